"""Moving policy weights from the learners to the engines.

A learner publishes a version as one file in shared memory plus a small manifest, which travels through the coordinator.
An engine of the same host maps that file; an engine of another host pulls it first, in chunks, over ZMQ.

    learner rank 0 -- publish --> /dev/shm/.../weights-00000007.bin <-- map -- engines of this host
                                          |  manifest (JSON): names, shapes, offsets, checksum
                                          +-- FileServer -- chunks --> pull --> file of another host <-- map -- engines

A published file is never written again: old versions are unlinked, so what an engine has mapped stays as it was. Knows
numpy and torch, no vLLM and no Ray.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from asyncrl.buffer.keys import CurveKeys, ServerKeys, ShardAddress
from asyncrl.errors import WeightSyncError
from asyncrl.file_server import FileServer, fetch

ALIGNMENT = 64
"""Bytes that a tensor's offset is a multiple of."""
HASH_BLOCK = 1 << 26
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Everything needed to find, check and read one published version.

    Attributes:
        version: policy version of the weights.
        host: identity of the machine that `path` belongs to.
        address: ZMQ endpoint that serves the file to other hosts; None: nowhere.
        checksum: xxh3 (64 bits, hex) of the whole file.
        public_key: CURVE key of the server behind `address`.
    """

    version: int
    host: str
    path: str
    address: str | None
    nbytes: int
    checksum: str
    tensors: tuple[TensorEntry, ...]
    public_key: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WeightManifest:
        try:
            tensors = tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in values["tensors"])
            return cls(**{**values, "tensors": tensors})
        except (KeyError, TypeError) as error:
            raise WeightSyncError(f"this is not a weight manifest: {error!r}") from error


def this_host() -> str:
    """Identity of this machine, the same for all its processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


class WeightPublisher:
    """Writes versions into a shared-memory folder and serves them to other hosts.

    Args:
        directory: folder of a memory file system, e.g. /dev/shm/asyncrl-RUN; made when missing.
        keep: versions that stay; publishing version V removes the older ones before it writes.
        host: address to serve on. Anything but loopback needs `keys`.
        keys: CURVE keys of the server.
    """

    def __init__(
        self, directory: str | Path, *, keep: int = 2, host: str = "127.0.0.1", keys: ServerKeys | None = None
    ) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._keep = keep
        self._published: list[tuple[int, Path]] = []
        self._server = FileServer(self._directory, host=host, keys=keys)

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Write one version, one tensor in memory at a time, and return its manifest.

        Raises:
            WeightSyncError: the version is not newer than the last one, a value is not finite, a name comes twice, or
                shared memory is full. Nothing of this version is left then; the one before it still is.
        """
        if self._published and version <= self._published[-1][0]:
            raise WeightSyncError(f"version {version} was published after version {self._published[-1][0]}")
        while len(self._published) >= self._keep:
            self._published.pop(0)[1].unlink(missing_ok=True)
        path = self._directory / f"weights-{version:08d}.bin"
        part = path.with_suffix(".part")
        try:
            entries, nbytes, checksum = _write(part, tensors)
            part.rename(path)
        except OSError as error:
            raise WeightSyncError(f"version {version} could not be written to {self._directory}: {error}") from error
        finally:
            part.unlink(missing_ok=True)
        self._published.append((version, path))
        return WeightManifest(
            version=version,
            host=this_host(),
            path=str(path),
            address=self._server.address.endpoint,
            nbytes=nbytes,
            checksum=checksum,
            tensors=entries,
            public_key=self._server.address.public_key,
        )

    def close(self) -> None:
        """Stop serving and remove the files; the folder too when it is empty then."""
        self._server.close()
        for _, path in self._published:
            path.unlink(missing_ok=True)
        self._published.clear()
        if self._directory.exists() and not any(self._directory.iterdir()):
            self._directory.rmdir()


def _write(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[tuple[TensorEntry, ...], int, str]:
    """Stream the tensors into a new file; returns entries, size and checksum."""
    entries: dict[str, TensorEntry] = {}
    digest = xxhash.xxh3_64()
    end = 0
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        for name, tensor in tensors:
            if name in entries:
                raise WeightSyncError(f"tensor {name} was published twice")
            data = _bytes_of(name, tensor)
            padding = -end % ALIGNMENT
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries[name] = TensorEntry(name, dtype, tuple(tensor.shape), end + padding, len(data))
            for chunk in (memoryview(bytes(padding)), data):
                if chunk:
                    _append(fd, chunk, end)
                    digest.update(chunk)
                    end += len(chunk)
    finally:
        os.close(fd)
    if not entries:
        raise WeightSyncError("no tensors to publish")
    return tuple(entries.values()), end, digest.hexdigest()


def _bytes_of(name: str, tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order, after checking that they are usable weights."""
    if tensor.dtype not in DTYPES.values():
        raise WeightSyncError(f"tensor {name} is {tensor.dtype}; weights are {', '.join(DTYPES)}")
    tensor = tensor.detach().to("cpu").contiguous()
    # One pass without a temporary; the exact count is made only when the sum says that something is wrong.
    if not math.isfinite(tensor.sum(dtype=torch.float32)):
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise WeightSyncError(f"tensor {name} has {bad} of {tensor.numel()} values that are not finite")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _append(fd: int, data: memoryview, offset: int) -> None:
    # Reserving first makes full shared memory an error here, and not a bus error in whoever maps the file.
    os.posix_fallocate(fd, offset, len(data))
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def open_weights(manifest: WeightManifest, *, check: bool = True) -> dict[str, torch.Tensor]:
    """Map a version of this host: name -> tensor, without a copy. They stay valid when the file is removed.

    Args:
        check: verify the checksum; False after `verify`.

    Raises:
        WeightSyncError: the file is gone, has another size or checksum, or the manifest contradicts itself.
    """
    _check_layout(manifest)
    data = _map(manifest)
    if check:
        _check_sum(manifest, data)
    return {
        entry.name: torch.frombuffer(
            data, dtype=DTYPES[entry.dtype], count=math.prod(entry.shape), offset=entry.offset
        ).view(entry.shape)
        for entry in manifest.tensors
    }


