"""The ticket office: who gets which ticket, when, and what the ledger says."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.admission import Admission
from asyncrl.errors import GenerationError
from asyncrl.prompt_cursor import PromptCursor
from asyncrl.tickets import TicketOffice
from asyncrl.types import Prompt

PROMPTS = [Prompt(prompt_id=f"p:{i}", tokens=[i], text=str(i), row={"prompt": str(i)}) for i in range(10)]


def make_cursor(*, seed: int = 0, shuffle: bool = True) -> PromptCursor:
    return PromptCursor(PROMPTS, group_size=4, seed=seed, shuffle=shuffle)


def make_office(*, lock_step: bool, max_staleness: int = 0, num_steps: int = 100) -> TicketOffice:
    admission = Admission(groups_per_step=4, max_staleness=max_staleness, num_steps=num_steps)
    return TicketOffice(admission, make_cursor(), generators=["a", "b"], lock_step=lock_step)


def test_cursor_deals_each_prompt_once_per_epoch_in_a_seeded_order() -> None:
    tickets = make_cursor(seed=3).take(20)
    ids = [t.prompt.prompt_id for t in tickets]
    assert sorted(ids[:10]) == sorted(ids[10:]) == sorted(p.prompt_id for p in PROMPTS)
    assert ids[:10] != ids[10:]
    assert [t.number for t in tickets] == list(range(20))
    again = make_cursor(seed=3)
    assert [t.prompt.prompt_id for _ in range(20) for t in again.take(1)] == ids
    assert [t.prompt.prompt_id for t in make_cursor(seed=4).take(10)] != ids[:10]


def test_cursor_seeds_of_different_groups_do_not_overlap() -> None:
    seeds = [t.seed + i for t in make_cursor().take(50) for i in range(t.group_size)]
    assert len(set(seeds)) == 200


def test_free_tickets_go_to_whoever_asks_until_the_bound() -> None:
    async def scenario() -> None:
        office = make_office(lock_step=False, max_staleness=1)
        first = await office.take("a", num=6, engine_version=0)
        second = await office.take("b", num=6, engine_version=0)
        assert first is not None and second is not None
        assert [t.number for t in first + second] == list(range(8))
        waiting = asyncio.create_task(office.take("a", num=6, engine_version=1))
        for ticket in first[:4]:
            await office.group_done(number=ticket.number, failed=None)
        assert not waiting.done()
        await office.count_trained(range(4), num_groups=4)
        third = await waiting
        assert third is not None and [t.number for t in third] == [8, 9, 10, 11]
        assert office.ledger() == {
            "started": 12,
            "in_flight": 8,
            "stored": 0,
            "trained": 4,
            "failed": 0,
            "evicted": 0,
        }

    asyncio.run(scenario())


def test_lock_step_deals_fixed_shares_once_per_version() -> None:
    async def scenario() -> None:
        office = make_office(lock_step=True)
        b, a = await asyncio.gather(
            office.take("b", num=99, engine_version=0), office.take("a", num=99, engine_version=0)
        )
        assert a is not None and b is not None
        assert [t.number for t in a] == [0, 2]
        assert [t.number for t in b] == [1, 3]
        for ticket in a + b:
            await office.group_done(number=ticket.number, failed=None)
        await office.count_trained(range(4), num_groups=4)
        stale = asyncio.create_task(office.take("a", num=99, engine_version=0))
        fresh = await office.take("b", num=99, engine_version=1)
        assert fresh is not None and [t.number for t in fresh] == [5, 7]
        assert not stale.done()
        await office.close()
        assert await stale is None

    asyncio.run(scenario())


def test_lock_step_replaces_failed_groups_when_the_rest_is_in() -> None:
    async def scenario() -> None:
        office = make_office(lock_step=True)
        a = await office.take("a", num=99, engine_version=0)
        b = await office.take("b", num=99, engine_version=0)
        assert a is not None and b is not None
        await office.group_done(number=0, failed="reward raised")
        for number in (1, 2, 3):
            await office.group_done(number=number, failed=None)
        replacement = await office.take("a", num=99, engine_version=0)
        assert replacement is not None and [t.number for t in replacement] == [4]
        assert office.ledger()["failed"] == 1

    asyncio.run(scenario())


def test_a_run_whose_groups_all_fail_stops_with_the_cause() -> None:
    async def scenario() -> None:
        office = make_office(lock_step=False, max_staleness=1)
        waiting = asyncio.create_task(office.wait_stored(4))
        for _ in range(8):
            tickets = await office.take("a", num=1, engine_version=0)
            assert tickets
            await office.group_done(number=tickets[0].number, failed="division by zero in my_reward.py")
        with pytest.raises(GenerationError, match=r"last 8 groups all failed.*division by zero in my_reward\.py"):
            await waiting

    asyncio.run(scenario())


def test_evicted_groups_are_counted_and_replaced() -> None:
    async def scenario() -> None:
        office = make_office(lock_step=False)
        tickets = await office.take("a", num=4, engine_version=0)
        assert tickets is not None and len(tickets) == 4
        for ticket in tickets:
            await office.group_done(number=ticket.number, failed=None)
        await office.count_evicted(1)
        again = await office.take("a", num=4, engine_version=0)
        assert again is not None and [t.number for t in again] == [4]
        assert office.ledger() == {"started": 5, "in_flight": 1, "stored": 3, "trained": 0, "failed": 0, "evicted": 1}

    asyncio.run(scenario())


def test_no_ticket_within_a_second_is_an_empty_answer() -> None:
    async def scenario() -> None:
        office = make_office(lock_step=False)
        assert len(await office.take("a", num=9, engine_version=0) or []) == 4
        assert await office.take("b", num=1, engine_version=0) == []

    asyncio.run(scenario())


def test_who_waits_for_tickets_asks_again_when_its_engine_has_a_newer_version() -> None:
    async def scenario(lock_step: bool) -> None:
        office = make_office(lock_step=lock_step, max_staleness=0 if lock_step else 1)
        first = await office.take("a", num=99, engine_version=0) or []
        second = await office.take("b", num=99, engine_version=0) or []
        waiting = asyncio.create_task(office.take("a", num=99, engine_version=0))
        await asyncio.sleep(0.01)
        for ticket in first + second:
            await office.group_done(number=ticket.number, failed=None)
        await office.count_trained(range(4), num_groups=4)
        start = asyncio.get_running_loop().time()
        await office.wake()
        assert await waiting == []
        assert asyncio.get_running_loop().time() - start < 0.5
        assert await office.take("a", num=99, engine_version=1)

    for lock_step in (True, False):
        asyncio.run(scenario(lock_step))


def test_lock_step_gives_no_tickets_while_it_is_held() -> None:
    async def scenario() -> None:
        office = make_office(lock_step=True)
        await office.hold()
        waiting = asyncio.create_task(office.take("a", num=99, engine_version=0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await office.resume()
        assert await waiting

    asyncio.run(scenario())


def test_in_order_waits_for_slow_groups_with_lower_numbers() -> None:
    async def scenario() -> None:
        office = make_office(lock_step=False, max_staleness=1)
        await office.take("a", num=6, engine_version=0)
        for number in (1, 2, 3, 5):
            await office.group_done(number=number, failed=None)
        assert await office.wait_stored(4)
        waiting = asyncio.create_task(office.wait_stored(4, in_order=True))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await office.group_done(number=0, failed=None)
        assert await waiting

    asyncio.run(scenario())
