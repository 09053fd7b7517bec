"""What `nvidia-smi` printed (`-q -x`, `-q`, the table), as readings; every schema since v10.

All of it are claims: NVIDIA's own mock of the library makes the real nvidia-smi print anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybrid.audit.reading import Reading, Scalar
from hybrid.audit.smi_tables import read_table
from hybrid.audit.smi_tree import MOST_BYTES, Node, read_text, read_xml
from hybrid.errors import DataError

_UNKNOWN = {"", "n/a", "[n/a]", "none", "not supported", "[not supported]", "[redacted]", "unknown"}
_BROKEN = re.compile(
    r"unknown error|gpu is lost|requires reset|\berr!|insufficient permissions", re.IGNORECASE
)
_HOOKED = re.compile(r"\[HAMI-core|Start hijacking|libvgpu|\[4pdvGPU", re.IGNORECASE)
_FAILED = re.compile(
    r"^.*(NVIDIA-SMI has failed|Unable to determine the device handle|No devices were found"
    r"|Failed to initialize NVML|Driver/library version mismatch|GPU is lost|couldn't communicate"
    r"|Unable to query|command not found).*$",
    re.IGNORECASE | re.MULTILINE,
)
Parse = Callable[[str], Scalar]


def _text(value: str) -> Scalar:
    return None if value.strip().lower() in _UNKNOWN else value.strip()


def _number(value: str) -> Scalar:
    found = re.match(r"(-?[0-9]{1,15}(?:\.[0-9]{1,6})?)(?![\d.])", value.strip())
    if found is None:
        return None
    return float(found[1]) if "." in found[1] else int(found[1])


def _flag(value: str) -> Scalar:
    return {"yes": True, "no": False}.get(value.strip().lower())


def _said(value: str) -> Scalar:
    """A word of which None means none: `Virtualization Mode: None`."""
    return None if value.strip().lower() in _UNKNOWN - {"none"} else value.strip()


def _pci_id(value: str) -> Scalar:
    """ "20B210DE" or "0x20B210DE" (device, vendor) as "10de:20b2"; another vendor's is unknown."""
    found = re.fullmatch(r"(?:0x)?([0-9A-Fa-f]{4})([0-9A-Fa-f]{4})", value.strip())
    if found is None or found[1] == "0000":
        return None
    return f"{found[2]}:{found[1]}".lower()


def bus_id(value: str) -> Scalar:
    """A PCI address with a domain of four digits, lower case: "0000:01:00.0"."""
    found = re.fullmatch(
        r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})\.(\d)", value.strip()
    )
    return f"{int(found[1], 16):04x}:{found[2]}:{found[3]}.{found[4]}".lower() if found else None


@dataclass(frozen=True)
class _Field:
    """A reading, and where XML (several schemas) and text have it."""

    name: str
    parse: Parse
    xml: tuple[str, ...]
    text: tuple[str, ...] = ()
    unit: str = ""


def _f(name: str, parse: Parse, xml: str, text: str = "", unit: str = "") -> _Field:
    return _Field(f"claimed.{name}", parse, _paths(xml), _paths(text), unit)


def _paths(alternatives: str) -> tuple[str, ...]:
    return tuple(p for p in alternatives.split("|") if p)


_LINK = "pci/pci_gpu_link_info"
_POWER = ("gpu_power_readings", "power_readings")
_LINK_T = "PCI/GPU Link Info"
_POWER_T = ("GPU Power Readings", "Power Readings")


def _power(name: str, xml: tuple[str, ...], text: tuple[str, ...]) -> _Field:
    return _Field(
        f"claimed.{name}", _number,
        tuple(f"{group}/{tag}" for tag in xml for group in _POWER),
        tuple(f"{group}/{key}" for key in text for group in _POWER_T), "W",
    )  # fmt: skip


