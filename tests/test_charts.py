"""Charts: the same bytes each time, well-formed and inert, every label once, spilled memory on a line of its own."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import harness
from harness.charts import canvas, draw_curve
from harness.curve import Curve, Point
from harness.physics import Flag
from harness.placement import Cell

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "$x^2$ <script>alert(1)</script> & \x1b[31m\"'"


def point(label: str, tps: float | None, state: Cell, **facts: object) -> Point:
    given: dict[str, object] = {"low": tps and tps * 0.96, "high": tps and tps * 1.04}
    arm, x = f"llama-cpp@ncmoe={label}", float(label.strip("≥"))
    return Point(label=label, values=(label.strip("≥"),), x=x, arm=arm, tps=tps, state=state, **(given | facts))  # type: ignore[arg-type]


CURVE = Curve(
    over="ncmoe",
    arms="llama-cpp@ncmoe=…",
    axis="layers whose experts are on the CPU (ncmoe)",
    points=(
        point("0", None, Cell.DOES_NOT_FIT),
        point("4", None, Cell.DOES_NOT_FIT),
        point("8", 14.2, Cell.SPILLED),
        point("12", 16.1, Cell.SPILLED, flags=(Flag.TOO_SLOW,), ceiling_tps=150.0),
        point("16", 92.1, Cell.TIGHT, fitted_tps=95.0, ceiling_tps=140.0),
        point("24", 70.5, Cell.FITS, fitted_tps=71.0, ceiling_tps=105.0),
        point("32", 38.2, Cell.FITS, fitted_tps=56.0, flags=(Flag.OFF_CURVE,)),
        point("≥40", 46.1, Cell.FITS, fitted_tps=46.0, ceiling_tps=74.0),
    ),
    edge="16",
    beyond="12",
    best=("16",),
    finding="ncmoe=16 is fastest: 92.1 tok/s; memory is full below ncmoe=16",
)


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(within: ElementTree.Element) -> list[str]:
    return ["".join(each.itertext()) for each in within.iter(f"{SVG}text")]


def group(svg: str, name: str) -> list[ElementTree.Element]:
    return [each for each in parsed(svg).iter(f"{SVG}g") if each.get("id") == name]


def stretch(line: ElementTree.Element) -> int:
    """Points that one line goes through."""
    return sum(len(re.findall(r"[ML] ", path.get("d", ""))) for path in line.iter(f"{SVG}path"))


@pytest.mark.parametrize("dark", [False, True])
def test_the_same_curve_is_the_same_bytes_in_another_process(dark: bool, tmp_path: Path) -> None:
    """Whatever that process has in its matplotlibrc and its hash seed."""
    (tmp_path / "matplotlibrc").write_text("font.size: 30\naxes.facecolor: red\nsvg.fonttype: path\n")
    code = f"import test_charts as t; print(t.draw_curve(t.CURVE, dark={dark}), end='')"
    roots = os.pathsep.join([str(Path(__file__).parent), str(Path(harness.__file__).parent.parent)])
    environment = os.environ | {"PYTHONPATH": roots, "PYTHONHASHSEED": "7", "PYTHONUTF8": "1"}
    other = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, check=True)

    assert other.stdout.decode() == draw_curve(CURVE, dark=dark) == draw_curve(CURVE, dark=dark)


def test_light_and_dark_differ_in_colours_alone() -> None:
    light, dark = draw_curve(CURVE, dark=False), draw_curve(CURVE, dark=True)

    assert light != dark
    assert texts(parsed(light)) == texts(parsed(dark))
    assert "#ffffff" not in light + dark, "the page shows through"


def test_a_chart_is_well_formed_and_points_to_nothing_outside() -> None:
    for dark in (False, True):
        drawn = draw_curve(CURVE, dark=dark)
        root = parsed(drawn)

        assert drawn.startswith("<svg ")
        assert (root.get("width"), root.get("role")) == ("600", "img")
        assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {
            "svg", "title", "defs", "style", "g", "path", "use", "text", "tspan", "clipPath", "rect",
        }  # fmt: skip
        attributes = [(name, value) for each in root.iter() for name, value in each.attrib.items()]
        assert not [name for name, _ in attributes if name.startswith("on")]
        assert all(value.startswith("#") for name, value in attributes if name.endswith("href"))
        assert all("url(" not in value or "url(#" in value for _, value in attributes)
        assert not re.search(r"(@import|url\()(?!#)", "".join(root.itertext()))


def test_text_from_elsewhere_is_text_in_a_chart() -> None:
    hostile = dataclasses.replace(CURVE, finding=HOSTILE, arms=HOSTILE, axis=HOSTILE)
    drawn = draw_curve(hostile, dark=False)

    assert "<script" not in drawn
    assert "\x1b" not in drawn
    told = texts(parsed(drawn))
    assert sum("$x^2$ <script>alert(1)</script> & [31m\"'" in each for each in told) == 3


def test_each_value_is_on_the_axis_once_and_the_title_is_the_finding() -> None:
    drawn = draw_curve(CURVE, dark=False)
    (axis,) = group(drawn, "matplotlib.axis_1")

    assert [text for text in texts(axis) if text in {each.label for each in CURVE.points}] == [
        each.label for each in CURVE.points
    ]
    root = parsed(drawn)
    assert root.findtext(f"{SVG}title") == CURVE.finding
    everything = " ".join(texts(root))
    assert all(word in everything for word in CURVE.finding.split())
    assert "decode, tok/s" in everything


def test_every_speed_and_every_state_that_occurs_is_written() -> None:
    told = texts(parsed(draw_curve(CURVE, dark=False)))

    for text in ("14.2", "16.1 !", "92.1", "70.5", "38.2 !", "46.1"):
        assert told.count(text) == 1
    for text in ("fits", "tight", "spilled", "does not fit", "best", "ceiling of the memory", "line of physics"):
        assert told.count(text) == 1
    assert told.count("◂ memory is full") == 1
    assert "state unknown" not in told


def test_spilled_points_have_a_line_of_their_own() -> None:
    drawn = draw_curve(CURVE, dark=False)

    assert [stretch(line) for line in group(drawn, "spilled")] == [2]
    assert [stretch(line) for line in group(drawn, "measured")] == [4]


def test_each_state_has_a_mark_of_its_own_shape() -> None:
    shapes = set()
    for state in Cell:
        points = tuple(point(str(n), 40.0, state) for n in (0, 4, 8))
        alone = dataclasses.replace(CURVE, points=points, edge=None, beyond=None, best=())
        defined = parsed(draw_curve(alone, dark=False)).iter(f"{SVG}defs")
        shapes.add(frozenset(path.get("d") for each in defined for path in each.iter(f"{SVG}path")))

    assert len(shapes) == len(Cell)


def test_a_line_is_broken_where_a_speed_is_missing() -> None:
    points = [*CURVE.points[4:], *(point(str(n), 40.0, Cell.FITS) for n in (44, 48))]
    points[2] = dataclasses.replace(points[2], tps=None, low=None, high=None, state=Cell.UNKNOWN)
    drawn = draw_curve(dataclasses.replace(CURVE, points=tuple(points), edge=None, beyond=None), dark=False)

    assert [stretch(line) for line in group(drawn, "measured")] == [2, 3]
    assert "memory is full" not in " ".join(texts(parsed(drawn))[:-1]).replace(CURVE.finding, "")


def test_a_ceiling_far_above_does_not_press_the_curve_flat() -> None:
    points = tuple(dataclasses.replace(each, ceiling_tps=5000.0) for each in CURVE.points)
    told = texts(parsed(draw_curve(dataclasses.replace(CURVE, points=points), dark=False)))

    assert "ceiling of the memory" not in told
    assert "5000" not in told


def test_what_was_not_tried_takes_no_room() -> None:
    """Of a long search, the values that were tried stand beside each other, each with its label."""
    tried = {13: Cell.DOES_NOT_FIT, 14: Cell.FITS, 15: Cell.FITS, 16: Cell.FITS, 45: Cell.FITS}
    points = tuple(
        point(str(n), 97.0 - n if n in (15, 16) else None, tried.get(n, Cell.UNKNOWN), tried=n in tried)
        for n in range(46)
    )
    found = dataclasses.replace(CURVE, points=points, edge="14", beyond="13", best=("15", "16"))
    (axis,) = group(draw_curve(found, dark=False), "matplotlib.axis_1")

    assert texts(axis)[:5] == ["13", "14", "15", "16", "45"]


@pytest.mark.parametrize("count", [30, 100])
def test_crowded_labels_leave_each_other_room(count: int) -> None:
    points = tuple(point(str(n), 40.0 + n, Cell.FITS) for n in range(count))
    best = str(count // 2 + 1)
    drawn = draw_curve(dataclasses.replace(CURVE, points=points, edge=None, beyond=None, best=(best,)), dark=False)
    (axis,) = group(drawn, "matplotlib.axis_1")
    shown = [(each.get("x"), "".join(each.itertext())) for each in axis.iter(f"{SVG}text")]
    places = [float(x) for x, text in shown if x is not None and text.isdecimal()]

    assert best in [text for _, text in shown]
    assert 5 < len(places) < count
    assert all(after - before > 10 for before, after in itertools.pairwise(places)), "a digit of 9 points, and a gap"


@pytest.mark.parametrize(("fits", "beyond", "side"), [(19, 18, 1), (29, 30, -1)])
def test_a_speed_beside_the_edge_does_not_cross_its_line(fits: int, beyond: int, side: int) -> None:
    states = {n: Cell.FITS if (n - beyond) * side > 0 else Cell.DOES_NOT_FIT for n in (*range(15, 33), 0, 48)}
    points = tuple(point(str(n), 77.4 if state is Cell.FITS else None, state) for n, state in sorted(states.items()))
    curve = dataclasses.replace(CURVE, points=points, edge=str(fits), beyond=str(beyond), best=(str(fits),))
    drawn = draw_curve(curve, dark=False)

    (line,) = re.findall(r'd="M ([\d.]+) [^"]*"[^>]*stroke-dasharray: 7.2,3.6', drawn)
    places = [float(x) for x in re.findall(r'text-anchor: middle[^>]* x="([\d.]+)"[^>]*>77.4<', drawn)]
    assert len(places) > 1
    assert min((x - float(line)) * side for x in places) > len("77.4") * 4 / 2, "half a word of 8 points"


def test_a_knob_over_many_powers_is_drawn_by_powers() -> None:
    """64 and 128 are as far apart as 1024 and 2048."""
    points = tuple(point(str(n), 40.0, Cell.FITS) for n in (64, 128, 1024, 2048))
    bare = dataclasses.replace(CURVE, over="ub", points=points, edge=None, beyond=None, best=())
    (axis,) = group(draw_curve(bare, dark=False), "matplotlib.axis_1")
    first, second, third, fourth = (float(each.get("x", "")) for each in list(axis.iter(f"{SVG}text"))[:4])

    assert second - first == pytest.approx(fourth - third, rel=0.01)


def test_a_curve_without_any_speed_can_be_drawn() -> None:
    points = tuple(dataclasses.replace(each, tps=None, low=None, high=None) for each in CURVE.points)
    told = texts(parsed(draw_curve(dataclasses.replace(CURVE, points=points, best=()), dark=True)))

    assert "best" not in told
    assert "no speed" in told


def test_a_point_without_a_speed_is_no_zero() -> None:
    """It stands on its shelf, farther below the axis than a mark is high."""
    drawn = draw_curve(CURVE, dark=False)
    root = parsed(drawn)
    zeros = [float(each.get("y", "")) for each in root.iter(f"{SVG}text") if "".join(each.itertext()) == "0"]
    zero = min(zeros)  # the other is the value of a point
    crosses = [each for each in root.iter(f"{SVG}use") if f"stroke: {canvas.TEXT}" in each.get("style", "")]
    below = [float(each.get("y", "")) for each in crosses if zero + 3 < float(each.get("y", "")) < max(zeros)]

    assert texts(root).count("no speed") == 1
    assert len(below) == 2, "the two that do not fit"
    whole = tuple(each for each in CURVE.points if each.tps is not None)
    assert "no speed" not in texts(parsed(draw_curve(dataclasses.replace(CURVE, points=whole), dark=False)))
