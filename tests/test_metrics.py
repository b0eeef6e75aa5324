"""Metric sinks and the accounting of a step's time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from asyncrl.metrics import JsonlSink, Metrics, TensorBoardSink
from asyncrl.throughput import Throughput


class FailingSink:
    def __init__(self) -> None:
        self.calls = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        raise OSError("disk full")

    def close(self) -> None:
        raise OSError("disk full")


def test_jsonl_has_one_sorted_object_per_row_and_null_for_not_finite(tmp_path: Path) -> None:
    metrics = Metrics([JsonlSink(tmp_path / "metrics.jsonl")])
    metrics.write(1, {"b": 2.0, "a": float("nan")})
    metrics.write(2, {"a": 1.5})
    metrics.close()
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert list(first) == ["step", "time/unix", "a", "b"]
    assert (first["step"], first["a"], first["b"]) == (1, None, 2.0)
    assert second["a"] == 1.5


def test_tensorboard_reads_the_scalars_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics([TensorBoardSink(tmp_path / "tb")])
    for step in (1, 2, 3):
        metrics.write(step, {"learner/loss": step / 4})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("learner/loss")] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_a_failing_sink_is_switched_off_and_the_others_go_on(tmp_path: Path) -> None:
    failing = FailingSink()
    metrics = Metrics([failing, JsonlSink(tmp_path / "metrics.jsonl")])
    metrics.write(1, {"a": 1.0})
    metrics.write(2, {"a": 2.0})
    metrics.close()
    assert failing.calls == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_parts_of_a_step_sum_to_its_length_and_rates_are_per_step() -> None:
    times = iter([0.0, 1.0, 4.0, 5.0, 5.0, 6.0, 8.0, 8.0])
    throughput = Throughput(clock=lambda: next(times))
    throughput.mark("wait_data")
    throughput.mark("train")
    row = throughput.step([{"generated_tokens": 100, "busy_s": 4, "idle_s": 1}], trained_tokens=50)
    assert row["time/wait_data_s"] + row["time/train_s"] + row["time/other_s"] == row["time/step_s"] == 5.0
    assert row["idle/learners"] == pytest.approx(0.2)
    assert row["idle/generators"] == pytest.approx(0.2)
    assert row["throughput/generated_tokens_per_s"] == pytest.approx(20)
    assert row["throughput/trained_tokens_per_s"] == pytest.approx(10)
    throughput.mark("train")
    row = throughput.step([{"generated_tokens": 160, "busy_s": 7, "idle_s": 1}], trained_tokens=30)
    assert row["throughput/generated_tokens_per_s"] == pytest.approx(20)
    assert row["idle/generators"] == 0.0
