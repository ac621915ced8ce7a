"""Every load in time order, a row for each arm, so that drift, jumps and lotteries show.

All rows have one scale of proportion about the median of their arm: a load that is 2 % off stands
as far from its line in each. Loads that are not judged are hollow; one that broke has no height.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from harness.charts.canvas import (
    BAND,
    BLUE,
    EDGE_PX,
    FAINT,
    GRID,
    SMALL_PT,
    VERMILLION,
    WIDTH_PX,
    Sheet,
    name_column,
    stand_in,
    steps,
    with_room,
)
from harness.compare import Comparison, all_rows
from harness.run import outcomes_of
from harness.words import count, number, percent

ROW_PX, CROWDED_PX = 46, 34
CROWDED = 8  # rows, from which on they are lower
NAMES_LEAST_PX = 116.0  # for the median below a short name
LEAST_SPAN, MOST_SPAN = 0.02, 0.30  # of the speed, that half a row stands for
PAUSE = 10.0  # times the usual time from load to load: a run that was resumed, and nothing happened in between


class _Kind(Enum):
    """What became of a load: the words for it, its mark and its colour."""

    JUDGED = ("judged", "o", BLUE)
    DISTURBED = ("judged, though other programs were busy", "s", VERMILLION)
    SET_ASIDE = ("not judged: its block was run again, was cut off, or came after the last look", "o", FAINT)
    BROKEN = ("broke, without a speed", "x", VERMILLION)

    @property
    def is_judged(self) -> bool:
        return self in (_Kind.JUDGED, _Kind.DISTURBED)

    @property
    def is_filled(self) -> bool:
        return self is _Kind.JUDGED


@dataclass(frozen=True, slots=True)
class _Load:
    """One load in its row."""

    name: str
    block: tuple[int, int]  # and its attempt
    minutes: float  # since the first
    kind: _Kind
    log_tps: float | None
    off: float | None  # of its arm's median, in log units


def finding(comparison: Comparison) -> str | None:
    """In one sentence; None where no arm has two loads that count: one alone is off nothing."""
    judged = [load for load in _loads(comparison) if load.kind.is_judged]
    if not judged or all(len(row.loads) < 2 for row in all_rows(comparison)):
        return None
    far = max(math.expm1(abs(load.off)) for load in judged if load.off is not None)
    drift = comparison.judgement.drift
    told = "" if drift is None else "; the speed drifts" if drift.flagged else "; no drift is shown"
    return f"{count(len(judged), 'load')} in time order: the farthest is {percent(far)} off the median of its arm{told}"


def draw(comparison: Comparison) -> str:
    """SVG for a light page, where there is a finding."""
    title, loads = finding(comparison) or "", _loads(comparison)
    arms = list(dict.fromkeys(_name(comparison, label) for label in _in_order(comparison)))
    arms = [name for name in arms if any(load.name == name for load in loads)]
    column, lines = name_column(arms)
    start, end = EDGE_PX + max(column, NAMES_LEAST_PX) + 14, float(WIDTH_PX - EDGE_PX - 8)
    far = max((abs(load.off) for load in loads if load.off is not None), default=0.0)
    span = min(max(math.log1p(LEAST_SPAN), far), math.log1p(MOST_SPAN))
    times = sorted(load.minutes for load in loads)
    pauses = _pauses(times)
    longest = _worked(times[-1], pauses) or 1.0

    def x(minutes: float) -> float:
        return start + (end - start) * _worked(minutes, pauses) / longest

    sheet = Sheet()
    sheet.heading(
        title,
        "The line of a row is the median of its arm, in decode tok/s; its upper edge is "
        f"{percent(math.expm1(span))} above it.",
        *stand_in(comparison),
    )
    firsts = [loads[0], *(load for before, load in pairwise(loads) if load.block != before.block)]
    starts = [(load.block, x(load.minutes)) for load in firsts]
    _draw_blocks(sheet, starts, end)
    top, row_px = sheet.y, CROWDED_PX if len(arms) > CROWDED else ROW_PX
    middles = {}
    for name, its in zip(arms, lines, strict=True):
        height = max(row_px, 13 * (len(its) + 1) + 6)
        middles[name] = sheet.y + height / 2
        median = _median(loads, name)
        sheet.names(middles[name], its, "no speed" if median is None else f"median {number(math.exp(median))}")
        if len(middles) % 2:
            sheet.box(start - 6, sheet.y, end - start + 12, height, facecolor=BAND, zorder=0.2)
        sheet.line([start - 4, end + 4], [middles[name]] * 2, GRID, 1.2, zorder=0.7)
        sheet.y += height
    bottom = sheet.y
    sheet.uprights([place - 5 for _, place in starts[1:]], top, bottom, GRID, linestyle=(0, (3, 3)), width=0.8)
    sheet.uprights([(x(a) + x(b)) / 2 for a, b in pauses], top, bottom, FAINT, linestyle=(0, (1, 2)), width=1.4)
    for kind in _Kind:
        _draw_kind(sheet, [load for load in loads if load.kind is kind], kind, middles, x, row_px / 2 - 6, span)
    sheet.ticks([(x(value), f"{value:g}") for value in _ticks(times[-1], pauses)], bottom, bottom + 4)
    sheet.y = bottom + 32
    cut = f"; {count(len(pauses), 'pause')} cut out, dotted" if pauses else ""
    sheet.text((start + end) / 2, sheet.y, f"minutes since the first load{cut}", points=SMALL_PT, ha="center")
    _draw_key(sheet, [kind for kind in _Kind if any(load.kind is kind for load in loads)])
    return sheet.svg(title)


def _draw_blocks(sheet: Sheet, starts: Sequence[tuple[tuple[int, int], float]], end: float) -> None:
    """The number of each block above it, as many as there is room for; with its attempt from the second on."""
    edges = [*(place for _, place in starts), end]
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    labels = [f"{block}" + (f" ({attempt})" if attempt > 1 else "") for (block, attempt), _ in starts]
    labels[0] = f"block {labels[0]}"
    for place, text in with_room(zip(middles, labels, strict=True), SMALL_PT):
        sheet.text(place, sheet.y + 8, text, points=SMALL_PT, color=FAINT, ha="center")
    sheet.y += 14


def _draw_kind(
    sheet: Sheet,
    loads: Sequence[_Load],
    kind: _Kind,
    middles: dict[str, float],
    x: Callable[[float], float],
    half_px: float,
    span: float,
) -> None:
    """All loads of one kind. One beyond the edge of its row is an arrow there, with its speed."""
    _, mark, color = kind.value
    face = color if kind.is_filled else "none"
    within = [load for load in loads if load.off is None or abs(load.off) <= span]
    heights = [middles[load.name] - half_px * (-1.0 if load.off is None else load.off / span) for load in within]
    sheet.marks([x(load.minutes) for load in within], heights, mark, color, markerfacecolor=face)
    for load in loads:
        if load.off is not None and load.log_tps is not None and abs(load.off) > span:
            up = load.off > 0
            place, y = x(load.minutes), middles[load.name] - (half_px if up else -half_px)
            sheet.marks([place], [y], "^" if up else "v", color, markerfacecolor=face)
            left = place > WIDTH_PX / 2
            text = number(math.exp(load.log_tps))
            sheet.text(place + (-7 if left else 7), y + 4, text, points=SMALL_PT, ha="right" if left else "left")


def _draw_key(sheet: Sheet, kinds: Sequence[_Kind]) -> None:
    """What the marks are, where one is not simply judged."""
    for kind in kinds if list(kinds) != [_Kind.JUDGED] else []:
        words, mark, color = kind.value
        sheet.y += 16
        sheet.marks([EDGE_PX + 5], [sheet.y - 4], mark, color, markerfacecolor=color if kind.is_filled else "none")
        sheet.text(EDGE_PX + 15, sheet.y, words, points=SMALL_PT)


# ── the loads ───────────────────────────────────────────────────────────────────────────────


def _loads(comparison: Comparison) -> list[_Load]:
    """Of all blocks, in time order."""
    judged = {(row.arm, load.block, load.minutes) for row in all_rows(comparison) for load in row.loads}
    records = [load for load in comparison.run.loads if load.stage == "block"]
    began = min((load.started_unix_s for load in records), default=0.0)
    found = []
    for load, outcome in zip(records, outcomes_of(comparison.run), strict=True):
        name, minutes = _name(comparison, load.label), (load.started_unix_s - began) / 60
        if outcome.value is None:
            kind = _Kind.BROKEN
        elif (name, load.block, minutes) not in judged:
            kind = _Kind.SET_ASIDE
        else:
            kind = _Kind.DISTURBED if outcome.disturbed else _Kind.JUDGED
        found.append(_Load(name, (load.block, load.attempt), minutes, kind, outcome.value, None))
    medians = {name: _median(found, name) for name in {load.name for load in found}}
    return sorted(
        (
            load if load.log_tps is None or (median := medians[load.name]) is None else _placed(load, median)
            for load in found
        ),
        key=lambda load: load.minutes,
    )


def _placed(load: _Load, median: float) -> _Load:
    return dataclasses.replace(load, off=None if load.log_tps is None else load.log_tps - median)


def _median(loads: Sequence[_Load], name: str) -> float | None:
    """Log speed: of the judged loads of an arm, or where none is judged of all that have a speed."""
    its = [load for load in loads if load.name == name and load.log_tps is not None]
    logs = [load.log_tps for load in [each for each in its if each.kind.is_judged] or its]
    return statistics.median(log for log in logs if log is not None) if logs else None


def _in_order(comparison: Comparison) -> list[str]:
    """Labels as the arms were named, the twin behind its original."""
    drawn = comparison.header.plan
    labels = [label for label in drawn.labels if label != drawn.twin]
    if drawn.twin is not None:
        labels.insert(labels.index(drawn.reference) + 1, drawn.twin)
    return labels


def _name(comparison: Comparison, label: str) -> str:
    drawn = comparison.header.plan
    text = next(arm.text for arm in drawn.arms if arm.label == label)
    return f"{text} (twin)" if label == drawn.twin else text


# ── time ────────────────────────────────────────────────────────────────────────────────────


def _pauses(times: Sequence[float]) -> list[tuple[float, float]]:
    """Long gaps from one load to the next, but for the usual time at their end."""
    gaps = [b - a for a, b in pairwise(times)]
    usual = statistics.median(gaps) if gaps else 0.0
    return [(a, b - usual) for a, b in pairwise(times) if usual and b - a > PAUSE * usual]


def _worked(minutes: float, pauses: Sequence[tuple[float, float]]) -> float:
    """Minutes without the pauses before."""
    return minutes - sum(min(minutes, end) - begin for begin, end in pauses if minutes > begin)


def _ticks(last: float, pauses: Sequence[tuple[float, float]]) -> list[float]:
    """Round minutes outside the pauses."""
    first, second, *_ = [*steps(0.0, _worked(last, pauses), 8), 1.0]
    step = second - first
    edges = [0.0, *(edge for pause in pauses for edge in pause), last]
    return [
        round(number * step, 9)
        for begin, end in zip(edges[::2], edges[1::2], strict=True)
        for number in range(math.ceil(begin / step), math.floor(end / step) + 1)
    ]
