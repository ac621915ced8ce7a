"""`report.md` in GitHub-flavoured Markdown: a function of the run folder alone. Computes nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from harness import hardware, physics
from harness.answer import (
    answer,
    best_commands,
    candidates,
    ceiling_share_of,
    memory_of,
    not_counted,
    status_of,
)
from harness.charts import Picture, pictures
from harness.compare import Comparison, Row, all_rows
from harness.curve import curves, draw
from harness.gates import BAND_C, Temperatures
from harness.gpu import Gpu
from harness.machine import Machine
from harness.parity import OVERCLAIM, Parity, claims, parity, spoken
from harness.placement import Cell, held_bytes
from harness.plan import Status
from harness.record import LoadRecord
from harness.sizes import format_bytes
from harness.terminal import outcome_grid
from harness.words import (
    NONE,
    attribute,
    code,
    count,
    fenced,
    markdown,
    markdown_table,
    memory,
    number,
    percent,
    ratio,
    span,
    spread,
)

STOPPED = "It was stopped; `llamaduel run --resume` with this folder goes on with it."
KINDS = ("ratios", "speeds", "curve", "memory", "loads")  # of pictures
TITLE_ARMS = 4  # more are in the tables
LIMITS = (
    "It is about this machine, these builds, this model, these prompts and this context. "
    "Speed says nothing about the quality of answers.",
)
ELSEWHERE = frozenset({"placement", "VRAM", "on device", "on host", "RSS", "memory"})  # sections of their own


def report(comparison: Comparison) -> str:
    """The report in GitHub-flavoured Markdown; a function of the run folder alone."""
    header = comparison.header
    drawn: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for each in pictures(comparison):
        drawn[each.kind].append(_picture(each))
    blocks = (
        f"# {markdown(_arms(comparison))} on {markdown(header.model.name)}",
        _watermark(comparison),
        markdown(answer(comparison)),
        *_paste(comparison),
        "## Can it be trusted",
        *_state(comparison),
        _integrity(comparison),
        *_notes(comparison),
        "## Comparison",
        markdown_table(*_grid(comparison)),
        "Ratios are decode speeds against the reference. Intervals of tok/s and of a ratio answer different questions: "
        "compare arms by their ratio only.",
        *drawn["ratios"],
        *_verdicts(comparison),
        *_failures(comparison),
        *_left_out(comparison),
        *_as_llama_bench(comparison),
        *drawn["speeds"],
        *_search(comparison),
        *_curves(comparison, drawn["curve"]),
        "## Settings, asked for and read back",
        _parity(comparison),
        "## Where the weights were",
        *drawn["memory"],
        _placements(comparison),
        *hardware.witnesses(comparison),
        "## What memory allows",
        _physics(comparison),
        *hardware.joules(comparison),
        "## Machine",
        _machine(comparison),
        "## Every load in time order",
        *drawn["loads"],
        _loads(comparison),
        "## How it was measured",
        _parameters(comparison),
        "## Again",
        "" if comparison.finished else STOPPED,
        "The same run:",
        fenced(header.command),
        *_by_hand(comparison),
        "## What this does not say",
        *LIMITS,
    )
    return "\n\n".join(filter(None, blocks)) + "\n"


def _arms(comparison: Comparison) -> str:
    """For a title."""
    arms = [row.arm for row in comparison.rows if row.loads] or [row.arm for row in comparison.rows]
    return ", ".join(arms[:TITLE_ARMS]) + (
        f" and {count(len(arms) - TITLE_ARMS, 'more arm')}" if arms[TITLE_ARMS:] else ""
    )


def _watermark(comparison: Comparison) -> str:
    """What nobody who quotes this report may miss."""
    state = comparison.state
    said = {
        "RED": "RED: this run ranks nothing. Do not quote its speeds.",
        "SCREENING": "SCREENING: numbers of too few blocks, and no claim.",
    }.get(state.word)
    return f"> **{said}**" if said else ""


def _paste(comparison: Comparison) -> list[str]:
    """The command of the arm to take; several where none is shown to be faster."""
    return [text for arm, command in best_commands(comparison) for text in (f"{code(arm)} by hand:", fenced(command))]


def _state(comparison: Comparison) -> list[str]:
    """The state, with a line for each reason."""
    state = comparison.state
    reasons = "\n".join(f"- {markdown(reason)}" for reason in state.reasons)
    return [f"**{state.word}**" + (":" if reasons else "."), *([reasons] if reasons else [])]


def _grid(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The table in llama-bench's words; memory and reasons have sections of their own."""
    headers, cells = outcome_grid(comparison, tuple(ELSEWHERE))
    words = {"decode tok/s": f"{_tg(comparison)} tok/s", "prefill tok/s": f"{_pp(comparison)} tok/s"}
    return [words.get(name, name) for name in headers], cells


