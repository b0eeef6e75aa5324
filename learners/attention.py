"""Attention over packed segments, registered with transformers as "asyncrl_packed".

Causal within each segment, nothing across. Segments arrive sorted by length, so that equal lengths run as one batched
call without padding; on CUDA with 16-bit types one variable-length kernel takes all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncrl.errors import ConfigError

NAME = "asyncrl_packed"


@dataclass(frozen=True, slots=True)
class Segments:
    """Layout of a packed sequence: runs of (number of segments, length), and the same as cumulative offsets int32."""

    runs: tuple[tuple[int, int], ...]
    offsets: Tensor

    @classmethod
    def from_runs(cls, runs: tuple[tuple[int, int], ...], *, device: torch.device) -> Segments:
        lengths = [length for count, length in runs for _ in range(count)]
        return cls(runs, torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device))


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,
    attention_mask: None,
    *,
    segments: Segments,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Returns [1, T, heads, head_dim]. Dropout is never applied."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"{type(module).__name__} needs attention with {name}, which the learner does not have")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256:
        return _varlen(query, key, value, segments, scaling, sliding_window), None
    return _by_runs(query, key, value, segments, scaling, sliding_window), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = segments.runs[-1][1]
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # [T, heads, head_dim]
    left = -1 if window is None else window - 1
    grouped = q.shape[1] != k.shape[1]
    out = varlen_attn(
        q, k, v, segments.offsets, segments.offsets, longest, longest,
        scale=scale, window_size=(left, 0), enable_gqa=grouped,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out[None]


def _by_runs(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, window: int | None
) -> Tensor:
    heads, head_dim = query.shape[1], query.shape[3]
    if key.shape[1] != heads:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    # One split per tensor: slicing run by run would make the backward write a full-size gradient per slice.
    sizes = [count * length for count, length in segments.runs]
    pieces = []
    split = (x[0].split(sizes, dim=1) for x in (query, key, value))
    for (count, length), *parts in zip(segments.runs, *split, strict=True):
        # [heads, count * length, head_dim] -> [count, heads, length, head_dim]
        q, k, v = (x.unflatten(1, (count, length)).transpose(0, 1) for x in parts)
        banded = window is not None and length > window
        mask = _band(length, window, query.device) if banded else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not banded, scale=scale)
        pieces.append(out.transpose(1, 2).reshape(count * length, heads, head_dim))
    return torch.cat(pieces)[None]


@cache
def _band(length: int, window: int, device: torch.device) -> Tensor:
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)
