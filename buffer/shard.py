"""One shard of the replay buffer: a store behind a ZMQ ROUTER socket, on a thread of its own.

ShardService turns the frames of a request into the frames of its reply and knows no sockets; ShardServer owns the
socket. Whatever arrives is answered: a malformed or refused request gets an error reply, and the shard goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import zmq

from asyncrl.buffer.keys import ServerKeys, ShardAddress, check_host, secure_server
from asyncrl.buffer.store import COUNTERS, GroupStore
from asyncrl.buffer.wire import MAX_FRAME_BYTES, Message, pack, ref_to_dict, unpack
from asyncrl.errors import ReplayBufferError

logger = logging.getLogger(__name__)

Reply = tuple[dict[str, Any], list[Any]]


class ShardService:
    """Requests to replies on one GroupStore. `operations` is everything that a client can ask for."""

    def __init__(self, store: GroupStore | None = None) -> None:
        self.store = GroupStore() if store is None else store
        self.operations = {
            "append": self._append,
            "read": self._read,
            "peek": self._peek,
            "lease": self._lease,
            "commit": self._commit,
            "release": self._release,
            "evict": self._evict,
            "stats": self._stats,
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

    def _append(self, message: Message) -> Reply:
        if len(message.payloads) != 1:
            raise ReplayBufferError(f"append takes one group; got {len(message.payloads)} frames")
        stored = self.store.append(message.payloads[0], checksum=message.text("checksum"))
        return {"stored": stored, "held_bytes": self.store.held_bytes}, []

    def _read(self, message: Message) -> Reply:
        groups = [self.store.read(group_id) for group_id in message.ids("group_ids")]
        return {"checksums": [g.checksum for g in groups]}, [g.payload for g in groups]

    def _peek(self, message: Message) -> Reply:
        refs = self.store.peek(message.integer("num_groups"), **_bound(message))
        return {"refs": [ref_to_dict(ref) for ref in refs]}, []

    def _lease(self, message: Message) -> Reply:
        granted = self.store.lease(message.text("lease_id"), message.ids("group_ids"), **_bound(message))
        return {"granted": granted}, []

    def _commit(self, message: Message) -> Reply:
        return {"num_groups": self.store.commit(message.text("lease_id"))}, []

    def _release(self, message: Message) -> Reply:
        return {"num_groups": self.store.release(message.text("lease_id"))}, []

    def _evict(self, message: Message) -> Reply:
        return {"refs": [ref_to_dict(ref) for ref in self.store.evict(**_bound(message))]}, []

    def _stats(self, message: Message) -> Reply:
        stats = asdict(self.store.stats())
        return {name: stats[name] for name in COUNTERS}, []


def _bound(message: Message) -> dict[str, int]:
    return {name: message.integer(name) for name in ("policy_version", "max_staleness")}


class ShardServer:
    """Serves one shard until stop().

    `host` is the IP address of the interface that clients reach it by; the port is chosen by the system. Without
    `keys` only loopback addresses are allowed; with them only clients whose public key is listed get an answer.
    """

    def __init__(self, host: str = "127.0.0.1", keys: ServerKeys | None = None) -> None:
        check_host(host, has_keys=keys is not None)
        self._host, self._keys = host, keys
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._stop_signal: zmq.Socket[bytes] | None = None
        self._authenticator: Any = None
        self._thread: threading.Thread | None = None

    def start(self) -> ShardAddress:
        """Bind and serve on a new thread. Raises ReplayBufferError when the address cannot be bound."""
        if self._context is not None:
            raise ReplayBufferError("this buffer shard was started before")
        interface = f"tcp://[{self._host}]" if ":" in self._host else f"tcp://{self._host}"
        self._context = zmq.Context()
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.maxmsgsize = MAX_FRAME_BYTES
        router.ipv6 = ":" in self._host
        try:
            if self._keys is not None:
                self._authenticator = secure_server(router, self._keys)
            port = router.bind_to_random_port(interface)
        except (zmq.ZMQError, ValueError) as error:
            router.close()
            self.stop()
            raise ReplayBufferError(f"a buffer shard cannot listen on {self._host}: {error}") from error
        endpoint = f"{interface}:{port}"
        self._stop_signal = self._context.socket(zmq.PAIR)
        self._stop_signal.bind("inproc://stop")
        stop = self._context.socket(zmq.PAIR)
        stop.connect("inproc://stop")
        self._thread = threading.Thread(target=_serve, args=(router, stop), name=f"shard {endpoint}", daemon=True)
        self._thread.start()
        return ShardAddress(endpoint, None if self._keys is None else self._keys.own.public)

    def stop(self) -> None:
        """End the thread and forget the contents. Repeating it is harmless."""
        context, self._context = self._context, None
        if context is None:
            return
        if self._stop_signal is not None and self._thread is not None:
            self._stop_signal.send(b"")
            self._thread.join()
            self._stop_signal.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        context.destroy(linger=0)


def _serve(router: zmq.Socket[bytes], stop: zmq.Socket[bytes]) -> None:
    service = ShardService()
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(stop, zmq.POLLIN)
    try:
        while True:
            ready = dict(poller.poll())
            if stop in ready:
                return
            client, *frames = router.recv_multipart()
            try:
                router.send_multipart([client, *service.handle(frames)], copy=False)
            except zmq.ZMQError as error:
                logger.warning("buffer shard: a reply could not be sent: %s", error)
    finally:
        router.close()
        stop.close()