NODE_FIELDS = (
    _f("driver_version", _text, "driver_version", "Driver Version"),
    _f("cuda_version", _text, "cuda_version", "CUDA Version"),
    _f("attached_gpus", _number, "attached_gpus", "Attached GPUs", "count"),
)
FIELDS = (
    _f("name", _text, "product_name", "Product Name"),
    _f("brand", _text, "product_brand", "Product Brand"),
    _f("architecture", _text, "product_architecture", "Product Architecture"),
    _f("uuid", _text, "uuid", "GPU UUID"),
    _f("serial", _text, "serial", "Serial Number"),
    _f("minor", _number, "minor_number", "Minor Number"),
    _f("vbios", _text, "vbios_version", "VBIOS Version"),
    _f("part_number", _text, "gpu_part_number", "GPU Part Number"),
    _f("multi_gpu_board", _flag, "multigpu_board", "MultiGPU Board"),
    _f("driver_model", _text, "driver_model/current_dm", "Driver Model/Current"),
    _f(
        "virtualization", _said, "gpu_virtualization_mode/virtualization_mode",
        "GPU Virtualization Mode/Virtualization Mode",
    ),
    _f(
        "license", _text,
        "vgpu_software_licensed_product/license_status|grid_licensed_product/license_status",
        "vGPU Software Licensed Product/License Status|GRID Licensed Product/License Status",
    ),
    _f("mig_mode", _text, "mig_mode/current_mig", "MIG Mode/Current"),
    _f("pci_device_id", _pci_id, "pci/pci_device_id", "PCI/Device Id"),
    _f("pci_subsystem_id", _pci_id, "pci/pci_sub_system_id", "PCI/Sub System Id"),
    _f("pcie_gen_max", _number, f"{_LINK}/pcie_gen/max_link_gen", f"{_LINK_T}/PCIe Generation/Max"),
    _f(
        "pcie_gen_device_max", _number, f"{_LINK}/pcie_gen/max_device_link_gen",
        f"{_LINK_T}/PCIe Generation/Device Max",
    ),
    _f(
        "pcie_gen_host_max", _number, f"{_LINK}/pcie_gen/max_host_link_gen",
        f"{_LINK_T}/PCIe Generation/Host Max",
    ),
    _f(
        "pcie_gen_now", _number, f"{_LINK}/pcie_gen/current_link_gen",
        f"{_LINK_T}/PCIe Generation/Current",
    ),
    _f(
        "pcie_width_max", _number, f"{_LINK}/link_widths/max_link_width",
        f"{_LINK_T}/Link Width/Max",
    ),
    _f(
        "pcie_width_now", _number, f"{_LINK}/link_widths/current_link_width",
        f"{_LINK_T}/Link Width/Current",
    ),
    _f("pcie_replays", _number, "pci/replay_counter", "PCI/Replays Since Reset", "count"),
    _f("performance_state", _text, "performance_state", "Performance State"),
    _f("memory_mib", _number, "fb_memory_usage/total", "FB Memory Usage/Total", "MiB"),
    _f("memory_used_mib", _number, "fb_memory_usage/used", "FB Memory Usage/Used", "MiB"),
    _f("bar1_mib", _number, "bar1_memory_usage/total", "BAR1 Memory Usage/Total", "MiB"),
    _f("utilisation_percent", _number, "utilization/gpu_util", "Utilization/Gpu", "%"),
    _f("ecc_mode", _text, "ecc_mode/current_ecc", "ECC Mode/Current|Ecc Mode/Current"),
    _f("remap_pending", _flag, "remapped_rows/remapped_row_pending", "Remapped Rows/Pending"),
    _f(
        "remap_failed", _flag, "remapped_rows/remapped_row_failure",
        "Remapped Rows/Remapping Failure Occurred",
    ),
    _f(
        "retired_pending", _flag,
        "retired_pages/pending_retirement|retired_pages/pending_blacklist",
        "Retired Pages/Pending Page Blacklist|Retired Pages/Pending",
    ),
    _f(
        "retired_double_bit", _number, "retired_pages/double_bit_retirement/retired_count",
        "Retired Pages/Double Bit ECC", "count",
    ),
    _f(
        "sram_threshold_exceeded", _flag, "ecc_errors/aggregate/sram_threshold_exceeded",
        "ECC Errors/Aggregate/SRAM Threshold Exceeded",
    ),
    _f(
        "reset_required", _flag, "gpu_reset_status/reset_required",
        "GPU Reset Status/Reset Required",
    ),
    _f("temperature_c", _number, "temperature/gpu_temp", "Temperature/GPU Current Temp", "°C"),
    _power(
        "power_w", ("power_draw", "instant_power_draw"),
        ("Power Draw", "Instantaneous Power Draw"),
    ),
    _power(
        "power_limit_w", ("enforced_power_limit", "current_power_limit", "power_limit"),
        ("Enforced Power Limit", "Current Power Limit", "Power Limit"),
    ),
    _power("power_limit_default_w", ("default_power_limit",), ("Default Power Limit",)),
    _power("power_limit_max_w", ("max_power_limit",), ("Max Power Limit",)),
    _f("clock_sm_mhz", _number, "clocks/sm_clock", "Clocks/SM", "MHz"),
    _f("clock_sm_max_mhz", _number, "max_clocks/sm_clock", "Max Clocks/SM", "MHz"),
)  # fmt: skip


