"""The search for the best placement, where the best is known (S13)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.edge import MOST_LOADS, Found, Tried, search
from truth.simulation import Array
from truth.table import Attained

COUNT, RUNS, SIGMA = 41, 2000, 0.02
STAYS = np.arange(COUNT)  # expert layers on the host
SPEED = -np.log(0.010 + 0.0004 * STAYS)  # 100 to 38 tok/s


def refusing(edge: int) -> Array:
    """Beyond the edge nothing loads."""
    return np.asarray(np.where(edge > STAYS, np.nan, SPEED))


def spilling(edge: int) -> Array:
    """Beyond the edge it loads and runs at half the speed and less, and no flag tells."""
    return np.asarray(np.where(edge > STAYS, SPEED + math.log(0.5) - 0.05 * (edge - STAYS), SPEED))


def flat(edge: int) -> Array:
    return np.full(COUNT, 4.0)


def tight(edge: int) -> Array:
    """Nothing loads beyond the edge, and close to it the card is so full that it is slower."""
    near = np.clip(3 - (STAYS - edge), 0, 3)
    return np.asarray(np.where(edge > STAYS, np.nan, SPEED + np.log(1 - 0.06 * near)))


SHAPES: dict[str, Callable[[int], Array]] = {
    "beyond the edge nothing loads": refusing,
    "beyond the edge it spills": spilling,
    "flat": flat,
    "best shortly before the edge": tight,
}


@pytest.mark.parametrize("miss", [3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_ten_loads_find_a_placement_close_to_the_best(shape: str, miss: int, attained: Attained) -> None:
    random = np.random.RandomState(401)
    loads, regret, regret_of_three = [], [], []
    for _ in range(RUNS):
        edge = random.randint(0, COUNT - 1)
        truth = SHAPES[shape](edge)

        def measure(candidate: int, truth: Array = truth) -> Tried:
            value = truth[candidate] + SIGMA * random.standard_normal()
            return Tried(candidate, None if math.isnan(value) else float(value))

        found = search(COUNT, edge + random.randint(-miss, miss + 1), measure)
        loads.append(len(found.tried))
        speeds = truth[list(found.ranked)]
        regret.append(1 - math.exp(speeds[0] - np.nanmax(truth)))
        regret_of_three.append(1 - math.exp(speeds[:3].max() - np.nanmax(truth)))
    case = f"{shape}, guess ± {miss}"
    attained("S13", f"{case}: loads, at most", max(loads), "≤", 10, "")
    attained("S13", f"{case}: within 3 % of the best", float(np.mean(np.array(regret) <= 0.03)), "≥", 0.92)
    attained("S13", f"{case}: one of three within 3 %", float(np.mean(np.array(regret_of_three) <= 0.03)), "≥", 0.97)


def found_in(truth: list[float | None], guess: int) -> Found:
    return search(len(truth), guess, lambda candidate: Tried(candidate, truth[candidate]))


@settings(deadline=None, derandomize=True)
@given(st.lists(st.none() | st.floats(0, 6), min_size=1, max_size=60), st.integers(-9, 99), st.sets(st.integers(0, 59)))
def test_whatever_is_measured_the_search_ends_in_time(truth: list[float | None], guess: int, spilled: set[int]) -> None:
    found = search(len(truth), guess, lambda n: Tried(n, truth[n], spilled=n in spilled))
    assert 1 <= len(found.tried) <= MOST_LOADS
    assert all(truth[n] is not None and n not in spilled for n in found.ranked)
    assert len(set(found.ranked)) == len(found.ranked)
    assert (found.best is None) == (not found.ranked)


@pytest.mark.parametrize("guess", [-3, 0, 29, 59, 70])
def test_a_guess_that_misses_by_far_costs_no_more_loads(guess: int) -> None:
    truth = [None if n < 50 else 4.0 - 0.03 * n for n in range(60)]
    found = found_in(truth, guess)
    assert len(found.tried) <= MOST_LOADS
    assert found.best is not None


def test_a_model_that_does_not_load_anywhere_has_no_best() -> None:
    found = found_in([None] * 9, guess=3)
    assert (found.best, found.edge, found.ranked) == (None, None, ())


def test_a_model_that_fits_whole_is_left_whole() -> None:
    found = found_in([4.0 - 0.03 * n for n in range(30)], guess=0)
    assert (found.best, found.edge) == (0, 0)


def test_a_placement_that_spills_is_never_the_best_however_fast() -> None:
    truth = [5.0, 5.0, 5.0, 4.0, 3.9, 3.8, 3.7]
    found = search(7, 3, lambda n: Tried(n, truth[n], spilled=n < 3))
    assert (found.best, found.edge) == (3, 3)


def test_one_candidate_is_the_best_of_itself() -> None:
    assert found_in([4.0], guess=0).best == 0
