"""Joules a token from counters that step: a meter with a known truth, its error, and when nothing is said."""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
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


def load(
    chance: random.Random, step_s: float, prefill_w: float, decode_w: float, decode_s: float, every_s: float
) -> tuple[energy.Points, list[Window], float]:
    """A load as it is looked at, the windows of its four answers, and the joules that they really cost.

    A thread looks every `every_s` and, beside it, somebody at both ends of every request: milliseconds after the last
    token, and milliseconds later before the next request. The counter steps when it likes.
    """
    pieces, looks, windows, now_s = [(0.0, 0.0, decode_w)], [0.0], [], 0.0  # of pieces: begin, joules so far, watts

    def draw(watts: float, seconds: float) -> None:
        nonlocal now_s
        _, joules, _ = pieces.pop()
        pieces.extend([(now_s, joules, watts), (now_s + seconds, joules + watts * seconds, decode_w)])
        now_s += seconds

    draw(decode_w, chance.uniform(2.0, 3.0))  # it loads
    for number in range(5):
        looks.append(now_s)
        draw(prefill_w, 0.8 * decode_s * chance.uniform(0.9, 1.2))
        begin_s = now_s
        draw(decode_w, decode_s * chance.uniform(0.92, 1.08))
        if number:  # the first only warms up
            windows.append(window(begin_s, now_s, 95))
        looks.append(now_s + 0.006)
        draw(decode_w, chance.uniform(0.008, 0.018))
    draw(decode_w, 0.5)
    looks.append(now_s)
    at_s = chance.uniform(0.0, every_s)
    while at_s < now_s:
        looks.append(at_s)
        at_s += every_s * chance.uniform(0.97, 1.05)

    def used_j(at_s: float) -> float:
        begin_s, joules, watts = next((each for each in reversed(pieces) if each[0] <= at_s), pieces[0])
        return 1e6 + joules + watts * (at_s - begin_s)

    phase_s = chance.uniform(0.0, step_s)
    seen = [(round(each * S), used_j(math.floor((each - phase_s) / step_s) * step_s + phase_s)) for each in looks]
    return seen, windows, sum(used_j(each.end_ns / S) - used_j(each.begin_ns / S) for each in windows)


def together(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(each**2 for each in values))


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
        [(0, 5.0), (S // 2, 15.0), (4 * S, 15.0), (9 * S, 15.0)],  # since before the answer
        [(0, 5.0), (3 * S, 35.0), (4 * S, 45.0), (6 * S, 45.0), (9 * S, 45.0)],  # since the middle of it
        [(0, 5.0), (3 * S, 35.0), (4 * S, 45.0), (7 * S + 1, 45.0), (9 * S, 90.0)],  # and went on
    ],
    ids=[
        *("none", "never told", "lost between", "begins late", "ends early", "began anew", "stands still"),
        *("stopped before", "stopped within", "stopped for a while"),
    ],
)
def test_a_counter_that_does_not_cover_the_answers_says_nothing(broken: energy.Points) -> None:
    assert energy.spent(broken, [window(2.0, 8.0)]) is None


def test_a_counter_that_stopped_is_not_carried_on() -> None:
    seen = points(lambda at_s: 10.0 * math.floor(10 * min(at_s, 10.0)), 101.0)

    assert energy.spent(seen, [window(0.5, 100.0)]) is None
    assert energy.spent(seen, [window(1.0, 4.0), window(30.0, 34.0)]) is None
    assert energy.spent(seen, [window(11.0, 11.5)]) is None
    again = points(lambda at_s: 10.0 * math.floor(10 * (at_s if at_s < 50 else max(50.0, at_s - 4))), 101.0)
    assert energy.spent(again, [window(0.5, 100.0)]) is None
    before = energy.spent(seen, [window(1.0, 4.0), window(5.0, 9.5)])
    assert before is not None
    assert before.watts == pytest.approx(100.0, rel=0.02)


def test_a_counter_that_rests_before_and_after_the_answers_is_no_slower_while_they_come() -> None:
    seen = points(counter(lambda at_s: 200.0 if 5 <= at_s < 20 else 0.0), 30.0)
    found = energy.spent(seen, [window(6.0, 18.0)])

    assert found is not None
    assert found.error_j == pytest.approx(200.0 * 0.1 / math.sqrt(6), rel=0.1)


def test_looks_that_show_the_same_within_milliseconds_make_no_step_longer() -> None:
    shown = counter(lambda _: 170.0)
    seldom = points(shown, 16.0, every_s=1.07)
    twice = sorted([*seldom, *((at_ns + 4_000_000, joules) for at_ns, joules in seldom)])
    alone, paired = (energy.spent(seen, [window(2.0, 13.0)]) for seen in (seldom, twice))

    assert alone is not None
    assert paired is not None
    assert any(before[1] == after[1] for before, after in pairwise(twice))
    assert paired.error_j == pytest.approx(alone.error_j, rel=0.1)


def test_answers_hardly_longer_than_a_step_of_the_counter_say_nothing() -> None:
    seen = points(counter(lambda _: 170.0, step_s=1.0), 12.0)

    short = [window(start, start + 1.2) for start in (1.0, 3.0, 5.0)]
    assert energy.spent(seen, short) is None
    assert energy.spent(seen, [*short, window(7.0, 11.0)]) is None  # one of four does not speak for the others
    assert energy.spent(seen, [window(7.0, 11.0)]) is not None


@pytest.mark.parametrize(("prefill_w", "decode_w"), [(170.0, 170.0), (250.0, 160.0), (110.0, 170.0)])
@pytest.mark.parametrize(
    ("step_s", "decode_s", "every_s", "most"),
    [
        (0.1, 1.1, 1.07, 2.0),  # a dear counter, which is read about once a second
        (0.1, 2.5, 1.07, 2.0),
        (0.1, 1.1, 0.1, 2.0),
        (1.0, 2.5, 1.07, 2.0),
        (1.0, 2.5, 0.1, 2.0),
        (0.02, 1.1, 1.07, 8.0),  # steps that are shorter than is taken for granted cannot be seen
        (0.02, 2.5, 0.1, 8.0),
    ],
)
def test_the_error_told_is_the_error_made_of_a_load_and_of_an_arm(
    step_s: float, decode_s: float, every_s: float, most: float, prefill_w: float, decode_w: float
) -> None:
    chance = random.Random(7)
    made, told, arms_made, arms_told = [], [], [], []
    for _ in range(60):
        loads = [load(chance, step_s, prefill_w, decode_w, decode_s, every_s) for _ in range(6)]
        spent = [energy.spent(seen, windows) for seen, windows, _ in loads]
        truth_j = [each[2] for each in loads]
        known = [(each, true_j) for each, true_j in zip(spent, truth_j, strict=True) if each is not None]
        made += [each.joules - true_j for each, true_j in known]
        told += [each.error_j for each, _ in known]
        if (arm := energy.per_token(spent, None)) is not None:
            steps = sum(each.steps for each, _ in known)
            arms_made.append(arm.joules * steps - sum(truth_j))
            arms_told.append(arm.error_j * steps)

    assert len(made) > 0.95 * 360
    assert 0.8 < together(told) / together(made) < most
    assert abs(statistics.fmean(made)) < 0.25 * together(made)  # else more loads would be no better
    assert len(arms_made) > 0.8 * 60
    assert 0.8 < together(arms_told) / together(arms_made) < most


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
