"""`asyncrl buffer tail`: the newest groups, as a person reads them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from asyncrl.buffer.schema import decode_group
from asyncrl.buffer.stored import StoredGroup, in_order
from asyncrl.buffer_tool.source import HOW_TO_KEEP, Source
from asyncrl.data import load_tokenizer
from asyncrl.errors import DataError, ReplayBufferError
from asyncrl.types import Rollout

POLL_S = 1.0
NUM_SHOWN_IDS = 32

Decode = Callable[[np.ndarray], str]


def tail(source: Source, *, num_groups: int, num_rollouts: int, follow: bool) -> None:
    """Print the groups with the highest numbers, oldest first; with `follow`, then the new ones as they come.

    Raises ReplayBufferError when the files of the shards are gone.
    """
    decode = _decoder(source)
    shards = source.read()
    groups = in_order(shards)
    for group in groups[-num_groups:] if num_groups > 0 else []:
        print(_show(group, num_rollouts, decode))
    if not groups and not follow:
        print(f"{source.path}: no groups in the files of its {len(shards)} shards; {HOW_TO_KEEP}")
    if follow:
        _follow(source, {group.ref.group_id for group in groups}, num_rollouts, decode)


def _follow(source: Source, seen: set[bytes], num_rollouts: int, decode: Decode) -> None:
    while True:
        time.sleep(POLL_S)
        try:
            groups = in_order(source.read())
        except ReplayBufferError as error:
            print(f"the end: {error}")
            return
        for group in groups:
            if group.ref.group_id not in seen:
                print(_show(group, num_rollouts, decode), flush=True)
        seen |= {group.ref.group_id for group in groups}


def _show(stored: StoredGroup, num_rollouts: int, decode: Decode) -> str:
    ref = stored.ref
    try:
        group = decode_group(stored.read().message)
    except ReplayBufferError as error:
        return f"group {ref.number}: {error}\n"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(group.created_at))
    lines = [
        f"group {ref.number}  {group.prompt_id}  versions {ref.min_version}..{ref.max_version}  "
        f"reward {ref.reward_mean:.3f} +- {ref.reward_std:.3f}  {ref.num_rows} rollouts  {group.generator}  {when}  "
        f"{stored.path.parent.name}/{stored.path.name}",
        f"    prompt    {decode(group.prompt_tokens)}",
    ]
    lines += [_show_rollout(i, rollout, decode) for i, rollout in enumerate(group.rollouts[:num_rollouts])]
    if ref.num_rows > num_rollouts:
        lines.append(f"    ... {ref.num_rows - num_rollouts} more rollouts (--rollouts)")
    return "\n".join(lines) + "\n"


def _show_rollout(index: int, rollout: Rollout, decode: Decode) -> str:
    versions = rollout.policy_versions[rollout.loss_mask]
    sampled = f"v{versions.min()}..{versions.max()}" if versions.size else "-"
    return (
        f"    {index:>3}  reward {rollout.reward:>6.3f}  {rollout.finish_reason:<6}  {rollout.response.size:>5} tokens"
        f"  {sampled:<7}  {rollout.error or decode(rollout.response)}"
    )


def _decoder(source: Source) -> Decode:
    """Token ids to text that is safe to print, by the tokenizer of the run's model; to numbers where there is none."""
    if source.config is not None:
        try:
            tokenizer = load_tokenizer(source.config.model.path)
            return lambda ids: repr(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
        except DataError as error:
            print(f"(token ids, not text: {error})")
    return _show_ids


def _show_ids(ids: np.ndarray) -> str:
    shown = " ".join(map(str, ids[:NUM_SHOWN_IDS].tolist()))
    return f"{shown} ... ({ids.size} ids)" if ids.size > NUM_SHOWN_IDS else shown
