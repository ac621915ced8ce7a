"""Two arms of known speed: false claims, power, equivalence, coverage (S1 to S8)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from harness import plan, verdict
from truth.simulation import (
    COVERAGE_FLOOR,
    HEAVY,
    LIMIT,
    NOISIER,
    NOISY,
    QUIET,
    RENTED,
    RESTLESS,
    RUNS,
    SCENARIOS,
    TYPICAL,
    Array,
    Noise,
    Scenario,
    a_plan,
    falling,
    judged,
    load_values,
    one_after_another,
    play,
    positions,
    requests,
    scenario_values,
    start_minutes,
    stop,
)
from truth.table import Attained

ONE = verdict.level(contrasts=1)
THREE = verdict.level(contrasts=3)
NAMES = [scenario.name for scenario in SCENARIOS]


def differences(values: Array) -> Array:
    """Of every arm but the twin (last) against arm 0, as the plan declares them."""
    return np.asarray(values[:, 1:-1] - values[:, :1])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_equal_arms_are_rarely_called_different_after_six_blocks(scenario: Scenario, attained: Attained) -> None:
    found = differences(scenario_values(scenario, 101, arms=3, blocks=6))[:, 0]
    attained("S1", f"equal arms, 6 blocks, {scenario.name}", verdict.paired(found, 0.05).differs.mean(), "≤", LIMIT)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_seven_looks_do_not_raise_the_false_rate(scenario: Scenario, attained: Attained) -> None:
    found = differences(scenario_values(scenario, 102, arms=3, blocks=24))
    end = judged(found, stop(found, ONE), ONE)
    false = (end.differs & ~end.same).mean()
    attained("S2", f"equal arms, 7 looks, {scenario.name}", false, "≤", LIMIT)
    looks = [verdict.paired(found[:, 0, :look], ONE.alpha).differs for look in verdict.LOOKS]
    missed = np.logical_or.reduce(looks).mean()
    attained("S2", f"truth outside the interval at any of 7 looks, {scenario.name}", missed, "≤", LIMIT)


@pytest.mark.parametrize(
    ("name", "noise"), [("quiet", QUIET), ("typical", TYPICAL), ("noisy", NOISY), ("heavy", HEAVY)]
)
def test_three_contrasts_share_one_error(name: str, noise: Noise, attained: Attained) -> None:
    found = differences(load_values(requests(103, start_minutes(positions(5, 24)), noise)))
    end = judged(found, stop(found, THREE), THREE)
    false = (end.differs & ~end.same).any(axis=1).mean()
    attained("S3", f"3 equal contrasts, 7 looks, {name}", false, "≤", LIMIT)


@pytest.mark.parametrize(("effect", "power"), [(0.03, 0.75), (0.05, 0.95), (0.10, 0.99)])
def test_six_blocks_find_a_true_difference(effect: float, power: float, attained: Attained) -> None:
    effects = (0.0, math.log1p(effect), 0.0)
    found = differences(load_values(requests(104, start_minutes(positions(3, 6)), TYPICAL, effects)))[:, 0]
    attained("S4", f"true {100 * effect:.0f} %, 6 blocks", verdict.paired(found, 0.05).differs.mean(), "≥", power)


def test_the_schedule_finds_true_differences_and_stops_early(attained: Attained) -> None:
    effects = (0.0, *np.log1p([0.03, 0.05, 0.10]), 0.0)
    found = differences(load_values(requests(105, start_minutes(positions(5, 24)), TYPICAL, effects)))
    stopped = stop(found, THREE)
    end = judged(found, stopped, THREE)
    for index, (effect, power) in enumerate([(0.03, 0.85), (0.05, 0.98), (0.10, 0.99)]):
        attained("S5", f"true {100 * effect:.0f} %, 7 looks, 3 contrasts", end.differs[:, index].mean(), "≥", power)
    attained("S5", "mean blocks", stopped.mean(), "≤", 10.5, "")
    for index, effect in enumerate(effects[1:-1]):
        bias = abs(float(np.mean(end.mean[:, index]) - effect))
        attained("S5", f"stopping early shifts the ratio, true {100 * math.expm1(effect):.0f} %", bias, "≤", 0.003)


def test_equal_arms_are_called_the_same_and_unequal_ones_are_not(attained: Attained) -> None:
    minutes = start_minutes(positions(3, 24))
    equal = differences(load_values(requests(106, minutes)))
    apart = differences(load_values(requests(107, minutes, TYPICAL, (0.0, math.log1p(0.03), 0.0))))
    attained("S6", "SAME at true 0, 6 blocks", verdict.paired(equal[:, 0, :6], 0.05).same.mean(), "≥", 0.80)
    attained("S6", "false SAME at true 3 %", verdict.paired(apart[:, 0, :6], 0.05).same.mean(), "≤", LIMIT)
    attained("S6", "SAME at true 0, 7 looks", judged(equal, stop(equal, ONE), ONE).same.mean(), "≥", 0.90)
    attained("S6", "false SAME at true 3 %, 7 looks", judged(apart, stop(apart, ONE), ONE).same.mean(), "≤", LIMIT)


def coverage(found: Array, truth: float) -> float:
    test = verdict.paired(found, 0.05)
    return float((np.abs(test.mean - truth) <= test.half_width).mean())


@pytest.mark.parametrize(("name", "noise"), [("typical", TYPICAL), ("heavy", HEAVY)])
@pytest.mark.parametrize("effect", [0.0, 0.03, 0.10])
def test_intervals_hold_the_truth(name: str, noise: Noise, effect: float, attained: Attained) -> None:
    effects = (0.0, math.log1p(effect), 0.0)
    found = differences(load_values(requests(108, start_minutes(positions(3, 12)), noise, effects)))[:, 0]
    worst = min(coverage(found[:, :n], math.log1p(effect)) for n in (6, 8, 10, 12))
    attained("S7", f"coverage at true {100 * effect:.0f} %, {name}, worst of n = 6…12", worst, "≥", COVERAGE_FLOOR)


# ── S8: four wrong methods must not pass where the right one does ───────────────────────────


def test_requests_taken_as_replicates_fail(attained: Attained) -> None:
    speeds = requests(109, start_minutes(positions(3, 6)))
    flat = speeds.reshape(RUNS, 3, -1)
    false = (stats.ttest_ind(flat[:, 0], flat[:, 1], axis=1).pvalue < 0.05).mean()
    attained("S8", "mutant: requests as replicates, equal arms", float(false), ">", LIMIT)


def test_arms_one_after_another_fail(attained: Attained) -> None:
    values = load_values(requests(110, one_after_another(3, 6), TYPICAL, (), falling))
    false = verdict.paired(differences(values)[:, 0], 0.05).differs.mean()
    attained("S8", "mutant: arms one after another, falls 1 %/min", false, ">", LIMIT)


def test_pooled_variance_fails(attained: Attained) -> None:
    values = scenario_values(NOISIER, 111, arms=5, blocks=6)
    left = (
        values
        - values.mean(axis=1, keepdims=True)
        - values.mean(axis=2, keepdims=True)
        + values.mean((1, 2))[:, None, None]
    )
    freedom = 4 * 5
    error = np.sqrt((left**2).sum(axis=(1, 2)) / freedom * 2 / 6)
    mean = (values[:, 1] - values[:, 0]).mean(axis=1)
    false = (np.abs(mean) > stats.t.ppf(0.975, freedom) * error).mean()
    attained("S8", "mutant: pooled variance, one arm 3× noisier", float(false), ">", LIMIT)


def test_bootstrap_over_blocks_fails(attained: Attained) -> None:
    found = differences(load_values(requests(112, start_minutes(positions(3, 6, 1000)))))[:, 0]
    interval = stats.bootstrap(
        (found,), np.mean, axis=-1, n_resamples=999, method="BCa", rng=np.random.default_rng(1)
    ).confidence_interval
    held = ((interval.low <= 0) & (interval.high >= 0)).mean()
    attained("S8", "mutant: BCa bootstrap over 6 blocks, coverage", float(held), "<", COVERAGE_FLOOR)
    attained("S8", "paired t on the same blocks, coverage", coverage(found, 0.0), "≥", COVERAGE_FLOOR)


# ── the noise of a real machine ─────────────────────────────────────────────────────────────


def test_the_scenario_of_a_rented_gpu_machine_is_as_noisy_as_that_machine(attained: Attained) -> None:
    values = scenario_values(RENTED, 116, arms=3, blocks=10)
    of_an_arm = math.sqrt(values.var(axis=-1, ddof=1).mean())
    ratio = math.sqrt((values[:, 1] - values[:, 0]).var(axis=-1, ddof=1).mean())
    for sign, seen_load, seen_ratio in (("≥", 0.059, 0.047), ("≤", 0.069, 0.076)):
        attained("§2.5", "the scenario: sd of the loads of an arm", of_an_arm, sign, seen_load)
        attained("§2.5", "the scenario: sd of a log ratio from block to block", ratio, sign, seen_ratio)


@pytest.mark.parametrize(
    ("deviation", "five", "ten", "same"), [(0.047, 0.95, 0.99, 0.20), (0.076, 0.45, 0.99, None)], ids=["4.7 %", "7.6 %"]
)
def test_the_noise_of_a_rented_gpu_machine_is_borne(
    deviation: float, five: float, ten: float, same: float | None, attained: Attained
) -> None:
    """sd of the paired log ratio per block as seen there; 3 contrasts against one reference."""
    random = np.random.RandomState(113)
    name = f"sd {100 * deviation:.1f} % a block"
    arms = deviation / math.sqrt(2) * random.standard_normal((RUNS, 4, 24))
    equal = np.asarray(arms[:, 1:] - arms[:, :1])
    stopped = stop(equal, THREE)
    end = judged(equal, stopped, THREE)
    attained("§2.5", f"{name}: false DIFFERENT, 3 equal contrasts", (end.differs & ~end.same).any(1).mean(), "≤", LIMIT)
    attained("§2.5", f"{name}: SAME at true 0", end.same.mean(), "≥" if same else "≤", same or 0.05)
    for effect, power in ((0.05, five), (0.10, ten)):
        found = equal + math.log1p(effect)
        stopped = stop(found, THREE)
        end = judged(found, stopped, THREE)
        attained("§2.5", f"{name}: true {100 * effect:.0f} % found", end.differs.mean(), "≥", power)
        attained("§2.5", f"{name}: true {100 * effect:.0f} %, mean blocks", stopped.mean(), "≤", 24, "")


# ── the simulations run the product ─────────────────────────────────────────────────────────


def test_the_plan_itself_stops_and_decides_as_the_simulation_does() -> None:
    minutes = start_minutes(positions(5, 24))
    calm = load_values(requests(114, minutes, TYPICAL, (0.0, 0.03, 0.0, 0.05, 0.0)))[:40]
    restless = load_values(requests(114, minutes, RESTLESS, (0.0, 0.5, 0.6, -0.5, 0.0)))[:20]  # decided and wide
    values = np.concatenate([calm, restless])
    found = differences(values)
    stopped = stop(found, THREE)
    end = judged(found, stopped, THREE)
    words = set()
    for run in range(len(values)):
        drawn = a_plan(4, seed=run)
        assert drawn.level == THREE
        outcomes = play(drawn, values[run])
        assert plan.blocks_done(drawn, outcomes) == plan.blocks_judged(drawn, outcomes) == stopped[run]
        kept = plan.values(drawn, outcomes)
        for index, (a, b) in enumerate(drawn.contrasts):
            single = verdict.contrast(kept[a], kept[b], drawn.level, drawn.margin)
            assert single.word == (
                "SAME" if end.same[run, index] else "DIFFERENT" if end.differs[run, index] else "INCONCLUSIVE"
            )
            assert math.log(single.ratio) == pytest.approx(end.mean[run, index], abs=1e-12)
            assert math.log(single.high or 0) == pytest.approx(
                end.mean[run, index] + end.half_width[run, index], abs=1e-12
            )
            words.add(single.word)
    assert words >= {"SAME", "DIFFERENT"}
    assert len(set(stopped.tolist())) > 2


def test_the_value_of_a_load_is_the_median_that_the_simulation_takes() -> None:
    speeds = requests(115, start_minutes(positions(3, 6, 50)))
    medians = load_values(speeds)
    for index in np.ndindex(medians.shape):
        product = plan.load_value(np.exp(speeds[index]).tolist(), 3)
        assert product == pytest.approx(medians[index], abs=1e-12)
