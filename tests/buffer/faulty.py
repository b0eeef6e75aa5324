"""A shard whose replies a test can change or lose."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from asyncrl.buffer import ShardAddress, StoreSettings
from asyncrl.buffer.segments import IDENTITY
from asyncrl.buffer.shard import ShardService
from asyncrl.buffer.store import GroupStore

Tamper = Callable[[list[Any], list[Any]], list[Any] | None]
Deliver = Callable[[list[Any]], Sequence[list[Any]]]


@contextmanager
def faulty_shard(
    tamper: Tamper,
    *,
    local: bool = True,
    deliver: Deliver = lambda reply: [reply],
    settings: StoreSettings | None = None,
) -> Iterator[ShardAddress]:
    """`tamper(request, reply)` returns the frames to send instead of the reply; None sends nothing. `deliver(reply)`
    returns all replies to send in its place, earlier ones included.

    local: clients find the shard's files; otherwise everything goes over the socket.
    """
    directory = Path(tempfile.mkdtemp())
    store = GroupStore(directory, settings)
    if local:
        (directory / IDENTITY).write_text(json.dumps({"token": "t", "port": 1}))
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    stopping = threading.Event()

    def serve() -> None:
        service = ShardService(store, token="t")
        while not stopping.is_set():
            if router.poll(20):
                client, *request = router.recv_multipart()
                reply = tamper(request, service.handle(request))
                for frames in () if reply is None else deliver(reply):
                    router.send_multipart([client, *frames])
        router.close(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ShardAddress(f"tcp://127.0.0.1:{port}", None)
    finally:
        stopping.set()
        thread.join()
        context.term()
        shutil.rmtree(directory)
