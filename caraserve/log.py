"""Logging set-up: one line an event, human on a terminal, JSON where asked. Level 0."""

import json
import logging
import sys
import time


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _HumanFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        # A name or path in a message must not be able to forge a second log line.
        return super().format(record) if record.exc_info else super().format(record).replace("\n", "\\n")


def configure(log_format: str, level: str) -> None:
    """Sends our logs to standard error. `log_format` is `human` or `json`; `level` a standard name."""
    handler = logging.StreamHandler(sys.stderr)
    human = _HumanFormatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(_JsonFormatter() if log_format == "json" else human)
    root = logging.getLogger("caraserve")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
