"""How many agents' nodes are needed, and what they cost: Little's law on model calls.

J. D. C. Little, "A proof for the queuing formula L = lambda W", Operations Research 9 (1961) 383:
calls in flight = calls a second x seconds a call. A node waits for so many at once, and spends
some processor time on each; both are planned up to a ceiling, because queues grow without bound
as utilisation nears 1. Spread over zones, the nodes that one zone's loss leaves must still do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid.planning.ranges import Range, Values, exactly, within
from hybrid.planning.workload import AgentsPart, ServePart


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What the agents need.

    Attributes:
        calls_per_s: model calls a second.
        in_flight: model calls that are waited for at once, on average.
        for_calls, for_cpu: nodes needed for the one and for the other.
        nodes: nodes to run, as given or needed.
        utilisation: of the scarcer of both, with those nodes; above 1 queues never empty.
    """

    calls_per_s: float
    in_flight: float
    for_calls: int
    for_cpu: int
    nodes: int
    utilisation: float

    @property
    def needed(self) -> int:
        """The larger of both."""
        return max(self.for_calls, self.for_cpu)


def capacity(v: Values, steps: int, agents: AgentsPart) -> Capacity:
    """Nodes from one value of each input: requests/s, seconds a call, CPU ms a call."""
    calls = v["requests a second"] * steps
    in_flight = calls * v["model call, s"]
    room = agents.calls_in_flight * agents.ceiling
    cpu = calls * v["CPU of a call, ms"] / 1000
    cpu_room = agents.vcpus * agents.ceiling
    for_calls, for_cpu = math.ceil(in_flight / room), math.ceil(cpu / cpu_room)
    needed = max(1, for_calls, for_cpu)
    if agents.zones > 1:  # what is left when one zone goes must carry everything
        needed = math.ceil(needed * agents.zones / (agents.zones - 1))
    nodes = agents.nodes or needed
    busiest = max(in_flight / agents.calls_in_flight, cpu / agents.vcpus)
    return Capacity(
        calls_per_s=calls,
        in_flight=in_flight,
        for_calls=for_calls,
        for_cpu=for_cpu,
        nodes=nodes,
        utilisation=busiest / nodes,
    )


def inputs(serve: ServePart, agents: AgentsPart) -> dict[str, Range]:
    """The inputs of `capacity` with their ranges."""
    return {
        "requests a second": exactly(serve.requests_per_s),
        "model call, s": within(serve.call_s, 1.5, "given or default, within 1.5 times"),
        "CPU of a call, ms": within(agents.cpu_ms_per_call, 2, "given or default, within twice"),
    }
