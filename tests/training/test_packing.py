"""Packed documents against the same documents alone: the same logits, loss and gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid.config import TrainingConfig
from hybrid.errors import ConfigError
from hybrid.training.isolation import check_isolation
from hybrid.training.packing import IGNORE, Batch, isolate
from hybrid.training.parallel import Precision, World, spread

CPU = torch.device("cpu")
EXACT = Precision(params=torch.float64, compute=torch.float64)


def tiny(family: str = "llama", **fields: Any) -> Any:
    dims = {
        "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "initializer_range": 0.4, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**dims, **fields}))


@pytest.fixture(scope="module")
def model() -> Any:
    return spread(
        tiny(), TrainingConfig(strategy="single"), EXACT, World(rank=0, size=1, device=CPU)
    )


def packed(rows: list[list[int]], seed: int = 0) -> Batch:
    """Rows of documents of the given lengths, all rows equally long."""
    rng = np.random.default_rng(seed)
    stream = rng.integers(1, 60, (len(rows), sum(rows[0]) + 1))
    batch: Batch = {"input_ids": stream[:, :-1].copy(), "labels": stream[:, 1:].copy()}
    return isolate(batch, [np.cumsum(lengths) for lengths in rows])


def run(model: Any, batch: Batch, row: int | None = None) -> torch.Tensor:
    chosen = slice(None) if row is None else slice(row, row + 1)
    return model(
        input_ids=torch.from_numpy(batch["input_ids"][chosen]),
        position_ids=torch.from_numpy(batch["position_ids"][chosen]),
        use_cache=False,
    ).logits


ROWS = [[1, 7, 16], [24], [2, 2, 20], [8, 15, 1]]


def test_a_packed_document_is_as_if_alone(model: Any) -> None:
    """Logits, the loss summed over labels, and the gradient of all parameters."""
    batch = packed(ROWS)
    logits = run(model, batch)
    loss = F.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(batch["labels"]).flatten(), ignore_index=IGNORE,
        reduction="sum",
    )  # fmt: skip
    together = torch.autograd.grad(loss, list(model.parameters()))
    alone = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(ROWS):
        for begin, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            own = torch.from_numpy(batch["input_ids"][row, begin : begin + length])[None]
            expected = model(input_ids=own, use_cache=False).logits[0]
            found = logits[row, begin : begin + length]
            assert (found - expected).abs().max() < 1e-9
            alone = alone + F.cross_entropy(expected[:-1], own[0, 1:], reduction="sum")
    assert float((loss - alone).detach().abs()) < 1e-9
    apart = torch.autograd.grad(alone, list(model.parameters()))
    assert max((a - b).abs().max() for a, b in zip(together, apart, strict=True)) < 1e-9


def test_without_isolation_the_same_documents_do_see_each_other(model: Any) -> None:
    batch = packed(ROWS)
    plain = model(input_ids=torch.from_numpy(batch["input_ids"]), use_cache=False).logits
    assert (plain - run(model, batch))[0, 8:].abs().max() > 0.1


@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=6), data=st.data())
def test_changing_a_neighbour_changes_nothing(
    model: Any, lengths: list[int], data: st.DataObject
) -> None:
    which = data.draw(st.integers(0, len(lengths) - 1))
    batch = packed([lengths], seed=1)
    ends = np.cumsum([0, *lengths])
    mine = slice(int(ends[which]), int(ends[which + 1]))
    changed = batch["input_ids"].copy()
    changed += 7
    changed %= 60
    changed[:, mine] = batch["input_ids"][:, mine]
    with torch.no_grad():
        before = run(model, batch)
        after = run(model, {**batch, "input_ids": changed})
    assert torch.equal(before[:, mine], after[:, mine])


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_families_that_isolate_pass_the_trial(family: str) -> None:
    more = {"sliding_window": 4} if family == "mistral" else {}
    model = tiny(family, **more).train()
    check_isolation(model, 60, CPU)
    assert model.training


@pytest.mark.parametrize("family", ["bloom", "opt"])
def test_families_that_do_not_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=rf"training\.packing.*'{family}'.*use 'concatenate'"):
        check_isolation(tiny(family, word_embed_proj_dim=32), 60, CPU)


def test_a_micro_batch_without_a_boundary_needs_no_mask(model: Any) -> None:
    """One document a row: positions count up, and transformers leaves the mask to the kernel."""
    from transformers.masking_utils import create_causal_mask

    for rows, needed in (([[24], [24]], False), (ROWS, True)):
        mask = create_causal_mask(
            config=model.config,
            inputs_embeds=torch.zeros(len(rows), 24, 32),
            attention_mask=None,
            cache=None,
            position_ids=torch.from_numpy(packed(rows)["position_ids"]),
        )
        assert (mask is not None) == needed
    assert mask.dtype == torch.bool
    assert mask.shape == (len(ROWS), 1, 24, 24)


def test_documents_of_one_token_have_no_label() -> None:
    batch = packed([[1, 1, 1, 5]])
    assert batch["position_ids"].tolist() == [[0, 0, 0, 0, 1, 2, 3, 4]]
    assert (batch["labels"][0] == IGNORE).tolist() == [True] * 3 + [False] * 4 + [True]
