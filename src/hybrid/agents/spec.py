"""Agents as data: one specification an agent, kept in the store where every host watches it."""

from __future__ import annotations

import difflib
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from pydantic import Field, ValidationError
from pydantic_core import from_json, to_json
from redis.asyncio import Redis
from redis.exceptions import RedisError

from hybrid.agents.builtin import check_search, resolve_behaviour, resolve_verifier
from hybrid.agents.store import unavailable
from hybrid.config import NAME, AgentConfig, explain
from hybrid.errors import ConfigError, Conflict, NotFound

Owner = Literal["file", "api"]
_Change: TypeAlias = "tuple[Sequence[str], Sequence[AgentSpec]]"
"""The names to remove, and the agents to write."""

_SPECS = "{hybrid:agents}:specs"
_VERSION = "{hybrid:agents}:version"
_CHANNEL = "hybrid:agents:changed"
POLL_S = 0.5
"""A missed notification costs a host this long: pub/sub promises nothing, the counter does."""

# One call, so that no host sees a counter without its change. ARGV: channel, the version that the
# change was made for, the names to delete (count first), then name and document in pairs. Returns
# the new version, or 0 if there was another change since.
_APPLY = """
if (redis.call('GET', KEYS[2]) or '') ~= ARGV[2] then return 0 end
local version = redis.call('INCR', KEYS[2])
local gone = tonumber(ARGV[3])
for i = 4, 3 + gone do redis.call('HDEL', KEYS[1], ARGV[i]) end
for i = 4 + gone, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], version .. ' ' .. ARGV[i + 1])
end
redis.call('PUBLISH', ARGV[1], version)
return version
"""


class AgentSpec(AgentConfig):
    """One agent as the hosts see it: its configuration, its name, who owns it, its version.

    `params.extract` is read by the built-in behaviours: a regular expression with one group that
    takes the entity out of a question before the template is filled; what it does not match is
    used whole.
    """

    name: str = Field(pattern=NAME)
    """How tasks, routers and `agent/<name>` call it."""
    owner: Owner = "api"
    """`file`: comes from hybrid.yaml and is replaced by the next `apply_file`; `api`: added over
    HTTP or the command line and left alone by it."""
    version: int = 0
    """The store's change counter when this was written; 0 before."""

    @classmethod
    def of(cls, name: str, config: AgentConfig | Mapping[str, Any], owner: Owner) -> AgentSpec:
        """Check a configuration and everything it names.

        Raises:
            ConfigError: an unknown key, a bad value or one without a JSON form, a behaviour or
                verifier that does not import, an `extract` that is not a regular expression with
                one group, a `search` without an embedder or documents.
        """
        fields = config.model_dump() if isinstance(config, AgentConfig) else dict(config)
        where = f"agent {name!r}"
        try:
            spec = cls.model_validate({**fields, "name": name, "owner": owner})
            spec = cls.model_validate({k: _as_stored(v, f"{where}: {k}") for k, v in spec})
        except ValidationError as e:
            raise ConfigError(explain(e, where, cls)) from None
        if "{input}" not in spec.template:
            raise ConfigError(f"{where}: template: {spec.template!r} must contain {{input}}")
        if "{input}" not in spec.embedder_template:
            raise ConfigError(
                f"{where}: embedder_template: {spec.embedder_template!r} must contain {{input}}"
            )
        resolve_behaviour(spec.behaviour, where)
        if spec.behaviour == "search":
            check_search(spec, where)
        if spec.verify is not None:
            resolve_verifier(spec.verify, where)
        extract = spec.params.get("extract")
        if extract is not None:
            try:
                groups = re.compile(extract).groups
            except (re.error, TypeError) as e:
                raise ConfigError(f"{where}: params.extract: {extract!r}: {e}") from None
            if groups != 1:
                raise ConfigError(f"{where}: params.extract: {extract!r} must have one group")
        return spec

    def config(self) -> AgentConfig:
        """The configuration alone."""
        return AgentConfig.model_validate(self.model_dump(exclude={"name", "owner", "version"}))


