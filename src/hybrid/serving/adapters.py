"""Names on the wire: `legal-base` and `legal-base:citation`, resolved in the served release."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.errors import ModelNotFound
from hybrid.registry import Manifest, Registry, Release
from hybrid.serving.backend import AdapterRef
from hybrid.wire import ModelCard

SEPARATOR = ":"


@dataclass(frozen=True)
class Catalog:
    """A release with the manifests it names. Immutable: a new release is a new catalog."""

    name: str
    alias: str
    release: Release
    base: Manifest
    adapters: dict[str, Manifest]

    @classmethod
    def read(cls, registry: Registry, name: str, alias: str) -> Catalog:
        """The release `name@alias` names now.

        Raises:
            NotFound: none is published. IntegrityError: its files are damaged.
        """
        release = registry.release(f"{name}@{alias}")
        return cls(
            name=name,
            alias=alias,
            release=release,
            base=registry.by_digest(release.base_digest).manifest,
            adapters={
                adapter: registry.by_digest(digest).manifest
                for adapter, digest in release.adapters.items()
            },
        )

    @property
    def label(self) -> str:
        """The release as answers name it, e.g. `legal-base@stable#3`."""
        return f"{self.name}@{self.alias}#{self.release.version}"

    def model_of(self, adapter: str) -> str:
        """What a client writes as `model` for an adapter."""
        return f"{self.name}{SEPARATOR}{adapter}"

    def resolve(self, model: str, registry: Registry) -> AdapterRef | None:
        """What a client's `model` is: an adapter to load, or None for the base itself.

        Raises:
            ModelNotFound: neither; the message lists what there is.
        """
        base, separator, adapter = model.partition(SEPARATOR)
        if base == self.name and not separator:
            return None
        manifest = self.adapters.get(adapter) if base == self.name else None
        if manifest is None:
            known = [self.name, *map(self.model_of, self.adapters)]
            raise ModelNotFound(
                f"no model {model!r} in {self.label}; there are: {', '.join(known)}", param="model"
            )
        assert manifest.base_digest is not None
        return AdapterRef(
            name=adapter,
            digest=manifest.digest,
            base_digest=manifest.base_digest,
            path=registry.by_digest(manifest.digest).path,
        )

    def cards(self) -> list[ModelCard]:
        """The lines of GET /v1/models: the base first, then its adapters by name."""

        def card(model: str, m: Manifest) -> ModelCard:
            return ModelCard(
                id=model,
                kind=m.kind,
                digest=m.digest,
                base_digest=m.base_digest or m.digest,
                release=self.label,
                created=int(m.created),
                metrics=dict(m.metrics),
            )

        return [
            card(self.name, self.base),
            *(card(self.model_of(a), m) for a, m in sorted(self.adapters.items())),
        ]
