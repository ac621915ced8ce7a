"""Joules a token, by counters that the hardware itself keeps, and never by an estimate.

A counter steps about ten times a second, so the two ends of a window are uncertain by a step each,
and a short window says nothing: the answers of a load are added up, and less than ten seconds of
them give no figure. The sensor behind a counter may be several per cent off; that is the same for
all arms of a machine and cancels in their ratios.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from harness import gpus

WINDOW_S = 10.0  # the shortest that tells anything
IDLE_S = 10.0
STEP_S = 0.1  # of every counter seen; a slower one shows by itself
SLOPE_S = 1.0  # over which power is told
IDLE_DRIFT = 0.05  # between the beginning and the end of a run
Points = Sequence[tuple[int, float | None]]  # nanoseconds on the clock that stamps tokens, and joules


@dataclass(frozen=True, slots=True)
class Window:
    """From the first token of an answer to its last: `steps` tokens were decoded in it."""

    begin_ns: int
    end_ns: int
    steps: int


@dataclass(frozen=True, slots=True)
class Spent:
    """What windows cost together. `error_j` is one standard deviation, of the counter's steps alone."""

    joules: float
    seconds: float
    steps: int
    error_j: float

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """What the machine draws while no engine runs."""

    started_unix_s: float
    seconds: float
    gpu_w: float | None = None
    cpu_w: float | None = None


@dataclass(frozen=True, slots=True)
class PerToken:
    """Of an arm, joules a decoded token over all its windows; `error_j` as in `Spent`.

    `above_idle_j` is without what the machine draws at rest; None where that was not measured.
    """

    joules: float
    above_idle_j: float | None
    error_j: float
    watts: float
    seconds: float


# ── from counters to joules: pure ───────────────────────────────────────────────────────────


def spent(points: Points, windows: Sequence[Window]) -> Spent | None:
    """Joules of these windows together; None where the counter does not cover them, stopped or began anew.

    Between two readings a counter is taken to grow evenly. Each end of a window is uncertain by a step of Δ
    seconds, evenly: at P watts a standard deviation of P Δ / √12, so P Δ / √6 for both. Where power differs
    before and after the two readings around an end, what it may have been between them is added.
    """
    if not windows or not points or any(joules is None for _, joules in points):
        return None
    begin_ns, end_ns = min(each.begin_ns for each in windows), max(each.end_ns for each in windows)
    steps = sorted((at_ns, joules) for at_ns, joules in points if joules is not None)
    if (
        steps[0][0] > begin_ns
        or steps[-1][0] < end_ns
        or any(after[1] < before[1] for before, after in pairwise(steps))
    ):
        return None
    changes = [steps[0], *(after for before, after in pairwise(steps) if after[1] > before[1])]
    if len(changes) < 3:
        return None
    step_s = STEP_S
    if len(changes) < len(steps):  # it stood still between two looks
        step_s = max(step_s, statistics.median((after[0] - before[0]) / 1e9 for before, after in pairwise(changes)))
    joules = sum(_at(changes, each.end_ns) - _at(changes, each.begin_ns) for each in windows)
    seconds = sum((each.end_ns - each.begin_ns) / 1e9 for each in windows)
    if joules <= 0 or seconds <= 0:
        return None
    stepped_j2 = len(windows) * (joules / seconds * step_s) ** 2 / 6
    between_j2 = sum(_uneven(changes, at_ns) ** 2 / 12 for each in windows for at_ns in (each.begin_ns, each.end_ns))
    return Spent(joules, seconds, sum(each.steps for each in windows), math.sqrt(stepped_j2 + between_j2))


def _at(changes: Sequence[tuple[int, float]], at_ns: int) -> float:
    """The counter at a moment, on the line through the steps around it; past the last one, on that line further."""
    after = next((number for number, (when, _) in enumerate(changes) if when >= at_ns), len(changes) - 1)
    (first_ns, first), (second_ns, second) = changes[max(0, after - 1)], changes[max(1, after)]
    return first + (second - first) * (at_ns - first_ns) / (second_ns - first_ns)


def _uneven(changes: Sequence[tuple[int, float]], at_ns: int) -> float:
    """Joules by which power may have been uneven between the readings around a moment; 0 where too few are around."""
    after = next((number for number, (when, _) in enumerate(changes) if when >= at_ns), 0)
    earlier, later = changes[:after][::-1], changes[after:]
    if len(earlier) < 2 or len(later) < 2:
        return 0.0
    return abs(_watts(earlier) - _watts(later)) * (later[0][0] - earlier[0][0]) / 1e9


