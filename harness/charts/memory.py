"""Memory of every arm, on the device and on the host: what was predicted above what the engine reported.

Both plots have one scale, so that a GiB is as long here as there. What nobody tells is a dash; the
line of the device's whole memory is drawn where it is known and near enough to be of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness import placement, plausibility
from harness.charts.canvas import (
    BLUE,
    EDGE_PX,
    FAINT,
    GREEN,
    ORANGE,
    SMALL_PT,
    TEXT,
    VERMILLION,
    WIDTH_PX,
    Sheet,
    name_column,
    named,
    steps,
    width_px,
)
from harness.compare import Comparison, Row
from harness.placement import Cell, held_bytes
from harness.plan import Status
from harness.words import NONE, count, memory

ROW_PX = 34
APART_PX = 20  # between the plots
REALISED_PX, PREDICTED_PX = 11, 6  # high
NEAR = 1.6  # times the most that is held: a total beyond it would press the bars flat
GAP_PX = 16  # from the longest bar to the numbers, with room for three dots
LEAST_PX = 1.5  # of a part that can be drawn
STATES = {Cell.FITS: "fits", Cell.TIGHT: "tight", Cell.SPILLED: "spilled", Cell.DOES_NOT_FIT: "does not fit"}
PARTS = ("weights", "KV and state", "compute")
STYLES: dict[str, dict[str, Any]] = {
    "weights": {"facecolor": BLUE, "edgecolor": BLUE},
    "KV and state": {"facecolor": ORANGE, "edgecolor": ORANGE},
    "compute": {"facecolor": "none", "edgecolor": GREEN, "hatch": "/////"},
}


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes by part, in the order of PARTS; None is unknown."""

    weights: int | None
    context: int | None
    compute: int | None

    @property
    def known(self) -> list[tuple[str, int]]:
        sizes = zip(PARTS, (self.weights, self.context, self.compute), strict=True)
        return [(part, size) for part, size in sizes if size is not None]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.known)

    @property
    def is_whole(self) -> bool:
        return len(self.known) == len(PARTS)


@dataclass(frozen=True, slots=True)
class _Bars:
    """One arm on one side; None where nothing is known."""

    predicted: _Held | None
    realised: _Held | None

    @property
    def most(self) -> int:
        return max((each.total for each in (self.predicted, self.realised) if each is not None), default=0)

    @property
    def is_whole(self) -> bool:
        return all(each is None or each.is_whole for each in (self.predicted, self.realised))

    @property
    def text(self) -> str:
        """What the engine told, or else what was predicted, as far as it was."""
        if self.realised is not None:
            return memory(self.realised.total)
        if self.predicted is None:
            return NONE
        return ("≈ " if self.predicted.is_whole else "≥ ") + memory(self.predicted.total)


@dataclass(frozen=True, slots=True)
class _Plot:
    """One side of all arms, with a word for each and the memory there in all."""

    side: str
    bars: Sequence[_Bars]
    words: Sequence[str]
    total: int | None

    @property
    def held(self) -> int:
        return max((bars.most for bars in self.bars), default=0)

    @property
    def shows_total(self) -> bool:
        return self.total is not None and self.total <= NEAR * self.held

    @property
    def most(self) -> int:
        """Bytes that the plot is wide."""
        return max(self.held, self.total) if self.shows_total and self.total is not None else self.held

    @property
    def words_px(self) -> float:
        """What the words need beside the longest bar."""
        return GAP_PX + 2 + max(width_px(text, SMALL_PT) for text in (*self.words, *(bars.text for bars in self.bars)))


def finding(comparison: Comparison) -> str | None:
    """In one sentence; None where nothing is known of any placement."""
    rows = _rows(comparison)
    if not any(bars.most for row in rows for bars in (_device(row), _host(row))):
        return None
    told = [(row.arm, row.predicted_device_bytes, row.realised_device_bytes) for row in rows]
    both = [(arm, said, seen) for arm, said, seen in told if said is not None and seen is not None]
    wrong = [arm for arm, said, seen in both if not placement.same_bytes(said, seen)]
    sizes = [bars.realised.total for bars in map(_device, rows) if bars.realised is not None]
    if not sizes:
        return "Memory is only predicted: no engine told where it put the weights"
    least, most = memory(min(sizes)), memory(max(sizes))
    if not max(sizes):
        return "All of it is host memory"
    span = f"On the device {most if least == most else f'{least} to {most}'}"
    if wrong:
        return f"{span}; {named(wrong)} {'is' if len(wrong) == 1 else 'are'} not as predicted"
    if silent := sum(said is None and seen is not None for _, said, seen in told):
        unsaid = f"nothing was predicted for {count(silent, 'arm')}"
        return f"{span}, as predicted; {unsaid}" if both else f"{span}; nothing was predicted"
    return f"{span}, as predicted"


