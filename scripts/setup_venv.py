"""Make `.venv` with the locked project in it, and tell what is going on meanwhile.

Standard library only, and readable for old Pythons: they are told that they are too old. A stamp,
written last, says that `.venv` is whole; without it the next start does everything again.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    sys.exit(f"Python 3.11 or newer is needed, this is {version}: take a newer one, as in `python3.12 {sys.argv[0]}`")
if sys.platform == "win32":
    sys.exit("Windows itself is not supported: run `wsl --install`, and start this in the Linux that it brings")

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = VENV / "setup.lock"  # there from the first moment: it marks a folder as made here
STAMP = VENV / "setup.json"
LOG = VENV / "setup.log"
STEPS = "1"  # raise it when a step below changes
FREE_BYTES = 1_500_000_000
BASE = getattr(sys, "_base_executable", "") or sys.executable  # not the one in .venv, which may go away
NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ConnectionError|ReadTimeout|NameResolutionError|name resolution|dns error"
    r"|[Nn]etwork is unreachable|[Cc]onnection (refused|timed out|reset)|ProxyError|error sending request"
)
SCRUBBED = re.compile(
    r"PIP_(TARGET|PREFIX|ROOT|USER|REQUIRE_VIRTUALENV)|PYTHON(PATH|HOME)|UV_(TARGET|PREFIX|SYSTEM_PYTHON|PYTHON)"
)


class Stopped(Exception):
    """The set-up cannot go on; the message is one sentence with the next step."""


def set_up(dev: bool) -> None:
    """Make `.venv`, or what is missing of it; `dev` adds the tools that the tests need."""
    if VENV.exists() and not LOCK.exists() and any(VENV.iterdir()):
        raise Stopped(
            f"{VENV} was not made by this script: move it away (`mv .venv .venv.mine`), then start this again"
        )
    VENV.mkdir(exist_ok=True)
    with LOCK.open("a") as lock:
        _wait_for(lock)
        have, want = _stamp(), _key()
        if have.get("key") == want and (have.get("dev") or not dev):
            return
        free = shutil.disk_usage(VENV).free
        if free < FREE_BYTES:
            raise Stopped(f"{free / 1e9:.1f} GB of disk are free at {ROOT} and 1.5 GB are needed: make room first")
        STAMP.unlink(missing_ok=True)
        requirements = ROOT / f"requirements{'-dev' if dev else ''}.lock"
        uv = shutil.which("uv")
        if have.get("key") != want:
            _remove_all_but(LOCK)
            _make_venv(uv, lock)
        installer = (
            [uv, "pip", "install", "--python", PYTHON] if uv else [PYTHON, "-m", "pip", "install", "--retries=3"]
        )
        checked = ["--require-hashes", "--no-deps", "--only-binary=:all:", "-r", requirements]
        step(f"packages of {requirements.name}", [*installer, *checked], lock)
        step("llamaduel itself", [*installer, "--no-deps", "--no-build-isolation", "--editable", ROOT], lock)
        STAMP.write_text(json.dumps({"key": want, "dev": dev}))


def step(title: str, argv: Sequence[object], lock: IO[str]) -> None:
    """Run one command of the set-up; its output goes to the log, a counter runs meanwhile.

    The child inherits the lock: if we are killed, the next start waits until it too is gone.
    """
    live = sys.stdout.isatty()
    if not live:
        print(f"{title} …", flush=True)
    started = time.monotonic()
    environment = {key: value for key, value in os.environ.items() if not SCRUBBED.fullmatch(key)}
    with LOG.open("w") as log:
        process = subprocess.Popen(
            [str(argument) for argument in argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=ROOT,
            pass_fds=[lock.fileno()],
        )
    try:
        while process.poll() is None:
            if live:
                _show(f"{title}, {time.monotonic() - started:.0f} s  {_last_line()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
    except KeyboardInterrupt:
        process.kill()
        process.wait()
        raise
    seconds = time.monotonic() - started
    if live:
        _show("")
    if process.returncode:
        raise Stopped(_why(title))
    print(f"{title}: {seconds:.1f} s", flush=True)


def _make_venv(uv: str | None, lock: IO[str]) -> None:
    title = f".venv with Python {sys.version_info[0]}.{sys.version_info[1]}"
    if uv:
        step(title, [uv, "venv", "--allow-existing", "--no-project", "--python", BASE, VENV], lock)
    elif importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        step(title, [BASE, "-m", "venv", VENV], lock)
    else:
        raise Stopped(
            "this Python cannot make virtual environments: "
            f"`apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-venv` (Debian, Ubuntu), "
            "then start this again"
        )


def _why(title: str) -> str:
    told = LOG.read_text(errors="replace")
    if NO_NETWORK.search(told):
        return (
            f"{title}: no package index can be reached: connect this machine (or set its proxy), then start this again"
        )
    if "No space left on device" in told or "os error 28" in told:
        return f"{title}: the disk is full: make room, then start this again"
    if "No matching distribution" in told or "no wheels with a matching" in told:
        return f"{title}: one of them has no wheel for this system; Linux (glibc 2.28, x86_64 or aarch64) and macOS do"
    errors = [line for line in told.splitlines() if re.search("error", line, re.IGNORECASE)] or [_last_line()]
    return f"{title} failed: {errors[-1].strip()[:300]} (the whole log: {LOG})"


def _key() -> str:
    files = [ROOT / name for name in ("pyproject.toml", "requirements.lock", "requirements-dev.lock")]
    facts = [STEPS, os.path.realpath(BASE), str(ROOT), str(sys.version_info[:2]), *(file.read_text() for file in files)]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def _stamp() -> dict[str, object]:
    """What the stamp says, or nothing where `.venv` is not whole."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(STAMP.read_text())
        if PYTHON.exists() and isinstance(found, dict):
            return found
    return {}


def _wait_for(lock: IO[str]) -> None:
    said = False
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not said:
            print("another start is setting up .venv, waiting for it …", flush=True)
        said = True
        time.sleep(0.2)


def _remove_all_but(kept: Path) -> None:
    for path in kept.parent.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != kept:
            path.unlink()


def _last_line() -> str:
    lines = [line.strip() for line in LOG.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _show(text: str) -> None:
    """Put `text` on the terminal's current line, cut to its width."""
    width = shutil.get_terminal_size().columns - 1
    print("\r\033[K" + text[:width], end="", flush=True)


@contextlib.contextmanager
def plain_endings() -> Iterator[None]:
    """What stops the set-up ends in one line and an exit code, never in a traceback."""
    try:
        yield
    except Stopped as reason:
        sys.exit(str(reason))
    except OSError as error:
        sys.exit(f"the set-up stopped: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


def take_flags(arguments: list[str], usage: str, *flags: str) -> set[str]:
    """Remove our own flags from the front of `arguments`, up to `--`; the rest is pytest's."""
    if {"-h", "--help"} & set(arguments[:1]):
        print(usage.strip())
        sys.exit(0)
    ours = arguments[: arguments.index("--")] if "--" in arguments else list(arguments)
    taken = {flag for flag in flags if flag in ours}
    arguments[:] = [word for word in ours if word not in taken] + arguments[len(ours) + 1 :]
    return taken


def become(*argv: object) -> None:
    """Replace this process, so that signals and the exit code are pytest's own."""
    sys.stdout.flush()
    os.execv(PYTHON, [str(PYTHON), *map(str, argv)])
