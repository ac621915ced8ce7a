"""llama.cpp: `llama-server` in every placement, a full build or the wheel behind its flags.

One adapter for all placements, so that they cannot drift apart: a placement is a few words of
argv. Where an engine was found decides only how it is started; what it did is read from its own
`/props` and from the buffer lines of its log.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from backends import embedded_server, llama_failure, llama_log, stand_in
from backends.llama_bench import bench, require_bench
from backends.llama_failure import Failure, read_failure
from backends.llama_http import GREEDY, Server, error_text, listens, read_line
from backends.stand_in import StandIn
from harness import process
from harness.arms import read_arm
from harness.contract import (
    Arm,
    Chunk,
    Device,
    Engine,
    ModelFile,
    Placement,
    Prompt,
    Realised,
    Request,
    Settings,
    Usage,
)
from harness.errors import Crashed, EngineFailed, TimedOut, Unavailable, UsageError

PROGRAM = "llama-server"
INSTALL = "`llamaduel engines install llama-cpp`"
NO_RPC = f"this build has no RPC, so it does not see the stand-in device; run {INSTALL}"
PLACEMENTS = ("auto", "ngl=N", "cpu-moe", "ncmoe=N", "cpu")
KNOBS = ("c", "b", "ub", "t", "fa", "ctk", "ctv", "lm", "rpc")
LAYERS = "999"  # more than any model has

# how settings are spelled, in the order of the command line
FLAGS = {
    "context": "-c",
    "batch": "-b",
    "ubatch": "-ub",
    "threads": "-t",
    "flash_attention": "-fa",
    "kv_k": "-ctk",
    "kv_v": "-ctv",
}
# before --load-mode (builds up to about b10500)
OLD_LOAD_MODES = {
    "auto": (),
    "mmap": (),
    "none": ("--no-mmap",),
    "mlock": ("--no-mmap", "--mlock"),
    "mmap+mlock": ("--mlock",),
    "dio": ("--direct-io",),
}
# on every arm; the first spelling that the build takes. No context shift: our requests forbid it in Ollama too.
ALWAYS = (
    (("-np",), "1"),
    (("--no-webui", "--no-ui"), None),
    (("--offline",), None),
)
NO_CACHE = ((("--cache-ram",), "0"),)
OURS = ("-lv", "4", "--host", "127.0.0.1")  # for reading it, not part of the arm

POLL_S = 0.05
PORT_TRIES = 3
LOG_S = 5.0
LOAD_S, LOAD_BYTES_PER_S = 60.0, 30e6  # patience with a slow disk


# ── what a binary says about itself ─────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Binary:
    """`version` is for people: `b11434`, or that it is unknown. `flags` is what it takes."""

    version: str
    flags: frozenset[str]
    devices: tuple[Device, ...]


def binary(path: Path) -> Binary:
    """Ask a llama-server once, until the file changes. Raises Unavailable if it does not run."""
    status = path.stat()
    return _ask(path, status.st_mtime_ns, status.st_size)


@cache
def _ask(path: Path, _mtime_ns: int, _size: int) -> Binary:
    said = _output(path, "--version")
    help_text = _output(path, "--help")
    listed = _output(path, "--list-devices")
    found = re.search(r"\bbuild (\d+)", said) or re.search(r"version: (\d+)\b(?!\.)", said)
    if not found or not int(found[1]):  # built outside git; our own folders are named for their build
        found = re.search(r"llama-cpp-b(\d+)", str(path.resolve()))
    version = f"b{found[1]}" if found else "of unknown build"
    if "xllamacpp" in said:
        version += " (xllamacpp wheel)"
    flags = frozenset(
        word.rstrip(",")
        for line in help_text.splitlines()
        if line.startswith("-")
        for word in line.split()
        if word.startswith("-")
    )
    return Binary(version, flags, llama_log.listed_devices(listed.splitlines()))


def _output(path: Path, question: str) -> str:
    try:
        done = subprocess.run(
            [*_program(path), question],
            env=process.engine_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{path} does not run: {error}; name another with --llama-server, or run {INSTALL}") from None
    if done.returncode:
        words = next((line for line in done.stderr.splitlines() if "error" in line), "").removeprefix("error: ")
        reason = words or process.explain_exit(done.returncode)
        raise Unavailable(f"{path} does not run: {reason}; name another with --llama-server, or run {INSTALL}")
    return done.stdout + done.stderr


def _program(path: Path) -> tuple[str, ...]:
    """How that file is started: our launcher needs the interpreter that has the wheel."""
    return (sys.executable, "-P", str(path)) if path.suffix == ".py" else (str(path),)


# ── the command line ────────────────────────────────────────────────────────────────────────


def arguments(
    model: Path,
    placement: Placement,
    settings: Settings,
    flags: frozenset[str] | None = None,
    fit_target_mib: int | None = None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(argv without the program and without what is ours, notes on spelling).

    `flags` is what the build takes; None stands for a current build.
    """
    notes: list[str] = []

    def takes(flag: str) -> bool:
        return flags is None or flag in flags

    words = ["--rpc", ",".join(settings.rpc)] if settings.rpc else []
    words += ["-m", str(model), *_placed(placement, takes("-fit"))]
    if fit_target_mib is not None and placement.kind == "auto":
        words += ["-fitt", str(fit_target_mib)]
    for name, flag in FLAGS.items():
        if (value := getattr(settings, name)) is not None:
            words += [flag, str(value)]
    if settings.load_mode is not None:
        if takes("--load-mode"):
            words += ["--load-mode", settings.load_mode]
        else:
            words += (old := OLD_LOAD_MODES[settings.load_mode])
            notes.append(f"load mode {settings.load_mode} is spelled {' '.join(old) or 'by no flag'} in this build")
    for spellings, value in (*ALWAYS, *(NO_CACHE if settings.prompt_cache == "off" else ())):
        spelling = next(filter(takes, spellings), None)
        if spelling is None:
            notes.append(f"this build has no {spellings[0]}")
        else:
            words += [spelling] if value is None else [spelling, value]
    return tuple(words), tuple(notes)


