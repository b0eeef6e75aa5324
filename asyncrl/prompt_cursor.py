"""Endless, seeded order over a prompt source: the only place that decides which prompt comes next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.types import Prompt, Ticket


class PromptCursor:
    """Deals prompts as numbered tickets, epoch after epoch, each prompt once per epoch.

    Ticket n is a function of (prompts, seed, n) alone, so that a position in the run is one integer.
    """

    def __init__(self, prompts: Sequence[Prompt], *, group_size: int, seed: int, shuffle: bool) -> None:
        self._prompts = prompts
        self._group_size = group_size
        self._seed = seed
        self._shuffle = shuffle
        self._order: np.ndarray = np.arange(len(prompts))
        self._epoch = -1
        self.position = 0

    def take(self, num: int) -> list[Ticket]:
        """The next `num` tickets."""
        tickets = [self._ticket(self.position + i) for i in range(num)]
        self.position += num
        return tickets

    def _ticket(self, number: int) -> Ticket:
        epoch, row = divmod(number, len(self._prompts))
        if epoch != self._epoch:
            self._epoch = epoch
            if self._shuffle:
                self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self._prompts))
        # Rollout i of a group samples with seed + i: groups are spaced so that no two rollouts share a seed.
        seed = (self._seed * 1_000_003 + number) * self._group_size % 2**31
        return Ticket(number=number, prompt=self._prompts[self._order[row]], group_size=self._group_size, seed=seed)
