"""A sweep as a curve: decode speed over the one number that changes from arm to arm.

Values that are one placement are one point. A point knows how it sat in device memory, what the
memory would allow and where the line of the others lies; the curve knows its edge, the last value
before memory is full, and the best: the fastest and all that are not told apart from it.
Data and words only; `draw` is for a terminal, `charts` draws for a page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from harness import physics
from harness.arms import OF_THE_PROMPTS, parse_arms
from harness.compare import Comparison, Row
from harness.contract import Arm
from harness.errors import UsageError
from harness.find import FREES_DEVICE
from harness.physics import Flag
from harness.placement import Cell
from harness.plan import Status
from harness.record import Search
from harness.verdict import telling
from harness.words import number, percent, plain

FEWEST_VALUES = 3  # fewer are two arms, and a line through them says nothing
WIDEST = 100  # columns of a drawing
PLACEMENTS = frozenset({"ncmoe", "ngl"})
HOLDS = frozenset({Cell.FITS, Cell.TIGHT})
FULL = frozenset({Cell.SPILLED, Cell.DOES_NOT_FIT})
MAY_SPILL = frozenset({Cell.SPILLED, Cell.TIGHT})  # reason enough to be slower
WITHOUT_ORDER = frozenset({"rpc"})  # its values are machines
CLAIMS = {"SCREENING": "too few blocks for a claim", "RED": "this run ranks nothing"}
AXES = {
    "ncmoe": "layers whose experts are on the CPU",
    "ngl": "layers on the GPU",
    "c": "context in tokens",
    "b": "batch in tokens",
    "ub": "micro-batch in tokens",
    "t": "threads",
    "depth": "tokens already in the context",
    "ctk": "type of the keys in the KV cache",
    "ctv": "type of the values in the KV cache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One placement of a sweep. Speeds in tokens a second; `tps` is None where none may be shown."""

    label: str  # of all its values: "16", "≥40"
    values: tuple[str, ...]
    x: float  # the number, or a rank where the values are none
    arm: str  # the one that ran
    tps: float | None = None
    low: float | None = None  # of this point alone
    high: float | None = None
    state: Cell = Cell.UNKNOWN
    why: str | None = None
    tried: bool = True
    ceiling_tps: float | None = None
    share: float | None = None  # of the ceiling
    fitted_tps: float | None = None
    flags: tuple[Flag, ...] = ()

    @property
    def can_be(self) -> bool:
        """Whether any memory allows its speed."""
        return Flag.IMPOSSIBLE not in self.flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One sweep. `edge` and `best` are labels; `finding` is the whole in one line, `notes` are sentences."""

    over: str  # "ncmoe", "ngl", "ub"
    arms: str  # what the points share: "llama-cpp@ncmoe=…"
    axis: str
    points: tuple[Point, ...]  # by x
    edge: str | None = None
    beyond: str | None = None  # the point where memory is full, next to the edge
    best: tuple[str, ...] = ()
    finding: str = ""
    notes: tuple[str, ...] = ()

    @property
    def has_speeds(self) -> bool:
        return any(point.tps is not None for point in self.points)

    def point(self, label: str) -> Point:
        return next(point for point in self.points if point.label == label)


def curves(comparison: Comparison) -> tuple[Curve, ...]:
    """One curve for each sweep among the rows: three values or more of one number, all else equal.

    Of a run with a search also the one over its candidates, of which only the confirmed have speeds.
    """
    found = [] if comparison.header.search is None else [_searched(comparison, comparison.header.search)]
    rows = {row.arm: row for row in comparison.rows}
    found += [_swept(comparison, rows, over, shared, arms) for (shared, over), arms in _sweeps(rows).items()]
    return tuple(curve for curve in found if curve is not None)


# ── which arms are a sweep ──────────────────────────────────────────────────────────────────


def _sweeps(texts: Iterable[str]) -> dict[tuple[str, str], dict[str, str]]:
    """By what the arms share and the number they differ in: value → arm text, of sweeps that are long enough."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for text in texts:
        if (arm := _parsed(text)) is None:
            continue
        for over, value in _numbers(arm):
            found.setdefault((_shared(arm, over), over), {})[value] = text
    return {key: arms for key, arms in found.items() if len(arms) >= FEWEST_VALUES}


