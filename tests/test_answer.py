"""The answer and its advice: true to the verdicts, and silent where they do not reach."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from played_run import OTHER, REFERENCE, THIRD, a_header, contender, played

from harness import answer, terminal
from harness.compare import Comparison, compare
from harness.curve import curves
from harness.errors import RunRefused
from harness.record import Header


def judged(tps: dict[str, float], header: Header | None = None, **told: Any) -> Comparison:
    return compare(played(header or a_header(), tps, **told))


def n(value: int) -> str:
    return f"llama-cpp@ncmoe={value}"


def sweep(**speeds: float) -> Comparison:
    tps = {n(int(name[1:])): speed for name, speed in speeds.items()}
    return judged(tps, a_header(*map(contender, tps)), noise=0.001)


def test_arms_of_one_verdict_share_a_clause_and_what_is_farthest_is_told_first() -> None:
    said = answer.answer(judged({REFERENCE: 50.0, OTHER: 40.0, THIRD: 30.0}))

    assert said.startswith(f"On this machine {THIRD} (0.60×")
    assert f" and {OTHER} (0.80×" in said
    assert f" are slower than {REFERENCE}. Take {REFERENCE}, the fastest here." in said


def test_an_arm_that_was_not_compared_leaves_nothing_to_advise() -> None:
    header = a_header(*map(contender, (REFERENCE, OTHER, THIRD)), contrasts=((OTHER, REFERENCE),))
    found = judged({REFERENCE: 50.0, OTHER: 30.0, THIRD: 100.0}, header)

    assert f"is slower than {REFERENCE}" in answer.answer(found)
    assert "Take" not in answer.answer(found)
    assert answer.best_commands(found) == []


def test_arms_at_other_depths_leave_nothing_to_advise() -> None:
    deep = f"{REFERENCE},depth=4096"
    deeper = contender(deep)
    deeper = dataclasses.replace(deeper, settings=dataclasses.replace(deeper.settings, depth=4096))
    found = judged({REFERENCE: 50.0, deep: 60.0, OTHER: 30.0}, a_header(contender(REFERENCE), deeper, contender(OTHER)))

    assert "Take" not in answer.answer(found)


def test_the_advice_is_the_fastest_of_those_shown_to_be_ahead() -> None:
    one = judged({REFERENCE: 50.0, OTHER: 60.0, THIRD: 50.0})
    two = judged({REFERENCE: 50.0, OTHER: 60.0, THIRD: 70.0})

    assert f"Take {OTHER}, shown to be faster." in answer.answer(one)
    assert f"Take {THIRD}, the fastest of those shown to be ahead." in answer.answer(two)


def test_the_advice_and_the_curve_name_the_same_values() -> None:
    found = sweep(n0=50.0, n8=51.0, n16=50.95, n24=40.0)

    assert {row.arm for row in answer.best(found)} == {n(8), n(16)}
    assert f"Take {n(8)} or {n(16)}: none of them is shown to be faster." in answer.answer(found)
    assert curves(found)[0].best == ("8", "16")


def test_same_as_the_reference_is_not_the_same_as_each_other() -> None:
    found = sweep(n0=50.0, n8=51.1, n16=48.9)

    assert {row.contrast.word for row in found.rows if row.contrast} == {"SAME"}
    assert [row.arm for row in answer.best(found)] == [n(8)]


def test_a_curve_names_no_best_where_a_value_was_not_compared() -> None:
    tps = {n(0): 50.0, n(8): 48.0, n(16): 60.0, n(24): 40.0}
    header = a_header(*map(contender, tps), contrasts=((n(24), n(0)), (n(8), n(0))))

    assert curves(judged(tps, header))[0].finding.startswith("ncmoe=16 reads highest, 60.")


def test_a_run_in_which_an_arm_died_says_so() -> None:
    found = judged({}, a_header(contender(REFERENCE), contender(OTHER)), dies=OTHER)

    assert "There is no complete block yet" not in answer.answer(found)
    assert f"{OTHER} CRASHED: it died" in answer.answer(found)


def test_a_dead_reference_is_no_question_of_the_preset() -> None:
    found = judged({}, dies=REFERENCE, since_block=4)

    assert "--preset" not in answer.answer(found)


def test_what_is_the_same_asks_for_no_more_blocks() -> None:
    found = judged({REFERENCE: 50.0, OTHER: 50.0, THIRD: 50.0}, noise=0.001)

    assert {row.contrast.word for row in found.rows if row.contrast} == {"SAME"}
    assert "Next: to tell" not in terminal.table(found, 100)


def test_a_header_that_lacks_an_arm_of_its_plan_is_damaged() -> None:
    run = played(a_header())
    header = dataclasses.replace(run.header, contenders=run.header.contenders[:2])

    with pytest.raises(RunRefused, match=f"damaged: its plan has {THIRD} and its header has not"):
        compare(dataclasses.replace(run, header=header))
