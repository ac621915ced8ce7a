"""For all tests: nothing depends on the speed of the machine, and the same examples are tried each time."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
from pathlib import Path

import pytest
from truth.table import attained as attained
from truth.table import pytest_terminal_summary as pytest_terminal_summary

from harness import synth

with contextlib.suppress(ModuleNotFoundError):  # `pytest --benchmark-only` needs none of the test tools
    from hypothesis import settings

    settings.register_profile("llamaduel", deadline=None, derandomize=True, database=None)
    settings.load_profile("llamaduel")

# A shell without job control starts background jobs deaf to Ctrl-C, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


if importlib.util.find_spec("hypothesis") is None:  # a user's environment: there are benchmarks and no tests
    collect_ignore_glob = ["test_*.py", "truth/*"]


@pytest.fixture(autouse=True)
def options_of_the_user_stay_outside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that names an engine or a preset decides nothing, but where real engines are tested."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)  # a job's page is for its own runs
    if request.node.get_closest_marker("engine") is None:
        for name in [name for name in os.environ if name.startswith("LLAMADUEL_")]:
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model with a known answer, for engines that only pretend."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    synth.synthesize(path, size="24MiB")
    return path
