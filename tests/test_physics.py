"""Bounds of decode speed: honest speeds pass, lies and spills are caught, and nothing is claimed without a bound."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import machine as machines
from harness import physics
from harness.gpu import Gpu
from harness.machine import Machine
from harness.physics import Band, Bandwidth, Flag, HostProbe, Point, band, wrong_signs

MIB, GIB = 1 << 20, 1 << 30
FAST = Bandwidth(host_peak=80e9, host_typical=70e9, device_peak=504e9, device_least=504e9)
L3 = 32 * MIB


@dataclass(frozen=True)
class Token:
    """What one token reads, and how often it changes sides."""

    bytes_per_token_host: int = 0
    bytes_per_token_device: int = 0
    crossings: int = 0


EXPERTS_ON_HOST = Token(1_500_000_000, 1_000_000_000, 98)


def sure(token: Token, **keywords: object) -> tuple[float, float]:
    found = band(token, FAST, host_cache_bytes=L3, **keywords)  # type: ignore[arg-type]
    assert found.ceiling_tps is not None
    assert found.floor_tps is not None
    return found.ceiling_tps, found.floor_tps


# ── bounds ──────────────────────────────────────────────────────────────────────────────────


def test_host_and_device_take_turns_so_their_times_add() -> None:
    ceiling, _ = sure(EXPERTS_ON_HOST)

    assert ceiling == pytest.approx(1 / (1.5 / 80 + 1.0 / 504))


def test_the_floor_adds_slow_memory_every_crossing_and_what_a_token_waits_for_beside() -> None:
    _, floor = sure(EXPERTS_ON_HOST)

    assert floor == pytest.approx(1 / (1.5 / (0.2 * 70) + 1.0 / (0.25 * 504) + 98 * 100e-6 + 5e-3))


HOST_BYTES = st.integers(4 * L3, 40 * GIB)
DEVICE_BYTES = st.integers(4 * physics.DEVICE_CACHE_BYTES, 40 * GIB)
SIDES = st.one_of(
    st.tuples(HOST_BYTES, st.just(0)), st.tuples(st.just(0), DEVICE_BYTES), st.tuples(HOST_BYTES, DEVICE_BYTES)
)  # of a token: host only, device only, mixed


@given(
    sides=SIDES,
    eta_host=st.floats(0.3, 0.9),
    eta_device=st.floats(0.3, 0.9),
    crossings=st.integers(0, 200),
    crossing_s=st.floats(0, 100e-6),
)
def test_an_honest_speed_is_never_flagged(
    sides: tuple[int, int], eta_host: float, eta_device: float, crossings: int, crossing_s: float
) -> None:
    host, device = sides
    seconds = host / (eta_host * 70e9) + device / (eta_device * 504e9) + crossings * crossing_s

    found = band(Token(host, device, crossings), FAST, host_cache_bytes=L3)

    assert found.flag(1 / seconds) is None
    assert 0 < (found.share(1 / seconds) or 0) < 1


@given(
    sides=SIDES,
    eta=st.floats(0.3, 0.9),
    crossings=st.integers(0, 200),
)
def test_lies_and_spills_are_always_flagged(sides: tuple[int, int], eta: float, crossings: int) -> None:
    host, device = sides
    found = band(Token(host, device, crossings), FAST, host_cache_bytes=L3)
    assert found.ceiling_tps is not None
    seconds = host / (eta * 70e9) + device / (eta * 504e9) + crossings * physics.CROSSING_S

    assert found.flag(1e6) is Flag.IMPOSSIBLE
    assert found.flag(3 * found.ceiling_tps) is Flag.IMPOSSIBLE
    assert found.flag(0.1 / seconds) is Flag.TOO_SLOW


def test_a_tenth_above_the_ceiling_is_still_our_own_error() -> None:
    found = Band(ceiling_tps=100.0, floor_tps=10.0)

    assert found.flag(109.9) is None
    assert found.flag(110.1) is Flag.IMPOSSIBLE
    assert found.flag(9.9) is Flag.TOO_SLOW


def test_the_measured_run_on_a_held_card_lies_in_its_band() -> None:
    """16.3 GiB of 30B-A3B's shape, all experts on 16 host cores that read 76 GB/s: 33 to 45 tok/s were seen."""
    measured = Bandwidth(host_peak=76e9 * 1.1, host_typical=76e9, device_peak=4.9e12, device_least=4.9e12)
    token = Token(bytes_per_token_host=980_000_000, bytes_per_token_device=800_000_000, crossings=98)

    found = band(token, measured, host_cache_bytes=L3)

    assert [found.flag(tps) for tps in (32.9, 38.0, 45.2)] == [None, None, None]
    assert found.flag(264.0) is Flag.IMPOSSIBLE  # the speed without any expert on the host


