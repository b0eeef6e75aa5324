"""What a person sees of a run: a live panel in a terminal, plain lines elsewhere, a curve and results at the end."""

from __future__ import annotations

import math
import time

import plotext
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.config import JobConfig, OfflineConfig, RLConfig
from asyncrl.progress import Progress
from asyncrl.run_folder import RunFolder

LINE_EVERY_S = 5.0


class Display:
    """Draws snapshots of Progress; use as a context manager. Knows nothing of Ray."""

    def __init__(self, config: JobConfig, run_folder: RunFolder, *, console: Console | None = None) -> None:
        self._config = config
        self._run_folder = run_folder
        self._console = console or Console()
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._last_line = (0.0, "", -1)
        self._progress: Progress | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def update(self, progress: Progress) -> None:
        """Draw the newest snapshot."""
        self._progress = progress
        if self._console.is_terminal:
            self._live.update(self.panel(progress))
        else:
            self._print_line(progress)

    def say(self, message: str) -> None:
        """One lasting line."""
        self._console.print(message, highlight=False, soft_wrap=True)

    def panel(self, progress: Progress) -> Panel:
        """The live picture of a run."""
        bar = ProgressBar(total=progress.num_steps, completed=progress.step, width=None)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        for name, value in self.rows(progress):
            table.add_row(name, value)
        title = f"{self._config.name}  {self._mode()}"
        footer = Text(str(self._run_folder.path), style="dim", overflow="fold")
        return Panel(Group(Text(progress.phase, style="bold"), bar, table, footer), title=title, title_align="left")

    def rows(self, progress: Progress) -> list[tuple[str, str]]:
        """Name and text of every line of the panel."""
        now = time.time()
        latest = progress.latest
        eta = progress.eta_s(now)
        rows = [
            ("step", f"{progress.step} / {progress.num_steps}"),
            ("time", f"{_clock(now - progress.started_at)}   left {_clock(eta)}"),
        ]
        if isinstance(self._config, OfflineConfig):
            return rows + _offline_rows(latest)
        if isinstance(self._config, RLConfig):
            return rows + _rl_rows(progress, self._config.staleness_bound)
        return rows + _sft_rows(progress)

    def finish(self) -> None:
        """The lasting end of a run, however it ended: its curve and what was saved."""
        self._live.stop()
        progress = self._progress
        if progress is None:
            return
        if len(progress.curve) > 1:
            self._console.print(Text.from_ansi(self.curve(progress)))
            progress.latest.update(progress.averages())
            for name, value in self.rows(progress):
                self.say(f"{name:>18}  {value}")
        if progress.phase.startswith("done: "):
            self.say(f"{'end':>18}  {progress.phase}")
        for path in progress.saved or ["nothing"]:
            self.say(f"{'saved':>18}  {path}")

    def curve(self, progress: Progress) -> str:
        """Training and held-out values over steps, as text."""
        is_rl = isinstance(self._config, RLConfig)
        series = [("reward" if is_rl else "loss", progress.curve, "dot")]
        if progress.evals:
            series.append(("held-out reward" if is_rl else "held-out token accuracy", progress.evals, "braille"))
        plotext.clear_figure()
        plotext.theme("clear")
        plotext.plotsize(min(78, self._console.width), 16)
        for label, points, marker in series:
            plotext.plot(*zip(*points, strict=True), label=label, marker=marker)
        if progress.evals:
            plotext.scatter(*zip(*progress.evals, strict=True), marker="O")
        values = [value for _, points, _ in series for _, value in points if math.isfinite(value)]
        low, high = min(values, default=0.0), max(values, default=1.0)
        plotext.ylim(low, high if high > low else low + 1.0)
        plotext.title(self._config.name)
        plotext.xlabel("step")
        return plotext.build()

    def line(self, progress: Progress) -> str:
        """The most important numbers in one line."""
        latest = progress.latest
        parts = [f"step {progress.step}/{progress.num_steps}", f"left {_clock(progress.eta_s(time.time()))}"]
        if isinstance(self._config, OfflineConfig):
            parts += [
                f"loss {_number(latest, 'learner/loss', 4)}",
                f"staleness {_number(latest, 'learner/staleness/mean', 1)}",
                f"effective samples {_percent(latest, 'learner/weight/ess')}",
                f"tokens/s {_number(latest, 'throughput/trained_tokens_per_s', 0)} trained",
            ]
        elif isinstance(self._config, RLConfig):
            parts += [
                f"reward {_number(latest, 'learner/reward/mean')}",
                f"held-out {_held_out(progress)}",
                f"staleness {_number(latest, 'learner/staleness/mean', 1)}",
                f"buffer {_percent(latest, 'buffer/fill')}",
                f"tokens/s {_number(latest, 'throughput/generated_tokens_per_s', 0)} generated"
                f" {_number(latest, 'throughput/trained_tokens_per_s', 0)} trained",
                f"idle {_percent(latest, 'idle/generators')} generators {_percent(latest, 'idle/learners')} learners",
            ]
        else:
            parts += [f"loss {_number(latest, 'learner/loss')}", f"held-out {_held_out(progress)}"]
        return "  ".join(parts)

    def _mode(self) -> str:
        if isinstance(self._config, OfflineConfig):
            return "offline"
        return self._config.mode if isinstance(self._config, RLConfig) else "sft"

    def _print_line(self, progress: Progress) -> None:
        """Not a terminal: a line when the phase changes, and every few seconds when the step moved."""
        then, phase, step = self._last_line
        now = time.monotonic()
        if progress.phase != phase or (progress.step != step and now - then >= LINE_EVERY_S):
            self._last_line = (now, progress.phase, progress.step)
            self.say(f"{progress.phase}: {self.line(progress)}" if progress.step else progress.phase)


