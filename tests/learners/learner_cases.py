"""What several learner tests build: configurations, groups, and a process group of one."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from asyncrl.config import RLConfig, SFTConfig
from asyncrl.learners.distributed import init_distributed, leave_distributed
from asyncrl.types import Group, Rollout

FIRST_CHARACTER = 3
NUM_CHARACTERS = 10


@contextlib.contextmanager
def process_group() -> Iterator[torch.device]:
    """This process as the only rank. Determinism settings are put back afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield init_distributed(rank=0, world_size=1, init_method=f"file://{folder}/store", threads=1)
        finally:
            leave_distributed()
            torch.use_deterministic_algorithms(False)


def rl_config(
    model: Path, *, groups: int = 4, ranks: int = 1, temperature: float = 1.0, learners: dict | None = None, **algorithm
) -> RLConfig:
    return RLConfig.model_validate(
        {
            "job": "rl",
            "name": "test",
            "steps": 10,
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "prompts.jsonl"},
            "reward": {"function": "asyncrl.rewards:exact_match"},
            "algorithm": {"name": "grpo", "groups_per_step": groups, "group_size": 3, **algorithm},
            "generators": {"temperature": temperature},
            "learners": {"num_ranks": ranks, "lr": 1e-4, **(learners or {})},
        }
    )


def sft_config(task: Path, *, ranks: int = 1, steps: int = 30, **learners) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "job": "sft",
            "name": "test",
            "steps": steps,
            "batch_size": 32,
            "model": {"path": str(task / "model"), "dtype": "float32"},
            "data": {
                "train": str(task / "demonstrations.jsonl"),
                "eval": str(task / "demonstrations_eval.jsonl"),
            },
            "learners": {"num_ranks": ranks, "lr": 2e-3, "warmup_steps": 5, **learners},
        }
    )


def make_rollout(rng: np.random.Generator, *, reward: float, versions: tuple[int, int] = (0, 1)) -> Rollout:
    """Random digits of random length, one token in the middle not sampled by the policy (a tool's)."""
    length = int(rng.integers(2, 9))
    mask = np.ones(length, bool)
    mask[length // 2] = length < 4
    sampled = np.where(np.arange(length) < length // 2, versions[0], versions[1])
    return Rollout(
        response=rng.integers(FIRST_CHARACTER, FIRST_CHARACTER + NUM_CHARACTERS, length).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, rng.normal(-2.8, 0.3, length), 0.0).astype(np.float32),
        policy_versions=np.where(mask, sampled, -1).astype(np.int32),
        reward=reward,
        finish_reason="stop",
        seconds=0.1,
    )


def make_groups(num: int, *, seed: int = 0, versions: tuple[int, int] = (0, 1)) -> list[Group]:
    """Groups of three; the second group holds a rollout that failed to score."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(num):
        rewards = [float(rng.random()) for _ in range(3)]
        if number == 1:
            rewards[0] = float("nan")
        prompt = rng.integers(FIRST_CHARACTER, FIRST_CHARACTER + NUM_CHARACTERS, int(rng.integers(3, 7)))
        groups.append(
            Group(
                group_id=bytes([number]) * 16,
                number=number,
                prompt_id=f"test:{number}",
                prompt_tokens=prompt.astype(np.int32),
                rollouts=tuple(make_rollout(rng, reward=reward, versions=versions) for reward in rewards),
                generator="test",
                created_at=0.0,
            )
        )
    return groups
