"""Log lines: for people, or one JSON object each; of every process of plait alike.

A line's ``extra={"fields": {...}}`` are further members of its object; the text must say enough without them.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("text", "json")

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""of the HTTP request that is being worked on"""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, and how."""

    level: str = "warning"
    """of plait's own loggers; other libraries' lines are shown from "warning" up"""
    format: str = "text"
    process: str = ""
    """which of several processes of a kind this is"""

    def __post_init__(self) -> None:
        for name, value, known in (("level", self.level, LEVELS), ("format", self.format, FORMATS)):
            if value not in known:
                raise ValueError(f"--log-{name} {value}: it is one of {', '.join(known)}")


class JsonFormatter(logging.Formatter):
    """One object on one line: time, level, logger, message, process, request_id, fields, exception."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if self._process:
            line["process"] = self._process
        if (of := request_id.get()) is not None:
            line["request_id"] = of
        for name, value in getattr(record, "fields", {}).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, where from, the message; a traceback below."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = f"{process} " if process else ""

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("plait.").rpartition(".")[2]
        line = f"{_time(record):%H:%M:%S} {record.levelname} {self._process}{name}: {record.getMessage()}"
        if (of := request_id.get()) is not None:
            line += f" [{of}]"
        if record.exc_info:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return line


def configure(settings: LogSettings) -> None:
    """Send all log lines of this process to standard error; as JSON, what ends the process too."""
    formatters = {"json": JsonFormatter, "text": TextFormatter}
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatters[settings.format](settings.process))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("plait").setLevel(settings.level.upper())
    logging.captureWarnings(True)
    if settings.format == "json":
        sys.excepthook = _log_uncaught


def structured() -> bool:
    """Whether this process writes JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created).astimezone()


def _log_uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    logging.getLogger("plait").critical("ended by %s", kind.__name__, exc_info=(kind, error, where))
