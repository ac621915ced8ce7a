"""One table of options. `--help`, pytest's `--duel-…`, `[tool.llamaduel]` and `LLAMADUEL_…` come from it.

The nearest source wins: command line, environment, `pyproject.toml` of the current folder, default.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UsageError, nearest
from harness.sizes import parse_tokens

DEFAULT_ARMS = "ollama,llama-cpp,llama-cpp@ngl=99,llama-cpp@cpu-moe"
FOUND_ARMS = "ollama,llama-cpp,llama-cpp@{sweep}"  # of `find`, which fills in what this model has
LEAST_TOKENS = 8  # of an answer
LEAST_PERCENT = 0.5  # of a margin; less is a share that was meant as a percentage
WHOLE = "all"  # a stand-in device that is as large as the machine's memory


def _option(
    default: Any,
    read: Callable[[str], Any],
    help_: str,
    metavar: str = "",
    bare: str | None = None,
    joined: str | None = None,
) -> Any:
    """`bare` is the value of the option given without one (`--stand-in`); flags have `bare="1"`.

    `joined` stands between the values of an option that takes several; in a table they are a list.
    """
    return dataclasses.field(
        default=default, metadata={"read": read, "help": help_, "metavar": metavar, "bare": bare, "joined": joined}
    )


def _text(text: str) -> str:
    if not text.strip():
        raise UsageError("must not be blank; give a value, or leave the option out")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("is not UTF-8 and cannot be recorded; rename it") from None
    return text


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise UsageError(nearest(text, words))
        return text

    return read


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or int(text) == 0:
        raise UsageError("takes a whole number above 0")
    return int(text)


def _length(text: str) -> int:
    if _whole(text) < LEAST_TOKENS:
        raise UsageError(f"takes at least {LEAST_TOKENS} tokens; a speed cannot be read from fewer")
    return int(text)


def _seed(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise UsageError("takes a whole number from 0 to 999999999")
    return int(text)


def _share(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%?", text)
    if not found or not LEAST_PERCENT <= float(found[1]) < 100:
        raise UsageError(
            f"takes a percentage from {LEAST_PERCENT}% to less than 100%; write 3% for three per cent, not 0.03"
        )
    return float(found[1]) / 100


def _minutes(text: str) -> float:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)\s*(s|m|min|h)?", text)
    if not found or float(found[1]) == 0:
        raise UsageError("takes a time, as in 20min, 90s or 1h")
    return float(found[1]) * {"s": 1 / 60, "h": 60.0}.get(found[2] or "m", 1.0)


def _flag(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise UsageError("is yes or no")
    return words[text.lower()]


def _contrasts(text: str) -> tuple[str, ...]:
    pairs = tuple(pair.strip() for pair in text.split(";") if pair.strip())
    if not pairs or any(pair.count(":") < 1 for pair in pairs):
        raise UsageError("takes ARM:ARM, several separated by semicolons")
    return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything a person can set. Sizes and arms stay text here; the harness reads them."""

    model: str | None = _option(
        None,
        _text,
        "a GGUF file, a folder with one, ollama:NAME or hf:ORG/REPO:FILE; without it a small synthetic model",
        "MODEL",
    )
    arms: str = _option(
        DEFAULT_ARMS, _text, "the contenders, as in ollama,llama-cpp@cpu-moe,ub=256", "ARMS", joined=","
    )
    reference: str | None = _option(None, _text, "the arm that the others are compared with (first that loads)", "ARM")
    contrast: tuple[str, ...] = _option(
        (),
        _contrasts,
        "compare only these pairs, declared before the run; semicolons between pairs",
        "A:B",
        joined=";",
    )
    preset: str = _option(
        "confirm", _one_of("quick", "confirm"), "quick: 2 blocks and no claims; confirm: 6 to 24 blocks", "PRESET"
    )
    budget: float | None = _option(
        None, _minutes, "time for the blocks, as in 20min or 90s: fixes how many; repeated ones come on top", "TIME"
    )
    settings: str = _option(
        "matched", _one_of("matched", "stock"), "matched: equal on all arms; stock: each engine as shipped", "SET"
    )
    margin: float = _option(0.03, _share, "differences within it count as the same (3%%)", "PERCENT")
    seed: int | None = _option(None, _seed, "order of the loads; recorded either way", "N")
    prompts: str | None = _option(None, _text, "a prompt set in TOML (the built-in one)", "FILE")
    prompt_tokens: int = _option(512, _whole, "about how long each prompt is, in tokens (512)", "N")
    thinking: bool = _option(False, _flag, "let models with a thinking switch think", "", "1")
    context: int = _option(4096, _whole, "context in tokens, on every arm (4096, or what --depth needs)", "N")
    out_tokens: int | None = _option(None, _length, "length of an answer (the probe picks 128 to 1024)", "N")
    depth: int = _option(0, parse_tokens, "tokens in the context before each prompt, as in 4096 or 16k (0)", "N")
    stand_in: str | None = _option(
        None, _text, "a stand-in device of this size in place of a GPU: placement is real, speed is not", "SIZE", WHOLE
    )
    vram_limit: str | None = _option(
        None, _text, "hold every GPU to this much free memory, as a smaller card; several with commas", "SIZE"
    )
    gpu_in_use: str = _option(
        "wait",
        _one_of("wait", "refuse", "go-on"),
        "if other programs hold GPU memory: wait (a minute, then go on), refuse, or go-on",
        "WORD",
    )
    llama_server: str | None = _option(None, _text, "path of llama-server, or of the folder that holds it", "PATH")
    ollama: str | None = _option(None, _text, "path of ollama, or `attach` to use the daemon that runs", "PATH")
    openai: str | None = _option(None, _text, "table of servers for openai@NAME, in TOML", "FILE")
    no_wait: bool = _option(False, _flag, "do not wait for a quiet machine", "", "1")
    allow_remote: bool = _option(False, _flag, "allow servers and models that are not on this machine", "", "1")
    resume: str | None = _option(None, _text, "go on with the run in this folder", "DIR")
    out: str = _option("runs", _text, "where run folders are made (runs)", "DIR")
    fail_on_regression: str | None = _option(
        None, _text, "fail if an arm lost more than the margin since the run in this folder", "RUN"
    )


