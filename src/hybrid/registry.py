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
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from hybrid.errors import (
    AdapterRefused,
    Conflict,
    IntegrityError,
    InvalidRequest,
    NotFound,
    RegistryError,
)
from hybrid.registry_records import (
    KINDS,
    FileEntry,
    Kind,
    Manifest,
    Record,
    Ref,
    Release,
    Resolved,
    blob_path,
    check_name,
    check_safetensors,
    content_digest,
    parse_ref,
)
from hybrid.registry_store import BlobStore, sha256_file

ANY: Final = -1
"""`expect=ANY`: set an alias whatever it names now."""
__all__ = [
    "ANY", "KINDS", "FileEntry", "Kind", "Manifest", "Ref", "Registry", "Release", "Resolved",
    "check_safetensors", "parse_ref",
]  # fmt: skip
_FORBIDDEN = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


class Registry:
    """A registry.

    Args:
        root: local path or fsspec URL; made on first publish.
        cache: where models of a remote root are materialised; the root itself when it is local.
    """

    def __init__(self, root: str | Path, cache: Path | None = None) -> None:
        self._store = BlobStore(root)
        if self._store.local is None and cache is None:
            cache = Path(tempfile.gettempdir()) / f"hybrid-cache-{os.getuid()}"
        self._materialised = (self._store.local or cache or Path()) / "materialised"

    # --- publishing ---------------------------------------------------------------------

    def publish(
        self,
        kind: Kind,
        name: str,
        folder: Path,
        *,
        base_digest: str | None = None,
        run_id: str = "",
        data_digest: str = "",
        metrics: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """Publish a folder as the next version of `name`.

        The same content as the newest version's is not published twice: its manifest is returned.

        Raises:
            InvalidRequest: a bad name, an empty folder, an adapter without a base digest.
            IntegrityError: a safetensors file is truncated or malformed.
            RegistryError: the registry cannot be written (full, no permission).
        """
        check_name(name)
        if (kind == "adapter") != (base_digest is not None):
            raise InvalidRequest("an adapter needs a base digest, and only an adapter has one")
        paths = sorted(p for p in folder.rglob("*") if p.is_file())
        if not paths:
            raise InvalidRequest(f"{folder}: nothing to publish")
        files = []
        for path in paths:
            if path.suffix in _FORBIDDEN:
                raise InvalidRequest(f"{path}: pickled weights are refused; save safetensors")
            if path.suffix == ".safetensors":
                check_safetensors(path)
            files.append(
                FileEntry(
                    path=path.relative_to(folder).as_posix(),
                    sha256=sha256_file(path),
                    size=path.stat().st_size,
                )
            )
        digest = content_digest(kind, files, base_digest)
        at = f"manifests/{kind}/{name}"
        newest = self._store.sequence(at)
        if newest and (last := self._manifest(kind, name, newest)).digest == digest:
            return last
        for entry, path in zip(files, paths, strict=True):
            self._store.put_file(blob_path(entry.sha256), path)

        def manifest(version: int) -> Manifest:
            return Manifest(
                kind=kind,
                name=name,
                version=version,
                digest=digest,
                files=tuple(files),
                base_digest=base_digest,
                run_id=run_id,
                data_digest=data_digest,
                metrics=dict(metrics or {}),
                created=time.time(),
            )

        while True:
            made = manifest(self._store.sequence(at) + 1)
            with contextlib.suppress(FileExistsError):
                self._create(f"{at}/{made.version:06d}.json", made)
                self._index(made)
                return made

    def _create(self, path: str, record: Record) -> None:
        self._store.create(path, record.model_dump_json(indent=1).encode())

    def _index(self, manifest: Manifest) -> None:
        """Remember which version a digest is; the first to publish it stays the answer."""
        pointer = f"{manifest.kind}/{manifest.name}/{manifest.version}".encode()
        with contextlib.suppress(FileExistsError):
            self._store.create(f"digests/{manifest.digest}", pointer)

    # --- reading ------------------------------------------------------------------------

    def manifest(self, ref: str, kind: Kind = "base") -> Manifest:
        """The manifest a reference names; see `resolve`."""
        parsed = parse_ref(ref)
        if parsed.digest is not None:
            found = self._by_digest(parsed.digest)
            if (found.kind, found.name) != (kind, parsed.name):
                raise NotFound(
                    f"{ref}: that digest is the {found.kind} {found.name}@v{found.version}"
                )
            return found
        version = parsed.version
        if parsed.alias is not None:
            version = self.aliases(kind, parsed.name).get(parsed.alias)
            if version is None:
                raise NotFound(f"{ref}: no such alias of a {kind} in {self._store.root}")
        if version is None:
            version = self._store.sequence(f"manifests/{kind}/{parsed.name}")
        return self._manifest(kind, parsed.name, version)

    def resolve(self, ref: str, kind: Kind = "base") -> Resolved:
        """Bring a model to this machine: `name` (newest), `name@alias`, `name@v3`, `name@<sha256>`.

        Raises:
            NotFound: there is none. IntegrityError: its bytes are missing or wrong.
        """
        manifest = self.manifest(ref, kind)
        return Resolved(manifest, self._materialise(manifest))

    def by_digest(self, digest: str) -> Resolved:
        """The model of a digest, whatever its name. Raises NotFound, IntegrityError."""
        manifest = self._by_digest(digest)
        return Resolved(manifest, self._materialise(manifest))

    def list(self, kind: Kind) -> list[Manifest]:
        """Every version of every name."""
        return [
            self._manifest(kind, name, int(file[:-5]))
            for name in self._store.names(f"manifests/{kind}")
            for file in self._store.names(f"manifests/{kind}/{name}")
        ]

    def verify(self, ref: str, kind: Kind = "base") -> Manifest:
        """Read every byte of a version again.

        Raises:
            IntegrityError: names the file whose bytes are not those published.
        """
        manifest = self.manifest(ref, kind)
        for entry in manifest.files:
            found = self._store.digest(blob_path(entry.sha256))
            if found != entry.sha256:
                raise IntegrityError(
                    f"{manifest.name}@v{manifest.version}: {entry.path} holds {found[:12]}…,"
                    f" published was {entry.sha256[:12]}…; publish it again"
                )
        return manifest

    def _manifest(self, kind: Kind, name: str, version: int) -> Manifest:
        path = f"manifests/{kind}/{name}/{version:06d}.json"
        try:
            return Manifest.model_validate_json(self._store.read(path))
        except FileNotFoundError:
            which = f"{name}@v{version}" if version else name
            raise NotFound(
                f"no {kind} {which} in {self._store.root} (there: "
                f"{', '.join(self._store.names(f'manifests/{kind}')) or 'nothing'})"
            ) from None
        except ValidationError as e:
            raise IntegrityError(f"{self._store.root}: {path} is no manifest: {e}") from None

    def _by_digest(self, digest: str) -> Manifest:
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise InvalidRequest(f"{digest!r} is no hex sha256", param="digest")
        try:
            kind, name, version = self._store.read(f"digests/{digest}").decode().split("/")
        except FileNotFoundError:
            # A publisher may have died between the manifest and its index.
            for each in KINDS:
                for manifest in self.list(each):
                    if manifest.digest == digest:
                        self._index(manifest)
                        return manifest
            raise NotFound(f"no model with digest {digest} in {self._store.root}") from None
        return self._manifest("base" if kind == "base" else "adapter", name, int(version))

    def _materialise(self, manifest: Manifest) -> Path:
        target = self._materialised / manifest.digest
        if target.is_dir():
            return target
        try:
            self._materialised.mkdir(parents=True, exist_ok=True)
            temp = Path(tempfile.mkdtemp(dir=self._materialised, prefix="."))
        except OSError as e:
            raise RegistryError(f"{self._materialised}: {e}") from e
        try:
            for entry in manifest.files:
                path = temp / entry.path
                path.parent.mkdir(parents=True, exist_ok=True)
                self._store.fetch(blob_path(entry.sha256), path, entry.sha256)
                if path.stat().st_size != entry.size:
                    raise IntegrityError(
                        f"{manifest.name}@v{manifest.version}: {entry.path} has"
                        f" {path.stat().st_size} bytes, published were {entry.size}"
                    )
            temp.chmod(0o755)
            with contextlib.suppress(OSError):  # another resolver was first: its copy is as good
                temp.rename(target)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
        return target

    # --- aliases and releases -----------------------------------------------------------

    def aliases(self, kind: Kind, name: str) -> dict[str, int]:
        """Alias to version."""
        check_name(name)
        at = f"aliases/{kind}/{name}"
        return {a: self._alias(f"{at}/{a}")[1] for a in self._store.names(at)}

    def _alias(self, folder: str) -> tuple[int, int]:
        """(number of the newest entry, the version it names); (0, 0) when unset."""
        number = self._store.sequence(folder)
        if not number:
            return 0, 0
        entry = json.loads(self._store.read(f"{folder}/{number:06d}.json"))
        return number, int(entry["version"])

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
