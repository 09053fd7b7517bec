"""The registry: atomic, verified, content-addressed, on local paths and object stores."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3_server import s3_server

from hybrid.errors import (
    AdapterRefused,
    Conflict,
    IntegrityError,
    InvalidRequest,
    NotFound,
    RegistryError,
)
from hybrid.registry import Registry, check_safetensors, parse_ref


def safetensors(spans: list[tuple[int, int]], data: bytes) -> bytes:
    header = {
        f"w{i}": {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]}
        for i, (a, b) in enumerate(spans)
    }
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def model(folder: Path, text: str = "{}", size: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)
    (folder / "model.safetensors").write_bytes(safetensors([(0, size)], b"x" * size))
    return folder


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


def test_what_is_published_comes_back(registry: Registry, tmp_path: Path) -> None:
    source = model(tmp_path / "m")
    (source / "sub").mkdir()
    (source / "sub/ünïcode.txt").write_text("é")
    made = registry.publish("base", "b", source, run_id="r", data_digest="d", metrics={"loss": 1.5})
    for ref in ("b", "b@v1", f"b@{made.digest}"):
        found = registry.resolve(ref)
        assert found.manifest == made
        assert (found.path / "sub/ünïcode.txt").read_text() == "é"
    assert registry.by_digest(made.digest).manifest == made
    assert registry.verify("b") == made
    assert registry.list("base") == [made]
    assert registry.publish("base", "b", source) == made, "the same content is one version"
    other = registry.publish("base", "c", source)
    assert other.digest == made.digest
    assert registry.resolve(f"c@{made.digest}").manifest.name == "c"
    for ref in ("b@v2", "nobody", "b@nowhere", f"b@{'0' * 64}"):
        with pytest.raises(NotFound):
            registry.resolve(ref)


PUBLISH = """
import sys
from pathlib import Path
from hybrid.registry import Registry
root, folder, name, count = sys.argv[1:]
registry = Registry(root)
for i in range(int(count)):
    (Path(folder) / "config.json").write_text(f"{folder} {i}")
    print(registry.publish("base", name, Path(folder)).version, flush=True)
