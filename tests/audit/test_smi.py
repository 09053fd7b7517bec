"""nvidia-smi's outputs of every kind: what is read of them, exactly, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid.audit import names
from hybrid.audit.captures import capture_files, read_capture, read_capture_file
from hybrid.audit.reading import Reading
from hybrid.audit.smi import parse_smi
from hybrid.audit.smi_tree import MOST_BYTES, read_xml
from hybrid.errors import DataError

FOLDER = Path(__file__).parent / "captures"


def capture(start: str) -> list[Reading]:
    [path] = FOLDER.glob(f"{start}*")
    return read_capture_file(path)


def values(readings: list[Reading], gpu: int | None = 0) -> dict[str, Any]:
    return {r.name.removeprefix("claimed."): r.value for r in readings if r.gpu == gpu}


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("01_", {"name": "NVIDIA A10G", "memory_mib": 23028, "pcie_gen_now": 1,
                 "pcie_width_now": 8, "virtualization": "Pass-Through", "ecc_mode": "Enabled",
                 "remap_failed": False, "power_limit_w": 300.0, "throttle_reasons": "gpu_idle",
                 "pci_bus_id": "0000:00:1e.0"}),
        ("03_", {"mig_mode": "Enabled", "mig_devices": 4, "pci_device_id": "10de:20b2",
                 "part_number": "20B2-895-A1", "pcie_gen_host_max": 4, "ecc_uncorrected": 0,
                 "power_limit_w": 500.0, "throttle_reasons": ""}),
        ("04_", {"power_limit_w": 200.0, "power_limit_default_w": 350.0, "bar1_mib": 32768}),
        ("05_", {"name": "NVIDIA GeForce RTX 3060", "brand": "GeForce",
                 "vbios": "94.04.71.00.69", "power_limit_w": 170.0}),
        ("07_", {"name": "Quadro P2000", "pcie_gen_max": 3, "pcie_width_now": 8}),
        ("09_", {"name": "NVIDIA GeForce RTX 4090", "architecture": "Ada Lovelace",
                 "pci_device_id": "10de:2684", "memory_used_mib": 20328, "pcie_width_now": 16,
                 "remap_pending": False, "clock_sm_max_mhz": 3105}),
        ("12_", {"uuid": "GPU-11111111-2222-4333-8444-0000000000b2", "reset_required": False,
                 "virtualization": "Pass-Through"}),
        ("15_", {"driver_model": "WDDM", "power_w": 31.83}),
        ("21_", {"name": "NVIDIA H200", "memory_mib": 143771, "power_limit_w": 700}),
    ],
)  # fmt: skip
def test_what_is_read_of_a_capture(start: str, expected: dict[str, Any]) -> None:
    found = values(capture(start))
    assert {k: found.get(k) for k in expected} == expected


@pytest.mark.parametrize(
    ("start", "absent"),
    [
        ("01_", {"pci_device_id", "pcie_gen_host_max", "mig_mode", "driver_model", "license"}),
        ("04_", {"pci_device_id", "part_number", "pcie_gen_host_max", "serial", "ecc_mode"}),
        ("12_", {"name", "pci_device_id"}),
    ],
)
def test_what_is_not_said_or_crossed_out_is_unknown(start: str, absent: set[str]) -> None:
    assert not absent & values(capture(start)).keys()


def test_the_node_and_several_gpus() -> None:
    node = values(capture("09_"), None)
    assert node == {"driver_version": "535.154.05", "cuda_version": "12.2", "attached_gpus": 8,
                    "gpu_count": 1}  # fmt: skip
    pasted = capture("21_")
    assert values(pasted, None) == {"gpu_count": 7}
    assert [values(pasted, i)["ecc_mode"] for i in (5, 6)] == ["Enabled", "Disabled"]
    [parts] = [r.detail["parts"] for r in capture("03_") if r.name == "claimed.mig_devices"]
    assert parts == [{"sm_count": 14, "memory_mib": 19968}] * 4


def test_topology_kernel_log_and_nccl_curve() -> None:
    topology = [r for r in capture("18_") if r.name == "claimed.nvlinks"]
    assert [(r.gpu, r.value) for r in topology] == [(i, 18) for i in range(8)]
    log = {(r.name, r.value) for r in capture("16_")}
    assert {("log.xid", 79), ("log.xid", 63), ("log.off_the_bus", "0000:b3:00.0"),
            ("log.probe_failed", 1)} <= log  # fmt: skip
    [curve] = [r for r in capture("20_") if r.name == "collective.busbw_gib_s"]
    assert [size for size, _ in curve.curve] == [float(2**n) for n in range(20, 30)]
    assert curve.value == max(y for _, y in curve.curve) == pytest.approx(29.5e9 / 2**30)
    assert curve.curve[-1][1] == pytest.approx(5.31e9 / 2**30)


def test_every_reading_of_the_captures_has_a_name_in_the_table() -> None:
    for path in FOLDER.iterdir():
        for r in read_capture_file(path):
            assert r.name in names.READINGS, r.name
            assert r.fakeable, "nothing that was saved proves anything"


OLD = b"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v10.dtd">
<nvidia_smi_log><driver_version>418.39</driver_version><attached_gpus>1</attached_gpus>
<gpu id="0000:5E:00.0"><product_name>Tesla V100-SXM2-32GB</product_name>
<retired_pages><double_bit_retirement><retired_count>61</retired_count></double_bit_retirement>
<pending_retirement>Yes</pending_retirement></retired_pages>
<ecc_errors><volatile><double_bit><device_memory>2</device_memory><total>3</total></double_bit>
</volatile></ecc_errors>
<grid_licensed_product><license_status>Unlicensed</license_status></grid_licensed_product>
<power_readings><power_limit>300.00 W</power_limit></power_readings>
<clocks_throttle_reasons><clocks_throttle_reason_hw_slowdown>Active
</clocks_throttle_reason_hw_slowdown></clocks_throttle_reasons>
<temperature><gpu_temp>Unknown Error</gpu_temp></temperature></gpu></nvidia_smi_log>"""


