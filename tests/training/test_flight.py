"""torch's flight recorder: its private names are there; what was entered, what is finished."""

from __future__ import annotations

import sys
from pathlib import Path

from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d, is_nccl_available

sys.path.insert(0, str(Path(__file__).parent))

import worlds
from faults import step_with_every_strategy

from hybrid.config import TrainingConfig
from hybrid.training.flight import DEFAULT_GROUP, Flight, group_key, read_flight


def test_the_private_names_are_there() -> None:
    assert callable(_distributed_c10d._dump_fr_trace)
    assert not is_nccl_available() or callable(_distributed_c10d._dump_nccl_trace)
    world = distributed_c10d._world
    assert world.pg_names == {}
    assert world.pg_group_ranks == {}


def test_without_a_process_group_there_is_nothing_to_tell() -> None:
    assert read_flight() == Flight(unfinished=[], entered={}, groups={})


def test_what_is_finished_is_not_waited_in_and_groups_are_known(tmp_path: Path) -> None:
    flight = worlds.run(2, tmp_path, step_with_every_strategy, TrainingConfig())
    assert flight["unfinished"] == []
    default, pair = sorted(flight["groups"])
    assert default == DEFAULT_GROUP
    assert flight["groups"] == {default: [0, 1], pair: [0, 1]}
    assert flight["entered"][group_key("gloo:all_reduce", pair)] == 1
    assert flight["entered"][group_key("gloo:all_gather", default)] > 5
