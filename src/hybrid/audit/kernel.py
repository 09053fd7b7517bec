"""What the node's kernel says of its GPUs: /proc/driver/nvidia, the PCI bus, mounts, preloads.

Harder to forge than NVML, not impossible: who owns the host can mount over all of it.
"""

from __future__ import annotations

import ctypes
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hybrid.audit.clouds import claimed_cloud
from hybrid.audit.reading import Reading, Scalar
from hybrid.audit.smi import bus_id
from hybrid.audit.smi_tables import read_kernel_log

PROC_SUPER_MAGIC = 0x9FA0
_DRIVER = "proc/driver/nvidia"
_LOGS = ("var/log/kern.log", "var/log/dmesg", "var/log/messages", "var/log/syslog")
_LOG_TAIL = 4 << 20
_MOST_TEXT = 1 << 20


def filesystem_type(path: Path) -> int:
    """The magic number of the file system that a path is on (statfs(2)).

    Raises:
        OSError: the path cannot be asked.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_long * 64)()  # f_type is the first field, and a long
    if libc.statfs(str(path).encode(), buffer) != 0:
        raise OSError(ctypes.get_errno(), "statfs", str(path))
    return int(buffer[0])


def read_kernel(
    root: Path = Path("/"),
    *,
    environ: Mapping[str, str] | None = None,
    filesystem: Callable[[Path], int] = filesystem_type,
) -> list[Reading]:
    """Readings of everything below a root that this process may read.

    GPUs get the order of their PCI addresses, which is nvidia-smi's; `claims.gather` aligns them.

    Args:
        root: "/"; a test's tree.
        environ: of the process that uses the GPU.
        filesystem: asks which file system a path is on.
    """
    found: list[Reading] = []
    for name, path in (
        ("kernel.release", "proc/sys/kernel/osrelease"),
        ("kernel.boot_id", "proc/sys/kernel/random/boot_id"),
    ):
        if value := _read(root / path).strip():
            found.append(_say(name, value, f"/{path}"))
    if cloud := claimed_cloud(_read(root / "sys/class/dmi/id/sys_vendor")):
        found.append(_say("claimed.cloud", cloud, "/sys/class/dmi/id/sys_vendor"))
    return [
        *found,
        *_driver(root, filesystem),
        *_bus(root),
        *_mounts(_read(root / "proc/self/mountinfo")),
        *_preloads(root, environ or {}),
        *_log(root),
    ]


def _say(
    name: str, value: Scalar, source: str, gpu: int | None = None, unit: str = "", **detail: Any
) -> Reading:
    return Reading(
        name=name, value=value, unit=unit, source=source, fakeable=True, gpu=gpu, detail=detail
    )


def _read(path: Path, limit: int = _MOST_TEXT) -> str:
    """A file's beginning; "" where there is none or it may not be read."""
    try:
        with path.open("rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""


def _driver(root: Path, filesystem: Callable[[Path], int]) -> list[Reading]:
    """/proc/driver/nvidia: version, and a folder for each GPU named by its PCI address."""
    found = []
    text = _read(root / _DRIVER / "version")
    version = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", text)
    if version:
        found.append(_say("kernel.driver_version", version[1], f"/{_DRIVER}/version"))
    gpus = root / _DRIVER / "gpus"
    try:
        entries = sorted(gpus.iterdir())
    except OSError:
        return found  # no driver, or a container that does not show it
    found.append(_say("kernel.gpu_count", len(entries), f"/{_DRIVER}/gpus", unit="count"))
    for i, entry in enumerate(entries):
        place = bus_id(entry.name)
        shown = f"/{_DRIVER}/gpus/{entry.name}/information"
        if wrong := _not_the_kernels(entry, place, filesystem):
            found.append(_say("kernel.not_procfs", wrong, shown, i))
        if place is not None:
            found.append(_say("claimed.pci_bus_id", place, "kernel", i))
        for line in _read(entry / "information").splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            name = {"Model": "name", "GPU UUID": "uuid", "Video BIOS": "vbios"}.get(key)
            if name and value and "?" not in value:
                found.append(_say(f"claimed.{name}", value, "kernel", i))
            if key == "Bus Location" and place is not None and bus_id(value) != place:
                wrong = f"{entry.name} says that it is at {value}"
                found.append(_say("kernel.not_procfs", wrong, shown, i))
    return found


def _not_the_kernels(entry: Path, place: Scalar, filesystem: Callable[[Path], int]) -> str | None:
    """Why a GPU's folder is not what the driver makes; None when it is."""
    if place is None:
        return f"{entry.name} is no PCI address"
    information = entry / "information"
    try:
        for path in (entry, information):
            if path.is_symlink():
                return f"{path.name} of {entry.name} is a symbolic link"
        if not stat.S_ISREG(information.stat().st_mode):
            return f"information of {entry.name} is no file"
        if (kind := filesystem(information)) != PROC_SUPER_MAGIC:
            return f"information of {entry.name} is not on procfs (statfs {kind:#x})"
    except OSError as e:
        return f"information of {entry.name}: {e.strerror}"
    return None


def _bus(root: Path) -> list[Reading]:
    """NVIDIA display devices that the PCI bus lists, and the device nodes."""
    devices = root / "sys/bus/pci/devices"
    found: list[Reading] = []
    if devices.is_dir():
        gpus = [
            d
            for d in sorted(devices.iterdir())
            if _read(d / "vendor").strip() == "0x10de"
            and _read(d / "class").strip()[:6] in ("0x0300", "0x0302")
        ]
        found.append(_say("kernel.pci_count", len(gpus), "/sys/bus/pci", unit="count"))
        for i, d in enumerate(gpus):
            device = _read(d / "device").strip().removeprefix("0x").lower()
            found.append(_say("claimed.pci_bus_id", bus_id(d.name), "sysfs", i))
            if re.fullmatch(r"[0-9a-f]{4}", device):
                found.append(_say("claimed.pci_device_id", f"10de:{device}", "sysfs", i))
    nodes = [p.name for p in (root / "dev").glob("nvidia[0-9]*")]
    if nodes:
        found.append(_say("kernel.device_nodes", len(nodes), "/dev", unit="count"))
    return found


def _mounts(mountinfo: str) -> list[Reading]:
    """Mounts over the driver's files or the PCI bus that are not the kernel's own (proc(5)).

    NVIDIA's container runtime mounts an empty tmpfs on /proc/driver/nvidia and binds the kernel's
    own folders of the container's GPUs into it; both are right.
    """
    foreign = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split(" ")[0]
        if len(fields) < 5:
            continue
        within, point = fields[3], re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
        driver = f"/{_DRIVER}"
        if point == driver or point.startswith(driver + "/"):
            runtime = point == driver and kind == "tmpfs"
            own = kind == "proc" and point == f"/proc{within.removesuffix('/')}"
            if not (runtime or own):
                foreign.append(f"{point} ({kind})")
        elif point.startswith(("/sys/bus/pci/", "/sys/devices/pci")) and kind != "sysfs":
            foreign.append(f"{point} ({kind})")
    if not foreign:
        return []
    return [_say("kernel.foreign_mounts", ", ".join(foreign)[:500], "/proc/self/mountinfo")]


def _preloads(root: Path, environ: Mapping[str, str]) -> list[Reading]:
    """Libraries that are loaded before all others, by /etc/ld.so.preload or the environment."""
    named = _read(root / "etc/ld.so.preload").split() + re.split(
        r"[ :]+", environ.get("LD_PRELOAD", "")
    )
    found = ", ".join(n for n in named if n)
    settings = sorted(k for k in environ if k.startswith(("CUDA_DEVICE_MEMORY_LIMIT",
                                                          "CUDA_DEVICE_SM_LIMIT",
                                                          "CUDA_OVERSUBSCRIBE")))  # fmt: skip
    if not found and not settings:
        return []
    return [
        _say("kernel.preloaded", found or None, "ld.so.preload, environment", settings=settings)
    ]


def _log(root: Path) -> list[Reading]:
    """NVIDIA's lines of kernel logs that may be read, each once."""
    text = ""
    for path in _LOGS:
        try:
            with (root / path).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - _LOG_TAIL))
                text += file.read().decode("utf-8", "replace")
        except OSError:
            continue
    seen: dict[object, Reading] = {}
    for r in read_kernel_log(text):
        seen.setdefault((r.name, r.value, r.detail["bus"]), r)
    return list(seen.values())
