from __future__ import annotations

import asyncio
import time

from elastic_trainer.cluster.lag import LEAST_S, TICK_S, Lag

BLOCKED_S = 0.6


def test_a_loop_that_is_held_up_has_an_excuse_once() -> None:
    async def scene() -> tuple[float, float]:
        lag = Lag()
        watch = asyncio.ensure_future(lag.watch())
        await asyncio.sleep(2 * TICK_S)
        lag.take()
        time.sleep(BLOCKED_S)
        at_once = lag.take()  # before the watch has had its turn
        again = lag.take()
        watch.cancel()
        return at_once, again

    at_once, again = asyncio.run(scene())
    assert at_once >= BLOCKED_S - TICK_S
    assert again == 0.0


def test_what_was_lost_before_somebody_asks_is_kept() -> None:
    async def scene() -> float:
        lag = Lag()
        watch = asyncio.ensure_future(lag.watch())
        await asyncio.sleep(2 * TICK_S)
        for _ in range(2):
            time.sleep(BLOCKED_S)
            await asyncio.sleep(2 * TICK_S)
        watch.cancel()
        return lag.take()

    assert asyncio.run(scene()) >= 2 * (BLOCKED_S - TICK_S)


def test_short_turns_of_others_are_no_excuse() -> None:
    """One look at a time: how late ticks come depends on who has the cores."""
    measured = 0
    for _ in range(20):
        lag, began = Lag(), time.monotonic()
        time.sleep(TICK_S + LEAST_S / 2)
        found = lag.take()
        if time.monotonic() - began < TICK_S + LEAST_S:  # else somebody had this core
            assert found == 0.0
            measured += 1
    assert measured > 0


def test_many_short_events_without_a_pause_hold_the_loop_up_too() -> None:
    lag, found = Lag(), 0.0
    for _ in range(20):
        time.sleep(LEAST_S / 4)
        found += lag.take()
    assert found >= 20 * LEAST_S / 4 - TICK_S - LEAST_S
