"""A shard whose replies a test can change or lose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from asyncrl.buffer import ShardAddress
from asyncrl.buffer.shard import ShardService

Tamper = Callable[[list[Any], list[Any]], list[Any] | None]


@contextmanager
def faulty_shard(tamper: Tamper) -> Iterator[ShardAddress]:
    """`tamper(request, reply)` returns the frames to send instead of the reply; None sends nothing."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    stopping = threading.Event()

    def serve() -> None:
        service = ShardService()
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
