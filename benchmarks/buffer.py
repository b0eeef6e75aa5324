"""Throughput of the replay buffer: `python benchmarks/buffer.py [--groups 2000] [--writers 2]`.

Workload: groups of 8 trajectories, prompt 256 tokens, response log-uniform 64..2048 (about 65 kB per group). Shards run
in processes of their own. `memcpy` copies the same bytes in this process: the bound that no buffer beats.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from asyncrl.buffer import ReplayBuffer, ShardAddress, ShardServer
from asyncrl.buffer.schema import decode_group, encode_groups
from asyncrl.types import Group, Rollout

GROUP_SIZE, PROMPT_TOKENS, MIN_TOKENS, MAX_TOKENS = 8, 256, 64, 2048
BATCH_GROUPS = 8
APPEND_GROUPS = 16


def make_rollout(rng: np.random.Generator) -> Rollout:
    length = int(np.exp(rng.uniform(np.log(MIN_TOKENS), np.log(MAX_TOKENS))))
    return Rollout(
        response=rng.integers(0, 150_000, length, dtype=np.int32),
        loss_mask=rng.random(length) < 0.9,
        behaviour_logprobs=rng.standard_normal(length, dtype=np.float32),
        policy_versions=np.zeros(length, dtype=np.int32),
        reward=float(rng.random()),
        finish_reason="stop",
        seconds=1.0,
    )


def make_group(number: int, rng: np.random.Generator) -> Group:
    return Group(
        group_id=rng.bytes(16),
        number=number,
        prompt_id=f"bench:{number}",
        prompt_tokens=rng.integers(0, 150_000, PROMPT_TOKENS, dtype=np.int32),
        rollouts=tuple(make_rollout(rng) for _ in range(GROUP_SIZE)),
        generator="bench",
        created_at=time.time(),
    )


def serve(pipe: Any) -> None:
    server = ShardServer()
    pipe.send(server.start().to_dict())
    pipe.recv()
    server.stop()


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(name: str, elapsed: float, num_groups: int, num_bytes: int) -> None:
    print(f"{name:<22}{num_groups * GROUP_SIZE / elapsed:>16,.0f}{num_bytes / elapsed / 1e6:>12,.0f}")


def measure(addresses: list[ShardAddress], *, groups: list[Group], num_writers: int) -> None:
    payloads = [encoded.message.to_pybytes() for encoded in encode_groups(groups)]
    chunks = [groups[i : i + APPEND_GROUPS] for i in range(0, len(groups), APPEND_GROUPS)]
    num_groups, num_bytes = len(groups), sum(map(len, payloads))
    print(f"{'':<22}{'trajectories/s':>16}{'MB/s':>12}")
    report("memcpy", seconds(lambda: [bytearray(p) for p in payloads]), num_groups, num_bytes)
    report("encode", seconds(lambda: [encode_groups(chunk) for chunk in chunks]), num_groups, num_bytes)
    report("decode", seconds(lambda: [decode_group(p) for p in payloads]), num_groups, num_bytes)

    with ThreadPoolExecutor(num_writers) as pool, ReplayBuffer(addresses) as buffer:
        report(
            f"append ({num_writers} threads)",
            seconds(lambda: list(pool.map(buffer.append_many, chunks))),
            num_groups,
            num_bytes,
        )
        lease = buffer.lease(num_groups, policy_version=0, max_staleness=0)
        assert lease is not None
        batches = [lease.refs[i : i + BATCH_GROUPS] for i in range(0, num_groups, BATCH_GROUPS)]
        report(
            f"read ({BATCH_GROUPS} groups)", seconds(lambda: [buffer.read(b) for b in batches]), num_groups, num_bytes
        )
        buffer.commit(lease)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--writers", type=int, default=2, help="threads that append through one client")
    parser.add_argument("--shards", type=int, default=2)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(args.shards):
        pipe, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(theirs,), daemon=True))
        processes[-1].start()
        pipes.append(pipe)
    rng = np.random.default_rng(0)
    groups = [make_group(number, rng) for number in range(args.groups)]
    measure([ShardAddress.from_dict(pipe.recv()) for pipe in pipes], groups=groups, num_writers=args.writers)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()


if __name__ == "__main__":
    main()
