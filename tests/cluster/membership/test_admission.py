"""Checks of the cluster's options at the start, addresses, the file of secrets, and TLS between instances."""

import asyncio
import logging
import os
import shutil
import subprocess
from pathlib import Path

import aiohttp
import pytest

from caraserve.cli.options import OptionParser
from caraserve.cluster.membership.auth import SecretFile
from caraserve.cluster.membership.dns import (
    PeerResolver,
    is_loopback,
    is_wildcard,
    join_address,
    outward_address,
    resolve_peers,
)
from caraserve.config import ClusterConfig, HttpConfig
from caraserve.errors import ConfigError
from caraserve.serve_cluster import ClusterCredentials, check_cluster
from caraserve.util.option_values import split_address
from tests.cluster.nodes import instances, until
from tests.http.log_lines import logged


def admitted(*arguments: str) -> ClusterCredentials:
    return check_cluster(*OptionParser((ClusterConfig, HttpConfig)).parse_args(arguments).configs)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "10.0.0.7:8000"], "--cluster-secret-file is needed"),
        (["--peers", "peers.example:8000"], "--cluster-secret-file is needed"),
        (["--peers", "127.0.0.1:8000", "--host", "0.0.0.0"], "--cluster-secret-file is needed"),
        (["--peers", "127.0.0.1:8000", "--advertise", "10.0.0.7:80"], "--cluster-secret-file is needed"),
        (["--peers", "127.0.0.1:1", "--peer-port", "1", "--peer-host", "::"], "--cluster-secret-file is needed"),
        (["--peers", "127.0.0.1:8000", "--api-key", "k"], "--cluster-secret-file is needed with --api-key"),
        (
            ["--peers", "127.0.0.1:8000", "--api-key-file", "keys.toml"],
            "--cluster-secret-file is needed with --api-key",
        ),
        (["--peers", "127.0.0.1:8000", "--cluster-secret-file", "/nowhere"], "'/nowhere': No such file"),
        (["--peers", "127.0.0.1:8000", "--cluster-secret-file", os.devnull], "at least 16 bytes"),
        (["--peers", ",".join(f"127.0.0.1:{port}" for port in range(1, 66))], "Kubernetes"),
        (["--peers", "127.0.0.1:8000", "--peer-host", "127.0.0.1"], "--peer-port"),
        (["--peers", "127.0.0.1:8000", "--cluster-tls-cert", "x"], "belong together"),
        (["--peers", "127.0.0.1:8000", *[f"--cluster-tls-{part}=x" for part in ("cert", "key", "ca")]], "--peer-port"),
    ],
)
def test_a_configuration_that_is_open_or_cannot_work_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        admitted(*arguments)


def test_on_loopback_addresses_no_secret_is_needed() -> None:
    assert admitted("--peers", "127.0.0.1:1,[::1]:2,localhost:3").listening is None


def test_with_a_secret_any_address_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text("a secret of the tests\n")
    admitted("--peers", "10.0.0.7:8000", "--host", "0.0.0.0", "--cluster-secret-file", str(file))


def test_secrets_are_one_to_a_line(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_bytes(b"  first secret of the two \r\n\nsecond secret of the two")
    secrets = SecretFile(file)
    assert secrets.keys.hello_keys() == (
        *SecretFile(written(tmp_path / "1", b"first secret of the two")).keys.hello_keys(),
        *SecretFile(written(tmp_path / "2", b"second secret of the two")).keys.hello_keys(),
    )
    assert not secrets.reread()


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "text", ["host", "host:", ":80", "host:0", "host:65536", "host:x", "::1:80", "[::1]", "h:８０"]
)
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        split_address(text)


def test_addresses_are_split_joined_and_classified() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert join_address("::1", 80) == "[::1]:80"
    assert split_address(join_address("host", 80)) == ("host", 80)
    assert [is_loopback(host) for host in ("127.0.0.9", "::1", "localhost", "10.0.0.1", "0.0.0.0", "host")] == [
        *(True, True, True),
        *(False, False, False),
    ]
    assert [is_wildcard(host) for host in ("0.0.0.0", "::", "127.0.0.1", "host")] == [True, True, False, False]


async def test_the_route_to_a_peer_gives_the_own_address() -> None:
    assert await outward_address("127.0.0.1:80", PeerResolver()) == "127.0.0.1"
    assert await outward_address("nobody.invalid:80", PeerResolver()) is None


async def test_peers_resolve_to_all_their_addresses_and_unresolved_ones_are_returned() -> None:
    found, missing = await resolve_peers(
        ("127.0.0.1:1", "127.0.0.1:1", "127.0.0.2:1", "nobody.invalid:1", "no..name:1"), PeerResolver()
    )
    assert found == ("127.0.0.1:1", "127.0.0.2:1")
    assert missing == ["nobody.invalid:1", "no..name:1"]


def certificate(folder: Path, name: str, ca: Path | None = None) -> None:
    """Writes a key and a certificate of that name, self-signed or signed by `ca`."""
    sign = ["-CA", f"{ca}.pem", "-CAkey", f"{ca}.key"] if ca else ["-addext", "basicConstraints=critical,CA:TRUE"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-keyout", f"{folder / name}.key", "-out", f"{folder / name}.pem"]
    subprocess.run([*command, *sign], check=True, capture_output=True)


def tls(folder: Path, name: str, ca: str) -> ClusterCredentials:
    files = [f"--cluster-tls-cert={folder / name}.pem", f"--cluster-tls-key={folder / name}.key"]
    return admitted("--peers", "127.0.0.1:1", "--peer-port", "0", *files, f"--cluster-tls-ca={folder / ca}.pem")


async def test_a_replaced_certificate_is_used_for_both_directions(tmp_path: Path) -> None:
    for name in ("old", "new"):
        certificate(tmp_path, name)
    shutil.copytree(tmp_path, tmp_path / "live")
    credentials = tls(tmp_path / "live", "old", "old")
    assert credentials.tls is not None
    for file in ("old.pem", "old.key"):
        shutil.copy(tmp_path / file.replace("old", "new"), tmp_path / "live" / file)
    credentials.tls.reread()
    with logged("caraserve", logging.LogRecord.getMessage) as texts:
        watching = asyncio.create_task(credentials.tls.watch())
        assert "read again" in await texts.next()
        watching.cancel()
    for context in credentials.tls.contexts:
        (authority,) = context.newest.get_ca_certs()
        assert dict(name for (name,) in authority["subject"])["commonName"] == "new"


async def test_only_certificates_of_the_clusters_authority_are_accepted(tmp_path: Path) -> None:
    for name in ("ca", "other"):
        certificate(tmp_path, name)
    certificate(tmp_path, "member", tmp_path / "ca")
    certificate(tmp_path, "stranger", tmp_path / "other")
    member, stranger = tls(tmp_path, "member", "ca"), tls(tmp_path, "stranger", "ca")
    assert member.listening is not None
    assert member.dialling is not None
    async with instances(tmp_path) as running, aiohttp.ClientSession() as session:
        for name in "ab":
            await running.start(name, tls=(member.listening, member.dialling))
        await until(running.agree)
        url = f"{running.running['a'].address}/cluster/ws"
        async with session.ws_connect(f"https://{url}", ssl=member.dialling or True) as stream:
            assert not stream.closed
        with pytest.raises(aiohttp.ClientError):
            await session.ws_connect(f"https://{url}", ssl=stranger.dialling or True)
        with pytest.raises(aiohttp.ClientError):
            await session.ws_connect(f"http://{url}")