def _pp(comparison: Comparison) -> str:
    """ "pp512", by the prompt tokens that the engines counted."""
    counts = [count for row in comparison.rows if row.prompt_tokens for count in row.prompt_tokens]
    return f"pp{span(counts)}" if counts else "pp"


def _tg(comparison: Comparison) -> str:
    """ "tg128". llama-bench decodes in an empty context and we behind the prompt, which it would call "@ d512"."""
    return f"tg{comparison.header.plan.out_tokens}"


def _as_llama_bench(comparison: Comparison) -> list[str]:
    """Mean and standard deviation over loads, as llama-bench prints them over repetitions."""
    behind = _pp(comparison).replace("pp", " @ d", 1) if _pp(comparison) != "pp" else ""
    cells = [
        (row.arm, test, f"{statistics.mean(speeds):.2f} ± {statistics.stdev(speeds):.2f}", len(speeds))
        for row in comparison.rows
        for test, speeds in (
            (_pp(comparison), [load.prefill_tps for load in row.loads if load.prefill_tps]),
            (f"{_tg(comparison)}{behind}", [load.decode_tps for load in row.loads]),
        )
        if len(speeds) > 1
    ]
    if not cells:
        return []
    return [
        "In the form of llama-bench: mean and standard deviation, here over loads. The answers follow the prompt, "
        "which it calls depth.",
        markdown_table(("arm", "test", "t/s", "loads"), cells),
    ]


def _search(comparison: Comparison) -> list[str]:
    """How the arms were picked. Speeds of a search are picked for being high, so none is shown."""
    search = comparison.header.search
    if search is None:
        return []
    rows = [(number, each.arm, each.status.word, each.cell, each.loads) for number, each in enumerate(search.tried, 1)]
    told = [
        f"{candidates(search)} by {code(search.over)}, one candidate each, searched in "
        f"{count(sum(each.loads for each in search.tried), 'load')}. The search only picks: its speeds are in the "
        "samples and are no result.",
        markdown_table(("try", "arm", "outcome", "device memory", "loads"), rows),
        f"Confirmed with fresh loads: {' and '.join(map(code, search.chosen))}.",
    ]
    reasons = {each.arm: each.status.reason for each in search.tried if each.status.reason}
    told += ["\n".join(f"- {code(arm)}: {markdown(reason)}" for arm, reason in reasons.items())] if reasons else []
    if search.refused:
        told.append(f"Not tried, for they cannot fit: {', '.join(map(code, search.refused))}.")
    return ["## How the placement was found", *told, *map(markdown, search.notes), fenced(search.command)]


def _by_hand(comparison: Comparison) -> list[str]:
    """Each arm without the harness; arms that differ in their prompts alone share a command."""
    arms: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.command is not None and row.status.word is not Status.ALIAS:
            arms.setdefault(row.command, []).append(row.arm)
    return [
        text for command, named in arms.items() for text in (f"{', '.join(map(code, named))} by hand:", fenced(command))
    ]


