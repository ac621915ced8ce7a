"""The ground that all charts share: a sheet of 600 pixels, its colours, and the way to SVG.

A sheet is measured in pixels from its top left corner and grows downwards as it is filled. It is
drawn once in the colours of a light page; `darken` changes them for a dark one. Text is made inert
and never markup or mathematics, and the same drawing always gives the same bytes.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from harness.compare import Comparison
from harness.words import count, held_to, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_PX = 600
DPI = 96
EDGE_PX = 8  # that nothing comes nearer to the border
TITLE_PT, TEXT_PT, SMALL_PT = 10.5, 8.5, 8.0
MARK_PX = 4.5  # from the middle of a mark to its border
NAMES_PX = 190  # of the longest name of an arm before it is wrapped
NAME_LINES = 4
BRIEF = 60  # signs of a name within a sentence
NEAR_PT = 0.75  # one pixel, between two matplotlibs that draw the same

# Okabe and Ito, which stay apart for the colour-blind; each with what it is on a dark page.
TEXT, FAINT, GRID, BAND = "#1f2328", "#59636e", "#d8dee4", "#eaeef2"
BLUE, ORANGE, VERMILLION, GREEN = "#0072b2", "#e69f00", "#d55e00", "#009e73"
ON_DARK = {
    TEXT: "#e6edf3",
    FAINT: "#9198a1",
    GRID: "#30363d",
    BAND: "#21262d",
    BLUE: "#56b4e9",
    ORANGE: "#f0c54a",
    VERMILLION: "#ff7f2a",
    GREEN: "#00c08b",
}
SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "llamaduel",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # as wide as each other, so that what is measured here holds there
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": FAINT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "hatch.linewidth": 0.8,
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """The settings of all charts, whatever a matplotlibrc says; signs that no font here has are no warning."""
    import matplotlib.style

    with matplotlib.style.context(["default", SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s)Glyph .* missing from", UserWarning)
        yield


# ── text ────────────────────────────────────────────────────────────────────────────────────


def inert(text: object) -> str:
    """`plain`, without what XML cannot hold."""
    return re.sub("[\ud800-\udfff\ufffe\uffff]", "�", plain(text))


def width_px(text: str, points: float, *, bold: bool = False) -> float:
    """How wide a line of text is."""
    return sum(_advance(sign, bold) for sign in text) * points * DPI / 72


@cache
def _advance(sign: str, bold: bool) -> float:
    """Of one sign, in its size; a sign that the font lacks comes from another and may be as wide as high."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")))
    if not font.get_char_index(ord(sign)):
        return 1.0
    font.set_size(100, 72)
    return font.load_char(ord(sign)).linearHoriAdvance / 65536 / 100


def wrapped(text: str, width: float, points: float, *, bold: bool = False, most: int = 99) -> list[str]:
    """Lines no wider than `width` pixels, broken behind a sign that parts words or, where there is none, anywhere."""

    def is_wide(line: str) -> bool:
        return width_px(line.rstrip(), points, bold=bold) > width

    lines: list[str] = []
    line = ""
    for piece in re.findall(r"[^ ,@/]*[ ,@/]?", inert(text)):
        if line and is_wide(line + piece):
            lines, line = [*lines, line], ""
        line += piece
        while is_wide(line):
            at = _fitting(line, width, points, bold)
            lines, line = [*lines, line[:at]], line[at:]
    lines += [line] if line.strip() or not lines else []
    if len(lines) > most:
        lines[most - 1 :] = [shortened("".join(lines[most - 1 :]), width, points, bold=bold)]
    return [line.rstrip() for line in lines]


def shortened(text: str, width: float, points: float, *, bold: bool = False) -> str:
    """As much of the text as there is room for, and a sign that there is more."""
    text = inert(text)
    if width_px(text, points, bold=bold) <= width:
        return text
    return text[: _fitting(text, width - width_px("…", points, bold=bold), points, bold)].rstrip() + "…"


def _fitting(text: str, width: float, points: float, bold: bool) -> int:
    """How many signs from the start are no wider; one at least."""
    used = 0.0
    for at, sign in enumerate(text):
        used += width_px(sign, points, bold=bold)
        if used > width:
            return max(at, 1)
    return len(text)


