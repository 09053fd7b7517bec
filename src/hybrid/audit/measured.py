"""What was measured against the product that a GPU claims to be: agreements and contradictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from hybrid.audit import thresholds as t
from hybrid.audit.facts import Facts, as_number, finding
from hybrid.audit.reading import Expectation, Finding, Reading
from hybrid.audit.specs import Sku, Specs

GIB = 2**30
MIB = 2**20
GB = 1e9
_TENSOR = ("measured.matmul_tflops.bf16", "measured.matmul_tflops.fp16")


@dataclass(frozen=True)
class Check:
    """One property of a product that was, or should have been, measured.

    Attributes:
        reading: its name.
        says: whether the measurement is the product's; "unknown" where either is missing.
    """

    reading: str
    says: Literal["agrees", "differs", "unknown"]


def checks(facts: Facts, gpu: int, sku: Sku) -> list[Check]:
    """Every property that tells products apart and cannot be faked, in one list.

    Only readings that are not fakeable count. A cell that the table does not know gives "unknown".
    """
    return [
        _capability(facts, gpu, sku),
        _range(
            facts, gpu, "measured.sm_count", sku.sm_count, lambda v, known: v == known
        ),
        _range(
            facts, gpu, "measured.memory_bytes", sku.memory_total_mib,
            lambda v, known: t.USABLE_MEMORY.value * known
            <= v / MIB
            <= t.MEMORY_EXCESS.value * known,
        ),
        _host_memory(facts, gpu),
        _range(
            facts, gpu, "measured.memory_gib_s", sku.mem_bw_gbs,
            lambda v, known: t.BANDWIDTH_LOW.value * known
            <= v * GIB / GB
            <= t.BANDWIDTH_EXCESS.value * known,
        ),
        _range(
            facts, gpu, tensor_reading(facts, gpu), sku.tensor_tflops,
            lambda v, known: t.TENSOR_LOW.value * known <= v <= t.TENSOR_EXCESS.value * known,
        ),
        _answered(facts, gpu),
    ]  # fmt: skip


def tensor_reading(facts: Facts, gpu: int) -> str:
    """bf16 where the GPU has it; else fp16, in which older data sheets are written."""
    return next((n for n in _TENSOR if facts.get(n, gpu) is not None), _TENSOR[0])


def _measured(facts: Facts, gpu: int, name: str) -> Reading | None:
    return next((r for r in facts.all(name, gpu) if not r.fakeable), None)


def _range(
    facts: Facts, gpu: int, name: str, known: float | None, fits: Callable[[float, float], bool]
) -> Check:
    value = as_number(_measured(facts, gpu, name))
    if value is None or known is None:
        return Check(name, "unknown")
    return Check(name, "agrees" if fits(value, known) else "differs")


def _capability(facts: Facts, gpu: int, sku: Sku) -> Check:
    name = "measured.compute_capability"
    r = _measured(facts, gpu, name)
    if r is None or sku.compute_capability is None:
        return Check(name, "unknown")
    return Check(name, "agrees" if str(r.value) == sku.compute_capability else "differs")


def _host_memory(facts: Facts, gpu: int) -> Check:
    name = "measured.chunk_min_gib_s"
    r = _measured(facts, gpu, name)
    least, best = as_number(r), _fastest_chunk(r)
    if least is None or best is None:
        return Check(name, "unknown")
    return Check(name, "differs" if least < t.HOST_CHUNK.value * best else "agrees")


def _fastest_chunk(slowest: Reading | None) -> float | None:
    """GiB/s of the fastest part of memory; the median would be the host's where half of it is."""
    return max((rate for _, rate in slowest.curve), default=None) if slowest else None


def _answered(facts: Facts, gpu: int) -> Check:
    name = "challenge.correct"
    r = _measured(facts, gpu, name)
    if r is None:
        return Check(name, "unknown")
    return Check(name, "agrees" if r.value is True else "differs")


def also_fits(facts: Facts, gpu: int, sku: Sku, specs: Specs) -> tuple[str, ...]:
    """Other products of the same die that nothing measured excludes; blanks exclude nothing."""
    found = []
    for other in specs.skus:
        if other is sku or other.die is None or other.die != sku.die:
            continue
        said = [c.says for c in checks(facts, gpu, other) if c.reading.startswith("measured.")]
        if "differs" in said or said.count("agrees") < 3 or _too_fast_for(facts, gpu, other):
            continue
        found.append(other.product)
    return tuple(found)


def _too_fast_for(facts: Facts, gpu: int, other: Sku) -> bool:
    """Copies to a peer that the other product's NVLinks could not carry."""
    rates = [as_number(r) for r in facts.all("measured.p2p_gib_s", gpu) if not r.fakeable]
    fastest = max((r for r in rates if r is not None), default=None)
    if fastest is None or other.nvlink_total_gbs is None:
        return False
    return fastest * GIB / GB > t.NVLINK_EXCESS.value * other.nvlink_total_gbs / 2


def against_product(facts: Facts, gpu: int, sku: Sku, specs: Specs) -> Iterator[Finding]:
    """Measurements that the claimed product cannot give."""
    yield from _nvlink(facts, gpu, sku, specs)
    yield from _silicon(facts, gpu, sku)
    yield from _memory(facts, gpu, sku)
    yield from _speed(facts, gpu, sku)


