"""The engine's own C kernels: compiled for this processor when an engine starts, kept in a cache.

Without a C compiler, or with `HYBRID_KERNELS=off`, or on a GPU, torch's operations do the same
within float tolerance: slower, since each is a pass of its own over what another just wrote.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

_FLAGS = (
    "-O3", "-march=native", "-std=c11", "-fPIC", "-fopenmp", "-ffp-contract=fast",
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
    "-mprefer-vector-width=512",
)  # fmt: skip
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "rms_norm": (_P, _P, _P, _I, _I, _F),
    "silu_mul": (_P, _P, _I, _I),
    "argmax": (_P, _P, _I, _I),
    "decode_attention": (_P, _P, _P, _P, _I, _P, _P, _I, _I, _I, _I, _I, _F, _I, _P, _P),
    "prompt_attention": (
        _P, _P, _P, _P, _P, _I, _P, _P, _I, _I, _I, _I, _I, _F, _I, _P, _P,
    ),
    "lora": (_P, _P, _P, _I, _P, _I, _I, _I, _I, _I, _P, _P, _P),
}  # fmt: skip


def usable(x: Tensor) -> bool:
    """Whether the kernels can work on such a tensor."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and kernels() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation (Zhang and Sennrich 2019) of x [T, dim]."""
    library = kernels()
    if library is None or not usable(x):
        return F.rms_norm(x, weight.shape, weight, eps)
    y = torch.empty_like(x)
    library.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), *x.shape, eps)
    return y


def silu_mul(y: Tensor) -> Tensor:
    """silu(gate) * up [T, dim] of y [T, 2 * dim], gate and up side by side."""
    library, (rows, both) = kernels(), y.shape
    if library is None or not usable(y):
        return F.silu(y[:, : both // 2]).mul_(y[:, both // 2 :])
    z = y.new_empty(rows, both // 2)
    library.silu_mul(y.data_ptr(), z.data_ptr(), rows, both // 2)
    return z


def argmax(x: Tensor) -> Tensor:
    """int64 [T]: the first of the largest of each row of x [T, dim]."""
    library = kernels()
    if library is None or not usable(x):
        return x.argmax(-1)
    best = torch.empty(len(x), dtype=torch.int64)
    x = x.contiguous()
    library.argmax(x.data_ptr(), best.data_ptr(), *x.shape)
    return best


def alone() -> None:
    """Let torch use no other threads for what the calling thread does."""
    path = _openmp()
    if path is not None:
        torch.get_num_threads()  # sets this thread's number, the first time that it is asked
        ctypes.CDLL(str(path)).omp_set_num_threads(1)


@lru_cache(maxsize=1)
def kernels() -> ctypes.CDLL | None:
    """The compiled kernels, see kernels.c; None where they cannot be had, which is logged."""
    if os.environ.get("HYBRID_KERNELS", "on") == "off":
        return None
    compiler = shutil.which(os.environ.get("CC", "cc"))
    threads = _openmp()
    if compiler is None or threads is None or platform.machine() != "x86_64":
        log.info("no C compiler, or none for this machine: the engine uses torch's operations")
        return None
    source = files("hybrid.engine").joinpath("kernels.c").read_bytes()
    try:
        library = ctypes.CDLL(str(_built(compiler, threads, source)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as e:
        said = getattr(e, "stderr", None)
        log.warning(
            "the engine's kernels do not compile (%s); torch's operations are used", said or e
        )
        return None
    for name, types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


def _built(compiler: str, threads: Path, source: bytes) -> Path:
    """The shared library, compiled unless it is in the cache."""
    processor = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if "flags" in line), ""
    )
    what = [source, *_FLAGS, compiler, threads, processor, platform.python_version()]
    key = hashlib.sha256("\0".join(map(str, what)).encode()).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid"
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    built = home / f"kernels-{key}.so"
    if built.exists():
        return built
    with tempfile.TemporaryDirectory(dir=home) as folder:
        code, unit, made = (Path(folder) / f"kernels.{ext}" for ext in ("c", "o", "so"))
        code.write_bytes(source)
        # Linked with the OpenMP that torch has loaded: two pools of threads would fight for cores.
        for command in (
            [compiler, *_FLAGS, "-c", str(code), "-o", str(unit)],
            [compiler, "-shared", str(unit), str(threads), "-lm", "-o", str(made)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        os.replace(made, built)  # whole, or not there
    return built


def _openmp() -> Path | None:
    """The OpenMP library in this process, if it is GNU's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "libgomp" in path:
            return Path(path)
    return None
