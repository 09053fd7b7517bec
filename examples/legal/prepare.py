"""Make the legal example's data from courts-db and reporters-db: corpus and specialists' rows.

    python examples/legal/prepare.py OUT

writes OUT/corpus/{train,holdout}.jsonl, OUT/{task}/{train,holdout}.jsonl and, for the closed
sets, OUT/{task}/choices.json. Held-out entities appear in no train file. The same packages give
the same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from courts_db import courts
from reporters_db import REPORTERS

sys.path.insert(0, str(Path(__file__).parent))

import citations
from augment import augment
from records import HeldOut, Record, load

TASKS = {
    "jurisdiction": (("court",), "location"),
    "court-type": (("court",), "type"),
    "reporter": (("reporter", "law"), "jurisdiction"),
}
PROMPTS = {
    "jurisdiction": "court {input}\nlocation\n",
    "court-type": "court {input}\ntype\n",
    "reporter": "reporter {input}\njurisdiction\n",
    "entities": "citation {input}\nparts\n",
}
COPIES = 6
"""Times each train row is in the corpus, augmented differently each time."""

Row = dict[str, Any]


def prepare(out: Path) -> None:
    """Write corpus, rows and choices below `out`."""
    records = load()
    held_out = HeldOut(records)
    tasks: dict[str, dict[str, list[Row]]] = {
        task: {
            "train": [
                row
                for row in _rows(records, kinds, label, False)
                if held_out.first_in(row["input"]) is None
            ],
            "holdout": _rows(records, kinds, label, True),
        }
        for task, (kinds, label) in TASKS.items()
    }
    rng = random.Random(0)
    tasks["entities"] = {
        "train": list(citations.rows([r for r in records if not r.held_out], 7000, rng)),
        "holdout": list(citations.rows([r for r in records if r.held_out], 200, rng)),
    }
    for task, splits in tasks.items():
        for split, rows in splits.items():
            _write(out / task / f"{split}.jsonl", rows)
        if task in TASKS:
            answers = {answer for row in splits["train"] for answer in _answers(row)}
            (out / task / "choices.json").write_text(json.dumps(sorted(answers), indent=1) + "\n")
    documents = [
        document
        for document in [*_documents(tasks, "train", COPIES), *_notes()]
        if held_out.first_in(document) is None
    ]
    rng.shuffle(documents)
    _write(out / "corpus" / "train.jsonl", ({"text": d} for d in documents))
    _write(out / "corpus" / "holdout.jsonl", ({"text": d} for d in _documents(tasks, "holdout", 1)))


def _rows(records: list[Record], kinds: tuple[str, ...], label: str, held_out: bool) -> list[Row]:
    """One row a name; `output` is a list where the name belongs to several, commonest first."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        if record.kind in kinds and record.held_out == held_out and record.labels.get(label):
            for name in record.strings:
                found[name].update(record.labels[label])
    rows = []
    for name, counts in found.items():
        answers = sorted(counts, key=lambda a: (-counts[a], a))
        rows.append({"input": name, "output": answers if len(answers) > 1 else answers[0]})
    return rows


def _answers(row: Row) -> list[str]:
    return row["output"] if isinstance(row["output"], list) else [row["output"]]


def _documents(tasks: dict[str, dict[str, list[Row]]], split: str, copies: int) -> list[str]:
    """Task text for the base: prompt and answer, the names augmented in all but one copy."""
    rng = random.Random(1)
    documents = []
    for task, splits in tasks.items():
        for row in splits[split]:
            for copy in range(copies if task in TASKS else 1):
                name = augment(row["input"], rng) if copy else row["input"]
                documents.append(PROMPTS[task].format(input=name) + _answers(row)[0])
    return documents


def _notes() -> list[str]:
    """The packages' own remarks on courts and reporters."""
    notes = [court["notes"] for court in courts if court.get("notes")]
    for entries in REPORTERS.values():
        notes += [entry["notes"] for entry in entries if entry.get("notes")]
    return list(dict.fromkeys(notes))


def _write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
