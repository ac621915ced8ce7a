"""The public names of `harness`: few, lazy, and each what it says."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import harness


@pytest.mark.parametrize("name", harness.__all__)
def test_a_public_name_is_the_same_whenever_it_is_asked_for(name: str) -> None:
    first = getattr(harness, name)
    assert callable(first)
    assert getattr(harness, name) is first


def test_no_public_name_is_a_modules_name() -> None:
    """Importing the module would put it where the name was."""
    modules = {module.name for module in pkgutil.iter_modules(harness.__path__)}
    assert not modules & set(harness.__all__)


def test_importing_the_library_loads_nothing_heavy() -> None:
    heavy = "numpy scipy pydantic rich tabulate gguf ollama matplotlib"
    script = f"import sys, harness.cli; print([name for name in {heavy.split()} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
