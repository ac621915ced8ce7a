"""What every load finds before it starts, made equal: the model's files in the page cache, and the heat.

A neighbour's file may have pushed the model out of memory, and the load before leaves a hot chip.
So the files are read once, and a chip hotter than at earlier loads of the run may cool, for a
minute at most. Nothing here fails: what cannot be had is recorded, and the load goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from harness import gpus, machine
from harness.contract import Say
from harness.sizes import format_bytes

MOST_MEMORY = 0.7  # of what is available: beyond it, reading the file pushes out what the engine needs
WINDOW_BYTES = 16 << 20  # asked for, and read, at a time; a multiple of every page size
PIECE_BYTES = 4 << 20
BAND_C = 3.0  # to either side
FEWEST_STARTS = 3  # before there is a band
COOL_S = 60.0
LOOK_S = 1.0
BURN_IN_S = 300.0
STEADY_C = 1.0  # a minute
STEADY_OVER_S = 60.0  # sensors tell whole degrees, so a shorter time tells nothing of a slope


@dataclass(frozen=True, slots=True)
class PageCache:
    """The model's files before a load. `resident` is the share of them in memory, None where it cannot be told."""

    seconds: float
    read_bytes: int  # in windows of which a page was not in memory, or not known to be
    resident: float | None
    skipped: str | None = None  # why the files were left as they were


@dataclass(frozen=True, slots=True)
class Temperatures:
    """In degrees Celsius; None without a sensor."""

    gpu_c: float | None = None
    cpu_c: float | None = None

    def pairs(self, other: Temperatures) -> list[tuple[float, float]]:
        """Of the sensors that both know."""
        both = ((self.gpu_c, other.gpu_c), (self.cpu_c, other.cpu_c))
        return [(mine, its) for mine, its in both if mine is not None and its is not None]


@dataclass(frozen=True, slots=True)
class Thermal:
    """The heat of a load: as it began, and under load, when its last answer had ended."""

    waited_s: float
    start: Temperatures
    middle: Temperatures  # of the band
    within: bool | None  # the band, as it began; None without a sensor or a band
    end: Temperatures = Temperatures()


# ── the page cache ──────────────────────────────────────────────────────────────────────────


def no_room(file_bytes: int, host_bytes: int | None, available_bytes: int) -> str | None:
    """Why the files are not to be read ahead; None if they are. Unknown `host_bytes` may be all of the file.

    Page cache and engine must fit together, or reading one pushes out the other.
    """
    needed = file_bytes + (file_bytes if host_bytes is None else host_bytes)
    if needed < MOST_MEMORY * available_bytes:
        return None
    return (
        f"file and engine need {format_bytes(needed)}, more than {MOST_MEMORY:.0%} of the "
        f"{format_bytes(available_bytes)} that are available"
    )


