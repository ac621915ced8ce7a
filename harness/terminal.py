"""Tables for a terminal: a run with its answer and state, and two runs side by side."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise

from harness.answer import (
    answer,
    best,
    best_commands,
    ceiling_share_of,
    change_sentence,
    memory_of,
    not_counted,
    status_of,
    verdict_of,
    word_of,
)
from harness.changes import Change, Changes, nothing_common
from harness.compare import Comparison, Row, all_rows
from harness.differences import Difference
from harness.parity import ASKED, Parity, parity, spoken
from harness.plan import PRESETS, Status
from harness.record import resuming
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
    ("J/token", lambda row: number(row.gpu_j.value if row.gpu_j else None)),
    ("on device", lambda row: memory(row.realised_device_bytes)),
    ("on host", lambda row: memory(row.realised_host_bytes)),
    ("RSS", lambda row: memory(row.rss_bytes)),
    ("memory", memory_of),
    ("of ceiling", ceiling_share_of),
    ("ratio", lambda row: "1" if row.is_reference else ratio(row.contrast)),
    ("verdict", verdict_of),
    ("status", status_of),
)


MAY_VANISH = frozenset(
    {"prefill tok/s", "memory", "of ceiling", "VRAM", "J/token", "on device", "on host", "RSS", "load", "TTFT"}
)
NARROWER = (  # what goes first where it is narrow; "decode tok/s (" is its interval
    "RSS", "load", "on host", "of ceiling", "placement", "memory", "on device", "J/token", "VRAM", "verdict (", "TTFT",
    "prefill tok/s", "decode tok/s (", "arm", "ratio (",
)  # fmt: skip
NARROWER_CHANGES = ("before, tok/s (", "after, tok/s (", "verdict (", "before, tok/s", "after, tok/s", "arm")
SHORT_ARM, LEAST_ARM = 24, 12  # columns; longer names are cut in the middle, at last to the second
PAGE = 40  # lines
MOST_LINES = 4  # of one thing below the table
LEAST_BELOW = 6  # lines there, however long the rest is
OF_ONE_ARM = "Intervals of tok/s are of that arm alone (95 %), not for comparing rows."
WIDE = 200  # a file or a pipe has no width: nothing is left out
NOTHING = ({NONE}, {"0 B"}, {NONE, "0 B"})


def grid(comparison: Comparison, drop: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
    """Headers and cells; columns in which nothing is known are left out."""
    rows = all_rows(comparison)
    columns = [(name, [cell(row) for row in rows]) for name, cell in CELLS if name not in drop]
    columns = [(name, cells) for name, cells in columns if name not in MAY_VANISH or set(cells) not in NOTHING]
    return [name for name, _ in columns], [list(cells) for cells in zip(*(cells for _, cells in columns), strict=True)]


def outcome_grid(comparison: Comparison, drop: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
    """The same in one column less: the status of an arm that is not OK stands for its verdict."""
    headers, cells = grid(comparison, ("status", *drop))
    words = {row.arm: word_of(row) for row in all_rows(comparison) if row.status.word is not Status.OK}
    return headers, [[*line[:-1], words.get(line[0], line[-1])] for line in cells]  # the verdict is last


def table(comparison: Comparison, width: int | None = None, *, colour: bool | None = None) -> str:
    """One page: the answer, the command to paste, the table, the state, and where to go from here.

    Where it is narrow, less important columns go first. With `colour` words of state and verdict have one; it never
    tells what the words do not. Both are what stdout is, unless given.
    """
    width, paint = width or _width(), _painter(colour)
    is_common = len({row.placement for row in comparison.rows}) == 1  # what all have in common is for the report
    headers, cells = outcome_grid(comparison, ("placement",) if is_common else ())
    shown = [[plain(cell) for cell in line] for line in cells]
    state = comparison.state.word
    above = [
        _filled(answer(comparison), width),
        *_paste(comparison, width),
        _fitting(headers, shown, NARROWER, width, paint),
    ]
    onwards = "\n".join(_onwards(comparison, width))
    room = PAGE - len("\n\n".join([*above, "", onwards]).splitlines())
    below = _below(comparison, width, max(LEAST_BELOW, room) if width < WIDE else sys.maxsize)
    return "\n\n".join([*above, below.replace(state, paint(state), 1), onwards])


def _paste(comparison: Comparison, width: int) -> list[str]:
    """The command of the arm to take; where any may be taken, the shortest one."""
    commands = best_commands(comparison)
    if not commands:
        return []
    picked = commands[:1] if comparison.header.search else sorted(commands, key=lambda each: len(each[1]))[:1]
    others = [plain(arm) for arm, _ in commands if arm != picked[0][0]]
    more = f" ({' and '.join(others)} in the report)" if others else ""
    return [f"To run {plain(arm)} by hand{more}:\n{folded(command, width)}" for arm, command in picked]


def _below(comparison: Comparison, width: int, room: int) -> str:
    """Below the table: state, then what has no number of its own. What `room` lines do not hold is in the report."""
    lines: list[str] = []
    left_out = 0
    paragraphs = _footer(comparison)
    for first, *rest in paragraphs:
        kept_free = 0 if lines else min(len(paragraphs) - 1, room // 2)  # the state leaves a line for each that follows
        left = room - len(lines) - kept_free
        found = _whole(first, rest, width, left if width >= WIDE else min(left, MOST_LINES))
        lines += found
        left_out += not found
    return "\n".join([*lines, *(["More is in the report."] if left_out else [])])


def _whole(first: str, rest: Sequence[str], width: int, most: int) -> list[str]:
    """A paragraph of as many of these as `most` lines hold, whole; nothing, if not even the first fits."""
    for kept in range(len(rest), -1, -1):
        more = f"({len(rest) - kept} more in the report)" if rest[kept:] not in ([], [OF_ONE_ARM]) else ""
        lines = _filled(" ".join(filter(None, [first, *rest[:kept], more])), width, "  ").splitlines()
        if len(lines) <= most:
            return lines
    return []


def _footer(comparison: Comparison) -> list[list[str]]:
    """Paragraphs, each of a head and parts that can be left out; the state is first."""
    judgement, drawn = comparison.judgement, comparison.header.plan
    counts = f"{count(judgement.n, 'block')} judged"
    if comparison.blocks_run != judgement.n:
        counts += f" of {comparison.blocks_run} run"
    return [
        [f"State {judgement.state.word}:", *judgement.state.reasons],
        *([line] for line in _without_numbers(comparison)),
        [f"{counts}; ratios {drawn.level.words}, margin {percent(drawn.margin)}.", OF_ONE_ARM],
        *([line] for line in _settings(comparison)),
        *(
            [f"{kind}:", *(f"{reason}{';' if reason != reasons[-1] else ''}" for reason in reasons)]
            for kind, reasons in not_counted(comparison)
        ),
    ]


def _without_numbers(comparison: Comparison) -> list[str]:
    """Arms that did not run for themselves, those with one reason together."""
    arms: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.status.word is not Status.OK:
            reason = f" ({row.status.reason})" if row.status.alias_of is not None else f": {row.status.reason}"
            arms.setdefault(word_of(row) + reason * bool(row.status.reason), []).append(row.arm)
    return [f"{', '.join(named)}{' ' if why.startswith('= ') else ': '}{why}" for why, named in arms.items()]


def _onwards(comparison: Comparison, width: int) -> list[str]:
    """Where everything lies, and what to type next."""
    folder, state, place = comparison.run.folder, comparison.state.word, shlex.quote(str(comparison.run.folder))
    written = [name for name in ("report.md", "report.html") if (folder / name).is_file()]
    beside = "".join(f", and {name}" for name in written[1:])
    lines = [_filled(f"Report: {folder / written[0]}{beside}" if written else f"Run folder: {folder}", width, "  ")]
    if not comparison.finished:
        done = count(comparison.blocks_run, "block")
        return [*lines, _labelled(f"Stopped after {done}; go on", resuming(folder), width)]
    open_ = [each for each in comparison.judgement.contrasts.values() if each.word == "INCONCLUSIVE"]
    needed = max((each.blocks_needed or 0 for each in open_), default=0)
    if state == "RED":
        lines.append(_filled("Next: mend what the state names and run it again; `publish` refuses it.", width, "  "))
    elif needed and len(best(comparison)) > 1:
        margin, most = percent(comparison.header.plan.margin), PRESETS["confirm"]
        capped = comparison.header.plan.max_blocks < needed <= most
        more = f"a longer --budget gives up to {most}" if capped else "on a quieter machine fewer (`llamaduel doctor`)"
        lines.append(_filled(f"Next: to tell {margin} apart takes {needed} blocks at this noise; {more}.", width, "  "))
    return [*lines, *([_labelled("Share it", f"llamaduel publish {place}", width)] if comparison.state.ranks else [])]


def _labelled(label: str, command: str, width: int) -> str:
    """A command to paste is never broken by us."""
    line = f"{label}: {plain(command)}"
    return line if len(line) <= width else f"{label}:\n  {plain(command)}"


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


def changes_table(changes: Changes, width: int | None = None, *, colour: bool | None = None) -> str:
    """What may be said, two runs side by side, and all that differs between them; as wide and coloured as `table`."""
    width, paint = width or _width(), _painter(colour)

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
    nothing = nothing_common(changes)
    said = " ".join(map(change_sentence, changes.changes)) or plain(f"{nothing[0].upper()}{nothing[1:]}.")
    return "\n\n".join(
        [
            _filled(said, width),
            _fitting(headers, [[*map(plain, row)] for row in cells], NARROWER_CHANGES, width, paint),
            "\n".join(_filled(line, width, "  ") for line in lines if line),
        ]
    )


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


# ── lines that fit ──────────────────────────────────────────────────────────────────────────

COLOURS = {
    "GREEN": "1;32", "AMBER": "1;33", "RED": "1;31", "SCREENING": "1;36", "DIFFERENT": "1", "FASTER": "1",
    "SLOWER": "1;31", "LOST": "1;31", "INCONCLUSIVE": "33", "NOT_COMPARABLE": "33",
    **dict.fromkeys((word.value for word in Status if word not in (Status.OK, Status.ALIAS)), "31"),
}  # fmt: skip
Paint = Callable[[str], str]


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE


def _painter(colour: bool | None) -> Paint:
    """Words in their colour, by the first of them; as they are where nobody sees a colour or wants one."""
    if colour is None:
        wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")
        colour = wanted and sys.stdout.isatty()
    if not colour:
        return lambda text: text

    def paint(text: str) -> str:
        code = COLOURS.get(re.split(r"[ ,]", text)[0])
        return text if code is None else f"\x1b[{code}m{text}\x1b[0m"

    return paint


def _filled(text: str, width: int, indent: str = "") -> str:
    """A path or a name is never broken, for it is pasted; nor is "3 %"."""
    filled = textwrap.fill(
        plain(text).replace(" %", "\xa0%"),
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace("\xa0", " ")


def _fitting(
    headers: Sequence[str], rows: Sequence[Sequence[str]], narrower: Sequence[str], width: int, paint: Paint
) -> str:
    """A line for each row, two spaces between columns; where it is too wide, by steps of `narrower`, then by arms."""
    columns = {name: [row[at] for row in rows] for at, name in enumerate(headers)}

    def too_wide() -> int:
        widths = [max(map(len, (name, *cells))) for name, cells in columns.items()]
        return sum(widths) + 2 * (len(widths) - 1) - width

    def cut_arms(least: int) -> None:
        longest = max(map(len, columns["arm"]), default=0)
        columns["arm"] = [_cut(arm, max(least, longest - too_wide())) for arm in columns["arm"]]

    for step in narrower:
        name = step.removesuffix(" (")
        if too_wide() <= 0:
            break
        if step == "arm":
            whole = columns["arm"]
            cut_arms(SHORT_ARM)
            columns["arm"] = columns["arm"] if too_wide() <= 0 else whole
        elif name != step and name in columns:
            columns[name] = [cell.partition(" (")[0] for cell in columns[name]]
        elif name in columns:
            del columns[name]
    if too_wide() > 0:
        cut_arms(LEAST_ARM)
    widths = [max(map(len, (name, *cells))) for name, cells in columns.items()]
    lines = [list(columns), ["-" * width for width in widths], *zip(*columns.values(), strict=True)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line[:-1], widths, strict=False)), paint(line[-1])])
        for line in lines
    )


def _cut(text: str, width: int) -> str:
    """Names of arms differ at their ends."""
    head = width // 2
    return text if len(text) <= width else f"{text[:head]}…{text[head + 1 - width :]}"


def folded(command: str, width: int) -> str:
    """A command as it is pasted, its long lines continued by a backslash where no quotes are open."""
    return "\n".join(_folded(line, width) for line in shell(command).splitlines())


def _folded(line: str, width: int) -> str:
    words = re.findall(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+""", line)
    if len(line) <= width or line.startswith("#") or "$'" in line or " ".join(words) != line:
        return line
    lines, pieces = [words[0]], list[str]()
    for before, word in pairwise(words):
        if pieces and before.startswith("-") and not word.startswith("-"):
            pieces[-1] += f" {word}"  # an option and its value stay together
        else:
            pieces.append(word)
    for word in pieces:
        if len(lines[-1]) + len(word) + 3 > width:
            lines.append(f"   {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)
