from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl.buffer import SCHEMA, groups_to_table, write_parquet
from asyncrl.buffer.schema import VERSION_KEY
from asyncrl.errors import ReplayBufferError
from tests.buffer.groups import make_group


def groups():
    stopped, cut = make_group(0), make_group(1, num_rollouts=3)
    return [stopped, dataclasses.replace(cut, rollouts=tuple(
        dataclasses.replace(r, finish_reason="length", reward_parts={"a": 0.5}) for r in cut.rollouts
    ))]  # fmt: skip


def test_a_table_has_one_row_per_rollout_in_order():
    table = groups_to_table(groups())
    assert table.schema.equals(SCHEMA, check_metadata=True)
    assert table["number"].to_pylist() == [0, 0, 1, 1, 1]
    assert table["finish_reason"].to_pylist() == ["stop"] * 2 + ["length"] * 3
    assert groups_to_table([]).num_rows == 0


def test_parquet_keeps_the_rows_and_the_version(tmp_path: Path):
    path = tmp_path / "rollouts.parquet"
    write_parquet(path, groups())
    found = pq.read_table(path)
    assert found.to_pylist() == groups_to_table(groups()).to_pylist()
    assert found.schema.metadata[VERSION_KEY] == b"2"
    assert [p.name for p in tmp_path.iterdir()] == ["rollouts.parquet"]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path):
    path = tmp_path / "rollouts.parquet"
    write_parquet(path, groups())
    with pytest.raises(ReplayBufferError):
        write_parquet(path, [dataclasses.replace(make_group(0), rollouts=())])
    assert pq.read_table(path).num_rows == 5
    assert [p.name for p in tmp_path.iterdir()] == ["rollouts.parquet"]
