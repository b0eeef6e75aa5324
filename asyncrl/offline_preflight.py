"""Checks an offline run before a process starts: the model, and every stored group, against the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.buffer.schema import read_batch
from asyncrl.buffer.stored import StoredGroup
from asyncrl.config import OfflineConfig, RLConfig
from asyncrl.errors import ConfigError, ReplayBufferError
from asyncrl.model_folder import ModelInfo, read_model_folder
from asyncrl.preflight import Preflight, absolute_paths, check_runs_dir

BYTES_FACTOR = 1.05
"""Room for what segment files hold beside their groups."""


@dataclass(frozen=True, slots=True)
class Versions:
    """A range of behaviour policy versions, both ends included; None: open."""

    first: int | None
    last: int | None

    @classmethod
    def parse(cls, text: str) -> Versions:
        """Raises ConfigError unless `text` is FIRST:LAST, FIRST: or :LAST."""
        first, colon, last = text.partition(":")
        try:
            if not colon:
                raise ValueError
            return cls(int(first) if first else None, int(last) if last else None)
        except ValueError:
            raise ConfigError(
                f"(command line): --versions is FIRST:LAST, FIRST: or :LAST (policy versions); got {text!r}"
            ) from None

    def hold(self, group: StoredGroup) -> bool:
        """Whether every token of the group was sampled by one of them."""
        low, high = group.ref.min_version, group.ref.max_version
        low = high if low < 0 else low  # a rollout without a sampled token has no version
        return (self.first is None or low >= self.first) and (self.last is None or high <= self.last)


def offline_preflight(
    config: RLConfig, groups: Sequence[StoredGroup], *, source: Path, temperature: float | None
) -> tuple[Preflight, list[str]]:
    """Read every group and compare all with the configuration.

    Args:
        groups: in the order of their numbers.
        source: where they lie, for messages.
        temperature: that the stored run sampled at, where it is known.

    Returns:
        The run that may start, and what is wrong with each group that it leaves out.

    Raises:
        ConfigError, ReplayBufferError: the only problem, or a ConfigError that lists them all.
    """
    check_runs_dir(config)
    model = read_model_folder(config.model.path)
    intact, damaged, largest, longest = _read_all(groups)
    if not intact:
        raise ReplayBufferError(f"{source} has no group to train on" + (f": {damaged[0]}" if damaged else ""))
    problems = [
        *_model_problems(model, largest=largest, longest=longest),
        *_amount_problems(config, intact, source),
    ]
    if temperature is not None and temperature != config.generators.temperature:
        problems.append(
            f"[generators] temperature = {config.generators.temperature:g}: the stored run sampled at {temperature:g}, "
            f"and its logprobs are of that; use --generators.temperature={temperature:g}"
        )
    if problems:
        raise ConfigError(problems)
    offline = OfflineConfig(
        **absolute_paths(config).model_dump(),
        oldest_version=min(group.ref.min_version for group in intact),
        newest_version=max(group.ref.max_version for group in intact),
    )
    note = f"made by: asyncrl buffer replay {source}\n{len(intact)} stored groups, no generators"
    return Preflight(offline, model, [], [], longest, stored=intact, note=note), damaged


def _read_all(groups: Sequence[StoredGroup]) -> tuple[list[StoredGroup], list[str], int, int]:
    """The intact groups, what is wrong with the others, and of the intact the largest token id and the longest row."""
    intact: list[StoredGroup] = []
    damaged: list[str] = []
    largest = longest = 0
    for group in groups:
        try:
            tokens = read_batch(group.read().message).column("tokens")
        except ReplayBufferError as error:
            damaged.append(str(error))
            continue
        intact.append(group)
        largest = max(largest, int(tokens.flatten().to_numpy().max(initial=0)))
        longest = max(longest, group.ref.max_tokens)
    return intact, damaged, largest, longest


def _model_problems(model: ModelInfo, *, largest: int, longest: int) -> list[str]:
    problems = []
    if model.vocab_size is not None and largest >= model.vocab_size:
        problems.append(
            f"[model] path: the stored groups have token {largest}, but the model embeds {model.vocab_size} tokens; "
            f"they were sampled from another model"
        )
    if model.max_position_embeddings is not None and longest > model.max_position_embeddings:
        problems.append(
            f"[model] path: the longest stored row has {longest} tokens, more than the model's "
            f"{model.max_position_embeddings} positions"
        )
    return problems


def _amount_problems(config: RLConfig, groups: Sequence[StoredGroup], source: Path) -> list[str]:
    """Whether the groups suffice for the steps, and the buffer for the groups."""
    a, b = config.algorithm, config.buffer
    problems = []
    num_uses = len(groups) * b.max_uses
    if len(groups) < a.groups_per_step:
        problems.append(
            f"[algorithm] groups_per_step = {a.groups_per_step}: {source} has {len(groups)} groups that fit, less "
            f"than a batch"
        )
    elif num_uses < config.steps * a.groups_per_step:
        uses = -(-config.steps * a.groups_per_step // len(groups))
        problems.append(
            f"steps = {config.steps}: {len(groups)} stored groups, each used {b.max_uses} times at most, make "
            f"{num_uses // a.groups_per_step} steps of {a.groups_per_step}; lower steps, or use them more often: "
            f"--buffer.sampling=uniform --buffer.max_uses={uses + (uses > 1)}"
        )
    needed = BYTES_FACTOR * sum(group.ref.nbytes for group in groups)
    room = b.num_shards * b.capacity_gb * 1e9
    if needed > room:
        more = ', and set durability = "disk" or memory_gb if memory is short' if b.durability == "memory" else ""
        problems.append(
            f"[buffer] capacity_gb = {b.capacity_gb:g}: the stored groups take {needed / 1e9:.2f} GB, "
            f"{b.num_shards} shards hold {room / 1e9:.2f}; raise it{more}"
        )
    return problems
