"""`asyncrl buffer stats`: contents and totals of every shard, from the shards, their files or metrics.jsonl."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from asyncrl.buffer import LEDGER, BufferStats
from asyncrl.buffer.stored import StoredShard
from asyncrl.buffer_tool.source import HOW_TO_KEEP, Source
from asyncrl.errors import ReplayBufferError

Row = dict[str, object]
_COLUMNS = ("shard", "groups", *LEDGER, "bytes", "segments", "in_files", "versions", "fill", "balanced")


def print_stats(source: Source, *, as_json: bool) -> None:
    """Raises ReplayBufferError when nothing tells of the buffer any more."""
    live = source.ask()
    try:
        shards = source.read()
    except ReplayBufferError:
        if live is None and (source.config is None or not source.run_folder.metrics.is_file()):
            raise
        shards = []
    if live is None and not shards:
        _print_metrics(source, as_json=as_json)
        return
    capacity = None if source.config is None else source.config.buffer.capacity_gb * 1e9
    told = list(live.shards) if live is not None else [shard.stats for shard in shards]
    rows = [_shard_row(i, stats, shards[i] if i < len(shards) else None, capacity) for i, stats in enumerate(told)]
    state = "the run goes on; told by its shards" if live is not None else "from the shards' files, nobody serves them"
    if as_json:
        print(json.dumps({"path": str(source.path), "live": live is not None, "shards": rows, "total": _total(rows)}))
        return
    print(f"{source.path}\n({state})\n")
    print(_table([*rows, _total(rows)]))
    for line in (line for shard in shards for line in (*shard.problems, *shard.notes) if live is None):
        print(f"note: {line}", file=sys.stderr)


def _shard_row(index: int, stats: BufferStats | None, stored: StoredShard | None, capacity: float | None) -> Row:
    """Of one shard; None where nobody knows."""
    row: Row = {column: None for column in _COLUMNS}
    row["shard"] = f"shard-{index}" if stored is None else stored.directory.name
    if stats is not None:
        row |= {name: getattr(stats, name) for name in ("groups", *LEDGER)}
        row |= {"bytes": stats.held_bytes, "balanced": stats.is_balanced}
        row["fill"] = None if capacity is None else stats.held_bytes / capacity
    if stored is not None:
        refs = [group.ref for group in stored.groups]
        row |= {"segments": stored.num_segments, "in_files": len(refs), "bytes": stored.num_bytes}
        row["versions"] = [min(r.min_version for r in refs), max(r.max_version for r in refs)] if refs else None
    return row


def _total(rows: Sequence[Row]) -> Row:
    def known(name: str) -> list:
        return [row[name] for row in rows if row[name] is not None]

    total: Row = {name: sum(known(name)) if len(known(name)) == len(rows) else None for name in _COLUMNS[1:-3]}
    versions, fill = known("versions"), known("fill")
    total["versions"] = [min(v[0] for v in versions), max(v[1] for v in versions)] if versions else None
    total["fill"] = sum(fill) / len(fill) if fill else None
    total["balanced"] = all(known("balanced")) if known("balanced") else None
    return {"shard": "total", **total}


def _table(rows: Sequence[Row]) -> str:
    """Right-aligned columns."""
    lines = [[name.removesuffix("_groups").replace("_", " ") for name in _COLUMNS]]
    lines += [[_cell(name, row[name]) for name in _COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name == "versions":
        assert isinstance(value, list)
        return f"{value[0]}..{value[1]}"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _print_metrics(source: Source, *, as_json: bool) -> None:
    """Of a run that ended and left no files: the buffer as it was when the last batch was taken."""
    lines = source.run_folder.metrics.read_text().splitlines()
    rows = [json.loads(line) for line in lines if '"buffer/appended"' in line and line.endswith("}")]
    if not rows:
        raise ReplayBufferError(f"{source.run_folder.metrics} has no row of a trained batch yet, and no shard answers")
    step = rows[-1]["step"]
    values = {name.removeprefix("buffer/"): v for name, v in rows[-1].items() if name.startswith("buffer/")}
    if as_json:
        print(json.dumps({"path": str(source.path), "live": False, "step": step, "total": values}))
        return
    print(f"{source.path}\n(from metrics.jsonl: the buffer when the batch of step {step} was taken; {HOW_TO_KEEP})\n")
    for name in ("groups", *LEDGER, "bytes", "held_bytes", "fill"):
        print(f"{name.removesuffix('_groups'):>12}  {_cell(name, values[name])}")
    is_balanced = values["appended"] == sum(values[name] for name in ("groups", *LEDGER[1:]))
    print(f"{'balanced':>12}  {_cell('balanced', is_balanced)}")
