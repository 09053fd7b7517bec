"""TensorBoard files, read back as an event reader does."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from hybrid.training.progress import Progress


def events(path: Path) -> list[Any]:
    """The records of a TFRecord file: length, its checksum, bytes, their checksum."""
    raw, at, found = path.read_bytes(), 0, []
    while at < len(raw):
        header = raw[at : at + 8]
        (length,) = struct.unpack("<Q", header)
        body = raw[at + 12 : at + 12 + length]
        sums = struct.unpack("<I", raw[at + 8 : at + 12]) + struct.unpack(
            "<I", raw[at + 12 + length : at + 16 + length]
        )
        assert sums == (masked_crc32c(header), masked_crc32c(body))
        found.append(Event.FromString(body))
        at += 16 + length
    return found


def write(folder: Path, first: int, last: int) -> None:
    progress = Progress(folder, scalars=True)
    progress.write("start", step=first)
    for n in range(first + 1, last + 1):
        progress.write("step", step=n, loss=1.0 / n, lr=1e-3, grad_norm=2.0, tokens_per_s=None)
    progress.write("eval", step=last, eval_loss=0.25)
    progress.write("finished", step=last)


def test_every_attempt_has_a_file_that_says_which_steps_are_done_again(tmp_path: Path) -> None:
    write(tmp_path, 0, 5)
    write(tmp_path, 3, 6)  # within the same second
    files = sorted((tmp_path / "tensorboard").iterdir(), key=lambda p: int(p.name.split(".")[-1]))
    assert len(files) == 2
    first, second = (events(path) for path in files)
    assert all(log[0].file_version == "brain.Event:2" for log in (first, second))

    def scalars(log: list[Any]) -> dict[tuple[str, int], float]:
        return {(v.tag, e.step): v.simple_value for e in log for v in e.summary.value}

    one, two = scalars(first), scalars(second)
    assert [one["train/loss", n] for n in (1, 2, 4)] == [1.0, 0.5, 0.25]
    assert one["eval/loss", 5] == 0.25
    assert ("speed/tokens_per_s", 1) not in one
    assert {step for tag, step in two if tag == "train/learning_rate"} == {4, 5, 6}
    starts = [e for e in second if e.session_log.status == SessionLog.START]
    assert [e.step for e in starts] == [4]
    assert not [e for e in first if e.session_log.status == SessionLog.START]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "run", enabled=False, scalars=True)
    progress.write("start", step=0)
    progress.write("step", step=1, loss=1.0)
    assert not (tmp_path / "run").exists()
