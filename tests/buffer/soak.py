"""Soak test of the replay buffer: `python -m tests.buffer.soak --minutes 60 --seed 0` (or `make soak`).

Real shard, writer and reader processes; at random (seeded) moments one of them is killed or stopped for a while. Shard
0 is only stopped, so that its memory and descriptors show a leak. Writers and readers note what they were told in
journals, which outlive them. At every interval all of them rest, and what the shards hold is held against the journals:

    every acknowledged group is held, or was trained on, or was too old once; no group more often than max_uses;
    the shards' totals add up; every group that is read is bit for bit what was written, and within the staleness bound.

The memory, descriptors and bytes of files in the last quarter of the time must be those of the second quarter.
Exit status 1, with every violation on a line, when something does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from asyncrl.buffer import BufferStats, ReplayBuffer, Sampling, ShardAddress, ShardServer, StoreSettings, shared_memory
from asyncrl.errors import ReplayBufferError
from asyncrl.types import Group, GroupRef
from tests.buffer.groups import assert_same_group, make_group

SPAWN = multiprocessing.get_context("spawn")
MAX_STALENESS = 3
LEASE_S = 6.0
LONG_STOP_S = LEASE_S + 3
TIMEOUT_S = 60.0  # also for a process to start on a loaded machine
BATCH = 4
NUM_SHARDS, NUM_WRITERS, NUM_READERS = 2, 2, 2
RECORD = struct.Struct("<cqq")  # what, number of the group, its version
ACKNOWLEDGED, TRAINING, TRAINED, LATE = b"A", b"I", b"C", b"L"


def group_of(number: int, version: int) -> Group:
    """The same number gives the same group; 1 to 30 kB."""
    return make_group(number, version=version, num_rollouts=1 + number % 4, length=20 + number * 37 % 400)


@dataclass
class Shared:
    """What the processes know of each other, in memory that a kill cannot leave locked."""

    version: Any = field(default_factory=lambda: SPAWN.Value("q", 0, lock=False))
    resting: Any = field(default_factory=lambda: SPAWN.Array("b", 2, lock=False))  # writers, readers are to rest
    busy: Any = field(default_factory=lambda: SPAWN.Array("b", NUM_WRITERS + NUM_READERS, lock=False))


class Journal:
    """Appends records to a file; a kill leaves whole ones."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, what: bytes, groups: list[tuple[int, int]]) -> None:
        os.write(self._fd, b"".join(RECORD.pack(what, number, version) for number, version in groups))


@dataclass(frozen=True)
class Job:
    """What a writer or reader process needs to know."""

    name: str
    slot: int
    seed: int
    first: int  # number of a writer's first group
    addresses: list[dict[str, Any]]
    folder: Path
    shared: Shared
    sampling: Sampling
    pause_s: float


def serve(directory: str, settings: StoreSettings, pipe: Any) -> None:
    logging.basicConfig(filename=f"{directory}.txt", level=logging.WARNING)
    server = ShardServer(directory, settings=settings)
    pipe.send(server.start().to_dict())
    pipe.recv()
    server.stop()


def work(job: Job) -> None:
    """A writer or reader, until it is killed."""
    rng = random.Random(job.seed)
    shared, journal = job.shared, Journal(job.folder / f"{job.name}.journal")
    is_writer = job.name.startswith("writer")
    number = job.first
    with ReplayBuffer([ShardAddress.from_dict(a) for a in job.addresses], timeout_s=TIMEOUT_S) as buffer:
        while True:
            shared.busy[job.slot] = 1
            if shared.resting[0 if is_writer else 1]:
                shared.busy[job.slot] = 0
                time.sleep(0.01)
                continue
            try:
                if is_writer:
                    number = append(buffer, number, job, journal, rng)
                else:
                    train(buffer, job, journal, rng)
            except (ReplayBufferError, AssertionError) as error:
                line = f"{time.monotonic()}\t{job.name}\t{type(error).__name__}: {error}".replace("\n", " ")
                with open(job.folder / "errors", "a") as file:
                    file.write(line + "\n")
            time.sleep(job.pause_s * rng.random() * 2)


def append(buffer: ReplayBuffer, number: int, job: Job, journal: Journal, rng: random.Random) -> int:
    version = max(0, job.shared.version.value - rng.choice((0, 0, 0, 1)))
    groups = [group_of(n, version) for n in range(number, number + rng.randint(1, 4))]
    buffer_full = "the replay buffer is full"
    while True:
        try:
            buffer.append_many(groups)
            break
        except ReplayBufferError as error:
            if buffer_full not in str(error):
                raise
    journal.note(ACKNOWLEDGED, [(group.number, version) for group in groups])
    return number + len(groups)


