"""What a run shows of itself while it goes on: filled by the coordinator, drawn by the display."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Everything the display draws; small, since it crosses to the driver several times a second.

    Attributes:
        latest: the newest value of every metric.
        curve: (step, training value): mean reward in RL, loss in SFT.
        evals: (step, held-out value): mean reward in RL, token accuracy in SFT.
        saved: model folders written so far.
    """

    job: str
    num_steps: int
    phase: str = "starting"
    step: int = 0
    started_at: float = field(default_factory=time.time)
    training_since: float | None = None
    latest: dict[str, float] = field(default_factory=dict)
    curve: list[tuple[int, float]] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    _seconds: float = 0.0
    _totals: dict[str, float] = field(default_factory=dict)

    def record_step(self, step: int, metrics: Mapping[str, float], *, value: float) -> None:
        """An optimizer batch is done."""
        self.step = step
        self.latest.update(metrics)
        self.curve.append((step, value))
        seconds = metrics.get("time/step_s", 0.0)
        self._seconds += seconds
        for name in metrics:
            if name.startswith(("throughput/", "idle/")):
                self._totals[name] = self._totals.get(name, 0.0) + metrics[name] * seconds

    def record_eval(self, step: int, metrics: Mapping[str, float], *, value: float | None) -> None:
        """An evaluation of the model after `step` batches is done; None: nothing could be scored."""
        self.latest.update(metrics)
        if value is not None:
            self.evals.append((step, value))

    def eta_s(self, now: float) -> float | None:
        """Seconds to the last step at the pace so far; None before the first."""
        if not self.step or self.training_since is None:
            return None
        return (now - self.training_since) / self.step * (self.num_steps - self.step)

    def averages(self) -> dict[str, float]:
        """Rates and idle shares over all steps, weighted by their time."""
        return {name: total / self._seconds for name, total in self._totals.items()} if self._seconds else {}
