"""FSDP2 over the decoder layers and the root; weights stream from rank 0 into everyone's shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint


def shard(model: nn.Module, layers: list[nn.Module], *, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard each layer and what is left of the model. Masters and gradient reduction are float32, compute is `dtype`.

    Gradients of ranks are summed, not averaged: losses are already divided by the counts of the whole step.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if dtype == torch.float32:
        policy = MixedPrecisionPolicy()
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum.
            module.set_force_sum_reduction_for_comms(True)


def sync_gradients(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward reduces gradients over ranks, or only adds to this rank's."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(enabled)


@contextlib.contextmanager
def scoring(model: nn.Module) -> Iterator[None]:
    """Forward passes without gradients. The root, which stays gathered until a backward, is sharded again after."""
    assert isinstance(model, FSDPModule)
    with torch.no_grad():
        yield
    model.reshard()


def checkpoint_activations(layers: list[nn.Module]) -> None:
    """Recompute these layers in the backward pass. Before `shard`: its hooks must stay outside."""
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


@torch.no_grad()
def materialise(model: nn.Module, source: Mapping[str, Tensor] | None, *, device: torch.device) -> None:
    """Give a sharded meta model its weights, one tensor at a time. Collective.

    Args:
        source: rank 0: full tensors by name, parameters and buffers (of any dtype); None elsewhere.
    """
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        if source is not None:
            full = source[name].to(device=device, dtype=parameter.dtype).contiguous()
        else:
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        parameter.to_local().copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements).to_local())
    # Buffers that are not in the checkpoint (rotary frequencies) are lost on the meta device: they travel too.
    for name, buffer in model.named_buffers():
        if source is not None:
            buffer.copy_(source[name])
        dist.broadcast(buffer, src=0)
