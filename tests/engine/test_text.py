"""Streams of text: what is given piece by piece is what decoding all tokens at once gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders

from hybrid.engine.text import Codec, Stream
from hybrid.testing import tiny_base


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "base"
    tiny_base(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("naïve 漢")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def codec(folder: Path) -> Codec:
    made = Codec(folder)
    assert made.joins_bytes
    return made


@pytest.fixture(scope="module")
def careful(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Codec:
    """The same with a decoder of which nothing is known: each token is decoded with the last."""
    other = tmp_path_factory.mktemp("careful")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    tokenizer.save(str(other / "tokenizer.json"))
    (other / "config.json").write_text((folder / "config.json").read_text())
    made = Codec(other)
    assert not made.joins_bytes
    return made


def given_out(codec: Codec, ids: list[int], stop: tuple[str, ...] = ()) -> str:
    stream, text = Stream(codec, stop), ""
    for token in ids:
        text += stream.push(token)
        if stream.stopped:
            return text
    return text + stream.finish()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_tokens(codec: Codec, careful: Codec, data: st.DataObject) -> None:
    """Half characters, bytes that are none, special and added tokens, tokens beyond the last."""
    ids = data.draw(st.lists(st.integers(0, codec.size + 2), max_size=30))
    assert given_out(codec, ids) == codec.decode(ids) == given_out(careful, ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40), stop=st.text(min_size=1, max_size=3))
def test_any_text_up_to_its_stop_string(codec: Codec, careful: Codec, text: str, stop: str) -> None:
    ids = codec.encode_part(text)
    assert codec.decode(ids) == text
    for one in (codec, careful):
        assert given_out(one, ids, (stop,)) == text.split(stop, 1)[0]


def test_half_a_character_is_held_back(codec: Codec) -> None:
    ids = codec.encode_part("漢")
    assert len(ids) > 1
    stream = Stream(codec, ())
    assert [stream.push(t) for t in ids] == [""] * (len(ids) - 1) + ["漢"]
    assert Stream(codec, ()).push(ids[0]) == ""
