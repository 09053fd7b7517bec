"""Outputs that are lines: plain `nvidia-smi`, `nvidia-smi topo -m`, nccl-tests, kernel logs."""

from __future__ import annotations

import re

from hybrid.audit.curves import classify
from hybrid.audit.reading import Reading, Scalar

_GIB = 2**30
_FIRST = re.compile(
    r"^\|\s+(\d+)\s+(\S.*?)\s+(?:(On|Off|N/A|WDDM|TCC|MCDM)\s+)\|\s+([0-9A-Fa-f:.]+)\s+\w+\s+\|"
    r"\s+(\S+)\s+\|\s*$"
)
_SECOND = re.compile(
    r"^\|\s*\S+\s+(\d+)C\s+(P\d+)\s+(\d+)W\s*/\s*(\d+|N/A)W?\s*\|\s*(\d+)MiB\s*/\s*(\d+)MiB\s*\|"
)
_HEAD = re.compile(r"Driver Version:\s*(\S+)(?:\s+CUDA Version:\s*(\S+))?")


def _say(
    name: str, value: Scalar, gpu: int | None, source: str, unit: str = "", **detail: object
) -> Reading:
    return Reading(
        name=name, value=value, unit=unit, source=source, fakeable=True, gpu=gpu, detail=detail
    )


def read_table(text: str) -> list[Reading]:
    """Readings of plain `nvidia-smi`, whole or rows of it; [] when there are none.

    GPUs are numbered in the order of the rows: what was pasted together may repeat an index.
    """
    source = "nvidia-smi"
    found: list[Reading] = []
    gpu = -1
    for line in text.splitlines():
        if first := _FIRST.match(line):
            gpu += 1
            found.append(_say("claimed.name", first[2], gpu, source))
            place = _bus(first[4])
            if place:
                found.append(_say("claimed.pci_bus_id", place, gpu, source))
            if first[3] in ("WDDM", "TCC", "MCDM"):
                found.append(_say("claimed.driver_model", first[3], gpu, source))
            if first[5] == "Off":
                found.append(_say("claimed.ecc_mode", "Disabled", gpu, source))
            elif first[5].isascii() and first[5].isdecimal():
                found.append(_say("claimed.ecc_mode", "Enabled", gpu, source))
                count = int(first[5][:15])
                found.append(_say("claimed.ecc_uncorrected", count, gpu, source, "count"))
        elif gpu >= 0 and (second := _SECOND.match(line)):
            for name, value, unit in (
                ("temperature_c", second[1], "°C"), ("power_w", second[3], "W"),
                ("power_limit_w", second[4], "W"), ("memory_used_mib", second[5], "MiB"),
                ("memory_mib", second[6], "MiB"),
            ):  # fmt: skip
                if value.isascii() and value.isdecimal():
                    found.append(_say(f"claimed.{name}", int(value[:15]), gpu, source, unit))
            found.append(_say("claimed.performance_state", second[2], gpu, source))
    if gpu < 0:
        return []
    if head := _HEAD.search(text):
        found.append(_say("claimed.driver_version", head[1], None, source))
        if head[2]:
            found.append(_say("claimed.cuda_version", head[2], None, source))
    return [*found, _say("claimed.gpu_count", gpu + 1, None, source, "count")]


def _bus(text: str) -> str | None:
    found = re.fullmatch(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)", text)
    return f"{int(found[1], 16):04x}:{found[2]}".lower() if found else None


def read_topology(text: str) -> list[Reading]:
    """`nvidia-smi topo -m`: for each GPU the NVLinks to its peers, and how it reaches them.

    [] when it is no such matrix. A link NV18 is 18 NVLinks; PIX, PXB, PHB, NODE, SYS are ever
    longer ways over PCIe (NVIDIA, `nvidia-smi topo -h`).
    """
    lines = [line.split() for line in text.splitlines() if re.match(r"\s*GPU\d", line)]
    rows = [cells for cells in lines if len(cells) > 1 and not cells[1].startswith("GPU")]
    found = []
    for i, cells in enumerate(rows):
        ways = [c for n, c in enumerate(cells[1 : len(rows) + 1]) if n != i and c != "X"]
        if not ways or not all(re.fullmatch(r"NV\d{1,3}|PIX|PXB|PHB|NODE|SYS", w) for w in ways):
            continue
        links = min(int(w[2:]) if w.startswith("NV") else 0 for w in ways)
        found.append(
            _say("claimed.nvlinks", links, i, "nvidia-smi topo -m", "count", ways=sorted(set(ways)))
        )
    return found


_RUN = re.compile(
    r"^\s*(\d{3,15})\s+\d+\s+\w+\s+\w+\s+(?:-?\d+\s+)?([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(\d+|N/A)\s",
    re.MULTILINE,
)


def read_nccl_tests(text: str) -> list[Reading]:
    """The curve of nccl-tests' `all_reduce_perf` (out of place): GiB/s over the links by size.

    Its class is of the shape alone: what the links carry is in no such output.

    [] when there are fewer than two rows.
    """
    rows = _RUN.findall(text)
    if len(rows) < 2:
        return []
    curve = tuple((float(size), float(bus) * 1e9 / _GIB) for size, _, _, bus, _ in rows if _ok(bus))
    wrong = sum(int(w[:15]) for *_, w in rows if w.isascii() and w.isdecimal())
    source = "nccl-tests"
    top = max((rate for _, rate in curve), default=None)
    kind, why = classify(sorted(curve))
    return [
        Reading(
            name="collective.busbw_gib_s", value=top, unit="GiB/s", source=source, fakeable=True,
            curve=curve,
        ),
        _say("collective.class", kind, None, source, why=why),
        _say("collective.errors", wrong, None, source, "count"),
    ]  # fmt: skip


def _ok(number: str) -> bool:
    return re.fullmatch(r"\d{1,12}(\.\d{0,6})?", number) is not None


_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d{1,4})\b,?\s*([^\n]*)")
_OFF = re.compile(
    r"NVRM: The NVIDIA GPU ([0-9A-Fa-f:.]+)(?:(?!NVRM: The)[\s\S]){0,300}?fallen off the bus"
)
_PROBE = re.compile(r"NVRM: The NVIDIA probe routine failed for (\d{1,4}) device")
_LIMITED = re.compile(
    r"([0-9A-Fa-f:.]+): ([\d.]{1,10}) Gb/s available PCIe bandwidth, limited by ([^\n]*)"
)


def read_kernel_log(text: str) -> list[Reading]:
    """NVIDIA's lines of a kernel log (dmesg): Xid errors, GPUs that are gone, limited links.

    The readings carry the line and the PCI address in `detail`. [] when there are none.
    """
    found: list[Reading] = []

    def say(name: str, value: Scalar, place: str, line: str, unit: str = "") -> None:
        detail = {"bus": place.lower().rstrip(":."), "line": " ".join(line.split())[:300]}
        found.append(_say(name, value, None, "kernel log", unit, **detail))

    for match in _XID.finditer(text):
        say("log.xid", int(match[2]), match[1], match[0])
    for match in _OFF.finditer(text):
        say("log.off_the_bus", match[1].lower(), match[1], match[0])
    for match in _PROBE.finditer(text):
        say("log.probe_failed", int(match[1]), "", match[0], "count")
    for match in _LIMITED.finditer(text):
        if _ok(match[2]):
            say("log.pcie_limited", float(match[2]), match[1], match[0], "Gbit/s")
    return found
