"""Keeps every core busy, more and more: nothing at first, all of them after so many seconds, until it is ended.

    python scripts/experiments/burn.py SECONDS PARENT

It ends too when PARENT, the process that started it, is gone.
"""

from __future__ import annotations

import os
import sys
import time

SLICE_S = 0.02


def burn(seconds: float, began: float, parent: int) -> None:
    """One core: busy for a share of each slice that grows with time."""
    while os.getppid() == parent:
        start = time.monotonic()
        busy_s = SLICE_S * min(1.0, (start - began) / seconds)
        while time.monotonic() < start + busy_s:
            pass
        time.sleep(max(0.0, start + SLICE_S - time.monotonic()))


def main(seconds: float, parent: int) -> None:
    began, me = time.monotonic(), os.getpid()
    for _ in range((os.cpu_count() or 1) - 1):
        if os.fork() == 0:
            os.setsid()  # Linux shares a core among sessions, so that each of us counts
            burn(seconds, began, me)
            os._exit(0)
    burn(seconds, began, parent)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
