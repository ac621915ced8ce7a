"""A comparison as text: the answer, the terminal table, `report.md`, and JSON. Computes nothing.

All text from engines, models and files is made inert here, once: control characters go, and in
Markdown what could be markup is escaped.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import statistics
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from harness.arms import KNOBS
from harness.changes import Change, Changes
from harness.compare import Comparison, Row, parity
from harness.differences import Difference
from harness.gates import BAND_C, Temperatures
from harness.plan import Status
from harness.record import LoadRecord, Search
from harness.sizes import format_bytes
from harness.verdict import Contrast, Interval

NONE = "–"
ANSWER_CONTRASTS = 4  # more than these are in the table only
Cell = tuple[str, Callable[[Row], str]]


# ── inert text ──────────────────────────────────────────────────────────────────────────────


def plain(text: object) -> str:
    """One line without control, format and direction characters."""
    kept = (" " if unicodedata.category(sign) in ("Cc", "Zl", "Zp") else sign for sign in str(text))
    return " ".join("".join(sign for sign in kept if unicodedata.category(sign) != "Cf").split())


def markdown(text: object) -> str:
    """`plain`, with everything escaped that Markdown or HTML would take for its own."""
    escaped = re.sub(r"([\\`*_{}\[\]#|~])", r"\\\1", plain(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def shell(command: str) -> str:
    """A command as it is pasted: its lines stay, nothing in them moves a terminal."""
    return "\n".join(plain(line) for line in command.splitlines())


def fenced(text: str) -> str:
    """A block of shell that its content cannot end."""
    inner = shell(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", inner)), default=0))
    return f"{fence}sh\n{inner}\n{fence}"


def code(text: object) -> str:
    """A Markdown code span that its content cannot end; pipes are safe in tables too."""
    inner = plain(text).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", inner)), default=0))
    pad = " " if inner.startswith("`") or inner.endswith("`") else ""
    return f"{fence}{pad}{inner}{pad}{fence}"


# ── numbers ─────────────────────────────────────────────────────────────────────────────────


def number(value: float | None, unit: str = "") -> str:
    """Three figures at least; unknown is a dash."""
    if value is None:
        return NONE
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}{unit}"


def spread(interval: Interval | None) -> str:
    """Value with its own 95 % interval."""
    if interval is None:
        return NONE
    if interval.low is None:
        return number(interval.value)
    digits = 0 if interval.value >= 1000 else 1 if interval.value >= 10 else 3
    return f"{interval.value:.{digits}f} ({interval.low:.{digits}f}–{interval.high:.{digits}f})"


def ratio(contrast: Contrast | None) -> str:
    """With its interval; none for arms that may not be compared."""
    if contrast is None or contrast.word == "NOT_COMPARABLE":
        return NONE
    if contrast.low is None or contrast.high is None:
        return f"{contrast.ratio:.2f}×"
    return f"{contrast.ratio:.3f}× ({contrast.low:.3f}–{contrast.high:.3f})"


def memory(value: int | None) -> str:
    return NONE if value is None else format_bytes(value)


def milliseconds(interval: Interval | None) -> str:
    return NONE if interval is None else f"{interval.value * 1000:.0f} ms"


# ── the answer ──────────────────────────────────────────────────────────────────────────────


def answer(comparison: Comparison) -> str:
    """What may be said, in one paragraph, most important first. Engines and builds are named last."""
    state = comparison.state
    if state.word == "RED":
        said = f"This run ranks nothing. {state.reasons[0]}"
    elif comparison.header.search is not None:
        said = " ".join([_best(comparison), *_claims(comparison)])
    else:
        said = " ".join(_claims(comparison)) or _nothing_to_compare(comparison)
    engines = dict.fromkeys(row.engine for row in comparison.rows if row.engine and row.loads)
    stand_in = any(each.settings.stand_in_bytes is not None for each in comparison.header.contenders)
    label = " Stand-in device: placement is real, speed says nothing about a GPU." if stand_in else ""
    return f"{said} Measured with {' and '.join(map(str, engines)) or 'no engine'}.{label}"


def _best(comparison: Comparison) -> str:
    """What a search came to, by what was confirmed."""
    search = comparison.header.search
    assert search is not None
    among = _candidates(search)
    if not comparison.best:
        return f"Picked by a search over {search.over} ({among}): {' and '.join(search.chosen)}."
    names = " and ".join(row.arm for row in comparison.best)
    if len(comparison.best) == 1:
        return f"The best of {among} by {search.over} is {names}."
    same = any(row.contrast is not None and row.contrast.word == "SAME" for row in comparison.best)
    how = f"are the same within {percent(comparison.header.plan.margin)}" if same else "are not told apart"
    return f"The best of {among} by {search.over} are {names}, which {how}."


def _candidates(search: Search) -> str:
    return count(len(search.candidates), "value" if search.over in KNOBS else "placement")


def _claims(comparison: Comparison) -> list[str]:
    drawn = comparison.header.plan
    texts = {arm.label: arm.text for arm in drawn.arms}
    found = list(comparison.judgement.contrasts.items())
    claims = [_claim(contrast, texts[a], texts[b]) for (a, b), contrast in found[:ANSWER_CONTRASTS]]
    if found and comparison.state.word == "SCREENING":
        claims.insert(0, f"{count(comparison.judgement.n, 'block')}: too few for a claim.")
    if len(found) > ANSWER_CONTRASTS:
        claims.append(f"{len(found) - ANSWER_CONTRASTS} more comparisons are in the table.")
    return claims


def _claim(contrast: Contrast, arm: str, reference: str) -> str:
    bounds = f"{contrast.ratio:.2f}×"
    if contrast.low is not None and contrast.high is not None:
        bounds += f", {contrast.low:.2f}–{contrast.high:.2f}"
    match contrast.word:
        case "SAME":
            return f"{arm} and {reference} decode at the same speed within {percent(contrast.margin)} ({bounds})."
        case "DIFFERENT":
            return f"{arm} decodes at {contrast.ratio:.2f} times the speed of {reference} ({bounds})."
        case "INCONCLUSIVE":
            within = percent(contrast.attained_margin) if contrast.attained_margin is not None else NONE
            return f"{arm} and {reference} are not told apart: within {within} ({bounds})."
        case "NOT_COMPARABLE":
            return f"{arm} and {reference} are not comparable: {contrast.reason}."
        case _:
            return f"{arm} / {reference}: {bounds}."


def _nothing_to_compare(comparison: Comparison) -> str:
    row = comparison.reference
    if not row.loads and row.status.word is not Status.OK:
        return f"{row.arm}, the reference, has no numbers ({status_of(row)}), so nothing is compared."
    if not row.loads:
        return "There is no complete block yet."
    same = [other.arm for other in comparison.rows if other.status.alias_of is not None]
    also = f" {', '.join(same)} would be the same placement." if same else ""
    return f"{row.arm} decodes at {spread(row.decode_tps)} tok/s; no other arm could be compared with it.{also}"


def unfinished(comparison: Comparison, folder: object) -> str:
    """What to do about a run that was stopped."""
    done = count(comparison.blocks_run, "block")
    return f"Stopped after {done}; go on with `llamaduel run --resume {folder}`"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


# ── the table ───────────────────────────────────────────────────────────────────────────────


def verdict_of(row: Row) -> str:
    if row.is_reference:
        return "reference"
    if row.contrast is None:
        return NONE
    if row.contrast.word == "INCONCLUSIVE" and row.contrast.attained_margin is not None:
        return f"INCONCLUSIVE (within {percent(row.contrast.attained_margin)})"
    return row.contrast.word


def status_of(row: Row) -> str:
    return row.why_not or str(row.status)


CELLS: tuple[Cell, ...] = (
    ("arm", lambda row: row.arm),
    ("placement", lambda row: row.placement),
    ("decode tok/s", lambda row: spread(row.decode_tps)),
    ("prefill tok/s", lambda row: number(row.prefill_tps.value) if row.prefill_tps else NONE),
    ("TTFT", lambda row: milliseconds(row.ttft_s)),
    ("load", lambda row: number(row.load_s, " s")),
    ("VRAM", lambda row: memory(row.vram_bytes)),
    ("on device", lambda row: memory(row.realised_device_bytes)),
    ("on host", lambda row: memory(row.realised_host_bytes)),
    ("RSS", lambda row: memory(row.rss_bytes)),
    ("ratio", lambda row: "1" if row.is_reference else ratio(row.contrast)),
    ("verdict", verdict_of),
    ("status", status_of),
)


MAY_VANISH = frozenset({"VRAM", "on device", "on host", "RSS", "load", "TTFT"})
NARROW_DROPS = ("RSS", "load", "TTFT", "on host", "prefill tok/s", "placement", "on device")
WIDE = 200  # a file or a pipe has no width: nothing is left out
NOTHING = ({NONE}, {"0 B"}, {NONE, "0 B"})


def _not_counted(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """What is in the samples and in no number: how many of a kind, and each reason with its arm."""
    rows = _rows(comparison)
    kinds = {
        "invalid sample": [(row.arm, row.invalid_reasons) for row in rows],
        "failed load": [(row.arm, row.failed_loads) for row in rows],
    }
    return [
        (count(total, kind), [f"{times} × {arm}: {why}" for arm, reasons in found for why, times in reasons.items()])
        for kind, found in kinds.items()
        if (total := sum(times for _, reasons in found for times in reasons.values()))
    ]


def _rows(comparison: Comparison) -> list[Row]:
    """All arms, and the twin after its original."""
    rows = list(comparison.rows)
    if comparison.twin is not None:
        twin = dataclasses.replace(
            comparison.twin,
            arm=f"{comparison.twin.arm} (twin)",
            is_reference=False,
            contrast=comparison.judgement.twin.contrast if comparison.judgement.twin else None,
        )
        rows.insert(rows.index(comparison.reference) + 1, twin)
    return rows


def _grid(comparison: Comparison, drop: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
    """Headers and cells; columns in which nothing is known are left out."""
    rows = _rows(comparison)
    columns = [(name, [cell(row) for row in rows]) for name, cell in CELLS if name not in drop]
    columns = [(name, cells) for name, cells in columns if name not in MAY_VANISH or set(cells) not in NOTHING]
    return [name for name, _ in columns], [list(cells) for cells in zip(*(cells for _, cells in columns), strict=True)]


def table(comparison: Comparison, width: int | None = None) -> str:
    """For a terminal: the answer, the table, the state. Where it is narrow, less important columns go first."""
    import textwrap

    from tabulate import tabulate

    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE

    def draw(drop: Sequence[str], status: int | None) -> str:
        headers, cells = _grid(comparison, drop)
        shown = [[plain(cell) for cell in line] for line in cells]
        limits = [status if name in ("status", "placement") else None for name in headers]
        return str(
            tabulate(
                shown, headers, tablefmt="simple", disable_numparse=True, maxcolwidths=limits, break_on_hyphens=False
            )
        )

    tries = [(NARROW_DROPS[:count], limit) for count in range(len(NARROW_DROPS) + 1) for limit in (44, 28, 20)]
    drawn = (draw(drop, limit) for drop, limit in tries)
    fitting = next((text for text in drawn if max(map(len, text.splitlines())) <= width), None)
    paragraphs = [
        textwrap.fill(plain(answer(comparison)), width),
        fitting or draw(NARROW_DROPS, 20),
        *(textwrap.fill(line, width, subsequent_indent="  ") for line in _footer(comparison)),
    ]
    paste = [f"To run {plain(arm)} by hand:\n{shell(command)}" for arm, command in best_commands(comparison)]
    return "\n\n".join([*paragraphs[:2], "\n".join(paragraphs[2:]), *paste])


def _footer(comparison: Comparison) -> list[str]:
    """Below the table: state, level, what the intervals are, where everything is."""
    judgement, drawn = comparison.judgement, comparison.header.plan
    counts = f"{count(judgement.n, 'block')} judged"
    if comparison.blocks_run != judgement.n:
        counts += f" of {comparison.blocks_run} run"
    lines = [
        f"State {judgement.state.word}: {' '.join(judgement.state.reasons)}",
        f"{counts}; ratios {drawn.level.words}, margin {percent(drawn.margin)}; intervals of tok/s are of that arm "
        "alone (95 %), not for comparing rows.",
    ]
    lines += [f"{row.arm}: {status_of(row)}" for row in comparison.rows if len(status_of(row)) > 90]
    unequal = [
        f"{each.setting} ({', '.join(f'{arm}: {value or NONE}' for arm, value in each.values.items())})"
        for each in parity(comparison.run)
        if each.differs
    ]
    mute = [each.arm for each in comparison.header.contenders if each.realised and not each.realised.settings]
    if unequal:
        lines.append(f"Settings that differ as read back: {'; '.join(unequal)}")
    elif mute:
        lines.append(f"Settings cannot be read back from {', '.join(mute)}.")
    else:
        lines.append("Settings as read back from the engines are equal on all arms.")
    lines += [f"{kind}: {'; '.join(reasons)}" for kind, reasons in _not_counted(comparison)]
    if not comparison.finished:
        lines.append(unfinished(comparison, comparison.run.folder))
    lines.append(f"Run folder: {comparison.run.folder}   plan {comparison.header.plan_digest[:16]}")
    return [plain(line) for line in lines]


# ── report.md ───────────────────────────────────────────────────────────────────────────────


def report(comparison: Comparison) -> str:
    """The report in GitHub-flavoured Markdown; a function of the run folder alone."""
    header = comparison.header
    return (
        "\n\n".join(
            block
            for block in (
                f"# {markdown(header.model.name)}: {markdown(', '.join(row.arm for row in comparison.rows))}",
                markdown(answer(comparison)),
                *_paste(comparison),
                "## Can it be trusted",
                _integrity(comparison),
                "## Comparison",
                _table(*_grid(comparison)),
                "Ratios are decode speeds against the reference. Intervals of tok/s and of a ratio answer different "
                "questions: compare arms by their ratio only.",
                *_verdicts(comparison),
                *_failures(comparison),
                *_left_out(comparison),
                *_search(comparison),
                "## Where the weights were",
                _placements(comparison),
                "## Settings, as the engines read them back",
                _parity(comparison),
                "## Every load in time order",
                _loads(comparison),
                "## How it was measured",
                _parameters(comparison),
                "## Machine",
                _machine(comparison),
                "## Again",
                "The same run:",
                fenced(header.command),
                *_by_hand(comparison),
                "## What this does not say",
                "It is about this machine, these builds, this model, these prompts and this context. "
                "Speed says nothing about the quality of answers.",
            )
            if block
        )
        + "\n"
    )


def _table(headers: Sequence[str], cells: Sequence[Sequence[object]]) -> str:
    from tabulate import tabulate

    shown = [[markdown(cell) for cell in line] for line in cells]
    return str(tabulate(shown, [markdown(name) for name in headers], tablefmt="github", disable_numparse=True))


def _paste(comparison: Comparison) -> list[str]:
    """The command of the fastest arm, where the verdicts say that there is one."""
    if comparison.best:
        return _paste_best(comparison)
    others = [row for row in comparison.rows if row.contrast is not None]
    ahead = [row for row in others if row.contrast and row.contrast.word == "DIFFERENT" and row.contrast.ratio > 1]
    behind = [row for row in others if row.contrast and row.contrast.word == "DIFFERENT" and row.contrast.ratio < 1]
    best = max(ahead, key=lambda row: row.contrast.ratio if row.contrast else 0.0, default=None)
    if best is None and others and len(behind) == len(others):
        best = comparison.reference
    if best is None or best.command is None:
        return []
    words = (
        "The reference is the fastest arm here" if best.is_reference else "The arm farthest ahead of the reference here"
    )
    return [f"{words}, {code(best.arm)}, by hand:", fenced(best.command)]


def _paste_best(comparison: Comparison) -> list[str]:
    """What a search found, ready to paste: on its engine, and on the others that can be told so."""
    return [
        text for arm, command in best_commands(comparison) for text in (f"To run {code(arm)} by hand:", fenced(command))
    ]


def best_commands(comparison: Comparison) -> list[tuple[str, str]]:
    """Arm and command: of the best that a search found, then the same placement on other engines."""
    search = comparison.header.search
    if search is None or not comparison.best or comparison.best[0].command is None:
        return []
    best = comparison.best[0]
    return [(best.arm, best.command or ""), *search.elsewhere.get(best.arm, {}).items()]


def _search(comparison: Comparison) -> list[str]:
    """How the arms were picked. Speeds of a search are picked for being high, so none is shown."""
    search = comparison.header.search
    if search is None:
        return []
    rows = [(number, each.arm, each.status.word, each.cell, each.loads) for number, each in enumerate(search.tried, 1)]
    told = [
        f"{_candidates(search)} by {code(search.over)}, one candidate each, searched in "
        f"{count(sum(each.loads for each in search.tried), 'load')}. The search only picks: its speeds are in the "
        "samples and are no result.",
        _table(("try", "arm", "outcome", "device memory", "loads"), rows),
        f"Confirmed with fresh loads: {' and '.join(map(code, search.chosen))}.",
    ]
    reasons = {each.arm: each.status.reason for each in search.tried if each.status.reason}
    told += ["\n".join(f"- {code(arm)}: {markdown(reason)}" for arm, reason in reasons.items())] if reasons else []
    if search.refused:
        told.append(f"Not tried, for they cannot fit: {', '.join(map(code, search.refused))}.")
    return ["## How the placement was found", *told, *map(markdown, search.notes), fenced(search.command)]


def _by_hand(comparison: Comparison) -> list[str]:
    """Each arm without the harness."""
    return [
        text
        for row in comparison.rows
        if row.command is not None and row.status.word is not Status.ALIAS
        for text in (f"{code(row.arm)} by hand:", fenced(row.command))
    ]


def _integrity(comparison: Comparison) -> str:
    judgement, header = comparison.judgement, comparison.header
    twin, drift, variance, warm = judgement.twin, judgement.drift, comparison.variance, comparison.warm_up
    rows = [
        ("state", f"{judgement.state.word}: {' '.join(judgement.state.reasons)}"),
        ("blocks", f"{judgement.n} judged, {comparison.blocks_run} run, {header.plan.max_blocks} at most"),
        ("level", f"{header.plan.level.words}; margin {percent(header.plan.margin)}"),
        ("twin of the reference", ratio(twin.contrast) if twin else NONE),
        (
            "drift",
            f"{100 * drift.per_minute:+.2f} ± {100 * drift.half_width:.2f} % a minute (p {drift.p_slope:.2g}), "
            f"steps p {drift.p_steps:.2g}"
            if drift
            else NONE,
        ),
        ("noise inside a load", percent(variance.within_load) if variance.within_load is not None else NONE),
        ("noise between loads", percent(variance.between_loads) if variance.between_loads is not None else NONE),
        (
            "first request against the rest",
            f"{100 * -warm.residue:+.1f} % ({'warm' if warm.adequate else 'the warm-up was too short'})"
            if warm
            else NONE,
        ),
        ("loads of blocks that were repeated", str(comparison.repeated_loads)),
        ("invalid samples", str(sum(row.invalid_samples for row in _rows(comparison)))),
        *_between_loads(comparison),
        ("finished", "yes" if comparison.finished else unfinished(comparison, comparison.run.folder.resolve().name)),
        ("output", _outputs(comparison)),
        ("plan, hashed before block 1", header.plan_digest),
        ("weights digest", header.model.digest),
    ]
    return _table(("check", "result"), rows)


def _between_loads(comparison: Comparison) -> list[tuple[str, str]]:
    """What each load found as it began, one line a gate."""
    loads = [load for load in comparison.run.loads if load.stage == "block"]
    burnt = [load for load in comparison.run.loads if load.stage == "burn-in"]
    rows = [
        ("burn-in, not analysed", f"{count(len(burnt), 'load')} of {burnt[0].arm}{_heat(burnt)}") if burnt else None,
        ("quiet machine before a load", _quiet(loads)),
        ("memory after a load", _memory_after(comparison.run.loads)),
        ("page cache before a load", _page_cache(loads)),
        ("temperature as a load began", _temperature(loads)),
    ]
    return [row for row in rows if row is not None]


def _quiet(loads: Sequence[LoadRecord]) -> str:
    found = [load.quiet for load in loads if load.quiet is not None]
    if not found:
        return "not waited for"
    busy, unknown = sum(each.quiet is False for each in found), sum(each.quiet is None for each in found)
    parts = [f"waited {_span([each.waited_s for each in found])} s"]
    parts += [f"still busy before {busy} of {count(len(found), 'load')}"] if busy else []
    parts += [f"not known before {unknown} of {count(len(found), 'load')}"] if unknown else []
    return ", ".join(parts)


def _memory_after(loads: Sequence[LoadRecord]) -> str:
    """Of all loads, probes too: the one after them began with what they left."""
    known = [load.settled for load in loads if load.settled is not None]
    if not known:
        return NONE
    bad = [each for each in known if not each.settled]
    if not bad:
        gpu = any(each.over_bytes is not None for each in known)
        return "every engine that was started is gone" + (", GPU memory back at its baseline" if gpu else "")
    left = max((each.over_bytes for each in bad if each.over_bytes is not None), default=None)
    held = max((each.rss_bytes for each in bad if each.rss_bytes is not None), default=None)
    most = [f"{memory(size)} of the {where}" for size, where in ((left, "GPU"), (held, "host")) if size is not None]
    after = [
        f"block {load.block} {load.arm}"
        for earlier, load in pairwise(loads)
        if load.stage == "block" and earlier.settled is not None and not earlier.settled.settled
    ]
    return (
        f"memory did not come back after {len(bad)} of {count(len(known), 'load')}"
        + (f" (at most {', '.join(most)})" if most else "")
        + (f"; what began so: {', '.join(after)}" if after else "")
    )


def _page_cache(loads: Sequence[LoadRecord]) -> str:
    found = [load.cache for load in loads if load.cache is not None]
    read, skipped = [each for each in found if each.skipped is None], [each for each in found if each.skipped]
    shares = [each.resident for each in read if each.resident is not None]
    parts = []
    if read:
        whole = f", {_span([int(100 * share) for share in shares])} % of it in memory" if shares else ""
        parts.append(f"model read before {len(read)} of {count(len(loads), 'load')}{whole}")
    if skipped:
        reasons = "; ".join(dict.fromkeys(each.skipped for each in skipped if each.skipped))
        parts.append(f"left as it was before {len(skipped)} of {count(len(loads), 'load')}: {reasons}")
    return "; ".join(parts) or NONE


def _temperature(loads: Sequence[LoadRecord]) -> str:
    found = [load.thermal for load in loads if load.thermal is not None]
    begun = _degrees([each.start for each in found])
    if not begun:
        return NONE
    waited = [each.waited_s for each in found]
    parts = [*begun, *([f"waited {_span(waited)} s to cool"] if any(waited) else [])]
    outside = sum(each.within is False for each in found)
    parts += [f"{outside} of {count(len(found), 'load')} began outside the band of ±{BAND_C:.0f} °C"] if outside else []
    return ", ".join(parts)


def _heat(loads: Sequence[LoadRecord]) -> str:
    ended = _degrees([load.thermal.end for load in loads if load.thermal is not None])
    return "".join(f", {each}" for each in ended)


def _degrees(found: Sequence[Temperatures]) -> list[str]:
    sensors = {"GPU": [each.gpu_c for each in found], "CPU": [each.cpu_c for each in found]}
    known = {name: [each for each in values if each is not None] for name, values in sensors.items()}
    return [f"{name} {_span(values)} °C" for name, values in known.items() if values]


def _span(values: Sequence[float]) -> str:
    """Whole numbers: "0–3", or "3" where all are equal."""
    least, most = f"{min(values):.0f}", f"{max(values):.0f}"
    return least if least == most else f"{least}–{most}"


def _outputs(comparison: Comparison) -> str:
    checked = [row.output_ok for row in comparison.rows if row.output_ok is not None]
    if not checked:
        return "not checked: this model has no known answer"
    wrong = [row.arm for row in _rows(comparison) if row.output_ok is False]
    return f"WRONG on {', '.join(wrong)}" if wrong else "every answer was the known one, on every arm"


def _verdicts(comparison: Comparison) -> list[str]:
    """Each declared comparison whole: what was shown, what could have been, and what hangs on one pair of blocks."""
    judgement, drawn = comparison.judgement, comparison.header.plan
    texts = {arm.label: arm.text for arm in drawn.arms}
    found = [
        (texts[a], texts[b], contrast, judgement.left_out[a, b]) for (a, b), contrast in judgement.contrasts.items()
    ]
    if judgement.twin is not None:
        found.append((f"{texts[drawn.reference]} (twin)", texts[drawn.reference], judgement.twin.contrast, None))
    if not found:
        return []
    rows = [
        (
            contrast.sentence(a, b),
            contrast.level,
            NONE if contrast.attained_margin is None else percent(contrast.attained_margin),
            NONE if contrast.detectable is None else percent(contrast.detectable),
            contrast.blocks_needed or NONE,
            NONE if out is None else f"{out.low:.3f}–{out.high:.3f}",
        )
        for a, b, contrast, out in found
    ]
    headers = (
        "verdict",
        "interval at",
        "same within",
        "found in 4 of 5 such runs",
        f"blocks that find {percent(drawn.margin)}",
        "ratio without any one pair of blocks",
    )
    return ["Each comparison that was declared before the run:", _table(headers, rows)]


def _failures(comparison: Comparison) -> list[str]:
    """Arms without numbers, and why."""
    rows = [row for row in comparison.rows if row.status.word is not Status.OK]
    if not rows:
        return []
    return [
        "Arms without numbers of their own:",
        "\n".join(f"- {code(row.arm)}: {markdown(status_of(row))}" for row in rows),
    ]


def _left_out(comparison: Comparison) -> list[str]:
    return [
        text
        for kind, reasons in _not_counted(comparison)
        for text in (f"{kind}, in the samples and in no number:", "\n".join(f"- {markdown(why)}" for why in reasons))
    ]


def _placements(comparison: Comparison) -> str:
    headers = (
        "arm",
        "device, predicted",
        "device, realised",
        "host, realised",
        "VRAM (NVML)",
        "weights digest",
        "engine",
    )
    return (
        _table(
            headers,
            [
                (
                    row.arm,
                    memory(row.predicted_device_bytes),
                    memory(row.realised_device_bytes),
                    memory(row.realised_host_bytes),
                    memory(row.vram_bytes),
                    (row.weights_digest or NONE)[:16],
                    row.engine or NONE,
                )
                for row in comparison.rows
            ],
        )
        + "\n\n"
        + "\n".join(_argv_lines(comparison))
    )


def _parity(comparison: Comparison) -> str:
    found = parity(comparison.run)
    if not found:
        return "No engine told its settings."
    arms = list(found[0].values)
    cells = [
        (f"{each.setting} ≠" if each.differs else each.setting, *(each.values[arm] or NONE for arm in arms))
        for each in found
    ]
    return _table(("setting", *arms), cells)


def _argv_lines(comparison: Comparison) -> list[str]:
    """What the process that computes was started with."""
    return [
        f"- {code(each.arm)}: {code(' '.join(each.realised.argv))}"
        for each in comparison.header.contenders
        if each.realised is not None
    ]


def _loads(comparison: Comparison) -> str:
    rows = _rows(comparison)
    loads = sorted(((load.minutes, row.arm, load) for row in rows for load in row.loads), key=lambda each: each[0])
    usual = {row.arm: statistics.median(load.decode_tps for load in row.loads) for row in rows if len(row.loads) > 1}
    cells = [
        (
            f"{minutes:.1f}",
            load.block,
            arm,
            number(load.decode_tps),
            f"{100 * (load.decode_tps / usual[arm] - 1):+.1f} %".replace("-", "−") if arm in usual else NONE,
            number(load.prefill_tps),
            number(load.load_s, " s"),
        )
        for minutes, arm, load in loads
    ]
    headers = ("minute", "block", "arm", "decode tok/s", "off its arm's median", "prefill tok/s", "load")
    return _table(headers, cells)


def _parameters(comparison: Comparison) -> str:
    header, drawn = comparison.header, comparison.header.plan
    rows: list[tuple[str, object]] = [
        ("model", f"{header.model.file}, {memory(header.model.size_bytes)}, {header.model.architecture}"),
        ("requests a load", f"{drawn.requests} after {drawn.warmups} warm-up, {drawn.out_tokens} tokens each"),
        ("order", f"mirrored random blocks, seed {drawn.seed}"),
        ("prompts", drawn.prompts_digest),
        *((f"setting {name}", NONE if value is None else value) for name, value in drawn.settings),
        *((f"version of {name}", found) for name, found in header.versions.items()),
        ("started", header.started),
    ]
    return _table(("parameter", "value"), rows)


def _machine(comparison: Comparison) -> str:
    machine = comparison.header.machine
    gpus = ", ".join(f"{gpu.name}, driver {gpu.driver or NONE}" for gpu in machine.gpus)
    rows: list[tuple[str, object]] = [
        ("CPU", f"{machine.cpu or NONE}, {machine.physical_cores or NONE} cores"),
        ("memory", memory(machine.memory_bytes)),
        ("GPU", gpus or "none that NVML answers for"),
        ("system", f"{machine.system or NONE}, kernel {machine.kernel or NONE}, {machine.libc or NONE}"),
        ("Python", machine.python or NONE),
    ]
    notes = "\n".join(f"- {markdown(note)}" for note in comparison.header.notes)
    return _table(("part", "fact"), rows) + (f"\n\n{notes}" if notes else "")


# ── JSON, and two runs ──────────────────────────────────────────────────────────────────────


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The fields that scripts may rely on."""
    return {
        "run_dir": str(comparison.run.folder),
        "state": comparison.state.word,
        "reasons": list(comparison.state.reasons),
        "answer": plain(answer(comparison)),
        "plan_digest": comparison.header.plan_digest,
        "best": [row.arm for row in comparison.best],
        "commands": dict(best_commands(comparison)),
        "arms": [row_json(row) for row in comparison.rows],
    }


