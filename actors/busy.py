"""How much of its time an engine had something to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BusyClock:
    """Splits the time since its construction into time with at least one rollout in flight, and time without."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = self._changed = clock()
        self._busy_s = 0.0
        self.running = 0

    @contextmanager
    def count(self, num_rollouts: int) -> Iterator[None]:
        """These rollouts are in flight inside the block."""
        self._add(num_rollouts)
        try:
            yield
        finally:
            self._add(-num_rollouts)

    def seconds(self) -> tuple[float, float]:
        """Busy and idle seconds until now."""
        self._add(0)
        return self._busy_s, self._changed - self._started - self._busy_s

    def _add(self, change: int) -> None:
        now = self._clock()
        if self.running:
            self._busy_s += now - self._changed
        self._changed = now
        self.running += change
