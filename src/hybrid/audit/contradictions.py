"""Claims against claims: sources that disagree, names that do not fit, files that are forged.

A contradiction proves that somebody lies; agreement proves nothing, for all of it can be set.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from hybrid.audit import thresholds as t
from hybrid.audit.facts import Facts, as_number, finding, where
from hybrid.audit.reading import Expectation, Finding, Reading
from hybrid.audit.specs import Sku, Specs, memory_range

_TABLE = "gpus.csv"
_SAME = ("claimed.name", "claimed.uuid", "claimed.serial", "claimed.pci_device_id")
_ONCE = (
    ("claimed.uuid", "uuid-repeated", "UUID"),
    ("claimed.serial", "serial-repeated", "serial number"),
    ("claimed.pci_bus_id", "bus-id-repeated", "PCI address"),
)


def claimed_product(facts: Facts, gpu: int, specs: Specs) -> Sku | None:
    """The one product of the table that a GPU claims to be, by name, else by PCI id; else None."""
    name, pci = facts.text("claimed.name", gpu), facts.text("claimed.pci_device_id", gpu)
    found = specs.by_name(name) if name else ()
    if not found and pci:
        found = specs.by_pci_id(pci)
    if len(found) > 1:
        narrower = specs.find(name, pci, facts.number("claimed.memory_mib", gpu))
        found = narrower or found
    return found[0] if len(found) == 1 else None


def contradictions(
    facts: Facts, specs: Specs, previous: Facts | None, sold_as: str | None
) -> Iterator[Finding]:
    """Every contradiction among the claims of one node."""
    yield from _drivers(facts)
    yield from _counts(facts)
    yield from _forgeries(facts)
    yield from _repeated(facts)
    if previous is not None:
        yield from _changed(facts, previous)
    for gpu in facts.gpus:
        yield from _disagreeing(facts, gpu)
        if sold_as is not None:
            yield from _offer(facts, gpu, specs, sold_as)
        sku = claimed_product(facts, gpu, specs)
        yield from _name(facts, gpu, specs)
        if sku is not None:
            yield from _product(facts, gpu, sku, specs)
        yield from _shares(facts, gpu)


def _drivers(facts: Facts) -> Iterator[Finding]:
    claimed = facts.all("claimed.driver_version")
    release = facts.text("kernel.release") or ""
    on_windows = "microsoft" in release.lower() or bool(facts.everywhere("claimed.driver_model"))
    for r in claimed[:1]:
        major = re.match(r"(\d{3})\.", str(r.value))
        low, high = t.WINDOWS_BRANCHES
        if major and not on_windows and low <= int(major[1]) <= high and int(major[1]) % 5:
            yield finding(
                "windows-driver", "identity", "contradicted",
                f"driver {r.value} exists on Windows only, and this is Linux: the NVIDIA library"
                " of the node is not NVIDIA's",
                [r], Expectation(source="CUDA release notes, driver versions by system"),
            )  # fmt: skip
    kernel = facts.get("kernel.driver_version")
    for r in claimed:
        if kernel is not None and r.value != kernel.value:
            yield finding(
                "driver-against-kernel", "identity", "contradicted",
                f"{r.source} says driver {r.value}, the kernel has {kernel.value} loaded; NVIDIA's"
                " own tools refuse to work so",
                [r, kernel], Expectation(allowed=(kernel.value,), source=kernel.source),
            )  # fmt: skip


def _counts(facts: Facts) -> Iterator[Finding]:
    """More GPUs than the kernel has are a lie; fewer are a container's share."""
    if "microsoft" in (facts.text("kernel.release") or "").lower():
        return  # WSL shows no PCI devices
    for r in facts.all("claimed.gpu_count"):
        listed = as_number(r)
        for name in ("kernel.gpu_count", "kernel.pci_count", "kernel.device_nodes"):
            kernel = facts.get(name)
            there = as_number(kernel)
            if kernel is not None and listed is not None and there is not None and listed > there:
                yield finding(
                    "more-gpus-than-kernel", "identity", "contradicted",
                    f"{r.source} lists {listed:g} GPUs, {kernel.source} has {there:g}",
                    [r, kernel], Expectation(high=there, source=kernel.source),
                )  # fmt: skip
                break
    attached, listed_r = facts.get("claimed.attached_gpus"), facts.get("claimed.gpu_count")
    a, b = as_number(attached), as_number(listed_r)
    if attached and listed_r and a is not None and b is not None and a != b:
        yield finding(
            "partial-output", "identity", "note",
            f"nvidia-smi says that {a:g} GPUs are attached and describes {b:g}",
            [attached, listed_r],
        )  # fmt: skip


