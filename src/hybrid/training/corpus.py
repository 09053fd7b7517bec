"""Reading a corpus: text, JSONL and Parquet files from globs or fsspec URLs, document by document.

Every error names the file and the line, because a corpus is somebody else's data.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from hybrid.config import DataConfig
from hybrid.errors import DataError

JSONL = (".jsonl", ".ndjson")
PARQUET = (".parquet", ".pq")


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of a corpus: an fsspec URL or path, its size in bytes, its state.

    `state` changes whenever the file does (time of change, ETag), so it keys what is made from it.
    """

    url: str
    size: int
    state: str


def find_files(patterns: Sequence[str], what: str = "data.train") -> list[File]:
    """The files that globs, paths or fsspec URLs name: sorted by URL, each once.

    Raises:
        DataError: nothing is named, or a pattern matches no file.
    """
    if not patterns:
        raise DataError(f"{what} names no files: list text, JSONL or Parquet files", param=what)
    found: dict[str, File] = {}
    for pattern in patterns:
        filesystem, path = fsspec.core.url_to_fs(pattern)
        matches = [p for p in filesystem.glob(path) if filesystem.isfile(p)]
        if not matches:
            raise DataError(f"{what}: {pattern}: no such file", param=what)
        for match in matches:
            url = filesystem.unstrip_protocol(match)
            found[url] = File(
                url=url, size=filesystem.size(match), state=str(filesystem.ukey(match))
            )
    return [found[url] for url in sorted(found)]


def read_documents(files: Sequence[File], config: DataConfig) -> Iterator[str]:
    """Yield the documents of `files` in order; those of white space only are passed over.

    Raises:
        DataError: a file is not UTF-8, a JSONL row is not JSON or lacks the field, a Parquet file
            lacks the column; the message names file and line (or row).
    """
    for file in files:
        name = file.url.removeprefix("file://")
        if file.url.endswith(PARQUET):
            documents = _read_parquet(file, name, config.field)
        elif file.url.endswith(JSONL):
            documents = _read_jsonl(file, name, config.field)
        elif config.text_documents == "line":
            documents = (line for _, line in _read_lines(file, name))
        else:
            documents = _read_whole(file, name)
        for document in documents:
            if document.strip():
                yield document


def prepare_once(config: DataConfig, out: Path) -> bool:
    """Run `prepare(out)` of the Python file `data.prepare`, unless this very file has run already.

    Returns:
        Whether it ran. A marker with the file's digest is written only after it returned; a second
        run on this machine waits for that.

    Raises:
        DataError: the file is missing or has no function `prepare`.
    """
    if config.prepare is None:
        return False
    script, marker = Path(config.prepare), out / ".prepared.json"
    try:
        digest = hashlib.sha256(script.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise DataError(f"data.prepare: {script}: no such file", param="data.prepare") from None
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once: the second finds the marker
        if marker.exists() and json.loads(marker.read_text())["sha256"] == digest:
            return False
        prepare = runpy.run_path(str(script)).get("prepare")
        if prepare is None:
            raise DataError(
                f"data.prepare: {script}: defines no prepare(out)", param="data.prepare"
            )
        prepare(out)
        marker.write_text(json.dumps({"script": str(script), "sha256": digest}))
    return True


def _read_whole(file: File, name: str) -> Iterator[str]:
    with fsspec.open(file.url, "rb") as stream:
        raw = stream.read()
    try:
        yield raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise DataError(f"{name}: line {line}: not UTF-8 (byte 0x{raw[e.start]:02x})") from None


def _read_lines(file: File, name: str) -> Iterator[tuple[int, str]]:
    with fsspec.open(file.url, "rb") as stream:
        for number, raw in enumerate(stream, 1):
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as e:
                raise DataError(
                    f"{name}: line {number}: not UTF-8 (byte 0x{raw[e.start]:02x})"
                ) from None


def _read_jsonl(file: File, name: str, field: str) -> Iterator[str]:
    for number, line in _read_lines(file, name):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            raise DataError(f"{name}: line {number}: not JSON: {e.msg}") from None
        if not isinstance(row, dict) or field not in row:
            shown = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise DataError(
                f"{name}: line {number}: no field {field!r} (found: {shown}); set data.field"
            )
        yield _text(row[field], f"{name}: line {number}", field)


def _read_parquet(file: File, name: str, field: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with fsspec.open(file.url, "rb") as stream:
        try:
            table = pq.ParquetFile(stream)
        except pa.ArrowInvalid as e:
            raise DataError(f"{name}: not a Parquet file: {e}") from None
        columns = table.schema_arrow.names
        if field not in columns:
            raise DataError(
                f"{name}: no column {field!r} (found: {', '.join(columns)}); set data.field"
            )
        row = 0
        for batch in table.iter_batches(columns=[field]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield _text(value, f"{name}: row {row}", field)


def _text(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {field!r} is {type(value).__name__}, not text")
    return value
