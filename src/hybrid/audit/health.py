"""Is it well? Errors that were counted, links and clocks under load, speed against the product.

Nothing is judged from an idle card: a link at rest is at generation 1, and clocks are low.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybrid.audit import thresholds as t
from hybrid.audit.facts import Facts, as_number, finding, where
from hybrid.audit.measured import GB, GIB, tensor_reading
from hybrid.audit.reading import Expectation, Finding, Severity
from hybrid.audit.specs import Sku

_HARD = ("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal")


def node_health(facts: Facts) -> Iterator[Finding]:
    """Of the node, and of GPUs that only its log names."""
    for gpu in (None, *facts.gpus):
        yield from _log(facts, gpu)
        for r in facts.all("claimed.tool_failed", gpu):
            yield finding(
                "tool-failed", "health", "unfit",
                f"{where(gpu)}: {r.source} failed: {r.value}", [r],
            )  # fmt: skip


def _log(facts: Facts, gpu: int | None) -> Iterator[Finding]:
    worst: dict[int, Finding] = {}
    for r in facts.all("log.xid", gpu):
        code = int(as_number(r) or 0)
        if code in t.XID_SEVERITY and code not in worst:
            level, why = t.XID_SEVERITY[code]
            severity: Severity = "unfit" if level == "unfit" else "degraded"
            worst[code] = finding(
                "xid", "health", severity,
                f"{where(gpu)} ({r.detail.get('bus')}): Xid {code}, {why}", [r],
                Expectation(source="NVIDIA Xid catalogue"),
            )  # fmt: skip
    yield from worst.values()
    for r in facts.all("log.off_the_bus", gpu):
        yield finding(
            "off-the-bus", "health", "unfit", f"the GPU at {r.value} fell off the bus", [r]
        )
    for r in facts.all("log.probe_failed", gpu):
        yield finding(
            "driver-probe-failed", "health", "unfit",
            f"the driver could not take {r.value} GPUs of this node", [r],
        )  # fmt: skip
    for r in facts.all("log.pcie_limited", gpu):
        yield finding(
            "link-limited", "health", "degraded",
            f"{where(gpu)}: the kernel says that something on the way limits the link to"
            f" {r.value} Gbit/s",
            [r],
        )  # fmt: skip


def claimed_health(facts: Facts, gpu: int, sku: Sku | None) -> Iterator[Finding]:
    """What a GPU's own counters and settings say; nobody has a reason to make these up."""
    flags: tuple[tuple[str, str, Severity, str], ...] = (
        ("claimed.remap_failed", "remap-failed", "unfit",
         "a row of memory could not be remapped: return the board"),
        ("claimed.remap_pending", "remap-pending", "degraded",
         "a row of memory waits to be remapped: reset the GPU"),
        ("claimed.retired_pending", "retirement-pending", "degraded",
         "a page of memory waits to be retired: reload the driver"),
        ("claimed.sram_threshold_exceeded", "sram-errors", "unfit",
         "its SRAM had more errors than NVIDIA allows: return the board"),
        ("claimed.reset_required", "reset-required", "degraded", "the driver asks for a reset"),
    )  # fmt: skip
    for name, kind, severity, text in flags:
        r = facts.get(name, gpu)
        if r is not None and r.value is True:
            yield finding(kind, "health", severity, f"GPU {gpu}: {text}", [r])
    errors = facts.get("claimed.ecc_uncorrected", gpu)
    if errors is not None and (as_number(errors) or 0) > 0:
        yield finding(
            "ecc-uncorrected", "health", "degraded",
            f"GPU {gpu} had {errors.value} uncorrected memory errors since its driver was loaded",
            [errors], Expectation(high=0, source="NVIDIA GPU memory error management"),
        )  # fmt: skip
    pages = facts.get("claimed.retired_double_bit", gpu)
    if pages is not None and (as_number(pages) or 0) >= t.RETIRED_PAGES.value:
        yield finding(
            "retired-pages", "health", "unfit",
            f"GPU {gpu} has retired {pages.value} pages: NVIDIA replaces such boards", [pages],
            Expectation(high=t.RETIRED_PAGES.value - 1, source=t.RETIRED_PAGES.why),
        )  # fmt: skip
    ecc = facts.get("claimed.ecc_mode", gpu)
    if ecc is not None and ecc.value == "Disabled" and sku is not None and sku.ecc == "yes":
        hbm = sku.memory_type in t.HBM
        yield finding(
            "ecc-off", "health", "degraded" if hbm else "note",
            f"GPU {gpu} runs without ECC, which a {sku.product} has: wrong bits stay unseen", [ecc],
            Expectation(allowed=("Enabled",), source=sku.source),
        )  # fmt: skip
    yield from _settings(facts, gpu)


