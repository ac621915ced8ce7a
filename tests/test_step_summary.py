"""The page of a GitHub Actions job: answer, table and gate on it, inert and short, and never a reason to fail."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from played_run import a_header, contender, later, played, written

from harness import step_summary
from harness.changes import Changes, compare_runs
from harness.cli import main
from harness.compare import Comparison, compare
from harness.testing import engines
from harness.testing.script import Script

EVIL = "m</summary><script>x</script> | [a](http://b) `c` @everyone \x1b[31m \u202e"
LOST = {"llama-cpp@cpu-moe": 30.0}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "step-summary"
    path.write_text("said before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    return path


@pytest.fixture(scope="module")
def before() -> Comparison:
    return compare(played(a_header(), folder=Path("before")))


def since(before: Comparison, tps: dict[str, float] | None = None) -> Changes:
    return compare_runs(before, compare(played(later(), tps, folder=Path("after"))))


def rendered(text: str) -> str:
    return str(MarkdownIt("commonmark").enable("table").render(text))


def test_a_run_is_answer_state_table_and_command(before: Comparison) -> None:
    text = step_summary.summarize(before)
    html = rendered(text)

    assert "llama-cpp@cpu-moe" in html
    assert re.search(r"<strong>(GREEN|AMBER)</strong>", html)
    assert html.count("<table>") == 1
    assert html.count("<tr>") == 1 + len(before.rows) + (before.twin is not None)
    assert before.header.command in html


@pytest.mark.parametrize(
    ("tps", "title", "word"),
    [(LOST, "a regression", "SLOWER, a regression"), (None, "no regression", "SAME")],
)
def test_a_gate_says_first_whether_anything_was_lost(
    before: Comparison, tps: dict[str, float] | None, title: str, word: str
) -> None:
    html = rendered(step_summary.summarize(None, since(before, tps)))

    assert html.startswith(f"<h3>llamaduel: {title} since <code>2026-01-01</code></h3>")
    assert word in html


def test_two_runs_that_can_decide_nothing_are_no_pass(before: Comparison) -> None:
    other = compare(played(later(*map(contender, ("llama-cpp@ngl=9", "llama-cpp"))), folder=Path("after")))
    html = rendered(step_summary.summarize(None, compare_runs(before, other)))

    assert "<h3>llamaduel: nothing decided" in html
    assert "confounded" in html


def test_what_engines_and_files_say_is_inert(before: Comparison) -> None:
    run = played(a_header(contender("llama-cpp", placement=EVIL), contender("llama-cpp@cpu-moe")))
    header = dataclasses.replace(
        run.header, command="run\n```\n<script>", model=dataclasses.replace(run.header.model, name=EVIL)
    )
    text = step_summary.summarize(compare(dataclasses.replace(run, header=header)))
    html = rendered(text)

    assert "\x1b" not in text
    assert "\u202e" not in text
    assert not re.search(r"<(script|a |/summary)", html)
    assert "@everyone" not in text


def test_the_page_is_added_to_by_run_and_compare(page: Path, model: Path, tmp_path: Path) -> None:
    first = str(written(played(a_header()), tmp_path / "before"))
    second = str(written(played(later(), LOST), tmp_path / "after"))
    short = ("--preset", "quick", "--out-tokens", "16", "--prompt-tokens", "64", "--context", "512", "--no-wait")

    assert main(["compare", first, second, "--fail-on-regression"]) == 4
    gated = page.read_text()
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        main(["run", str(model), "--arms", "llama-cpp", "--out", str(tmp_path / "runs"), *short])
    whole = page.read_text()

    assert gated.startswith("said before\n### llamaduel: a regression since")
    assert whole.startswith(gated)
    assert "The same run:" in whole


@pytest.mark.parametrize(
    ("left", "then"), [("said before", "said before\n"), ("said before\n", "said before\n"), ("", ""), (None, "")]
)
def test_what_is_added_begins_on_a_line_of_its_own(left: str | None, then: str, page: Path, before: Comparison) -> None:
    page.unlink()
    if left is not None:
        page.write_text(left)

    step_summary.append_summary(print, before)

    assert page.read_text().startswith(f"{then}### llamaduel: ")


def test_two_runs_with_only_their_reference_in_common_say_so(before: Comparison) -> None:
    other = compare(played(later(*map(contender, ("llama-cpp", "llama-cpp@ngl=99"))), folder=Path("after")))
    html = rendered(step_summary.summarize(None, compare_runs(before, other)))

    assert "<h3>llamaduel: nothing decided" in html
    assert "only the reference, llama-cpp, is in both runs, and no arm to compare through it" in html


def test_pytest_adds_to_it_too(page: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "test_duel.py").write_text(
        "import pytest\n@pytest.mark.duel\ndef test_decode(arm, replay): replay('decode')\n"
    )
    options = ("preset=quick", "out-tokens=16", "prompt-tokens=64", "context=512", "no-wait", "arms=llama-cpp")
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--benchmark-only", f"--duel-model={model}",
             *(f"--duel-{option}" for option in options), "test_duel.py"],
            cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert page.read_text().count("### llamaduel: ") == 1


def test_reading_an_old_run_adds_nothing(page: Path, tmp_path: Path) -> None:
    folder = str(written(played(a_header()), tmp_path / "run"))

    for command in (["report", folder], ["verify", folder], ["export", folder]):
        assert main(command) == 0
    assert page.read_text() == "said before\n"


@pytest.mark.parametrize("place", ["a folder", "no/such/folder/page", "/dev/full"])
def test_a_page_that_cannot_be_written_is_one_warning(
    place: str, before: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a folder").mkdir()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / place))
    said: list[str] = []

    step_summary.append_summary(said.append, before)

    (warning,) = said
    assert warning.startswith("warning: the summary of this job cannot be written (")
    assert "\n" not in warning


def test_without_github_nothing_is_written(before: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    said: list[str] = []

    step_summary.append_summary(said.append, before)

    assert said == []


def test_the_page_stays_below_what_github_takes(
    page: Path, before: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_summary, "summarize", lambda *_: "a paragraph of a table\n\n" * 100_000)
    for _ in range(3):
        step_summary.append_summary(print, before)

    assert page.stat().st_size <= step_summary.MOST_BYTES < 1 << 20
    assert page.read_text().endswith(step_summary.CUT)