def test_a_fast_gpu_waits_for_kernels_and_not_for_memory_and_is_not_called_slow() -> None:
    """The same model with all of it on the device: 248 to 260 tok/s were seen where memory alone would allow 2500."""
    measured = Bandwidth(device_peak=4.8e12, device_least=4.8e12)
    token = Token(bytes_per_token_host=2176, bytes_per_token_device=1_936_364_544, crossings=2)

    found = band(token, measured, host_cache_bytes=L3)

    assert [found.flag(tps) for tps in (248.0, 260.0)] == [None, None]
    assert found.flag(25.0) is Flag.TOO_SLOW


def test_a_share_is_not_of_a_ceiling_that_leaves_out_what_a_cache_may_serve() -> None:
    """Measured too: 1 GB a token on the host, beside caches of 300 MiB."""
    fast = Bandwidth(host_peak=136e9, host_typical=100e9, device_peak=4.8e12, device_least=4.8e12)
    found = band(Token(1_026_885_760, 909_480_960, 92), fast, host_cache_bytes=300 * MIB)

    assert found.ceiling_tps == pytest.approx(4.8e12 / 909_480_960)
    assert found.flag(39.7) is None
    assert found.share(39.7) is None
    assert found.reason == "what a token reads on the host may come from a cache, so those bytes do not count"


@pytest.mark.parametrize(
    ("token", "bandwidth", "keywords", "reason"),
    [
        (EXPERTS_ON_HOST, FAST, {"host_cache_bytes": L3, "stand_in": True}, "stand-in device"),
        (None, FAST, {"host_cache_bytes": L3}, "the engine chose the placement"),
        (Token(4 * L3 - 1), FAST, {"host_cache_bytes": L3}, "active weights fit a cache"),
        (Token(0, 500 * MIB), FAST, {"host_cache_bytes": L3}, "active weights fit a cache"),
        (Token(GIB), FAST, {}, "caches is unknown"),
        (Token(GIB), Bandwidth(), {"host_cache_bytes": L3}, "memory bandwidth is unknown"),
        (Token(8000, 9 * GIB), Bandwidth(host_peak=1e9), {"host_cache_bytes": L3}, "memory bandwidth is unknown"),
    ],
)
def test_where_nothing_binds_there_is_a_reason_and_no_flag(
    token: Token | None, bandwidth: Bandwidth, keywords: dict[str, int], reason: str
) -> None:
    found = band(token, bandwidth, **keywords)  # type: ignore[arg-type]

    assert (found.ceiling_tps, found.floor_tps) == (None, None)
    assert reason in (found.reason or "")
    assert found.flag(1e9) is None
    assert found.share(5.0) is None


def test_a_row_of_the_embedding_on_the_host_does_not_turn_the_bound_off() -> None:
    found = band(Token(8_000, 9 * GIB, 2), FAST, host_cache_bytes=L3)

    assert found.ceiling_tps == pytest.approx(504e9 / (9 * GIB))


def test_a_side_that_a_cache_may_serve_counts_below_but_not_above() -> None:
    found = band(Token(100 * MIB, 9 * GIB), FAST, host_cache_bytes=L3)

    assert found.ceiling_tps == pytest.approx(504e9 / (9 * GIB))
    assert found.floor_tps == pytest.approx(1 / (100 * MIB / (0.2 * 70e9) + 9 * GIB / (0.25 * 504e9) + 5e-3))


