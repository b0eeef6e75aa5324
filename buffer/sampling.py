"""Which groups a lease takes. Every choice is an ordering, so that shards can be merged: each offers its first
`num` groups with their keys, and the lowest keys of all win.

The two random orders are exponential races: a group of weight w gets the key Exp(1) / w. The k lowest keys are then a
weighted sample without replacement (Efraimidis and Spirakis 2006), over any number of shards. Uniform sampling runs the
race in order of arrival (Renyi 1953): the next of n equal groups comes after Exp(1) / n and is any of them, so that it
takes the same time however much is stored.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal

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


class FreeGroups:
    """The groups that may be leased, in the orders that leases ask for.

    Attributes:
        rows, tokens, bytes: sums over them.
    """

    def __init__(self) -> None:
        self.rows = self.tokens = self.bytes = 0
        self._refs: dict[bytes, GroupRef] = {}
        self._in_order: list[tuple[int, bytes]] = []  # (number, group id), sorted
        self._by_version: dict[int, dict[bytes, None]] = {}  # min_version -> ids

    def __len__(self) -> int:
        return len(self._refs)

    def add(self, ref: GroupRef) -> None:
        self._refs[ref.group_id] = ref
        insort(self._in_order, (ref.number, ref.group_id))
        self._by_version.setdefault(ref.min_version, {})[ref.group_id] = None
        self._count(ref, 1)

    def remove(self, ref: GroupRef) -> None:
        del self._refs[ref.group_id]
        del self._in_order[bisect_left(self._in_order, (ref.number, ref.group_id))]
        ids = self._by_version[ref.min_version]
        del ids[ref.group_id]
        if not ids:
            del self._by_version[ref.min_version]
        self._count(ref, -1)

    def older_than(self, version: int) -> list[GroupRef]:
        """Those whose min_version is below, oldest first."""
        versions = sorted(v for v in self._by_version if v < version)
        return [self._refs[group_id] for v in versions for group_id in self._by_version[v]]

    def first(self, num: int, sampling: Sampling, *, draw: str) -> list[Offer]:
        """At most `num` of them with their keys, lowest key first. Random orders depend on the name of the `draw`."""
        num = max(0, min(num, len(self)))
        if sampling.order == "fifo":
            return [((float(number),), self._refs[group_id]) for number, group_id in self._in_order[:num]]
        if sampling.order == "freshest":
            return self._freshest(num)
        rng = random.Random(f"{sampling.seed} {draw}")
        return self._uniform(num, rng) if sampling.order == "uniform" else self._prioritized(num, rng)

    def _freshest(self, num: int) -> list[Offer]:
        chosen: list[Offer] = []
        for version in sorted(self._by_version, reverse=True):
            if len(chosen) == num:
                break
            groups = (self._refs[group_id] for group_id in self._by_version[version])
            newest = heapq.nlargest(num - len(chosen), groups, key=lambda ref: (ref.number, ref.group_id))
            chosen += [((-float(version), -float(ref.number)), ref) for ref in newest]
        return chosen

    def _uniform(self, num: int, rng: random.Random) -> list[Offer]:
        time, chosen = 0.0, []
        for i, position in enumerate(rng.sample(range(len(self)), num)):
            time += rng.expovariate(len(self) - i)
            chosen.append(((time,), self._refs[self._in_order[position][1]]))
        return chosen

    def _prioritized(self, num: int, rng: random.Random) -> list[Offer]:
        races = ((rng.expovariate(_weight(self._refs[i])), i) for _, i in self._in_order)
        return [((time,), self._refs[group_id]) for time, group_id in heapq.nsmallest(num, races)]

    def _count(self, ref: GroupRef, sign: int) -> None:
        self.rows += sign * ref.num_rows
        self.tokens += sign * ref.num_tokens
        self.bytes += sign * ref.nbytes


def _weight(ref: GroupRef) -> float:
    spread = 0.0 if math.isnan(ref.reward_std) else ref.reward_std
    return spread + MIN_WEIGHT
