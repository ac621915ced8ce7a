"""The main door: one run, one round per load in pytest-benchmark, our table after its own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_changes import CARD, finished
from test_changes import SHORT as AS_BEGUN
from test_changes import begun as begun

from harness import plan
from harness.plan import ArmStatus, Status
from harness.record import Header
from harness.testing import engines
from harness.testing.script import Script

ROOT = Path(__file__).parent.parent
SHORT = (
    "--duel-preset=quick", "--duel-no-wait", "--duel-out-tokens=16", "--duel-prompt-tokens=64", "--duel-context=512",
)  # fmt: skip


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    tests = str(ROOT / "benchmarks")
    return subprocess.run(
        [*argv, tests, *arguments], cwd=folder, env=os.environ, capture_output=True, text=True, check=False
    )


@pytest.fixture
def measured(model: Path, tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    with engines.fake(tmp_path, Script(itl_s=0.003)):
        out = f"--duel-out={tmp_path / 'runs'}"
        done = run_pytest(
            tmp_path,
            "--benchmark-only",
            f"--duel-model={model}",
            out,
            *SHORT,
            f"--benchmark-json={tmp_path / 'b.json'}",
        )
    return done, tmp_path / "b.json"


def test_every_load_is_one_round_and_every_other_arm_a_skip_with_its_reason(
    measured: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, path = measured

    assert done.returncode == 0, done.stdout + done.stderr
    assert "= llama-cpp (no GPU: one placement)" in done.stdout
    assert "Report: " in done.stdout
    assert "block 1" in done.stdout + done.stderr, "progress is shown while it runs"
    found = {each["name"]: each for each in json.loads(path.read_text())["benchmarks"]}
    arms = ("ollama", "llama-cpp")
    assert set(found) == {f"test_{metric}[{arm}]" for metric in ("decode", "prefill", "ttft") for arm in arms}
    decode = found["test_decode[llama-cpp]"]
    assert decode["stats"]["rounds"] == 2
    per_token_s = 1 / decode["extra_info"]["decode_tps"]["value"]
    assert decode["stats"]["mean"] == pytest.approx(per_token_s, rel=0.2), "seconds, so that bigger is worse"
    assert decode["extra_info"]["arm"] == "llama-cpp"
    assert "/" not in decode["param"], "an id that is stable from machine to machine"


def test_without_benchmark_only_no_engine_is_started(model: Path, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    with engines.fake(tmp_path, Script(starts=str(starts))):
        done = run_pytest(tmp_path, f"--duel-model={model}", *SHORT)

    assert done.returncode == 5, "no test ran"
    assert "12 deselected" in done.stdout
    assert not starts.exists()


def test_a_choice_of_tests_never_changes_the_plan(model: Path, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    with engines.fake(tmp_path, Script(itl_s=0.002, starts=str(starts))):
        out = f"--duel-out={tmp_path / 'runs'}"
        done = run_pytest(tmp_path, "--benchmark-only", f"--duel-model={model}", out, *SHORT, "-k", "ttft and ollama")

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(starts.read_text().splitlines()) >= 6, "both arms were probed and ran in two blocks"


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--duel-arms=olama", "did you mean 'ollama'?"),
        ("--duel-margin=x", "--duel-margin 'x': takes a percentage"),
        ("--duel-model=missing.gguf", "nothing was compared: "),
        ("--numprocesses=2", "without pytest-xdist"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, option: str, sentence: str) -> None:
    fake_xdist = tmp_path / "fake_xdist.py"
    fake_xdist.write_text("def pytest_addoption(parser):\n    parser.addoption('--numprocesses', type=int)\n")
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        with engines.fake(tmp_path, Script()):
            done = run_pytest(tmp_path, "-p", "fake_xdist", "--benchmark-only", option)
    finally:
        del os.environ["PYTHONPATH"]

    assert done.returncode not in (0, 5)
    assert sentence in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


# ── a baseline ──────────────────────────────────────────────────────────────────────────────


def replay(folder: Path, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The benchmarks on a run that is finished: no engine starts, and every speed is given."""
    with engines.fake(tmp_path / "fakes", dataclasses.replace(CARD, dies_loading="loaded")):
        arms = f"--duel-arms={AS_BEGUN['arms']}"
        return run_pytest(tmp_path, "--benchmark-only", f"--duel-resume={folder}", arms, "--duel-no-wait", *arguments)