def _placed(placement: Placement, has_fit: bool) -> Iterator[str]:
    if placement.kind == "auto":
        return
    if has_fit:
        yield from ("-fit", "off")
    match placement.kind:
        case "ngl":
            yield from ("-ngl", str(placement.n))
        case "cpu-moe":
            yield from ("-ngl", LAYERS, "--cpu-moe")
        case "ncmoe":
            yield from ("-ngl", LAYERS, "--n-cpu-moe", str(placement.n))
        case "cpu":
            yield from ("-ngl", "0", "--device", "none")


# ── the backend ─────────────────────────────────────────────────────────────────────────────


class LlamaCpp:
    """llama.cpp as the harness sees it."""

    name = "llama-cpp"

    def __init__(self) -> None:
        self._found: Engine | None = None  # by the last `find`; `command` speaks of it

    def find(self, hints: Mapping[str, str]) -> Engine:
        """For a stand-in device the first build that can take one; where all lack RPC, the first of them as it is."""
        wants_device = "stand-in" in hints
        without = None
        for origin, path in _candidates(hints):
            engine = _engine(origin, path)
            if not wants_device or (engine.rpc and stand_in.program(path)):
                self._found = engine
                return engine
            without = without or engine
        if without and without.rpc:
            raise Unavailable(
                f"{without} takes no stand-in device, for there is no {stand_in.NAMES[0]} beside it; run {INSTALL}"
            )
        if without:
            self._found = without
            return without
        raise Unavailable(
            f"no llama.cpp here; run {INSTALL}, or `pip install 'llamaduel[embedded]'`, "
            "or name yours with --llama-server"
        )

    def parse(self, text: str) -> Arm:
        arm = read_arm(text, self.name, PLACEMENTS, KNOBS)
        for host in (host for key, value in arm.knobs if key == "rpc" for host in value.split("+")):
            if not re.fullmatch(r"[\w.-]+:\d{1,5}", host):
                raise UsageError(f"knob rpc={host}: write host:port, and several as host:port+host:port")
        return arm

    def resolve(self, ref: str) -> Path | None:
        return None

    def command(self, arm: Arm, model: ModelFile, settings: Settings) -> str:
        program, flags, rpc_server = [PROGRAM], None, Path(stand_in.NAMES[0])
        if self._found:
            flags = binary(self._found.path).flags
            if self._found.origin == "embedded":
                program = ["python", "-m", "backends.embedded_server"]
            elif self._found.origin != "PATH":
                program = [str(self._found.path)]
                rpc_server = stand_in.program(self._found.path) or rpc_server
        before, target = "", None
        if settings.stand_in_bytes is not None and (self._found is None or self._found.rpc):
            before = f'(set -m; {shlex.quote(str(rpc_server))} -t 1 & trap "kill $!" EXIT; sleep 1; '
            settings = _with_rpc(settings, stand_in.USUAL)
            target = max(0, psutil.virtual_memory().total - (settings.stand_in_bytes or 0)) // llama_log.MIB
        words, _ = arguments(model.path, arm.placement, settings, flags, target)
        return before + shlex.join([*program, *words]) + (")" if before else "")

    @contextlib.contextmanager
    def open(self, engine: Engine, model: ModelFile, arm: Arm, settings: Settings, log: Path) -> Iterator[LlamaSession]:
        """A build without RPC does without a stand-in, and its notes say so; rpc=… is Unavailable there."""
        if settings.rpc and not engine.rpc:
            raise Unavailable(f"{engine} has no RPC, so it does not take rpc=…; run {INSTALL}")
        with contextlib.ExitStack() as stack:
            device: StandIn | None = None
            if settings.stand_in_bytes is not None and engine.rpc:
                own_log = log.with_name(f"{log.stem}-stand-in.log")
                device = stack.enter_context(stand_in.start(engine.path, settings.stand_in_bytes, own_log))
            target = device.fit_target_mib if device else None
            asked = _with_rpc(settings, device.endpoint) if device else settings
            words, notes = arguments(model.path, arm.placement, asked, binary(engine.path).flags, target)
            if settings.stand_in_bytes is not None and device is None:
                notes += (NO_RPC,)
            attempt = _Attempt(engine, model, settings, words, notes, log, device)
            for left in reversed(range(PORT_TRIES)):
                try:
                    session = attempt.start(stack)
                    break
                except _PortTaken as error:
                    if not left:
                        raise Crashed(f"no free port after {PORT_TRIES} tries ({error}); try again") from None
            try:
                yield session
            except Crashed as error:  # its death in words; only the log knows whether it is a result
                raise session.cause_of_death() or error from None

    bench, require_bench = staticmethod(bench), staticmethod(require_bench)  # for `llamaduel calibrate`