def row_json(row: Row) -> dict[str, Any]:
    contrast = row.contrast
    comparable = contrast is not None and contrast.word != "NOT_COMPARABLE"
    return {
        "arm": row.arm,
        "status": row.status.word.value,
        "alias_of": row.status.alias_of,
        "reason": row.why_not,
        "placement": row.placement,
        "engine": row.engine,
        "weights_digest": row.weights_digest,
        "output_ok": row.output_ok,
        "decode_tps": _interval_json(row.decode_tps),
        "prefill_tps": _interval_json(row.prefill_tps),
        "ttft_s": _interval_json(row.ttft_s),
        "load_s": row.load_s,
        "vram_bytes": row.vram_bytes,
        "rss_bytes": row.rss_bytes,
        "predicted_device_bytes": row.predicted_device_bytes,
        "realised_device_bytes": row.realised_device_bytes,
        "ratio": {"value": contrast.ratio, "low": contrast.low, "high": contrast.high}
        if comparable and contrast
        else None,
        "verdict": None if contrast is None else contrast.word,
        "is_reference": row.is_reference,
        "samples": row.samples,
        "invalid_samples": row.invalid_samples,
        "invalid_reasons": dict(row.invalid_reasons),
    }


def _interval_json(interval: Interval | None) -> dict[str, float | None] | None:
    return None if interval is None else {"value": interval.value, "low": interval.low, "high": interval.high}


