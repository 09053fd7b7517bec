"""Corpora in, shards out: every malformed input is named with its file and line."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybrid import config
from hybrid.config import ProjectConfig
from hybrid.errors import ConfigError, DataError
from hybrid.training import rows
from hybrid.training.corpus import prepare_once
from hybrid.training.data import IGNORE, ShardSet, ShardTask, load_tokenizer, prepare_data

TEXT = "All work and no play makes Jack a dull boy. " * 40


def project(folder: Path, *files: str, **data: Any) -> ProjectConfig:
    training = {"sequence_length": 16, "micro_batch": 2, "micro_batches": 2}
    return config.parse(
        {
            "run": {"name": "t", "dir": str(folder / "run")},
            "model": {"name": "b", "context": 32},
            "training": training,
            "data": {
                "train": [str(folder / f) for f in files],
                "tokenizer": {"vocab_size": 300},
                **data,
            },
        }
    )


def test_text_jsonl_and_parquet_give_the_same_tokens(tmp_path: Path) -> None:
    documents = [f"{i} {TEXT[:200]}" for i in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    pq.write_table(pa.table({"text": documents}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("\n".join(documents))
    digests = set()
    for name in ("a.jsonl", "a.parquet", "a.txt"):
        digests.add(prepare_data(project(tmp_path, name, text_documents="line")).digest)
    assert len(digests) == 1


def test_each_epoch_holds_every_token_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    made = project(tmp_path, "a.txt")
    data = prepare_data(made)
    shards, settings = ShardSet(data.train), made.training
    count = shards.sequences(16)
    seen = []
    for k in range(0, count, 4):
        for index in range(2):
            batch = shards.micro_batch(k // 4, index, settings, seed=3)
            assert batch["input_ids"].shape == (2, 16)
            assert batch["input_ids"].dtype == np.int64
            real = batch["labels"] != IGNORE
            inner = batch["labels"][:, :-1] == batch["input_ids"][:, 1:]
            assert (inner | ~real[:, :-1]).all()
            seen += [tuple(row) for row in batch["labels"]]
    tokens = sorted(t for row in seen[:count] for t in row if t != IGNORE)
    stream = np.load(next(Path(data.train).glob("*.tokens.npy")))
    assert tokens == sorted(int(t) for t in stream[1:])
    tokenizer = load_tokenizer(data.tokenizer)
    assert stream[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "no text in"),
        ("blank.txt", b" \n\n ", "no text in"),
        ("latin.txt", "goed\nhéél".encode("latin-1"), "line 2: not UTF-8"),
        ("a.jsonl", b'{"text": "ok"}\n{"txt": "x"}\n', r"line 2: no field 'text' \(found: txt\)"),
        ("b.jsonl", b'{"text": "ok"}\n{"text": \n', "line 2: not JSON"),
        ("c.jsonl", b'{"text": 3}\n', "line 1: 'text' is int"),
        ("d.jsonl", b"[1]\n", "line 1: no field"),
        ("e.parquet", b"PAR1 but not really", "not a Parquet file"),
        ("short.txt", b"too short", "shorter than one sequence of 16"),
    ],
)
def test_a_bad_corpus_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        prepare_data(project(tmp_path, name))


def test_a_missing_corpus_column_or_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        prepare_data(project(tmp_path, "*.txt"))
    with pytest.raises(DataError, match="names no files"):
        prepare_data(project(tmp_path))
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column 'text' \(found: body\)"):
        prepare_data(project(tmp_path, "a.parquet"))
    (tmp_path / "base").mkdir()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path / "base")


def test_two_runs_prepare_the_same_data_at_once(tmp_path: Path) -> None:
    """Both are half-way at the same moment; both get the same whole folder, and nothing is left."""
    (tmp_path / "a.txt").write_text(TEXT)
    made, half_way = project(tmp_path, "a.txt"), threading.Barrier(2, timeout=60)

    def run_all(tasks: Sequence[ShardTask]) -> list[dict[str, Any]]:
        half_way.wait()
        return [task() for task in tasks]

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: prepare_data(made, run_all), range(2))
    assert one == two
    assert ShardSet(one.train).tokens > 100
    assert len(list((tmp_path / "run/shards").iterdir())) == 1


def test_a_failed_preparation_leaves_nothing_and_old_leftovers_go(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    made, shards = project(tmp_path, "a.txt"), tmp_path / "run/shards"

    def fails(tasks: Sequence[ShardTask]) -> list[dict[str, Any]]:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        prepare_data(made, fails)
    assert list(shards.iterdir()) == []
    for name, days in (("killed.1.tmp", 2), ("busy.2.tmp", 2)):
        (shards / name).mkdir()
        os.utime(shards / name, (time.time() - days * 86400,) * 2)
    (shards / "busy.2.tmp/train").mkdir()  # written just now
    os.utime(shards / "busy.2.tmp", (0, 0))
    prepare_data(made)
    assert not (shards / "killed.1.tmp").exists()
    assert (shards / "busy.2.tmp").exists()


def test_a_second_run_waits_for_the_first_ones_prepare(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = tmp_path / "prepare.py"
    script.write_text("def prepare(out):\n    (out / 'made').touch(exist_ok=False)\n")
    made = project(tmp_path, "a.txt", prepare=str(script)).data
    out.mkdir()
    with (out / ".prepare.lock").open("w") as first, ThreadPoolExecutor(1) as pool:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = pool.submit(prepare_once, made, out)
        with pytest.raises(TimeoutError):
            second.result(0.3)
        marker = {"sha256": hashlib.sha256(script.read_bytes()).hexdigest()}
        (out / ".prepared.json").write_text(json.dumps(marker))
        fcntl.flock(first, fcntl.LOCK_UN)
        assert second.result(60) is False
    assert not (out / "made").exists()
    (out / ".prepared.json").unlink()
    assert [prepare_once(made, out), prepare_once(made, out)] == [True, False]
    assert (out / "made").exists()


def test_text_may_hold_other_line_ends(tmp_path: Path) -> None:
    texts = ["one\u2028two", "three\u0085four", "five\x0bsix"]
    lines = [json.dumps({"input": t, "output": t}, ensure_ascii=False) for t in texts[:2]]
    lines.append(json.dumps({"input": texts[2], "output": texts[2]}))
    (tmp_path / "rows.jsonl").write_bytes("\r\n".join([*lines, ""]).encode())
    assert [row.input for row in rows.read_rows(tmp_path / "rows.jsonl")] == texts


def test_an_interrupted_preparation_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    made = project(tmp_path, "a.txt")
    first = prepare_data(made)
    (first.train.parent / "data.json").unlink()
    (first.train / "index.json").write_text("{")
    assert prepare_data(made).digest == first.digest
