"""Charts of a run as SVG, readable at 600 pixels, for light and dark pages.

Each module draws one chart and says what it shows in a sentence; a chart with nothing to show is
not there. `pictures` are all of a run in reading order, `draw` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from harness.charts import canvas, curve, forest, memory, speeds, strip
from harness.charts.canvas import darken, is_same
from harness.charts.curve import draw_curve
from harness.compare import Comparison
from harness.curve import Curve, curves

__all__ = ["Picture", "darken", "draw", "draw_curve", "is_same", "pictures"]


@dataclass(frozen=True, slots=True)
class Picture:
    """One chart. `name` is its path in the run folder without "-light.svg" or "-dark.svg"."""

    name: str
    kind: str  # ratios, curve, loads, speeds, memory
    alt: str  # what it shows, in one plain sentence


_Chart: TypeAlias = tuple[Picture, Callable[[], str]]


def pictures(comparison: Comparison) -> tuple[Picture, ...]:
    """All charts of a run in the order of reading. Draws nothing."""
    return tuple(picture for picture, _ in _charts(comparison))


def draw(comparison: Comparison) -> dict[str, str]:
    """Path in the run folder → SVG, of every picture, for a light and for a dark page."""
    drawn = {}
    with canvas.style():
        for picture, draw_light in _charts(comparison):
            drawn[f"{picture.name}-light.svg"] = light = draw_light()
            drawn[f"{picture.name}-dark.svg"] = darken(light)
    return drawn


def _charts(comparison: Comparison) -> Iterator[_Chart]:
    """Each picture with what draws it for a light page."""

    def chart(kind: str, alt: str | None, draw_light: Callable[[Comparison], str]) -> Iterator[_Chart]:
        if alt is not None:
            yield Picture(f"charts/{kind}", kind, canvas.inert(alt)), partial(draw_light, comparison)

    yield from chart("ratios", forest.finding(comparison), forest.draw)
    found = curves(comparison)
    for each, name in zip(found, _curve_names(found), strict=True):
        if each.has_speeds:  # without one there is nothing to draw
            yield Picture(name, "curve", canvas.inert(each.finding)), partial(curve.draw, each)
    yield from chart("loads", strip.finding(comparison), strip.draw)
    yield from chart("speeds", speeds.finding(comparison), speeds.draw)
    yield from chart("memory", memory.finding(comparison), memory.draw)


def _curve_names(found: tuple[Curve, ...]) -> list[str]:
    """Two curves over one number have one name each."""
    names: list[str] = []
    for each in found:
        same = sum(name.startswith(f"charts/{each.over}") for name in names)
        names.append(f"charts/{each.over}" + (f"-{same + 1}" if same else ""))
    return names
