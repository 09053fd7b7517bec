"""Packed token shards and the data cursor: which tokens a micro-batch holds, from its number alone.

Documents are tokenised, closed with the end-of-text token and laid end to end in memory-mapped
`.npy` shards. Sequence n is the window [n·L, n·L + L] of that stream; each epoch visits all of
them in an order drawn from (seed, epoch). Nothing but the step number needs to be remembered.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from hybrid.config import DataConfig, ProjectConfig, TrainingConfig
from hybrid.errors import ConfigError, DataError
from hybrid.training.corpus import File, find_files, read_documents

END_OF_TEXT = "<|endoftext|>"
IGNORE = -100
"""Label of a position that is padding: no loss is taken there."""
SHARD_BYTES = 64 * 1024 * 1024
"""Source bytes a shard is cut at (between files), so that many can be tokenised at once."""

Tokens = npt.NDArray[np.unsignedinteger[Any]]


class Batch(TypedDict):
    """One micro-batch: int64 arrays [micro_batch, sequence_length].

    `labels[i, t]` is the token that follows `input_ids[i, t]`, or IGNORE past the corpus' end.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


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
                ids = np.array([*encoded.ids, self.eos], dtype=np.uint32 if wide else np.uint16)
                documents.append(ids)
        tokens = np.concatenate(documents) if documents else np.zeros(0, dtype=np.uint16)
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        return write_shard(self.folder, self.number, tokens, offsets)


def write_shard(
    folder: Path, number: int, tokens: Tokens, offsets: npt.NDArray[np.int64]
) -> dict[str, Any]:
    """Write one shard as a pair of `.npy` files.

    Args:
        tokens: uint16 or uint32 [tokens], every document closed by the end-of-text token.
        offsets: int64 [documents + 1]; document d is tokens[offsets[d]:offsets[d + 1]].

    Returns:
        Its entry of the index: name, tokens, documents, sha256 over the two arrays' bytes.
    """
    name = f"shard-{number:05d}"
    np.save(folder / f"{name}.tokens.npy", tokens)
    np.save(folder / f"{name}.offsets.npy", offsets)
    digest = hashlib.sha256(tokens.astype("<u4").tobytes())
    digest.update(offsets.astype("<i8").tobytes())
    return {
        "name": name,
        "tokens": len(tokens),
        "documents": len(offsets) - 1,
        "sha256": digest.hexdigest(),
    }


class ShardSet:
    """The token stream of one corpus, memory-mapped, with deterministic access."""

    def __init__(self, folder: Path) -> None:
        self.index: dict[str, Any] = json.loads((folder / "index.json").read_text())
        self._shards: list[Tokens] = [
            np.load(folder / f"{entry['name']}.tokens.npy", mmap_mode="r")
            for entry in self.index["shards"]
            if entry["tokens"]  # an empty array cannot be mapped
        ]
        self._starts = np.cumsum([0, *map(len, self._shards)])
        self.tokens = int(self._starts[-1])
        self._order = lru_cache(maxsize=2)(_permutation)  # a batch may straddle two epochs

    def sequences(self, length: int) -> int:
        """Windows of `length` inputs; the last may be padded."""
        return -(-(self.tokens - 1) // length)

    def micro_batch(self, step: int, index: int, config: TrainingConfig, seed: int) -> Batch:
        """Micro-batch `index` of step `step` (both from 0), the same on whatever rank asks."""
        count = self.sequences(config.sequence_length)
        first = (step * config.micro_batches + index) * config.micro_batch
        windows = []
        for k in range(first, first + config.micro_batch):
            epoch, position = divmod(k, count)
            windows.append(int(self._order(seed, epoch, count)[position]))
        return self._gather(windows, config.sequence_length)

    def eval_batch(self, index: int, config: TrainingConfig) -> Batch:
        """Micro-batch `index` of the corpus in its own order; rows past the end are padding."""
        first = index * config.micro_batch
        return self._gather(range(first, first + config.micro_batch), config.sequence_length)

    def _gather(self, windows: Iterable[int], length: int) -> Batch:
        rows = [self._window(n * length, length + 1) for n in windows]
        inputs = np.zeros((len(rows), length), dtype=np.int64)
        labels = np.full((len(rows), length), IGNORE, dtype=np.int64)
        for i, row in enumerate(rows):
            inputs[i, : min(len(row), length)] = row[:length]
            labels[i, : max(len(row) - 1, 0)] = row[1:]
        return {"input_ids": inputs, "labels": labels}

    def _window(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """At most `length` tokens of the stream from `start`, across shards."""
        parts, end = [], min(start + length, self.tokens)
        while start < end:
            shard = int(np.searchsorted(self._starts, start, side="right")) - 1
            stop = min(end, int(self._starts[shard + 1]))
            base = int(self._starts[shard])
            parts.append(self._shards[shard][start - base : stop - base].astype(np.int64))
            start = stop
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _permutation(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)


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
    data, source = config.data, config.model.source
    train = find_files(data.train, "data.train")
    holdout = find_files(data.holdout, "data.holdout") if data.holdout else []
    learn = find_files(data.tokenizer.train_on or data.train, "data.tokenizer.train_on")
    key = _digest(
        [data.field, data.text_documents, data.tokenizer.vocab_size, str(source or "")],
        *([(f.url, f.state) for f in files] for files in (train, holdout, learn)),
    )
    home = config.run.dir / "shards" / key[:16]
    if not (home / "data.json").exists():
        shutil.rmtree(home, ignore_errors=True)  # what an interrupted preparation left
        home.mkdir(parents=True)
        tokenizer = (
            load_tokenizer(source)
            if source
            else train_tokenizer(
                _some(read_documents(learn, data), learn),
                data.tokenizer.vocab_size,
                config.model.context,
            )
        )
        tokenizer.save_pretrained(home / "tokenizer")
        digests = [hashlib.sha256((home / "tokenizer/tokenizer.json").read_bytes()).hexdigest()]
        for name, files in (("train", train), ("holdout", holdout)):
            if files:
                folder = home / name
                folder.mkdir()
                shards = run_all(
                    [
                        ShardTask(
                            files=group,
                            config=data,
                            tokenizer=home / "tokenizer",
                            eos=tokenizer.eos_token_id,
                            folder=folder,
                            number=number,
                        )
                        for number, group in enumerate(_group(files))
                    ]
                )
                (folder / "index.json").write_text(json.dumps({"shards": shards}, indent=1))
                digests += [shard["sha256"] for shard in shards]
        (home / "data.json").write_text(json.dumps({"digest": _digest(digests)}))
    result = PreparedData(
        train=home / "train",
        holdout=home / "holdout" if holdout else None,
        tokenizer=home / "tokenizer",
        digest=json.loads((home / "data.json").read_text())["digest"],
    )
    _check_length(result, config)
    return result


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
