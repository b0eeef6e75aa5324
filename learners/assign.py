"""Cutting a batch of groups into rank slices. Imports no torch: the coordinator uses it.

refs of one batch --assign_groups--> one list per rank, each rank reads its own groups from the buffer
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.types import GroupRef


def balanced_split(sizes: Sequence[int], *, num_parts: int) -> list[list[int]]:
    """Cut positions 0..n-1 into parts of equal count and nearly equal total size.

    Longest first, each to the lightest part that still has room; ties go to the earlier one. Deterministic. Positions
    within a part ascend.

    Raises:
        ValueError: num_parts does not divide the number of items.
    """
    if len(sizes) % num_parts:
        raise ValueError(f"{len(sizes)} items cannot be cut into {num_parts} parts of equal count")
    room = len(sizes) // num_parts
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0] * num_parts
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = min((p for p in range(num_parts) if len(parts[p]) < room), key=lambda p: (totals[p], p))
        parts[lightest].append(item)
        totals[lightest] += sizes[item]
    return [sorted(part) for part in parts]


def assign_groups(refs: Sequence[GroupRef], *, num_ranks: int, num_minibatches: int) -> list[list[GroupRef]]:
    """Cut one batch into rank slices.

    Minibatch m is the m-th block of the batch in number order, whatever the number of ranks, so that every rank count
    takes the same optimizer steps. Within a minibatch all ranks get equally many groups, balanced by tokens.

    Returns:
        One list per rank, minibatch-major (the first len/num_minibatches refs of a slice are minibatch 0) and ascending
        in number.

    Raises:
        ValueError: the groups of a batch cannot be cut evenly.
    """
    if len(refs) % num_minibatches:
        raise ValueError(f"{len(refs)} groups cannot be cut into {num_minibatches} minibatches of equal count")
    ordered = sorted(refs, key=lambda ref: ref.number)
    size = len(ordered) // num_minibatches
    slices: list[list[GroupRef]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(ordered), size) if size else ():
        block = ordered[start : start + size]
        parts = balanced_split([ref.num_tokens for ref in block], num_parts=num_ranks)
        for rank, part in enumerate(parts):
            slices[rank] += [block[i] for i in part]
    return slices