def with_room(labels: Iterable[tuple[float, str]], points: float) -> list[tuple[float, str]]:
    """Those of the centred labels that do not touch one before them in the list."""
    kept: list[tuple[float, float, tuple[float, str]]] = []
    for x, text in labels:
        half = width_px(text, points) / 2 + 4
        if all(x + half <= start or x - half >= end for start, end, _ in kept):
            kept.append((x - half, x + half, (x, text)))
    return sorted(each for *_, each in kept)


def steps(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, no more than `most`."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def brief(arm: str) -> str:
    """A name that leaves room for what is said about it."""
    text = inert(arm)
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 1]}…"


def named(arms: Sequence[str], noun: str = "arm") -> str:
    """One or two by name, more by their number."""
    return " and ".join(map(brief, arms)) if len(arms) <= 2 else count(len(arms), noun)


def stand_in(comparison: Comparison) -> list[str]:
    """What every chart of speeds says of a stand-in device, or of a card that was made smaller."""
    if all(each.settings.stand_in_bytes is None for each in comparison.header.contenders):
        return [text] if (text := held_to(comparison.limits)) else []
    return ["Stand-in device: placement is real, speed says nothing about a GPU."]


# ── a sheet ─────────────────────────────────────────────────────────────────────────────────


class Sheet:
    """A chart while it is drawn. `y` is where the next thing goes; all lengths are pixels."""

    def __init__(self) -> None:
        from matplotlib.figure import Figure

        self.figure: Figure = Figure(figsize=(WIDTH_PX / DPI, 1), dpi=DPI)
        self.figure.patch.set_visible(False)
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set_xlim(0, WIDTH_PX)
        self.axes.set_autoscale_on(False)
        self.y = 0.0

    def heading(self, title: str, *notes: str) -> None:
        """Title and what to know, over the whole width."""
        room = WIDTH_PX - 2 * EDGE_PX
        self.y += 4
        for line in wrapped(title, room, TITLE_PT, bold=True, most=4):
            self.y += 17
            self.text(EDGE_PX, self.y, line, points=TITLE_PT, weight="bold")
        self.y += 3
        for note in notes:
            for line in wrapped(note, room, SMALL_PT, most=4):
                self.y += 14
                self.text(EDGE_PX, self.y, line, points=SMALL_PT, color=FAINT)
        self.y += 8

    def text(self, x: float, y: float, text: str, *, points: float = TEXT_PT, **facts: Any) -> None:
        """One line on its base line at `y`, from `x` unless `ha` says otherwise."""
        # in the axes a text would be given a clip, which costs as much as the text
        given: dict[str, Any] = {"color": TEXT, "va": "baseline", "transform": self.axes.transData}
        self.figure.text(x, y, inert(text), fontsize=points, **(given | facts))

    def names(self, y: float, lines: Sequence[str], below: str | None = None) -> None:
        """The name of an arm, its lines around the middle `y`, with a fainter line below."""
        many = len(lines) + (below is not None)
        base = y - 6.5 * (many - 1) + 4
        for line in lines:
            self.text(EDGE_PX, base, line)
            base += 13
        if below is not None:
            self.text(EDGE_PX, base, below, points=SMALL_PT, color=FAINT)

    def rows(self, names: Sequence[Sequence[str]], row_px: float) -> list[float]:
        """A row for each name, as high as its lines need; the middles of all."""
        middles = []
        for name in names:
            height = max(row_px, 13 * len(name) + 8)
            middles.append(self.y + height / 2)
            self.names(middles[-1], name)
            self.y += height
        return middles

    def line(self, xs: Sequence[float], ys: Sequence[float], color: str, width: float = 1.0, **facts: Any) -> None:
        """Through the points, in order; broken at a nan."""
        self.axes.plot(xs, ys, color=color, linewidth=width, **({"clip_on": False, "zorder": 2} | facts))

    def marks(self, xs: Sequence[float], ys: Sequence[float], mark: str, color: str, **facts: Any) -> None:
        """A mark at each point."""
        given: dict[str, Any] = {"markersize": 5.5, "markeredgewidth": 1.3, "clip_on": False, "zorder": 4}
        self.axes.plot(xs, ys, mark, color=color, **(given | facts))

    def whiskers(self, bars: Iterable[tuple[float, float, float, float]], color: str) -> None:
        """Intervals as (low, middle, high, y), each but for where its mark is."""
        xs: list[float] = []
        ys: list[float] = []
        for low, middle, high, y in bars:
            for near, far in ((middle - MARK_PX, low), (middle + MARK_PX, high)):
                if abs(far - middle) > MARK_PX:
                    xs += [near, far, math.nan, far, far, math.nan]
                    ys += [y, y, math.nan, y - 4, y + 4, math.nan]
        self.line(xs, ys, color, 1.4)

    def box(self, x: float, y: float, width: float, height: float, **facts: Any) -> None:
        """A rectangle from its top left corner; without facts a filled one of no colour of its own."""
        from matplotlib.patches import Rectangle

        given: dict[str, Any] = {"facecolor": BAND, "edgecolor": "none", "linewidth": 0, "clip_on": False, "zorder": 1}
        self.axes.add_patch(Rectangle((x, y), width, height, **(given | facts)))

    def apart(self, names: Sequence[str], reasons: Sequence[str], left: float) -> None:
        """Rows of arms that have nothing to draw: the name, and from `left` on why, in words."""
        for name, reason in zip(names, reasons, strict=True):
            lines = wrapped(name, left - EDGE_PX - 14, TEXT_PT, most=NAME_LINES)
            told = wrapped(reason, WIDTH_PX - EDGE_PX - left, SMALL_PT, most=2)
            height = 13 * max(len(lines), len(told)) + 6
            for number, line in enumerate(lines):
                self.text(EDGE_PX, self.y + 13 * number + 13, line)
            for number, line in enumerate(told):
                self.text(left, self.y + 13 * number + 13, line, points=SMALL_PT, color=FAINT)
            self.y += height

    def ticks(self, labels: Iterable[tuple[float, str]], top: float, bottom: float) -> None:
        """Numbers below the ground of a plot and a fine line up from each; the first in the list have the right."""
        shown = with_room(labels, SMALL_PT)
        for x, text in shown:
            self.text(x, bottom + 14, text, points=SMALL_PT, ha="center", color=FAINT)
        self.line(*_uprights([x for x, _ in shown], top, bottom), GRID, 0.8, zorder=0.5)

    def uprights(self, xs: Sequence[float], top: float, bottom: float, color: str, **facts: Any) -> None:
        """Lines from top to bottom at each x."""
        self.line(*_uprights(xs, top, bottom), color, **({"zorder": 0.6} | facts))

    def svg(self, title: str) -> str:
        """What was drawn, as high as it has grown."""
        height = math.ceil(self.y + EDGE_PX)
        self.figure.set_size_inches(WIDTH_PX / DPI, height / DPI)
        self.axes.set_ylim(height, 0)
        return svg_of(self.figure, title)