def test_a_gpu_of_unknown_speed_leaves_the_ceiling_of_the_host() -> None:
    host_only = Bandwidth(host_peak=80e9, host_typical=70e9)

    found = band(EXPERTS_ON_HOST, host_only, host_cache_bytes=L3)

    assert found.ceiling_tps == pytest.approx(80 / 1.5)
    assert found.floor_tps is None
    assert found.reason == "memory bandwidth of the device is unknown, so those bytes do not count"
    assert found.share(50.0) is None, "of a ceiling that half of the bytes do not lower"


# ── the sign of a sweep ─────────────────────────────────────────────────────────────────────


def test_more_on_the_device_and_slower_is_the_wrong_sign() -> None:
    sweep = [Point("N=48", 3 * GIB, 34.6), Point("N=36", 5 * GIB, 15.3), Point("N=24", 11 * GIB, 11.7)]

    assert [(slow.label, fast.label) for slow, fast in wrong_signs(sweep[::-1])] == [("N=36", "N=48"), ("N=24", "N=36")]


def test_a_spill_explains_the_wrong_sign_and_a_few_percent_are_none() -> None:
    assert wrong_signs([Point("a", 1, 30.0), Point("b", 2, 12.0, spilled=True)]) == ()
    assert wrong_signs([Point("a", 1, 30.0), Point("b", 2, 29.2)]) == ()
    assert wrong_signs([Point("a", 2, 30.0), Point("b", 2, 12.0)]) == ()


def test_what_is_one_placement_counts_once_for_the_sign() -> None:
    """An article's sweep: the first three are one placement under three names, and none of them spilled."""
    speeds = {48: 34.6, 44: 27.2, 40: 16.9, 36: 15.3, 32: 14.4, 28: 13.0, 24: 11.7}
    sweep = [Point(f"N={n}", (40 - min(n, 40)) * GIB, tps) for n, tps in speeds.items()]

    pairs = [(slow.label, fast.label) for slow, fast in wrong_signs(sweep)]

    assert pairs == [("N=36", "N=40"), ("N=32", "N=36"), ("N=28", "N=32"), ("N=24", "N=28")]
    overlapping = [Point("a", 0, 34.6), Point("b", 0, 15.0), Point("c", 1, 16.0)]
    assert wrong_signs(overlapping) == (), "what is one placement disagrees by more than what is none"


# ── the line of a sweep ─────────────────────────────────────────────────────────────────────

TOTAL = 2_000_000_000  # bytes a token, wherever they lie


