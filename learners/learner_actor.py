"""Ray shell of one learner rank. Every method after start() is a collective: call it on all ranks."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from asyncrl.config import JobConfig, RLConfig, SFTConfig
from asyncrl.model_tensors import num_parameters
from asyncrl.process import log_to_file
from asyncrl.shared_folder import check_room
from asyncrl.types import GroupRef
from asyncrl.wiring import Wiring

VERSIONS_IN_MEMORY = 3
"""Two that are published, and one that an engine still reads."""


@ray.remote
class LearnerActor:
    """One process of the learners' mesh."""

    def __init__(self, *, rank: int, log: Path) -> None:
        log_to_file(log)
        self._rank = rank

    def rendezvous(self) -> str:
        """An address for torch.distributed on this rank's host, open from now on (call on rank 0)."""
        host = ray.util.get_node_ip_address()
        self._listener = socket.create_server((host, 0))
        return f"tcp://{host}:{self._listener.getsockname()[1]}"

    def start(
        self,
        config: JobConfig,
        *,
        num_ranks: int,
        init_method: str,
        wiring: Wiring | None = None,
    ) -> None:
        """Join the other ranks and load the model. RL needs the wiring, SFT has none."""
        from asyncrl.learners import PolicyTrainer, SFTTrainer, init_distributed

        use_gpu = bool(ray.get_gpu_ids())
        if wiring is not None:
            self._shared = wiring.hold()
            if self._rank == 0:
                self._check_shared_memory(config, use_gpu=use_gpu)
        device = init_distributed(
            rank=self._rank,
            world_size=num_ranks,
            init_method=init_method,
            threads=config.learners.threads,
            use_gpu=use_gpu,
            listener=getattr(self, "_listener", None),
        )
        if isinstance(config, RLConfig):
            assert wiring is not None
            self._buffer = wiring.connect_buffer()
            publisher = wiring.make_publisher(ray.util.get_node_ip_address()) if self._rank == 0 else None
            self._trainer: Any = PolicyTrainer(config, world_size=num_ranks, device=device, publisher=publisher)
        elif isinstance(config, SFTConfig):
            self._trainer = SFTTrainer(config, rank=self._rank, world_size=num_ranks, device=device)

    def _check_shared_memory(self, config: JobConfig, *, use_gpu: bool) -> None:
        half = config.model.dtype == "bfloat16" or (config.model.dtype == "auto" and use_gpu)
        nbytes = VERSIONS_IN_MEMORY * num_parameters(config.model.path) * (2 if half else 4)
        check_room(self._shared.path, nbytes, what=f"{VERSIONS_IN_MEMORY} versions of the weights")

    def train_groups(self, refs: Sequence[GroupRef], *, policy_version: int) -> dict[str, float]:
        """RL: read this rank's groups from the shards and train on them."""
        return self._trainer.train_step(self._buffer.read(refs), policy_version=policy_version)

    def train_demonstrations(self, step: int) -> dict[str, float]:
        """SFT: train on this rank's share of batch `step`."""
        return self._trainer.train_step(step)

    def evaluate(self) -> dict[str, float]:
        return self._trainer.evaluate()

    def publish(self, version: int) -> dict[str, Any] | None:
        return self._trainer.publish(version)

    def save(self, path: Path) -> None:
        self._trainer.save(path)

    def shutdown(self) -> None:
        for part in ("_trainer", "_buffer", "_shared"):
            if hasattr(self, part):
                getattr(self, part).close()
