"""One shard of the replay buffer: a store behind a ZMQ ROUTER socket, on a thread of its own.

ShardService turns the frames of a request into the frames of its reply and knows no sockets; ShardServer owns the
socket and the directory. Whatever arrives is answered: a malformed or refused request gets an error reply, and the
shard goes on. A server that starts on the directory of a killed one continues with its contents on its port.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zmq

from asyncrl.buffer.keys import ServerKeys, ShardAddress, check_host, secure_server
from asyncrl.buffer.records import Entry, pack_entry, unpack_records
from asyncrl.buffer.sampling import Sampling
from asyncrl.buffer.segment_table import StoreSettings
from asyncrl.buffer.segments import IDENTITY
from asyncrl.buffer.snapshot import SnapshotWriter
from asyncrl.buffer.stats import COUNTERS
from asyncrl.buffer.store import GroupStore
from asyncrl.buffer.wire import MAX_FRAME_BYTES, Message, identity, pack, unpack
from asyncrl.errors import ReplayBufferError

logger = logging.getLogger(__name__)

TICK_S = 1.0
MAX_GAP_S = 2 * TICK_S

Reply = tuple[dict[str, Any], list[Any]]


class WakingClock:
    """Seconds in which this process ran, for the timeouts of leases: after a stop of the process, or of the machine,
    the renewals that came meanwhile are still unread. It is read at every tick; a longer gap counts as MAX_GAP_S."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._read_at = now()
        self._elapsed = 0.0

    def __call__(self) -> float:
        now = self._now()
        self._elapsed += min(now - self._read_at, MAX_GAP_S)
        self._read_at = now
        return self._elapsed


