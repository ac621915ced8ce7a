"""Prefill and decode speed of every arm side by side, each with the interval of this arm alone.

Two plots share their rows, so that any number of arms has room for its name and its numbers.
Nothing here compares arms: that is what ratios are for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.charts.canvas import (
    BLUE,
    EDGE_PX,
    FAINT,
    GRID,
    ORANGE,
    SMALL_PT,
    TEXT,
    WIDTH_PX,
    Sheet,
    name_column,
    stand_in,
    steps,
    width_px,
)
from harness.compare import Comparison, Row, all_rows
from harness.plan import Status
from harness.verdict import Interval, telling
from harness.words import NONE, number

ROW_PX = 28
APART_PX = 22  # between the plots


def finding(comparison: Comparison) -> str | None:
    """In one sentence; None where no prefill speed is known."""
    rows = _rows(comparison)
    prefill, decode = [row.prefill_tps for row in rows], [row.decode_tps for row in rows]
    if not any(prefill):
        return None
    return f"Prefill {_span(prefill)}, decode {_span(decode)}"


def draw(comparison: Comparison) -> str:
    """SVG for a light page, where there is a finding."""
    title, rows = finding(comparison) or "", _rows(comparison)
    left, lines = name_column([row.arm for row in rows])
    start, end = EDGE_PX + left + 14, float(WIDTH_PX - EDGE_PX)
    half = (end - start - APART_PX) / 2
    sheet = Sheet()
    sheet.heading(
        title,
        "Each with the 95 % interval of its own arm, which is not for comparing arms: ratios are.",
        *stand_in(comparison),
    )
    sheet.text(start, sheet.y + 10, "prefill, tok/s", points=SMALL_PT, weight="bold")
    sheet.text(start + half + APART_PX, sheet.y + 10, "decode, tok/s", points=SMALL_PT, weight="bold")
    sheet.y += 18
    top = sheet.y
    middles = sheet.rows(lines, ROW_PX)
    bottom = sheet.y
    prefill = [(row.prefill_tps, _text(row.prefill_tps)) for row in rows]
    decode = [(row.decode_tps, _text(row.decode_tps) + " !" * bool(row.flags)) for row in rows]
    for x, speeds, mark, color in ((start, prefill, "s", ORANGE), (start + half + APART_PX, decode, "o", BLUE)):
        _draw_plot(sheet, (x, x + half), (top, bottom), middles, speeds, mark, color)
    sheet.y = bottom + 16
    if any(row.flags for row in rows):
        sheet.y += 14
        sheet.text(EDGE_PX, sheet.y, "! flagged: see what memory allows", points=SMALL_PT, color=FAINT)
    return sheet.svg(title)


def _draw_plot(
    sheet: Sheet,
    sides: tuple[float, float],
    ends: tuple[float, float],
    middles: Sequence[float],
    speeds: Sequence[tuple[Interval | None, str]],
    mark: str,
    color: str,
) -> None:
    """From nothing at the left to the highest, with its number at the right of each."""
    left, right = sides
    room = max(width_px(text, SMALL_PT) for _, text in speeds) + 10
    known = [(y, speed, _bounds(speed)) for y, (speed, _) in zip(middles, speeds, strict=True) if speed is not None]
    most = max((high for _, _, (_, high) in known), default=1.0)

    def x(tps: float) -> float:
        return left + (right - left - room) * tps / most

    sheet.ticks([(x(value), f"{value:g}") for value in steps(0.0, most, 4)], *ends)
    stems = [(place, y) for y, speed, _ in known for place, y in ((left, y), (x(speed.value), y), (math.nan, math.nan))]
    sheet.line([place for place, _ in stems], [y for _, y in stems], GRID, 1.6, zorder=0.7)
    sheet.whiskers([(x(low), x(speed.value), x(high), y) for y, speed, (low, high) in known], color)
    sheet.marks([x(speed.value) for _, speed, _ in known], [y for y, *_ in known], mark, color)
    for y, (each, text) in zip(middles, speeds, strict=True):
        place = 8 + (left if each is None else x(_bounds(each)[1]))
        sheet.text(place, y + 4, text, points=SMALL_PT, color=FAINT if each is None else TEXT)


def _text(speed: Interval | None) -> str:
    return number(speed.value if speed is not None else None)


def _bounds(speed: Interval) -> tuple[float, float]:
    """The ends of its interval, or twice the speed itself where the interval says nothing."""
    return telling(speed.low, speed.high) or (speed.value, speed.value)


def _rows(comparison: Comparison) -> list[Row]:
    return [row for row in all_rows(comparison) if row.status.word is not Status.ALIAS]


def _span(speeds: Sequence[Interval | None]) -> str:
    values = [speed.value for speed in speeds if speed is not None]
    if not values:
        return NONE
    least, most = number(min(values)), number(max(values))
    return f"{least} tok/s" if least == most else f"{least} to {most} tok/s"
