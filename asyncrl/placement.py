"""What a run asks of the cluster: one bundle of resources per process. No Ray in here: --dry-run prints it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config import JobConfig, RLConfig

LIGHT_CPU = 0.1
"""Share of a core that is reserved for processes which mostly wait: shards and the coordinator."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources of one process."""

    process: str
    cpus: float
    gpus: int = 0

    def to_ray(self) -> dict[str, float]:
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


@dataclass(frozen=True, slots=True)
class Placement:
    """All bundles of a run, in the order of the placement group."""

    bundles: tuple[Bundle, ...]

    @property
    def total(self) -> dict[str, float]:
        return {
            "CPU": round(sum(b.cpus for b in self.bundles), 2),
            "GPU": sum(b.gpus for b in self.bundles),
        }

    def describe(self) -> str:
        """One line per kind of process, then the sum."""
        lines = [f"{'process':<14}{'number':>8}{'CPUs each':>12}{'GPUs each':>12}"]
        kinds = Counter((b.process.rsplit("-", 1)[0], b.cpus, b.gpus) for b in self.bundles)
        lines += [f"{kind:<14}{count:>8}{cpus:>12g}{gpus:>12}" for (kind, cpus, gpus), count in kinds.items()]
        lines.append(f"{'all':<14}{len(self.bundles):>8}{self.total['CPU']:>12g}{self.total['GPU']:>12g}")
        return "\n".join(lines)

    def shortage(self, available: Mapping[str, float]) -> str | None:
        """What the cluster lacks for this run, or None."""
        missing = [
            f"{need:g} {kind}s needed, {available.get(kind, 0):g} in the cluster"
            for kind, need in self.total.items()
            if need > available.get(kind, 0)
        ]
        return "; ".join(missing) or None

    @property
    def num_cpus(self) -> int:
        """Whole CPUs that hold every bundle."""
        return math.ceil(self.total["CPU"])


def plan_placement(config: JobConfig, *, use_gpus: bool) -> Placement:
    """One bundle each for the coordinator, generators, learner ranks and shards.

    Args:
        use_gpus: give every engine `tensor_parallel` GPUs, and every learner rank one unless its device is "cpu";
            otherwise threads of the CPU.
    """
    learners = config.learners
    bundles = [Bundle("coordinator", LIGHT_CPU)]
    if isinstance(config, RLConfig):
        generators = config.generators
        cpus, gpus = (1, generators.tensor_parallel) if use_gpus else (generators.threads, 0)
        bundles += [Bundle(f"generator-{i}", cpus, gpus) for i in range(config.num_generators)]
        bundles += [Bundle(f"shard-{i}", LIGHT_CPU) for i in range(config.buffer.num_shards)]
    cpus, gpus = (1, 1) if use_gpus and learners.device == "auto" else (learners.threads, 0)
    bundles += [Bundle(f"learner-{i}", cpus, gpus) for i in range(learners.num_ranks)]
    return Placement(tuple(bundles))