def names() -> tuple[str, ...]:
    """All option names as written on a command line, without dashes in front."""
    return tuple(field.name.replace("_", "-") for field in dataclasses.fields(Options))


def collect(
    given: Mapping[str, str | None],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    prefix: str = "--",
) -> Options:
    """The options in force. `given` is what stood on the command line, by field name; flags there begin with `prefix`.

    Raises UsageError for a value or a name that cannot be taken, and says where it stood.
    """
    environment = os.environ if environment is None else environment
    table = _project_table(folder or Path.cwd())
    fields = {field.name: field for field in dataclasses.fields(Options)}
    for key in table:
        if key.replace("-", "_") not in fields:
            raise UsageError(f"[tool.llamaduel] in pyproject.toml has no option {key!r}; {nearest(key, names())}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        spelled = name.replace("_", "-")
        variable = f"LLAMADUEL_{name.upper()}"
        for where, text in (
            (f"{prefix}{spelled}", given.get(name)),
            (variable, environment.get(variable) or None),
            (f"[tool.llamaduel] {spelled}", table.get(spelled, table.get(name))),
        ):
            if text is not None:
                try:
                    values[name] = field.metadata["read"](text)
                except UsageError as error:
                    raise UsageError(f"{where} {text!r}: {error}") from None
                break
    return Options(**values)


def _project_table(folder: Path) -> dict[str, str]:
    """`[tool.llamaduel]` with every value as the text it would be on a command line."""
    path = folder / "pyproject.toml"
    if not path.is_file():
        return {}
    try:
        tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{path.name} in this folder cannot be read: {error}") from None
    table = tool.get("llamaduel", {}) if isinstance(tool, Mapping) else tool
    if not isinstance(table, Mapping):
        raise UsageError(
            f"{path.name} in this folder holds {table!r} where the table [tool.llamaduel] belongs; "
            "write that line, and below it one `option = value` a line"
        )
    return {key: _as_text(key, value) for key, value in table.items()}


def _as_text(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, Mapping | list):
        joined: dict[str, str | None] = {field.name: field.metadata["joined"] for field in dataclasses.fields(Options)}
        between = joined.get(key.replace("-", "_"))
        if between is None or isinstance(value, Mapping):
            kind = "one value, or a list of them" if between else "one value"
            raise UsageError(f"[tool.llamaduel] {key} in pyproject.toml takes {kind}; write it as on the command line")
        return between.join(map(str, value))
    return str(value)


def declare(add: Callable[..., Any], prefix: str = "--") -> None:
    """Add every option through `add(flag, **argparse_keywords)`; values stay text until `collect`."""
    for field in dataclasses.fields(Options):
        flag = prefix + field.name.replace("_", "-")
        bare, metavar = field.metadata["bare"], field.metadata["metavar"]
        keywords: dict[str, Any] = {"dest": f"duel_{field.name}", "default": None, "help": field.metadata["help"]}
        if bare is not None and not metavar:
            add(flag, action="store_const", const=bare, **keywords)
        elif bare is not None:
            add(flag, nargs="?", const=bare, metavar=metavar, **keywords)
        else:
            add(flag, metavar=metavar, **keywords)