def sweep_of(rest_s: float, byte_s: float, off: list[float]) -> list[Point]:
    """Experts moved to the host step by step, each point `off` times slower than the line."""
    hosts = [TOTAL * index // (len(off) - 1) for index in range(len(off))]
    return [
        Point(
            f"N={index}",
            on_device=TOTAL - host,
            tps=1 / ((rest_s + byte_s * host) * factor),
            traffic=Token(host, TOTAL - host, 2 * index),
        )
        for index, (host, factor) in enumerate(zip(hosts, off, strict=True))
    ]


def flagged(found: physics.Fit | None) -> list[int]:
    assert found is not None
    return [index for index, point in enumerate(found.points) if point.flag is Flag.OFF_CURVE]


TRUE_LINE = {"rest_s": st.floats(0.001, 0.02), "byte_s": st.floats(1 / 100e9, 1 / 20e9)}
# up to seven times slower from one end to the other; where one step is more than all the rest, an end may lie anywhere
GENTLE_LINE = {"rest_s": st.floats(0.01, 0.02), "byte_s": st.floats(1 / 100e9, 1 / 33e9)}


@given(**TRUE_LINE, off=st.lists(st.floats(0.95, 1.05), min_size=4, max_size=14))
def test_honest_points_are_never_off_the_curve(rest_s: float, byte_s: float, off: list[float]) -> None:
    found = physics.fit_sweep(sweep_of(rest_s, byte_s, off))

    assert flagged(found) == []


@given(**TRUE_LINE, count=st.integers(4, 14))
def test_a_line_without_noise_is_recovered(rest_s: float, byte_s: float, count: int) -> None:
    points = sweep_of(rest_s, byte_s, [1.0] * count)
    found = physics.fit_sweep(points)

    assert found is not None
    assert found.side == "host"
    assert found.rest_s == pytest.approx(rest_s)
    assert found.byte_s == pytest.approx(byte_s)
    assert [each.fitted_tps for each in found.points] == pytest.approx([point.tps for point in points])
    assert [each.label for each in found.points] == [point.label for point in points]


@given(**TRUE_LINE, noise=st.lists(st.sampled_from([0.97, 0.99, 1.01, 1.03]), min_size=10, max_size=14))
def test_noise_moves_the_line_little(rest_s: float, byte_s: float, noise: list[float]) -> None:
    found = physics.fit_sweep(sweep_of(rest_s, byte_s, noise))

    assert found is not None
    for host in (0, TOTAL):
        assert found.rest_s + found.byte_s * host == pytest.approx(rest_s + byte_s * host, rel=0.1)


@given(
    **GENTLE_LINE,
    off=st.lists(st.floats(0.97, 1.03), min_size=7, max_size=14),
    where=st.integers(0, 13),
    factor=st.sampled_from([0.5, 2.0]),
)
def test_a_point_twice_off_is_the_one_that_is_flagged(
    rest_s: float, byte_s: float, off: list[float], where: int, factor: float
) -> None:
    where %= len(off)
    off[where] = factor

    assert flagged(physics.fit_sweep(sweep_of(rest_s, byte_s, off))) == [where]


@given(
    **GENTLE_LINE,
    off=st.lists(st.floats(0.97, 1.03), min_size=9, max_size=14),
    slower=st.lists(st.floats(3, 10), min_size=1, max_size=3),
)
def test_a_spilled_tail_is_flagged_or_left_out(
    rest_s: float, byte_s: float, off: list[float], slower: list[float]
) -> None:
    """The least on the host is the most on the device: there memory is full, and only there."""
    honest = sweep_of(rest_s, byte_s, off)
    points = [
        dataclasses.replace(point, tps=point.tps / slower[index]) if index < len(slower) else point
        for index, point in enumerate(honest)
    ]
    assert flagged(physics.fit_sweep(points)) == list(range(len(slower)))

    told = [dataclasses.replace(point, spilled=index < len(slower)) for index, point in enumerate(points)]
    found = physics.fit_sweep(told)

    assert flagged(found) == []
    assert found is not None
    assert [each.left_out for each in found.points] == [point.spilled for point in told]
    assert all(each.residual < -physics.OFF_CURVE for each in found.points if each.left_out)


def test_an_impossible_point_does_not_bend_the_line() -> None:
    points = sweep_of(0.01, 1 / 50e9, [1.0] * 6)
    points[2] = dataclasses.replace(points[2], tps=1e6, flag=Flag.IMPOSSIBLE)
    found = physics.fit_sweep(points)

    assert found is not None
    assert found.rest_s == pytest.approx(0.01)
    assert found.points[2].left_out


def test_a_flat_curve_has_a_line_without_slope() -> None:
    points = [dataclasses.replace(point, tps=50.0) for point in sweep_of(0.01, 0.0, [1.0] * 6)]
    found = physics.fit_sweep(points)

    assert found is not None
    assert found.rest_s == pytest.approx(0.02)
    assert found.byte_s == pytest.approx(0.0, abs=1e-15)


def test_a_sweep_of_what_is_read_on_the_device_is_fitted_there() -> None:
    """Keys and values of a longer context, all layers on the device."""
    points = [
        Point(f"depth={depth}", depth, 1 / (0.005 + size / 500e9), traffic=Token(8_000, size, 2))
        for depth in (0, 4096, 8192, 16384)
        for size in [GIB + depth * 100_000]
    ]
    found = physics.fit_sweep(points)

    assert found is not None
    assert found.side == "device"
    assert found.rest_s == pytest.approx(0.005)
    assert found.byte_s == pytest.approx(1 / 500e9)


@pytest.mark.parametrize(
    "points",
    [
        [],
        sweep_of(0.01, 1e-11, [1.0] * 3),
        [dataclasses.replace(point, traffic=None) for point in sweep_of(0.01, 1e-11, [1.0] * 6)],
        [dataclasses.replace(point, spilled=True) for point in sweep_of(0.01, 1e-11, [1.0] * 6)],
        [dataclasses.replace(point, traffic=Token(GIB, GIB, 2)) for point in sweep_of(0.01, 1e-11, [1.0] * 6)],
        sweep_of(0.01, 1e-11, [1, 3, 9, 27, 81, 243]),
    ],
    ids=["nothing", "three points", "unknown traffic", "all spilled", "nothing moves", "no two agree"],
)
def test_where_no_line_can_be_had_there_is_none(points: list[Point]) -> None:
    assert physics.fit_sweep(points) is None


# ── bandwidth ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("gpu", "gigabytes"),
    [
        (Gpu(name="NVIDIA GeForce RTX 4070", bus_width_bits=192, memory_clock_mhz=10501), 504),
        (Gpu(name="NVIDIA GeForce RTX 3090", bus_width_bits=384, memory_clock_mhz=9751), 936),
        (Gpu(name="NVIDIA GeForce RTX 4090", bus_width_bits=384, memory_clock_mhz=10501), 1008),
        (Gpu(name="NVIDIA GeForce RTX 5090", bus_width_bits=512, memory_clock_mhz=14001), 1792),
        (Gpu(name="NVIDIA GeForce RTX 3060", bus_width_bits=192, memory_clock_mhz=7501), 360),
        (Gpu(name="NVIDIA A100-SXM4-40GB", bus_width_bits=5120, memory_clock_mhz=1215), 1555),
        (Gpu(name="NVIDIA A100-SXM4-80GB", bus_width_bits=5120, memory_clock_mhz=1593), 2039),
        (Gpu(name="NVIDIA H100 PCIe", bus_width_bits=5120, memory_clock_mhz=1593), 2039),
        (Gpu(name="NVIDIA H100 80GB HBM3", bus_width_bits=5120, memory_clock_mhz=2619), 3352),
        (Gpu(name="NVIDIA B200", bus_width_bits=7680, memory_clock_mhz=3996), 7672),
        (Gpu(name="Tesla T4", bus_width_bits=256, memory_clock_mhz=5001), 320),
        (Gpu(name="NVIDIA L4", bus_width_bits=192, memory_clock_mhz=6251), 300),
        (Gpu(name="NVIDIA H200", bus_width_bits=6144, memory_clock_mhz=3201), 4917),
        (Gpu(name="NVIDIA GB10", unified=True), 273),
        (Gpu(name="NVIDIA something new"), None),
    ],
    ids=lambda value: value.name if isinstance(value, Gpu) else str(value),
)
def test_device_bandwidth_is_bus_width_times_clock(gpu: Gpu, gigabytes: int | None) -> None:
    """As published, to 3 %: H200 4.8 TB/s, H100 PCIe 2.0; the others to the last figure."""
    found = physics.device_bytes_s(gpu)

    assert (None if found is None else round(found / 1e9)) == gigabytes


