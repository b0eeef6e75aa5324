"""Ray shell of one buffer shard."""

from __future__ import annotations

from pathlib import Path

import ray

from asyncrl.buffer import ServerKeys, ShardAddress, ShardServer
from asyncrl.process import log_to_file


@ray.remote
class ShardActor:
    """Holds a ShardServer; the data goes over its own socket, not through Ray."""

    def __init__(self, *, log: Path, keys: ServerKeys | None) -> None:
        log_to_file(log)
        self._server = ShardServer(ray.util.get_node_ip_address(), keys=keys) if keys else ShardServer()

    def start(self) -> ShardAddress:
        return self._server.start()

    def shutdown(self) -> None:
        self._server.stop()
