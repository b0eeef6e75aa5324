"""The trajectories of many groups as a few flat arrays: what a learner packs into microbatches."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.buffer.message import MessageView
from asyncrl.buffer.schema import LAYOUT
from asyncrl.errors import ReplayBufferError


@dataclass(frozen=True, slots=True)
class Columns:
    """N trajectories of G groups, group after group: T tokens, of which R follow a prompt.

    Attributes:
        group_offsets: int64 [G + 1], group g has the trajectories group_offsets[g] to group_offsets[g + 1].
        tokens: int32 [T], prompt and response of each trajectory.
        token_offsets: int64 [N + 1], trajectory i has tokens[token_offsets[i] : token_offsets[i + 1]].
        prompt_lengths: int32 [N], of its tokens.
        response_offsets: int64 [N + 1], as token_offsets, into the next three.
        loss_mask, behaviour_logprobs, policy_versions: bool, float32, int32 [R], as in Rollout.
        rewards: float32 [N], NaN where scoring failed.
        min_versions: int32 [N], as Rollout.min_version.
    """

    group_offsets: np.ndarray
    tokens: np.ndarray
    token_offsets: np.ndarray
    prompt_lengths: np.ndarray
    response_offsets: np.ndarray
    loss_mask: np.ndarray
    behaviour_logprobs: np.ndarray
    policy_versions: np.ndarray
    rewards: np.ndarray
    min_versions: np.ndarray


def read_columns(messages: Sequence[Any]) -> Columns:
    """Of the Arrow messages of groups. Raises ReplayBufferError for anything else."""
    try:
        return _read_columns([LAYOUT.unpack(message) for message in messages])
    except (ValueError, IndexError, struct.error) as error:
        raise ReplayBufferError(f"a stored group is not an Arrow record batch message: {error}") from error


def _read_columns(views: Sequence[MessageView]) -> Columns:
    def items(name: str, dtype: Any) -> np.ndarray:
        return _joined([view.items(name, dtype, view.num_items(name)) for view in views], dtype)

    def column(name: str, dtype: Any) -> np.ndarray:
        return _joined([view.column(name, dtype) for view in views], dtype)

    prompt_lengths = column("prompt_length", np.int32)
    token_offsets = _joined_offsets(views, "tokens")
    rewards = column("reward", np.float32)
    scored = [view.valid("reward") for view in views]
    group_offsets = np.cumsum([0, *(view.num_rows for view in views)])
    for start, valid in zip(group_offsets.tolist(), scored, strict=False):
        if valid is not None:
            rewards[start : start + valid.size][~valid] = np.nan
    return Columns(
        group_offsets=group_offsets,
        tokens=items("tokens", np.int32),
        token_offsets=token_offsets,
        prompt_lengths=prompt_lengths,
        response_offsets=token_offsets - np.cumsum([0, *prompt_lengths.tolist()]),
        loss_mask=items("loss_mask", np.bool_),
        behaviour_logprobs=items("behaviour_logprobs", np.float32),
        policy_versions=items("policy_versions", np.int32),
        rewards=rewards,
        min_versions=column("min_version", np.int32),
    )


def _joined(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _joined_offsets(views: Sequence[MessageView], name: str) -> np.ndarray:
    """Offsets of the rows in the items of all views."""
    offsets, base = [np.zeros(1, np.int64)], 0
    for view in views:
        offsets.append(view.offsets(name)[1:] + np.int64(base))
        base += view.num_items(name)
    return np.concatenate(offsets)
