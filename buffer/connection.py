"""A client's connection to one shard: requests with a deadline over a ZMQ DEALER socket."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import zmq

from asyncrl.buffer.keys import CurveKeys, ShardAddress, secure_client
from asyncrl.buffer.wire import MAX_FRAME_BYTES, Message, pack, unpack
from asyncrl.errors import ReplayBufferError


class ShardTimeout(ReplayBufferError):
    """A shard did not answer in time; whether it carried the request out is unknown."""


RESEND_S = 3.0


class Connection:
    """One socket, one request at a time, any thread.

    The socket lives as long as the connection, so requests reach the shard in the order they were made, those that
    nobody waits for any more included. A request that stays without an answer is sent again, for a shard that was
    started anew meanwhile: carrying any request out twice must be harmless.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: ShardAddress,
        *,
        keys: CurveKeys | None,
        timeout_s: float,
    ) -> None:
        self.endpoint = address.endpoint
        self._timeout_s = timeout_s
        self._has_keys = address.public_key is not None
        self._lock = threading.Lock()
        self._last_id = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.maxmsgsize = MAX_FRAME_BYTES
        # As many waits as fill the timeout, none longer than RESEND_S.
        self._socket.rcvtimeo = math.ceil(timeout_s * 1e3 / max(1, math.ceil(timeout_s / RESEND_S)))
        try:
            secure_client(self._socket, address, keys)
            self._socket.connect(address.endpoint)
        except (zmq.ZMQError, ValueError) as error:
            self._socket.close()
            raise ReplayBufferError(f"cannot connect to buffer shard {address.endpoint}: {error}") from error

    def request(self, op: str, fields: Mapping[str, Any], payloads: Sequence[Any] = ()) -> Message:
        """The reply. Raises ShardTimeout without one, ReplayBufferError with the shard's words when it refused."""
        with self._lock:
            return self._await(self._send(op, fields, payloads), op, fields, payloads)

    def post(self, op: str, fields: Mapping[str, Any]) -> None:
        """Send a request without waiting for its reply. Never raises."""
        with self._lock:
            try:
                while not self._socket.closed and self._socket.poll(0):
                    self._socket.recv_multipart()  # the reply to an earlier post
                self._send(op, fields, ())
            except ReplayBufferError:
                return  # nothing more can be done for a shard that takes no messages

    def close(self) -> None:
        with self._lock:
            self._socket.close()

    def _await(self, request_id: int, op: str, fields: Mapping[str, Any], payloads: Sequence[Any]) -> Message:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                frames = self._socket.recv_multipart(copy=False)
            except zmq.Again:
                if time.monotonic() + 1e-3 > deadline:
                    raise ShardTimeout(self._explain(op)) from None
                self._send(op, fields, payloads, request_id)
                continue
            reply = unpack([frame.buffer for frame in frames])
            # Other ids belong to requests that were given up; none at all, to a request that was not understood.
            if reply.header.get("id") in (request_id, None):
                break
        if reply.header.get("ok") is not True:
            raise ReplayBufferError(f"buffer shard {self.endpoint} refused {op}: {reply.text('error')}")
        return reply

    def _send(self, op: str, fields: Mapping[str, Any], payloads: Sequence[Any], request_id: int | None = None) -> int:
        if self._socket.closed:
            raise ReplayBufferError(f"the connection to buffer shard {self.endpoint} is closed")
        if request_id is None:
            self._last_id += 1
            request_id = self._last_id
        try:
            frames = pack({"id": request_id, "op": op, **fields}, payloads)
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise ShardTimeout(self._explain(op)) from None
        return request_id

    def _explain(self, op: str) -> str:
        keys = ", and are its keys and the client's from the same run" if self._has_keys else ""
        return (
            f"buffer shard {self.endpoint} did not answer {op} within {self._timeout_s:g} s: "
            f"is it alive, reachable from this machine{keys}?"
        )


def request_all(requests: Sequence[tuple[Connection, str, Mapping[str, Any], Sequence[Any]]]) -> list[Message]:
    """As Connection.request for each, all on their way at once, and all carried out whichever is refused.

    Connections come in the same order in every call, each at most once: a call holds all of them.
    """
    with ExitStack() as held:
        sent = []
        for connection, *request in requests:
            held.enter_context(connection._lock)
            sent.append((connection, connection._send(*request), request))
        return [connection._await(request_id, *request) for connection, request_id, request in sent]
