"""What lies in the folders of shards and snapshots, read beside their owner: nothing is locked, written or removed.

    log (who was appended, where, what became of it)  --+
    segment files (footers: what is kept, also of groups that are gone from the shard)  --+--> StoredShard -> groups

Works on a run that goes on, one that ended and one that was killed. The log says where each group lies and its
checksum; a group that the log no longer mentions is known from its file alone, and checked by its structure.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import xxhash

from asyncrl.buffer.log import LOG, read_log
from asyncrl.buffer.records import Entry, Kind, Record
from asyncrl.buffer.schema import EncodedGroup, describe, read_batch
from asyncrl.buffer.segment_table import RECYCLED, segment_files
from asyncrl.buffer.segments import IDENTITY, SEALED, WRITERS, blocks_of, check_segment_schema
from asyncrl.buffer.snapshot import FORMAT, MANIFEST, check_file, read_manifest_file
from asyncrl.buffer.stats import BufferStats
from asyncrl.buffer.store import GroupStore
from asyncrl.errors import ReplayBufferError
from asyncrl.types import GroupRef

_OWN_FILES = (LOG, IDENTITY, WRITERS, "lock", MANIFEST)
_TEMPORARY = (".tmp", ".new", RECYCLED)


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group in a file.

    Attributes:
        ref: its index entry; the shard is 0.
        offset: of its Arrow message of ref.nbytes bytes in the file.
        checksum: xxh3_64 of the message; None where only the file tells of the group.
    """

    ref: GroupRef
    path: Path
    offset: int
    checksum: int | None

    def read(self) -> EncodedGroup:
        """The group as it was stored. Raises ReplayBufferError, which names file and group, when it is damaged."""
        name = f"{self.path}, group {self.ref.number} ({self.ref.group_id.hex()}) at byte {self.offset}"
        message = _read_at(self.path, self.offset, self.ref.nbytes, name)
        if self.checksum is not None and (found := xxhash.xxh3_64_intdigest(message)) != self.checksum:
            raise ReplayBufferError(f"{name}: xxh3 checksum {found:016x}, the shard's log says {self.checksum:016x}")
        return _describe(message, name)


@dataclass(slots=True)
class StoredShard:
    """One shard folder, or one snapshot.

    Attributes:
        groups: every group that a file holds, leased and used ones too, in the order of the files.
        stats: contents and totals as the log tells them; None without a log (a snapshot, spilled segments).
        num_segments, num_bytes: segment files, and their sizes together.
        problems: what is damaged, missing or foreign, each with its file.
        notes: what a reader should know and is not wrong.
    """

    directory: Path
    groups: list[StoredGroup] = field(default_factory=list)
    stats: BufferStats | None = None
    num_segments: int = 0
    num_bytes: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def verify(self) -> int:
        """Read every group; how many are intact. The others are added to the problems."""
        num_intact = 0
        for group in self.groups:
            try:
                group.read()
                num_intact += 1
            except ReplayBufferError as error:
                self.problems.append(str(error))
        return num_intact


def find_shards(path: Path) -> list[Path]:
    """The folders of shards and snapshots at `path`: itself, a run folder, or a folder of shards.

    Raises ReplayBufferError, with what was looked for, when there are none.
    """
    if not path.exists():
        raise ReplayBufferError(f"{path}: no such folder; give a run folder, a shard folder or a snapshot folder")
    if not path.is_dir():
        raise ReplayBufferError(f"{path} is a file; give the run folder, shard folder or snapshot folder that it is in")
    for candidates in ([path], path.glob("shard-*"), path.glob("buffer/shard-*")):
        found = sorted(filter(_is_shard, candidates), key=lambda folder: (len(folder.name), folder.name))
        if found:
            return found
    raise ReplayBufferError(
        f"{path} holds no replay buffer: neither {LOG}, *{SEALED} segments or {MANIFEST}, nor shard-* or "
        f"buffer/shard-* folders with them"
    )


