"""The best of many placements in at most ten loads: a search for the edge of memory.

Candidates are ordered by what they leave on the host, one for each placement class. Speed rises
as less stays on the host, up to the edge where the card is full; beyond it loading fails, or
weights spill and speed collapses. So the edge is bracketed and bisected, its neighbours are
tried, and the best are measured again. (An optimiser that only compares speeds walks into
the side that does not load.) The result says which candidates deserve blocks of their own: the
numbers of a search are picked for being high, and are never published.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

REACH = 4  # first bracket around the guess, in candidates
STRIDE = 8  # how far a bracket that missed the edge moves
NEIGHBOURS = (1, 2, 4)  # beside the edge, where a card that is nearly full may already be slower
SLOWER = 0.015  # than the upper end of the bracket: beyond the edge
MOST_LOADS = 10
AGAIN = 2  # candidates measured twice, as far as loads are left


@dataclass(frozen=True, slots=True)
class Tried:
    """One candidate tried. `value` is its log speed, None where it did not load; `loads` is what that cost."""

    candidate: int
    value: float | None
    spilled: bool = False
    loads: int = 1


@dataclass(frozen=True, slots=True)
class Found:
    """Candidates that ran, best first, and every load in order. `edge`: the last before memory is full."""

    ranked: tuple[int, ...]
    tried: tuple[Tried, ...]
    edge: int | None

    @property
    def best(self) -> int | None:
        return self.ranked[0] if self.ranked else None


def search(count: int, guess: int, measure: Callable[[int], Tried]) -> Found:
    """Search candidates 0 (least on the host) to `count - 1`; `guess` is the first thought to fit."""
    tried: list[Tried] = []

    def spent() -> int:
        return sum(each.loads for each in tried)

    def load(candidate: int) -> Tried:
        tried.append(measure(candidate))
        return tried[-1]

    def known(candidate: int) -> Tried:
        return next((each for each in tried if each.candidate == candidate), None) or load(candidate)

    def may_load() -> bool:
        return spent() < MOST_LOADS - AGAIN

    last = count - 1
    guess = max(0, min(guess, last))
    lower, upper = guess - REACH, guess + REACH
    while may_load() and upper < last and _beyond(known(upper), known(last)):
        lower, upper = upper, upper + STRIDE  # the whole bracket was beyond the edge
    upper = min(upper, last)
    if known(upper).value is None and upper == last:
        # The one that should always load does not: a host that is too small for it, or a crash. Others may.
        others = dict.fromkeys((guess, (guess + last) // 2, guess // 2, 0))
        found = next((each for each in others if may_load() and known(each).value is not None), None)
        if found is None:
            return Found((), tuple(tried), None)
        lower, upper = found - REACH, found
    while may_load() and lower >= 0 and not _beyond(known(lower), known(upper)):
        lower, upper = lower - STRIDE, lower  # and here it was all before it
    lower = max(lower, -1)
    while may_load() and upper - lower > 1:
        middle = (lower + upper) // 2
        if _beyond(known(middle), known(upper)):
            lower = middle
        else:
            upper = middle
    for step in NEIGHBOURS:
        if upper + step <= last and spent() < MOST_LOADS:
            known(upper + step)
    for candidate in _ranked(tried)[:AGAIN]:
        if spent() < MOST_LOADS:
            load(candidate)
    return Found(tuple(_ranked(tried)), tuple(tried), upper)


def _beyond(one: Tried, upper: Tried) -> bool:
    """Does it fail, spill, or run slower than a candidate that leaves more on the host?"""
    return one.value is None or one.spilled or (upper.value is not None and one.value < upper.value - SLOWER)


def by_candidate(tried: Iterable[Tried]) -> dict[int, list[float]]:
    """The log speeds of each candidate that loaded."""
    values: dict[int, list[float]] = {}
    for each in tried:
        if each.value is not None:
            values.setdefault(each.candidate, []).append(each.value)
    return values


def _ranked(tried: list[Tried]) -> list[int]:
    """Candidates that ran without spilling, by mean speed, best first."""
    values = by_candidate(each for each in tried if not each.spilled)
    return sorted(values, key=lambda candidate: -math.fsum(values[candidate]) / len(values[candidate]))
