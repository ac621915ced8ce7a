"""Ratios of decode speed with their intervals, one row for each declared comparison and for the twin.

A verdict is told by the shape and colour of its mark and by its word beside it; what has no ratio
is below in words. A run that is RED ranks nothing, and so no row of it has a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from harness import plan
from harness.charts.canvas import (
    BAND,
    BLUE,
    EDGE_PX,
    FAINT,
    SMALL_PT,
    TEXT,
    VERMILLION,
    WIDTH_PX,
    Sheet,
    brief,
    name_column,
    named,
    shortened,
    stand_in,
    steps,
)
from harness.compare import Comparison
from harness.verdict import Contrast, telling
from harness.words import NONE, count, percent, ratio

WORDS_PX = 146  # of the verdicts at the right
ROW_PX = 34
LEAST_MARGINS = 2.0  # that the axis shows on both sides of 1
MOST_POWERS = 7  # of ten, that each have a number
LINEAR_TO = 6.0  # times from the least to the most, where the numbers of the axis are evenly apart
MARKS = {"SAME": ("o", BLUE), "DIFFERENT": ("D", VERMILLION), "INCONCLUSIVE": ("s", FAINT), "SCREENING": ("o", FAINT)}
FILLED = frozenset({"SAME", "DIFFERENT"})
SAID = {"SCREENING": "no claim"}


def finding(comparison: Comparison) -> str | None:
    """In one sentence; None where there is no ratio to show."""
    compared, apart = _compared(comparison), _apart(comparison)
    if not (compared or (apart and _twin(comparison))):
        return None
    if comparison.state.word == "RED":
        return "This run is RED and ranks nothing"
    against = _reference(comparison)
    if comparison.state.word == "SCREENING":
        blocks = count(comparison.judgement.n, "block")
        return f"{blocks}: ratios of decode speed{f' to {against}' if against else ''}, and no claim"
    within = percent(comparison.header.plan.margin)
    groups = {
        "faster": [name for name, each in compared if each.word == "DIFFERENT" and each.ratio > 1],
        "slower": [name for name, each in compared if each.word == "DIFFERENT" and each.ratio < 1],
        f"the same within {within}": [name for name, each in compared if each.word == "SAME"],
        "not told apart": [name for name, each in compared if each.word == "INCONCLUSIVE"],
    }
    noun = "arm" if against else "pair"
    told = [
        f"{named(group, noun)} {'is' if len(group) == 1 else 'are'} {what}" for what, group in groups.items() if group
    ]
    return (f"Against {against}: " if against else "Decode speed: ") + ("; ".join(told) or "no arm can be compared")


def draw(comparison: Comparison) -> str:
    """SVG for a light page, where there is a finding."""
    drawn, title = comparison.header.plan, finding(comparison) or ""
    rows, apart = [*_twin(comparison), *_compared(comparison)], _apart(comparison)
    left, lines = name_column([name for name, _ in (*rows, *apart)])
    start, end = EDGE_PX + left + 14, float(WIDTH_PX - EDGE_PX - WORDS_PX - 10)
    low, high = _range([contrast for _, contrast in rows], drawn.margin)

    def x(ratio: float) -> float:
        return start + (end - start) * math.log(ratio / low) / math.log(high / low)

    sheet = Sheet()
    twin = ", of the twin 95 %" if comparison.judgement.twin else ""
    sheet.heading(
        title,
        f"State {comparison.state.word}. Bars: {drawn.level.words}{twin}. "
        f"Shaded: ±{percent(drawn.margin)}, which counts as the same.",
        *stand_in(comparison),
    )
    top, middles = sheet.y, []
    for name in lines[: len(rows)]:
        height = max(ROW_PX, 13 * len(name) + 8)
        middles.append(sheet.y + height / 2)
        sheet.y += height
    bottom, edge = sheet.y, x(1 / (1 + drawn.margin))
    sheet.box(edge, top, x(1 + drawn.margin) - edge, bottom - top, facecolor=BAND, zorder=0.2)
    sheet.ticks([(x(value), f"{value:g}") for value in _ticks(low, high)], top, bottom)
    sheet.uprights([x(1.0)], top, bottom, TEXT)
    is_twin = [True, *[False] * len(rows)] if _twin(comparison) else [False] * len(rows)
    for (_, contrast), name, y, check in zip(rows, lines, middles, is_twin, strict=False):
        sheet.names(y, name)
        _draw_row(sheet, contrast, x, y, muted=check or not comparison.state.ranks)
    sheet.y = bottom + 30
    against = _reference(comparison)
    axis = f"over that of {against}, log scale" if against else "of the first over the second, log scale"
    axis = shortened(f"decode speed {axis}", WIDTH_PX - 2 * EDGE_PX, SMALL_PT)
    sheet.text(WIDTH_PX - EDGE_PX, sheet.y, axis, points=SMALL_PT, ha="right")
    if apart:
        sheet.y += 12
        sheet.apart([name for name, _ in apart], [why for _, why in apart], start)
    return sheet.svg(title)


def _draw_row(sheet: Sheet, contrast: Contrast, x: Callable[[float], float], y: float, *, muted: bool) -> None:
    """Mark, interval and words; `muted` where its colour would claim something."""
    mark, color = MARKS[contrast.word]
    if muted:
        color = FAINT
    middle = x(contrast.ratio)
    if (bounds := telling(contrast.low, contrast.high)) is not None:
        sheet.whiskers([(x(bounds[0]), middle, x(bounds[1]), y)], color)
    face = color if contrast.word in FILLED else "none"
    sheet.marks([middle], [y], mark, color, markerfacecolor=face)
    left = WIDTH_PX - EDGE_PX - WORDS_PX
    sheet.marks([left + 5], [y - 5], mark, color, markerfacecolor=face)
    sheet.text(left + 14, y - 1, SAID.get(contrast.word, contrast.word), points=SMALL_PT, weight="bold")
    told = shortened(ratio(contrast), WORDS_PX - 14, SMALL_PT)
    sheet.text(left + 14, y + 12, told, points=SMALL_PT, color=FAINT)


# ── what the rows are ───────────────────────────────────────────────────────────────────────


def _reference(comparison: Comparison) -> str | None:
    """The arm that all are compared with, if it is one."""
    drawn = comparison.header.plan
    against = {second for _, second in drawn.contrasts} or {drawn.reference}
    return brief(_texts(comparison)[against.pop()]) if len(against) == 1 else None


def _texts(comparison: Comparison) -> dict[str, str]:
    return {arm.label: arm.text for arm in comparison.header.plan.arms}


def _twin(comparison: Comparison) -> list[tuple[str, Contrast]]:
    """The second copy of the reference against the first, where it ran."""
    drawn, found = comparison.header.plan, comparison.judgement.twin
    return [(f"{_texts(comparison)[drawn.reference]} (twin)", found.contrast)] if found is not None else []


def _compared(comparison: Comparison) -> list[tuple[str, Contrast]]:
    """Every declared pair that has a ratio, by the name of its row."""
    return [
        (_name(comparison, *pair), contrast)
        for pair, contrast in comparison.judgement.contrasts.items()
        if contrast.word != "NOT_COMPARABLE"
    ]


def _name(comparison: Comparison, first: str, second: str) -> str:
    texts = _texts(comparison)
    return texts[first] if _reference(comparison) else f"{texts[first]} / {texts[second]}"


def _apart(comparison: Comparison) -> list[tuple[str, str]]:
    """What has no ratio, and why not: pairs that may not be compared, then arms without a pair."""
    found = [
        (_name(comparison, *pair), f"not comparable: {contrast.reason}")
        for pair, contrast in comparison.judgement.contrasts.items()
        if contrast.word == "NOT_COMPARABLE"
    ]
    texts = _texts(comparison)
    told = {texts[label] for pair in comparison.judgement.contrasts for label in pair}
    found += [
        (row.arm, row.why_not or ("in no declared comparison" if row.loads else NONE))
        for row in comparison.rows
        if plan.public(row.arm) not in told and not (row.is_reference and row.loads)
    ]
    return found


# ── the axis ────────────────────────────────────────────────────────────────────────────────


def _range(contrasts: Sequence[Contrast], margin: float) -> tuple[float, float]:
    """Least and most ratio of the axis: all that is drawn, with room beside it."""
    shown = [(1 + margin) ** LEAST_MARGINS, (1 + margin) ** -LEAST_MARGINS]
    for each in contrasts:
        shown += [each.ratio, *(telling(each.low, each.high) or ())]
    logs = [math.log(ratio) for ratio in shown]
    room = 0.04 * (max(logs) - min(logs))
    return math.exp(min(logs) - room), math.exp(min(700.0, max(logs) + room))


def _ticks(low: float, high: float) -> list[float]:
    """Round ratios, 1 and powers of ten before the others, for they have the right of way."""
    if high <= LINEAR_TO * low:
        return sorted((value for value in steps(low, high) if value > 0), key=lambda value: value != 1)
    exponents = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    every = 1 + len(exponents) // MOST_POWERS
    powers = [10.0**exponent for exponent in exponents if exponent % every == 0]
    between = [10.0**exponent * each for each in (0.5, 2, 0.2, 5) for exponent in exponents] if every == 1 else []
    chosen = [*powers, *(value for value in between if low <= value <= high)]
    return sorted(chosen, key=lambda value: value != 1)
