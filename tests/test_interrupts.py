"""Requests to stop are counted or raised, and never lost."""

from __future__ import annotations

import signal

import pytest

from asyncrl.interrupts import Interrupts


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_is_counted_while_deferred_and_the_second_is_raised(number: signal.Signals) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interrupts() as interrupts:
        with interrupts.deferred():
            signal.raise_signal(number)
            assert interrupts.count == 1
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        interrupts.ignore()
        signal.raise_signal(number)


def test_an_ignored_sigint_stays_ignored_and_sigterm_works() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.count == 0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_handlers_of_others_are_replaced_anew_and_given_back() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with Interrupts() as interrupts:
        signal.signal(signal.SIGTERM, lambda *_: None)  # as ray.init does
        interrupts.install()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
