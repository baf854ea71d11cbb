"""Makes the folder of the image without a builder of images, and starts the server from it as a container would.

`python -m scripts.binary.image make FOLDER` carries out the COPY and RUN lines of the Dockerfile's first stage, which
make /opt/caraserve, with the environment of this Python. `… run FOLDER [ARGUMENTS]` starts the ENTRYPOINT with the
image's variables; where mounts are allowed, without any capability, and with all but its volumes and /tmp read-only.
"""

import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts import uv_install

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "/opt/caraserve"
# A mount namespace: $1 are the volumes with their folders here, on file systems in memory, as $2… is the command.
_CONTAINED = """
for pair in $1; do
    at=${pair%%=*}
    mount -t tmpfs tmpfs "$(dirname "$at")"
    mkdir "$at"
    mount --bind "${pair#*=}" "$at"
done
mount -o remount,bind,ro /
shift
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""


@dataclass(frozen=True, slots=True)
class Instruction:
    """A line of a Dockerfile: COPY with its files, or ENV with its variables, as one text."""

    word: str
    text: str


def stages(dockerfile: Path) -> list[list[Instruction]]:
    """Returns the instructions of each stage, FROM first."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    instructions = [Instruction(*line.split(maxsplit=1)) for line in lines if line.strip()]
    starts = [at for at, one in enumerate(instructions) if one.word == "FROM"]
    return [instructions[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def make(folder: Path) -> None:
    """Carries out the first stage but its ENV: modules are translated when they are imported. Its WORKDIR and
    /opt/caraserve are in `folder`."""
    work, variables = folder, os.environ | package_sources()
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for one in stages(ROOT / "Dockerfile")[0]:
        match one.word:
            case "ARG":
                name, _, value = one.text.partition("=")
                variables[name] = value.strip('"')
            case "WORKDIR":
                work = folder / one.text.removeprefix("/")
                work.mkdir(parents=True)
            case "COPY":
                copy(one.text, work)
            case "RUN":
                command = one.text.replace(PREFIX, f"{folder}{PREFIX}")
                done = subprocess.run(["sh", "-euc", command], cwd=work, env=variables, capture_output=True, text=True)
                if done.returncode != 0:
                    sys.exit(f"{command}\n{done.stdout}{done.stderr}")


def package_sources() -> dict[str, str]:
    """Returns variables that tell uv from where pip takes packages on this machine."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    settings = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **uv_install.variables(settings)}


def copy(text: str, work: Path) -> None:
    """Carries out a COPY from this repository."""
    *sources, target = text.split()
    for source in sources:
        for path in map(Path, glob.glob(str(ROOT / source))):
            if path.is_dir():
                shutil.copytree(path, work / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, work / target)


def run(folder: Path, arguments: list[str]) -> None:
    """Becomes the process of a container. What it keeps in XDG_CACHE_HOME there is in that of this process."""
    last = {one.word: one.text for one in stages(ROOT / "Dockerfile")[-1]}
    variables = dict(pair.split("=", 1) for pair in last["ENV"].split())
    variables["PATH"] = variables["PATH"].replace(PREFIX, f"{folder}{PREFIX}").replace("$PATH", os.defpath)
    (program,) = parsed(last["ENTRYPOINT"])
    command = [f"{folder}{PREFIX}/bin/{program}", *arguments]
    here = Path(os.environ["XDG_CACHE_HOME"]).resolve()
    kept = {variables["XDG_CACHE_HOME"]: here, variables["XDG_DATA_HOME"]: here / "data"}
    volumes = {volume: kept[os.path.dirname(volume)] / Path(volume).name for volume in parsed(last["VOLUME"])}
    for path in volumes.values():
        path.mkdir(parents=True, exist_ok=True)
    pairs = " ".join(f"{volume}={shlex.quote(str(path))}" for volume, path in volumes.items())
    contained = ["unshare", "--mount", "sh", "-euc", _CONTAINED, "sh", pairs]
    if can_run([*contained, "true"]):
        command = [*contained, *command]
    else:  # not root, or in a container that may not mount
        print("image: no mounts are allowed here, so all files can be written", file=sys.stderr)
        variables |= {name: str(kept[variables[name]]) for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME")}
    # In an image, modules have been translated.
    variables["PYTHONPYCACHEPREFIX"] = f"{variables['XDG_CACHE_HOME']}/caraserve/translated"
    os.chdir("/")
    os.execvpe(command[0], command, variables)


def can_run(command: list[str]) -> bool:
    """Returns whether a command succeeds."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def parsed(text: str) -> list[str]:
    """Returns the items of a list in a Dockerfile."""
    return [str(item) for item in json.loads(text)]


def main() -> None:
    what, folder, *arguments = sys.argv[1:]
    if what == "make":
        make(Path(folder).resolve())
    else:
        run(Path(folder).resolve(), arguments)


if __name__ == "__main__":
    main()
