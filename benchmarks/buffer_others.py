"""The other buffers of benchmarks/buffer.py: a plain ZMQ server, Ray, torchrl."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from buffer_workload import (
    GROUP_SIZE,
    MAX_TOKENS,
    PROMPT_TOKENS,
    SAMPLE_GROUPS,
    Client,
    Packed,
    Server,
    make_pool,
    pack,
    pack_groups,
    resident_bytes,
)

from asyncrl.buffer import shared_memory
from asyncrl.types import Group, Rollout

_SPAWN = multiprocessing.get_context("spawn")
_DTYPES = (np.int32, np.bool_, np.float32, np.int32)


# A plain ZMQ server: blobs in a list, the oldest overwritten; no checksum, no log, no lease, no index.


def serve_blobs(pipe: Any, capacity: int) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    pipe.send(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
    blobs: list[Any] = []
    rng, oldest = random.Random(0), 0
    while True:
        client, *frames = socket.recv_multipart(copy=False)
        if len(frames) == 1:
            reply = rng.choices(blobs, k=SAMPLE_GROUPS) if blobs else [b""]
            socket.send_multipart([client.bytes, *reply], copy=False)
            continue
        if len(blobs) < capacity:
            blobs.append(frames[1])
        else:
            blobs[oldest % capacity] = frames[1]
            oldest += 1
        socket.send_multipart([client.bytes, b""])


class BlobServer(Server):
    consumes = False

    def __init__(self, num_groups: int) -> None:
        pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=serve_blobs, args=(theirs, num_groups), daemon=True)
        self._process.start()
        self.config = pipe.recv()

    def memory(self) -> int:
        return resident_bytes(self._process.pid or 0)

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


class BlobClient(Client):
    WINDOW = 8

    def __init__(self, config: Any) -> None:
        self._socket = zmq.Context().socket(zmq.DEALER)
        self._socket.connect(config)
        self._unanswered = 0

    def put(self, group: Group) -> None:
        columns = zip(*(arrays_of(rollout) for rollout in group.rollouts), strict=True)
        head = np.array([(r.response.size, r.reward) for r in group.rollouts], np.float64)
        blob = b"".join([group.group_id, head, group.prompt_tokens, *(array for column in columns for array in column)])
        self._socket.send_multipart([b"put", blob], copy=False)
        self._unanswered += 1
        self._wait(self.WINDOW - 1)

    def flush(self) -> None:
        self._wait(0)

    def _wait(self, most: int) -> None:
        while self._unanswered > most:
            self._socket.recv()
            self._unanswered -= 1

    def sample(self) -> Packed | None:
        self._socket.send(b"sample")
        frames = self._socket.recv_multipart(copy=False)
        if len(frames) == 1:
            return None
        rows = [row for frame in frames for row in self._rows(frame.buffer)]
        return pack([prompt for prompt, _ in rows], [rollout for _, rollout in rows])

    @staticmethod
    def _rows(blob: Any) -> Iterator[tuple[np.ndarray, Rollout]]:
        head = np.frombuffer(blob, np.float64, 2 * GROUP_SIZE, 16)
        ends = np.cumsum(head[::2]).astype(int).tolist()
        at = 16 + head.nbytes
        prompt = np.frombuffer(blob, np.int32, PROMPT_TOKENS, at)
        at += prompt.nbytes
        columns = []
        for dtype in _DTYPES:
            columns.append(np.frombuffer(blob, dtype, ends[-1], at))
            at += columns[-1].nbytes
        for start, end, reward in zip([0, *ends], ends, head[1::2].tolist(), strict=False):
            yield prompt, Rollout(*(column[start:end] for column in columns), reward, "stop", 0.0)


def arrays_of(rollout: Rollout) -> tuple[np.ndarray, ...]:
    return rollout.response, rollout.loss_mask, rollout.behaviour_logprobs, rollout.policy_versions


# Ray


class Mailbox:
    """An actor that holds pickled groups by value, first in, first out."""

    def __init__(self, capacity: int) -> None:
        self._blobs: list[bytes] = []
        self._capacity = capacity

    def put(self, blob: bytes) -> None:
        self._blobs.append(blob)
        del self._blobs[: -self._capacity]

    def take(self, count: int) -> list[bytes]:
        if len(self._blobs) < count:
            return []
        taken, self._blobs = self._blobs[:count], self._blobs[count:]
        return taken

    def pid(self) -> int:
        return os.getpid()


class RayServer(Server):
    """The actor's own memory is what counts: calls pass their arguments by value."""

    def __init__(self, num_groups: int) -> None:
        import ray

        quiet = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "bench"}
        ray.init(num_cpus=8, object_store_memory=2 << 30, include_dashboard=False, **quiet)
        self.config = {"address": ray.get_runtime_context().gcs_address, **quiet}
        self._make(num_groups)

    def _make(self, num_groups: int) -> None:
        import ray

        # Read groups leave room for new ones, so the bound is generous.
        self._actor = ray.remote(Mailbox).options(name="mailbox").remote(4 * num_groups + 4096)
        self._pid = ray.get(self._actor.pid.remote())

    def memory(self) -> int:
        return resident_bytes(self._pid)

    def stop(self) -> None:
        import ray

        ray.shutdown()


