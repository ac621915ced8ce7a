"""Who else uses this machine, and what a load costs it: watched from beside, never from inside.

Foreign CPU is what is busy, less our own process tree and kernel threads, plus what the
hypervisor took (steal), in cores. A reading is a set of counters at one moment, stamped by the
clock that stamps tokens; everything said about a window is computed from readings by pure
functions. A thread of its own takes them, and looks so seldom that it costs at most 1 % of a core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from harness import gpus, process
from harness.contract import Say
from harness.energy import Meter
from harness.gpu import Glance
from harness.preflight import HELD_BYTES

FOREIGN_CORES = 0.3  # above it, a load is disturbed
FOREIGN_GPU = 0.2  # share of time; a desktop alone stays below
WINDOW_S = 1.0
SHORTEST_S = 0.5  # between two readings
METER_S = 0.1  # between two looks at energy counters, which step that often
CPU_SHARE = 0.004  # of one core, at most, for readings
METER_SHARE = 0.004  # for energy counters: 4 ms a look on a large card
WORKS = 0.05  # share of time from which on a card is working, and its clock counts; with experts on the host it waits
HAS_PROC = sys.platform.startswith("linux")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Counters at one moment. Seconds of CPU time only ever grow, unless a process of ours is lost."""

    at_s: float
    busy_s: float | None = None  # of all CPUs, without interrupts and steal
    steal_s: float | None = None
    own_s: float | None = None
    kernel_s: float | None = None  # of kernel threads
    rss_bytes: int | None = None  # of the engines' processes; None too while there is none
    major_faults: int | None = None  # of those that live
    gpus: tuple[Glance, ...] = ()
    engine_gpu_bytes: int | None = None  # of GPU memory, by the driver's list of processes
    swap_used_bytes: int | None = None
    memory_stall_s: float | None = None  # that some task waited for memory

    @property
    def gpu_used_bytes(self) -> int | None:
        """Of all cards, over all processes."""
        memory = gpus.memory(self.gpus)
        return None if memory is None else memory.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """One load as seen from beside. What this system does not tell is None."""

    seconds: float
    peak_rss_bytes: int | None = None
    vram_bytes: int | None = None  # peak over the baseline, all GPUs
    foreign_cores: float | None = None
    major_faults: int | None = None
    swap_growth_bytes: int | None = None
    memory_stall_s: float | None = None
    throttles: tuple[str, ...] | None = None  # every reason seen
    engine_vram_bytes: int | None = None  # the most that the driver's list of processes says of our engines
    gpu_free_bytes: int | None = None  # the least of any card
    gpu_busy: float | None = None  # mean share of time that the busiest card worked
    gpu_power_w: float | None = None  # mean of all cards together
    gpu_celsius: float | None = None  # the most
    gpu_clock_mhz: float | None = None  # median of the cards that work, while they do
    gpu_memory_clock_mhz: float | None = None
    link_generation: int | None = None  # of PCIe, the most seen: an idle link rests
    lanes: int | None = None
    sent_bytes: int | None = None  # by the cards over PCIe
    received_bytes: int | None = None
    watch_share: float | None = None  # CPU time of the watching thread, in cores

    @property
    def disturbed(self) -> bool | None:
        """Whether others used more than the limit; None if that is not known."""
        return None if self.foreign_cores is None else self.foreign_cores > FOREIGN_CORES

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Quiet:
    """How the machine was found before a load. `quiet` is None if that is not known."""

    waited_s: float
    foreign_cores: float | None
    quiet: bool | None
    foreign_gpu: float | None = None  # share of time that a GPU worked
    gpu_used_bytes: int | None = None  # held before we load anything


@dataclass(frozen=True, slots=True)
class Settled:
    """What a stopped engine left behind: GPU memory over the baseline, and processes with what they hold."""

    waited_s: float
    settled: bool
    over_bytes: int | None
    left: tuple[int, ...] = ()
    rss_bytes: int | None = None  # of those left; None: none is, or they cannot be asked


# ── from readings to facts: pure ────────────────────────────────────────────────────────────


