"""Logprobs of given tokens from hidden states, without logits of all tokens at once.

    forward:   logits of a few tokens at a time; only logprob and log-sum-exp per token stay
    backward:  logits again, a tile of the vocabulary at a time, so that each tile of the head's gradient is one GEMM

The extra memory is one tile of at most TILE_ELEMENTS float32 in both directions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 24


class TokenScores(NamedTuple):
    """Per trained token [t], float32. Only `logprobs` carries a gradient.

    Attributes:
        logprobs: log softmax(logits / temperature) at the token.
        entropy: of that distribution, in nats.
        greedy: True where the token has the largest logit.
    """

    logprobs: Tensor
    entropy: Tensor
    greedy: Tensor


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return (hidden @ weight.t()).float().div_(temperature)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, tile_elements: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns: list[tuple[Tensor, ...]] = []
        rows = max(1, tile_elements // weight.shape[0])
        for h, target in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = _logits(h, weight, temperature)
            lse = logits.logsumexp(1)
            chosen = logits.gather(1, target[:, None])[:, 0]
            greedy = chosen >= logits.amax(1)
            entropy = lse - (logits - lse[:, None]).exp_().mul_(logits).sum(1)
            columns.append((chosen - lse, entropy, greedy, lse))
        logprobs, entropy, greedy, lse = (torch.cat(parts) for parts in zip(*columns, strict=True))
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.temperature, ctx.tile_elements = temperature, tile_elements
        ctx.mark_non_differentiable(entropy, greedy)
        return logprobs, entropy, greedy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets, lse = ctx.saved_tensors
        scaled = (grads[0] / ctx.temperature)[:, None]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight)
        columns = max(1, ctx.tile_elements // max(hidden.shape[0], 1))
        for start in range(0, weight.shape[0], columns):
            tile = weight[start : start + columns]
            # d loss / d logits = grad * (1[v == target] - p_v) / temperature
            d = _logits(hidden, tile, ctx.temperature).sub_(lse[:, None]).exp_().mul_(-scaled)
            local = targets - start
            here = (local >= 0) & (local < tile.shape[0])
            index = local.clamp(0, tile.shape[0] - 1)[:, None]
            d.scatter_(1, index, d.gather(1, index) + scaled * here[:, None])
            d = d.to(weight.dtype)
            grad_hidden += d @ tile
            torch.mm(d.t(), hidden, out=grad_weight[start : start + columns])
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def token_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, tile_elements: int = TILE_ELEMENTS
) -> TokenScores:
    """Scores of the target tokens under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: [t, H]; weight: [V, H], same dtype; targets: int64 [t].
    """
    return TokenScores(*_TokenScores.apply(hidden, weight, targets, temperature, tile_elements))
