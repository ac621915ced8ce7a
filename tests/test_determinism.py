"""The same seed, the same run; the same folder, the same numbers; killed and continued, the same analysis (X2).

Runs of a backend without a process, each in a process of its own, with scripted clocks: see truth/scripted.py.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from truth.scripted import Runs, blocks_by_line, kill_at, lines_of
from truth.table import Attained

from harness import record
from harness.compare import Comparison, Row
from harness.record import Run
from harness.walk import read, verify

pytestmark = pytest.mark.truth
KEPT = ("none", "half", "unended", "whole")  # of the line at which a process is killed
KILLS = 20
READ = "import sys, pathlib, harness.walk; print(repr(harness.walk.read(pathlib.Path(sys.argv[1]))))"


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs("toy", tmp_path_factory.mktemp("runs"), model=model, arms="toy,t=1,toy,t=2", seed=1)


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Comparison:
    """The run that nobody killed."""
    assert runs.begin("whole") == [0]
    return read(runs.find("whole"))


def analysis(found: Comparison) -> dict[str, Any]:
    """All that a comparison says of the arms.

    Left out is what tells of the machine, and what counts attempts: a block that was cut off stays in the
    file, and in the numbers of samples and of loads that failed.
    """

    def said(row: Row | None) -> Row | None:
        return row and dataclasses.replace(
            row,
            vram_bytes=None,
            rss_bytes=None,
            samples=0,
            invalid_samples=0,
            invalid_reasons={},
            failed_loads={},
        )

    told = {each.name: getattr(found, each.name) for each in dataclasses.fields(found)}
    del told["run"], told["repeated_loads"]
    told |= {"rows": [said(row) for row in found.rows], "twin": said(found.twin)}
    return told | {"plan": found.header.plan_digest}


def differing(one: Comparison, other: Comparison) -> list[str]:
    first, second = analysis(one), analysis(other)
    return [part for part in first if first[part] != second[part]]


def order(run: Run) -> list[tuple[int, int, str]]:
    return [(load.block, load.attempt, load.label) for load in run.loads if load.stage == "block"]


def test_the_run_to_be_killed_repeats_a_block_and_goes_past_its_first_look(whole: Comparison) -> None:
    assert (whole.judgement.n, whole.finished, whole.repeated_loads) == (8, True, 3)
    assert sum(row.invalid_samples for row in whole.rows) == 2
    assert whole.judgement.contrasts["B", "A"].word == "DIFFERENT"


def test_one_seed_gives_one_order_and_one_analysis(runs: Runs, whole: Comparison, attained: Attained) -> None:
    assert runs.begin("same", "other", seed={"other": 2}) == [0, 0]
    same, other = (read(runs.find(name)) for name in ("same", "other"))

    assert order(same.run) == order(whole.run)
    assert order(other.run)[:12] != order(whole.run)[:12]
    assert lines_of(same.run) == lines_of(whole.run)
    attained("X2", "two runs of one seed, parts of the analysis that differ", len(differing(same, whole)), "=", 0, "")


def test_a_folder_gives_every_number_again_in_any_process(runs: Runs, whole: Comparison, attained: Attained) -> None:
    moved = runs.folder / "moved"
    shutil.copytree(whole.run.folder, moved)
    said = {repr(read(moved))}
    for seed in ("0", "1", "2"):
        environment = runs.environment | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", READ, str(moved)]
        said.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip())

    attained("X2", "one folder, different analyses of it in four processes", len(said), "=", 1, "")
    attained("X2", "lines of its report that the samples do not give", len(verify(moved)), "=", 0, "")


def test_killed_at_any_line_and_continued_a_run_says_what_it_would_have_said(
    runs: Runs, whole: Comparison, attained: Attained
) -> None:
    blocks = blocks_by_line(whole.run)
    draw = random.Random(20)
    lines = sorted(draw.sample(range(1, len(blocks) + 1), KILLS))
    kills = {f"killed-{number}": kill_at(line, draw.choice(KEPT), blocks) for number, line in enumerate(lines)}
    assert {kill.kept for kill in kills.values()} == set(KEPT)

    assert runs.begin(*kills, kills=kills) == [-signal.SIGKILL] * KILLS
    before = {name: (runs.find(name) / record.LINES).read_bytes() for name in kills}
    assert runs.resume(*kills) == [0] * KILLS

    cut_off, wrong = 0, {}
    for name in kills:
        found = read(runs.find(name))
        complete = before[name][: before[name].rfind(b"\n") + 1]
        assert (found.run.folder / record.LINES).read_bytes().startswith(complete), "what is written stays"
        assert lines_of(found.run) == lines_of(whole.run), name
        assert verify(found.run.folder) == [], name
        cut_off += len(found.run.loads) > len(whole.run.loads)
        if parts := differing(found, whole):
            wrong[name] = parts
    assert cut_off > KILLS / 3, "many a kill leaves loads of a block that was cut off"
    attained("X2", f"killed at {KILLS} random lines and continued, other analyses", len(wrong), "=", 0, "")


def test_a_load_of_a_block_that_was_cut_off_would_have_been_seen(runs: Runs, whole: Comparison) -> None:
    """A wrong resume, which goes on in the middle of a block, does not pass as above."""
    blocks = blocks_by_line(whole.run)
    kill = kill_at(blocks.index(5) + 6, "whole", blocks)
    assert runs.begin("wrong", kills={"wrong": kill}) == [-signal.SIGKILL]
    assert runs.resume("wrong", keeps_abandoned=True) == [0]

    assert differing(read(runs.find("wrong")), whole)
