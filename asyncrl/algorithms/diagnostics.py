"""What every objective reports about a step, as sums and maxima that add up over microbatches and ranks.

diagnose (per microbatch) -> add -> all-reduce in float64 -> summarise -> {"ratio/mean": ...}
"""
# ruff: noqa: F722

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asyncrl.algorithms.objective import PolicyLoss, log_ratio

SUMS = (
    "tokens", "ratio", "clipped_low", "clipped_high", "weight", "weight_squared", "limited",
    "kl_k1", "kl_k3", "entropy", "fresh_tokens", "fresh_gap",
)  # fmt: skip
MAXIMA = ("ratio", "weight", "fresh_gap")


class Diagnostics(NamedTuple):
    """float64 vectors in the order of SUMS and MAXIMA."""

    sums: Float[Tensor, " sums"]
    maxima: Float[Tensor, " maxima"]

    def add(self, other: Diagnostics) -> Diagnostics:
        """Diagnostics of both parts together."""
        return Diagnostics(self.sums + other.sums, self.maxima.maximum(other.maxima))


def kl_estimates(
    logprobs: Float[Tensor, " t"], reference: Float[Tensor, " t"]
) -> tuple[Float[Tensor, " t"], Float[Tensor, " t"]]:
    """k1 = d and k3 = exp(-d) - 1 + d with d = log p/q: unbiased estimates of KL(p || q) on samples of p.

    Source: J. Schulman, "Approximating KL Divergence", 2020; k3 also arXiv:2402.03300 eq. 4.
    """
    d = log_ratio(logprobs, reference)
    return d, (-d).exp() - 1 + d


def effective_sample_size(weight_sum: float, weight_squared_sum: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2): 1 when all weights are equal, 1/n when one token carries everything."""
    return weight_sum**2 / (count * weight_squared_sum) if count and weight_squared_sum else 1.0


@torch.no_grad()
def diagnose(
    result: PolicyLoss,
    *,
    logprobs: Float[Tensor, " t"],
    behaviour: Float[Tensor, " t"],
    entropy: Float[Tensor, " t"],
    start: Float[Tensor, " t"],
    fresh: Bool[Tensor, " t"],
) -> Diagnostics:
    """Diagnostics of one microbatch.

    Args:
        logprobs: of the policy being trained.
        start: logprobs of the policy at the start of the batch, for the gap below.
        fresh: token was sampled by that very policy (staleness 0). There |start - behaviour| is the mismatch between
            the engine and the learner and nothing else.
    """
    kl_k1, kl_k3 = kl_estimates(behaviour, logprobs.detach())
    gap = (start.detach() - behaviour).abs() * fresh
    weights = result.weight.values
    columns = (
        torch.ones_like(weights), result.ratio, result.surrogate.clipped_low, result.surrogate.clipped_high,
        weights, weights.square(), result.weight.limited, kl_k1, kl_k3, entropy, fresh, gap,
    )  # fmt: skip
    sums = torch.stack([column.to(torch.float64) for column in columns]).sum(1)
    maxima = torch.stack([torch.nn.functional.pad(x, (0, 1)).amax() for x in (result.ratio, weights, gap)])
    return Diagnostics(sums, maxima.to(torch.float64))


def summarise(sums: Sequence[float], maxima: Sequence[float]) -> dict[str, float]:
    """Metrics of the step from the totals over all microbatches and ranks. The gap is absent when no token is fresh."""
    total = dict(zip(SUMS, sums, strict=True))
    largest = dict(zip(MAXIMA, maxima, strict=True))
    n = max(total["tokens"], 1.0)
    metrics = {
        "ratio/mean": total["ratio"] / n,
        "ratio/max": largest["ratio"],
        "clip/low_fraction": total["clipped_low"] / n,
        "clip/high_fraction": total["clipped_high"] / n,
        "weight/mean": total["weight"] / n,
        "weight/max": largest["weight"],
        "weight/limited_fraction": total["limited"] / n,
        "weight/ess": effective_sample_size(total["weight"], total["weight_squared"], total["tokens"]),
        "kl/k1": total["kl_k1"] / n,
        "kl/k3": total["kl_k3"] / n,
        "entropy/mean": total["entropy"] / n,
    }
    if total["fresh_tokens"]:
        metrics["logprob_gap/mean"] = total["fresh_gap"] / total["fresh_tokens"]
        metrics["logprob_gap/max"] = largest["fresh_gap"]
    return metrics
