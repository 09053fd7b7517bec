"""What the kernel says, of real files and doctored ones; NVML through a library that is a mock."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.audit.claims import align, gather
from hybrid.audit.kernel import PROC_SUPER_MAGIC, filesystem_type, read_kernel
from hybrid.audit.nvml import read_nvml
from hybrid.audit.reading import Reading
from hybrid.audit.specs import load_specs
from hybrid.audit.verdict import NodeVerdict, judge

INFORMATION = """Model: \t\t NVIDIA A100-SXM4-80GB
IRQ:   \t\t 132
GPU UUID: \t GPU-00000000-0000-0000-0000-00000000000{n}
Video BIOS: \t 92.00.36.00.02
Bus Type: \t PCIe
Bus Location: \t 0000:0{n}:00.0
Device Minor: \t {n}
"""


class Tree:
    """The part of / that a kernel with GPUs shows, as files that a test may doctor."""

    def __init__(self, root: Path, gpus: int = 2) -> None:
        self.root = root
        self.write("proc/driver/nvidia/version",
                   "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release\n"
                   "GCC version:  gcc version 12.3.0\n")  # fmt: skip
        self.write("proc/sys/kernel/osrelease", "6.8.0-60-generic\n")
        for n in range(1, gpus + 1):
            self.write(f"proc/driver/nvidia/gpus/0000:0{n}:00.0/information",
                       INFORMATION.format(n=n))  # fmt: skip
            self.pci(f"0000:0{n}:00.0", "0x10de", "0x030200", "0x20b2")
        self.pci("0000:00:1f.3", "0x8086", "0x040300", "0xa348")
        self.pci("0000:01:00.1", "0x10de", "0x040300", "0x228b")  # its own sound
        self.write("proc/self/mountinfo", "22 1 0:21 / /proc rw,nosuid - proc proc rw\n")

    def write(self, path: str, text: str) -> Path:
        full = self.root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_text(text)
        return full

    def pci(self, place: str, vendor: str, kind: str, device: str) -> None:
        for name, value in (("vendor", vendor), ("class", kind), ("device", device)):
            self.write(f"sys/bus/pci/devices/{place}/{name}", value + "\n")

    def readings(self, **environ: str) -> list[Reading]:
        return read_kernel(self.root, environ=environ, filesystem=lambda p: PROC_SUPER_MAGIC)

    def verdict(self, **environ: str) -> NodeVerdict:
        return judge(align(self.readings(**environ)), load_specs())


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def caught(verdict: NodeVerdict) -> dict[str, set[str]]:
    """Findings that contradict, and the readings that gave them away."""
    return {
        f.kind: {r.name for r in f.readings}
        for f in verdict.findings
        if f.severity == "contradicted"
    }


def test_an_honest_kernel(tree: Tree) -> None:
    found = {(r.name, r.gpu): r.value for r in tree.readings() if r.source != "sysfs"}
    assert found["kernel.driver_version", None] == "570.158.01"
    assert found["kernel.gpu_count", None] == found["kernel.pci_count", None] == 2
    assert found["claimed.name", 1] == "NVIDIA A100-SXM4-80GB"
    assert found["claimed.vbios", 0] == "92.00.36.00.02"
    verdict = tree.verdict()
    assert verdict.findings == ()
    assert [g.product for g in verdict.gpus] == ["A100-SXM4-80GB"] * 2


def test_this_machines_own_files() -> None:
    assert filesystem_type(Path("/proc/self/mountinfo")) == PROC_SUPER_MAGIC
    assert filesystem_type(Path("/sys")) != PROC_SUPER_MAGIC
    with pytest.raises(OSError, match="statfs"):
        filesystem_type(Path("/absent"))
    found = {r.name: r.value for r in read_kernel()}
    assert found["kernel.release"] == os.uname().release
    assert not {"kernel.foreign_mounts", "kernel.not_procfs"} & found.keys()


def test_files_that_are_on_no_procfs(tree: Tree) -> None:
    """The real statfs(2) of this folder's file system, which is a forger's."""
    readings = read_kernel(tree.root, environ={})
    assert "kernel.not_procfs" in {r.name for r in readings}
    assert caught(judge(readings, load_specs())) == {"not-procfs": {"kernel.not_procfs"}}


def test_a_link_a_wrong_name_and_another_place(tree: Tree) -> None:
    gpus = tree.root / "proc/driver/nvidia/gpus"
    forged = tree.write("tmp/information", INFORMATION.format(n=1))
    (gpus / "0000:01:00.0/information").unlink()
    (gpus / "0000:01:00.0/information").symlink_to(forged)
    tree.write("proc/driver/nvidia/gpus/0000:02:00.0/information", INFORMATION.format(n=3))
    tree.write("proc/driver/nvidia/gpus/gpu9/information", INFORMATION.format(n=9))
    told = [r.value for r in tree.readings() if r.name == "kernel.not_procfs"]
    assert [w in str(v) for v, w in zip(told, ("link", "0000:03", "no PCI address"), strict=True)]
    assert "not-procfs" in caught(tree.verdict())


@pytest.mark.parametrize(
    ("line", "foreign"),
    [
        ("40 22 0:50 / /proc/driver/nvidia rw - tmpfs tmpfs rw,mode=555", False),
        ("41 40 0:21 /driver/nvidia/gpus/0000:01:00.0 /proc/driver/nvidia/gpus/0000:01:00.0 ro"
         " - proc proc rw", False),
        ("42 22 0:60 /proc/cpuinfo /proc/cpuinfo rw - fuse.lxcfs lxcfs rw", False),
        ("43 22 8:1 /kit /proc/driver/nvidia/gpus rw - ext4 /dev/sda1 rw", True),
        ("44 22 0:51 / /proc/driver/nvidia/gpus/0000:01:00.0/information rw - tmpfs tmpfs rw",
         True),
        ("45 22 0:21 /driver/nvidia/gpus/0000:01:00.0 /proc/driver/nvidia/gpus/0000:02:00.0 ro"
         " - proc proc rw", True),
        ("46 22 8:1 /v /proc/driver/nvidia/version ro - overlay overlay rw", True),
        ("47 22 8:1 /d /sys/bus/pci/devices/0000:01:00.0/device ro - ext4 /dev/sda1 rw", True),
        ("48 22 8:1 /x /proc/driver/nvidia\\040x rw - ext4 /dev/sda1 rw", False),
        ("nonsense", False),
    ],
)  # fmt: skip
def test_mounts_of_the_container_runtime_are_right_and_others_not(
    tree: Tree, line: str, foreign: bool
) -> None:
    tree.write("proc/self/mountinfo", f"22 1 0:21 / /proc rw - proc proc rw\n{line}\n")
    found = caught(tree.verdict())
    assert found == ({"foreign-mounts": {"kernel.foreign_mounts"}} if foreign else {})


@pytest.mark.parametrize(
    ("path", "text", "environ", "hooked"),
    [
        ("etc/ld.so.preload", "/usr/local/vgpu/libvgpu.so\n", {}, True),
        ("etc/ld.so.preload", "/usr/lib/libjemalloc.so\n", {}, False),
        ("etc/other", "", {"LD_PRELOAD": "/x/libfoo.so:/opt/lib/libcuda-hook.so"}, True),
        ("etc/other", "", {"CUDA_DEVICE_MEMORY_LIMIT_0": "4g"}, False),
    ],
)
def test_preloads(tree: Tree, path: str, text: str, environ: dict[str, str], hooked: bool) -> None:
    tree.write(path, text)
    found = caught(tree.verdict(**environ))
    assert found == ({"preloaded-hook": {"kernel.preloaded"}} if hooked else {})


def test_a_kernels_log_names_the_gpu(tree: Tree) -> None:
    line = "NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.\n"
    tree.write("var/log/kern.log", line * 3)
    tree.write("var/log/syslog", line)
    verdict = tree.verdict()
    [found] = [f for f in verdict.findings if f.kind == "xid"]
    assert (found.gpu, verdict.health) == (1, "unfit")
    assert [g.health for g in verdict.gpus] == ["fit", "unfit"]


MOCK = r"""
#include <stdio.h>
#include <string.h>
typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; } Pci;
typedef struct { unsigned long long total, free, used; } Memory;
static long gpus[16];
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = COUNT; return 0; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "%s", DRIVER); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 12080; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { gpus[i] = i; *h = &gpus[i]; return 0; }
int nvmlDeviceGetName(void *h, char *s, unsigned n) {
  snprintf(s, n, "NVIDIA A100-SXM4-80GB"); return 0; }
