"""What two runs are, fact by fact: weights, prompts, settings, machine, engines, versions.

Every difference is named. Some forbid a verdict on what changed, because a speed would then be
that of another task or another machine; others, an engine's build first of all, are the question.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

from harness import placement
from harness.contract import Settings
from harness.gpu import Gpu
from harness.machine import Machine
from harness.plan import Plan
from harness.record import Contender, Header
from harness.sizes import format_bytes

UNKNOWN = "–"
DIGITS = 12  # of a digest, in words
UNITS = {"_w": " W", "_mhz": " MHz", "_bits": " bits", "_mts": " MT/s"}
HARDWARE = frozenset({"cpu", "physical_cores", "logical_cores"})
GPU_HARDWARE = frozenset({"name", "memory_bytes", "unified", "mig"})
TASK = frozenset({"weights_digest", "prompts_digest", "out_tokens", "warmups"})
TASK_SETTINGS = frozenset({"kind", "prompt_tokens", "thinking"})
ARMS = frozenset({"arms", "aside", "reference", "twin", "contrasts", "aliases"})  # labels, and told apart from them
ENGINE = frozenset(field.name for field in dataclasses.fields(Settings))  # those are compared arm by arm


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One fact that two runs do not share, of one arm or (None) of the whole run."""

    fact: str
    arm: str | None = None
    before: str
    after: str
    forbids: bool = False  # with it, a ratio between the runs would mean something else

    def __str__(self) -> str:
        return f"{self.arm + ': ' if self.arm else ''}{self.fact} was {self.before}, is {self.after}"


Fact = tuple[str, object, object]


def between(before: Header, after: Header) -> tuple[Difference, ...]:
    """Those that forbid a verdict first."""
    found = [
        *_of_plans(before.plan, after.plan),
        *of_machines(before.machine, after.machine),
        *_of_headers(before, after),
    ]
    later = {each.arm: each for each in after.contenders}
    for contender in before.contenders:
        if contender.arm in later:
            found += _of_arms(contender, later[contender.arm])
    return tuple(sorted(found, key=lambda each: not each.forbids))


def of_machines(before: Machine, after: Machine) -> list[Difference]:
    """All that is recorded of a machine, GPUs fact by fact; memory in use and warnings are of a moment."""
    found = []
    for name in (field.name for field in dataclasses.fields(Machine)):
        if name not in ("gpus", "available_bytes", "warnings"):
            old, new = (_words(name, getattr(machine, name)) for machine in (before, after))
            found += _named([(_spoken(name), old, new)], forbids=name in HARDWARE)
    for name in (field.name for field in dataclasses.fields(Gpu)):
        olds, news = ([_words(name, getattr(gpu, name)) for gpu in machine.gpus] for machine in (before, after))
        found += _named([(f"GPU {_spoken(name)}", olds, news)], forbids=name in GPU_HARDWARE)
    return found


def _of_plans(before: Plan, after: Plan) -> list[Difference]:
    found = []
    for name in (field.name for field in dataclasses.fields(Plan)):
        if name not in ARMS and name not in ("seed", "settings"):
            old, new = (_words(name, getattr(each, name)) for each in (before, after))
            found += _named([(_spoken(name), old, new)], forbids=name in TASK)
    found += _named([("twin", before.twin is not None, after.twin is not None)])
    asked, now = dict(before.settings), dict(after.settings)
    for name in sorted((asked.keys() | now.keys()) - ENGINE):
        found += _named([(f"setting {name}", asked.get(name), now.get(name))], forbids=name in TASK_SETTINGS)
    return found


def _of_headers(before: Header, after: Header) -> list[Difference]:
    versions = before.versions.keys() | after.versions.keys()
    return _named(
        (
            ("model file", before.model.sha256[:DIGITS], after.model.sha256[:DIGITS]),
            ("waits for a quiet machine", not before.options.get("no_wait"), not after.options.get("no_wait")),
            *(
                (f"version of {name}", before.versions.get(name), after.versions.get(name))
                for name in sorted(versions, key=lambda name: (name != "llamaduel", name))
            ),
        )
    )


def _of_arms(before: Contender, after: Contender) -> list[Difference]:
    if before.engine is None or after.engine is None:
        return []  # the row of the arm says why
    told = bool(before.device_kinds and after.device_kinds)
    found = _named(
        (
            ("placement", before.placement, after.placement),
            *(
                (f"setting {name}", getattr(before.settings, name), getattr(after.settings, name))
                for name in sorted(ENGINE)
            ),
        ),
        before.arm,
        forbids=True,
    )
    found += _named([("kinds of device", before.device_kinds, after.device_kinds)], before.arm, forbids=told)
    found += _named(
        (("engine", before.engine, after.engine), ("origin of the engine", before.engine.origin, after.engine.origin)),
        before.arm,
    )
    if before.realised is None or after.realised is None:
        return found
    read_back = (
        (f"setting {name} as read back", before.realised.settings[name], after.realised.settings[name])
        for name in sorted(before.realised.settings.keys() & after.realised.settings.keys())
    )
    (old_host, old_device), (new_host, new_device) = (
        placement.realised_bytes(realised.buffers) or (None, None) for realised in (before.realised, after.realised)
    )
    return found + _named(
        (
            *read_back,
            ("memory on the host", _words("_bytes", old_host), _words("_bytes", new_host)),
            ("memory on the device", _words("_bytes", old_device), _words("_bytes", new_device)),
        ),
        before.arm,
    )


# ── words ───────────────────────────────────────────────────────────────────────────────────


def _named(facts: Iterable[Fact], arm: str | None = None, *, forbids: bool = False) -> list[Difference]:
    """Those whose words differ: what rounds to the same size is the same."""
    said = ((fact, _words(fact, old), _words(fact, new)) for fact, old, new in facts)
    return [
        Difference(fact=fact, arm=arm, before=old, after=new, forbids=forbids) for fact, old, new in said if old != new
    ]


def _spoken(name: str) -> str:
    """A field's name without its unit, which stands with the value."""
    return re.sub(f"({'|'.join(UNITS)}|_bytes)$", "", name).replace("_", " ")


def _words(name: str, value: object) -> str:
    unit = next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), "")
    match value:
        case None:
            return UNKNOWN
        case bool():
            return "yes" if value else "no"
        case int() if name.endswith("_bytes"):
            return format_bytes(value)
        case float() if name == "margin":
            return f"{100 * value:g} %"
        case str() if name.endswith("_digest"):
            return value[:DIGITS]
        case int() | float():
            return f"{value:g}{unit}" if isinstance(value, float) else f"{value}{unit}"
        case tuple() | list() | frozenset():
            return ", ".join(map(str, sorted(value) if isinstance(value, frozenset) else value)) or "none"
        case _:
            return str(value)
