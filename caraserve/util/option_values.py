"""Parsers of option values. All but `split_address` raise ArgumentTypeError with a text that shows a valid value."""

import argparse
import ipaddress
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caraserve.util.units import human_bytes, parse_bytes

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_TOKEN_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 1_000_000, "M": 1 << 20}  # as vLLM reads them
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]+)?", re.IGNORECASE)
_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")  # a DNS name has at most 253 characters
_PORT = re.compile(r"[0-9]{1,5}")
_MOST_CORE = 8191  # Linux's own limit


def size(text: str) -> int:
    """Parses a size such as 512MiB, 2GB or 1048576; returns bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size_of_at_least(least_bytes: int) -> Any:
    """Returns a parser of sizes that are at least `least_bytes`."""

    def parse(text: str) -> int:
        if (value := size(text)) < least_bytes:
            raise argparse.ArgumentTypeError(f"{text} is too small; at least {human_bytes(least_bytes)} is needed")
        return value

    return parse


def at_least(least: float, kind: type[int] | type[float] = int) -> Any:
    """Returns a parser of numbers of type `kind` that are at least `least`."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is too small; at least {least} is needed")
        return value

    return parse


def share(text: str) -> float:
    """Parses a number above 0 and up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a share above 0 and up to 1")
    return value


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parses a list of cores such as 1-3,6; returns them sorted."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            raise argparse.ArgumentTypeError(f"{text!r}: write cores as in 1-3,6")
        if max(int(first), int(last or 0)) > _MOST_CORE:
            raise argparse.ArgumentTypeError(f"{text!r}: no machine has so many cores")
        cores.update(range(int(first), int(last or first) + 1))
    if not cores:
        raise argparse.ArgumentTypeError(f"{text!r}: the second core of a range is below the first")
    return tuple(sorted(cores))


def tokens(text: str) -> int | None:
    """Parses a number of tokens such as 4096, 4k (4000) or 4K (4096). Returns None for auto and -1."""
    if text in ("auto", "-1"):
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text)
    value = int(float(found[1]) * _TOKEN_UNITS[found[2]]) if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number of tokens such as 4096, 4k, 4K, or auto")
    return value


def key(text: str) -> str:
    """Parses a key of clients or admins, which must not be blank."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a key must not be empty")
    return text.strip()


def origin(text: str) -> str:
    """Parses a web origin such as https://chat.example; * stands for all."""
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: write SCHEME://HOST[:PORT] without a path, or *")
    return text.lower()


def url(text: str) -> str:
    """Parses an address of an HTTP server, with or without a path."""
    if not _URL.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: write http://HOST:PORT or https://HOST:PORT, with a path or not")
    return text


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT or [IPV6]:PORT into (host, port). Raises ValueError for all else.

    An accepted address is safe in a URL: it cannot hold a path, a user name or another host.
    """
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if ":" in host and not bracketed:
        raise ValueError(f"{address[:300]!r}: write [IPV6]:PORT")
    if not (
        (_is_ipv6(host) if bracketed else _HOST.fullmatch(host)) and _PORT.fullmatch(port) and 0 < int(port) < 65536
    ):
        raise ValueError(f"{address[:300]!r}: write HOST:PORT")
    return host, int(port)


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.IPv6Address(host).scope_id is None  # a zone is valid on one machine only
    except ValueError:
        return False


def parse_address(text: str) -> str:
    """Checks HOST:PORT and returns it unchanged."""
    try:
        split_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_peers(text: str) -> tuple[str, ...]:
    """Parses addresses with commas between them; returns each once."""
    return tuple(dict.fromkeys(parse_address(part.strip()) for part in text.split(",") if part.strip()))


def parse_port(text: str) -> int:
    """Parses a port to listen on; 0 means any free one."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use 0 to 65535")
    return int(text)


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter of --lora-modules. `base_model`: the base model that the option names, or None."""

    name: str
    path: Path
    base_model: str | None = None


def lora_module(text: str) -> LoraModule:
    """Parses `name=path` or vLLM's JSON form {"name": …, "path": …, "base_model_name": …}."""
    base_model = None
    if text.startswith("{"):
        try:
            fields = json.loads(text)
            name, path, base_model = fields["name"], fields["path"], fields.get("base_model_name")
        except (ValueError, KeyError, TypeError):
            raise argparse.ArgumentTypeError(f'{text!r}: JSON needs "name" and "path"') from None
    else:
        name, equals, path = text.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{text!r}: write NAME=PATH")
    if not isinstance(name, str) or not ADAPTER_NAME.fullmatch(name) or not isinstance(path, str) or not path:
        raise argparse.ArgumentTypeError(f"{text!r}: a name has letters, digits and . _ : - (128 at most), then a path")
    return LoraModule(name, Path(path), str(base_model) if base_model else None)
