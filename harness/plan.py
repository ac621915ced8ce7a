"""The plan of a run, and the only place that decides which load comes next and when to stop.

A plan is fixed before block 1 and holds all that reproduces the run and nothing private, so its
digest can be published. `next_load` is a pure function of the plan and the outcomes so far: a
run that was killed goes on exactly where its file ends.

A block is one load of every arm; odd blocks are in random order and each even block mirrors the
one before it, so that steady drift cancels inside a pair. A load that broke, or ran while other
programs were busy, repeats its whole block as written, twice at most; its speed never matters.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from harness import verdict
from harness.errors import RunRefused, UsageError, nearest

FORMAT = 1
PRESETS = {"quick": 2, "confirm": verdict.LOOKS[-1]}  # the most blocks of each
OUT_TOKENS = (128, 256, 512, 1024)
DECODE_WINDOW_S = 2.0  # shorter, and one stall of the scheduler is several per cent
SLOW_LOAD_S = 45.0


class Status(StrEnum):
    """What became of an arm."""

    OK = "OK"
    ALIAS = "ALIAS"
    NOOP = "NOOP"
    UNAVAILABLE = "UNAVAILABLE"
    DOES_NOT_FIT = "DOES_NOT_FIT"
    CRASHED = "CRASHED"
    TIMEOUT = "TIMEOUT"
    VOID = "VOID"
    UNSTABLE = "UNSTABLE"


FAILED = frozenset({Status.DOES_NOT_FIT, Status.CRASHED, Status.TIMEOUT, Status.VOID, Status.NOOP})  # by the engine
RESULTS = frozenset({Status.DOES_NOT_FIT, Status.UNAVAILABLE, Status.VOID, Status.NOOP})  # repeating changes nothing


@dataclass(frozen=True, slots=True)
class ArmStatus:
    word: Status
    reason: str = ""
    alias_of: str | None = None

    def __str__(self) -> str:
        if self.alias_of is not None:
            return f"{self.word} (= {self.alias_of})"
        return f"{self.word}: {self.reason}" if self.reason else str(self.word)


@dataclass(frozen=True, slots=True)
class PlannedArm:
    """`label` is a neutral letter: nothing in it tells the twin from its original."""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Aside:
    """An arm that was asked for and does not run."""

    text: str
    word: Status
    alias_of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that reproduces a run. Labels stand for arms in `reference`, `contrasts` and `twin`."""

    format: int = FORMAT
    preset: str
    arms: tuple[PlannedArm, ...]  # the twin, a second copy of the reference, among them
    aside: tuple[Aside, ...] = ()
    reference: str
    twin: str | None
    contrasts: tuple[tuple[str, str], ...]
    aliases: tuple[tuple[str, str], ...] = ()  # arms known to be one placement, where they were not merged
    seed: int
    looks: tuple[int, ...]
    look_alpha: float
    margin: float
    max_blocks: int
    max_repeats: int
    requests: int  # measured, a load
    warmups: int  # before them, a load
    out_tokens: int
    prompts_digest: str
    weights_digest: str
    settings: tuple[tuple[str, str | int | None], ...]  # sorted by name

    def __post_init__(self) -> None:
        labels = self.labels
        if self.format != FORMAT:
            raise RunRefused(f"the plan has format {self.format}; this version reads {FORMAT}")
        named = [self.reference, *(label for pair in (*self.contrasts, *self.aliases) for label in pair)]
        _check(bool(labels) and len(set(labels)) == len(labels), "its arms have no labels of their own")
        _check(set(named) <= set(labels), "a contrast names an arm that it does not have")
        _check(self.twin is None or (self.twin in labels and self.twin not in named), "its twin is no arm of its own")
        _check(all(a != b for a, b in self.contrasts), "a contrast compares an arm with itself")
        pairs = self.max_blocks >= 2 and self.max_blocks % 2 == 0
        _check(pairs or self.max_blocks == 1, "its blocks are no whole pairs")  # one alone claims nothing
        _check(all(n % 2 == 0 and n >= verdict.FEWEST_BLOCKS for n in self.looks), "a look is not after a whole pair")
        _check(
            self.looks == tuple(sorted(set(self.looks))) and (self.looks or (self.max_blocks,))[-1] == self.max_blocks,
            "its looks do not rise to its last block",
        )
        _check(self.looks != () or self.max_blocks < verdict.FEWEST_BLOCKS, "it has blocks for a claim and no look")
        _check(0 < self.look_alpha < 1 and 0 < self.margin < 1, "its error or margin is not between 0 and 1")
        _check(self.requests >= 1 and self.warmups >= 0 and self.max_repeats >= 0, "a count is too small")
        private = [text for text in _texts(dataclasses.asdict(self)) if "/" in text or "\\" in text]
        _check(not private, f"{private[:1]} looks like a path, and a plan is for publishing")

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(arm.label for arm in self.arms)

    @property
    def level(self) -> verdict.Level:
        return verdict.level(len(self.looks), len(self.contrasts), self.look_alpha)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Canonical: one plan has one text."""
        return json.dumps(
            dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises RunRefused for anything that `to_json` does not write."""
        try:
            data: dict[str, Any] = json.loads(text)
            aside = tuple(Aside(each["text"], Status(each["word"]), each["alias_of"]) for each in data.pop("aside"))
            found = cls(
                arms=tuple(PlannedArm(**each) for each in data.pop("arms")),
                aside=aside,
                contrasts=tuple((a, b) for a, b in data.pop("contrasts")),
                aliases=tuple((a, b) for a, b in data.pop("aliases")),
                settings=tuple((name, value) for name, value in data.pop("settings")),
                looks=tuple(data.pop("looks")),
                **data,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunRefused(f"this is no plan of llamaduel ({type(error).__name__}: {error})") from None
        return found


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RunRefused(f"the plan cannot be run: {otherwise}")


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for each in value.values() for text in _texts(each)]
    if isinstance(value, Sequence):
        return [text for each in value for text in _texts(each)]
    return []