def _parsed(text: str) -> Arm | None:
    try:
        (arm,) = parse_arms(text)
    except (UsageError, ValueError):  # of an engine that is not here any more
        return None
    return arm


def _numbers(arm: Arm) -> list[tuple[str, str]]:
    """What could be swept in it, with its value."""
    placed = [] if arm.placement.n is None else [(arm.placement.kind, str(arm.placement.n))]
    return placed + [(key, value) for key, value in arm.knobs if key not in WITHOUT_ORDER]


def _shared(arm: Arm, over: str) -> str:
    """The arm with a gap where the number was."""
    knobs = tuple((key, "…" if key == over else value) for key, value in arm.knobs)
    text = str(dataclasses.replace(arm, knobs=knobs))
    return text if arm.placement.kind != over else text.replace(f"@{arm.placement}", f"@{over}=…", 1)


# ── its points ──────────────────────────────────────────────────────────────────────────────


def _swept(comparison: Comparison, rows: dict[str, Row], over: str, shared: str, arms: dict[str, str]) -> Curve | None:
    ran: dict[str, list[str]] = {}  # arm that ran → the values that it stands for
    for value in _ordered(arms):
        ran.setdefault(rows[arms[value]].status.alias_of or arms[value], []).append(value)
    if len(ran) < 2:
        return None
    order = _ordered(arms)
    points = tuple(_measured(rows[text], values, order) for text, values in ran.items() if text in rows)
    return _told(comparison, over, shared, points, rows)


def _searched(comparison: Comparison, search: Search) -> Curve | None:
    """The candidates of a search: states of all that were tried, speeds of the confirmed alone."""
    rows = {row.arm: row for row in comparison.rows}
    tried = {each.arm: each for each in search.tried}
    candidates = {
        value: text
        for text in (*search.refused, *search.candidates)
        if (arm := _parsed(text)) is not None
        for over, value in _numbers(arm)
        if over == search.over
    }
    if len(candidates) < FEWEST_VALUES:
        return None
    order = _ordered(candidates)
    points = []
    for value, text in candidates.items():
        found = tried.get(text)
        state, why = Cell.UNKNOWN, None
        if text in search.refused:
            state, why = Cell.DOES_NOT_FIT, "predicted not to fit"
        elif found is not None:
            state, why = Cell(found.cell), found.status.reason or "tried; speeds of a search are not published"
        point = Point(
            label=value, values=(value,), x=_x(value, order), arm=text, state=state, why=why, tried=why is not None
        )
        if text in search.chosen and text in rows:
            point = _measured(rows[text], [value], order)
            point = point if point.state is not Cell.UNKNOWN else dataclasses.replace(point, state=state)
        points.append(point)
    shared = _shared(next(arm for text in candidates.values() if (arm := _parsed(text)) is not None), search.over)
    return _told(comparison, search.over, shared, tuple(points), rows)


def _ordered(values: Iterable[str]) -> list[str]:
    """Numbers by size; words as they come."""
    found = list(values)
    return sorted(found, key=int) if all(value.isdecimal() for value in found) else found


def _x(value: str, order: Sequence[str]) -> float:
    return float(value) if all(each.isdecimal() for each in order) else float(order.index(value))


def _label(values: Sequence[str], order: Sequence[str]) -> str:
    """All values of one point; `order` holds those of the whole sweep."""
    places = [order.index(value) for value in values]
    if len(values) == 1:
        return values[0]
    if places[-1] - places[0] + 1 != len(places) or not values[0].isdecimal():
        return ", ".join(values)
    if places[-1] == len(order) - 1:
        return f"≥{values[0]}"
    return f"≤{values[-1]}" if places[0] == 0 else f"{values[0]}–{values[-1]}"


def _measured(row: Row, values: Sequence[str], order: Sequence[str]) -> Point:
    """A row as a point. What did something else than asked has no speed of its own."""
    counts = row.status.word in (Status.OK, Status.UNSTABLE) and row.decode_tps is not None
    speed = row.decode_tps if counts else None
    tps = speed.value if speed is not None else None
    bounds = telling(speed.low, speed.high) if speed is not None else None
    does_not_fit = row.status.word is Status.DOES_NOT_FIT
    state = Cell.DOES_NOT_FIT if does_not_fit else row.cell
    label = _label(values, order)
    return Point(
        label=label,
        values=tuple(values),
        x=_x(values[-1] if label.startswith("≤") else values[0], order),
        arm=row.arm,
        tps=tps,
        low=bounds[0] if bounds is not None else None,
        high=bounds[1] if bounds is not None else None,
        state=state,
        why=row.why_not or row.cell_reason,
        ceiling_tps=row.ceiling_tps,
        share=row.share if tps is not None else None,
        flags=row.flags,
    )


