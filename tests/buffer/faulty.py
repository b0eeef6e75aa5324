"""A shard whose replies a test can change or lose."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from asyncrl.buffer import ShardAddress
from asyncrl.buffer.segments import IDENTITY
from asyncrl.buffer.shard import ShardService
from asyncrl.buffer.store import GroupStore

Tamper = Callable[[list[Any], list[Any]], list[Any] | None]


@contextmanager
def faulty_shard(tamper: Tamper, *, local: bool = True) -> Iterator[ShardAddress]:
    """`tamper(request, reply)` returns the frames to send instead of the reply; None sends nothing.

    local: clients find the shard's files; otherwise everything goes over the socket.
    """
    directory = Path(tempfile.mkdtemp())
    store = GroupStore(directory)
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
                if reply is not None:
                    router.send_multipart([client, *reply])
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