def foreign_between(before: Reading, after: Reading) -> float | None:
    """Foreign CPU in cores between two readings; None if unknown.

    Also None where our own time fell: a process of ours ended unseen and took its share along.
    """
    window_s = after.at_s - before.at_s
    if window_s <= 0 or None in (before.busy_s, after.busy_s, before.own_s, after.own_s):
        return None
    own_s = _growth(before.own_s, after.own_s)
    if own_s is None or own_s < 0:
        return None
    busy_s = _growth(before.busy_s, after.busy_s) or 0.0
    kernel_s = max(0.0, _growth(before.kernel_s, after.kernel_s) or 0.0)
    steal_s = max(0.0, _growth(before.steal_s, after.steal_s) or 0.0)
    return (busy_s - own_s - kernel_s + steal_s) / window_s


def foreign_mean(readings: Sequence[Reading]) -> float | None:
    """Mean foreign cores over all windows that are known, at least 0."""
    known = [
        (after.at_s - before.at_s, cores)
        for before, after in pairwise(readings)
        if (cores := foreign_between(before, after)) is not None
    ]
    seconds = sum(window_s for window_s, _ in known)
    return max(0.0, sum(window_s * cores for window_s, cores in known) / seconds) if seconds else None


def summarise(readings: Sequence[Reading], baseline_bytes: int | None = None) -> Telemetry:
    """One load from its readings, in time order. `baseline_bytes` is GPU memory before it (first reading).

    A card that was lost on the way leaves unknown how much GPU memory was taken.
    """
    first = readings[0]
    base = first.gpu_used_bytes if baseline_bytes is None else baseline_bytes
    peak_gpu = None if readings[-1].gpu_used_bytes is None else _most(each.gpu_used_bytes for each in readings)
    swap = [r.swap_used_bytes for r in readings if r.swap_used_bytes is not None]
    stall = [r.memory_stall_s for r in readings if r.memory_stall_s is not None]
    reasons = [found for each in readings if (found := gpus.throttles(each.gpus)) is not None]
    glances = [glance for each in readings for glance in each.gpus]
    working = [each for each in glances if each.busy is not None and each.busy >= WORKS]
    free = [each.free_bytes for each in glances if each.free_bytes is not None]
    return Telemetry(
        seconds=readings[-1].at_s - first.at_s,
        peak_rss_bytes=_most(each.rss_bytes for each in readings),
        vram_bytes=None if base is None or peak_gpu is None else max(0, peak_gpu - base),
        foreign_cores=foreign_mean(readings),
        major_faults=_climb([r.major_faults for r in readings]),
        swap_growth_bytes=max(swap) - swap[0] if swap else None,
        memory_stall_s=stall[-1] - stall[0] if stall else None,
        throttles=tuple(sorted(frozenset[str]().union(*reasons))) if reasons else None,
        engine_vram_bytes=_most(each.engine_gpu_bytes for each in readings),
        gpu_free_bytes=min(free, default=None),
        gpu_busy=_mean(gpus.busy(each.gpus) for each in readings),
        gpu_power_w=_mean(_sum([glance.power_w for glance in each.gpus]) for each in readings),
        gpu_celsius=max((each.celsius for each in glances if each.celsius is not None), default=None),
        gpu_clock_mhz=_median(each.clock_mhz for each in working),
        gpu_memory_clock_mhz=_median(each.memory_clock_mhz for each in working),
        link_generation=_most(each.link_generation for each in glances),
        lanes=_most(each.lanes for each in glances),
        sent_bytes=_grown([_sum([glance.sent_bytes for glance in each.gpus]) for each in readings]),
        received_bytes=_grown([_sum([glance.received_bytes for glance in each.gpus]) for each in readings]),
    )


def _most(values: Iterable[int | None]) -> int | None:
    return max((each for each in values if each is not None), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) / len(known) if known else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return statistics.median(known) if known else None


def _sum(parts: Sequence[float | None]) -> float | None:
    """None unless every card tells."""
    known = [each for each in parts if each is not None]
    return sum(known) if known and len(known) == len(parts) else None


