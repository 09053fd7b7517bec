"""Light augmentation of court and reporter names: what people do to names when they type them.

Case, points, abbreviations and dropped characters. Used on the base corpus and, anew each epoch,
on every training row of a specialist.
"""

from __future__ import annotations

import random
import re

ABBREVIATIONS = {
    "Court": "Ct.", "County": "Cnty.", "Supreme": "Sup.", "District": "Dist.", "Circuit": "Cir.",
    "Appeals": "App.", "Appellate": "App.", "Superior": "Super.", "Municipal": "Mun.",
    "United States": "U.S.", "Department": "Dept.", "Division": "Div.", "Bankruptcy": "Bankr.",
    "Reports": "Rep.", "Reporter": "Rptr.", "Judicial": "Jud.", "Common Pleas": "C.P.",
    "Justice": "Just.", "Probate": "Prob.", "Juvenile": "Juv.", "Township": "Twp.",
}  # fmt: skip


def augment(text: str, rng: random.Random) -> str:
    """`text` as somebody else might have typed it; half of the time unchanged."""
    if rng.random() < 0.5:
        return text
    if rng.random() < 0.3:
        for long, short in ABBREVIATIONS.items():
            if rng.random() < 0.5:
                text = re.sub(rf"\b{long}\b", short, text)
    if rng.random() < 0.25:
        text = text.replace(".", "" if rng.random() < 0.5 else ". ")
        text = " ".join(text.split())
    if rng.random() < 0.2:
        text = text.replace(",", "")
    if rng.random() < 0.25 and len(text.split()) > 3:
        parts = text.split()
        del parts[rng.randrange(len(parts))]
        text = " ".join(parts)
    if rng.random() < 0.1 and len(text) > 8:
        at = rng.randrange(1, len(text) - 1)
        text = text[:at] + text[at + 1 :]
    if rng.random() < 0.15:
        text = text.lower() if rng.random() < 0.6 else text.upper()
    return text