def change_sentence(change: Change) -> str:
    """What may be said about one arm in two runs."""
    arm, ratio_ = change.arm, ""
    if change.ratio is not None:
        ratio_ = f" ({change.ratio:.3f}×, {change.low:.3f}–{change.high:.3f})"
    within = percent(change.attained_margin) if change.attained_margin is not None else NONE
    match change.word:
        case "SAME":
            said = f"{arm} decodes as before within {percent(change.margin)}{ratio_}."
        case "SLOWER" if change.regression:
            said = f"{arm} is slower than before{ratio_}, by more than {percent(change.margin)}: a regression."
        case "SLOWER":
            said = f"{arm} is slower than before{ratio_}, not shown to be by more than {percent(change.margin)}."
        case "FASTER":
            said = f"{arm} is faster than before{ratio_}."
        case "INCONCLUSIVE" if change.reason:
            said = f"{arm} is not told apart from before{ratio_}: {change.reason}."
        case "INCONCLUSIVE":
            said = f"{arm} is not told apart from before: within {within}{ratio_}."
        case "LOST":
            said = f"{arm} is lost, a regression: {change.reason}."
        case _:
            said = f"{arm} has no verdict: {change.reason}."
    return plain(said)


def undecided(changes: Changes) -> str:
    """Why no regression could be found, for one that has to be excluded."""
    reasons = "; ".join(dict.fromkeys(change.reason for change in changes.changes)) or "no arm is in both runs"
    return plain(f"not one arm could be judged, so no regression is excluded: {reasons}")


