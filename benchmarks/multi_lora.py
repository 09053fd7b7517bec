"""Many adapters in one batch: our engine against PEFT's generate(adapter_names=…), in process.

    python benchmarks/multi_lora.py [--quick] [--json -]

A made Llama in float32, 32 requests spread over the adapters, greedy. Both sides run the same
prompts to the same length, interleaved; the medians are compared. `adapters16_vs_peft` and
`base_vs_transformers` are ratios of tokens a second: above 1, ours is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hybrid.engine.engine import Engine
from hybrid.testing_models import tiny_adapter, tiny_base
from hybrid.wire import Sampling

REQUESTS = 32


def ours(engine: Engine, prompts: list[list[int]], adapters: Sequence[str], new: int) -> int:
    """Tokens generated. The end-of-text token is not expected from random weights."""
    sequences = [
        engine.submit(str(i), p, Sampling(max_tokens=new), adapter=adapter)
        for i, (p, adapter) in enumerate(zip(prompts, cycle(adapters or [None])))
    ]
    while not engine.idle:
        engine.step()
    return sum(len(s.output) for s in sequences)


def peft(model: Any, prompts: list[list[int]], adapters: list[str], new: int) -> int:
    """The same through transformers, with PEFT's mixed batches."""
    how: dict[str, Any] = {}
    if adapters:
        how["adapter_names"] = [adapters[i % len(adapters)] for i in range(len(prompts))]
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            **how,
        )
    return int(out.shape[0] * (out.shape[1] - ids.shape[1]))


def rate(run: Callable[[], int]) -> float:
    """Tokens a second of one run."""
    start = time.perf_counter()
    tokens = run()
    return tokens / (time.perf_counter() - start)


def compare(
    name: str, mine: Callable[[], int], peer: Callable[[], int], rounds: int
) -> dict[str, float]:
    """Medians of interleaved runs, after one of each to warm up."""
    rate(mine), rate(peer)
    pairs = [(rate(mine), rate(peer)) for _ in range(rounds)]
    a, b = (statistics.median(p[i] for p in pairs) for i in (0, 1))
    print(f"{name:24} ours {a:8.0f} tok/s   peer {b:8.0f} tok/s   ratio {a / b:.2f}")
    return {"ours": round(a, 1), "peer": round(b, 1), "ratio": round(a / b, 3)}


def main() -> None:
    """Parse, make the models, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model, under a minute")
    parser.add_argument("--json", metavar="-", help="print one JSON object last")
    arguments = parser.parse_args()
    hidden, layers, new, rounds = (192, 3, 16, 3) if arguments.quick else (512, 8, 64, 3)
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tiny_base(
            root / "base",
            vocab_size=8192,
            hidden_size=hidden,
            intermediate_size=int(hidden * 2.75),
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 128),
            max_position_embeddings=256,
            initializer_range=0.02,
            eos_token_id=8191,
        )
        names = [f"a{i}" for i in range(16)]
        for i, name in enumerate(names):
            tiny_adapter(root / "base", root / name, rank=8, seed=i)
        engine = Engine(root / "base", "b", max_rows=REQUESTS, max_queue=REQUESTS, device="cpu")
        for name in names:
            engine.add_adapter(
                engine.read_adapter(root / name, name=name, digest=name, base_digest="b")
            )
        plain = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32).eval()
        mixed: Any = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32),
            root / names[0],
            adapter_name=names[0],
        )
        for name in names[1:]:
            mixed.load_adapter(root / name, adapter_name=name)
        mixed.eval()
    torch.manual_seed(1)
    prompts = torch.randint(300, 8000, (REQUESTS, 64)).tolist()
    result = {
        "adapters16_vs_peft": compare(
            "16 adapters",
            lambda: ours(engine, prompts, names, new),
            lambda: peft(mixed, prompts, names, new),
            rounds,
        ),
        "base_vs_transformers": compare(
            "base",
            lambda: ours(engine, prompts, [], new),
            lambda: peft(plain, prompts, [], new),
            rounds,
        ),
    }
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
