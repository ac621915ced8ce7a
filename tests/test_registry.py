"""Engines are found by entry point, ours and those of others in the same way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from harness import registry
from harness.errors import RunRefused, UsageError

ROOT = Path(__file__).parent.parent
PLUGIN = Path(__file__).parent / "plugin_package"


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """What is installed, as a list that a test may fill."""
    found: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: [point for point in found if point.group == group])
    registry._load.cache_clear()
    yield found
    registry._load.cache_clear()


def test_what_is_registered_is_what_the_project_declares() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    assert set(registry.backends()) >= set(declared["llamaduel.backends"])
    assert set(registry.recipes()) >= set(declared["llamaduel.engines"])


def test_a_backend_is_known_by_the_name_of_its_entry_point() -> None:
    assert {name: each.name for name, each in registry.backends().items()} == {
        name: name for name in registry.backends()
    }


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'ollama'"):
        registry.backend("olama")
    with pytest.raises(UsageError, match="did you mean 'llama-cpp'"):
        registry.recipe("lama-cpp")


def test_nothing_installed_is_said_and_not_an_empty_table(entry_points: list[EntryPoint]) -> None:
    with pytest.raises(RunRefused, match="pip install"):
        registry.backends()


def test_an_entry_point_that_cannot_be_loaded_names_itself(entry_points: list[EntryPoint]) -> None:
    entry_points.append(EntryPoint("ghost", "no_such_module:Ghost", "llamaduel.backends"))
    with pytest.raises(RunRefused, match=r"'ghost' \(no_such_module:Ghost\) cannot be loaded"):
        registry.backends()


def test_each_backend_is_made_once() -> None:
    assert registry.backend("openai") is registry.backend("openai")


def test_a_package_of_somebody_else_is_found_and_keeps_the_contract(tmp_path: Path) -> None:
    """Installed for real, then tried in a process of its own, where it is seen."""
    source = shutil.copytree(PLUGIN, tmp_path / "plugin")
    site = tmp_path / "site"
    install = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    run = {"capture_output": True, "text": True, "cwd": tmp_path}
    installed = subprocess.run([sys.executable, "-m", *install, str(source)], **run, check=False)  # type: ignore[call-overload]
    assert installed.returncode == 0, installed.stderr
    assert (site / "llamaduel_parrot.py").exists()

    check = shutil.move(source / "check_parrot.py", tmp_path)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(check)]
    environment = os.environ | {"PYTHONPATH": str(site)}
    checked = subprocess.run(tests, **run, env=environment, check=False)  # type: ignore[call-overload]
    assert checked.returncode == 0, checked.stdout[-5000:]
    assert "21 passed" in checked.stdout
