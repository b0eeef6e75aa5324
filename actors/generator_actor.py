"""Ray shell of one generator: builds engine, scorer and rollout loop, and passes calls on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from asyncrl.config import RLConfig
from asyncrl.errors import GenerationError
from asyncrl.process import last_error, log_to_file
from asyncrl.types import Prompt, Ticket
from asyncrl.wiring import Wiring


class RemoteCoordinator:
    """The coordinator as a generator sees it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def take_tickets(self, generator: str, *, num: int, engine_version: int) -> list[Ticket] | None:
        return await self._handle.take_tickets.remote(generator, num=num, engine_version=engine_version)

    async def group_done(self, generator: str, **report: Any) -> None:
        await self._handle.group_done.remote(generator, **report)


@ray.remote
class GeneratorActor:
    """One vLLM engine. Every method but start() needs start() to have returned."""

    def __init__(self, *, name: str, log: Path) -> None:
        log_to_file(log)
        self._log = log
        self._name = name

    async def start(self, config: RLConfig, *, wiring: Wiring, coordinator: Any) -> None:
        from asyncrl.actors.engine import Engine
        from asyncrl.actors.generator import Generator
        from asyncrl.data import load_tokenizer
        from asyncrl.rewards import Scorer

        self._shared = wiring.hold()
        generators = config.generators
        self._scorer = Scorer(config.reward)
        await self._scorer.start()
        with self._explained():
            self._engine = await Engine.start(
                config.model.path,
                dtype=config.model.dtype,
                max_model_len=generators.max_model_len,
                max_num_seqs=generators.max_concurrent_rollouts,
                kv_cache_gb=generators.kv_cache_gb,
                gpu_memory_utilization=generators.gpu_memory_utilization,
                tensor_parallel=generators.tensor_parallel,
                seed=config.seed,
                threads=generators.threads,
                trust_remote_code=config.model.trust_remote_code,
            )
        self._wiring = wiring
        self._buffer = wiring.connect_buffer()
        self._generator = Generator(
            self._engine,
            name=self._name,
            buffer=self._buffer,
            coordinator=RemoteCoordinator(coordinator),
            scorer=self._scorer,
            tokenizer=load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code),
            config=config,
        )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """vLLM's errors point to a trace "above": add what its process last wrote here."""
        try:
            yield
        except GenerationError as error:
            cause = last_error(self._log)
            raise GenerationError(f"{error}; {self._log.name} ends with: {cause}" if cause else str(error)) from error

    async def run(self) -> None:
        with self._explained():
            await self._generator.run()

    async def update_weights(self, manifest: dict[str, Any]) -> None:
        from asyncrl.weights import WeightManifest

        local = await asyncio.to_thread(self._wiring.pull, WeightManifest.from_dict(manifest))
        await self._engine.update_weights(local)

    async def evaluate(self, prompts: Sequence[Prompt], *, samples_per_prompt: int, seed: int) -> Any:
        return await self._generator.evaluate(prompts, samples_per_prompt=samples_per_prompt, seed=seed)

    async def stats(self) -> dict[str, float]:
        return self._generator.stats()

    async def shutdown(self) -> None:
        """End the engine's processes and the reward workers; also after a start() that failed half-way."""
        for part in ("_engine", "_scorer", "_buffer", "_shared"):
            owned = getattr(self, part, None)
            if owned is not None:
                closing = owned.shutdown() if part == "_engine" else owned.close()
                if closing is not None:
                    await closing