def _grown(counters: Sequence[float | None]) -> int | None:
    """Of a counter that only grows; None if it was not told at both ends, or began anew between."""
    if not counters or counters[0] is None or counters[-1] is None or counters[-1] < counters[0]:
        return None
    return int(counters[-1] - counters[0])


def _growth(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _climb(counts: Sequence[int | None]) -> int | None:
    """Sum of all increases: a fall is the end of a process, not a negative count; before its start there was none."""
    known = [count for count in counts if count is not None]
    if not known:
        return None
    return sum(max(0, b - a) for a, b in pairwise(known if counts[0] is not None else [0, *known]))


# ── readings ────────────────────────────────────────────────────────────────────────────────


class _Stat(NamedTuple):
    """Of `/proc/PID/stat`, what we need. `cpu_ticks` holds its ended children too."""

    parent: int
    started: int
    major_faults: int
    cpu_ticks: int
    rss_pages: int


class Reader:
    """Takes readings. Remembers which processes carry our mark, for that never changes."""

    def __init__(self, pids: Callable[[], Iterable[int]] | None = None, proc: Path = Path("/proc")) -> None:
        """`pids` names engine processes that do not carry our mark (an attached server)."""
        self._pids = pids or tuple
        self._proc = proc
        self._marked: dict[tuple[int, int], bool] = {}
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def read(self) -> Reading:
        times = psutil.cpu_times()
        busy_s = sum(getattr(times, name) for name in ("user", "nice", "system"))
        own_s, kernel_s, rss_bytes, faults, engines = self._processes()
        return Reading(
            at_s=time.perf_counter(),
            busy_s=busy_s or None,  # some sandboxes show none
            steal_s=getattr(times, "steal", None),
            own_s=own_s,
            kernel_s=kernel_s,
            rss_bytes=rss_bytes,
            major_faults=faults,
            gpus=gpus.glances(),
            engine_gpu_bytes=_held_by(engines),
            swap_used_bytes=_swap_used(),
            memory_stall_s=self._memory_stall(),
        )

    def engine_pids(self) -> tuple[int, ...]:
        """Living processes that carry our mark."""
        if not HAS_PROC:
            return tuple(child.pid for child in _children() if _carries_mark(child.pid))
        stats = dict(self._stats())
        return tuple(pid for pid, stat in stats.items() if self._is_marked(pid, stat))

    def _processes(self) -> tuple[float | None, float | None, int | None, int | None, set[int]]:
        """Own seconds, kernel-thread seconds, engines' resident bytes and major faults, and their pids."""
        if not HAS_PROC:
            return self._processes_by_psutil()
        stats = dict(self._stats())
        marked = {pid for pid, stat in stats.items() if self._is_marked(pid, stat)}
        engines = (marked | set(self._pids())) & stats.keys()
        own = _tree(stats, {os.getpid()} | engines)
        return (
            sum(stats[pid].cpu_ticks for pid in own) * self._tick_s,
            sum(stat.cpu_ticks for pid, stat in stats.items() if 2 in (pid, stat.parent)) * self._tick_s,
            sum(stats[pid].rss_pages for pid in engines) * self._page_bytes if engines else None,
            sum(stats[pid].major_faults for pid in engines) if engines else None,
            engines,
        )

    def _processes_by_psutil(self) -> tuple[float | None, None, int | None, None, set[int]]:
        own_s, rss_bytes, engines = 0.0, 0, set[int]()
        for child in (psutil.Process(), *_children()):
            with contextlib.suppress(psutil.Error):
                own_s += sum(child.cpu_times()[:4])
                if _carries_mark(child.pid):
                    rss_bytes += int(child.memory_info().rss)
                    engines.add(child.pid)
        return own_s, None, rss_bytes if engines else None, None, engines

    def _stats(self) -> Iterator[tuple[int, _Stat]]:
        for entry in os.scandir(self._proc):
            if entry.name.isdigit() and (stat := _read_stat(self._proc / entry.name / "stat")):
                yield int(entry.name), stat

    def _is_marked(self, pid: int, stat: _Stat) -> bool:
        key = (pid, stat.started)
        if key not in self._marked:
            self._marked[key] = stat.parent != 2 and _carries_mark(pid, self._proc)
        return self._marked[key]

    def _memory_stall(self) -> float | None:
        with contextlib.suppress(OSError, ValueError):
            some = (self._proc / "pressure/memory").read_text(encoding="ascii").splitlines()[0]
            return int(some.rpartition("total=")[2]) / 1e6
        return None


def _read_stat(path: Path) -> _Stat | None:
    """None if the process ended while we looked."""
    try:
        text = path.read_bytes()
        numbers = [int(word) for word in text[text.rindex(b")") + 4 :].split()]  # a name may hold blanks and brackets
        return _Stat(
            parent=numbers[0],
            started=numbers[18],
            major_faults=numbers[8],
            cpu_ticks=sum(numbers[10:14]),
            rss_pages=numbers[20],
        )
    except (OSError, ValueError, IndexError):
        return None


def _tree(stats: dict[int, _Stat], roots: set[int]) -> set[int]:
    """These processes and all below them."""
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found: set[int] = set()
    waiting = [pid for pid in roots if pid in stats]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def _children() -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process().children(recursive=True)
    return []


def _carries_mark(pid: int, proc: Path | None = None) -> bool:
    """Whether it is an engine of ours: a child that carries our mark and does not stand aside."""
    if proc is not None:
        with contextlib.suppress(OSError):
            told = set((proc / str(pid) / "environ").read_bytes().split(b"\0"))
            return f"{process.OWNER}={process.owner()}".encode() in told and f"{process.ASIDE}=1".encode() not in told
        return False
    with contextlib.suppress(psutil.Error, OSError):
        environment = psutil.Process(pid).environ()
        return environment.get(process.OWNER) == process.owner() and process.ASIDE not in environment
    return False


def _held_by(pids: set[int]) -> int | None:
    """GPU memory of these processes by the driver's lists; None where it does not name them, as in a container."""
    if not pids:
        return None
    cards = gpus.holders()
    if None in cards:  # a part of it would be taken for all
        return None
    found = [each.used_bytes for card in cards for each in card or () if each.pid in pids]
    known = [size for size in found if size is not None]
    return sum(known) if known and len(known) == len(found) else None


def _swap_used() -> int | None:
    with warnings.catch_warnings(), contextlib.suppress(OSError, RuntimeError):
        warnings.simplefilter("ignore")  # psutil warns where a kernel hides its swap counters
        return int(psutil.swap_memory().used)
    return None


# ── waiting and watching ────────────────────────────────────────────────────────────────────


def foreign_cores(window_s: float = WINDOW_S, pids: Iterable[int] = ()) -> float | None:
    """Foreign CPU over the next `window_s` seconds; `pids` are ours besides our process tree."""
    reader = Reader(lambda: pids)
    before = reader.read()
    time.sleep(window_s)
    return foreign_between(before, reader.read())


def wait_until_quiet(
    limit: float = FOREIGN_CORES,
    wait_s: float = 60.0,
    *,
    gpu_limit: float = FOREIGN_GPU,
    say: Say | None = None,
    read: Callable[[], Reading] | None = None,
    gpu_busy: Callable[[], float | None] = gpus.busy,
    sleep: Callable[[float], None] = time.sleep,
) -> Quiet:
    """Wait until others use at most `limit` cores and `gpu_limit` of a GPU, `wait_s` at most; then go on.

    Time is taken from the readings, so a caller owns the clock through `read` and `sleep`.
    """
    read = read or Reader().read
    begin = before = read()
    said = False
    while True:
        sleep(WINDOW_S)
        after, gpu = read(), gpu_busy()
        cores = foreign_between(before, after)
        waited_s = after.at_s - begin.at_s
        quiet = None if cores is None else cores <= limit
        calm = quiet is not False and (gpu is None or gpu <= gpu_limit)
        if calm or waited_s >= wait_s:
            shown = None if cores is None else max(0.0, cores)
            return Quiet(waited_s, shown, quiet if calm else False, gpu, after.gpu_used_bytes)
        if say and not said:
            what = f"{cores:.1f} cores" if quiet is False else f"a GPU {gpu:.0%} of the time"
            say(f"other programs use {what}; waiting up to {wait_s:.0f} s for a quiet machine (--no-wait skips this)")
            said = True
        before = after


def memory_settled(
    baseline_bytes: int | None,
    wait_s: float = 30.0,
    *,
    slack_bytes: int = HELD_BYTES,
    look: Callable[[], tuple[int | None, tuple[int, ...]]] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Settled:
    """Wait until GPU memory is back at its baseline and no engine process is left, `wait_s` at most.

    Host memory is back with the last process, which takes its own along. `look` gives the used
    GPU bytes and the processes left.
    """
    look = look or _look
    begin = clock()
    while True:
        used, left = look()
        over = None if used is None or baseline_bytes is None else used - baseline_bytes
        settled = not left and (over is None or over <= slack_bytes)
        waited_s = clock() - begin
        if settled or waited_s >= wait_s:
            return Settled(waited_s, settled, over, left, _resident(left) if left else None)
        sleep(0.1)


def _look() -> tuple[int | None, tuple[int, ...]]:
    memory = gpus.memory()
    return None if memory is None else memory.used_bytes, Reader().engine_pids()


def _resident(pids: Iterable[int]) -> int | None:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found.append(int(psutil.Process(pid).memory_info().rss))
    return sum(found) if found else None


class Watcher:
    """Takes readings in a thread of its own until it is stopped. `meter` holds those of energy counters."""

    def __init__(self, read: Callable[[], Reading], baseline_bytes: int | None, meter: Meter) -> None:
        self._read, self.meter = read, meter
        self._readings = [read()]
        self._metered = meter.read()
        first = self._readings[0].gpu_used_bytes
        self.baseline_bytes = first if baseline_bytes is None else baseline_bytes  # GPU memory before the load
        self._cpu_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def summary(self) -> Telemetry:
        """What was seen so far."""
        found = summarise(tuple(self._readings), self.baseline_bytes)
        return dataclasses.replace(found, watch_share=self._cpu_s / found.seconds if found.seconds > 0 else None)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.meter.read()
        self._readings.append(self._read())

    def _run(self) -> None:
        """The dearer a look, the more seldom: with many processes, or a slow driver, its cost sets how often."""
        begin_s = time.monotonic()
        look_s, meter_s = begin_s + SHORTEST_S, begin_s + METER_S  # when each is due
        while not self._stop.wait(max(0.0, min(look_s, meter_s) - time.monotonic())):
            if self._metered and time.monotonic() >= meter_s:
                meter_s = time.monotonic() + max(METER_S, self._cost(self.meter.read) / METER_SHARE)
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + max(SHORTEST_S, self._cost(self._look) / CPU_SHARE)
            if not self._metered:
                meter_s = look_s
            self._cpu_s = time.thread_time()

    def _look(self) -> None:
        self._readings.append(self._read())

    def _cost(self, look: Callable[[], object]) -> float:
        """Seconds of CPU time that it took."""
        before_s = time.thread_time()
        look()
        return time.thread_time() - before_s


@contextlib.contextmanager
def watch(
    pids: Callable[[], Iterable[int]] | None = None,
    *,
    baseline_bytes: int | None = None,
    read: Callable[[], Reading] | None = None,
    meter: Meter | None = None,
) -> Iterator[Watcher]:
    """Watch the machine while the block runs; `summary()` tells what was seen, also afterwards.

    Engines that we started are found by their mark; `pids` adds others. `baseline_bytes` is the GPU
    memory in use before the load, if it is known better than by a look now.
    """
    watcher = Watcher(read or Reader(pids).read, baseline_bytes, meter or Meter())
    try:
        yield watcher
    finally:
        watcher.stop()
