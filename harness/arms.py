"""The arm grammar: `backend[@placement][,knob=value]…`, several arms separated by commas.

After a comma, a piece whose part before `@` or `=` is a registered backend starts a new arm;
any other piece is a knob of the arm before it. `ncmoe=0..48/4` is a sweep and `ctk=f16/q8_0` a list:
several arms. What a backend understands it says itself, with `read_arm` and two sets of words;
`depth` is a matter of the prompts, so that every backend takes it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from harness.contract import Arm, Placement, Settings
from harness.errors import UsageError, nearest
from harness.registry import backend, backends
from harness.sizes import parse_tokens

# knob → the field of Settings that it sets
KNOBS: Mapping[str, str] = {
    "c": "context",
    "b": "batch",
    "ub": "ubatch",
    "t": "threads",
    "fa": "flash_attention",
    "ctk": "kv_k",
    "ctv": "kv_v",
    "lm": "load_mode",
    "rpc": "rpc",
    "depth": "depth",
}
NUMBERS = frozenset({"c", "b", "ub", "t"})
OF_THE_PROMPTS = frozenset({"depth"})  # no engine is told
CHOICES: Mapping[str, frozenset[str]] = {
    "fa": frozenset({"on", "off", "auto"}),
    "ctk": frozenset({"f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"}),
    "ctv": frozenset({"f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"}),
    "lm": frozenset({"auto", "none", "mmap", "mlock", "mmap+mlock", "dio"}),
}
SWEEP = re.compile(r"^([0-9]{1,9})\.\.([0-9]{1,9})(?:/([0-9]{1,9}))?$")
MOST_SWEPT = 200


def read_arm(text: str, name: str, placements: Iterable[str], knobs: Iterable[str]) -> Arm:
    """One arm of backend `name` from its text.

    `placements` holds `word` or `word=N`, `knobs` holds names of what the engine can be told. Raises
    UsageError that names the nearest valid word.
    """
    head, *pieces = text.split(",")
    base, at, place = head.partition("@")
    if base != name:
        raise UsageError(f"{text!r} is no arm of {name!r}")
    if at and not place:
        raise UsageError(f"{text!r} has nothing after '@'; {nearest('', placements)}")
    placement = _read_placement(place, name, frozenset(placements)) if at else Placement()
    return Arm(name, placement, tuple(sorted(_read_knobs(pieces, name, OF_THE_PROMPTS.union(knobs)))))


def _read_placement(text: str, name: str, known: frozenset[str]) -> Placement:
    kind, equals, number = text.partition("=")
    if not equals and kind in known:
        return Placement(kind)
    if equals and f"{kind}=N" in known:
        if re.fullmatch(r"\d{1,6}", number):
            return Placement(kind, int(number))
        raise UsageError(f"{name}@{text}: {kind} takes a whole number from 0 to 999999, as in {kind}=20")
    if not equals and f"{kind}=N" in known:
        raise UsageError(f"{name}@{text}: {kind} takes a number, as in {kind}=20")
    raise UsageError(f"{name} has no placement {text!r}; {nearest(text, known)}")


def _read_knobs(pieces: Iterable[str], name: str, known: frozenset[str]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for piece in pieces:
        key, equals, value = piece.partition("=")
        if key not in known:
            raise UsageError(f"{name} has no knob {key!r}; {nearest(key, known)}")
        if not equals or not value:
            raise UsageError(f"knob {key!r} of {name} needs a value, as in {key}=…")
        if key in seen:
            raise UsageError(f"knob {key!r} of {name} is given twice")
        seen.add(key)
        if key in NUMBERS and not re.fullmatch(r"[1-9]\d{0,8}", value):
            raise UsageError(f"knob {key}={value}: {key} takes a whole number above 0")
        if key in CHOICES and value not in CHOICES[key]:
            raise UsageError(f"knob {key}={value}: {nearest(value, CHOICES[key])}")
        if key == "depth":
            value = str(parse_tokens(value))
        yield key, str(int(value)) if key in NUMBERS else value


def parse_arms(text: str) -> tuple[Arm, ...]:
    """All arms of a list, sweeps expanded, in the order given. Raises UsageError."""
    return tuple(arm for sweep in parse_sweeps(text) for arm in sweep)


def parse_sweeps(text: str) -> tuple[tuple[Arm, ...], ...]:
    """`parse_arms` with the arms of one sweep together; an arm that is none stands alone. Raises UsageError."""
    known = backends()
    groups: list[list[str]] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if not piece:
            raise UsageError(f"an empty arm in {text!r}; write for example ollama,llama-cpp@cpu-moe")
        if re.split("[@=]", piece, maxsplit=1)[0] in known:
            groups.append([piece])
        elif groups and "=" in piece and "@" not in piece.split("=", 1)[0]:
            groups[-1].append(piece)
        else:
            word = re.split("[@=]", piece, maxsplit=1)[0]
            raise UsageError(f"no engine {word!r}; {nearest(word, known)}")
    many = sum(math.prod(len(_alternatives(piece)[1]) for piece in group) for group in groups)
    if many > MOST_SWEPT:
        raise UsageError(f"{text!r} makes {many} arms; at most {MOST_SWEPT}, so raise a step or drop values")
    sweeps = [
        tuple(backend(re.split("[@=]", group[0], maxsplit=1)[0]).parse(one) for one in _expand(group))
        for group in groups
    ]
    seen: set[Arm] = set()
    for arm in (arm for sweep in sweeps for arm in sweep):
        if arm in seen:
            raise UsageError(f"arm {arm} is given twice; the twin of the reference is added by the harness")
        seen.add(arm)
    return tuple(sweeps)


def _alternatives(piece: str) -> tuple[str, Sequence[object]]:
    """What stands before a value, and the values: the numbers of `A..B/S`, those of the list `X/Y`, or just one."""
    key, equals, value = piece.rpartition("=")
    if not equals:
        return "", (piece,)
    if not (sweep := SWEEP.match(value)):
        return f"{key}=", value.split("/")
    first, last, step = int(sweep[1]), int(sweep[2]), int(sweep[3] or 1)
    if step == 0:
        raise UsageError(f"{piece}: the step of a sweep is at least 1")
    return f"{key}=", range(first, last + 1, step) if first <= last else range(first, last - 1, -step)


def _expand(pieces: Iterable[str]) -> Iterator[str]:
    """The texts of one arm with every alternative of every piece."""
    alternatives = [[f"{before}{value}" for value in values] for before, values in map(_alternatives, pieces)]
    return map(",".join, product(*alternatives))


def apply_knobs(arm: Arm, settings: Settings) -> Settings:
    """The settings of one arm: the run's, with its knobs on top."""
    changes: dict[str, Any] = {}
    for key, value in arm.knobs:
        if key == "rpc":
            changes[KNOBS[key]] = tuple(value.split("+"))
        elif key in KNOBS:
            changes[KNOBS[key]] = int(value) if key in NUMBERS | OF_THE_PROMPTS else value
    return dataclasses.replace(settings, **changes)
