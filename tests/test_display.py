"""The picture of a run, drawn from a snapshot."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from asyncrl.config import RLConfig
from asyncrl.display import Display
from asyncrl.progress import Progress
from asyncrl.run_folder import RunFolder

CONFIG = RLConfig(
    **{
        "job": "rl",
        "name": "sorting",
        "steps": 4,
        "model": {"path": "m"},
        "data": {"train": "t"},
        "reward": {"function": "r:f"},
        "algorithm": {"name": "grpo"},
    }
)


def make_progress() -> Progress:
    progress = Progress(job="sorting", num_steps=4, phase="training", started_at=0.0, training_since=10.0)
    progress.record_eval(0, {"eval/reward/mean": 0.33}, value=0.33)
    for step in (1, 2):
        progress.record_step(
            step,
            {
                "learner/reward/mean": step / 4,
                "learner/staleness/mean": 1.25,
                "learner/staleness/max": 2.0,
                "buffer/fill": 0.5,
                "buffer/groups": 24.0,
                "tickets/evicted": 0.0,
                "tickets/failed": 3.0,
                "throughput/generated_tokens_per_s": 8123.4,
                "throughput/trained_tokens_per_s": 4000.0,
                "idle/generators": 0.25,
                "idle/learners": 0.1,
                "time/step_s": 2.0,
            },
            value=step / 4,
        )
    progress.record_eval(2, {"eval/reward/mean": 0.9}, value=0.9)
    progress.saved.append("runs/x/model")
    return progress


def make_display(*, terminal: bool) -> tuple[Display, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=terminal, color_system=None)
    return Display(CONFIG, RunFolder(Path("runs/sorting-1")), console=console), output


def test_panel_names_every_number_a_person_watches() -> None:
    display, output = make_display(terminal=True)
    Console(file=output, width=100).print(display.panel(make_progress()))
    text = output.getvalue()
    for piece in (
        "2 / 4",
        "reward",
        "0.500",
        "33.0% -> 90.0%",
        "mean 1.25   max 2   bound 2",
        "50% full",
        "failed 3",
        "generated 8,123   trained 4,000",
        "generators 25%   learners 10%",
        "runs/sorting-1",
    ):
        assert piece in text, piece


def test_eta_extends_the_pace_so_far() -> None:
    assert make_progress().eta_s(now=30.0) == 20.0
    assert Progress(job="x", num_steps=4).eta_s(now=1.0) is None


def test_without_a_terminal_lines_are_printed_and_the_end_has_a_curve() -> None:
    display, output = make_display(terminal=False)
    with display:
        display.update(Progress(job="sorting", num_steps=4, phase="starting"))
        display.update(make_progress())
        display.finish()
    text = output.getvalue()
    assert text.startswith("starting")
    assert "training: step 2/4" in text
    assert "held-out reward" in text and "┤" in text
    assert "saved  runs/x/model" in text


def test_the_end_shows_the_rates_of_the_whole_run_not_of_its_last_step() -> None:
    display, output = make_display(terminal=False)
    progress = make_progress()
    progress.record_step(3, {"idle/generators": 1.0, "time/step_s": 4.0}, value=0.75)
    with display:
        display.update(progress)
        display.finish()
    assert "generators 62%" in output.getvalue()  # (2 * 0.25 * 2 + 4 * 1.0) / 8 s
