"""What may be said: words, intervals, states. Rates against a known truth are in tests/truth."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import verdict
from harness.verdict import Drift, LeftOut

STEADILY = settings(deadline=None, derandomize=True)
LEVEL = verdict.level(7, 2)
logs = st.floats(-3, 8, allow_nan=False)
blocks = st.integers(2, 24).flatmap(
    lambda n: st.tuples(st.lists(logs, min_size=n, max_size=n), st.lists(logs, min_size=n, max_size=n))
)


def around(log_ratio: float, deviation: float, n: int = 8) -> tuple[list[float], list[float]]:
    """Two arms whose log ratio has exactly this mean and standard deviation."""
    base = [4.0 + 0.1 * math.sin(block) for block in range(n)]
    size = deviation * math.sqrt((n - 1) / n)
    return [b + log_ratio + (size if block % 2 else -size) for block, b in enumerate(base)], base


# ── words ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("log_ratio", "deviation", "word"),
    [
        (0.0, 0.01, "SAME"),
        (0.08, 0.01, "DIFFERENT"),
        (-0.08, 0.01, "DIFFERENT"),
        (0.0, 0.08, "INCONCLUSIVE"),
        (0.0295, 0.002, "DIFFERENT"),  # inside the margin, but not shown to be
    ],
)
def test_a_contrast_has_one_of_three_words(log_ratio: float, deviation: float, word: str) -> None:
    found = verdict.contrast(*around(log_ratio, deviation), LEVEL)
    assert found.word == word
    assert found.ratio == pytest.approx(math.exp(log_ratio))


def test_a_small_but_certain_lead_is_same_and_named() -> None:
    found = verdict.contrast(*around(0.012, 0.002), LEVEL)
    assert found.word == "SAME"
    assert found.differs
    assert found.ahead == pytest.approx(math.expm1(0.012))
    assert found.sentence("ollama", "llama-cpp").startswith(
        "SAME within ±3 %, ollama ahead by 1.2 %; ollama / llama-cpp 1.01"
    )
    first, second = around(0.012, 0.002)
    back = verdict.contrast(second, first, LEVEL)
    assert "ollama ahead by 1.2 %" in back.sentence("llama-cpp", "ollama")


def test_a_difference_is_never_told_without_its_interval() -> None:
    found = verdict.contrast(*around(0.08, 0.02), LEVEL)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.ratio < found.high
    assert found.sentence("a", "b") == f"DIFFERENT: a runs at 1.083× ({found.low:.3f}–{found.high:.3f}) the speed of b"


def test_what_is_not_told_apart_says_within_what_and_how_many_blocks_more() -> None:
    found = verdict.contrast(*around(0.01, 0.05, n=8), LEVEL)
    assert found.word == "INCONCLUSIVE"
    assert found.ahead is None
    assert found.attained_margin is not None
    assert found.detectable is not None
    assert found.blocks_needed is not None
    assert found.attained_margin > found.margin
    assert found.detectable > found.margin
    assert found.blocks_needed > found.n
    assert found.sentence("a", "b").startswith(
        f"not told apart: within {100 * found.attained_margin:.1f} %; a / b 1.01"
    )


def test_fewer_than_six_blocks_give_numbers_and_no_claim() -> None:
    for n in (2, 4):
        found = verdict.contrast(*around(0.5, 0.001, n), LEVEL)
        assert found.word == "SCREENING"
        assert found.ahead is None
        assert not found.settled
        assert found.low is not None
    assert "no claim" in found.sentence("a", "b")


def test_one_block_has_a_ratio_and_nothing_else() -> None:
    found = verdict.contrast([1.0], [0.5], LEVEL)
    assert (found.word, found.n, found.ratio) == ("SCREENING", 1, math.exp(0.5))
    assert (found.low, found.high, found.half_width, found.attained_margin) == (None, None, None, None)
    assert (found.detectable, found.blocks_needed) == (None, None)
    assert found.sentence("a", "b") == "1 block, no claim; a / b 1.65×"


def test_a_hopeless_interval_is_still_a_short_line() -> None:
    found = verdict.contrast([0.0, 9.0], [0.0, 0.0], LEVEL)
    assert found.low is not None
    assert found.low < 0.01
    assert found.sentence("a", "b") == "2 blocks, no claim; a / b 90×"


def test_blocks_of_one_arm_alone_are_no_contrast() -> None:
    with pytest.raises(ValueError, match="same blocks"):
        verdict.contrast([1.0, 2.0], [1.0], LEVEL)
    with pytest.raises(ValueError, match="same blocks"):
        verdict.contrast([], [], LEVEL)


def test_levels_say_over_what_they_hold() -> None:
    assert verdict.level(7, 2) == verdict.Level(0.0125 / 2, "joint 95 % over 7 looks and 2 contrasts")
    assert verdict.level(4, 1).words == "joint 95 % over 4 looks and 1 contrast"
    assert verdict.level(1, 1, look_alpha=0.05).words == "joint 95 % over 1 look and 1 contrast"
    assert verdict.level(7, 1, look_alpha=0.05).words == "joint 65 % over 7 looks and 1 contrast"
    assert verdict.level(7, 0).words == "joint 95 % over 7 looks", "one arm alone is compared with nothing"
    assert verdict.level(0, 3).words == "95 %, no claim"
    assert verdict.contrast(*around(0, 0.01), 0.05).level == "95 %"
    assert verdict.contrast(*around(0, 0.01), 0.0125).level == "98.75 %"


@STEADILY
@given(blocks)
def test_turning_a_contrast_round_turns_its_numbers_and_keeps_its_word(arms: tuple[list[float], list[float]]) -> None:
    there, back = verdict.contrast(*arms, LEVEL), verdict.contrast(arms[1], arms[0], LEVEL)
    assert there.word == back.word
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.attained_margin == pytest.approx(back.attained_margin)
    if there.high is not None and there.high < 1e100:
        assert there.low == pytest.approx(1 / (back.high or 0), rel=1e-6)


@STEADILY
@given(blocks, st.floats(-2, 2))
def test_what_moves_both_arms_of_a_block_moves_no_ratio(arms: tuple[list[float], list[float]], shift: float) -> None:
    moved = [[value + shift * (block + 1) for block, value in enumerate(arm)] for arm in arms]
    before, after = verdict.contrast(*arms, LEVEL), verdict.contrast(moved[0], moved[1], LEVEL)
    assert after.ratio == pytest.approx(before.ratio, rel=1e-6)


@STEADILY
@given(blocks)
def test_a_word_follows_from_the_numbers_beside_it(arms: tuple[list[float], list[float]]) -> None:
    found = verdict.contrast(*arms, LEVEL)
    assert found.attained_margin is not None
    assert found.half_width is not None
    if found.n < 6:
        assert found.word == "SCREENING"
    elif found.word == "SAME":
        assert found.attained_margin < found.margin * (1 + 1e-9)
    else:
        assert found.attained_margin >= found.margin * (1 - 1e-9)
        assert found.differs == (found.word == "DIFFERENT") or found.half_width < 1e-9


def test_equal_values_are_the_same_without_any_width() -> None:
    found = verdict.contrast([1.0] * 6, [1.0] * 6, LEVEL)
    assert (found.word, found.ratio, found.low, found.high, found.half_width) == ("SAME", 1.0, 1.0, 1.0, 0.0)
    assert found.sentence("a", "b") == "SAME within ±3 %; a / b 1.000× (1.000–1.000)"


def test_more_noise_needs_more_blocks_up_to_a_number_not_worth_naming() -> None:
    needed = [verdict.blocks_needed(deviation, 0.0125) for deviation in (0.001, 0.02, 0.05, 0.1)]
    assert needed[0] == 6
    assert all(a is not None and b is not None and a < b for a, b in itertools.pairwise(needed))
    assert all(n is not None and n % 2 == 0 for n in needed)
    assert verdict.blocks_needed(3.0, 0.0125) is None


# ── one arm ─────────────────────────────────────────────────────────────────────────────────


def test_the_interval_of_an_arm_is_about_its_geometric_mean_and_says_what_it_is_not_for() -> None:
    speeds = [math.log(90), math.log(100), math.log(110)]
    found = verdict.interval(speeds)
    assert found.value == pytest.approx((90 * 100 * 110) ** (1 / 3))
    assert found.low is not None
    assert found.high is not None
    assert math.log(found.high / found.value) == pytest.approx(
        4.30265 * statistics.stdev(speeds) / math.sqrt(3), rel=1e-5
    )
    assert found.value / found.low == pytest.approx(found.high / found.value)
    assert found.note == "of this arm alone, not for comparing rows"


def test_one_load_has_a_value_and_no_interval() -> None:
    found = verdict.interval([math.log(50)])
    assert found.value == pytest.approx(50)
    assert (found.low, found.high, found.n) == (None, None, 1)
    with pytest.raises(ValueError, match="at least one load"):
        verdict.interval([])


def test_variance_is_split_into_requests_and_loads() -> None:
    draw = random.Random(1)
    arms = {
        arm: [[load + draw.gauss(0, 0.02) for _ in range(3)] for load in (draw.gauss(4, 0.05) for _ in range(400))]
        for arm in "ab"
    }
    found = verdict.variance(arms)
    assert found.within_load == pytest.approx(0.02, rel=0.05)
    assert found.between_loads == pytest.approx(0.05, rel=0.06)


def test_variance_that_cannot_be_split_is_unknown_and_never_negative() -> None:
    assert verdict.variance({}) == verdict.Variance(None, None)
    assert verdict.variance({"a": [[1.0], [2.0]]}) == verdict.Variance(None, None)
    assert verdict.variance({"a": [[1.0, 2.0]]}).between_loads is None
    assert verdict.variance({"a": [[1.0, 2.0], [2.0, 1.0], []]}).between_loads == 0.0


def test_a_first_request_that_lags_is_reported_as_how_much_slower_it_is() -> None:
    loads = [[math.log(96 + 0.1 * i), math.log(100.0), math.log(100.0 + 0.1 * i)] for i in range(8)]
    found = verdict.warm_up(loads)
    assert found is not None
    assert found.residue == pytest.approx(0.036, abs=0.003)
    assert not found.adequate
    faster = verdict.warm_up([[math.log(104 + 0.1 * i), *load[1:]] for i, load in enumerate(loads)])
    assert faster is not None
    assert faster.adequate


def test_warm_up_looks_only_at_loads_whose_first_request_and_one_more_are_valid() -> None:
    good: list[list[float | None]] = [[1.0, 1.01, None], [1.0, None, 1.02], [1.0, 1.0, 1.0]]
    found = verdict.warm_up([*good, [None, 5.0, 5.0], [7.0, None, None], [7.0], []])
    assert found is not None
    assert found.n == 3
    assert verdict.warm_up(good[:2]) is None


# ── drift, spread ───────────────────────────────────────────────────────────────────────────


def test_drift_is_given_in_log_units_a_minute() -> None:
    minutes = [[0.0, 3.0, 4.0, 7.0], [1.0, 2.0, 5.0, 6.0]]
    values = [[4.0 - 0.02 * t + 0.001 * math.cos(9 * t) for t in arm] for arm in minutes]
    found = verdict.drift(values, minutes, seed=3)
    assert found is not None
    assert found.per_minute == pytest.approx(-0.02, abs=0.001)
    assert found.block_minutes == 2.0
    assert found.per_block == pytest.approx(-0.04, abs=0.002)
    assert found.flagged


def test_the_same_seed_gives_the_same_p_and_the_values_alone_decide_the_slope() -> None:
    minutes = [[0.0, 3.0, 4.0, 7.0], [1.0, 2.0, 5.0, 6.0]]
    draw = random.Random(5)
    values = [[draw.gauss(4, 0.02) for _ in arm] for arm in minutes]
    first, again, other = (verdict.drift(values, minutes, seed) for seed in (1, 1, 2**40))
    assert first == again
    assert first is not None
    assert other is not None
    assert (first.per_minute, first.p_slope) == (other.per_minute, other.p_slope)
    assert first.p_steps == pytest.approx(other.p_steps, abs=0.1)


def test_a_step_in_the_middle_is_drift() -> None:
    draw = random.Random(6)
    minutes = [[2.0 * block + arm for block in range(8)] for arm in (0, 1)]
    values = [[draw.gauss(4, 0.005) - (0.1 if t > 8 else 0) for t in arm] for arm in minutes]
    found = verdict.drift(values, minutes, seed=0)
    assert found is not None
    assert found.p_steps < 0.025


@pytest.mark.parametrize(
    ("values", "minutes"),
    [
        ([], []),
        ([[1.0]], [[0.0]]),
        ([[1.0, 1.1]], [[0.0, 1.0]]),
        ([[1.0, 1.1, 1.2], [1.0, 1.1, 1.2]], [[0.0] * 3] * 2),
    ],
)
def test_too_few_loads_or_no_time_is_no_drift_test(values: Any, minutes: Any) -> None:
    assert verdict.drift(values, minutes, seed=0) is None


def test_loads_that_never_vary_do_not_drift() -> None:
    found = verdict.drift(
        [[4.0] * 6, [5.0] * 6], [[2.0 * b for b in range(6)], [2.0 * b + 1 for b in range(6)]], seed=0
    )
    assert found is not None
    assert (found.per_minute, found.p_slope, found.p_steps) == (0.0, 1.0, 1.0)
    assert not found.flagged


def test_a_gap_of_a_resumed_run_does_not_lengthen_its_blocks() -> None:
    starts = [0.0, 2.0, 4.0, 600.0, 602.0, 604.0]
    minutes = [starts, [start + 1 for start in starts]]
    found = verdict.drift([[4.0, 4.1, 4.0, 4.1, 4.0, 4.1]] * 2, minutes, seed=0)
    assert found is not None
    assert found.block_minutes == 2.0


CALM = [0.0, 0.01, -0.01, 0.005, -0.005, 0.0]


def test_two_loads_far_off_their_median_make_an_arm_unstable() -> None:
    one = [*CALM[:-1], -0.2]
    two = [*CALM[:-2], -0.2, 0.2]
    found = verdict.spread({"calm": CALM, "one": one, "two": two})
    assert found.limit == 0.12
    assert found.far == {"calm": 0, "one": 1, "two": 2}
    assert found.unstable == ("two",)
    long = CALM * 3
    assert len(long) >= verdict.MANY_BLOCKS
    many = verdict.spread({"two": [*long[:-2], -0.2, 0.2], "three": [*long[:-3], -0.2, 0.2, 0.2]})
    assert many.unstable == ("three",)


def test_the_limit_widens_where_all_loads_scatter() -> None:
    restless = [0.15, -0.15, 0.1, -0.1, 0.14, -0.14]
    found = verdict.spread({"a": restless, "b": restless})
    assert found.mad > verdict.CALM_MAD
    assert found.limit == 0.30
    assert not found.unstable


def test_leaving_out_a_pair_shows_how_much_hangs_on_it() -> None:
    found = verdict.leave_out([0.0, 0.0, 0.0, 0.0, 0.3, 0.3, 9.9], [0.0] * 7)
    assert found is not None
    assert found.low == 1.0
    assert found.high == pytest.approx(math.exp(0.15))
    assert found.range == pytest.approx(math.expm1(0.15))
    assert verdict.leave_out([0.0] * 3, [0.0] * 3) is None


# ── states ──────────────────────────────────────────────────────────────────────────────────

SAME_TWIN = verdict.twin(*around(0.0, 0.01))
STEADY = Drift(per_minute=0.0001, half_width=0.001, p_slope=0.8, p_steps=0.7, block_minutes=3.0)


def test_a_sound_run_is_green() -> None:
    found = verdict.state(8, twin=SAME_TWIN, drift=STEADY)
    assert found.word == "GREEN"
    assert found.ranks
    assert len(found.reasons) == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"twin": None}, "noise floor is not known"),
        ({"twin": verdict.twin(*around(0.0, 0.08))}, "the same only within"),
        ({"drift": Drift(-0.004, 0.002, 0.001, 0.2, 3.0)}, "drifts by −0.4 % ± 0.2 % a minute (p = 0.001)"),
        ({"drift": Drift(0.0, 0.002, 0.9, 0.01, 3.0)}, "more than noise (cumulative sum, p = 0.01)"),
        ({"left_out": {"a / b": LeftOut(1.0, 1.05)}}, "a / b moves by 5 %"),
        ({"disturbed": 2}, "2 loads ran while other programs were busy"),
    ],
)
def test_doubt_is_amber_and_still_ranks(given: dict[str, Any], says: str) -> None:
    found = verdict.state(8, **{"twin": SAME_TWIN, "drift": STEADY, **given})
    assert found.word == "AMBER"
    assert found.ranks
    assert len(found.reasons) == 1
    assert says in found.reasons[0]
    assert found.reasons[0].endswith(".")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"twin": verdict.twin(*around(0.05, 0.01))}, "Two copies of the reference differ, 1.051×"),
        ({"unstable": {"ollama": "2 of 8 loads are far off"}}, "ollama is unstable: 2 of 8 loads"),
        ({"drift": Drift(-0.011, 0.002, 0.001, 0.2, 3.0)}, "drifts by −3.3 % during one block"),
        (
            {"aliases": {"a and b": verdict.contrast(*around(0.5, 0.02), LEVEL)}},
            "one placement, and yet differ by 65 %",
        ),
    ],
)
def test_what_cannot_be_true_is_red_and_ranks_nothing(given: dict[str, Any], says: str) -> None:
    found = verdict.state(8, **{"twin": SAME_TWIN, "drift": STEADY, **given})
    assert found.word == "RED"
    assert not found.ranks
    assert says in found.reasons[0]
    claim = verdict.contrast(*around(0.3, 0.01), LEVEL)
    after = verdict.temper(claim, found, SAME_TWIN)
    assert after.word == "NOT_COMPARABLE"
    assert after.ahead is None
    assert after.ratio == claim.ratio
    assert after.sentence("a", "b").startswith("not comparable: the run is RED")


def test_a_twin_off_by_less_than_one_per_cent_is_no_bias_however_certain() -> None:
    assert not verdict.twin(*around(0.008, 0.0005)).biased
    assert verdict.twin(*around(0.012, 0.0005)).biased


def test_few_blocks_are_screening_whatever_else_is_wrong() -> None:
    found = verdict.state(2, twin=None, unstable={"a": "it jumps"})
    assert found.word == "SCREENING"
    assert not found.ranks
    assert found.reasons[0].startswith("2 blocks: fewer than 6")
    assert "a is unstable: it jumps." in found.reasons


def test_in_amber_a_difference_below_the_noise_floor_is_not_told_apart() -> None:
    rough = verdict.twin(*around(0.0, 0.08))
    amber = verdict.state(8, twin=rough)
    small = verdict.contrast(*around(0.04, 0.01), LEVEL)
    large = verdict.contrast(*around(0.4, 0.01), LEVEL)
    assert (small.word, large.word) == ("DIFFERENT", "DIFFERENT")
    after = verdict.temper(small, amber, rough)
    assert after.word == "INCONCLUSIVE"
    assert "noise floor of ±6.9 %" in after.sentence("a", "b")
    assert verdict.temper(large, amber, rough) == large
    certain = verdict.contrast(*around(0.012, 0.002), LEVEL)
    assert certain.ahead is not None
    after = verdict.temper(certain, amber, rough)
    assert (after.word, after.ahead) == ("SAME", None)
    assert "ahead" not in after.sentence("a", "b")
    assert verdict.temper(small, verdict.state(8, twin=SAME_TWIN), SAME_TWIN) == small


# ── a whole run ─────────────────────────────────────────────────────────────────────────────


def run_of(speeds: dict[str, float], n: int = 8, deviation: float = 0.008) -> dict[str, list[float]]:
    draw = random.Random(11)
    return {label: [math.log(speed) + draw.gauss(0, deviation) for _ in range(n)] for label, speed in speeds.items()}


def times_of(values: dict[str, list[float]]) -> dict[str, list[float]]:
    k = len(values)
    return {
        label: [float(k * block + (arm if block % 2 else k - 1 - arm)) for block in range(len(found))]
        for arm, (label, found) in enumerate(values.items())
    }


def judge(values: dict[str, list[float]], **more: Any) -> verdict.Judgement:
    given: dict[str, Any] = {"reference": "A", "twin_label": "D", "level": LEVEL, "seed": 4}
    return verdict.judge(values, times_of(values), [("B", "A"), ("C", "A")], **{**given, **more})


def test_a_run_is_judged_whole() -> None:
    found = judge(run_of({"A": 50, "B": 50, "C": 60, "D": 50}))
    assert found.n == 8
    assert found.state.word == "GREEN"
    assert {pair: one.word for pair, one in found.contrasts.items()} == {("B", "A"): "SAME", ("C", "A"): "DIFFERENT"}
    assert found.contrasts["C", "A"].ratio == pytest.approx(1.2, rel=0.02)
    assert found.twin is not None
    assert found.twin.contrast.word == "SAME"


def test_an_arm_without_values_is_left_out_of_the_contrasts() -> None:
    found = judge(run_of({"A": 50, "C": 60, "D": 50}))
    assert list(found.contrasts) == [("C", "A")]


def test_no_block_is_nothing_to_compare() -> None:
    assert judge({}).state.word == "SCREENING"
    assert judge({"A": [], "B": []}).contrasts == {}


def test_reasons_carry_the_names_of_arms_and_only_compared_arms_count() -> None:
    values = run_of({"A": 50, "B": 50, "C": 50, "D": 50, "E": 50})
    for block in (2, 5):
        values["E"][block] -= 0.7
    assert judge(values).state.word == "GREEN"
    for block in (2, 5):
        values["B"][block] -= 0.7
    found = judge(values, names={"B": "llama-cpp@cpu"})
    assert found.state.word == "RED"
    assert found.state.reasons[0] == "llama-cpp@cpu is unstable: 2 of 8 loads are more than 12 % off its median."
    assert found.contrasts["B", "A"].word == "NOT_COMPARABLE"
    assert judge(run_of({"A": 50, "B": 50, "D": 50}), unstable={"B": "3 loads broke"}).state.word == "RED"


def test_equal_placements_that_differ_make_the_run_red() -> None:
    values = run_of({"A": 50, "B": 25, "C": 50, "D": 50})
    assert judge(values).state.word == "GREEN"
    found = judge(values, aliases=[("B", "A")])
    assert found.state.word == "RED"
    assert "one placement" in found.state.reasons[0]


@pytest.mark.parametrize(("other", "word"), [(40, "SCREENING"), (25, "RED")])
def test_one_load_each_of_one_placement_is_enough_to_see_what_no_noise_explains(other: float, word: str) -> None:
    one = {label: [math.log(speed)] for label, speed in (("A", 50.0), ("B", float(other)))}
    found = judge(one, aliases=[("B", "A")])
    assert found.state.word == word
    assert not found.state.ranks


@STEADILY
@given(st.integers(1, 12), st.integers(2, 4), st.randoms(use_true_random=False))
def test_any_run_can_be_judged(n: int, arms: int, draw: random.Random) -> None:
    values = {label: [draw.uniform(-2, 2) for _ in range(n)] for label in "ABCD"[:arms]}
    found = judge(values)
    assert found.n == n
    assert found.state.reasons
    assert (found.state.word == "SCREENING") == (n < 6)
    assert all(one.sentence("x", "y") for one in found.contrasts.values())
    assert (found.twin is not None) == (arms == 4)


def test_an_attained_margin_is_told_from_the_one_that_it_missed() -> None:
    assert verdict._beside(0.0304, 0.03) == "3.04 %"
    assert verdict._beside(0.042, 0.03) == "4.2 %"
