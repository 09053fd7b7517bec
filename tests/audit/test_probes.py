"""The probes on devices that lie about one thing each, and on one that does not."""

from __future__ import annotations

from typing import Any

import lying_devices
import pytest
from lying_devices import TINY

from hybrid.audit import cuda_kernels, links, memory, silicon
from hybrid.audit.device import CpuDevice, open_device
from hybrid.audit.reading import Reading
from hybrid.errors import ConfigError

MIB = 2**20


def by_name(readings: list[Reading]) -> dict[str, Reading]:
    return {r.name.split(".", 1)[1]: r for r in readings}


def test_memory_that_is_the_hosts_is_slow_in_parts() -> None:
    found = by_name(memory.probe_memory(lying_devices.HostBacked(), TINY))
    slowest = found["chunk_min_gib_s"]
    assert isinstance(slowest.value, float)
    assert slowest.value < 0.06  # the link's speed
    assert max(rate for _, rate in slowest.curve) > 10 * slowest.value
    slow = [x for x, rate in slowest.curve if rate < 0.06]
    assert len(slow) == 15  # of 30: the other half is real
    assert found["memory_errors"].value == 0


def test_memory_that_forgets() -> None:
    found = by_name(memory.probe_memory(lying_devices.Forgetful(), TINY))
    assert found["memory_errors"].value == 1
    assert found["memory_errors"].detail["wrong_words_by_chunk"] == {"2": 1}
    assert found["memory_bytes"].value == 60 * MIB  # the good chunks and the scratch one
    honest = by_name(memory.probe_memory(lying_devices.Honest(), TINY))
    assert honest["memory_errors"].value == 0
    assert honest["memory_bytes"].value == 62 * MIB


def test_another_die_shows_in_what_it_can_multiply() -> None:
    found = by_name(silicon.probe_matmul(lying_devices.OlderDie(), TINY))
    assert found["matmul_tflops.fp8"].value is None
    assert found["matmul_tflops.fp8"].detail["absent"] == "compute capability 8.6"
    fp64, fp32 = (found[f"matmul_tflops.{k}"].value for k in ("fp64", "fp32"))
    assert isinstance(fp64, float) and isinstance(fp32, float) and fp64 < fp32 / 4
    die = by_name(silicon.probe_silicon(lying_devices.OlderDie(), TINY))
    assert die["compute_capability"].value == "8.6"


@pytest.mark.parametrize("size", [6, 40, 50, 96])
def test_the_cache_is_read_off_the_latency_curve(size: int) -> None:
    def latency(footprint: int) -> float:
        hit = min(1.0, size / footprint)
        return 210 * hit + 640 * (1 - hit)

    curve = [(float(mib * MIB), latency(mib)) for mib in silicon._FOOTPRINTS_MIB]
    found = silicon.cache_size(curve)
    # The slow end of the curve still has hits in it, so that large caches are judged small.
    assert found is not None and found / MIB == pytest.approx(size, rel=0.4)


def test_no_step_in_the_curve_is_no_cache() -> None:
    assert silicon.cache_size([(float(n), 100.0) for n in range(1, 9)]) is None
    assert silicon.cache_size([(1.0, 1.0)]) is None


def test_the_link_is_sampled_while_data_moves() -> None:
    class Linked(lying_devices.Honest):
        asked = 0

        def link(self) -> Any:
            Linked.asked += 1
            return links.Link(4 if Linked.asked > 1 else 1, 16, "sysfs")

        def copy(self, to: Any, source: Any) -> None:
            while Linked.asked < 3:  # as long as it takes to be looked at
                pass
            super().copy(to, source)

    found = by_name(links.probe_copies(Linked(), TINY))
    assert found["pcie_gen_loaded"].value == 4
    assert found["pcie_width_loaded"].value == 16
    assert found["pcie_gen_loaded"].fakeable
    assert isinstance(found["h2d_gib_s"].value, float)


def test_a_peer_that_gets_other_data_is_found() -> None:
    class Patched(lying_devices.Honest):
        copies = 0

        def peers(self) -> Any:
            return [self.place]

        def copy(self, to: Any, source: Any) -> None:
            super().copy(to, source)
            to[17] += 1

    # One word wrong on the way there, and again on the way back.
    assert by_name(links.probe_peers(Patched(), TINY))["p2p_errors"].value == 1


def test_power_and_reasons_to_throttle_are_those_under_load() -> None:
    class Capped(lying_devices.Honest):
        def load(self) -> Any:
            return links.Load(150.0, 1095.0, 61.0, ("software power cap",), "nvml")

    found = by_name(links.probe_load(Capped(), TINY))
    assert found["power_w_loaded"].value == 150
    assert found["throttle_reasons"].value == "software power cap"


def test_the_cpu_answers_every_probe() -> None:
    device = CpuDevice()
    for probe in (silicon.probe_silicon, silicon.probe_matmul, links.probe_copies,
                  links.probe_load, memory.probe_memory):  # fmt: skip
        assert all(r.gpu is None and r.name.startswith("cpu.") for r in probe(device, TINY))
    assert device.load_latency(4 * MIB, 2048) > 0


@pytest.mark.parametrize("spec", ["gpu", "cuda:x", "no_such_module:Device", "math:Nothing"])
def test_devices_that_are_none(spec: str) -> None:
    with pytest.raises(ConfigError, match="audit device"):
        open_device(spec)


def test_private_names_of_torch_are_there() -> None:
    assert all(callable(f) for f in cuda_kernels.private_names().values())
