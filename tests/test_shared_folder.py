"""Shared memory of a run is gone when its last process is, however that ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import shared_folder
from asyncrl.errors import ConfigError
from asyncrl.shared_folder import SharedFolder, check_room, new_shared_folder

HOLD = """
import sys, time
from asyncrl.shared_folder import SharedFolder
SharedFolder(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_folder, "shared_memory", lambda: str(tmp_path))
    return tmp_path


def test_the_last_holder_removes_the_folder() -> None:
    first = new_shared_folder()
    (first.path / "weights").mkdir()
    second = SharedFolder(first.path)
    first.close()
    first.close()
    assert (second.path / "weights").exists()
    second.close()
    assert not second.path.exists()


def test_a_new_run_removes_what_killed_ones_left_and_nothing_else(parent: Path) -> None:
    (parent / "asyncrl-foreign").mkdir()
    dead, alive = parent / "asyncrl-dead", SharedFolder(parent / "asyncrl-alive")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(dead)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        (dead / "weights-00000001.bin").write_bytes(b"x")
        new_shared_folder().remove()
        assert dead.exists(), "its process lives"
        holder.kill()
        holder.wait()
    run = new_shared_folder()
    assert sorted(p.name for p in parent.iterdir()) == sorted(["asyncrl-alive", "asyncrl-foreign", run.path.name])
    alive.close()
    run.remove()


def test_remove_ends_the_folder_although_others_hold_it() -> None:
    run = new_shared_folder()
    other = SharedFolder(run.path)
    run.remove()
    assert not run.path.exists()
    other.close()


def test_too_little_shared_memory_is_said_with_numbers(parent: Path) -> None:
    check_room(parent, 1, what="one version")
    with pytest.raises(ConfigError, match=r"3 versions needs 1,000,000,000 MB of shared memory, .* --shm-size"):
        check_room(parent, 10**15, what="3 versions")
