"""Makes the debug corpus: a few hundred harbour-log entries drawn from a small grammar."""

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


def prepare(out: Path) -> None:
    """Write train.txt and holdout.txt, one entry a line."""
    rng = random.Random(7)
    (out / "train.txt").write_text("\n".join(entry(rng) for _ in range(400)) + "\n")
    (out / "holdout.txt").write_text("\n".join(entry(rng) for _ in range(40)) + "\n")
