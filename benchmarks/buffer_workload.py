"""What the buffers in benchmarks/buffer.py are given, and what a reader makes of it.

Groups of 8 trajectories, prompt 256 tokens, response log-uniform 64..2048, so about 8.2 kB of raw arrays each.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.types import Group, Rollout

GROUP_SIZE, PROMPT_TOKENS, MIN_TOKENS, MAX_TOKENS = 8, 256, 64, 2048
SAMPLE_GROUPS = 8  # 64 trajectories
POOL_GROUPS = 128
TOKEN_BYTES = 4 + 4 + 4 + 1  # id, logprob, version, mask

Packed = dict[str, np.ndarray]
"""The microbatch that every reader makes: tokens, logprobs, versions, mask aligned over prompts and responses [T],
starts [N + 1] of the trajectories, rewards [N]."""


class Server:
    """One buffer. `config` is what its clients connect with; `consumes`: a sample takes groups out."""

    consumes = True

    def __init__(self, num_groups: int) -> None:
        self.config: Any = None

    def memory(self) -> int:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError


class Client:
    """What a writer or a reader does. put may hold groups back until flush."""

    def put(self, group: Group) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        pass

    def sample(self) -> Packed | None:
        """SAMPLE_GROUPS groups, packed, or None when there are none."""
        raise NotImplementedError

    def close(self) -> None:
        pass


def resident_bytes(pid: int) -> int:
    """Of a process, pages that it shares counted in part."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def make_pool(seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [_make_group(number, rng) for number in range(POOL_GROUPS)]


def endless(pool: list[Group]) -> Iterator[Group]:
    """The pool again and again, each time under new ids."""
    number = 0
    while True:
        for group in pool:
            yield dataclasses.replace(group, group_id=os.urandom(16), number=number)
            number += 1


def raw_bytes(group: Group) -> int:
    tokens = sum(rollout.response.size for rollout in group.rollouts)
    return tokens * TOKEN_BYTES + len(group.rollouts) * (4 * group.prompt_tokens.size + 4 + 16)


def pack(prompts: Sequence[np.ndarray], rollouts: Sequence[Rollout]) -> Packed:
    """From arrays of single rollouts."""
    parts = {
        "tokens": [part for pair in zip(prompts, (r.response for r in rollouts), strict=True) for part in pair],
        "logprobs": _after(prompts, [r.behaviour_logprobs for r in rollouts]),
        "versions": _after(prompts, [r.policy_versions for r in rollouts]),
        "mask": _after(prompts, [r.loss_mask for r in rollouts]),
    }
    sizes = [len(prompt) + len(r.response) for prompt, r in zip(prompts, rollouts, strict=True)]
    rewards = np.array([r.reward for r in rollouts], np.float32)
    packed = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    return {**packed, "starts": np.cumsum([0, *sizes]), "rewards": rewards}


def pack_groups(groups: Sequence[Group]) -> Packed:
    rows = [(group.prompt_tokens, rollout) for group in groups for rollout in group.rollouts]
    return pack([prompt for prompt, _ in rows], [rollout for _, rollout in rows])


def _after(prompts: Sequence[np.ndarray], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    zeros = np.zeros(max(len(prompt) for prompt in prompts), arrays[0].dtype)
    return [part for prompt, array in zip(prompts, arrays, strict=True) for part in (zeros[: len(prompt)], array)]


def _make_group(number: int, rng: np.random.Generator) -> Group:
    rollouts = tuple(_make_rollout(number, rng) for _ in range(GROUP_SIZE))
    prompt = rng.integers(0, 150_000, PROMPT_TOKENS, dtype=np.int32)
    return Group(rng.bytes(16), number, f"bench:{number}", prompt, rollouts, "bench", 0.0)


def _make_rollout(version: int, rng: np.random.Generator) -> Rollout:
    length = int(np.exp(rng.uniform(np.log(MIN_TOKENS), np.log(MAX_TOKENS))))
    return Rollout(
        response=rng.integers(0, 150_000, length, dtype=np.int32),
        loss_mask=rng.random(length) < 0.9,
        behaviour_logprobs=rng.standard_normal(length, dtype=np.float32),
        policy_versions=np.full(length, version, np.int32),
        reward=float(rng.random()),
        finish_reason="stop",
        seconds=1.0,
    )
