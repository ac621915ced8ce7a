"""The product's statistics against another implementation of the same tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from harness import verdict
from truth.simulation import NOISY, TYPICAL, Noise, load_values, positions, requests, start_minutes

weightstats = pytest.importorskip("statsmodels.stats.weightstats", reason="statsmodels is not installed")


@pytest.mark.parametrize("noise", [TYPICAL, NOISY])
@pytest.mark.parametrize("blocks", [6, 8, 12, 24])
@pytest.mark.parametrize("alpha", [0.05, 0.0125, 0.0125 / 3])
def test_the_verdict_is_that_of_two_one_sided_tests_and_a_paired_t(noise: Noise, blocks: int, alpha: float) -> None:
    values = load_values(requests(301, start_minutes(positions(3, blocks, 100)), noise, (0.0, 0.02, 0.0)))
    words = set()
    for a, b, _ in values:
        found = verdict.contrast(a.tolist(), b.tolist(), alpha, 0.03)
        p_same, _, _ = weightstats.ttost_paired(np.exp(a), np.exp(b), 1 / 1.03, 1.03, transform=np.log)
        t = stats.ttest_rel(a, b)
        low, high = t.confidence_interval(1 - alpha)
        expected = "SAME" if p_same < alpha else "DIFFERENT" if t.pvalue < alpha else "INCONCLUSIVE"
        words.add(expected)
        assert found.word == expected
        assert found.differs == (t.pvalue < alpha)
        assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-9)
    assert len(words) > 1


def test_the_attained_margin_is_where_the_two_one_sided_tests_just_pass() -> None:
    for a, b, _ in load_values(requests(302, start_minutes(positions(3, 6, 20)), NOISY)):
        attained = verdict.contrast(a.tolist(), b.tolist(), 0.05).attained_margin
        assert attained is not None
        p, _, _ = weightstats.ttost_paired(a, b, -math.log1p(attained), math.log1p(attained))
        assert p == pytest.approx(0.05, rel=1e-6)


def test_the_line_through_the_loads_is_that_of_least_squares() -> None:
    minutes = start_minutes(positions(3, 6, 10))
    values = load_values(requests(303, minutes, TYPICAL))
    for run in range(10):
        found = verdict.drift(values[run].tolist(), minutes[run].tolist(), seed=0)
        assert found is not None
        centred = (values[run] - values[run].mean(axis=1, keepdims=True)).ravel()
        line = stats.linregress(minutes[run].ravel(), centred)
        freedom = centred.size - 3 - 1
        error = line.stderr * math.sqrt((centred.size - 2) / freedom)
        assert found.per_minute == pytest.approx(line.slope, rel=1e-9, abs=1e-12)
        assert found.p_slope == pytest.approx(2 * stats.t.sf(abs(line.slope / error), freedom), rel=1e-6)
        assert found.half_width == pytest.approx(stats.t.ppf(0.975, freedom) * error, rel=1e-6)
        assert found.block_minutes == pytest.approx(2.0)