def _integrity(comparison: Comparison) -> str:
    judgement, header = comparison.judgement, comparison.header
    twin, drift, variance, warm = judgement.twin, judgement.drift, comparison.variance, comparison.warm_up
    rows = [
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
        ("invalid samples", str(sum(row.invalid_samples for row in all_rows(comparison)))),
        *_between_loads(comparison),
        *hardware.watched(comparison),
        ("finished", "yes" if comparison.finished else f"no: stopped after {count(comparison.blocks_run, 'block')}"),
        ("output", _outputs(comparison)),
        ("plan, hashed before block 1", header.plan_digest),
        ("weights digest", header.model.digest),
    ]
    return markdown_table(("check", "result"), rows)


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
    parts = [f"waited {span([each.waited_s for each in found])} s"]
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
        whole = f", {span([int(100 * share) for share in shares])} % of it in memory" if shares else ""
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
    parts = [*begun, *([f"waited {span(waited)} s to cool"] if any(waited) else [])]
    outside = sum(each.within is False for each in found)
    parts += [f"{outside} of {count(len(found), 'load')} began outside the band of ±{BAND_C:.0f} °C"] if outside else []
    return ", ".join(parts)


def _heat(loads: Sequence[LoadRecord]) -> str:
    ended = _degrees([load.thermal.end for load in loads if load.thermal is not None])
    return "".join(f", {each}" for each in ended)


def _degrees(found: Sequence[Temperatures]) -> list[str]:
    sensors = {"GPU": [each.gpu_c for each in found], "CPU": [each.cpu_c for each in found]}
    known = {name: [each for each in values if each is not None] for name, values in sensors.items()}
    return [f"{name} {span(values)} °C" for name, values in known.items() if values]


def _outputs(comparison: Comparison) -> str:
    checked = [row.output_ok for row in comparison.rows if row.output_ok is not None]
    if not checked:
        return "not checked: this model has no known answer"
    wrong = [row.arm for row in all_rows(comparison) if row.output_ok is False]
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
    return ["Each comparison that was declared before the run:", markdown_table(headers, rows)]


def _failures(comparison: Comparison) -> list[str]:
    """Arms without numbers, and why; those of one reason share a line."""
    reasons: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.status.word is not Status.OK:
            reasons.setdefault(status_of(row), []).append(row.arm)
    if not reasons:
        return []
    lines = [f"- {', '.join(map(code, arms))}: {markdown(reason)}" for reason, arms in reasons.items()]
    return ["Arms without numbers of their own:", "\n".join(lines)]


def _left_out(comparison: Comparison) -> list[str]:
    return [
        text
        for kind, reasons in not_counted(comparison)
        for text in (f"{kind}, in the samples and in no number:", "\n".join(f"- {markdown(why)}" for why in reasons))
    ]


def _placements(comparison: Comparison) -> str:
    headers = (
        "arm",
        "placement",
        "device weights",
        "device KV",
        "device compute",
        "host",
        "VRAM (NVML)",
        "RSS",
        "memory",
        "weights digest",
        "engine",
    )
    return markdown_table(
        headers,
        [
            (
                row.arm,
                row.placement,
                *_where(row),
                memory(row.vram_bytes),
                memory(row.rss_bytes),
                memory_of(row),
                (row.weights_digest or NONE)[:16],
                row.engine or NONE,
            )
            for row in comparison.rows
            if row.status.alias_of is None
        ],
    ) + "".join(f"\n\n{text}" for text in (PLACED, *_cells(comparison), *_claims(comparison)))


PLACED = (
    "Predicted from the file before anything was loaded / realised by what the engine reported; compute buffers are "
    "predicted roughly. Where the engine chose, nothing was predicted. VRAM is what the driver saw, with its own share."
)


def _where(row: Row) -> tuple[str, str, str, str]:
    """Weights, context memory and compute buffers of the device, and all of the host: predicted / realised."""
    said = row.predicted
    return (
        _both(said.device_weights_bytes if said else None, _held(row, ("weights",), on_host=False)),
        _both(said.device_memory_bytes if said else None, _held(row, ("kv", "rs"), on_host=False)),
        _both(said.compute_bytes if said else None, _held(row, ("compute",), on_host=False), "≈ "),
        _both(said.host_bytes if said else None, _held(row, ("weights", "kv", "rs"), on_host=True)),
    )


