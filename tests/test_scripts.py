"""The scripts that start from nothing but Python: run as a person runs them, on a copy with a tiny `uv`."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
LOCKS = [ROOT / "requirements.lock", ROOT / "requirements-dev.lock", ROOT / "backends/data/build-tools.lock"]
UV = """#!/bin/sh
echo "$@" >> "$NOTES/uv"
[ -z "$UV_SAYS" ] || { echo "$UV_SAYS"; exit 2; }
if [ "$1" = venv ]; then
  for venv; do :; done
  mkdir -p "$venv/bin" && cp "$NOTES/python" "$venv/bin/python"
  exit
fi
if [ -n "$WAIT_FOR" ]; then
  echo $$ > "$NOTES/pid"
  left=3000
  while [ ! -e "$WAIT_FOR" ] && [ $left -gt 0 ]; do sleep 0.02; left=$((left - 1)); done
fi
"""
PYTHON = """#!/bin/sh
if [ "$2" = backends.embedded_server ]; then
  [ -z "$ENGINE_SAYS" ] || { echo "$ENGINE_SAYS" >&2; exit 1; }
  exit
fi
echo "runs in $PWD: $@"
"""


class Checkout:
    """A copy of what the scripts need, without a network and without anything installed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notes, self.venv = folder / "checkout", folder / "notes", folder / "checkout/.venv"
        for path in (self.folder / "scripts", self.folder / "benchmarks", self.notes, folder / "bin"):
            path.mkdir(parents=True)
        for file in [*SCRIPTS, ROOT / "pyproject.toml", *LOCKS[:2]]:
            shutil.copy(file, self.folder / file.relative_to(ROOT))
        for path, text in ((folder / "bin/uv", UV), (self.notes / "python", PYTHON)):
            path.write_text(text)
            path.chmod(0o755)
        for name in ("sh", "cat", "cp", "mkdir", "sleep"):
            (folder / "bin" / name).symlink_to(shutil.which(name) or name)
        self.environment = {"PATH": str(folder / "bin"), "HOME": str(folder), "NOTES": str(self.notes)}

    @contextlib.contextmanager
    def start(self, *argv: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """In a process group of its own, as a terminal does; it is gone when the block ends."""
        with subprocess.Popen(
            [sys.executable, *argv],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's `&` has it ignored
        ) as process:
            try:
                yield process
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise

    def run(self, *argv: str, **environment: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        with self.start(*argv, **environment) as process:
            output, errors = process.communicate(timeout=60)
            return process.returncode, output, errors

    def installs(self) -> int:
        """How often the packages of a lock file were installed."""
        path = self.notes / "uv"
        return path.read_text().count("--require-hashes") if path.exists() else 0

    def wait_for(self, name: str, process: subprocess.Popen[str]) -> None:
        while not (self.notes / name).exists():
            assert process.poll() is None, process.stderr
            time.sleep(0.01)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


BENCH = ("scripts/bench.py", "--embedded-only")


def test_the_first_start_sets_up_and_the_second_goes_straight_on(checkout: Checkout) -> None:
    code, first, _ = checkout.run(*BENCH)
    assert code == 0
    assert "packages of requirements.lock: " in first
    assert first.splitlines()[-1].startswith(f"runs in {checkout.folder}: -m pytest --benchmark-only ")
    code, second, _ = checkout.run(*BENCH)
    assert (code, second) == (0, first.splitlines()[-1] + "\n")
    assert checkout.installs() == 1


def test_what_is_installed_is_locked_by_hash_and_the_project_brings_nothing_along(checkout: Checkout) -> None:
    checkout.run(*BENCH)
    _, packages, project = (checkout.notes / "uv").read_text().splitlines()
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(packages.split())
    assert {"--no-deps", "--no-build-isolation", "--editable"} <= set(project.split())


def test_the_tests_add_their_tools_and_the_benchmark_needs_no_second_set_up(checkout: Checkout) -> None:
    checkout.run(*BENCH, "--setup-only")
    assert "requirements-dev.lock: " in checkout.run("scripts/test.py", "--setup-only")[1]
    assert checkout.run(*BENCH, "--setup-only")[1] == "ready: .venv/bin/python -m pytest --benchmark-only\n"
    assert checkout.run("scripts/test.py", "-q")[1].endswith("pyproject.toml -q\n")
    assert (checkout.notes / "uv").read_text().count("venv ") == 1


def test_a_changed_lock_file_is_installed(checkout: Checkout) -> None:
    checkout.run(*BENCH)
    with (checkout.folder / "requirements.lock").open("a") as file:
        file.write("# changed\n")
    checkout.run(*BENCH)
    assert checkout.installs() == 2


def test_options_that_are_not_ours_go_to_pytest(checkout: Checkout) -> None:
    _, output, _ = checkout.run(*BENCH, "--duel-preset=quick", "--", "-k", "decode", "--help")
    assert output.splitlines()[-1].endswith("benchmarks --duel-preset=quick -k decode --help")
    _, output, _ = checkout.run(*BENCH, "benchmarks/test_duel.py::test_ttft")
    assert output.splitlines()[-1].endswith("pyproject.toml benchmarks/test_duel.py::test_ttft")


@pytest.mark.parametrize("script", ["scripts/bench.py", "scripts/test.py"])
def test_help_needs_no_set_up(checkout: Checkout, script: str) -> None:
    code, output, _ = checkout.run(script, "--help")
    assert code == 0
    assert "--setup-only" in output
    assert not checkout.venv.exists()


# ── what can go wrong ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("error: error sending request for url: dns error", "no package index can be reached"),
        ("ERROR: No matching distribution found for xllamacpp", "no wheel for this system"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("note: x\nerror: hash mismatch for scipy\n", "failed: error: hash mismatch for scipy (the whole log: "),
    ],
)
def test_a_failed_step_ends_in_one_sentence_and_is_repeated(checkout: Checkout, said: str, reason: str) -> None:
    code, _, errors = checkout.run(*BENCH, UV_SAYS=said)
    assert code == 1
    assert reason in errors
    assert len(errors.splitlines()) == 1
    assert checkout.run(*BENCH)[0] == 0


def test_a_venv_that_is_not_ours_is_left_alone(checkout: Checkout) -> None:
    (checkout.venv / "bin").mkdir(parents=True)
    code, _, errors = checkout.run(*BENCH)
    assert code == 1
    assert "was not made by this script" in errors
    assert [path.name for path in checkout.venv.iterdir()] == ["bin"]


def test_ctrl_c_says_one_line_and_the_next_start_repairs(checkout: Checkout) -> None:
    with checkout.start(*BENCH, WAIT_FOR="/nowhere/never") as process:
        checkout.wait_for("pid", process)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().startswith("interrupted")
    assert len(errors.strip().splitlines()) == 1
    assert checkout.run(*BENCH)[0] == 0
    assert checkout.installs() == 2


def test_after_a_kill_the_next_start_waits_for_the_orphan_and_does_all_again(checkout: Checkout) -> None:
    go_on = checkout.notes / "go-on"
    with checkout.start(*BENCH, WAIT_FOR=str(go_on)) as process:
        checkout.wait_for("pid", process)
        process.kill()
    with checkout.start(*BENCH) as process:
        assert process.stdout
        assert "another start is setting up .venv" in process.stdout.readline()
        go_on.touch()
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert ".venv with Python" in rest
    assert checkout.installs() == 2


def test_two_starts_at_once_set_up_once(checkout: Checkout) -> None:
    go_on = checkout.notes / "go-on"
    with checkout.start(*BENCH, WAIT_FOR=str(go_on)) as first:
        checkout.wait_for("pid", first)
        with checkout.start(*BENCH) as second:
            assert second.stdout
            assert "waiting for it" in second.stdout.readline()
            go_on.touch()
            assert second.communicate(timeout=60)[0].startswith("runs in ")
        first.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert checkout.installs() == 1


def test_an_embedded_engine_that_does_not_start_is_said_with_the_command(checkout: Checkout) -> None:
    said = "error: the system has no libgomp.so.1 (Debian: `apt-get install libgomp1`)"
    code, output, errors = checkout.run(*BENCH, ENGINE_SAYS=said)
    assert code == 1
    assert "runs in" not in output
    assert errors == "the embedded engine does not start: " + said.removeprefix("error: ") + "\n"
    assert checkout.run(*BENCH, ENGINE_SAYS=said, LLAMADUEL_LLAMA_SERVER="/opt/llama-server")[0] == 0


# ── Ollama ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LLAMADUEL_OLLAMA", raising=False)
    return importlib.import_module("bench")


@pytest.fixture
def installs(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that `bench` runs; each of them succeeds."""
    ran: list[list[str]] = []

    def run(argv: list[str]) -> bool:
        ran.append(argv[1:])
        return True

    monkeypatch.setattr(bench, "run", run)
    return ran


def test_ollama_is_built_where_no_gpu_is_seen(
    bench: ModuleType, installs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "has_gpu", lambda: False)
    bench.get_ollama()
    assert installs == [["engines", "install", "ollama"]]


def test_a_failed_build_of_ollama_names_the_way_without_it(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "has_gpu", lambda: False)
    monkeypatch.setattr(bench, "run", lambda argv: False)
    with pytest.raises(bench.Stopped, match="--embedded-only"):
        bench.get_ollama()


def test_a_program_on_path_or_named_by_the_person_is_taken(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not bench.given("ollama", ["--duel-preset=quick"])
    assert bench.given("llama-server", ["--duel-llama-server=/opt/llama-server"])
    monkeypatch.setenv("LLAMADUEL_LLAMA_SERVER", "/opt/llama-server")
    assert bench.given("llama-server", [])
    (tmp_path / "ollama").touch(0o755)
    assert bench.given("ollama", [])


def test_on_a_gpu_the_official_way_is_named_and_nothing_is_built(
    bench: ModuleType, installs: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "has_gpu", lambda: True)
    bench.get_ollama()
    assert "take the official one" in capsys.readouterr().out
    assert not installs


# ── old Pythons, other systems ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_old_pythons_can_read_the_scripts(script: Path) -> None:
    ast.parse(script.read_text(), feature_version=(3, 7))


@pytest.mark.parametrize(
    ("pretend", "sentence"),
    [
        ("sys.version_info = (3, 8, 18)", "Python 3.11 or newer is needed, this is 3.8"),
        ("sys.platform = 'win32'", "wsl --install"),
    ],
)
def test_an_old_python_and_windows_get_one_sentence(checkout: Checkout, pretend: str, sentence: str) -> None:
    start = f"{pretend}; sys.argv = ['bench.py']; runpy.run_path('scripts/bench.py')"
    code, output, errors = checkout.run("-c", f"import runpy, shutil, subprocess, sys; {start}", PYTHONPATH="scripts")
    assert (code, output) == (1, "")
    assert sentence in errors
    assert len(errors.splitlines()) == 1


def test_shell_scripts_can_be_started_and_stop_at_the_first_error() -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix]
    assert scripts
    for path in [*scripts, ROOT / ".ci/run"]:
        assert os.access(path, os.X_OK), path
        assert "set -euo pipefail" in path.read_text(), path


# ── lock files ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_locked_package_has_one_version_and_hashes_and_no_index_is_named(lock: Path) -> None:
    text = lock.read_text()
    entries = [entry for entry in re.split(r"\n(?=\S)", text) if not entry.startswith("#")]
    assert len(entries) >= 9
    assert all(re.match(r"[\w.-]+==[\w.]+ .*\\\n\s+--hash=sha256:", entry, re.DOTALL) for entry in entries)
    assert "://" not in text


def test_the_tests_run_on_the_very_packages_of_the_benchmark() -> None:
    locked, dev = ({line for line in lock.read_text().splitlines() if "==" in line} for lock in LOCKS[:2])
    assert locked < dev


def test_the_lock_files_have_all_that_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for lock, names in ((LOCKS[0], ["embedded"]), (LOCKS[1], ["embedded", "dev"])):
        locked = dict(re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE))
        for text in [*project["dependencies"], *(each for name in names for each in extras[name])]:
            wanted = Requirement(text)
            assert wanted.specifier.contains(locked.get(wanted.name, "0")), f"{text}: run scripts/lock"