"""


def publisher(root: Path, folder: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PUBLISH, str(root), str(folder), "b", str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_concurrent_publishers_get_versions_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "registry"
    running = [publisher(root, model(tmp_path / f"m{i}"), 5) for i in range(3)]
    outputs = [p.communicate(timeout=60)[0] for p in running]
    versions = sorted(int(v) for out in outputs for v in out.split())
    assert versions == list(range(1, 16))
    registry = Registry(root)
    for version in versions:
        registry.verify(f"b@v{version}")


def test_a_publisher_killed_in_the_middle_leaves_the_old_version_intact(tmp_path: Path) -> None:
    root = tmp_path / "registry"
    registry = Registry(root)
    first = registry.publish("base", "b", model(tmp_path / "old"))
    big = model(tmp_path / "big", size=64 << 20)
    victim = publisher(root, big, 1)
    deadline = time.monotonic() + 30
    while not list((root / "tmp").glob("*")):  # it is copying now
        assert time.monotonic() < deadline
        assert victim.poll() is None
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert registry.list("base") == [first]
    assert registry.verify("b") == first
    again = registry.publish("base", "b", big)
    assert again.version == 2
    registry.verify("b")


def test_a_full_disk_is_said_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    """A limit on file size is a real failing write, for any user on any file system."""
    root = tmp_path / "registry"
    first = Registry(root).publish("base", "b", model(tmp_path / "old"))
    big = model(tmp_path / "big", size=1 << 20)
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from hybrid.registry import Registry; from hybrid.errors import RegistryError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))\n"
        "try: Registry(sys.argv[1]).publish('base', 'b', Path(sys.argv[2]))\n"
        "except RegistryError as e: print(e.message); sys.exit(e.exit_code)"
    )
    command = [sys.executable, "-c", code, str(root), str(big)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == RegistryError.exit_code, done.stderr
    assert "no space left" in done.stdout
    registry = Registry(root)
    assert registry.list("base") == [first]
    assert list((root / "tmp").iterdir()) == []
    assert registry.publish("base", "b", big).version == 2


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x01",
        safetensors([(0, 4)], b"123"),
        safetensors([(0, 4)], b"12345"),
        safetensors([(0, 2), (3, 4)], b"1234"),
        safetensors([(0, 3), (2, 4)], b"1234"),
        struct.pack("<Q", 3) + b"{}}",
        struct.pack("<Q", 2**60) + b"{}",
    ],
)
def test_damaged_weights_are_refused(registry: Registry, tmp_path: Path, raw: bytes) -> None:
    source = model(tmp_path / "m")
    (source / "model.safetensors").write_bytes(raw)
    with pytest.raises(IntegrityError):
        check_safetensors(source / "model.safetensors")
    with pytest.raises(IntegrityError):
        registry.publish("base", "b", source)
    assert registry.list("base") == []


def test_what_must_not_be_published_is_refused(registry: Registry, tmp_path: Path) -> None:
    source = model(tmp_path / "m")
    for name in ("", "Größe", "a/b", "a b", "x" * 64, "../x"):
        with pytest.raises(InvalidRequest):
            registry.publish("base", name, source)
    with pytest.raises(InvalidRequest, match="base digest"):
        registry.publish("adapter", "a", source)
    with pytest.raises(InvalidRequest, match="nothing to publish"):
        registry.publish("base", "b", tmp_path / "none")
    (source / "model.bin").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="pickled"):
        registry.publish("base", "b", source)


def test_damaged_blobs_are_found_and_repaired_by_publishing_again(
    registry: Registry, tmp_path: Path
) -> None:
    source = model(tmp_path / "m")
    made = registry.publish("base", "b", source)
    registry.resolve("b")
    digest = next(f.sha256 for f in made.files if f.path == "config.json")
    blob = tmp_path / "registry/blobs" / digest[:2] / digest
    blob.chmod(0o644)
    blob.write_bytes(b"[]")
    with pytest.raises(IntegrityError, match=r"config\.json"):
        registry.verify("b")
    assert registry.publish("base", "b", source) == made
    registry.verify("b")
    assert (registry.resolve("b").path / "config.json").read_text() == "{}"
    blob.unlink()
    with pytest.raises(IntegrityError, match="missing"):
        registry.verify("b")


def test_releases_hold_what_fits_together(registry: Registry, tmp_path: Path) -> None:
    one = registry.publish("base", "b", model(tmp_path / "1", "1")).digest
    two = registry.publish("base", "b", model(tmp_path / "2", "2")).digest
    fits = registry.publish("adapter", "a", model(tmp_path / "a"), base_digest=one).digest
    with pytest.raises(NotFound):
        registry.release("b@stable")
    assert registry.publish_release("b", one, {}).version == 1
    assert registry.update_release("b", add={"a": fits}).adapters == {"a": fits}
    assert registry.update_release("b", add={"a": fits}).version == 2, "nothing changed"
    with pytest.raises(AdapterRefused) as e:
        registry.publish_release("b", two, {"a": fits})
    assert one in e.value.message
    assert two in e.value.message
    assert registry.release("b@stable").base_digest == one
    with pytest.raises(NotFound):
        registry.update_release("b", remove=["z"])
    assert registry.update_release("b", remove=["a"]).adapters == {}
    with pytest.raises(InvalidRequest, match="no digest"):
        registry.release(f"b@{one}")
    with pytest.raises(Conflict):
        registry.publish_release("b", two, {}, expect=1)


def test_concurrent_updates_of_a_release_are_all_kept(registry: Registry, tmp_path: Path) -> None:
    base = registry.publish("base", "b", model(tmp_path / "b")).digest
    registry.publish_release("b", base, {})
    digests = {
        f"a{i}": registry.publish(
            "adapter", f"a{i}", model(tmp_path / f"a{i}", str(i)), base_digest=base
        ).digest
        for i in range(8)
    }
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: registry.update_release("b", add=dict([item])), digests.items()))
    assert registry.release("b@stable").adapters == digests


def test_aliases_compare_and_set(registry: Registry, tmp_path: Path) -> None:
    for i in range(2):
        registry.publish("base", "b", model(tmp_path / f"m{i}", str(i)))
    registry.set_alias("base", "b", "good", 1, expect=0)
    assert registry.resolve("b@good").manifest.version == 1
    with pytest.raises(Conflict):
        registry.set_alias("base", "b", "good", 2, expect=2)
    registry.set_alias("base", "b", "good", 2, expect=1)
    assert registry.aliases("base", "b") == {"good": 2}
    with pytest.raises(NotFound):
        registry.set_alias("base", "b", "good", 3)
    with pytest.raises(InvalidRequest, match="looks like a version"):
        registry.set_alias("base", "b", "v7", 1)


OBJECT_STORE = """
import sys
from pathlib import Path
from hybrid.errors import Conflict
from hybrid.registry import Registry
root, folder, cache = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if root.startswith("s3"):
    import fsspec
    fsspec.filesystem("s3").mkdir("bucket")
registry = Registry(root, cache)
made = registry.publish("base", "b", folder)
assert registry.publish("base", "b", folder) == made
found = registry.resolve("b")
assert (found.path / "config.json").read_text() == "{}" and cache in found.path.parents
assert registry.verify("b") == made
(folder / "config.json").write_text("2")
assert registry.publish("base", "b", folder).version == 2
registry.publish_release("b", made.digest, {})
assert registry.release("b@stable").version == 1
registry.set_alias("base", "b", "good", 1, expect=0)
try:
    registry.set_alias("base", "b", "good", 2, expect=0)
except Conflict:
    print("conflict")
try:
    registry._store.create("manifests/base/b/000001.json", b"over it")
except FileExistsError:
    print("exclusive")
registry.verify("b@v1")
"""


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_object_stores_keep_the_same_promises(tmp_path: Path, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        env = dict(os.environ)
        if kind == "s3":
            env |= {
                "AWS_ENDPOINT_URL": stack.enter_context(s3_server()),
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        root = "s3://bucket/registry" if kind == "s3" else f"memory://{uuid.uuid4().hex}"
        command = [sys.executable, "-c", OBJECT_STORE, root, str(model(tmp_path / "m"))]
        done = subprocess.run(
            [*command, str(tmp_path / "cache")],
            env=env, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        assert done.stdout.split() == ["conflict", "exclusive"], done.stderr[-2000:]


@given(st.text(max_size=80))
def test_a_reference_parses_or_is_refused_by_name(text: str) -> None:
    try:
        parsed = parse_ref(text)
    except InvalidRequest:
        return
    assert text.partition("@")[0] == parsed.name
    parts = (parsed.version, parsed.digest, parsed.alias)
    assert sum(part is not None for part in parts) == ("@" in text)
