"""Backends and engine recipes by name, through entry points.

Ours are registered in `pyproject.toml` exactly as a third party registers its own.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TypeVar, cast

from harness.contract import Backend, Recipe
from harness.errors import RunRefused, UsageError, nearest

T = TypeVar("T")


@cache
def _load(group: str) -> MappingProxyType[str, object]:
    found: dict[str, object] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        try:
            found[point.name] = point.load()()
        except Exception as error:
            raise RunRefused(
                f"the entry point {point.name!r} ({point.value}) cannot be loaded: {error}; "
                "install its package anew, or remove it"
            ) from error
    if not found:
        raise RunRefused(f"no entry point in {group!r}: install the project itself with `pip install -e .`")
    return MappingProxyType(found)


def backends() -> MappingProxyType[str, Backend]:
    """All registered backends by name."""
    return cast("MappingProxyType[str, Backend]", _load("llamaduel.backends"))


def backend(name: str) -> Backend:
    """One backend. Raises UsageError with the nearest name."""
    known = backends()
    if name not in known:
        raise UsageError(f"no engine {name!r}; {nearest(name, known)}")
    return known[name]


def recipes() -> MappingProxyType[str, Recipe]:
    """All registered recipes by name."""
    return cast("MappingProxyType[str, Recipe]", _load("llamaduel.engines"))


def recipe(name: str) -> Recipe:
    """One recipe. Raises UsageError with the nearest name."""
    known = recipes()
    if name not in known:
        raise UsageError(f"no recipe {name!r}; {nearest(name, known)}")
    return known[name]