def read_stored(paths: Iterable[Path], *, spilled: Sequence[Path] = ()) -> list[StoredShard]:
    """What each folder of find_shards holds.

    Args:
        spilled: for each shard, the folder of the segments that it moved to disk, if it has one.
    """
    folders = list(paths)
    spilled = spilled or [Path()] * len(folders)
    return [
        _read_snapshot(folder) if (folder / MANIFEST).exists() else _read_shard(folder, spill_dir)
        for folder, spill_dir in zip(folders, spilled, strict=True)
    ]


def in_order(shards: Iterable[StoredShard]) -> list[StoredGroup]:
    """All groups of these shards by number, each once, whatever shard it lies in."""
    groups = {group.ref.group_id: group for shard in shards for group in shard.groups}
    return sorted(groups.values(), key=lambda group: (group.ref.number, group.ref.group_id))


def _is_shard(folder: Path) -> bool:
    return (folder / LOG).is_file() or (folder / MANIFEST).is_file() or bool(segment_files(folder))


def _read_shard(directory: Path, spill_dir: Path) -> StoredShard:
    # The log before the files: what it names is in a file by then, if it was not removed since.
    shard = StoredShard(directory)
    records, held = _read_log(shard)
    described = _described(records)
    has_all = bool(records) and not _is_compacted(records)
    paths = segment_files(directory) + (segment_files(spill_dir) if spill_dir != Path() else [])
    for path in paths:
        _read_segment(shard, path, described.get(_number(path), {}), has_all=has_all)
    if shard.stats is not None:
        _find_foreign(shard, paths, records)
        _find_missing(shard, paths, held)
    elif not (directory / LOG).exists():
        shard.notes.append(f"{directory} has no {LOG}: its groups are checked by their structure alone")
    return shard


def _read_log(shard: StoredShard) -> tuple[list[Record], list[Entry]]:
    """The records of the shard's log and the groups that it holds by them; nothing without a log, or a damaged one."""
    path = shard.directory / LOG
    if not path.is_file():
        return [], []
    try:
        records, num_torn = read_log(path)
        if num_torn and not records:
            raise ReplayBufferError(f"{path} has no record that this asyncrl can read")
        store = GroupStore.as_logged(shard.directory, records)
    except ReplayBufferError as error:
        shard.problems.append(str(error))
        return [], []
    shard.stats = store.stats()
    if num_torn:
        shard.problems.append(
            f"{path} is truncated: it ends with {num_torn} bytes that are no whole record (a write that was cut off "
            f"and never acknowledged; a shard that starts here drops them)"
        )
    return records, store.held_entries()


def _described(records: Iterable[Record]) -> dict[int, dict[int, Entry]]:
    """Segment -> offset -> entry of every group that the log still describes, gone ones too."""
    described: dict[int, dict[int, Entry]] = {}
    for record in records:
        if record.kind is Kind.APPEND:
            described.setdefault(record.entry.segment, {})[record.entry.offset] = record.entry
    return described


def _number(path: Path) -> int:
    """Of a segment, by the name of its file; -1: not the name of one."""
    return int(path.stem) if path.stem.isdigit() else -1


def _is_compacted(records: Iterable[Record]) -> bool:
    """Whether groups that are gone may be left out of the log: a compacted one sums them up in totals."""
    return any(record.kind is Kind.TOTAL for record in records)


def _read_segment(shard: StoredShard, path: Path, entries: dict[int, Entry], *, has_all: bool) -> None:
    """Add the groups of one file: those of its footer, or those that the log places in an open one.

    Args:
        entries: offset -> what the log says of a group in this file.
        has_all: the log describes every group of it.
    """
    try:
        check_segment_schema(path)
        blocks = blocks_of(path) if path.suffix == SEALED else []
        shard.num_bytes += path.stat().st_size
    except (ReplayBufferError, OSError) as error:
        shard.problems.append(str(error))
        return
    shard.num_segments += 1
    for offset, metadata, body in blocks:
        if offset not in entries:
            if has_all:
                shard.problems.append(
                    f"{path}: the group at byte {offset} is not in the shard's log: the log is truncated, or the file "
                    f"is foreign"
                )
            _add_undescribed(shard, path, offset, metadata + body)
    listed = {offset for offset, _, _ in blocks}
    for offset, entry in entries.items():
        if path.suffix == SEALED and offset not in listed:
            shard.problems.append(f"{path}: its footer does not list group {entry.ref.number} at byte {offset}")
        shard.groups.append(StoredGroup(entry.ref, path, offset, entry.checksum))


