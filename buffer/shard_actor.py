"""Ray shell of one buffer shard."""

from __future__ import annotations

import shutil
from pathlib import Path

import ray

from asyncrl.buffer import ServerKeys, ShardAddress, ShardServer, StoreSettings
from asyncrl.process import log_to_file
from asyncrl.shared_folder import SharedFolder


@ray.remote(max_restarts=-1)
class ShardActor:
    """Holds a ShardServer; the data goes over its own socket and files, not through Ray.

    Where a killed one was, Ray starts it again, and the server continues from the files on the same port.
    """

    def __init__(
        self, *, log: Path, directory: Path, settings: StoreSettings, shared_dir: Path, keys: ServerKeys | None
    ) -> None:
        log_to_file(log)
        self._shared = SharedFolder(shared_dir)
        host = ray.util.get_node_ip_address() if keys else "127.0.0.1"
        self._remove = directory if settings.durability == "memory" else None
        self._server = ShardServer(directory, settings=settings, host=host, keys=keys)
        self._address = self._server.start()

    def address(self) -> ShardAddress:
        return self._address

    def shutdown(self) -> None:
        self._server.stop()
        if self._remove is not None:
            shutil.rmtree(self._remove, ignore_errors=True)
        self._shared.close()
