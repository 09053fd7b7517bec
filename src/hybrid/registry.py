"""The registry: bases, adapters and releases, content-addressed, published atomically.

    blobs/ab/abcd…                      file contents, by sha256
    manifests/KIND/NAME/000001.json     what a version consists of
    aliases/KIND/NAME/ALIAS/000001.json which version an alias names: the highest number counts
    releases/NAME/000001.json           one base digest and the adapters that go with it
    materialised/DIGEST/                a published model as a folder (hard links, or a cache)

Blobs come first and the manifest last, and every numbered file is created exclusively: a publisher
that dies leaves unreferenced blobs, never half a version, and of two that want the same number one
takes the next. Weights are safetensors; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Final

from hybrid.errors import (
    AdapterRefused,
    Conflict,
    InvalidRequest,
    NotFound,
)
from hybrid.registry_models import ModelRegistry
from hybrid.registry_records import (
    KINDS,
    FileEntry,
    Kind,
    Manifest,
    Ref,
    Release,
    Resolved,
    check_name,
    check_safetensors,
    parse_ref,
)

ANY: Final = -1
"""`expect=ANY`: set an alias whatever it names now."""
__all__ = [
    "ANY", "KINDS", "FileEntry", "Kind", "Manifest", "Ref", "Registry", "Release", "Resolved",
    "check_safetensors", "parse_ref",
]  # fmt: skip


class Registry(ModelRegistry):
    """All of a registry: versions (`ModelRegistry`), aliases, releases."""

    # --- aliases and releases -----------------------------------------------------------

    def set_alias(
        self, kind: Kind, name: str, alias: str, version: int, *, expect: int = ANY
    ) -> None:
        """Point an alias at a version.

        Args:
            expect: the version it must name now (0: unset), or ANY.

        Raises:
            NotFound: no such version. Conflict: another writer was first.
        """
        check_name(name)
        check_name(alias)
        if re.fullmatch(r"v[0-9]+", alias):
            raise InvalidRequest(f"alias {alias!r} looks like a version; name it otherwise")
        self._manifest(kind, name, version)
        self._move_alias(f"aliases/{kind}/{name}/{alias}", version, expect)

    def _move_alias(self, folder: str, version: int, expect: int) -> None:
        while True:
            number, current = self._alias(folder)
            if expect not in (ANY, current):
                raise Conflict(f"{folder}: names v{current}, expected was v{expect}; look again")
            if current == version:
                return
            data = json.dumps({"version": version, "at": time.time()}).encode()
            with contextlib.suppress(FileExistsError):
                self._store.create(f"{folder}/{number + 1:06d}.json", data)
                return

    def publish_release(
        self,
        name: str,
        base_digest: str,
        adapters: Mapping[str, str],
        *,
        alias: str = "stable",
        expect: int = ANY,
    ) -> Release:
        """Publish a release and point its alias at it.

        Raises:
            AdapterRefused: an adapter was trained on another base; both digests are named.
            NotFound: a digest is not published. Conflict: the alias is not at `expect`.
        """
        check_name(name)
        check_name(alias)
        if self._by_digest(base_digest).kind != "base":
            raise InvalidRequest(f"{base_digest} is an adapter, not a base")
        for adapter, digest in adapters.items():
            check_name(adapter)
            manifest = self._by_digest(digest)
            if manifest.base_digest != base_digest:
                raise AdapterRefused(
                    f"adapter {adapter} ({digest}) was trained on base {manifest.base_digest}, not"
                    f" on {base_digest}; specialise it on that base first"
                )
        while True:
            release = Release(
                name=name,
                version=self._store.sequence(f"releases/{name}") + 1,
                base_digest=base_digest,
                adapters=dict(sorted(adapters.items())),
                created=time.time(),
            )
            with contextlib.suppress(FileExistsError):
                self._create(f"releases/{name}/{release.version:06d}.json", release)
                break
        self._move_alias(f"aliases/release/{name}/{alias}", release.version, expect)
        return release

    def release(self, ref: str) -> Release:
        """The release that `name@alias` or `name@v3` names; one listing and two small reads.

        Raises:
            NotFound: there is none.
        """
        parsed = parse_ref(ref)
        version = parsed.version
        if parsed.digest is not None:
            raise InvalidRequest(f"{ref}: a release has no digest; name an alias or a version")
        if version is None:
            alias = parsed.alias or "stable"
            version = self._alias(f"aliases/release/{parsed.name}/{alias}")[1]
        try:
            raw = self._store.read(f"releases/{parsed.name}/{version:06d}.json")
        except FileNotFoundError:
            raise NotFound(f"no release {ref} in {self._store.root}") from None
        return Release.model_validate_json(raw)

    def update_release(
        self,
        name: str,
        *,
        alias: str = "stable",
        add: Mapping[str, str] | None = None,
        remove: Sequence[str] = (),
    ) -> Release:
        """The next release on the same base, with adapters added, replaced or removed.

        Concurrent updates are all kept: each is made again on what the other left.

        Raises:
            NotFound: no release, or `remove` names none of its adapters. AdapterRefused.
        """
        while True:
            current = self.release(f"{name}@{alias}")
            missing = sorted(set(remove) - set(current.adapters))
            if missing:
                raise NotFound(f"{name}@{alias} has no adapter {', '.join(missing)}")
            adapters = {**current.adapters, **(add or {})}
            for gone in remove:
                del adapters[gone]
            if adapters == current.adapters:
                return current
            with contextlib.suppress(Conflict):
                return self.publish_release(
                    name, current.base_digest, adapters, alias=alias, expect=current.version
                )