def _nvlink(facts: Facts, gpu: int, sku: Sku, specs: Specs) -> Iterator[Finding]:
    """Peers joined by just what a lesser product of the same die has: A800, H800."""
    if sku.nvlink_total_gbs is None:
        return
    found = [r for r in facts.all("measured.p2p_gib_s", gpu) if not r.fakeable]
    fastest = max(found, key=lambda r: as_number(r) or 0.0, default=None)
    rate = (as_number(fastest) or 0.0) * GIB / GB
    for other in specs.skus:
        links = other.nvlink_total_gbs
        if fastest is None or links is None or other.die != sku.die:
            continue
        low, high = (x.value * links / 2 for x in (t.NVLINK_TWIN, t.NVLINK_EXCESS))
        if links < t.NVLINK_COPY.value * sku.nvlink_total_gbs and low <= rate <= high:
            yield finding(
                "nvlink-of-another", "identity", "contradicted",
                f"copies from GPU {gpu} to its peers reach {rate:.0f} GB/s: that is what the"
                f" NVLinks of a {other.product} carry; a {sku.product} has"
                f" {sku.nvlink_total_gbs / 2:g} in each direction",
                [fastest],
                Expectation(
                    low=t.NVLINK_COPY.value * sku.nvlink_total_gbs / 2 * GB / GIB, source=sku.source
                ),
            )  # fmt: skip
            return


def _silicon(facts: Facts, gpu: int, sku: Sku) -> Iterator[Finding]:
    sms = _measured(facts, gpu, "measured.sm_count")
    if sms is not None and sku.sm_count is not None and sms.value != sku.sm_count:
        mode = facts.get("claimed.mig_mode", gpu)
        parts = mode is not None and mode.value == "Enabled"
        fewer = (as_number(sms) or 0) < sku.sm_count
        yield finding(
            "mig-slice" if parts and fewer else "sm-count", "identity", "contradicted",
            f"work on GPU {gpu} was seen on {sms.value} SMs; a {sku.product} has {sku.sm_count}"
            + (": this is a slice of one (MIG)" if parts and fewer else ""),
            [sms, mode] if parts and mode else [sms],
            Expectation(allowed=(sku.sm_count,), source=sku.source),
        )  # fmt: skip
    capability = _measured(facts, gpu, "measured.compute_capability")
    if (
        capability is not None
        and sku.compute_capability is not None
        and str(capability.value) != sku.compute_capability
    ):
        yield finding(
            "compute-capability", "identity", "contradicted",
            f"GPU {gpu} runs binaries of {capability.value}; a {sku.product} is"
            f" {sku.compute_capability}",
            [capability], Expectation(allowed=(sku.compute_capability,), source=sku.source),
        )  # fmt: skip
    l2 = _measured(facts, gpu, "measured.l2_bytes")
    size = as_number(l2)
    if l2 is not None and size is not None and sku.l2_mib is not None:
        low, high = (x.value * sku.l2_mib for x in (t.L2_LOW, t.L2_HIGH))
        if not low <= size / MIB <= high:
            yield finding(
                "l2-size", "identity", "contradicted",
                f"the L2 of GPU {gpu} ends at {size / MIB:.3g} MiB; a {sku.product} has"
                f" {sku.l2_mib:g}",
                [l2], Expectation(low=low * MIB, high=high * MIB, source=sku.source),
            )  # fmt: skip
    double = _measured(facts, gpu, "measured.matmul_tflops.fp64")
    single = _measured(facts, gpu, "measured.matmul_tflops.fp32")
    a, b = as_number(double), as_number(single)
    if double and single and a is not None and b and sku.die is not None:
        full = sku.die in t.FULL_FP64_DIES
        # FP32 that is fused off makes the ratio large; that has a finding of its own.
        crippled = sku.fp32_tflops is not None and b < t.FP32_CRIPPLED.value * sku.fp32_tflops
        if (full and a / b < t.FP64_FULL.value) or (
            not full and not crippled and a / b > t.FP64_FULL.value
        ):
            yield finding(
                "fp64-ratio", "identity", "contradicted",
                f"FP64 of GPU {gpu} runs at {a / b:.2g} of its FP32, which is not {sku.die}'s",
                [double, single],
                Expectation(
                    low=t.FP64_FULL.value if full else None,
                    high=None if full else t.FP64_FULL.value,
                    source=t.FP64_FULL.why,
                ),
            )  # fmt: skip


