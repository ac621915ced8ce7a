"""The last screen of a run, and two runs side by side: on one page, at any width, with and without colour."""

from __future__ import annotations

import dataclasses
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import played_run
import pytest
from played_run import a_header, contender, later, played

from harness import changes, terminal
from harness.compare import Comparison, compare
from harness.plan import ArmStatus, Status

EIGHT = (
    "llama-cpp", "llama-cpp@cpu-moe", "llama-cpp@ngl=9", "llama-cpp@ncmoe=12,ub=1024", "llama-cpp@ncmoe=24,ub=1024",
    "llama-cpp@ncmoe=36,ub=1024", "llama-cpp@cpu", "llama-cpp@ngl=20,ctk=q8_0,ctv=q8_0",
)  # fmt: skip
SERVER = (
    "llama-server -m models/SmolLM2-135M-Instruct.Q4_1.gguf -fit off -ngl 999 --n-cpu-moe 15 -c 4096 -b 512 -ub 512 "
    "-t 15 -fa on -ctk f16 -ctv f16 --load-mode auto -np 1 --cache-ram 0 --no-webui --offline -a 'a name of two'"
)
GROUP = "\n".join(
    (
        '(set -m; server= device=; d=$(mktemp -d "$PWD/duel.XXXXXX") || exit',
        """trap 'kill $server $device; wait; rm -r "$d"' EXIT""",
        'export OLLAMA_HOST=127.0.0.1:11435 OLLAMA_MODELS="$d/models"',
        "OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=f16 OLLAMA_NUM_PARALLEL=1 OLLAMA_CONTEXT_LENGTH=4096 ollama "
        "serve > ollama.log 2>&1 & server=$!; sleep 2 && kill -0 $server &&",
        "printf '%s\\n' 'FROM models/m.gguf' 'PARAMETER num_ctx 4096' 'PARAMETER num_gpu 999' 'PARAMETER num_thread 7' "
        "| ollama create duel -f /dev/stdin &&",
        "ollama run duel --verbose)",
    )
)
SGR = re.compile(r"\x1b\[[\d;]*m")


def judged(arms: tuple[str, ...] = EIGHT, command: str = SERVER, **given: Any) -> Comparison:
    """A run whose arms are 3 % and more apart, and each of which has a command."""
    tps = {arm: 50.0 * (1 + 0.1 * at) for at, arm in enumerate(arms)} | given.pop("tps", {})
    header = a_header(*(contender(arm, command=command) for arm in arms), max_blocks=6)
    return compare(played(header, tps, **given))


