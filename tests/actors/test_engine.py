"""The real vLLM engine: log-probabilities, weight updates with requests in flight, repeatability, failures, shutdown.

One engine serves the tests of this file; each moves it forward to versions of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from asyncrl.actors import engine as engine_module
from asyncrl.actors.engine import Engine
from asyncrl.actors.sampling import Sample, SampleRequest
from asyncrl.errors import GenerationError, WeightSyncError
from asyncrl.weights import WeightManifest, WeightPublisher

pytestmark = pytest.mark.integration

EOS = 1
MAX_MODEL_LEN = 96
PROMPTS = [np.random.default_rng(i).integers(3, 13, size=4 + i % 5).tolist() for i in range(32)]
TOLERANCE = 1e-4


@dataclass
class World:
    """The engine, the loop it lives on, and everything it has been given."""

    runner: asyncio.Runner
    engine: Engine
    publisher: WeightPublisher
    models: dict[int, torch.nn.Module]
    base: Path

    def run(self, coroutine):
        return self.runner.run(coroutine)

    def new_weights(self, version: int) -> dict[str, torch.Tensor]:
        """Weights of a version, far from all others; the model that has them is in `models`."""
        model = load(self.base)
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        self.models[version] = model
        return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}

    def publish(self, version: int, weights: dict[str, torch.Tensor] | None = None) -> WeightManifest:
        return self.publisher.publish(version, (weights or self.new_weights(version)).items())

    def next_version(self) -> int:
        return max(self.models) + 1

    async def sample(self, i: int = 0, *, temperature: float = 1.0, max_new_tokens: int = 40) -> Sample:
        return await self.engine.sample(
            f"request-{i}-{time.monotonic_ns()}",
            PROMPTS[i],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=i,
        )

    async def until_busy(self) -> None:
        """Return when a request is in flight."""
        async with asyncio.timeout(20):
            while not self.engine._llm.get_num_unfinished_requests():
                await asyncio.sleep(0.001)

    def error(self, sample: Sample, prompt: list[int], *, temperature: float = 1.0) -> float:
        """Largest distance of a log-probability from a whole forward pass under the version that it names."""
        worst = 0.0
        ids = torch.tensor([[*prompt, *sample.tokens.tolist()]])
        for version in set(sample.versions.tolist()):
            with torch.no_grad():
                logprobs = (self.models[version](ids).logits[0] / temperature).log_softmax(-1)
            expected = logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
            of_version = sample.versions == version
            worst = max(worst, float(np.abs(expected - sample.logprobs)[of_version].max()))
        return worst


def load(path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


async def start(path: Path) -> Engine:
    return await Engine.start(path, dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=64, kv_cache_gb=0.125)


@pytest.fixture(scope="module")
def world(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    publisher = WeightPublisher(tmp_path_factory.mktemp("weights"), keep=4)
    with asyncio.Runner() as runner:
        engine = runner.run(start(tiny_model))
        yield World(runner, engine, publisher, {0: load(tiny_model)}, tiny_model)
        runner.run(engine.shutdown())
    publisher.close()


def check_it_works(world: World) -> None:
    sample = world.run(world.sample())
    assert set(sample.versions.tolist()) == {world.engine.version}
    assert world.error(sample, PROMPTS[0]) < TOLERANCE


def test_logprobs_are_those_of_a_forward_pass_with_the_temperature_applied(world: World) -> None:
    async def main() -> list[Sample]:
        return await asyncio.gather(*(world.sample(i, temperature=0.7) for i in range(32)))

    version = world.engine.version
    samples = world.run(main())
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        assert world.error(sample, prompt, temperature=0.7) < TOLERANCE
        assert set(sample.versions.tolist()) == {version}
        assert sample.tokens.size == sample.logprobs.size == sample.versions.size > 0
        # The end-of-sequence token is sampled and therefore part of the completion.
        assert (sample.tokens[-1] == EOS) == (sample.finish_reason == "stop")
        assert sample.finish_reason == "stop" or sample.tokens.size == 40
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}


def test_requests_in_flight_go_on_under_new_weights(world: World) -> None:
    first = world.engine.version
    versions = [world.next_version(), world.next_version() + 1]
    manifests = [world.publish(version) for version in versions]

    async def main() -> list[Sample]:
        tasks = [asyncio.create_task(world.sample(i, max_new_tokens=80)) for i in range(32)]
        for manifest in manifests:
            await world.sample(0, max_new_tokens=2)  # it ends after two steps of all the others
            await world.engine.update_weights(manifest)
        return await asyncio.gather(*tasks)

    samples = world.run(main())
    assert world.engine.version == versions[-1]
    spans = {tuple(dict.fromkeys(sample.versions.tolist())) for sample in samples}
    assert (first, *versions) in spans  # one rollout, three versions, in order
    assert all(span == tuple(sorted(span)) for span in spans)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        assert world.error(sample, prompt) < TOLERANCE
    check_it_works(world)


def without_one(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if "layers.1.mlp.up_proj" not in name}


def with_one_more(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**weights, "model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)}


def with_another_shape(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**weights, "model.norm.weight": torch.ones(127)}


@pytest.mark.parametrize(
    ("change", "message"),
    [(without_one, "1 missing"), (with_one_more, "1 unknown"), (with_another_shape, "1 of another shape")],
)
@pytest.mark.parametrize("checked_by", ["engine", "worker"])
def test_weights_of_another_model_leave_the_engine_as_it_was(
    world: World, monkeypatch: pytest.MonkeyPatch, change: Callable, message: str, checked_by: str
) -> None:
    version = world.next_version()
    manifest = world.publish(version, change(world.new_weights(version)))
    if checked_by == "worker":
        monkeypatch.setattr("asyncrl.actors.engine.check_tensors", lambda manifest, expected: None)
    before = world.engine.version
    with pytest.raises(WeightSyncError, match=message):
        world.run(world.engine.update_weights(manifest))
    assert world.engine.version == before
    check_it_works(world)


def test_damaged_and_older_weights_leave_the_engine_as_it_was(world: World) -> None:
    version = world.next_version()
    manifest = world.publish(version)
    with pytest.raises(WeightSyncError, match="checksum"):
        world.run(world.engine.update_weights(replace(manifest, checksum="0" * 16)))
    check_it_works(world)
    world.run(world.engine.update_weights(manifest))
    with pytest.raises(WeightSyncError, match="older"):
        world.run(world.engine.update_weights(replace(manifest, version=version - 1)))
    assert world.engine.version == version
    check_it_works(world)


def test_updates_at_the_same_time_follow_each_other(world: World) -> None:
    versions = [world.next_version(), world.next_version() + 1]
    manifests = [world.publish(version) for version in versions]
    updates = world.engine.num_updates

    async def main() -> None:
        again = world.engine.update_weights(manifests[1])  # the same version twice is one update
        await asyncio.gather(*(world.engine.update_weights(manifest) for manifest in manifests), again)

    world.run(main())
    assert (world.engine.version, world.engine.num_updates) == (versions[-1], updates + 2)
    check_it_works(world)


def test_a_cancelled_update_is_finished_and_a_cancelled_request_is_gone(world: World) -> None:
    manifest = world.publish(world.next_version())

    async def main() -> None:
        request = asyncio.create_task(world.sample(1, max_new_tokens=80))
        batch = asyncio.create_task(world.engine.sample_batch([SampleRequest("cancelled", PROMPTS[2], 80, 1.0, 1)]))
        update = asyncio.create_task(world.engine.update_weights(manifest))
        await world.until_busy()
        for task in (request, batch, update):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    world.run(main())
    assert world.engine.version == manifest.version
    assert world.engine._llm.get_num_unfinished_requests() == 0
    check_it_works(world)


def test_a_batch_is_bitwise_repeatable(world: World) -> None:
    requests = [SampleRequest(f"batch-{i}", PROMPTS[i % 8], 60, 1.0, 1000 + i) for i in range(48)]

    def once() -> list[tuple[bytes, bytes]]:
        samples = world.run(world.engine.sample_batch(requests))
        return [(sample.tokens.tobytes(), sample.logprobs.tobytes()) for sample in samples]

    first = once()
    assert once() == first
    assert len(set(first)) > 40  # seeds differ


@pytest.mark.parametrize("tokens", [[], [3] * (MAX_MODEL_LEN + 1), [99_999]])
def test_a_prompt_that_cannot_be_sampled_from_is_refused_alone(world: World, tokens: list[int]) -> None:
    async def main() -> Sample:
        good = asyncio.create_task(world.sample(3))
        with pytest.raises(GenerationError, match="refused"):
            await world.engine.sample("bad", tokens, max_new_tokens=4, temperature=1.0)
        return await good

    assert world.run(main()).tokens.size
    assert not world.engine.dead


def test_shutdown_fails_what_is_in_flight_and_leaves_no_process(world: World) -> None:
    processes = [psutil.Process(p.pid) for p in multiprocessing.active_children()]
    assert processes

    async def main() -> None:
        request = asyncio.create_task(world.sample(0, max_new_tokens=80))
        await world.until_busy()
        await world.engine.shutdown()
        with pytest.raises(GenerationError, match="shut down"):
            await request
        with pytest.raises(GenerationError, match="shut down"):
            await world.sample(1)
        await world.engine.shutdown()  # harmless

    world.run(main())
    assert world.engine.dead
    assert not any(process.is_running() for process in processes)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("fault", "message"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "hangs: .* for 1 s")])
def test_a_dead_or_hanging_engine_process_is_a_generation_error(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, fault: signal.Signals, message: str
) -> None:
    monkeypatch.setattr(engine_module, "WATCH_EVERY_S", 0.2)
    monkeypatch.setattr(engine_module, "ANSWER_TIMEOUT_S", 1.0)

    async def main() -> None:
        engine = await start(tiny_model)
        try:
            request = asyncio.create_task(engine.sample("r", PROMPTS[0], max_new_tokens=80, temperature=1.0))
            await engine.sample("first", PROMPTS[1], max_new_tokens=2, temperature=1.0)
            psutil.Process(multiprocessing.active_children()[0].pid).send_signal(fault)
            with pytest.raises(GenerationError, match=message):
                await asyncio.wait_for(request, timeout=20)
            assert engine.dead
            with pytest.raises(GenerationError):
                await engine.sample("s", PROMPTS[0], max_new_tokens=4, temperature=1.0)
        finally:
            await engine.shutdown()

    asyncio.run(main())
    assert not multiprocessing.active_children()
