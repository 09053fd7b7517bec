"""Saved outputs, of any of the tools: which one is it, and what does it say?"""

from __future__ import annotations

from pathlib import Path

from hybrid.audit.reading import Reading
from hybrid.audit.smi import parse_smi
from hybrid.audit.smi_tables import read_kernel_log, read_nccl_tests, read_topology
from hybrid.audit.smi_tree import MOST_BYTES
from hybrid.errors import DataError


def read_capture(data: bytes) -> list[Reading]:
    """Readings of a saved `nvidia-smi` (-q -x, -q, table, topo -m), kernel log or nccl-tests run.

    One file may hold several of them, one after the other.

    Raises:
        DataError: it is none of these, or XML that is broken or hostile.
    """
    if len(data) > MOST_BYTES:
        raise DataError(f"{len(data)} bytes; at most {MOST_BYTES} are read")
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    other = read_topology(text) + read_kernel_log(text) + read_nccl_tests(text)
    try:
        return parse_smi(data) + other
    except DataError:
        if other:
            return other
        raise


def capture_files(paths: list[Path]) -> list[Path]:
    """The files that are meant: each path itself, or the files of a folder, sorted.

    Raises:
        DataError: a path does not exist, or a folder is empty.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.is_file())
            if not inside:
                raise DataError(f"{path}: an empty folder")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"{path}: no such file")
    return found


def read_capture_file(path: Path) -> list[Reading]:
    """`read_capture` of a file; the error names it."""
    try:
        return read_capture(path.read_bytes())
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}") from None
    except DataError as e:
        raise DataError(f"{path}: {e}") from None
