"""Traces made by hand, whose every microsecond is known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.errors import DataError
from hybrid.planning import kernel_names
from hybrid.planning.trace import RankTrace, analyse, read_trace
from hybrid.planning.verdict import judge

HERE = Path("made.json")


def event(
    cat: str, name: str, start: float, end: float, tid: int = 1, **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": 1,
            "tid": tid, "args": args}  # fmt: skip


def made(events: list[dict[str, Any]], *, rank: int = 0, size: int = 2) -> RankTrace:
    about = {"rank": rank, "world_size": size, "backend": "nccl"}
    return analyse({"traceEvents": events, "distributedInfo": about}, HERE)


STEP = event("user_annotation", "ProfilerStep#3", 0, 1000)
ON_A_GPU = [
    STEP,
    event("kernel", "ampere_sgemm_128x64_tn", 0, 300, 7),
    event("kernel", "void at::native::vectorized_elementwise_kernel<4>", 300, 400, 7),
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", 350, 600, 20),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 590, 700, 21),
    event("gpu_user_annotation", "nccl:all_reduce", 350, 600, 20),  # the kernel told once more
    event("user_annotation", "nccl:all_reduce", 340, 350),  # its launch
    event("cpu_op", "aten::mm", 0, 20),
    event("user_annotation", "data", 700, 850),
    event("cuda_runtime", "cudaDeviceSynchronize", 900, 1000),
]


def test_every_microsecond_of_a_gpus_step_is_where_it_belongs() -> None:
    found = made(ON_A_GPU)
    [step] = found.steps
    in_us = {k: round(v * 1e6, 6) for k, v in vars(step).items() if k != "step"}
    assert in_us == {
        "seconds": 1000,
        "compute": 400,
        "matmul": 300,
        "exposed": 200,  # 400..600
        "overlapped": 50,  # 350..400
        "copies": 100,  # 600..700
        "host_wait": 150,  # data
        "idle": 150,  # 850..900 nothing at all, 900..1000 the host waits for the device
        "input_wait": 150,
    }
    assert step.step == 3
    assert step.overlap == pytest.approx(50 / 250)
    assert found.collectives == {"all_reduce": pytest.approx(250e-6)}
    assert found.device
    assert found.warnings == ()
    assert found.ops[0] == ("ampere_sgemm_128x64_tn", pytest.approx(300e-6), 1)


def test_ops_of_a_cpu_count_without_dispatch_collectives_and_what_wraps_them() -> None:
    events = [
        STEP,
        event("cpu_op", "aten::linear", 0, 200),
        event("cpu_op", "aten::mm", 10, 190),
        event("cpu_op", "aten::add", 210, 220),  # 10 us: dispatch, the host's
        # A norm of a sharded tensor: 50 us at work, then a reduction over ranks.
        event("cpu_op", "aten::linalg_vector_norm", 300, 600),
        event("cpu_op", "PythonSubclass", 310, 590),
        event("cpu_op", "aten::linalg_vector_norm", 320, 370),
        event("cpu_op", "c10d::allreduce_", 380, 400),
        event("user_annotation", "gloo:all_reduce", 390, 580, 2),
        event("cpu_op", "aten::add_", 400, 500, 2),  # gloo's own, on its thread
        event("cpu_op", "aten::copy_", 700, 800),
        event("cpu_op", "aten::mul", 395, 450, 3),  # another thread computes meanwhile
    ]
    found = made(events)
    [step] = found.steps
    assert step.compute * 1e6 == pytest.approx(200 + 50 + 55)
    assert step.matmul * 1e6 == pytest.approx(180)
    assert step.overlapped * 1e6 == pytest.approx(55)
    assert step.exposed * 1e6 == pytest.approx(190 - 55)
    assert step.copies * 1e6 == pytest.approx(100)
    assert step.idle == 0
    assert [name for name, _, _ in found.ops][:2] == ["aten::mm", "aten::copy_"]


NAMES = st.sampled_from(
    ["aten::mm", "aten::mul", "aten::copy_", "gloo:all_reduce", "c10d::allreduce_", "data",
     "ncclKernel_AllGather_RING_LL_Sum_int8_t", "sgemm", "Memcpy DtoD", "PythonSubclass"]
)  # fmt: skip
CATS = st.sampled_from(["cpu_op", "user_annotation", "kernel", "gpu_memcpy", "cuda_runtime"])


@given(
    st.lists(
        st.builds(
            lambda c, n, s, d, t: event(c, n, s, s + d, t),
            CATS, NAMES, st.integers(0, 1200), st.integers(0, 500), st.integers(1, 3),
        ),
        max_size=25,
    )
)  # fmt: skip
def test_whatever_the_events_the_parts_add_up_to_the_step(events: list[dict[str, Any]]) -> None:
    found = made([STEP, *events])
    [step] = found.steps
    parts = (step.compute, step.exposed, step.copies, step.host_wait, step.idle)
    assert all(part >= 0 for part in (*parts, step.matmul, step.overlapped, step.input_wait))
    assert sum(parts) == pytest.approx(step.seconds)
    assert step.matmul <= step.compute + 1e-12
    assert step.overlapped <= step.compute + 1e-12
    assert step.input_wait <= step.host_wait + step.idle + 1e-12
    assert bool(found.warnings) == (not found.collectives)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "reduce_scatter"),
        ("void ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "all_gather"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", "broadcast"),
        ("ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f32(ncclSymkDevWorkArgs4K)", "all_reduce"),
        ("ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)", "other"),
        ("rcclGenericKernel", "other"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", "all_reduce"),
        ("multimem_all_reduce_kernel<float>", "all_reduce"),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(unsigned long)",
         "all_reduce"),
        ("void c10d::(anonymous namespace)::two_shot_all_reduce_kernel<float>(int)", "all_reduce"),
        ("void <unnamed>::one_shot_all_reduce_kernel<float, 16>", "all_reduce"),
        ("void at::native::(anonymous namespace)::reduce_kernel<512, 1>", None),
        ("void at::native::reduce_kernel<512, 1>", None),
        ("ampere_sgemm_128x64_tn", None),
        ("indexSelectLargeIndex", None),
    ],
)  # fmt: skip
def test_collectives_are_known_by_name_whatever_the_version(name: str, kind: str | None) -> None:
    assert kernel_names.device_collective(name) == kind


def test_a_kernel_of_an_unknown_name_is_known_by_what_pytorch_tells_of_it() -> None:
    told = event("kernel", "futureKernel_v9", 10, 50, 20, **{"Collective name": "_allgather_base"})
    found = made([STEP, event("kernel", "sgemm", 0, 20, 7), told])
    assert found.collectives == {"all_gather": pytest.approx(40e-6)}


def test_no_communication_among_several_ranks_is_said_loudly() -> None:
    silent = [STEP, event("kernel", "sgemm", 0, 900, 7)]
    [warning] = made(silent, size=2).warnings
    assert "NO COMMUNICATION WAS FOUND" in warning
    assert made(silent, size=1).warnings == ()
    both = [made(silent), made(silent, rank=1)]
    assert any("NO COMMUNICATION" in w for w in judge(both).warnings)


def test_a_trace_is_read_plain_gzipped_or_as_a_bare_list(tmp_path: Path) -> None:
    plain, packed, bare = (tmp_path / n for n in ("a.json", "b.json.gz", "c.json"))
    trace = {"traceEvents": ON_A_GPU, "distributedInfo": {"rank": 1, "world_size": 2}}
    plain.write_text(json.dumps(trace))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    bare.write_text(json.dumps(ON_A_GPU))
    assert read_trace(plain).steps == read_trace(packed).steps == read_trace(bare).steps
    assert (read_trace(plain).rank, read_trace(bare).world_size) == (1, 1)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"{}", b'{"traceEvents": 5}', b'{"traceEvents": []}', b"\x1f\x8bbroken",
     b'{"traceEvents": [{"ph": "X", "ts": "x", "dur": 1}]}', gzip.compress(b"{}" * 99)[:-9]],
)  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"x\.json"):
        read_trace(path)
    with pytest.raises(DataError, match="no such trace"):
        read_trace(tmp_path / "none.json")


def test_a_trace_without_steps_is_one_step_and_says_so() -> None:
    found = made([event("kernel", "sgemm", 100, 300, 7)], size=1)
    assert found.steps[0].seconds * 1e6 == pytest.approx(200)
    assert "marks no steps" in found.warnings[0]
