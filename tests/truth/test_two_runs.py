"""Two runs of arms of known speed: false changes and regressions, power, and ways that must not pass (R1 to R5)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from harness import verdict
from truth.simulation import (
    LIMIT,
    NOISY,
    SCENARIOS,
    TYPICAL,
    Array,
    Noise,
    Scenario,
    load_values,
    positions,
    requests,
    scenario_values,
    start_minutes,
    stop,
)
from truth.table import Attained

ARMS = 3  # beside the reference and its twin
PLANNED = verdict.level(contrasts=ARMS)
LEVEL = verdict.change_level(ARMS)
NAMES = [scenario.name for scenario in SCENARIOS]
Flags = NDArray[np.bool_]


def ratios(values: Array) -> Array:
    """Log ratios to the reference (arm 0) of every arm but the twin (last), by block."""
    return np.asarray(values[:, 1:-1] - values[:, :1])


def run_of(seed: int, scenario: Scenario = SCENARIOS[0], effect: float = 0.0, blocks: int = 24) -> Array:
    """Log ratios of many runs of one day, all arms but the reference faster by `effect`."""
    return ratios(scenario_values(scenario, seed, ARMS + 2, blocks)) + effect


def judged(before: Array, after: Array) -> tuple[Flags, Flags]:
    """Of each arm of each pair of runs, both stopped by their own plan: is a change claimed, and is it a regression?"""
    ended = [stop(run, PLANNED) for run in (before, after)]
    claimed, lost = np.zeros(before.shape[:-1], dtype=bool), np.zeros(before.shape[:-1], dtype=bool)
    for first in verdict.LOOKS:
        for second in verdict.LOOKS:
            here = (ended[0] == first) & (ended[1] == second)
            if here.any():
                test = verdict.changed(before[here][..., :first], after[here][..., :second], LEVEL.alpha)
                claimed[here], lost[here] = test.differs & ~test.same, regressed(test)
    return claimed, lost


def regressed(test: verdict.Paired, margin: float = verdict.MARGIN) -> Flags:
    """As a change is called a regression: even the upper bound is a loss beyond the margin."""
    return np.asarray(1 - np.exp(test.mean + test.half_width) > margin)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_equal_runs_are_rarely_called_changed(scenario: Scenario, attained: Attained) -> None:
    claimed, lost = judged(run_of(301, scenario), run_of(302, scenario))
    attained("R1", f"3 unchanged arms, any called changed, {scenario.name}", claimed.any(axis=1).mean(), "≤", LIMIT)
    attained("R1", f"3 unchanged arms, any regression, {scenario.name}", lost.any(axis=1).mean(), "≤", LIMIT)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_a_loss_of_just_the_margin_is_rarely_called_more(scenario: Scenario, attained: Attained) -> None:
    _, lost = judged(run_of(303, scenario), run_of(304, scenario, math.log1p(-verdict.MARGIN)))
    attained("R1", f"3 arms lose the margin, any regression, {scenario.name}", lost.any(axis=1).mean(), "≤", LIMIT)


@pytest.mark.parametrize("noisier", [1.0, 3.0])
def test_the_interval_holds_whichever_looks_the_two_runs_ended_at(noisier: float, attained: Attained) -> None:
    random = np.random.RandomState(305)
    before, after = random.standard_normal((4000, 24)), noisier * random.standard_normal((4000, 24))
    alpha = verdict.change_level(1).alpha
    outside = [
        verdict.changed(before[:, :first], after[:, :second], alpha).differs
        for first in verdict.LOOKS
        for second in verdict.LOOKS
    ]
    case = f"truth outside at any of 49 pairs of looks, one run {noisier:g}× as noisy"
    attained("R2", case, np.logical_or.reduce(outside).mean(), "≤", LIMIT)


@pytest.mark.parametrize(
    ("name", "noise", "blocks", "power"), [("typical", TYPICAL, 8, 0.8), ("noisy", NOISY, 24, 0.8)]
)
def test_a_loss_of_a_tenth_is_found(name: str, noise: Noise, blocks: int, power: float, attained: Attained) -> None:
    minutes = start_minutes(positions(ARMS + 2, blocks))
    before = ratios(load_values(requests(306, minutes, noise)))
    after = ratios(load_values(requests(307, minutes, noise, (0.0, math.log(0.9), 0.0, 0.0, 0.0))))
    found = regressed(verdict.changed(before, after, LEVEL.alpha))
    attained("R3", f"1 of 3 arms loses 10 %, margin 3 %, {blocks} blocks, {name}", found[:, 0].mean(), "≥", power)
    attained(
        "R3", f"the other 2 arms called lost, {blocks} blocks, {name}", found[:, 1:].any(axis=1).mean(), "≤", LIMIT
    )


# ── two wrong methods must not pass ─────────────────────────────────────────────────────────


def test_speeds_of_two_days_without_the_reference_fail(attained: Attained) -> None:
    """Each day has a speed of its own, here with a standard deviation of 3 %."""
    minutes = start_minutes(positions(ARMS + 2, 8))
    days = 0.03 * np.random.RandomState(308).standard_normal((2, len(minutes), 1, 1))
    before, after = (load_values(requests(309 + day, minutes)) + days[day] for day in (0, 1))
    raw = regressed(verdict.changed(before[:, 1:-1], after[:, 1:-1], LEVEL.alpha))
    through = regressed(verdict.changed(ratios(before), ratios(after), LEVEL.alpha))
    attained("R4", "mutant: raw speeds of two days, any regression", raw.any(axis=1).mean(), ">", LIMIT)
    attained("R4", "the same days through the reference, any regression", through.any(axis=1).mean(), "≤", LIMIT)


def test_a_level_that_forgets_the_looks_fails(attained: Attained) -> None:
    random = np.random.RandomState(311)
    before, after = random.standard_normal((2, 4000, 24))
    outside = [
        verdict.changed(before[:, :first], after[:, :second], 0.05).differs
        for first in verdict.LOOKS
        for second in verdict.LOOKS
    ]
    attained("R5", "mutant: 5 % at each pair of looks", np.logical_or.reduce(outside).mean(), ">", LIMIT)