def _rl_rows(progress: Progress, bound: int) -> list[tuple[str, str]]:
    latest = progress.latest
    supply = f"{_percent(latest, 'buffer/fill')} full   evicted {_number(latest, 'tickets/evicted', 0)}"
    generated = _number(latest, "throughput/generated_tokens_per_s", 0)
    trained = _number(latest, "throughput/trained_tokens_per_s", 0)
    return [
        ("reward", f"{_number(latest, 'learner/reward/mean')}   {_spark([v for _, v in progress.curve])}"),
        ("held-out reward", _held_out(progress)),
        ("staleness", f"{_staleness(latest)}   bound {bound}"),
        ("buffer", f"{supply}   failed {_number(latest, 'tickets/failed', 0)}{_unscored(latest)}"),
        ("tokens/s", f"generated {generated}   trained {trained}"),
        ("idle", f"generators {_percent(latest, 'idle/generators')}   learners {_percent(latest, 'idle/learners')}"),
    ]


def _offline_rows(latest: dict[str, float]) -> list[tuple[str, str]]:
    correction = f"weights cut {_percent(latest, 'learner/weight/limited_fraction')}"
    return [
        ("reward", f"{_number(latest, 'learner/reward/mean')}   (of the stored rollouts)"),
        ("staleness", f"{_staleness(latest)}   measured, not bounded"),
        (
            "off-policy",
            f"effective samples {_percent(latest, 'learner/weight/ess')}   {correction}"
            f"   kl {_number(latest, 'learner/kl/k3')}",
        ),
        ("buffer", f"{_percent(latest, 'buffer/fill')} left{_unscored(latest)}"),
        ("tokens/s", f"trained {_number(latest, 'throughput/trained_tokens_per_s', 0)}"),
    ]


def _sft_rows(progress: Progress) -> list[tuple[str, str]]:
    latest = progress.latest
    return [
        ("loss", f"{_number(latest, 'learner/loss')}   {_spark([v for _, v in progress.curve])}"),
        ("held-out accuracy", _held_out(progress)),
        ("tokens/s", _number(latest, "throughput/trained_tokens_per_s", 0)),
    ]


def _staleness(latest: dict[str, float]) -> str:
    return f"mean {_number(latest, 'learner/staleness/mean', 2)}   max {_number(latest, 'learner/staleness/max', 0)}"


def _number(latest: dict[str, float], name: str, digits: int = 3) -> str:
    value = latest.get(name)
    return "-" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def _percent(latest: dict[str, float], name: str) -> str:
    return f"{latest[name]:.0%}" if name in latest else "-"


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _unscored(latest: dict[str, float]) -> str:
    """Rollouts of the last batch whose reward failed, if any."""
    num = latest.get("learner/rollouts/failed", 0)
    return f"   rollouts without reward {num:.0f}" if num else ""


def _held_out(progress: Progress) -> str:
    if not progress.evals:
        return "-"
    (_, first), (_, last) = progress.evals[0], progress.evals[-1]
    return f"{first:.1%}" + (f" -> {last:.1%}" if len(progress.evals) > 1 else "")


def _spark(values: list[float], width: int = 30) -> str:
    """The last values as a row of bars."""
    bars = "▁▂▃▄▅▆▇█"
    shown = [v for v in values[-width:] if math.isfinite(v)]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    return "".join(bars[int((v - low) / (high - low) * 7) if high > low else 0] for v in shown)
