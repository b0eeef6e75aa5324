"""What a run asks of the cluster."""

from __future__ import annotations

from asyncrl.config import RLConfig, SFTConfig
from asyncrl.placement import plan_placement

RL = {
    "job": "rl",
    "name": "x",
    "steps": 1,
    "model": {"path": "m"},
    "data": {"train": "t"},
    "reward": {"function": "r:f"},
    "algorithm": {"name": "grpo"},
    "generators": {"num": 2, "tensor_parallel": 4},
    "learners": {"num_ranks": 8},
}


def test_gpu_run_takes_one_gpu_per_rank_and_tensor_parallel_gpus_per_engine() -> None:
    placement = plan_placement(RLConfig(**RL), use_gpus=True)
    assert placement.total["GPU"] == 2 * 4 + 8
    assert placement.shortage({"CPU": 64, "GPU": 8}) == "16 GPUs needed, 8 in the cluster"
    assert placement.shortage({"CPU": 64, "GPU": 16}) is None


def test_ranks_on_the_cpu_leave_the_gpus_to_the_engines() -> None:
    placement = plan_placement(RLConfig(**RL | {"learners": {"num_ranks": 8, "device": "cpu"}}), use_gpus=True)
    assert placement.total["GPU"] == 2 * 4
    assert {b.gpus for b in placement.bundles if b.process.startswith("learner")} == {0}


def test_cpu_run_takes_threads_and_light_shares() -> None:
    placement = plan_placement(RLConfig(**RL), use_gpus=False)
    assert placement.total == {"CPU": 10.3, "GPU": 0}
    assert placement.num_cpus == 11
    assert [b.process for b in placement.bundles][:5] == [
        "coordinator",
        "generator-0",
        "generator-1",
        "shard-0",
        "shard-1",
    ]


def test_supervised_run_has_neither_generators_nor_shards() -> None:
    config = SFTConfig(job="sft", name="x", steps=1, model={"path": "m"}, data={"train": "t"})  # type: ignore[arg-type]
    lines = plan_placement(config, use_gpus=False).describe().splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["coordinator", "1"], ["learner", "2"], ["all", "3"]]
