"""A damaged adapter either loads to exactly what its files say, or is refused; nothing else."""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from hybrid.engine.adapters import module_name
from hybrid.engine.engine import Engine
from hybrid.engine.lora import Adapter
from hybrid.errors import AdapterRefused
from hybrid.testing_models import tiny_adapter, tiny_base

BASE = "b" * 64
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
DTYPES = [
    torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
FIELDS = [
    "r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias", "modules_to_save",
    "peft_type", "ensure_weight_tying", "fan_in_fan_out", "lora_bias", "init_lora_weights",
    "layer_replication", "lora_dropout", "new_field",
]  # fmt: skip
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 10),
    st.integers(10**18, 10**30),
    st.floats(),
    st.sampled_from(
        ["", "q_proj", "(", "a|b", ".*", "all-linear", "lm_head", "all", "LORA", "\x00"]
    ),
    st.lists(st.sampled_from(["q_proj", "lm_head", "norm", "embed_tokens", 1, None]), max_size=3),
    st.dictionaries(
        st.sampled_from(["q_proj", "(", "lm_head", ""]),
        st.one_of(st.integers(-1, 9), st.floats(), st.none(), st.text(max_size=2)),
        max_size=2,
    ),
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Path]:
    root = tmp_path_factory.mktemp("mutations")
    tiny_base(root / "base", vocab_size=300, hidden_size=32, intermediate_size=48)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of embeddings that are saved
        tiny_adapter(
            root / "base",
            root / "good",
            rank=2,
            targets=("q_proj", "down_proj", "lm_head"),
            modules_to_save=["embed_tokens"],
        )
    state = load_file(root / "good" / WEIGHTS)
    state["base_model.model.model.embed_tokens.weight"] += 0.25
    save_file(state, root / "good" / WEIGHTS)
    return Engine(root / "base", BASE, device="cpu"), root / "good"


