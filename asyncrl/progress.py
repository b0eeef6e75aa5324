"""What a run shows of itself while it goes on: filled by the coordinator, drawn by the display."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Progress:
    """Everything the display draws; small, and crosses to the driver as a plain dict.

    Attributes:
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

    def record_step(self, step: int, metrics: Mapping[str, float], *, value: float) -> None:
        """An optimizer batch is done."""
        self.step = step
        self.latest.update(metrics)
        self.curve.append((step, value))

    def record_eval(self, step: int, metrics: Mapping[str, float], *, value: float) -> None:
        """An evaluation of the model after `step` batches is done."""
        self.latest.update(metrics)
        self.evals.append((step, value))

    def eta_s(self, now: float) -> float | None:
        """Seconds to the last step at the pace so far; None before the first."""
        if not self.step or self.training_since is None:
            return None
        return (now - self.training_since) / self.step * (self.num_steps - self.step)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
