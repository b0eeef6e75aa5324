"""What every process of a run does first: send its output to its own log file."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from pathlib import Path

from asyncrl.errors import ConfigError

LOG_TAIL = 1 << 16
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


CAUSE = re.compile(r"\b((?!EngineDeadError)[A-Z]\w*(?:Error|Exception): (?!Engine core initialization failed).+)")


def last_error(log: Path) -> str:
    """The last "SomeError: text" in the tail of a log file, or "" where there is none."""
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL))
        found = CAUSE.findall(file.read().decode(errors="replace"))
    return found[-1].strip() if found else ""


def log_to_file(path: Path) -> None:
    """Append this process's logging, stdout and stderr (its children's too) to `path`.

    Raises:
        ConfigError: the run folder, which the driver made, is not there on this host.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except FileNotFoundError:
        raise ConfigError(
            f"{socket.gethostname()} does not see {path.parent}: runs_dir, model and data must lie on a file system "
            "that all hosts mount at the same path"
        ) from None
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format=FORMAT, stream=sys.stderr, force=True)
