"""How vLLM is set up for a generator: environment, engine arguments, sampling parameters and outputs.

Everything vLLM reads from the environment is set here. Imports vLLM only inside functions.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from asyncrl.actors.sampling import Sample, SampleRequest
from asyncrl.types import FINISH_REASONS

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import RequestOutput

GIB = 1 << 30
MIN_BATCHED_TOKENS = 8192


def set_environment() -> None:
    """What vLLM reads from the environment while it is imported; its processes inherit it."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ["ASYNCRL_ENGINE_OWNER"] = str(os.getpid())
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "asyncrl" not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = f"{plugins},asyncrl"


def _set_cpu_environment(threads: int) -> None:
    """The same for CPUs, where the model runs with OpenMP threads."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # vLLM's own binding would pin every engine of the machine to the same cores.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Lets one process be both engine core and worker. The threads above are inherited, which makes that sound.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Saves seconds of compilation at the first requests; the model runs eagerly.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def engine_args(
    model_path: str,
    *,
    dtype: str,
    max_model_len: int,
    kv_cache_gb: float | None,
    tensor_parallel: int,
    threads: int,
    **others: Any,
) -> AsyncEngineArgs:
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        _set_cpu_environment(threads)
        kv_cache_gb = kv_cache_gb or 1.0
    return AsyncEngineArgs(
        model=model_path,
        dtype=cast(Any, ("float32" if on_cpu else "bfloat16") if dtype == "auto" else dtype),
        max_model_len=max_model_len,
        # On CPUs a seeded request whose prompt is split over two steps kills the engine.
        enable_chunked_prefill=not on_cpu,
        max_num_batched_tokens=max(max_model_len, MIN_BATCHED_TOKENS),
        kv_cache_memory_bytes=int(kv_cache_gb * GIB) if kv_cache_gb else None,
        tensor_parallel_size=tensor_parallel,
        distributed_executor_backend="uni" if tensor_parallel == 1 else "mp",
        enforce_eager=on_cpu,
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
        generation_config="vllm",  # no sampling defaults from the model folder
        weight_transfer_config=WeightTransferConfig(backend="asyncrl"),
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **others,
    )


def sampling_params(request: SampleRequest) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        seed=request.seed,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def to_sample(output: RequestOutput, *, seconds: float) -> Sample:
    completion = output.outputs[0]
    versions = np.full(len(completion.token_ids), -1, dtype=np.int32)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    logprobs = cast("FlatLogprobs | None", completion.logprobs)
    reason = completion.finish_reason or "error"
    return Sample(
        tokens=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=np.asarray(logprobs.logprobs if logprobs else [], dtype=np.float32),
        versions=versions,
        finish_reason=reason if reason in FINISH_REASONS else "error",
        seconds=seconds,
    )