# ── what it says ────────────────────────────────────────────────────────────────────────────


def _told(comparison: Comparison, over: str, shared: str, points: Iterable[Point], rows: dict[str, Row]) -> Curve:
    """The curve with its line, edge, best and words."""
    points = sorted(points, key=lambda point: point.x)
    notes = [
        f"{over} = {', '.join(point.values)}: one placement, measured once." for point in points if point.values[1:]
    ]
    if any(each.settings.stand_in_bytes is not None for each in comparison.header.contenders):
        notes.append("Stand-in device: placement is real, speed says nothing about a GPU.")
    else:
        points, said = _fitted(over, points, rows)
        notes += said
        if over in PLACEMENTS:
            points, said = _signed(comparison, over, points, rows)
            notes += said
    best = () if over in OF_THE_PROMPTS else _best(comparison, points, rows)
    edge, beyond = None, None
    if len(best) > 1:
        notes.insert(0, f"Best by intervals: those of the speed ratios of {at(over, *best)} overlap.")
    if (found := _edge(over, points, rows)) is not None:
        edge, beyond = found[0].label, found[1].label
        notes.insert(
            0, f"{at(over, edge)} is the last value before memory is full; {at(over, beyond)}: {_full(found[1])}."
        )
    return Curve(
        over=over,
        arms=shared,
        axis=f"{AXES[over]} ({over})" if over in AXES else over,
        points=tuple(points),
        edge=edge,
        beyond=beyond,
        best=best,
        finding=_finding(comparison, over, points, best, edge),
        notes=tuple(notes),
    )


def at(over: str, *labels: str) -> str:
    """Values as a person names them: "ncmoe=16", "ncmoe≥40", "ncmoe = 16, 20"."""
    if len(labels) > 1:
        return f"{over} = {', '.join(labels)}"
    return over + (labels[0] if labels[0].startswith(("≥", "≤")) else f"={labels[0]}")


def _toward_device(over: str, points: Sequence[Point]) -> list[Point]:
    """The least on the device first: a larger number fills it, unless it is one that frees it."""
    return list(reversed(points)) if over in FREES_DEVICE else list(points)


def _fitted(over: str, points: Sequence[Point], rows: dict[str, Row]) -> tuple[list[Point], list[str]]:
    """The points with the speed of the physical line through them, and what that says."""
    given = [
        physics.Point(
            point.label,
            0,
            point.tps,
            spilled=point.state is Cell.SPILLED,
            traffic=row.predicted,
            flag=None if point.can_be else Flag.IMPOSSIBLE,
        )
        for point in points
        if point.tps is not None and (row := rows[point.arm]).predicted is not None
    ]
    fit = physics.fit_sweep(given)
    if fit is None:
        return list(points), []
    line = {each.label: each for each in fit.points}
    told = [
        f"The line of physics: {1000 * fit.rest_s:.1f} ms a token, and {1e12 * fit.byte_s:.1f} ms more for each GB "
        f"that it reads on the {fit.side}."
    ]
    found = []
    for point in points:
        each = line.get(point.label)
        if each is not None:
            point = dataclasses.replace(point, fitted_tps=each.fitted_tps)
            if each.flag is not None:
                told.append(f"{at(over, point.label)} runs at {1 + each.residual:.2f} times the speed of that line.")
                point = _flagged(point, each.flag)
        found.append(point)
    return found, told


def _flagged(point: Point, flag: Flag) -> Point:
    return dataclasses.replace(point, flags=tuple(dict.fromkeys((*point.flags, flag))))


