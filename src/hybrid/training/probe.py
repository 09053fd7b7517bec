"""What one machine says of itself before a run: software, memory, and what it sees of the storage.

It runs on every node at once, in a process of its own, and imports neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hybrid
from hybrid.errors import HybridError
from hybrid.training.main_memory import free_memory
from hybrid.training.rules import CPU_COMPILERS, GPU_COMPILERS
from hybrid.training.shards import ShardSet
from hybrid.training.storage import Storage

PACKAGES = ("torch", "ray", "transformers", "tokenizers", "safetensors", "numpy", "deepspeed")
SEEN_S = 5.0
"""A shared file system may show a new file to other machines this late."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: its name, and bytes in all and free."""

    name: str
    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a node is asked. Pickles.

    Attributes:
        storages: paths and fsspec URLs of folders that every node is to share.
        token: a word that the driver has written into each of them, under its own name.
        shards: folders of token shards.
    """

    storages: tuple[str, ...]
    token: str
    shards: tuple[str, ...] = ()

    def file(self, who: str) -> str:
        """The name of a participant's file within a storage."""
        return f".preflight-{self.token}-{who}"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a node answers.

    Attributes:
        node: Ray's id of it.
        host: its own name.
        versions: of Python, the packages, this package's very code, CUDA and the driver.
        gpus: none where it has none.
        memory: bytes of its main memory that are free.
        storage: by storage what is wrong with it as seen from here.
        free: by local storage the bytes free there.
        shards: what is wrong with the shards as seen from here.
        compilers: of C and C++.
    """

    node: str
    host: str
    versions: dict[str, str]
    gpus: tuple[Gpu, ...]
    memory: int
    storage: dict[str, str]
    free: dict[str, int]
    shards: str | None
    compilers: tuple[str, ...] = ()


def probe(node: str, asked: Asked) -> Probe:
    """Look at this machine, and leave a file named after `node` in each storage."""
    storage, free = {}, {}
    for url in asked.storages:
        at = Storage(url)
        if (fault := _try_storage(at, asked, node)) is not None:
            storage[url] = fault
        elif at.local is not None:
            free[url] = shutil.disk_usage(at.local).free
    return Probe(
        node=node,
        host=socket.gethostname(),
        versions=versions(),
        gpus=gpus(),
        memory=free_memory(),
        storage=storage,
        free=free,
        shards=try_shards(asked.shards),
        compilers=tuple(c for c in (*CPU_COMPILERS, *GPU_COMPILERS) if shutil.which(c)),
    )


def versions() -> dict[str, str]:
    """What must be the same everywhere, read without importing any of it."""
    found = {"python": platform.python_version(), "hybrid": f"{hybrid.__version__} ({code()})"}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
        cuda = re.search(r"^cuda\b[^=]*= *'([^']+)'", text, re.MULTILINE)
        found["torch's CUDA"] = cuda[1] if cuda else "none"
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        if driver := re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text):
            found["NVIDIA driver"] = driver[1]
    return found


def code() -> str:
    """Twelve digits of a digest of this package's source: a version alone may lie."""
    root = Path(hybrid.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs of this machine, whichever of them this process may use."""
    if shutil.which("nvidia-smi") is None:
        return ()
    try:
        said = subprocess.run(
            [
                "nvidia-smi",
                "--query-gpu=name,memory.total,memory.free",
                "--format=csv,noheader,nounits",
            ],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):  # a driver that does not answer has no GPU for us
        return ()
    return parse_gpus(said)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The lines `NAME, MiB in all, MiB free` of nvidia-smi; other lines are passed over."""
    found = re.findall(r"^(.+), (\d+), (\d+)\s*$", text, re.MULTILINE)
    return tuple(
        Gpu(name=name, total=int(total) << 20, free=int(free) << 20) for name, total, free in found
    )


def _try_storage(at: Storage, asked: Asked, node: str) -> str | None:
    try:
        if not wait_for(at, asked.file("driver"), asked.token):
            return "does not see what the driver has written there"
        at.put(asked.file(node), asked.token.encode())
    except OSError as e:
        return f"cannot be written: {e}"
    return None


def wait_for(at: Storage, path: str, token: str, timeout_s: float = SEEN_S) -> bool:
    """Whether a file with `token` in it is seen within a while."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):
            if at.read(path) == token.encode():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def try_shards(folders: Sequence[str]) -> str | None:
    """What is wrong with the first of these corpora that cannot be read here; None if nothing."""
    for folder in folders:
        try:
            ShardSet(Path(folder))
        except (HybridError, OSError) as e:
            return str(e)
    return None


def clear(storages: Sequence[str], asked: Asked, who: Sequence[str]) -> None:
    """Remove the files that participants left."""
    for url in storages:
        at = Storage(url)
        for name in who:
            with contextlib.suppress(OSError):
                at.remove(asked.file(name))
