"""One shard as a client uses it: through files where both are on one host, through the socket where they are not.

same host     client --pwrite--> segment file <--pread-- client       only index entries cross the socket
elsewhere     client --Arrow messages over ZMQ--> shard --> its segment file
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from asyncrl.buffer.connection import Connection
from asyncrl.buffer.records import Entry, pack_entry, unpack_records
from asyncrl.buffer.schema import EncodedGroup
from asyncrl.buffer.segments import IDENTITY, WRITERS, SegmentReader, SegmentWriter, WriterLock, metadata_length
from asyncrl.buffer.wire import MAX_FRAME_BYTES, Message
from asyncrl.errors import ReplayBufferError

Location = tuple[Entry, str]
"""Where a group lies: its entry and the segment file."""
Result = bool | str | None
"""Of an append: stored, known already, the words of the refusal, or None: the shard takes no more."""


class RemoteShard:
    """Thread-safe. `group_bytes` is what the shard's groups took at the last append; `request` and `post` are those of
    its `connection`. Renewals have one of their own: no request to this shard, or to another, may hold them up."""

    def __init__(self, connection: Connection, *, renewals: Connection) -> None:
        self.endpoint = connection.endpoint
        self.group_bytes = 0
        self.draining = False
        self.request, self.post = connection.request, connection.post
        self.connection = connection
        self._renewals = renewals
        self._lock = threading.Lock()  # of the writer and the reader
        self._directory: Path | None = None
        self._greeted = False
        self._writer_id = uuid.uuid4().bytes
        self._writer = SegmentWriter()
        self._writer_lock: WriterLock | None = None
        self._reader = SegmentReader()

    @property
    def is_local(self) -> bool:
        """Whether the shard's files are this host's. Asks the shard at the first call."""
        with self._lock:
            self._greet()
        return self._directory is not None

    def append(self, groups: Sequence[EncodedGroup]) -> list[Result]:
        """Store groups. After a timeout the same call may be repeated: what the shard has it ignores."""
        with self._lock:
            self._greet()
            if self._directory is None:
                return self._append_over_socket(groups)
            return self._append_to_files(groups)

    def read(self, groups: Mapping[bytes, Location | None]) -> dict[bytes, Any]:
        """The messages of held groups, each checked against its checksum. A location saves asking the shard for it.

        Raises ReplayBufferError when one is gone or corrupted; the shard gives a corrupted one up.
        """
        with self._lock:
            self._greet()
            messages: dict[bytes, Any] = {}
            if self._directory is not None:
                for group_id, location in groups.items():
                    if location is not None and (message := self._read_file(*location)) is not None:
                        messages[group_id] = message
            rest = [group_id for group_id in groups if group_id not in messages]
            return messages | self._ask(rest) if rest else messages

    def _ask(self, group_ids: Sequence[bytes]) -> dict[bytes, Any]:
        """Messages of groups whose place is not known, or is not here."""
        ids = b"".join(group_ids)
        if self._directory is None:
            reply = self.request("read", {}, [ids])
            entries = [record.entry for record in unpack_records(reply.payloads[0])]
            found = [m if _is_intact(e, m) else None for e, m in zip(entries, reply.payloads[1:], strict=True)]
        else:
            reply = self.request("locate", {}, [ids])
            entries = [record.entry for record in unpack_records(reply.frame())]
            found = [self._read_file(e, path) for e, path in zip(entries, reply.items("paths"), strict=True)]
        for entry, message in zip(entries, found, strict=True):
            if message is None:
                self._refuse(entry)
        return dict(zip(group_ids, found, strict=True))

    def _read_file(self, entry: Entry, path: str) -> bytes | None:
        """A private copy, or None when it is not there as recorded (any more)."""
        try:
            message = self._reader.read(path, entry.offset, entry.ref.nbytes)
        except ReplayBufferError:
            return None
        return message if _is_intact(entry, message) else None

    def close(self) -> None:
        with self._lock:
            self._writer.close()
            self._reader.close()
            if self._writer_lock is not None:
                self._writer_lock.close()
                self._writer_lock = None
        self.connection.close()
        self._renewals.close()

    def renew(self, leases: Sequence[bytes]) -> None:
        """Tell the shard that the holder of these leases lives. Does not wait for an answer."""
        self._renewals.post("renew", {"leases": [lease.hex() for lease in leases]})

    def _greet(self) -> None:
        if self._greeted:
            return
        reply = self.request("hello", {})
        directory = Path(reply.text("directory"))
        try:
            token = json.loads((directory / IDENTITY).read_text())["token"]
            if token == reply.text("token") and os.access(directory / WRITERS, os.W_OK):
                self._directory = directory
        except (OSError, ValueError, KeyError):
            pass  # another host, another container or another user: the socket it is
        self._greeted = True

    def _append_over_socket(self, groups: Sequence[EncodedGroup]) -> list[Result]:
        results: list[Result] = []
        batch: list[EncodedGroup] = []
        for group in [*groups, None]:
            if batch and (group is None or sum(g.message.size for g in batch) + group.message.size > MAX_FRAME_BYTES):
                checksums = [f"{xxhash.xxh3_64_intdigest(g.message):016x}" for g in batch]
                fields = {"checksums": checksums, "uses": [g.uses for g in batch]}
                reply = self.request("append_messages", fields, [g.message for g in batch])
                results += self._results(reply, len(batch))
                batch = []
            if group is not None:
                batch.append(group)
        return results

    def _append_to_files(self, groups: Sequence[EncodedGroup]) -> list[Result]:
        results: list[Result] = []
        written: list[bytes] = []
        for group in groups:
            offset = self._writer.write(group.message)
            if offset is None:  # no room for it, or none on the disk: a segment that was used before may have some
                results += self._acknowledge(written)
                written = []
                if not self._next_segment(group.message.size):
                    return results + [None] * (len(groups) - len(results))
                offset = self._writer.write(group.message, or_fail=True)
                assert offset is not None
            entry = Entry(
                group.ref,
                self._writer.number,
                offset,
                metadata_length(group.message),
                xxhash.xxh3_64_intdigest(group.message),
                group.uses,
            )
            written.append(pack_entry(entry))
        return results + self._acknowledge(written)

    def _acknowledge(self, written: list[bytes]) -> list[Result]:
        if not written:
            return []
        reply = self.request("append", {"writer": self._writer_id.hex()}, [b"".join(written)])
        results = self._results(reply, len(written))
        if any(isinstance(answer, str) for answer in results):
            self._writer.close()  # the shard may have closed the segment
        return results

    def _results(self, reply: Message, num: int) -> list[Result]:
        results = reply.items("results")
        if len(results) != num:
            raise ReplayBufferError(f"buffer shard {self.endpoint} answered {len(results)} of {num} appends")
        self.group_bytes = reply.integer("bytes")
        self.draining = self.draining or bool(reply.header.get("draining"))
        return results

    def _next_segment(self, num_bytes: int) -> bool:
        """Go on in another segment; False when the shard is full or draining."""
        assert self._directory is not None
        if self._writer_lock is None:
            self._writer_lock = WriterLock(self._directory / WRITERS / self._writer_id.hex())
        fields = {"writer": self._writer_id.hex(), "num_bytes": num_bytes, "seal": self._writer.number}
        self._writer.close()  # before the shard seals it, and so also when its answer is late
        reply = self.request("grant", fields)
        if reply.header.get("segment") is None:
            self.draining = bool(reply.header.get("draining"))
            return False
        self._writer.start(reply.integer("segment"), reply.text("path"), reply.integer("capacity"))
        return True

    def _refuse(self, entry: Entry) -> NoReturn:
        reply = self.request("quarantine", {}, [entry.ref.group_id])
        given_up = "it was given up" if reply.items("quarantined")[0] else "the shard's own copy is intact, try again"
        raise ReplayBufferError(
            f"group {entry.ref.number} ({entry.ref.group_id.hex()}) from {self.endpoint} is corrupted: its bytes do "
            f"not match the xxh3 checksum {entry.checksum:016x} that was recorded; {given_up}"
        )


def _is_intact(entry: Entry, message: Any) -> bool:
    return xxhash.xxh3_64_intdigest(message) == entry.checksum
