"""Between text and tokens: encoding, streaming decoding, stop strings."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hybrid.errors import IntegrityError

_REPLACEMENT = "�"
_utf8 = partial(codecs.getincrementaldecoder("utf-8"), "replace")
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level BPE (GPT-2's) writes bytes with; printable ones stay."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_LETTERS = _byte_letters()


class Codec:
    """A base's tokenizer and its end-of-text tokens.

    Attributes:
        ends, end: the end-of-text tokens; one of them.
        joins_bytes: `decode` is `shown` of each token, joined.
        size: the highest token id and one.

    Raises:
        IntegrityError: the folder has no tokenizer.json, or names no end-of-text token.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise IntegrityError(f"{folder}: no tokenizer.json; the base cannot be served")
        self._tokenizer: Any = Tokenizer.from_file(str(path))
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._byte_level = "ByteLevel" in repr(self._tokenizer.decoder)
        # Alone, that decoder only joins bytes, so that a token's do not depend on its neighbours.
        self.joins_bytes = type(self._tokenizer.decoder).__name__ == "ByteLevel"
        self._shown: dict[int, bytes] = {}
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        ends: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            if (folder / name).exists():
                value = json.loads((folder / name).read_text()).get("eos_token_id")
                ends |= set(value if isinstance(value, list) else [value]) - {None}
        if not ends:
            raise IntegrityError(f"{folder}: config.json names no eos_token_id")
        self.ends = frozenset(ends)
        self.end = min(ends)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the tokenizer puts around one."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a continuation: nothing is put around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def piece(self, token: int) -> bytes:
        """Bytes of one token within a text, whole characters or not; of a special one its name."""
        name: str | None = self._tokenizer.id_to_token(token)
        if name is None:  # the model's vocabulary is larger than the tokenizer's
            return b""
        if token in self._added:
            return name.encode()
        if self._byte_level:
            return b"".join(bytes([_LETTERS[c]]) if c in _LETTERS else c.encode() for c in name)
        if byte := _BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        return name.replace("▁", " ").encode()

    def shown(self, token: int) -> bytes:
        """What `decode` makes of one token, where `joins_bytes`: nothing of a special one."""
        known = self._shown.get(token)
        if known is None:
            name: str = self._tokenizer.id_to_token(token) or ""
            added = self._added.get(token)
            if added is not None and added.special:
                name = ""
            letters = all(c in _LETTERS for c in name)
            known = bytes(_LETTERS[c] for c in name) if letters else name.encode()
            self._shown[token] = known
        return known


class Stream:
    """Turns tokens into text piece by piece.

    Holds back half a character (a byte-level token may end inside one), and text that may be the
    beginning of a stop string; a stop string itself is never given out.
    """

    def __init__(self, codec: Codec, stop: Sequence[str]) -> None:
        self._codec = codec
        self._stop = stop
        self._bytes = _utf8() if codec.joins_bytes else None
        self._ids: list[int] = []
        self._shown = 0  # tokens whose text is in `_text`
        self._context = 0  # decoding starts here, since a token's text may depend on the one before
        self._text = ""
        self._given = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that is certain now."""
        if self._bytes is not None:
            self._text += self._bytes.decode(self._codec.shown(token))
            return self._give(final=False)
        self._ids.append(token)
        before = self._codec.decode(self._ids[self._context : self._shown])
        after = self._codec.decode(self._ids[self._context :])
        if not after.endswith(_REPLACEMENT):
            self._text += after[len(before) :]
            self._context, self._shown = self._shown, len(self._ids)
        return self._give(final=False)

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        if self._bytes is not None:
            self._text += self._bytes.decode(b"", final=True)
            return self._give(final=True)
        before = self._codec.decode(self._ids[self._context : self._shown])
        self._text += self._codec.decode(self._ids[self._context :])[len(before) :]
        self._context = self._shown = len(self._ids)
        return self._give(final=True)

    def _give(self, *, final: bool) -> str:
        if self.stopped:
            return ""
        cut = min((i for s in self._stop if (i := self._text.find(s)) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            end = max(cut, self._given)
        else:
            held = 0 if final else max((_overlap(self._text, s) for s in self._stop), default=0)
            end = max(len(self._text) - held, self._given)
        piece = self._text[self._given : end]
        self._given = end
        return piece


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that is a proper beginning of `stop`."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
