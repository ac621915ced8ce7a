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


# ── inert text ──────────────────────────────────────────────────────────────────────────────


def plain(text: object) -> str:
    """One line without control, format and direction characters."""
    return " ".join(_inert(text).split())


def _inert(text: object) -> str:
    kept = (" " if unicodedata.category(sign) in ("Cc", "Zl", "Zp") else sign for sign in str(text))
    return "".join(sign for sign in kept if unicodedata.category(sign) != "Cf")


def markdown(text: object) -> str:
    """`plain`, with everything escaped that Markdown or HTML would take for its own."""
    escaped = re.sub(r"([\\`*_{}\[\]#|~])", r"\\\1", plain(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def shell(command: str) -> str:
    """A command as it is pasted: its lines stay, nothing in them moves a terminal."""
    return "\n".join(plain(line) for line in command.splitlines())


def attribute(text: object) -> str:
    """`plain`, for between the quotes of an HTML attribute."""
    return plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def fenced(text: str, language: str = "sh") -> str:
    """A block of shell, or a drawing with `language` "text", that its content cannot end."""
    inner = shell(text) if language == "sh" else "\n".join(map(_inert, text.splitlines()))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", inner)), default=0))
    return f"{fence}{language}\n{inner}\n{fence}"


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


def percent(share: float) -> str:
    if share > 10:
        return "over 1000 %"
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def span(values: Sequence[float]) -> str:
    """Whole numbers: "0–3", or "3" where all are equal."""
    least, most = f"{min(values):.0f}", f"{max(values):.0f}"
    return least if least == most else f"{least}–{most}"
