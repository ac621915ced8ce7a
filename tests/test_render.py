"""What a person reads: only what the verdicts allow, and text from elsewhere made inert."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from harness import facts, render, terminal, verdict, words
from harness.compare import Comparison
from harness.options import Options
from harness.testing import engines
from harness.testing.script import Script
from harness.walk import duel

HOSTILE = "a|b `c` <img src=x>\n# heading *bold* [l](http://x) \x1b[31mred \u202eabc"


@pytest.fixture(scope="module")
def comparison(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("render")
    given = Options(
        model=str(model), arms="ollama,llama-cpp", preset="quick", no_wait=True, out=str(folder / "runs"),
        out_tokens=16, prompt_tokens=64, context=512,
    )  # fmt: skip
    with engines.fake(folder, Script(itl_s=0.002)):
        return duel(given, lambda _: None)


def judged(comparison: Comparison, word: verdict.Word, ratio: float, state: verdict.StateWord = "GREEN") -> Comparison:
    """The same comparison with another verdict on its one contrast."""
    ((pair, found),) = comparison.judgement.contrasts.items()
    contrast = dataclasses.replace(
        found, word=word, ratio=ratio, low=ratio * 0.98, high=ratio * 1.02, attained_margin=0.042, reason="why not"
    )
    judgement = dataclasses.replace(
        comparison.judgement, n=6, state=verdict.State(state, ("a reason.",)), contrasts={pair: contrast}
    )
    rows = tuple(row if row.is_reference else dataclasses.replace(row, contrast=contrast) for row in comparison.rows)
    return dataclasses.replace(comparison, judgement=judgement, rows=rows)


@pytest.mark.parametrize(
    ("word", "ratio", "claim", "fastest"),
    [
        ("SAME", 1.0, "decode at the same speed within 3 %", None),
        (
            "DIFFERENT",
            1.5,
            "decodes at 1.50 times the speed",
            "The arm farthest ahead of the reference here, `llama-cpp`",
        ),
        ("DIFFERENT", 0.5, "decodes at 0.50 times the speed", "The reference is the fastest arm here, `ollama`"),
        ("INCONCLUSIVE", 1.02, "not told apart: within 4.2 %", None),
        ("NOT_COMPARABLE", 1.5, "not comparable: why not", None),
    ],
)
def test_the_answer_says_what_the_verdict_says(
    comparison: Comparison, word: verdict.Word, ratio: float, claim: str, fastest: str | None
) -> None:
    report = render.report(judged(comparison, word, ratio))

    assert claim in report
    assert ("fastest" in report or "farthest" in report) == (fastest is not None)
    assert fastest is None or fastest in report


def test_arms_that_may_not_be_compared_have_no_ratio(comparison: Comparison) -> None:
    found = judged(comparison, "NOT_COMPARABLE", 1.5)

    assert "1.5" not in words.ratio(found.row("llama-cpp").contrast)
    assert facts.as_json(found)["arms"][1]["ratio"] is None


def test_a_red_run_ranks_nothing_and_still_shows_its_numbers(comparison: Comparison) -> None:
    found = judged(comparison, "NOT_COMPARABLE", 1.5, "RED")
    table = terminal.table(found, 200)

    assert table.startswith("This run ranks nothing.")
    assert "State RED: a reason." in table
    assert words.spread(found.row("llama-cpp").decode_tps) in table


def test_text_from_elsewhere_is_inert_in_the_report(comparison: Comparison) -> None:
    rows = tuple(dataclasses.replace(row, engine=HOSTILE, command=HOSTILE + "\n```\n<b>") for row in comparison.rows)
    report = render.report(dataclasses.replace(comparison, rows=rows))
    fence = ""
    for line in report.splitlines():
        if fence:
            fence = "" if line == fence else fence
        elif line.startswith("```"):
            fence = line.removesuffix("sh")
        else:
            assert not line.startswith("# heading")
            assert "<img" not in line
            assert "<b>" not in line

    assert fence == "", "every block is closed by its own fence"
    assert "\x1b" not in report
    assert "\u202e" not in report


def test_plain_text_is_one_line_without_signs_that_a_terminal_obeys() -> None:
    assert words.plain(HOSTILE) == "a|b `c` <img src=x> # heading *bold* [l](http://x) [31mred abc"


def test_a_code_span_is_not_ended_by_its_content() -> None:
    assert words.code("a`b") == "``a`b``"
    assert words.code("`") == "`` ` ``"


@pytest.mark.parametrize("width", [60, 100, 200])
def test_a_table_keeps_arm_speed_and_verdict_at_every_width(comparison: Comparison, width: int) -> None:
    table = terminal.table(comparison, width)

    for text in ("arm", "decode tok/s", "verdict", "llama-cpp"):
        assert text in table
    if width >= 100:
        assert max(map(len, table.splitlines())) <= width


def test_unknown_is_a_dash() -> None:
    assert words.number(None) == "–"
    assert words.memory(None) == "–"
    assert words.spread(None) == "–"
    assert words.ratio(None) == "–"
