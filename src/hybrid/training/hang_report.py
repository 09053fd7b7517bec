"""What the ranks of a hung run tell, put together: who waits in what, who is missing, and where.

An account is what one rank wrote (`Watchdog`): its process, step and phase, the stacks of its
threads, its flight recorder, and the state of its neighbours' processes. A rank without one is
silent: stopped, gone, or unable to run Python.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import TrainingError
from hybrid.training.flight import DEFAULT_GROUP, group_key
from hybrid.training.processes import ELSEWHERE, Process
from hybrid.training.progress import read_progress

MOST_SAID = 8
"""Ranks that the summary says where they are, at most."""
MOST_UNFINISHED = 20
"""Unfinished collectives of a rank that are listed: the oldest ones."""


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """A collective that some ranks wait in.

    Attributes:
        name, group, seq: see `flight.Collective`.
        waiting: ranks that entered it.
        missing: ranks of the group that are not known to have entered it.
        others: what ranks that are in the same place of their sequence called in its stead.
    """

    name: str
    group: str
    seq: int
    waiting: list[int]
    missing: list[int]
    others: dict[int, str]

    def __str__(self) -> str:
        group = "" if self.group == DEFAULT_GROUP else f" of group {self.group}"
        return f"{self.name} #{self.seq}{group}"


def standstills(accounts: Mapping[int, Mapping[str, Any]], size: int) -> list[Standstill]:
    """Every collective that is waited in, the ones that most ranks are missing from first."""
    waits: dict[tuple[str, int], dict[int, str]] = {}
    for rank, account in accounts.items():
        for c in account["flight"]["unfinished"]:
            key = (group_key(c["name"], c["group"]), c["seq"])
            waits.setdefault(key, {})[rank] = c["name"]
    found = []
    for (kept, seq), names in waits.items():
        group = kept.partition(":")[2]
        members = list(range(size))
        if group != DEFAULT_GROUP:
            one = next(iter(names))
            members = accounts[one]["flight"]["groups"].get(group, members)
        by_name: dict[str, list[int]] = {}
        for rank, name in names.items():
            by_name.setdefault(name, []).append(rank)
        name = max(by_name, key=lambda n: (len(by_name[n]), -by_name[n][0]))
        found.append(
            Standstill(
                name=name,
                group=group,
                seq=seq,
                waiting=sorted(by_name[name]),
                missing=[
                    rank
                    for rank in members
                    if rank not in accounts
                    or accounts[rank]["flight"]["entered"].get(kept, 0) < seq
                ],
                others={rank: other for rank, other in names.items() if other != name},
            )
        )
    return sorted(found, key=lambda s: (-len(s.missing), -len(s.others), s.seq))


def compose(
    accounts: Mapping[int, Mapping[str, Any]],
    last_seen: Mapping[int, Mapping[str, Any]],
    processes: list[Process],
    *,
    limit_s: float,
    native_stacks: Mapping[int, str],
) -> dict[str, Any]:
    """The whole report, as plain JSON.

    Args:
        accounts: by rank.
        last_seen: `step`, `phase`, `seconds` and `time` of each rank's last sign of life.
        processes: of all ranks, in order of rank.
        limit_s: the limit that was passed.
        native_stacks: what Python's fault handler wrote of a rank that could not run Python.

    Returns:
        `summary` (one line), `step`, `collectives`, `silent`, `ranks` (the accounts) and `error`.
    """
    waits = standstills(accounts, len(processes))
    silent = []
    for process in processes:
        if process.rank in accounts:
            continue
        seen = (a["neighbours"].get(str(process.rank), ELSEWHERE) for a in accounts.values())
        state = next((s for s in seen if s != ELSEWHERE), "unknown: nobody else is on its node")
        stacks = native_stacks.get(process.rank, "")
        if stacks:
            state += ", with the interpreter's lock held"
        silent.append(
            {
                **asdict(process),
                "state": state,
                "last_seen": dict(last_seen.get(process.rank, {})),
                "native_stacks": stacks,
            }
        )
    step = max(account["step"] for account in accounts.values())
    summary = _summary(waits, accounts, silent, processes, step, limit_s)
    return {
        "time": time.time(),
        "limit_s": limit_s,
        "step": step,
        "summary": summary,
        "error": TrainingError(summary).envelope()["error"],
        "collectives": [{**asdict(wait), "said": str(wait)} for wait in waits],
        "silent": silent,
        "ranks": [accounts[rank] for rank in sorted(accounts)],
    }


def _summary(
    waits: list[Standstill],
    accounts: Mapping[int, Mapping[str, Any]],
    silent: list[dict[str, Any]],
    processes: list[Process],
    step: int,
    limit_s: float,
) -> str:
    missing: list[int] = []
    parts = [f"no progress for {limit_s:g} s in step {step}"]
    if waits:
        first = waits[0]
        missing = [*first.missing, *first.others]
        parts.append(f"{_ranks(first.waiting)} in {first}")
        parts += [
            f"{processes[rank]} is in {other} in its stead" for rank, other in first.others.items()
        ]
        if not missing:
            parts.append("all of its ranks are in it: look at the network between them")
    quiet = {entry["rank"]: entry for entry in silent}
    for rank in (missing or sorted(quiet) or sorted(accounts))[:MOST_SAID]:
        if rank in quiet:
            seen = quiet[rank]["last_seen"]
            where = f", last seen in {_where(seen)}" if seen else ""
            never = "is missing from it" if waits else "is silent"
            parts.append(f"{processes[rank]} {never}: {quiet[rank]['state']}{where}")
        else:
            account = accounts[rank]
            never = "never entered it: " if rank in missing and waits else "is "
            stack = account["threads"][0]["stack"] if account["threads"] else []
            at = f" at {stack[-1]}" if stack else ""
            parts.append(f"{processes[rank]} {never}in {_where(account)}{at}")
    return "; ".join(parts)


def _where(record: Mapping[str, Any]) -> str:
    return f"{record['phase']} of step {record['step']} for {record['seconds']:.1f} s"


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:MOST_SAID])) + (" …" if len(ranks) > MOST_SAID else "")
    return f"rank {listed} waits" if len(ranks) == 1 else f"ranks {listed} wait"


def as_text(report: Mapping[str, Any]) -> str:
    """The report for a person to read."""
    lines = [report["summary"], ""]
    for wait in report["collectives"]:
        lines.append(f"{wait['said']}: waiting {wait['waiting']}, missing {wait['missing']}")
    for entry in report["silent"]:
        lines += ["", f"rank {entry['rank']} (pid {entry['pid']} on {entry['node']}): silent"]
        lines.append(f"  process: {entry['state']}")
        if entry["last_seen"]:
            lines.append(f"  last seen in {_where(entry['last_seen'])}")
        lines += [f"  {line}" for line in entry["native_stacks"].splitlines()]
    for account in report["ranks"]:
        lines += ["", f"rank {account['rank']} (pid {account['pid']} on {account['node']})"]
        lines.append(f"  in {_where(account)}")
        for c in account["flight"]["unfinished"]:
            lines.append(f"  in {c['name']} #{c['seq']} {c['sizes']} for {c['seconds']:.1f} s")
        for thread in account["threads"]:
            waits = (
                f", waits in {thread['waits_in']}" if thread["waits_in"] not in ("", "0") else ""
            )
            lines.append(f"  thread {thread['name']}: {thread['state']}{waits}")
            lines += [f"    {frame}" for frame in thread["stack"]]
        lines.append("  native threads:")
        lines += [f"    {n} x {where}" for where, n in account["native_threads"].items()]
    return "\n".join(lines) + "\n"


def last_hang(folder: Path, since: float) -> str | None:
    """Of a run whose last attempt hung: the report's summary and path.

    Args:
        since: UNIX seconds; what was before is another's.
    """
    for record in reversed(read_progress(folder)):
        if record["time"] < since or record["event"] == "start":
            return None
        if record["event"] == "hang":
            return str(record["message"])
    return None
