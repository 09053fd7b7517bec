"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_AGAIN_S = 0.2


async def end(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks and wait until they have ended.

    One cancellation may be lost: a client library that was about to time out turns it into its
    time-out. So it is repeated; a task's clean-up that awaits goes through `whole`.
    """
    open_tasks = {t for t in tasks if t is not None}
    while open_tasks:
        for task in open_tasks:
            task.cancel()
        _, open_tasks = await asyncio.wait(open_tasks, timeout=_AGAIN_S)
    await asyncio.gather(*(t for t in tasks if t is not None), return_exceptions=True)


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """Run clean-up to its end however often the caller is cancelled meanwhile.

    Raises:
        CancelledError: the caller was cancelled; the work has ended all the same.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as e:
            cancelled = e
    if cancelled is not None and not task.cancelled() and task.exception() is None:
        raise cancelled
    return task.result()
