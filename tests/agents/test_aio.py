"""Ending tasks: a lost cancellation is repeated, and a repeated one does not break clean-up."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from hybrid.agents import aio
from hybrid.agents.aio import end, whole


def test_a_swallowed_cancellation_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "_AGAIN_S", 0.001)

    async def scene() -> int:
        swallowed = 0

        async def deaf() -> None:
            nonlocal swallowed
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    if swallowed == 2:
                        raise
                    swallowed += 1

        task = asyncio.create_task(deaf())
        await asyncio.sleep(0)
        await end(task, None)
        assert task.cancelled()
        return swallowed

    assert asyncio.run(scene()) == 2


def test_clean_up_is_done_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "_AGAIN_S", 0.001)

    async def scene() -> list[str]:
        done: list[str] = []

        async def clean() -> None:
            for name in ("first", "second"):
                await asyncio.sleep(0.02)
                done.append(name)

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await whole(clean())

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        await end(task)
        assert task.cancelled()
        return done

    assert asyncio.run(scene()) == ["first", "second"]


def test_what_clean_up_returns_and_raises_is_handed_on() -> None:
    async def give(value: int) -> int:
        if value < 0:
            raise ValueError(value)
        return value

    async def scene() -> None:
        assert await whole(give(3)) == 3
        with contextlib.suppress(ValueError):
            await whole(give(-1))
            pytest.fail("it did not raise")

    asyncio.run(scene())
