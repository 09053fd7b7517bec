"""The report: who is missing from what, for every way in which ranks can fail to meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid.training.hang_report import as_text, compose, last_hang, standstills
from hybrid.training.processes import ELSEWHERE, STOPPED, Process
from hybrid.training.progress import Progress


def process(rank: int) -> Process:
    return Process(
        rank=rank, pid=100 + rank, started=1, host="h", node=f"n{rank}", kernel=f"k{rank}"
    )


def account(
    rank: int,
    *,
    waits: tuple[str, str, int] | None = None,
    entered: dict[str, int] | None = None,
    groups: dict[str, list[int]] | None = None,
    phase: str = "gradient norm",
    neighbours: dict[str, str] | None = None,
) -> dict[str, Any]:
    unfinished = []
    if waits is not None:
        name, group, seq = waits
        unfinished = [
            {"name": name, "group": group, "seq": seq, "sizes": [[2]], "seconds": 9.0, "frames": []}
        ]
    thread = {"name": "T", "state": "sleeping", "waits_in": "", "stack": [f"{rank}.py:2 f: y"]}
    return {
        "rank": rank,
        "pid": 100 + rank,
        "node": f"n{rank}",
        "step": 58,
        "phase": phase,
        "seconds": 9.0,
        "threads": [thread],
        "native_threads": {"python, futex": 2},
        "flight": {"unfinished": unfinished, "entered": entered or {}, "groups": groups or {}},
        "neighbours": neighbours or {},
    }  # fmt: skip


def report(accounts: list[dict[str, Any]], size: int, **more: Any) -> dict[str, Any]:
    return compose(
        {a["rank"]: a for a in accounts},
        more.get("seen", {}),
        [process(rank) for rank in range(size)],
        limit_s=600,
        native_stacks=more.get("native", {}),
    )


def test_who_never_entered_is_told_from_who_waits() -> None:
    waits = ("nccl:all_reduce", "0", 417)
    made = report(
        [
            account(0, waits=waits, entered={"nccl:0": 417}),
            account(1, phase="data", entered={"nccl:0": 416}),
            account(2, waits=waits, entered={"nccl:0": 418}),
        ],
        3,
    )
    [wait] = made["collectives"]
    assert (wait["waiting"], wait["missing"], wait["others"]) == ([0, 2], [1], {})
    assert made["summary"] == (
        "no progress for 600 s in step 58; ranks 0, 2 wait in nccl:all_reduce #417; rank 1 (pid 101"
        " on n1) never entered it: in data of step 58 for 9.0 s at 1.py:2 f: y"
    )
    assert "nccl:all_reduce #417: waiting [0, 2], missing [1]" in as_text(made)


def test_backends_of_one_group_count_for_themselves() -> None:
    made = standstills(
        {
            0: account(0, waits=("gloo:all_reduce", "0", 9), entered={"gloo:0": 9}),
            1: account(1, entered={"gloo:0": 8, "nccl:0": 4000}),
        },
        2,
    )
    assert made[0].missing == [1]


def test_ranks_that_call_different_things_in_the_same_place_are_named() -> None:
    made = report(
        [
            account(0, waits=("gloo:all_reduce", "0", 5), entered={"gloo:0": 5}),
            account(1, waits=("gloo:broadcast", "0", 5), entered={"gloo:0": 5}),
            account(2, waits=("gloo:all_reduce", "0", 5), entered={"gloo:0": 5}),
        ],
        3,
    )
    assert made["collectives"][0]["others"] == {1: "gloo:broadcast"}
    assert "rank 1 (pid 101 on n1) is in gloo:broadcast in its stead" in made["summary"]
    assert "network" not in made["summary"]


def test_all_of_them_waiting_points_at_the_network() -> None:
    waits, entered = ("nccl:all_gather", "0", 3), {"nccl:0": 3}
    made = report([account(r, waits=waits, entered=entered) for r in (0, 1)], 2)
    assert "all of its ranks are in it: look at the network" in made["summary"]


def test_only_members_of_a_group_can_be_missing_from_it() -> None:
    made = standstills(
        {
            r: account(
                r,
                waits=("nccl:all_gather", "7", 4) if r == 2 else None,
                entered={"nccl:7": 4 if r == 2 else 3},
                groups={"7": [2, 3]},
            )
            for r in range(4)
        },
        4,
    )
    assert (made[0].waiting, made[0].missing) == ([2], [3])
    assert str(made[0]) == "nccl:all_gather #4 of group 7"


def test_silent_ranks_are_told_by_their_neighbours_or_said_to_be_unknown() -> None:
    waits = ("gloo:all_reduce", "0", 5)
    neighbours = {"1": STOPPED, "2": ELSEWHERE, "3": "sleeping"}
    made = report(
        [account(0, waits=waits, entered={"gloo:0": 5}, neighbours=neighbours)],
        4,
        seen={1: {"step": 58, "phase": "data", "seconds": 0.2}},
        native={3: "Thread 0x1\n  File here"},
    )
    one, two, three = made["silent"]
    assert one["state"] == STOPPED
    assert two["state"] == "unknown: nobody else is on its node"
    assert three["state"] == "sleeping, with the interpreter's lock held"
    assert (
        "rank 1 (pid 101 on n1) is missing from it: stopped (SIGSTOP), last seen in data"
        in (made["summary"])
    )
    assert "  Thread 0x1\n" in as_text(made)


def test_without_a_collective_every_rank_says_where_it_is_but_not_all_of_a_thousand() -> None:
    made = report([account(r, phase="data") for r in range(1000)], 1000)
    assert made["summary"].count("is in data of step 58") == 8
    assert len(made["ranks"]) == 1000


def test_the_last_attempts_hang_is_the_one_that_counts(tmp_path: Path) -> None:
    assert last_hang(tmp_path, 0) is None
    progress = Progress(tmp_path)
    progress.write("start", step=0)
    progress.write("hang", step=3, message="it hangs")
    assert last_hang(tmp_path, 0) == "it hangs"
    assert last_hang(tmp_path, 1e12) is None  # of an earlier driver
    progress.write("start", step=0)
    assert last_hang(tmp_path, 0) is None
