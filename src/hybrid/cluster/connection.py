"""A connection to Ray for the length of a verb, to a local cluster of its own if none runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from hybrid.cluster.local import LocalCluster
from hybrid.pools import NAMESPACE


@contextlib.contextmanager
def connection(local: LocalCluster, *, training_only: bool) -> Iterator[None]:
    """Connect to the local cluster if it runs, else to RAY_ADDRESS, else to one that is started.

    Within a connection nothing is done; one started here ends with it.

    Args:
        training_only: start one for training only, see `LocalCluster.start`.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        yield
        return
    state = local.state()
    own = None
    if state is None and "RAY_ADDRESS" not in os.environ:
        state = own = local.start(bound=True, training_only=training_only)
    try:
        if state is not None:
            local.enter(state)
        import ray  # only now: it reads its authentication settings when it is imported

        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
        try:
            yield
        finally:
            ray.shutdown()
    finally:
        if own is not None:
            local.stop()
            os.environ.pop("RAY_ADDRESS", None)
