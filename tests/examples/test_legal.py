"""The legal example's data: nothing held out occurs in anything that is trained on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid import config

LEGAL = Path(__file__).parents[2] / "examples/legal"
TASKS = ("jurisdiction", "court-type", "reporter", "entities")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("legal")
    sys.path.insert(0, str(LEGAL))
    try:
        import prepare

        prepare.prepare(out)
        yield out
    finally:
        sys.path.remove(str(LEGAL))


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_held_out_entities_occur_nowhere_in_training(data: Path) -> None:
    """Checked afresh on word bounds, whatever case and punctuation, over every training text."""
    from records import HeldOut, load, words

    records = load()
    held_out = HeldOut(records)
    names = {words(s) for r in records if r.held_out for s in r.strings}
    assert len(names) > 1000
    texts = [str(r["text"]) for r in rows(data / "corpus/train.jsonl")]
    for task in TASKS:
        for row in rows(data / task / "train.jsonl"):
            texts.append(str(row["input"]))
    assert len(texts) > 60_000
    found = [(t, name) for t in texts if (name := held_out.first_in(t))]
    assert found == []
    # The finder itself: it does find a held-out name in other clothes.
    name = max(names, key=len)
    assert held_out.first_in(f"SEE ALSO: {name.upper()}, of old") == name


def test_held_out_rows_are_about_held_out_entities(data: Path) -> None:
    for task in TASKS[:3]:
        train = {r["input"] for r in rows(data / task / "train.jsonl")}
        holdout = rows(data / task / "holdout.jsonl")
        assert len(holdout) > 400
        assert not train & {r["input"] for r in holdout}


def test_the_split_is_the_same_every_time(data: Path, tmp_path: Path) -> None:
    import prepare

    prepare.prepare(tmp_path)
    for path in sorted(data.rglob("*.json*")):
        assert (tmp_path / path.relative_to(data)).read_bytes() == path.read_bytes()


def test_a_name_of_several_courts_has_a_set_of_answers(data: Path) -> None:
    sets = [r for r in rows(data / "jurisdiction/holdout.jsonl") if isinstance(r["output"], list)]
    assert sets


def test_eyecite_reads_the_parts_that_are_asked_for(data: Path) -> None:
    import citations

    for row in rows(data / "entities/holdout.jsonl")[:50]:
        assert citations.parts(str(row["input"])) == json.loads(str(row["output"]))


def test_the_project_file_names_what_is_prepared(data: Path) -> None:
    project = config.load(LEGAL / "hybrid.yaml")
    assert set(project.adapters) == set(TASKS)
    for name, adapter in project.adapters.items():
        assert (data / name / Path(adapter.train).name).exists()
        from prepare import PROMPTS

        assert adapter.template == PROMPTS[name]
