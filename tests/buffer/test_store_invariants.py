"""Model-based test of a shard's contents: staleness bound, whole groups, nothing trained on twice, totals balance."""

from __future__ import annotations

from functools import cache

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncrl.buffer.schema import decode_group, encode_group
from asyncrl.buffer.store import GroupStore
from asyncrl.buffer.wire import checksum
from tests.buffer.groups import make_group


@cache
def encoded(number: int, version: int) -> tuple[bytes, str, bytes, int]:
    group = make_group(number, version=version, num_rollouts=1 + number % 3, length=1)
    payload = encode_group(group).to_pybytes()
    return payload, checksum(payload), group.group_id, len(group.rollouts)


class ShardModel(RuleBasedStateMachine):
    """Every group is in exactly one of the model's sets."""

    @initialize(max_staleness=st.integers(0, 3))
    def start(self, max_staleness: int) -> None:
        self.store = GroupStore()
        self.max_staleness = max_staleness
        self.version = 0
        self.written: dict[bytes, tuple[int, int]] = {}  # id -> number, version
        self.free: set[bytes] = set()
        self.leases: dict[str, list[bytes]] = {}
        self.trained: set[bytes] = set()
        self.evicted: set[bytes] = set()
        self.num_leases = 0

    @property
    def bound(self) -> dict[str, int]:
        return {"policy_version": self.version, "max_staleness": self.max_staleness}

    def stale(self) -> set[bytes]:
        return {g for g in self.free if self.version - self.written[g][1] > self.max_staleness}

    def evict_in_model(self) -> set[bytes]:
        stale = self.stale()
        self.free -= stale
        self.evicted |= stale
        return stale

    def usable(self) -> list[bytes]:
        return sorted(self.free, key=lambda group_id: self.written[group_id])

    @rule(number=st.integers(0, 40), lag=st.integers(0, 2))
    def append(self, number: int, lag: int) -> None:
        payload, digest, group_id, _ = encoded(number, max(0, self.version - lag))
        assert self.store.append(payload, checksum=digest) == (group_id not in self.written)
        if group_id not in self.written:
            self.written[group_id] = (number, max(0, self.version - lag))
            self.free.add(group_id)

    @rule()
    def step_version(self) -> None:
        self.version += 1

    @rule()
    def evict(self) -> None:
        assert {ref.group_id for ref in self.store.evict(**self.bound)} == self.evict_in_model()

    @rule(num_groups=st.integers(1, 4))
    def lease_the_lowest_numbers(self, num_groups: int) -> None:
        offered = [ref.group_id for ref in self.store.peek(num_groups, **self.bound)]
        self.evict_in_model()
        assert offered == self.usable()[:num_groups]
        lease_id = str(self.num_leases)
        self.num_leases += 1
        assert self.store.lease(lease_id, offered, **self.bound)
        self.leases[lease_id] = offered
        self.free -= set(offered)
        for group_id in offered:
            assert self.version - self.written[group_id][1] <= self.max_staleness

    @rule(data=st.data())
    def lease_what_is_no_longer_offered(self, data: st.DataObject) -> None:
        """What another client took, trained on or let age cannot be had: not even together with free groups."""
        taken = sorted(set(self.written) - self.free | self.stale())
        if taken:
            asked = [data.draw(st.sampled_from(taken)), *(self.usable()[:1])]
            assert not self.store.lease("late", asked, **self.bound)

    @rule(data=st.data(), commit=st.booleans(), repeat=st.booleans())
    def end_lease(self, data: st.DataObject, commit: bool, repeat: bool) -> None:
        if not self.leases:
            return
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        groups = self.leases.pop(lease_id)
        end = self.store.commit if commit else self.store.release
        assert end(lease_id) == len(groups)
        if repeat:
            assert end(lease_id) == 0
        if commit:
            assert not self.trained & set(groups)
            self.trained |= set(groups)
        else:
            self.free |= set(groups)

    @rule(data=st.data())
    def read_whole(self, data: st.DataObject) -> None:
        held = sorted(self.free | {g for groups in self.leases.values() for g in groups})
        if held:
            group_id = data.draw(st.sampled_from(held))
            group = decode_group(self.store.read(group_id).payload)
            assert (group.group_id, group.number, group.min_version) == (group_id, *self.written[group_id])
            assert len(group.rollouts) == 1 + group.number % 3

    @invariant()
    def totals_balance(self) -> None:
        stats = self.store.stats()
        leased = [g for groups in self.leases.values() for g in groups]
        assert stats.appended == stats.groups + stats.leased_groups + stats.committed + stats.evicted
        assert stats.appended == len(self.written)
        assert (stats.groups, stats.leased_groups) == (len(self.free), len(leased))
        assert (stats.committed, stats.evicted) == (len(self.trained), len(self.evicted))
        assert stats.rows == sum(1 + self.written[g][0] % 3 for g in self.free)
        sizes = {g: len(encoded(*self.written[g])[0]) for g in [*self.free, *leased]}
        assert stats.bytes == sum(sizes[g] for g in self.free)
        assert stats.leased_bytes == sum(sizes[g] for g in leased)


TestShardModel = ShardModel.TestCase
TestShardModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
