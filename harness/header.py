"""Reads the header of a GGUF: its keys and its tensor table, never the weights.

The `gguf` package knows the types and writes such files, but its reader takes seconds for a large
vocabulary, and gives up on a tensor type that it does not know yet; this one takes milliseconds and goes on.
Every file that is not a whole GGUF ends here, with one sentence each.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.errors import ModelError
from harness.sizes import format_bytes

MAGIC = b"GGUF"
MOST = (1 << 32) - 1  # engines read the numbers of a model in 32 bits
DIMENSIONS = 4  # at most
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Elements and bytes of a block of every type that a KV cache takes: to plan with, without waiting for the package.
_OF_CACHES = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34), "Q5_1": (32, 24), "Q5_0": (32, 22),
    "Q4_1": (32, 20), "Q4_0": (32, 18), "IQ4_NL": (32, 18),
}  # fmt: skip
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the tensor table. `start` counts from the beginning of the file."""

    name: str
    type: str  # "Q4_K"
    shape: tuple[int, ...]  # ggml order: the row length first
    start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """`fields` holds scalars as they are, strings as str, arrays of strings as lists of bytes.

    A damaged file may hold anything under any key, so read them by the methods, which promise a type.
    They put the architecture in front of a name that begins with a dot: ".block_count".
    """

    path: Path
    size: int
    fields: dict[str, Any]
    entries: tuple[Entry, ...]

    def text(self, name: str) -> str:
        """Empty if the key is missing, or no text."""
        value = self._value(name)
        return value if isinstance(value, str) else ""

    def texts(self, name: str) -> list[bytes]:
        """Empty if the key is missing. Raises ModelError if it holds something else."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(item, bytes) for item in value[:1]):  # all of one type
            raise ModelError(f"{self.path} gives no list of texts as its {name}; download it again")
        return value

    def number(self, name: str, default: int = 0, *, least: int = 0, most: int = MOST) -> int:
        """A whole number in a range; the default if the key is missing. Raises ModelError."""
        value = self._value(name)
        return default if value is None else self._whole(name, value, least, most)

    def numbers(self, name: str, count: int, default: int | Sequence[int] = 0) -> list[int]:
        """The same, `count` times: from one number for all, or from a list of numbers or flags, filled up with 0."""
        value = self._value(name, default)
        if isinstance(value, str) or not isinstance(value, Sequence):
            return [self._whole(name, value)] * count
        whole = [self._whole(name, int(item) if isinstance(item, bool) else item) for item in value[:count]]
        return whole + [0] * (count - len(whole))

    def _value(self, name: str, default: Any = None) -> Any:
        return self.fields.get(self.text("general.architecture") + name if name.startswith(".") else name, default)

    def _whole(self, name: str, value: Any, least: int = 0, most: int = MOST) -> int:
        name = name.removeprefix(".")
        if type(value) is not int:  # a bool is one to isinstance
            raise ModelError(f"{self.path} gives no whole number as its {name}; download it again")
        if not least <= value <= most:
            raise ModelError(f"{self.path} gives {value} as its {name}, and no model has that; download it again")
        return value


def read(path: Path) -> Header:
    """The header of one file. Raises ModelError, a sentence with the next step for every kind of bad file."""
    try:
        if path.is_dir():
            inside = sorted(path.glob("*.gguf"))
            raise ModelError(f"{path} is a folder; name the .gguf file in it, e.g. {inside[0] if inside else 'X.gguf'}")
        size = path.stat().st_size
        if size == 0:
            raise ModelError(f"{path} is empty; download it again")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check_start(path, data[:64])
            return _parse(path, size, data)
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}; check the path") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check its permissions and its disk") from error


def siblings(path: Path) -> tuple[Path, ...]:
    """All parts of a split model that are there, by the file's name; the file alone if it is not split."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return (path,)
    return tuple(part for part in _parts(path, match, int(match["count"])) if part.is_file())


def read_all(path: Path) -> tuple[Header, ...]:
    """The headers of all parts of a model, the first one first. Raises ModelError like `read`."""
    first = read(path)
    count = first.number("split.count")
    if count <= 1:
        return (first,)
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelError(f"{path} is one of {count} parts; give it its name back, X-00001-of-{count:05d}.gguf")
    parts = _parts(path, match, count)
    number = first.number("split.no")
    if number != 0:
        raise ModelError(f"{path} is part {number + 1} of {count}; give the first one, {parts[0]}")
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelError(f"{path} has {count} parts and {', '.join(missing)} is missing; download it beside the first")
    headers = (first, *(read(part) for part in parts[1:]))
    for expected, header in enumerate(headers):
        if header.fields.get("split.no") != expected or header.fields.get("split.count") != count:
            raise ModelError(f"{header.path} is no part of {path}; download that part again")
    found, wanted = sum(len(header.entries) for header in headers), first.number("split.tensors.count")
    if wanted and found != wanted:
        raise ModelError(f"the parts of {path} hold {found} tensors and should hold {wanted}; download them again")
    return headers