class SpecStore:
    """The specifications in the store; every change raises one counter and is announced.

    Every call raises StoreUnavailable when the store does not answer. What a change is refused for
    is judged by what is there when it is written, whoever else writes.
    """

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def put(self, name: str, config: AgentConfig | Mapping[str, Any]) -> AgentSpec:
        """Add or replace an agent that belongs to the API.

        Raises:
            ConfigError: see `AgentSpec.of`; or a route or fallback names no agent.
            Conflict: hybrid.yaml owns an agent of this name.
        """
        spec = AgentSpec.of(name, config, "api")

        def change(present: dict[str, AgentSpec]) -> _Change:
            _refuse_file_owned(present, name)
            _check_names({**present, name: spec}, [spec])
            return [], [spec]

        version = await self._apply(change)
        return spec.model_copy(update={"version": version})

    async def delete(self, name: str) -> None:
        """Remove an agent that belongs to the API.

        Raises:
            NotFound: no such agent.
            Conflict: hybrid.yaml owns it, or another agent routes to it by name.
        """

        def change(present: dict[str, AgentSpec]) -> _Change:
            if name not in present:
                raise _unknown(name, present)
            _refuse_file_owned(present, name)
            for other in present.values():
                if other.name != name and name in (*other.routes, other.fallback):
                    raise Conflict(
                        f"agent {other.name!r} routes to {name!r}; change that one first"
                    )
            return [name], []

        await self._apply(change)

    async def get(self, name: str) -> AgentSpec:
        """One agent.

        Raises:
            NotFound: no such agent.
        """
        raw = await _asked(self._client.hget(_SPECS, name))
        if raw is None:
            raise _unknown(name, await self.list())
        return _read(raw)

    async def list(self) -> dict[str, AgentSpec]:
        """All agents, sorted by name."""
        raw = await _asked(self._client.hgetall(_SPECS))
        specs = sorted(map(_read, raw.values()), key=lambda spec: spec.name)
        return {spec.name: spec for spec in specs}

    async def apply_file(self, configs: Mapping[str, AgentConfig]) -> dict[str, AgentSpec]:
        """Make the agents of hybrid.yaml the ones of owner `file`; those of the API stay.

        Raises:
            ConfigError: see `put`.
            Conflict: the API added a different agent under one of the names.
        """
        specs = [AgentSpec.of(name, config, "file") for name, config in configs.items()]

        def change(present: dict[str, AgentSpec]) -> _Change:
            for spec in specs:
                other = present.get(spec.name)
                if other is not None and other.owner == "api" and other.config() != spec.config():
                    raise Conflict(
                        f"agent {spec.name!r} of hybrid.yaml was added differently over the API;"
                        f" `hybrid agents remove {spec.name}` or rename one of them"
                    )
            gone = [s.name for s in present.values() if s.owner == "file" and s.name not in configs]
            after = {n: s for n, s in present.items() if n not in gone}
            after |= {spec.name: spec for spec in specs}
            _check_names(after, after.values())
            changed = [
                spec
                for spec in specs
                if spec.name not in present
                or present[spec.name].model_dump(exclude={"version"})
                != spec.model_dump(exclude={"version"})
            ]
            return gone, changed

        await self._apply(change)
        return {n: s for n, s in (await self.list()).items() if s.owner == "file"}

    async def changes(self) -> AsyncIterator[dict[str, AgentSpec]]:
        """All agents now, and again within a second of every change."""
        seen = None
        try:
            async with self._client.pubsub() as announcements:
                await announcements.subscribe(_CHANNEL)
                while True:
                    version = await self._client.get(_VERSION)
                    if seen is None or version != seen[0]:
                        seen = (version,)
                        yield await self.list()
                    await announcements.get_message(ignore_subscribe_messages=True, timeout=POLL_S)
        except (RedisError, OSError) as e:
            raise unavailable(e) from e

    async def _apply(self, change: Callable[[dict[str, AgentSpec]], _Change]) -> int:
        """Carry out what `change` makes of all agents, anew if another writer came between."""
        while True:
            # Before the agents: what is written after this is noticed.
            version = await _asked(self._client.get(_VERSION))
            gone, specs = change(await self.list())
            if not gone and not specs:
                return int(version or 0)
            documents = [x for s in specs for x in (s.name, s.model_dump_json(exclude={"version"}))]
            what = (_CHANNEL, version or "", str(len(gone)), *gone, *documents)
            written = await _asked(self._client.eval(_APPLY, 2, _SPECS, _VERSION, *what))
            if written:
                return int(written)


async def _asked(call: Any) -> Any:
    """The store's reply. Raises StoreUnavailable."""
    try:
        return await call
    except (RedisError, OSError) as e:
        raise unavailable(e) from e


def _as_stored(value: Any, what: str) -> Any:
    """A field as the store gives it back: a date is a string then, infinity null, a tuple a list.

    Compared in any other form, a file that was applied before would seem to have changed.
    """
    try:
        return from_json(to_json(value, inf_nan_mode="null"))
    except ValueError as e:
        raise ConfigError(f"{what}: it has no JSON form: {e}") from None


def _read(raw: bytes | str) -> AgentSpec:
    text = raw.decode() if isinstance(raw, bytes) else raw
    version, _, document = text.partition(" ")
    return AgentSpec.model_validate_json(document).model_copy(update={"version": int(version)})


def _refuse_file_owned(present: Mapping[str, AgentSpec], name: str) -> None:
    if name in present and present[name].owner == "file":
        raise Conflict(f"agent {name!r} is defined in hybrid.yaml; change it there and `hybrid up`")


def _check_names(present: Mapping[str, AgentSpec], specs: Iterable[AgentSpec]) -> None:
    for spec in specs:
        named = [("routes", route) for route in spec.routes]
        named += [("fallback", spec.fallback)] if spec.fallback else []
        for field, other in named:
            if other not in present:
                raise ConfigError(
                    f"agent {spec.name!r}: {field}: {_unknown(other, present).message}"
                )


def _unknown(name: str, present: Iterable[str]) -> NotFound:
    near = difflib.get_close_matches(name, list(present), 1)
    hint = f"; did you mean {near[0]!r}?" if near else f" (there are: {', '.join(sorted(present))})"
    return NotFound(f"no agent {name!r}{hint}", param="agent")