def parse_smi(data: bytes) -> list[Reading]:
    """Readings of whatever nvidia-smi printed: `-q -x`, `-q` (or a part of it), or its table.

    GPUs are numbered in the order of the output. What is absent, N/A or unreadable is no reading.

    Args:
        data: stdout, with anything that libraries printed before it.

    Raises:
        DataError: it is nothing of nvidia-smi's, truncated or hostile XML, or too long.
    """
    if len(data) > MOST_BYTES:
        raise DataError(f"nvidia-smi output of {len(data)} bytes; at most {MOST_BYTES} are read")
    start = re.search(rb"<\?xml|<!DOCTYPE nvidia_smi_log|<nvidia_smi_log", data)
    if start is not None:
        closing = b"</nvidia_smi_log>"
        end = data.rfind(closing)
        end = len(data) if end < start.start() else end + len(closing)
        # Around the document stands what libraries and warnings had to say.
        around = (data[: start.start()] + b"\n" + data[end:]).decode("utf-8", "replace")
        log = read_xml(data[start.start() : end])
        return _noise(around) + _of_tree(log, "xml", "nvidia-smi -q -x")
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    noise = _noise(text)
    if table := read_table(text):
        return noise + table
    try:
        return noise + _of_tree(read_text(text), "text", "nvidia-smi -q")
    except DataError:
        if noise:
            return noise
        raise DataError(
            "not an output of nvidia-smi (`nvidia-smi -q -x` is the best one)"
        ) from None


def _noise(text: str) -> list[Reading]:
    """What others said in or before nvidia-smi's output: hooks, and its own failure."""
    found = []
    hooks = [line.strip() for line in text.splitlines() if _HOOKED.search(line)]
    if hooks:
        found.append(
            Reading(
                name="claimed.hooked", value=hooks[0][:200], source="nvidia-smi", fakeable=True,
                detail={"lines": len(hooks)},
            )
        )  # fmt: skip
    for match in _FAILED.finditer(text):
        message = match[0].strip()
        if not message.startswith("#"):
            found.append(
                Reading(
                    name="claimed.tool_failed", value=message[:300], source="nvidia-smi",
                    fakeable=True,
                )
            )  # fmt: skip
    return found


