"""What each adapter's requests had and cost: counts and seconds since the engine began."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict, dataclass

from hybrid.engine.scheduler import Sequence

BASE = ""
"""The base, where an adapter's digest would stand."""


@dataclass
class Served:
    """Sums over an adapter's requests. Seconds are divided by `requests`, `answered` or
    `output_tokens` for means.

    requests: accepted; answered: begun to be, with a first token; rejected: refused when they came;
    cancelled: ended by their caller, or by their deadline; preempted: rows given back under way.
    prompt_tokens, cached_tokens: read, and found in the prefix cache instead. output_tokens.
    queue_s: from arrival to a row; first_token_s: from arrival to the first token; decode_s: from
    the first token to the end.
    """

    requests: int = 0
    answered: int = 0
    rejected: int = 0
    cancelled: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0


class Metrics:
    """`Served` by adapter digest; `BASE` is the base's own."""

    def __init__(self) -> None:
        self._served: defaultdict[str, Served] = defaultdict(Served)

    def of(self, digest: str | None) -> Served:
        """An adapter's."""
        return self._served[digest or BASE]

    def first(self, sequence: Sequence) -> None:
        """A request has its first token."""
        served = self.of(sequence.client[1])
        now = time.monotonic()
        served.answered += 1
        served.queue_s += (sequence.started or now) - sequence.arrived
        served.first_token_s += now - sequence.arrived

    def ended(self, sequence: Sequence, *, whole: bool) -> None:
        """A request has ended; `whole`: with an answer, not cut off."""
        served = self.of(sequence.client[1])
        served.cancelled += not whole
        served.preempted += sequence.preempted
        served.output_tokens += len(sequence.output)
        if sequence.started is not None:
            served.cached_tokens += sequence.cached
            served.prompt_tokens += len(sequence.prompt) - sequence.cached
        if sequence.first_token is not None:
            served.decode_s += time.monotonic() - sequence.first_token

    def as_dict(self) -> dict[str, dict[str, float]]:
        """By digest, `""` for the base; times rounded to microseconds."""
        return {
            digest: {k: round(v, 6) for k, v in asdict(served).items()}
            for digest, served in self._served.items()
        }