def _with_rpc(settings: Settings, endpoint: str) -> Settings:
    return replace(settings, rpc=(*settings.rpc, endpoint))


def _candidates(hints: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """(origin, path), the preferred one first. A path that was given hides all others."""
    if given := hints.get(PROGRAM):
        yield "option", _given(Path(given).expanduser())
        return
    if on_path := shutil.which(PROGRAM):
        yield "PATH", Path(on_path)
    if cached := _installed():
        yield "cache", cached
    if importlib.util.find_spec("xllamacpp"):
        yield "embedded", Path(embedded_server.__file__)


def _given(path: Path) -> Path:
    if path.is_file():
        return path
    for inside in (path / PROGRAM, path / "bin" / PROGRAM, path / "build" / "bin" / PROGRAM):
        if inside.is_file():
            return inside
    raise Unavailable(f"no {PROGRAM} at {path}; give --llama-server the program or its folder, or run {INSTALL}")


def _installed() -> Path | None:
    from backends.install import LlamaCppRecipe

    return LlamaCppRecipe().installed()


def _engine(origin: str, path: Path) -> Engine:
    facts = binary(path)
    return Engine(
        product="llama.cpp",
        version=facts.version,
        path=path,
        origin=origin,
        devices=facts.devices,
        rpc="--rpc" in facts.flags,
    )


# ── one start ───────────────────────────────────────────────────────────────────────────────


class _PortTaken(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One start on one port, until it answers or is given up."""

    engine: Engine
    model: ModelFile
    settings: Settings
    words: tuple[str, ...]
    notes: tuple[str, ...]
    log: Path
    stand_in: StandIn | None

    def start(self, stack: contextlib.ExitStack) -> LlamaSession:
        """A server that has answered; the stack ends it. Raises _PortTaken, Unavailable or EngineFailed."""
        server = Server(process.free_port(), secrets.token_hex(16))
        argv = (*_program(self.engine.path), *self.words, *OURS, "--port", str(server.port))
        environment = process.engine_environment({"LLAMA_API_KEY": server.key})
        skip_bytes = self.log.stat().st_size if self.log.exists() else 0
        kills = llama_failure.kills_for_memory()
        started = time.monotonic()
        try:
            child = stack.enter_context(process.start(argv, self.log, environment))
        except OSError as error:
            raise Unavailable(f"{self.engine.path} cannot be started: {error}") from None
        session = LlamaSession(self, server, child, skip_bytes, kills)
        session.await_ready(started)
        return session


class LlamaSession:
    """A llama-server that has answered."""

    def __init__(
        self, attempt: _Attempt, server: Server, child: process.Child, skip_bytes: int, kills_before: int | None
    ) -> None:
        self._attempt = attempt
        self._server = server
        self._child = child
        self._skip_bytes = skip_bytes
        self._kills_before = kills_before
        self._props: Mapping[str, Any] = {}
        self._load_s: float | None = None
        self._loaded_bytes: int | None = None  # of its log, when it had answered for the first time

    # ── until it answers ──

    def await_ready(self, started: float) -> None:
        """Healthy, ours, with our model, and one token came back. Raises EngineFailed."""
        patience_s = LOAD_S + self._attempt.model.size_bytes / LOAD_BYTES_PER_S
        deadline = started + patience_s
        while not self._is_healthy():
            self._raise_if_dead("loading")
            if time.monotonic() > deadline:
                raise TimedOut(
                    f"the model was not loaded within {patience_s:.0f} s; see {self._attempt.log.name}, "
                    "or put the file on a faster disk"
                )
            time.sleep(POLL_S)
        self._check_identity()
        self._first_token(deadline)
        self._load_s = time.monotonic() - started
        self._await_log()
        self._loaded_bytes = self._attempt.log.stat().st_size

    def _await_log(self) -> None:
        """A thread of the server writes its log, and may lag behind on a busy disk."""
        deadline = time.monotonic() + LOG_S
        while not any("listening on" in line for line in self._log_lines()) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError):
            return self._server.call("/health", timeout_s=2.0)[0] == 200
        return False

    def _check_identity(self) -> None:
        if listens(self._child.pids(), self._server.port) is False:
            raise _PortTaken(f"port {self._server.port} is answered by another program")
        status, props = self._call("/props")
        self._props = props if status == 200 and isinstance(props, dict) else {}
        loaded = self._props.get("model_path")
        if loaded is None:
            raise EngineFailed(f"/props answered {status} without a model path; this build is not supported")
        if Path(loaded) != self._attempt.model.path:
            raise EngineFailed(f"the server has loaded {loaded}, not {self._attempt.model.path}")

        if (slots := self._props.get("total_slots", 1)) != 1:
            raise EngineFailed(f"the server has {slots} slots, not 1; a config.ini of this system may ask for them")

    def _first_token(self, deadline: float) -> None:
        body = {"prompt": "Hello", "n_predict": 1, "cache_prompt": False, "temperature": 0.0}
        status, reply = self._call("/completion", body, max(5.0, deadline - time.monotonic()))
        if status != 200 or not isinstance(reply, dict) or not reply.get("tokens_predicted"):
            time.sleep(POLL_S)  # for the thread that writes its log
            if failure := self._starved():
                raise failure.error("answering")
            raise EngineFailed(f"the first token did not come ({error_text(reply)}); see {self._attempt.log.name}")

    def _call(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 10.0) -> tuple[int, Any]:
        """A control request of a server that should be up. Raises EngineFailed."""
        try:
            return self._server.call(path, body, timeout_s)
        except OSError as error:
            self._raise_if_dead("answering")
            raise TimedOut(f"no answer to {path} within {timeout_s:.0f} s ({type(error).__name__})") from None

    # ── the contract ──

    def request(self, prompt: Prompt, max_tokens: int) -> Request:
        return self._server.completion(prompt, max_tokens)

    def read(self, line: bytes) -> Chunk | Usage | None:
        return read_line(line)

    def settle(self, usage: Usage) -> Usage:
        return usage  # the last line of the stream said it all

    def count_tokens(self, text: str) -> int | None:
        status, reply = self._call("/tokenize", {"content": text, "add_special": True})
        tokens = reply.get("tokens") if status == 200 and isinstance(reply, dict) else None
        return len(tokens) if isinstance(tokens, list) else None

    def death(self) -> str | None:
        error = self.cause_of_death()
        return str(error) if error else None

    def realised(self) -> Realised:
        load = llama_log.read_load(self._log_lines())
        argv = self._argv()
        from_props, from_slots = self._told_by_props(), self._told_by_slots()
        settings = {**from_slots, **load.settings, **from_props}
        if argv:
            settings["context_shift"] = "on" if "--context-shift" in argv else "off"
        if who := llama_log.placed_by(load, argv, {}):  # no LLAMA_ARG_… reaches it
            settings["placed_by"] = who
        helpers = self._attempt.stand_in.child.pids() if self._attempt.stand_in else ()
        read_from = {"log": load.settings, "/slots": from_slots.keys() - load.settings.keys(), "/props": from_props}
        return Realised(
            engine=str(self._attempt.engine),
            argv=argv,
            pids=(*self._child.pids(), *helpers),
            weights=Path(self._props["model_path"]),
            settings=settings,
            buffers=load.buffers,
            load_s=self._load_s,
            asked=self._asked(),
            explained=llama_log.limits(
                {name: getattr(self._attempt.settings, name) for name in ("context", "batch", "ubatch")}, settings
            ),
            reported={
                "build_info": self._props.get("build_info"),
                "devices": [device.name for device in load.devices],
                "settings_from": {name: source for source, names in read_from.items() for name in names},
                **llama_log.claim(load),
            },
            notes=(*self._attempt.notes, *load.notes, *self._doubts(load, settings)),
        )

    def _asked(self) -> dict[str, str]:
        """What every arm of this adapter asks for beside the settings: one slot, and a request that is greedy."""
        asked = {"slots": "1", "context_shift": "off", **llama_log.sampling(GREEDY)}
        if self._attempt.settings.threads is not None:
            asked["threads_batch"] = str(self._attempt.settings.threads)  # -t sets both
        return asked

    def _told_by_props(self) -> dict[str, str]:
        told = {
            "context": self._props.get("default_generation_settings", {}).get("n_ctx"),
            "slots": self._props.get("total_slots"),
        }
        found = {name: str(value) for name, value in told.items() if value is not None}
        for text in (str(self._props.get("build_info")), self._attempt.engine.version):
            if "build" not in found and (build := re.match(r"b[1-9]\d*", text)):
                found["build"] = build[0]  # a build outside git does not know its own
        return found

    def _told_by_slots(self) -> dict[str, str]:
        """How the last request was sampled; nothing where the build does not say."""
        with contextlib.suppress(OSError, LookupError, TypeError):
            return llama_log.sampling(self._server.call("/slots")[1][0]["params"])
        return {}

    def _doubts(self, load: llama_log.Load, settings: Mapping[str, str]) -> Iterator[str]:
        asked = (*FLAGS, "load_mode")
        lost = [name for name in asked if getattr(self._attempt.settings, name) is not None and name not in settings]
        if lost:
            yield f"not read back: {', '.join(lost)}"
        if load.buffers is None:
            yield "the log has no buffer lines, so the placement is unknown"
        elif any(buffer.device == "CPU_Mapped" for buffer in load.buffers):
            yield "weights are mapped: CPU_Mapped counts a span of the file, not the tensors in it"

    def _argv(self) -> tuple[str, ...]:
        """The command line of the process itself, not the one that we meant."""
        with contextlib.suppress(psutil.Error):
            return tuple(self._child.process.cmdline())
        return ()

    # ── its end ──

    def _log_lines(self, begin: int | None = None) -> Sequence[str]:
        with self._attempt.log.open("rb") as file:
            file.seek(self._skip_bytes if begin is None else begin)
            return file.read().decode(errors="replace").splitlines()

    def cause_of_death(self) -> Exception | None:
        """What ended it since it had loaded. A server that found no memory for a request finds none for the next."""
        if error := self._cause_of_death("generating"):
            return error
        failure = self._starved()
        return failure.error("generating") if failure else None

    def _starved(self) -> Failure | None:
        """Memory that it did not get for a request; it says so and lives on."""
        failure = read_failure(self._log_lines(self._loaded_bytes), loaded=True)
        return failure if failure and failure.kind == "memory" else None

    def _raise_if_dead(self, doing: str) -> None:
        if error := self._cause_of_death(doing):
            raise error

    def _cause_of_death(self, doing: str) -> Exception | None:
        with contextlib.suppress(psutil.TimeoutExpired):
            self._child.process.wait(0.02)  # its sockets close a moment before it can be waited for
        code = self._child.returncode()
        helper = self._attempt.stand_in
        if code is None:
            ended = helper.child.returncode() if helper else None
            return None if ended is None else Crashed(f"the stand-in device ended: {process.explain_exit(ended)}")
        loaded = self._loaded_bytes is not None
        failure = read_failure(self._log_lines(self._loaded_bytes), loaded=loaded)
        if failure and failure.kind == "port" and not loaded:
            return _PortTaken(failure.line)
        if failure and failure.kind != "other":
            return failure.error(doing)
        if code == -signal.SIGKILL and (killed := llama_failure.killed_for_memory(self._kills_before)):
            return killed.error(doing)
        said = f" ({failure.line})" if failure else ""
        return Crashed(f"llama-server ended while {doing}: {process.explain_exit(code)}{said}")
