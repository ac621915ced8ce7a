"""Foreign load, quiet machine and the cost of a load: from recorded counters, and on this machine."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from harness import process, telemetry
from harness.energy import Meter
from harness.gpu import Glance
from harness.telemetry import Quiet, Reader, Reading, Settled

GIB = 1 << 30


def cards(used: int, *throttles: str, **told: Any) -> tuple[Glance, ...]:
    """One card of 24 GiB as it is seen at a moment."""
    return (Glance(used_bytes=used, total_bytes=24 * GIB, throttles=frozenset(throttles) or None, **told),)


# counters of a 2-core machine: seconds of CPU time since boot
AT_REST = Reading(at_s=100.0, busy_s=900.0, steal_s=2.0, own_s=10.0, kernel_s=30.0)


def later(seconds: float, **grown: float) -> Reading:
    """AT_REST after some seconds, its counters grown by so much."""
    counters = {
        name: getattr(AT_REST, name) + grown.get(name, 0.0) for name in ("busy_s", "steal_s", "own_s", "kernel_s")
    }
    return Reading(at_s=AT_REST.at_s + seconds, **counters)


# ── from readings to facts ──────────────────────────────────────────────────────────────────


def test_foreign_is_busy_less_own_less_kernel_threads_plus_steal() -> None:
    after = later(10.0, busy_s=17.0, own_s=12.0, kernel_s=1.0, steal_s=0.5)

    assert telemetry.foreign_between(AT_REST, after) == pytest.approx(0.45)


def test_our_own_work_alone_is_not_foreign() -> None:
    assert telemetry.foreign_between(AT_REST, later(5.0, busy_s=9.9, own_s=9.9)) == pytest.approx(0.0)


def test_foreign_is_unknown_where_the_system_hides_processes() -> None:
    blind = Reading(at_s=101.0, busy_s=901.0)

    assert telemetry.foreign_between(AT_REST, blind) is None
    assert telemetry.foreign_mean([AT_REST, blind]) is None
    assert telemetry.summarise([AT_REST, blind]).disturbed is None


def test_macos_without_steal_and_kernel_threads_still_tells_foreign_load() -> None:
    before = Reading(at_s=0.0, busy_s=50.0, own_s=5.0)
    after = Reading(at_s=2.0, busy_s=53.0, own_s=7.0)

    assert telemetry.foreign_between(before, after) == pytest.approx(0.5)


def test_a_window_in_which_a_process_of_ours_was_lost_is_left_out_of_the_mean() -> None:
    lost = later(2.0, busy_s=2.0, own_s=-3.0)
    after = later(4.0, busy_s=2.4, own_s=-3.0)

    assert telemetry.foreign_between(AT_REST, lost) is None
    assert telemetry.foreign_mean([AT_REST, lost, after]) == pytest.approx(0.2)


def test_the_mean_weighs_windows_by_their_length() -> None:
    readings = [AT_REST, later(1.0, busy_s=1.0), later(10.0, busy_s=1.0)]

    assert telemetry.foreign_mean(readings) == pytest.approx(0.1)


def test_a_load_under_foreign_work_is_disturbed_and_one_just_below_the_limit_is_not() -> None:
    assert telemetry.summarise([AT_REST, later(10.0, busy_s=3.1)]).disturbed is True
    assert telemetry.summarise([AT_REST, later(10.0, busy_s=2.9)]).disturbed is False


def test_a_load_is_summed_up_by_peaks_and_growth() -> None:
    gib = 1 << 30
    readings = [
        Reading(at_s=0.0, gpus=cards(2 * gib), swap_used_bytes=100, memory_stall_s=1.0),
        Reading(
            at_s=1.0,
            rss_bytes=5 * gib,
            major_faults=40,
            gpus=cards(9 * gib, "heat"),
            swap_used_bytes=350,
            memory_stall_s=1.25,
        ),
        Reading(
            at_s=2.5,
            gpus=cards(2 * gib, "power cap"),
            swap_used_bytes=300,
            memory_stall_s=1.5,
        ),
    ]

    seen = telemetry.summarise(readings)

    assert seen.seconds == 2.5
    assert seen.peak_rss_bytes == 5 * gib
    assert seen.vram_bytes == 7 * gib
    assert seen.major_faults == 40
    assert seen.swap_growth_bytes == 250
    assert seen.memory_stall_s == 0.5
    assert seen.throttles == ("heat", "power cap")


def test_faults_from_before_the_first_look_at_an_engine_that_ran_already_do_not_count() -> None:
    readings = [Reading(at_s=float(at), major_faults=faults) for at, faults in enumerate([100, 130, 5, 9])]

    assert telemetry.summarise(readings).major_faults == 30 + 4


def test_a_baseline_from_before_the_load_wins_over_the_first_look() -> None:
    readings = [Reading(at_s=0.0, gpus=cards(700)), Reading(at_s=1.0, gpus=cards(900))]

    assert telemetry.summarise(readings, baseline_bytes=100).vram_bytes == 800


def test_a_card_that_was_lost_leaves_unknown_how_much_memory_was_taken() -> None:
    one, two, lost = Glance(used_bytes=3, total_bytes=24), Glance(used_bytes=5, total_bytes=24), Glance(total_bytes=24)
    before, after = dataclasses.replace(one, used_bytes=0), Reading(at_s=2.0, gpus=(one, lost))

    assert (
        telemetry.summarise([Reading(at_s=0.0, gpus=(before, two)), Reading(at_s=1.0, gpus=(one, two))]).vram_bytes == 3
    )
    assert telemetry.summarise([Reading(at_s=0.0, gpus=(before, two)), after]).vram_bytes is None
    assert telemetry.summarise([after, after]).vram_bytes is None


def test_what_the_system_does_not_tell_is_none_and_never_zero() -> None:
    seen = telemetry.summarise([Reading(at_s=0.0), Reading(at_s=3.0)])

    assert {name: value for name, value in seen.to_json().items() if value is not None} == {"seconds": 3.0}


# ── waiting ─────────────────────────────────────────────────────────────────────────────────


class Recorded:
    """A machine played back: each look advances its clock by one second and adds that second's foreign work."""

    def __init__(self, foreign: Iterable[float], gpu: Iterable[float | None] = ()) -> None:
        self.foreign, self.gpu = list(foreign), list(gpu)
        self.now_s, self.busy_s, self.slept_s = 0.0, 0.0, 0.0

    def read(self) -> Reading:
        return Reading(at_s=self.now_s, busy_s=self.busy_s, own_s=0.0, gpus=cards(77))

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.now_s += seconds
        self.busy_s += seconds * (self.foreign.pop(0) if len(self.foreign) > 1 else self.foreign[0])

    def gpu_busy(self) -> float | None:
        return self.gpu.pop(0) if self.gpu else None

    def wait(self, **keywords: Any) -> Quiet:
        return telemetry.wait_until_quiet(read=self.read, sleep=self.sleep, gpu_busy=self.gpu_busy, **keywords)


