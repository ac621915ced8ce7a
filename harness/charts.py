"""The curve of a sweep as SVG: the same input gives the same bytes, readable at 600 pixels.

State is told by shape and colour, an interval by a bar, a missing speed by a mark below zero, and
spilled memory by a line of its own. Text stays text: nothing in it is markup or mathematics.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from harness.curve import PLACEMENTS, Curve, Point
from harness.placement import Cell
from harness.words import NONE, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_PX = 600
WIDTH_IN, HEIGHT_IN = 6.25, 3.9  # at 96 pixels an inch
TITLE_COLUMNS = 60  # of its size, over the whole width
SIGN_SHARE = 0.0135  # of the axis, for one sign of a label
EDGE_ROOM = 0.22  # of the axis, for the words at the edge
HEADROOM = 1.2  # of the highest, for its speed and the words at the edge
BELOW = -0.05  # of the highest: where points without a speed lie
NEAR = 1.6  # times the highest speed: a ceiling above it would press the curve flat
LOG_FROM = 8  # times from the least to the most, before a knob is drawn by its powers of two


@dataclass(frozen=True, slots=True)
class _Theme:
    """Colours by Okabe and Ito, which stay apart for the colour-blind, with text and lines to fit the page."""

    text: str
    faint: str
    grid: str
    line: str
    best: str
    states: dict[Cell, str]


LIGHT = _Theme(
    text="#1f2328",
    faint="#59636e",
    grid="#d8dee4",
    line="#0072b2",
    best="#009e73",
    states={
        Cell.FITS: "#0072b2",
        Cell.TIGHT: "#e69f00",
        Cell.SPILLED: "#d55e00",
        Cell.DOES_NOT_FIT: "#1f2328",
        Cell.UNKNOWN: "#59636e",
    },
)
DARK = _Theme(
    text="#e6edf3",
    faint="#9198a1",
    grid="#30363d",
    line="#56b4e9",
    best="#00c08b",
    states={
        Cell.FITS: "#56b4e9",
        Cell.TIGHT: "#f0c54a",
        Cell.SPILLED: "#ff7f2a",
        Cell.DOES_NOT_FIT: "#e6edf3",
        Cell.UNKNOWN: "#9198a1",
    },
)
MARKS = {Cell.FITS: "o", Cell.TIGHT: "s", Cell.SPILLED: "v", Cell.DOES_NOT_FIT: "x", Cell.UNKNOWN: "D"}
FILLED = frozenset({Cell.FITS, Cell.TIGHT, Cell.SPILLED})
WORDS = {
    Cell.FITS: "fits",
    Cell.TIGHT: "tight",
    Cell.SPILLED: "spilled",
    Cell.DOES_NOT_FIT: "does not fit",
    Cell.UNKNOWN: "state unknown",
}


def draw_curve(curve: Curve, *, dark: bool) -> str:
    """SVG on a transparent ground, for a light or a dark page; without declaration, so that it can stand in HTML."""
    import matplotlib.style
    from matplotlib.figure import Figure

    theme = DARK if dark else LIGHT
    settings: dict[str, Any] = {
        "svg.hashsalt": "llamaduel",
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.size": 9,
        "text.color": theme.text,
        "axes.labelcolor": theme.text,
        "axes.edgecolor": theme.faint,
        "xtick.color": theme.text,
        "ytick.color": theme.text,
    }
    with matplotlib.style.context(["default", settings]):  # whatever a matplotlibrc says
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
        axes = figure.add_subplot()
        places = _places(curve)
        _frame(axes, curve, places, theme)
        _lines(axes, curve, places, theme)
        _points(axes, curve, places, theme)
        if curve.edge is not None and curve.beyond is not None:
            _edge(axes, curve, places, theme)
        figure.legend(
            loc="outside lower center", ncols=4, frameon=False, fontsize=8, handletextpad=0.5, columnspacing=1.4
        )
        file = io.StringIO()
        unknown = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=unknown)
    drawn = file.getvalue()
    size = f'width="{WIDTH_PX}" height="{round(WIDTH_PX * HEIGHT_IN / WIDTH_IN)}" role="img" '
    size += f'data-matplotlib="{matplotlib.__version__}" '
    opening, rest = drawn[drawn.index("<svg") :].split(">", 1)
    opening = re.sub(r'width="[^"]*" height="[^"]*" ', size, opening)
    return f"{opening}>\n <title>{escape(plain(curve.finding))}</title>{rest}"


def _places(curve: Curve) -> dict[str, float]:
    """Where each point stands: at its number, or where most were not tried one beside the other."""
    shown = [point for point in curve.points if point.tried]
    if len(shown) < len(curve.points):
        return {point.label: float(rank) for rank, point in enumerate(shown)}
    return {point.label: point.x for point in shown}


def _frame(axes: Axes, curve: Curve, places: dict[str, float], theme: _Theme) -> None:
    """Title, axes and the labels of the points, as many as there is room for."""
    title = "\n".join(textwrap.wrap(plain(curve.finding), TITLE_COLUMNS))
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axes.set_xlabel(f"{plain(curve.axis)}\n{plain(curve.arms)}")
    axes.set_ylabel("decode, tok/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    top, highest = _top(curve), HEADROOM * _top(curve)
    without_speed = any(point.tps is None for point in curve.points if point.tried)
    axes.set_ylim(2 * BELOW * top if without_speed else 0, highest)
    if without_speed:
        axes.axhline(0, color=theme.faint, linewidth=0.8)
    ticks = [float(tick) for tick in axes.get_yticks() if 0 <= tick <= highest]
    axes.set_yticks(
        [*ticks, BELOW * top] if without_speed else ticks,
        [f"{tick:g}" for tick in ticks] + [NONE] * without_speed,
    )
    least, most = min(places.values()), max(places.values())
    numbers = all(point.values[0].isdecimal() and point.tried for point in curve.points)
    if numbers and curve.over not in PLACEMENTS and 0 < LOG_FROM * least <= most:
        axes.set_xscale("log", base=2)
    axes.set_xlim(*_padded(axes, least, most))
    shown = sorted((point for point in curve.points if point.tried), key=lambda point: _weight(curve, point))
    kept = _with_room(axes, [(places[point.label], plain(point.label)) for point in shown])
    axes.set_xticks([x for x, _ in kept], [label for _, label in kept])
    axes.minorticks_off()


def _weight(curve: Curve, point: Point) -> tuple[bool, ...]:
    """Whose label comes first where there is no room for all: the best, the edge, both ends, those with a speed."""
    ends = (curve.points[0], curve.points[-1])
    return (
        point.label not in curve.best,
        point.label not in (curve.edge, curve.beyond),
        point not in ends,
        point.tps is None,
    )


def _padded(axes: Axes, least: float, most: float) -> tuple[float, float]:
    """Room beside the first and the last point."""
    if axes.get_xscale() == "log":
        room = (most / least) ** 0.05
        return float(least / room), float(most * room)
    room = 0.05 * (most - least or 1.0)
    return least - room, most + room


def _with_room(axes: Axes, labels: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Those of the labels at x that do not touch one before them in the list."""
    kept: list[tuple[float, float, tuple[float, str]]] = []
    for x, label in labels:
        middle = axes.transAxes.inverted().transform(axes.transData.transform((x, 0.0)))[0]
        half = SIGN_SHARE * (len(label) + 1) / 2
        if all(middle + half <= start or middle - half >= end for start, end, _ in kept):
            kept.append((middle - half, middle + half, (x, label)))
    return sorted(each for *_, each in kept)


