"""Whether what is about to be trained could be served: the engine's own preflight, beforehand.

What is published passes it again with its weights, when it is judged; nothing is found out by the
first query.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

from hybrid.config import AdapterConfig
from hybrid.engine.preflight import EMBEDDING, LoraSpec
from hybrid.engine.shape import Shape
from hybrid.errors import AdapterRefused, Unsupported
from hybrid.training.lora import peft_config


def check_servable(
    name: str, spec: AdapterConfig, base: Path | None, backend: Literal["engine", "vllm"] = "engine"
) -> None:
    """Let the engine read the configuration that training would write.

    Args:
        base: the base's folder; None leaves out what depends on it.
        backend: `serving.backend`.

    Raises:
        AdapterRefused: it asks for what is not served on this base; says which setting.
    """

    def refuse(why: str) -> AdapterRefused:
        return AdapterRefused(f"adapters.{name}: {why}; nothing was trained")

    with tempfile.TemporaryDirectory() as folder:
        peft_config(spec).save_pretrained(folder)
        read = LoraSpec.read(Path(folder) / "adapter_config.json", refuse, fan_in_fan_out=True)
    if backend == "vllm":
        if spec.kind == "embed":
            raise refuse("kind embed is not served by serving.backend vllm")
        if read.saved:
            raise refuse("lora.modules_to_save is not served by serving.backend vllm")
    if base is None:
        return
    try:
        Shape.read(base)
    except Unsupported as e:
        # transformers' own forward runs it, which adapts linear layers only.
        if read.saved or read.has_lora(EMBEDDING):
            raise refuse(
                f"adapters of the embedding and modules_to_save are not served on this base ({e})"
            ) from None