# ── drawing it up ───────────────────────────────────────────────────────────────────────────


def make(
    arms: Sequence[str],
    *,
    seed: int,
    prompts_digest: str,
    weights_digest: str,
    reference: str | None = None,
    contrasts: Sequence[tuple[str, str]] = (),
    aliases: Sequence[tuple[str, str]] = (),
    twin: bool | None = None,
    preset: str = "confirm",
    max_blocks: int | None = None,
    margin: float = verdict.MARGIN,
    requests: int = 3,
    warmups: int = 1,
    out_tokens: int = OUT_TOKENS[0],
    settings: Mapping[str, str | int | None] | None = None,
    aside: Sequence[Aside] = (),
) -> Plan:
    """The plan for arms that can run, by their texts; labels are letters in the same order.

    The reference is the first arm unless named, the contrasts are every other arm against it
    unless declared, and a twin runs in every preset that makes claims. Hosts in `rpc=` are
    replaced by their number. `aliases` are pairs of arms that are one placement. Raises UsageError.
    """
    if preset not in PRESETS:
        raise UsageError(f"no preset {preset!r}; {nearest(preset, PRESETS)}")
    if not arms or len(set(arms)) != len(arms):
        raise UsageError("a plan takes at least one arm, and each once; name the arms with --arms")
    label_of = {text: _letters(index) for index, text in enumerate(arms)}

    def label(text: str) -> str:
        if text not in label_of:
            raise UsageError(f"{text!r} is no arm of this run that can be measured; {nearest(text, label_of)}")
        return label_of[text]

    chief = label(arms[0] if reference is None else reference)
    declared = [(label(a), label(b)) for a, b in contrasts]
    pairs = declared or [(other, chief) for other in label_of.values() if other != chief]
    if any(a == b for a, b in pairs) or len({frozenset(pair) for pair in pairs}) != len(pairs):
        raise UsageError("a contrast compares two different arms, and is declared once")
    blocks = max(2, min(PRESETS[preset], max_blocks or PRESETS[preset]))
    with_twin = preset == "confirm" if twin is None else twin
    twin_label = _letters(len(arms)) if with_twin else None
    planned = [PlannedArm(found, public(text)) for text, found in label_of.items()]
    if twin_label is not None:
        planned.append(PlannedArm(twin_label, public(arms[list(label_of.values()).index(chief)])))
    looks = tuple(look for look in verdict.LOOKS if look <= blocks)
    return Plan(
        preset=preset,
        arms=tuple(planned),
        aside=tuple(
            dataclasses.replace(each, text=public(each.text), alias_of=each.alias_of and public(each.alias_of))
            for each in aside
        ),
        reference=chief,
        twin=twin_label,
        contrasts=tuple(pairs),
        aliases=tuple((label(a), label(b)) for a, b in aliases),
        seed=seed,
        looks=looks,
        look_alpha=verdict.LOOK_ALPHA,
        margin=margin,
        max_blocks=looks[-1] if looks else blocks // 2 * 2,
        max_repeats=2,
        requests=requests,
        warmups=warmups,
        out_tokens=out_tokens,
        prompts_digest=prompts_digest,
        weights_digest=weights_digest,
        settings=tuple(
            sorted(
                (name, _hosts(value) if name == "rpc" and isinstance(value, str) else value)
                for name, value in (settings or {}).items()
            )
        ),
    )


