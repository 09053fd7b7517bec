"""Training one LoRA adapter: PEFT on a frozen base, whole on one device or sharded over many."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hybrid.config import AdapterConfig
from hybrid.errors import ConfigError
from hybrid.training.adapter_batches import Batches, split
from hybrid.training.adapter_loop import Report, train_loop
from hybrid.training.adapter_loss import AnswerLoss, PairLoss
from hybrid.training.parallel import World
from hybrid.training.quantize import quantize
from hybrid.training.rows import AdapterData


class Base:
    """A base held in memory to train many adapters on, one after another.

    Args:
        folder: Hugging Face layout.
        name: written into adapters as what they were trained on, e.g. `legal-base@<digest>`.
        precision: see `lora.base_precision`.
        sharded: it is to be sharded over ranks when it is first trained on, and then serves for
            that one adapter; until then it is in the host's memory.
    """

    def __init__(
        self, folder: Path, name: str, precision: str = "auto", *, sharded: bool = False
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.name, self.precision, self.sharded = name, precision, sharded
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.world = World.current() if sharded else World(rank=0, size=1, device=_device())
        self.device = self.world.device
        self.dtype = _dtype(precision, self.device)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=self.dtype
        )
        if precision in ("int8", "nf4"):
            quantize(self.model, precision, self.dtype)  # type: ignore[arg-type]
        if not sharded:
            self.model.to(self.device)
        self.model.requires_grad_(False)
        self.context = int(self.model.config.max_position_embeddings)
        self.window: int | None = getattr(self.model.config, "sliding_window", None)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(precision: str, device: torch.device) -> torch.dtype:
    """What the base computes in."""
    if precision in ("float32", "bfloat16"):
        return torch.float32 if precision == "float32" else torch.bfloat16
    gpu = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if gpu else torch.float32


def peft_config(spec: AdapterConfig) -> Any:
    """PEFT's configuration of an adapter."""
    lora = spec.lora
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        modules_to_save=list(lora.modules_to_save) or None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
    )


def train_adapter(
    base: Base, spec: AdapterConfig, data: AdapterData, out: Path, *, seed: int, report: Report
) -> dict[str, Any]:
    """Train an adapter and save it in PEFT's format, with hybrid.json beside it.

    A run that was killed goes on from the small checkpoint in `out`'s parent folder. With a
    sharded base all ranks call it together, and rank 0 saves.

    Args:
        out: folder to write.
        seed: of initialisation, dropout, augmentation and order.
        report: called about every ten steps, see `adapter_loop.train_loop`.

    Returns:
        train_loss (nats a token, or a pair, over the last tenth of the steps), steps, epochs; with
        early stopping validation_loss and best_step too, and resumed_from where it went on.

    Raises:
        ConfigError: a target matches nothing in the base, or a row does not fit it.
        DataError: too few rows for early stopping. TrainingError: the loss is not finite.
    """
    lora = spec.lora
    rows, aside = data.train, None
    if lora.early_stopping:
        rows, aside = split(data.train, lora.early_stopping.share, spec.train)
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            # An end of a tied base that is adapted alone is served just as PEFT computes it.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            peft = get_peft_model(base.model, peft_config(spec))
    except ValueError as e:
        raise ConfigError(f"lora.targets: {e}") from None
    try:
        trained_by_name = _trainable(peft, base)
        loss = _loss(peft.base_model.model, base, spec, list(trained_by_name.values()))
        batches = Batches(base, spec, rows, data.augment, seed)
        if lora.packing:
            _check_window(base)
        out.parent.mkdir(parents=True, exist_ok=True)
        trained = train_loop(
            loss,
            trained_by_name,
            lora,
            batches,
            Batches(base, spec, aside, None, seed) if aside else None,
            out.parent,
            seed=seed,
            world=base.world,
            report=report,
        )
        if base.world.rank == 0:
            _save(peft, base, spec, data, out)
        base.world.gather(None)
    finally:
        if not base.sharded:
            peft.unload()  # the base is as it was, for the next adapter
    return {
        "train_loss": trained.train_loss,
        "steps": trained.steps,
        "epochs": round(trained.steps / batches.per_epoch, 2),
        **(
            {"validation_loss": trained.best.loss, "best_step": trained.best.step}
            if trained.best
            else {}
        ),
        **({"resumed_from": trained.resumed_from} if trained.resumed_from else {}),
    }


def _trainable(peft: Any, base: Base) -> dict[str, nn.Parameter]:
    """The adapter's parameters by name, float32 whatever the base is, on this rank's device."""
    found = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    for p in found.values():
        p.data = p.data.to(base.device, torch.float32)
    if base.dtype != torch.float32 and _saves_embedding(found):
        embedding = peft.base_model.model.get_input_embeddings()
        embedding.register_forward_hook(lambda module, args, output: output.to(base.dtype))
    return found


def _saves_embedding(found: dict[str, nn.Parameter]) -> bool:
    """Whether an embedding is trained whole: its float32 rows go into a base of another dtype."""
    return any("embed" in name and "modules_to_save" in name for name in found)


def _loss(model: Any, base: Base, spec: AdapterConfig, parameters: list[nn.Parameter]) -> nn.Module:
    """What is minimised; with a sharded base, its frozen part spread over the ranks.

    The adapter's own parameters stay whole on every rank: they are small, and their gradients are
    summed in one message.
    """
    loss = PairLoss(model, spec.temperature) if spec.kind == "embed" else AnswerLoss(model)
    if base.sharded and base.world.size > 1:
        mesh = init_device_mesh(base.device.type, (base.world.size,))
        own = set(parameters)
        for block in model.get_decoder().layers:
            fully_shard(block, mesh=mesh, ignored_params=own)
        fully_shard(loss, mesh=mesh, ignored_params=own)
    elif base.sharded:
        loss.to(base.device)
    return loss


def _check_window(base: Base) -> None:
    # The mask of packed rows replaces the model's own, whose windows it does not know.
    if base.window is not None and base.window < base.context:
        raise ConfigError(
            f"lora.packing: this base attends to windows of {base.window} tokens; rows of it cannot"
            " be packed"
        )


def _save(peft: Any, base: Base, spec: AdapterConfig, data: AdapterData, out: Path) -> None:
    peft.peft_config["default"].base_model_name_or_path = base.name
    peft.save_pretrained(out, save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)  # PEFT's template of a model card
    about = {"template": spec.template, "kind": spec.kind, "choices": list(data.choices)}
    (out / "hybrid.json").write_text(json.dumps(about, ensure_ascii=False, indent=1))
