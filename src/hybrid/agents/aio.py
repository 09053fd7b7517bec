"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 0.2


async def end(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended.

    One cancellation may be lost: a client library that was about to time out turns it into its
    time-out. So it is repeated.
    """
    open_tasks = {t for t in tasks if t is not None}
    while open_tasks:
        for task in open_tasks:
            task.cancel()
        _, open_tasks = await asyncio.wait(open_tasks, timeout=_AGAIN_S)
    await asyncio.gather(*(t for t in tasks if t is not None), return_exceptions=True)
