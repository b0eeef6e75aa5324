"""The command line: help, errors, exit codes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncrl import __version__
from asyncrl.cli import main
from asyncrl.config_load import load_config
from asyncrl.preflight import Preflight

RUN = """\
job = "rl"
name = "demo"
steps = 2
model.path = "{task}/model"
data.train = "{task}/prompts.jsonl"
reward.function = "asyncrl.rewards:exact_match"
algorithm.name = "grpo"
generators.max_new_tokens = 8
"""


@pytest.fixture
def run_toml(tmp_path: Path, sort_task: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN.format(task=sort_task))
    return "run.toml"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Preflight, str | None]]:
    """Calls of asyncrl.launch.launch, which is replaced: nothing starts."""
    calls: list[tuple[Preflight, str | None]] = []

    def launch(prepared: Preflight, *, address: str | None) -> int:
        calls.append((prepared, address))
        return 0

    module = ModuleType("asyncrl.launch")
    module.launch = launch  # type: ignore[attr-defined]
    module.placement_plan = lambda config, address: f"plan of {config.name}\n\n2 processes"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "asyncrl.launch", module)
    return calls


def command(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "asyncrl", *arguments], capture_output=True, text=True, **kwargs)


def exit_code(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_launch_passes_the_checked_configuration_on(run_toml: str, launched: list[Any]) -> None:
    assert main(["launch", "--config", run_toml, "--learners.lr", "2e-5", "--address", "auto", "--mode=sync"]) == 0
    ((prepared, address),) = launched
    assert (prepared.config.learners.lr, prepared.config.mode, address) == (2e-5, "sync", "auto")
    assert len(prepared.prompts) == 2000 and prepared.config.generators.max_model_len == 15


def test_dry_run_prints_toml_and_plan_and_starts_nothing(
    run_toml: str, launched: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["launch", "--steps=7", f"--config={run_toml}", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["generators"]["max_model_len"] == 15
    assert printed.endswith("# plan of demo\n#\n# 2 processes\n")
    (tmp_path / "resolved.toml").write_text(printed)
    assert load_config(tmp_path / "resolved.toml").steps == 7
    assert launched == [] and not (tmp_path / "runs").exists()


def test_every_problem_is_a_line_and_the_exit_code_is_2(
    run_toml: str, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--config", run_toml, "--learners.learning_rate=1", "--steps=0"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: (command line): [learners] unknown key 'learning_rate'; did you mean 'lr'?",
        "error: (command line): steps must be an integer > 0; got 0",
    ]
    assert main(["launch", "--config", run_toml, "--model.path=nowhere", "--reward.function=no.py:f"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: [model] path = 'nowhere': no such folder; looked at /")
    assert lines[1].startswith("error: [reward] no file /") and len(lines) == 2 and launched == []


def test_a_misspelt_option_is_not_taken_for_a_setting(
    run_toml: str, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--config", run_toml, "--dryrun"]) == 2
    assert capsys.readouterr().err == "error: (command line): unknown option --dryrun; did you mean --dry-run?\n"
    assert launched == []


def test_config_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("launch", "--steps=3") == 2
    assert "the following arguments are required: --config" in capsys.readouterr().err


def test_interrupt_and_bugs(run_toml: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: BaseException) -> None:
        def launch(*_: object, **__: object) -> int:
            raise error

        monkeypatch.setattr(sys.modules["asyncrl.launch"], "launch", launch)

    raising(KeyboardInterrupt())
    assert main(["launch", "--config", run_toml]) == 130
    raising(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main(["launch", "--config", run_toml])


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"asyncrl {__version__}\n"
    assert main([]) == 0
    assert "asyncrl launch --help" in capsys.readouterr().out
    assert exit_code("launch", "--help") == 0
    text = capsys.readouterr().out
    assert "--learners.lr=1e-5" in text and "--dry-run" in text
    assert "[generators]\n  num  (an integer > 0; default 1)\n      Generator actors, each with a vLLM engine." in text


def test_errors_from_a_real_process_have_no_traceback(tmp_path: Path) -> None:
    run = command("launch", "--config", "none.toml", cwd=tmp_path)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == f"error: none.toml: no such configuration file; looked at {tmp_path}/none.toml\n"


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from asyncrl.cli import main\ntry: main(['launch', '--help'])\nexcept SystemExit: pass\n"
    code += "print({'torch', 'ray', 'vllm', 'transformers', 'numpy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "set()"


@pytest.mark.integration
def test_dry_run_of_the_real_plan(run_toml: str, tmp_path: Path) -> None:
    run = command("launch", "--config", run_toml, "--dry-run", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert tomllib.loads(run.stdout)["name"] == "demo"
    assert all(f"\n# {process} " in run.stdout for process in ("coordinator", "generator", "shard", "learner"))