def train(buffer: ReplayBuffer, job: Job, journal: Journal, rng: random.Random) -> None:
    version = job.shared.version.value
    lease = buffer.lease(
        BATCH, policy_version=version, max_staleness=MAX_STALENESS, sampling=job.sampling, timeout_s=LEASE_S
    )
    if lease is None:
        return
    assert len({ref.group_id for ref in lease.refs}) == BATCH, "a group twice in one lease"
    check_contents(buffer, lease.refs, policy_version=version)
    time.sleep(job.pause_s * rng.random())
    if rng.random() < 0.1:
        buffer.release(lease)
        return
    groups = [(ref.number, ref.min_version) for ref in lease.refs]
    journal.note(TRAINING, groups)
    try:
        buffer.commit(lease)
    except ReplayBufferError as error:
        if "handed out again" in str(error):
            journal.note(LATE, groups)
        raise
    journal.note(TRAINED, groups)


def check_contents(buffer: ReplayBuffer, refs: Any, *, policy_version: int) -> None:
    for ref, group in zip(refs, buffer.read(refs), strict=True):
        assert policy_version - ref.min_version <= MAX_STALENESS, f"staleness of group {ref.number}"
        assert_same_group(group, group_of(ref.number, ref.min_version))


class Worker:
    """A process that is started again when it was killed."""

    def __init__(self, name: str, start: Callable[[], Any]) -> None:
        self.name = name
        self._start = start
        self.stopped: list[tuple[float, float]] = []
        self.process = start()

    def kill(self) -> None:
        self.process.kill()  # nothing happens to one that is dead
        self.process.join()

    def restart(self) -> None:
        self.process = self._start()

    def stop_for(self, seconds: float, until: threading.Event) -> None:
        begin = time.monotonic()
        os.kill(self.process.pid, signal.SIGSTOP)
        until.wait(seconds)
        os.kill(self.process.pid, signal.SIGCONT)
        self.stopped.append((begin, time.monotonic()))

    @property
    def num_long_stops(self) -> int:
        return sum(end - begin > LEASE_S / 2 for begin, end in self.stopped)

    def was_stopped_long(self, before: float) -> bool:
        """Long enough to lose a lease, within the minute before; a little less counts: renewals take time."""
        return any(end - begin > LEASE_S / 2 and before - 60 < end <= before + 1 for begin, end in self.stopped)


