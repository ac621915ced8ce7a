"""One engine build at a time, in a folder that is gone afterwards.

A build happens in a work folder beside its target and is renamed into place when it is whole,
so an engine is either there or not. All that toolchains want to keep (modules, objects, wheels,
HOME) lies in the work folder, which goes away however the build ends; what a killed build left
is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import process
from harness.contract import Say
from harness.errors import Unavailable

EVERY_S = 3.0  # between two lines of progress
PINNED = Path(__file__).parent / "data" / "build-tools.lock"
# What would change a build, or send pip's files elsewhere. GOPROXY and pip's index settings stay.
SCRUBBED = re.compile(
    r"^(PIP_(TARGET|PREFIX|ROOT|USER|REQUIRE_VIRTUALENV|DRY_RUN)|PYTHON(PATH|HOME)|CC|CXX|\w*FLAGS|CMAKE_\w+|CGO_\w+"
    r"|GO(?!PROXY$|NOPROXY$|ENV$)\w*|NINJA_\w+|LLAMA_\w+|GGML_\w+|OLLAMA_\w+|ZIG_\w+)$"
)
NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ConnectionError|ReadTimeout|name resolution|NameResolutionError|no such host"
    r"|[Nn]etwork is unreachable|[Cc]onnection (refused|timed out|reset)|i/o timeout|ProxyError|Cannot connect to proxy"
)
COMPILERS = (("gcc", "g++"), ("cc", "c++"), ("clang", "clang++"))
PROBE = "#include <string>\n#include <thread>\nint main() { std::thread([] { std::string s; }).join(); }\n"


@dataclass(frozen=True, slots=True)
class Compilers:
    """A C and a C++ compiler that work, and the flags that they need; `zig` is set where they are zig's."""

    c: str
    cxx: str
    flags: str = ""
    zig: Path | None = None  # the folder of `zig-ar`, `zig-ranlib` and the compilers