def _forgeries(facts: Facts) -> Iterator[Finding]:
    for r in facts.everywhere("kernel.foreign_mounts"):
        yield finding(
            "foreign-mounts", "identity", "contradicted",
            f"something is mounted over what the driver says of its GPUs: {r.value}", [r],
            Expectation(source="proc(5); libnvidia-container mounts a tmpfs and procfs, no more"),
        )  # fmt: skip
    for r in facts.everywhere("kernel.not_procfs"):
        yield finding(
            "not-procfs", "identity", "contradicted",
            f"what should be the driver's own file is not: {r.value}", [r],
            Expectation(source="statfs(2): PROC_SUPER_MAGIC"),
        )  # fmt: skip
    for r in facts.everywhere("claimed.hooked"):
        yield finding(
            "driver-hooked", "identity", "contradicted",
            f"a library answers in the driver's place and gives shares of a GPU out: {r.value}",
            [r],
        )  # fmt: skip
    for r in facts.everywhere("kernel.preloaded"):
        names = [h for h in t.HOOKS if h in str(r.value).lower()]
        if names:
            yield finding(
                "preloaded-hook", "identity", "contradicted",
                f"every program here must first load {r.value}, which answers in the driver's"
                " place",
                [r],
            )  # fmt: skip


def _repeated(facts: Facts) -> Iterator[Finding]:
    for name, kind, label in _ONCE:
        by_value: dict[tuple[str, object], list[Reading]] = defaultdict(list)
        for gpu in facts.gpus:
            board = facts.get("claimed.multi_gpu_board", gpu)
            if name == "claimed.serial" and board is not None and board.value is True:
                continue
            for r in facts.all(name, gpu):
                by_value[r.source, r.value].append(r)
        for (source, value), readings in by_value.items():
            if len(readings) > 1 and str(value).strip("0X") != "":
                gpus = ", ".join(str(r.gpu) for r in readings)
                yield finding(
                    kind, "identity", "contradicted",
                    f"GPUs {gpus} have one {label}, {value} ({source}): one card answers for"
                    " several",
                    readings,
                )  # fmt: skip
                break


def _changed(facts: Facts, previous: Facts) -> Iterator[Finding]:
    now = {r.value for r in facts.everywhere("claimed.uuid")}
    then = {r.value for r in previous.everywhere("claimed.uuid")}
    if not now or not then or now == then:
        return
    boots = [f.get("kernel.boot_id") for f in (facts, previous)]
    same_boot = boots[0] is not None and boots[1] is not None and boots[0].value == boots[1].value
    readings = [r for r in facts.everywhere("claimed.uuid") if r.value not in then]
    gone = sorted(str(u) for u in then - now)
    if same_boot or now & then:
        yield finding(
            "uuid-changed", "identity", "contradicted",
            f"since the last audit of this node {len(readings)} GPUs have other UUIDs and"
            f" {len(gone)} are gone ({', '.join(gone)[:200]})"
            + (", without a reboot" if same_boot else ""),
            readings or facts.everywhere("claimed.uuid"),
            Expectation(allowed=tuple(sorted(str(u) for u in then)), source="earlier audit"),
        )  # fmt: skip
    else:
        yield finding(
            "another-machine", "identity", "note",
            "all GPUs have other UUIDs than at the last audit of this node: it is another machine",
            readings,
        )  # fmt: skip


def _disagreeing(facts: Facts, gpu: int) -> Iterator[Finding]:
    for name in _SAME:
        found = facts.all(name, gpu)
        other = next((r for r in found[1:] if _plain(r) != _plain(found[0])), None)
        if other is not None:
            yield finding(
                "sources-disagree", "identity", "contradicted",
                f"GPU {gpu}: {found[0].source} says {found[0].value}, {other.source} says"
                f" {other.value}",
                [found[0], other],
            )  # fmt: skip
    memory = facts.all("claimed.memory_mib", gpu)
    sizes = [as_number(r) or 0 for r in memory]
    if memory and max(sizes) > 1.02 * min(sizes):
        yield finding(
            "sources-disagree", "identity", "contradicted",
            f"GPU {gpu}: memory is "
            + ", ".join(f"{r.value} MiB by {r.source}" for r in memory),
            memory,
        )  # fmt: skip


def _plain(r: Reading) -> str:
    return str(r.value).strip().lower().removeprefix("nvidia ")


def _offer(facts: Facts, gpu: int, specs: Specs, sold_as: str) -> Iterator[Finding]:
    offered = specs.sold_as(sold_as)
    name = facts.get("claimed.name", gpu)
    sku = claimed_product(facts, gpu, specs)
    if not offered or name is None or sku in offered:
        return
    memory = facts.number("claimed.memory_mib", gpu)
    what = f"{name.value}" + (f" with {memory:g} MiB" if memory else "")
    yield finding(
        "sold-as-another", "identity", "contradicted",
        f"GPU {gpu} is offered as {sold_as} and calls itself {what}", [name],
        Expectation(allowed=tuple(n for s in offered for n in s.names), source=_TABLE),
    )  # fmt: skip


