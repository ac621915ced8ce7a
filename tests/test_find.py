"""`find` from the sweep to the confirmed answer, against engines whose speed by N is scripted."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import short_run

from harness import edge, synth, walk
from harness.display import quiet
from harness.errors import RunRefused, UsageError
from harness.plan import Status
from harness.probe import Progress
from harness.record import Run
from harness.testing import engines
from harness.testing.script import Script

LAYERS = 12
OOM = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 900.00 MiB on device 0: cudaMalloc failed: out of memory"
Curve = Callable[[int], Mapping[str, Any]]  # what an engine does that keeps the experts of N layers on the host


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with enough layers to search."""
    path = tmp_path_factory.mktemp("model") / "layered.gguf"
    synth.write(path, dataclasses.replace(synth.scaled(synth.SHAPES["tiny"], 16 << 20), layers=LAYERS))
    return path


options = partial(short_run.options, arms=f"ollama,llama-cpp@ncmoe=0..{LAYERS}")


def itl_s(n: int) -> float:
    return 0.002 + 0.0015 * n


def refusing(n: int) -> Mapping[str, Any]:
    return {"itl_s": itl_s(n)} if n >= 5 else {"dies_loading": OOM}


def spilling(n: int) -> Mapping[str, Any]:
    return {"itl_s": itl_s(n) if n >= 5 else 0.03}


def flat(n: int) -> Mapping[str, Any]:
    return {"itl_s": 0.004}


def tight(n: int) -> Mapping[str, Any]:
    """Close to the edge the card is so full that it is slower."""
    return {"itl_s": itl_s(n) * (1.6 if n < 7 else 1.0)} if n >= 5 else {"dies_loading": OOM}


def cases(curve: Curve) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = [{"when": f"--n-cpu-moe {n} ", **curve(n)} for n in range(LAYERS + 1)]
    return found


def speed(run: Run, stage: str, arm: str) -> list[float]:
    loads = [load for load in run.loads if load.stage == stage and load.arm == arm]
    return [each.decode_tps for load in loads for each in run.samples_of(load) if each.decode_tps]


@pytest.mark.parametrize(
    ("curve", "near"), [(refusing, range(5, 8)), (spilling, range(5, 8)), (tight, range(7, 10)), (flat, range(13))]
)
def test_the_best_of_thirteen_placements_is_found_in_ten_loads_and_measured_again(
    curve: Curve, near: range, layered: Path, tmp_path: Path
) -> None:
    card = Script(devices=(("CUDA0", "a card", 8000),))
    with engines.fake(tmp_path, card, cases=cases(curve)):
        comparison = walk.find_best(options(layered, tmp_path / "runs"), quiet)

    search = comparison.header.search
    assert search is not None
    assert search.candidates == tuple(f"llama-cpp@ncmoe={n}" for n in range(LAYERS + 1))
    assert sum(each.loads for each in search.tried) <= edge.MOST_LOADS
    assert int(search.chosen[0].rpartition("=")[2]) in near
    assert [row.arm for row in comparison.rows] == [*search.chosen, "ollama"]
    assert comparison.reference.arm == search.chosen[0]
    run = comparison.run
    for row in comparison.rows:  # what is told of the chosen comes from loads of the blocks alone
        assert len(row.loads) == comparison.judgement.n
        assert not {load.decode_tps for load in row.loads} & set(speed(run, "search", row.arm))
    assert walk.verify(run.folder) == []
    report = (run.folder / walk.REPORT).read_text(encoding="utf-8")
    assert "How the placement was found" in report
    searched = {f"{value:.1f}" for arm in search.candidates for value in speed(run, "search", arm)}
    section = report.partition("## How the placement was found")[2].partition("\n## ")[0]
    assert not [value for value in searched if value in section]


def test_the_find_ends_with_a_command_for_each_engine_that_can_be_told(layered: Path, tmp_path: Path) -> None:
    card = Script(devices=(("CUDA0", "a card", 8000),), itl_s=0.004)
    with engines.fake(tmp_path, card, cases=cases(refusing)):
        comparison = walk.find_best(options(layered, tmp_path / "runs", preset="confirm", budget=60.0), quiet)

    search = comparison.header.search
    assert search is not None
    assert all(f"ollama@{arm.partition('@')[2]}" in search.elsewhere[arm] for arm in search.chosen)
    if comparison.state.ranks:  # a machine too noisy for six blocks is called so, and then names no best
        assert comparison.best[0].arm in search.chosen
        from harness.terminal import table

        drawn, report = table(comparison), (comparison.run.folder / "report.md").read_text()
        arm, faster = comparison.best[0].arm, comparison.row("ollama").contrast
        on_ollama = f"ollama@{arm.partition('@')[2]}"
        if faster is not None and faster.word == "DIFFERENT" and faster.ratio > 1:
            assert "Take ollama, shown to be faster." in drawn
            assert f"To run ollama by hand ({arm} and {on_ollama} in the report):\n" in drawn
        else:
            assert f"To run {arm} by hand ({on_ollama} in the report):\n" in drawn
        assert "ollama run duel --verbose)\n" in report
        assert f"--n-cpu-moe {arm.rpartition('=')[2]}" in report.partition("## Can it be trusted")[0]


