"""Runs of the real command, each in a folder of its own, and a search for what they leave behind."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from asyncrl.buffer import shared_memory
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
TAG = "ASYNCRL_TEST_TAG"


@dataclass
class Workspace:
    """A working directory with the sorting task in data/sort and the examples; launch() runs the command line there."""

    path: Path
    tag: str = field(default_factory=lambda: uuid.uuid4().hex)
    shared_before: set[Path] = field(default_factory=lambda: set(shared_folders()))

    def environment(self) -> dict[str, str]:
        return os.environ | {TAG: self.tag, "PYTHONUNBUFFERED": "1", "COLUMNS": "160"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`asyncrl ARGUMENTS` as a child process."""
        return subprocess.Popen(
            [sys.executable, "-m", "asyncrl", *arguments],
            cwd=self.path,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_heed_sigint,
        )

    def start_launch(self, config: str, *overrides: str) -> subprocess.Popen[str]:
        """`asyncrl launch` as a child process; beside GPUs as exact as on CPUs, and with one GPU enough."""
        on_gpus = ["--model.dtype=float32", "--learners.device=cpu"] if torch.cuda.is_available() else []
        return self.start("launch", "--config", config, *on_gpus, *overrides)

    def launch(self, config: str, *overrides: str, status: int = 0, timeout_s: float = 500) -> str:
        """Run a config to its end; returns what was printed after checking the exit status and for leftovers."""
        process = self.start_launch(config, *overrides)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
            raise AssertionError(f"no end within {timeout_s} s:\n{output}\n{self.logs()}") from None
        assert process.returncode == status, f"exit status {process.returncode}:\n{output}\n{self.logs()}"
        self.assert_nothing_left()
        return output

    def run_folder(self, name: str) -> Path:
        return (self.path / "runs" / f"{name}-latest").resolve()

    def metrics(self, name: str) -> list[dict[str, Any]]:
        return read_metrics(self.run_folder(name))

    def logs(self) -> str:
        """The ends of all log files, for a failed assertion."""
        files = sorted(self.path.glob("runs/*/logs/*.log"))
        return "\n".join(f"--- {f.name}\n{f.read_text()[-2000:]}" for f in files)

    def processes(self) -> list[psutil.Process]:
        """Every live process that descends from a command of this workspace."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TAG) == self.tag:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def assert_nothing_left(self, within_s: float = 15) -> None:
        wait_until(lambda: not self.processes(), within_s=within_s, what=lambda: f"left: {self.processes()}")
        left = set(shared_folders()) - self.shared_before
        assert not left, f"left in shared memory: {left}"


def _heed_sigint() -> None:
    """As in a terminal, also when the tests run in the background of a script."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def shared_folders() -> list[Path]:
    """Folders in shared memory that no process holds."""
    return [path for path in Path(shared_memory()).glob("asyncrl-*") if _is_abandoned(path)]


def _is_abandoned(path: Path) -> bool:
    try:
        with open(path / "alive", "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """The folder in which all integration runs happen, as a user's clone of the repository."""
    from tests.conftest import load_example

    path = tmp_path_factory.mktemp("workspace")
    (path / "examples").symlink_to(ROOT / "examples")
    load_example("sort_digits").write_all(path / "data" / "sort")
    space = Workspace(path)
    yield space
    for process in space.processes():
        process.kill()


@pytest.fixture(scope="session")
def warm(workspace: Workspace) -> str:
    """What the documented supervised warm-up printed; runs/sft_sort-latest/model exists from then on."""
    return workspace.launch("examples/sft_sort.toml")
