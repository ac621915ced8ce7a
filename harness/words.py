"""Text and numbers as a reader sees them: everything made inert, every unknown a dash.

All text from engines, models and files goes through here once: control characters go, and in
Markdown what could be markup is escaped.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from harness.sizes import format_bytes
from harness.verdict import Contrast, Interval, telling

NONE = "–"
# What GitHub makes a link of without any markup, and what begins a list or a rule at the start of a line. A name
# after @ and a number after # are looked for behind all escapes, so a space without width keeps them apart.
LIVE = (
    (re.compile(r":(?=//)"), r":\\"),
    (re.compile(r"(?<![a-z0-9])(www)\.", re.IGNORECASE), r"\1\\."),
    (
        re.compile(r"(?<![a-z0-9])@(?=\w)|@(?=[\w-]*\.\w)|\\#(?=\d)|(?<![a-z0-9])GH-(?=\d)", re.IGNORECASE),
        r"\g<0>&#8203;",
    ),
    (re.compile(r"^(\d{0,9})([-+.)])(?=\s|$|-)"), r"\1\\\2"),
)


# ── inert text ──────────────────────────────────────────────────────────────────────────────


def plain(text: object) -> str:
    """One line without control, format and direction characters."""
    return " ".join(_inert(text).split())


def _inert(text: object) -> str:
    return "".join(map(_sign, str(text)))


def _sign(sign: str) -> str:
    kind = unicodedata.category(sign)
    if kind in ("Cc", "Zl", "Zp"):
        return " "
    if kind == "Cs" or ord(sign) & 0xFFFE == 0xFFFE:  # no text file and no XML may hold it
        return "\N{REPLACEMENT CHARACTER}"
    return "" if kind == "Cf" else sign


def markdown(text: object) -> str:
    """`plain`, with everything escaped that Markdown, GitHub or HTML would take for its own."""
    escaped = re.sub(r"([\\`*{}\[\]#|~$]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", plain(text))  # a_b is no emphasis
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for live, inert in LIVE:
        escaped = live.sub(inert, escaped)
    return escaped


def shell(command: str) -> str:
    """A command as it is pasted: its lines stay, nothing in them moves a terminal."""
    return "\n".join(map(_inert, command.splitlines()))


def markdown_table(headers: Sequence[str], cells: Sequence[Sequence[object]]) -> str:
    """In GitHub's form, every cell escaped."""
    from tabulate import tabulate

    shown = [[markdown(cell) for cell in line] for line in cells]
    return str(tabulate(shown, [markdown(name) for name in headers], tablefmt="github", disable_numparse=True))


def attribute(text: object) -> str:
    """`plain`, for between the quotes of an HTML attribute."""
    return plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def fenced(text: str, language: str = "sh") -> str:
    """A block of shell, or a drawing with `language` "text", that its content cannot end."""
    inner = shell(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", inner)), default=0))
    return f"{fence}{language}\n{inner}\n{fence}"


def code(text: object) -> str:
    """A Markdown code span that its content cannot end. Not for tables, where a pipe would."""
    inner = plain(text) or NONE
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
    bounds = telling(interval.low, interval.high)
    if bounds is None:
        return number(interval.value)
    digits = 0 if interval.value >= 1000 else 1 if interval.value >= 10 else 3
    return f"{interval.value:.{digits}f} ({bounds[0]:.{digits}f}–{bounds[1]:.{digits}f})"


def ratio(contrast: Contrast | None) -> str:
    """With its interval; none for arms that may not be compared."""
    if contrast is None or contrast.word == "NOT_COMPARABLE":
        return NONE
    bounds = telling(contrast.low, contrast.high)
    if bounds is None:
        return f"{contrast.ratio:.2f}×"
    return f"{contrast.ratio:.3f}× ({bounds[0]:.3f}–{bounds[1]:.3f})"


def memory(value: int | None) -> str:
    return NONE if value is None else format_bytes(value)


def milliseconds(interval: Interval | None) -> str:
    return NONE if interval is None else f"{interval.value * 1000:.0f} ms"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def held_to(limits: Sequence[int]) -> str:
    """What to know of GPUs whose memory was held to one of these sizes; empty where none was."""
    sizes = " or ".join(map(format_bytes, limits))
    return f"GPU memory was held to {sizes}: capacity is emulated, bandwidth is this card's." if sizes else ""


def percent(share: float) -> str:
    if share > 10:
        return "over 1000 %"
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def span(values: Sequence[float]) -> str:
    """Whole numbers: "0–3", or "3" where all are equal."""
    least, most = f"{min(values):.0f}", f"{max(values):.0f}"
    return least if least == most else f"{least}–{most}"