def draw(comparison: Comparison) -> str:
    """SVG for a light page, where there is a finding."""
    title, rows = finding(comparison) or "", _rows(comparison)
    left, lines = name_column([row.arm for row in rows])
    total = _total(comparison)
    plots = [
        _Plot("device", [_device(row) for row in rows], [_state(row) for row in rows], total),
        _Plot("host", [_host(row) for row in rows], [""] * len(rows), None),
    ]
    plots = [plot for plot in plots if plot.most]
    sheet = Sheet()
    mapped = any(each.on_host and each.device.endswith("_Mapped") for row in rows for each in row.buffers or ())
    notes = ["Host weights of a mapped file are the span that is mapped, of which the device may hold a part."] * mapped
    line = ": the dashed line" if any(plot.shows_total for plot in plots) else ""
    sheet.heading(title, *([f"The device has {memory(total)} in all{line}."] if total else []), *notes)
    start = EDGE_PX + left + 14
    words = sum(plot.words_px for plot in plots) + APART_PX * (len(plots) - 1)
    byte_px = (WIDTH_PX - EDGE_PX - start - words) / sum(plot.most for plot in plots)
    sheet.y += 14
    top = sheet.y
    middles = sheet.rows(lines, ROW_PX)
    for plot in plots:
        _draw_plot(sheet, plot, start, byte_px, middles, (top, sheet.y))
        start += plot.most * byte_px + plot.words_px + APART_PX
    sheet.y += 18
    _draw_key(sheet, partly=any(not bars.is_whole for plot in plots for bars in plot.bars))
    return sheet.svg(title)


def _draw_plot(
    sheet: Sheet, plot: _Plot, left: float, byte_px: float, middles: Sequence[float], ends: tuple[float, float]
) -> None:
    """The bars of one side, from `left` on."""
    top, bottom = ends
    unit, size = ("GiB", 1 << 30) if plot.most >= 1 << 30 else ("MiB", 1 << 20)
    sheet.text(left, top - 5, f"{plot.side}, {unit}", points=SMALL_PT, weight="bold")
    width = plot.most * byte_px
    ticks = steps(0.0, plot.most / size, max(2, min(6, int(width / 40))))
    sheet.ticks([(left + value * size * byte_px, f"{value:g}") for value in ticks], top, bottom)
    if plot.shows_total and plot.total is not None:
        sheet.uprights([left + plot.total * byte_px], top, bottom, VERMILLION, width=1.4, linestyle=(0, (5, 2)))
    for bars, word, y in zip(plot.bars, plot.words, middles, strict=True):
        if bars.predicted is not None:
            above = y - (3 if bars.realised is None else 11)
            _draw_bar(sheet, bars.predicted, left, above, PREDICTED_PX, byte_px, filled=False)
        if bars.realised is not None:
            _draw_bar(sheet, bars.realised, left, y - 3, REALISED_PX, byte_px, filled=True)
        place = left + width + GAP_PX
        shown = bars.text
        sheet.text(place, y + (6 if word == "" else 0), shown, points=SMALL_PT, color=FAINT if shown == NONE else TEXT)
        if word:
            sheet.text(place, y + 12, word, points=SMALL_PT, color=FAINT)


def _draw_bar(sheet: Sheet, held: _Held, x: float, y: float, height: float, byte_px: float, *, filled: bool) -> None:
    """Its parts one behind the other; where a part is unknown, three dots at the end."""
    for part, size in held.known:
        width = size * byte_px
        style = STYLES[part] if filled else {"facecolor": "none", "edgecolor": STYLES[part]["edgecolor"]}
        if width >= LEAST_PX:
            inset = 0.5  # the edge is drawn inside, so that parts do not lie over each other
            sheet.box(x + inset, y + inset, width - 2 * inset, height - 2 * inset, linewidth=0.9, zorder=3, **style)
        x += width
    if not held.is_whole:
        sheet.text(x + 2, y + height, "…", points=SMALL_PT, color=FAINT)


def _draw_key(sheet: Sheet, *, partly: bool) -> None:
    x = float(EDGE_PX)
    sheet.y += 16
    for part in PARTS:
        sheet.box(x, sheet.y - 9, 14, 10, linewidth=0.9, zorder=3, **STYLES[part])
        sheet.text(x + 20, sheet.y, part, points=SMALL_PT)
        x += width_px(part, SMALL_PT) + 40
    sheet.box(x, sheet.y - 7, 20, PREDICTED_PX, facecolor="none", edgecolor=FAINT, linewidth=0.9, zorder=3)
    sheet.text(
        x + 26, sheet.y, "outline: predicted, compute about" + "; …: a part is unknown" * partly, points=SMALL_PT
    )


# ── the bytes ───────────────────────────────────────────────────────────────────────────────


def _rows(comparison: Comparison) -> list[Row]:
    return [row for row in comparison.rows if row.status.alias_of is None]


def _device(row: Row) -> _Bars:
    said = row.predicted
    return _Bars(
        None if said is None else _Held(said.device_weights_bytes, said.device_memory_bytes, said.compute_bytes),
        _realised(row, on_host=False),
    )


def _host(row: Row) -> _Bars:
    said = row.predicted
    return _Bars(
        None if said is None else _Held(said.host_weights_bytes, said.host_memory_bytes, 0),
        _realised(row, on_host=True),
    )


def _realised(row: Row, *, on_host: bool) -> _Held | None:
    """As the engine reported it; of the host without what it computes in, which nothing predicts."""
    if row.buffers is None:
        return None
    weights, context, compute = (
        held_bytes(row.buffers, kinds, on_host=on_host) for kinds in (("weights",), ("kv", "rs"), ("compute",))
    )
    return _Held(weights, context, 0 if on_host else compute)


def _state(row: Row) -> str:
    """How it sits in the memory of the device, in words."""
    cell = Cell.DOES_NOT_FIT if row.status.word is Status.DOES_NOT_FIT else row.cell
    return "" if cell is Cell.UNKNOWN else STATES[cell]


def _total(comparison: Comparison) -> int | None:
    """Memory of the device that all arms had, where it is known, and is one."""
    header = comparison.header
    found = {plausibility.device_bytes(header, each) for each in header.contenders if each.realised is not None}
    known = [size for size in found if size]
    return max(known) if known and len(known) == len(found) and placement.same_bytes(max(known), min(known)) else None
