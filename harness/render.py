"""`report.md` in GitHub-flavoured Markdown: a function of the run folder alone. Computes nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from harness.answer import all_rows, answer, best_commands, candidates, not_counted, status_of, unfinished
from harness.compare import Comparison, parity
from harness.gates import BAND_C, Temperatures
from harness.plan import Status
from harness.record import LoadRecord
from harness.terminal import grid
from harness.words import NONE, code, count, fenced, markdown, memory, number, percent, ratio, span


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
                _table(*grid(comparison)),
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
        ("invalid samples", str(sum(row.invalid_samples for row in all_rows(comparison)))),
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
        for kind, reasons in not_counted(comparison)
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