def test_a_quiet_machine_costs_one_look() -> None:
    assert Recorded([0.125]).wait() == Quiet(1.0, 0.125, True, None, 77)


def test_waiting_ends_when_the_others_end_and_says_so_once() -> None:
    said: list[str] = []

    found = Recorded([1.5, 1.5, 0.2]).wait(say=said.append)

    assert (found.waited_s, found.quiet) == (3.0, True)
    assert len(said) == 1
    assert "1.5 cores" in said[0]
    assert "--no-wait" in said[0]


def test_after_the_longest_wait_it_goes_on_and_keeps_what_it_saw() -> None:
    found = Recorded([0.875]).wait(wait_s=5.0)

    assert found == Quiet(5.0, 0.875, False, None, 77)


def test_a_gpu_at_work_for_others_is_waited_for_too() -> None:
    said: list[str] = []

    found = Recorded([0.0], gpu=[0.8, 0.0]).wait(say=said.append)

    assert (found.waited_s, found.quiet, found.foreign_gpu) == (2.0, True, 0.0)
    assert "GPU 80%" in said[0]


def test_where_foreign_load_is_unknown_nothing_is_waited_for_and_nothing_is_claimed() -> None:
    times = iter(range(100))

    found = telemetry.wait_until_quiet(
        read=lambda: Reading(at_s=float(next(times))), sleep=lambda _: None, gpu_busy=lambda: None
    )

    assert found == Quiet(1.0, None, None, None, None)


def settle(looks: list[tuple[int | None, tuple[int, ...]]], baseline: int | None, **keywords: Any) -> Settled:
    clock = iter(range(1000))
    return telemetry.memory_settled(
        baseline,
        look=lambda: looks.pop(0) if len(looks) > 1 else looks[0],
        clock=lambda: float(next(clock)),
        sleep=lambda _: None,
        **keywords,
    )


