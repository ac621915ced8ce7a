"""The parity table: what every arm was asked for, what it really ran with, and why two arms differ.

A row is one setting over all arms, or where one kind of buffer lay. A difference is explained by
what was asked for, by what was left to the engines, by their builds, or by words of an adapter;
what none of these explains is unexplained, and said loudest. Beside it stand the engines' own
claims of placement, against the buffers. Nothing here asks which engine it is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.contract import Buffer, Realised, Settings
from harness.placement import same_bytes
from harness.record import Contender, Run
from harness.sizes import format_bytes

PLACED_BY, BY_USER = "placed_by", "user"
BUFFERS = {"weights": ("weights",), "context_memory": ("kv", "rs"), "compute_buffers": ("compute", "output")}
SHAPES = ("context", "slots", "batch", "ubatch", "flash_attention", "kv_k", "kv_v", "load_mode")  # what sizes hang on
ASKABLE = tuple(field.name for field in dataclasses.fields(Settings))
LEFT = (None, "auto")
ASKED = "asked for differently"
ALL = 0.995  # of a share, as 100 % is printed
OVERCLAIM = 0.15  # embeddings stay on the host in a whole offload too, and a claim counts layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """One setting. `asked` None is left to the engine, a value None was not told; values of several loads have strokes.

    `why` and `unexplained` are sentences. An arm may do otherwise than asked without any two arms that differ.
    """

    setting: str
    asked: Mapping[str, str | None]
    values: Mapping[str, str | None]
    differs: bool
    why: tuple[str, ...] = ()
    unexplained: tuple[str, ...] = ()

    @property
    def is_placement(self) -> bool:
        """Whether it tells where things lay, which is what arms differ by."""
        return self.setting == PLACED_BY or self.setting in BUFFERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What an engine says of its placement, and what its buffers say: shares (0 to 1) that are on a device."""

    arm: str
    text: str
    weights_share: float | None
    bytes_share: float | None
    wrong: bool


# ── the rows ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An arm, and what each of its loads realised, the probe first."""

    contender: Contender
    loads: tuple[Realised, ...]

    @property
    def arm(self) -> str:
        return self.contender.arm

    @property
    def placement(self) -> str | None:
        """As asked for; None is the engine's own choice."""
        return self.arm.partition(",")[0].partition("@")[2] or None

    def told(self, setting: str) -> tuple[str, ...]:
        """Its different values, in the order in which loads told them."""
        if setting in BUFFERS:
            found = [_where(load.buffers, BUFFERS[setting]) for load in self.loads]
        else:
            found = [load.settings.get(setting) for load in self.loads]
        return tuple(dict.fromkeys(value for value in found if value is not None))

    def asked(self, setting: str) -> str | None:
        if setting == PLACED_BY or setting in BUFFERS:
            return self.placement if self.told(setting) else None
        own = getattr(self.contender.settings, setting) if setting in ASKABLE else None
        return str(own) if own is not None else self.loads[0].asked.get(setting)

    def explained(self, setting: str) -> str | None:
        return next((load.explained[setting] for load in self.loads if setting in load.explained), None)

    def strays(self, setting: str) -> bool:
        """Whether some load had another value than the one asked for."""
        asked = self.asked(setting)
        if asked in LEFT or setting in BUFFERS:
            return False
        return any(value != (BY_USER if setting == PLACED_BY else asked) for value in self.told(setting))


def parity(run: Run) -> tuple[Parity, ...]:
    """Every setting that any engine read back, and every kind of buffer; empty where no engine told any."""
    realised = {each.arm: [each.realised] for each in run.header.contenders if each.realised is not None}
    for load in run.loads:
        if load.stage == "block" and load.realised is not None:
            realised.setdefault(load.arm, []).append(load.realised)
    arms = [_Loaded(each, tuple(realised[each.arm])) for each in run.header.contenders if each.arm in realised]
    told = {name for arm in arms for load in arm.loads for name in load.settings}
    names = [name for name in ASKABLE if name in told] + sorted(told.difference(ASKABLE))
    stock = dict(run.header.plan.settings).get("kind") == "stock"
    changed = [name for name in SHAPES if _differs(name, arms)]
    return tuple(
        _row(name, arms, changed, stock=stock) for name in (*names, *BUFFERS) if any(a.told(name) for a in arms)
    )


def _row(name: str, arms: Sequence[_Loaded], changed: Sequence[str], *, stock: bool) -> Parity:
    unexplained: list[str] = []
    bent: dict[str, str] = {}
    for arm in arms:
        if arm.strays(name):
            if because := arm.explained(name):
                bent[arm.arm] = because
            else:
                values = " / ".join(arm.told(name))
                unexplained.append(f"{arm.arm} was asked for {arm.asked(name)} and has {values}")
        elif len(arm.told(name)) > 1 and not (stock or name in BUFFERS or name == PLACED_BY):
            unexplained.append(f"{arm.arm} had not the same in every load")
    steady = [arm for arm in arms if arm.told(name) and not arm.strays(name)]
    alike: dict[str | None, list[_Loaded]] = {}
    for arm in steady:
        alike.setdefault(arm.asked(name), []).append(arm)
    why: list[str] = []
    if len(alike) > 1 and _differs(name, steady):
        why.append(_asked_differently(name, alike))
    if any(_differs(name, group) for group in alike.values()):
        left = list(_left(name, alike, changed, stock=stock))
        if not left and not unexplained:
            unexplained.append("it differs, and nothing that was asked for or left open says why")
        why += left
    same = set(bent.values())
    why += (same if len(same) == 1 and len(bent) == len(arms) else [_grouped(bent)]) if bent else []
    return Parity(
        setting=name,
        asked={arm.arm: arm.asked(name) for arm in arms},
        values={arm.arm: " / ".join(arm.told(name)) or None for arm in arms},
        differs=_differs(name, arms),
        why=tuple(why),
        unexplained=tuple(unexplained),
    )


