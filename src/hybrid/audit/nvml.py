"""NVML asked directly, past nvidia-smi: `python -m hybrid.audit.nvml` prints JSON lines.

A process of its own, because the library is the node's and may hang, crash or lie. Function names
and layouts are those of NVIDIA's nvml.h.
"""

from __future__ import annotations

import ctypes
import json
import sys
from ctypes import byref, c_char, c_int, c_uint, c_ulonglong, c_void_p, create_string_buffer
from typing import Any, ClassVar

from hybrid.audit.reading import Reading, Scalar
from hybrid.audit.smi import bus_id
from hybrid.audit.wire import reading_to_json

LIBRARY = "libnvidia-ml.so.1"


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_v3_t."""

    _fields_: ClassVar[list[Any]] = [
        ("bus_id_legacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("device_id", c_uint),
        ("subsystem_id", c_uint),
        ("bus_id", c_char * 32),
    ]


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_: ClassVar[list[Any]] = [
        ("total", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    ]


def read_nvml(library: str = LIBRARY) -> list[Reading]:
    """What NVML says of the driver and of each GPU; a call that it refuses is no reading.

    Raises:
        OSError: there is no such library, or it does not start.
    """
    nvml = ctypes.CDLL(library)
    if (code := nvml.nvmlInit_v2()) != 0:
        raise OSError(f"nvmlInit: error {code}")
    found: list[Reading] = []

    def say(name: str, value: Scalar, gpu: int | None = None, unit: str = "") -> None:
        found.append(
            Reading(
                name=f"claimed.{name}",
                value=value,
                unit=unit,
                source="nvml",
                fakeable=True,
                gpu=gpu,
            )
        )

    def text(function: str, *first: Any) -> str | None:
        buffer = create_string_buffer(96)
        call = getattr(nvml, function, None)
        if call is None or call(*first, buffer, c_uint(96)) != 0:
            return None
        return buffer.value.decode("utf-8", "replace")

    count = c_uint()
    if nvml.nvmlDeviceGetCount_v2(byref(count)) == 0:
        say("gpu_count", count.value, unit="count")
    if version := text("nvmlSystemGetDriverVersion"):
        say("driver_version", version)
    cuda = c_int()
    if hasattr(nvml, "nvmlSystemGetCudaDriverVersion_v2") and (
        nvml.nvmlSystemGetCudaDriverVersion_v2(byref(cuda)) == 0
    ):
        say("cuda_version", f"{cuda.value // 1000}.{cuda.value % 1000 // 10}")
    for i in range(min(count.value, 64)):
        handle = c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(c_uint(i), byref(handle)) != 0:
            continue
        for name, function in (("name", "Name"), ("uuid", "UUID"), ("serial", "Serial"),
                               ("vbios", "VbiosVersion")):  # fmt: skip
            if value := text(f"nvmlDeviceGet{function}", handle):
                say(name, value, i)
        pci = _PciInfo()
        if hasattr(nvml, "nvmlDeviceGetPciInfo_v3") and (
            nvml.nvmlDeviceGetPciInfo_v3(handle, byref(pci)) == 0
        ):
            say("pci_device_id", f"{pci.device_id & 0xFFFF:04x}:{pci.device_id >> 16:04x}", i)
            say("pci_bus_id", bus_id(pci.bus_id.decode("ascii", "replace")), i)
        memory = _Memory()
        if hasattr(nvml, "nvmlDeviceGetMemoryInfo") and (
            nvml.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0
        ):
            say("memory_mib", memory.total >> 20, i, "MiB")
    return [r for r in found if r.value is not None]


if __name__ == "__main__":
    for r in read_nvml(*sys.argv[1:]):
        sys.stdout.write(json.dumps(reading_to_json(r)) + "\n")
