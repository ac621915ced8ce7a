"""What a person reads: only what the verdicts allow, and text from elsewhere made inert."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from harness import answer, facts, render, terminal, verdict, words
from harness.compare import Comparison
from harness.gpu import Gpu
from harness.options import Options
from harness.plan import ArmStatus, Status
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
    ("word", "ratio", "claim", "advice", "pasted"),
    [
        ("SAME", 1.0, "llama-cpp (1.00×, 0.98–1.02) decodes at the same speed as ollama within 3 %", "Take either.",
         ["ollama", "llama-cpp"]),
        ("DIFFERENT", 1.5, "llama-cpp (1.50×, 1.47–1.53) is faster than ollama", "Take llama-cpp, shown to be faster.",
         ["llama-cpp"]),
        ("DIFFERENT", 0.5, "llama-cpp (0.50×, 0.49–0.51) is slower than ollama", "Take ollama, the fastest here.",
         ["ollama"]),
        ("INCONCLUSIVE", 1.02, "llama-cpp (1.02×, 1.00–1.04: within 4.2 %) is not told apart from ollama",
         "Neither is shown to be faster: take either.", ["ollama", "llama-cpp"]),
        ("NOT_COMPARABLE", 1.5, "llama-cpp (why not) is not comparable with ollama", None, []),
    ],
)  # fmt: skip
def test_the_answer_says_what_the_verdict_says_then_what_to_do_and_what_to_paste(
    comparison: Comparison, word: verdict.Word, ratio: float, claim: str, advice: str | None, pasted: list[str]
) -> None:
    found = judged(comparison, word, ratio)
    first, *rest = render.report(found).split("\n\n")[1:]

    assert f"On this machine {claim}." in first
    assert (advice or "Measured with") in first
    assert "Take" in first or "take" in first or advice is None
    assert [text for text in rest[:4] if text.endswith("by hand:")] == [f"`{arm}` by hand:" for arm in pasted]


@pytest.mark.parametrize(
    ("state", "mark"),
    [("RED", "> **RED: this run ranks nothing. "), ("SCREENING", "> **SCREENING: "), ("AMBER", None), ("GREEN", None)],
)
def test_a_run_that_claims_nothing_is_marked_before_anything_is_said(
    comparison: Comparison, state: verdict.StateWord, mark: str | None
) -> None:
    found = judged(comparison, "SAME", 1.0, state)
    second = render.report(found).split("\n\n")[1]

    assert second.startswith(mark or "On this machine")
    assert bool(answer.best_commands(found)) == (mark is None), "no command where nothing is ranked"


def test_another_depth_is_other_work_and_no_choice(comparison: Comparison) -> None:
    found = judged(comparison, "DIFFERENT", 0.5)
    contenders = tuple(
        dataclasses.replace(each, settings=dataclasses.replace(each.settings, depth=4096 * (each.arm == "llama-cpp")))
        for each in found.header.contenders
    )
    header = dataclasses.replace(found.header, contenders=contenders)

    deeper = dataclasses.replace(found, run=dataclasses.replace(found.run, header=header))

    assert answer.best(found)
    assert answer.best(deeper) == ()


def test_arms_of_one_reason_share_a_line(comparison: Comparison) -> None:
    status = ArmStatus(Status.DOES_NOT_FIT, "no room")
    rows = tuple(dataclasses.replace(row, status=status) for row in comparison.rows)

    assert "- `ollama`, `llama-cpp`: DOES_NOT_FIT: no room" in render.report(dataclasses.replace(comparison, rows=rows))


def test_arms_of_one_command_share_a_block(comparison: Comparison) -> None:
    rows = tuple(dataclasses.replace(row, command="serve it") for row in comparison.rows)

    again = render.report(dataclasses.replace(comparison, rows=rows)).partition("## Again")[2]

    assert "`ollama`, `llama-cpp` by hand:\n\n```sh\nserve it\n```" in again


def test_an_underscore_within_a_word_stays_readable_and_no_other_does() -> None:
    assert words.markdown("DOES_NOT_FIT __init__ _a_ a__b") == r"DOES_NOT_FIT \_\_init\_\_ \_a\_ a\_\_b"


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
        elif not line.startswith("<picture>"):  # ours, and tests/test_injection.py looks into it
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
        assert max(len(line) for line in table.splitlines() if "/" not in line) <= width, "but for a path"


def test_unknown_is_a_dash() -> None:
    assert words.number(None) == "–"
    assert words.memory(None) == "–"
    assert words.spread(None) == "–"
    assert words.ratio(None) == "–"


def test_the_machine_is_told_as_far_as_it_is_known(comparison: Comparison) -> None:
    def machine_of(**known: Any) -> str:
        machine = dataclasses.replace(comparison.header.machine, **known)
        header = dataclasses.replace(comparison.header, machine=machine)
        run = dataclasses.replace(comparison.run, header=header)
        return (
            render.report(dataclasses.replace(comparison, run=run)).partition("## Machine\n")[2].partition("\n## ")[0]
        )

    gpu = Gpu(name="a card", memory_bytes=12 << 30, driver="580.1", power_limit_w=200.0)
    whole = machine_of(
        gpus=(gpu,), memory_speed_mts=5600, memory_modules=2, memory_channels=2, governor="powersave",
        on_ac_power=False, wsl=True, wsl_version=2,
    )  # fmt: skip
    bare = machine_of(memory_speed_mts=None, memory_channels=None, governor=None, on_ac_power=None, gpus=())

    assert "a card, 12.0 GiB, driver 580.1, power limit 200 W" in whole
    assert "2 modules, 2 channels, 5600 MT/s" in whole
    assert "governor powersave, on battery" in whole
    assert "WSL2" in whole
    assert "MT/s" not in bare
    assert "on mains" not in bare
    assert "none that NVML answers for" in bare
