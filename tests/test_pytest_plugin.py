"""The main door: one run, one round per load in pytest-benchmark, our table after its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert "Run folder:" in done.stdout
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
