"""The buffers that benchmarks/buffer.py compares: each has a server, in the main process, and clients elsewhere."""

from __future__ import annotations

import importlib
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from buffer_others import (
    BlobClient,
    BlobServer,
    RayClient,
    RayQueueClient,
    RayQueueServer,
    RayServer,
    TorchRLClient,
    TorchRLServer,
)
from buffer_workload import SAMPLE_GROUPS, Client, Packed, Server, resident_bytes

from asyncrl.buffer import Columns, Lease, ReplayBuffer, ShardAddress, ShardServer, StoreSettings, shared_memory
from asyncrl.types import Group

APPEND_GROUPS = 32
LEASE_GROUPS = 64
_SPAWN = multiprocessing.get_context("spawn")


# asyncrl


def serve_shard(pipe: Any, directory: str, durability: Any) -> None:
    server = ShardServer(directory, settings=StoreSettings(durability=durability, capacity_bytes=1 << 40))
    pipe.send(server.start().to_dict())
    pipe.recv()
    server.stop()


class AsyncRLServer(Server):
    """Shards in processes of their own, in shared memory or in a folder on disk."""

    def __init__(self, num_groups: int, *, durability: str = "memory", num_shards: int = 1, root: str = "") -> None:
        self.directory = tempfile.mkdtemp(prefix="asyncrl-bench-", dir=root or shared_memory())
        self._durability, self._num_shards = durability, num_shards
        self.processes: list[Any] = []
        self.start()

    def start(self) -> None:
        pipes = [_SPAWN.Pipe() for _ in range(self._num_shards)]
        self.processes = [
            _SPAWN.Process(target=serve_shard, args=(theirs, f"{self.directory}/{i}", self._durability), daemon=True)
            for i, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        self._pipes = [ours for ours, _ in pipes]
        self.config = [pipe.recv() for pipe in self._pipes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def memory(self) -> int:
        with ReplayBuffer([ShardAddress.from_dict(address) for address in self.config]) as buffer:
            return buffer.stats().held_bytes + sum(resident_bytes(process.pid) for process in self.processes)

    def stop(self) -> None:
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
                process.join()
        shutil.rmtree(self.directory, ignore_errors=True)


class AsyncRLClient(Client):
    """Reads the groups of a lease while the next lease is taken and the last one committed, as the coordinator does."""

    lease_groups = LEASE_GROUPS

    def __init__(self, config: Any) -> None:
        self._buffer = ReplayBuffer([ShardAddress.from_dict(address) for address in config])
        self._groups: list[Group] = []
        self._leaser = ThreadPoolExecutor(1)
        self._next = self._leaser.submit(lambda: None)
        self._lease: Any = None
        self._at = 0

    def put(self, group: Group) -> None:
        self._groups.append(group)
        if len(self._groups) == APPEND_GROUPS:
            self.flush()

    def flush(self) -> None:
        self._buffer.append_many(self._groups)
        self._groups = []

    def sample(self) -> Packed | None:
        if self._lease is None:
            self._lease, self._at = self._next.result(), 0
            self._next = self._leaser.submit(self._take)
            if self._lease is None:
                return None
        columns = self._buffer.read_columns(self._lease.refs[self._at : self._at + SAMPLE_GROUPS])
        self._at += SAMPLE_GROUPS
        if self._at == self.lease_groups:
            self._leaser.submit(self._buffer.commit, self._lease)
            self._lease = None
        return pack_columns(columns)

    def _take(self) -> Lease | None:
        return self._buffer.lease(self.lease_groups, policy_version=1000, max_staleness=1000)

    def close(self) -> None:
        self._leaser.shutdown()
        self._buffer.close()


class SmallLeaseClient(AsyncRLClient):
    """Every sample is a lease of its own, committed before the next one."""

    def sample(self) -> Packed | None:
        lease = self._buffer.lease(SAMPLE_GROUPS, policy_version=1000, max_staleness=1000)
        if lease is None:
            return None
        packed = pack_columns(self._buffer.read_columns(lease.refs))
        self._buffer.commit(lease)
        return packed


def pack_columns(columns: Columns) -> Packed:
    starts, ends = columns.token_offsets, columns.response_offsets.tolist()
    packed: Packed = {"tokens": columns.tokens, "starts": starts, "rewards": columns.rewards}
    begins = (starts[:-1] + columns.prompt_lengths).tolist()
    for name, values in (
        ("logprobs", columns.behaviour_logprobs),
        ("versions", columns.policy_versions),
        ("mask", columns.loss_mask),
    ):
        aligned = packed[name] = np.zeros(columns.tokens.size, values.dtype)
        for begin, a, b in zip(begins, ends, ends[1:], strict=False):
            aligned[begin : begin + b - a] = values[a:b]
    return packed


@dataclass(frozen=True)
class Peer:
    """A buffer to measure. fork: its clients inherit the server's objects."""

    name: str
    server: Callable[..., Any]
    client: Callable[[Any], Any]
    needs: str = ""
    fork: bool = False

    @property
    def is_here(self) -> bool:
        try:
            for module in self.needs.split():
                importlib.import_module(module)
        except ImportError:
            return False
        return True


ASYNCRL = Peer("asyncrl", AsyncRLServer, AsyncRLClient)
PEERS = (
    ASYNCRL,
    Peer("asyncrl, lease each", AsyncRLServer, SmallLeaseClient),
    Peer("plain ZMQ server", BlobServer, BlobClient),
    Peer("Ray actor by value", RayServer, RayClient, "ray"),
    Peer("ray.util.queue", RayQueueServer, RayQueueClient, "ray"),
    Peer("torchrl LazyMemmap", TorchRLServer, TorchRLClient, "torchrl tensordict", fork=True),
)
