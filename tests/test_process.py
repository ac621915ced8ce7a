"""Marks that outlast a set clock, a cache that cannot be written, and an end that nobody can spoil."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from harness import process
from harness.errors import RunRefused

HAS_PROC = Path("/proc/self/stat").exists()


def move_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """As after a step of the system clock: all start times by it move along."""
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + seconds)


def test_a_process_is_its_mark_for_as_long_as_it_lives() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        mark = process.mark_of(child.pid)
        assert mark.startswith(f"{child.pid}-")
        assert process.is_alive(mark)
    assert not process.is_alive(mark)
    assert process.owner() == process.mark_of(os.getpid())


def test_another_process_of_the_same_number_is_not_taken_for_it() -> None:
    pid, _, start = process.mark_of(os.getpid()).partition("-")
    assert not process.is_alive(f"{pid}-1{start}")


@pytest.mark.parametrize("mark", ["", "7", "x-y", "-", "99999999999999999999-1.2"])
def test_what_is_no_mark_is_nobodys(mark: str) -> None:
    assert not process.is_alive(mark)


@pytest.mark.skipif(not HAS_PROC, reason="start times are known by the wall clock only on this system")
@pytest.mark.parametrize("seconds", [-7200.0, 0.02, 86400.0])
def test_setting_the_system_clock_ends_nobody(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = process.mark_of(os.getpid())
    move_clock(monkeypatch, seconds)
    assert process.is_alive(mark)
    assert process.mark_of(os.getpid()) == mark


def test_where_only_the_wall_clock_is_known_a_little_may_be_between_two_readings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "_start_since_boot", lambda pid: None)
    mark = process.mark_of(os.getpid())
    move_clock(monkeypatch, 2.0)
    assert process.is_alive(mark)
    move_clock(monkeypatch, 60.0)
    assert not process.is_alive(mark)


def test_a_name_full_of_brackets_and_spaces_does_not_move_the_fields(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = ["S", *map(str, range(4, 53))]  # field n of the line holds n
    (tmp_path / "7" / "stat").write_text(f"7 (a ) b (c) {' '.join(fields)}\n")
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("0123abcd-4567-89ab-cdef-0123456789ab\n")
    assert process._start_since_boot(7, tmp_path) == "22.0123abcd"
    assert process._start_since_boot(8, tmp_path) is None


def test_a_cache_that_cannot_be_written_names_the_variable_that_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for call in (process.engine_environment, lambda: process.cache_folder("sessions")):
        with pytest.raises(RunRefused, match=r"cannot be made .*; set XDG_CACHE_HOME to a folder") as raised:
            call()
        assert "\n" not in str(raised.value)


def test_engines_get_a_home_of_their_own_with_an_empty_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1")
    found = process.engine_environment({"MORE": "1"})
    home = tmp_path / "llamaduel" / "home"
    assert (found["HOME"], found["XDG_CONFIG_HOME"], found["MORE"]) == (str(home), str(home / "config"), "1")
    assert list((home / "config").iterdir()) == []
    assert "LLAMA_ARG_CTX_SIZE" not in found


IMPATIENT = """
import os, signal, subprocess
from harness import process

def press(*_):
    raise KeyboardInterrupt

for name in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(name, press)  # as the command line has it
wait = subprocess.Popen.wait

def wait_impatiently(self, *arguments, **keywords):
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), name)
    code = wait(self, *arguments, **keywords)
    print("the guard ended with", code, flush=True)
    return code

process._start_guard()
subprocess.Popen.wait = wait_impatiently
"""


def test_one_more_ctrl_c_at_the_end_prints_nothing_and_waits_for_the_guard() -> None:
    done = subprocess.run([sys.executable, "-c", IMPATIENT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the guard ended with 0\n", "")


EARLIER = """
real, pressed = signal.signal, set()

def signal_late(name, handler):
    if name not in pressed:
        pressed.add(name)
        os.kill(os.getpid(), name)
    return real(name, handler)

signal.signal = signal_late
"""


def test_a_ctrl_c_just_before_it_is_ignored_is_ignored_too() -> None:
    script = IMPATIENT + EARLIER
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the guard ended with 0\n", "")


def test_code_of_ours_runs_whatever_modules_lie_in_the_folder_we_were_started_in(tmp_path: Path) -> None:
    (tmp_path / "harness.py").write_text("raise SystemExit(3)\n")
    argv = process.python("from harness.process import guard; guard('0-0')")

    assert subprocess.run(argv, cwd=tmp_path, stdin=subprocess.DEVNULL, check=False).returncode == 0
