"""Tests of the checks before weights are read, and of the message of a server that is ready."""

import asyncio
import dataclasses
import logging
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import uvloop

from caraserve import demo
from caraserve.cli.options import OptionParser
from caraserve.config import ClusterConfig, HttpConfig, LoraConfig, LoraModule, ModelConfig
from caraserve.core.adapter_facts import AdapterFacts
from caraserve.errors import ConfigError
from caraserve.http import tls_files
from caraserve.http.app import make_app, start_http
from caraserve.http.server import bind
from caraserve.http.tls_files import TlsFiles, first_context
from caraserve.model.families import load_plan
from caraserve.serve import _announce
from caraserve.start_checks import check_paths, client_tls, exposure, upload_root
from tests.http.fake_engine import FakeAdapter, FakeEngine
from tests.http.log_lines import logged
from tests.http.serving import http_config, new_metrics, serving
from tests.serving import engine_config, lora_config, model_config, running

POET = demo.adapters_folder() / "poet"


def tls_of(*words: str) -> TlsFiles | None:
    return client_tls(*OptionParser((HttpConfig, ClusterConfig)).parse_args(words).configs)


def test_a_port_is_bound_without_listening_and_not_twice() -> None:
    (taken,) = bind("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with taken:
        taken.listen()
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: another process does"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="check --host"):
        bind("no.such.host.invalid", 0)


async def test_clients_are_refused_until_the_server_listens() -> None:
    sockets = bind("localhost", 0)
    ports = {one.getsockname()[1] for one in sockets}
    assert len(ports) == 1
    url = f"http://localhost:{ports.pop()}/health"
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(url)
        app = make_app(FakeEngine(), http_config(), new_metrics(), allow_lora_updates=False)
        runner, _ = await start_http(app, http_config(), sockets)
        async with session.get(url) as answer:
            assert answer.status == 200
        await runner.cleanup()


@pytest.mark.parametrize("wrong", ["adapter", "folder", "root", "template"])
def test_a_missing_path_is_named(wrong: str, tmp_path: Path) -> None:
    missing = tmp_path / wrong
    model, lora = model_config(demo.model_folder()), lora_config({"poet": POET}, adapters_dir=demo.adapters_folder())
    check_paths(model, lora)
    flag = ""
    if wrong == "adapter":
        lora.lora_modules.append(LoraModule("x", missing))
    elif wrong == "folder":
        lora, flag = lora_config({}, adapters_dir=missing), "--adapters-dir '"
    elif wrong == "root":
        lora, flag = lora_config({}, adapter_roots=[missing]), "--allow-adapter-path '"
    else:
        model = dataclasses.replace(model, chat_template=missing)
    with pytest.raises(ConfigError, match=f"{flag}{missing}"):
        check_paths(model, lora)
    missing.touch()
    if wrong != "template":
        advice = f"; give the folder that it is in, '{tmp_path}'" if wrong == "adapter" else ""
        with pytest.raises(ConfigError, match=f"{missing}' is a file, not a folder{advice}"):
            check_paths(model, lora)


@pytest.mark.parametrize(
    ("settings", "is_open"),
    [
        ({}, False),
        ({"host": "localhost"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "gpu-7.example"}, True),
        ({"host": "0.0.0.0", "api_key": ("sesame",)}, False),
        ({"host": "0.0.0.0", "admin_key": ("sesame",)}, False),
        ({"host": "0.0.0.0", "ssl_ca_certs": Path("ca.pem")}, False),
    ],
    ids=str,
)
def test_a_server_that_other_machines_may_use_without_a_key_warns(settings: dict[str, Any], is_open: bool) -> None:
    warning = exposure(http_config(**settings))
    assert bool(warning) == is_open
    assert not is_open or ("--api-key" in warning and settings["host"] in warning)


def test_a_folder_that_takes_uploads_must_be_writable() -> None:
    lora = lora_config({}, adapters_dir=Path("/proc/self"))  # where nobody can write
    with pytest.raises(ConfigError, match=r"--adapters-dir takes uploads .*/proc/self cannot be written"):
        check_paths(model_config(demo.model_folder()), lora)
    check_paths(model_config(demo.model_folder()), dataclasses.replace(lora, allow_runtime_lora_updating=False))
    check_paths(model_config(demo.model_folder()), dataclasses.replace(lora, loading_mode="cached"))
    only_read = lora_config({}, adapter_roots=[Path("/proc/self")])
    check_paths(model_config(demo.model_folder()), only_read)
    assert upload_root(only_read) is None


def demo_configs(*words: str) -> LoraConfig:
    return demo.with_demo(*OptionParser((ModelConfig, LoraConfig)).parse_args(words).configs)[1]


def test_uploads_to_the_demo_go_to_the_users_folder_and_not_to_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    lora = demo_configs("--allow-runtime-lora-updating", "--lora-modules", f"pirate={POET}")
    assert upload_root(lora) == lora.adapters_dir == tmp_path / "caraserve" / "adapters"
    served = {module.name: module.path for module in lora.lora_modules}
    assert served == {name: demo.adapters_folder() / name for name in demo.ADAPTER_NAMES} | {"pirate": POET}
    assert demo.adapters_folder() in lora.allow_adapter_path
    assert demo_configs().adapters_dir is None
    monkeypatch.setenv("XDG_DATA_HOME", "/proc/self")
    unwritable = demo_configs("--allow-runtime-lora-updating")
    assert (unwritable.adapters_dir, upload_root(unwritable)) == (None, None)
    assert len(unwritable.lora_modules) == len(demo.ADAPTER_NAMES)
    own = demo_configs("--adapters-dir", str(tmp_path))
    assert (own.adapters_dir, own.lora_modules) == (tmp_path, [])


def certificate(folder: Path, name: str) -> Path:
    files = ["-keyout", f"{folder / name}.key", "-out", f"{folder / name}.pem"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*command, "-days", "2", *names, *files], check=True, capture_output=True)
    return folder / f"{name}.pem"


