"""The replay buffer beside others on one machine: `python benchmarks/buffer.py [--quick] [--tables peers,flat,...]`.

Tables: peers (write, sample, both at once, memory), flat (cost against what is stored), durability, recovery, snapshot.
Writers, reader and shards are processes of their own; what is compared runs in turn, and numbers are medians.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from buffer_peers import APPEND_GROUPS, ASYNCRL, LEASE_GROUPS, PEERS, AsyncRLServer, Peer, pack_columns
from buffer_session import NUM_WRITERS, session
from buffer_workload import GROUP_SIZE, SAMPLE_GROUPS, endless, make_pool, raw_bytes

from asyncrl.buffer import ReplayBuffer, Sampling, ShardAddress

INSTALL = {
    "torchrl LazyMemmap": "uv pip install torchrl tensordict",
    "TransferQueue": "no adapter yet; uv pip install transferqueue tensordict omegaconf",
    "Reverb": "no adapter: dm-reverb 0.14 needs TensorFlow 2.14 and numpy 1, asyncrl numpy 2",
}
REPLAY = Sampling("uniform", max_uses=1 << 30)
ANY_VERSION = {"policy_version": 1000, "max_staleness": 1000}
Row = dict[str, float]


# Tables


def compare(peer: Peer, *, num: int, seconds: float) -> Row:
    raw = float(np.mean([raw_bytes(group) for group in make_pool()])) / GROUP_SIZE
    with session(peer, num // GROUP_SIZE) as s:
        before = s.server.memory()
        row = {"fill": s.fill(num)}
        row["memory"] = (s.server.memory() - before) / (num // NUM_WRITERS * NUM_WRITERS) / raw
        row["sample"], latencies = s.sample(seconds, int(0.8 * num) if s.server.consumes else 1 << 60)
        row["p50"] = percentile(latencies, 50)
        row["write"] = s.write(seconds)
        row["both_w"], row["both_s"], latencies = s.both(seconds)
        row["both_p50"], row["both_p99"] = percentile(latencies, 50), percentile(latencies, 99)
    return row


def table_of_peers(args: argparse.Namespace) -> None:
    here = [peer for peer in PEERS if peer is ASYNCRL or (peer.is_here and re.search(args.peers, peer.name))]
    rows: dict[str, list[Row]] = {peer.name: [] for peer in here}
    for _ in range(args.repeats):
        for peer in here:
            rows[peer.name].append(compare(peer, num=args.trajectories, seconds=args.seconds))
    pool = make_pool()
    memcpy = memcpy_rate(pool)
    print(f"\n{args.trajectories:,} stored; trajectories/s; ms per 64 trajectories; memory: held / raw bytes")
    print(f"memcpy of the same arrays: {memcpy:,.0f} trajectories/s")
    names = ("fill", "write", "sample", "p50", "both_w", "both_s", "both_p50", "both_p99", "memory")
    header = ("fill", "write", "sample", "p50 ms", "both: write", "sample", "p50 ms", "p99 ms", "memory")
    print(f"{'':<22}" + "".join(f"{name:>13}" for name in header))
    for name, found in rows.items():
        print(f"{name:<22}" + "".join(f"{show(median(found, column)):>13}" for column in names))
    print("\nasyncrl / other, median of the ratios within one round")
    for name, found in rows.items():
        if name != ASYNCRL.name:
            ratios = (
                statistics.median(a[c] / b[c] for a, b in zip(rows[ASYNCRL.name], found, strict=True))
                for c in ("write", "sample", "both_w", "both_s")
            )
            labels = ("write", "sample", "both: write", "sample")
            print(f"{name:<22}" + "".join(f"  {n} {r:.2f}" for n, r in zip(labels, ratios, strict=True)))
    own = rows[ASYNCRL.name]
    to_memcpy = [median(own, name) / memcpy for name in ("write", "sample")]
    print(f"{'memcpy':<22}  write {to_memcpy[0]:.3f}  sample {to_memcpy[1]:.3f}")
    for name, how in INSTALL.items():
        if name not in rows:
            print(f"not compared here: {name} ({how})")


def table_of_sizes(args: argparse.Namespace) -> None:
    sizes = [1024, 10_240] if args.quick else [1024, 10_240, 102_400]
    costs: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    servers = {size: AsyncRLServer(0) for size in sizes}
    buffers = {size: connect(server) for size, server in servers.items()}
    streams = {size: endless(make_pool()) for size in sizes}
    for size in sizes:
        for _ in range(0, size, GROUP_SIZE * LEASE_GROUPS):
            buffers[size].append_many(list(islice(streams[size], LEASE_GROUPS)))
    for _ in range(args.repeats * 4):
        for size in sizes:
            costs[size].append(turn_over(buffers[size], streams[size]))
    print("\nus per trajectory when a group is added and one is taken, against trajectories stored")
    print(f"{'stored':<12}{'append':>12}{'sample':>12}{'ratio to 1k (append, sample)':>32}")
    for size in sizes:
        append, sample = (statistics.median(cost[i] for cost in costs[size]) * 1e6 for i in (0, 1))
        ratios = [
            statistics.median(a[i] / b[i] for a, b in zip(costs[size], costs[sizes[0]], strict=True)) for i in (0, 1)
        ]
        print(f"{size:<12,}{append:>12.1f}{sample:>12.1f}{ratios[0]:>25.2f}{ratios[1]:>7.2f}")
    for size in sizes:
        buffers[size].close()
        servers[size].stop()


def turn_over(buffer: ReplayBuffer, stream: Iterator[Any], rounds: int = 4) -> tuple[float, float]:
    """Seconds per trajectory to append, and to lease, read, pack and commit."""
    append = sample = 0.0
    for _ in range(rounds):
        groups = list(islice(stream, LEASE_GROUPS))
        start = time.perf_counter()
        for i in range(0, LEASE_GROUPS, APPEND_GROUPS):
            buffer.append_many(groups[i : i + APPEND_GROUPS])
        middle = time.perf_counter()
        lease = buffer.lease(LEASE_GROUPS, **ANY_VERSION)
        assert lease is not None
        for i in range(0, LEASE_GROUPS, SAMPLE_GROUPS):
            pack_columns(buffer.read_columns(lease.refs[i : i + SAMPLE_GROUPS]))
        buffer.commit(lease)
        append, sample = append + middle - start, sample + time.perf_counter() - middle
    num = rounds * LEASE_GROUPS * GROUP_SIZE
    return append / num, sample / num


def table_of_durabilities(args: argparse.Namespace) -> None:
    found: dict[str, list[float]] = {"memory": [], "disk": [], "fsync": []}
    for _ in range(args.repeats):
        for durability, rates in found.items():
            root = "" if durability == "memory" else str(args.directory)
            with session(ASYNCRL, 0, durability=durability, root=root) as s:
                s.fill(1024)
                rates.append(s.write(args.seconds))
    print(f"\nwrite, trajectories/s, by durability (disk: {args.directory})")
    for durability, rates in found.items():
        ratio = statistics.median(a / b for a, b in zip(rates, found["memory"], strict=True))
        print(f"{durability:<12}{statistics.median(rates):>12,.0f}{ratio:>8.2f} of memory")


def table_of_recovery(args: argparse.Namespace) -> None:
    num = 10_240 if args.quick else 102_400
    seconds = []
    for _ in range(1 if args.quick else 3):
        with session(ASYNCRL, 0) as s:
            s.fill(num)
            s.server.kill()
            start = time.perf_counter()
            s.server.start()
            with connect(s.server) as buffer:
                stats = buffer.stats()
            seconds.append(time.perf_counter() - start)
            assert stats.rows == num, stats
    print(f"\nkill -9 of a shard that holds {num:,} trajectories: answers again after "
          f"{statistics.median(seconds):.2f} s, start of the process included")  # fmt: skip


def table_of_snapshots(args: argparse.Namespace) -> None:
    num_bytes = (1 << 27) if args.quick else (1 << 30)
    server = AsyncRLServer(0)
    with connect(server) as buffer, TemporaryDirectory(dir=args.directory) as directory:
        stream = endless(make_pool())
        while buffer.stats().bytes < num_bytes:
            buffer.append_many(list(islice(stream, 256)))
        slow, seconds = [], []
        for _ in range(args.repeats):
            before = replay(buffer, for_seconds(1.0))
            start = time.monotonic()
            thread = threading.Thread(target=snapshot, args=(server, directory))
            thread.start()
            during = replay(buffer, thread.is_alive)
            seconds.append(time.monotonic() - start)
            after = replay(buffer, for_seconds(1.0))
            slow.append(1 - during / ((before + after) / 2))
    server.stop()
    print(f"\nsnapshot of {num_bytes / 1e9:.1f} GB: {statistics.median(seconds):.1f} s; sampling is slower by "
          f"{statistics.median(slow):.0%} meanwhile ({', '.join(f'{x:.0%}' for x in slow)})")  # fmt: skip


def snapshot(server: AsyncRLServer, directory: str) -> None:
    with connect(server) as buffer:
        buffer.snapshot(directory, policy_version=0)


def for_seconds(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() < end


def replay(buffer: ReplayBuffer, go_on: Callable[[], bool]) -> float:
    """Trajectories per second, sampled again and again."""
    num, start = 0, time.monotonic()
    while go_on():
        lease = buffer.lease(SAMPLE_GROUPS, sampling=REPLAY, **ANY_VERSION)
        assert lease is not None
        pack_columns(buffer.read_columns(lease.refs))
        buffer.commit(lease)
        num += SAMPLE_GROUPS * GROUP_SIZE
    return num / (time.monotonic() - start)


# Small things


def connect(server: AsyncRLServer) -> ReplayBuffer:
    return ReplayBuffer([ShardAddress.from_dict(address) for address in server.config])


def memcpy_rate(pool: list[Any]) -> float:
    arrays = [np.zeros(raw_bytes(group), np.uint8) for group in pool]
    target = np.empty(max(a.size for a in arrays), np.uint8)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        for array in arrays:
            target[: array.size] = array
        times.append(time.perf_counter() - start)
    return len(pool) * GROUP_SIZE / statistics.median(times)


def percentile(latencies: list[float], q: float) -> float:
    return float(np.percentile(latencies, q)) * 1e3 if latencies else float("nan")


def median(rows: list[Row], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def show(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


TABLES = {
    "peers": table_of_peers,
    "flat": table_of_sizes,
    "durability": table_of_durabilities,
    "recovery": table_of_recovery,
    "snapshot": table_of_snapshots,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tables", default=",".join(TABLES), help=f"of {', '.join(TABLES)}")
    parser.add_argument("--peers", default="", help="asyncrl and those whose name matches this")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=20_480, help="stored at first")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--directory", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")), help="on disk")
    parser.add_argument("--quick", action="store_true", help="less of everything, in under a minute, without Ray")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.trajectories, args.seconds = 1, 5120, 0.5
        global PEERS
        PEERS = tuple(peer for peer in PEERS if peer.needs != "ray")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}")
    for name in args.tables.split(","):
        TABLES[name](args)


if __name__ == "__main__":
    main()
