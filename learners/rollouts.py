"""Groups from the buffer -> rows to train on, with their per-token columns. numpy and the advantage function only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.learners.packing import Row
from asyncrl.types import Group, Rollout


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One rollout to train on. t is its number of trained tokens.

    Attributes:
        behaviour_logprobs: float32 [t].
        advantages: float32 [t].
        fresh: bool [t], sampled by the policy that is about to be trained (staleness 0).
    """

    row: Row
    behaviour_logprobs: np.ndarray
    advantages: np.ndarray
    fresh: np.ndarray


def rows_of(groups: Sequence[Group], *, advantage: Callable[..., torch.Tensor], policy_version: int) -> list[TrainRow]:
    """Rows of whole groups. Rollouts that failed to score or sampled no token are left out.

    Args:
        advantage: (rewards [r], groups [r]) -> advantages [r], over all rollouts of these groups.
    """
    rollouts = [(i, rollout) for i, group in enumerate(groups) for rollout in group.rollouts]
    rewards = torch.tensor([rollout.reward for _, rollout in rollouts], dtype=torch.float64)
    advantages = advantage(rewards, torch.tensor([i for i, _ in rollouts])).tolist()
    return [
        _row(groups[i].prompt_tokens, rollout, advantage=value, policy_version=policy_version)
        for (i, rollout), value in zip(rollouts, advantages, strict=True)
        if np.isfinite(rollout.reward) and rollout.loss_mask.any()
    ]


def _row(prompt: np.ndarray, rollout: Rollout, *, advantage: float, policy_version: int) -> TrainRow:
    mask = rollout.loss_mask
    trained = np.flatnonzero(mask) + prompt.size
    return TrainRow(
        row=Row(tokens=np.concatenate([prompt, rollout.response]), trained=trained),
        behaviour_logprobs=rollout.behaviour_logprobs[mask],
        advantages=np.full(trained.size, advantage, np.float32),
        fresh=rollout.policy_versions[mask] == policy_version,
    )


SUMS = (
    "rollouts", "scored", "reward", "reward_squared", "response_tokens", "truncated", "staleness", "groups",
    "even_groups",
)  # fmt: skip


def max_staleness(groups: Sequence[Group], *, policy_version: int) -> int:
    """Of the sampled rollouts; those without a sampled token have no version and are not trained on."""
    sampled = (rollout for group in groups for rollout in group.rollouts if rollout.loss_mask.any())
    return max((policy_version - rollout.min_version for rollout in sampled), default=0)


def rollout_sums(groups: Sequence[Group], *, policy_version: int) -> list[float]:
    """Sums over these groups in the order of SUMS; they add up over ranks."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [rollout for rollout in rollouts if np.isfinite(rollout.reward)]
    rewards = np.array([rollout.reward for rollout in scored], np.float64)
    spreads = [np.ptp([r.reward for r in group.rollouts if np.isfinite(r.reward)] or [0.0]) for group in groups]
    return [
        len(rollouts),
        len(scored),
        rewards.sum(),
        np.square(rewards).sum(),
        sum(rollout.response.size for rollout in scored),
        sum(rollout.finish_reason == "length" for rollout in scored),
        sum(policy_version - rollout.min_version for rollout in scored if rollout.loss_mask.any()),
        len(groups),
        sum(spread == 0.0 for spread in spreads),
    ]


def summarise(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the totals of `rollout_sums` over all ranks."""
    total = dict(zip(SUMS, sums, strict=True))
    n = max(total["scored"], 1.0)
    mean = total["reward"] / n
    return {
        "reward/mean": mean,
        "reward/std": max(total["reward_squared"] / n - mean**2, 0.0) ** 0.5,
        "response_tokens/mean": total["response_tokens"] / n,
        "rollouts/truncated_fraction": total["truncated"] / n,
        "rollouts/failed": total["rollouts"] - total["scored"],
        "groups/even_fraction": total["even_groups"] / max(total["groups"], 1.0),
        "staleness/mean": total["staleness"] / n,
    }