def _differs(name: str, arms: Iterable[_Loaded]) -> bool:
    return len({value for arm in arms for value in arm.told(name)}) > 1


Alike = Mapping[str | None, Sequence[_Loaded]]  # arms that did as they were asked, by what that was


def _asked_differently(name: str, alike: Alike) -> str:
    if name in BUFFERS:
        return "follows from the placement asked for"
    wanted = {
        arm.arm: "left to the engine" if asked is None else asked for asked, arms in alike.items() for arm in arms
    }
    return f"{ASKED}: {_grouped(wanted)}"


def _left(name: str, alike: Alike, changed: Sequence[str], *, stock: bool) -> Iterator[str]:
    """Why arms that were asked for the same are not alike; nothing where that cannot be said."""
    arms = [arm for group in alike.values() if _differs(name, group) for arm in group]
    builds = dict.fromkeys(build for arm in arms for build in arm.told("build"))
    apart = f"different builds: {distance(builds)}" if len(builds) > 1 else None
    open_to_engine = any(arm.asked(name) is None for arm in arms)
    if name == "build":
        yield apart or "different builds"
    elif name in BUFFERS:
        if causes := _hangs_on(name, alike, changed):
            yield f"follows from {', '.join(causes)}"
        elif open_to_engine:
            yield "left to each engine, whose choice hangs on what is free"
        elif apart:
            yield apart
    else:
        words = {arm.arm: because for arm in arms if (because := arm.explained(name))}
        if stock or name == PLACED_BY or not open_to_engine:
            yield "left to each engine"
        elif apart and not words:
            yield "left to each build"
        if words:
            yield _grouped(words)


def _hangs_on(name: str, alike: Alike, changed: Sequence[str]) -> list[str]:
    """The settings that differ and sizes follow from; those of fixed weights only from how they are loaded."""
    fixed = name == "weights" and None not in alike
    return [spoken(each) for each in changed if not fixed or each == "load_mode"]


def _grouped(words: Mapping[str, str]) -> str:
    """ "a and b: x; c: y"."""
    arms: dict[str, list[str]] = {}
    for arm, word in words.items():
        arms.setdefault(word, []).append(arm)
    return "; ".join(f"{' and '.join(named)}: {word}" for word, named in arms.items())


def distance(builds: Iterable[str]) -> str:
    """ "b9509 and b11434, 1925 builds apart"; only their names where one has no number."""
    named = sorted(builds, key=lambda build: (len(build), build))
    numbers = [int(found[1]) for build in named if (found := re.fullmatch(r"b(\d+)", build))]
    apart = f", {max(numbers) - min(numbers)} builds apart" if len(numbers) == len(named) else ""
    return f"{' and '.join(named)}{apart}"


def spoken(setting: str) -> str:
    return setting.replace("_", " ")


def _where(buffers: Iterable[Buffer] | None, kinds: Sequence[str]) -> str | None:
    """ "16.3 GiB CUDA0, 1.2 GiB CPU", devices first; None where the engine did not tell or has none."""
    sizes: dict[tuple[bool, str], int] = {}
    for buffer in buffers or ():
        if buffer.kind in kinds and buffer.bytes:
            place = (buffer.on_host, buffer.device)
            sizes[place] = sizes.get(place, 0) + buffer.bytes
    return ", ".join(f"{format_bytes(sizes[place])} {place[1]}" for place in sorted(sizes)) or None


# ── claims ──────────────────────────────────────────────────────────────────────────────────


def claims(run: Run) -> tuple[Claim, ...]:
    """What each engine said of its placement in the probe. None of it is evidence."""
    found = []
    for each in run.header.contenders:
        said = each.realised.reported if each.realised else {}
        if each.realised is None or not isinstance(said.get("claim"), str):
            continue
        model = run.header.model
        weights, whole = _device_shares(each.realised.buffers, model.size_bytes)
        claimed = said.get("claimed_device_share")
        wrong = False
        if isinstance(claimed, float | int) and weights is not None and whole is not None:
            if claimed >= ALL and model.device_weights_bytes:  # who claims all has all that can be there
                there = round(weights * model.size_bytes)
                short = there < model.device_weights_bytes and not same_bytes(model.device_weights_bytes, there)
                wrong = short or weights - whole > OVERCLAIM
            else:  # a part may be one of all bytes
                wrong = claimed - (min(weights, whole) if claimed >= ALL else whole) > OVERCLAIM
        found.append(Claim(arm=each.arm, text=said["claim"], weights_share=weights, bytes_share=whole, wrong=wrong))
    return tuple(found)


def _device_shares(buffers: Sequence[Buffer] | None, model_bytes: int) -> tuple[float | None, float | None]:
    """Of the model's bytes, and of all bytes that the engine holds. A host buffer may be a span of the file."""
    if buffers is None or not model_bytes:
        return None, None
    there = sum(each.bytes for each in buffers if not each.on_host)
    weights = min(model_bytes, sum(each.bytes for each in buffers if each.kind == "weights" and not each.on_host))
    here = sum(each.bytes for each in buffers if each.on_host and each.kind != "weights")
    return weights / model_bytes, there / (there + model_bytes - weights + here)
