"""Addresses and ports as they stand on the command line. Level 0."""

import argparse


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT or [IPV6]:PORT. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{address!r}: write HOST:PORT")
    if ":" in host and not bracketed:
        raise ValueError(f"{address!r}: write [IPV6]:PORT")
    return host, int(port)


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
