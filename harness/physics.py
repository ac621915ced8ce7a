"""How fast decoding can be at all: bytes that a token must read, over the bandwidth of where they lie.

A single stream reads every active weight once a token, and host and device take turns, so the sum
of both times is a bound. The band between ceiling and floor is wide; it catches gross errors only:
a counter that lies, a placement that is not what it seems, memory that spilled. Over a sweep the
same time is a line in the bytes that move, and a point far off that line stands out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from harness import telemetry
from harness.gpu import Gpu
from harness.machine import Machine
from harness.process import cache_dir

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.float32]]
    Array = np.ndarray[Any, np.dtype[np.float64]]

FORMAT = 1  # of the cached probe
CACHES = 4  # active bytes below so many caches may be served from them, and bound nothing
DEVICE_CACHE_BYTES = 128 << 20  # drivers do not tell theirs; no GPU so far has more
SMALLEST_BYTES, LARGEST_BYTES = 256 << 20, 1 << 30  # of all probe arrays together
ASIDE = 0.01  # of all bytes: a row of the embedding, and other crumbs
LEAST_CACHES = 2  # that a probe array must exceed, so that a cache serves little of it
PROBE_S = 4.0
ROUNDS = 5
PEAK = 1.1  # numpy may miss the best by so much
ABOVE = 1.10  # of the ceiling, before a speed is called impossible
HOST_LEAST, DEVICE_LEAST = 0.2, 0.25  # of typical bandwidth, in the slowest honest reports
CROSSING_S = 100e-6  # once between host and device, at worst
LATENCY_S = 5e-3  # of a token beside all bytes: starting kernels, sampling; 3.6 ms were seen on a fast GPU
SLOWER = 1.03  # with more on the device, before the sign is called wrong
OFF_CURVE = 0.15  # of the fitted speed, before a point is called off the curve
FEWEST_POINTS, FEWEST_FITTED = 4, 3  # distinct points of a sweep, and those that a line of two parameters keeps

# Published bytes a second, of the fastest and the slowest part of that name, where the driver gives neither bus width
# nor clock: unified memory (NVIDIA's data sheets of DGX Spark, Jetson Thor, and Jetson AGX Orin to Orin Nano).
PUBLISHED = {r"\bGB10\b": (273e9, 273e9), r"\bThor\b": (273e9, 273e9), r"\bOrin\b": (204.8e9, 68e9)}


class Flag(StrEnum):
    IMPOSSIBLE = "IMPOSSIBLE"  # above the ceiling
    TOO_SLOW = "TOO_SLOW"  # below the floor
    WRONG_SIGN = "WRONG_SIGN"  # slower with more on the device
    OFF_CURVE = "OFF_CURVE"  # far off the line of its sweep


class Traffic(Protocol):
    """What one decoded token moves."""

    @property
    def bytes_per_token_host(self) -> int: ...
    @property
    def bytes_per_token_device(self) -> int: ...
    @property
    def crossings(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProbe:
    """Host memory bandwidth in bytes a second, best of a few rounds for each kernel."""

    kernels: dict[str, float]
    array_bytes: int
    threads: int  # of the best read
    seconds: float
    foreign_cores: float | None = None  # while it ran

    @property
    def peak(self) -> float:
        """More than any program can have."""
        return PEAK * max(self.kernels.values(), default=0.0)

    @property
    def typical(self) -> float:
        """What reading alone gets."""
        return statistics.median([self.kernels[name] for name in READS if name in self.kernels] or [0.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bytes a second; None is unknown. With several GPUs, the fastest and the slowest."""

    host_peak: float | None = None
    host_typical: float | None = None
    device_peak: float | None = None
    device_least: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Between which speeds decoding must lie. `reason` says why a bound is missing, or which bytes it leaves out."""

    ceiling_tps: float | None = None
    floor_tps: float | None = None
    reason: str | None = None

    def flag(self, tps: float) -> Flag | None:
        """Whether this speed lies outside."""
        if self.ceiling_tps is not None and tps > ABOVE * self.ceiling_tps:
            return Flag.IMPOSSIBLE
        if self.floor_tps is not None and tps < self.floor_tps:
            return Flag.TOO_SLOW
        return None

    def share(self, tps: float) -> float | None:
        """Part of the ceiling that was reached; None without one, or where it is one of some bytes only."""
        return None if self.ceiling_tps is None or self.reason is not None else tps / self.ceiling_tps


@dataclass(frozen=True, slots=True)
class Point:
    """One arm of a sweep. `on_device` orders it: bytes there, or a rank; `traffic` is what the fit needs."""

    label: str
    on_device: int
    tps: float
    spilled: bool = False
    traffic: Traffic | None = None
    flag: Flag | None = None  # of its own band


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A point beside the line. `residual`: measured speed over the fitted one, less 1."""

    label: str
    fitted_tps: float | None  # None: the line leaves no time there
    residual: float
    flag: Flag | None = None  # OFF_CURVE
    left_out: bool = False  # spilled or impossible: not judged by the line


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Decode time of a token over a sweep: `rest_s` + bytes read on `side` × `byte_s`.

    A sweep moves one number, so bytes of host and device lie on one line and only one slope can be
    told: with `host`, what a byte costs more there than on the device it comes from.
    """

    side: Literal["host", "device"]
    rest_s: float  # nothing on that side
    byte_s: float
    points: tuple[Fitted, ...]  # all that were given, in their order


# ── bounds: pure ────────────────────────────────────────────────────────────────────────────


def band(
    traffic: Traffic | None,
    bandwidth: Bandwidth,
    *,
    host_cache_bytes: int | None = None,
    device_cache_bytes: int = DEVICE_CACHE_BYTES,
    stand_in: bool = False,
) -> Band:
    """Ceiling and floor of one placement, in tokens a second.

    A side whose active bytes may come from a cache bounds nothing from above, but still counts below.
    """
    if stand_in:
        return Band(reason="stand-in device: speed says nothing about a GPU")
    if traffic is None:
        return Band(reason="the engine chose the placement")
    host, device = traffic.bytes_per_token_host, traffic.bytes_per_token_device
    if host_cache_bytes is None and device == 0:
        return Band(reason="the size of the CPU's caches is unknown")
    least_s, uncounted = 0.0, list[str]()
    for side, size, cache_bytes, peak in (
        ("host", host, host_cache_bytes, bandwidth.host_peak),
        ("device", device, device_cache_bytes, bandwidth.device_peak),
    ):
        if cache_bytes is not None and size >= CACHES * cache_bytes:
            least_s += size / peak if peak else 0.0
            uncounted += [] if peak else [f"memory bandwidth of the {side} is unknown"]
        elif size > ASIDE * (host + device):
            uncounted.append(f"what a token reads on the {side} may come from a cache")
    if not least_s:
        known = bandwidth.host_peak if host >= device else bandwidth.device_peak
        return Band(reason="active weights fit a cache" if known else "memory bandwidth is unknown")
    reason = f"{uncounted[0]}, so those bytes do not count" if uncounted else None
    return Band(ceiling_tps=1 / least_s, floor_tps=_floor(traffic, bandwidth), reason=reason)


def _floor(traffic: Traffic, bandwidth: Bandwidth) -> float | None:
    most_s = LATENCY_S + traffic.crossings * CROSSING_S
    for size, typical, least in (
        (traffic.bytes_per_token_host, bandwidth.host_typical, HOST_LEAST),
        (traffic.bytes_per_token_device, bandwidth.device_least, DEVICE_LEAST),
    ):
        if typical:
            most_s += size / (least * typical)
        elif size > ASIDE * (traffic.bytes_per_token_host + traffic.bytes_per_token_device):
            return None
    return 1 / most_s


def wrong_signs(points: Sequence[Point]) -> tuple[tuple[Point, Point], ...]:
    """Neighbours of a sweep where more on the device is clearly slower, and nothing spilled: (slower, faster).

    Points with the same there are one placement: all of them must be slower than all of the other's.
    """
    placements: dict[int, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.on_device):
        placements.setdefault(point.on_device, []).append(point)
    pairs = [(max(more, key=_speed), min(less, key=_speed)) for less, more in pairwise(placements.values())]
    return tuple((more, less) for more, less in pairs if less.tps > SLOWER * more.tps and not more.spilled)


def _speed(point: Point) -> float:
    return point.tps


# ── a sweep: pure ───────────────────────────────────────────────────────────────────────────


def fit_sweep(points: Sequence[Point]) -> Fit | None:
    """The line of decode time through a sweep, by least squares of relative errors, neither part negative.

    It begins with the points that agree with the line most agree with, and drops the worst of them
    while one is off by more than OFF_CURVE. None below four distinct points, where no line has more
    than half of them, or where nothing moves. Spilled and impossible points take no part.
    """
    import numpy as np

    known = [(point, point.traffic) for point in points if point.traffic is not None]
    usable = [not point.spilled and point.flag is not Flag.IMPOSSIBLE for point, _ in known]
    both = np.array([(each.bytes_per_token_host, each.bytes_per_token_device) for _, each in known], float)
    if not any(usable):
        return None
    ranges = np.ptp(both[usable], axis=0)
    side: Literal["host", "device"] = "host" if 2 * ranges[0] >= ranges[1] else "device"
    moved = both[:, 0 if side == "host" else 1]
    if len(set(moved[usable])) < FEWEST_POINTS:
        return None
    seconds = np.array([1 / point.tps for point, _ in known])
    candidates = [index for index, fits in enumerate(usable) if fits]
    kept: list[int] = []
    least = np.inf
    for rest_s, byte_s in _lines(moved[candidates], seconds[candidates]):
        off = (rest_s + byte_s * moved) / seconds - 1
        agreeing = [index for index in candidates if abs(off[index]) <= OFF_CURVE]
        error = float(np.square(off[agreeing]).sum())
        if (-len(agreeing), error) < (-len(kept), least):
            kept, least = agreeing, error
    while len(kept) >= FEWEST_FITTED:
        rest_s, byte_s = _nearest(moved[kept], seconds[kept])
        off = (rest_s + byte_s * moved) / seconds - 1
        worst = max(kept, key=lambda index: abs(off[index]))
        if abs(off[worst]) <= OFF_CURVE:
            break
        kept.remove(worst)
    if len(kept) < FEWEST_FITTED or 2 * len(kept) <= len(candidates):
        return None
    return Fit(
        side=side,
        rest_s=rest_s,
        byte_s=byte_s,
        points=tuple(
            Fitted(
                label=point.label,
                fitted_tps=1 / time_s if (time_s := rest_s + byte_s * float(moved[index])) else None,
                residual=float(off[index]),
                flag=Flag.OFF_CURVE if usable[index] and abs(off[index]) > OFF_CURVE else None,
                left_out=not usable[index],
            )
            for index, (point, _) in enumerate(known)
        ),
    )


def _lines(moved: Array, seconds: Array) -> Iterator[tuple[float, float]]:
    """Start and slope of all lines that go through two points, or flat or from nothing through one, none below 0."""
    points = list(zip(moved.tolist(), seconds.tolist(), strict=True))
    for x, t in points:
        yield t, 0.0
        if x:
            yield 0.0, t / x
    for (x1, t1), (x2, t2) in combinations(points, 2):
        if x1 != x2:
            slope = (t2 - t1) / (x2 - x1)
            if slope > 0 and t1 - slope * x1 > 0:
                yield t1 - slope * x1, slope


def _nearest(moved: Array, seconds: Array) -> tuple[float, float]:
    """Start and slope of the line nearest to these points in relative errors, none below 0."""
    import numpy as np
    from scipy.optimize import nnls

    scale = moved.max() or 1.0  # bytes beside ones are no fit columns
    columns = np.column_stack((np.ones_like(moved), moved / scale)) / seconds[:, None]
    start, slope = nnls(columns, np.ones_like(seconds))[0]
    return float(start), float(slope / scale)


# ── bandwidth ───────────────────────────────────────────────────────────────────────────────


def bandwidth(machine: Machine, host: HostProbe | None) -> Bandwidth:
    """What is known of this machine; one GPU of unknown speed makes all of them unknown."""
    peaks = _known([device_bytes_s(gpu) for gpu in machine.gpus])
    least = _known([_least_bytes_s(gpu) for gpu in machine.gpus])
    return Bandwidth(
        host_peak=host.peak if host and host.peak > 0 else None,
        host_typical=host.typical if host and host.typical > 0 else None,
        device_peak=max(peaks) if peaks else None,
        device_least=min(least) if least else None,
    )


def _known(speeds: Sequence[float | None]) -> list[float]:
    """All of them, or none if one is unknown."""
    known = [speed for speed in speeds if speed is not None]
    return known if len(known) == len(speeds) else []


def device_bytes_s(gpu: Gpu) -> float | None:
    """Memory bandwidth of a GPU: bus width × highest memory clock × 2 transfers / 8 bits.

    The driver gives the clock of every GDDR and HBM such that this holds, to 3 % of what is published.
    """
    if (published := _published(gpu)) is not None:
        return published[0]
    if gpu.bus_width_bits is None or gpu.memory_clock_mhz is None:
        return None
    return gpu.bus_width_bits / 8 * gpu.memory_clock_mhz * 1e6 * 2


def _least_bytes_s(gpu: Gpu) -> float | None:
    """What the slowest part of this name has; unknown under MIG, where a slice has only a share."""
    if gpu.mig:
        return None
    published = _published(gpu)
    return published[1] if published is not None else device_bytes_s(gpu)


def _published(gpu: Gpu) -> tuple[float, float] | None:
    return next((speeds for name, speeds in PUBLISHED.items() if re.search(name, gpu.name)), None)


def host_probe(machine: Machine, folder: Path | None = None) -> HostProbe | None:
    """Host bandwidth, probed once for each machine (about 5 s) and kept; None if memory is too small for it.

    A probe during which other programs worked is used, and not kept.
    """
    path = (folder or cache_dir()) / f"bandwidth-{_machine_key(machine)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return HostProbe(**json.loads(path.read_text(encoding="utf-8")))
    size = probe_bytes(machine)
    if size is None:
        return None
    found = probe(size, machine.physical_cores or 1)
    if found.foreign_cores is None or found.foreign_cores <= telemetry.FOREIGN_CORES:
        with contextlib.suppress(OSError):  # a read-only home costs time, not the run
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(asdict(found)), encoding="utf-8")
            partial.replace(path)
    return found


def probe_bytes(machine: Machine) -> int | None:
    """Size of the probe arrays: well above the caches, at most 1 GiB and a quarter of what is available."""
    cache = machine.last_level_cache_bytes or 0
    size = min(max(2 * CACHES * cache, SMALLEST_BYTES), LARGEST_BYTES, (machine.available_bytes or 0) // 4)
    return size if size >= max(LEAST_CACHES * cache, SMALLEST_BYTES // 4) else None


def probe(
    size: int, cores: int, *, limit_s: float = PROBE_S, clock: Callable[[], float] = time.perf_counter
) -> HostProbe:
    """Run every kernel on every thread count, best of five rounds, or of those that `limit_s` allows (at least one)."""
    import numpy as np

    begin, reader = clock(), telemetry.Reader()
    before = reader.read()
    best: dict[str, tuple[float, int]] = {}
    whole = np.empty(size // 4, np.float32)
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(lambda part: part.fill(1.0), _slices(whole, cores)))  # first touch where it will be read
        for number, (name, threads) in enumerate(_rounds(cores)):
            if clock() - begin > limit_s and number >= len(_KERNELS):
                break
            kernel, share = _KERNELS[name]
            parts = list(zip(*(_slices(array, threads) for array in np.split(_cut(whole, share), share)), strict=True))
            start = clock()
            list(pool.map(lambda arrays, run=kernel: run(*arrays), parts))
            speed = share * (whole.size // share) * 4 / max(clock() - start, 1e-9)
            best[name] = max(best.get(name, (0.0, 0)), (speed, threads))
    after = reader.read()
    return HostProbe(
        kernels={name: speed for name, (speed, _) in best.items()},
        array_bytes=size,
        threads=max(best[name] for name in READS)[1],
        seconds=clock() - begin,
        foreign_cores=telemetry.foreign_mean((before, after)),
    )


def _rounds(cores: int) -> Iterator[tuple[str, int]]:
    """Kernels and thread counts, the most promising first: all cores, then half of them, and so on down to one."""
    counts = [cores]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    yield from ((name, threads) for threads in counts * ROUNDS for name in _KERNELS)


def _slices(array: Bytes, parts: int) -> list[Bytes]:
    step = -(-array.size // parts)
    return [array[start : start + step] for start in range(0, array.size, step)]


def _cut(array: Bytes, parts: int) -> Bytes:
    """The array, shortened so that it splits evenly."""
    return array[: array.size // parts * parts]


def _largest(a: Bytes) -> None:
    a.max()


def _total(a: Bytes) -> None:
    a.sum()


def _bits(a: Bytes) -> None:
    import numpy as np

    np.bitwise_or.reduce(a.view(np.uint32))


def _copy(a: Bytes, b: Bytes) -> None:
    import numpy as np

    np.copyto(b, a)


def _add(a: Bytes, b: Bytes, c: Bytes) -> None:
    import numpy as np

    np.add(a, b, out=c)


# name → kernel, and how many arrays it moves; all release the interpreter's lock
_KERNELS: dict[str, tuple[Callable[..., None], int]] = {
    "max": (_largest, 1),
    "sum": (_total, 1),
    "or": (_bits, 1),
    "copy": (_copy, 2),
    "add": (_add, 3),
}
READS = ("max", "sum", "or")


def _machine_key(machine: Machine) -> str:
    facts = (FORMAT, machine.cpu, machine.physical_cores, machine.numa_nodes, machine.last_level_cache_bytes)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