def test_memory_is_settled_within_the_slack_once_no_engine_is_left() -> None:
    mib = 1 << 20

    found = settle([(9000 * mib, (41,)), (1200 * mib, (41,)), (1200 * mib, ())], baseline=1000 * mib)

    assert found == Settled(3.0, True, 200 * mib, ())


def test_memory_that_stays_is_a_flag_after_thirty_seconds() -> None:
    mib = 1 << 20

    found = settle([(1300 * mib, ())], baseline=1000 * mib)

    assert found == Settled(30.0, False, 300 * mib, ())


def test_without_a_gpu_only_the_processes_count() -> None:
    assert settle([(None, (7,)), (None, ())], baseline=None) == Settled(2.0, True, None, ())


# ── readings of this machine ────────────────────────────────────────────────────────────────

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, which only Linux has")


def stat_line(pid: int, name: str, parent: int, *, faults: int = 0, ticks: tuple[int, ...], pages: int = 0) -> str:
    """`/proc/PID/stat` as the kernel writes it; `ticks` are utime, stime, cutime, cstime."""
    user, system, child_user, child_system = ticks
    return (
        f"{pid} ({name}) S {parent} {pid} {pid} 0 -1 4194560 9000 12 {faults} 5 {user} {system} {child_user} "
        f"{child_system} 20 0 4 0 {pid}00 123456789 {pages} 18446744073709551615 1 1 0 0 0 0 0 0 17 1 0 0 0 0 0\n"
    )


@linux
def test_process_counters_are_told_apart_by_tree_mark_and_kernel(tmp_path: Path) -> None:
    us, mark = os.getpid(), f"{process.OWNER}={process.owner()}"

    def put(pid: int, line: str, environment: str = "HOME=/x") -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(line)
        (tmp_path / str(pid) / "environ").write_bytes(environment.encode() + b"\0A=1\0")

    put(2, stat_line(2, "kthreadd", 0, ticks=(0, 50, 0, 0)))
    put(9, stat_line(9, "kworker/0:1", 2, ticks=(0, 150, 0, 0)))
    put(us, stat_line(us, "python", 1, faults=99, ticks=(100, 20, 300, 80), pages=7))
    put(us + 1, stat_line(us + 1, "helper", us, faults=9, ticks=(10, 0, 0, 0), pages=5))
    put(us + 2, stat_line(us + 2, "llama (server) 1", 1, faults=3, ticks=(400, 40, 0, 0), pages=1000), mark)
    put(us + 3, stat_line(us + 3, "compiler", 1, ticks=(5000, 0, 0, 0), pages=9), f"{process.OWNER}=1-2.00")
    put(us + 4, stat_line(us + 4, "attached", 1, faults=4, ticks=(30, 0, 0, 0), pages=10))
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure/memory").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull total=0\n")
    tick, page = 1 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")

    seen = Reader(lambda: (us + 4,), tmp_path).read()

    assert seen.own_s == pytest.approx((500 + 10 + 440 + 30) * tick)
    assert seen.kernel_s == pytest.approx(200 * tick)
    assert seen.rss_bytes == 1010 * page
    assert seen.major_faults == 7
    assert seen.memory_stall_s == 2.5
    assert Reader(proc=tmp_path).engine_pids() == (us + 2,)