def _uprights(xs: Sequence[float], top: float, bottom: float) -> tuple[list[float], list[float]]:
    return [x for each in xs for x in (each, each, math.nan)], [y for _ in xs for y in (top, bottom, math.nan)]


def name_column(names: Sequence[str]) -> tuple[float, list[list[str]]]:
    """How wide the column of the names is, and the lines of each."""
    width = min(NAMES_PX, max((width_px(inert(name), TEXT_PT) for name in names), default=0.0) + 1)
    return width, [wrapped(name, width, TEXT_PT, most=NAME_LINES) for name in names]


# ── SVG ─────────────────────────────────────────────────────────────────────────────────────


def svg_of(figure: Figure, title: str) -> str:
    """On a transparent ground; without declaration, so that it can stand in HTML."""
    import matplotlib

    file = io.StringIO()
    unknown = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=unknown)
    drawn = file.getvalue()
    width_in, height_in = figure.get_size_inches()
    size = f'width="{WIDTH_PX}" height="{round(WIDTH_PX * height_in / width_in)}" role="img" '
    size += f'data-matplotlib="{matplotlib.__version__}" '
    drawn = re.sub(r'<g id="[a-z0-9]+_\d+">', "<g>", drawn)  # names of nothing, for a page may hold many charts
    opening, rest = drawn[drawn.index("<svg") :].split(">", 1)
    opening = re.sub(r'width="[^"]*" height="[^"]*" ', size, opening)
    return f"{opening}>\n <title>{escape(inert(title))}</title>{rest}"


