"""What cannot run is refused before anything is spread, and the error names the key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybrid.config import TrainingConfig
from hybrid.errors import ConfigError
from hybrid.training.rules import check_strategy, shard_size

MODEL = SimpleNamespace(
    model_type="llama", num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.0
)
TWO_NODES = ["a", "a", "b", "b"]


def settings(strategy: str, **parallel: Any) -> TrainingConfig:
    asked = {"strategy": strategy, "parallel": parallel, "workers": 12}
    return TrainingConfig.model_validate(asked)


@pytest.mark.parametrize(
    ("made", "nodes", "key", "said"),
    [
        (settings("single"), ["a", "a"], "strategy", "one worker"),
        (settings("ddp", reshard=False), TWO_NODES, "parallel.reshard", "'ddp'"),
        (settings("ddp", offload=True), TWO_NODES, "parallel.offload", "fsdp"),
        (settings("single", offload=True), ["a"], "parallel.offload", "fsdp"),
        (settings("fsdp", shard=2), TWO_NODES, "parallel.shard", "'hsdp'"),
        (settings("fsdp", tensor=2), TWO_NODES, "parallel.tensor", "'tp'"),
        (settings("hsdp"), ["a", "a", "b"], "parallel.shard", "unequal"),
        (settings("hsdp", shard=3), TWO_NODES, "parallel.shard", "divide"),
        (settings("tp"), TWO_NODES, "parallel.tensor", "2 ranks or more"),
        (settings("tp", tensor=3), TWO_NODES, "parallel.tensor", "divide the 4 workers"),
        (settings("tp", tensor=4), TWO_NODES, "parallel.tensor", "2 num_key_value_heads"),
    ],
)
def test_what_makes_no_sense_is_refused(
    made: TrainingConfig, nodes: list[str], key: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        check_strategy(made, MODEL, nodes)
    assert refused.value.param == f"training.{key}"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("model_type", "gpt2", "not gpt2"), ("attention_dropout", 0.1, "attention_dropout")],
)
def test_tensor_parallelism_is_for_models_it_is_right_for(
    field: str, value: Any, said: str
) -> None:
    model = SimpleNamespace(**{**vars(MODEL), field: value})
    with pytest.raises(ConfigError, match=said) as refused:
        check_strategy(settings("tp", tensor=2), model, TWO_NODES)
    assert refused.value.param == "training.strategy"


def test_what_makes_sense_is_not() -> None:
    for made in (
        settings("ddp"), settings("fsdp", reshard=False, offload=True),
        settings("hsdp"), settings("hsdp", shard=2), settings("tp", tensor=2, offload=True),
    ):  # fmt: skip
        check_strategy(made, MODEL, TWO_NODES)


def test_hsdp_keeps_a_copy_on_each_node_unless_told_otherwise() -> None:
    assert shard_size(settings("hsdp"), TWO_NODES) == 2
    assert shard_size(settings("hsdp"), ["a"] * 4) == 4
    assert shard_size(settings("hsdp", shard=1), TWO_NODES) == 1


def test_workers_come_in_units_of_those_that_belong_together() -> None:
    def sizes(**training: Any) -> tuple[int, int]:
        made = TrainingConfig.model_validate(training)
        return made.fewest_workers, made.most_workers

    tensor, shard = {"tensor": 2}, {"shard": 4}
    assert sizes(strategy="tp", parallel=tensor, workers=[3, 7]) == (4, 6)
    assert sizes(strategy="hsdp", parallel=shard, workers=[2, 9]) == (4, 8)
    assert sizes(strategy="fsdp", workers=[3, 7]) == (3, 7)
    for strategy, parallel, workers in (
        ("tp", tensor, 3), ("tp", tensor, [3, 3]), ("hsdp", shard, [5, 7]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="has no multiple of parallel"):
            sizes(strategy=strategy, parallel=parallel, workers=workers)
    with pytest.raises(ValueError, match="not \\[fewest, most\\]"):
        sizes(workers=[3, 2])


def test_auto_never_reaches_the_workers() -> None:
    with pytest.raises(ConfigError, match="trials choose one before"):
        check_strategy(settings("auto"), MODEL, TWO_NODES)
