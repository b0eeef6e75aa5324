"""Model-based test of a shard's contents: staleness bound, whole groups, nothing trained on more often than allowed,
nothing lost when the shard dies, totals balance. The store is killed (dropped without closing) and reopened at random.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache, partial
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncrl.buffer.records import Entry
from asyncrl.buffer.sampling import ORDERS, Sampling
from asyncrl.buffer.schema import EncodedGroup, decode_group, encode_group
from asyncrl.buffer.segment_table import StoreSettings
from asyncrl.buffer.segments import SegmentWriter, WriterLock, metadata_length
from asyncrl.buffer.store import GroupStore
from asyncrl.errors import ReplayBufferError
from tests.buffer.groups import lease_id, make_group

LEASE_S = 10.0


@cache
def encoded(number: int, version: int) -> EncodedGroup:
    return encode_group(make_group(number, version=version, num_rollouts=1 + number % 3, length=1))


class ShardModel(RuleBasedStateMachine):
    """Every group is in exactly one of the model's sets."""

    @initialize(max_staleness=st.integers(0, 3), max_uses=st.integers(1, 2))
    def start(self, max_staleness: int, max_uses: int) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.clock = 0.0
        self.open_store()
        self.writer_id = lease_id(999)
        self.writer = SegmentWriter()
        self.writer_lock: WriterLock | None = None
        self.max_staleness = max_staleness
        self.max_uses = max_uses
        self.version = 0
        self.written: dict[bytes, tuple[int, int]] = {}  # id -> number, version
        self.free: set[bytes] = set()
        self.leases: dict[bytes, list[bytes]] = {}
        self.deadlines: dict[bytes, float] = {}
        self.uses: dict[bytes, int] = {}
        self.trained: set[bytes] = set()
        self.evicted: set[bytes] = set()
        self.num_leases = 0

    def open_store(self) -> None:
        segments = StoreSettings(segment_bytes=12_000, memory_bytes=30_000, spill_dir=self.directory / "spilled")
        self.store = GroupStore(self.directory / "shard", segments, now=lambda: self.clock)

    def teardown(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def bound(self) -> dict[str, int]:
        return {"policy_version": self.version, "max_staleness": self.max_staleness}

    def stale(self) -> set[bytes]:
        return {g for g in self.free if self.version - self.written[g][1] > self.max_staleness}

    def expire_in_model(self) -> None:
        for lease in [lease for lease, deadline in self.deadlines.items() if deadline < self.clock]:
            self.free |= set(self.leases.pop(lease))
            del self.deadlines[lease]

    def evict_in_model(self) -> set[bytes]:
        self.expire_in_model()
        stale = self.stale()
        self.free -= stale
        self.evicted |= stale
        return stale

    def usable(self) -> list[bytes]:
        return sorted(self.free, key=lambda group_id: self.written[group_id])

    def note_append(self, group: EncodedGroup) -> None:
        if group.ref.group_id not in self.written:
            self.written[group.ref.group_id] = (group.ref.number, group.ref.min_version)
            self.free.add(group.ref.group_id)
            self.uses[group.ref.group_id] = 0

    @rule(number=st.integers(0, 40), lag=st.integers(0, 2))
    def append_a_message(self, number: int, lag: int) -> None:
        group = encoded(number, max(0, self.version - lag))
        stored = self.store.append_message(group.message, checksum=xxhash.xxh3_64_intdigest(group.message))
        assert stored == (group.ref.group_id not in self.written)
        self.note_append(group)

    @rule(numbers=st.lists(st.integers(0, 60), max_size=3), lag=st.integers(0, 2))
    def append_through_files(self, numbers: list[int], lag: int) -> None:
        if self.writer_lock is None:
            self.writer_lock = WriterLock(self.store.directory / "writers" / self.writer_id.hex())
        for number in numbers:
            group = encoded(number, max(0, self.version - lag))
            size = group.message.size
            offset = self.writer.write(group.message)
            if offset is None:
                segment = self.store.grant(self.writer_id, size, seal=self.writer.number)
                assert segment is not None
                self.writer.start(segment.number, segment.path, segment.capacity)
                offset = self.writer.write(group.message)
                assert offset is not None
            checksum = xxhash.xxh3_64_intdigest(group.message)
            entry = Entry(group.ref, self.writer.number, offset, metadata_length(group.message), checksum)
            new = group.ref.group_id not in self.written
            assert self.store.append([entry], writer=self.writer_id) == [new]
            assert self.store.append([entry], writer=self.writer_id) == [False]
            self.note_append(group)

    @rule(torn=st.booleans())
    def the_writer_dies(self, torn: bool) -> None:
        if self.writer_lock is None:
            return
        if torn:
            self.writer.write(b"half of a group" * 6)
        self.writer_lock.close()
        self.writer_lock = None
        self.writer.close()
        self.store.seal_dead_writers()

    @rule()
    def the_shard_dies(self) -> None:
        self.open_store()
        self.deadlines = dict.fromkeys(self.leases, self.clock + LEASE_S)

    @rule()
    def compact(self) -> None:
        self.store._log.compact(self.store._records())

    @rule(seconds=st.sampled_from([1.0, LEASE_S, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock += seconds
        self.store.expire_leases()
        self.expire_in_model()

    @rule()
    def step_version(self) -> None:
        self.version += 1
        self.store.advance(self.version)

    @rule(number=st.integers(61, 70))
    def append_from_the_future(self, number: int) -> None:
        self.store.advance(self.version)
        group = encoded(number, self.version + 1)
        with pytest.raises(ReplayBufferError, match=f"policy version {self.version + 1}; the newest is {self.version}"):
            self.store.append_message(group.message, checksum=xxhash.xxh3_64_intdigest(group.message))

    @rule()
    def evict(self) -> None:
        assert {ref.group_id for ref in self.store.evict(**self.bound)} == self.evict_in_model()

    @rule(num_groups=st.integers(1, 4), order=st.sampled_from(ORDERS))
    def lease_what_is_offered(self, num_groups: int, order) -> None:
        offers = self.store.offer(num_groups, **self.bound, sampling=Sampling(order), draw=str(self.num_leases))
        offered = [ref.group_id for _, ref in offers]
        self.evict_in_model()
        assert [key for key, _ in offers] == sorted(key for key, _ in offers)
        assert len(set(offered)) == min(num_groups, len(self.free)) and set(offered) <= self.free
        if order == "fifo":
            assert offered == self.usable()[:num_groups]
        self.num_leases += 1
        lease = lease_id(self.num_leases)
        assert self.store.lease(lease, offered, **self.bound, timeout_s=LEASE_S)
        if not offered:
            return
        self.leases[lease] = offered
        self.deadlines[lease] = self.clock + LEASE_S
        self.free -= set(offered)
        for group_id in offered:
            assert self.version - self.written[group_id][1] <= self.max_staleness

    @rule(data=st.data())
    def lease_what_is_no_longer_offered(self, data: st.DataObject) -> None:
        """What another client took, trained on or let age cannot be had: not even together with free groups."""
        taken = sorted(set(self.written) - self.free | self.stale())
        if taken:
            asked = [data.draw(st.sampled_from(taken)), *(self.usable()[:1])]
            assert not self.store.lease(lease_id(0), asked, **self.bound)
            self.expire_in_model()

    @rule(data=st.data(), commit=st.booleans(), repeat=st.booleans())
    def end_lease(self, data: st.DataObject, commit: bool, repeat: bool) -> None:
        if not self.leases:
            return
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        groups = self.leases.pop(lease)
        del self.deadlines[lease]
        for attempt in range(1 + repeat):
            end = partial(self.store.commit, group_ids=groups, max_uses=self.max_uses) if commit else self.store.release
            ended = end(lease)
            assert ended == (0 if attempt else len(groups))
        for group_id in groups:
            self.uses[group_id] += commit
            assert self.uses[group_id] <= self.max_uses
            (self.trained if self.uses[group_id] == self.max_uses else self.free).add(group_id)

    @rule(data=st.data())
    def commit_what_ran_out(self, data: st.DataObject) -> None:
        """The holder was slow: its groups count as trained on unless somebody else has them, which is an error."""
        if not self.leases or self.max_uses > 1:
            return
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        self.clock += LEASE_S + 1.0
        self.store.expire_leases()
        groups = self.leases[lease]
        self.expire_in_model()
        taken = groups[0]
        other = lease_id(10_000 + self.num_leases)
        assert self.store.lease(other, [taken], policy_version=self.version, max_staleness=99)
        with pytest.raises(ReplayBufferError, match="handed out again"):
            self.store.commit(lease, groups)
        self.store.release(other)
        self.free -= set(groups[1:])
        self.trained |= set(groups[1:])
        for group_id in groups[1:]:
            self.uses[group_id] += 1

    @rule(data=st.data())
    def read_whole(self, data: st.DataObject) -> None:
        held = sorted(self.free | {g for groups in self.leases.values() for g in groups})
        if held:
            group_id = data.draw(st.sampled_from(held))
            group = decode_group(self.store.read(group_id))
            assert (group.group_id, group.number, group.min_version) == (group_id, *self.written[group_id])
            assert len(group.rollouts) == 1 + group.number % 3

    @invariant()
    def totals_balance(self) -> None:
        stats = self.store.stats()
        leased = [g for groups in self.leases.values() for g in groups]
        assert stats.is_balanced
        assert stats.appended == len(self.written)
        assert (stats.groups, stats.leased_groups) == (len(self.free), len(leased))
        assert (stats.committed, stats.evicted) == (len(self.trained), len(self.evicted))
        assert stats.uses == sum(self.uses.values())
        assert stats.rows == sum(1 + self.written[g][0] % 3 for g in self.free)
        sizes = {g: encoded(*self.written[g]).ref.nbytes for g in [*self.free, *leased]}
        assert stats.bytes == sum(sizes[g] for g in self.free)
        assert stats.leased_bytes == sum(sizes[g] for g in leased)


TestShardModel = ShardModel.TestCase
TestShardModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
