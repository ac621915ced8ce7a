"""The public names of `harness`: few, lazy, and each what it says."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import harness

ROOT = Path(__file__).resolve().parent.parent


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


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("harness/**/*.py"), *ROOT.glob("backends/*.py")]), ids=lambda path: path.stem
)
def test_no_name_of_a_module_is_given_twice(path: Path) -> None:
    """The second silently takes the place of the first, for all that was written to mean it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    given = [
        name.id
        for statement in tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        for name in (target.elts if isinstance(target, ast.Tuple) else [target])
        if isinstance(name, ast.Name)
    ]
    assert sorted(given) == sorted(set(given))