def changes_table(changes: Changes) -> str:
    """For a terminal: what may be said, two runs side by side, and all that differs between them."""
    import textwrap

    from tabulate import tabulate

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE

    def bounds(change: Change) -> str:
        return NONE if change.ratio is None else f"{change.ratio:.3f}× ({change.low:.3f}–{change.high:.3f})"

    before, after = changes.before, changes.after
    cells = [
        (change.arm, spread(change.before_tps), spread(change.after_tps), bounds(change), _change_word(change))
        for change in changes.changes
    ]
    if changes.reference is not None and changes.reference not in {change.arm for change in changes.changes}:
        speeds = (spread(before.reference_tps), spread(after.reference_tps))
        cells.insert(0, (changes.reference, *speeds, NONE, "reference (confounded)"))
    headers = ("arm", "before, tok/s", "after, tok/s", "after / before", "verdict")
    drawn = str(tabulate([list(map(plain, row)) for row in cells], headers, disable_numparse=True))
    margin = f"margin {percent(changes.margin)}"
    lines = [
        *changes.notes,
        f"after / before is of ratios to {changes.reference}, {changes.level}, {margin}." if changes.level else "",
        "tok/s have their day in them and are not for comparing.",
        *(
            f"{name}: {side.run_dir} of {side.started[:10]}, {side.state}, {count(side.blocks, 'block')} judged"
            for name, side in (("Before", before), ("After", after))
        ),
        *_differing(changes),
    ]
    if not changes.differences:
        lines.append("Nothing that was recorded differs beside the speeds.")
    said = " ".join(map(change_sentence, changes.changes)) or "The two runs have no arm in common to compare."
    filled = [textwrap.fill(plain(line), width, subsequent_indent="  ") for line in lines if line]
    return "\n\n".join([textwrap.fill(said, width), drawn, "\n".join(filled)])


