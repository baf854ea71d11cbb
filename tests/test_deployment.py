"""The image, the compose file and the systemd unit: at one with one another and with the server that they start.

`scripts/build_binary` carries out the Dockerfile's lines, and starts what they make.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from caraserve.cli.options import OptionParser
from caraserve.config import SERVE_CONFIGS
from caraserve.gpu.driver import environment
from caraserve.http.context import HttpTimings
from caraserve.serve_cluster import check_cluster
from scripts.binary.image import Instruction, parsed, stages

ROOT = Path(__file__).parent.parent
STAGES = stages(ROOT / "Dockerfile")
LAST = {one.word: one.text for one in STAGES[-1]}
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
UNIT = ROOT / "scripts" / "systemd" / "caraserve.service"


def options(words: list[str], variables: Mapping[str, str | None]) -> Any:
    """What the server makes of a command line and of variables; those without a value are not set."""
    command, *arguments = words
    assert command == "serve"
    with patch.dict(os.environ, {name: value for name, value in variables.items() if value is not None}):
        return OptionParser(SERVE_CONFIGS).parse_args(arguments)


# --- the image ---


def test_the_image_serves_the_demo_to_other_machines_as_another_user_than_root() -> None:
    assert options(parsed(LAST["CMD"]), {}).host == "0.0.0.0"
    assert parsed(LAST["ENTRYPOINT"]) == ["caraserve"]
    assert int(LAST["USER"]) > 0


def test_the_image_copies_files_that_are_there_and_that_a_builder_is_sent() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sources = [name for one in STAGES[0] if one.word == "COPY" for name in one.text.split()[:-1]]
    assert sources
    for name in sources:
        assert list(ROOT.glob(name)), name
        assert f"!{name}" in ignored
    copied = re.findall(r"constraint (?:\")?(constraints[\w.-]*)", " ".join(one.text for one in STAGES[0]))
    assert copied == ["constraints.txt", "constraints-"]


def test_what_the_image_writes_to_is_on_volumes_of_its_user() -> None:
    volumes = parsed(LAST["VOLUME"])
    variables = dict(pair.split("=", 1) for pair in LAST["ENV"].split())
    written = [f"{variables[name]}/caraserve" for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME")]
    assert sorted(written) == sorted(volumes)
    assert any(variables["HF_HOME"].startswith(f"{volume}/") for volume in volumes)
    (made,) = [one.text for one in STAGES[-1] if "install --directory" in one.text]
    assert f"--owner={LAST['USER']}" in made
    assert all(volume in made.split() for volume in volumes)


def test_an_image_for_gpus_has_what_triton_compiles_c_with() -> None:
    """Python's headers are in the image that it begins with."""
    assert Instruction("ARG", 'EXTRA=""') in STAGES[-1]
    assert any(f"--no-install-recommends {environment.DEBIAN['a C compiler']} " in one.text for one in STAGES[-1])


class _Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_image_is_healthy_as_long_as_its_server_says_so(
    status: int, healthy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Health, "status", status)
    program, *arguments = parsed(LAST["HEALTHCHECK"].partition(" CMD ")[2])
    assert program == "python"
    with HTTPServer(("127.0.0.1", 0), _Health) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        variables = {"CARASERVE_PORT": str(server.server_port)}
        done = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, check=False)
        thread.join()
    assert (done.returncode == 0) == healthy


# --- docker-compose.yml ---