def without(header: Header, arm: str) -> Header:
    """The same run as it would have begun, had this arm crashed in the probe."""
    contenders = tuple(
        dataclasses.replace(each, status=ArmStatus(Status.CRASHED, "it died")) if each.arm == arm else each
        for each in header.contenders
    )
    drawn = plan.make(
        [each.arm for each in contenders if each.status.word is Status.OK],
        seed=1,
        prompts_digest=header.plan.prompts_digest,
        weights_digest=header.plan.weights_digest,
        out_tokens=header.plan.out_tokens,
        settings=dict(header.plan.settings),
    )
    return dataclasses.replace(header, contenders=contenders, plan=drawn)


def test_each_test_of_an_arm_that_lost_speed_since_the_baseline_fails_with_the_sentence(
    begun: Header, tmp_path: Path
) -> None:
    base = finished(begun, tmp_path / "base")

    same = replay(finished(begun, tmp_path / "same", base), tmp_path)
    slow = replay(finished(begun, tmp_path / "slow", base, moe=35.0), tmp_path)

    assert same.returncode == 0, same.stdout + same.stderr
    assert "llamaduel: since the baseline" in same.stdout
    assert slow.returncode == 1, slow.stdout + slow.stderr
    failed = re.findall(r"^FAILED \S+::(\S+)", slow.stdout, re.MULTILINE)
    assert failed == [f"test_{metric}[llama-cpp@cpu-moe]" for metric in ("decode", "prefill", "ttft")]
    assert re.search(
        r"llama-cpp@cpu-moe is slower than before \(0\.87\d×, .*by more than 3 %: a regression", slow.stdout
    )


def test_an_arm_that_is_lost_since_the_baseline_is_a_failure_and_no_skip(begun: Header, tmp_path: Path) -> None:
    base = finished(begun, tmp_path / "base")
    done = replay(finished(without(begun, "llama-cpp@cpu-moe"), tmp_path / "lost", base), tmp_path)

    assert done.returncode == 1
    assert "3 failed, 3 passed" in done.stdout
    assert "llama-cpp@cpu-moe is lost, a regression: it ran before, now CRASHED: it died." in done.stdout


def test_a_baseline_that_decides_nothing_is_no_pass(begun: Header, tmp_path: Path) -> None:
    base = finished(begun, tmp_path / "base")
    other = dataclasses.replace(begun, plan=dataclasses.replace(begun.plan, warmups=2))
    done = replay(finished(other, tmp_path / "other", base), tmp_path)

    assert done.returncode == 1
    assert "not one arm could be judged, so no regression is excluded: warmups was 1, is 2" in done.stdout


def test_a_baseline_that_is_not_there_is_told_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script(dies_loading="loaded")):
        gone = "--duel-fail-on-regression=nowhere"
        done = run_pytest(tmp_path, "--benchmark-only", f"--duel-model={model}", gone, "--duel-no-wait")

    assert done.returncode == 2
    assert "nothing was compared: there is no baseline to compare with: nowhere holds no run" in done.stdout


def test_the_gate_of_pytest_benchmark_still_works(begun: Header, tmp_path: Path) -> None:
    storage = f"--benchmark-storage=file://{tmp_path / 'saved'}"
    against = [storage, "--benchmark-compare", "--benchmark-compare-fail=median:5%"]

    saved = replay(finished(begun, tmp_path / "a"), tmp_path, storage, "--benchmark-save=base")
    same = replay(finished(begun, tmp_path / "b"), tmp_path, *against)
    slow = replay(finished(begun, tmp_path / "c", moe=35.0), tmp_path, *against)

    assert (saved.returncode, same.returncode) == (0, 0), same.stdout + same.stderr
    assert slow.returncode != 0
    assert "Performance has regressed" in slow.stdout + slow.stderr
