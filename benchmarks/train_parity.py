"""What our training loop costs beside a loop written by hand, and beside transformers' Trainer.

    python benchmarks/train_parity.py [--quick] [--json -]

The same Llama (10 M parameters, float32), 4,096 tokens a step, two processes of one thread each:

- ours: `jobs/train.py`, under Ray Train, with everything that it does by default
- torchrun: FSDP2 as its tutorial has it (a shard a layer, reshard after forward, AdamW, clipping)
- Trainer: transformers', under torchrun, which on processors is DDP; so is ours beside it

Steady state: the median step, the first three and the last left out, of each run; runs take turns,
and the median of their medians counts.

- `vs_torchrun`, `vs_trainer`: tokens/s
- `peak_fraction`: FLOP/s that training needs, recomputation not counted, over what both processes
  reach at once in matrix products
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODEL = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 1024,
    "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
SEQUENCE, MICRO_BATCH, MICRO_BATCHES, WORKERS = 128, 8, 4, 2
TOKENS = SEQUENCE * MICRO_BATCH * MICRO_BATCHES
DROPPED = 3
"""Of the first steps."""

TORCHRUN = """
import json, sys, time, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
shape, sequence, batch, micro_batches, steps, out = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**shape))
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
mine = micro_batches // dist.get_world_size()
times = [time.time()]
for step in range(steps):
    for micro in range(mine):
        ids = torch.randint(0, shape["vocab_size"], (batch, sequence))
        model.set_requires_gradient_sync(micro + 1 == mine)
        (model(input_ids=ids, labels=ids).loss / mine).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.time())
if dist.get_rank() == 0:
    open(out, "w").write(json.dumps(times))
dist.destroy_process_group()
"""

TRAINER = """
import json, sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
shape, sequence, batch, micro_batches, steps, out = json.loads(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)
times = []
class Clock(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        times.append(time.time())
rows = torch.randint(0, shape["vocab_size"], (steps * batch * micro_batches, sequence))
arguments = TrainingArguments(
    output_dir=out + ".d", max_steps=steps, per_device_train_batch_size=batch,
    gradient_accumulation_steps=micro_batches // 2, use_cpu=True, ddp_backend="gloo",
    optim="adamw_torch_fused", max_grad_norm=1.0, logging_strategy="no", save_strategy="no",
    report_to="none", disable_tqdm=True, ddp_find_unused_parameters=False,
)
trainer = Trainer(
    model=LlamaForCausalLM(LlamaConfig(**shape)), args=arguments, callbacks=[Clock()],
    train_dataset=[{"input_ids": r, "labels": r} for r in rows],
)
trainer.train()
if arguments.process_index == 0:
    open(out, "w").write(json.dumps(times))
"""

PEAK = """
import json, sys, time, torch
torch.set_num_threads(1)
a = torch.randn(1024, 1024)
out = torch.empty_like(a)
sys.stdin.readline()
best = float("inf")
for _ in range(25):
    start = time.perf_counter()
    torch.mm(a, a, out=out)
    best = min(best, time.perf_counter() - start)
print(2 * 1024**3 / best)
"""


def say(line: str) -> None:
    """To stderr: stdout is the JSON's."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def environment() -> dict[str, str]:
    """Of every process that is measured."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return {**ours, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def ours(folder: Path, steps: int, strategy: str) -> float:
    """Tokens/s of `jobs/train.py`."""
    (folder / "corpus.txt").write_text("".join(f"{i * i} and {i * 7919}. " for i in range(60000)))
    shape = {
        "name": "base", "hidden_size": MODEL["hidden_size"],
        "intermediate_size": MODEL["intermediate_size"], "layers": MODEL["num_hidden_layers"],
        "heads": MODEL["num_attention_heads"], "kv_heads": MODEL["num_key_value_heads"],
        "context": SEQUENCE,
    }  # fmt: skip
    project = {
        "run": {"name": "parity", "dir": str(folder / "run")},
        "model": shape,
        "data": {
            "train": [str(folder / "corpus.txt")],
            "tokenizer": {"vocab_size": MODEL["vocab_size"]},
        },
        "training": {
            "steps": steps, "sequence_length": SEQUENCE, "micro_batch": MICRO_BATCH,
            "micro_batches": MICRO_BATCHES, "strategy": strategy, "workers": WORKERS,
            "eval_every": 10**6, "checkpoint": {"every": 10**6},
        },
        "registry": {"root": str(folder / "registry"), "cache": str(folder / "cache")},
    }  # fmt: skip
    file = folder / "hybrid.yaml"
    file.write_text(json.dumps(project))  # JSON is YAML
    run([sys.executable, str(ROOT / "jobs/train.py"), "-c", str(file), "--json"])
    [progress] = folder.glob("run/runs/*/progress.jsonl")
    records = [json.loads(line) for line in progress.read_text().splitlines()]
    return steady([r["time"] for r in records if r["event"] == "step"])


def torchrun(folder: Path, steps: int, code: str) -> float:
    """Tokens/s of a script under torchrun."""
    script, out = folder / "peer.py", folder / "times.json"
    script.write_text(code)
    what = [MODEL, SEQUENCE, MICRO_BATCH, MICRO_BATCHES, steps, str(out)]
    run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={WORKERS}", str(script), json.dumps(what),
        ]
    )  # fmt: skip
    return steady(json.loads(out.read_text()))


def run(command: Sequence[str]) -> None:
    """To its end; what it said if that is no good one."""
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise SystemExit(f"{command[1:3]} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def steady(times: Sequence[float]) -> float:
    """Tokens/s of the median step, from the times at which steps ended."""
    seconds = [b - a for a, b in itertools.pairwise(times)][DROPPED - 1 : -1]
    return TOKENS / statistics.median(seconds)


def peak() -> float:
    """FLOP/s of all processes together, at the same time."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PEAK],
            env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(WORKERS)
    ]  # fmt: skip
    time.sleep(5)  # until both are ready; one that is not yet begins with the other's last products
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in processes)