def _memory(facts: Facts, gpu: int, sku: Sku) -> Iterator[Finding]:
    there = _measured(facts, gpu, "measured.memory_bytes")
    size = as_number(there)
    if there is not None and size is not None and sku.memory_total_mib is not None:
        low = t.USABLE_MEMORY.value * sku.memory_total_mib * MIB
        high = t.MEMORY_EXCESS.value * sku.memory_total_mib * MIB
        free, total = there.detail.get("free_bytes"), there.detail.get("total_bytes")
        taken = 0.0
        if isinstance(free, int) and isinstance(total, int) and total > 0:
            taken = 1 - free / total
        if size > high or (size < low and taken < 0.07):
            yield finding(
                "memory-size", "identity", "contradicted",
                f"GPU {gpu} keeps {size / GIB:.1f} GiB; a {sku.product} has"
                f" {sku.memory_total_mib / 1024:.1f}",
                [there], Expectation(low=low, high=high, source=sku.source),
            )  # fmt: skip
        elif size < low:
            yield finding(
                "memory-taken", "health", "degraded",
                f"{100 * taken:.0f} % of the memory of GPU {gpu} was taken already: others use it",
                [there], Expectation(low=low, source=sku.source),
            )  # fmt: skip


def _speed(facts: Facts, gpu: int, sku: Sku) -> Iterator[Finding]:
    """Faster than the product can be; and FP32 that a fuse holds back."""
    moved = _measured(facts, gpu, "measured.memory_gib_s")
    rate = as_number(moved)
    if moved is not None and rate is not None and sku.mem_bw_gbs is not None:
        most = t.BANDWIDTH_EXCESS.value * sku.mem_bw_gbs
        if rate * GIB / GB > most:
            yield finding(
                "faster-than-product", "identity", "contradicted",
                f"the memory of GPU {gpu} moves {rate * GIB / GB:.0f} GB/s; a {sku.product} has"
                f" {sku.mem_bw_gbs:g}",
                [moved], Expectation(high=most * GB / GIB, source=sku.source),
            )  # fmt: skip
    products = _measured(facts, gpu, tensor_reading(facts, gpu))
    speed = as_number(products)
    if products is not None and speed is not None and sku.tensor_tflops is not None:
        most = t.TENSOR_EXCESS.value * sku.tensor_tflops
        if speed > most:
            yield finding(
                "faster-than-product", "identity", "contradicted",
                f"GPU {gpu} multiplies at {speed:.0f} TFLOP/s; the peak of a {sku.product} is"
                f" {sku.tensor_tflops:g}",
                [products], Expectation(high=most, source=sku.source),
            )  # fmt: skip
    single = _measured(facts, gpu, "measured.matmul_tflops.fp32")
    slow = as_number(single)
    if single is not None and slow is not None and sku.fp32_tflops is not None:
        least = t.FP32_CRIPPLED.value * sku.fp32_tflops
        well = rate is not None and sku.mem_bw_gbs is not None and (
            rate * GIB / GB >= t.BANDWIDTH_LOW.value * sku.mem_bw_gbs
        )  # fmt: skip
        if slow < least and well:
            yield finding(
                "fp32-held-back", "identity", "contradicted",
                f"FP32 of GPU {gpu} runs at {slow:.2g} of {sku.fp32_tflops:g} TFLOP/s while its"
                " memory is fast: as mining cards are made",
                [single], Expectation(low=least, source=sku.source),
            )  # fmt: skip


def without_product(facts: Facts, gpu: int) -> Iterator[Finding]:
    """What contradicts the node's own words, whatever the product."""
    least = _measured(facts, gpu, "measured.chunk_min_gib_s")
    a, b = as_number(least), _fastest_chunk(least)
    if least and a is not None and b is not None and a < t.HOST_CHUNK.value * b:
        host = a < t.HOST_CHUNK_GIB_S.value
        yield finding(
            "host-backed-memory" if host else "slow-chunk",
            "identity" if host else "health", "contradicted" if host else "degraded",
            f"part of GPU {gpu}'s memory is read at {a:.3g} GiB/s, other parts at {b:.3g}"
            + (": at the speed of the PCIe link, so it is the host's" if host else ""),
            [least], Expectation(low=t.HOST_CHUNK.value * b, source=t.HOST_CHUNK.why),
        )  # fmt: skip
    wrong = _measured(facts, gpu, "measured.memory_errors")
    words = as_number(wrong)
    if wrong is not None and words:
        chunk = wrong.detail.get("chunk_bytes")
        by_chunk = wrong.detail.get("wrong_words_by_chunk")
        most = max(by_chunk.values()) if isinstance(by_chunk, dict) and by_chunk else words
        aliased = isinstance(chunk, int) and most > t.ALIASED_WORDS.value * chunk / 8
        yield finding(
            "memory-not-there" if aliased else "memory-errors",
            "identity" if aliased else "health", "contradicted" if aliased else "unfit",
            f"{words:.0f} words of GPU {gpu}'s memory came back other than written"
            + (": more was offered than there is" if aliased else ""),
            [wrong], Expectation(high=0, source="the probe's own pattern"),
        )  # fmt: skip
    sms = _measured(facts, gpu, "measured.sm_count")
    attributes = sms.detail.get("attributes") if sms is not None else None
    said = attributes.get("sm_count") if isinstance(attributes, dict) else None
    if sms is not None and isinstance(said, int) and said != sms.value:
        yield finding(
            "attribute-against-measurement", "identity", "contradicted",
            f"the driver says that GPU {gpu} has {said} SMs; work was seen on {sms.value}", [sms],
            Expectation(allowed=(said,), source="cudaDeviceProp"),
        )  # fmt: skip
