"""Process group, determinism, and the few collectives that carry plain numbers and errors between ranks.

All differences between CPU (gloo) and CUDA (nccl) are here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.errors import AsyncRLError, ConfigError

TIMEOUT = timedelta(minutes=30)


def init_distributed(
    *,
    rank: int,
    world_size: int,
    init_method: str,
    threads: int,
    use_gpu: bool = False,
    listener: socket.socket | None = None,
) -> torch.device:
    """Join the learners' process group and make the process deterministic. Returns this rank's device.

    Args:
        use_gpu: as the placement decided: nccl and one of this process's visible GPUs; otherwise gloo and the CPU.
        init_method: as in torch.distributed, e.g. "tcp://127.0.0.1:29500" or "file:///path"; the same on all ranks.
        threads: CPU threads of this rank. More than one per core makes every step many times slower.
        listener: rank 0: the open socket of a "tcp://" init_method, which nobody else could take meanwhile.

    Raises:
        ConfigError: a GPU was given to this rank, and this torch cannot use it.
    """
    if use_gpu and not torch.cuda.is_available():
        raise ConfigError(
            f"a learner was given a GPU, but torch {torch.__version__} cannot use it: install the CUDA build "
            '(`make setup ENGINE=gpu`), or set [learners] device = "cpu"'
        )
    device = torch.device("cuda", rank % torch.cuda.device_count()) if use_gpu else torch.device("cpu")
    make_deterministic(threads=threads)
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if use_gpu else "gloo",
        init_method=init_method if listener is None else None,
        store=None if listener is None else _serve_store(listener, world_size),
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        device_id=device if use_gpu else None,
    )
    return device


def _serve_store(listener: socket.socket, world_size: int) -> dist.Store:
    """The store that the other ranks find at the listener's address, under the prefix that they look for."""
    host, port = listener.getsockname()[:2]
    store = dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return dist.PrefixStore("default_pg", store)


def leave_distributed() -> None:
    """Leave the process group, if in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_deterministic(*, threads: int) -> None:
    """Bitwise repeatable kernels. Before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # Filling every torch.empty with NaN is a debugging aid that costs a pass over memory each time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def data_mesh(device: torch.device) -> DeviceMesh:
    """The one-dimensional mesh over which parameters are sharded."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def gather_numbers(values: Sequence[float] | torch.Tensor, *, device: torch.device) -> np.ndarray:
    """float64 [num_ranks, k] of every rank's k numbers, on every rank, in rank order (so sums are repeatable)."""
    mine = torch.as_tensor(values, dtype=torch.float64, device=device)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine)
    return torch.stack(table).cpu().numpy()


def raise_together(error: AsyncRLError | None) -> None:
    """Collective. Raise rank 0's error on every rank, so that none is left waiting in the next collective."""
    shared: list[AsyncRLError | None] = [error]
    dist.broadcast_object_list(shared, src=0)
    if shared[0] is not None:
        raise shared[0]