def _add_undescribed(shard: StoredShard, path: Path, offset: int, nbytes: int) -> None:
    name = f"{path}, group at byte {offset}"
    try:
        ref = _describe(_read_at(path, offset, nbytes, name), name).ref
        shard.groups.append(StoredGroup(ref, path, offset, None))
    except ReplayBufferError as error:
        shard.problems.append(str(error))


def _find_foreign(shard: StoredShard, paths: Sequence[Path], records: Iterable[Record]) -> None:
    granted = {record.entry.segment for record in records if record.kind is Kind.GRANT}
    for path in paths:
        if _number(path) not in granted:
            shard.problems.append(f"{path} is a foreign file: the shard's log knows no such segment")
    for path in sorted(shard.directory.iterdir()):
        if path not in paths and path.name not in _OWN_FILES and path.suffix not in _TEMPORARY:
            shard.problems.append(f"{path} is a foreign file: a shard writes nothing of that name")


def _find_missing(shard: StoredShard, paths: Sequence[Path], held: Sequence[Entry]) -> None:
    there = {_number(path) for path in paths}
    for segment in sorted({entry.segment for entry in held} - there):
        numbers = sorted(entry.ref.number for entry in held if entry.segment == segment)
        shard.problems.append(
            f"{shard.directory}: segment {segment:08d} is missing, with {len(numbers)} groups that were neither "
            f"trained on nor dropped ({', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''})"
        )


def _read_snapshot(directory: Path) -> StoredShard:
    """A snapshot's files against its manifest, and the groups in them."""
    shard = StoredShard(directory)
    try:
        files = read_manifest_file(directory)["files"]
    except ReplayBufferError as error:
        shard.problems.append(str(error))
        return shard
    for name, expected in files.items():
        try:
            check_file(directory / name, expected)
        except ReplayBufferError as error:
            shard.problems.append(str(error))
        if (directory / name).is_file():
            found = len(shard.groups), len(shard.problems)
            _read_segment(shard, directory / name, {}, has_all=False)
            num_groups = len(shard.groups) - found[0]
            if len(shard.problems) == found[1] and num_groups != expected["num_groups"]:
                shard.problems.append(
                    f"{directory / name} holds {num_groups} groups, the manifest says {expected['num_groups']}"
                )
    for path in sorted(directory.iterdir()):
        if path.name not in (MANIFEST, *files) and path.suffix not in _TEMPORARY:
            shard.problems.append(f'{path} is a foreign file: the manifest of this "{FORMAT}" does not list it')
    return shard


def _read_at(path: Path, offset: int, nbytes: int, name: str) -> bytes:
    try:
        with open(path, "rb") as file:
            message = os.pread(file.fileno(), nbytes, offset)
    except OSError as error:
        raise ReplayBufferError(f"{name}: cannot be read: {error.strerror}") from error
    if len(message) != nbytes:
        raise ReplayBufferError(f"{name}: the file is truncated, {len(message)} of {nbytes} bytes are there")
    return message


def _describe(message: bytes, name: str) -> EncodedGroup:
    try:
        return EncodedGroup(pa.py_buffer(message), describe(read_batch(message), len(message)))
    except ReplayBufferError as error:
        raise ReplayBufferError(f"{name}: {error}") from error


def iter_intact(groups: Iterable[StoredGroup], damaged: list[str]) -> Iterator[EncodedGroup]:
    """The groups that can be read; what is wrong with each of the others is added to `damaged`."""
    for group in groups:
        try:
            yield group.read()
        except ReplayBufferError as error:
            damaged.append(str(error))
