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

from harness.errors import RunRefused

OWNER = "LLAMADUEL_OWNER"  # the mark of the harness
CHILD = "LLAMADUEL_CHILD"  # one value for a child and all that it starts
ASIDE = "LLAMADUEL_ASIDE"  # set to 1: such a child is ours, ended like the others, and is no engine
SCRUBBED = re.compile(r"^(LLAMA_|GGML_|OLLAMA_|MTMD_|AIP_MODE$)")
STOP_S = 1.0  # an engine with a request in flight may never follow a signal
TAIL_BYTES = 64 * 1024
CLOCK_S = 5.0  # what two readings of one start time may differ by, where it is known by the wall clock only


def cache_dir() -> Path:
    """Where engines, models and private homes are kept (XDG; nothing is written elsewhere)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llamaduel"


def cache_folder(*names: str) -> Path:
    """A folder in the cache, made if need be. Raises RunRefused."""
    folder = cache_dir().joinpath(*names)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunRefused(
            f"{folder} cannot be made ({error.strerror}); set XDG_CACHE_HOME to a folder that you may write to"
        ) from None
    return folder


def engine_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without the variables that engines read, with a private HOME, plus `extra`.

    Device visibility and LD_LIBRARY_PATH stay: engines need them. The HOME persists, for shader
    caches; the configuration folder in it is empty, so that no config.ini leaks into a run.
    Raises RunRefused where the cache cannot be written.
    """
    config = cache_folder("home", "config")
    kept = {key: value for key, value in os.environ.items() if not SCRUBBED.match(key)}
    return kept | {"HOME": str(config.parent), "XDG_CONFIG_HOME": str(config)} | dict(extra or {})


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

    def last_line(self) -> str | None:
        """The last of its log that says something."""
        return next((line for line in reversed(self.tail()) if line.strip()), None)


@contextlib.contextmanager
def start(
    argv: Sequence[str], log: Path, environment: Mapping[str, str], stop_s: float = STOP_S, *, piped: bool = False
) -> Iterator[Child]:
    """Run a command until the block ends; whatever happens, it and its children are gone then.

    `piped` leaves its stdin and stdout to the caller, as unbuffered pipes of `Child.process`; stdin
    ends when the block does, or when we do. Raises OSError if it cannot be started.
    """
    _start_guard()
    log.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    marked = dict(environment) | {OWNER: owner(), CHILD: mark}
    with log.open("ab") as sink:
        process = psutil.Popen(
            list(argv),
            bufsize=0,
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else sink,
            stderr=sink,
            env=marked,
            start_new_session=True,
        )
    child = Child(process, mark, log)
    try:
        yield child
    finally:
        for pipe in (process.stdin, process.stdout) if piped else ():
            pipe.close()
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
    """Our own mark."""
    return mark_of(os.getpid())


def mark_of(pid: int) -> str:
    """`PID-START` of a process, so that a reused pid is not taken for it. Raises psutil.NoSuchProcess.

    On Linux the start is `TICKS.BOOT`: the system clock may be set while a run goes on, and every
    start time by that clock moves with it. Elsewhere it is that time, in seconds.
    """
    return f"{pid}-{_start_since_boot(pid) or f'{psutil.Process(pid).create_time():.2f}'}"


def is_alive(mark: str) -> bool:
    pid, _, started = mark.partition("-")
    with contextlib.suppress(psutil.Error, ValueError):
        process = psutil.Process(int(pid))
        now = _start_since_boot(process.pid)
        same = abs(process.create_time() - float(started)) < CLOCK_S if now is None else now == started
        return same and process.status() != psutil.STATUS_ZOMBIE
    return False


def _start_since_boot(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Clock ticks from boot to its start, and which boot that was; None where the system does not tell."""
    with contextlib.suppress(OSError, IndexError):
        # Fields are counted after the name, which may hold anything: 22 is the 20th of them.
        ticks = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[19]
        return f"{ticks}.{(proc / 'sys/kernel/random/boot_id').read_text().strip()[:8]}"
    return None


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


def python(code: str) -> list[str]:
    """A command that runs code of this package, whatever modules lie in the folder that we were started in."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path.append({str(Path(__file__).parent.parent)!r}); {code}"]


@cache
def _start_guard() -> None:
    """A process that ends all our children when our end of its pipe closes, however we died."""
    started = subprocess.Popen(
        python(f"from harness.process import guard; guard({owner()!r})"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(_end_guard, started)


def _end_guard(started: subprocess.Popen[bytes]) -> None:
    """Close the pipe and wait: at a normal end there is nothing to do. One more Ctrl-C changes nothing here."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(KeyboardInterrupt):  # one that came just before is raised here
            signal.signal(name, signal.SIG_IGN)
        signal.signal(name, signal.SIG_IGN)
    assert started.stdin is not None
    started.stdin.close()
    started.wait()


def guard(mark: str) -> None:
    """Body of the guard process: wait for the end of the harness, then end its children."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_marked(OWNER, mark)
