"""Claims from a machine that lies: a fake nvidia-smi on PATH, a doctored /proc, a preload."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hybrid.audit.claims import gather
from hybrid.audit.kernel import PROC_SUPER_MAGIC
from hybrid.audit.reading import Reading
from hybrid.audit.specs import load_specs
from hybrid.audit.verdict import NodeVerdict, judge

A10G = Path(__file__).parent / "captures/01_a10g_aws_vm_idle_gen1_x8.xml"
SPECS = load_specs()


class Machine:
    """A folder as the root of a machine, and a PATH with an nvidia-smi that prints a file."""

    def __init__(self, folder: Path, xml: bytes) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        (folder / "bin").mkdir()
        (folder / "out.xml").write_bytes(xml)
        self.smi = folder / "bin/nvidia-smi"
        self.script(f'cat "{folder / "out.xml"}"')
        self.environ = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.defpath}"}

    def script(self, line: str) -> None:
        self.smi.write_text(f"#!/bin/sh\n{line}\n")
        self.smi.chmod(0o755)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def judged(self, previous: list[Reading] | None = None) -> NodeVerdict:
        return judge(self.readings(), SPECS, previous)

    def readings(self) -> list[Reading]:
        return gather(
            self.root, environ=self.environ, library="libnvidia-ml-absent.so",
            filesystem=lambda path: PROC_SUPER_MAGIC, timeout_s=5,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, A10G.read_bytes())


def found(verdict: NodeVerdict, kind: str) -> set[str]:
    """Names of the readings of a finding."""
    [one] = [f for f in verdict.findings if f.kind == kind]
    return {r.name for r in one.readings}


def test_an_honest_machine_is_not_accused(machine: Machine) -> None:
    verdict = machine.judged()
    assert (verdict.identity, verdict.health, verdict.findings) == ("unknown", "fit", ())


def test_one_card_listed_twice_has_one_uuid(machine: Machine, tmp_path: Path) -> None:
    xml = A10G.read_text()
    [gpu] = re.findall(r"<gpu id=.*?</gpu>", xml, re.DOTALL)
    other = re.sub(r"00000000:00:1E", "00000000:00:1F", gpu, flags=re.IGNORECASE)
    twice = xml.replace(gpu, gpu + other)
    twice = re.sub(r"<attached_gpus>1<", "<attached_gpus>2<", twice)
    (tmp_path / "out.xml").write_text(twice)
    verdict = machine.judged()
    assert verdict.identity == "contradicted"
    assert found(verdict, "uuid-repeated") == {"claimed.uuid"}


def test_a_uuid_that_has_changed_since_the_last_audit(machine: Machine, tmp_path: Path) -> None:
    before = machine.readings()
    new = re.sub(rb"GPU-b6928ede", b"GPU-00000000", A10G.read_bytes())
    (tmp_path / "out.xml").write_bytes(new)
    verdict = machine.judged(before)
    kinds = {f.kind for f in verdict.findings}
    assert kinds & {"uuid-changed", "another-machine"}


def test_something_mounted_over_the_drivers_files(machine: Machine) -> None:
    machine.write(
        "proc/self/mountinfo",
        "22 1 0:21 / /proc rw - proc proc rw\n"
        "99 22 8:1 /fake /proc/driver/nvidia/gpus rw - ext4 /dev/sda1 rw\n",
    )
    verdict = machine.judged()
    assert verdict.identity == "contradicted"
    assert "foreign-mounts" in {f.kind for f in verdict.findings}


def test_a_library_that_every_program_must_load_first(machine: Machine) -> None:
    machine.environ["LD_PRELOAD"] = "/usr/local/vgpu/libvgpu.so"
    verdict = machine.judged()
    assert verdict.identity == "contradicted"
    assert "preloaded-hook" in {f.kind for f in verdict.findings}


def test_a_share_of_a_gpu_that_announces_itself(machine: Machine, tmp_path: Path) -> None:
    line = "[HAMI-core Msg(1:2:libvgpu.c:839)]: Initializing.....\\n"
    machine.script(f'printf "{line}"; cat "{tmp_path / "out.xml"}"')
    verdict = machine.judged()
    assert verdict.identity == "contradicted"
    assert "driver-hooked" in {f.kind for f in verdict.findings}


@pytest.mark.parametrize(
    "line", ["echo 'NVIDIA-SMI has failed because it could not communicate'; exit 9", "sleep 60"]
)
def test_a_tool_that_fails_or_hangs_is_a_finding_and_no_gpu(machine: Machine, line: str) -> None:
    machine.script(line)
    verdict = machine.judged()
    assert verdict.health == "unfit"
    assert verdict.identity != "genuine"
    assert found(verdict, "tool-failed") == {"claimed.tool_failed"}


def test_work_seen_on_too_few_multiprocessors_contradicts_the_name(
    machine: Machine, tmp_path: Path
) -> None:
    """An RTX 3090 has 82."""
    [path] = A10G.parent.glob("04_rtx3090_*")
    (tmp_path / "out.xml").write_bytes(path.read_bytes())
    told = machine.readings()
    for value, identity in ((70, "contradicted"), (82, "unknown")):
        seen = Reading(
            name="measured.sm_count",
            value=value,
            unit="count",
            source="kernel",
            fakeable=False,
            gpu=0,
        )
        verdict = judge([*told, seen], SPECS)
        assert verdict.identity == identity, verdict.findings
        if identity == "contradicted":
            assert found(verdict, "sm-count") == {"measured.sm_count"}
