"""`plan`: which arms there really are, how much they need, how many loads, all before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import short_run
from played_run import OTHER, THIRD, contender, engine

from harness import listings, preview, process, record, synth, walk
from harness import machine as machines
from harness import model as models
from harness.cli import main
from harness.contract import Settings
from harness.display import quiet
from harness.options import Options
from harness.testing import engines
from harness.testing.script import Script

GIB = 1 << 30
CARD = Script(devices=(("CUDA0", "a card", 16000),))
ARTICLE = "llama-cpp@ncmoe=48,llama-cpp@ncmoe=44,llama-cpp@ncmoe=40,llama-cpp@ncmoe=36"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 40 layers, all with experts; no weights."""
    return synth.write(tmp_path_factory.mktemp("header") / "m.gguf", synth.SHAPES["qwen3.5-35b-a3b"], header_only=True)


@pytest.fixture
def header(written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That model, on a machine with room for it, whatever this one has."""
    here = machines.read()
    monkeypatch.setattr(machines, "read", lambda: dataclasses.replace(here, memory_bytes=64 * GIB))
    return written


@pytest.mark.parametrize("arms", [ARTICLE, "llama-cpp@ncmoe=48/44/40/36"])
def test_the_articles_four_arms_are_two_and_no_engine_loads_anything(
    arms: str, header: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = tmp_path / "starts"
    with engines.fake(tmp_path, dataclasses.replace(CARD, starts=str(starts))):
        assert main(["plan", str(header), "--arms", arms]) == 0

    out = " ".join(capsys.readouterr().out.split())
    assert "2 arms, not 4." in out
    assert "his model has 40 layers: ncmoe=48, ncmoe=44 and ncmoe=40 are one placement, all experts on the CPU" in out
    assert not starts.exists()


def test_a_plan_as_json_has_arms_bytes_loads_and_notes(
    header: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engines.fake(tmp_path, CARD):
        assert main(["plan", str(header), "--arms", ARTICLE, "--json", "--out", str(tmp_path / "runs")]) == 0

    found = json.loads(capsys.readouterr().out)
    first, *merged, last = found["arms"]
    assert [each["status"] for each in found["arms"]] == ["OK", "ALIAS", "ALIAS", "OK"]
    assert [each["alias_of"] for each in merged] == ["llama-cpp@ncmoe=48"] * 2
    assert found["loads"] == {"fewest": 6 * 3, "most": 24 * 3}, "two arms and the twin"
    assert found["minutes"] is None, "no run has told how fast this is"
    assert found["notes"][0].startswith("2 arms, not 4.")
    for each in (first, last):
        weights, context = each["predicted_device_weights_bytes"], each["predicted_device_context_bytes"]
        assert each["predicted_device_bytes"] == weights + context
        assert each["predicted_host_bytes"] > weights
        assert each["predicted_device_compute_bytes"] > 0
    assert last["predicted_device_weights_bytes"] > first["predicted_device_weights_bytes"]


def test_a_quick_run_has_no_twin(header: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, CARD):
        found = preview.preview_run(Options(model=str(header), arms=ARTICLE, preset="quick"), quiet)

    assert found["loads"] == {"fewest": 2 * 2, "most": 2 * 2}, "two arms in two blocks"


def test_without_a_gpu_the_plan_says_so(header: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script()):
        found = preview.preview_run(Options(model=str(header), arms="llama-cpp,llama-cpp@ngl=99,llama-cpp@cpu"), quiet)

    assert found["notes"][0].startswith("1 arm, not 3. No GPU: llama-cpp, ngl=99 and cpu are one placement.")


def test_arms_that_differ_are_not_talked_about(header: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, CARD):
        found = preview.preview_run(Options(model=str(header), arms="llama-cpp,llama-cpp@cpu-moe"), quiet)

    assert not [note for note in found["notes"] if "one placement" in note]


def test_an_engine_that_is_missing_is_no_arm_and_is_named(
    header: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engines.fake(tmp_path, CARD):
        missing = ["--ollama", str(tmp_path / "nowhere")]
        assert main(["plan", str(header), "--arms", f"ollama,{ARTICLE}", *missing]) == 0

    out = " ".join(capsys.readouterr().out.split())
    assert "2 arms, not 4." in out
    assert "UNAVAILABLE" in out
    assert "nowhere" in out


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(width: int, header: Path, tmp_path: Path) -> None:
    arms = f"ollama,llama-cpp,{ARTICLE},llama-cpp@cpu-moe"
    with engines.fake(tmp_path, CARD):
        found = preview.preview_run(Options(model=str(header), arms=arms), quiet)

    drawn = listings.preview_table(found, width)

    assert max(map(len, drawn.splitlines())) <= width
    assert "= llama-cpp@ncmoe=48" in drawn
    assert "experts of the first 36 of 40 layers" in drawn or width < 120


# ── minutes ─────────────────────────────────────────────────────────────────────────────────

options = partial(short_run.options, arms="ollama,llama-cpp")


@pytest.fixture(scope="module")
def ran(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run, with the times and states of a machine that is neither slow nor disturbed."""
    folder = tmp_path_factory.mktemp("ran")
    with engines.fake(folder, Script(itl_s=0.002)):
        run = walk.duel(options(model, folder / "runs"), quiet).run
        assert models.load(model).file.digest, "known from now on"
    header = json.loads((run.folder / record.HEADER).read_text("utf-8"))
    for each in header["contenders"]:
        each["status"] = {"word": "OK", "reason": "", "alias_of": None}
    (run.folder / record.HEADER).write_text(json.dumps(header), "utf-8")
    lines = [json.loads(line) for line in (run.folder / record.LINES).read_text("utf-8").splitlines()]
    for line in lines:
        if line["kind"] == "load" and line["stage"] == "block":
            line["ended_unix_s"] = line["started_unix_s"] = 1e9 + 90.0 * line["block"] + line["position"]
    (run.folder / record.LINES).write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    return folder


def planned(ran: Path, given: Options) -> Any:
    with engines.fake(ran, Script(itl_s=0.002)):
        return preview.preview_run(given, quiet)


def test_minutes_are_those_of_an_earlier_run_of_the_same_work(ran: Path, model: Path) -> None:
    found = planned(ran, options(model, ran / "runs"))

    (folder,) = (ran / "runs").iterdir()
    assert found["minutes"] == {"fewest": 3.0, "most": 3.0, "from": str(folder)}, "two blocks of 90 seconds"
    assert f"about 3 min, by the loads of {folder}" in " ".join(listings.preview_table(found).split())


@pytest.mark.parametrize(
    "changes",
    [{"out_tokens": 48}, {"context": 1024}, {"arms": "ollama,llama-cpp,llama-cpp@ngl=3,b=64"}, {"preset": "confirm"}],
    ids=str,
)
def test_a_run_of_other_work_tells_no_minutes(changes: dict[str, object], ran: Path, model: Path) -> None:
    assert planned(ran, options(model, ran / "runs", **changes))["minutes"] is None


def test_a_run_of_another_machine_or_a_damaged_one_tells_no_minutes(
    ran: Path, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (folder,) = (ran / "runs").iterdir()
    damaged = tmp_path / "runs" / "damaged"
    damaged.mkdir(parents=True)
    (damaged / record.HEADER).write_bytes((folder / record.HEADER).read_bytes()[:-100])
    assert planned(ran, options(model, tmp_path / "runs"))["minutes"] is None

    here = machines.read()
    monkeypatch.setattr(machines, "read", lambda: dataclasses.replace(here, cpu="another"))
    assert planned(ran, options(model, ran / "runs"))["minutes"] is None


@pytest.mark.parametrize(
    ("budget", "blocks", "said"),
    [
        (2.0, 2, "A budget of 2 min is less than 2 blocks take, the fewest there are (3 loads each, too few for a"),
        (13.0, 8, "A budget of 13 min holds 8 blocks (3 loads each)."),
        (600.0, 24, "A budget of 600 min holds 24 blocks (3 loads each)."),
    ],
)
def test_a_budget_is_told_in_blocks(ran: Path, model: Path, budget: float, blocks: int, said: str) -> None:
    confirm = {"preset": "confirm", "budget": budget}
    (folder,) = (ran / "runs").iterdir()
    header = folder / record.HEADER
    before = header.read_text("utf-8")
    header.write_text(before.replace('"preset": "quick"', '"preset": "confirm"'), "utf-8")
    try:
        found = planned(ran, options(model, ran / "runs", **confirm))
    finally:
        header.write_text(before, "utf-8")

    assert found["loads"]["most"] == 3 * blocks, "two arms and the twin"
    assert found["minutes"]["most"] == 1.5 * blocks, "blocks of 90 seconds"
    assert found["notes"][-1].startswith(said)


def test_what_a_budget_holds_is_not_known_before_anything_ran(header: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, CARD):
        given = Options(model=str(header), arms=ARTICLE, budget=20.0, out=str(tmp_path / "runs"))
        found = preview.preview_run(given, quiet)

    assert found["minutes"] is None
    assert found["notes"][-1].endswith("the probe tells: 2 at least, 24 at most.")


@pytest.mark.parametrize(
    ("minutes", "said"), [(1 / 60, "1 s"), (0.75, "45 s"), (1.0, "1 min"), (1.5, "1.5 min"), (20.0, "20 min")]
)
def test_a_budget_is_told_as_a_person_writes_it(minutes: float, said: str, header: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, CARD):
        given = Options(model=str(header), arms=ARTICLE, budget=minutes, out=str(tmp_path / "runs"))
        found = preview.preview_run(given, quiet)

    assert found["notes"][-1].startswith(f"How many blocks a budget of {said} holds, ")
    assert found["loads"] == {"fewest": 2 * 3, "most": 24 * 3}, "the blocks of that sentence, two arms and the twin"


def test_a_budget_does_not_change_a_preset_of_one_length(header: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, CARD):
        given = Options(model=str(header), arms=ARTICLE, budget=20.0, preset="quick", out=str(tmp_path / "runs"))
        found = preview.preview_run(given, quiet)

    assert found["loads"] == {"fewest": 2 * 2, "most": 2 * 2}
    assert found["notes"][-1] == "A budget of 20 min changes nothing: quick has 2 blocks, the fewest there are."


@pytest.mark.parametrize("preset", ["quick", "confirm"])
def test_a_run_on_the_smallest_budget_makes_the_fewest_loads_of_its_plan(
    preset: str, model: Path, tmp_path: Path
) -> None:
    given = options(model, tmp_path / "runs", arms="llama-cpp", preset=preset, budget=1 / 60)
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        expected = preview.preview_run(given, quiet)["loads"]["fewest"]
        drawn = walk.duel(given, quiet).header.plan

    assert drawn.max_blocks * len(drawn.arms) == expected


def test_the_synthetic_model_is_planned_for_as_many_blocks_as_it_runs(tmp_path: Path) -> None:
    with engines.fake(tmp_path, CARD):
        found = preview.preview_run(Options(arms="llama-cpp,llama-cpp@cpu"), quiet)

    assert found["loads"] == {"fewest": 6 * 3, "most": 6 * 3}


def test_a_plan_does_not_read_the_weights(model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, CARD):
        preview.preview_run(options(model, tmp_path), quiet)
        (facts,) = (process.cache_dir() / "models").iterdir()

    assert json.loads(facts.read_bytes())["digest"] == ""


@pytest.mark.parametrize("rpc", [True, False])
def test_arms_on_a_stand_in_that_their_engine_does_not_see_are_named(rpc: bool) -> None:
    """As the embedded wheel: it takes the placement and has no device to put it on."""
    settings = Settings(stand_in_bytes=12 << 30)
    arms = [contender(arm, settings=settings, engine=engine(rpc=rpc)) for arm in (OTHER, THIRD)]

    notes = list(preview._blind(arms))

    assert [f"{OTHER}, {THIRD} will be VOID" in note for note in notes] == [True] * (not rpc)