def read_ahead(
    files: Sequence[Path],
    host_bytes: int | None,
    available_bytes: int,
    *,
    say: Say | None = None,
    resident: Callable[[BinaryIO, int, int], int | None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> PageCache:
    """Read the files once through the page cache, as far as they are not in it, if there is room.

    `resident` tells how many of so many bytes from an offset are in memory, None if it cannot.
    """
    resident = resident or resident_bytes
    begin, read_bytes = clock(), 0
    try:
        skipped = no_room(sum(path.stat().st_size for path in files), host_bytes, available_bytes)
        for path in files if skipped is None else ():
            with path.open("rb", buffering=0) as file:
                for start, length in _windows(path):
                    if resident(file, start, length) != length:
                        if say and not read_bytes:
                            say("reading the model into memory")
                        read_bytes += _read(file, start, length)
        share = _share(files, resident)
    except (OSError, ValueError) as error:  # a file that shrinks cannot be looked into
        why = (error.strerror if isinstance(error, OSError) else None) or error
        return PageCache(clock() - begin, read_bytes, None, f"a file cannot be read ({why})")
    return PageCache(clock() - begin, read_bytes, share, skipped)


def resident_bytes(file: BinaryIO, start: int, length: int) -> int | None:
    """How much of a window of a file is in the page cache, by mincore; None where the system does not tell.

    Linux says "all of it" to those who neither own the file nor may write to it.
    """
    if not sys.platform.startswith("linux"):
        return None
    owner = os.fstat(file.fileno()).st_uid
    if os.geteuid() not in (0, owner) and not os.access(f"/proc/self/fd/{file.fileno()}", os.W_OK):
        return None
    pages = -(-length // mmap.PAGESIZE)
    answer = ctypes.create_string_buffer(pages)
    # a private view that could be written to, because only of such a one Python tells the address
    with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start) as view:
        first = ctypes.c_char.from_buffer(view)
        try:
            failed = _mincore()(ctypes.addressof(first), length, answer)
        finally:
            del first  # or the view cannot be closed, whose own error would then stand before Ctrl-C
    if failed:
        return None
    present = pages - answer.raw[:pages].count(0)
    return min(length, present * mmap.PAGESIZE)


@cache
def _mincore() -> Any:
    call = ctypes.CDLL(None).mincore
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return call


def _windows(path: Path) -> list[tuple[int, int]]:
    """Offset and length of each."""
    size = path.stat().st_size
    return [(start, min(WINDOW_BYTES, size - start)) for start in range(0, size, WINDOW_BYTES)]


def _read(file: BinaryIO, start: int, length: int) -> int:
    """Read a window and forget it; the bytes that were there."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # only a hint
            os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_WILLNEED)
    file.seek(start)
    done = 0
    while done < length and (piece := file.read(min(PIECE_BYTES, length - done))):
        done += len(piece)
    return done


def resident_share(files: Sequence[Path]) -> float | None:
    """Share of these files in the page cache; None where it cannot be told. Reads nothing. Raises OSError."""
    return _share(files, resident_bytes)


def _share(files: Sequence[Path], resident: Callable[[BinaryIO, int, int], int | None]) -> float | None:
    total = found = 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            for start, length in _windows(path):
                present = resident(file, start, length)
                if present is None:
                    return None
                total, found = total + length, found + present
    return found / total if total else None


# ── heat ────────────────────────────────────────────────────────────────────────────────────


def temperatures() -> Temperatures:
    """Now: the hottest GPU and the hottest CPU package."""
    return Temperatures(gpus.celsius(), machine.cpu_celsius())


def middle_of(starts: Sequence[Temperatures]) -> Temperatures:
    """The middle of the band: the median of what earlier loads of the run began at, once there are a few.

    All earlier loads count, those that began outside as well: a band that cannot be reached any
    more moves to where the machine is, and does not cost a minute before each load to the end.
    """

    def median(known: list[float]) -> float | None:
        return statistics.median(known) if len(known) >= FEWEST_STARTS else None

    return Temperatures(
        median([each.gpu_c for each in starts if each.gpu_c is not None]),
        median([each.cpu_c for each in starts if each.cpu_c is not None]),
    )


def too_hot(now: Temperatures, middle: Temperatures) -> bool:
    """Whether any chip is above its band. Being below is no reason to wait: waiting only cools."""
    return any(found > usual + BAND_C for found, usual in now.pairs(middle))


def within(now: Temperatures, middle: Temperatures) -> bool | None:
    """Whether every chip is within its band; None if there is nothing to compare."""
    pairs = now.pairs(middle)
    return all(abs(found - usual) <= BAND_C for found, usual in pairs) if pairs else None


def wait_until_cool(
    starts: Sequence[Temperatures],
    wait_s: float = COOL_S,
    *,
    say: Say | None = None,
    read: Callable[[], Temperatures] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Thermal:
    """Wait until no chip is hotter than the band, `wait_s` at most; then go on. 0 only looks.

    `starts` are the temperatures at which earlier loads of the run began.
    """
    read = read or temperatures
    middle, begin = middle_of(starts), clock()
    now, waited_s = read(), 0.0
    while waited_s < wait_s and too_hot(now, middle):
        if say and not waited_s:
            say(f"hotter than at earlier loads; waiting up to {wait_s:.0f} s (--no-wait skips this)")
        sleep(LOOK_S)
        now, waited_s = read(), clock() - begin
    return Thermal(waited_s, now, middle, within(now, middle))


def is_warm(ends: Sequence[tuple[float, float]], limit_s: float = BURN_IN_S) -> bool:
    """Whether burn-in is over: less than 1 °C a minute, over a minute at least, or time is up.

    `ends` holds seconds since its beginning and the temperature under load, one for each load of it.
    """
    if not ends:
        return False
    now_s, now_c = ends[-1]
    before = next(((at_s, at_c) for at_s, at_c in reversed(ends) if now_s - at_s >= STEADY_OVER_S), None)
    if before is None:
        return now_s >= limit_s
    return now_s >= limit_s or abs(now_c - before[1]) / (now_s - before[0]) * 60 < STEADY_C