def darken(svg: str) -> str:
    """The same for a dark page. What is defined in it gets names of its own, for both may stand in one page."""

    def changed(tag: re.Match[str]) -> str:
        colored = re.sub(r"#[0-9a-f]{6}\b", lambda found: ON_DARK.get(found[0], found[0]), tag[0])
        return re.sub(r'(?<=["#])([mph][0-9a-f]{10})(?=[")])', r"\1-dark", colored)

    return re.sub(r"<[a-z][^>]*>", changed, svg)  # in tags alone: a colour in a text is a text


def is_same(written: str, drawn: str) -> bool:
    """Whether a chart is the one that was drawn now: to the letter, or nearly if by another matplotlib.

    Nearly is: the same elements with the same attributes and texts, and each number no further off than `NEAR_PT`.
    """
    if drawn_by(written) == drawn_by(drawn):
        return written == drawn
    if "<!" in written or "<?" in written:  # an entity could be anything
        return False
    try:
        ours, theirs = ElementTree.fromstring(drawn), ElementTree.fromstring(written)
    except ElementTree.ParseError:
        return False
    names: dict[str, str] = {}
    pairs = zip_longest(_flat(ours, names), _flat(theirs, {}))
    return all(one is not None and other is not None and _is_near(one, other) for one, other in pairs)


def drawn_by(svg: str) -> str | None:
    """The version of the matplotlib that it says drew it."""
    found = re.match(r'<svg [^>]*?data-matplotlib="([\w.+-]{1,40})"', svg)
    return found[1] if found else None


_Place: TypeAlias = tuple[str, bool, dict[str, str], str, str]


def _flat(root: ElementTree.Element, names: dict[str, str]) -> Iterator[_Place]:
    """Every element in order, with how deep it stands: tag, whether it defines, attributes, text, text behind it.

    What is defined is called by its number, for its name is a digest of where the lines run.
    """

    def numbered(found: re.Match[str]) -> str:
        return names.setdefault(found[0], f"#{len(names)}")

    def walk(element: ElementTree.Element, depth: int, defines: bool) -> Iterator[_Place]:
        defines = defines or element.tag.endswith("}defs")
        facts = {
            name: " ".join(re.sub(r"\b[mph][0-9a-f]{10}(?:-dark)?\b", numbered, value).split())
            for name, value in element.attrib.items()
            if (depth, name) != (0, "data-matplotlib")
        }
        text, behind = ((each or "").strip(" \n") for each in (element.text, element.tail))
        yield f"{depth} {element.tag}", defines, facts, text, behind
        for inner in element:
            yield from walk(inner, depth + 1, defines)

    return walk(root, 0, False)


def _is_near(one: _Place, other: _Place) -> bool:
    tag, defines, facts, *texts = one
    if [tag, defines, *texts] != [other[0], other[1], *other[3:]] or facts.keys() != other[2].keys():
        return False
    return all(_is_near_value(name, value, other[2][name], defines) for name, value in facts.items())


def _is_near_value(name: str, one: str, other: str, defines: bool) -> bool:
    """Numbers of places may differ a little, those of a mark's shape and of a style not; all else is equal."""
    if name == "transform":
        moved = re.compile(r"translate\(([^()]*)\)")
        if moved.sub("translate()", one) != moved.sub("translate()", other):
            return False
        one, other = (" ".join(moved.findall(value)) for value in (one, other))
    near = NEAR_PT if name in PLACES and not (defines and name == "d") else 0.01
    if _NUMBER.sub("0", one) != _NUMBER.sub("0", other):
        return False
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= near for a, b in pairs)


PLACES = frozenset({"d", "x", "y", "width", "height", "viewBox", "points", "transform"})
_NUMBER = re.compile(r"(?<![\w#.])-?\d+(?:\.\d*)?(?:e[+-]?\d+)?")