def _differing(changes: Changes) -> list[str]:
    """A line for each difference; one that several arms share names them all."""
    arms: dict[Difference, list[str]] = {}
    for each in changes.differences:
        arms.setdefault(dataclasses.replace(each, arm=None), []).extend([each.arm] if each.arm else [])
    return [
        f"Differs{', and forbids a verdict' if each.forbids else ''}: "
        f"{dataclasses.replace(each, arm=', '.join(named) or None)}"
        for each, named in arms.items()
    ]


def _change_word(change: Change) -> str:
    if change.word == "INCONCLUSIVE" and change.attained_margin is not None:
        return f"INCONCLUSIVE (within {percent(change.attained_margin)})"
    return f"{change.word}, a regression" if change.regression else change.word


# ── models, plans, engines ──────────────────────────────────────────────────────────────────


def inspect_table(found: Mapping[str, Any]) -> str:
    """What `inspect` knows, for a terminal."""
    experts = NONE
    if found["experts"]:
        experts = f"{found['experts_used']} of {found['experts']} a token, in {found['expert_layers']} layers"
    facts = [
        ("model", found["name"]),
        ("architecture", f"{found['arch']}, {found['type'] or NONE}"),
        ("layers", found["layers"]),
        ("experts", experts),
        ("weights", memory(found["weights_bytes"])),
        ("read per decoded token", memory(found["bytes_per_token"])),
        ("trained context", found["context_train"] or NONE),
    ]
    first: dict[str, str] = {}
    rows = []
    for each in found["placements"]:
        same = first.setdefault(each["class"], each["placement"])
        words = each["words"] if same == each["placement"] else f"= {same}"
        rows.append((each["placement"], words, memory(each["device_bytes"]), memory(each["host_bytes"])))
    headers = ("placement", "where", f"device at {found['context']} tokens", "host")
    return f"{_lined((), facts)}\n\n{_lined(headers, rows)}"


