"""The plan: what it holds, which load comes next, what is kept."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import plan, verdict
from harness.errors import RunRefused, UsageError
from harness.plan import ArmStatus, Aside, Outcome, Plan, Planned, Status

STEADILY = settings(deadline=None, derandomize=True)
ARMS = ("ollama", "llama-cpp", "llama-cpp@cpu-moe")


def make(arms: tuple[str, ...] = ARMS, **more: Any) -> Plan:
    given: dict[str, Any] = {"seed": 7, "prompts_digest": "p" * 64, "weights_digest": "w" * 64}
    return plan.make(arms, **{**given, **more})


def outcome(load: Planned, value: float | None = 4.0, **more: Any) -> Outcome:
    broken = "the server ended" if value is None else None
    return Outcome(block=load.block, attempt=load.attempt, label=load.label, value=value, broken=broken, **more)


Engine = Callable[[Planned], Outcome]


def play(drawn: Plan, engine: Engine, outcomes: list[Outcome] | None = None, at_most: int = 10_000) -> list[Outcome]:
    """Run to the end, or for some loads."""
    outcomes = [] if outcomes is None else outcomes
    for _ in range(at_most):
        load = plan.next_load(drawn, outcomes)
        if load is None:
            break
        outcomes.append(engine(load))
    return outcomes


def steady(load: Planned) -> Outcome:
    return outcome(load, 4.0 + 0.0001 * load.block)


def undecided(load: Planned) -> Outcome:
    """Too restless to be decided at any look."""
    return outcome(load, 4.0 + 0.5 * math.sin(37.0 * load.block + ord(load.label[0])))


def loads_of(outcomes: list[Outcome]) -> list[tuple[int, int, str]]:
    return [(each.block, each.attempt, each.label) for each in outcomes]


# ── what a plan holds ───────────────────────────────────────────────────────────────────────


def test_labels_are_neutral_and_the_twin_is_a_copy_of_the_reference() -> None:
    drawn = make(reference="llama-cpp")
    assert [(arm.label, arm.text) for arm in drawn.arms] == [*zip("ABC", ARMS, strict=True), ("D", "llama-cpp")]
    assert (drawn.reference, drawn.twin) == ("B", "D")
    assert drawn.contrasts == (("A", "B"), ("C", "B"))
    many = make(tuple(f"llama-cpp@ncmoe={n}" for n in range(60)))
    assert many.labels[25:28] == ("Z", "AA", "AB")
    assert len(set(many.labels)) == 61


def test_the_first_arm_is_the_reference_unless_named() -> None:
    assert make().reference == "A"
    assert make().contrasts == (("B", "A"), ("C", "A"))


def test_declared_contrasts_replace_the_usual_ones_and_set_the_level() -> None:
    drawn = make(contrasts=[("llama-cpp@cpu-moe", "llama-cpp")])
    assert drawn.contrasts == (("C", "B"),)
    assert drawn.level == verdict.Level(0.0125, "joint 95 % over 7 looks and 1 contrast")
    assert make().level.alpha == 0.0125 / 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"preset": "thorough"}, "no preset 'thorough'"),
        ({"arms": ()}, "at least one arm"),
        ({"arms": ("ollama", "ollama")}, "each once"),
        ({"reference": "olama"}, "did you mean 'ollama'"),
        ({"contrasts": [("ollama", "vllm")]}, "'vllm' is no arm of this run"),
        ({"contrasts": [("ollama", "ollama")]}, "two different arms"),
        ({"contrasts": [("ollama", "llama-cpp"), ("llama-cpp", "ollama")]}, "declared once"),
    ],
)
def test_a_plan_that_makes_no_sense_is_a_usage_error(more: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make(**more)


def test_presets_fix_how_many_blocks_and_whether_anything_is_claimed() -> None:
    confirm, quick = make(), make(preset="quick")
    assert (confirm.max_blocks, confirm.looks, confirm.twin) == (24, verdict.LOOKS, "D")
    assert (quick.max_blocks, quick.looks, quick.twin) == (2, (), None)
    assert quick.level.words == "95 %, no claim"
    assert make(preset="quick", twin=True).twin == "D"
    assert make(twin=False).twin is None


@pytest.mark.parametrize(
    ("affordable", "blocks", "looks"), [(13, 12, (6, 8, 10, 12)), (6, 6, (6,)), (5, 4, ()), (3, 2, ()), (1, 2, ())]
)
def test_the_budget_fixes_the_last_look_before_block_one(affordable: int, blocks: int, looks: tuple[int, ...]) -> None:
    drawn = make(max_blocks=affordable)
    assert (drawn.max_blocks, drawn.looks) == (blocks, looks)
    assert plan.max_blocks(affordable * 4 * 40 / 60 + 0.01, 40, loads=4) == blocks


def test_minutes_are_those_of_all_loads() -> None:
    drawn = make()
    assert plan.estimate_minutes(drawn, 40) == pytest.approx(24 * 4 * 40 / 60)
    assert plan.estimate_minutes(drawn, 40, blocks=6) == pytest.approx(6 * 4 * 40 / 60)
    assert plan.estimate_minutes(drawn, {"A": 30, "B": 20, "C": 50, "D": 20}, blocks=1) == pytest.approx(2.0)
    assert plan.max_blocks(20, {"A": 30, "B": 20, "C": 50, "D": 20}, loads=4) == 10
    assert plan.max_blocks(20, 0, loads=4) == 24


def test_dear_loads_get_more_requests_and_fast_arms_longer_answers() -> None:
    assert [plan.requests_per_load(seconds) for seconds in (5, 44.9, 45)] == [3, 3, 5]
    assert [plan.out_tokens(tps) for tps in (1, 63.5, 64, 127.5, 300, 5000)] == [128, 128, 256, 256, 1024, 1024]


def test_a_contrast_is_read_from_arms_that_hold_colons_themselves() -> None:
    arms = ("ollama", "llama-cpp,rpc=a:1+b:2", "llama-cpp,rpc=a:1")
    assert plan.read_contrast("llama-cpp,rpc=a:1:ollama", arms) == (arms[2], "ollama")
    assert plan.read_contrast("llama-cpp,rpc=a:1+b:2:llama-cpp,rpc=a:1", arms) == (arms[1], arms[2])
    for wrong in ("ollama", "ollama:vllm", ":", ""):
        with pytest.raises(UsageError, match="is no contrast of two arms"):
            plan.read_contrast(wrong, arms)


# ── on paper ────────────────────────────────────────────────────────────────────────────────

plans = st.builds(
    make,
    arms=st.sampled_from([ARMS[:1], ARMS[:2], ARMS]),
    seed=st.integers(0, 2**63),
    twin=st.sampled_from([True, False, None]),
    preset=st.sampled_from(["quick", "confirm"]),
    max_blocks=st.none() | st.integers(1, 24),
    margin=st.floats(0.001, 0.5),
    requests=st.integers(1, 5),
    warmups=st.integers(0, 2),
    settings=st.dictionaries(st.sampled_from("cbt"), st.none() | st.integers(0, 9999) | st.sampled_from(["on", "é"])),
    aside=st.lists(st.builds(Aside, st.just("x"), st.sampled_from(Status), st.none() | st.just("ollama")), max_size=2),
)


@STEADILY
@given(plans)
def test_a_plan_comes_back_from_its_text_exactly(drawn: Plan) -> None:
    text = drawn.to_json()
    again = Plan.from_json(text)
    assert again == drawn
    assert again.to_json() == text
    assert again.digest == drawn.digest
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def test_anything_that_changes_in_a_plan_changes_its_digest() -> None:
    drawn = make()
    others = [
        make(seed=8),
        make(margin=0.02),
        make(requests=4),
        make(reference="llama-cpp"),
        make(settings={"c": 4096}),
        make(aside=[Aside("x", Status.UNAVAILABLE)]),
        make(weights_digest="x" * 64),
    ]
    assert len({each.digest for each in [drawn, *others]}) == len(others) + 1


def test_the_digest_and_the_order_of_a_plan_are_the_same_everywhere() -> None:
    """Literals, so that no change of a library, of Python or of this code moves them unseen."""
    drawn = make()
    assert drawn.digest == "15fb87b852e2344eca73ccb812da61fdbfbece949da9b3caa34013310ee97ab7"
    assert ["".join(plan.order(drawn, block)) for block in range(1, 7)] == [
        "BCDA",
        "ADCB",
        "ADBC",
        "CBDA",
        "DACB",
        "BCAD",
    ]


def test_a_plan_does_not_depend_on_the_process_that_makes_it() -> None:
    code = (
        "from harness import plan\n"
        "p = plan.make(['ollama', 'llama-cpp', 'x'], seed=3, prompts_digest='p', weights_digest='w')\n"
        "print(p.digest, [plan.order(p, b) for b in range(1, 25)])\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_hosts_do_not_get_into_a_plan_and_paths_are_refused() -> None:
    drawn = make(
        ("llama-cpp,rpc=10.0.0.7:50052+box:50052,t=4", "ollama"),
        settings={"rpc": "10.0.0.7:50052", "c": 4096},
        aside=[Aside("llama-cpp,rpc=box:1", Status.ALIAS, "llama-cpp,rpc=box:1")],
    )
    assert [arm.text for arm in drawn.arms] == [
        "llama-cpp,rpc=<2>,t=4",
        "ollama",
        "llama-cpp,rpc=<2>,t=4",
    ]
    assert "10.0.0.7" not in drawn.to_json()
    assert "box" not in drawn.to_json()
    with pytest.raises(RunRefused, match="looks like a path"):
        make(settings={"model": "/home/me/model.gguf"})
    with pytest.raises(RunRefused, match="looks like a path"):
        make(("openai@a", "C:\\engine"))


def broken_texts() -> list[str]:
    good = json.loads(make().to_json())
    changes: list[dict[str, Any]] = [
        {"format": 2},
        {"reference": "Z"},
        {"contrasts": [["A", "A"]]},
        {"contrasts": [["A"]]},
        {"twin": "A"},
        {"looks": [8, 6]},
        {"looks": [7]},
        {"looks": []},
        {"max_blocks": 5},
        {"max_blocks": 8},
        {"margin": 0},
        {"requests": 0},
        {"arms": []},
        {"arms": [{"label": "A"}]},
        {"aside": [{"text": "x", "word": "LOST", "alias_of": None}]},
        {"surplus": 1},
        {"looks": None},
        {"margin": "3"},
    ]
    lost = {key: value for key, value in good.items() if key != "seed"}
    return ["", "null", "[]", "{", json.dumps(lost), *(json.dumps({**good, **change}) for change in changes)]


@pytest.mark.parametrize("text", broken_texts())
def test_a_text_that_is_no_plan_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(RunRefused) as caught:
        Plan.from_json(text)
    assert "\n" not in str(caught.value)


# ── order ───────────────────────────────────────────────────────────────────────────────────


@STEADILY
@given(st.integers(0, 2**40), st.integers(1, 4), st.integers(1, 12))
def test_blocks_hold_every_arm_once_and_even_blocks_mirror(seed: int, arms: int, pair: int) -> None:
    drawn = make(("a", "b", "c", "d")[:arms], seed=seed)
    odd, even = plan.order(drawn, 2 * pair - 1), plan.order(drawn, 2 * pair)
    assert sorted(odd) == sorted(drawn.labels)
    assert even == odd[::-1]
    # so the places of an arm in a pair always add up to the same
    assert {odd.index(label) + even.index(label) for label in drawn.labels} == {len(drawn.labels) - 1}


def test_over_seeds_all_orders_are_equally_frequent() -> None:
    orders = Counter(plan.order(make(seed=seed, twin=False), 2 * pair + 1) for seed in range(1000) for pair in range(6))
    assert len(orders) == 6
    chi_squared = sum((count - 1000) ** 2 / 1000 for count in orders.values())
    assert chi_squared < 20.5  # p = .001 with 5 degrees of freedom; the seeds are fixed


def test_pairs_of_one_plan_are_drawn_apart() -> None:
    drawn = make()
    assert len({plan.order(drawn, block) for block in range(1, 24, 2)}) > 5


@STEADILY
@given(plans)
def test_prompts_are_equal_for_all_arms_and_never_used_twice(drawn: Plan) -> None:
    used = [index for block in range(drawn.max_blocks + 1) for index in plan.prompts(drawn, block)]
    warm = [index for block in range(drawn.max_blocks + 1) for index in plan.warmups(drawn, block)]
    assert used == list(range((drawn.max_blocks + 1) * drawn.requests))
    assert len(set(used + warm)) == len(used) + (drawn.max_blocks + 1) * drawn.warmups


# ── a run ───────────────────────────────────────────────────────────────────────────────────


def test_a_run_goes_block_by_block_in_order_and_stops_at_the_first_look_that_settles_all() -> None:
    drawn = make()
    outcomes = play(drawn, steady)
    assert loads_of(outcomes) == [(block, 1, label) for block in range(1, 7) for label in plan.order(drawn, block)]
    first = plan.next_load(drawn, [])
    assert first is not None
    assert (first.block, first.attempt, first.position) == (1, 1, 0)
    assert first.prompts == (3, 4, 5)
    assert first.arm == next(arm.text for arm in drawn.arms if arm.label == first.label)


def test_an_undecided_run_ends_with_its_last_block() -> None:
    for blocks in (24, 12):
        drawn = make(max_blocks=blocks)
        outcomes = play(drawn, undecided)
        assert plan.blocks_done(drawn, outcomes) == plan.blocks_judged(drawn, outcomes) == blocks
        assert len(outcomes) == blocks * 4


def test_quick_runs_two_blocks_and_looks_at_nothing() -> None:
    drawn = make(preset="quick")
    outcomes = play(drawn, steady)
    assert len(outcomes) == 2 * 3
    assert {len(found) for found in plan.values(drawn, outcomes).values()} == {2}


def test_a_decided_but_wide_contrast_goes_on() -> None:
    """Two arms that differ by far, told apart at once, but only within ±10 %."""

    def wide(load: Planned) -> Outcome:
        loud = 0.05 if load.block % 2 else -0.05
        return outcome(load, 4.0 if load.label != "B" else 5.0 + loud)

    drawn = make(ARMS[:2])
    outcomes = play(drawn, wide)
    found = plan.values(drawn, outcomes)
    at_six = verdict.contrast(found["B"][:6], found["A"][:6], drawn.level)
    assert at_six.word == "DIFFERENT"
    assert not at_six.settled
    assert 6 < plan.blocks_done(drawn, outcomes) < 24


def test_a_single_arm_runs_against_its_twin_to_the_first_look() -> None:
    assert plan.blocks_done(make(("ollama",)), play(make(("ollama",)), undecided)) == 6


# ── broken and disturbed loads ──────────────────────────────────────────────────────────────


def test_a_broken_load_repeats_its_whole_block_as_written() -> None:
    drawn = make()

    def engine(load: Planned) -> Outcome:
        fails = load.block == 2 and load.attempt == 1 and load.position == 2
        return outcome(load, None) if fails else steady(load)

    outcomes = play(drawn, engine)
    second = [each for each in loads_of(outcomes) if each[0] == 2]
    order = plan.order(drawn, 2)
    assert second == [*((2, 1, label) for label in order[:3]), *((2, 2, label) for label in order)]
    assert {each.attempt for each in plan.kept(drawn, outcomes)["A"] if each.block == 2} == {2}
    assert all(status.word is Status.OK for status in plan.statuses(drawn, outcomes).values())


def test_a_disturbed_load_repeats_its_block_twice_at_most_and_is_then_kept() -> None:
    drawn = make()
    outcomes = play(drawn, lambda load: outcome(load, 4.0, disturbed=load.label == "B" and load.block == 1))
    attempts = Counter(each.attempt for each in outcomes if each.block == 1 and each.label == "B")
    assert attempts == {1: 1, 2: 1, 3: 1}
    kept = plan.kept(drawn, outcomes)["B"]
    assert (kept[0].attempt, kept[0].disturbed) == (3, True)
    assert plan.statuses(drawn, outcomes)["B"].word is Status.OK


def test_repeats_of_a_block_are_counted_together_whatever_their_cause() -> None:
    drawn = make()

    def engine(load: Planned) -> Outcome:
        if load.block == 1 and load.attempt == 1 and load.position == 0:
            return outcome(load, None)
        return outcome(load, 4.0, disturbed=load.block == 1)

    outcomes = play(drawn, engine)
    assert max(each.attempt for each in outcomes if each.block == 1) == 3
    assert sum(each.disturbed for loads in plan.kept(drawn, outcomes).values() for each in loads) == 4


def test_an_arm_that_breaks_in_every_attempt_leaves_and_the_others_go_on() -> None:
    drawn = make()

    def engine(load: Planned) -> Outcome:
        if load.label == "C" and load.block == 3:
            return outcome(load, None, status=Status.CRASHED)
        return steady(load)

    outcomes = play(drawn, engine)
    assert plan.blocks_done(drawn, outcomes) == 6
    assert sum(each.label == "C" for each in outcomes) == 2 + 3
    assert set(plan.values(drawn, outcomes)) == {"A", "B", "D"}
    assert plan.statuses(drawn, outcomes)["C"] == ArmStatus(Status.CRASHED, "the server ended")


def test_an_arm_that_leaves_without_a_word_of_its_own_is_unstable() -> None:
    drawn = make()
    outcomes = play(drawn, lambda load: outcome(load, None if load.label == "C" else 4.0))
    assert plan.statuses(drawn, outcomes)["C"] == ArmStatus(Status.UNSTABLE, "the server ended")


def test_an_arm_that_never_fits_is_a_result_at_once_and_no_repeat() -> None:
    drawn = make()

    def engine(load: Planned) -> Outcome:
        return outcome(load, None, status=Status.DOES_NOT_FIT) if load.label == "B" else steady(load)

    outcomes = play(drawn, engine)
    assert sum(each.label == "B" for each in outcomes) == 1
    assert {each.attempt for each in outcomes} == {1}
    assert plan.statuses(drawn, outcomes)["B"].word is Status.DOES_NOT_FIT


def test_an_arm_that_fitted_before_gets_another_attempt() -> None:
    drawn = make()

    def engine(load: Planned) -> Outcome:
        fails = load.label == "B" and load.block == 4 and load.attempt == 1
        return outcome(load, None, status=Status.DOES_NOT_FIT) if fails else steady(load)

    outcomes = play(drawn, engine)
    assert len(plan.values(drawn, outcomes)["B"]) == 6
    assert plan.statuses(drawn, outcomes)["B"].word is Status.OK


def test_an_arm_that_broke_twice_is_unstable_though_it_ran_to_the_end() -> None:
    drawn = make()

    def engine(load: Planned) -> Outcome:
        return outcome(load, None) if load.label == "B" and load.attempt == 1 and load.block < 3 else steady(load)

    outcomes = play(drawn, engine)
    found = plan.statuses(drawn, outcomes)["B"]
    assert found == ArmStatus(Status.UNSTABLE, "2 of its loads broke, the last: the server ended")
    assert len(plan.values(drawn, outcomes)["B"]) == 6


def test_without_the_reference_there_is_nothing_left_to_compare() -> None:
    drawn = make()
    outcomes = play(drawn, lambda load: outcome(load, None if load.label == "A" else 4.0))
    assert {each.block for each in outcomes} == {1}
    assert plan.next_load(drawn, outcomes) is None


def test_an_outcome_has_a_value_or_a_reason() -> None:
    with pytest.raises(ValueError, match="what broke"):
        Outcome(block=1, attempt=1, label="A", value=None)
    with pytest.raises(ValueError, match="what broke"):
        Outcome(block=1, attempt=1, label="A", value=1.0, broken="it did")


def test_the_value_of_a_load_is_the_log_of_the_median_and_needs_two_valid_requests() -> None:
    assert plan.load_value([10.0, 30.0, 20.0], 3) == pytest.approx(math.log(20))
    assert plan.load_value([10.0, 40.0], 3) == pytest.approx(math.log(20))
    assert plan.load_value([10.0], 3) is None
    assert plan.load_value([10.0], 1) == pytest.approx(math.log(10))
    assert plan.load_value([], 1) is None


# ── resuming ────────────────────────────────────────────────────────────────────────────────


def test_a_block_cut_off_is_run_again_whole_and_that_is_no_repeat() -> None:
    drawn = make()
    outcomes = play(drawn, steady, at_most=6)
    assert plan.blocks_done(drawn, outcomes) == 1
    resumed = list(plan.abandon(drawn, outcomes))
    assert [each.abandoned for each in resumed] == [False] * 4 + [True] * 2
    play(drawn, lambda load: outcome(load, 4.0, disturbed=load.block == 2), resumed)
    second = [each for each in loads_of(resumed) if each[0] == 2]
    order = plan.order(drawn, 2)
    assert second[:2] == [(2, 1, label) for label in order[:2]]
    assert second[2:5] == [(2, 2, order[0]), (2, 3, order[0]), (2, 4, order[0])]
    assert second[4:] == [(2, 4, label) for label in order]


def test_a_run_cut_off_between_blocks_loses_nothing() -> None:
    drawn = make()
    outcomes = play(drawn, steady, at_most=8)
    assert plan.abandon(drawn, outcomes) == tuple(outcomes)


def test_a_block_cut_off_twice_still_goes_on_from_the_file_alone() -> None:
    """The mark of abandonment is not in the file: a later attempt says the same."""
    drawn = make()
    outcomes = play(drawn, steady, at_most=6)
    outcomes = play(drawn, steady, list(plan.abandon(drawn, outcomes)), at_most=3)
    from_file = [dataclasses.replace(each, abandoned=False) for each in outcomes]
    again = play(drawn, steady, list(plan.abandon(drawn, from_file)))
    assert [each for each in loads_of(again) if each[0] == 2][5:] == [(2, 3, label) for label in plan.order(drawn, 2)]
    unmarked = [dataclasses.replace(each, abandoned=False) for each in again]
    assert plan.values(drawn, unmarked) == plan.values(drawn, again)


def test_a_run_that_ends_between_looks_is_judged_at_the_last_look_passed() -> None:
    drawn = make()
    for loads, done, judged in ((4 * 5, 5, 5), (4 * 7 + 1, 7, 6), (4 * 15, 15, 12), (3, 0, 0)):
        outcomes = play(drawn, undecided, at_most=loads)
        assert plan.blocks_done(drawn, outcomes) == done
        assert plan.blocks_judged(drawn, outcomes) == judged
        assert {len(found) for found in plan.values(drawn, outcomes).values()} == {judged}


def test_outcomes_of_another_plan_are_refused() -> None:
    drawn = make()
    outcomes = play(drawn, steady, at_most=6)
    wrong = [outcomes[1:], outcomes[:2] + outcomes[3:], [*outcomes, outcomes[-1]]]
    wrong.append([*outcomes[:5], dataclasses.replace(outcomes[5], attempt=3)])
    for each in wrong:
        with pytest.raises(RunRefused, match="does not follow the plan"):
            plan.next_load(drawn, each)
    ended = play(drawn, steady)
    with pytest.raises(RunRefused, match="does not follow the plan"):
        plan.blocks_done(make(preset="quick"), ended)


# ── whatever the engines do ─────────────────────────────────────────────────────────────────


def whims(draw: random.Random, trouble: float) -> Engine:
    def engine(load: Planned) -> Outcome:
        whim = draw.choice(["disturbed", "broken", "crash", "full"]) if draw.random() < trouble else "ok"
        if whim in ("ok", "disturbed"):
            return outcome(load, undecided(load).value, disturbed=whim == "disturbed")
        return outcome(load, None, status={"crash": Status.CRASHED, "full": Status.DOES_NOT_FIT}.get(whim, Status.OK))

    return engine


@STEADILY
@given(st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([0.0, 0.1, 0.3, 0.9]), st.sampled_from([0.0, 0.07]))
def test_any_run_keeps_the_rules(seed: int, arms: int, trouble: float, kills: float) -> None:
    draw = random.Random(seed)
    drawn = make(ARMS[:arms], seed=seed, max_blocks=8)
    engine = whims(draw, trouble)
    outcomes: list[Outcome] = []
    while (load := plan.next_load(drawn, outcomes)) is not None:
        assert plan.next_load(drawn, tuple(outcomes)) == load  # pure
        assert load.block <= drawn.max_blocks
        assert load.prompts == plan.prompts(drawn, load.block)
        outcomes.append(engine(load))
        if draw.random() < kills:
            outcomes = list(plan.abandon(drawn, outcomes))
    repeats: Counter[int] = Counter()
    for block in {each.block for each in outcomes}:
        own = [each for each in outcomes if each.block == block]
        attempts = sorted({each.attempt for each in own})
        assert attempts == list(range(1, len(attempts) + 1))
        for attempt in attempts:
            labels = [each.label for each in own if each.attempt == attempt]
            assert len(set(labels)) == len(labels)
            assert labels == [label for label in plan.order(drawn, block) if label in labels]  # as written
        cut_off = {each.attempt for each in own if each.abandoned}
        repeats[block] = len(attempts) - 1 - len(cut_off - {attempts[-1]})
    assert max(repeats.values(), default=0) <= drawn.max_repeats
    kept = plan.kept(drawn, outcomes)
    assert {len(loads) for loads in kept.values()} <= {plan.blocks_judged(drawn, outcomes)}
    for loads in kept.values():
        assert [each.block for each in loads] == list(range(1, len(loads) + 1))
        assert all(each.value is not None for each in loads)
    for label, status in plan.statuses(drawn, outcomes).items():
        assert (label in kept) or status.word is not Status.OK
    unmarked = [dataclasses.replace(each, abandoned=False) for each in outcomes]
    assert plan.values(drawn, unmarked) == plan.values(drawn, outcomes)


@STEADILY
@given(st.integers(0, 50), st.integers(0, 40), st.floats(0.1, 10))
def test_speed_changes_neither_the_order_nor_any_repeat(seed: int, cut: int, factor: float) -> None:
    """Up to the first look, where speeds are looked at, and only to stop."""
    drawn = make(seed=seed)
    outcomes = play(drawn, undecided, at_most=min(cut, 23))
    scaled = [dataclasses.replace(each, value=(each.value or 0) * factor) for each in outcomes]
    assert plan.next_load(drawn, scaled) == plan.next_load(drawn, outcomes)


@STEADILY
@given(st.integers(0, 20), st.integers(0, 47))
def test_resuming_from_any_prefix_gives_the_same_order(seed: int, cut: int) -> None:
    drawn = make(seed=seed, max_blocks=12)
    whole = play(drawn, undecided)
    resumed = play(drawn, undecided, list(plan.abandon(drawn, whole[:cut])))
    assert plan.values(drawn, resumed) == plan.values(drawn, whole)
    last = {(each.block, each.label): index for index, each in enumerate(resumed) if not each.abandoned}
    assert [key for key, _ in sorted(last.items(), key=lambda item: item[1])] == [
        (each.block, each.label) for each in whole
    ]


def test_statuses_read_as_words() -> None:
    assert str(ArmStatus(Status.OK)) == "OK"
    assert str(ArmStatus(Status.ALIAS, "the same placement", "llama-cpp")) == "ALIAS (= llama-cpp)"
    assert str(ArmStatus(Status.DOES_NOT_FIT, "12 GiB are missing")) == "DOES_NOT_FIT: 12 GiB are missing"
