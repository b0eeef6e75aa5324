"""The ticket office: hands prompts to generators while the staleness bound allows, and counts what became of them.

    take()                group_done()               trained() / evicted()
    prompt cursor --> ticket --> [generator] --> stored in the buffer --> learner
                        ^                |
                        +--- lost (failed or evicted): its place is given again

Every number handed out is, at any time, in exactly one of: in flight, stored, trained, failed, evicted.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Sequence

from asyncrl.admission import Admission
from asyncrl.errors import GenerationError
from asyncrl.prompt_cursor import PromptCursor
from asyncrl.types import Ticket

TAKE_TIMEOUT_S = 1.0


class TicketOffice:
    """Called by all generators and the coordinator on one event loop.

    In lock step (sync mode) the tickets of a batch are dealt in a fixed way: generator i of n gets every n-th, all at
    once, when nothing of the batch is in flight. Otherwise tickets go to whoever asks.
    """

    def __init__(
        self, admission: Admission, cursor: PromptCursor, *, generators: Sequence[str], lock_step: bool
    ) -> None:
        self.admission = admission
        self._cursor = cursor
        self._generators = list(generators)
        self._lock_step = lock_step
        self._shares: dict[str, list[Ticket]] = {name: [] for name in generators}
        self._changed = asyncio.Condition()
        self._in_flight: set[int] = set()
        self._stored: list[int] = []  # numbers, sorted; may keep some that were evicted
        self._open = True
        self._held = False
        self._num_wakes = 0
        self.stored = 0
        self.trained = 0
        self.failed = 0
        self.evicted = 0
        self._failed_in_a_row = 0
        self._fatal: GenerationError | None = None

    async def take(self, generator: str, *, num: int, engine_version: int) -> list[Ticket] | None:
        """Up to `num` tickets (in lock step: the whole share); [] when it is time to ask again; None: go home."""
        try:
            async with asyncio.timeout(TAKE_TIMEOUT_S), self._changed:
                num_wakes = self._num_wakes
                while self._open:
                    tickets = self._deal(generator, num, engine_version)
                    if tickets or num_wakes != self._num_wakes:
                        return tickets
                    await self._changed.wait()
        except TimeoutError:
            return []
        return None

    async def group_done(self, *, number: int, failed: str | None) -> None:
        """A ticket's group is acknowledged by the buffer, or could not be made (`failed` says why)."""
        async with self._changed:
            self._in_flight.remove(number)
            if failed is None:
                self.stored += 1
                insort(self._stored, number)
                self._failed_in_a_row = 0
            else:
                self._count_failure(failed)
            self._changed.notify_all()

    async def wait_stored(self, num_groups: int, *, in_order: bool = False) -> bool:
        """Wait until that many groups lie in the buffer; False: the office closed meanwhile.

        Args:
            in_order: also wait for every group with a lower number that is still being generated.

        Raises:
            GenerationError: every group fails, so that waiting would never end.
        """

        def ready() -> bool:
            if self.stored < num_groups:
                return False
            return not in_order or not self._in_flight or self._stored[num_groups - 1] < min(self._in_flight)

        async with self._changed:
            await self._changed.wait_for(lambda: ready() or self._fatal or not self._open)
            if self._fatal:
                raise self._fatal
            return self._open

    async def count_evicted(self, num_groups: int) -> None:
        """Groups left the buffer because they aged past the bound."""
        async with self._changed:
            self.stored -= num_groups
            self.evicted += num_groups
            self.admission.lose(num_groups)
            self._changed.notify_all()

    async def count_trained(self, numbers: Sequence[int], *, num_groups: int) -> None:
        """The groups with these numbers were used by the optimizer step that made the next version.

        Args:
            num_groups: how many of them left the buffer with it: all, unless groups are used several times.
        """
        async with self._changed:
            gone = set(numbers)
            self._stored = [number for number in self._stored if number not in gone]
            self.stored -= num_groups
            self.trained += num_groups
            self.admission.train(num_groups)
            self._changed.notify_all()

    async def wake(self) -> None:
        """An engine reached a newer version: whoever waits for tickets gets none and asks again, with that version."""
        async with self._changed:
            self._num_wakes += 1
            self._changed.notify_all()

    async def hold(self) -> None:
        """Lock step: no tickets until resume(), so that nothing is sampled beside an evaluation."""
        async with self._changed:
            self._held = True

    async def resume(self) -> None:
        """End of hold()."""
        async with self._changed:
            self._held = False
            self._num_wakes += 1
            self._changed.notify_all()

    async def close(self) -> None:
        """No more tickets: every take() returns None, every waiter wakes."""
        async with self._changed:
            self._open = False
            self._changed.notify_all()

    @property
    def in_flight(self) -> int:
        """Groups being generated."""
        return len(self._in_flight)

    def ledger(self) -> dict[str, int]:
        """What became of every ticket; `started` is the sum of the others."""
        counts = {
            "in_flight": self.in_flight,
            "stored": self.stored,
            "trained": self.trained,
            "failed": self.failed,
            "evicted": self.evicted,
        }
        return {"started": self._cursor.position - sum(map(len, self._shares.values())), **counts}

    def _deal(self, generator: str, num: int, engine_version: int) -> list[Ticket]:
        if self._lock_step:
            return self._deal_share(generator, engine_version)
        tickets = self._cursor.take(min(num, self.admission.num_startable(engine_version=engine_version)))
        self.admission.start(len(tickets))
        self._in_flight.update(t.number for t in tickets)
        return tickets

    def _deal_share(self, generator: str, engine_version: int) -> list[Ticket]:
        if self._held or engine_version != self.admission.policy_version:
            return []
        if not self._in_flight and not any(self._shares.values()):
            batch = self._cursor.take(self.admission.num_startable(engine_version=engine_version))
            self.admission.start(len(batch))
            for i, name in enumerate(self._generators):
                self._shares[name] = batch[i :: len(self._generators)]
            self._changed.notify_all()
        share, self._shares[generator] = self._shares[generator], []
        self._in_flight.update(t.number for t in share)
        return share

    def _count_failure(self, cause: str) -> None:
        self.failed += 1
        self.admission.lose(1)
        self._failed_in_a_row += 1
        limit = 2 * self.admission.groups_per_step
        if self._failed_in_a_row >= limit:
            self._fatal = GenerationError(
                f"the last {limit} groups all failed, so there is nothing to train on. The latest cause: {cause}"
            )
