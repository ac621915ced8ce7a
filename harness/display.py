"""What a person sees while a run goes on: one live line on a terminal, plain lines elsewhere.

Everything goes to stderr, so that stdout stays the result.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.words import plain

if TYPE_CHECKING:
    from harness.probe import Progress, Watch

SAME_LINE_S = 30.0  # without a terminal, the same phase is told again no sooner


@contextlib.contextmanager
def show_progress() -> Iterator[Watch]:
    """A watch for `run`: a bar with loads done, minutes left and what is running now."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _Lines()
        return
    live = _Live()
    try:
        yield live
    finally:
        live.close()


def quiet(_: Progress) -> None:
    """A watch that shows nothing."""


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


class _Live:
    """rich's bar for what goes on; lasting lines scroll by above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (SpinnerColumn(), BarColumn(bar_width=20), MofNCompleteColumn())
        text = TextColumn("{task.description}", markup=False)
        self._bar = Bar(*columns, text, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("starting", total=None)

    def __call__(self, progress: Progress) -> None:
        self._bar.start()
        if progress.lasting:
            self._bar.console.print(plain(progress.text), markup=False, highlight=False)
        text = plain(progress.text) + _time_left(progress)
        self._bar.update(self._task, description=text, completed=progress.done or 0, total=progress.total)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()


def _line(progress: Progress) -> str:
    count = "" if progress.done is None else f"[{progress.done}/{progress.total}] "
    return count + plain(progress.text) + _time_left(progress)


def _time_left(progress: Progress) -> str:
    if progress.seconds_left is None:
        return ""
    return f"  (about {max(1, round(progress.seconds_left / 60))} min left; Ctrl-C stops and keeps what there is)"
