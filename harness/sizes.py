"""Sizes of memory, files and texts, as people type and read them.

`G`, `Gi` and `GiB` are powers of 1024, `GB` is a power of 1000, as on a disk's box.
"""

from __future__ import annotations

import re

from harness.errors import UsageError

_NUMBER = re.compile(r"\s*(\d{1,15}(?:\.\d+)?|\.\d+)\s*([kmgt]?)(i?b?)\s*", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes of "0.15GiB", "800MiB", "12G", "20GB". Raises UsageError, also for a bare small number."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a size; write it like 800MiB, 12GiB or 20GB")
    number, prefix, unit = float(match[1]), match[2].lower(), match[3].lower()
    size = int(number * (1000 if unit == "b" else 1024) ** _POWER[prefix])
    if not prefix and not unit and size < 1 << 20:
        raise UsageError(f"{text!r} has no unit; write {match[1]}GiB or {match[1]}MiB")
    if size <= 0:
        raise UsageError(f"{text!r} is no room at all; write a size like 800MiB or 12GiB")
    return size


def parse_tokens(text: str) -> int:
    """A number of tokens: 0, 4096, 16k (of 1024). Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,7})(k?)", text)
    if match is None:
        raise UsageError(f"{text!r} is not a number of tokens; write it like 0, 4096 or 16k")
    return int(match[1]) * (1024 if match[2] else 1)


def format_bytes(size: int) -> str:
    """Three digits and a unit: "16.3 GiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000 or unit == "GiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.{max(0, 3 - len(str(int(abs(value)))))}f} {unit}"
