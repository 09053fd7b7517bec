"""One connection to the store, kept for one caller: the mailbox's short way past a client's pool.

A call through `redis.asyncio.Redis` fetches a connection, checks it, wraps the call in retries,
events and time-outs. For the few calls a host makes again and again that was half of its processor
time; here it is the driver's connection alone, with one timer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError, TimeoutError

from hybrid.agents.store_cluster import ClusterClient

_CALL_S = 10.0


class Line:
    """A connection from a client's pool, made when it is first needed and again when it broke.

    One call at a time.

    Args:
        client: from `hybrid.agents.store.connect`.
    """

    def __init__(self, client: Redis) -> None:
        self._client: Any = client
        self._connection: AbstractConnection | None = None

    async def call(self, command: tuple[Any, ...]) -> Any:
        """Send a command; its reply.

        Raises:
            ResponseError: the server refused it.
            RedisError, OSError: the connection broke, or nothing came for 10 s; whether the command
                was carried out is unknown.
        """
        if isinstance(self._client, ClusterClient):
            return await self._client.execute_command(*command)  # it knows which node
        if self._connection is not None and _hung_up(self._connection):
            await self.close()  # known before anything is sent: nothing is in doubt
        connection = self._connection
        if connection is None:
            connection = await self._client.connection_pool.get_connection()
            assert isinstance(connection, AbstractConnection)
            connection.socket_timeout = None  # the timer below is cheaper
            self._connection = connection
        late: list[asyncio.Task[None]] = []

        def hang_up() -> None:
            late.append(asyncio.ensure_future(connection.disconnect(nowait=True)))

        timer = asyncio.get_running_loop().call_later(_CALL_S, hang_up)
        try:
            await connection.send_packed_command(
                [hiredis.pack_command(command)], check_health=False
            )
            return await connection.read_response()
        except ResponseError:
            raise
        except (RedisError, OSError) as e:
            await self.close()
            if late:
                raise TimeoutError(f"no answer within {_CALL_S:g} s") from None
            raise e
        except BaseException:
            await self.close()  # an answer that is still to come must not be taken for another's
            raise
        finally:
            timer.cancel()
            await asyncio.gather(*late)

    async def close(self) -> None:
        """Give the connection up."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._client.connection_pool.release(connection)


def _hung_up(connection: AbstractConnection) -> bool:
    """Whether the server has closed a connection that nothing is read from."""
    reader: asyncio.StreamReader | None = getattr(connection, "_reader", None)
    return reader is None or reader.at_eof()
