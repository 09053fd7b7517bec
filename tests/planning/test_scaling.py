"""Laws of scaling: found again under noise, honest where points are few, refused where wrong."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.errors import DataError
from hybrid.planning.scaling import Point, fit, knee_of, serial_share, usl
from hybrid.planning.scaling_advice import recommend, table, two_worker_check

POWERS = (1, 2, 4, 8, 16, 32, 64)


def curve(counts: tuple[int, ...], sigma: float, kappa: float, gamma: float = 1e4) -> list[Point]:
    return [Point(workers=n, rate=usl(n, gamma, sigma, kappa)) for n in counts]


@settings(max_examples=60, deadline=None)
@given(knee=st.floats(4, 40), sigma=st.floats(0, 0.15), seed=st.integers(0, 2**32))
def test_the_knee_is_found_within_15_percent_under_2_percent_noise(
    knee: float, sigma: float, seed: int
) -> None:
    noise = random.Random(seed)
    points = [
        Point(workers=p.workers, rate=p.rate * (1 + noise.uniform(-0.02, 0.02)))
        for p in curve(POWERS, sigma, (1 - sigma) / knee**2)
    ]
    found = fit(points)
    assert found.model == "usl"
    assert found.knee is not None
    assert found.knee.value == pytest.approx(knee, rel=0.15)
    assert found.knee.low <= found.knee.value <= found.knee.high
    assert found.residual is not None
    assert found.residual < 0.02


@given(sigma=st.floats(0, 0.9), kappa=st.floats(1e-6, 0.1), gamma=st.floats(1e-3, 1e9))
@settings(max_examples=60, deadline=None)
def test_without_noise_the_terms_come_back(sigma: float, kappa: float, gamma: float) -> None:
    found = fit(curve(POWERS, sigma, kappa, gamma))
    assert found.gamma == pytest.approx(gamma, rel=1e-6)
    assert found.sigma is not None
    assert found.kappa is not None
    assert found.sigma.value == pytest.approx(sigma, abs=1e-6)
    assert found.kappa.value == pytest.approx(kappa, abs=1e-7)


def test_the_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng, held, tries = random.Random(4), 0, 60
    for _ in range(tries):
        knee, sigma = rng.uniform(6, 30), rng.uniform(0.0, 0.1)
        points = [
            Point(workers=p.workers, rate=p.rate * math.exp(rng.gauss(0, 0.02)))
            for p in curve(POWERS, sigma, (1 - sigma) / knee**2)
        ]
        found = fit(points).knee
        assert found is not None
        held += found.low <= knee <= found.high
    assert 0.75 * tries < held < tries


def test_at_three_points_it_is_amdahls_law_and_has_no_knee() -> None:
    found = fit(curve((1, 2, 4), 0.1, 0.0))
    assert found.model == "amdahl"
    assert found.sigma is not None
    assert found.sigma.value == pytest.approx(0.1, abs=1e-6)
    assert found.kappa is None
    assert found.knee is None
    assert any("no knee" in note for note in found.notes)


def test_two_points_are_given_no_law_and_no_residual() -> None:
    found = fit([Point(workers=1, rate=100), Point(workers=2, rate=160)])
    assert (found.model, found.residual, found.knee) == ("none", None, None)
    assert "no residual" in found.notes[0]
    assert "25.0 %" in found.notes[1]  # 1 / (0.25 + 0.75 / 2) = 1.6
    assert recommend(found).workers == 2
    assert serial_share(2, 1.6) == pytest.approx(0.25)


def test_one_point_says_so() -> None:
    found = fit([Point(workers=4, rate=100)])
    assert "one point" in found.notes[0]
    assert recommend(found).workers == 4


def test_a_knee_beyond_what_was_measured_is_said_to_be() -> None:
    found = fit(curve((1, 2, 4, 8), 0.02, 0.98 / 40**2))
    assert found.knee is not None
    assert found.knee.value == pytest.approx(40, rel=1e-3)
    assert any("extrapolated" in note for note in found.notes)
    assert any("one degree of freedom" in note for note in found.notes)


def test_linear_growth_has_no_knee_and_more_than_linear_is_questioned() -> None:
    assert any("no knee" in note for note in fit(curve((1, 2, 4, 8), 0, 0)).notes)
    doubled = [Point(workers=n, rate=100.0 * n * (1 if n == 1 else 1.2)) for n in (1, 2, 4, 8)]
    assert any("caches" in note for note in fit(doubled).notes)


def test_more_workers_that_only_slow_each_other_down_put_the_knee_at_one() -> None:
    found = fit([Point(workers=n, rate=100 / n) for n in (1, 2, 4, 8)])
    assert found.knee is not None
    assert found.knee.value == pytest.approx(1, abs=0.1)
    assert recommend(found).workers == 1
    assert recommend(found).elastic == (1, 1)
    assert knee_of(1.5, 0.1) == 1


@pytest.mark.parametrize(
    "points",
    [
        [],
        [Point(workers=1, rate=0)],
        [Point(workers=0, rate=5)],
        [Point(workers=1, rate=math.nan)],
        [Point(workers=1, rate=5), Point(workers=1, rate=6)],
    ],
)
def test_what_is_no_measurement_is_refused(points: list[Point]) -> None:
    with pytest.raises(DataError, match="scaling"):
        fit(points)


@settings(max_examples=60, deadline=None)
@given(knee=st.floats(2, 200), sigma=st.floats(0, 0.5))
def test_recommended_workers_are_below_the_knee_and_inside_their_elastic_range(
    knee: float, sigma: float
) -> None:
    found = fit(curve(POWERS, sigma, (1 - sigma) / knee**2))
    advice = recommend(found)
    fewest, most = advice.elastic
    assert 1 <= fewest <= advice.workers <= most <= knee + 1e-6
    assert most <= 2 * POWERS[-1]
    assert found.rate(advice.workers) >= found.rate(max(1, advice.workers - 1))


def test_the_table_holds_speedup_efficiency_and_tokens_a_dollar() -> None:
    rows = table(fit([Point(workers=1, rate=100), Point(workers=2, rate=150)]), 3.6)
    assert [r.speedup for r in rows] == [1.0, 1.5]
    assert [r.efficiency for r in rows] == [1.0, 0.75]
    assert [r.tokens_per_usd for r in rows] == pytest.approx([100_000, 75_000])
    assert rows[0].predicted is None


def test_the_rule_of_two_names_likely_causes_by_what_is_known() -> None:
    slow = [Point(workers=1, rate=100), Point(workers=2, rate=150, spread=0.2)]
    facts = {"cores": 2, "cpus_per_worker": 1, "one_machine": True, "communication_share": 0.3}
    check = two_worker_check(slow, facts | {"strategy": "fsdp", "mode": "strong"})
    assert (check.outcome, check.speedup) == ("failed", 1.5)
    assert "2 cores" in check.causes[0]
    assert "30 %" in check.causes[1]
    assert any("vary by 20 %" in cause for cause in check.causes)
    assert any("gathers the parameters" in cause for cause in check.causes)
    good = two_worker_check([Point(workers=1, rate=100), Point(workers=2, rate=190)], {})
    assert (good.outcome, good.causes) == ("passed", ())
    assert two_worker_check(slow[:1], {}).outcome == "not measured"
    assert two_worker_check(slow, {"unit": "nodes"}).name == "two-nodes"
