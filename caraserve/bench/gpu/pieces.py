"""Packs a folder into files of limited size, and back: a machine that is lent for a call may return no larger ones."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

PIECE_BYTES = 15 << 20


def pack(folders: Iterable[Path], root: Path, target: Path, name: str, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Writes folders below `root` as a compressed archive to `target`, cut into NAME.tgz.00, NAME.tgz.01 and so on;
    older pieces of the name are replaced. Returns the pieces, none if no folder exists."""
    for old in _pieces(target, name):
        old.unlink()
    there = [folder for folder in folders if folder.is_dir()]
    if not there:
        return []
    target.mkdir(parents=True, exist_ok=True)
    with _Cut(target, name, piece_bytes) as cut, tarfile.open(fileobj=cut, mode="w|gz") as archive:
        for folder in there:
            archive.add(folder, folder.relative_to(root))
    return _pieces(target, name)


def unpack(source: Path, name: str, root: Path) -> None:
    """Writes what `pack` has packed from `root` there again. Raises FileNotFoundError without pieces."""
    pieces = _pieces(source, name)
    if not pieces:
        raise FileNotFoundError(f"{source} has no {name}.tgz.00")
    root.mkdir(parents=True, exist_ok=True)
    whole = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(fileobj=whole, mode="r:gz") as archive:
        archive.extractall(root, filter="data")


def _pieces(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"{name}.tgz.[0-9][0-9]"))


class _Cut(io.RawIOBase):
    """A stream that is written to one file after another, none larger than `piece_bytes`."""

    def __init__(self, folder: Path, name: str, piece_bytes: int) -> None:
        self._folder, self._name, self._most = folder, name, piece_bytes
        self._count = self._left = 0
        self._file: io.BufferedWriter | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: "bytes | memoryview") -> int:  # type: ignore[override]
        view = memoryview(data)
        while view:
            if not self._left:
                self._next()
            assert self._file is not None
            written = self._file.write(view[: self._left])
            self._left -= written
            view = view[written:]
        return len(data)

    def _next(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = (self._folder / f"{self._name}.tgz.{self._count:02}").open("wb")
        self._count, self._left = self._count + 1, self._most

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()
