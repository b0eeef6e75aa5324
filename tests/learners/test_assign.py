from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learners.assign import assign_groups, balanced_split
from asyncrl.types import GroupRef


def ref(number: int, tokens: int) -> GroupRef:
    return GroupRef(
        shard=0,
        group_id=number.to_bytes(16, "big"),
        number=number,
        num_rows=4,
        num_tokens=tokens,
        max_tokens=tokens,
        min_version=0,
        max_version=0,
        nbytes=tokens,
        reward_mean=0.0,
        reward_std=0.0,
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[GroupRef], int, int]:
    ranks, minibatches, each = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    count = ranks * minibatches * each
    numbers = draw(st.lists(st.integers(0, 10_000), min_size=count, max_size=count, unique=True))
    tokens = draw(st.lists(st.integers(1, 5_000), min_size=count, max_size=count))
    return [ref(n, t) for n, t in zip(numbers, tokens, strict=True)], ranks, minibatches


@given(batches())
def test_every_group_goes_to_one_rank_and_every_rank_count_takes_the_same_minibatches(batch) -> None:
    refs, ranks, minibatches = batch
    slices = assign_groups(refs, num_ranks=ranks, num_minibatches=minibatches)
    assert sorted(r.number for part in slices for r in part) == sorted(r.number for r in refs)
    each = len(refs) // ranks // minibatches
    assert [len(part) for part in slices] == [each * minibatches] * ranks
    in_order = sorted(r.number for r in refs)
    for m in range(minibatches):
        taken = sorted(r.number for part in slices for r in part[m * each : (m + 1) * each])
        assert taken == in_order[m * each * ranks : (m + 1) * each * ranks]
    for part in slices:
        assert [r.number for r in part] == sorted(r.number for r in part)
    # The order in which the buffer hands them out does not matter.
    assert assign_groups(refs[::-1], num_ranks=ranks, num_minibatches=minibatches) == slices


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12).map(lambda sizes: sizes * 4))
def test_parts_are_within_one_item_of_each_other(sizes: list[int]) -> None:
    """Every part takes one item per round of four, and the rounds are sorted: the gap is at most the largest item."""
    totals = [sum(sizes[i] for i in part) for part in balanced_split(sizes, num_parts=4)]
    assert max(totals) - min(totals) <= max(sizes)


def test_long_groups_are_spread() -> None:
    refs = [ref(i, tokens) for i, tokens in enumerate([1000, 1000, 10, 10, 10, 10, 500, 500])]
    totals = [sum(r.num_tokens for r in part) for part in assign_groups(refs, num_ranks=2, num_minibatches=1)]
    assert totals == [1520, 1520]


def test_uneven_batches_are_refused() -> None:
    refs = [ref(i, 10) for i in range(6)]
    with pytest.raises(ValueError, match="minibatches"):
        assign_groups(refs, num_ranks=1, num_minibatches=4)
    with pytest.raises(ValueError, match="4 parts"):
        assign_groups(refs, num_ranks=4, num_minibatches=1)


def test_cutting_batches_needs_no_torch() -> None:
    code = (
        "import sys; from asyncrl.learners import assign_groups; import asyncrl.learners.packing; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
