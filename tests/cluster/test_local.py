"""A local cluster for training only, started by a verb and ended with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

VERB = """
import json, os, sys
import hybrid
from hybrid.cluster.local import QUIET
from hybrid.errors import Conflict

project = hybrid.open(sys.argv[1])
with project.ray(training_only=True):
    import ray

    said = {"pools": sorted(n["Labels"]["pool"] for n in ray.nodes() if n["Alive"])}
    settings = ray.remote(num_cpus=0)(lambda names: [n for n in names if n in os.environ])
    said["quiet"] = ray.get(settings.remote(list(QUIET))) == list(QUIET)
    said["status"] = hybrid.open(sys.argv[1]).status()["cluster"]
    try:
        hybrid.open(sys.argv[1]).up()
    except Conflict as e:
        said["up"] = e.message
said["after"] = project.local.state()
said["left"] = [n for n in QUIET if n in os.environ]
print(json.dumps(said))
"""


def test_training_alone_starts_only_what_it_needs_and_nothing_is_served_there(
    tmp_path: Path,
) -> None:
    file = tmp_path / "hybrid.yaml"
    file.write_text("run: {name: alone}\nmodel: {name: base}\nagents: {swarm: {hosts: 2}}\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", VERB, str(file)],
        env=env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["pools"] == ["gpu"]  # one node, the head's too
    assert said["status"]["dashboard"] is None
    assert "a cluster of its own" in said["up"]
    assert said["after"] is None
    assert said["quiet"]
    assert said["left"] == []  # a whole cluster may be started next in the same process
    assert not (tmp_path / ".hybrid/store").exists()