def preview_table(found: Mapping[str, Any]) -> str:
    """What `plan` knows, for a terminal."""
    rows = [
        (
            each["arm"],
            each["placement"],
            memory(each["predicted_device_bytes"]),
            memory(each["predicted_host_bytes"]),
            f"= {each['alias_of']}" if each["alias_of"] else each["status"],
            each["engine"] or NONE,
        )
        for each in found["arms"]
    ]
    headers = ("arm", "placement", "device", "host", "status", "engine")
    reasons = dict.fromkeys(each["reason"] for each in found["arms"] if each["reason"] and not each["alias_of"])
    fewest, most = found["loads"]["fewest"], found["loads"]["most"]
    many = f"{most} loads" if fewest == most else f"{fewest} to {most} loads"
    told = f"{many} after one of each arm as a probe, which says how many minutes." if most else "Nothing can run."
    return "\n\n".join([_lined(headers, rows), *map(plain, reasons), told])


def engines_table(found: Mapping[str, Any]) -> str:
    """What `engines list` knows, for a terminal."""
    engines = [
        (each["backend"], each["engine"], each["from"], each["path"])
        if each["found"]
        else (each["backend"], NONE, NONE, NONE)
        for each in found["engines"]
    ]
    recipes = [(each["name"], each["installed"] or "not installed", each["summary"]) for each in found["recipes"]]
    missing = [f"{each['backend']}: {plain(each['next'])}" for each in found["engines"] if not each["found"]]
    return "\n\n".join(
        [
            _lined(("backend", "engine", "from", "path"), engines),
            *missing,
            _lined(("llamaduel engines install", "in the cache", "what"), recipes),
        ]
    )


def _lined(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    from tabulate import tabulate

    shown = [[plain(cell) for cell in row] for row in rows]
    return str(tabulate(shown, headers, tablefmt="simple" if headers else "plain", disable_numparse=True))
