"""Packs folders into files of limited size, and back: a machine that is lent for a call may return no larger ones."""

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

PIECE_BYTES = 15 << 20


def pack(folders: Iterable[Path], root: Path, target: Path, name: str, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Writes folders below `root` as a compressed archive to `target`, cut into NAME.tgz.0000, NAME.tgz.0001 and
    so on; older pieces of the name are replaced. Returns the pieces, none if no folder exists."""
    for old in _pieces(target, name):
        old.unlink()
    there = [folder for folder in folders if folder.is_dir()]
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz", compresslevel=6) as archive:
        for folder in there:
            archive.add(folder, folder.relative_to(root))
    target.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(whole.getbuffer()) if there else 0, piece_bytes)):
        (target / f"{name}.tgz.{number:04}").write_bytes(whole.getbuffer()[start : start + piece_bytes])
    return _pieces(target, name)


def unpack(source: Path, name: str, root: Path) -> None:
    """Writes what `pack` has packed from `root` there again. Raises FileNotFoundError without pieces, and ValueError
    if they are damaged or some are missing."""
    pieces = _pieces(source, name)
    if not pieces:
        raise FileNotFoundError(f"{source} has no {name}.tgz.0000")
    root.mkdir(parents=True, exist_ok=True)
    try:
        whole = gzip.decompress(b"".join(piece.read_bytes() for piece in pieces))  # which verifies the checksum
        with tarfile.open(fileobj=io.BytesIO(whole), mode="r:") as archive:
            archive.extractall(root, filter="data")
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{source}: the pieces of {name} are damaged: {error}") from None


def _pieces(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"{name}.tgz.{'[0-9]' * 4}"))
