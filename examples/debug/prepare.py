"""Makes the debug corpus: harbour-log entries from a small grammar, and two specialists' rows."""

import json
import random
from pathlib import Path

SHIPS = ["Alcyone", "Bittern", "Corvina", "Dunlin", "Egret", "Fulmar"]
CARGO = ["timber", "salt", "wool", "copper", "barley", "glass"]
PORTS = ["Aldmouth", "Brackwater", "Carrow", "Dovesey"]
WINDS = ["north", "east", "south", "west"]


def entry(rng: random.Random) -> str:
    """One log line; its parts depend on each other, so that there is something to learn."""
    ship = rng.randrange(len(SHIPS))
    cargo, port = CARGO[ship], PORTS[ship % len(PORTS)]
    berth, tons = ship + 1, 10 * rng.randint(2, 30)
    return rng.choice(
        [
            f"The {SHIPS[ship]} came in from {port} with {tons} tons of {cargo}"
            f" and lay at berth {berth}.",
            f"Wind from the {rng.choice(WINDS)}; the {SHIPS[ship]}, bound for {port},"
            f" left berth {berth} after unloading {cargo}.",
            f"{tons} tons of {cargo} were weighed at berth {berth} for the {SHIPS[ship]}.",
        ]
    )


def rows(rng: random.Random, count: int, task: str) -> list[dict[str, str]]:
    """A ship in some words, and what is true of it: its cargo or its port."""
    made = []
    for _ in range(count):
        ship = rng.randrange(len(SHIPS))
        said = rng.choice(["the {}, {} tons", "{} with {} tons", "ship {} ({} tons)"])
        answer = CARGO[ship] if task == "cargo" else PORTS[ship % len(PORTS)]
        made.append({"input": said.format(SHIPS[ship], rng.randint(20, 300)), "output": answer})
    return made


def prepare(out: Path) -> None:
    """Write train.txt and holdout.txt, one entry a line, and a folder a specialist."""
    rng = random.Random(7)
    entries = [entry(rng) for _ in range(440)]
    tasks = []
    for task in ("cargo", "port"):
        for split, count in (("train", 300), ("holdout", 60)):
            path = out / task / f"{split}.jsonl"
            path.parent.mkdir(exist_ok=True)
            made = rows(rng, count, task)
            path.write_text("".join(json.dumps(r) + "\n" for r in made))
            if split == "train":  # the base sees the format, so that a specialist is quick
                tasks += [f"{r['input']} | {task}:{r['output']}" for r in made]
    train = entries[:400] + tasks
    rng.shuffle(train)
    (out / "train.txt").write_text("\n".join(train) + "\n")
    (out / "holdout.txt").write_text("\n".join(entries[400:]) + "\n")
