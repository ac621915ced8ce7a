"""Children that never outlive us: start, watch, explain their death, stop.

Every child carries a mark in its environment that its own children inherit, so that Ollama's
runner is found even after `ollama serve` was killed. A guard process ends everything with our
mark if we are killed, and `end_leftovers` does it again at the next start.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

OWNER = "LLAMADUEL_OWNER"  # pid and start time of the harness
CHILD = "LLAMADUEL_CHILD"  # one value for a child and all that it starts
SCRUBBED = re.compile(r"^(LLAMA_|GGML_|OLLAMA_|MTMD_|AIP_MODE$)")
STOP_S = 1.0  # an engine with a request in flight may never follow a signal
TAIL_BYTES = 64 * 1024


def cache_dir() -> Path:
    """Where engines, models and private homes are kept (XDG; nothing is written elsewhere)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llamaduel"


def engine_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without the variables that engines read, with a private HOME, plus `extra`.

    Device visibility and LD_LIBRARY_PATH stay: engines need them. The HOME persists, for shader
    caches; the configuration folder in it is empty, so that no config.ini leaks into a run.
    """
    home = cache_dir() / "home"
    (home / "config").mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not SCRUBBED.match(key)}
    return kept | {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")} | dict(extra or {})


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Child:
    """A started engine. `log` holds its stdout and stderr."""

    process: psutil.Popen
    mark: str
    log: Path

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def returncode(self) -> int | None:
        """None while it runs."""
        code = self.process.poll()
        return None if code is None else int(code)

    def pids(self) -> tuple[int, ...]:
        """This process and every one that it started, while they run."""
        marked = {process.pid for process in _marked(CHILD, self.mark)}
        return tuple(sorted(marked | ({self.pid} if self.returncode() is None else set()), key=self.pid.__ne__))

    def tail(self, lines: int = 400) -> list[str]:
        """The last lines of its log."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-lines:]
        return []


@contextlib.contextmanager
def start(argv: Sequence[str], log: Path, environment: Mapping[str, str], stop_s: float = STOP_S) -> Iterator[Child]:
    """Run a command until the block ends; whatever happens, it and its children are gone then.

    Raises OSError if it cannot be started.
    """
    _start_guard()
    log.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    marked = dict(environment) | {OWNER: owner(), CHILD: mark}
    with log.open("ab") as sink:
        process = psutil.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=marked, start_new_session=True
        )
    child = Child(process, mark, log)
    try:
        yield child
    finally:
        stop(child, stop_s)


def stop(child: Child, stop_s: float = STOP_S) -> None:
    """SIGTERM, a deadline, SIGKILL; then the same for whatever it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        child.process.terminate()
    with contextlib.suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
        child.process.wait(stop_s)
    with contextlib.suppress(psutil.NoSuchProcess):
        child.process.kill()
    child.process.wait()
    end_marked(CHILD, child.mark)


def end_marked(variable: str, value: str, wait_s: float = 5.0) -> list[int]:
    """Kill every process whose environment holds `variable=value`; the pids that were ended."""
    ended: list[int] = []
    deadline = time.monotonic() + wait_s
    while (found := _marked(variable, value)) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=0.5)
        ended += [process.pid for process in found]
    return sorted(set(ended))


def end_leftovers() -> list[int]:
    """End what a killed harness left running: marked processes whose owner is gone. Their pids."""
    dead: set[str] = set()
    for process in psutil.process_iter():
        mark = _environ(process).get(OWNER, "")
        if mark and not is_alive(mark):
            dead.add(mark)
    return [pid for mark in sorted(dead) for pid in end_marked(OWNER, mark)]


def explain_exit(code: int) -> str:
    """What an exit code means, with the next step where there is one."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    reason = {
        "SIGILL": "this binary was built for another CPU; run `llamaduel engines install llama-cpp` on this machine",
        "SIGKILL": "killed, most likely by the system for lack of memory; take a smaller model or context",
        "SIGSEGV": "a crash inside the engine; its log has the last lines",
        "SIGABRT": "the engine gave up, often for lack of device memory; its log has the last lines",
        "SIGTERM": "ended from outside",
    }.get(name, "ended by a signal")
    return f"{name}: {reason}"


@cache
def owner() -> str:
    """Our own mark: pid and start time, so that a reused pid is not taken for us."""
    return f"{os.getpid()}-{psutil.Process().create_time():.2f}"


def is_alive(mark: str) -> bool:
    pid, _, started = mark.partition("-")
    with contextlib.suppress(psutil.Error, ValueError):
        process = psutil.Process(int(pid))
        return f"{process.create_time():.2f}" == started and process.status() != psutil.STATUS_ZOMBIE
    return False


def _environ(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ()
    return {}


def _marked(variable: str, value: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and _environ(process).get(variable) == value
    ]


@cache
def _start_guard() -> None:
    """A process that ends all our children when our end of its pipe closes, however we died."""
    code = f"from harness.process import guard; guard({owner()!r})"
    started = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(started.communicate)  # closes the pipe and waits: at a normal end there is nothing to do


def guard(mark: str) -> None:
    """Body of the guard process: wait for the end of the harness, then end its children."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_marked(OWNER, mark)
