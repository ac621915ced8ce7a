"""What a person sees while a run goes on: two live lines on a terminal, plain lines elsewhere.

Everything goes to stderr, so that stdout stays the result. A drawing costs the processor that the engines are
measured on, so none is made while a request runs, but for one now and then in a long one; see `TICK_S`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from harness.words import plain

if TYPE_CHECKING:
    from rich.text import Text

    from harness.probe import Progress, Watch

SAME_LINE_S = 30.0  # without a terminal, the same phase is told again no sooner
TICK_S = 1.0  # between two drawings where nothing is measured
TIMED_TICK_S = 5.0  # where a request runs: a sign of life that costs a millisecond
MANY_ARMS = 4  # of more, only the one that loads and the reference show their speed
UNKNOWN_COLUMNS = 80
EDGE = 3  # columns left free, for the ^C that a terminal echoes
STOPS = "Ctrl-C stops"
HINT = f"{STOPS} and keeps what there is"


@contextlib.contextmanager
def show_progress() -> Iterator[Watch]:
    """A watch for `run`: loads done, minutes left, what is running now and what came out so far."""
    if not _is_live():
        yield _Lines()
        return
    live = _Live()
    try:
        yield live
    finally:
        live.close()


def quiet(_: Progress) -> None:
    """A watch that shows nothing."""


def _is_live() -> bool:
    """Can a line be drawn again? Not into a file, and what a CI keeps is a file even where it looks like a terminal."""
    ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return sys.stderr.isatty() and not ci and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


# ── plain lines ─────────────────────────────────────────────────────────────────────────────


class _Lines:
    """A line for each lasting thing and for each new load, and one now and then so that nothing seems to hang."""

    def __init__(self) -> None:
        self._head = ""
        self._told_s = -SAME_LINE_S

    def __call__(self, progress: Progress) -> None:
        head, now_s = progress.text.rsplit(": ", 1)[0], time.monotonic()
        if not progress.lasting and head == self._head and now_s - self._told_s < SAME_LINE_S:
            return
        self._head, self._told_s = head, now_s
        print(_line(progress), file=sys.stderr, flush=True)  # noqa: T201


def _line(progress: Progress) -> str:
    count = "" if progress.done is None else f"[{progress.done}/{progress.total}] "
    left = "" if progress.seconds_left is None else f"  ({_minutes(progress.seconds_left)} left; {HINT})"
    return count + plain(progress.text) + left


def _minutes(seconds: float) -> str:
    return f"about {max(1, round(seconds / 60))} min"


# ── two live lines ──────────────────────────────────────────────────────────────────────────


class _Live:
    """Two lines that are drawn again; lasting ones scroll by above them. The cursor is never hidden."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, color_system=None if os.environ.get("NO_COLOR") else "auto")
        self._began_s = self._since_s = time.monotonic()
        self._now: Progress | None = None
        self._drawn: list[int] = []  # columns of each line on the screen
        self._changed = threading.Condition()
        self._open, self._told = True, False
        self._ticker = threading.Thread(target=self._tick, name="display", daemon=True)

    def __call__(self, progress: Progress) -> None:
        with self._changed:
            if self._now is None:
                self._ticker.start()
            if self._now is None or progress.text != self._now.text:
                self._since_s = time.monotonic()
            self._now, self._told = progress, self._told or progress.lasting
            self._draw(f"{plain(progress.text)}\n" if progress.lasting else "")
            self._changed.notify()

    def close(self) -> None:
        """Leave the terminal as it was."""
        with self._changed:
            self._open = False
            self._write(self._erase() + ("\n" if self._told else ""))  # the result stands apart from it
            self._drawn = []
            self._changed.notify()
        if self._now is not None:
            self._ticker.join()

    def _tick(self) -> None:
        """Clocks go on between two things told. rich's own thread would draw ten times a second."""
        from harness.load import is_timed

        with self._changed, contextlib.suppress(OSError):  # the terminal is gone: so is its watch
            while self._open:
                timed = self._now is not None and is_timed(phase_of(self._now))
                if not self._changed.wait(TIMED_TICK_S if timed else TICK_S):
                    self._draw()

    def _draw(self, above: str = "") -> None:
        assert self._now is not None
        now_s = time.monotonic()
        room = max(1, self._columns() - EDGE)
        lines = draw(self._now, room, now_s - self._began_s, now_s - self._since_s)
        with self._console.capture() as drawing:
            for line in lines:
                self._console.print(line, end="", soft_wrap=True)
                self._console.out("\n" if line is not lines[-1] else "", end="")
        self._write(self._erase() + above + drawing.get())
        self._drawn = [line.cell_len for line in lines]

    def _erase(self) -> str:
        """A terminal that was made narrower has wrapped what is on it."""
        width = self._columns() if self._drawn else 1
        rows = sum(max(1, -(-columns // width)) for columns in self._drawn)
        return "" if not rows else "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "") + "\x1b[J"

    def _columns(self) -> int:
        """Of the terminal that is drawn on, now; stdin, which rich asks first, may be another."""
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self._console.file.fileno()).columns or UNKNOWN_COLUMNS
        return UNKNOWN_COLUMNS

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


def phase_of(progress: Progress) -> str:
    """What the load is at; the whole text of what is no load."""
    return progress.text.partition(f": {progress.arm}: ")[2] if progress.arm else progress.text


def draw(progress: Progress, room: int, elapsed_s: float, phase_s: float) -> list[Text]:
    """How far it is, then what it is at: neither is wider than `room` columns. Less important words go first."""
    from rich.text import Text

    if progress.total is None:  # nothing is kept yet
        parts = {"clock": _clock(elapsed_s), "at": _phase(progress, phase_s), "hint": STOPS}
        lines = [_fitting(parts, [("hint", "")], room), *filter(None, [_at(progress, room)])]
    else:
        lines = [_far(progress, room, elapsed_s, phase_s), _at(progress, room, _phase(progress, phase_s))]
    texts = [Text(line) for line in lines]
    for text in texts:
        text.truncate(room, overflow="ellipsis")
        text.highlight_regex("━+", "green")
        text.highlight_regex(r"─{3,}|about .* left|~.* left|Ctrl-C.*", "dim")
    return texts


def _far(progress: Progress, room: int, elapsed_s: float, phase_s: float) -> str:
    """Loads, block, clock, minutes left, and that it may be stopped."""
    parts = {"bar": "", "loads": "", "block": "", "clock": _clock(elapsed_s), "left": "", "hint": HINT}
    shorter = [("hint", STOPS)]
    done, total, left_s = progress.done, progress.total, progress.seconds_left
    if done is not None and total:
        parts |= {"bar": _bar(done, total, 20), "loads": f"{done}/{total} loads"}
    if progress.block is not None:
        parts["block"] = f"block {progress.block} of at most {progress.most_blocks}"
        shorter.append(("block", f"block {progress.block} of ≤{progress.most_blocks}"))
    if left_s is not None:
        parts["left"] = f"{_minutes(left_s - phase_s)} left"
    if parts["bar"]:
        shorter.append(("bar", _bar(done or 0, total or 1, 10)))
    shorter.append(("left", parts["left"].replace("about ", "~")))
    if parts["bar"]:
        shorter.append(("bar", _bar(done or 0, total or 1, 6)))
    if progress.block is not None:
        shorter.append(("block", f"block {progress.block}"))
    shorter += [("bar", ""), ("loads", parts["loads"].removesuffix(" loads")), ("hint", ""), ("block", "")]
    return _fitting(parts, shorter, room)


def _at(progress: Progress, room: int, phase: str = "") -> str:
    """What the load is at, and the speeds so far."""
    parts = {"at": phase, "speeds": _speeds(progress.speeds)}
    short = [each for each in progress.speeds if each[0] in (progress.arm, progress.speeds[0][0])]
    if len(progress.speeds) > MANY_ARMS:
        parts["speeds"] = _speeds(short if progress.total else progress.speeds[-MANY_ARMS:])
    own = [each for each in short if each[0] == progress.arm]
    shorter = [_speeds(short), _speeds(own), ""] if progress.total else [_speeds(progress.speeds[-1:]), ""]
    return _fitting(parts, [("speeds", text) for text in shorter], room)


def _phase(progress: Progress, phase_s: float) -> str:
    """The stage where it is no block, the arm, its phase and for how long."""
    stage = progress.text.partition(f": {progress.arm}: ")[0] if progress.arm and progress.block is None else ""
    at = ": ".join(plain(part) for part in (stage, progress.arm, phase_of(progress)) if part)
    return f"{at}, {_clock(phase_s)}" if phase_s >= TICK_S else at


def _speeds(speeds: Sequence[tuple[str, str]]) -> str:
    return f"tok/s {', '.join(f'{plain(arm)} {plain(speed)}' for arm, speed in speeds)}" if speeds else ""


def _fitting(parts: dict[str, str], shorter: Sequence[tuple[str, str]], room: int) -> str:
    """The parts two spaces apart, made shorter one by one until they fit; at worst too wide."""
    parts = dict(parts)
    for name, text in [("", ""), *shorter]:
        parts |= {name: text} if name else {}
        line = "  ".join(part for part in parts.values() if part)
        if len(line) <= room:
            break
    return line


def _bar(done: int, total: int, width: int) -> str:
    full = round(width * min(1.0, done / total))
    return "━" * full + "─" * (width - full)


def _clock(seconds: float) -> str:
    """ "0:07", "1:02:03"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
