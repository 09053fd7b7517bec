"""One bit an element: signs and a scale for each chunk, with error feedback on both ways.

The compressed all-reduce of 1-bit Adam (Tang et al. 2021), after 1-bit SGD (Seide et al. 2014):
each rank sends every other the signs of that one's part, each averages its part of all and sends
the signs of that back. What a rank left out is added to its next gradient, what the owner of a
part left out to its next average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

CHUNK = 512
"""Elements with a scale of their own."""
BYTES = CHUNK // 8 + 4
"""Of a chunk on the wire: its signs and a float32."""

Named = Sequence[tuple[str, torch.Tensor]]
"""Gradients of one bucket with their parameters' names, the same on all ranks."""


def encode(chunks: torch.Tensor) -> torch.Tensor:
    """Signs and mean magnitude of each row: [n, CHUNK] → uint8 [n, BYTES]."""
    bits = (chunks >= 0).view(len(chunks), -1, 8).to(torch.uint8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=chunks.device)
    signs = (bits * weights).sum(-1, dtype=torch.uint8)
    scales = chunks.abs().mean(1, keepdim=True).to(torch.float32)
    return torch.cat([signs, scales.view(torch.uint8)], dim=1)


def decode(message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `encode` kept: uint8 [n, BYTES] → [n, CHUNK], each element plus or minus its scale."""
    places = torch.arange(8, dtype=torch.uint8, device=message.device)
    bits = (message[:, : CHUNK // 8, None] >> places) & 1
    scales = message[:, CHUNK // 8 :].contiguous().view(torch.float32).to(dtype)
    return torch.where(bits.flatten(1).bool(), scales, -scales)


class OneBit:
    """Averages gradients over ranks, matrices by signs; vectors are sent whole.

    Attributes:
        residual: by name, what this rank has left out so far, of the parameter's shape and dtype.
    """

    def __init__(self) -> None:
        self.residual: dict[str, torch.Tensor] = {}
        # By the names of a bucket's matrices: what this rank left out of its part of the average.
        self._server: dict[tuple[str, ...], torch.Tensor] = {}

    def applies(self, gradient: torch.Tensor) -> bool:
        """Whether it is sent as signs: gains and biases are few and would share a scale."""
        return gradient.ndim >= 2

    def reduce(self, gradients: Named) -> None:
        """Replace each rank's gradients by what stands for their mean. Collective."""
        size = dist.get_world_size()
        whole = [gradient for _, gradient in gradients if not self.applies(gradient)]
        if whole:
            flat = torch.cat([t.flatten() for t in whole])
            dist.all_reduce(flat)
            _split(flat / size, whole)
        matrices = [(name, gradient) for name, gradient in gradients if self.applies(gradient)]
        if matrices:
            self._reduce(matrices, size)

    def _reduce(self, matrices: Named, size: int) -> None:
        names = tuple(name for name, _ in matrices)
        if names not in self._server and any(set(names) & set(other) for other in self._server):
            self.fold()  # DDP has regrouped its buckets, on all ranks at once
        for name, gradient in matrices:
            if name not in self.residual:
                self.residual[name] = torch.zeros_like(gradient)
        left = [self.residual[name] for name in names]
        flat = torch.cat([(g + e).flatten() for (_, g), e in zip(matrices, left, strict=True)])
        length, dtype = len(flat), flat.dtype
        part = -(-length // (size * CHUNK)) * CHUNK
        chunks = torch.nn.functional.pad(flat, (0, size * part - length)).view(-1, CHUNK)

        message = encode(chunks)
        _split(_finite(flat - decode(message, dtype).flatten()[:length]), left)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message)
        average = decode(received, dtype).view(size, part).mean(0)
        if names in self._server:
            average += self._server[names]
        answer = encode(average.view(-1, CHUNK))
        self._server[names] = _finite(average - decode(answer, dtype).flatten())
        answers = torch.empty_like(message)
        dist.all_gather_single(answers, answer)
        _split(decode(answers, dtype).flatten()[:length], [gradient for _, gradient in matrices])

    def fold(self) -> None:
        """Give all ranks one residual: what the mean gradient lacks in all. Collective.

        Nothing is lost by it, and then any number of ranks can go on from one rank's.
        """
        size = dist.get_world_size()
        for name in sorted(self.residual):
            dist.all_reduce(self.residual[name])
            self.residual[name] /= size
        for names, own in self._server.items():
            parts = torch.empty(size * len(own), dtype=own.dtype, device=own.device)
            dist.all_gather_single(parts, own)
            left = [self.residual[name] for name in names]
            flat = torch.cat([e.flatten() for e in left])
            _split(flat + parts[: len(flat)], left)
        self._server.clear()

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks once folded."""
        return {"residual": dict(self.residual)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take up what `state_dict` gave, on as many ranks or others."""
        self.residual = {k: v.to(device, copy=True) for k, v in state.get("residual", {}).items()}
        self._server.clear()


def _split(flat: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    parts = torch.split(flat, [t.numel() for t in into])
    for tensor, part in zip(into, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _finite(left: torch.Tensor) -> torch.Tensor:
    """Without what came of a step that was not finite: it is skipped, or ends the run."""
    return torch.where(torch.isfinite(left), left, 0.0)
