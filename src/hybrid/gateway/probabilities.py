"""Log probabilities in OpenAI's two schemas: of a chat's tokens, and of a completion's."""

from __future__ import annotations

import codecs
from typing import Any

from hybrid.wire import Alternative, Chunk


def token_text(piece: bytes) -> str:
    """A token as text; half a character as `bytes:\\xe2\\x98`, as OpenAI writes it."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in piece)


def chat(chunk: Chunk) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""

    def entry(piece: bytes, logprob: float) -> dict[str, Any]:
        return {"token": token_text(piece), "logprob": logprob, "bytes": list(piece)}

    content = [
        {**entry(piece, p), "top_logprobs": [entry(a.piece, a.logprob) for a in others]}
        for piece, p, others in zip(_pieces(chunk), chunk.logprobs, _others(chunk), strict=True)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The `logprobs` of completion choices, with offsets that run on over an answer's chunks.

    Args:
        top: how many of the likeliest tokens were asked for; the chosen one is always among them.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._read: dict[int, tuple[codecs.IncrementalDecoder, int]] = {}

    def render(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """What belongs to a chunk of choice `index`; offsets count characters of its answer."""
        decoder, offset = self._read.get(index) or (
            codecs.getincrementaldecoder("utf-8")("replace"),
            0,
        )
        offsets = []
        for piece in _pieces(chunk):
            offsets.append(offset)
            offset += len(decoder.decode(piece))
        self._read[index] = decoder, offset
        tokens = [token_text(piece) for piece in _pieces(chunk)]
        top: list[dict[str, float]] | None = None
        if self._top:
            top = [
                # Two tokens may read alike; the first is the likelier.
                {**{token_text(a.piece): a.logprob for a in reversed(others)}, token: p}
                for token, p, others in zip(tokens, chunk.logprobs, _others(chunk), strict=True)
            ]
        return {
            "tokens": tokens,
            "token_logprobs": list(chunk.logprobs),
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _pieces(chunk: Chunk) -> tuple[bytes, ...]:
    return chunk.pieces or (b"",) * len(chunk.logprobs)


def _others(chunk: Chunk) -> tuple[tuple[Alternative, ...], ...]:
    return chunk.top_logprobs or ((),) * len(chunk.logprobs)
