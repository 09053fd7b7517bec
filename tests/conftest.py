"""Shared fixtures: a real three-node Ray cluster with token auth, one for the whole session."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hybrid.pools import AGENTS, GPU, HEAD

OBJECT_STORE = 128 * 1024 * 1024

# Before anything imports ray or torch: Ray reads its auth mode at import, torch its threads.
os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # 2 s each time that workers begin or end
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        # Behaviours of the tests must be importable on the hosts.
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent / "agents"), os.environ.get("PYTHONPATH", "")]
        ).strip(os.pathsep),
    }
)
os.environ.pop("RAY_ADDRESS", None)


@dataclass(frozen=True)
class RayCluster:
    """A running cluster.

    Attributes:
        address: for `ray.init`.
        env: for a subprocess that connects to it.
        cluster: Ray's own test cluster, for tests that add and take away nodes.
    """

    address: str
    env: dict[str, str]
    cluster: Any


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """A head, a gpu-pool node with 4 slots and an agents-pool node with 4 slots; connected to.

    The 4 CPUs of each node are numbers for Ray's scheduler, not cores of this machine.
    """
    # Unix socket paths are at most 107 bytes, so Ray's session cannot live below tmp_path; and
    # it is ours alone, because the default one may belong to another cluster of this machine.
    folder = Path(tempfile.mkdtemp(prefix="hy-"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    env = {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_TMPDIR": str(folder)}
    os.environ.update(env)

    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(shutdown_at_exit=True)
    try:
        cluster.add_node(
            num_cpus=1,
            resources=HEAD.resources(1),
            labels=HEAD.labels(),
            object_store_memory=OBJECT_STORE,
            include_dashboard=False,
            temp_dir=str(folder / "ray"),
        )
        for pool in (GPU, AGENTS):
            cluster.add_node(
                num_cpus=4,
                resources=pool.resources(4),
                labels=pool.labels(),
                object_store_memory=OBJECT_STORE,
            )
        ray.init(address=cluster.address, log_to_driver=False, namespace="hybrid")
        yield RayCluster(
            address=cluster.address,
            env={**os.environ, "RAY_ADDRESS": cluster.address},
            cluster=cluster,
        )
    finally:
        ray.shutdown()
        for node in list(cluster.worker_nodes):
            cluster.remove_node(node)
        if cluster.head_node is not None:
            cluster.remove_node(cluster.head_node)
        for name in env:
            os.environ.pop(name, None)
        with contextlib.suppress(OSError):  # a log still being written is no failed test
            shutil.rmtree(folder)
