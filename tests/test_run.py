"""The whole walk against engines with scripted speed: real processes, real HTTP, known truth."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from short_run import options

from harness import process, record
from harness import run as runs
from harness.display import quiet
from harness.errors import RunRefused, UsageError
from harness.model import load
from harness.options import Options
from harness.plan import Status
from harness.probe import Progress, Watch
from harness.terminal import table
from harness.testing import engines
from harness.testing.script import Script
from harness.walk import duel, read, verify, write_report

FAST = Script(itl_s=0.004)
MEASURED = {Status.OK, Status.UNSTABLE}  # a stalled machine makes clocks disagree, and that is no fault of ours


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[engines.Engines]:
    with engines.fake(tmp_path, FAST) as found:
        yield found


def nothing_is_left() -> bool:
    return not [
        each
        for each in psutil.process_iter()
        if process._environ(each).get(process.OWNER) == process.owner() and each.pid != os.getpid()
    ]


def test_a_run_leaves_a_folder_that_verifies_and_no_process(
    fakes: engines.Engines, model: Path, tmp_path: Path
) -> None:
    comparison = duel(options(model, tmp_path / "runs"), quiet)

    assert [row.arm for row in comparison.rows] == ["ollama", "llama-cpp"]
    assert {row.status.word for row in comparison.rows} <= MEASURED
    assert all(row.output_ok for row in comparison.rows)
    assert len({row.weights_digest for row in comparison.rows}) == 1
    assert comparison.rows[0].weights_digest is not None
    assert verify(comparison.run.folder) == []
    assert nothing_is_left()


def test_an_arm_at_half_speed_is_found_different(model: Path, tmp_path: Path) -> None:
    slow = [{"when": "--cpu-moe", "itl_s": 0.012}]
    gpu = Script(itl_s=0.006, devices=(("CUDA0", "a card", 8000),))
    with engines.fake(tmp_path, gpu, cases=slow):
        arms = "llama-cpp@ngl=99,llama-cpp@cpu-moe"
        comparison = duel(options(model, tmp_path / "runs", arms=arms, preset="confirm", budget=0.01), quiet)
        # a budget of less than a second leaves one pair of blocks: numbers, no claims
        assert comparison.state.word == "SCREENING"

        comparison = duel(options(model, tmp_path / "runs", arms=arms, preset="confirm", budget=60.0), quiet)

    contrast = comparison.row("llama-cpp@cpu-moe").contrast
    assert contrast is not None
    assert contrast.ratio == pytest.approx(0.5, rel=0.15)
    assert comparison.judgement.n >= 6
    if comparison.state.ranks:  # a machine too noisy for six blocks is called so, and then ranks nothing
        assert contrast.word == "DIFFERENT"


def test_every_load_of_the_plan_is_one_engine_start(model: Path, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    with engines.fake(tmp_path, Script(itl_s=0.002, starts=str(starts))):
        comparison = duel(options(model, tmp_path / "runs"), quiet)

    assert len(starts.read_text().splitlines()) == len(comparison.run.loads)
    assert {load.stage for load in comparison.run.loads} == {"probe", "block"}


def test_stock_settings_leave_every_engine_its_own(fakes: engines.Engines, model: Path, tmp_path: Path) -> None:
    comparison = duel(options(model, tmp_path / "runs", arms="llama-cpp", settings="stock"), quiet)

    (contender,) = comparison.header.contenders
    assert contender.realised is not None
    assert not {"-c", "-b", "-ub", "-t", "-fa", "-ctk", "-ctv"} & set(contender.realised.argv)
    assert comparison.row("llama-cpp").decode_tps is not None


def test_without_a_device_placements_are_one_and_run_once(fakes: engines.Engines, model: Path, tmp_path: Path) -> None:
    comparison = duel(options(model, tmp_path, arms="llama-cpp,llama-cpp@ngl=99,llama-cpp@cpu-moe"), quiet)

    assert comparison.row("llama-cpp").status.word in MEASURED
    assert [row.status.word for row in comparison.rows[1:]] == [Status.ALIAS, Status.ALIAS]
    assert comparison.row("llama-cpp@cpu-moe").status.alias_of == "llama-cpp"
    assert {load.arm for load in comparison.run.loads} == {"llama-cpp"}


def test_an_engine_that_is_missing_is_a_row_with_the_next_step(model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, FAST) as found:
        found.ollama.unlink()
        os.environ["PATH"] = str(found.bin)
        comparison = duel(options(model, tmp_path / "runs"), quiet)

    row = comparison.row("ollama")
    assert row.status.word is Status.UNAVAILABLE
    assert "llamaduel engines install ollama" in row.status.reason
    assert comparison.row("llama-cpp").decode_tps is not None


def test_an_arm_that_dies_loading_is_a_row_and_not_the_end(model: Path, tmp_path: Path) -> None:
    dies = [{"when": "--cpu-moe", "dies_loading": "GGML_ASSERT(false) failed", "exit_code": -6}]
    with engines.fake(tmp_path, Script(itl_s=0.002, devices=(("CUDA0", "a card", 8000),)), cases=dies):
        comparison = duel(options(model, tmp_path, arms="llama-cpp@ngl=99,llama-cpp@cpu-moe"), quiet)

    row = comparison.row("llama-cpp@cpu-moe")
    assert row.status.word is Status.CRASHED
    assert "SIGABRT" in row.status.reason
    assert comparison.row("llama-cpp@ngl=99").status.word in MEASURED


def test_if_no_arm_runs_the_run_is_refused_with_every_reason(model: Path, tmp_path: Path) -> None:
    with (
        engines.fake(tmp_path, Script(dies_loading="unknown model architecture: 'qwen9'")),
        pytest.raises(RunRefused, match=r"no arm can be measured.*ollama, llama-cpp: .*qwen9"),
    ):
        duel(options(model, tmp_path), quiet)


def test_if_no_value_of_a_long_sweep_fits_the_sentence_has_the_two_ends(model: Path, tmp_path: Path) -> None:
    last = load(model).blocks
    card = Script(devices=(("CUDA0", "a card", 1),))
    with engines.fake(tmp_path, card), pytest.raises(RunRefused, match="no arm can be measured") as refused:
        duel(options(model, tmp_path, arms=f"llama-cpp@ncmoe=0..{last}"), quiet)

    told = str(refused.value)
    assert told.count(" asked of CUDA0 ") == 2
    assert all(f"ncmoe={value}:" in told for value in (0, last))
    assert f"; and {last - 1} more, of the arms between" in told


def test_wrong_output_is_void_however_fast(model: Path, tmp_path: Path) -> None:
    wrong = [{"when": "--cpu-moe", "words": ["nonsense", "again"]}]
    with engines.fake(tmp_path, Script(itl_s=0.002, devices=(("CUDA0", "a card", 8000),)), cases=wrong):
        comparison = duel(options(model, tmp_path, arms="llama-cpp@ngl=99,llama-cpp@cpu-moe"), quiet)

    row = comparison.row("llama-cpp@cpu-moe")
    assert row.status.word is Status.VOID
    assert "known answer" in row.status.reason


def test_output_that_goes_wrong_later_makes_the_arm_void(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    right = {"itl_s": 0.002, "devices": [["CUDA0", "a card", 8000]]}
    script.write_text(json.dumps(right))

    def turn_wrong(progress: Progress) -> None:
        if progress.text.startswith("block 2"):
            script.write_text(json.dumps(right | {"cases": [{"when": "--cpu-moe", "words": ["nonsense"]}]}))

    with engines.fake(tmp_path, FAST):
        os.environ["LLAMADUEL_FAKE"] = str(script)
        arms = "llama-cpp@ngl=99,llama-cpp@cpu-moe"
        comparison = duel(options(model, tmp_path / "runs", arms=arms), turn_wrong)

    row = comparison.row("llama-cpp@cpu-moe")
    assert row.status.word is Status.VOID
    assert row.output_ok is False
    assert row.contrast is None, "nothing is ranked with it"
    assert "WRONG on llama-cpp@cpu-moe" in (comparison.run.folder / "report.md").read_text()


def turning(script: Path, before: dict[str, object], after: dict[str, object], when: str) -> Watch:
    """Changes what the fake engines do at the first progress that begins so."""
    script.write_text(json.dumps(before))

    def watch(progress: Progress) -> None:
        if progress.text.startswith(when):
            script.write_text(json.dumps(before | after))

    return watch


def test_one_wrong_answer_among_many_right_ones_makes_the_arm_void(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    right: dict[str, object] = {"itl_s": 0.002, "devices": [["CUDA0", "a card", 8000]]}
    wrong: dict[str, object] = {"cases": [{"when": "--cpu-moe", "words": ["nonsense"]}]}
    turn = turning(script, right, wrong, "block 1: llama-cpp@cpu-moe")

    def watch(progress: Progress) -> None:
        turn(progress)
        if progress.lasting and progress.text.startswith("block 1: llama-cpp@cpu-moe"):
            script.write_text(json.dumps(right))  # and from here on it is right again

    with engines.fake(tmp_path, FAST):
        os.environ["LLAMADUEL_FAKE"] = str(script)
        comparison = duel(options(model, tmp_path / "runs", arms="llama-cpp@ngl=99,llama-cpp@cpu-moe"), watch)

    row = comparison.row("llama-cpp@cpu-moe")
    assert row.status.word is Status.VOID
    assert not row.loads
    assert "known answer" in table(comparison)


def test_weights_placed_otherwise_after_the_probe_make_the_arm_void(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    card: dict[str, object] = {"itl_s": 0.002, "devices": [["CUDA0", "a card", 8000]]}
    elsewhere = {"cases": [{"when": "--cpu-moe", "buffers": [["CUDA0", "model", 500.0], ["CPU", "model", 1.0]]}]}
    with engines.fake(tmp_path, FAST):
        os.environ["LLAMADUEL_FAKE"] = str(script)
        arms = "llama-cpp@ngl=99,llama-cpp@cpu-moe"
        watch = turning(script, card, dict(elsewhere), "block 1")
        comparison = duel(options(model, tmp_path / "runs", arms=arms), watch)

    status = comparison.row("llama-cpp@cpu-moe").status
    assert status.word is Status.VOID
    assert "where" in status.reason
    assert "were predicted" in status.reason


def test_an_engine_that_chooses_anew_in_each_load_is_said_to(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    held = [["CUDA0", "model", 20.0], ["CUDA0", "KV", 1.0], ["CPU", "model", 20.0]]
    less = [["CUDA0", "model", 5.0], ["CUDA0", "KV", 1.0], ["CPU", "model", 35.0]]
    card: dict[str, object] = {"itl_s": 0.002, "devices": [["CUDA0", "a card", 8000]], "buffers": held}
    with engines.fake(tmp_path, FAST):
        os.environ["LLAMADUEL_FAKE"] = str(script)
        watch = turning(script, card, {"buffers": less}, "block 2")
        comparison = duel(options(model, tmp_path / "runs", arms="ollama,llama-cpp"), watch)

    told = " ".join(comparison.state.reasons)
    assert "llama-cpp did not place the weights alike in all its loads: 6.00 MiB to 21.0 MiB on the device" in told
    assert comparison.row("llama-cpp").realised_device_bytes == 6 << 20


def test_a_reference_that_dies_leaves_no_result_and_says_why(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    with engines.fake(tmp_path, FAST):
        os.environ["LLAMADUEL_FAKE"] = str(script)
        watch = turning(script, {"itl_s": 0.002}, {"dies_loading": "segmentation fault"}, "block 1")
        comparison = duel(options(model, tmp_path / "runs", arms="llama-cpp"), watch)

    assert not comparison.has_numbers
    assert "llama-cpp, the reference, has no numbers (CRASHED" in table(comparison)


def test_an_arm_with_hosts_in_it_can_be_the_reference(model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script(itl_s=0.002, devices=(("CUDA0", "a card", 8000),))):
        arms = "llama-cpp@ngl=99,rpc=127.0.0.1:1,llama-cpp@cpu-moe"
        comparison = duel(options(model, tmp_path / "runs", arms=arms), quiet)

    assert comparison.reference.arm == "llama-cpp@ngl=99,rpc=127.0.0.1:1"


def test_a_model_that_changes_under_the_run_ends_it(fakes: engines.Engines, model: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(model.read_bytes())

    def replace(progress: Progress) -> None:
        if "block 1" in progress.text and progress.lasting:
            other = tmp_path / "other.gguf"
            other.write_bytes(model.read_bytes())
            other.replace(mine)

    with pytest.raises(RunRefused, match="changed while it was measured"):
        duel(options(mine, tmp_path / "runs", arms="llama-cpp"), replace)


def test_one_folder_is_written_by_one_process(fakes: engines.Engines, model: Path, tmp_path: Path) -> None:
    given = options(model, tmp_path / "runs", preset="confirm", budget=60.0)
    with begin(given) as running:
        wait_for(running, "block 2")
        (folder,) = (tmp_path / "runs").iterdir()
        with pytest.raises(RunRefused, match="another process"):
            duel(Options(resume=str(folder), no_wait=True), quiet)
        running.send_signal(signal.SIGINT)
        assert running.stdout is not None
        running.stdout.read()
    assert verify(folder) == []


def test_a_run_is_continued_with_its_own_options(fakes: engines.Engines, model: Path, tmp_path: Path) -> None:
    folder = duel(options(model, tmp_path / "runs", arms="llama-cpp"), quiet).run.folder

    with pytest.raises(UsageError, match="--arms ollama does not go with --resume"):
        duel(Options(resume=str(folder), arms="ollama"), quiet)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"reference": "ollama"}, "ollama is to be compared and cannot run: "),
        ({"reference": "llama-cpp,llama-cpp@cpu"}, "the reference is one arm"),
        ({"contrast": ("llama-cpp:llama-cpp@cpu-moe",)}, "compares one placement with itself"),
        ({"contrast": ("llama-cpp:llama-cpp@cpu",)}, "is no contrast of two arms"),
    ],
)
def test_what_cannot_be_compared_is_told_before_anything_is_loaded(
    model: Path, tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    with engines.fake(tmp_path, Script(dies_loading="loaded")) as found:
        found.ollama.unlink()
        os.environ["PATH"] = str(found.bin)
        with pytest.raises(UsageError, match=sentence):
            duel(options(model, tmp_path / "runs", arms="llama-cpp,llama-cpp@cpu-moe,ollama", **changes), quiet)

    assert not (tmp_path / "runs").exists()


def test_an_alias_as_reference_is_the_arm_that_it_stands_for(
    fakes: engines.Engines, model: Path, tmp_path: Path
) -> None:
    arms = "ollama,llama-cpp,llama-cpp@cpu-moe"
    comparison = duel(options(model, tmp_path / "runs", arms=arms, reference="llama-cpp@cpu-moe"), quiet)

    assert comparison.reference.arm == "llama-cpp"
    assert "--reference=llama-cpp" in comparison.header.command
    assert "--seed=1" in comparison.header.command


def test_a_run_that_never_began_names_its_logs_or_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script(dies_loading="no")), pytest.raises(RunRefused, match=r"logs are in .*engines"):
        duel(options(model, tmp_path / "runs", arms="llama-cpp"), quiet)


def test_a_cached_prompt_is_invalid_and_told(model: Path, tmp_path: Path) -> None:
    with (
        engines.fake(tmp_path, Script(itl_s=0.002, cached=5)),
        pytest.raises(RunRefused, match="5 prompt tokens came from a cache"),
    ):
        duel(options(model, tmp_path, arms="llama-cpp"), quiet)


KILLED = """
import os, sys
from harness.options import Options
from harness.walk import duel
duel(Options(**{options!r}), lambda progress: print(progress.text, flush=True))
"""


def begin(given: Options) -> subprocess.Popen[str]:
    values = {name: getattr(given, name) for name in given.__dataclass_fields__}
    return subprocess.Popen(
        [sys.executable, "-c", KILLED.format(options=values)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(running: subprocess.Popen[str], text: str) -> None:
    assert running.stdout is not None
    for line in running.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} never came")


def await_end(mark: str) -> None:
    deadline = time.monotonic() + 30
    while any(process._environ(each).get(process.OWNER, "") == mark for each in psutil.process_iter()):
        assert time.monotonic() < deadline, "an engine outlived its harness"
        time.sleep(0.05)


def test_killed_it_leaves_no_engine_and_goes_on_where_it_was(
    fakes: engines.Engines, model: Path, tmp_path: Path
) -> None:
    given = options(model, tmp_path / "runs", preset="confirm", budget=0.2)
    with begin(given) as running:
        wait_for(running, "block 2")
        mark = process.mark_of(running.pid)
        running.send_signal(signal.SIGKILL)
    await_end(mark)
    (folder,) = (tmp_path / "runs").iterdir()
    before = record.read(folder)
    assert any(load.stage == "block" for load in before.loads), "samples so far are readable"
    with (folder / record.LINES).open("ab") as lines:
        lines.write(b'{"format":1,"kind":"sam')  # the kill came in the middle of a line

    comparison = duel(Options(resume=str(folder), no_wait=True), quiet)

    assert comparison.header == before.header, "the plan and its digest never change"
    assert comparison.run.loads[: len(before.loads)] == before.loads
    assert verify(folder) == []
    again = duel(Options(resume=str(folder), no_wait=True), quiet)
    assert again.run.loads == comparison.run.loads, "nothing is left to do"


def test_ctrl_c_keeps_a_readable_run(fakes: engines.Engines, model: Path, tmp_path: Path) -> None:
    with begin(options(model, tmp_path / "runs", preset="confirm", budget=60.0)) as running:
        wait_for(running, "block 2")
        mark = process.mark_of(running.pid)
        running.send_signal(signal.SIGINT)
        assert running.stdout is not None
        running.stdout.read()
    await_end(mark)

    (folder,) = (tmp_path / "runs").iterdir()
    stopped = read(folder)
    assert stopped.blocks_run >= 1
    assert not stopped.finished
    assert "It was stopped;" in (folder / "report.md").read_text()
    assert verify(folder) == []


def test_a_run_on_another_engine_build_is_not_continued(model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, FAST):
        folder = duel(options(model, tmp_path / "runs", arms="llama-cpp"), quiet).run.folder
    with (
        engines.fake(tmp_path / "newer", Script(version="12000")),
        pytest.raises(RunRefused, match=r"llama\.cpp b11434 is now llama\.cpp b12000"),
    ):
        duel(Options(resume=str(folder), no_wait=True), quiet)


def test_a_changed_sample_or_report_does_not_verify(fakes: engines.Engines, model: Path, tmp_path: Path) -> None:
    folder = duel(options(model, tmp_path / "runs", arms="llama-cpp"), quiet).run.folder
    lines = (folder / record.LINES).read_text().splitlines()
    for number, line in enumerate(lines):
        data = json.loads(line)
        if data["kind"] == "sample" and data["load"].startswith("block") and not data["sample"]["warmup"]:
            data["sample"]["chunk_ns"][-1] += 50_000_000
            data["sample"]["usage"]["decode_s"] += 0.05
            lines[number] = json.dumps(data)
    (folder / record.LINES).write_text("\n".join(lines) + "\n")

    assert any("the samples give" in problem for problem in verify(folder))


def test_a_changed_page_or_chart_does_not_verify_and_a_new_report_mends_it(
    fakes: engines.Engines, model: Path, tmp_path: Path
) -> None:
    folder = duel(options(model, tmp_path / "runs", arms="llama-cpp,ollama"), quiet).run.folder
    chart = sorted((folder / "charts").glob("*.svg"))[0]
    stray = folder / "charts" / "earlier-light.svg"
    for path in (folder / "report.html", chart):
        whole = path.read_text("utf-8")
        path.write_text(whole.replace("ollama", "0llama", 1), "utf-8")
        assert [problem for problem in verify(folder) if path.name in problem]
        path.write_text(whole, "utf-8")
    assert verify(folder) == []

    stray.write_text("<svg/>", "utf-8")
    chart.write_text("", "utf-8")
    write_report(folder)

    assert verify(folder) == []
    assert not stray.exists(), "a chart of an earlier report is not of this one"


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    for command in (read, verify):
        with pytest.raises(RunRefused, match="holds no run"):
            command(tmp_path)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("llamaduel tiny 154MiB, known answer", "llamaduel-tiny-154mib-known-answer"),
        ("Qwen3.5 35B-A3B Instruct UD-Q4_K_XL imatrix longer", "qwen3-5-35b-a3b-instruct-ud-q4-k-xl-imatrix"),
        ("x" * 60 + " 7B", "x" * 48),
        ("//..//", "model"),
    ],
)
def test_a_run_folder_is_named_by_whole_words_of_the_model(name: str, slug: str) -> None:
    assert runs.slug(name) == slug
    assert len(slug) <= 48
