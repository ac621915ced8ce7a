"""Tables for a terminal: a run with its answer and state, and two runs side by side."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Sequence

from harness.answer import (
    all_rows,
    answer,
    best_commands,
    ceiling_share_of,
    change_sentence,
    memory_of,
    not_counted,
    status_of,
    unfinished,
    verdict_of,
)
from harness.changes import Change, Changes
from harness.compare import Comparison, Row
from harness.differences import Difference
from harness.parity import ASKED, Parity, parity, spoken
from harness.words import NONE, count, memory, milliseconds, number, percent, plain, ratio, shell, spread

Column = tuple[str, Callable[[Row], str]]

CELLS: tuple[Column, ...] = (
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
    ("memory", memory_of),
    ("of ceiling", ceiling_share_of),
    ("ratio", lambda row: "1" if row.is_reference else ratio(row.contrast)),
    ("verdict", verdict_of),
    ("status", status_of),
)


MAY_VANISH = frozenset({"memory", "of ceiling", "VRAM", "on device", "on host", "RSS", "load", "TTFT"})
NARROW_DROPS = ("RSS", "load", "TTFT", "on host", "of ceiling", "prefill tok/s", "memory", "placement", "on device")
WIDE = 200  # a file or a pipe has no width: nothing is left out
NOTHING = ({NONE}, {"0 B"}, {NONE, "0 B"})


def grid(comparison: Comparison, drop: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
    """Headers and cells; columns in which nothing is known are left out."""
    rows = all_rows(comparison)
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
        headers, cells = grid(comparison, drop)
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
    lines += _settings(comparison)
    lines += [f"{kind}: {'; '.join(reasons)}" for kind, reasons in not_counted(comparison)]
    if not comparison.finished:
        lines.append(unfinished(comparison, comparison.run.folder))
    lines.append(f"Run folder: {comparison.run.folder}   plan {comparison.header.plan_digest[:16]}")
    return [plain(line) for line in lines]


def _settings(comparison: Comparison) -> list[str]:
    """What differs and what nothing explains; where the weights lay is what arms are for, and has its columns."""
    rows = parity(comparison.run)
    loud = [f"{spoken(each.setting)}: {text}" for each in rows for text in each.unexplained]
    unequal: dict[str, list[str]] = {}
    for each in rows:
        if each.differs and each.why and not each.unexplained and not each.is_placement:
            reason = ASKED if each.why[0].startswith(ASKED) else each.why[0]
            unequal.setdefault(reason, []).append(f"{spoken(each.setting)} ({_by_value(each)})")
    lines = [f"UNEXPLAINED settings: {'; '.join(loud)}."] if loud else []
    lines += [f"Settings that differ, {reason}: {'; '.join(named)}." for reason, named in unequal.items()]
    told = {arm for each in rows for arm, value in each.values.items() if value is not None}
    mute = [each.arm for each in comparison.header.contenders if each.realised and each.arm not in told]
    if not lines and len(told) > 1:
        lines.append("Settings as read back from the engines are equal on all arms.")
    elif not lines and told:
        lines.append(f"Settings as read back from {', '.join(told)} are as asked for.")
    if mute:
        lines.append(f"Settings cannot be read back from {', '.join(mute)}.")
    return lines


def _by_value(row: Parity) -> str:
    """ "ollama 1024, llama-cpp and llama-cpp@cpu-moe 2048"."""
    arms: dict[str, list[str]] = {}
    for arm, value in row.values.items():
        if value is not None:
            arms.setdefault(value, []).append(arm)
    return ", ".join(f"{' and '.join(named)} {value}" for value, named in arms.items())


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
