"""Joules a token, by counters that the hardware itself keeps, and never by an estimate.

A counter steps about ten times a second, so the two ends of a window are uncertain by a step each,
and a short window says nothing: the answers of a load are added up, and less than ten seconds of
them give no figure. The sensor behind a counter may be several per cent off; that is the same for
all arms of a machine and cancels in their ratios.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from harness import gpus

WINDOW_S = 10.0  # the shortest that tells anything
IDLE_S = 10.0
STEP_S = 0.1  # of counters seen, at most; a slower one shows by itself
STOPPED_S = 3.0  # no counter known stands still for so long
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
    """What windows cost together. `error_j` is one standard deviation, without that of the sensor."""

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

    A counter shows what it held at its last step, which is up to Δ seconds old, every age being equally likely. So a
    look that comes Δ after the begin of a window shows nothing of the prefill before it, and of a window those s
    seconds are measured that lie between the first such look and the look nearest to its end. Nobody looks when the
    first token comes; the rest of a window is held to draw the same power P. Of T seconds in n windows:

        joules = P T,    P = Σ joules measured / Σ s
        error  = T / Σ s · √max(n (P Δ)² / 6, n / (n - 1) · Σ (joules measured - P s)²)

    At each end a step is worth a standard deviation of P Δ / √12, so P Δ / √6 for both. The second term is how far
    apart the windows were found, which also tells of a slow counter that was never caught standing still.

    To share out evenly what grew between the looks around a first token would spare the T / Σ s. But it books a part
    of the prefill as decoding, the same way in every answer, and no number of loads averages that out.
    """
    if not windows or not points or any(joules is None for _, joules in points):
        return None
    begin_ns, end_ns = min(each.begin_ns for each in windows), max(each.end_ns for each in windows)
    looks = sorted((at_ns, joules) for at_ns, joules in points if joules is not None)
    if (
        looks[0][0] > begin_ns
        or looks[-1][0] < end_ns
        or any(after[1] < before[1] for before, after in pairwise(looks))
    ):
        return None
    step_s = max(STEP_S, _standstill_s(looks, begin_ns, end_ns))
    if step_s > STOPPED_S:
        return None
    measured = [part for each in windows if (part := _measured(looks, each, step_s)) is not None]
    joules, inner_s = sum(part[0] for part in measured), sum(part[1] for part in measured)
    if joules <= 0 or (step_s > STEP_S and 2 * len(measured) < len(windows)):  # Δ of a slow one is known from below
        return None
    watts, seconds = joules / inner_s, sum((each.end_ns - each.begin_ns) / 1e9 for each in windows)
    variance_j2 = max(len(measured) * (watts * step_s) ** 2 / 6, _scatter_j2(measured, watts))
    error_j = seconds / inner_s * math.sqrt(variance_j2)
    return Spent(watts * seconds, seconds, sum(each.steps for each in windows), error_j)


def _scatter_j2(measured: Sequence[tuple[float, float]], watts: float) -> float:
    """Variance of the sum of these joules, by how they scatter about one power; 0 of fewer than two."""
    apart_j2 = sum((joules - watts * inner_s) ** 2 for joules, inner_s in measured)
    return apart_j2 * len(measured) / (len(measured) - 1) if len(measured) > 1 else 0.0


def _standstill_s(looks: Sequence[tuple[int, float]], begin_ns: int, end_ns: int) -> float:
    """The longest time between two looks that show the same, of those that reach into this time.

    For that long the counter made no step; a step takes that at least. The time from one change that is seen to the
    next would tell how seldom somebody looks.
    """
    seen: dict[float, list[int]] = {}
    for at_ns, joules in looks:
        seen.setdefault(joules, []).append(at_ns)
    return max(
        ((each[-1] - each[0]) / 1e9 for each in seen.values() if each[0] < end_ns and each[-1] > begin_ns), default=0.0
    )


def _measured(looks: Sequence[tuple[int, float]], window: Window, step_s: float) -> tuple[float, float] | None:
    """Joules and seconds between two looks that show nothing but this window; None if they are not a step apart.

    The second may be half a step late: what it shows is that old in the mean.
    """
    step_ns = step_s * 1e9
    inside = [each for each in looks if window.begin_ns + step_ns <= each[0] <= window.end_ns + step_ns / 2]
    if not inside:
        return None
    (first_ns, first), (last_ns, last) = inside[0], min(inside, key=lambda each: abs(each[0] - window.end_ns))
    return (last - first, (last_ns - first_ns) / 1e9) if last_ns - first_ns >= step_ns else None


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