def _top(curve: Curve) -> float:
    """The highest of what is drawn, with the ceiling where it is not far above."""
    highest = max((point.high or point.tps or 0.0 for point in curve.points), default=0.0) or 1.0
    near = [each for point in curve.points if (each := point.ceiling_tps) and each <= NEAR * highest]
    return max([highest, *near])


def _lines(axes: Axes, curve: Curve, places: dict[str, float], theme: _Theme) -> None:
    """The ceiling, the line of physics, and the speeds: broken where one is missing, and where memory spilled."""

    def line(points: Sequence[Point], speeds: Sequence[float | None], **style: Any) -> None:
        known = [(places[point.label], speed) for point, speed in zip(points, speeds, strict=True) if speed is not None]
        if known:
            axes.plot(*zip(*known, strict=True), **style)

    ceilings = [point.ceiling_tps for point in curve.points]
    if any(each is not None and each <= _top(curve) for each in ceilings):
        line(curve.points, ceilings, linestyle="--", color=theme.faint, linewidth=1, label="ceiling of the memory")
    fitted = [point.fitted_tps for point in curve.points]
    line(curve.points, fitted, linestyle=":", color=theme.text, linewidth=1, label="line of physics")
    for kind, group in groupby(curve.points, key=_kind):
        points = list(group)
        if kind is not None:
            color = theme.states[Cell.SPILLED] if kind == "spilled" else theme.line
            style = (0, (3, 2)) if kind == "spilled" else "-"
            speeds = [point.tps for point in points]
            line(points, speeds, linestyle=style, color=color, linewidth=1.5, gid=kind)


