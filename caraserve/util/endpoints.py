"""Addresses and ports as they stand on the command line."""

import argparse
import ipaddress
import re

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")  # a name of DNS has 253 characters at most
_PORT = re.compile(r"[0-9]{1,5}")


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT or [IPV6]:PORT, and of nothing else: in a URL it says where to connect and no more.
    Raises ValueError."""
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
        return ipaddress.IPv6Address(host).scope_id is None  # a zone means something on one machine alone
    except ValueError:
        return False


def parse_address(text: str) -> str:
    """HOST:PORT, checked. Raises ArgumentTypeError, as the two below."""
    try:
        split_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_peers(text: str) -> tuple[str, ...]:
    """Addresses between commas, each once."""
    return tuple(dict.fromkeys(parse_address(part.strip()) for part in text.split(",") if part.strip()))


def parse_port(text: str) -> int:
    """A port to listen on; 0 for any."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use 0 to 65535")
    return int(text)
