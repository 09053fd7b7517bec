"""hybrid.yaml as frozen models: reading and checking it; the sections are in sections*.py.

`load(path)` reads and checks the file. Every error names the file, the key path, the value and
what is allowed, with a "did you mean" for misspelt keys. Relative paths are taken from the
folder of the file.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from hybrid.errors import ConfigError
from hybrid.sections import (
    AgentConfig,
    AgentsConfig,
    DataConfig,
    ModelConfig,
    ProjectConfig,
    RegistryConfig,
    RunConfig,
    ServingConfig,
    StoreConfig,
    SwarmConfig,
    TokenizerConfig,
)
from hybrid.sections_base import NAME, Name
from hybrid.sections_training import (
    AdapterConfig,
    CheckpointConfig,
    CompressionConfig,
    FaultConfig,
    LoraConfig,
    ParallelConfig,
    Strategy,
    TrainingConfig,
)

__all__ = [
    "NAME",
    "Name",
    "explain",
    "load",
    "parse",
    "read_mapping",
    "RunConfig",
    "RegistryConfig",
    "ModelConfig",
    "TokenizerConfig",
    "DataConfig",
    "CheckpointConfig",
    "CompressionConfig",
    "FaultConfig",
    "ParallelConfig",
    "Strategy",
    "TrainingConfig",
    "LoraConfig",
    "AdapterConfig",
    "ServingConfig",
    "StoreConfig",
    "AgentConfig",
    "SwarmConfig",
    "AgentsConfig",
    "ProjectConfig",
]


def load(path: str | Path, overrides: dict[str, Any] | None = None) -> ProjectConfig:
    """Read hybrid.yaml.

    Args:
        path: the file.
        overrides: dotted key paths to values that replace those of the file,
            e.g. `{"training.steps": 10}`.

    Raises:
        ConfigError: the file is missing, not YAML, or a key is unknown or out of range.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"{path}: no such file; pass -c FILE or run in its folder")
    raw = read_mapping(path)
    for dotted, value in (overrides or {}).items():
        _set(raw, dotted, value, path)
    return _resolve_paths(parse(raw, where=str(path)), path.resolve().parent)


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping.

    Raises:
        ConfigError: it is missing, not UTF-8, not YAML, or something else than a mapping.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 at byte {e.start}") from None
    except (yaml.YAMLError, OSError) as e:
        raise ConfigError(f"{path}: {e}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping, found {type(raw).__name__}")
    return raw


def parse(raw: dict[str, Any], where: str = "hybrid.yaml") -> ProjectConfig:
    """Check a mapping already in memory. `where` is named in errors.

    Raises:
        ConfigError: a key is unknown, missing or out of range.
    """
    try:
        return ProjectConfig.model_validate(raw)
    except ValidationError as e:
        raise ConfigError(_explain(e, where)) from None


def explain(e: ValidationError, where: str, model: type[BaseModel]) -> str:
    """One line an error: place, key path, value, what is allowed, and a near miss."""
    return _explain(e, where, model)


def _explain(e: ValidationError, where: str, model: type[BaseModel] = ProjectConfig) -> str:
    lines = []
    for error in e.errors():
        loc = tuple(error["loc"])
        key = ".".join(str(part) for part in loc) or "(file)"
        if error["type"] == "extra_forbidden":
            allowed = _allowed(model, loc[:-1])
            near = difflib.get_close_matches(str(loc[-1]), allowed, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            lines.append(
                f"{where}: {key}: unknown key{hint} (allowed: {', '.join(sorted(allowed))})"
            )
        elif error["type"] == "missing":
            lines.append(f"{where}: {key}: missing")
        else:
            message = error["msg"].removeprefix("Value error, ")
            value = error["input"]
            shown = "" if isinstance(value, dict) else f" {value!r}:"
            lines.append(f"{where}: {key}:{shown} {message}")
    return "\n".join(lines)


def _allowed(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """The keys of the section at `loc`."""
    for part in loc:
        found = model.model_fields.get(str(part))
        if found is None:  # the name within a mapping of sections: the class stays
            continue
        inner = _section_of(found.annotation)
        if inner is not None:
            model = inner
    return list(model.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, dict, Annotated):
        for arg in get_args(annotation):
            found = _section_of(arg)
            if found is not None:
                return found
    return None


def _set(raw: dict[str, Any], dotted: str, value: Any, path: Path) -> None:
    *parents, last = dotted.split(".")
    at = raw
    for part in parents:
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            raise ConfigError(f"{path}: --set {dotted}: {part} is not a section")
    at[last] = value


def _resolve_paths(config: ProjectConfig, root: Path) -> ProjectConfig:
    """Make every relative local path absolute, from the folder of the file."""

    def path(value: str) -> str:
        return value if "://" in value else str(root / value)

    data = config.data
    checkpoint = config.training.checkpoint
    storage = path(checkpoint.storage) if checkpoint.storage else None
    adapters = {
        name: a.model_copy(
            update={
                "train": path(a.train),
                "holdout": path(a.holdout),
                "choices": path(a.choices) if a.choices else None,
                "augment": path(a.augment) if a.augment and ".py:" in a.augment else a.augment,
                "candidates": path(a.candidates)
                if a.candidates and ".py:" in a.candidates
                else a.candidates,
            }
        )
        for name, a in config.adapters.items()
    }
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": root / config.run.dir}),
            "registry": config.registry.model_copy(
                update={
                    "root": path(config.registry.root),
                    "cache": root / config.registry.cache,
                }
            ),
            "model": config.model.model_copy(
                update={"source": root / config.model.source if config.model.source else None}
            ),
            "data": data.model_copy(
                update={
                    "train": tuple(map(path, data.train)),
                    "holdout": tuple(map(path, data.holdout)),
                    "prepare": path(data.prepare) if data.prepare else None,
                    "tokenizer": data.tokenizer.model_copy(
                        update={"train_on": tuple(map(path, data.tokenizer.train_on))}
                    ),
                }
            ),
            "adapters": adapters,
            "training": config.training.model_copy(
                update={"checkpoint": checkpoint.model_copy(update={"storage": storage})}
            ),
        }
    )
