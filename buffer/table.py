"""Groups as a table: sample rollouts in a run folder, for pandas, DuckDB or any other reader of Parquet."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from asyncrl.buffer.schema import SCHEMA, groups_to_batch
from asyncrl.types import Group


def groups_to_table(groups: Iterable[Group]) -> pa.Table:
    """One row per rollout, in order; the columns of `schema.SCHEMA`."""
    return pa.Table.from_batches([groups_to_batch([group]) for group in groups], schema=SCHEMA)


def write_parquet(path: str | os.PathLike[str], groups: Iterable[Group]) -> None:
    """Write the groups as a Parquet file that appears whole: a temporary name in its folder, then a rename."""
    import pyarrow.parquet as pq  # slow to import, and only this function needs it

    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(groups_to_table(groups), temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