def _settings(facts: Facts, gpu: int) -> Iterator[Finding]:
    limit, usual = (facts.get(f"claimed.power_limit{x}_w", gpu) for x in ("", "_default"))
    a, b = as_number(limit), as_number(usual)
    if limit and usual and a is not None and b and a < t.POWER_CAPPED.value * b:
        yield finding(
            "power-capped", "health", "degraded",
            f"GPU {gpu} may draw {a:g} W; as shipped it is {b:g} W", [limit, usual],
            Expectation(low=t.POWER_CAPPED.value * b, source="its own default limit"),
        )  # fmt: skip
    mig = facts.get("claimed.mig_mode", gpu)
    if mig is not None and mig.value == "Enabled":
        parts = facts.get("claimed.mig_devices", gpu)
        some = f" into {parts.value} parts" if parts is not None else ""
        yield finding(
            "mig-enabled", "health", "degraded",
            f"GPU {gpu} is divided{some} (MIG): a program sees one part of it",
            [mig] if parts is None else [mig, parts],
        )  # fmt: skip
    license_ = facts.get("claimed.license", gpu)
    if license_ is not None and "unlicensed" in str(license_.value).lower():
        yield finding(
            "vgpu-unlicensed", "health", "unfit",
            f"the vGPU has no licence ({license_.value}): it slows to a crawl after minutes",
            [license_],
        )  # fmt: skip
    used, total = (facts.get(f"claimed.memory{x}_mib", gpu) for x in ("_used", ""))
    a, b = as_number(used), as_number(total)
    if used and total and a is not None and b and a > 0.05 * b:
        yield finding(
            "memory-in-use", "health", "note",
            f"{a:g} of {b:g} MiB of GPU {gpu} are in use: yours, or somebody's who shares it",
            [used],
        )  # fmt: skip


def measured_health(facts: Facts, gpu: int, sku: Sku | None) -> Iterator[Finding]:
    """Links, peers, clocks and speed, all under load."""
    yield from _link(facts, gpu, sku)
    yield from _peers(facts, gpu, sku)
    reasons = facts.text("measured.throttle_reasons", gpu) or ""
    hard = sorted({w.strip() for w in reasons.split(",") if any(h in w.lower() for h in _HARD)})
    if hard:
        r = facts.all("measured.throttle_reasons", gpu)
        yield finding(
            "throttled", "health", "degraded",
            f"GPU {gpu} slows down under load: {', '.join(hard)}", r,
        )  # fmt: skip
    clock, most = (
        facts.get(n, gpu) for n in ("measured.clock_mhz_loaded", "claimed.clock_sm_max_mhz")
    )
    a, b = as_number(clock), as_number(most)
    if clock and most and a is not None and b and a < t.CLOCK_LOW.value * b:
        yield finding(
            "clock-low", "health", "degraded",
            f"GPU {gpu} runs at {a:.0f} MHz under load; it can do {b:.0f}", [clock, most],
            Expectation(low=t.CLOCK_LOW.value * b, source=t.CLOCK_LOW.why),
        )  # fmt: skip
    if sku is not None:
        yield from _speed(facts, gpu, sku)


