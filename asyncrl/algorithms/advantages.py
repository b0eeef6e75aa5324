"""What a rollout is worth. Rewards of whole groups in, one advantage per rollout out."""
# ruff: noqa: F722

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor


def grpo(rewards: Float[Tensor, " r"], groups: Int[Tensor, " r"], *, eps: float = 1e-6) -> Float[Tensor, " r"]:
    """Group-relative advantages, A_i = (R_i - mean_g) / (std_g + eps) with the sample std (ddof 1).

    Rollouts whose reward is NaN (scoring failed) are not counted and get 0. So does every rollout of a group with equal
    rewards or with fewer than two scored rollouts: there is nothing to compare.

    Args:
        rewards: one per rollout.
        groups: index of the rollout's group, 0 <= index < r.

    Source: arXiv:2402.03300, section 4.1.2.
    """
    scored = ~rewards.isnan()
    values, index = rewards[scored], groups[scored]

    def per_group(x: Tensor, reduce: str, start: float) -> Tensor:
        return x.new_full(rewards.shape, start).scatter_reduce(0, index, x, reduce)[index]

    count = per_group(values.new_ones(values.shape), "sum", 0.0)
    centred = values - per_group(values, "sum", 0.0) / count
    std = (per_group(centred.square(), "sum", 0.0) / (count - 1).clamp(min=1)).sqrt()
    spread = per_group(values, "amax", -float("inf")) > per_group(values, "amin", float("inf"))
    advantages = rewards.new_zeros(rewards.shape)
    advantages[scored] = (centred / (std + eps)) * spread
    return advantages


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"grpo": grpo}
"""[algorithm] name -> its advantage, (rewards, groups) -> advantages."""
