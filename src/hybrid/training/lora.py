"""Training one LoRA adapter: PEFT on a base in memory, loss on the answer only."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from hybrid.config import AdapterConfig
from hybrid.errors import ConfigError, TrainingError
from hybrid.training.rows import AdapterData

Report = Callable[[dict[str, Any]], None]
_BUCKET = 16
"""Batches whose rows are sorted by length together, so that little is padded."""
_WARMUP = 0.05


class Base:
    """A base held in memory to train many adapters on, one after another.

    Args:
        folder: Hugging Face layout.
        name: written into adapters as what they were trained on, e.g. `legal-base@<digest>`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.name = name
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32
        ).to(self.device)
        self.context = int(self.model.config.max_position_embeddings)


def train_adapter(
    base: Base, spec: AdapterConfig, data: AdapterData, out: Path, *, seed: int, report: Report
) -> dict[str, Any]:
    """Train an adapter and save it in PEFT's format, with hybrid.json beside it.

    Args:
        out: folder to write.
        seed: of initialisation, dropout, augmentation and order.
        report: called with `{"step", "steps", "loss"}` about once a second's worth of steps.

    Returns:
        train_loss (nats a token of the last tenth of the steps), steps, epochs.

    Raises:
        ConfigError: a target matches nothing in the base. TrainingError: the loss is not finite.
    """
    lora = spec.lora
    torch.manual_seed(seed)
    try:
        peft = get_peft_model(
            base.model,
            LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=list(lora.targets),
                task_type="CAUSAL_LM",
            ),
        )
    except ValueError as e:
        raise ConfigError(f"lora.targets: {e}") from None
    try:
        return _train(peft, base, spec, data, out, seed, report)
    finally:
        peft.unload()  # the base is as it was, for the next adapter


def _train(
    peft: Any,
    base: Base,
    spec: AdapterConfig,
    data: AdapterData,
    out: Path,
    seed: int,
    report: Report,
) -> dict[str, Any]:
    lora = spec.lora
    parameters = [p for p in peft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=lora.lr, weight_decay=lora.weight_decay, betas=(0.9, 0.99)
    )
    batches = make_batches(base, spec, data, random.Random(seed))
    peft.train()
    losses: list[float] = []
    for step in range(lora.steps):
        for group in optimizer.param_groups:
            group["lr"] = lora.lr * _schedule(step, lora.steps)
        loss = answer_loss(peft.base_model.model, *next(batches))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise TrainingError(f"step {step + 1}: loss is {losses[-1]}; lower lora.lr ({lora.lr})")
        if (step + 1) % 10 == 0 or step + 1 == lora.steps:
            recent = losses[-10:]
            report({"step": step + 1, "steps": lora.steps, "loss": sum(recent) / len(recent)})
    _save(peft, base, spec, data, out)
    tail = losses[-max(1, lora.steps // 10) :]
    return {
        "train_loss": sum(tail) / len(tail),
        "steps": lora.steps,
        "epochs": round(lora.steps * lora.batch / len(data.train), 2),
    }


def _save(peft: PeftModel, base: Base, spec: AdapterConfig, data: AdapterData, out: Path) -> None:
    peft.peft_config["default"].base_model_name_or_path = base.name
    peft.save_pretrained(out, save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)  # PEFT's template of a model card
    about = {"template": spec.template, "kind": spec.kind, "choices": list(data.choices)}
    (out / "hybrid.json").write_text(json.dumps(about, ensure_ascii=False, indent=1))


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over 5 % of the steps, then a cosine to zero."""
    warm = max(1, int(_WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def make_batches(
    base: Base, spec: AdapterConfig, data: AdapterData, rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches: input_ids and labels, int64 [batch, tokens], padded on the right.

    Labels are -100 but on the answer and the end-of-text token after it. Each epoch augments the
    inputs anew and draws a new order.

    Raises:
        ConfigError: a row does not fit the base's context.
    """
    end = base.tokenizer.eos_token_id

    def encode(text: str, **how: Any) -> list[int]:
        ids: list[int] = base.tokenizer(text, **how)["input_ids"]
        return ids

    while True:
        rows = []
        for row in data.train:
            text = data.augment(row.input, rng) if data.augment else row.input
            prompt = encode(spec.template.replace("{input}", text))
            answer = [*encode(row.outputs[0], add_special_tokens=False), end]
            if len(prompt) + len(answer) > base.context:
                raise ConfigError(
                    f"a row has {len(prompt) + len(answer)} tokens, the base's context is"
                    f" {base.context}: {row.input[:60]!r}"
                )
            rows.append((prompt, answer))
        rng.shuffle(rows)
        batches = []
        size = spec.lora.batch
        for start in range(0, len(rows), size * _BUCKET):
            bucket = sorted(rows[start : start + size * _BUCKET], key=lambda r: len(r[0] + r[1]))
            batches += [bucket[i : i + size] for i in range(0, len(bucket), size)]
        rng.shuffle(batches)
        for batch in batches:
            yield _pad(batch, end, base.device)


def _pad(
    batch: list[tuple[list[int], list[int]]], end: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    width = max(len(p) + len(a) for p, a in batch)
    ids = torch.full((len(batch), width), end)
    labels = torch.full((len(batch), width), -100)
    for i, (prompt, answer) in enumerate(batch):
        ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        # The token at t predicts the one at t + 1: the answer is predicted from one before it.
        labels[i, len(prompt) - 1 : len(prompt) + len(answer) - 1] = torch.tensor(answer)
    return ids.to(device), labels.to(device)


def answer_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy (nats) over labelled positions; logits are made only there."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = labels >= 0
    return F.cross_entropy(model.lm_head(hidden[wanted]), labels[wanted])
