"""Which groups a lease takes. Every choice is an ordering, so that shards can be merged: each offers its first
`num` groups with their keys, and the lowest keys of all win.

The two random orders are exponential races: a group of weight w gets the key Exp(1) / w. The k lowest keys are then a
weighted sample without replacement (Efraimidis and Spirakis 2006), over any number of shards. Uniform sampling runs the
race in order of arrival (Renyi 1953): the next of n equal groups comes after Exp(1) / n and is any of them, so that it
takes the same time however much is stored.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.errors import ReplayBufferError
from asyncrl.types import GroupRef

Order = Literal["fifo", "freshest", "uniform", "prioritized"]
ORDERS: tuple[Order, ...] = ("fifo", "freshest", "uniform", "prioritized")
MIN_WEIGHT = 1e-3
Offer = tuple[tuple[float, ...], GroupRef]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How groups are chosen.

    Attributes:
        order: fifo: lowest numbers first. freshest: newest min_version first, then highest numbers. uniform: each group
            is as likely as any other. prioritized: in proportion to the spread (population std) of its rewards, plus
            MIN_WEIGHT: a group without spread teaches a group-relative objective nothing.
        max_uses: how often a group is trained on before it leaves; more than once is replay, in the random orders.
        seed: of the random orders; the same seed, draw and contents give the same groups.
    """

    order: Order = "fifo"
    max_uses: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ReplayBufferError(f"sampling order must be one of {', '.join(ORDERS)}; got {self.order!r}")
        if self.max_uses < 1:
            raise ReplayBufferError(f"max_uses must be at least 1; got {self.max_uses}")
        if self.max_uses > 1 and self.order in ("fifo", "freshest"):
            raise ReplayBufferError(
                f"{self.order} takes each group once: max_uses = {self.max_uses} needs uniform or prioritized"
            )


FIFO = Sampling()


def offer(
    free: Sequence[tuple[int, bytes]],
    refs: Mapping[bytes, Any],
    by_version: Mapping[int, Mapping[bytes, None]],
    sampling: Sampling,
    *,
    num: int,
    draw: str,
) -> list[Offer]:
    """The first `num` free groups with their keys, lowest key first.

    Args:
        free: (number, group id), sorted.
        refs: group id -> anything with a `ref`.
        by_version: min_version -> ids of its free groups.
        draw: names this draw; random orders differ from draw to draw.
    """
    num = min(num, len(free))
    if sampling.order == "fifo":
        return [((float(number),), refs[group_id].ref) for number, group_id in free[:num]]
    if sampling.order == "freshest":
        return _freshest(refs, by_version, num)
    rng = random.Random(f"{sampling.seed} {draw}")
    if sampling.order == "uniform":
        return _uniform(free, refs, rng, num)
    return _prioritized(free, refs, rng, num)


def _freshest(refs: Mapping[bytes, Any], by_version: Mapping[int, Mapping[bytes, None]], num: int) -> list[Offer]:
    chosen: list[Offer] = []
    for version in sorted(by_version, reverse=True):
        if len(chosen) == num:
            break
        ids = by_version[version]
        newest = heapq.nlargest(num - len(chosen), ((refs[i].ref.number, i) for i in ids))
        chosen += [((-float(version), -float(number)), refs[group_id].ref) for number, group_id in newest]
    return chosen


def _uniform(free: Sequence[tuple[int, bytes]], refs: Mapping[bytes, Any], rng: random.Random, num: int) -> list[Offer]:
    time, chosen = 0.0, []
    for i, position in enumerate(rng.sample(range(len(free)), num)):
        time += rng.expovariate(len(free) - i)
        chosen.append(((time,), refs[free[position][1]].ref))
    return chosen


def _prioritized(
    free: Sequence[tuple[int, bytes]], refs: Mapping[bytes, Any], rng: random.Random, num: int
) -> list[Offer]:
    groups = [refs[group_id].ref for _, group_id in free]
    first = heapq.nsmallest(num, ((rng.expovariate(weight(ref)), i) for i, ref in enumerate(groups)))
    return [((time,), groups[i]) for time, i in first]


def weight(ref: GroupRef) -> float:
    """Of a group in prioritized sampling."""
    spread = ref.reward_std if ref.reward_std == ref.reward_std else 0.0
    return spread + MIN_WEIGHT
