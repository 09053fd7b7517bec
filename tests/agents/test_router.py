"""The router on the legal example's agents: questions, bare entities, strangers, a newcomer."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hybrid import config
from hybrid.agents.router import Router
from hybrid.agents.spec import AgentSpec

LEGAL = Path(__file__).parents[2] / "examples/legal"


def specs() -> list[AgentSpec]:
    project = config.load(LEGAL / "hybrid.yaml")
    return [
        AgentSpec.model_validate({**s.model_dump(), "name": n, "owner": "file"})
        for n, s in project.agents.specs.items()
        if s.behaviour == "answer"
    ]


@pytest.fixture(scope="module")
def router() -> Router:
    return Router(specs())


@pytest.mark.parametrize(
    ("text", "agent"),
    [
        ("Delaware County Juvenile Court", "jurisdiction"),
        ("In which state does the Wayne County Probate Court sit?", "jurisdiction"),
        ("Where is the Municipal Court of Seattle located?", "jurisdiction"),
        ("What type of court is the Tennessee Court of Appeals?", "court-type"),
        ("What kind of court is the Court of Federal Claims?", "court-type"),
        ('Which jurisdiction does the reporter "So. 2d" cover?', "reporter"),
        ("F. 2d", "reporter"),
        ("Mich. App.", "reporter"),
    ],
)
def test_questions_and_bare_entities_find_their_specialist(
    router: Router, text: str, agent: str
) -> None:
    decision = router.route(text)
    assert decision.agent == agent, decision
    assert sum(decision.scores.values()) == pytest.approx(1)


@pytest.mark.parametrize("text", ["", "?", "zzz qqq 999", "日本語のテキスト", "12345"])
def test_it_abstains_on_what_resembles_nothing(router: Router, text: str) -> None:
    decision = router.route(text)
    assert decision.agent is None
    assert decision.reason


def test_a_threshold_of_certainty_makes_it_abstain(router: Router) -> None:
    assert router.route("court", threshold=0.999999).agent is None


def test_a_new_agent_is_routable_from_its_description_and_examples_alone() -> None:
    text = "The court relied on Ortiz v. Lane, 77 U.S. 12 (1990)."
    fields = yaml.safe_load((LEGAL / "entities.agent.yaml").read_text())
    fields |= {"name": "entities", "owner": "api", "behaviour": "answer"}
    assert Router([*specs(), AgentSpec.model_validate(fields)]).route(text).agent == "entities"


def test_without_agents_there_is_nobody_to_choose() -> None:
    assert Router([]).route("x").agent is None


def test_it_decides_the_same_every_time(router: Router) -> None:
    assert router.route("Ohio court") == Router(list(reversed(specs()))).route("Ohio court")
