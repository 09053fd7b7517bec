"""From a corpus to what training reads: the tokenizer, and shards of tokens (shards.py)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from hybrid.config import DataConfig, ProjectConfig
from hybrid.errors import ConfigError, DataError
from hybrid.training.corpus import File, find_files, read_documents
from hybrid.training.packing import IGNORE, Batch
from hybrid.training.shards import ShardSet, write_shard

__all__ = [
    "IGNORE", "Batch", "PreparedData", "ShardSet", "ShardTask", "load_tokenizer", "prepare_data",
    "train_tokenizer", "write_shard",
]  # fmt: skip

END_OF_TEXT = "<|endoftext|>"
SHARD_BYTES = 64 * 1024 * 1024
"""Source bytes a shard is cut at (between files), so that many can be tokenised at once."""
LEFTOVER_S = 24 * 3600.0
"""A preparation that has written nothing for so long was killed; what it left is removed."""


# --- tokenizer ------------------------------------------------------------------------------


def train_tokenizer(documents: Iterable[str], vocab_size: int, context: int) -> Any:
    """Learn a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2), with END_OF_TEXT at id 0.

    Case is kept, digits stand alone (numbers then share their parts), words are cut as GPT-2 cuts
    them. Any string can be encoded and comes back unchanged.

    Returns:
        A transformers `PreTrainedTokenizerFast`; END_OF_TEXT both ends a text and pads.
    """
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(source: Path) -> Any:
    """The tokenizer of a Hugging Face model directory.

    Raises:
        ConfigError: there is none, it has no fast form, or it has no end-of-text token.
    """
    from transformers import AutoTokenizer

    if not (source / "tokenizer.json").exists():
        raise ConfigError(
            f"model.source: {source}: no tokenizer.json; a base needs its fast tokenizer there",
            param="model.source",
        )
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.source: {source}: its tokenizer has no eos_token", param="model.source"
        )
    return tokenizer


# --- shards ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """Tokenise `files` into shard `number` of `folder`. Pickles; runs anywhere `folder` is seen."""

    files: tuple[File, ...]
    config: DataConfig
    tokenizer: Path
    eos: int
    folder: Path
    number: int

    def __call__(self) -> dict[str, Any]:
        """Write the shard and return its entry of the index."""
        bpe = Tokenizer.from_file(str(self.tokenizer / "tokenizer.json"))
        wide = bpe.get_vocab_size() > np.iinfo(np.uint16).max + 1
        documents = []
        for texts in _chunks(read_documents(self.files, self.config), 256):
            for encoded in bpe.encode_batch(texts, add_special_tokens=False):
                if not encoded.ids:  # a normaliser took all: nothing to learn from
                    continue
                ids = np.array([*encoded.ids, self.eos], dtype=np.uint32 if wide else np.uint16)
                documents.append(ids)
        tokens = np.concatenate(documents) if documents else np.zeros(0, dtype=np.uint16)
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        return write_shard(self.folder, self.number, tokens, offsets)


# --- the whole corpus of a project ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """What training reads: folders of shards and the tokenizer, and the digest of all of it."""

    train: Path
    holdout: Path | None
    tokenizer: Path
    digest: str


RunAll = Callable[[Sequence[ShardTask]], list[dict[str, Any]]]


def prepare_data(config: ProjectConfig, run_all: RunAll | None = None) -> PreparedData:
    """Make the tokenizer and the shards below `run.dir`/shards, once for one state of the files.

    Args:
        run_all: runs shard tasks and returns their results in order; by default one after another.

    Raises:
        DataError: the corpus is missing, empty, malformed or shorter than one sequence.
        ConfigError: `model.source` has no usable tokenizer.
    """
    run_all = run_all or (lambda tasks: [task() for task in tasks])
    corpora, learn = _files(config)
    home = _home(config, corpora, learn)
    if not (home / "data.json").exists():
        _make(config, home, corpora, learn, run_all)
    result = _made(home)
    _check_length(result, config)
    return result


def prepared(config: ProjectConfig) -> PreparedData | None:
    """What `prepare_data` has made of the files as they are now; None if it has yet to."""
    try:
        home = _home(config, *_files(config))
    except DataError:  # no files yet: `data.prepare` makes them
        return None
    return _made(home) if (home / "data.json").exists() else None


def _files(config: ProjectConfig) -> tuple[dict[str, list[File]], list[File]]:
    """The files of each corpus, and those that the tokenizer is learnt from."""
    data = config.data
    train = find_files(data.train, "data.train")
    holdout = find_files(data.holdout, "data.holdout") if data.holdout else []
    learn = find_files(data.tokenizer.train_on or data.train, "data.tokenizer.train_on")
    return {"train": train, "holdout": holdout}, learn


def _home(config: ProjectConfig, corpora: dict[str, list[File]], learn: list[File]) -> Path:
    """The folder of what is made of these files in their present state."""
    data, source = config.data, config.model.source
    key = _digest(
        [data.field, data.text_documents, data.tokenizer.vocab_size, str(source or "")],
        *([(f.url, f.state) for f in files] for files in (*corpora.values(), learn)),
    )
    return config.run.dir / "shards" / key[:16]


def _made(home: Path) -> PreparedData:
    holdout = home / "holdout"
    return PreparedData(
        train=home / "train",
        holdout=holdout if holdout.exists() else None,
        tokenizer=home / "tokenizer",
        digest=json.loads((home / "data.json").read_text())["digest"],
    )


def _make(
    config: ProjectConfig,
    home: Path,
    corpora: dict[str, list[File]],
    learn: list[File],
    run_all: RunAll,
) -> None:
    """Make all of `home` in a folder of this process's own, then rename it.

    Runs that prepare the same data at once, on whatever machines, do not meet: the first to be done
    is kept, and the others' is dropped, as it is the same.
    """
    own = home.with_name(f"{home.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    own.mkdir(parents=True)
    try:
        digest = _fill(config, own, corpora, learn, run_all)
        (own / "data.json").write_text(json.dumps({"digest": digest}))
        try:
            if home.exists() and not (home / "data.json").exists():  # damaged
                home.rename(own / "damaged")
                shutil.rmtree(own / "damaged")
            own.rename(home)
        except OSError:
            if not (home / "data.json").exists():
                raise
    finally:
        shutil.rmtree(own, ignore_errors=True)
    for other in home.parent.glob("*.tmp"):
        try:
            written = max(path.stat().st_mtime for path in (other, *other.rglob("*")))
        except FileNotFoundError:  # its owner is just finishing
            continue
        if time.time() - written > LEFTOVER_S:
            shutil.rmtree(other, ignore_errors=True)


def _fill(
    config: ProjectConfig,
    folder: Path,
    corpora: dict[str, list[File]],
    learn: list[File],
    run_all: RunAll,
) -> str:
    """The tokenizer and every corpus' shards, in `folder`; a digest of them."""
    data, source = config.data, config.model.source
    tokenizer = (
        load_tokenizer(source)
        if source
        else train_tokenizer(
            _some(read_documents(learn, data), learn),
            data.tokenizer.vocab_size,
            config.model.context,
        )
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    digests = [hashlib.sha256((folder / "tokenizer/tokenizer.json").read_bytes()).hexdigest()]
    for name, files in corpora.items():
        if files:
            (folder / name).mkdir()
            shards = run_all(
                [
                    ShardTask(
                        files=group,
                        config=data,
                        tokenizer=folder / "tokenizer",
                        eos=tokenizer.eos_token_id,
                        folder=folder / name,
                        number=number,
                    )
                    for number, group in enumerate(_group(files))
                ]
            )
            (folder / name / "index.json").write_text(json.dumps({"shards": shards}, indent=1))
            digests += [shard["sha256"] for shard in shards]
    return _digest(digests)


def _check_length(data: PreparedData, config: ProjectConfig) -> None:
    length = config.training.sequence_length
    tokens = ShardSet(data.train).tokens
    if tokens <= length:
        raise DataError(
            f"data.train: {tokens} tokens in all, shorter than one sequence of {length} (and the"
            " token after it); add text or lower training.sequence_length",
            param="data.train",
        )
    if data.holdout is not None and ShardSet(data.holdout).tokens < 2:
        raise DataError("data.holdout: no text in these files", param="data.holdout")


def _group(files: Sequence[File]) -> Iterator[tuple[File, ...]]:
    """Cut the list of files into shards by size alone, so that any cluster makes the same ones."""
    group: list[File] = []
    for file in files:
        if group and sum(f.size for f in group) + file.size > SHARD_BYTES:
            yield tuple(group)
            group = []
        group.append(file)
    yield tuple(group)


def _some(documents: Iterator[str], files: Sequence[File]) -> Iterator[str]:
    """The documents; an error when there are none, before a tokenizer is learnt from nothing."""
    empty = True
    for document in documents:
        empty = False
        yield document
    if empty:
        names = ", ".join(file.url.removeprefix("file://") for file in files[:3])
        raise DataError(f"no text in {names}", param="data.train")


def _chunks(items: Iterable[str], size: int) -> Iterator[list[str]]:
    chunk: list[str] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
