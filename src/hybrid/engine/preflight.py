"""What adapter_config.json says: read and typed; what this engine does not compute is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from hybrid.engine.variants import refuse_variants
from hybrid.errors import AdapterRefused

T = TypeVar("T")
Patterns = tuple[tuple[re.Pattern[str], T], ...]
Names = re.Pattern[str] | tuple[str, ...]
Refuse = Callable[[str], AdapterRefused]
"""Makes the error for a reason; it names the adapter."""

EMBEDDING: Final = "model.embed_tokens"
HEAD: Final = "lm_head"
ENDS: Final = (EMBEDDING, HEAD)

MAX_RANK: Final = 4096
"""The kernel keeps eight rows of an adapter's low products on the stack."""

_BIASES = ("none", "all", "lora_only")
_A_RANK = f"a whole number from 1 to {MAX_RANK}"
_A_NUMBER = "a finite number"


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """An adapter's configuration, checked.

    rank, alpha: where no pattern says otherwise. ranks, alphas: overrides, by a pattern that is
    matched at a name's end. rslora: scaled by the root of the rank. targets: names' ends, or a
    pattern of whole names, that have LoRA; excluded: the same, of those that have not; layers:
    indices they are restricted to, below what `lists` matches. saved: which of ENDS it brings
    whole. tied: its head and its embedding are to be one, where the base's are. biases: it may
    have trained the base's.
    """

    rank: int
    alpha: float
    ranks: Patterns[int]
    alphas: Patterns[float]
    rslora: bool
    targets: Names
    excluded: Names
    layers: frozenset[int] | None
    lists: tuple[re.Pattern[str], ...]
    saved: frozenset[str]
    tied: bool
    biases: bool

    @classmethod
    def read(cls, path: Path, refuse: Refuse, *, fan_in_fan_out: bool = False) -> LoraSpec:
        """From PEFT's adapter_config.json.

        Args:
            fan_in_fan_out: whether the base may hold weights as [in, out].

        Raises:
            AdapterRefused: it cannot be read, a field has the wrong type, or asks for what is not
                served.
        """
        try:
            raw = json.loads(path.read_bytes(), object_pairs_hook=_once)
        except (ValueError, OSError, RecursionError) as e:
            raise refuse(f"{path.name} cannot be read: {e}") from None
        if not isinstance(raw, dict):
            raise refuse(f"{path.name} holds no object")
        _check_features(raw, refuse)
        if raw.get("fan_in_fan_out") and not fan_in_fan_out:
            raise refuse("fan_in_fan_out=True is not supported: the base's weights are [out, in]")

        def typed(field: str, fits: Callable[[Any], bool], what: str, default: Any = None) -> Any:
            value = default if raw.get(field) is None else raw[field]
            if not fits(value):
                raise refuse(f"{field}={value!r} is not {what}")
            return value

        def compiled(field: str, pattern: str, around: str = "{}") -> re.Pattern[str]:
            if _may_backtrack(pattern):
                raise refuse(f"{field}: {pattern!r} repeats what repeats: it may never end")
            try:
                return re.compile(around.format(pattern))
            except (re.error, OverflowError, RecursionError) as e:
                raise refuse(f"{field}: {pattern!r} is no regular expression: {e}") from None

        def patterns(field: str, fits: Callable[[Any], bool], what: str) -> Patterns[Any]:
            found = typed(field, lambda v: isinstance(v, dict), "an object", {})
            for pattern, value in found.items():
                if not fits(value):
                    raise refuse(f"{field}: {value!r} for {pattern!r} is not {what}")
            return tuple((compiled(field, p, r"(.*\.)?({})$"), v) for p, v in found.items())

        def names(field: str, default: Any) -> Names:
            value = typed(field, _is_names, "a name or a list of names", default)
            return compiled(field, value) if isinstance(value, str) else tuple(value)

        lists = typed("layers_pattern", _is_names, "a name or a list of names", [])
        layers = typed("layers_to_transform", _is_layers, "a layer or a list of layers", [])
        layers = [layers] if isinstance(layers, int) else layers
        bias = typed("bias", lambda v: v in _BIASES, f"one of {', '.join(_BIASES)}", "none")
        return cls(
            rank=typed("r", _is_rank, f"a rank: {_A_RANK}"),
            alpha=typed("lora_alpha", _is_number, _A_NUMBER),
            ranks=patterns("rank_pattern", _is_rank, _A_RANK),
            alphas=patterns("alpha_pattern", _is_number, _A_NUMBER),
            rslora=typed("use_rslora", _is_bool, "true or false", False),
            targets=names("target_modules", None),
            excluded=names("exclude_modules", []),
            layers=frozenset(layers) if layers else None,
            lists=tuple(
                compiled("layers_pattern", p, r"(?:^|.*?\.){}\.(?P<idx>\d+)\.")
                for p in ([lists] if isinstance(lists, str) else lists) or [r"[^.]*"]
            ),
            saved=_saved(typed("modules_to_save", _is_list, "a list of names", []), refuse),
            tied=typed("ensure_weight_tying", _is_bool, "true or false", False),
            biases=bias != "none",
        )

    def has_lora(self, module: str) -> bool:
        """Whether PEFT puts LoRA on a module (its `check_target_module_exists`).

        Args:
            module: a full name, e.g. `model.layers.0.mlp.up_proj`.
        """
        if _named(self.excluded, module) or module in self.saved:
            return False
        if not isinstance(self.targets, re.Pattern) and module in self.targets:
            return True
        if isinstance(self.targets, re.Pattern) or self.layers is None:
            return _named(self.targets, module)
        at = next(filter(None, (p.match(module) for p in self.lists)), None)
        in_layers = at is not None and int(at["idx"]) in self.layers
        return in_layers and _named(self.targets, module)

    def rank_of(self, module: str) -> int:
        """Of a module by its full name."""
        return next((v for p, v in self.ranks if p.match(module)), self.rank)

    def scaling_of(self, module: str) -> float:
        """What B A is multiplied by."""
        rank = self.rank_of(module)
        alpha = next((v for p, v in self.alphas if p.match(module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _check_features(raw: dict[str, Any], refuse: Refuse) -> None:
    if str(raw.get("peft_type", "")).upper() != "LORA":
        raise refuse(f"peft_type is {raw.get('peft_type')!r}, only LORA is served")
    refuse_variants(raw, refuse, but=("bias", "modules_to_save"))


def _named(names: Names, module: str) -> bool:
    if isinstance(names, re.Pattern):
        # PEFT makes a list of "all-linear" when it trains, of all but the head.
        return bool(names.fullmatch(module)) or (
            names.pattern.lower() == "all-linear" and module not in ENDS
        )
    return any(f".{module}".endswith(f".{name}") for name in names)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a field is given twice")
    return made


def _saved(entries: list[str], refuse: Refuse) -> frozenset[str]:
    """PEFT saves every module whose full name ends with an entry."""
    for entry in entries:
        if not any(name.endswith(entry) for name in ENDS):
            raise refuse(
                f"modules_to_save={entry!r} is not supported: only embed_tokens and lm_head are"
            )
    return frozenset(n for n in ENDS if any(n.endswith(entry) for entry in entries))


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) and v for v in value)


def _is_names(value: Any) -> bool:
    return _is_list(value) or (isinstance(value, str) and bool(value))


def _is_layers(value: Any) -> bool:
    layers = value if isinstance(value, list) else [value]
    return all(isinstance(v, int) and not isinstance(v, bool) for v in layers)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANK


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def _may_backtrack(pattern: str) -> bool:
    """Whether a repeated group repeats within, so that matching may take exponential time.

    Groups are replaced from the inside out: by R where something in them repeats, else by x.
    """
    pattern = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern)  # escapes and classes are one character
    while (group := re.search(r"\(([^()]*)\)([*+{]?)", pattern)) is not None:
        repeats = re.search(r"[*+R]|\{\d+,\}", group[1]) is not None
        if repeats and group[2]:
            return True
        pattern = pattern.replace(group[0], ("R" if repeats else "x") + group[2], 1)
    return False
