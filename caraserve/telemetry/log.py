"""Log set-up: one line for each event, readable on a terminal or as JSON.

A record may have `details` (`extra={"details": {…}}`): names with numbers or short texts. They are fields of the JSON
line, and follow a human line's message as `name=value`.
"""

import json
import logging
import re
import sys
import time

_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@+-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "details", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)  # in ASCII: terminals also obey control characters beyond it


class _HumanFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        if not record.exc_info:  # a name or path in a message must not forge a second line or control the terminal
            line = _CONTROL.sub(lambda found: repr(found[0])[1:-1], line)
        details = getattr(record, "details", {})
        return " ".join([line, *(f"{name}={_plain(value)}" for name, value in details.items())])


def _plain(value: object) -> str:
    """Returns a value on one line, quoted unless all its characters are harmless."""
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return json.dumps(value)
    return str(value)


def configure(log_format: str, level: str) -> None:
    """Sends the logs of this package to standard error. `log_format`: human or json; `level`: a standard name."""
    handler = logging.StreamHandler(sys.stderr)
    human = _HumanFormatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(_JsonFormatter() if log_format == "json" else human)
    root = logging.getLogger("caraserve")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