def verify(manifest: WeightManifest) -> None:
    """Check layout, size and checksum of a version of this host. Raises WeightSyncError."""
    _check_layout(manifest)
    _check_sum(manifest, _map(manifest))


def _map(manifest: WeightManifest) -> mmap.mmap:
    try:
        with open(manifest.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != manifest.nbytes or not size:
                raise WeightSyncError(f"{manifest.path} has {size} bytes; its manifest says {manifest.nbytes}")
            # Private and writable: torch asks for writable memory, and nobody's writes reach the file.
            return mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise WeightSyncError(
            f"weights of version {manifest.version} cannot be opened ({error}); they may have been replaced by a "
            "newer version"
        ) from error


def _check_sum(manifest: WeightManifest, data: mmap.mmap) -> None:
    digest = xxhash.xxh3_64()
    with memoryview(data) as view:
        for start in range(0, len(view), HASH_BLOCK):
            digest.update(view[start : start + HASH_BLOCK])
    if digest.hexdigest() != manifest.checksum:
        raise WeightSyncError(
            f"weights of version {manifest.version} are damaged: {manifest.path} has checksum {digest.hexdigest()}, "
            f"its manifest says {manifest.checksum}"
        )


def _check_layout(manifest: WeightManifest) -> None:
    names = set()
    for entry in manifest.tensors:
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise WeightSyncError(f"tensor {entry.name} has the unknown type {entry.dtype!r}")
        wrong_size = entry.nbytes != math.prod(entry.shape) * dtype.itemsize
        if entry.name in names or wrong_size or not 0 <= entry.offset <= manifest.nbytes - entry.nbytes:
            raise WeightSyncError(f"the manifest of version {manifest.version} contradicts itself at {entry}")
        names.add(entry.name)


def pull(
    manifest: WeightManifest, directory: str | Path, *, client_keys: CurveKeys | None = None, timeout_s: float = 60.0
) -> WeightManifest:
    """Make a version readable on this host: unchanged where it already is, else fetched into `directory`.

    Older versions in `directory` are removed, except the one before.

    Raises:
        WeightSyncError: the publisher does not answer, no longer has the version, or the data arrived damaged.
    """
    if manifest.host == this_host() and os.path.exists(manifest.path):
        return manifest
    if manifest.address is None:
        raise WeightSyncError(f"weights of version {manifest.version} are on host {manifest.host}, which serves none")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / Path(manifest.path).name
    local = replace(manifest, host=this_host(), path=str(path), address=None, public_key=None)
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            fetch(
                ShardAddress(manifest.address, manifest.public_key),
                path.name,
                manifest.nbytes,
                part,
                client_keys=client_keys,
                timeout_s=timeout_s,
            )
            verify(replace(local, path=str(part)))
            part.rename(path)
        except OSError as error:
            raise WeightSyncError(f"version {manifest.version} could not be written to {directory}: {error}") from error
        finally:
            part.unlink(missing_ok=True)
    for old in sorted(directory.glob("weights-*.bin"))[:-2]:
        old.unlink(missing_ok=True)
    return local