def test_several_gpus_are_bounded_by_the_fastest_and_the_slowest(this: Machine) -> None:
    pair = (
        Gpu(name="a", bus_width_bits=192, memory_clock_mhz=10000),
        Gpu(name="b", bus_width_bits=384, memory_clock_mhz=10000),
    )

    found = physics.bandwidth(dataclasses.replace(this, gpus=pair), None)

    assert found == Bandwidth(device_peak=960e9, device_least=480e9)
    unknown = dataclasses.replace(this, gpus=(*pair, Gpu(name="c")))
    assert physics.bandwidth(unknown, None) == Bandwidth()


def test_a_part_of_a_gpu_and_the_small_parts_of_a_name_have_a_low_floor(this: Machine) -> None:
    slice_ = Gpu(name="NVIDIA A100-SXM4-40GB", bus_width_bits=5120, memory_clock_mhz=1215, mig=True)
    sliced = physics.bandwidth(dataclasses.replace(this, gpus=(slice_,)), None)
    orin = physics.bandwidth(dataclasses.replace(this, gpus=(Gpu(name="Orin (nvgpu)", unified=True),)), None)

    assert (sliced.device_peak, sliced.device_least) == (1215 * 2e6 * 640, None)
    assert (orin.device_peak, orin.device_least) == (204.8e9, 68e9)


