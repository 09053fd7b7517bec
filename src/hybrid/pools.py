"""The pools of a cluster: head, gpu and agents, each a node label and an integer custom resource.

This is the only place they are spelled. Placement goes by label; training workers take the
resource as well, because Ray Train's elastic policy counts resources and ignores labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NAMESPACE = "hybrid"
"""Ray's, of all actors."""
LABEL = "pool"
NODE_ID_LABEL = "ray.io/node-id"
"""Ray puts its own id of each node under this label."""


@dataclass(frozen=True)
class Pool:
    """One pool: `name` is the label's value, `resource` the custom resource its nodes declare."""

    name: str

    @property
    def resource(self) -> str:
        """The custom resource, e.g. `pool_gpu`."""
        return f"pool_{self.name}"

    @property
    def label_selector(self) -> dict[str, str]:
        """What `ray.remote(label_selector=…)` and `ScalingConfig(label_selector=…)` take."""
        return {LABEL: self.name}

    def selector_without(self, avoid: Sequence[str]) -> dict[str, str]:
        """`label_selector`, and none of the nodes with these ids of Ray's."""
        if not avoid:
            return self.label_selector
        return {**self.label_selector, NODE_ID_LABEL: f"!in({','.join(avoid)})"}

    def labels(self) -> dict[str, str]:
        """The labels a node of this pool starts with."""
        return {LABEL: self.name}

    def resources(self, slots: int) -> dict[str, float]:
        """The custom resources a node with `slots` worker slots starts with."""
        return {self.resource: slots}


HEAD = Pool("head")
GPU = Pool("gpu")
AGENTS = Pool("agents")
POOLS = (HEAD, GPU, AGENTS)
