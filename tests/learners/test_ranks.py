"""Two gloo ranks against one process: same loss, gradient norm, weights; errors reach every rank."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from learner_cases import make_groups, process_group, rl_config, sft_config

from asyncrl.errors import AsyncRLError
from asyncrl.learners import PolicyTrainer, SFTTrainer, assign_groups, init_distributed
from asyncrl.types import Group, GroupRef
from asyncrl.weights import WeightManifest, WeightPublisher, open_weights
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

POLICY_CASES: dict[str, dict[str, Any]] = {
    "one_minibatch": {},
    "two_minibatches": {"num_minibatches": 2, "learners": {"max_tokens_per_microbatch": 40}},
    "sequence_mean": {"aggregate": "sequence_mean", "learners": {"max_tokens_per_microbatch": 25}},
    "recompute_activations": {"learners": {"activation_checkpointing": True}},
}


def ref_of(group: Group) -> GroupRef:
    return GroupRef(
        shard=0,
        group_id=group.group_id,
        number=group.number,
        num_rows=len(group.rollouts),
        num_tokens=group.num_tokens,
        max_tokens=0,
        min_version=group.min_version,
        max_version=group.min_version,
        nbytes=0,
        reward_mean=0.0,
        reward_std=0.0,
    )


def without_rewards(group: Group) -> Group:
    failed = tuple(dataclasses.replace(r, reward=float("nan")) for r in group.rollouts)
    return dataclasses.replace(group, rollouts=failed)


def batch() -> list[Group]:
    """Eight groups, three of which failed: ranks get unequal numbers of rows, and so dummies."""
    return [without_rewards(g) if g.number in (2, 5, 7) else g for g in make_groups(8)]


class Rank:
    """One rank of a world, with everything the cases need."""

    def __init__(self, task: Path, folder: Path, *, rank: int, world_size: int, device: torch.device) -> None:
        self.task, self.folder = task, folder
        self.place = {"rank": rank, "world_size": world_size, "device": device}

    def policy(self, **settings: Any) -> PolicyTrainer:
        config = rl_config(self.task / "model", groups=8, ranks=self.place["world_size"], **settings)
        publisher = WeightPublisher(self.folder / "weights") if self.place["rank"] == 0 else None
        return PolicyTrainer(
            config, world_size=self.place["world_size"], device=self.place["device"], publisher=publisher
        )

    def mine(self, trainer: PolicyTrainer, groups: list[Group]) -> list[Group]:
        by_number = {g.number: g for g in groups}
        slices = assign_groups(
            [ref_of(g) for g in groups],
            num_ranks=self.place["world_size"],
            num_minibatches=trainer.config.algorithm.num_minibatches,
        )
        return [by_number[r.number] for r in slices[self.place["rank"]]]

    def train_policy(self, **settings: Any) -> tuple[list[dict[str, float]], torch.Tensor]:
        trainer = self.policy(**settings)
        groups = self.mine(trainer, batch())
        metrics = [trainer.train_step(groups, policy_version=version) for version in (1, 2)]
        return metrics, weights(trainer)

    def train_sft(self) -> tuple[list[dict[str, float]], torch.Tensor]:
        config = sft_config(self.task, ranks=self.place["world_size"], max_tokens_per_microbatch=200)
        trainer = SFTTrainer(config, **self.place)
        return [*(trainer.train_step(step) for step in range(4)), trainer.evaluate()], weights(trainer)

    def save_and_publish(self) -> tuple[dict | None, torch.Tensor]:
        trainer = self.policy()
        trainer.train_step(self.mine(trainer, batch()), policy_version=1)
        trainer.save(str(self.folder / "saved"))
        manifest = trainer.publish(2)
        if manifest is not None:
            opened = dict(open_weights(WeightManifest.from_dict(manifest)))
            torch.save({k: v.clone() for k, v in opened.items()}, self.folder / "published.pt")
        return manifest, weights(trainer)

    def errors(self) -> list[str]:
        """What each rank hears of problems that one of them has; hearing the later ones shows that none is stuck."""
        trainer = self.policy()
        groups, heard = self.mine(trainer, batch()), []
        stale = make_groups(8, versions=(-5, 0)) if self.place["rank"] == 1 else batch()
        calls = (
            lambda: trainer.train_step(self.mine(trainer, stale), policy_version=1),
            lambda: trainer.train_step(groups[: 4 - self.place["rank"]], policy_version=1),
            lambda: trainer.save(str(self.folder / "published.pt" / "under_a_file")),
            lambda: poison(trainer) or trainer.publish(0),
            lambda: trainer.train_step(groups, policy_version=1),
        )
        for call in calls:
            try:
                call()
            except AsyncRLError as error:
                heard.append(f"{type(error).__name__}: {error}")
        return heard

    def run(self) -> dict[str, Any]:
        results: dict[str, Any] = {name: self.train_policy(**case) for name, case in POLICY_CASES.items()}
        results["again"] = self.train_policy(**POLICY_CASES["two_minibatches"])
        results["sft"] = self.train_sft()
        results["saved"] = self.save_and_publish()
        return results


def weights(trainer: PolicyTrainer | SFTTrainer) -> torch.Tensor:
    return torch.cat([p.full_tensor().detach().flatten() for p in trainer.model.parameters()])


def poison(trainer: PolicyTrainer) -> None:
    with torch.no_grad():
        trainer.model.causal_lm.model.norm.weight.fill_(float("nan"))


def run_rank(rank: int, world_size: int, task: Path, folder: Path) -> None:
    address, listener = folder / "address", None
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        (folder / "new").write_text(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        (folder / "new").rename(address)
    wait_until(address.exists, within_s=60, what=lambda: "rank 0 gave no address")
    device = init_distributed(
        rank=rank, world_size=world_size, init_method=address.read_text(), threads=1, listener=listener
    )
    member = Rank(task, folder, rank=rank, world_size=world_size, device=device)
    results = member.run()
    results["errors"] = member.errors()
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two(sort_task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict, Path]:
    """Results of both ranks, and their folder."""
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.spawn(run_rank, (2, sort_task, folder), nprocs=2)
    first, second = (torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1))
    return first, second, folder


@pytest.fixture(scope="module")
def one(sort_task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    with process_group() as device:
        folder = tmp_path_factory.mktemp("one")
        return Rank(sort_task, folder, rank=0, world_size=1, device=device).run()


@pytest.mark.parametrize("case", [*POLICY_CASES, "sft"])
def test_two_ranks_take_the_steps_of_one_process(case: str, one: dict, two: tuple[dict, dict, Path]) -> None:
    expected, expected_weights = one[case]
    for results in two[:2]:
        metrics, after = results[case]
        for step, values in zip(metrics, expected, strict=True):
            assert step == pytest.approx(values, rel=1e-5, abs=1e-5)
        torch.testing.assert_close(after, expected_weights, rtol=1e-5, atol=1e-5)


def test_every_rank_reports_the_same(two: tuple[dict, dict, Path]) -> None:
    for case in (*POLICY_CASES, "sft"):
        assert two[0][case][0] == two[1][case][0]


def test_two_runs_are_bitwise_equal(one: dict, two: tuple[dict, dict, Path]) -> None:
    for results in (one, *two[:2]):
        assert results["again"][0] == results["two_minibatches"][0]
        assert torch.equal(results["again"][1], results["two_minibatches"][1])


def test_recomputing_activations_changes_nothing(one: dict) -> None:
    assert one["recompute_activations"][0] == one["one_minibatch"][0]
    assert torch.equal(one["recompute_activations"][1], one["one_minibatch"][1])


def test_the_saved_folder_and_the_published_weights_are_the_model(two: tuple[dict, dict, Path]) -> None:
    first, second, folder = two
    manifest, expected = first["saved"]
    assert second["saved"][0] is None
    assert manifest["version"] == 2
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(torch.cat([p.detach().flatten() for p in loaded.parameters()]), expected)
    published = torch.load(folder / "published.pt")
    assert list(published) == [name for name, _ in loaded.named_parameters()]
    assert torch.equal(torch.cat([t.flatten() for t in published.values()]), expected)


def test_an_error_on_one_rank_is_raised_on_all(two: tuple[dict, dict, Path]) -> None:
    first, second, _ = two
    assert first["errors"] == second["errors"]
    kinds = [text.split(":")[0] for text in first["errors"]]
    assert kinds == ["ReplayBufferError", "AsyncRLError", "CheckpointError", "WeightSyncError", "AsyncRLError"]
    assert "[4, 3]" in first["errors"][1]
    assert "must be finite" in first["errors"][4]