def _kind(point: Point) -> str | None:
    """Points of one kind that follow each other share a line; those without a speed have none."""
    if point.tps is None:
        return None
    return "spilled" if point.state is Cell.SPILLED else "measured"


def _points(axes: Axes, curve: Curve, places: dict[str, float], theme: _Theme) -> None:
    below = BELOW * _top(curve)
    for state in Cell:
        points = [point for point in curve.points if point.state is state and point.tried]
        if not points:
            continue
        color = theme.states[state]
        axes.plot(
            [places[point.label] for point in points],
            [below if point.tps is None else point.tps for point in points],
            MARKS[state],
            color=color,
            markerfacecolor=color if state in FILLED else "none",
            markersize=6,
            markeredgewidth=1.5,
            label=WORDS[state],
            zorder=4,
        )
        for point in points:
            if point.tps is not None and point.low is not None and point.high is not None:
                off = [[point.tps - point.low], [point.high - point.tps]]
                axes.errorbar([places[point.label]], [point.tps], off, color=color, capsize=3, linewidth=1.2, zorder=3)
    best = [(places[point.label], point.tps) for point in curve.points if point.label in curve.best and point.tps]
    if best:
        axes.plot(
            *zip(*best, strict=True),
            "o",
            color=theme.best,
            markerfacecolor="none",
            markersize=13,
            markeredgewidth=1.8,
            label="best" if len(best) == 1 else "best, not told apart",
            zorder=5,
        )
    _speeds(axes, curve, places, theme)


def _speeds(axes: Axes, curve: Curve, places: dict[str, float], theme: _Theme) -> None:
    """The speed above its point where there is room, with a sign where something is to be said about it."""
    measured = [point for point in curve.points if point.tps is not None]
    by_place = {places[point.label]: point for point in measured}
    ranked = sorted(measured, key=lambda point: (_weight(curve, point), -(point.tps or 0.0)))
    texts = [(places[each.label], f"{each.tps:.1f}" + (" !" if each.flags else "")) for each in ranked]
    for x, text in _with_room(axes, texts):
        point = by_place[x]
        high, low = point.high or point.tps or 0.0, point.low or point.tps or 0.0
        under = point.fitted_tps is not None and point.fitted_tps > high  # the line of physics, which it would cross
        axes.annotate(
            text,
            (x, low if under else high),
            xytext=(0, -7 if under else 7),
            textcoords="offset points",
            ha="center",
            va="top" if under else "baseline",
            fontsize=8,
            color=theme.text,
            zorder=6,
        )
    if any(point.flags for point in measured):
        axes.plot([], [], linestyle="none", label="! flagged, see the notes")


def _edge(axes: Axes, curve: Curve, places: dict[str, float], theme: _Theme) -> None:
    """A line between the last value that fits and the next, with an arrow to where memory is full."""
    fits, beyond = places[curve.edge or ""], places[curve.beyond or ""]
    x = (fits * beyond) ** 0.5 if axes.get_xscale() == "log" else (fits + beyond) / 2
    axes.axvline(x, color=theme.faint, linewidth=1.2, linestyle=(0, (6, 3)))
    share = axes.transAxes.inverted().transform(axes.transData.transform((x, 0.0)))[0]
    left = share > EDGE_ROOM if beyond < fits else share > 1 - EDGE_ROOM  # of the line, where there is room
    axes.annotate(
        "◂ memory is full" if beyond < fits else "memory is full ▸",
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if left else 4, -2),
        textcoords="offset points",
        ha="right" if left else "left",
        va="top",
        fontsize=8,
        color=theme.faint,
    )


def is_same(written: str, drawn: str) -> bool:
    """Whether a chart is the one that was drawn now: to the letter, or in all words if by another matplotlib."""
    if _drawn_by(written) == _drawn_by(drawn):
        return written == drawn
    return _words(written) == _words(drawn) and "<script" not in written


def _drawn_by(svg: str) -> str | None:
    found = re.search(r'data-matplotlib="([^"]*)"', svg)
    return found[1] if found else None


def _words(svg: str) -> list[str]:
    """All labels and numbers, in order; where they stand is for each matplotlib to say."""
    return re.findall(r">([^<>]+)</(?:text|tspan)>", svg)