def _both(predicted: int | None, realised: int | None, about: str = "") -> str:
    if predicted is None and realised is None:
        return NONE
    return f"{NONE if predicted is None else about + memory(predicted)} / {memory(realised)}"


def _held(row: Row, kinds: Sequence[str], *, on_host: bool) -> int | None:
    return None if row.buffers is None else held_bytes(row.buffers, kinds, on_host=on_host)


def _cells(comparison: Comparison) -> list[str]:
    """Why a placement does not simply fit, and what other witnesses saw."""
    told = [
        f"- {code(row.arm)}: {row.cell}, {markdown(row.cell_reason)}"
        for row in comparison.rows
        if row.cell_reason and row.cell is not Cell.UNKNOWN and row.status.alias_of is None
    ]
    told += [f"- {code(row.arm)}: {markdown(each)}" for row in comparison.rows for each in row.contradictions]
    return ["\n".join(told)] if told else []


def _claims(comparison: Comparison) -> list[str]:
    """What the engines say of their own placement, and what is wrong with it."""
    found = claims(comparison.run)
    if not found:
        return []
    lines = []
    for each in found:
        seen = "its buffers are not known"
        if each.weights_share is not None and each.bytes_share is not None:
            weights, whole = (percent(round(share, 2)) for share in (each.weights_share, each.bytes_share))
            seen = f"by its buffers {weights} of the weights and {whole} of all bytes are there"
        lines.append(f"- {code(each.arm)}: {markdown(each.text)}{' — **wrong**' * each.wrong}: {seen}")
    limit = f"wrong is a claim of all where more could be there, or of {100 * OVERCLAIM:.0f} points too much"
    return [f"What the engines claim is kept and not believed; {limit}:", "\n".join(lines)]


def _notes(comparison: Comparison) -> list[str]:
    notes = comparison.header.notes
    return ["What to know of this run:", "\n".join(f"- {markdown(note)}" for note in notes)] if notes else []


def _curves(comparison: Comparison, drawn: Sequence[str]) -> list[str]:
    """Each sweep: the chart, the same in plain text, and what it says."""
    found, charts = curves(comparison), iter(drawn)
    parts = ["## The curve" if len(found) == 1 else "## The curves"] if found else []
    for curve in found:
        parts += [f"### {code(curve.arms)}"] if found[1:] else []
        parts += [next(charts)] if curve.has_speeds else []
        parts += [fenced(draw(curve), "text")]
        parts += ["\n".join(f"- {markdown(note)}" for note in curve.notes)] if curve.notes else []
    return parts


def _picture(picture: Picture) -> str:
    """A chart for a light and for a dark page."""
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{picture.name}-dark.svg">'
        f'<img src="{picture.name}-light.svg" width="600" alt="{attribute(picture.alt)}"></picture>'
    )


def _physics(comparison: Comparison) -> str:
    """Ceiling and floor of each arm by what a token reads, and the share of it that was reached."""
    bandwidth = physics.bandwidth(comparison.header.machine, comparison.header.host_probe)
    rows = [row for row in comparison.rows if row.status.alias_of is None]
    bounded = [row for row in rows if row.ceiling_tps is not None]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.unbounded:
            reasons.setdefault(row.unbounded, []).append(row.arm)
    cells = []
    for row in bounded:
        traffic = row.predicted or row.like
        cells.append(
            (
                row.arm,
                memory(traffic.bytes_per_token_host if traffic else None),
                memory(traffic.bytes_per_token_device if traffic else None),
                number(row.floor_tps),
                spread(row.decode_tps),
                number(row.ceiling_tps),
                ceiling_share_of(row),
                ", ".join(row.flags) or NONE,
            )
        )
    headers = ("arm", "host, a token", "device, a token", "floor", "decode tok/s", "ceiling", "of ceiling", "flag")
    speeds = [
        f"{where}: {_gigabytes(least)} typical, {_gigabytes(most)} at most"
        for where, least, most in (
            ("Host memory", bandwidth.host_typical, bandwidth.host_peak),
            ("GPU memory", bandwidth.device_least, bandwidth.device_peak),
        )
        if most is not None
    ]
    parts = [
        "A token reads its weights once; the ceiling is the time that takes at the highest bandwidth, the floor that "
        "at the lowest which is still honest. Below it memory spilled or something held the arm up, above it a count "
        "is wrong."
        if bounded
        else "",
        markdown_table(headers, cells) if bounded else "",
        ". ".join(speeds) + "." if speeds and bounded else "",
        "\n".join(f"- No share for {', '.join(map(code, arms))}: {markdown(why)}." for why, arms in reasons.items()),
    ]
    return "\n\n".join(part for part in parts if part)