def _of_tree(log: Node, kind: str, source: str) -> list[Reading]:
    def say(name: str, value: Scalar, gpu: int | None, unit: str = "", **detail: Any) -> Reading:
        return Reading(
            name=name, value=value, unit=unit, source=source, fakeable=True, gpu=gpu, detail=detail
        )

    found = _of_fields(log, NODE_FIELDS, kind, source, None)
    gpus = list(log.all("gpu"))
    found.append(say("claimed.gpu_count", len(gpus), None, "count"))
    for i, gpu in enumerate(gpus):
        found += _of_fields(gpu, FIELDS, kind, source, i)
        place = bus_id(gpu.attributes.get("id", ""))
        if place is not None:
            found.append(say("claimed.pci_bus_id", place, i))
        found += [
            say(name, value, i, unit, **detail)
            for name, value, unit, detail in (*_mig(gpu), *_errors(gpu), *_throttling(gpu))
        ]
        broken = sorted({n.text.strip() for n in _leaves(gpu) if _BROKEN.search(n.text)})
        if broken:
            found.append(say("claimed.tool_failed", broken[0], i))
    return found


def _of_fields(
    node: Node, fields: tuple[_Field, ...], kind: str, source: str, gpu: int | None
) -> list[Reading]:
    found = []
    for f in fields:
        for path in f.xml if kind == "xml" else f.text:
            at = node.at(path)
            value = None if at is None else f.parse(at.text)
            if value is not None:
                found.append(
                    Reading(
                        name=f.name, value=value, unit=f.unit, source=source, fakeable=True, gpu=gpu
                    )
                )
                break
    return found


Extra = tuple[str, Scalar, str, dict[str, Any]]


def _mig(gpu: Node) -> list[Extra]:
    """The parts of a divided GPU, with their SMs and memory."""
    parts = []
    for device in (d for top in gpu.all("mig_devices") for d in top.all("mig_device")):
        sms = device.at("device_attributes/shared/multiprocessor_count")
        memory = device.at("fb_memory_usage/total")
        parts.append(
            {
                "sm_count": _number(sms.text) if sms else None,
                "memory_mib": _number(memory.text) if memory else None,
            }
        )
    return [("claimed.mig_devices", len(parts), "count", {"parts": parts})] if parts else []


_UNCORRECTED = re.compile(r"(sram|dram)_uncorrectable|SRAM Uncorrectable|DRAM Uncorrectable")


def _errors(gpu: Node) -> list[Extra]:
    """Uncorrected ECC errors, whichever of the schemas counts them."""
    found: list[Extra] = []
    for name, tags in (
        ("claimed.ecc_uncorrected", ("volatile", "Volatile")),
        ("claimed.ecc_uncorrected_ever", ("aggregate", "Aggregate")),
    ):
        counts = []
        for top in ("ecc_errors", "ECC Errors"):
            for tag in tags:
                group = gpu.at(f"{top}/{tag}")
                if group is None:
                    continue
                counts += [_number(c.text) for c in group.children if _UNCORRECTED.match(c.tag)]
                old = group.at("double_bit/total")  # before v11
                counts += [_number(old.text)] if old else []
        known = [c for c in counts if isinstance(c, int)]
        if known:
            found.append((name, sum(known), "count", {}))
    return found


_REASON = re.compile(r"clocks_(?:event|throttle)_reason_(\w+)")


def _throttling(gpu: Node) -> list[Extra]:
    """The reasons that are active, in NVML's words; "" when none is."""
    groups = [
        n
        for tag in (
            "clocks_event_reasons", "clocks_throttle_reasons", "Clocks Event Reasons",
            "Clocks Throttle Reasons",
        )
        for n in gpu.all(tag)
    ]  # fmt: skip
    if not groups:
        return []
    active = [
        match[1] if (match := _REASON.fullmatch(n.tag)) else n.tag.lower().replace(" ", "_")
        for group in groups
        for n in _leaves(group)
        if n.text.strip() == "Active"
    ]
    return [("claimed.throttle_reasons", ", ".join(sorted(active)), "", {})]


def _leaves(node: Node) -> list[Node]:
    """All descendants that have text of their own, not deeper than the tree was read."""
    found, open_nodes = [], [node]
    while open_nodes:
        here = open_nodes.pop()
        open_nodes += here.children
        if here.text.strip():
            found.append(here)
    return found
