"""What a run, or two, leave on the page of a GitHub Actions job: answer, state, table, command, and what changed.

Such a job names a file in `GITHUB_STEP_SUMMARY`, and Markdown that is appended to it is shown there. Nothing is
computed here, and a file that takes no more text never costs a run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from harness.answer import answer, best_commands, change_sentence, undecided
from harness.changes import Changes
from harness.compare import Comparison
from harness.contract import Say
from harness.terminal import grid
from harness.words import NONE, code, fenced, markdown, markdown_table, number, plain

VARIABLE = "GITHUB_STEP_SUMMARY"
MOST_BYTES = 900 << 10  # GitHub refuses more than 1 MiB a step, all of it
CUT = "\n\n… cut here: the whole is in `report.md` of the run folder.\n"
LEFT_OUT = ("placement", "load", "TTFT", "VRAM", "on device", "on host", "RSS", "memory", "of ceiling")


def summarize(comparison: Comparison | None, changes: Changes | None = None) -> str:
    """Markdown about a run, about what changed since another one, or both."""
    parts = [*(_run(comparison) if comparison else ()), *(_changes(changes) if changes else ())]
    return "\n\n".join(parts) + "\n"


def append_summary(say: Say, comparison: Comparison | None, changes: Changes | None = None) -> None:
    """Onto the page of the job, where there is one; what cannot be written there is one warning."""
    if not (name := os.environ.get(VARIABLE)):
        return
    path = Path(name)
    try:
        text = _within(f"{_own_line(path)}{summarize(comparison, changes)}\n", MOST_BYTES - _size(path))
        with path.open("ab") as file:
            file.write(text)
    except OSError as error:
        say(plain(f"warning: the summary of this job cannot be written ({error.strerror or error}); the run is whole"))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _own_line(path: Path) -> str:
    """What ends the line that another step left open."""
    if not _size(path):
        return ""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return "" if file.read(1) == b"\n" else "\n"


def _within(text: str, most: int) -> bytes:
    """The text, or as many of its whole paragraphs as there is room for."""
    whole = text.encode(errors="replace")
    if len(whole) <= most:
        return whole
    kept = whole[: max(0, most - len(CUT.encode()))].rpartition(b"\n\n")[0]
    return kept + CUT.encode() if kept else b""


def _run(comparison: Comparison) -> Iterator[str]:
    yield f"### llamaduel: {markdown(comparison.header.model.name)}"
    yield markdown(answer(comparison))
    yield f"**{comparison.state.word}** – {markdown(' '.join(comparison.state.reasons))}"
    yield markdown_table(*grid(comparison, LEFT_OUT))
    for arm, command in best_commands(comparison):
        yield f"To run {code(arm)} by hand:"
        yield fenced(command)
    yield "The same run:"
    yield fenced(comparison.header.command)


def _changes(changes: Changes) -> Iterator[str]:
    """The gate: whether anything was lost, then each arm."""
    word = "a regression" if changes.regression else "no regression" if changes.decided else "nothing decided"
    yield f"### llamaduel: {word} since {code(changes.before.started[:10])}"
    if not changes.decided:
        yield markdown(undecided(changes))
    if changes.changes:
        yield "\n".join(f"- {markdown(change_sentence(each))}" for each in changes.changes)
        cells = [
            (
                each.arm,
                number(each.before_tps.value) if each.before_tps else NONE,
                number(each.after_tps.value) if each.after_tps else NONE,
                NONE if each.ratio is None else f"{each.ratio:.3f}× ({each.low:.3f}–{each.high:.3f})",
                each.word + (", a regression" if each.regression else ""),
            )
            for each in changes.changes
        ]
        yield markdown_table(("arm", "before, tok/s", "after, tok/s", "after / before", "verdict"), cells)
    if told := [*changes.notes, *(f"Differs: {each}." for each in changes.differences)]:
        yield "\n".join(f"- {markdown(text)}" for text in told)