def deltas(engine: Engine, adapter: Adapter) -> dict[str, Tensor]:
    """What it adds to each module's weight [out, in], or has instead of it."""
    shape, found = engine.decoder.shape, {}
    for layer, name in adapter.layout.targets:
        n_in, n_out, fused, column = shape.projections()[name]
        weights = adapter.views[layer, fused]
        index = [start for start, _, _ in weights.parts].index(column)
        rank = adapter.layout.rank
        a = weights.a[0][:, index * rank : (index + 1) * rank]
        delta = (a @ weights.parts[index][2][0]).t()
        if name in ("q_proj", "k_proj"):  # pairs side by side → halves of a head apart
            back = torch.empty_like(delta)
            back[shape.paired(n_out // shape.head_dim)] = delta
            delta = back
        assert delta.shape == (n_out, n_in)
        found[module_name(layer, name)] = delta
    for module, own in (("model.embed_tokens", adapter.embedding), ("lm_head", adapter.head)):
        if own is not None and own.whole is not None:
            found[module] = own.whole
        elif own is not None and own.a is not None and own.b is not None:
            product = own.a @ own.b
            found[module] = product if module != "lm_head" else product.t()
    return found


def expected(engine: Engine, folder: Path) -> dict[str, Tensor]:
    """The same from the files, with none of the loader's code."""
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    state = load_file(folder / WEIGHTS)
    found: dict[str, Tensor] = {}

    def pattern(field: str, module: str, default: Any) -> Any:
        for key, value in (config.get(field) or {}).items():
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        return default

    for key, tensor in state.items():
        name = key.removeprefix("base_model.model.")
        if name.endswith("base_layer.weight"):
            continue
        if name.endswith((".lora_A.weight", ".lora_embedding_A")):
            module = name.rsplit(".lora_", 1)[0]
            b = state[key.replace("_A", "_B")].float()
            rank = pattern("rank_pattern", module, config["r"])
            alpha = pattern("alpha_pattern", module, config["lora_alpha"])
            scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            delta = b @ tensor.float() * scaling
            found[module] = delta.t() if "embedding" in name else delta
        elif "lora_" not in name:
            whole = tensor.float()
            if not torch.equal(whole, engine.decoder.embedding):
                found[name.removesuffix(".weight")] = whole
    return found


def check(good: tuple[Engine, Path], folder: Path) -> str | None:
    """Why it is refused; None: it was loaded, exactly."""
    engine, _ = good
    try:
        adapter = engine.read_adapter(folder, name="m", digest="m", base_digest=BASE)
    except AdapterRefused as e:
        return e.message
    got, want = deltas(engine, adapter), expected(engine, folder)
    assert got.keys() == want.keys()
    for module, delta in want.items():
        torch.testing.assert_close(got[module], delta, rtol=1e-5, atol=1e-6, msg=module)
    return None


def mutate_state(data: st.DataObject, state: dict[str, Tensor]) -> dict[str, Tensor]:
    keys = sorted(state)
    key = data.draw(st.sampled_from(keys))
    kind = data.draw(st.sampled_from(["drop", "shape", "dtype", "rename", "extra", "nan", "swap"]))
    tensor = state[key]
    if kind == "drop":
        for gone in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=4)):
            state.pop(gone, None)
    elif kind == "shape":
        dims = data.draw(st.lists(st.integers(0, 9), max_size=3))
        state[key] = data.draw(
            st.sampled_from([torch.zeros(dims), tensor.t().contiguous(), tensor[:-1].clone()])
        )
    elif kind == "dtype":
        state[key] = tensor.to(data.draw(st.sampled_from(DTYPES)))
    elif kind == "rename":
        old, new = data.draw(
            st.sampled_from(
                [("layers.1", "layers.01"), ("layers.0", "layers.5"), ("self_attn", "mlp"),
                 ("q_proj", "k_proj"), ("lora_A", "lora_C"), ("base_model.", ""), ("lm_head", "x")]
            )
        )  # fmt: skip
        state = {k.replace(old, new): v for k, v in state.items()}
    elif kind == "extra":
        state[
            data.draw(st.sampled_from(["x", "", key + ".x", "base_model.model.lm_head.weight"]))
        ] = data.draw(st.sampled_from([torch.zeros(1), torch.ones(300, 32)]))
    elif kind == "nan":
        tensor.view(-1)[0] = data.draw(st.sampled_from([math.nan, math.inf, 1e38]))
    else:
        other = data.draw(st.sampled_from(keys))
        state[key], state[other] = state[other], state[key]
    return state


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_mutation_loads_exactly_or_is_refused(
    good: tuple[Engine, Path], tmp_path: Path, data: st.DataObject
) -> None:
    folder = tmp_path / "mutated"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good[1], folder)
    for _ in range(data.draw(st.integers(1, 2))):
        what = data.draw(st.sampled_from(["state", "field", "bytes", "truncate", "text"]))
        path = folder / data.draw(st.sampled_from([WEIGHTS, CONFIG]))
        raw = bytearray(path.read_bytes())
        if what == "bytes" and raw:  # most of the damage where the structure is
            limit = data.draw(st.sampled_from([16, 2500, len(raw)]))
            for _ in range(data.draw(st.integers(1, 3))):
                raw[data.draw(st.integers(0, min(limit, len(raw)) - 1))] ^= 1 << data.draw(
                    st.integers(0, 7)
                )
            path.write_bytes(raw)
        elif what == "truncate":
            path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
        elif what == "text":
            old, new = data.draw(
                st.sampled_from(
                    [(b"F32", b"F64"), (b"F32", b"F4 "), (b"F32", b"I32"), (b"lora_A", b"lora_B"),
                     (b'"r"', b'"R"'), (b"{", b"[" * 9000), (b"2", b"3"), (b"2", b"9" * 5000),
                     (b"null", b"NaN"), (b'"r":', b'"r": 1, "r":')]
                )
            )  # fmt: skip
            path.write_bytes(bytes(raw).replace(old, new, 1))
        else:
            try:
                if what == "state":
                    (folder / WEIGHTS).write_bytes(
                        save(mutate_state(data, load_file(folder / WEIGHTS)))
                    )
                else:
                    config = json.loads((folder / CONFIG).read_text())
                    config[data.draw(st.sampled_from(FIELDS))] = data.draw(VALUES)
                    (folder / CONFIG).write_text(json.dumps(config))
            except Exception:  # noqa: BLE001 - what was damaged before cannot be damaged this way
                break
    why = check(good, folder)
    assert why is None or why.startswith("adapter m (m): ")


def test_the_whole_one_loads_exactly(good: tuple[Engine, Path]) -> None:
    assert check(good, good[1]) is None
