"""Where the time of a step went, on both sides of the buffer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence


class Throughput:
    """Turns marks of the training loop and counters of the generators into per-step rates and idle shares.

    Every second of the loop belongs to the mark that follows it, so that the parts of a step sum to its length.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_mark = self._step_start = clock()
        self._parts: dict[str, float] = {}
        self._counters: dict[str, float] = {}

    def mark(self, part: str) -> None:
        """The time since the previous mark was spent on `part`."""
        now = self._clock()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last_mark
        self._last_mark = now

    def step(self, generators: Sequence[Mapping[str, float]], *, trained_tokens: float) -> dict[str, float]:
        """Close a step.

        Args:
            generators: cumulative counters of each generator (generated_tokens, busy_s, idle_s, ...); none in SFT.
            trained_tokens: tokens of the step's batch.
        """
        self.mark("other")
        now = self._clock()
        seconds = max(now - self._step_start, 1e-9)
        totals = {k: sum(g[k] for g in generators) for k in ("generated_tokens", "busy_s", "idle_s")}
        delta = {k: v - self._counters.get(k, 0.0) for k, v in totals.items()}
        row = {f"time/{part}_s": spent for part, spent in self._parts.items()}
        row["time/step_s"] = seconds
        row["throughput/trained_tokens_per_s"] = trained_tokens / seconds
        row["idle/learners"] = self._parts.get("wait_data", 0.0) / seconds
        if generators:
            row["throughput/generated_tokens_per_s"] = delta["generated_tokens"] / seconds
            row["idle/generators"] = delta["idle_s"] / max(delta["idle_s"] + delta["busy_s"], 1e-9)
        self._step_start, self._parts, self._counters = now, {}, totals
        return row
