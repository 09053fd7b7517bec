"""The registry's first half: versions of bases and adapters, published and read back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hybrid.errors import (
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
    Resolved,
    blob_path,
    check_name,
    check_safetensors,
    content_digest,
    parse_ref,
)
from hybrid.registry_store import BlobStore, sha256_file

_FORBIDDEN = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


class ModelRegistry:
    """Publishing and reading of versions; `Registry` adds aliases and releases.

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
        # Before anything is returned: publishing again is also how damaged bytes are repaired.
        repaired = [
            self._store.put_file(blob_path(entry.sha256), path, entry.sha256)
            for entry, path in zip(files, paths, strict=True)
        ]
        if any(repaired):
            shutil.rmtree(self._materialised / digest, ignore_errors=True)
        newest = self._store.sequence(at)
        if newest and (last := self._manifest(kind, name, newest)).digest == digest:
            return last

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
        # The manifest is there by now; without the index it is only found more slowly.
        with contextlib.suppress(FileExistsError, RegistryError):
            self._store.create(f"digests/{manifest.digest}", pointer)

    # --- reading ------------------------------------------------------------------------

    def manifest(self, ref: str, kind: Kind = "base") -> Manifest:
        """The manifest a reference names; see `resolve`."""
        parsed = parse_ref(ref)
        if parsed.digest is not None:
            found = self._by_digest(parsed.digest)
            if (found.kind, found.name) == (kind, parsed.name):
                return found
            for other in self.list(kind):  # the same content under two names
                if (other.name, other.digest) == (parsed.name, parsed.digest):
                    return other
            raise NotFound(f"{ref}: that digest is the {found.kind} {found.name}@v{found.version}")
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
            try:
                temp.rename(target)
            except OSError as e:
                if not target.is_dir():  # else another resolver was first: its copy is as good
                    raise RegistryError(f"{target}: {e}") from e
        finally:
            shutil.rmtree(temp, ignore_errors=True)
        return target

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