@pytest.mark.parametrize("record", [FAST, HostProbe(kernels={"max": 3e10}, array_bytes=1, threads=2, seconds=0.5)])
def test_what_was_probed_is_kept_in_a_header_as_it_is(record: Bandwidth | HostProbe) -> None:
    from pydantic import TypeAdapter

    adapter = TypeAdapter(type(record))
    assert adapter.validate_json(adapter.dump_json(record)) == record


@pytest.fixture
def this() -> Machine:
    """This machine with memory enough, and caches small enough, for a probe of a few milliseconds."""
    return dataclasses.replace(machines.read(), last_level_cache_bytes=MIB, available_bytes=4 * 64 * MIB, gpus=())


@pytest.mark.parametrize(
    ("cache", "available", "size"),
    [
        (16 * MIB, 64 * GIB, 256 * MIB),
        (64 * MIB, 64 * GIB, 512 * MIB),
        (256 * MIB, 64 * GIB, GIB),
        (300 * MIB, 64 * GIB, GIB),
        (520 * MIB, 64 * GIB, None),
        (16 * MIB, 512 * MIB, 128 * MIB),
        (16 * MIB, 200 * MIB, None),
        (None, 64 * GIB, 256 * MIB),
    ],
    ids=[
        "small",
        "eight caches",
        "at most 1 GiB",
        "a server",
        "caches too large",
        "a quarter",
        "memory too small",
        "unknown",
    ],
)
def test_probe_arrays_are_far_above_the_caches_and_bounded(
    this: Machine, cache: int | None, available: int, size: int | None
) -> None:
    assert (
        physics.probe_bytes(dataclasses.replace(this, last_level_cache_bytes=cache, available_bytes=available)) == size
    )


def test_a_probe_runs_every_kernel_and_its_peak_is_above_its_typical() -> None:
    found = physics.probe(8 * MIB, 2)

    assert set(found.kernels) == {"max", "sum", "or", "copy", "add"}
    assert all(speed > 0 for speed in found.kernels.values())
    assert found.peak >= max(found.kernels.values()) >= found.typical > 0
    assert found.threads in (1, 2)


def test_a_probe_ends_after_one_round_when_time_is_up() -> None:
    ticks = itertools.count()

    found = physics.probe(MIB, 1, limit_s=0.0, clock=lambda: float(next(ticks)))

    assert set(found.kernels) == {"max", "sum", "or", "copy", "add"}
    assert found.seconds == 3 * 5 + 2  # three looks at the clock a kernel, one that ends it, one at the end


QUIET = HostProbe(
    kernels={"max": 30e9, "sum": 25e9, "or": 31e9, "copy": 24e9, "add": 40e9},
    array_bytes=MIB,
    threads=2,
    seconds=1.0,
    foreign_cores=0.1,
)


def test_typical_is_the_median_of_the_reads_and_peak_a_tenth_above_the_best_of_all() -> None:
    assert QUIET.typical == 30e9
    assert QUIET.peak == pytest.approx(44e9)


def test_a_quiet_probe_is_kept_for_this_machine_only(
    this: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(physics, "probe", lambda size, cores: QUIET)
    assert physics.host_probe(this, tmp_path) == QUIET
    other = dataclasses.replace(QUIET, array_bytes=7)
    monkeypatch.setattr(physics, "probe", lambda size, cores: other)

    assert physics.host_probe(this, tmp_path) == QUIET
    assert physics.host_probe(dataclasses.replace(this, cpu="another"), tmp_path) == other


def test_a_probe_in_noise_is_used_but_not_kept(this: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = dataclasses.replace(QUIET, foreign_cores=1.5)
    monkeypatch.setattr(physics, "probe", lambda size, cores: noisy)

    assert physics.host_probe(this, tmp_path) == noisy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", json.dumps({"kernels": {}}), "[]"])
def test_a_damaged_cache_is_probed_again(
    this: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(physics, "probe", lambda size, cores: QUIET)
    physics.host_probe(this, tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_text(text)

    assert physics.host_probe(this, tmp_path) == QUIET


def test_a_machine_too_small_for_a_probe_has_no_host_bandwidth(this: Machine, tmp_path: Path) -> None:
    assert physics.host_probe(dataclasses.replace(this, available_bytes=MIB), tmp_path) is None