@pytest.mark.parametrize("name", SERVICES)
def test_the_server_takes_the_options_of_each_service(name: str) -> None:
    """And those that its variables stand for, with any value."""
    service = SERVICES[name]
    samples = {"CARASERVE_MODEL": "/models/some", "CARASERVE_ADAPTERS_DIR": "/models/adapters"}
    samples |= {"CARASERVE_API_KEY": "a", "CARASERVE_ADMIN_KEY": "b", "CARASERVE_KV_CACHE_BYTES": "1GiB"}
    variables = {one: value or samples[one] for one, value in service["environment"].items()}
    parsed_options = options(service["command"], variables)
    (port,) = service["ports"]
    assert port.split(":")[0] == "127.0.0.1"
    assert int(port.split(":")[2]) == parsed_options.port


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_keeps_what_it_writes_and_writes_to_nothing_else(name: str) -> None:
    service = SERVICES[name]
    mounts = dict(one.rpartition("}")[2].split(":")[:2] if "}" in one else one.split(":") for one in service["volumes"])
    kept = {at: volume for volume, at in mounts.items() if at in parsed(LAST["VOLUME"])}
    assert set(kept) == set(parsed(LAST["VOLUME"]))
    assert set(kept.values()) <= COMPOSE["volumes"].keys()
    assert (service["read_only"], service["tmpfs"], service["cap_drop"]) == (True, ["/tmp"], ["ALL"])


def test_services_that_run_together_share_neither_ports_nor_volumes() -> None:
    for taken in ("ports", "volumes"):
        first, second = (
            {one for one in SERVICES[name][taken] if not one.endswith(":ro")} for name in ("first", "second")
        )
        assert not first & second


def test_only_the_demo_on_cpus_is_started_without_being_named() -> None:
    assert [name for name, service in SERVICES.items() if "profiles" not in service] == ["caraserve"]
    assert SERVICES["gpu"]["build"]["args"]["EXTRA"] == "cuda13"
    (device,) = SERVICES["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_two_instances_find_one_another_by_the_names_of_their_services(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0" * 64)
    for name in ("first", "second"):
        service = SERVICES[name]
        assert service["secrets"] == ["cluster"]
        words = [word.replace("/run/secrets/cluster", str(secret)) for word in service["command"]]
        variables = {one: value for one, value in service["environment"].items() if value}
        _, _, _, http, cluster = options(words, variables).configs
        check_cluster(cluster, http)
        assert cluster.name == name
        assert cluster.advertise in cluster.peers


def test_a_stopped_container_gets_the_time_that_draining_takes() -> None:
    assert {service["stop_grace_period"] for service in SERVICES.values()} == {"1m"}
    assert longest_stop_s({}) < 60


def longest_stop_s(variables: Mapping[str, str]) -> float:
    """How long a server may take to end after SIGTERM: its requests, and last bytes on each of two ports."""
    return float(options(["serve"], variables).drain_timeout_s + 2 * HttpTimings().stop_s)


# --- systemd ---


def unit(name: str) -> list[str]:
    """Returns the values of a setting of the unit."""
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_unit_starts_the_server_with_options_that_it_takes() -> None:
    """Options of /etc/caraserve.env have priority: an argument would override them."""
    program, *words = shlex.split(unit("ExecStart")[0])
    assert program == "/opt/caraserve/bin/caraserve"
    assert words == ["serve"]
    specifiers = {"%C": "/var/cache", "%S": "/var/lib"}
    text = re.sub("%.", lambda found: specifiers[found[0]], unit("Environment")[0])
    variables = dict(pair.split("=") for pair in text.split())
    image = dict(pair.split("=", 1) for pair in LAST["ENV"].split())
    assert variables.items() <= image.items()
    assert (unit("CacheDirectory"), unit("StateDirectory")) == (["caraserve"], ["caraserve"])


def test_a_stop_of_the_unit_drains_first_and_a_wrong_option_is_not_tried_again() -> None:
    assert int(unit("TimeoutStopSec")[0]) > longest_stop_s({})
    assert unit("KillMode") == ["mixed"]  # workers serve running requests until the server ends them
    done = subprocess.run(
        [sys.executable, "-m", "caraserve", "serve", "--prot", "1"], cwd=ROOT, capture_output=True, check=False
    )
    assert unit("RestartPreventExitStatus") == [str(done.returncode)]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    program = Path(sys.executable).with_name("caraserve")
    copy.write_text(UNIT.read_text(encoding="utf-8").replace(unit("ExecStart")[0].split()[0], str(program)))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    copy.write_text(copy.read_text(encoding="utf-8").replace("KillMode=mixed", "KillMod=mixed"))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert "KillMod" in done.stderr