@linux
def test_a_process_that_ends_while_it_is_read_is_left_out(tmp_path: Path) -> None:
    for pid, text in ((os.getpid(), stat_line(os.getpid(), "python", 1, ticks=(7, 0, 0, 0))), (77, "")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(text)
    (tmp_path / "88").mkdir()

    seen = Reader(proc=tmp_path).read()

    assert seen.own_s == pytest.approx(7 / os.sysconf("SC_CLK_TCK"))
    assert (seen.rss_bytes, seen.major_faults) == (None, None)  # no engine: unknown, not 0


BURN = "import time\nwhile time.process_time() < 0.4: pass\n"


def burn_as_orphan(environment: dict[str, str]) -> None:
    """Run a process that is no descendant of ours, until its end."""
    read, write = os.pipe()
    code = f"import os, sys\nif os.fork(): sys.exit()\nos.setsid()\n{BURN}"
    subprocess.run([sys.executable, "-c", code], env=environment, pass_fds=(write,), check=True)
    os.close(write)
    os.read(read, 1)  # returns when the orphan, which holds the other end, is gone
    os.close(read)


@linux
def test_an_orphan_without_our_mark_is_foreign() -> None:
    before = Reader().read()

    burn_as_orphan({})
    after = Reader().read()

    foreign = telemetry.foreign_between(before, after)
    assert foreign is not None
    assert foreign * (after.at_s - before.at_s) > 0.2  # the rest of the machine can only add to it


@linux
def test_a_child_of_ours_is_own_even_after_it_ended() -> None:
    reader = Reader()
    before = reader.read()

    subprocess.run([sys.executable, "-c", BURN], check=True)

    after = reader.read()
    assert before.own_s is not None
    assert after.own_s is not None
    assert after.own_s - before.own_s > 0.35


@linux
def test_a_marked_engine_is_own_wherever_it_hangs_in_the_tree() -> None:
    wait = "import sys\nprint(1, flush=True)\nsys.stdin.read()\n"
    code = f"import os, sys\nif os.fork(): os._exit(0)\nos.setsid()\n{BURN}{wait}"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={process.OWNER: process.owner()},
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"1\n"  # it has burnt its share and lives on, with init as its parent
        parent.wait()
        reader = Reader()
        seen = reader.read()
        alive = reader.engine_pids()
        assert parent.stdin is not None
        parent.stdin.close()

    assert parent.pid not in alive
    assert len(alive) == 1
    assert seen.rss_bytes is not None
    assert seen.rss_bytes > 1 << 20


def test_without_proc_psutil_still_tells_own_time_and_engine_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "HAS_PROC", False)  # as on macOS
    reader = Reader()
    before = reader.read()
    code = f"{BURN}import sys\nprint(1, flush=True)\nsys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={process.OWNER: process.owner()},
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"1\n"
        seen, alive = reader.read(), reader.engine_pids()
        assert engine.stdin is not None
        engine.stdin.close()

    assert alive == (engine.pid,)
    assert before.own_s is not None
    assert seen.own_s is not None
    assert seen.own_s - before.own_s > 0.35
    assert (before.rss_bytes, seen.kernel_s, seen.major_faults) == (None, None, None)
    assert seen.rss_bytes is not None


@linux
def test_watching_sees_the_peak_of_an_engine_that_is_gone_at_the_end() -> None:
    code = "import sys\nheld = bytearray(64 << 20)\nprint(1, flush=True)\nsys.stdin.read()\n"
    reader = Reader()
    looked = threading.Semaphore(0)

    def read() -> Reading:
        seen = reader.read()
        looked.release()
        return seen

    with (
        telemetry.watch(read=read) as watcher,
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={process.OWNER: process.owner()},
        ) as engine,
    ):
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"1\n"
        while looked.acquire(blocking=False):
            pass
        assert looked.acquire(timeout=60)  # one look that may have begun before
        assert looked.acquire(timeout=60)
        assert engine.stdin is not None
        engine.stdin.close()

    peak = watcher.summary().peak_rss_bytes
    assert peak is not None
    assert peak > 64 << 20
    assert watcher.summary().seconds > 0
    assert not [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_the_dearer_a_reading_the_rarer_it_is_taken() -> None:
    stamps: list[float] = []

    def read() -> Reading:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        stamps.append(time.monotonic())
        return Reading(at_s=stamps[-1])

    with telemetry.watch(read=read):
        deadline = time.monotonic() + 60
        while len(stamps) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)

    assert stamps[2] - stamps[1] > 1.9  # 0.02 s of CPU at 1 % of a core


def test_dear_looks_at_everything_and_at_energy_cost_less_than_a_hundredth_of_a_core_together() -> None:
    def spin(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    def read() -> Reading:
        spin(0.004)
        return Reading(at_s=time.perf_counter())

    def joules() -> float:
        spin(0.0043)
        return time.perf_counter()

    with telemetry.watch(read=read, meter=Meter(joules, lambda: None)) as watcher:
        time.sleep(8.0)

    share = watcher.summary().watch_share
    assert share is not None
    assert 0.004 < share < 0.01


@linux
def test_a_look_at_this_machine_gives_a_number() -> None:
    assert telemetry.foreign_cores(window_s=0.05) is not None
