"""Admission keeps the staleness bound without the help of eviction, as long as groups do not overtake each other."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.admission import Admission


def test_start_of_a_run_admits_one_batch_more_than_the_bound() -> None:
    admission = Admission(groups_per_step=4, max_staleness=2, num_steps=100)
    assert admission.num_startable(engine_version=0) == 12
    admission.start(12)
    assert admission.num_startable(engine_version=0) == 0


def test_an_engine_one_version_behind_may_start_one_batch_less() -> None:
    admission = Admission(groups_per_step=4, max_staleness=1, num_steps=100)
    admission.start(4)
    admission.train(4)
    assert admission.num_startable(engine_version=1) == 8
    assert admission.num_startable(engine_version=0) == 4


def test_lost_groups_give_their_places_back() -> None:
    admission = Admission(groups_per_step=4, max_staleness=0, num_steps=100)
    admission.start(4)
    admission.lose(1)
    assert admission.num_startable(engine_version=0) == 1


def test_the_last_steps_start_nothing_that_would_not_be_trained() -> None:
    admission = Admission(groups_per_step=4, max_staleness=3, num_steps=2)
    assert admission.num_startable(engine_version=0) == 8
    admission.start(8)
    admission.train(4)
    assert admission.num_startable(engine_version=1) == 0


@given(
    groups_per_step=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    actions=st.lists(st.sampled_from(["start", "finish", "train", "update", "lose"]), max_size=200),
)
def test_groups_in_order_are_never_too_stale(groups_per_step: int, max_staleness: int, actions: list[str]) -> None:
    admission = Admission(groups_per_step=groups_per_step, max_staleness=max_staleness, num_steps=10**6)
    engine_version = 0
    running: deque[int] = deque()  # engine version at the start of each group, oldest first
    stored: deque[int] = deque()
    for action in actions:
        if action == "start" and admission.num_startable(engine_version=engine_version):
            admission.start(1)
            running.append(engine_version)
        elif action == "finish" and running:
            stored.append(running.popleft())
        elif action == "lose" and running:
            running.pop()
            admission.lose(1)
        elif action == "update":
            engine_version = admission.policy_version
        elif action == "train" and len(stored) >= groups_per_step:
            for _ in range(groups_per_step):
                assert admission.policy_version - stored.popleft() <= max_staleness
            admission.train(groups_per_step)
        assert admission.outstanding == len(running) + len(stored) <= (max_staleness + 1) * groups_per_step
