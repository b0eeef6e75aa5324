"""How the processes of an RL run reach each other: handed to every one of them when it starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.buffer import CurveKeys, ReplayBuffer, ServerKeys, ShardAddress, new_keys
from asyncrl.shared_folder import SharedFolder

if TYPE_CHECKING:
    from asyncrl.weights import WeightManifest, WeightPublisher

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Wiring:
    """Addresses and keys of one run.

    Attributes:
        addresses: of the buffer's shards.
        keys: the CURVE keys of this run's clients; None: everything is on one host and stays on loopback.
        shared_dir: folder in shared memory for weights and trajectories, the same name on every host.
    """

    addresses: Sequence[ShardAddress]
    keys: CurveKeys | None
    shared_dir: str

    @property
    def weights_dir(self) -> str:
        """For published and pulled weights."""
        return os.path.join(self.shared_dir, "weights")

    def hold(self) -> SharedFolder:
        """Keep shared_dir of this host as long as the caller lives."""
        return SharedFolder(self.shared_dir)

    def connect_buffer(self) -> ReplayBuffer:
        return ReplayBuffer(self.addresses, client_keys=self.keys)

    def make_publisher(self, host: str) -> WeightPublisher:
        """Publisher of the policy's weights; serves other hosts on this host's address when there are any."""
        from asyncrl.weights import WeightPublisher

        keys = server_keys(self.keys)
        return WeightPublisher(self.weights_dir, host=host if keys else LOOPBACK, keys=keys)

    def pull(self, manifest: WeightManifest) -> WeightManifest:
        """Make published weights readable on this host."""
        from asyncrl.weights import pull

        return pull(manifest, self.weights_dir, client_keys=self.keys)


def server_keys(clients: CurveKeys | None) -> ServerKeys | None:
    """Fresh keys for a server that answers only the run's clients."""
    return ServerKeys(own=new_keys(), clients=(clients.public,)) if clients else None
