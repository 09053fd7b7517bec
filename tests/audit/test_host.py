"""What the kernel says of a node: limits in every form of cgroup, in a made /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid.audit import cpu, host

MIB = 2**20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_container_of_cgroup_v2(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/box/memory.max": "4294967296\n",
            "sys/fs/cgroup/pod/box/memory.current": "1073741824\n",
            "sys/fs/cgroup/memory.max": "max\n",
            "proc/meminfo": "MemTotal:  8388608 kB\nMemAvailable: 6291456 kB\n",
        },
    )
    assert host.cpu_quota(root) == 1.5  # of the folder above
    assert host.memory_limit(root) == 4 << 30
    assert host.memory_total(root) == 8 << 30
    assert host.memory_available(root) == 3 << 30


def test_a_container_of_cgroup_v1(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a\n1:cpu,cpuacct:/a\n0::/\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
            "proc/meminfo": "MemTotal: 1024 kB\n",
        },
    )
    assert host.cpu_quota(root) == 0.5
    assert host.memory_limit(root) is None


def test_nothing_is_known_where_nothing_can_be_read(tmp_path: Path) -> None:
    assert host.cpu_quota(tmp_path) is None
    assert host.memory_limit(tmp_path) is None
    assert host.memory_available(tmp_path) is None
    assert host.cpu_times(tmp_path) is None
    assert cpu.clock_mhz(tmp_path) is None
    assert host.host(tmp_path).boot_id == "unknown"


@pytest.mark.parametrize(("listed", "count"), [("0-3,8,10-11", 7), ("0", 1), ("0-127", 128)])
def test_cores_that_are_online(tmp_path: Path, listed: str, count: int) -> None:
    root = write(tmp_path, {"sys/devices/system/cpu/online": listed + "\n"})
    assert host.online_cores(root) == count


def test_the_fabric_is_what_its_active_ports_carry(tmp_path: Path) -> None:
    ports = {
        "mlx5_0": ("400 Gb/sec (4X NDR)", "4: ACTIVE"),
        "mlx5_1": ("10 Gb/sec", "1: DOWN"),
        "mlx5_2": ("400 Gb/sec (4X NDR)", "4: ACTIVE"),
        "odd": ("fast", "4: ACTIVE"),
    }
    files = {}
    for name, (rate, state) in ports.items():
        files[f"sys/class/infiniband/{name}/ports/1/rate"] = rate
        files[f"sys/class/infiniband/{name}/ports/1/state"] = state
    assert host.fabric_gib_s(write(tmp_path, files)) == pytest.approx(100e9 / 2**30)
    assert host.fabric_gib_s(tmp_path / "none") is None


def test_stolen_time(tmp_path: Path) -> None:
    write(tmp_path, {"proc/stat": "cpu 100 0 0 800 100 0 0 0 50 0\ncpu0 1\n"})
    before = host.cpu_times(tmp_path)
    write(tmp_path, {"proc/stat": "cpu 150 0 0 820 100 0 0 30 50 0\ncpu0 1\n"})
    after = host.cpu_times(tmp_path)
    assert before is not None and after is not None
    assert host.stolen(before, after) == pytest.approx(0.3)
    assert host.busy(before, after) == pytest.approx(0.8)


@example(text="0\x85:")
@example(text="cpu " + "٣ " * 10)
@example(text="9" * 5000)
@example(text="7-3")
@given(text=st.text(max_size=200))
def test_damaged_files_of_the_kernel_are_unknown_and_no_crash(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    root = tmp_path_factory.mktemp("root")
    names = (
        "proc/self/cgroup", "proc/meminfo", "proc/stat", "proc/cpuinfo", "sys/fs/cgroup/cpu.max",
        "sys/fs/cgroup/memory.max", "sys/devices/system/cpu/online",
    )  # fmt: skip
    clean = text.encode("utf-8", "replace").decode()
    write(root, dict.fromkeys(names, clean))
    for read in (host.cpu_quota, host.memory_limit, host.memory_available, host.cpu_times):
        read(root)
    assert host.online_cores(root) >= 1
    cpu.clock_mhz(root)


def test_cores_are_those_one_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "online_cores", lambda: 8)
    monkeypatch.setattr(host, "affinity", lambda: 1)
    found = {r.name: r.value for r in cpu.cores(None, 0.02, rounds=1, slots=16)}
    assert found["cpu.cores_claimed"] == 8  # more are only a scheduler's slots
    [claimed] = [r for r in cpu.cores(16, 0.02, rounds=1, slots=4) if r.name.endswith("claimed")]
    assert claimed.value == 16  # what is paid for is a claim, whatever the kernel shows
    assert isinstance(found["cpu.cores_measured"], float)
    assert found["cpu.cores_measured"] <= 1
    assert found["cpu.sha256_gib_s"]


def test_a_moment_of_other_work_is_no_missing_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rounds get half of what is there; a later, longer one gets all."""
    spans: list[float] = []

    def spin(count: int, seconds: float) -> tuple[float, float]:
        if count == 1:
            return 1.0, 1e9
        spans.append(seconds)
        return (2.0 if len(spans) == 5 else 1.0), 1e9

    monkeypatch.setattr(cpu, "_spin", spin)
    monkeypatch.setattr(host, "online_cores", lambda: 2)
    monkeypatch.setattr(host, "affinity", lambda: 2)
    monkeypatch.setattr(host, "cpu_quota", lambda: None)
    monkeypatch.setattr(host, "cpu_times", lambda: None)
    found = {r.name: r.value for r in cpu.cores(2, 0.01)}
    assert found["cpu.cores_measured"] == 2
    assert spans == [0.01, 0.01, 0.01, 0.02, 0.04]
    spans[:] = [0.0] * 5  # never again
    assert {r.name: r.value for r in cpu.cores(2, 0.01, patience_s=0.1)}["cpu.cores_measured"] == 1
    assert len(spans) > 8, "it looked again before it said so"
    spans.clear()
    monkeypatch.setattr(host, "affinity", lambda: 1)
    cpu.cores(2, 0.01)
    assert len(spans) == 3, "one may use one core: looking longer finds no more"


def test_the_host_probes_measure(tmp_path: Path) -> None:
    stream = cpu.bandwidth(0.02)[0]
    assert isinstance(stream.value, float) and stream.value > 0
    memory = {r.name: r for r in cpu.memory(None, 8 * MIB)}
    assert memory["cpu.memory_errors"].value == 0
    assert memory["cpu.memory_errors"].detail["touched_bytes"] == 8 * MIB
    disk = cpu.disk(tmp_path / "new", 2 * MIB)
    assert [r.name for r in disk] == ["disk.write_mib_s", "disk.read_mib_s"]
    assert all(isinstance(r.value, float) and r.value > 0 for r in disk)
    assert list((tmp_path / "new").iterdir()) == []


def test_no_more_memory_is_touched_than_half_of_what_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "memory_available", lambda: 10 * MIB)
    found = {r.name: r for r in cpu.memory(4 << 30, 1 << 40)}
    assert found["cpu.memory_errors"].detail["touched_bytes"] == 5 * MIB
    assert found["cpu.memory_bytes_claimed"].value == 4 << 30