def _signed(
    comparison: Comparison, over: str, points: Sequence[Point], rows: dict[str, Row]
) -> tuple[list[Point], list[str]]:
    """The points with those flagged that are slower although they keep more on the device, and the sentence."""
    measured = [point for point in _toward_device(over, points) if point.tps is not None and point.can_be]
    ranks = _ranks(comparison, [point.arm for point in measured], rows)
    pairs = physics.wrong_signs(
        [
            physics.Point(point.label, ranks[point.arm], point.tps, spilled=point.state in MAY_SPILL)
            for point in measured
            if point.tps is not None
        ]
    )
    told = []
    for rank in dict.fromkeys(ranks.values()):
        same = [point for point in measured if ranks[point.arm] == rank]
        if len(same) > 1:
            speeds = [point.tps for point in same if point.tps is not None]
            told.append(
                f"{at(over, *(point.label for point in same))} are one placement, measured as {min(speeds):.1f} to "
                f"{max(speeds):.1f} tok/s."
            )
    if pairs:
        steps = []
        for chain in _chains(pairs):
            falling = ", ".join(f"{point.tps:.1f}" for point in chain)
            steps.append(f"{at(over, *(point.label for point in chain))} run at {falling} tok/s")
        told.append(
            f"More on the device is slower, and nothing is known to have spilled: {'; '.join(steps)}. Measure it again."
        )
    wrong = {slow.label for slow, _ in pairs}
    return [_flagged(point, Flag.WRONG_SIGN) if point.label in wrong else point for point in points], told


def _chains(pairs: Iterable[tuple[physics.Point, physics.Point]]) -> list[list[physics.Point]]:
    """Pairs of (slower, faster) neighbours as falling rows, so that each point is named once."""
    chains: list[list[physics.Point]] = []
    for slow, fast in pairs:
        if chains and chains[-1][-1].label == fast.label:
            chains[-1].append(slow)
        else:
            chains.append([fast, slow])
    return chains


def _ranks(comparison: Comparison, arms: Sequence[str], rows: dict[str, Row]) -> dict[str, int]:
    """What each arm keeps on the device: bytes, or where they are unknown a rank that one placement shares."""
    predicted = [rows[arm].predicted for arm in arms]
    if all(each is not None for each in predicted):
        return {arm: each.device_weights_bytes for arm, each in zip(arms, predicted, strict=True) if each is not None}
    texts = {arm.label: arm.text for arm in comparison.header.plan.arms}
    same = [{texts[a], texts[b]} for a, b in comparison.header.plan.aliases]
    ranks: dict[str, int] = {}
    for arm in arms:
        alike = next((ranks[other] for other in ranks if {arm, other} in same), None)
        ranks[arm] = len(ranks) if alike is None else alike
    return ranks


def _ratio(row: Row | None) -> tuple[float, float, float] | None:
    """Speed over the reference's, with its interval; None where there is none to judge by."""
    if row is None or row.is_reference:
        return None if row is None else (1.0, 1.0, 1.0)
    found = row.contrast
    if found is None or found.word == "NOT_COMPARABLE" or found.low is None or found.high is None:
        return None
    return found.ratio, found.low, found.high


def _best(comparison: Comparison, points: Sequence[Point], rows: dict[str, Row]) -> tuple[str, ...]:
    """The fastest and every point whose interval of the ratio overlaps its; none in a run that ranks nothing."""
    if not comparison.state.ranks:
        return ()
    measured = [point for point in points if point.tps is not None and point.can_be]
    ratios = {point.label: ratio for point in measured if (ratio := _ratio(rows.get(point.arm))) is not None}
    if len(ratios) < max(2, len(measured)):  # one that was not compared may be the fastest
        return ()
    _, least, _ = max(ratios.values())
    return tuple(label for label, (_, _, high) in ratios.items() if high >= least)


def _edge(over: str, points: Sequence[Point], rows: dict[str, Row]) -> tuple[Point, Point] | None:
    """The last point that fits, and the next one, where memory is full: by its state, or nearly full and slower."""
    if not points[0].values[0].isdecimal():
        return None
    for fits, beyond in reversed(list(pairwise(_toward_device(over, points)))):
        if fits.state not in HOLDS:
            continue
        one, other = _ratio(rows.get(fits.arm)), _ratio(rows.get(beyond.arm))
        slower = one is not None and other is not None and other[2] < one[1]
        if beyond.state in FULL or (beyond.state is Cell.TIGHT and slower):
            return fits, beyond
    return None


def _full(point: Point) -> str:
    return "it is slower" if point.state is Cell.TIGHT else point.state.value