@pytest.mark.parametrize("command", [SERVER, GROUP])
@pytest.mark.parametrize("noise", [0.002, 0.05])
def test_eight_arms_are_one_page_at_a_hundred_columns(command: str, noise: float) -> None:
    lines = terminal.table(judged(command=command, noise=noise, dies="llama-cpp@cpu"), 100).splitlines()

    assert len(lines) <= 40, "\n".join(lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("arms", [EIGHT[:2], EIGHT])
def test_no_line_is_wider_than_the_terminal_and_every_arm_has_one_line(arms: tuple[str, ...], width: int) -> None:
    drawn = terminal.table(judged(arms, noise=0.05), width)

    assert max(map(len, drawn.splitlines())) <= width, drawn
    if width >= 80:
        rows = [line for line in drawn.splitlines() if re.match(r"\S+ +(\(twin\) +)?\d+\.\d", line)]
        assert len(rows) == len(arms) + 1, drawn


def test_thirty_arms_are_thirty_lines() -> None:
    arms = tuple(f"llama-cpp@ncmoe={n}" for n in range(30))
    drawn = terminal.table(judged(arms), 100)

    assert [line.split()[0] for line in drawn.splitlines() if re.match(r"llama-cpp@ncmoe=\d+ +\d", line)] == [
        *arms[:1], *arms[1:],
    ]  # fmt: skip


def test_the_answer_stands_first_then_the_command_then_the_table() -> None:
    drawn = terminal.table(judged(), 100)
    places = [drawn.index(text) for text in ("On this machine", "by hand", "decode tok/s", "State ", "Run folder: ")]

    assert places == sorted(places)
    assert f"To run {EIGHT[-1]} by hand" in drawn


def test_arms_that_are_one_placement_share_their_reason() -> None:
    same = ArmStatus(Status.ALIAS, "no GPU: one placement", "llama-cpp")
    arms = [contender("llama-cpp"), *(contender(arm, status=same) for arm in ("llama-cpp@ngl=99", "llama-cpp@cpu-moe"))]
    drawn = terminal.table(compare(played(a_header(*arms))), 100)

    assert "llama-cpp@ngl=99, llama-cpp@cpu-moe = llama-cpp (no GPU: one placement)" in drawn
    assert drawn.count("one placement") == 1
    assert re.search(r"^llama-cpp@cpu-moe .*= llama-cpp$", drawn, re.MULTILINE)


@pytest.mark.parametrize(
    ("changed", "onwards"),
    [({}, "Share it: llamaduel publish 'a run'"), ({"twin": 1.5}, "Next: mend what the state names")],
)
def test_it_ends_with_what_to_do(changed: dict[str, Any], onwards: str) -> None:
    assert onwards in terminal.table(judged(EIGHT[:2], folder=Path("a run"), **changed), 100).splitlines()[-1]


def test_a_run_that_was_stopped_is_gone_on_with_before_anything_else() -> None:
    run = judged(EIGHT[:2]).run
    cut = compare(dataclasses.replace(run, loads=run.loads[:7]))

    assert terminal.table(cut, 100).endswith("go on: llamaduel run --resume run")
    assert "publish" not in terminal.table(cut, 100)


def test_what_was_written_is_named(tmp_path: Path) -> None:
    folder = played_run.written(judged(EIGHT[:2]).run, tmp_path / "run")
    drawn = terminal.table(compare(dataclasses.replace(judged(EIGHT[:2]).run, folder=folder)), 200)

    assert f"Report: {folder / 'report.md'}" in drawn
    assert "Run folder" not in drawn


@pytest.mark.parametrize("width", [40, 80, 100])
@pytest.mark.parametrize("command", [SERVER, GROUP, "a 'quote\nover lines' b", "# a remark " * 20])
def test_a_folded_command_is_the_same_command(command: str, width: int, tmp_path: Path) -> None:
    drawn = terminal.folded(command, width)

    assert shlex.split(drawn.replace("\\\n", ""), comments=True) == shlex.split(command, comments=True)
    done = subprocess.run(["bash", "-n"], input=drawn, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if command == SERVER and width >= 80:
        assert max(map(len, drawn.splitlines())) <= width


def test_a_name_that_does_not_fit_is_cut_in_the_middle() -> None:
    drawn = terminal.table(judged(("llama-cpp", f"llama-cpp@{'x' * 90}ncmoe=12", f"llama-cpp@{'x' * 90}ncmoe=24")), 60)

    names = re.findall(r"^(llama\S*…\S*)", drawn, re.MULTILINE)
    assert [name[-2:] for name in names] == ["12", "24"]


# ── colour ──────────────────────────────────────────────────────────────────────────────────


def test_colour_changes_no_word_and_no_column() -> None:
    found = judged()

    assert SGR.sub("", terminal.table(found, 100, colour=True)) == terminal.table(found, 100, colour=False)
    assert SGR.search(terminal.table(found, 100, colour=True))


@pytest.mark.parametrize(
    ("changed", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"TERM": ""}, False)]
)
def test_colour_is_for_a_terminal_that_wants_it(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], coloured: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    found = judged(EIGHT[:2])
    assert not SGR.search(terminal.table(found, 100)), "stdout is no terminal here"
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        drawn = terminal.table(found, 100)
    monkeypatch.undo()
    os.close(master)

    assert bool(SGR.search(drawn)) == coloured


# ── two runs ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", [80, 100, 140])
def test_two_runs_side_by_side_fit(width: int) -> None:
    before = judged(EIGHT, noise=0.05)
    tps = {row.arm: row.decode_tps.value for row in before.rows if row.decode_tps} | {"llama-cpp@cpu": 20.0}
    after = compare(played(later(*map(contender, EIGHT), max_blocks=6), tps))
    drawn = terminal.changes_table(changes.compare_runs(before, after), width)

    assert max(map(len, drawn.splitlines())) <= width, drawn
    assert len([line for line in drawn.splitlines() if re.match(r"llama-cpp\S* .*\d+\.\d", line)]) >= len(EIGHT) - 1