def _gigabytes(bytes_s: float | None) -> str:
    return NONE if bytes_s is None else f"{bytes_s / 1e9:.1f} GB/s"


def _parity(comparison: Comparison) -> str:
    """What differs as a table with its reasons, what does not in a line."""
    found = sorted(parity(comparison.run), key=lambda each: not each.unexplained)
    if not found:
        return "No engine told its settings."
    arms = list(found[0].values)
    loud = [f"- **{spoken(each.setting)}**: {markdown(text)}" for each in found for text in each.unexplained]
    apart = [each for each in found if each.differs or each.unexplained]
    cells = [(f"{spoken(each.setting)}{' ≠' * each.differs}", *(_cell(each, arm) for arm in arms)) for each in apart]
    reasons = [f"- {spoken(each.setting)}: {markdown('; '.join(each.why))}" for each in apart if each.why]
    alike = [each for each in found if not each.differs and not each.unexplained]
    settings = [each for each in alike if not each.is_placement]
    asked, left = ([each for each in settings if any(each.asked.values()) is wanted] for wanted in (True, False))
    placed = [each for each in alike if each.is_placement]
    gaps: dict[str, list[str]] = {}
    for each in found:
        gaps.setdefault(", ".join(arm for arm in arms if each.values[arm] is None), []).append(spoken(each.setting))
    parts = [
        "**Unexplained:**\n\n" + "\n".join(loud) if loud else "",
        markdown_table(("setting", *arms), cells) if cells else "",
        "Why:\n\n" + "\n".join(reasons) if reasons else "",
        *(
            f"Equal on all arms, {how}: {markdown('; '.join(map(_value, rows)))}."
            for how, rows in (("as asked for", asked), ("left to the engines", left), ("in placement", placed))
            if rows
        ),
        *(f"Not told by {markdown(arm)}: {', '.join(names)}." for arm, names in gaps.items() if arm),
        "The processes that computed:\n\n" + "\n".join(_argv_lines(comparison)),
    ]
    return "\n\n".join(part for part in parts if part)


def _cell(row: Parity, arm: str) -> str:
    """The value, and what was asked for instead where that is unexplained."""
    value, asked = row.values[arm] or NONE, row.asked[arm]
    strays = row.unexplained and not row.is_placement and asked not in (None, "auto", value)
    return f"{value} (asked {asked})" if strays else value


def _value(row: Parity) -> str:
    value = next(value for value in row.values.values() if value is not None)
    asked = [each for each in row.asked.values() if each not in (None, value)]
    note = f" (for {asked[0]}: {'; '.join(row.why)})" if asked and row.why else ""
    return f"{spoken(row.setting)} {value}{note}"


def _argv_lines(comparison: Comparison) -> list[str]:
    """What the process that computes was started with."""
    return [
        f"- {code(each.arm)}: {code(' '.join(each.realised.argv))}"
        for each in comparison.header.contenders
        if each.realised is not None
    ]


def _loads(comparison: Comparison) -> str:
    rows = all_rows(comparison)
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
    return markdown_table(headers, cells)


def _parameters(comparison: Comparison) -> str:
    header, drawn = comparison.header, comparison.header.plan
    rows: list[tuple[str, object]] = [
        ("model", f"{header.model.file}, {memory(header.model.size_bytes)}, {header.model.architecture}"),
        ("requests a load", f"{drawn.requests} after {drawn.warmups} warm-up, {drawn.out_tokens} tokens each"),
        *_prompt_lengths(comparison),
        ("order", f"mirrored random blocks, seed {drawn.seed}"),
        ("prompts", drawn.prompts_digest),
        *((f"setting {name}", value) for name, value in drawn.settings if value not in (None, "")),
        *((f"Python package {name}", found) for name, found in header.versions.items()),
        ("started", header.started),
    ]
    return markdown_table(("parameter", "value"), rows)


