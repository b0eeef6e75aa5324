"""Rows of tokens -> packed microbatches under a token budget. numpy only.

A packed microbatch is one flat sequence of row segments without padding. Only what is needed is kept: the inputs up to
the last trained token, and the positions whose hidden state predicts a trained token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to train on.

    Attributes:
        tokens: int32 [L].
        trained: int64 [t], t >= 1, ascending positions of the tokens whose prediction is trained. Never 0: nothing
            predicts the first token.
    """

    tokens: np.ndarray
    trained: np.ndarray

    @property
    def num_inputs(self) -> int:
        """Tokens that must go through the model: those before the last trained one."""
        return int(self.trained[-1])


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward pass of one rank. T input tokens, t trained tokens.

    Attributes:
        rows: positions of the rows in the list that was packed, in packed order.
        input_ids: int64 [T]; position_ids: int64 [T], from 0 in each segment.
        runs: (number of segments, length) of consecutive segments of equal length; lengths ascend.
        sources: int64 [t], input position whose output predicts the trained token.
        targets: int64 [t], the trained tokens.
        row_lengths: int64 [t], trained tokens of the row that each trained token belongs to.
    """

    rows: tuple[int, ...]
    input_ids: np.ndarray
    position_ids: np.ndarray
    runs: tuple[tuple[int, int], ...]
    sources: np.ndarray
    targets: np.ndarray
    row_lengths: np.ndarray

    def gather(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Per-row arrays over trained tokens -> one array [t] in packed order."""
        return np.concatenate([columns[row] for row in self.rows]) if self.rows else np.zeros(0, np.float32)


def _collate(rows: Sequence[Row], members: list[int]) -> Microbatch:
    members = sorted(members, key=lambda i: (rows[i].num_inputs, i))
    lengths = [rows[i].num_inputs for i in members]
    starts = np.cumsum([0, *lengths[:-1]])
    trained = [rows[i].trained for i in members]
    return Microbatch(
        rows=tuple(members),
        input_ids=np.concatenate([rows[i].tokens[:n] for i, n in zip(members, lengths, strict=True)]).astype(np.int64),
        position_ids=np.concatenate([np.arange(n) for n in lengths]),
        runs=tuple((len(list(run)), length) for length, run in groupby(lengths)),
        sources=np.concatenate([t - 1 + start for t, start in zip(trained, starts, strict=True)]),
        targets=np.concatenate([rows[i].tokens[t] for i, t in zip(members, trained, strict=True)]).astype(np.int64),
        row_lengths=np.concatenate([np.full(t.size, t.size) for t in trained]),
    )


def pack(rows: Sequence[Row], *, max_tokens: int) -> list[Microbatch]:
    """First-fit decreasing: microbatches of at most max_tokens inputs; a longer row gets one of its own."""
    bins: list[list[int]] = []
    room: list[int] = []
    sizes = [row.num_inputs for row in rows]
    for item in sorted(range(len(rows)), key=lambda i: (-sizes[i], i)):
        place = next((b for b, free in enumerate(room) if free >= sizes[item]), None)
        if place is None:
            bins.append([item])
            room.append(max_tokens - sizes[item])
        else:
            bins[place].append(item)
            room[place] -= sizes[item]
    return [_collate(rows, members) for members in bins]


def dummy() -> Microbatch:
    """A microbatch of one input and no trained token: lets a rank with less work join the collectives, weight zero."""
    zero, none = np.zeros(1, np.int64), np.zeros(0, np.int64)
    return Microbatch((), zero, zero, ((1, 1),), none, none, none)
