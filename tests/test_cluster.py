"""Ray's errors as ours: the cause, and where to look."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import RayActorError, RayTaskError

from asyncrl import cluster
from asyncrl.cluster import check_fits, explain, ray_cluster
from asyncrl.config import RLConfig
from asyncrl.errors import AsyncRLError, ConfigError, ReplayBufferError
from asyncrl.placement import plan_placement
from asyncrl.run_folder import RunFolder
from tests.test_placement import RL

CREATION = """The actor died because of an error raised in its creation task, ray::LearnerActor.__init__() (pid=1)
  File "process.py", line 38, in log_to_file
    raise ConfigError(
asyncrl.errors.ConfigError: host-7 does not see /runs/x/logs"""
DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: GeneratorActor
\tactor_id: 12
\tpid: 4711"""


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    return folder


def remote(cause: Exception) -> RayTaskError:
    return RayTaskError("train", "Traceback (most recent call last): ...", cause)


def test_our_errors_keep_their_kind_and_point_to_the_logs(run_folder: RunFolder) -> None:
    found = explain(remote(ReplayBufferError("a group is damaged")), run_folder)
    assert type(found) is ReplayBufferError
    assert str(found) == f"a group is damaged (logs: {run_folder.logs})"


def test_a_dead_process_is_named(run_folder: RunFolder) -> None:
    text = str(explain(RayActorError("12", DIED, False, False), run_folder))
    assert text.startswith("a process of the run died: GeneratorActor (process 4711). The actor died unexpectedly")


def test_an_error_at_the_start_of_an_actor_is_its_own_message(run_folder: RunFolder) -> None:
    found = explain(RayActorError("12", CREATION, True, False), run_folder)
    assert str(found) == f"ConfigError: host-7 does not see /runs/x/logs (logs: {run_folder.logs})"


def test_a_bug_leaves_its_traceback_in_a_file(run_folder: RunFolder) -> None:
    found = explain(remote(ZeroDivisionError("division by zero")), run_folder)
    assert type(found) is AsyncRLError
    assert str(found) == f"ZeroDivisionError: division by zero (traceback: {run_folder.log('driver')})"
    assert run_folder.log("driver").read_text()


def test_a_full_disk_does_not_hide_the_cause(tmp_path: Path) -> None:
    found = explain(remote(ZeroDivisionError("division by zero")), RunFolder(tmp_path / "gone"))
    assert "division by zero" in str(found)


def test_too_few_gpus_come_with_ways_out() -> None:
    config = RLConfig(**RL | {"generators": {"num": 1}, "learners": {"num_ranks": 2}})
    with pytest.raises(ConfigError, match=r"3 GPUs needed, 1 in the cluster(.|\n)*\[learners\] device = \"cpu\""):
        check_fits(plan_placement(config, use_gpus=True), {"CPU": 8, "GPU": 1})


@pytest.mark.parametrize(
    ("environment", "started", "address", "message"),
    [
        (None, None, "auto", "--address auto: no Ray cluster runs on this machine"),
        (None, "127.0.0.1:1", "auto", "--address 127.0.0.1:1: no Ray cluster answers there"),  # it died
        ("127.0.0.1:2", None, None, "--address 127.0.0.1:2: no Ray cluster answers there"),
    ],
)
def test_only_what_ray_start_or_the_environment_names_is_joined(
    monkeypatch: pytest.MonkeyPatch, environment: str | None, started: str | None, address: str | None, message: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    monkeypatch.setattr(cluster, "read_ray_address", lambda: started)
    with pytest.raises(ConfigError, match=message), ray_cluster(RLConfig(**RL), address):
        pass
