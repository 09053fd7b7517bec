"""Preflight: each check by what nodes may say, and all of them on a real cluster."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hybrid import config
from hybrid.cli import app
from hybrid.config import ProjectConfig
from hybrid.errors import ConfigError, PlacementError
from hybrid.pools import AGENTS, HEAD, LABEL
from hybrid.training import preflight as checks
from hybrid.training.data import prepare_data
from hybrid.training.main_memory import free_memory
from hybrid.training.memory import Estimate, estimate
from hybrid.training.model import architecture
from hybrid.training.preflight import failure
from hybrid.training.probe import Asked, Gpu, Probe, clear, code, parse_gpus, probe, versions

GIB = 2**30


def raw(folder: Path, **training: Any) -> dict[str, Any]:
    if not (folder / "corpus.txt").exists():  # else its shards would have to be made anew
        (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    return {
        "run": {"name": "t", "dir": str(folder / "run")},
        "model": {
            "name": "b", "hidden_size": 64, "intermediate_size": 128, "layers": 2,
            "heads": 4, "kv_heads": 2, "context": 128,
        },
        "data": {"train": [str(folder / "corpus.txt")], "tokenizer": {"vocab_size": 300}},
        "training": {
            "steps": 20, "sequence_length": 128, "micro_batch": 8, "micro_batches": 4,
            "warmup_steps": 2, "workers": 2, **training,
        },
    }  # fmt: skip


def project(folder: Path, **training: Any) -> ProjectConfig:
    return config.parse(raw(folder, **training))


def node(name: str = "a", **fields: Any) -> Probe:
    told: dict[str, Any] = {
        "node": f"id-{name}", "host": name, "versions": {"torch": "2.13.0", "ray": "2.60.0"},
        "gpus": (), "memory": 16 * GIB, "storage": {}, "free": {}, "shards": None, **fields,
    }  # fmt: skip
    return Probe(**told)


def needs(total: int, host: int = 0) -> Estimate:
    terms = {"parameters": total // 4, "optimiser": total // 2, "activations": total // 4}
    return Estimate(
        terms=terms, moment="update", host=host, checkpoint=GIB, export=GIB // 2, parameters=7
    )


def test_memory_is_held_against_the_tightest_device() -> None:
    small, large = (Gpu(name="H100", total=80 * GIB, free=n * GIB) for n in (20, 70))
    nodes = [node("a", gpus=(large, large)), node("b", gpus=(large, small))]
    found = [checks.check_memory(needs(n * GIB), nodes, 2) for n in (8, 17, 40)]
    assert [c.status for c in found] == ["ok", "warn", "fail"]
    assert "H100 on b" in found[2].said
    assert found[2].do.startswith("optimiser dominates: ")

    cpus = [node("a"), node("b", memory=8 * GIB)]
    found = [checks.check_memory(needs(n * GIB), cpus, 4) for n in (1, 2)]
    assert [c.status for c in found] == ["ok", "fail"]
    assert "b for each of 4 ranks" in found[1].said
    assert checks.check_memory(needs(GIB), [], 1).status == "ok"
    offloaded = checks.check_memory(needs(GIB, host=10 * GIB), nodes, 2)
    assert (offloaded.status, "main memory" in offloaded.said) == ("fail", True)


def test_versions_that_differ_are_named_with_their_nodes() -> None:
    mine = {"python": "3.12.1", "torch": "2.13.0+cpu", "ray": "2.60.0", "hybrid": "1 (abc)"}
    gpu = {**mine, "torch": "2.13.0+cu130", "torch's CUDA": "13.0", "NVIDIA driver": "580.1"}
    same = [node("a", versions=gpu), node("b", versions=gpu)]
    assert checks.check_versions({**mine, "torch's CUDA": "none"}, same).status == "ok"
    other = node("c", versions={**gpu, "ray": "2.59.0", "NVIDIA driver": "570.9"})
    found = checks.check_versions(mine, [*same, other])
    assert found.status == "fail"
    assert "ray: 2.60.0 (a, b, driver), 2.59.0 (c)" in found.said
    assert "NVIDIA driver: 580.1 (a, b), 570.9 (c)" in found.said
    edited = node("d", versions={**gpu, "hybrid": "1 (def)"})
    assert (
        "hybrid: 1 (abc) (a, driver), 1 (def) (d)"
        in checks.check_versions(mine, [same[0], edited]).said
    )


def test_storage_space_driver_nodes_and_shards() -> None:
    blind = node("b", storage={"/r": "does not see what the driver has written there"})
    assert checks.check_storage("/r", None, [node(), blind], set()).said.startswith("b: does not")
    assert checks.check_storage("/r", None, [node()], {"id-a"}).status == "fail"
    assert checks.check_storage("/r", "cannot be written: x", [node()], set()).status == "fail"
    assert checks.check_storage("/r", None, [node()], set()).status == "ok"

    made = config.parse(
        {
            "run": {"name": "m"},
            "model": {"name": "m"},
            "training": {"checkpoint": {"keep": 2, "keep_best": 1}},
        }
    )
    space = partial(checks.check_space, needs(GIB), made.training, url="/r")
    assert [space(free, held).status for free, held in ((4 * GIB, 0), (4 * GIB, GIB))] == [
        "fail", "ok",
    ]  # fmt: skip
    assert space(int(4.5 * GIB), 0).status == "ok"  # three kept, one being written, the export
    assert space(None, 0).status == "ok"

    assert [checks.check_driver(m).status for m in ("spot", "on-demand", None)] == [
        "fail", "ok", "ok",
    ]  # fmt: skip
    assert checks.check_nodes(2, [node()], {"id-b": "none within 30 s"}).status == "fail"
    assert checks.check_nodes(0, [], {}).status == "warn"
    assert checks.check_shards(True, None, [node(shards="cut short")]).said == "a: cut short"
    assert checks.check_shards(True, "cut short", []).said == "the driver: cut short"
    assert checks.check_shards(False, None, [node()]).status == "ok"


def test_batch_arithmetic(tmp_path: Path) -> None:
    uneven = checks.check_batches(project(tmp_path, workers=[3, 4]).training, None, None)
    assert uneven.status == "warn"
    assert "3 workers leave 33 % of their micro-batch slots empty" in uneven.said
    assert "multiple of 3" in uneven.do
    even = project(tmp_path).training
    assert even.tokens_per_step == 4096
    told = checks.check_batches(even, 20 * 4096, None)
    assert (told.status, "81,920 tokens: 1 epochs" in told.said) == ("ok", True)
    assert checks.check_batches(even, 4096, None).status == "warn"  # 20 epochs
    assert checks.check_batches(even, 100, None).status == "fail"
    warm = project(tmp_path, warmup_steps=20).training
    assert "warm-up" in checks.check_batches(warm, None, None).said


def test_all_that_failed_is_in_one_error() -> None:
    bad = [
        checks.check_driver("spot"),
        checks.check_shards(True, None, [node(shards="x")]),
        checks.check_nodes(0, [], {}),
    ]
    error = failure(bad)
    assert isinstance(error, ConfigError)
    assert "2 of 3 checks failed" in error.message
    assert "driver: " in error.message and "shards: a: x" in error.message
    assert isinstance(failure(bad[:1]), PlacementError)
    assert failure(bad[2:]) is None


@given(st.text())
def test_any_answer_of_nvidia_smi_is_read(text: str) -> None:
    parse_gpus(text)
    lines = "NVIDIA H200, 143771, 143000\nNVIDIA A100-SXM4-80GB, 81920, 80000\n"
    found = parse_gpus(lines)
    assert [g.name for g in found] == ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]
    assert found[0].free == 143000 << 20


def test_a_machine_answers_for_itself(tmp_path: Path) -> None:
    url = str(tmp_path / "shared")
    asked = Asked(storages=(url,), token="t", shards=(str(tmp_path / "none"),))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / asked.file("driver")).write_text("t")
    told = probe("n1", asked)
    assert (told.storage, set(told.free)) == ({}, {url})
    assert str(tmp_path / "none") in str(told.shards)
    assert (tmp_path / "shared" / asked.file("n1")).read_text() == "t"
    assert told.versions == versions()
    assert code() in told.versions["hybrid"]
    assert 0 < told.memory <= free_memory() * 1.5
    clear([url], asked, ["driver", "n1"])
    assert list((tmp_path / "shared").iterdir()) == []


def test_everything_on_a_real_cluster(ray_cluster: Any, tmp_path: Path) -> None:
    from hybrid.training.preflight_nodes import guard, preflight

    made = project(tmp_path)
    found = {c.name: c for c in preflight(made)}
    assert {n: c.said for n, c in found.items() if c.status == "fail"} == {}
    assert found.keys() == {
        "nodes", "slots", "driver", "versions", f"storage {tmp_path / 'run'}", "shards",
        "batches", "layout", "space", "memory",
    }  # fmt: skip
    assert "not made yet" in found["shards"].said
    assert not list((tmp_path / "run").glob(".preflight*"))
    exact = estimate(partial(architecture, made.model, 300), made.training, workers=2, gpu=False)
    assert checks.size(exact.total) in found["memory"].said

    data = prepare_data(made)
    told: list[str] = []
    guard(made, lambda r: told.append(r["message"]), wait_s=0)
    assert "readable from 1 node" in {c.name: c for c in preflight(made)}["shards"].said
    assert told[0].startswith("preflight: ")

    # A storage of which every process has its own, shards that were cut short, too many workers.
    [shard] = sorted(data.train.glob("*.tokens.npy"))[:1]
    shard.write_bytes(shard.read_bytes()[:-2])
    bad = {"workers": 99, "checkpoint": {"storage": "memory://ckpt"}}
    broken = project(tmp_path, **bad)
    with pytest.raises(ConfigError) as caught:
        guard(broken, lambda r: None, wait_s=0)
    message = caught.value.message
    assert "storage memory://ckpt: " in message and "does not see" in message
    assert "slots: " in message and "shards: " in message and shard.name in message
    told.clear()
    warned = project(tmp_path, preflight="warn", workers=99)
    guard(warned, lambda r: told.append(r["message"]), wait_s=0)
    assert len([t for t in told if "slots: " in t or "shards: " in t]) == 2
    guard(project(tmp_path, preflight="off", **bad), pytest.fail, wait_s=0)

    # The same by command.
    (tmp_path / "hybrid.yaml").write_text(json.dumps(raw(tmp_path)))
    command = ["train", "--check", "--json", "-c", str(tmp_path / "hybrid.yaml")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1, done.output
    rows = json.loads(done.stdout)
    assert [r["name"] for r in rows if r["status"] == "fail"] == ["shards"]


def test_a_driver_knows_the_labels_of_its_node(ray_cluster: Any) -> None:
    import ray

    from hybrid.training.preflight_nodes import _driver_labels

    there = ray.remote(num_cpus=0, label_selector=AGENTS.label_selector)(_driver_labels)
    assert ray.get(there.remote(), timeout=60)[LABEL] == AGENTS.name
    assert _driver_labels()[LABEL] == HEAD.name