class ShardService:
    """Requests to replies on one GroupStore. `operations` is everything that a client can ask for."""

    def __init__(self, store: GroupStore, *, token: str = "") -> None:
        self.store = store
        self._token = token
        self._draining = False
        self._snapshot: SnapshotWriter | None = None
        self._pinned: list[Entry] = []  # by the snapshot in progress
        self.operations = {
            "hello": self._hello,
            "grant": self._grant,
            "append": self._append,
            "append_messages": self._append_messages,
            "locate": self._locate,
            "read": self._read,
            "quarantine": self._quarantine,
            "advance": self._advance,
            "offer": self._offer,
            "lease": self._lease,
            "renew": self._renew,
            "commit": self._commit,
            "release": self._release,
            "evict": self._evict,
            "stats": self._stats,
            "drain": self._drain,
            "snapshot": self._start_snapshot,
            "snapshot_state": self._snapshot_state,
        }

    def handle(self, frames: Sequence[Any]) -> list[Any]:
        """Frames of the reply. Never raises."""
        request_id = None
        try:
            message = unpack(frames)
            request_id = message.integer("id")
            operation = self.operations.get(message.text("op"))
            if operation is None:
                raise ReplayBufferError(
                    f"unknown operation {message.text('op')[:80]!r}; known are {', '.join(self.operations)}"
                )
            header, payloads = operation(message)
        except ReplayBufferError as error:
            return pack({"id": request_id, "ok": False, "error": str(error)})
        except Exception as error:
            logger.exception("buffer shard: a request failed; the shard goes on")
            return pack({"id": request_id, "ok": False, "error": f"{type(error).__name__}: {error}"})
        return pack({"id": request_id, "ok": True, **header}, payloads)

    def tick(self) -> None:
        """What is due without being asked: leases and segments of holders that died, a long log. Never raises."""
        upkeep = (self._expire_leases, self._unpin_if_written, self._seal_dead_writers, self.store.compact_if_long)
        for step in upkeep:
            try:
                step()
            except Exception:
                logger.exception("buffer shard: its upkeep failed; the shard goes on")

    def _expire_leases(self) -> None:
        if num := self.store.expire_leases():
            logger.warning("%d leases ran out without a renewal; their groups are free again", num)

    def _seal_dead_writers(self) -> None:
        if num := self.store.seal_dead_writers():
            logger.warning("%d segments of writers that died were closed", num)

    def _hello(self, message: Message) -> Reply:
        return {"directory": str(self.store.directory), "token": self._token}, []

    def _grant(self, message: Message) -> Reply:
        if self._draining:
            return {"segment": None, "draining": True}, []
        num_bytes = message.integer("num_bytes")
        if not 0 <= num_bytes <= MAX_FRAME_BYTES:
            raise ReplayBufferError(f"num_bytes must be 0 to {MAX_FRAME_BYTES}; got {num_bytes}")
        segment = self.store.grant(message.identity("writer"), num_bytes, seal=message.integer("seal"))
        if segment is None:
            return {"segment": None}, []
        return {"segment": segment.number, "path": segment.path, "capacity": segment.capacity}, []

    def _append(self, message: Message) -> Reply:
        entries = [record.entry for record in unpack_records(message.frame())]
        results = self.store.append(entries, writer=message.identity("writer"))
        return {"results": results, "bytes": self.store.group_bytes}, []

    def _append_messages(self, message: Message) -> Reply:
        checksums, uses = message.items("checksums"), message.items("uses")
        if not len(checksums) == len(uses) == len(message.payloads):
            raise ReplayBufferError(
                f"{len(message.payloads)} groups came with {len(checksums)} checksums and {len(uses)} counts of uses"
            )
        results: list[bool | str | None] = []
        for payload, checksum, used in zip(message.payloads, checksums, uses, strict=True):
            try:
                group = {"checksum": _checksum(checksum), "uses": _count(used)}
                results.append(None if self._draining else self.store.append_message(payload, **group))
            except ReplayBufferError as error:
                results.append(str(error))
        return {"results": results, "bytes": self.store.group_bytes, "draining": self._draining}, []

    def _locate(self, message: Message) -> Reply:
        located = [self.store.locate(group_id) for group_id in message.ids()]
        return {"paths": [path for _, path in located]}, [b"".join(pack_entry(entry) for entry, _ in located)]

    def _read(self, message: Message) -> Reply:
        ids = message.ids()
        entries = b"".join(pack_entry(self.store.locate(group_id)[0]) for group_id in ids)
        return {}, [entries, *(self.store.read(group_id) for group_id in ids)]

    def _quarantine(self, message: Message) -> Reply:
        return {"quarantined": [self.store.quarantine(group_id) for group_id in message.ids()]}, []

    def _advance(self, message: Message) -> Reply:
        self.store.advance(message.integer("policy_version"))
        return {}, []

    def _offer(self, message: Message) -> Reply:
        sampling = Sampling(
            order=message.text("order"),  # type: ignore[arg-type]
            max_uses=message.integer("max_uses"),
            seed=message.integer("seed"),
        )
        offers = self.store.offer(
            message.integer("num_groups"), **_bound(message), sampling=sampling, draw=message.text("draw")
        )
        located = [self.store.locate(ref.group_id) for _, ref in offers]
        header = {"keys": [key for key, _ in offers], "paths": [path for _, path in located]}
        return header, [b"".join(pack_entry(entry) for entry, _ in located)]

    def _lease(self, message: Message) -> Reply:
        granted = self.store.lease(
            message.identity("lease"), message.ids(), **_bound(message), timeout_s=message.number("timeout_s")
        )
        return {"granted": granted}, []

    def _renew(self, message: Message) -> Reply:
        return {"renewed": [self.store.renew(identity(lease)) for lease in message.items("leases")]}, []

    def _commit(self, message: Message) -> Reply:
        max_uses = message.integer("max_uses")
        return {"num_groups": self.store.commit(message.identity("lease"), message.ids(), max_uses=max_uses)}, []

    def _release(self, message: Message) -> Reply:
        return {"num_groups": self.store.release(message.identity("lease"))}, []

    def _evict(self, message: Message) -> Reply:
        evicted = self.store.evict(**_bound(message))
        return {"ids": [ref.group_id.hex() for ref in evicted]}, []

    def _stats(self, message: Message) -> Reply:
        stats = asdict(self.store.stats())
        return {name: stats[name] for name in COUNTERS}, []

    def _drain(self, message: Message) -> Reply:
        self._draining = True
        return {}, []

    def _start_snapshot(self, message: Message) -> Reply:
        self._unpin_if_written()
        if self._pinned:
            raise ReplayBufferError("another snapshot of this shard is being written")
        held = self.store.held_entries()
        self._snapshot = SnapshotWriter(Path(message.text("path")), held, self.store.path_of)
        self._pinned = held
        self.store.pin(self._pinned)
        self._snapshot.start()
        return {"num_groups": len(held)}, []

    def _snapshot_state(self, message: Message) -> Reply:
        if self._snapshot is None:
            raise ReplayBufferError("this shard writes no snapshot: it was asked for none, or started again meanwhile")
        done = self._snapshot.poll()
        return {"done": done, **(self._snapshot.result() if done else {})}, []

    def _unpin_if_written(self) -> None:
        if self._snapshot is not None and self._snapshot.poll():
            self.store.unpin(self._pinned)
            self._pinned = []


def _checksum(text: Any) -> int:
    try:
        return int(text, 16)
    except (TypeError, ValueError):
        raise ReplayBufferError(f"a checksum is 16 hex digits; got {str(text)[:80]!r}") from None


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise ReplayBufferError(f"a count of uses is an integer from 0; got {str(value)[:80]!r}")
    return value


