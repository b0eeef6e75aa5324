"""Metric sinks of a run: metrics.jsonl (one object per line) and TensorBoard events.

Comes from the coordinator, goes to files. A sink that fails is reported once in the log and switched off; it never
stops training.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

TIMING_PREFIXES = ("time/", "throughput/", "idle/")
"""Metrics that depend on the clock; everything else repeats in sync mode."""


class Sink(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonlSink:
    """One line per call: {"step": 3, "time/unix": ..., "learner/loss": ...}; non-finite numbers become null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        row: dict[str, float | int | None] = {"step": step, "time/unix": round(time.time(), 3)}
        row.update({k: (v if math.isfinite(v) else None) for k, v in sorted(metrics.items())})
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars as TensorBoard events, without importing torch or tensorflow."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        # Generated modules: their names exist at run time only.
        summary = summary_pb2.Summary()  # pyright: ignore[reportAttributeAccessIssue]
        for name, value in sorted(metrics.items()):
            summary.value.add(tag=name, simple_value=value)
        event = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        self._writer.add_event(event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class Metrics:
    """Writes each row to every sink that still works."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics that belong to policy version `step`."""
        for sink in list(self._sinks):
            try:
                sink.write(step, metrics)
            except Exception:
                logger.exception("%s failed and is switched off", type(sink).__name__)
                self._sinks.remove(sink)

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except Exception:
                logger.exception("%s could not be closed", type(sink).__name__)
