"""Loading a published version into vLLM's model, on vLLM's worker. Runs inside vLLM's processes.

vLLM finds `register` through the entry point `vllm.general_plugins` in every process that it starts.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from asyncrl.errors import WeightSyncError
from asyncrl.model_tensors import check_tensors, expected_tensors
from asyncrl.weights import WeightManifest, open_weights

BACKEND = "asyncrl"
OWNER = "ASYNCRL_ENGINE_OWNER"
"""Environment variable that marks the processes of an Engine, against other uses of vLLM."""
REFUSED = "[refused before loading]"
"""In the message of an update that left the model as it was."""


def register() -> None:
    """Make the backend known to vLLM. May be called more than once."""
    if OWNER in os.environ and multiprocessing.parent_process() is not None:
        threading.Thread(target=_exit_with_parent, name="exit-with-parent", daemon=True).start()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, SharedMemoryWeights.__name__)


def _exit_with_parent() -> None:
    """End this process when the one that started it is gone, however it ended; vLLM's engine would stay."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: every update brings its manifest."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    manifest: dict[str, Any]


class SharedMemoryWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a whole version in one `update_weights` call, so that no step ever runs on half of it."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            manifest = WeightManifest.from_dict(update_info.manifest)
            check_tensors(manifest, expected_tensors(self.model_config.model))
            tensors = open_weights(manifest, check=False)  # the engine has verified the checksum
        except WeightSyncError as error:
            raise WeightSyncError(f"{REFUSED} {error}") from error
        self._load(tensors)

    @torch.no_grad()
    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        with disable_mtp_completeness_check():
            cast(Any, self.model).load_weights(tensors.items())
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_embeddings(self.model)

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def _repack_embeddings(model: torch.nn.Module) -> None:
    """Refresh the packed copies of embedding weights.

    On CPUs an lm_head tied to the input embedding computes with its own packed copy, which a layerwise reload does not
    renew: only the module that owns the parameter is processed again.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        weight = getattr(module, "weight", None)
        if (
            hasattr(module, "cpu_linear")
            and hasattr(module, "num_embeddings")
            and weight is not None
            and weight.numel()
        ):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