def _link(facts: Facts, gpu: int, sku: Sku | None) -> Iterator[Finding]:
    """The link during copies against the least that NVIDIA accepts, and copies against the link."""
    generation, width = (facts.get(f"measured.pcie_{x}_loaded", gpu) for x in ("gen", "width"))
    g, w = as_number(generation), as_number(width)
    least = sku.dcgm_min_link if sku is not None else None
    for kind, r, value, need, what in (
        ("link-generation", generation, g, least[0] if least else None, "generation"),
        ("link-lanes", width, w, least[1] if least else None, "lanes"),
    ):
        if r is not None and value is not None and need is not None and value < need:
            yield finding(
                kind, "health", "degraded",
                f"the link of GPU {gpu} has PCIe {what} {value:g} while data moves; NVIDIA asks for"
                f" {need} at least",
                [r], Expectation(low=need, source="DCGM diag-skus"),
            )  # fmt: skip
    copies = facts.get("measured.h2d_gib_s", gpu)
    rate = as_number(copies)
    if copies is None or rate is None:
        return
    lane = t.PCIE_GB_S_PER_LANE.get(int(g)) if g is not None else None
    if lane is not None and w:
        carries, source = lane * w, f"PCIe gen {g:g} x{w:g} during the copy"
    elif least is not None:
        carries, source = t.PCIE_GB_S_PER_LANE[least[0]] * least[1], "DCGM diag-skus"
    else:
        return
    low = t.LINK_COPY.value * carries * GB / GIB
    if rate < low:
        yield finding(
            "copies-slow", "health", "degraded",
            f"pinned copies to GPU {gpu} reach {rate:.3g} GiB/s; the link carries"
            f" {carries * GB / GIB:.3g}",
            [copies, *(r for r in (generation, width) if r is not None)],
            Expectation(low=low, source=source),
        )  # fmt: skip


def _peers(facts: Facts, gpu: int, sku: Sku | None) -> Iterator[Finding]:
    for r in facts.all("measured.p2p_errors", gpu):
        if (as_number(r) or 0) > 0:
            yield finding(
                "peer-data-wrong", "health", "unfit",
                f"copies from GPU {gpu} to GPU {r.detail.get('peer')} arrive wrong, without an"
                " error: a patched driver",
                [r], Expectation(high=0, source="the probe's own pattern"),
            )  # fmt: skip
            break
    if sku is None or sku.nvlink_total_gbs is None:
        return
    links = facts.get("claimed.nvlinks", gpu)
    if links is not None and links.value == 0:
        yield finding(
            "no-nvlink", "health", "degraded",
            f"GPU {gpu} reaches its peers over {', '.join(links.detail.get('ways', []))}; a"
            f" {sku.product} has NVLink",
            [links], Expectation(low=1, source=sku.source),
        )  # fmt: skip
    rates = [(as_number(r), r) for r in facts.all("measured.p2p_gib_s", gpu)]
    known = [(v, r) for v, r in rates if v is not None]
    if known:
        slowest, r = min(known, key=lambda x: x[0])
        joined, count = sku.nvlink_total_gbs / 2, as_number(links)
        if count and sku.nvlink_gen is not None:  # boards of four join each pair by a few links
            joined = min(joined, count * t.NVLINK_GB_S[sku.nvlink_gen])
        low = t.NVLINK_COPY.value * joined * GB / GIB
        if slowest < low:
            yield finding(
                "peer-copies-slow", "health", "degraded",
                f"copies from GPU {gpu} to GPU {r.detail.get('peer')} reach {slowest:.3g} GiB/s;"
                f" its NVLinks carry {joined * GB / GIB:.3g}",
                [r], Expectation(low=low, source=sku.source),
            )  # fmt: skip


def _speed(facts: Facts, gpu: int, sku: Sku) -> Iterator[Finding]:
    name = tensor_reading(facts, gpu)
    for reading_name, nominal, low, unfit, factor, what in (
        ("measured.memory_gib_s", sku.mem_bw_gbs, t.BANDWIDTH_LOW, t.BANDWIDTH_UNFIT, GIB / GB,
         "memory"),
        (name, sku.tensor_tflops, t.TENSOR_LOW, t.TENSOR_UNFIT, 1.0, "matrix products"),
    ):  # fmt: skip
        r = facts.get(reading_name, gpu)
        value = as_number(r)
        if r is None or value is None or nominal is None:
            continue
        share = value * factor / nominal
        if share < low.value:
            yield finding(
                "memory-slow" if what == "memory" else "products-slow", "health",
                "unfit" if share < unfit.value else "degraded",
                f"the {what} of GPU {gpu} reach {value:.3g} {r.unit}, {100 * share:.0f} % of what"
                f" a {sku.product} has by data sheet; genuine ones reach {100 * low.value:.0f} %"
                " and more",
                [r], Expectation(low=low.value * nominal / factor, source=low.why),
            )  # fmt: skip
