"""Which segments a shard has: granted to writers, sealed, spilled to disk, or empty and waiting to be used again."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from asyncrl.buffer.records import NO_ID, Entry, Kind, pack_block, pack_event
from asyncrl.buffer.segments import OPEN, PREFIX, SEALED, aligned, open_segment, seal_segment, segment_path
from asyncrl.errors import ReplayBufferError

logger = logging.getLogger(__name__)

Durability = Literal["memory", "disk", "fsync"]
NUM_RECYCLED = 8
RECYCLED, TEMPORARY = ".recycled", ".tmp"


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What a shard does with its groups' bytes.

    Attributes:
        durability: memory: files in shared memory; they survive any process but not the machine. disk: files on disk,
            written out by the kernel. fsync: on disk before a group is acknowledged.
        capacity_bytes: a shard whose segments take this much takes no more groups until some are gone.
        memory_bytes: (memory) beyond this, sealed segments move to spill_dir, oldest first.
        keep: never reuse a segment: the whole run stays readable.
        segment_bytes: of one segment file; a group that is larger gets one of its own.
    """

    durability: Durability = "memory"
    capacity_bytes: int = 16 << 30
    memory_bytes: int | None = None
    spill_dir: Path | None = None
    keep: bool = False
    segment_bytes: int = 4 << 20


@dataclass(slots=True)
class Segment:
    """One segment file.

    Attributes:
        used: end of the last message, in bytes.
        blocks: (offset, metadata, body) bytes of every message that was ever acknowledged, for the footer.
        num_live: groups that are still held, and copies of the segment in progress; at 0 a sealed segment is recycled.
        writer: who may append; NO_ID when sealed.
    """

    number: int
    path: str
    capacity: int
    writer: bytes
    used: int = len(PREFIX)
    num_live: int = 0
    spilled: bool = False
    blocks: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return self.writer != NO_ID


