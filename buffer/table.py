"""Groups as a table: sample rollouts in a run folder, for pandas, DuckDB or any other reader of Parquet."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from asyncrl.buffer.schema import SCHEMA, groups_to_batch, read_batch
from asyncrl.buffer.stored import StoredGroup, iter_intact
from asyncrl.errors import ReplayBufferError
from asyncrl.types import Group

ROW_GROUP_BYTES = 32 << 20
"""Of an exported file, before compression."""


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


def export_parquet(groups: Iterable[StoredGroup], path: Path) -> list[str]:
    """Write stored groups to a new Parquet file, which appears whole; the damaged ones are left out.

    Returns:
        What is wrong with each that was left out.

    Raises:
        ReplayBufferError: the file is there already, or cannot be written.
    """
    import pyarrow.parquet as pq

    damaged: list[str] = []
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists():
            raise FileExistsError(errno.EEXIST, "it exists; remove it or name another file")
        with pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
            for batches in _in_row_groups(groups, damaged):
                writer.write_table(pa.Table.from_batches(batches, schema=SCHEMA))
        temporary.rename(path)
    except OSError as error:
        raise ReplayBufferError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return damaged


def _in_row_groups(groups: Iterable[StoredGroup], damaged: list[str]) -> Iterator[list[pa.RecordBatch]]:
    """Batches of about ROW_GROUP_BYTES together."""
    batches: list[pa.RecordBatch] = []
    num_bytes = 0
    for group in iter_intact(groups, damaged):
        batches.append(read_batch(group.message))
        num_bytes += group.ref.nbytes
        if num_bytes >= ROW_GROUP_BYTES:
            yield batches
            batches, num_bytes = [], 0
    if batches:
        yield batches