def read_contrast(text: str, arms: Sequence[str]) -> tuple[str, str]:
    """`A:B` as two arm texts; an arm may hold colons of its own. Raises UsageError."""
    splits = [(text[:at], text[at + 1 :]) for at, sign in enumerate(text) if sign == ":"]
    for a, b in splits:
        if a in arms and b in arms:
            return a, b
    wrong = next((side for pair in splits for side in pair if side not in arms), text)
    raise UsageError(f"{text!r} is no contrast of two arms; write A:B; {nearest(wrong, arms)}")


def max_blocks(budget_minutes: float, seconds_per_load: float | Mapping[str, float], loads: int) -> int:
    """The largest look that fits into the budget; below the first look whole pairs, and at least one."""
    block_s = _block_seconds(seconds_per_load, loads)
    affordable = int(60 * budget_minutes / block_s) if block_s else verdict.LOOKS[-1]
    return max((look for look in verdict.LOOKS if look <= affordable), default=max(2, affordable // 2 * 2))


def estimate_minutes(plan: Plan, seconds_per_load: float | Mapping[str, float], blocks: int | None = None) -> float:
    """Minutes for `blocks` blocks (all of them unless given), none repeated. Seconds may be given per label."""
    return _block_seconds(seconds_per_load, len(plan.arms)) * (plan.max_blocks if blocks is None else blocks) / 60


def requests_per_load(load_s: float) -> int:
    """Two-stage optimum: dear loads are worth more requests."""
    return 5 if load_s >= SLOW_LOAD_S else 3


def out_tokens(fastest_decode_tps: float) -> int:
    """The smallest length whose decode window is long enough on the fastest arm, else the largest."""
    return next((n for n in OUT_TOKENS if (n - 1) / fastest_decode_tps >= DECODE_WINDOW_S), OUT_TOKENS[-1])


def _block_seconds(seconds_per_load: float | Mapping[str, float], loads: int) -> float:
    if isinstance(seconds_per_load, Mapping):
        return math.fsum(seconds_per_load.values())
    return seconds_per_load * loads


def _letters(index: int) -> str:
    """A, B, … Z, AA, AB, …"""
    head, last = divmod(index, 26)
    return (_letters(head - 1) if head else "") + chr(ord("A") + last)


def public(arm: str) -> str:
    return re.sub(r"(?<=,rpc=)[^,]+", lambda found: _hosts(found[0]), arm)


def _hosts(value: str) -> str:
    told = not value or re.fullmatch(r"<\d+>", value)  # twice changes nothing
    return value if told else f"<{len(value.split('+'))}>"


# ── loads ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Planned:
    """One load to do: which arm, where in the run, and the indices of its prompts."""

    block: int
    attempt: int
    position: int
    label: str
    arm: str
    prompts: tuple[int, ...]
    warmups: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a load. `value` is `load_value` of its requests, None where it broke.

    `broken` says why, in words; `status` is the word for a load that did not start or stay up.
    """

    block: int
    attempt: int
    label: str
    value: float | None
    broken: str | None = None
    disturbed: bool = False
    status: Status = Status.OK
    abandoned: bool = False  # its block was cut off, see `abandon`

    def __post_init__(self) -> None:
        if (self.value is None) == (self.broken is None):
            raise ValueError("an outcome has a value or says what broke, one of the two")


def load_value(decode_tps: Sequence[float], requests: int) -> float | None:
    """The value of a load: log of the median speed of its valid requests.

    None, which is a broken load, where fewer than two of them are valid (one, if only one was asked).
    """
    if len(decode_tps) < min(2, requests):
        return None
    return statistics.median(math.log(speed) for speed in decode_tps)


def order(plan: Plan, block: int) -> tuple[str, ...]:
    """The labels of a block (the first is 1) in the order of their loads."""
    pair = (block + 1) // 2
    # Sorting by a hash is a random order that no library version can change.
    shuffled = sorted(plan.labels, key=lambda label: hashlib.sha256(f"{plan.seed}/{pair}/{label}".encode()).digest())
    return tuple(shuffled if block % 2 else reversed(shuffled))


def prompts(plan: Plan, block: int) -> tuple[int, ...]:
    """Prompt indices of the requests of a block, equal for every arm. Block 0 is free for probes."""
    return tuple(range(block * plan.requests, (block + 1) * plan.requests))


def warmups(plan: Plan, block: int) -> tuple[int, ...]:
    """Prompt indices of the warm-ups of a block: beyond all those that are measured."""
    first = (plan.max_blocks + 1) * plan.requests
    return tuple(range(first + block * plan.warmups, first + (block + 1) * plan.warmups))


@dataclass(slots=True)
class _Progress:
    """Where a run stands after its outcomes."""

    block: int = 1
    attempt: int = 1
    repeats: int = 0
    todo: tuple[str, ...] = ()
    current: dict[str, Outcome] = dataclasses.field(default_factory=dict)
    done: list[dict[str, Outcome]] = dataclasses.field(default_factory=list)
    out: dict[str, Outcome] = dataclasses.field(default_factory=dict)  # arms that run no more, by their last load


def _replay(plan: Plan, outcomes: Sequence[Outcome]) -> _Progress:
    """Follow the outcomes through the plan. Raises RunRefused where they do not belong to it."""
    at = _Progress(todo=order(plan, 1))
    loaded: set[str] = set()

    def restart(*, repeat: bool) -> None:
        at.attempt += 1
        at.repeats += repeat
        at.current = {}
        at.todo = tuple(label for label in order(plan, at.block) if label not in at.out)

    for outcome in outcomes:
        if at.current and (outcome.block, outcome.attempt) == (at.block, at.attempt + 1):
            restart(repeat=False)  # the attempt before was abandoned
        if (outcome.block, outcome.attempt, outcome.label) != (at.block, at.attempt, (at.todo or ("",))[0]):
            raise RunRefused(
                f"load {outcome.label} of block {outcome.block}, attempt {outcome.attempt}, does not follow the plan; "
                "the file was changed, so start a new run"
            )
        at.todo = at.todo[1:]
        may_repeat = at.repeats < plan.max_repeats
        if outcome.value is not None and not (outcome.disturbed and may_repeat):
            at.current[outcome.label] = outcome
            loaded.add(outcome.label)
        elif outcome.value is None and (
            not may_repeat
            or outcome.status is Status.VOID  # right before is no excuse
            or (outcome.status in RESULTS and outcome.label not in loaded)
        ):
            at.out[outcome.label] = outcome
        else:
            restart(repeat=True)
        if not at.todo:
            at.done.append(at.current)
            at.block, at.attempt, at.repeats, at.current = at.block + 1, 1, 0, {}
            at.todo = tuple(label for label in order(plan, at.block) if label not in at.out)
    if outcomes and outcomes[-1].abandoned and at.current:
        restart(repeat=False)
    return at


def next_load(plan: Plan, outcomes: Sequence[Outcome]) -> Planned | None:
    """The load to do now, None when the run is over. Pure.

    A run stops after a look at which all its contrasts are settled, after its last block, or when
    no contrast has both its arms left.
    """
    at = _replay(plan, outcomes)
    if len(at.done) >= plan.max_blocks or not at.todo:
        return None
    alive = [pair for pair in plan.contrasts if not at.out.keys() & set(pair)]
    if plan.contrasts and not alive:
        return None
    between_blocks = not at.current and at.attempt == 1
    if between_blocks and len(at.done) in plan.looks and _settled(plan, alive, at.done):
        return None
    label = at.todo[0]
    return Planned(
        block=at.block,
        attempt=at.attempt,
        position=order(plan, at.block).index(label),
        label=label,
        arm=next(arm.text for arm in plan.arms if arm.label == label),
        prompts=prompts(plan, at.block),
        warmups=warmups(plan, at.block),
    )


def _settled(plan: Plan, contrasts: Sequence[tuple[str, str]], blocks: Sequence[Mapping[str, Outcome]]) -> bool:
    """Is every contrast decided, and narrow? The twin has no say: it is the noise floor, not a claim."""
    return all(
        verdict.contrast(_logs(blocks, a), _logs(blocks, b), plan.level, plan.margin).settled for a, b in contrasts
    )


def _logs(blocks: Sequence[Mapping[str, Outcome]], label: str) -> list[float]:
    return [found for block in blocks if (found := block[label].value) is not None]


def abandon(plan: Plan, outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The outcomes of a killed run, ready to go on: loads of a block cut off in the middle are marked.

    They stay in the file; the block is run again whole, and that is no repeat.
    """
    at = _replay(plan, outcomes)
    cut_off = (at.block, at.attempt)
    return tuple(
        dataclasses.replace(outcome, abandoned=True) if (outcome.block, outcome.attempt) == cut_off else outcome
        for outcome in outcomes
    )


def loads_left(plan: Plan, outcomes: Sequence[Outcome]) -> int:
    """At most, if no block must repeat and no look ends the run early."""
    at = _replay(plan, outcomes)
    return (plan.max_blocks - len(at.done)) * (len(plan.arms) - len(at.out)) - len(at.current)


# ── for the analysis ────────────────────────────────────────────────────────────────────────


def blocks_done(plan: Plan, outcomes: Sequence[Outcome]) -> int:
    return len(_replay(plan, outcomes).done)


def blocks_judged(plan: Plan, outcomes: Sequence[Outcome]) -> int:
    """Blocks that a verdict may use: up to the last look passed. A run cut off before any look has no claims."""
    done = blocks_done(plan, outcomes)
    return max((look for look in plan.looks if look <= done), default=done)


def kept(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, tuple[Outcome, ...]]:
    """The loads that are judged, one of every block, for the arms that ran to the end."""
    at = _replay(plan, outcomes)
    judged = at.done[: blocks_judged(plan, outcomes)]
    return {label: tuple(block[label] for block in judged) for label in plan.labels if label not in at.out}


def values(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Log speeds of `kept`, what `verdict.judge` takes."""
    return {
        label: [found for load in loads if (found := load.value) is not None]
        for label, loads in kept(plan, outcomes).items()
    }


def statuses(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, ArmStatus]:
    """Of every arm, as far as the loads tell: one that failed for good, or broke twice, is not OK."""
    out = _replay(plan, outcomes).out
    found = {}
    for label in plan.labels:
        broken = [outcome for outcome in outcomes if outcome.label == label and outcome.value is None]
        if label in out:
            word = out[label].status
            found[label] = ArmStatus(Status.UNSTABLE if word is Status.OK else word, out[label].broken or "")
        elif len(broken) >= 2:
            found[label] = ArmStatus(
                Status.UNSTABLE, f"{len(broken)} of its loads broke, the last: {broken[-1].broken}"
            )
        else:
            found[label] = ArmStatus(Status.OK)
    return found