def _watts(points: Sequence[tuple[int, float]]) -> float:
    """Power from the first of these points on, over a time in which single steps count little."""
    (first_ns, first), *others = points
    far_ns, far = next((each for each in others if abs(each[0] - first_ns) >= SLOPE_S * 1e9), others[-1])
    return (far - first) / (far_ns - first_ns) * 1e9


def per_token(found: Iterable[Spent | None], idle_w: float | None) -> PerToken | None:
    """Of all loads of an arm; None if one of them has no figure, or together they are too short."""
    loads = list(found)
    known = [each for each in loads if each is not None]
    seconds, steps = sum(each.seconds for each in known), sum(each.steps for each in known)
    if not known or len(known) < len(loads) or seconds < WINDOW_S or not steps:
        return None
    joules = sum(each.joules for each in known)
    return PerToken(
        joules=joules / steps,
        above_idle_j=None if idle_w is None else (joules - idle_w * seconds) / steps,
        error_j=math.sqrt(sum(each.error_j**2 for each in known)) / steps,
        watts=joules / seconds,
        seconds=seconds,
    )


def idle_drift(watts: Sequence[float]) -> float | None:
    """How far apart looks at rest are, as a share of the least; None unless there are two."""
    return max(watts) / min(watts) - 1 if len(watts) > 1 and min(watts) > 0 else None


# ── counters ────────────────────────────────────────────────────────────────────────────────


class Packages:
    """Energy of all CPU packages by the kernel's powercap counters, which wrap; mostly only root may read them."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._zones = [
            zone
            for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
            if zone.name.count(":") == 1 and (_text(zone / "name") or "").startswith("package")
        ]
        self._last: dict[Path, int] = {}
        self._sum_uj = 0

    def joules(self) -> float | None:
        """Since the first call; None unless every package tells."""
        for zone in self._zones:
            now, span = _text(zone / "energy_uj"), _text(zone / "max_energy_range_uj")
            if not now or not now.isdigit():
                return None
            last = self._last.get(zone, int(now))
            wrapped = int(span) if int(now) < last and span and span.isdigit() else 0
            self._sum_uj += int(now) - last + wrapped
            self._last[zone] = int(now)
        return self._sum_uj / 1e6 if self._zones else None


class Meter:
    """Readings of all counters over time, of one load. Several threads may take them."""

    def __init__(
        self,
        gpu: Callable[[], float | None] = gpus.joules,
        cpu: Callable[[], float | None] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._gpu, self._cpu, self._clock = gpu, cpu or Packages().joules, clock
        self._points: list[tuple[int, float | None, float | None]] = []
        self._alone = threading.Lock()  # else a counter that is read first could be stamped last, and seem to fall

    def read(self) -> bool:
        """Take one reading; whether any counter told anything."""
        with self._alone:
            gpu, cpu = self._gpu(), self._cpu()
            self._points.append((self._clock(), gpu, cpu))
        return gpu is not None or cpu is not None

    @property
    def now_ns(self) -> int:
        """When the last reading was taken."""
        return self._points[-1][0]

    def gpu_spent(self, windows: Sequence[Window]) -> Spent | None:
        return spent([(at_ns, gpu) for at_ns, gpu, _ in self._points], windows)

    def cpu_spent(self, windows: Sequence[Window]) -> Spent | None:
        return spent([(at_ns, cpu) for at_ns, _, cpu in self._points], windows)


def measure_idle(
    seconds: float = IDLE_S, *, meter: Meter | None = None, sleep: Callable[[float], None] = time.sleep
) -> Idle | None:
    """What is drawn over the next seconds; None at once where no counter tells."""
    meter = meter or Meter()
    if not meter.read():
        return None
    started, began_ns = time.time(), meter.now_ns
    for _ in range(round(seconds * 10)):
        sleep(0.1)
        meter.read()
    window = Window(began_ns, meter.now_ns, 0)
    gpu, cpu = meter.gpu_spent([window]), meter.cpu_spent([window])
    if gpu is None and cpu is None:
        return None
    known = gpu or cpu
    return Idle(
        started_unix_s=started,
        seconds=known.seconds if known else seconds,
        gpu_w=gpu.watts if gpu else None,
        cpu_w=cpu.watts if cpu else None,
    )


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii").strip()
    return None