def _prompt_lengths(comparison: Comparison) -> list[tuple[str, object]]:
    """As the engines counted them; one line where all arms had the same."""
    found: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.prompt_tokens is not None:
            found.setdefault(f"{span(row.prompt_tokens)} tokens, as counted", []).append(row.arm)
    return [("a prompt" + ("" if len(found) == 1 else f" of {', '.join(arms)}"), text) for text, arms in found.items()]


def _machine(comparison: Comparison) -> str:
    """Where it ran. What this machine does not tell has no line, but for what everyone asks for."""
    machine = comparison.header.machine
    engines = dict.fromkeys(str(each.engine) for each in comparison.header.contenders if each.engine)
    rows: list[tuple[str, object]] = [
        ("CPU", _joined(machine.cpu or NONE, *_cores(machine))),
        ("memory", _joined(memory(machine.memory_bytes), *_modules(machine))),
        *_measured(comparison),
        *(("GPU", _joined(gpu.name, *_card(gpu))) for gpu in machine.gpus),
        *([] if machine.gpus else [("GPU", "none that NVML answers for")]),
        (
            "system",
            _joined(machine.system, _told(machine.kernel, "kernel {}"), machine.libc, *_around(machine)) or NONE,
        ),
        *_power(machine),
        *(("engine", each) for each in engines),
        ("Python", machine.python or NONE),
    ]
    return markdown_table(("part", "fact"), rows)


def _joined(*parts: str | None) -> str:
    return ", ".join(filter(None, parts))


def _told(value: object, text: str) -> str | None:
    """The text with the value in it; nothing where the value is not known."""
    return None if value is None else text.format(value)


def _cores(machine: Machine) -> tuple[str | None, ...]:
    return (
        f"{machine.physical_cores or NONE} cores",
        _told(machine.cpu_max_mhz, "{} MHz at most"),
        _told(machine.cpu_quota_cores, "{:g} cores of time granted"),
        None if (machine.numa_nodes or 1) == 1 else f"{machine.numa_nodes} NUMA nodes",
    )


def _modules(machine: Machine) -> tuple[str | None, ...]:
    return (
        _told(machine.memory_modules, "{} modules"),
        _told(machine.memory_channels, "{} channels"),
        _told(machine.memory_speed_mts, "{} MT/s"),
    )


def _measured(comparison: Comparison) -> list[tuple[str, object]]:
    probe = comparison.header.host_probe
    if probe is None or probe.typical <= 0:
        return []
    best = f"{_gigabytes(max(probe.kernels.values()))}, the best of {', '.join(probe.kernels)}"
    return [("memory bandwidth, measured", f"{best}; {count(probe.threads, 'thread')}")]


def _card(gpu: Gpu) -> tuple[str | None, ...]:
    return (
        _told(gpu.memory_bytes and format_bytes(gpu.memory_bytes), "{}"),
        "unified memory" if gpu.unified else None,
        "MIG" if gpu.mig else None,
        _told(gpu.driver, "driver {}"),
        _told(gpu.compute, "compute capability {}"),
        _told(gpu.power_limit_w, "power limit {:.0f} W"),
    )


def _around(machine: Machine) -> tuple[str | None, ...]:
    return (
        f"WSL{machine.wsl_version or ''}" if machine.wsl else None,
        "in a container" if machine.container else None,
        _told(machine.hypervisor, "virtual machine ({})"),
    )


def _power(machine: Machine) -> list[tuple[str, object]]:
    source = {True: "on mains", False: "on battery", None: None}[machine.on_ac_power]
    told = _joined(
        _told(machine.governor, "governor {}"),
        _told(machine.energy_preference, "preference {}"),
        _told(machine.platform_profile, "profile {}"),
        source,
    )
    return [("power", told)] if told else []