class RayClient(Client):
    WINDOW = 16
    NAME = "mailbox"

    def __init__(self, config: Any) -> None:
        import ray

        ray.init(**config)
        self._ray = ray
        self._actor = ray.get_actor(self.NAME)
        self._pending: list[Any] = []

    def put(self, group: Group) -> None:
        self._send(pickle.dumps(group, 5))

    def _send(self, value: Any) -> None:
        self._pending.append(self._actor.put.remote(value))
        if len(self._pending) >= self.WINDOW:
            self._ray.get(self._pending.pop(0))

    def flush(self) -> None:
        self._ray.get(self._pending)
        self._pending = []

    def sample(self) -> Packed | None:
        blobs = self._ray.get(self._actor.take.remote(SAMPLE_GROUPS))
        return pack_groups([pickle.loads(blob) for blob in blobs]) if blobs else None

    def close(self) -> None:
        self._ray.shutdown()


class RayQueueServer(RayServer):
    def _make(self, num_groups: int) -> None:
        from ray.util.queue import Queue

        self._queue = Queue(actor_options={"name": "queue"})
        import psutil
        import ray

        ray.get(self._queue.actor.qsize.remote())
        names = (p for p in psutil.Process().children(recursive=True) if "_QueueActor" in " ".join(p.cmdline()))
        self._pid = max(p.pid for p in names)


class RayQueueClient(RayClient):
    """Queue.put waits for each group; its actor is called instead, several puts at once."""

    NAME = "queue"

    def put(self, group: Group) -> None:
        self._send(group)

    def sample(self) -> Packed | None:
        from ray.util.queue import Empty

        try:
            return pack_groups(self._ray.get(self._actor.get_nowait_batch.remote(SAMPLE_GROUPS)))
        except Empty:
            return None


# torchrl: rows padded to the longest trajectory in memory-mapped files


class TorchRLServer(Server):
    consumes = False

    def __init__(self, num_groups: int) -> None:
        os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")
        import torch
        from torchrl.data import LazyMemmapStorage, ReplayBuffer  # the processes share the mapped files

        torch.set_num_threads(1)
        self._directory = tempfile.mkdtemp(prefix="torchrl-bench-", dir=shared_memory())
        storage = LazyMemmapStorage(8 * num_groups, scratch_dir=self._directory)
        self.config = ReplayBuffer(storage=storage, batch_size=8 * SAMPLE_GROUPS, shared=True)
        self.config.extend(padded(make_pool()[0]))

    def memory(self) -> int:
        return sum(file.stat().st_blocks * 512 for file in Path(self._directory).rglob("*"))

    def stop(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


class TorchRLClient(Client):
    def __init__(self, config: Any) -> None:
        import torch

        torch.set_num_threads(1)
        self._buffer = config

    def put(self, group: Group) -> None:
        self._buffer.extend(padded(group))

    def sample(self) -> Packed | None:
        rows = self._buffer.sample()
        return {"padded": rows, "starts": np.cumsum([0, *rows["lengths"].tolist()])}


def padded(group: Group) -> Any:
    import torch
    from tensordict import TensorDict

    size = (len(group.rollouts), PROMPT_TOKENS + MAX_TOKENS)
    columns = {
        name: np.zeros(size, dtype)
        for name, dtype in zip(("tokens", "mask", "logprobs", "versions"), _DTYPES, strict=True)
    }
    for row, rollout in enumerate(group.rollouts):
        columns["tokens"][row, :PROMPT_TOKENS] = group.prompt_tokens
        for column, array in zip(columns.values(), arrays_of(rollout), strict=True):
            column[row, PROMPT_TOKENS : PROMPT_TOKENS + array.size] = array
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    tensors["lengths"] = torch.tensor([PROMPT_TOKENS + r.response.size for r in group.rollouts])
    tensors["rewards"] = torch.tensor([r.reward for r in group.rollouts])
    return TensorDict(tensors, batch_size=[len(group.rollouts)])
