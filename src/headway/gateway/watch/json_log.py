"""The log as JSON: one object per line, and nothing else, whatever ends the process."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any

log = logging.getLogger("headway")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, and a message or a request of the access log."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        request = getattr(record, "request", None)
        line |= request if request is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line)


def begin(level: int) -> None:
    """Log as JSON from now on, with Python's warnings and with exceptions that nothing catches."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda it: _uncaught(it.exc_type, it.exc_value, it.exc_traceback)
    sys.unraisablehook = lambda it: _uncaught(it.exc_type, it.exc_value, it.exc_traceback)


def is_on() -> bool:
    """Return whether this process logs as JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None and kind is not SystemExit:
        log.critical("%s is not caught: %s", kind.__name__, error, exc_info=(kind, error, trace))