def _finding(comparison: Comparison, over: str, points: Sequence[Point], best: Sequence[str], edge: str | None) -> str:
    """One line for a title."""
    measured = [(point.tps, point.label) for point in points if point.tps is not None and point.can_be]
    where = ""
    if edge is not None:
        where = f"; memory is full {'below' if over in FREES_DEVICE else 'above'} {at(over, edge)}"
    if not measured:
        return f"No value of {over} has a speed to show{where}"
    if over in OF_THE_PROMPTS:  # nothing to choose: what it costs is the finding
        (first_tps, first), (last_tps, last) = measured[0], measured[-1]
        return (
            f"From {at(over, first)} to {last} decoding goes from {first_tps:.1f} to {last_tps:.1f} tok/s, "
            f"{last_tps / first_tps:.2f} times as fast"
        )
    top_tps, top = max(measured)
    if len(best) == len(points) > 1:
        return f"No value of {over} is told apart: {top_tps:.1f} tok/s at most{where}"
    best_tps = max((tps for tps, label in measured if label in best), default=top_tps)
    if len(best) == 1:
        return f"{at(over, best[0])} is fastest: {best_tps:.1f} tok/s{where}"
    if best:
        return f"{at(over, *best)} are fastest and not told apart: {best_tps:.1f} tok/s{where}"
    if len(measured) == 1:
        return f"Only {at(over, top)} has a speed: {top_tps:.1f} tok/s{where}"
    claim = CLAIMS.get(comparison.state.word, "its values may not be compared")
    return f"{at(over, top)} reads highest, {top_tps:.1f} tok/s: {claim}{where}"


# ── for a terminal ──────────────────────────────────────────────────────────────────────────


def draw(curve: Curve, width: int = WIDEST) -> str:
    """The curve in plain text, a line and a bar for each point, nothing wider than `width` columns or 100."""
    width = min(width, WIDEST)
    most = max((point.tps for point in curve.points if point.tps is not None), default=0.0)
    rows: list[tuple[str, str, str, float]] = []
    fences = []  # before which row memory is full
    last = ""
    for (_, remark), group in groupby(curve.points, key=lambda point: _row_of(curve, point)):
        points = list(group)  # those without a speed are one row for as long as the same is said about them
        if rows and {last, points[0].label} == {curve.edge, curve.beyond}:
            fences.append(len(rows))
        rows.append((_span(points), _speed(points[0]), remark, points[0].tps or 0.0))
        last = points[-1].label
    first = max(len(curve.over), *(len(label) for label, *_ in rows))
    second = max(len("tok/s"), *(len(speed) for _, speed, *_ in rows))
    third = max(len(remark) for _, _, remark, _ in rows)
    room = max(width - first - second - third - 6, width // 4)
    lines = [plain(curve.finding), "", f"{curve.over:>{first}}  {'tok/s':<{second}}"]
    for index, (label, speed, remark, tps) in enumerate(rows):
        if index in fences:
            lines.append(f"{'':>{first}}  {' memory is full ':-^{second + 2 + room}}")
        bar = "█" * max(1, round(room * tps / most)) if tps else ""
        lines.append(f"{label:>{first}}  {speed:<{second}}  {bar:<{room}}  {remark}")
    short = (line if len(line) <= width else line[: width - 1] + "…" for line in map(str.rstrip, lines))
    return "\n".join(short)


def _span(points: Sequence[Point]) -> str:
    """One label for points that follow each other."""
    first, last = points[0], points[-1]
    if len(points) == 1:
        return first.label
    if last.label.startswith("≥"):
        return f"≥{first.values[0]}"
    return f"≤{last.values[-1]}" if first.label.startswith("≤") else f"{first.values[0]}–{last.values[-1]}"


def _row_of(curve: Curve, point: Point) -> tuple[str, str]:
    return "" if point.tps is None else point.label, _remarks(curve, point)


def _speed(point: Point) -> str:
    if point.tps is None or point.low is None or point.high is None:
        return number(point.tps)
    return f"{point.tps:.1f} ({point.low:.1f}–{point.high:.1f})"


def _remarks(curve: Curve, point: Point) -> str:
    if not point.tried:
        return "not tried"
    words = ["best"] if point.label in curve.best else []
    words += [point.state.value] if point.state is not Cell.UNKNOWN else []
    words += [flag.value for flag in point.flags]
    if point.share is not None:
        words.append(f"{percent(round(point.share, 2))} of the ceiling")
    if point.tps is None and point.state is Cell.UNKNOWN and point.why:
        words.append(plain(point.why))
    return ", ".join(words)
