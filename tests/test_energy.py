"""Joules a token from counters that step: a meter with a known truth, its error, and when nothing is said."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import energy
from harness.energy import Idle, Meter, Packages, Spent, Window

S = 1_000_000_000  # nanoseconds


def counter(watts: Callable[[float], float], step_s: float = 0.1) -> Callable[[float], float]:
    """What a counter shows that sums up this power and is renewed every `step_s`."""
    fine = 1000

    def shown(at_s: float) -> float:
        last = math.floor(at_s / step_s + 1e-9) * step_s
        return sum(watts(tick / fine) / fine for tick in range(round(last * fine)))

    return shown


def points(
    shown: Callable[[float], float], seconds: float, every_s: float = 0.1, from_s: float = 0.03
) -> energy.Points:
    """As the watching thread reads it."""
    return [
        (round((from_s + number * every_s) * S), shown(from_s + number * every_s))
        for number in range(round(seconds / every_s))
    ]


def window(begin_s: float, end_s: float, steps: int = 1000) -> Window:
    return Window(round(begin_s * S), round(end_s * S), steps)


# ── from counters to joules ─────────────────────────────────────────────────────────────────


def test_ten_seconds_at_200_watts_are_told_to_one_per_cent_with_their_error() -> None:
    found = energy.spent(points(counter(lambda _: 200.0), 14.0), [window(2.0, 12.0)])

    assert found is not None
    assert found.joules == pytest.approx(2000.0, rel=0.01)
    assert found.joules / found.steps == pytest.approx(2.0, rel=0.01)
    assert found.error_j / found.joules == pytest.approx(0.1 / math.sqrt(6) / 10, rel=0.1)  # 0.4 %
    assert found.watts == pytest.approx(200.0, rel=0.01)


def test_the_error_is_that_of_the_steps_that_the_counter_really_makes() -> None:
    slow = energy.spent(points(counter(lambda _: 200.0, step_s=1.0), 24.0), [window(2.0, 22.0)])

    assert slow is not None
    assert slow.error_j == pytest.approx(200.0 * 1.0 / math.sqrt(6), rel=0.1)


def test_several_answers_are_added_up_and_what_lies_between_them_is_left_out() -> None:
    def watts(at_s: float) -> float:
        return 300.0 if at_s % 5 >= 1 else 900.0  # the first second of each five is a prefill

    windows = [window(start + 1.2, start + 4.8, 100) for start in (0, 5, 10)]
    found = energy.spent(points(counter(watts), 16.0), windows)

    assert found is not None
    assert found.seconds == pytest.approx(10.8)
    assert found.steps == 300
    assert found.joules == pytest.approx(300.0 * 10.8, rel=0.02)
    steps_j = 300.0 * 0.1 / math.sqrt(6) * math.sqrt(3)
    assert steps_j < found.error_j < 2.5 * steps_j  # for power rose and fell near the ends


@pytest.mark.parametrize(
    "broken",
    [
        [],
        [(0, None), (9 * S, None)],
        [(0, 5.0), (4 * S, None), (9 * S, 50.0)],
        [(3 * S, 5.0), (5 * S, 7.0), (9 * S, 50.0)],  # begins after the window does
        [(0, 5.0), (2 * S, 7.0), (5 * S, 50.0)],  # and ends before it
        [(0, 5.0), (4 * S, 40.0), (5 * S, 1.0), (9 * S, 60.0)],  # a driver was loaded again
        [(0, 5.0), (4 * S, 5.0), (9 * S, 5.0)],  # it stands still
    ],
    ids=["none", "never told", "lost between", "begins late", "ends early", "began anew", "stands still"],
)
def test_a_counter_that_does_not_cover_the_answers_says_nothing(broken: energy.Points) -> None:
    assert energy.spent(broken, [window(2.0, 8.0)]) is None


@pytest.mark.parametrize("phase_s", [0.0, 0.013, 0.05, 0.09])
def test_seldom_looks_and_looks_close_together_make_the_error_no_larger_than_it_is(phase_s: float) -> None:
    """As a dear counter is read: about once a second, and twice within milliseconds where an answer ends."""

    def watts(at_s: float) -> float:
        return 250.0 if at_s % 4 < 1 else 150.0  # a prefill of one second, then three of decoding

    shown = counter(watts)
    at_s = sorted(
        [0.9 * number + phase_s for number in range(16)] + [each - gap for each in (4, 8, 12) for gap in (0.004, 0)]
    )
    seen = [(round(each * S), shown(each)) for each in at_s]
    truth_j, found = 150.0 * 2.8 * 2, energy.spent(seen, [window(5.2, 7.99), window(9.2, 11.99)])

    assert found is not None
    assert abs(found.joules - truth_j) < 3 * found.error_j
    assert found.error_j < 0.06 * truth_j


def test_without_an_answer_nothing_was_spent_on_one() -> None:
    assert energy.spent(points(counter(lambda _: 200.0), 5.0), []) is None


# ── an arm ──────────────────────────────────────────────────────────────────────────────────


def test_an_arm_is_all_its_loads_together_and_less_what_the_machine_draws_at_rest() -> None:
    found = energy.per_token([Spent(1000.0, 5.0, 400, 8.0), Spent(1100.0, 5.5, 440, 6.0)], idle_w=50.0)

    assert found is not None
    assert found.joules == pytest.approx(2.5)
    assert found.above_idle_j == pytest.approx((2100 - 50 * 10.5) / 840)
    assert found.error_j == pytest.approx(10.0 / 840)
    assert found.watts == pytest.approx(200.0)


def test_less_than_ten_seconds_in_all_give_no_figure() -> None:
    assert energy.per_token([Spent(1000.0, 4.9, 400, 8.0), Spent(1000.0, 4.9, 400, 8.0)], 50.0) is None
    assert energy.per_token([Spent(1000.0, 5.0, 400, 8.0), Spent(1000.0, 5.0, 400, 8.0)], 50.0) is not None


def test_an_arm_with_a_load_that_was_not_counted_has_no_figure() -> None:
    assert energy.per_token([Spent(4000.0, 20.0, 800, 8.0), None], 50.0) is None
    assert energy.per_token([], 50.0) is None


def test_above_idle_is_unknown_where_rest_was_not_measured() -> None:
    found = energy.per_token([Spent(4000.0, 20.0, 800, 8.0)], None)

    assert found is not None
    assert found.above_idle_j is None


@pytest.mark.parametrize(
    ("watts", "apart"),
    [
        ([50.0, 53.0], 0.06),
        ([53.0, 50.0], 0.06),
        ([80.0, 120.0, 80.0], 0.5),
        ([50.0], None),
        ([], None),
        ([0.0, 5.0], None),
    ],
)
def test_rest_before_and_after_is_compared_where_both_are_known(watts: list[float], apart: float | None) -> None:
    assert energy.idle_drift(watts) == (None if apart is None else pytest.approx(apart))


# ── counters ────────────────────────────────────────────────────────────────────────────────


class Clock:
    """Moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def now_ns(self) -> int:
        return round(self.now_s * S)


