"""A replay buffer under random faults: `python benchmarks/soak.py [--minutes 60] [--seed 0]`, or `make soak`.

Real processes write to two shards and lease from them, while shards, writers and readers are killed (SIGKILL) or
stopped for seconds (SIGSTOP), the policy version moves on and snapshots are taken. Exit status 1, with the reason,
unless

- every acknowledged group is in a reader's commit, in a shard, or counted as evicted, and the ledgers balance,
- every group that is read is the one that was written, bit by bit, within the staleness bound,
- no group is committed twice, none is quarantined, every snapshot restores,
- no reader loses a lease but by standing still for about as long as it lasts,
- memory, file descriptors and shared memory are no larger in the last quarter than in the second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from asyncrl.buffer import BufferStats, ReplayBuffer, ShardAddress, ShardServer, StoreSettings, shared_memory
from asyncrl.errors import ReplayBufferError
from asyncrl.types import Group, Rollout

SPAWN = multiprocessing.get_context("spawn")
NUM_SHARDS, NUM_WRITERS, NUM_READERS = 2, 2, 2
GROUP_SIZE, LEASE_GROUPS = 4, 8
MAX_STALENESS = 2
LEASE_TIMEOUT_S = 5.0
LEASES_RETURN_S = 60.0
"""Shards count only the time in which they run: on a loaded machine a lease of a dead holder takes longer to return."""
VERSION_EVERY_S = 1.0
SNAPSHOT_EVERY_S = 7.0
SETTINGS = StoreSettings(capacity_bytes=48 << 20, segment_bytes=1 << 20, memory_bytes=12 << 20)
ROOM = 1.25
SLACK = (("MB of memory", 20), ("descriptors", 150), ("MB of files", 40))
"""The last quarter may be ROOM times the second plus this: caches of open files fill up, backlogs come and go."""


def make_group(number: int, version: int) -> Group:
    """Everything but the version follows from the number."""
    rng = np.random.default_rng(number)

    def rollout() -> Rollout:
        length = int(rng.integers(16, 700))
        return Rollout(
            response=rng.integers(0, 150_000, length, dtype=np.int32),
            loss_mask=np.ones(length, dtype=np.bool_),
            behaviour_logprobs=-rng.random(length, dtype=np.float32),
            policy_versions=np.full(length, version, dtype=np.int32),
            reward=float(rng.random()),
            finish_reason="stop",
            seconds=0.25,
        )

    prompt = rng.integers(0, 150_000, 32, dtype=np.int32)
    rollouts = tuple(rollout() for _ in range(GROUP_SIZE))
    return Group(rng.bytes(16), number, f"soak:{number}", prompt, rollouts, "soak", 0.0)


def is_as_written(found: Group) -> bool:
    version = int(found.rollouts[0].policy_versions[0])
    expected = make_group(found.number, version)
    return found.group_id == expected.group_id and all(
        np.array_equal(a.response, b.response)
        and np.array_equal(a.behaviour_logprobs, b.behaviour_logprobs)
        and np.array_equal(a.policy_versions, b.policy_versions)
        for a, b in zip(found.rollouts, expected.rollouts, strict=True)
    )


def serve(directory: str, pipe: Any) -> None:
    server = ShardServer(directory, settings=replace(SETTINGS, spill_dir=Path(f"{directory}-spilled")))
    pipe.send(server.start().to_dict())
    pipe.recv()
    server.stop()


def write(addresses: list[dict[str, Any]], first: int, folder: str, version: Any) -> None:
    """Append for ever; numbers are written down after their acknowledgement."""
    with (
        ReplayBuffer([ShardAddress.from_dict(a) for a in addresses]) as buffer,
        open(f"{folder}/acked-{first}", "w") as log,
    ):
        number = first
        while True:
            try:
                buffer.append(make_group(number, version.value))
            except ReplayBufferError as error:  # full for longer than a client waits
                print(f"writer: {error}", file=sys.stderr)
                continue
            log.write(f"{number}\n")
            log.flush()
            number += 1


def read(addresses: list[dict[str, Any]], name: str, folder: str, version: Any) -> None:
    """Lease, check and commit for ever; numbers are written down before and after a commit."""

    def say(kind: str, lines: list[Any]) -> None:
        with open(f"{folder}/{kind}-{name}", "a") as log:
            log.write("".join(f"{line}\n" for line in lines))

    with ReplayBuffer([ShardAddress.from_dict(a) for a in addresses]) as buffer:
        while True:
            try:
                now = version.value
                lease = buffer.lease(
                    LEASE_GROUPS, policy_version=now, max_staleness=MAX_STALENESS, timeout_s=LEASE_TIMEOUT_S
                )
                if lease is None:
                    time.sleep(0.01)
                    continue
                stale = [ref.number for ref in lease.refs if now - ref.min_version > MAX_STALENESS]
                torn = [group.number for group in buffer.read(lease.refs) if not is_as_written(group)]
                say("wrong", [*(f"{n} is stale" for n in stale), *(f"{n} is torn" for n in torn)])
                numbers = [ref.number for ref in lease.refs]
                say("committing", numbers)
                buffer.commit(lease)
                say("committed", numbers)
            except ReplayBufferError as error:  # it was stopped for longer than its lease lasts
                say("late", [f"{time.monotonic()} {str(error).splitlines()[0]}"])


@dataclass
class Member:
    """A process that is started again after every kill."""

    name: str
    start: Callable[[], Any]
    process: Any = None

    def __post_init__(self) -> None:
        self.process = self.start()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.process = self.start()


@dataclass
class Soak:
    """All processes of one soak, and what was seen."""

    folder: Path
    rng: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    snapshots: Counter[str] = field(default_factory=Counter)
    sizes: list[tuple[float, float, float]] = field(default_factory=list)
    addresses: list[ShardAddress] = field(default_factory=list)
    long_stops: list[tuple[str, float]] = field(default_factory=list)  # who, until when

    def start(self) -> None:
        self.version = SPAWN.Value("i", 0)
        self._pipes: dict[int, Any] = {}
        self._next_first = 0
        self.shards = [Member(f"shard {i}", lambda i=i: self._shard(i)) for i in range(NUM_SHARDS)]
        self.writers = [Member(f"writer {i}", self._writer) for i in range(NUM_WRITERS)]
        self.readers = [Member(f"reader {i}", lambda i=i: self._reader(i)) for i in range(NUM_READERS)]

    def _spawn(self, target: Callable[..., None], *args: Any) -> Any:
        process = SPAWN.Process(target=target, args=args, daemon=True)
        process.start()
        return process

    def _shard(self, index: int) -> Any:
        self._pipes[index], theirs = SPAWN.Pipe()
        process = self._spawn(serve, str(self.folder / f"shard-{index}"), theirs)
        address = ShardAddress.from_dict(self._pipes[index].recv())
        assert index >= len(self.addresses) or self.addresses[index] == address, "a shard came back elsewhere"
        self.addresses[index:] = [address, *self.addresses[index + 1 :]]
        return process

    def _writer(self) -> Any:
        self._next_first += 1_000_000
        return self._spawn(
            write, [a.to_dict() for a in self.addresses], self._next_first, str(self.folder), self.version
        )

    def _reader(self, index: int) -> Any:
        return self._spawn(read, [a.to_dict() for a in self.addresses], str(index), str(self.folder), self.version)

    def fault(self) -> None:
        """Kill a process and start it again, or let one stand still for a while."""
        kind = self.rng.choice(["kill", "kill", "stop"])
        member = self.rng.choice([*self.shards, *self.writers, *self.readers])
        self.faults[f"{kind} {member.name.split()[0]}"] += 1
        if kind == "kill":
            member.kill()
            return
        seconds = self.rng.choice([0.3, 1.0, LEASE_TIMEOUT_S + 1.5])
        os.kill(member.process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(member.process.pid, signal.SIGCONT)
        if seconds > LEASE_TIMEOUT_S:
            self.long_stops.append((member.name, time.monotonic()))

    def snapshot(self, buffer: ReplayBuffer) -> None:
        target = self.folder / f"snapshot-{sum(self.snapshots.values())}"
        try:
            num_groups = buffer.snapshot(target, policy_version=self.version.value)
            with ReplayBuffer.local(num_shards=3) as other:
                other.restore(target)
                restored = other.stats().groups
            assert restored == num_groups, f"{target}: {num_groups} groups, {restored} restored"
            self.snapshots["restored"] += 1
        except ReplayBufferError as error:  # a shard was killed in it
            self.snapshots[f"not taken: {str(error).split(':')[0][:40]}"] += 1
        shutil.rmtree(target, ignore_errors=True)

    def measure(self, stats: BufferStats) -> str:
        """Note memory and descriptors of the shards, and bytes in shared memory."""
        processes = [psutil.Process(shard.process.pid) for shard in self.shards]
        rss = sum(p.memory_info().rss for p in processes) / 1e6
        descriptors = sum(p.num_fds() for p in processes)
        held = sum(f.stat().st_size for f in self.folder.glob("shard-*/*") if f.is_file()) / 1e6
        self.sizes.append((rss, descriptors, held))
        return (
            f"appended {stats.appended:>8,}  committed {stats.committed:>8,}  evicted {stats.evicted:>6,}  "
            f"faults {sum(self.faults.values()):>4}  RSS {rss:>5.0f} MB  descriptors {descriptors:>4.0f}  "
            f"files {held:>4.0f} MB"
        )

    def numbers(self, kind: str) -> list[int]:
        return [int(line) for file in self.folder.glob(f"{kind}-*") for line in file.read_text().split()]

    def run(self, seconds: float) -> None:
        began = time.monotonic()
        next_at = {"version": VERSION_EVERY_S, "snapshot": SNAPSHOT_EVERY_S, "report": 0.0}
        with ReplayBuffer(self.addresses) as buffer:
            while (elapsed := time.monotonic() - began) < seconds:
                if elapsed >= next_at["version"]:
                    buffer.advance(self.version.value + 1)  # shards refuse versions that they have not heard of
                    self.version.value += 1
                    next_at["version"] = elapsed + VERSION_EVERY_S
                if elapsed >= next_at["snapshot"]:
                    self.snapshot(buffer)
                    next_at["snapshot"] = elapsed + SNAPSHOT_EVERY_S
                if elapsed >= next_at["report"]:
                    print(f"{elapsed:>6.0f} s  {self.measure(buffer.stats())}", flush=True)
                    next_at["report"] = elapsed + max(1.0, min(10.0, seconds / 24))
                self.fault()
                time.sleep(self.rng.uniform(0.1, 1.0))

    def end(self) -> list[str]:
        """Let everything come to rest, and say what is wrong."""
        for member in [*self.writers, *self.readers]:
            member.process.kill()
            member.process.join()
        with ReplayBuffer(self.addresses) as buffer:
            deadline = time.monotonic() + LEASES_RETURN_S
            while (stats := buffer.stats()).leased_groups and time.monotonic() < deadline:
                time.sleep(0.5)
            rest = buffer.lease(stats.groups, policy_version=0, max_staleness=0) if stats.groups else None
            left = {ref.number for ref in rest.refs} if rest else set()
            problems = [
                f"group {g.number} is torn" for g in buffer.read(rest.refs if rest else []) if not is_as_written(g)
            ]
        for index, shard in enumerate(self.shards):
            self._pipes[index].send(None)
            shard.process.join()
        acknowledged, committed = set(self.numbers("acked")), self.numbers("committed")
        unseen = acknowledged - set(self.numbers("committing")) - left
        twice = [number for number, count in Counter(committed).items() if count > 1]
        problems += [line for file in self.folder.glob("wrong-*") for line in file.read_text().splitlines()]
        checks = {
            f"the ledger does not balance: {stats}": stats.is_balanced and not stats.leased_groups,
            f"{len(unseen)} acknowledged groups are nowhere, {stats.evicted} were evicted": len(unseen)
            <= stats.evicted,
            f"committed twice: {twice[:10]}": not twice,
            f"{stats.quarantined} groups were quarantined": not stats.quarantined,
            "no snapshot was taken and restored": self.snapshots["restored"] > 0,
            "nothing was committed": bool(committed),
        }
        problems += [problem for problem, good in checks.items() if not good]
        return problems + self.lost_leases() + self.growth()

    def lost_leases(self) -> list[str]:
        """Readers that were late without having been stopped: a shard, or another lease, came in their way."""
        problems = []
        for file in self.folder.glob("late-*"):
            name = f"reader {file.name.removeprefix('late-')}"
            ends = [end for stopped, end in self.long_stops if stopped == name]
            for line in file.read_text().splitlines():
                when, _, text = line.partition(" ")
                is_lost = "handed out again" in text or "is gone" in text
                if is_lost and not any(end - 1 < float(when) < end + 30 for end in ends):
                    problems.append(f"{name} lost a lease without having been stopped: {text}")
        return problems

    def growth(self) -> list[str]:
        quarter = len(self.sizes) // 4
        if quarter < 2:
            return []
        problems = []
        for i, (name, slack) in enumerate(SLACK):
            second = median(size[i] for size in self.sizes[quarter : 2 * quarter])
            last = median(size[i] for size in self.sizes[-quarter:])
            print(f"{name:>14}: {second:,.0f} in the second quarter, {last:,.0f} in the last")
            if last > ROOM * second + slack:
                problems.append(f"{name} grew from {second:,.0f} to {last:,.0f}")
        return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-soak-", dir=shared_memory()))
    soak = Soak(folder, random.Random(args.seed))
    try:
        soak.start()
        soak.run(60 * args.minutes)
        problems = soak.end()
    finally:
        for child in multiprocessing.active_children():
            child.kill()
        late = Counter(
            line.partition(" ")[2][:60] for file in folder.glob("late-*") for line in file.read_text().splitlines()
        )
        shutil.rmtree(folder, ignore_errors=True)
    for title, counts in (("faults", soak.faults), ("snapshots", soak.snapshots), ("late readers", late)):
        print(f"{title}: {', '.join(f'{name} {count}' for name, count in sorted(counts.items())) or 'none'}")
    for problem in problems:
        print(f"WRONG: {problem}")
    print("nothing lost, torn, stale or doubled" if not problems else f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
