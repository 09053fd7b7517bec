"""The GPU's side: for real where there is one (`-m gpu`), and what can be checked without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from hybrid.audit import cuda_kernels
from hybrid.audit.level import QUICK
from hybrid.audit.run import audit_here
from hybrid.audits import judged, reason

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_no_toolkit_is_needed_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(OSError, match="CUDA_HOME"):
        cpp_extension.include_paths("cuda")
    cuda_kernels.without_toolkit()
    assert cpp_extension.include_paths("cuda")


@pytest.mark.gpu
@needs_gpu
def test_the_silicon_is_what_the_driver_says() -> None:
    from hybrid.audit.cuda import CudaDevice

    device = CudaDevice(0)
    said = device.attributes()
    assert len(device.units()) == said["sm_count"]
    found = device.capability()
    assert found is not None and found.split(".")[0] == str(said["compute_capability"])[0]
    near, far = (device.load_latency(mib * 2**20, 20_000) for mib in (1, 256))
    assert 50e-9 < near < far < 5e-6


@pytest.mark.gpu
@needs_gpu
def test_a_genuine_gpu_is_not_accused(tmp_path: Path) -> None:
    results = audit_here(replace(QUICK, probe_s=60.0))
    (node,) = judged(results, tmp_path, "quick")
    outcomes = {r.name: r.detail for r in node.result.readings if r.value == "failed"}
    assert not outcomes
    assert node.verdict.identity != "contradicted", reason(node)
    values = {(r.name, r.gpu): r.value for r in node.result.readings}
    assert values["challenge.correct", 0] is True
    assert values["challenge.repeat_identical", 0] is True
    assert values["measured.memory_errors", 0] == 0
