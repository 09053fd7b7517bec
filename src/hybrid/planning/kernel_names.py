"""What a name in a profiler's trace stands for: a collective, a matmul, a copy, a wait for data.

Names differ with versions: NCCL's kernels were `ncclKernel_AllReduce_RING_LL_Sum_float` up to 2.18
and are `ncclDevKernel_AllReduce_Sum_f32_RING_LL` since, `ncclSymkDevKernel…` over symmetric memory;
gloo has no kernels, its work is ranges `gloo:all_reduce` on threads of its own.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

COLLECTIVES = (
    ("all_reduce", r"all_?reduce|cross_device_reduce"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_gather", r"all_?gather"),
    ("all_to_all", r"all_?to_?all"),
    ("broadcast", r"broadcast"),
    ("send_recv", r"send_?recv|\bsend\b|\brecv\b|p2p"),
    ("barrier", r"barrier"),
    ("reduce", r"reduce"),
    ("gather", r"gather"),
    ("scatter", r"scatter"),
)
_KINDS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in COLLECTIVES]
_KERNEL = re.compile(
    r"^(?:void\s+)?(?:(?:\w+|\(anonymous namespace\)|<unnamed>)?::)*(?:"
    r"(?:nccl|rccl|msccl|mscclpp|nvshmem)\w*"  # any prefix and version
    r"|(?:one|two)_shot_all_reduce\w*|multimem_\w*|cross_device_reduce\w*"
    r")",
    re.IGNORECASE,
)
_HOST_RANGE = re.compile(r"^(?:gloo|mpi|ucc):(\w+)", re.IGNORECASE)
_MATMUL_KERNEL = re.compile(
    r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|mma_|_mm_|\bmm\b|conv\w*(?:fprop|dgrad|wgrad)|"
    r"convolve|winograd|flash|fmha|attention|sdpa",
    re.IGNORECASE,
)
_MATMUL_OP = re.compile(
    r"^(?:aten::(?:mm|bmm|addmm|addmm_|baddbmm|addmv|mv|_grouped_mm|_scaled_mm|mkldnn_convolution|"
    r"convolution_backward|_?convolution|_scaled_dot_product_\w+|_flash_attention_\w+|"
    r"_efficient_attention_\w+)|mkldnn::\w*linear\w*|mkl::\w*linear\w*)$"
)
_COPY_OP = re.compile(r"^(?:aten::copy_|fsdp::\w*copy\w*|fsdp::chunk_cat)$")
_COLLECTIVE_OP = re.compile(r"^(?:c10d|_c10d_functional|symm_mem|_dtensor)::|^record_param_comms$")
_WRAPPER = re.compile(r"^(?:autograd::|torch::autograd::|PythonSubclass|PythonDispatch)")
_INPUT = re.compile(r"^(?:data$|data[ _:]?load|enumerate\(DataLoader\)|dataloader)", re.IGNORECASE)
_SYNC = re.compile(
    r"^(?:cuda|hip)\w*Synchronize|^(?:cuda|hip)EventQuery|^aten::_local_scalar_dense"
)


@lru_cache(maxsize=65536)
def device_collective(name: str) -> str | None:
    """The collective that a GPU kernel of this name does, `other` of an unknown one, else None."""
    return _kind(name) if _KERNEL.match(name) else None


@lru_cache(maxsize=65536)
def host_collective(name: str) -> str | None:
    """The collective that a range on the host's own threads does (gloo, MPI, UCC), else None."""
    found = _HOST_RANGE.match(name)
    return _kind(found[1]) if found else None


def told_collective(args: dict[str, Any]) -> str | None:
    """What PyTorch itself writes beside a kernel that a process group launched (since 2.3)."""
    told = args.get("Collective name")
    return _kind(str(told)) if told else None


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


@lru_cache(maxsize=65536)
def is_matmul(name: str, device: bool) -> bool:
    """Whether a kernel (`device`) or an op is a product of matrices, a convolution, attention."""
    return bool((_MATMUL_KERNEL if device else _MATMUL_OP).search(name))


@lru_cache(maxsize=65536)
def is_copy(name: str) -> bool:
    """Whether an op on the CPU does nothing but move memory."""
    return bool(_COPY_OP.match(name))


@lru_cache(maxsize=65536)
def is_glue(name: str) -> bool:
    """Whether an op only launches or wraps: collectives, autograd's nodes, subclasses' dispatch."""
    return bool(_COLLECTIVE_OP.match(name) or _WRAPPER.match(name) or "::" not in name)


def is_input(name: str) -> bool:
    """Whether a range is the wait for a batch."""
    return bool(_INPUT.match(name))


def is_wait(name: str) -> bool:
    """Whether the host waits for the device in a call of this name."""
    return bool(_SYNC.match(name))