int nvmlDeviceGetUUID(void *h, char *s, unsigned n) {
  snprintf(s, n, "GPU-00000000-0000-0000-0000-00000000000%ld", *(long *)h + 1); return 0; }
int nvmlDeviceGetSerial(void *h, char *s, unsigned n) { return 3; }
int nvmlDeviceGetPciInfo_v3(void *h, Pci *p) {
  memset(p, 0, sizeof *p); p->id = 0x20b210de;
  snprintf(p->bus_id, 32, "00000000:0%ld:00.0", *(long *)h + 1); return 0; }
int nvmlDeviceGetMemoryInfo(void *h, Memory *m) { m->total = 81920ULL << 20; return 0; }
"""
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def library(folder: Path, count: int = 2, driver: str = "570.158.01", init: str = "0") -> Path:
    """A mock of NVML like those that make the real nvidia-smi print anything."""
    folder.mkdir(exist_ok=True)
    (folder / "mock.c").write_text(MOCK)
    path = folder / "libnvidia-ml.so.1"
    defined = [f"-DCOUNT={count}", f'-DDRIVER="{driver}"', f"-DINIT={init}"]
    done = ["cc", "-shared", "-fPIC", *defined, "-o", str(path), str(folder / "mock.c")]
    subprocess.run(done, check=True, capture_output=True)
    return path


@needs_compiler
def test_nvml_is_asked_behind_nvidia_smis_back(tree: Tree, tmp_path: Path) -> None:
    path = library(tmp_path / "lib", count=2)
    found = {(r.name, r.gpu): r.value for r in read_nvml(str(path))}
    assert found["claimed.pci_device_id", 1] == "10de:20b2"
    assert found["claimed.pci_bus_id", 1] == "0000:02:00.0"
    assert found["claimed.memory_mib", 0] == 81920
    assert found["claimed.cuda_version", None] == "12.8"
    assert ("claimed.serial", 0) not in found and ("claimed.vbios", 0) not in found

    def verdict(lib: Path) -> NodeVerdict:
        readings = gather(tree.root, environ={"PATH": str(tmp_path)}, library=str(lib),
                          filesystem=lambda p: PROC_SUPER_MAGIC)  # fmt: skip
        return judge(readings, load_specs())

    assert verdict(path).findings == (), "NVML and the kernel agree"
    lying = library(tmp_path / "lies", count=8, driver="591.86")
    found_out = caught(verdict(lying))
    assert found_out.keys() == {"windows-driver", "driver-against-kernel", "more-gpus-than-kernel"}
    assert "kernel.driver_version" in found_out["driver-against-kernel"]
    assert "kernel.gpu_count" in found_out["more-gpus-than-kernel"]


@needs_compiler
@pytest.mark.parametrize("init", ["999", "(*(volatile int *)0)"])
def test_a_library_that_fails_or_crashes_is_a_reading(tmp_path: Path, init: str) -> None:
    path = library(tmp_path / "lib", init=init)
    found = gather(tmp_path, environ={"PATH": str(tmp_path)}, library=str(path))
    [failed] = [r for r in found if r.name == "claimed.tool_failed"]
    assert failed.source == "nvml"
    assert judge(found, load_specs()).health == "unfit"


def test_a_tool_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\nsleep 600 & echo $! > "{tmp_path / "child"}"\nwait\n')
    smi.chmod(0o755)
    environ = {"PATH": f"{tmp_path}{os.pathsep}{os.defpath}"}
    found = gather(tmp_path, environ=environ, library="absent.so", timeout_s=1.5)
    [failed] = [r for r in found if r.source == "nvidia-smi -q -x"]
    assert "did not answer within 1.5 s" in str(failed.value)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _alive(child):
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_gpus_of_all_sources_are_numbered_by_their_place() -> None:
    def say(source: str, gpu: int, place: str, uuid: str) -> list[Reading]:
        return [
            Reading(name=n, value=v, source=source, fakeable=True, gpu=gpu)
            for n, v in (("claimed.pci_bus_id", place), ("claimed.uuid", uuid))
        ]

    a, b, c = "0000:0a:00.0", "0000:0b:00.0", "0000:0c:00.0"
    mixed = [*say("nvidia-smi -q -x", 0, b, "B"), *say("nvidia-smi -q -x", 1, a, "A"),
             *say("nvml", 0, a, "A"), *say("nvml", 1, b, "B"), *say("nvml", 2, c, "C")]  # fmt: skip
    found = align(mixed)
    assert {(r.gpu, r.value) for r in found if r.name == "claimed.uuid"} == {(0, "B"), (1, "A")}
    assert judge(found, load_specs()).findings == ()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damaged_files_never_crash_and_never_make_it_genuine(data: st.DataObject) -> None:
    """Bytes changed, cut and moved in what the kernel shows, beside claims without measurements."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        tree.write(
            "proc/self/mountinfo", "22 1 0:21 /a /proc/driver/nvidia/\\040x rw - ext4 x rw\n"
        )
        tree.write("var/log/dmesg", "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n")
        files = sorted(p for p in tree.root.rglob("*") if p.is_file())
        for _ in range(data.draw(st.integers(1, 6))):
            path = data.draw(st.sampled_from(files))
            raw = bytearray(path.read_bytes())
            at = data.draw(st.integers(0, len(raw)))
            raw[at : data.draw(st.integers(at, len(raw)))] = data.draw(st.binary(max_size=8))
            path.write_bytes(raw)
        assert tree.verdict().identity != "genuine"


def test_an_escape_that_is_no_octal_number_stands_for_itself(tree: Tree) -> None:
    tree.write("proc/self/mountinfo", r"22 1 0:21 / /proc/driver/nvidia/\999 rw - ext4 x rw")
    assert caught(tree.verdict())["foreign-mounts"] == {"kernel.foreign_mounts"}
