"""Sharded weights -> full tensors on rank 0: to publish to generators, and to a Hugging Face folder.

One parameter at a time is gathered, in the type it leaves in; the learner never holds a second full model on a GPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.data import load_tokenizer
from asyncrl.errors import AsyncRLError, CheckpointError, WeightSyncError
from asyncrl.learners.distributed import raise_together
from asyncrl.learners.models import PolicyModel
from asyncrl.weights import WeightManifest, WeightPublisher


@torch.no_grad()
def full_weights(model: PolicyModel, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, full tensor on the rank's device) of each parameter. Collective: every rank must exhaust it.

    Tied weights come once, under the name of the embedding: the head's copy would load as a second, stale one.
    """
    for name, parameter in model.causal_lm.named_parameters():
        sharded = parameter.detach().to(dtype)
        assert isinstance(sharded, DTensor)
        yield name, sharded.full_tensor()


def publish(
    model: PolicyModel, publisher: WeightPublisher | None, *, version: int, dtype: torch.dtype
) -> WeightManifest | None:
    """Collective. Publish the current weights as `version` from rank 0 (the rank with a publisher); None elsewhere.

    Raises:
        WeightSyncError: on all ranks, e.g. when a weight is not finite.
    """
    weights = full_weights(model, dtype=dtype)
    manifest, failure = None, None
    try:
        if publisher is not None:
            manifest = publisher.publish(version, weights)
    except AsyncRLError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks are in the gathers below
        failure = WeightSyncError(f"version {version} could not be published: {type(error).__name__}: {error}")
    for _ in weights:  # the other ranks, and rank 0 after a failure: the gathers are collective
        pass
    raise_together(failure)
    return manifest


def save(model: PolicyModel, path: str | Path, *, source: str, trust_remote_code: bool = False) -> None:
    """Collective. Write a Hugging Face folder: safetensors, config, generation config, tokenizer.

    Weights have the type of the source model. The folder appears under its name only when it is complete, and replaces
    one of that name.

    Args:
        source: the model folder that the tokenizer comes from.

    Raises:
        CheckpointError: on all ranks, when it cannot be written.
    """
    tensors = {}
    for name, tensor in full_weights(model, dtype=model.source_dtype):
        if dist.get_rank() == 0:
            tensors[name] = tensor.cpu()
    failure = None
    if dist.get_rank() == 0:
        try:
            _write(model, tensors, Path(path), source=source, trust_remote_code=trust_remote_code)
        except Exception as error:  # noqa: BLE001 - a full disk is a SafetensorError; the other ranks wait for the answer
            failure = CheckpointError(f"model folder {path} could not be written: {error}")
    raise_together(failure)


def _write(model: PolicyModel, tensors: dict[str, Tensor], path: Path, *, source: str, trust_remote_code: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = (path.with_name(f".{path.name}.{word}-{os.getpid()}") for word in ("new", "old"))
    try:
        model.causal_lm.save_pretrained(new, state_dict=tensors)
        # save_pretrained declares the type of the masters.
        model.causal_lm.config.dtype = model.source_dtype
        model.causal_lm.config.save_pretrained(new)
        load_tokenizer(source, trust_remote_code).save_pretrained(new)
        if path.exists():
            path.rename(old)
        new.rename(path)
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
