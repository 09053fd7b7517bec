"""Documents packed into one sequence and kept apart: their positions and their labels.

`training.packing: isolate` gives every document of a sequence positions that begin at 0. Without a
cache or an attention mask of its own, transformers reads from such positions where documents begin
and lets no token attend across: block-diagonal causal attention (Krell et al. 2021), as one
[rows, 1, tokens, tokens] mask of one byte an entry for all layers, and none at all (the kernels'
own causal path) where no sequence of the micro-batch holds a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

IGNORE = -100
"""Label of a position that takes no loss: padding, or the end of an isolated document."""


class Batch(TypedDict):
    """One micro-batch: int64 arrays [micro_batch, sequence_length].

    `labels[i, t]` is the token that follows `input_ids[i, t]`, or IGNORE past the corpus' end.
    `position_ids` is there where documents are isolated: places within the document.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    position_ids: NotRequired[npt.NDArray[np.int64]]


def isolate(batch: Batch, documents: Sequence[npt.NDArray[np.int64]]) -> Batch:
    """Positions that begin anew with each document, and no label across a boundary.

    A document's last token, the end-of-text, has no label: what follows it here is the start of
    another document, which it must not know of. So a packed document's loss is its loss alone. A
    document that an earlier sequence began goes on at position 0, as its beginning is not seen.

    Args:
        documents: of each row, where documents begin: ascending, in [1, sequence_length].
    """
    rows, length = batch["input_ids"].shape
    first = np.zeros((rows, length), dtype=np.int64)
    labels = batch["labels"].copy()
    for row, begins in enumerate(documents):
        labels[row, begins - 1] = IGNORE
        inside = begins[begins < length]
        first[row, inside] = inside
    positions = np.arange(length) - np.maximum.accumulate(first, axis=1)
    return {**batch, "labels": labels, "position_ids": positions}