@dataclass(frozen=True, slots=True)
class Build:
    """A build under way. `out` becomes the target; everything else in `work` is thrown away."""

    what: str
    work: Path
    log: Path
    say: Say

    @property
    def out(self) -> Path:
        return self.work / "out"

    def run(
        self,
        argv: Sequence[object],
        doing: str,
        *,
        environment: Mapping[str, str] | None = None,
        progress: Callable[[str], str | None] = lambda _line: None,
    ) -> str:
        """Run a command to its end and return what it printed.

        Every few seconds one line tells what `progress` made of the latest line of output.
        Raises Unavailable with the reason and the log.
        """
        arguments = [str(argument) for argument in argv]
        printed: list[str] = []
        latest, rest, started, told = "", b"", time.monotonic(), 0.0
        with self.log.open("a") as file:
            print("$", *arguments, file=file)
        environment = self.environment() | dict(environment or {})
        try:
            offset = self.log.stat().st_size
            with process.start(arguments, self.log, environment) as child, self.log.open("rb") as output:
                output.seek(offset)
                while True:
                    code = child.returncode()  # before reading, so that its last words are not missed
                    *lines, rest = (rest + output.read()).split(b"\n")
                    for line in lines if code is None else [*lines, rest]:
                        printed.append(line.decode(errors="replace"))
                        latest = progress(printed[-1]) or latest
                    if code is not None:
                        break
                    if not told or time.monotonic() - told >= EVERY_S:
                        told = time.monotonic()
                        self.say(f"{self.what}: {' '.join(filter(None, (doing, latest)))}, {_clock(told - started)}")
                    time.sleep(0.1)
        except OSError as error:
            raise Unavailable(f"{self.what}: {arguments[0]} cannot be started: {error.strerror}") from error
        if code:
            raise Unavailable(self._why(doing, code, printed))
        return "\n".join(printed)

    def environment(self) -> dict[str, str]:
        """Ours, less what would change a build; every folder that a tool writes to is in `work`."""
        kept = {key: value for key, value in os.environ.items() if not SCRUBBED.match(key)}
        home, temporary = self.work / "home", self.work / "tmp"
        for folder in (home, temporary):
            folder.mkdir(exist_ok=True)
        return kept | {
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home),
            "XDG_CACHE_HOME": str(home),
            "TMPDIR": str(temporary),
            "LC_ALL": "C",
            "GOTOOLCHAIN": "local",  # else an old Go fetches a new one by itself
            "ZIG_GLOBAL_CACHE_DIR": str(self.work / "zig"),
            "ZIG_LOCAL_CACHE_DIR": str(self.work / "zig"),
        }

    def fetch(self, *names: str) -> Path:
        """Install pinned wheels, each checked against its hash, and return the folder they are in."""
        wanted = self._requirements("-".join(names), pinned(names))
        folder = self.work / "tools" / "-".join(names)  # of its own: pip replaces the bin of an earlier one
        self._pip(["install", "--no-compile", "--only-binary=:all:", "--target", folder], wanted, names)
        return folder

    def fetch_source(self, requirement: str) -> Path:
        """Download one pinned sdist (`name==version --hash=…`) and return the archive.

        pip runs the sdist's own metadata step; what that needs comes pinned too.
        """
        name = requirement.partition("==")[0]
        tools = self.fetch("packaging", "setuptools", "setuptools-scm", "vcs-versioning", "wheel")
        wanted = self._requirements(name, requirement)
        folder = self.work / "sdist"
        options = ["download", "--no-build-isolation", "--no-binary", name, "--dest", folder]
        self._pip(options, wanted, [name], {"PYTHONPATH": str(tools)})
        return next(folder.iterdir())

    def compilers(self) -> Compilers:
        """The first pair on PATH that makes a program, else zig, which is one."""
        source = self.work / "probe.cpp"
        source.write_text(PROBE)
        for c, cxx in COMPILERS:
            if shutil.which(c) and shutil.which(cxx):
                with contextlib.suppress(Unavailable):
                    self.run([cxx, "-std=c++17", "-pthread", source, "-o", self.work / "probe"], f"trying {cxx}")
                    return Compilers(c, cxx)
        zig = self.fetch("ziglang") / "ziglang" / "zig"
        folder = self.work / "compilers"
        folder.mkdir(exist_ok=True)
        for name in ("cc", "c++", "ar", "ranlib"):
            script = folder / f"zig-{name}"
            script.write_text(f'#!/bin/sh\nexec "{zig}" {name} "$@"\n')
            script.chmod(0o755)
        # By default it takes __DATE__ for an error.
        return Compilers(str(folder / "zig-cc"), str(folder / "zig-c++"), "-Wno-date-time", folder)

    def _pip(
        self,
        options: Sequence[object],
        requirements: Path,
        names: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if importlib.util.find_spec("pip") is None:
            raise Unavailable(
                f"pip is missing in {sys.executable}: run `{sys.executable} -m ensurepip` or `uv pip install pip`"
            )
        quiet = ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
        checked = ["--require-hashes", "--no-deps", "--retries", "3", "-r", requirements]
        # pip reads its index settings and credentials below the real HOME; it writes nothing there.
        real = {key: os.environ[key] for key in ("HOME", "XDG_CONFIG_HOME") if key in os.environ}
        self.run(
            [sys.executable, "-m", "pip", *options, *quiet, *checked],
            f"fetching {', '.join(names)}",
            environment={"PIP_ROOT_USER_ACTION": "ignore"} | real | dict(environment or {}),
        )

    def _requirements(self, name: str, text: str) -> Path:
        file = self.work / f"{name}.txt"
        file.write_text(text + "\n")
        return file

    def _why(self, doing: str, code: int, printed: Sequence[str]) -> str:
        text = "\n".join(printed[-200:])
        if NO_NETWORK.search(text):
            return (
                f"{self.what}: {doing} failed, the package registry cannot be reached: "
                "connect this machine to the network (or set its proxy), then run this again"
            )
        if "No space left on device" in text:
            return (
                f"{self.what}: {doing} failed, the disk of {self.work.parent} is full: make room, then run this again"
            )
        told = [line.strip() for line in printed if line.strip() and not re.match(r"ninja: |\[\d+/\d+\] ", line)]
        errors = [at for at, line in enumerate(told) if re.search(r"\berror\b", line, re.IGNORECASE)]
        at = (errors or [len(told) - 1])[-1]
        more = 3 if told and told[at].endswith(":") else 1
        last = " ".join(told[at : at + more])[:300] if told else process.explain_exit(code)
        return f"{self.what}: {doing} failed: {last} (the whole log: {self.log})"


def once(target: Path, what: str, make: Callable[[Build], None], *, free_bytes: int, say: Say) -> None:
    """Have `make` fill `build.out` and move that to `target`; nothing happens where it is there.

    Raises Unavailable: no room, or the build failed; `target` does not exist then.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target, what, say):
        if target.exists():
            return
        process.end_leftovers()
        prefix = f".{target.name}."
        for left in target.parent.glob(f"{prefix}work-*"):
            shutil.rmtree(left, ignore_errors=True)
        free = shutil.disk_usage(target.parent).free
        if free < free_bytes:
            raise Unavailable(
                f"{what} needs {free_bytes / 1e9:.1f} GB of disk while it is built and {target.parent} has "
                f"{free / 1e9:.1f} GB free: make room, or point XDG_CACHE_HOME to another disk"
            )
        work = Path(tempfile.mkdtemp(prefix=f"{prefix}work-", dir=target.parent))
        log = target.parent / f"{target.name}.log"
        log.unlink(missing_ok=True)
        started = time.monotonic()
        try:
            build = Build(what, work, log, say)
            build.out.mkdir()
            make(build)
            log.rename(build.out / "build.log")
            build.out.rename(target)
        finally:
            say(f"{what}: removing the build's own files")
            shutil.rmtree(work, ignore_errors=True)
        say(f"{what}: ready in {_clock(time.monotonic() - started)}, {target}")


def pinned(names: Sequence[str]) -> str:
    """The entries of these packages in the lock file, with all their hashes."""
    entries = re.split(r"\n(?=\S)", PINNED.read_text())
    found = {entry.partition("==")[0]: entry.rstrip() for entry in entries if not entry.startswith("#")}
    return "\n".join(found[name] for name in names)


def key(*parts: str) -> str:
    """Short name of a build: two builds that may differ never share a folder."""
    system = platform.system()
    with contextlib.suppress(ValueError, OSError):
        system += os.confstr("CS_GNU_LIBC_VERSION") or ""
    text = "\n".join((system, platform.machine(), *parts))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


@contextlib.contextmanager
def _alone(target: Path, what: str, say: Say) -> Iterator[None]:
    """Hold the lock of this target; while another process has it, say so and wait."""
    with (target.parent / f".{target.name}.lock").open("a") as lock:
        started, told = time.monotonic(), -EVERY_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - started
                if waited - told >= EVERY_S:
                    told = waited
                    say(f"{what}: another llamaduel is building it, waiting, {_clock(waited)}")
                time.sleep(0.2)
        yield


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
