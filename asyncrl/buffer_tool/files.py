"""`asyncrl buffer verify` and `asyncrl buffer export`: every group in the files of shards or of a snapshot."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.buffer.stored import in_order
from asyncrl.buffer.table import export_parquet
from asyncrl.buffer_tool.source import HOW_TO_KEEP, Source
from asyncrl.errors import ReplayBufferError

EXPORT_NAME = "trajectories.parquet"


def verify(source: Source) -> bool:
    """Check everything and print what is bad; whether all is good."""
    num_bad = 0
    for shard in source.read():
        num_intact = shard.verify()
        num_summed = sum(group.checksum is not None for group in shard.groups)
        print(
            f"{shard.directory}: {num_intact} of {len(shard.groups)} groups in {shard.num_segments} files are intact "
            f"({num_summed} by their recorded checksums, {len(shard.groups) - num_summed} by their structure)"
        )
        if shard.stats is not None and not shard.stats.is_balanced:
            shard.problems.append(f"{shard.directory}: the ledger does not balance: {shard.stats}")
        for problem in shard.problems:
            print(f"bad: {problem}")
        for note in shard.notes:
            print(f"note: {note}")
        num_bad += len(shard.problems)
    if num_bad and source.ask() is not None:
        print("note: the run goes on: what was removed while this command read is no damage; try again after its end")
    print(f"{num_bad} bad" if num_bad else "all good")
    return not num_bad


def export(source: Source, out: Path | None) -> bool:
    """Write every intact group to a new Parquet file; whether that were all.

    Raises ReplayBufferError when there is nothing to write, or the file exists.
    """
    if out is None and source.config is None:
        raise ReplayBufferError(f"{source.path} is not a run folder: name the file to write with --out")
    out = source.path if out is None else out
    out = out / EXPORT_NAME if out.is_dir() else out
    shards = source.read()
    groups = in_order(shards)
    if not groups:
        problems = [problem for shard in shards for problem in shard.problems]
        raise ReplayBufferError(f"{source.path} holds no groups" + (f": {problems[0]}" if problems else ""))
    damaged = export_parquet(groups, out)
    print(f"{out}: {len(groups) - len(damaged)} groups in the order of their numbers, a row per rollout")
    appended = sum(shard.stats.appended for shard in shards if shard.stats is not None)
    if appended > len(groups):
        print(f"note: {appended} groups were appended, the segments of the others were used again; {HOW_TO_KEEP}")
    problems = [problem for shard in shards for problem in shard.problems] + damaged
    for problem in problems:
        print(f"bad, left out: {problem}", file=sys.stderr)
    return not problems