def _bound(message: Message) -> dict[str, int]:
    return {name: message.integer(name) for name in ("policy_version", "max_staleness")}


class ShardServer:
    """Serves one shard until stop().

    Args:
        directory: of the shard's files, its alone. One that an earlier server left is continued, on its port. None: a
            folder in shared memory that stop() removes.
        host: IP address of the interface that clients reach the shard by; the port is chosen by the system. Without
            `keys` only loopback addresses are allowed; with them only clients whose public key is listed get an answer.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        settings: StoreSettings | None = None,
        host: str = "127.0.0.1",
        keys: ServerKeys | None = None,
    ) -> None:
        check_host(host, has_keys=keys is not None)
        self._is_temporary = directory is None
        self._directory = Path(
            tempfile.mkdtemp(prefix="asyncrl-shard-", dir=shared_memory()) if directory is None else directory
        )
        self._settings = settings or StoreSettings()
        self._host, self._keys = host, keys
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._stop_signal: zmq.Socket[bytes] | None = None
        self._authenticator: Any = None
        self._thread: threading.Thread | None = None
        self._lock_fd = -1

    def start(self) -> ShardAddress:
        """Bind and serve on a new thread.

        Raises ReplayBufferError when the address cannot be bound, or the directory is served by another process.
        """
        if self._context is not None:
            raise ReplayBufferError("this buffer shard was started before")
        self._lock()
        try:
            store = GroupStore(self._directory, self._settings, now=WakingClock())
        except ReplayBufferError:
            self.stop()
            raise
        identity_file = self._directory / IDENTITY
        earlier = json.loads(identity_file.read_text()) if identity_file.exists() else {}
        self._context = zmq.Context()
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.maxmsgsize = MAX_FRAME_BYTES
        router.ipv6 = ":" in self._host
        try:
            endpoint = self._bind(router, earlier.get("port"))
        except (zmq.ZMQError, ValueError) as error:
            router.close()
            self.stop()
            raise ReplayBufferError(f"a buffer shard cannot listen on {self._host}: {error}") from error
        token = uuid.uuid4().hex
        temporary = identity_file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"token": token, "port": int(endpoint.rsplit(":", 1)[1])}))
        temporary.replace(identity_file)
        self._stop_signal = self._context.socket(zmq.PAIR)
        self._stop_signal.bind("inproc://stop")
        stop = self._context.socket(zmq.PAIR)
        stop.connect("inproc://stop")
        service = ShardService(store, token=token)
        self._thread = threading.Thread(
            target=_serve, args=(service, router, stop), name=f"shard {endpoint}", daemon=True
        )
        self._thread.start()
        return ShardAddress(endpoint, None if self._keys is None else self._keys.own.public)

    def stop(self) -> None:
        """End the thread; the contents stay in the directory, if it was given. Repeating it is harmless."""
        context, self._context = self._context, None
        if context is not None:
            if self._stop_signal is not None and self._thread is not None:
                self._stop_signal.send(b"")
                self._thread.join()
                self._stop_signal.close()
            if self._authenticator is not None:
                self._authenticator.stop()
            context.destroy(linger=0)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        if self._is_temporary:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _lock(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock_fd = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            self._lock_fd = -1
            raise ReplayBufferError(f"another process serves the buffer shard in {self._directory}") from None

    def _bind(self, router: zmq.Socket[bytes], port: int | None) -> str:
        interface = f"tcp://[{self._host}]" if ":" in self._host else f"tcp://{self._host}"
        assert self._context is not None
        if self._keys is not None:
            self._authenticator = secure_server(router, self._keys)
        if port is None:
            port = router.bind_to_random_port(interface)
        else:
            router.bind(f"{interface}:{port}")
        return f"{interface}:{port}"


def shared_memory() -> str:
    """Folder of files in memory, where the system has one."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def _serve(service: ShardService, router: zmq.Socket[bytes], stop: zmq.Socket[bytes]) -> None:
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(stop, zmq.POLLIN)
    next_tick = time.monotonic() + TICK_S
    try:
        while True:
            ready = dict(poller.poll(TICK_S * 1e3))
            if stop in ready:
                return
            if time.monotonic() >= next_tick:
                service.tick()
                next_tick = time.monotonic() + TICK_S
            if router not in ready:
                continue
            client, *frames = router.recv_multipart(copy=False)
            try:
                router.send_multipart([client, *service.handle([f.buffer for f in frames])], copy=False)
            except zmq.ZMQError as error:
                logger.warning("buffer shard: a reply could not be sent: %s", error)
    finally:
        service.store.close()
        router.close()
        stop.close()