async def test_clients_use_tls_and_client_certificates_where_configured(tmp_path: Path) -> None:
    server, client = certificate(tmp_path, "server"), certificate(tmp_path, "client")
    tls = tls_of(f"--ssl-certfile={server}", f"--ssl-keyfile={server.with_suffix('.key')}", f"--ssl-ca-certs={client}")
    stranger = ssl.create_default_context(cafile=server)
    known = ssl.create_default_context(cafile=server)
    known.load_cert_chain(client, client.with_suffix(".key"))
    app = make_app(FakeEngine(), http_config(), new_metrics(), allow_lora_updates=False)
    runner, port = await start_http(app, http_config(), tls=first_context(tls))
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"https://127.0.0.1:{port}/health", ssl=known) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"https://127.0.0.1:{port}/health", ssl=stranger)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_replaced_certificate_is_used_for_new_connections_and_a_broken_one_is_not(
    new_loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_files, "_QUIET_S", 0.01)
    live, key = tmp_path / "live.pem", tmp_path / "live.key"

    def put(name: str) -> None:
        """Replaces both files, in a single step each."""
        for file in (live, key):
            shutil.copy(tmp_path / f"{name}{file.suffix}", tmp_path / "copy")
            (tmp_path / "copy").replace(file)

    async def test() -> None:
        for name in ("old", "new"):
            certificate(tmp_path, name)
        put("old")
        tls = tls_of(f"--ssl-certfile={live}", f"--ssl-keyfile={key}")
        assert tls is not None
        app = make_app(FakeEngine(), http_config(), new_metrics(), allow_lora_updates=False)
        runner, port = await start_http(app, http_config(), tls=first_context(tls))
        watching = asyncio.create_task(tls.watch())

        async def is_shown(name: str) -> bool:
            trusted = ssl.create_default_context(cafile=tmp_path / f"{name}.pem")
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted)
            except ssl.SSLCertVerificationError:
                return False
            writer.close()
            return True

        try:
            async with aiohttp.ClientSession() as session:
                trusted = ssl.create_default_context(cafile=tmp_path / "old.pem")
                with logged("caraserve", logging.LogRecord.getMessage) as texts:
                    for _ in range(2):  # the connection from before stays open
                        async with session.get(f"https://127.0.0.1:{port}/health", ssl=trusted) as answer:
                            assert answer.status == 200
                        live.write_text("no certificate")
                        tls.reread()
                        said = await texts.next()
                        assert str(live) in said
                        assert "still use the certificate from before" in said
                    assert await is_shown("old")
                    put("new")
                    tls.reread()
                    while "read again" not in await texts.next():  # it may have been looked at between the two files
                        pass
            assert (await is_shown("new"), await is_shown("old")) == (True, False)
        finally:
            watching.cancel()
            await runner.cleanup()

    with asyncio.Runner(loop_factory=new_loop) as loop:
        loop.run(test())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ssl-keyfile", "x"], "need --ssl-certfile"),
        (["--ssl-certfile", "/nowhere.pem"], "/nowhere.pem"),
        (["--ssl-certfile", "x", "--peers", "127.0.0.1:1"], "--peer-port"),
    ],
)
def test_certificates_that_cannot_be_used_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tls_of(*words)