def _name(facts: Facts, gpu: int, specs: Specs) -> Iterator[Finding]:
    """The name against what needs no product: brand, and the PCI id's own product."""
    name, brand = facts.get("claimed.name", gpu), facts.get("claimed.brand", gpu)
    if name is None:
        return
    if "graphics device" in str(name.value).lower():
        yield finding(
            "generic-name", "identity", "note",
            f"GPU {gpu} has no product name ({name.value}): the driver does not know the board, as"
            " with mining cards and engineering samples",
            [name],
        )  # fmt: skip
    if brand is not None and (brand.value == "GeForce") != ("GeForce" in str(name.value)):
        yield finding(
            "name-against-brand", "identity", "contradicted",
            f"GPU {gpu} is called {name.value} and its brand is {brand.value}", [name, brand],
        )  # fmt: skip
    pci = facts.get("claimed.pci_device_id", gpu)
    by_name = specs.by_name(str(name.value))
    by_pci = specs.by_pci_id(str(pci.value)) if pci is not None else ()
    if pci is not None and by_name and by_pci and not set(by_name) & set(by_pci):
        yield finding(
            "name-against-pci-id", "identity", "contradicted",
            f"GPU {gpu} is called {name.value}, and its PCI id {pci.value} is that of"
            f" {by_pci[0].product}",
            [name, pci],
            Expectation(allowed=by_name[0].pci_device_ids, source=by_name[0].source),
        )  # fmt: skip


def _product(facts: Facts, gpu: int, sku: Sku, specs: Specs) -> Iterator[Finding]:
    """What a GPU says of itself against the product that it claims to be."""
    memory = facts.get("claimed.memory_mib", gpu)
    size = as_number(memory)
    divided = (facts.text("claimed.virtualization", gpu) or "").lower() == "vgpu"
    if memory is not None and size is not None and not divided and not sku.fits_memory(size):
        low, high = memory_range(sku)
        yield finding(
            "name-against-memory", "identity", "contradicted",
            f"GPU {gpu} is called {sku.product} and has {size:g} MiB; that product has"
            f" {sku.memory_total_mib} (renamed, or its memory was changed)",
            [memory], Expectation(low=low, high=high, source=sku.source),
        )  # fmt: skip
    architecture = facts.get("claimed.architecture", gpu)
    if architecture is not None and sku.family is not None:
        said = str(architecture.value).split()[0]
        if said != sku.family:
            yield finding(
                "name-against-architecture", "identity", "contradicted",
                f"GPU {gpu} is called {sku.product} ({sku.family}) and its architecture {said}",
                [architecture], Expectation(allowed=(sku.family,), source=sku.source),
            )  # fmt: skip
    vbios = facts.get("claimed.vbios", gpu)
    if vbios is not None and sku.die is not None:
        die = t.VBIOS_DIES.get(str(vbios.value)[:5])
        if die is not None and sku.die in t.VBIOS_DIES.values() and die != sku.die:
            yield finding(
                "name-against-vbios", "identity", "contradicted",
                f"GPU {gpu} is called {sku.product} ({sku.die}) and its video BIOS {vbios.value} is"
                f" one of {die}",
                [vbios],
                Expectation(
                    allowed=tuple(v for v, d in t.VBIOS_DIES.items() if d == sku.die),
                    source="thresholds.VBIOS_DIES",
                ),
            )  # fmt: skip
    part = facts.get("claimed.part_number", gpu)
    if part is not None and re.fullmatch(r"[0-9A-Fa-f]{4}-\d{3}-[A-Z]\d", str(part.value)):
        inside = f"10de:{str(part.value)[:4].lower()}"
        others = specs.by_pci_id(inside)
        if others and sku not in others:
            yield finding(
                "name-against-part-number", "identity", "contradicted",
                f"GPU {gpu} is called {sku.product}, and its part number {part.value} is that of a"
                f" {others[0].product}",
                [part], Expectation(allowed=sku.pci_device_ids, source=sku.source),
            )  # fmt: skip
    link = facts.get("claimed.pcie_gen_device_max", gpu)
    generation = as_number(link)
    if link and generation is not None and sku.pcie_gen and generation < sku.pcie_gen:
        yield finding(
            "device-link-below-product", "identity", "contradicted",
            f"GPU {gpu} itself can do PCIe gen {generation:g}, a {sku.product} does gen"
            f" {sku.pcie_gen}",
            [link], Expectation(low=sku.pcie_gen, source=sku.source),
        )  # fmt: skip


def _shares(facts: Facts, gpu: int) -> Iterator[Finding]:
    mode = facts.get("claimed.virtualization", gpu)
    if mode is not None and str(mode.value).upper() == "VGPU":
        yield finding(
            "vgpu-share", "identity", "contradicted",
            f"{where(gpu)} is a share of a GPU (vGPU), not a GPU", [mode],
            Expectation(allowed=("None", "Pass-Through"), source="nvidia-smi manual"),
        )  # fmt: skip
