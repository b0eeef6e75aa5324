"""The inference engine of a generator: token ids in, token ids with log-probabilities and policy versions out.

A thin class over vLLM's AsyncLLM, which runs the model in a process of its own. vLLM is imported by `Engine.start`, not
by this module. New weights arrive as a manifest (asyncrl.weights) and are loaded by asyncrl.actors.vllm_weights inside
vLLM's worker, while the requests in flight stand still:

    validate -> pause(keep, clear_cache) -> load on the worker -> label with the version -> resume

Requests in flight go on under the new weights: their attention cache is recomputed, so that every log-probability is
that of one policy over the whole prefix, and the version of each token is recorded.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psutil

from asyncrl.actors.sampling import Sample, SampleRequest
from asyncrl.actors.tasks import finish, gather
from asyncrl.actors.vllm_setup import engine_args, sampling_params, set_environment, to_sample
from asyncrl.errors import GenerationError, WeightSyncError
from asyncrl.model_tensors import check_tensors, expected_tensors
from asyncrl.weights import WeightManifest, verify

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

T = TypeVar("T")

SHUTDOWN_S = 3.0
"""Time for an orderly end; then the processes are killed."""
WATCH_EVERY_S = 10.0
ANSWER_TIMEOUT_S = 300.0
"""An engine process that is silent for so long counts as dead. Longer than any of its steps."""


class Engine:
    """A vLLM engine whose weights move forward while it samples.

    `version` is the policy version that tokens are sampled with; `num_updates` and `update_s` sum up how it came there
    (checks and pauses included). All methods belong to the event loop of `start`.
    """

    def __init__(self, llm: AsyncLLM, *, model_path: str, version: int, num_workers: int) -> None:
        self._running: AsyncLLM | None = llm
        self._num_workers = num_workers
        self._expected = expected_tensors(model_path)
        self._processes: list[BaseProcess] = []
        self._descendants: list[psutil.Process] = []
        self._updating = asyncio.Lock()
        self._pausing = asyncio.Lock()
        self._broken: str | None = None
        self._watching: asyncio.Task[None] | None = None
        self.version = version
        self.num_updates = 0
        self.update_s = 0.0

    @classmethod
    async def start(
        cls,
        model_path: str | Path,
        *,
        max_model_len: int,
        max_num_seqs: int = 256,
        dtype: str = "auto",
        kv_cache_gb: float | None = None,
        gpu_memory_utilization: float = 0.9,
        tensor_parallel: int = 1,
        trust_remote_code: bool = False,
        seed: int = 0,
        threads: int = 1,
        version: int = 0,
    ) -> Engine:
        """Load the model and return when it can sample. Blocks the event loop while it starts.

        Args:
            dtype: "auto" is float32 on CPUs and bfloat16 on GPUs.
            kv_cache_gb: None is 1 on CPUs, and what gpu_memory_utilization leaves on GPUs.
            threads: CPU threads of the model (CPUs only).
            version: policy version of the weights in model_path.

        Raises:
            GenerationError: the engine did not start.
            WeightSyncError: the folder has no safetensors weights.
        """
        model_path = str(model_path)
        expected_tensors(model_path)
        set_environment()
        before = multiprocessing.active_children()
        try:
            from vllm.v1.engine.async_llm import AsyncLLM

            args = engine_args(
                model_path,
                dtype=dtype,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                kv_cache_gb=kv_cache_gb,
                gpu_memory_utilization=gpu_memory_utilization,
                tensor_parallel=tensor_parallel,
                trust_remote_code=trust_remote_code,
                seed=seed,
                threads=threads,
            )
            engine = cls(
                AsyncLLM.from_engine_args(args), model_path=model_path, version=version, num_workers=tensor_parallel
            )
        except Exception as error:
            raise GenerationError(f"the vLLM engine did not start on {model_path}: {error}") from error
        engine._processes = [process for process in multiprocessing.active_children() if process not in before]
        engine._descendants = [
            child for process in engine._processes for child in psutil.Process(process.pid).children(recursive=True)
        ]
        try:
            await engine._call(engine._llm.get_supported_tasks())  # cached by vLLM: later submissions keep their order
            await engine._call(engine._llm.update_weight_version(str(version)))
        except BaseException:
            await engine.shutdown()
            raise
        engine._watching = asyncio.create_task(engine._watch())
        return engine

    @property
    def dead(self) -> bool:
        """True when the engine cannot sample any more; only a new one can."""
        return self._broken is not None or self._llm.errored

    @property
    def _llm(self) -> AsyncLLM:
        if self._running is None:
            raise GenerationError("the engine was shut down")
        return self._running

    async def sample(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int | None = None,
    ) -> Sample:
        """Sample one completion. Cancelling it removes the request from the engine.

        Raises:
            GenerationError: the request is not valid (empty, too long, unknown ids), or the engine is dead (`dead`).
        """
        request = SampleRequest(request_id, tokens, max_new_tokens, temperature, seed)
        started = time.perf_counter()
        return await self._collect(await self._submit(request), started)

    async def sample_batch(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Sample all requests as one batch, submitted in order while the engine stands still.

        The same batch with the same seeds under the same weights gives bitwise equal tokens and log-probabilities, as
        long as nothing else is in flight.
        """
        started = time.perf_counter()
        outputs: list[RequestOutputCollector] = []
        try:
            async with self._paused():
                for request in requests:
                    outputs.append(await self._submit(request))
            return await gather(*(self._collect(output, started) for output in outputs))
        except BaseException:
            await self._abort(outputs)
            raise

    async def update_weights(self, manifest: WeightManifest) -> None:
        """Move to a newer version; the same version again does nothing. Requests in flight go on under it.

        All or nothing: after a WeightSyncError the engine works on with the weights it had. Cancelling the caller does
        not interrupt an update that has begun.

        Raises:
            WeightSyncError: the version is older, or the weights are damaged, gone or of another model.
            GenerationError: the engine is dead.
        """
        await finish(self._update(manifest))

    async def _update(self, manifest: WeightManifest) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with self._updating:
            if manifest.version == self.version:
                return
            if manifest.version < self.version:
                raise WeightSyncError(f"version {manifest.version} is older than the engine's version {self.version}")
            started = time.perf_counter()
            check_tensors(manifest, self._expected)
            await asyncio.to_thread(verify, manifest)  # sampling goes on meanwhile
            async with self._paused():
                await self._call(self._llm.start_weight_update())
                await self._load(
                    WeightTransferUpdateRequest({"manifest": manifest.to_dict()}), version=manifest.version
                )
                self.version = manifest.version
            self.num_updates += 1
            self.update_s += time.perf_counter() - started

    async def _load(self, request: Any, *, version: int) -> None:
        from asyncrl.actors.vllm_weights import REFUSED

        try:
            await self._llm.update_weights(request)
            await self._llm.finish_weight_update(weight_version=str(version))
        except Exception as error:
            # With several workers another one may have loaded what this one refused.
            if REFUSED in str(error) and not self._llm.errored and self._num_workers == 1:
                raise WeightSyncError(str(error).split(REFUSED)[-1].strip()) from error
            self._broken = f"new weights were loaded in part: {error}"
            raise GenerationError(f"the engine must be started anew, {self._broken}") from error

    async def _watch(self) -> None:
        """Ask now and then: a process that hangs would otherwise leave its requests waiting for ever."""
        while not self.dead:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await self._llm.is_sleeping()
            except TimeoutError:
                self._broken = f"its process has not answered for {ANSWER_TIMEOUT_S:.0f} s"
                self._llm.output_processor.propagate_error(GenerationError(f"the vLLM engine hangs: {self._broken}"))
            except Exception:  # noqa: BLE001 - whatever ended the engine, its requests report it
                return

    async def shutdown(self) -> None:
        """Stop the engine; requests in flight fail. Returns when none of its processes is left."""
        if self._running is None:
            return
        llm, self._running = self._running, None
        self._broken = self._broken or "it was shut down"
        if self._watching is not None:
            self._watching.cancel()
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # or it would report the end of the engine as a failure
        llm.output_processor.propagate_error(GenerationError("the engine was shut down"))
        await asyncio.to_thread(llm.shutdown, timeout=SHUTDOWN_S)
        del llm
        gc.collect()  # AsyncLLM is part of a reference cycle, and its finalizer fails at interpreter exit
        await asyncio.to_thread(_end, self._processes, self._descendants)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Hold all requests where they are, with an empty cache; one holder at a time."""
        async with self._pausing:
            try:
                await finish(self._call(self._llm.pause_generation(mode="keep", clear_cache=True)))
                yield
            finally:
                if not self.dead:
                    await finish(self._call(self._llm.resume_generation()))

    async def _submit(self, request: SampleRequest) -> RequestOutputCollector:
        from vllm.inputs.engine import tokens_input

        # The salt keeps a request from the cached prefixes of another version.
        prompt = tokens_input(list(request.tokens), cache_salt=f"version-{self.version}")
        return await self._call(self._llm.add_request(request.request_id, prompt, sampling_params(request)))

    async def _collect(self, output: RequestOutputCollector, started: float) -> Sample:
        try:
            final = await self._call(output.get())
        except asyncio.CancelledError:
            await self._abort([output])
            raise
        finally:
            output.close()
        return to_sample(cast("RequestOutput", final), seconds=time.perf_counter() - started)

    async def _abort(self, outputs: Sequence[RequestOutputCollector]) -> None:
        if outputs and not self.dead:
            await finish(self._llm.abort([output.request_id for output in outputs], internal=True))

    async def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a call into vLLM; what it raises becomes a GenerationError."""
        if self._broken is not None:
            coroutine.close()
            raise GenerationError(f"the engine is not usable: {self._broken}")
        try:
            return await coroutine
        except GenerationError:
            raise
        except Exception as error:
            what = "the vLLM engine died" if self._llm.errored else "the vLLM engine refused the request"
            raise GenerationError(f"{what}: {error}") from error


def _end(processes: Sequence[BaseProcess], descendants: Sequence[psutil.Process]) -> None:
    """Wait for the processes, and kill those that stay."""
    for process in processes:  # not with psutil: it would take the exit status that multiprocessing waits for
        process.join(SHUTDOWN_S)
        if process.is_alive():
            process.kill()
            process.join()
    _, alive = psutil.wait_procs(descendants, timeout=SHUTDOWN_S)
    for descendant in alive:
        descendant.kill()
    psutil.wait_procs(alive, timeout=SHUTDOWN_S)