class Soak:
    """The run: start(), then the clock, the faults and the audits until the time is over."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder, args
        self.rng = random.Random(args.seed)
        self.sampling = Sampling("uniform", args.max_uses, args.seed) if args.max_uses > 1 else Sampling()
        self.shared = Shared()
        self.settings = StoreSettings(
            segment_bytes=1 << 19, capacity_bytes=24 << 20, memory_bytes=4 << 20, spill_dir=folder
        )
        self.memory = Path(tempfile.mkdtemp(prefix="asyncrl-soak-", dir=shared_memory()))
        self.faults_allowed = threading.Lock()
        self.ending = threading.Event()
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []
        self.journals: dict[str, int] = {}  # file -> bytes that were read
        self.acknowledged: dict[int, int] = {}  # number -> version, of groups that may still be held
        self.uses: Counter[int] = Counter()
        self.in_doubt: Counter[int] = Counter()  # number -> uses that nobody confirmed
        self.errors_read = 0
        self.num_started = 0
        self.last_fault = 0.0
        self.addresses: list[ShardAddress] = []
        self.shards = [Worker(f"shard {i}", lambda i=i: self.start_shard(i)) for i in range(NUM_SHARDS)]
        self.buffer = ReplayBuffer(self.addresses, timeout_s=TIMEOUT_S)
        names = [f"writer {i}" for i in range(NUM_WRITERS)] + [f"reader {i}" for i in range(NUM_READERS)]
        self.workers = [Worker(n, lambda n=n, slot=slot: self.start_worker(n, slot)) for slot, n in enumerate(names)]

    # Processes

    def start_shard(self, index: int) -> Any:
        pipe, theirs = SPAWN.Pipe()
        settings = dataclasses.replace(self.settings, spill_dir=self.folder / f"spilled-{index}")
        process = SPAWN.Process(target=serve, args=(str(self.memory / f"shard-{index}"), settings, theirs), daemon=True)
        process.start()
        if not pipe.poll(TIMEOUT_S):
            raise RuntimeError(f"shard {index} does not start")
        address = ShardAddress.from_dict(pipe.recv())
        process.pipe = pipe  # type: ignore[attr-defined]  # kept open: its end ends the shard
        if len(self.addresses) == index:
            self.addresses.append(address)
        assert self.addresses[index] == address
        return process

    def start_worker(self, name: str, slot: int) -> Any:
        self.num_started += 1
        self.shared.busy[slot] = 0
        job = Job(
            name=name,
            slot=slot,
            seed=self.args.seed * 1000 + self.num_started,
            first=self.num_started * 1_000_000,
            addresses=[address.to_dict() for address in self.addresses],
            folder=self.folder,
            shared=self.shared,
            sampling=self.sampling,
            pause_s=self.args.pause_s,
        )
        process = SPAWN.Process(target=work, args=(job,), daemon=True)
        process.start()
        return process

    def cause_faults(self) -> None:
        """Thread: kill or stop one process after the other."""
        try:
            self.kill_and_stop()
        except Exception as error:  # noqa: BLE001 - a thread's error would end in its traceback
            self.violation(f"a process could not be started again: {type(error).__name__}: {error}")

    def kill_and_stop(self) -> None:
        rng = random.Random(self.args.seed + 1)
        while not self.ending.wait(rng.expovariate(1 / self.args.fault_every_s)):
            with self.faults_allowed:
                kill = rng.random() < 0.5
                kinds = self.shards[1:] if kill else self.shards, self.workers[:NUM_WRITERS], self.workers[NUM_WRITERS:]
                victim = rng.choice(rng.choice(kinds))
                self.last_fault = time.monotonic()
                if kill:
                    victim.kill()
                    self.counts[f"killed {victim.name.split()[0]}s"] += 1
                    self.ending.wait(rng.random())
                    victim.restart()
                else:
                    long = rng.random() < 0.3
                    self.counts[f"stopped {victim.name.split()[0]}s"] += 1
                    victim.stop_for(LONG_STOP_S if long else rng.uniform(0.1, 2.0), self.ending)
                self.last_fault = time.monotonic()

    # Time

    def run(self) -> bool:
        """Whether everything held."""
        begin = time.monotonic()
        faults = threading.Thread(target=self.cause_faults, daemon=True)
        faults.start()
        next_audit = begin + self.args.interval_s
        end = begin + self.args.minutes * 60
        print(HEADER, flush=True)
        while (now := time.monotonic()) < end and len(self.violations) < 20:
            self.step_version()
            self.read_journals()
            if now >= next_audit:
                self.snapshot_and_restore()
                self.audit()
                self.sample(now - begin)
                next_audit = time.monotonic() + self.args.interval_s
            time.sleep(self.args.step_s)
        self.ending.set()
        faults.join()
        self.audit()
        self.sample(time.monotonic() - begin)
        self.check_growth()
        self.report()
        return not self.violations

    def step_version(self) -> None:
        version = self.shared.version.value + 1
        self.buffer.advance(version)
        self.shared.version.value = version

    def read_journals(self) -> None:
        for path in self.folder.glob("*.journal"):
            with open(path, "rb") as file:
                file.seek(self.journals.get(path.name, 0))
                data = file.read()
            data = data[: len(data) // RECORD.size * RECORD.size]
            self.journals[path.name] = self.journals.get(path.name, 0) + len(data)
            for what, number, version in RECORD.iter_unpack(data):
                self.note(what, number, version)
        self.read_errors()

    def note(self, what: bytes, number: int, version: int) -> None:
        if what == ACKNOWLEDGED:
            self.acknowledged[number] = version
            self.counts["acknowledged"] += 1
        elif what == TRAINING:
            self.in_doubt[number] += 1
        elif what == TRAINED:
            self.in_doubt[number] -= 1
            self.uses[number] += 1
            self.counts["trained"] += 1
            if self.uses[number] > self.args.max_uses:
                self.violation(f"group {number} was trained on {self.uses[number]} times")

    def read_errors(self) -> None:
        path = self.folder / "errors"
        if not path.exists():
            return
        with open(path) as file:
            file.seek(self.errors_read)
            lines = file.readlines()
            self.errors_read = file.tell()
        for line in lines:
            when, name, text = line.rstrip().split("\t", 2)
            worker = next(w for w in self.workers if w.name == name)
            lost_lease = "handed out again" in text or "is gone: committed" in text
            if lost_lease and worker.was_stopped_long(float(when)):
                self.counts["leases lost by a long stop"] += 1
            else:
                self.violation(f"{name}: {text}")

    # Checks

    def violation(self, text: str) -> None:
        self.violations.append(text)
        print(f"VIOLATION: {text}", flush=True)

    def rest(self, kind: int, slots: range) -> None:
        self.shared.resting[kind] = 1
        deadline = time.monotonic() + 2 * TIMEOUT_S
        time.sleep(0.05)
        while any(self.shared.busy[slot] for slot in slots):
            if time.monotonic() > deadline:
                stuck = [self.workers[slot].name for slot in slots if self.shared.busy[slot]]
                self.violation(f"{', '.join(stuck)} did not come to rest")
                return
            time.sleep(0.01)

    def audit(self) -> None:
        """Everybody rests; then what the shards hold is known exactly, but for the leases of killed readers."""
        with self.faults_allowed:
            self.rest(0, range(NUM_WRITERS))
            self.rest(1, range(NUM_WRITERS, NUM_WRITERS + NUM_READERS))
            self.read_journals()
            version = self.shared.version.value
            self.buffer.evict(policy_version=version, max_staleness=MAX_STALENESS)
            stats = self.buffer.stats()
            refs = self.free_groups(version)
            self.check_conservation(stats, {ref.number: ref for ref in refs}, version)
            self.shared.resting[0] = self.shared.resting[1] = 0

    def free_groups(self, version: int) -> tuple[GroupRef, ...]:
        """Lease all that may be leased, read it, and give it back."""
        bound = {"policy_version": version, "max_staleness": MAX_STALENESS}
        for _ in range(5):  # leases of killed readers may run out in between
            num = self.buffer.stats().groups
            if not num:
                return ()
            lease = self.buffer.lease(num, **bound, sampling=self.sampling, timeout_s=LEASE_S)
            if lease is not None:
                check_contents(self.buffer, lease.refs, policy_version=version)
                self.buffer.release(lease)
                return lease.refs
        self.violation(f"{num} groups are free and cannot be leased")
        return ()

    def check_conservation(self, stats: BufferStats, held: dict[int, GroupRef], version: int) -> None:
        if not stats.is_balanced or stats.quarantined:
            self.violation(f"the ledger does not balance, or a group was damaged: {stats}")
        if stats.appended < self.counts["acknowledged"]:
            self.violation(f"{stats.appended} groups are stored, {self.counts['acknowledged']} were acknowledged")
        # A reader that was stopped may train on what was evicted after its lease ran out.
        late = BATCH * sum(w.num_long_stops for w in self.workers if w.name.startswith("reader"))
        if stats.uses < self.counts["trained"] - late:
            self.violation(f"{stats.uses} uses are counted, {self.counts['trained']} were made")
        missing = []
        for number, born in list(self.acknowledged.items()):
            used_up = self.uses[number] + self.in_doubt[number] >= self.args.max_uses
            if number not in held and not used_up and version - born <= MAX_STALENESS:
                missing.append(number)
            elif number not in held and version - born > MAX_STALENESS:
                del self.acknowledged[number]  # trained on or evicted: it cannot come back
        if len(missing) > stats.leased_groups:
            self.violation(f"{len(missing)} groups are lost, {stats.leased_groups} leased: {missing[:5]}")
        for number in held:
            if self.uses[number] >= self.args.max_uses:
                self.violation(f"group {number} is held after {self.uses[number]} uses")
        for counter in (self.uses, self.in_doubt):
            for number in [n for n in list(counter) if n not in self.acknowledged and n not in held]:
                if self.counts["audits"] % 4 == 3:  # keep them a while: a use too many may come late
                    del counter[number]
        self.counts["audits"] += 1

    def snapshot_and_restore(self) -> None:
        """While everything goes on: what was acknowledged before and not trained on until after is in it."""
        before, begin = dict(self.acknowledged), time.monotonic()
        target = self.folder / "snapshot"
        try:
            self.buffer.snapshot(target, policy_version=self.shared.version.value, timeout_s=30)
        except ReplayBufferError as error:
            if self.last_fault < begin and not self.faults_allowed.locked():
                self.violation(f"no snapshot without a fault: {error}")
            self.counts["snapshots cut short by a fault"] += 1
            return
        self.read_journals()
        version = self.shared.version.value
        with ReplayBuffer.local(1) as copy:
            copy.restore(target)
            num = copy.stats().groups
            lease = copy.lease(num, policy_version=version, max_staleness=1 << 30) if num else None
            refs = lease.refs if lease else ()
            for ref, group in zip(refs, copy.read(refs), strict=True):
                assert_same_group(group, group_of(ref.number, ref.min_version))
        there = {ref.number for ref in refs}
        missing = [
            n
            for n, born in before.items()
            if n not in there and not self.uses[n] and not self.in_doubt[n] and version - born <= MAX_STALENESS
        ]
        if missing:
            self.violation(f"{len(missing)} groups are not in a snapshot: {missing[:5]}")
        self.counts["snapshots"] += 1

    def sample(self, at_s: float) -> None:
        shard, stats = psutil.Process(self.shards[0].process.pid), self.buffer.stats()
        files = [file for file in self.memory.rglob("*") if file.is_file()]
        row = {
            "at_s": at_s,
            "rss_mb": shard.memory_info().rss / 1e6,
            "fds": shard.num_fds(),
            "client_fds": psutil.Process().num_fds(),
            "shm_mb": sum(bytes_of(file) for file in files) / 1e6,
            "disk_mb": sum(bytes_of(f) for f in self.folder.rglob("*") if f.suffix == ".arrow") / 1e6,
        }
        self.samples.append(row)
        c = self.counts
        print(
            f"{at_s:7.0f}{self.shared.version.value:8}{stats.appended:10}{stats.committed:10}{stats.evicted:9}"
            f"{stats.groups:7}{stats.leased_groups:7}{sum(n for k, n in c.items() if k.startswith('killed')):7}"
            f"{sum(n for k, n in c.items() if k.startswith('stopped')):7}{c['snapshots']:6}{row['rss_mb']:8.1f}"
            f"{row['fds']:5.0f}{row['client_fds']:5.0f}{row['shm_mb']:8.1f}{row['disk_mb']:8.1f}{len(self.violations):5}",
            flush=True,
        )

    def check_growth(self) -> None:
        quarter = len(self.samples) // 4
        for name, allowed in GROWTH.items():
            values = [row[name] for row in self.samples]
            early = statistics.median(values[quarter : 2 * quarter] or values)
            late = statistics.median(values[-quarter:] if quarter else values)
            print(f"{name:<12} second quarter {early:8.1f}   last quarter {late:8.1f}")
            if late > 1.1 * early + allowed:
                self.violation(f"{name} grew from {early:.1f} to {late:.1f}")

    def report(self) -> None:
        for name, count in sorted(self.counts.items()):
            print(f"{name:<32}{count:>10}")
        print(f"{'violations':<32}{len(self.violations):>10}")

    def close(self) -> None:
        self.buffer.close()
        for worker in self.workers + self.shards:
            worker.kill()
        shutil.rmtree(self.memory, ignore_errors=True)


HEADER = (
    f"{'s':>7}{'version':>8}{'appended':>10}{'committed':>10}{'evicted':>9}{'free':>7}{'leased':>7}{'kills':>7}"
    f"{'stops':>7}{'snap':>6}{'rss MB':>8}{'fds':>5}{'ours':>5}{'shm MB':>8}{'disk MB':>8}{'bad':>5}"
)
GROWTH = {"rss_mb": 10.0, "fds": 70.0, "client_fds": 70.0, "shm_mb": 14.0, "disk_mb": 24.0}
"""How much more the last quarter may have than the second, beyond a tenth; a client keeps 64 files of a shard
open, and a log grows to four times its shortest form."""


def bytes_of(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-uses", type=int, default=1)
    parser.add_argument("--interval-s", type=float, default=15, help="between two audits")
    parser.add_argument("--fault-every-s", type=float, default=3)
    parser.add_argument("--step-s", type=float, default=1.0, help="between two policy versions")
    parser.add_argument("--pause-s", type=float, default=0.02, help="mean rest of a writer or reader between two steps")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through close()
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-soak-"))
    soak = Soak(folder, args)
    try:
        held = soak.run()
    finally:
        soak.close()
    if held:
        shutil.rmtree(folder)
    else:
        print(f"journals and errors: {folder}")
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
