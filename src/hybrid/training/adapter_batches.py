"""A specialist's rows as micro-batches: the same ones for a step, whoever asks and whenever.

The step number alone decides a step's rows, their augmentation and how they are dealt, so that a
run that was killed goes on with them and any number of workers computes the same. Short rows are
padded among rows of like length, or packed: several in one sequence, hidden from one another.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from hybrid.config import AdapterConfig
from hybrid.errors import ConfigError, DataError
from hybrid.training.rows import Augment, Row

IGNORE = -100
"""Label of what is not predicted."""
_BUCKET = 16
"""Batches whose rows are sorted by length together, so that little is padded."""
_PACKED = 256
"""Tokens that packed sequences are filled up to: attention costs their square."""


@dataclass(frozen=True)
class Answer:
    """A row to predict: token ids, and how much its loss counts."""

    prompt: list[int]
    answer: list[int]
    weight: float = 1.0

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Pair:
    """Two texts that mean the same; `same` tells rows with the same output by equal numbers."""

    left: list[int]
    right: list[int]
    same: int

    def __len__(self) -> int:
        return max(len(self.left), len(self.right))


@dataclass(frozen=True)
class AnswerBatch:
    """ids, labels int64 [sequences, tokens], weights float32 of the same shape.

    Packed: positions int64 [sequences, tokens], and segments of the same shape, equal where two
    tokens belong to one row. count: labels that are not IGNORE.
    """

    ids: Tensor
    labels: Tensor
    weights: Tensor
    count: int
    positions: Tensor | None = None
    segments: Tensor | None = None


@dataclass(frozen=True)
class PairBatch:
    """ids int64 [2 rows, tokens], the lefts before the rights; lengths int64 [2 rows]; same int64
    [rows]. count: rows."""

    ids: Tensor
    lengths: Tensor
    same: Tensor
    count: int


class Batches:
    """What a step trains on.

    Args:
        base: its tokenizer, context and device are used.
        rows: to train on.
        augment: applied to every input anew each epoch.
        seed: of order and augmentation.

    Raises:
        ConfigError: a row does not fit the base's context.
    """

    def __init__(
        self,
        base: Any,
        spec: AdapterConfig,
        rows: Sequence[Row],
        augment: Augment | None,
        seed: int,
    ) -> None:
        self._base, self._spec, self._rows = base, spec, rows
        self._augment, self._seed = augment, seed
        self._weights = class_weights(rows, spec.lora.weights)
        outputs = dict.fromkeys(row.outputs[0] for row in rows)
        self._number = {output: i for i, output in enumerate(outputs)}
        self._epoch, self._batches = -1, list[list[Any]]()

    @property
    def per_epoch(self) -> int:
        """Steps that see every row once."""
        return -(-len(self._rows) // self._spec.lora.batch)

    def at(self, step: int) -> list[Any]:
        """The step's micro-batches (AnswerBatch or PairBatch), counted from 0; none is empty."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffled(epoch)
        return self._collated(self._batches[index], self._spec.lora.micro_batches)

    def all(self) -> list[Any]:
        """Every row once, in order and as it is written, in micro-batches."""
        lora = self._spec.lora
        size = -(-lora.batch // lora.micro_batches)
        made = [self._encoded(row, row.input) for row in self._rows]
        return [self.collate(made[i : i + size]) for i in range(0, len(made), size)]

    def collate(self, rows: Sequence[Any]) -> Any:
        """One micro-batch of encoded rows."""
        end, device = self._base.tokenizer.eos_token_id, self._base.device
        if self._spec.kind == "embed":
            return pair(rows, end, device)
        if self._spec.lora.packing:
            return pack(rows, end, device, min(_PACKED, self._base.context))
        return pad(rows, end, device)

    def _collated(self, rows: list[Any], parts: int) -> list[Any]:
        bounds = [len(rows) * i // parts for i in range(parts + 1)]
        pieces = [rows[a:b] for a, b in pairwise(bounds) if b > a]
        return [self.collate(piece) for piece in pieces]

    def _shuffled(self, epoch: int) -> list[list[Any]]:
        rng, size = random.Random(f"{self._seed}/{epoch}"), self._spec.lora.batch
        rows = [
            self._encoded(row, self._augment(row.input, rng) if self._augment else row.input)
            for row in self._rows
        ]
        rng.shuffle(rows)
        if self._spec.lora.packing:  # nothing is padded: any rows may be neighbours
            return [rows[i : i + size] for i in range(0, len(rows), size)]
        batches = []
        for start in range(0, len(rows), size * _BUCKET):
            bucket = sorted(rows[start : start + size * _BUCKET], key=len)
            batches += [bucket[i : i + size] for i in range(0, len(bucket), size)]
        rng.shuffle(batches)
        return batches

    def _encoded(self, row: Row, text: str) -> Answer | Pair:
        made: Answer | Pair
        if self._spec.kind == "embed":
            output = row.outputs[0]
            made = Pair(self._prompt(text), self._prompt(output), self._number[output])
        else:
            tokenizer = self._base.tokenizer
            answer = tokenizer(row.outputs[0], add_special_tokens=False)["input_ids"]
            made = Answer(
                self._prompt(text),
                [*answer, tokenizer.eos_token_id],
                self._weights[row.outputs[0]],
            )
        if len(made) > self._base.context:
            raise ConfigError(
                f"a row has {len(made)} tokens, the base's context is {self._base.context}:"
                f" {row.input[:60]!r}"
            )
        return made

    def _prompt(self, text: str) -> list[int]:
        filled = self._spec.template.replace("{input}", text)
        ids: list[int] = self._base.tokenizer(filled)["input_ids"]
        return ids


def class_weights(
    rows: Sequence[Row], how: Literal["none", "balanced", "sqrt"]
) -> dict[str, float]:
    """The weight of a row by its answer; 1 on average over the rows."""
    counts = Counter(row.outputs[0] for row in rows)
    power = {"none": 0.0, "sqrt": 0.5, "balanced": 1.0}[how]
    raw = {answer: (1 / n) ** power for answer, n in counts.items()}
    mean = sum(raw[answer] * n for answer, n in counts.items()) / len(rows)
    return {answer: weight / mean for answer, weight in raw.items()}


def split(rows: Sequence[Row], share: float, where: str) -> tuple[list[Row], list[Row]]:
    """(training, validation) rows: about `share` of the inputs, by their hash, are set aside.

    Rows with the same input fall on the same side.

    Raises:
        DataError: one side is empty.
    """

    def aside(row: Row) -> bool:
        digest = hashlib.sha256(row.input.encode()).digest()
        return int.from_bytes(digest[:8], "big") < share * 2**64

    sides = [row for row in rows if not aside(row)], [row for row in rows if aside(row)]
    if not all(sides):
        raise DataError(
            f"{where}: early_stopping.share {share:g} of {len(rows)} rows leaves"
            f" {len(sides[0])} to train on and {len(sides[1])} to look at; change the share"
        )
    return sides


def pad(rows: Sequence[Answer], end: int, device: torch.device) -> AnswerBatch:
    """One sequence a row, padded on the right."""
    return _laid([[row] for row in rows], max(map(len, rows)), end, device)


def pack(rows: Sequence[Answer], end: int, device: torch.device, width: int) -> AnswerBatch:
    """Several rows a sequence of up to `width` tokens (or the longest row): first fit, the longest
    first. Positions begin anew at each row."""
    width = max(width, *map(len, rows))
    bins: list[list[Answer]] = []
    room: list[int] = []
    for row in sorted(rows, key=len, reverse=True):
        at = next((i for i, left in enumerate(room) if left >= len(row)), None)
        if at is None:
            at = len(bins)
            bins.append([])
            room.append(width)
        bins[at].append(row)
        room[at] -= len(row)
    return _laid(bins, width - min(room), end, device, packed=True)


def _laid(
    bins: Sequence[Sequence[Answer]],
    width: int,
    end: int,
    device: torch.device,
    *,
    packed: bool = False,
) -> AnswerBatch:
    shape = (len(bins), width)
    ids, labels = torch.full(shape, end), torch.full(shape, IGNORE)
    weights, positions = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
    segments = torch.full(shape, -1)
    for i, rows in enumerate(bins):
        at = 0
        for n, row in enumerate(rows):
            ids[i, at : at + len(row)] = torch.tensor(row.prompt + row.answer)
            # The token at t predicts the one at t + 1: the answer is predicted from one before it.
            first = at + len(row.prompt) - 1
            labels[i, first : first + len(row.answer)] = torch.tensor(row.answer)
            weights[i, first : first + len(row.answer)] = row.weight
            positions[i, at : at + len(row)] = torch.arange(len(row))
            segments[i, at : at + len(row)] = n
            at += len(row)
    return AnswerBatch(
        ids.to(device),
        labels.to(device),
        weights.to(device),
        int((labels != IGNORE).sum()),
        positions.to(device) if packed else None,
        segments.to(device) if packed else None,
    )


def pair(rows: Sequence[Pair], end: int, device: torch.device) -> PairBatch:
    """The lefts, then the rights, padded on the right."""
    texts = [row.left for row in rows] + [row.right for row in rows]
    ids = torch.full((len(texts), max(map(len, texts))), end)
    for i, text in enumerate(texts):
        ids[i, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])
    same = torch.tensor([row.same for row in rows])
    return PairBatch(ids.to(device), lengths.to(device), same.to(device), len(rows))