def _parts(path: Path, match: re.Match[str], count: int) -> list[Path]:
    return [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


def _check_start(path: Path, start: bytes) -> None:
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(
            f"{path} is a Git-LFS pointer and not the model itself; run `git lfs pull`, or download the file"
        )
    if not start.startswith(MAGIC):
        what = "a web page" if start.lstrip()[:1] == b"<" else f"it begins with {start[:4]!r}"
        raise ModelError(f"{path} is not a GGUF file ({what}); name a .gguf file, or convert this one with llama.cpp")
    if len(start) < 8:
        raise ModelError(f"{path} ends inside its header; download it again")
    version = int.from_bytes(start[4:8], "little")
    if version & 0xFFFF == 0:
        raise ModelError(f"{path} was written for a big-endian machine; convert it with gguf-convert-endian")
    if version < 2:
        raise ModelError(f"{path} is GGUF version {version}, which no current engine loads; download a newer file")


class _Cursor:
    """A place in the header that moves on as it is read."""

    __slots__ = ("at", "data")

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at = data, at

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return values

    def one(self, layout: str) -> Any:
        return self.take(layout)[0]

    def string(self) -> bytes:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[bytes]:
        data, at, length_of = self.data, self.at, struct.Struct("<Q").unpack_from
        found: list[bytes] = []
        for _ in range(count):
            start = at + 8
            at = start + length_of(data, at)[0]
            found.append(data[start:at])
        if at > len(data):
            raise EOFError
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string().decode(errors="replace")
        if kind == _ARRAY:
            kind, count = self.take("IQ")
            if kind == _STRING:
                return self.strings(count)
            return list(self.take(f"{count}{_SCALARS[kind]}"))
        return self.one(_SCALARS[kind])


def _parse(path: Path, size: int, data: mmap.mmap) -> Header:
    cursor = _Cursor(data, 8)
    try:
        tensors, keys = cursor.take("QQ")
        fields: dict[str, Any] = {}
        for _ in range(keys):
            key = cursor.string().decode(errors="replace")
            fields[key] = cursor.value(cursor.one("I"))
        rows = []
        for _ in range(tensors):
            name = cursor.string().decode(errors="replace")
            shape = cursor.take(f"{cursor.one('I')}Q")
            if not 0 < len(shape) <= DIMENSIONS or 0 in shape:
                raise ModelError(f"{path} has a damaged header, with a tensor of no size; download it again")
            kind, offset = cursor.take("IQ")
            rows.append((name, kind, shape, offset))
    except (struct.error, EOFError):
        raise ModelError(f"{path} ends inside its header; download it again") from None
    except (KeyError, MemoryError, OverflowError):
        raise ModelError(f"{path} has a damaged header; download it again") from None
    alignment = fields.get("general.alignment")
    alignment = alignment if isinstance(alignment, int) and alignment > 0 else 32
    start = -(-cursor.at // alignment) * alignment
    entries = _entries(rows, start, size)
    end = max((entry.start + max(entry.bytes, 0) for entry in entries), default=0)
    if end > size:
        raise ModelError(
            f"{path} is cut short: its tensors need {format_bytes(end)} and the file ends "
            f"{format_bytes(end - size)} before that; download it again"
        )
    return Header(path, size, fields, entries)


def _entries(rows: list[tuple[str, int, tuple[int, ...], int]], start: int, size: int) -> tuple[Entry, ...]:
    ends = dict(pairwise([*sorted({row[3] for row in rows}), max(0, size - start)]))
    entries = []
    for name, kind, shape, offset in rows:
        known = quantization(kind)
        elements = 1
        for extent in shape:
            elements *= extent
        # The span to the next tensor is all that is known of a type that is newer than the gguf package.
        length = elements // known[1] * known[2] if known else ends[offset] - offset
        entries.append(Entry(name, known[0] if known else f"TYPE_{kind}", shape, start + offset, length))
    return tuple(entries)


@cache
def quantization(kind: int) -> tuple[str, int, int] | None:
    """Name, elements a block and bytes a block of a ggml type number; None if it is not known."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in set(GGMLQuantizationType):
        return None
    known = GGMLQuantizationType(kind)
    return (known.name, *GGML_QUANT_SIZES[known])


@cache
def block_of(type_name: str) -> tuple[int, int]:
    """Elements and bytes of one block of a type named as llama.cpp does: "f16", "q8_0", "Q4_K". Raises KeyError."""
    if (known := _OF_CACHES.get(type_name.upper())) is not None:
        return known
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[type_name.upper()]]