def flops_per_token() -> float:
    """6 a parameter in a matrix product, and attention (Chowdhery et al. 2022, appendix B)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    parameters = sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**MODEL)).parameters())
    attention = 12 * MODEL["num_hidden_layers"] * MODEL["hidden_size"] * SEQUENCE
    return float(6 * parameters + attention)


def claims(quick: bool) -> dict[str, dict[str, float]]:
    """Run them in turn."""
    steps = 8 if quick else 20
    contenders: dict[str, Callable[[Path], float]] = {
        "ours, fsdp": lambda folder: ours(folder, steps, "fsdp"),
        "torchrun": lambda folder: torchrun(folder, steps, TORCHRUN),
    }
    if not quick:  # another run of ours would be more than a minute
        contenders["ours, ddp"] = lambda folder: ours(folder, steps, "ddp")
        contenders["Trainer"] = lambda folder: torchrun(folder, steps, TRAINER)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    peaks = []
    for _ in range(1 if quick else 3):
        peaks.append(peak())
        for name, contender in contenders.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(contender(Path(folder)))
            say(f"  {name:12} {found[name][-1]:8.0f} tok/s")
    rates = {name: statistics.median(values) for name, values in found.items()}
    result = {"vs_torchrun": (rates["ours, fsdp"], rates["torchrun"])}
    if not quick:
        result["vs_trainer"] = (rates["ours, ddp"], rates["Trainer"])
    result["peak_fraction"] = (rates["ours, fsdp"] * flops_per_token(), statistics.median(peaks))
    return {
        name: {"ours": round(a, 1), "peer": round(b, 1), "ratio": round(a / b, 3)}
        for name, (a, b) in result.items()
    }


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round, without the Trainer")
    parser.add_argument("--json", metavar="FILE", help="write the claims; - is stdout")
    arguments = parser.parse_args()
    found: dict[str, Any] = claims(arguments.quick)
    for name, claim in found.items():
        say(f"{name}: {claim['ours']:,} against {claim['peer']:,}: {claim['ratio']}")
    if arguments.json == "-":
        sys.stdout.write(json.dumps(found) + "\n")
    elif arguments.json:
        Path(arguments.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