def segment_files(directory: Path) -> list[Path]:
    """Every segment file in a folder, sealed or open, in the order of their numbers; [] where there is no folder."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.suffix in (SEALED, OPEN))


class SegmentTable:
    """All segments of one shard, in `directory`.

    Args:
        log: ShardLog.write; writes records, before anything depends on them.
    """

    def __init__(self, directory: Path, settings: StoreSettings, *, log: Callable[..., None]) -> None:
        self._directory = directory
        self._settings = settings
        self._sync = settings.durability == "fsync"
        self._log = log
        self._segments: dict[int, Segment] = {}
        self._recycled: list[str] = []
        self._last = 0
        self._recovering = True

    def __getitem__(self, number: int) -> Segment:
        return self._segments[number]

    def get(self, number: int) -> Segment | None:
        return self._segments.get(number)

    def open_segments(self) -> Iterator[Segment]:
        return (s for s in list(self._segments.values()) if s.is_open)

    @property
    def bytes_in_use(self) -> int:
        """Of all segments that hold groups or may get them; kept ones that hold none are not counted."""
        return sum(s.capacity if s.is_open else s.used for s in self._segments.values() if s.is_open or s.num_live)

    @property
    def recycled_bytes(self) -> int:
        return sum(os.path.getsize(path) for path in self._recycled)

    def grant(self, writer: bytes, num_bytes: int) -> Segment | None:
        """A segment with room for a message of that size, for this writer alone; None when the shard is full.

        Raises ReplayBufferError when there is no room on the disk, to spill to or for the segment itself.
        """
        capacity = max(self._settings.segment_bytes, len(PREFIX) + aligned(num_bytes))
        if self.bytes_in_use + capacity > self._settings.capacity_bytes:
            return None
        self._spill_if_over_budget()
        number = self._last + 1
        path = segment_path(self._directory, number, sealed=False)
        used = max(self._recycled, key=os.path.getsize, default=None)  # a full disk gives no more pages
        open_segment(path, used)
        if used is not None:
            self._recycled.remove(used)
        self._log(pack_event(Kind.GRANT, owner=writer, segment=number, number=capacity), grows=True)
        return self.granted(number, writer, capacity)

    def granted(self, number: int, writer: bytes, capacity: int) -> Segment:
        """Take note of a segment that was granted now, or by the process before this one."""
        self._last = max(self._last, number)
        path = segment_path(self._directory, number, sealed=False)
        segment = self._segments[number] = Segment(number, path, capacity, writer)
        return segment

    def check(self, entry: Entry, writer: bytes) -> Segment:
        """The entry's segment. Raises ReplayBufferError when this writer may not have written there."""
        segment = self._segments.get(entry.segment)
        if segment is None or segment.writer != writer:
            raise ReplayBufferError(f"segment {entry.segment} of this shard is not open for this writer any more")
        if entry.offset < len(PREFIX) or entry.offset + entry.ref.nbytes > segment.capacity:
            raise ReplayBufferError(
                f"group {entry.ref.number} does not fit where it says it is: bytes {entry.offset} to "
                f"{entry.offset + entry.ref.nbytes} of a segment of {segment.capacity}"
            )
        return segment

    def add(self, entry: Entry) -> None:
        """A group was appended."""
        self.note_block(entry)
        self._segments[entry.segment].num_live += 1

    def note_block(self, entry: Entry) -> None:
        """A message was written, whatever became of its group."""
        segment = self._segments[entry.segment]
        block = (entry.offset, entry.metadata_length, entry.ref.nbytes - entry.metadata_length)
        if self._recovering and block in segment.blocks:
            return
        segment.used = max(segment.used, entry.offset + aligned(entry.ref.nbytes))
        segment.blocks.append(block)

    def drop(self, number: int) -> None:
        """A group of this segment, or a copy in progress, is gone."""
        segment = self._segments[number]
        segment.num_live -= 1
        if not segment.num_live and not segment.is_open and not self._recovering:
            self._recycle(segment)

    def seal(self, segment: Segment) -> None:
        """No more groups go into this segment; its file becomes an Arrow IPC file, unless nobody will read it.

        On a full disk it stays as it is, for this process alone to read, until its groups are gone or the next process
        seals it.
        """
        self._log(pack_event(Kind.SEAL, segment=segment.number))
        if segment.num_live or self._settings.keep:
            try:
                segment.path = seal_segment(segment.path, segment.used, segment.blocks, sync=self._sync)
            except ReplayBufferError as error:
                logger.warning("a segment has no footer yet: %s", error)
        segment.writer = NO_ID
        if not segment.num_live:
            self._recycle(segment)

    def recover(self) -> None:
        """After the records of an earlier process were replayed: put the files in the state that they say."""
        self._recovering = False
        for segment in list(self._segments.values()):
            sealed = segment_path(self._directory, segment.number, sealed=True)
            if segment.spilled:
                segment.path = self._spilled_path(segment.number)
            elif os.path.exists(sealed):
                segment.path, segment.writer = sealed, NO_ID
            elif not segment.is_open and os.path.exists(segment.path):
                segment.path = seal_segment(segment.path, segment.used, segment.blocks, sync=self._sync)
            if segment.is_open or segment.num_live:
                continue
            if os.path.exists(segment.path):
                self._recycle(segment)
            else:
                del self._segments[segment.number]  # recycled before
        known = {segment.path for segment in self._segments.values()}
        for directory in (self._directory, self._settings.spill_dir):
            for path in () if directory is None or not directory.is_dir() else directory.iterdir():
                if path.suffix == RECYCLED and directory == self._directory and str(path) not in self._recycled:
                    self._recycled.append(str(path))
                elif path.suffix in (SEALED, OPEN, TEMPORARY) and str(path) not in known:
                    path.unlink()

    def records(self) -> Iterator[bytes]:
        """What a compacted log has to say about the segments, without their groups."""
        if self._last not in self._segments:  # its number is not given again: clients may have its file open
            yield pack_event(Kind.GRANT, segment=self._last)
        for s in self._segments.values():
            yield pack_event(Kind.GRANT, owner=s.writer, segment=s.number, number=s.capacity)
            if s.is_open and self._settings.keep:  # groups that are gone stay in its footer
                yield from (pack_block(s.number, block) for block in s.blocks)

    def seals(self) -> Iterator[bytes]:
        """What it says after the groups."""
        for s in self._segments.values():
            if s.spilled:
                yield pack_event(Kind.SPILL, segment=s.number)
            elif not s.is_open:
                yield pack_event(Kind.SEAL, segment=s.number)

    def _recycle(self, segment: Segment) -> None:
        if self._settings.keep:
            return
        del self._segments[segment.number]
        if segment.spilled or len(self._recycled) >= NUM_RECYCLED or segment.capacity > self._settings.segment_bytes:
            Path(segment.path).unlink(missing_ok=True)
        else:
            self._reuse(segment.path)

    def _reuse(self, path: str) -> None:
        """Keep the pages of a file for the next segment, under a name that no reader takes for a sealed one."""
        name = os.path.join(self._directory, Path(path).stem + RECYCLED)
        os.rename(path, name)
        self._recycled.append(name)

    def _spill_if_over_budget(self) -> None:
        if self._settings.memory_bytes is None:
            return
        in_memory = [s for s in self._segments.values() if not s.spilled]
        excess = sum(s.capacity if s.is_open else s.used for s in in_memory) - self._settings.memory_bytes
        for segment in in_memory:
            if excess <= 0:
                return
            if not segment.is_open:
                excess -= segment.used
                self._spill(segment)

    def _spill(self, segment: Segment) -> None:
        target = self._spilled_path(segment.number)
        temporary = target + TEMPORARY
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copyfile(segment.path, temporary)
            if self._sync:
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
            os.rename(temporary, target)
        except OSError as error:
            Path(temporary).unlink(missing_ok=True)
            raise ReplayBufferError(f"a segment cannot be moved to {target}: {error.strerror}") from error
        self._log(pack_event(Kind.SPILL, segment=segment.number))
        in_memory = segment.path
        segment.path, segment.spilled = target, True
        if len(self._recycled) < NUM_RECYCLED:
            self._reuse(in_memory)
        else:
            os.unlink(in_memory)

    def _spilled_path(self, number: int) -> str:
        assert self._settings.spill_dir is not None
        return segment_path(self._settings.spill_dir, number, sealed=True)