async def test_a_key_that_is_replaced_before_its_certificate_is_not_reported(tmp_path: Path) -> None:
    for name in ("old", "new"):
        certificate(tmp_path, name)
    live, key = tmp_path / "live.pem", tmp_path / "live.key"
    shutil.copy(tmp_path / "old.pem", live)
    shutil.copy(tmp_path / "old.key", key)
    tls = tls_of(f"--ssl-certfile={live}", f"--ssl-keyfile={key}")
    assert tls is not None
    (context,) = tls.contexts
    old, has_read, read = context.newest, asyncio.Event(), tls._read

    def noted() -> Any:
        try:
            return read()
        finally:
            loop.call_soon_threadsafe(has_read.set)

    loop, tls._read = asyncio.get_running_loop(), noted
    with logged("caraserve", logging.LogRecord.getMessage) as texts:
        watching = asyncio.create_task(tls.watch())
        shutil.copy(tmp_path / "new.key", key)
        tls.reread()
        await has_read.wait()
        assert context.newest is old
        shutil.copy(tmp_path / "new.pem", live)
        tls.reread()
        assert "read again" in await texts.next()
        watching.cancel()
    assert context.newest is not old


def test_a_certificate_error_names_the_wrong_file(tmp_path: Path) -> None:
    cert, other = certificate(tmp_path, "a"), certificate(tmp_path, "b")
    key, absent = cert.with_suffix(".key"), tmp_path / "absent.pem"
    wrong = {
        f"--ssl-certfile {str(absent)!r} cannot be read: No such file or directory": (absent, key, cert),
        f"--ssl-keyfile {str(absent)!r} cannot be read: No such file or directory": (cert, absent, cert),
        f"--ssl-ca-certs {str(absent)!r} cannot be read: No such file or directory": (cert, key, absent),
        f"--ssl-ca-certs {str(key)!r}: ": (cert, key, key),
        f"--ssl-certfile {str(cert)!r} and --ssl-keyfile {str(other.with_suffix('.key'))!r}: this is not the key": (
            *(cert, other.with_suffix(".key"), cert),
        ),
    }
    for said, (certfile, keyfile, ca) in wrong.items():
        with pytest.raises(ConfigError) as caught:
            tls_of(f"--ssl-certfile={certfile}", f"--ssl-keyfile={keyfile}", f"--ssl-ca-certs={ca}")
        assert caught.value.message.startswith(said)
    with pytest.raises(ConfigError) as caught:
        tls_of(f"--ssl-certfile={absent}")
    assert "None" not in caught.value.message


async def test_the_base_model_answers_to_all_its_names_and_is_listed_by_each() -> None:
    fake = FakeEngine(other_base_names=("meta/base",))
    async with serving(fake) as client:
        for name in ("org/base", "meta/base", "meta/base:a"):
            assert (await client.complete(model=name)).status == 200
        taken = await client.post("/v1/load_lora_adapter", {"lora_name": "meta/base", "lora_path": "x"})
        listed = [card["id"] for card in (await client.get("/v1/models")).json["data"]]
    assert [request.adapter for request in fake.requests] == [None, None, "a"]
    assert taken.status == 400
    assert listed == ["org/base", "meta/base", "a", "b"]


async def test_adapters_above_the_highest_rank_are_refused() -> None:
    lora = type(lora_config({}))
    settings = {name: getattr(lora_config({"poet": POET}), name) for name in lora.__slots__}
    with pytest.raises(ConfigError, match="rank 8 is above --max-lora-rank 4"):
        async with running(model_config(demo.model_folder()), lora(**settings | {"max_lora_rank": 4}), engine_config()):
            pass


def announced(
    capsys: pytest.CaptureFixture[str], *, can_chat: bool = True, classes: tuple[int, ...] = (), **settings: object
) -> str:
    served = SimpleNamespace(engine=FakeEngine(), plan=load_plan(demo.model_folder()), device="the CPU")
    served.engine.tokenizer.can_chat = can_chat
    served.engine.loaded = {
        f"a{at}": FakeAdapter(f"a{at}", "x", facts=AdapterFacts(num_classes=count)) for at, count in enumerate(classes)
    }
    _announce(served, http_config(**settings), 8000)  # type: ignore[arg-type]
    return capsys.readouterr().out


def test_the_printed_command_names_loopback_and_contains_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    plain, keyed = announced(capsys), announced(capsys, host="0.0.0.0", api_key="sesame")
    assert "Authorization" not in plain
    assert "curl http://127.0.0.1:8000/v1/chat/completions -H 'Authorization: Bearer YOUR-API-KEY'" in keyed
    assert "0.0.0.0" not in keyed
    assert "sesame" not in keyed


def test_the_printed_command_can_be_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert '/v1/completions -H \'Content-Type: application/json\' -d \'{"model": "a1", "prompt": "' in announced(
        capsys, can_chat=False, classes=(3, 0)
    )
    assert '"model": "org/base", "messages"' in announced(capsys, classes=(3,))


def test_a_log_for_programs_has_no_plain_lines(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "caraserve"):
        assert announced(capsys, log_format="json") == ""
    assert "ready at http://127.0.0.1:8000" in caplog.text
