"""What a fake engine does: its speed, its words, its devices and its faults.

A script is JSON in the environment variable `LLAMADUEL_FAKE`, or a path to such a file. The
entries of `cases` change it for those engine starts whose command line holds their `when`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

VARIABLE = "LLAMADUEL_FAKE"
PLAIN = "LLAMADUEL_FAKE_PLAIN"  # set for a child whose parent plays the tricks of the wire itself
# as the real words of a model: pieces of one cycle, some of them of more than one byte a letter
WORDS = ("the", "quick", "brown", "fox", "naïve", "zebras", "over", "東京", "apples", "near", "cold", "wäter", "jump")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Seconds, tokens and MiB. What is left alone is an engine in good order."""

    # speed; a tuple gives each engine start its own value, in turn
    load_s: float = 0.0
    ttft_s: float = 0.005
    itl_s: float | tuple[float, ...] = 0.001
    tokens_per_chunk: int = 1
    burst: int = 1  # chunks that are sent together

    # the answer goes on in a cycle of words after the last word of the prompt: in this one, else in
    # that of a model with a known answer, else in WORDS
    words: tuple[str, ...] | None = None
    adds_bos: bool = False
    trained_context: int | None = None  # tokens; Ollama asks its runner for no more

    # devices as (name, description, MiB); buffers as (device, kind, MiB), else by the model's tensors
    devices: tuple[tuple[str, str, int], ...] = ()
    buffers: tuple[tuple[str, str, float], ...] | None = None
    version: str = "11434"  # of the fake llama-server
    starts: str | None = None  # a file that gets one line for every start that loads a model

    # faults before the model is loaded
    refuses: str | None = None  # every command ends with this text and exit code 1
    dies_loading: str | None = None  # loading ends with this text and `exit_code`
    exit_code: int = 1  # below 0: by that signal
    hangs_loading: bool = False
    ignores_sigterm: bool = False

    # faults of a stream, some of them after so many tokens
    http_error: int | None = None  # to prompts of more than `fails_above` tokens
    fails_above: int = 0
    last_words: tuple[str, ...] = ()  # errors in its log before it dies in a stream or answers with that error
    dies_after: int | None = None
    error_after: int | None = None  # an error object in a reply that began with 200
    silent_after: int | None = None
    ends_after: int | None = None  # end of text
    no_final: bool = False
    lingers_s: float = 0.0  # before the stream is closed
    garbage: bool = False  # a line that is no JSON
    comments: bool = False  # keep-alives
    crlf: bool = False
    split_bytes: int | None = None  # the stream is cut into pieces of this size

    # faults of the engine's own figures
    counts_off: int = 0  # added to the final count
    cached: int = 0  # prompt tokens taken from a cache
    reload_s: float = 0.0  # spent on loading inside a request
    truncated: bool = False
    decode_time_factor: float = 1.0
    counts_first_token: bool = False  # its own rate is n / time, as in old builds, not (n - 1) / time

    def itl_of(self, start: int) -> float:
        """Seconds between tokens in the engine start of this number, from 0."""
        return self.itl_s if isinstance(self.itl_s, (int, float)) else self.itl_s[start % len(self.itl_s)]

    def environment(self, cases: Iterable[Mapping[str, Any]] = ()) -> dict[str, str]:
        """The variable that makes a fake engine follow this script."""
        return {VARIABLE: json.dumps(asdict(self) | {"cases": list(cases)})}


def read(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> Script:
    """The script for one command line (`LLAMA_ARG_…` variables count as part of it)."""
    text = environment.get(VARIABLE, "{}")
    data: dict[str, Any] = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text("utf-8"))
    arguments = [f"{key}={value}" for key, value in sorted(environment.items()) if re.match("LLAMA_ARG_|OLLAMA_", key)]
    line = " ".join([*command, *arguments])
    for case in data.pop("cases", ()):
        if case["when"] in line:
            data |= {key: value for key, value in case.items() if key != "when"}
    if unknown := data.keys() - {field.name for field in fields(Script)}:
        raise SystemExit(f"fake engine: no such key in its script: {', '.join(sorted(unknown))}")
    script = Script(**{key: _frozen(value) for key, value in data.items()})
    if PLAIN in environment:
        script = replace(script, garbage=False, comments=False, crlf=False, split_bytes=None, burst=1, refuses=None)
    return script


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def number_of_start(script: Script) -> int:
    """How many engine starts came before this one; notes this one."""
    if script.starts is None:
        return 0
    path = Path(script.starts)
    with path.open("a+", encoding="utf-8") as file:
        file.seek(0)
        number = sum(1 for _ in file)
        file.write(f"{os.getpid()}\n")
    return number