def test_a_run_without_a_search_has_no_best(layered: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        assert walk.duel(options(layered, tmp_path / "runs", arms="llama-cpp"), quiet).best == ()


def test_numbers_other_than_a_placement_are_searched_too(layered: Path, tmp_path: Path) -> None:
    card = Script(devices=(("CUDA0", "a card", 8000),), itl_s=0.004)
    by_batch = [{"when": f"-ub {ub} ", "dies_loading": OOM} for ub in (512, 448, 384)]
    with engines.fake(tmp_path, card, cases=by_batch):
        given = options(layered, tmp_path / "runs", arms="llama-cpp@cpu-moe,ub=64..512/64")
        comparison = walk.find_best(given, quiet)

    search = comparison.header.search
    assert search is not None
    assert search.over == "ub"
    assert search.candidates[0] == "llama-cpp@cpu-moe,ub=512"
    assert not {f"llama-cpp@cpu-moe,ub={ub}" for ub in (512, 448, 384)} & set(search.chosen)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arms": "ollama,llama-cpp"}, "has 0"),
        ({"arms": "llama-cpp@ncmoe=0..3,llama-cpp@ngl=0..3"}, "has 2"),
        ({"arms": "llama-cpp@ncmoe=0..3,ub=64..128/64"}, "one number, not over ncmoe and ub"),
        ({"reference": "ollama"}, "leave out --reference"),
    ],
)
def test_a_search_that_cannot_be_meant_is_refused_before_a_model_is_read(
    changes: dict[str, object], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        walk.find_best(options(tmp_path / "no.gguf", tmp_path / "runs", **changes), quiet)


def test_values_that_are_one_placement_are_nothing_to_search(layered: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script()), pytest.raises(RunRefused, match="one placement here"):
        walk.find_best(options(layered, tmp_path / "runs"), quiet)
    assert not (tmp_path / "runs").exists()


def test_a_model_that_loads_nowhere_says_so_for_every_value_tried(layered: Path, tmp_path: Path) -> None:
    card = Script(devices=(("CUDA0", "a card", 8000),), dies_loading=OOM)
    with engines.fake(tmp_path, card), pytest.raises(RunRefused, match=r"no value of ncmoe .*out of memory"):
        walk.find_best(options(layered, tmp_path / "runs", arms=f"llama-cpp@ncmoe=0..{LAYERS}"), quiet)


def test_a_candidate_that_fails_where_all_should_load_does_not_end_the_search(layered: Path, tmp_path: Path) -> None:
    card = Script(devices=(("CUDA0", "a card", 8000),))
    dying = [{"when": f"--n-cpu-moe {n} ", "dies_loading": "killed"} for n in (LAYERS - 1, LAYERS)]
    with engines.fake(tmp_path, card, cases=[*cases(refusing)[: LAYERS - 1], *dying]):
        comparison = walk.find_best(options(layered, tmp_path / "runs", arms=f"llama-cpp@ncmoe=0..{LAYERS}"), quiet)

    search = comparison.header.search
    assert search is not None
    assert int(search.chosen[0].rpartition("=")[2]) in range(5, 8)
    assert sum(each.loads for each in search.tried) <= edge.MOST_LOADS


def test_a_winner_that_fails_before_it_is_confirmed_leaves_it_to_the_next(layered: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    speeds = {"devices": [["CUDA0", "a card", 8000]], "cases": cases(refusing)}
    script.write_text(json.dumps(speeds))

    def break_the_winner(progress: Progress) -> None:
        if found := re.match(r"confirming llama-cpp@ncmoe=(\d+)", progress.text):
            dies = {"when": f"--n-cpu-moe {found[1]} ", "dies_loading": "killed"}
            script.write_text(json.dumps(speeds | {"cases": [*cases(refusing), dies]}))

    with engines.fake(tmp_path, Script()):
        os.environ["LLAMADUEL_FAKE"] = str(script)
        given = options(layered, tmp_path / "runs", arms=f"llama-cpp@ncmoe=0..{LAYERS}")
        comparison = walk.find_best(given, break_the_winner)

    search = comparison.header.search
    assert search is not None
    assert comparison.row(search.chosen[0]).status.word is Status.CRASHED
    assert comparison.reference.arm == search.chosen[1]


def test_the_search_is_what_a_continued_run_keeps(layered: Path, tmp_path: Path) -> None:
    card = Script(devices=(("CUDA0", "a card", 8000),))
    with engines.fake(tmp_path, card, cases=cases(refusing)):

        def stop(progress: Progress) -> None:
            if progress.done:
                raise KeyboardInterrupt

        begun = walk.find_best(options(layered, tmp_path / "runs"), stop)
        assert not begun.finished
        again = options(layered, tmp_path / "runs", resume=str(begun.run.folder))  # as it was typed, and --resume
        resumed = walk.find_best(again, quiet)
    assert resumed.finished
    assert resumed.header.search == begun.header.search
    assert {row.status.word for row in resumed.rows} <= {Status.OK, Status.UNSTABLE}