def test_rest_is_measured_over_its_whole_time() -> None:
    clock, shown = Clock(), counter(lambda _: 61.0)
    meter = Meter(lambda: shown(clock.now_s), lambda: None, clock.now_ns)

    found = energy.measure_idle(10.0, meter=meter, sleep=clock.sleep)

    assert isinstance(found, Idle)
    assert found.seconds == pytest.approx(10.0)
    assert found.gpu_w == pytest.approx(61.0, rel=0.01)
    assert found.cpu_w is None


def test_without_a_counter_nobody_waits_for_rest() -> None:
    clock = Clock()

    assert energy.measure_idle(10.0, meter=Meter(lambda: None, lambda: None), sleep=clock.sleep) is None
    assert clock.now_s == 0.0


@pytest.fixture
def zones(tmp_path: Path) -> Callable[..., None]:
    def write(**counters: int) -> None:
        for name, used_uj in counters.items():
            folder = tmp_path / "sys/class/powercap" / name.replace("_", ":").replace("rapl", "intel-rapl")
            folder.mkdir(parents=True, exist_ok=True)
            inner = name.count("_") > 1
            (folder / "name").write_text("core\n" if inner else "psys\n" if name == "rapl_9" else "package-0\n")
            (folder / "energy_uj").write_text(f"{used_uj}\n")
            (folder / "max_energy_range_uj").write_text("262143328850\n")

    return write


def test_packages_are_added_up_and_what_is_inside_or_around_them_is_not(
    tmp_path: Path, zones: Callable[..., None]
) -> None:
    zones(rapl_0=1_000_000, rapl_0_0=900_000, rapl_1=5_000_000, rapl_9=9_000_000)
    packages = Packages(tmp_path)
    assert packages.joules() == 0.0

    zones(rapl_0=3_000_000, rapl_0_0=2_900_000, rapl_1=5_500_000, rapl_9=99_000_000)
    assert packages.joules() == 2.5


def test_a_counter_of_packages_that_wraps_goes_on(tmp_path: Path, zones: Callable[..., None]) -> None:
    zones(rapl_0=262_143_000_000)
    packages = Packages(tmp_path)
    packages.joules()

    zones(rapl_0=1_671_150)
    assert packages.joules() == pytest.approx(2.0)


def test_a_counter_of_packages_that_only_root_may_read_is_unknown(tmp_path: Path, zones: Callable[..., None]) -> None:
    zones(rapl_0=1)
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").unlink()

    assert Packages(tmp_path).joules() is None
    assert Packages(tmp_path / "elsewhere").joules() is None


def test_two_threads_never_read_a_counter_at_once() -> None:
    inside, most = [0], [0]

    def counter() -> float:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return 1.0

    meter = Meter(gpu=counter, cpu=lambda: None)
    threads = [threading.Thread(target=lambda: [meter.read() for _ in range(5)]) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert most == [1]
