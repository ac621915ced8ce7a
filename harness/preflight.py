"""Before anything is loaded: who else has memory of the GPUs, and whether the cards are fit to be measured.

A program that holds memory takes it from every engine, and one that goes on and off takes it from
some: so it is named, waited for or refused, as the user wants. What slows a card down is said and
left to the user, for it cannot be mended from here.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from harness import gpus
from harness.contract import Device, Say
from harness.errors import RunRefused
from harness.gpu import Gpu, State
from harness.machine import Machine
from harness.sizes import format_bytes

HELD_BYTES = 256 << 20  # of a GPU; a desktop may hold more, and is named all the same
NEAR_C = 15.0  # to its limit: no chip at rest is so close
WAIT_S = 60.0
LOOK_S = 1.0
MOST_NAMED = 3
LOW_CLOCK = 0.6  # of the highest: a card that works and is slower was set to, or cannot
INTEGRATED = re.compile(
    r"\b(U?HD|Iris|Arc)\b.{0,12}\bGraphics\b|\bRadeon(?:\(TM\))? (?:Vega \d+ )?Graphics\b|\buma: 1\b|\bllvmpipe",
    re.I,
)
UNITE = "name one instance in CUDA_VISIBLE_DEVICES (`nvidia-smi -L` lists them)"
Said = tuple[Literal["ok", "warn"], str, str | None]  # how bad, what, and the next step


@dataclass(frozen=True, slots=True)
class Foreign:
    """Memory of a card that is held by somebody else. `pid` is None where nobody tells whose it is."""

    card: str
    pid: int | None
    process: str | None
    used_bytes: int | None
    draws: bool = False

    def __str__(self) -> str:
        size = "an unknown amount" if self.used_bytes is None else format_bytes(self.used_bytes)
        if self.pid is None:
            return f"programs that cannot be seen from here hold {size} of {self.card}"
        return f"{self.process or 'a process'} (pid {self.pid}) holds {size} of {self.card}"


@dataclass(frozen=True, slots=True)
class Cleared:
    """How the cards were found before a run: what others hold of them, after waiting."""

    waited_s: float
    foreign: tuple[Foreign, ...]

    @property
    def large(self) -> tuple[Foreign, ...]:
        """Those who take memory that an engine would use."""
        return tuple(filter(is_large, self.foreign))


# ── who holds memory ────────────────────────────────────────────────────────────────────────


def foreign(states: Sequence[State], machine: Machine) -> tuple[Foreign, ...]:
    """All who hold memory of these cards, the largest of a card first. None of our engines runs when this is asked.

    In a container the driver tells pids of the host, so no name is looked up.
    """
    found: list[Foreign] = []
    for number, state in enumerate(states):
        card = name_of(number, states)
        named = [
            Foreign(card, each.pid, None if machine.container else _process_name(each.pid), each.used_bytes, each.draws)
            for each in state.holders or ()
        ]
        found += named
        used, reserved = state.glance.used_bytes, state.details.reserved_bytes
        if used is not None and reserved is not None and all(each.used_bytes is not None for each in named):
            rest = used - reserved - sum(each.used_bytes or 0 for each in named)
            found += [Foreign(card, None, None, rest)] if rest > HELD_BYTES else []
    return tuple(found)


def is_large(held: Foreign) -> bool:
    """Whether it takes memory that an engine would use. A desktop draws on, whatever it holds."""
    return not held.draws and (held.used_bytes is None or held.used_bytes > HELD_BYTES)


def name_of(number: int, states: Sequence[State]) -> str:
    """Of a card in sentences, with its number where there are others."""
    name = states[number].gpu.name
    return f"{number}: {name}" if len(states) > 1 else name


def _process_name(pid: int) -> str | None:
    with contextlib.suppress(psutil.Error, OSError):
        return psutil.Process(pid).name() or None
    return None


def clear(
    policy: str,
    machine: Machine,
    *,
    say: Say,
    wait_s: float = WAIT_S,
    look: Callable[[], tuple[State, ...]] = gpus.states,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Cleared:
    """Look at the cards, and at those who hold much of their memory: wait for them ("wait", then go on), raise
    RunRefused ("refuse") or go on ("go-on").
    """
    begin, said = clock(), False
    while True:
        found = foreign(look(), machine)
        large = [each for each in found if is_large(each)]
        waited_s = clock() - begin
        if policy == "refuse" and large:
            raise RunRefused(f"{_listed(large)}; {_step(machine)}, or go on all the same with --gpu-in-use go-on")
        if policy == "go-on" or not large or waited_s >= wait_s:
            return Cleared(waited_s, found)
        if not said:
            say(f"{_listed(large)}; waiting up to {wait_s:.0f} s for it to end (--gpu-in-use go-on skips this)")
            said = True
        sleep(LOOK_S)


def _listed(held: Sequence[Foreign]) -> str:
    more = [f"{len(held) - MOST_NAMED} more hold less"] if len(held) > MOST_NAMED else []
    return "; ".join([*map(str, held[:MOST_NAMED]), *more])


def _step(machine: Machine) -> str:
    seen = "Windows' task manager shows by whom; " if machine.wsl else ""
    return f"{seen}end it, or have it unload (`ollama stop NAME`)"


def holding(state: State, name: str, held: Sequence[Foreign], machine: Machine) -> Iterator[Said]:
    """Who has memory of one card, as a finding."""
    mine = [each for each in held if each.card == name]
    named = [each for each in mine if each.pid is not None]
    if named:
        told = [
            f"{each.process or 'a process'} (pid {each.pid}) "
            + ("–" if each.used_bytes is None else format_bytes(each.used_bytes))
            for each in named[:MOST_NAMED]
        ] + ([f"{len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else [])
        unknown = any(each.used_bytes is None for each in named)
        large = sum(each.used_bytes or 0 for each in named) > HELD_BYTES or (
            unknown and (state.glance.used_bytes or 0) > HELD_BYTES
        )
        step = "end them before a run, or have them unload (`ollama stop NAME`)"
        yield "warn" if large else "ok", f"{name} is held by {', '.join(told)}", step if large else None
    for each in mine:
        if each.pid is None and each.used_bytes is not None:
            why = "WSL2 does not tell by whom" if machine.wsl else "by no process that can be seen from here"
            yield (
                "warn",
                f"{format_bytes(each.used_bytes)} of {name} are held, {why}",
                "end what uses the GPU before a run",
            )


# ── what slows a card down ──────────────────────────────────────────────────────────────────


def slowing(state: State, name: str) -> Iterator[Said]:
    """What a user should know of a card before its numbers are believed."""
    gpu, now, details = state.gpu, state.glance, state.details
    if gpu.mig:
        yield "warn", f"{name} is split by MIG, so figures of the whole card are no budget", UNITE
    if now.throttles:
        reasons = ", ".join(sorted(now.throttles))
        yield "warn", f"{name} runs below its clock now ({reasons})", "let it cool and look at its fans and power"
    usual = details.usual_power_w
    if gpu.power_limit_w is not None and usual is not None and gpu.power_limit_w < usual - 1:
        step = f"`sudo nvidia-smi -pl {usual:.0f}` lifts it, or publish it with the numbers"
        yield "warn", f"{name} is capped at {gpu.power_limit_w:.0f} W of {usual:.0f} W", step
    if now.lanes is not None and details.most_lanes is not None and now.lanes < details.most_lanes:
        yield (
            "warn",
            f"{name} is linked by {now.lanes} of {details.most_lanes} PCIe lanes",
            "if it stays so under load, take another slot: what is not on the card crosses there",
        )
    if near(now.celsius, details.slowdown_celsius) and "heat" not in (now.throttles or ()):
        fact = f"{name} has {now.celsius:.0f} °C and slows down at {details.slowdown_celsius:.0f} °C"
        yield "warn", fact, "let it cool before a run"
    if details.display:
        fact = f"{name} draws a screen, which takes some of its memory and time"
        yield "warn", fact, "leave the desktop alone while a run goes on, or draw the screen with another GPU"


def near(now: float | None, limit: float | None) -> bool:
    return now is not None and limit is not None and now > limit - NEAR_C


def wrong_device(devices: Sequence[Device], machine: Machine) -> str | None:
    """A sentence if an engine sees only GPUs inside the CPU and the machine has another; None if all is well."""
    inside = [each for each in devices if INTEGRATED.search(each.description)]
    if not inside or len(inside) < len(devices) or not any(not gpu.unified for gpu in machine.gpus):
        return None
    seen = ", ".join(f"{each.name} ({each.description})" for each in inside)
    own = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus))
    return (
        f"it computes on {seen}, a GPU inside the CPU, and does not see the {own}; "
        "take an engine built for that, `llamaduel engines install llama-cpp` builds one"
    )


def low_clock(clock_mhz: float | None, gpu: Gpu) -> str | None:
    """A sentence if a card that worked did so far below its highest clock."""
    if clock_mhz is None or gpu.clock_mhz is None or clock_mhz >= LOW_CLOCK * gpu.clock_mhz:
        return None
    return f"{gpu.name} ran at {clock_mhz:.0f} of {gpu.clock_mhz} MHz while it worked"