def test_the_oldest_schema() -> None:
    found = values(parse_smi(OLD))
    assert found == {
        "name": "Tesla V100-SXM2-32GB", "retired_pending": True, "retired_double_bit": 61,
        "ecc_uncorrected": 3, "license": "Unlicensed", "power_limit_w": 300.0,
        "throttle_reasons": "hw_slowdown", "pci_bus_id": "0000:5e:00.0",
        "tool_failed": "Unknown Error",
    }  # fmt: skip


@pytest.mark.parametrize("around", [b"warning: infoROM\n%s", b"%s\nWARNING: infoROM\n",
                                    b"\xff\xfe%s\x00\x00"])  # fmt: skip
def test_what_stands_around_the_document_does_not_matter(around: bytes) -> None:
    assert values(parse_smi(around % OLD))["name"] == "Tesla V100-SXM2-32GB"


def entity_bomb() -> bytes:
    levels = b"".join(b'<!ENTITY a%d "%s">' % (n, b"&a%d;" % (n - 1) * 10) for n in range(1, 12))
    return b'<!DOCTYPE nvidia_smi_log [<!ENTITY a0 "x">%s]><nvidia_smi_log>&a11;' % levels


HOSTILE = {
    "entities that multiply": entity_bomb(),
    "an entity that reads a file": b'<!DOCTYPE nvidia_smi_log [<!ENTITY f SYSTEM "file:///etc/'
    b'passwd">]><nvidia_smi_log><gpu><product_name>&f;</product_name></gpu></nvidia_smi_log>',
    "a parameter entity": b'<!DOCTYPE nvidia_smi_log [<!ENTITY % p SYSTEM "http://127.0.0.1:9/">'
    b"%p;]><nvidia_smi_log/>",
    "too deep": b"<nvidia_smi_log>" + b"<a>" * 5000,
    "too many": b"<nvidia_smi_log>" + b"<a/>" * 400_001 + b"</nvidia_smi_log>",
    "another encoding": b'<?xml version="1.0" encoding="utf-77"?><nvidia_smi_log/>',
    "another document": b"<?xml version='1.0'?><svg/>",
    "two documents": OLD + OLD,
    "truncated": OLD[:-40],
    "too large": b"<nvidia_smi_log>" + b" " * MOST_BYTES,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_xml_is_a_typed_error(what: str) -> None:
    with pytest.raises(DataError):
        parse_smi(HOSTILE[what])


def test_a_dtd_by_name_alone_is_not_loaded() -> None:
    log = read_xml(b'<!DOCTYPE nvidia_smi_log SYSTEM "http://127.0.0.1:9/x.dtd"><nvidia_smi_log/>')
    assert log.tag == "nvidia_smi_log"


def test_numbers_that_are_none() -> None:
    text = OLD.replace(b"300.00 W", b"9" * 400 + b" W").replace(b">61<", "٦١".encode().join(
        (b">", b"<")))  # fmt: skip
    found = values(parse_smi(text))
    assert not {"power_limit_w", "retired_double_bit"} & found.keys()


def test_a_folder_is_one_nodes_outputs_and_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(OLD)
    (tmp_path / "a.txt").write_text("nothing of NVIDIA's")
    assert [p.name for p in capture_files([tmp_path])] == ["a.txt", "b.txt"]
    with pytest.raises(DataError, match=r"a\.txt: not an output"):
        read_capture_file(tmp_path / "a.txt")
    with pytest.raises(DataError, match="no such file"):
        capture_files([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty folder"):
        capture_files([tmp_path / "empty"])


def test_one_file_may_hold_several_outputs() -> None:
    [log] = FOLDER.glob("16_*")
    [topology] = FOLDER.glob("18_*")
    found = {r.name for r in read_capture(log.read_bytes() + b"\n" + topology.read_bytes())}
    assert {"log.xid", "claimed.nvlinks"} <= found
