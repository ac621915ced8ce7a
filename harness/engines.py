"""Engines on this machine: what is found, and what can be installed into the cache."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from harness.contract import Say
from harness.errors import Unavailable
from harness.options import Options
from harness.registry import backends, recipe, recipes

Found = TypedDict(  # "from" is a keyword
    "Found",
    {
        "backend": str,
        "found": Literal[True],
        "engine": str,
        "path": str,
        "from": str,
        "rpc": bool,
        "devices": list[str],
    },
)
Found.__doc__ = "A backend whose engine is here, and where from."


class Missing(TypedDict):
    """A backend without an engine, and how to get one."""

    backend: str
    found: Literal[False]
    next: str


class RecipeFacts(TypedDict):
    """A way to get an engine into the cache; `installed` is its path, if it is there."""

    name: str
    summary: str
    installed: str | None


class Listing(TypedDict):
    """Every backend, and every recipe."""

    engines: list[Found | Missing]
    recipes: list[RecipeFacts]


def hints(options: Options) -> dict[str, str]:
    """What a person told about where engines are, in the words that backends know."""
    given = {
        "llama-server": options.llama_server,
        "ollama": options.ollama,
        "openai": options.openai,
        "stand-in": "1" if options.stand_in is not None else None,
        "allow-remote": "1" if options.allow_remote else None,
    }
    return {key: value for key, value in given.items() if value is not None}


def list_engines(options: Options) -> Listing:
    """Every backend as a run with these options would find it, and every recipe."""
    return {
        "engines": [_look(name, hints(options)) for name in backends()],
        "recipes": [
            {"name": each.name, "summary": each.summary, "installed": _text(each.installed())}
            for each in recipes().values()
        ],
    }


def install_engine(name: str, say: Say) -> str:
    """Install by name and return the path. Raises UsageError, Unavailable or RunRefused."""
    return str(recipe(name).install(say))


def _look(name: str, told: dict[str, str]) -> Found | Missing:
    try:
        engine = backends()[name].find(told)
    except Unavailable as error:
        return {"backend": name, "found": False, "next": str(error)}
    return {
        "backend": name,
        "found": True,
        "engine": str(engine),
        "path": str(engine.path),
        "from": engine.origin,
        "rpc": engine.rpc,
        "devices": [device.name for device in engine.devices],
    }


def _text(path: object) -> str | None:
    return None if path is None else str(path)
