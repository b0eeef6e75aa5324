"""Snapshots: the groups of every shard as Arrow IPC files, and a manifest that says what is whole.

    DIR/manifest.json          policy version, and for every file its groups, bytes and xxh3; written last
    DIR/shard-0.arrow ...      the groups as they were stored, readable by any Arrow tool

A shard notes what it holds at one moment and copies it on a thread of its own while writes and leases go on.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from asyncrl.buffer.records import Entry
from asyncrl.buffer.schema import EncodedGroup, check_schema, describe
from asyncrl.buffer.segments import PREFIX, SegmentReader, aligned, pwrite_all, tail
from asyncrl.errors import ReplayBufferError

MANIFEST = "manifest.json"
FORMAT = "asyncrl buffer snapshot 1"
_PAUSE = 0.5
"""Of the time that copying takes, after every _PAUSE_BYTES: those who sample meanwhile shall hardly notice."""
_PAUSE_BYTES = 4 << 20
_READ_ATTEMPTS, _READ_PAUSE_S = 4, 0.02


class SnapshotWriter:
    """Copies groups to one file. Their segments must stay until poll() says that it is done.

    Args:
        path_of: the file of a segment by its number; it is renamed when it is full and moves when it is spilled.
    """

    def __init__(self, path: Path, groups: Sequence[Entry], path_of: Callable[[int], str]) -> None:
        self._path = path
        self._groups = groups
        self._path_of = path_of
        self._result: dict[str, Any] = {}
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poll(self) -> bool:
        """Whether it ended, well or not."""
        return not self._thread.is_alive()

    def result(self) -> dict[str, Any]:
        """What the manifest says of the file. Raises ReplayBufferError when it could not be written."""
        if self._error is not None:
            raise ReplayBufferError(f"the snapshot {self._path} could not be written: {self._error}")
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._write()
        except (ReplayBufferError, OSError) as error:
            self._error = str(error)

    def _write(self) -> dict[str, Any]:
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        reader, digest, blocks, end = SegmentReader(), xxhash.xxh3_64(), [], 0
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

        def write(data: bytes) -> None:
            nonlocal end
            pwrite_all(fd, data, end)
            digest.update(data)
            end += len(data)

        try:
            write(PREFIX)
            began, pause_at = time.monotonic(), _PAUSE_BYTES
            for entry in sorted(self._groups, key=lambda entry: entry.ref.number):
                message = self._read(reader, entry)
                blocks.append((end, entry.metadata_length, entry.ref.nbytes - entry.metadata_length))
                write(message.ljust(aligned(len(message)), b"\0"))
                if end > pause_at:
                    time.sleep(_PAUSE * (time.monotonic() - began))
                    began, pause_at = time.monotonic(), end + _PAUSE_BYTES
            write(tail(blocks))
            os.fsync(fd)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
            reader.close()
        temporary.replace(self._path)
        uses = {entry.ref.group_id.hex(): entry.uses for entry in self._groups if entry.uses}
        return {"num_groups": len(blocks), "num_bytes": end, "xxh3": digest.hexdigest(), "uses": uses}

    def _read(self, reader: SegmentReader, entry: Entry) -> bytes:
        error: ReplayBufferError | None = None
        for _ in range(_READ_ATTEMPTS):
            path = self._path_of(entry.segment)
            try:
                message = reader.read(path, entry.offset, entry.ref.nbytes)
                if xxhash.xxh3_64_intdigest(message) == entry.checksum:
                    return message
                error = ReplayBufferError(f"group {entry.ref.number} is corrupted in {path}")
            except ReplayBufferError as gone:
                error = gone
            time.sleep(_READ_PAUSE_S)  # the shard may be renaming it
        assert error is not None
        raise error


def write_manifest(directory: Path, files: dict[str, dict[str, Any]], *, policy_version: int) -> None:
    """Makes the snapshot valid: whatever came before it may be torn."""
    manifest = {"format": FORMAT, "policy_version": policy_version, "files": files}
    manifest["xxh3"] = _digest(manifest)
    temporary = directory / f".{MANIFEST}.tmp"
    with open(temporary, "w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / MANIFEST)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Raises ReplayBufferError unless the folder holds a whole snapshot, every byte as it was written."""
    manifest = read_manifest_file(directory)
    for name, expected in manifest["files"].items():
        check_file(directory / name, expected)
    return manifest


def read_manifest_file(directory: Path) -> dict[str, Any]:
    """The manifest alone. Raises ReplayBufferError when there is none that this asyncrl wrote."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise ReplayBufferError(f"{directory} is not a buffer snapshot: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise ReplayBufferError(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ReplayBufferError(f'{path} does not say "{FORMAT}": it was not written by this version of asyncrl')
    try:
        is_whole = all(
            Path(name).name == name and {"num_groups", "num_bytes", "xxh3"} <= set(expected)
            for name, expected in manifest["files"].items()
        ) and isinstance(manifest["policy_version"], int)
    except (KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise ReplayBufferError(f"{path} is damaged: it does not list files with their groups, bytes and checksums")
    if manifest.pop("xxh3", None) != _digest(manifest):
        raise ReplayBufferError(f"{path} is corrupted: its xxh3 does not match")
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def check_file(path: Path, expected: dict[str, Any]) -> None:
    """Raises ReplayBufferError when the file is missing, truncated or changed."""
    try:
        size = path.stat().st_size
        if size != expected["num_bytes"]:
            raise ReplayBufferError(
                f"{path} is truncated: it has {size} bytes, the manifest says {expected['num_bytes']}"
            )
        digest = xxhash.xxh3_64()
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise ReplayBufferError(f"{path} cannot be read: {error.strerror}") from error
    if digest.hexdigest() != expected["xxh3"]:
        raise ReplayBufferError(
            f"{path} is corrupted: its xxh3 is {digest.hexdigest()}, the manifest says {expected['xxh3']}"
        )


def read_groups(path: Path, uses: Mapping[str, int] | None = None) -> Iterator[EncodedGroup]:
    """The groups of an Arrow IPC file (a sealed segment or a snapshot's file), each checked.

    Args:
        uses: how often groups were trained on, by id in hex.
    """
    try:
        source = pa.memory_map(str(path))
    except (pa.ArrowException, OSError) as error:
        raise ReplayBufferError(f"{path} cannot be read: {error}") from error
    with source:
        try:
            reader = pa.ipc.open_file(source)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ReplayBufferError(f"{path} is not an Arrow IPC file, or is truncated: {error}") from error
        check_schema(reader.schema, what=str(path))
        for index in range(reader.num_record_batches):
            try:
                batch = reader.get_batch(index)
                message = batch.serialize()
                ref = describe(batch, message.size)
                yield EncodedGroup(message, ref, (uses or {}).get(ref.group_id.hex(), 0))
            except (pa.ArrowException, OSError, ReplayBufferError) as error:
                raise ReplayBufferError(f"{path}, group {index}: {error}") from error
