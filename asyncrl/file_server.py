"""Serve the files of one folder to other hosts, in chunks, over ZMQ. Nothing is unpickled.

The client asks for ranges and keeps a few requests on the way; each answer is a JSON header and the bytes.
"""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import zmq

from asyncrl.buffer.keys import CurveKeys, ServerKeys, ShardAddress, check_host, secure_client, secure_server
from asyncrl.errors import ReplayBufferError, WeightSyncError

CHUNK = 1 << 23
WINDOW = 4
"""Chunks that a client has asked for and not yet received."""
NAME = re.compile(r"[A-Za-z0-9_-]+\.bin")
MAX_REQUEST_BYTES = 1 << 12
POLL_MS = 100


class FileServer:
    """Serves *.bin files of `directory` from a thread of its own until closed."""

    def __init__(self, directory: Path, *, host: str = "127.0.0.1", keys: ServerKeys | None = None) -> None:
        try:
            check_host(host, has_keys=keys is not None)
        except ReplayBufferError as error:
            raise WeightSyncError(f"weights cannot be served on {host}: {error}") from error
        self._directory = directory
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.maxmsgsize = MAX_REQUEST_BYTES
        self._socket.ipv6 = ":" in host
        self._authenticator = None if keys is None else secure_server(self._socket, keys)
        bracketed = f"[{host}]" if ":" in host else host
        port = self._socket.bind_to_random_port(f"tcp://{bracketed}")
        self.address = ShardAddress(f"tcp://{bracketed}:{port}", None if keys is None else keys.own.public)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weights-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(POLL_MS):
                client, *frames = self._socket.recv_multipart()
                header, data = self._answer(b"".join(frames))
                self._socket.send_multipart([client, json.dumps(header).encode(), data], copy=False)

    def _answer(self, request: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            asked = json.loads(request)
            name, offset, length = str(asked["name"]), int(asked["offset"]), int(asked["length"])
            if not NAME.fullmatch(name) or offset < 0 or not 0 < length <= CHUNK:
                raise ValueError(f"refused: {asked}")
            with open(self._directory / name, "rb") as file:
                return {"offset": offset}, os.pread(file.fileno(), length, offset)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return {"error": str(error)}, b""


def fetch(
    address: ShardAddress,
    name: str,
    nbytes: int,
    path: Path,
    *,
    client_keys: CurveKeys | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Copy a served file of known size to `path`. `timeout_s` bounds the wait for any one chunk.

    Raises:
        WeightSyncError: no answer in time, or the server does not have the file (any more).
        OSError: `path` could not be written.
    """
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        secure_client(socket, address, client_keys)
        socket.connect(address.endpoint)
        _receive(socket, name, nbytes, fd, endpoint=address.endpoint, timeout_s=timeout_s)
    except ReplayBufferError as error:
        raise WeightSyncError(f"weights cannot be pulled from {address.endpoint}: {error}") from error
    finally:
        os.close(fd)
        socket.close()
        context.term()


def _receive(socket: zmq.Socket, name: str, nbytes: int, fd: int, *, endpoint: str, timeout_s: float) -> None:
    waiting = iter(range(0, nbytes, CHUNK))
    missing = set(range(0, nbytes, CHUNK))

    def ask(count: int) -> None:
        for _, offset in zip(range(count), waiting, strict=False):
            length = min(CHUNK, nbytes - offset)
            socket.send(json.dumps({"name": name, "offset": offset, "length": length}).encode())

    ask(WINDOW)
    while missing:
        if not socket.poll(int(timeout_s * 1000)):
            raise WeightSyncError(f"no answer within {timeout_s:g} s from {endpoint}, which serves {name}")
        header, data = socket.recv_multipart(copy=False)
        answer = json.loads(header.bytes)
        if "error" in answer:
            raise WeightSyncError(f"{endpoint} does not serve {name}: {answer['error']}")
        offset = answer["offset"]
        if offset not in missing or len(data.buffer) != min(CHUNK, nbytes - offset):
            raise WeightSyncError(f"{endpoint} sent {len(data.buffer)} unexpected bytes at {offset} of {name}")
        os.pwrite(fd, data.buffer, offset)
        missing.remove(offset)
        ask(1)
