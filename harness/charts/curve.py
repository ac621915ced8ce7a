"""The curve of a sweep: decode speed over the one number that changes from arm to arm.

State is told by shape and colour, an interval by a bar, and spilled memory by a line of its own.
Points without a speed stand on a shelf below the axis, apart from every number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from harness.charts import canvas
from harness.charts.canvas import (
    BAND,
    BLUE,
    DPI,
    EDGE_PX,
    FAINT,
    GREEN,
    GRID,
    ORANGE,
    SMALL_PT,
    TEXT,
    TITLE_PT,
    VERMILLION,
    WIDTH_PX,
    darken,
    inert,
    shortened,
    steps,
    svg_of,
    wrapped,
)
from harness.curve import PLACEMENTS, Curve, Point
from harness.placement import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_PX = 240  # high
LEFT_PX, RIGHT_PX = 66, 12  # beside it
AXIS_PX = WIDTH_PX - LEFT_PX - RIGHT_PX  # wide
SHELF_PX = 24  # for points without a speed, below the plot
SIGN_SHARE = 0.0135  # of the axis, for one sign of a label
EDGE_ROOM = 0.22  # of the axis, for the words at the edge
HEADROOM = 1.2  # of the highest, for its speed and the words at the edge
NEAR = 1.6  # times the highest speed: a ceiling above it would press the curve flat
LEGEND_COLUMNS = 4
LOG_FROM = 8  # times from the least to the most, before a knob is drawn by its powers of two
COLORS = {
    Cell.FITS: BLUE,
    Cell.TIGHT: ORANGE,
    Cell.SPILLED: VERMILLION,
    Cell.DOES_NOT_FIT: TEXT,
    Cell.UNKNOWN: FAINT,
}
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
    """SVG on a transparent ground, for a light or a dark page."""
    with canvas.style():
        return darken(draw(curve)) if dark else draw(curve)


def draw(curve: Curve) -> str:
    """SVG for a light page."""
    from matplotlib.figure import Figure

    title = wrapped(curve.finding, WIDTH_PX - 2 * EDGE_PX, TITLE_PT, bold=True, most=4)
    shelf = SHELF_PX * any(point.tps is None for point in curve.points if point.tried)
    above, below = 8 + 17 * len(title) + 4, shelf + 56
    figure = Figure(figsize=(WIDTH_PX / DPI, 1), dpi=DPI)
    figure.patch.set_visible(False)
    axes = figure.add_axes((0, 0, 1, 1))
    places = _places(curve)
    # As wide as it will be before the room for labels is reckoned.
    axes.set_position((LEFT_PX / WIDTH_PX, 0.0, 1 - (LEFT_PX + RIGHT_PX) / WIDTH_PX, 1.0))
    _frame(axes, curve, places, shelf)
    _lines(axes, curve, places)
    _points(axes, curve, places, shelf)
    _edge(axes, curve, places)
    handles, labels = axes.get_legend_handles_labels()
    legend = 18 * -(-len(labels) // LEGEND_COLUMNS)
    height = above + PLOT_PX + below + legend
    figure.set_size_inches(WIDTH_PX / DPI, height / DPI)
    axes.set_position(
        (LEFT_PX / WIDTH_PX, (below + legend) / height, 1 - (LEFT_PX + RIGHT_PX) / WIDTH_PX, PLOT_PX / height)
    )
    for number, line in enumerate(title):
        y = 1 - (8 + 17 * number + 12) / height
        figure.text(EDGE_PX / WIDTH_PX, y, line, fontsize=TITLE_PT, fontweight="bold", va="baseline")
    for number, words in enumerate((curve.axis, curve.arms)):
        y = (legend + 24 - 15 * number) / height
        text = shortened(words, WIDTH_PX - LEFT_PX - 2 * EDGE_PX, 9)
        figure.text((LEFT_PX + WIDTH_PX - RIGHT_PX) / 2 / WIDTH_PX, y, text, ha="center", va="baseline")
    figure.legend(
        handles, labels, loc="lower center", bbox_to_anchor=(0.5, 0.0), borderaxespad=0.2,
        ncols=LEGEND_COLUMNS, frameon=False, fontsize=SMALL_PT, handletextpad=0.5, columnspacing=1.4,
    )  # fmt: skip
    return svg_of(figure, curve.finding)


def _places(curve: Curve) -> dict[str, float]:
    """Where each point stands: at its number, or where most were not tried one beside the other."""
    shown = [point for point in curve.points if point.tried]
    if len(shown) < len(curve.points):
        return {point.label: float(rank) for rank, point in enumerate(shown)}
    return {point.label: point.x for point in shown}


def _frame(axes: Axes, curve: Curve, places: dict[str, float], shelf: int) -> None:
    """Axes and the labels of the points, as many as there is room for; below them the shelf."""
    axes.set_ylabel("decode, tok/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylim(0, HEADROOM * _top(curve))
    ticks = steps(0.0, HEADROOM * _top(curve), 7)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    if shelf:
        _shelf(axes, shelf)
    least, most = min(places.values()), max(places.values())
    numbers = all(point.values[0].isdecimal() and point.tried for point in curve.points)
    if numbers and curve.over not in PLACEMENTS and 0 < LOG_FROM * least <= most:
        axes.set_xscale("log", base=2)
    axes.set_xlim(*_padded(axes, least, most))
    shown = sorted((point for point in curve.points if point.tried), key=lambda point: _weight(curve, point))
    kept = _with_room(axes, [(places[point.label], inert(point.label)) for point in shown], {})
    axes.set_xticks([x for x, _ in kept], [label for _, label in kept])
    axes.minorticks_off()
    axes.tick_params(axis="x", length=0, pad=4 + shelf * 72 / DPI)


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


def _with_room(
    axes: Axes, labels: Sequence[tuple[float, str]], aside: Mapping[float, float]
) -> list[tuple[float, str]]:
    """Those of the labels at x that do not touch one before them in the list.

    Some stand `aside` of x, by a share of the axis.
    """
    kept: list[tuple[float, float, tuple[float, str]]] = []
    for x, label in labels:
        half = _half(label)
        middle = _share(axes, x) + aside.get(x, 0.0)
        if all(middle + half <= start or middle - half >= end for start, end, _ in kept):
            kept.append((middle - half, middle + half, (x, label)))
    return sorted(each for *_, each in kept)


def _half(label: str) -> float:
    """Of the width of a label, as a share of the axis."""
    return SIGN_SHARE * (len(label) + 1) / 2


def _share(axes: Axes, x: float) -> float:
    """How far along its axis x is."""
    return float(axes.transAxes.inverted().transform(axes.transData.transform((x, 0.0)))[0])


def _top(curve: Curve) -> float:
    """The highest of what is drawn, with the ceiling where it is not far above."""
    highest = max((point.high or point.tps or 0.0 for point in curve.points), default=0.0) or 1.0
    near = [each for point in curve.points if (each := point.ceiling_tps) and each <= NEAR * highest]
    return max([highest, *near])


def _lines(axes: Axes, curve: Curve, places: dict[str, float]) -> None:
    """The ceiling, the line of physics, and the speeds: broken where one is missing, and where memory spilled."""

    def line(points: Sequence[Point], speeds: Sequence[float | None], **style: Any) -> None:
        known = [(places[point.label], speed) for point, speed in zip(points, speeds, strict=True) if speed is not None]
        if known:
            axes.plot(*zip(*known, strict=True), **style)

    ceilings = [point.ceiling_tps for point in curve.points]
    if any(each is not None and each <= _top(curve) for each in ceilings):
        line(curve.points, ceilings, linestyle="--", color=FAINT, linewidth=1, label="ceiling of the memory")
    fitted = [point.fitted_tps for point in curve.points]
    line(curve.points, fitted, linestyle=":", color=TEXT, linewidth=1, label="line of physics")
    for kind, group in groupby(curve.points, key=_kind):
        points = list(group)
        if kind is not None:
            color = COLORS[Cell.SPILLED] if kind == "spilled" else BLUE
            style = (0, (3, 2)) if kind == "spilled" else "-"
            speeds = [point.tps for point in points]
            line(points, speeds, linestyle=style, color=color, linewidth=1.5, gid=kind)


def _kind(point: Point) -> str | None:
    """Points of one kind that follow each other share a line; those without a speed have none."""
    if point.tps is None:
        return None
    return "spilled" if point.state is Cell.SPILLED else "measured"


def _shelf(axes: Axes, shelf: int) -> None:
    """Where points without a speed stand: below the axis, shaded, with words where the others have a number."""
    from matplotlib.patches import Rectangle

    height = shelf / PLOT_PX
    ground = Rectangle((0, -height), 1, 0.75 * height, transform=axes.transAxes, facecolor=BAND, clip_on=False)
    axes.add_patch(ground)
    axes.text(
        -7 / AXIS_PX, -0.625 * height, "no speed", transform=axes.transAxes,
        ha="right", va="center", fontsize=SMALL_PT, color=FAINT,
    )  # fmt: skip


def _points(axes: Axes, curve: Curve, places: dict[str, float], shelf: int) -> None:
    for state in Cell:
        color, label = COLORS[state], WORDS[state]
        points = [point for point in curve.points if point.state is state and point.tried]
        style: dict[str, Any] = {
            "color": color,
            "markerfacecolor": color if state in FILLED else "none",
            "markersize": 6,
            "markeredgewidth": 1.5,
            "linestyle": "none",
            "marker": MARKS[state],
            "zorder": 4,
        }
        measured = [(places[point.label], point.tps) for point in points if point.tps is not None]
        if measured:
            axes.plot(*zip(*measured, strict=True), label=label, **style)
        without = [places[point.label] for point in points if point.tps is None]
        if without:
            height = [-0.625 * shelf / PLOT_PX] * len(without)
            label = f"_{label}" if measured else label  # once is enough
            axes.plot(without, height, label=label, transform=axes.get_xaxis_transform(), clip_on=False, **style)
        for point in points:
            if point.tps is not None and point.low is not None and point.high is not None:
                off = [[point.tps - point.low], [point.high - point.tps]]
                axes.errorbar([places[point.label]], [point.tps], off, color=color, capsize=3, linewidth=1.2, zorder=3)
    best = [(places[point.label], point.tps) for point in curve.points if point.label in curve.best and point.tps]
    if best:
        axes.plot(
            *zip(*best, strict=True),
            "o",
            color=GREEN,
            markerfacecolor="none",
            markersize=13,
            markeredgewidth=1.8,
            label="best" if len(best) == 1 else "best, not told apart",
            zorder=5,
        )
    _speeds(axes, curve, places)


def _speeds(axes: Axes, curve: Curve, places: dict[str, float]) -> None:
    """The speed above its point where there is room, with a sign where something is to be said about it."""
    measured = [point for point in curve.points if point.tps is not None]
    by_place = {places[point.label]: point for point in measured}
    ranked = sorted(measured, key=lambda point: (_weight(curve, point), -(point.tps or 0.0)))
    texts = [(places[each.label], f"{each.tps:.1f}" + (" !" if each.flags else "")) for each in ranked]
    edge = _edge_at(axes, curve, places)
    aside = {} if edge is None else _clear_of(axes, edge, texts)
    for x, text in _with_room(axes, texts, aside):
        point = by_place[x]
        high, low = point.high or point.tps or 0.0, point.low or point.tps or 0.0
        under = point.fitted_tps is not None and point.fitted_tps > high  # the line of physics, which it would cross
        axes.annotate(
            text,
            (x, low if under else high),
            xytext=(aside.get(x, 0.0) * AXIS_PX * 72 / DPI, -7 if under else 7),
            textcoords="offset points",
            ha="center",
            va="top" if under else "baseline",
            fontsize=8,
            color=TEXT,
            zorder=6,
        )
    if any(point.flags for point in measured):
        axes.plot([], [], linestyle="none", label="! flagged, see the notes")


def _clear_of(axes: Axes, line: float, labels: Sequence[tuple[float, str]]) -> dict[float, float]:
    """How far aside, as a share of the axis, those of the labels at x must stand that would cross an upright line."""
    off = [(x, _share(axes, x) - _share(axes, line), _half(label)) for x, label in labels]
    return {x: (half if share > 0 else -half) - share for x, share, half in off if abs(share) < half}


def _edge(axes: Axes, curve: Curve, places: dict[str, float]) -> None:
    """A line between the last value that fits and the next, with an arrow to where memory is full."""
    x = _edge_at(axes, curve, places)
    if x is None:
        return
    is_below = places[curve.beyond or ""] < x
    axes.axvline(x, color=FAINT, linewidth=1.2, linestyle=(0, (6, 3)))
    share = _share(axes, x)
    left = share > EDGE_ROOM if is_below else share > 1 - EDGE_ROOM  # of the line, where there is room
    axes.annotate(
        "◂ memory is full" if is_below else "memory is full ▸",
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if left else 4, -2),
        textcoords="offset points",
        ha="right" if left else "left",
        va="top",
        fontsize=8,
        color=FAINT,
    )


def _edge_at(axes: Axes, curve: Curve, places: dict[str, float]) -> float | None:
    """In the middle between the last value that fits and the next; None where there are no such two."""
    if curve.edge is None or curve.beyond is None:
        return None
    fits, beyond = places[curve.edge], places[curve.beyond]
    return (fits * beyond) ** 0.5 if axes.get_xscale() == "log" else (fits + beyond) / 2
