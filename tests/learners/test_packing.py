from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learners.packing import Row, dummy, pack


@st.composite
def rows(draw: st.DrawFn) -> Row:
    length = draw(st.integers(2, 30))
    trained = draw(st.sets(st.integers(1, length - 1), min_size=1))
    tokens = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
    return Row(tokens=np.array(tokens, np.int32), trained=np.array(sorted(trained)))


@given(st.lists(rows(), min_size=1, max_size=20), st.integers(5, 60))
def test_packing_keeps_every_row_whole_and_within_the_budget(given_rows: list[Row], budget: int) -> None:
    microbatches = pack(given_rows, max_tokens=budget)
    assert sorted(i for micro in microbatches for i in micro.rows) == list(range(len(given_rows)))
    for micro in microbatches:
        assert micro.input_ids.size <= budget or len(micro.rows) == 1
        lengths = [length for count, length in micro.runs for _ in range(count)]
        assert lengths == sorted(lengths) == [given_rows[i].num_inputs for i in micro.rows]
        start = used = 0
        for i, length in zip(micro.rows, lengths, strict=True):
            row = given_rows[i]
            assert micro.input_ids[start : start + length].tolist() == row.tokens[:length].tolist()
            assert micro.position_ids[start : start + length].tolist() == list(range(length))
            mine = slice(used, used + row.trained.size)
            assert micro.targets[mine].tolist() == row.tokens[row.trained].tolist()
            assert (micro.sources[mine] - start + 1).tolist() == row.trained.tolist()
            assert set(micro.row_lengths[mine]) == {row.trained.size}
            start, used = start + length, used + row.trained.size
        assert (start, used) == (micro.input_ids.size, micro.targets.size)


def test_columns_follow_the_packed_order() -> None:
    made = [Row(np.arange(n, dtype=np.int32), np.arange(1, n)) for n in (5, 3, 4)]
    (micro,) = pack(made, max_tokens=100)
    assert micro.rows == (1, 2, 0)
    assert micro.runs == ((1, 2), (1, 3), (1, 4))
    column = micro.gather([np.full(n - 1, n) for n in (5, 3, 4)])
    assert column.tolist() == [3, 3, 4, 4, 4, 5, 5, 5, 5]


def test_equal_lengths_make_one_run() -> None:
    made = [Row(np.arange(6, dtype=np.int32), np.array([4, 5])) for _ in range(7)]
    assert [micro.runs for micro in pack(made, max_tokens=20)] == [((4, 5),), ((3, 5),)]


def test_a_dummy_has_an_input_and_nothing_to_train() -> None:
    micro = dummy()
    assert micro.input_ids.size == 1
    assert micro.targets.size == micro.gather([]).size == 0
