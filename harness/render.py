"""A comparison as text: the answer, the terminal table, `report.md`, and JSON. Computes nothing.

All text from engines, models and files is made inert here, once: control characters go, and in
Markdown what could be markup is escaped.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.compare import Change, Changes, Comparison, Row, parity
from harness.plan import Status
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


def fenced(text: str) -> str:
    """A block of shell that its content cannot end."""
    inner = "\n".join(plain(line) for line in text.splitlines())
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
    else:
        said = " ".join(_claims(comparison)) or _nothing_to_compare(comparison)
    engines = dict.fromkeys(row.engine for row in comparison.rows if row.engine and row.loads)
    stand_in = any(each.settings.stand_in_bytes is not None for each in comparison.header.contenders)
    label = " Stand-in device: placement is real, speed says nothing about a GPU." if stand_in else ""
    return f"{said} Measured with {' and '.join(map(str, engines)) or 'no engine'}.{label}"


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
    if not row.loads:
        return "There is no complete block yet."
    same = [other.arm for other in comparison.rows if other.status.alias_of is not None]
    also = f" {', '.join(same)} would be the same placement." if same else ""
    return f"{row.arm} decodes at {spread(row.decode_tps)} tok/s; no other arm could be compared with it.{also}"


def unfinished(comparison: Comparison) -> str:
    """What to do about a run that was stopped."""
    done = count(comparison.blocks_run, "block")
    return f"Stopped after {done}; go on with `llamaduel run --resume {comparison.run.folder}`"


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
    return "\n\n".join(paragraphs[:2]) + "\n\n" + "\n".join(paragraphs[2:])


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
        for each in parity(comparison.header)
        if each.differs
    ]
    mute = [each.arm for each in comparison.header.contenders if each.realised and not each.realised.settings]
    if unequal:
        lines.append(f"Settings that differ as read back: {'; '.join(unequal)}")
    elif mute:
        lines.append(f"Settings cannot be read back from {', '.join(mute)}.")
    else:
        lines.append("Settings as read back from the engines are equal on all arms.")
    invalid = [(row.arm, why, times) for row in _rows(comparison) for why, times in row.invalid_reasons.items()]
    if invalid:
        told = "; ".join(f"{times} × {arm}: {why}" for arm, why, times in invalid)
        lines.append(f"{count(sum(times for _, _, times in invalid), 'invalid sample')}: {told}")
    if not comparison.finished:
        lines.append(unfinished(comparison))
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
                *_failures(comparison),
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
        ("invalid samples", str(sum(row.invalid_samples for row in _rows(comparison)))),
        ("finished", "yes" if comparison.finished else unfinished(comparison)),
        ("output", _outputs(comparison)),
        ("plan, hashed before block 1", header.plan_digest),
        ("weights digest", header.model.digest),
    ]
    return _table(("check", "result"), rows)


def _outputs(comparison: Comparison) -> str:
    checked = [row.output_ok for row in comparison.rows if row.output_ok is not None]
    if not checked:
        return "not checked: this model has no known answer"
    wrong = [row.arm for row in _rows(comparison) if row.output_ok is False]
    return f"WRONG on {', '.join(wrong)}" if wrong else "every answer was the known one, on every arm"


def _failures(comparison: Comparison) -> list[str]:
    """Arms without numbers, and why."""
    rows = [row for row in comparison.rows if row.status.word is not Status.OK]
    if not rows:
        return []
    return [
        "Arms without numbers of their own:",
        "\n".join(f"- {code(row.arm)}: {markdown(status_of(row))}" for row in rows),
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
    found = parity(comparison.header)
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
    loads = sorted(
        ((load.minutes, row.arm, load) for row in _rows(comparison) for load in row.loads), key=lambda each: each[0]
    )
    cells = [
        (
            f"{minutes:.1f}",
            load.block,
            arm,
            number(load.decode_tps),
            number(load.prefill_tps),
            number(load.load_s, " s"),
        )
        for minutes, arm, load in loads
    ]
    return _table(("minute", "block", "arm", "decode tok/s", "prefill tok/s", "load"), cells)


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
        ("CPU", f"{machine.cpu}, {machine.physical_cores} cores"),
        ("memory", memory(machine.memory_bytes)),
        ("GPU", gpus or "none that NVML answers for"),
        ("system", f"{machine.system}, kernel {machine.kernel}, {machine.libc or NONE}"),
        ("Python", machine.python),
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


def changes_table(changes: Changes) -> str:
    """Two runs side by side, and what differs between them."""
    from tabulate import tabulate

    def cell(change: Change) -> str:
        if change.ratio is None:
            return change.reason
        bounds = "" if change.low is None else f" ({change.low:.3f}–{change.high:.3f})"
        return f"{change.ratio:.3f}×{bounds}" + (f"; {change.reason}" if change.reason else "")

    cells = [
        [plain(change.arm), spread(change.before_tps), spread(change.after_tps), plain(cell(change))]
        for change in changes.changes
    ]
    through = f"through {changes.common_reference}" if changes.common_reference else "no common reference"
    headers = ["arm", "before, tok/s", "after, tok/s", f"after / before, {through}"]
    drawn = str(tabulate(cells, headers, disable_numparse=True))
    if not cells:
        drawn = "The two runs have no arm in common besides the reference."
    differing = [f"differs: {plain(line)}" for line in changes.differences]
    return "\n".join([drawn, "", *(differing or ["nothing else differs that was recorded"])])


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
