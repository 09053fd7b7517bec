"""Answers held to a JSON schema, a regex or a closed set: which tokens may come next.

llguidance compiles a constraint once; each request walks its own copy. A mask is made a step for
the constrained rows alone. Where a step would cost too much, llguidance gives up (its limits are
below): mostly when the constraint is tried at the start, rarely in the middle of an answer.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybrid.engine.text import Codec
from hybrid.errors import InvalidRequest, MissingExtra, Unsupported
from hybrid.wire import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from hybrid.engine.scheduler import Sequence

_MAX_TEXT = 100_000
"""Characters of a schema, a pattern or a list of choices."""
_TRIED_TOKENS = 16
"""What blows up does so in the first tokens."""
_WHITESPACE = r"( |\n {0,24})"
"""Between two parts of a JSON text: without a bound a weak model writes spaces until it is cut."""


@dataclass(frozen=True)
class Masks:
    """Which tokens the constrained rows of a step may choose from.

    `rows` index the step's rows; `bits` (int32 [len(rows), ceil(vocab / 32)], on the CPU) has a
    bit for each token, the lowest first.
    """

    rows: list[int]
    bits: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        """A copy of the rows with -inf for what is not allowed.

        Args:
            logits: float32 [N, vocab]; left as they are.

        Returns:
            float32 [len(rows), vocab], on the same device.
        """
        bits = self.bits.to(logits.device)
        places = torch.arange(32, dtype=torch.int32, device=logits.device)
        closed = (bits[:, :, None] >> places & 1 == 0).flatten(1)
        return logits[self.rows].masked_fill_(closed[:, : logits.shape[1]], -torch.inf)


class Grammars:
    """Compiled constraints, the last `size` that were used; any thread may ask.

    Args:
        folder: the base; its tokenizer.json is read when the first constraint comes.
        ends: its end-of-text tokens.
        vocab: rows of its output layer; those beyond the tokenizer's are never allowed.

    Attributes:
        built: how many were compiled.
    """

    def __init__(self, folder: Path, ends: Seq[int], vocab: int, *, size: int = 64) -> None:
        self._folder = folder
        self._ends = ends
        self._vocab = vocab
        self._size = size
        self._made: OrderedDict[Constraint, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self.built = 0

    def get(self, constraint: Constraint) -> LLMatcher:
        """The compiled constraint, to be copied; compiled once however many ask at a time.

        Raises:
            InvalidRequest: malformed, too large, too complex, or it allows no answer; `param` is
                its kind. Unsupported: the base's tokenizer. MissingExtra: llguidance.
        """
        with self._lock:
            future = self._made.get(constraint)
            mine = future is None
            if future is None:
                future = self._made[constraint] = Future()
                if len(self._made) > self._size:
                    self._made.popitem(last=False)
            self._made.move_to_end(constraint)
        if mine:
            try:
                future.set_result(self._build(constraint))
            except BaseException as e:  # noqa: BLE001 - whoever waits for it gets it, we too
                with self._lock:
                    self._made.pop(constraint, None)
                future.set_exception(e)
        return future.result()

    def _build(self, constraint: Constraint) -> LLMatcher:
        kind = constraint.kind
        _check_text(constraint)
        tokenizer = self._tokens()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
        made = LLMatcher(tokenizer, _grammar(constraint), log_level=0, limits=limits)
        tried, stuck = made.deep_copy(), False
        for _ in range(_TRIED_TOKENS):
            if tried.is_error() or tried.is_stopped():
                break
            mask = int.from_bytes(tried.compute_bitmask(), "little")
            for end in self._ends:
                mask &= ~(1 << end)
            if not mask:
                stuck = not tried.is_accepting()
                break
            tried.consume_token((mask & -mask).bit_length() - 1)
        if stuck or tried.is_error():
            raise InvalidRequest(f"{kind}: {_why(tried)}", param=kind)
        with self._lock:
            self.built += 1
        return made

    def _tokens(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer()
            return self._tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise MissingExtra(
                "constrained answers need llguidance: pip install 'hybrid[serve]'"
            ) from None
        text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
        try:
            return LLTokenizer(text, n_vocab=self._vocab, eos_token=list(self._ends))
        except ValueError as e:
            raise Unsupported(f"this base's tokenizer cannot be constrained: {e}") from None


class Constraints:
    """The constrained requests of an engine, each where it stands in its grammar.

    Args:
        folder, codec: the base and its tokenizer.
        vocab: rows of its output layer.
    """

    def __init__(self, folder: Path, codec: Codec, vocab: int) -> None:
        # config.json may name an end that the tokenizer lacks; it can never be chosen.
        self._ends = sorted(end for end in codec.ends if end < codec.size)
        self._vocab = vocab
        self._walks: dict[Sequence, LLMatcher] = {}
        self._executor: Any = None
        self.grammars = Grammars(folder, self._ends, vocab)

    def prepare(self, constraint: Constraint) -> None:
        """Compile, in any thread, so that `start` need not. Raises as `Grammars.get`."""
        self.grammars.get(constraint)

    def start(self, constraint: Constraint | None) -> LLMatcher | None:
        """A walk for a new request. Raises as `Grammars.get`."""
        return None if constraint is None else self.grammars.get(constraint).deep_copy()

    def hold(self, sequence: Sequence, walk: LLMatcher | None) -> None:
        """Hold a request to its walk until it is dropped."""
        if walk is not None:
            self._walks[sequence] = walk

    def drop(self, sequence: Sequence) -> None:
        """Forget a request that ended."""
        self._walks.pop(sequence, None)

    def masks(self, chosen: Seq[Sequence]) -> Masks | None:
        """What the constrained ones of a step's rows may choose; None when there are none.

        On a GPU this is done while the model runs: call it before its results are looked at.
        """
        if not self._walks:
            return None
        walks = [(row, w) for row, s in enumerate(chosen) if (w := self._walks.get(s)) is not None]
        if not walks:
            return None
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(torch.get_num_threads())
        bits = torch.zeros((len(walks), -(-self._vocab // 32)), dtype=torch.int32)
        self._executor.unsafe_compute_mask_ptr(
            [(walk, i) for i, (_, walk) in enumerate(walks)],
            bits.data_ptr(),
            bits.shape[1] * 4,
            len(walks),
        )
        return Masks([row for row, _ in walks], bits)

    def accept(self, sequence: Sequence, token: int) -> InvalidRequest | None:
        """Take a chosen token in.

        Returns:
            None, or why the answer cannot go on: a grammar that only now proved too complex.
        """
        walk = self._walks.get(sequence)
        if walk is None:
            return None
        # A walk that gave up, or is in a blind alley, allows nothing but an end.
        fine = walk.is_accepting() if token in self._ends else walk.consume_token(token)
        if fine and not walk.is_error():
            return None
        kind = sequence.sampling.constraint.kind if sequence.sampling.constraint else None
        n = len(sequence.output)
        return InvalidRequest(f"{kind}: given up after {n} tokens: {_why(walk)}", param=kind)

    def whole(self, sequence: Sequence) -> bool:
        """Whether nothing but the end of text may follow."""
        walk = self._walks.get(sequence)
        return walk is not None and walk.is_stopped()


def _check_text(constraint: Constraint) -> None:
    kind, text = constraint.kind, constraint.text
    if len(text) > _MAX_TEXT:
        raise InvalidRequest(f"{kind}: {len(text)} characters; allowed are {_MAX_TEXT}", param=kind)
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InvalidRequest(f"{kind}: no UTF-8 ({e.reason})", param=kind) from None
    if kind == "choice" and (not (choices := json.loads(text)) or not all(choices)):
        raise InvalidRequest("choice: at least one, none of them empty", param=kind)


def _grammar(constraint: Constraint) -> str:
    """llguidance's grammar of a constraint whose text is checked."""
    from llguidance import LLMatcher

    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.text)
    if constraint.kind == "choice":  # as one lexeme, which is faster than a rule
        choices = json.loads(constraint.text)
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, choices)))
    return LLMatcher.grammar_from_json_schema(
        constraint.text, defaults={"whitespace_pattern": _WHITESPACE}
    )


def _why(walk: LLMatcher) -> str:
    error = walk.get_error().replace("<non-verbose/>", "").strip()
    if not error or error.startswith("NoExtension"):
        return "no answer is possible"
    return error[:500]
