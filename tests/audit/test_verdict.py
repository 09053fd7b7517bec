"""Verdicts: what genuine is, what keeps it unknown, and alarms that must not be raised."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from honest import GIB, MEASURABLE, SPECS, changed, claims_of, measured_of, node_reading, sku
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.audit.reading import Finding, Reading
from hybrid.audit.verdict import judge

A100, H100 = sku("A100-SXM4-80GB"), sku("H100 80GB HBM3")


def kinds(verdict: Any, *, notes: bool = False) -> list[str]:
    return [f.kind for f in verdict.findings if notes or f.severity != "note"]


@pytest.mark.parametrize("s", MEASURABLE, ids=lambda s: s.product)
def test_a_genuine_product_that_was_measured_is_genuine_and_fit(s: Any) -> None:
    verdict = judge([*claims_of(s), *measured_of(s)], SPECS, sold_as=s.product)
    assert (verdict.identity, verdict.health) == ("genuine", "fit")
    assert kinds(verdict) == []
    [gpu] = verdict.gpus
    assert (gpu.product, gpu.missing) == (s.product, ())


@pytest.mark.parametrize("s", MEASURABLE, ids=lambda s: s.product)
def test_claims_alone_are_at_best_unknown(s: Any) -> None:
    verdict = judge(claims_of(s), SPECS)
    assert (verdict.identity, verdict.health) == ("unknown", "fit")
    assert verdict.findings == ()
    assert {"measured.sm_count", "measured.memory_bytes", "challenge.correct"} <= set(
        verdict.gpus[0].missing
    )


@pytest.mark.parametrize(
    "name",
    ["measured.sm_count", "measured.memory_bytes", "measured.compute_capability",
     "measured.chunk_min_gib_s", "measured.memory_gib_s", "measured.matmul_tflops.bf16",
     "challenge.correct"],
)  # fmt: skip
def test_without_one_measurement_or_with_a_fakeable_one_it_is_unknown(name: str) -> None:
    readings = [*claims_of(A100), *measured_of(A100)]
    if name.endswith("bf16"):  # the fp16 figure would stand in for it
        readings = [r for r in readings if not r.name.endswith("fp16")]
    for worse in (
        [r for r in readings if r.name != name],
        changed(readings, name, None),
        [replace(r, fakeable=True) if r.name == name else r for r in readings],
    ):
        verdict = judge(worse, SPECS)
        assert verdict.identity == "unknown"
        assert verdict.gpus[0].missing == (name,)


@pytest.mark.parametrize("product", ["A10G", "H800", "A800-SXM4-80GB", "L20X"])
def test_a_product_whose_silicon_nobody_has_published_stays_unknown(product: str) -> None:
    s = sku(product)
    readings = [*claims_of(s), *measured_of(A100)]
    told = {"claimed.architecture", "claimed.pci_device_id", "claimed.memory_mib"}
    verdict = judge([r for r in readings if r.name not in told], SPECS)
    assert verdict.identity != "genuine"
    assert "measured.sm_count" in verdict.gpus[0].missing


def test_a_product_that_is_not_in_the_table_is_unknown() -> None:
    verdict = judge([*claims_of(A100, name="NVIDIA X9000", pci_device_id=None),
                     *measured_of(A100)], SPECS)  # fmt: skip
    assert (verdict.identity, verdict.gpus[0].product) == ("unknown", None)


def test_one_false_gpu_of_eight_is_named_and_the_node_contradicted() -> None:
    readings: list[Reading] = []
    for gpu in range(8):
        readings += [*claims_of(A100, gpu), *measured_of(A100, gpu)]
    verdict = judge(changed(readings, "measured.sm_count", 70, gpu=5), SPECS)
    assert verdict.identity == "contradicted"
    assert [g.identity for g in verdict.gpus] == ["genuine"] * 5 + ["contradicted"] + [
        "genuine"
    ] * 2
    assert all(f.gpu == 5 for f in verdict.findings if f.severity == "contradicted")


def test_findings_of_the_driver_count() -> None:
    readings = [*claims_of(A100), *measured_of(A100)]
    seen = Finding(kind="challenge-shared-card", axis="identity", severity="contradicted",
                   text="x", readings=(), gpu=0)  # fmt: skip
    sick = replace(seen, kind="slower-than-peers", axis="health", severity="degraded")
    assert judge(readings, SPECS, findings=[seen]).identity == "contradicted"
    assert judge(readings, SPECS, findings=[sick]).health == "degraded"
    assert judge(readings, SPECS, findings=[sick]).identity == "genuine"


def with_one(name: str, value: Any, **detail: Any) -> list[Reading]:
    """A genuine A100 and one reading more."""
    more = Reading(name=name, value=value, source="x", fakeable=False, gpu=0, detail=detail)
    return [*claims_of(A100), *measured_of(A100), more]


FALSE_ALARMS: dict[str, list[Reading]] = {
    "idle at generation 1": with_one("claimed.pcie_gen_now", 1),
    "x8 on a cloud's T4": [*claims_of(sku("Tesla T4")),
                           *measured_of(sku("Tesla T4"), pcie_width_loaded=8, h2d_gib_s=5.9)],
    "x8 on a cloud's A10G": [*claims_of(sku("A10G")),
                             *measured_of(sku("A10G"), pcie_width_loaded=8, h2d_gib_s=11.5)],
    "an H100 at generation 4": [*claims_of(H100),
                                *measured_of(H100, pcie_gen_loaded=4, h2d_gib_s=22.0)],
    "memory a little under nominal": [*claims_of(A100, memory_mib=81251), *measured_of(A100)],
    "a T4's older driver": [*claims_of(sku("Tesla T4"), memory_mib=15109),
                            *measured_of(sku("Tesla T4"))],
    "A6000 memory under ECC": claims_of(sku("RTX A6000"), memory_mib=46068),
    "L40S memory without ECC": claims_of(sku("L40S"), memory_mib=49140),
    "an unknown new driver": [*claims_of(A100), *measured_of(A100),
                              node_reading("claimed.driver_version", "605.21.03")],
    "a new driver of two parts": [*claims_of(A100), *measured_of(A100),
                                  node_reading("claimed.driver_version", "575.64")],
    "a Windows driver under WSL": [*claims_of(A100), *measured_of(A100),
                                   node_reading("claimed.driver_version", "591.86"),
                                   node_reading("claimed.gpu_count", 1),
                                   node_reading("kernel.pci_count", 0),
                                   node_reading("kernel.release", "5.15.153-microsoft-WSL2")],
    "a Windows driver on Windows": [*claims_of(A100, driver_model="WDDM"), *measured_of(A100),
                                    node_reading("claimed.driver_version", "591.86")],
    "a container's share of the GPUs": [*claims_of(A100), *measured_of(A100),
                                        node_reading("claimed.gpu_count", 1),
                                        node_reading("kernel.pci_count", 8)],
    "harmless preloads": [*claims_of(A100), *measured_of(A100),
                          node_reading("kernel.preloaded", "/usr/lib/libjemalloc.so.2")],
    "bus bandwidth above the links' (NVLS)": with_one("collective.busbw_gib_s", 470e9 / GIB),
    "a program's own Xids": with_one("log.xid", 31, bus="0000:01:00", line="x"),
    "500 W where the data sheet says 400": [
        *claims_of(A100, power_limit_w=500, power_limit_default_w=500), *measured_of(A100)],
    "a power cap under load": with_one("measured.throttle_reasons", "sw_power_cap"),
    "two GPUs of one board": [*claims_of(A100, multi_gpu_board=True, serial="1"),
                              *claims_of(A100, 1, multi_gpu_board=True, serial="1")],
    "serials that are crossed out": [*claims_of(A100, serial="XXXXXX"),
                                     *claims_of(A100, 1, serial="XXXXXX")],
    "a board of four, four links to each": [
        *with_one("measured.p2p_gib_s", 92e9 / GIB, peer=1),
        Reading(name="claimed.nvlinks", value=4, source="topo", fakeable=True, gpu=0)],
    "an H100 board of four": [
        *claims_of(H100), *measured_of(H100),
        Reading(name="measured.p2p_gib_s", value=138e9 / GIB, source="torch", fakeable=False,
                gpu=0, detail={"peer": 1}),
        Reading(name="claimed.nvlinks", value=6, source="topo", fakeable=True, gpu=0)],
    "A100 peers at full speed": with_one("measured.p2p_gib_s", 270e9 / GIB, peer=1),
    "no NVLink where there is none": [
        *claims_of(sku("GeForce RTX 4090")), *measured_of(sku("GeForce RTX 4090")),
        Reading(name="claimed.nvlinks", value=0, source="topo", fakeable=True, gpu=0)],
    "the same node a day later": [*claims_of(A100), *measured_of(A100)],
}  # fmt: skip


@pytest.mark.parametrize("what", FALSE_ALARMS)
def test_a_known_false_alarm_does_not_fire(what: str) -> None:
    readings = FALSE_ALARMS[what]
    verdict = judge(readings, SPECS, readings)
    assert kinds(verdict) == []
    assert verdict.health == "fit"
    assert verdict.identity != "contradicted"


def test_five_per_cent_between_the_gpus_of_a_node_is_usual() -> None:
    readings: list[Reading] = []
    for gpu in range(8):
        readings += [*claims_of(A100, gpu)]
        readings += [
            replace(r, value=r.value * (0.975 + 0.05 * gpu / 7))
            if isinstance(r.value, float) and r.unit == "" and r.name.endswith(("_gib_s", "fp16"))
            else r
            for r in measured_of(A100, gpu)
        ]
    verdict = judge(readings, SPECS)
    assert (verdict.identity, verdict.health) == ("genuine", "fit")


@pytest.mark.parametrize(
    ("name", "value", "kind", "health"),
    [
        ("claimed.remap_pending", True, "remap-pending", "degraded"),
        ("claimed.remap_failed", True, "remap-failed", "unfit"),
        ("claimed.remap_pending", False, None, "fit"),
        ("claimed.retired_pending", True, "retirement-pending", "degraded"),
        ("claimed.retired_double_bit", 59, None, "fit"),
        ("claimed.retired_double_bit", 60, "retired-pages", "unfit"),
        ("claimed.sram_threshold_exceeded", True, "sram-errors", "unfit"),
        ("claimed.reset_required", True, "reset-required", "degraded"),
        ("claimed.ecc_uncorrected", 1, "ecc-uncorrected", "degraded"),
        ("claimed.ecc_uncorrected", 0, None, "fit"),
        ("claimed.ecc_mode", "Disabled", "ecc-off", "degraded"),
        ("log.xid", 79, "xid", "unfit"),
        ("log.xid", 63, "xid", "degraded"),
        ("log.xid", 13, None, "fit"),
        ("measured.clock_mhz_loaded", 500.0, "clock-low", "degraded"),
        ("measured.memory_errors", 1, "memory-errors", "unfit"),
    ],
)
def test_a_remap_that_waits_is_a_reset_one_that_failed_a_return(
    name: str, value: Any, kind: str | None, health: str
) -> None:
    readings = [*claims_of(A100, clock_sm_max_mhz=1410), *measured_of(A100)]
    readings = [r for r in readings if r.name != name]
    more = Reading(name=name, value=value, source="x", fakeable=False, gpu=0)
    verdict = judge([*readings, more], SPECS)
    assert verdict.health == health
    assert kinds(verdict) == ([kind] if kind else [])


@pytest.mark.parametrize(
    ("share", "kind", "health"),
    [(0.7, None, "fit"), (0.6, "memory-slow", "degraded"), (0.3, "memory-slow", "unfit")],
)
def test_slow_memory_is_of_health_and_leaves_identity_open(
    share: float, kind: str | None, health: str
) -> None:
    rate = share * (A100.mem_bw_gbs or 0) * 1e9 / GIB
    readings = measured_of(A100, memory_gib_s=rate, chunks=(rate, rate))
    verdict = judge([*claims_of(A100), *readings], SPECS)
    assert (verdict.health, kinds(verdict)) == (health, [kind] if kind else [])
    assert verdict.identity == ("genuine" if kind is None else "unknown")


@pytest.mark.parametrize(
    ("name", "value"),
    [("measured.memory_gib_s", 2400.0), ("measured.matmul_tflops.bf16", 400.0)],
)
def test_faster_than_the_product_can_be_is_another_product(name: str, value: float) -> None:
    verdict = judge(changed([*claims_of(A100), *measured_of(A100)], name, value), SPECS)
    assert verdict.identity == "contradicted"
    assert "faster-than-product" in kinds(verdict)


def test_memory_that_others_hold_is_no_lie() -> None:
    readings = [
        replace(r, value=50 * GIB, detail={"total_bytes": 79 * GIB, "free_bytes": 52 * GIB})
        if r.name == "measured.memory_bytes" else r
        for r in [*claims_of(A100), *measured_of(A100)]
    ]  # fmt: skip
    verdict = judge(readings, SPECS)
    assert kinds(verdict) == ["memory-taken"]
    assert (verdict.identity, verdict.health) == ("unknown", "degraded")


def test_gpus_that_were_changed_since_the_last_audit() -> None:
    boot, other = (node_reading("kernel.boot_id", b) for b in ("a", "b"))
    before = [*claims_of(A100), *claims_of(A100, 1), boot]
    one_other = [*claims_of(A100), *claims_of(A100, 1, uuid="GPU-other"), other]
    all_other = [*claims_of(A100, uuid="GPU-x"), *claims_of(A100, 1, uuid="GPU-y"), other]
    same_boot = [*all_other[:-1], boot]
    for now, kind in ((one_other, "uuid-changed"), (same_boot, "uuid-changed")):
        verdict = judge(now, SPECS, before)
        assert kinds(verdict) == [kind]
        assert verdict.identity == "contradicted"
    verdict = judge(all_other, SPECS, before)
    assert (kinds(verdict), kinds(verdict, notes=True)) == ([], ["another-machine"])
    assert judge(before, SPECS, before).findings == ()


READINGS = [*claims_of(A100), *measured_of(A100)]
NEEDED = set(judge(claims_of(A100), SPECS).gpus[0].missing)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_order_means_nothing_and_damage_never_makes_it_genuine(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32))
    shuffled = random.Random(seed).sample(READINGS, len(READINGS))
    assert judge(shuffled, SPECS).identity == "genuine"
    nonsense = st.one_of(
        st.none(), st.text(max_size=8), st.booleans(), st.integers(-(2**70), 2**70),
        st.floats(allow_nan=True, allow_infinity=True),
    )  # fmt: skip
    at = data.draw(st.sampled_from([i for i, r in enumerate(shuffled) if r.name in NEEDED]))
    value = data.draw(nonsense)
    worse = [replace(r, value=value) if i == at else r for i, r in enumerate(shuffled)]
    if shuffled[at].name.endswith("bf16"):
        worse = [r for r in worse if not r.name.endswith("fp16")]
    verdict = judge(worse, SPECS)
    known = shuffled[at].value
    if verdict.identity == "genuine":  # only by a value that the product can have
        assert isinstance(value, str if isinstance(known, str) else int | float)
        assert value is True if isinstance(known, bool) else not isinstance(value, bool)
    # From unknown to genuine there is no way by losing readings.
    kept = data.draw(st.lists(st.sampled_from(worse), unique_by=id))
    if verdict.identity == "unknown":
        assert judge(kept, SPECS).identity != "genuine"
