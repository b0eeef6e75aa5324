"""Anchors, surrogates, weights and aggregates, and the loss they make together.

    r = pi/pi_anchor, k = pi_anchor/mu:   L = -aggregate_t( w(k_t) * surrogate(r_t, A_t) )

pi is the policy being trained, mu the behaviour policy that sampled the tokens. Add a variant by writing its function
and its row in the table; nothing else knows the names.
"""
# ruff: noqa: F722

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from asyncrl.config import AlgorithmConfig

LOG_RATIO_LIMIT = 20.0


class StepCounts(NamedTuple):
    """What one optimizer step trains on, over all ranks and microbatches: the denominators of the aggregates.

    Rows without a trained token are not counted.
    """

    tokens: int
    sequences: int


class Surrogate(NamedTuple):
    """Per-token surrogate (to be maximised) and where its clip was the active term, by side."""

    values: Float[Tensor, " t"]
    clipped_low: Bool[Tensor, " t"]
    clipped_high: Bool[Tensor, " t"]


class Weight(NamedTuple):
    """Per-token weight, detached, and where its bound was hit."""

    values: Float[Tensor, " t"]
    limited: Bool[Tensor, " t"]


class PolicyLoss(NamedTuple):
    """One microbatch's share of the loss, and the per-token quantities the diagnostics are made from."""

    loss: Float[Tensor, ""]
    ratio: Float[Tensor, " t"]
    surrogate: Surrogate
    weight: Weight


def log_ratio(numerator: Float[Tensor, " t"], denominator: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    """log(p/q) clamped to +-20: beyond that the gradient is 0 and exp() stays finite."""
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def anchor_recompute(*, recomputed: Float[Tensor, " t"], behaviour: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    """The learner's own policy at the start of the batch (decoupled PPO, arXiv:2505.24298 eq. 5)."""
    return recomputed


def anchor_behaviour(*, recomputed: Float[Tensor, " t"], behaviour: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    """The recorded behaviour policy: the plain ratio pi/mu of PPO (arXiv:1707.06347)."""
    return behaviour


def clip(ratio: Float[Tensor, " t"], advantages: Float[Tensor, " t"], *, low: float, high: float) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A).

    Source: arXiv:1707.06347 eq. 7; separate bounds from arXiv:2503.14476 eq. 10.
    """
    values = (ratio * advantages).minimum(ratio.clamp(1 - low, 1 + high) * advantages)
    r = ratio.detach()
    return Surrogate(values, (r < 1 - low) & (advantages < 0), (r > 1 + high) & (advantages > 0))


def weight_none(ratio: Float[Tensor, " t"]) -> Weight:
    """w = 1."""
    return Weight(torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool))


def weight_truncate(ratio: Float[Tensor, " t"], *, maximum: float) -> Weight:
    """Truncated importance sampling, w = min(k, maximum) with k = pi_anchor/mu.

    A truncated token stays in the aggregate's denominator.
    """
    return Weight(ratio.clamp(max=maximum), ratio > maximum)


def token_mean(losses: Float[Tensor, " t"], row_lengths: Int[Tensor, " t"], *, counts: StepCounts) -> Float[Tensor, ""]:
    """Sum over this microbatch's tokens / tokens of the whole step (arXiv:2503.14476 eq. 8)."""
    return losses.sum() / max(counts.tokens, 1)


def sequence_mean(
    losses: Float[Tensor, " t"], row_lengths: Int[Tensor, " t"], *, counts: StepCounts
) -> Float[Tensor, ""]:
    """Sum of the rows' token means / rows of the whole step (arXiv:2402.03300 eq. 3).

    Args:
        row_lengths: trained tokens of the row that the token belongs to.
    """
    return (losses / row_lengths).sum() / max(counts.sequences, 1)


ANCHORS: dict[str, Callable[..., Tensor]] = {"recompute": anchor_recompute, "behaviour": anchor_behaviour}
AGGREGATES: dict[str, Callable[..., Tensor]] = {"token_mean": token_mean, "sequence_mean": sequence_mean}


@dataclass(frozen=True, slots=True)
class Objective:
    """Four of the five choices, bound to their settings (advantages are made from whole groups, before packing)."""

    anchor: Callable[..., Tensor]
    surrogate: Callable[[Tensor, Tensor], Surrogate]
    weight: Callable[[Tensor], Weight]
    aggregate: Callable[..., Tensor]

    @classmethod
    def from_config(cls, config: AlgorithmConfig) -> Objective:
        """The objective of an [algorithm] section."""
        weights = {"none": weight_none, "truncate": partial(weight_truncate, maximum=config.weight_max)}
        return cls(
            anchor=ANCHORS[config.anchor],
            surrogate=partial(clip, low=config.clip_low, high=config.clip_high),
            weight=weights[config.weight],
            aggregate=AGGREGATES[config.aggregate],
        )

    def loss(
        self,
        logprobs: Float[Tensor, " t"],
        *,
        recomputed: Float[Tensor, " t"],
        behaviour: Float[Tensor, " t"],
        advantages: Float[Tensor, " t"],
        row_lengths: Int[Tensor, " t"],
        counts: StepCounts,
    ) -> PolicyLoss:
        """One microbatch's share of the step's loss: summed over microbatches and ranks it is the loss of the step.

        Args:
            logprobs: of the policy being trained; the only input with a gradient.
            recomputed: the learner's logprobs at the start of the batch; the `behaviour` anchor ignores it.
            behaviour: logprobs under the distribution that was sampled from.
        """
        anchor = self.anchor(recomputed=recomputed, behaviour=behaviour).detach()
        ratio = log_ratio(logprobs, anchor).exp()
        surrogate = self.surrogate(ratio, advantages)
        weight = self.weight(log_ratio(anchor, behaviour).exp())
        loss = self.aggregate(-weight.values * surrogate.values, row_lengths, counts=counts)
        return PolicyLoss(loss, ratio.detach(), surrogate, weight)
