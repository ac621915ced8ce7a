"""Ollama: `ollama serve` as a child of ours, or the daemon that runs already (`--ollama attach`).

Since 0.30 Ollama computes in a llama-server that it starts itself, the runner. Ours is told
everything by environment and request options, gets the weights by link, and its log proves what
the runner did. An Ollama without a runner of its own gets one of our llama.cpp builds.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from backends import ollama_daemon, ollama_store, stand_in
from backends.ollama_session import UNREACHABLE, OllamaSession, ask, client, log_fields
from harness import process
from harness.arms import read_arm
from harness.contract import Arm, Device, Engine, ModelFile, Placement, Settings
from harness.errors import Crashed, EngineFailed, TimedOut, Unavailable, UsageError
from harness.sizes import format_bytes

PLACEMENTS = frozenset({"auto", "ngl=N", "cpu-moe", "ncmoe=N", "cpu"})
KNOBS = frozenset({"c", "b", "ub", "t", "fa", "ctk", "ctv"})
ONE = {("b", "ub"): "one batch size (num_batch)", ("ctk", "ctv"): "one type for the whole KV cache"}
USE_MMAP = {"none": False, "auto": True, "mmap": True}  # True: no flag, so llama.cpp's own `auto`

NAME = "llamaduel"  # of the model in a store of ours
FIRST_WITH_RUNNER = (0, 30)
FIRST_WITH_LOAD_MODE = (0, 32, 6)  # before it, its flags are not those of today's llama.cpp
GET_IT = (
    "`llamaduel engines install ollama` builds one for the CPU, "
    "with a GPU take the official one: `curl -fsSL https://ollama.com/install.sh | sh`"
)

START_S = 60.0  # `ollama serve` answers after 0.2 s; looking for GPUs may take longer
LOAD_S, LOAD_BYTES_PER_S = 60.0, 30e6  # patience with a slow disk
PORTS = 3  # how often a port may be taken between our look and Ollama's

# the context that it takes where none is asked for, by the whole memory of all its cards together
CONTEXTS = ((47 << 30, 262144), (23 << 30, 32768), (0, 4096))

DEVICE = 'msg="inference compute"'  # one line of its log for each device, or one for the CPU alone
DISCOVERED = "vram-based default context"  # the line after them
SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True, slots=True)
class _Way:
    """How a found engine is reached, beyond what `Engine` tells the harness."""

    runner: Engine | None = None  # a llama.cpp build that is not Ollama's own
    url: str | None = None  # of the daemon that we attach to
    allow_remote: bool = False


class Ollama:
    """Ollama as the harness sees it."""

    name = "ollama"

    def __init__(self) -> None:
        self._ways: dict[Engine, _Way] = {}
        self._found: Engine | None = None  # by the last `find`; `command` speaks of it
        self._merged: dict[str, ModelFile] = {}  # split models, by the digest of their tensors
        self._kept = contextlib.ExitStack()  # holds the folders of merged models until we exit

    def find(self, hints: Mapping[str, str]) -> Engine:
        try:
            engine, way = _find_daemon(hints) if hints.get("ollama") == "attach" else _find_binary(hints)
        except EngineFailed as error:
            raise Unavailable(f"Ollama is here but does not start: {error}; name another with --ollama") from error
        self._ways[engine] = way
        self._found = engine
        return engine

    def beside(self) -> Iterator[str]:
        return ollama_daemon.beside()

    def parse(self, text: str) -> Arm:
        arm = read_arm(text, self.name, PLACEMENTS, KNOBS)
        knobs = dict(arm.knobs)
        for (one, other), what in ONE.items():
            given = {knobs[key] for key in (one, other) if key in knobs}
            if len(given) > 1:
                raise UsageError(f"{text}: Ollama has {what}; give {one} or {other}, or the same value to both")
            if given:
                knobs[one] = knobs[other] = given.pop()
        return replace(arm, knobs=tuple(sorted(knobs.items())))

    def resolve(self, ref: str) -> Path | None:
        name = ref.removeprefix("ollama:")
        return ollama_store.resolve(name, ollama_store.user_stores(), asked=name != ref)

    def command(self, arm: Arm, model: ModelFile, settings: Settings) -> str:
        """A server of one's own with the model in it, and a chat; what was started and written ends with the chat.

        One group of lines, for a shell reads that whole before it starts anything: else the chat would
        take the rest of the paste for a prompt. A comment for a runner that `ollama create` cannot use.
        """
        engine = self._found
        runner = self._ways[engine].runner if engine else None
        if engine and runner and not _quantize(runner).is_file():
            again = shlex.join(["llamaduel", "run", str(model.path), "--arms", str(arm)])
            return (
                f"# Nothing to paste: the runner, {engine.runner}, has no llama-quantize for `ollama create`. "
                f"With this run's options, `{again}` repeats it."
            )
        own = engine.path if engine and engine.origin in {"option", "cache"} else Path("ollama")
        program = '"$d/bin/ollama"' if runner else shlex.quote(str(own))
        settings, because = _as_held(settings, engine.devices if engine else ())
        told, device = _told(arm.placement, settings), []
        if settings.stand_in_bytes is not None:
            spare = psutil.virtual_memory().total - settings.stand_in_bytes
            told |= _seen(stand_in.USUAL, max(0, spare) // SIZES["MiB"])
            server = runner.path if runner else engine and _own_runner(engine.path)
            device_program = (server and stand_in.program(server)) or stand_in.NAMES[0]
            device = [f"{shlex.quote(str(device_program))} -t 1 > /dev/null 2>&1 & device=$!"]
        assigned = [f"{key}={shlex.quote(value)}" for key, value in told.items()]
        source = model.path.parent if len(model.shards) > 1 else model.path
        options = {key: value for key, value in _options(arm.placement, settings).items() if value is not None}
        modelfile = [f"FROM {source}", *(f"# {setting}: {why}" for setting, why in because.items())]
        modelfile += (f"PARAMETER {key} {json.dumps(value)}" for key, value in options.items())
        return "\n".join(
            (
                '(set -m; server= device=; d=$(mktemp -d "$PWD/duel.XXXXXX") || exit',
                """trap 'kill $server $device; wait; rm -r "$d"' EXIT""",
                *(_layout_lines(engine.path, runner) if engine and runner else ()),
                'export OLLAMA_HOST=127.0.0.1:11435 OLLAMA_MODELS="$d/models"',
                *device,
                f"{' '.join([*assigned, program])} serve > ollama.log 2>&1 & server=$!; sleep 2 && kill -0 $server &&",
                f"printf '%s\\n' {shlex.join(modelfile)} | {program} create duel -f /dev/stdin &&",
                f"{program} run duel --verbose)",
            )
        )

    @contextlib.contextmanager
    def open(
        self, engine: Engine, model: ModelFile, arm: Arm, settings: Settings, log: Path
    ) -> Iterator[OllamaSession]:
        way = self._ways.get(engine) or _Way()
        _check(arm, settings, way)
        settings, because = _as_held(settings, engine.devices)
        options = _options(arm.placement, settings)
        wait_s = LOAD_S + model.size_bytes / LOAD_BYTES_PER_S
        if way.url:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"attached to the Ollama at {way.url}, whose log is its own\n")
            with ollama_daemon.attach(
                engine, way.url, model, options, wait_s, because=because, allow_remote=way.allow_remote
            ) as attached:
                yield attached
            return
        told = _told(arm.placement, settings) | {"OLLAMA_LOAD_TIMEOUT": f"{wait_s:.0f}s"}
        notes = [*ollama_daemon.beside(), *(f"not stock: {key}={value}" for key, value in _odd(told))]
        if len(model.shards) > 1:
            model = self._whole(engine, way, model, notes)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(_private_folder())
            device = _stand_in(stack, engine, way, settings, log)
            if device:
                told |= _seen(device.endpoint, device.fit_target_mib)
            store = folder / "models"
            notes.append(f"weights in Ollama's store by {ollama_store.link(store, NAME, model)}")
            log_begin = log.stat().st_size if log.exists() else 0
            child, url = stack.enter_context(_serve(_lay_out(folder, engine.path, way), store, log, told))
            session = OllamaSession(
                engine=engine,
                url=url,
                model=NAME,
                options=options,
                pids=lambda: (*child.pids(), *(device.child.pids() if device else ())),
                child=child,
                log=log,
                log_begin=log_begin,
                because=because,
                notes=tuple(notes),
            )
            session.load(wait_s)
            try:
                yield session
            except Crashed as error:  # its death in words; only the log knows whether it is a result
                raise session.cause_of_death() or error from None

    def _whole(self, engine: Engine, way: _Way, model: ModelFile, notes: list[str]) -> ModelFile:
        """One file for a model in shards, merged by Ollama; once, and kept until we exit."""
        if model.digest not in self._merged:
            if not self._merged:
                atexit.register(self._kept.close)
            with contextlib.ExitStack() as stack:
                folder = stack.enter_context(_private_folder())
                store = folder / "models"
                ollama_store.link(store, NAME, model)
                with (
                    _serve(_lay_out(folder, engine.path, way), store, folder / "serve.log", {}) as (_, url),
                    client(url, START_S + model.size_bytes / LOAD_BYTES_PER_S) as ollama,
                ):
                    ollama_store.create(ollama, NAME, model, store)
                blob = ollama_store.resolve(NAME, [store], asked=True)
                assert blob is not None
                sha256 = blob.name.removeprefix("sha256-")
                self._merged[model.digest] = replace(
                    model, path=blob, shards=(blob,), size_bytes=blob.stat().st_size, sha256=sha256
                )
                self._kept.push(stack.pop_all())
        notes.append(f"its {len(model.shards)} shards were merged by Ollama, for it takes one file only")
        return self._merged[model.digest]


# ── what Ollama is told ─────────────────────────────────────────────────────────────────────


def _check(arm: Arm, settings: Settings, way: _Way) -> None:
    """Raises Unavailable for what Ollama, or this way to it, cannot do."""
    if settings.rpc:
        raise Unavailable("Ollama has no setting for machines over RPC; take llama-cpp with rpc=…")
    if settings.batch != settings.ubatch:
        raise Unavailable(f"Ollama has one batch size; give b={settings.batch} or b={settings.ubatch} to its arm")
    if settings.kv_k != settings.kv_v:
        raise Unavailable(f"Ollama has one KV cache type; give ctk={settings.kv_k} or ctk={settings.kv_v} to its arm")
    if settings.load_mode not in {*USE_MMAP, None}:
        raise Unavailable(f"Ollama cannot load by {settings.load_mode!r}, only by {', '.join(USE_MMAP)}")
    if way.url is None:
        return
    ours = "needs an Ollama whose environment is ours; leave out `--ollama attach`"
    if arm.placement.kind in {"cpu-moe", "ncmoe"}:
        raise Unavailable(f"{arm.placement} {ours}")
    if settings.stand_in_bytes is not None:
        raise Unavailable(f"a stand-in device {ours}")
    if fixed := sorted({"fa", "ctk"} & dict(arm.knobs).keys()):
        raise Unavailable(f"the knob {' or '.join(fixed)} {ours}")


def _options(placement: Placement, settings: Settings) -> dict[str, Any]:
    """What decides how the runner is started: the same in every request, else it is started again."""
    return {
        "num_ctx": settings.context,
        "num_batch": settings.batch,
        "num_thread": settings.threads,
        "num_gpu": {"ngl": placement.n, "cpu": 0}.get(placement.kind),
        "use_mmap": USE_MMAP.get(settings.load_mode or ""),
    }


def _as_held(settings: Settings, devices: Sequence[Device]) -> tuple[Settings, Mapping[str, str]]:
    """For cards that are held to less memory than they have: settings, and why they are not those that were given.

    Ollama sees what is free of its cards, but takes its context by what there is of them. Where that makes another
    one, it is told what it would take on cards of that size. A size that is unknown is taken for larger.
    """
    limit = settings.device_limit_bytes
    if limit is None or settings.context is not None:
        return settings, {}
    held, known = _context_of(limit), [each.total_bytes for each in devices if each.total_bytes is not None]
    if known and len(known) == len(devices) and _context_of(sum(known)) == held:
        return settings, {}
    because = f"the default of Ollama on a card of {format_bytes(limit)}; there is more here, and it is held to that"
    return replace(settings, context=held), {"context": because}


def _context_of(total_bytes: int) -> int:
    return next(context for least_bytes, context in CONTEXTS if total_bytes >= least_bytes)


def _told(placement: Placement, settings: Settings) -> dict[str, str]:
    """The part of the environment of `ollama serve` that a placement and settings decide."""
    told = {}
    if settings.flash_attention in {"on", "off"}:
        told["OLLAMA_FLASH_ATTENTION"] = "1" if settings.flash_attention == "on" else "0"
    if settings.kv_k is not None:
        told["OLLAMA_KV_CACHE_TYPE"] = settings.kv_k
    if settings.prompt_cache == "off":  # else the runner saves the prompt before while a new one waits
        told["LLAMA_ARG_CACHE_RAM"] = "0"
    if placement.kind == "cpu-moe":
        told["LLAMA_ARG_CPU_MOE"] = "1"
    if placement.kind == "ncmoe":
        told["LLAMA_ARG_N_CPU_MOE"] = str(placement.n)
    return told


def _odd(told: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What its runner inherits and Ollama itself knows nothing of."""
    return ((key, value) for key, value in told.items() if key.startswith("LLAMA_ARG_"))


def _stand_in(
    stack: contextlib.ExitStack, engine: Engine, way: _Way, settings: Settings, log: Path
) -> stand_in.StandIn | None:
    if settings.stand_in_bytes is None:
        return None
    runner = way.runner.path if way.runner else _own_runner(engine.path)
    if runner is None or not engine.rpc:
        raise Unavailable(
            f"the runner of {engine} has no RPC, which the stand-in device needs; "
            "run `llamaduel engines install llama-cpp`"
        )
    own_log = log.with_name(f"{log.stem}-stand-in.log")
    return stack.enter_context(stand_in.start(runner, settings.stand_in_bytes, own_log))


def _seen(endpoint: str, fit_target_mib: int) -> dict[str, str]:
    """What makes the runner see a stand-in device, of the size that is left beside the margin."""
    return {"LLAMA_ARG_RPC": endpoint, "LLAMA_ARG_FIT_TARGET": str(fit_target_mib)}


# ── finding it ──────────────────────────────────────────────────────────────────────────────


def _find_daemon(hints: Mapping[str, str]) -> tuple[Engine, _Way]:
    allow_remote = "allow-remote" in hints
    url, version = ollama_daemon.find(allow_remote)
    _check_version(version, f"at {url}", drives_ours=False)
    engine = Engine(product="Ollama", version=version, path=Path(url.partition("://")[2]), origin="attached")
    return engine, _Way(url=url, allow_remote=allow_remote)


def _find_binary(hints: Mapping[str, str]) -> tuple[Engine, _Way]:
    path, origin = _binary(hints.get("ollama"))
    own = _own_runner(path)
    runner = None if own and (_has_rpc(own) or "stand-in" not in hints) else _other_runner(hints)
    way = _Way(runner=runner)
    version, devices = _look(path, way)
    _check_version(version, f"at {path}", drives_ours=runner is not None)
    engine = Engine(
        product="Ollama",
        version=version,
        path=path,
        origin=origin,
        devices=devices,
        rpc=runner.rpc if runner else own is not None and _has_rpc(own),
        runner=_name_of(runner) if runner else None,
    )
    return engine, way


def _binary(option: str | None) -> tuple[Path, str]:
    if option:
        given = Path(option).expanduser()
        for path in (given, given / "ollama", given / "bin" / "ollama"):
            if path.is_file() and os.access(path, os.X_OK):
                return path.absolute(), "option"
        raise Unavailable(f"there is no program ollama at {option}; give its path with --ollama, or leave that out")
    if found := shutil.which("ollama"):
        return Path(found).absolute(), "PATH"
    from backends.install import OllamaRecipe

    if installed := OllamaRecipe().installed():
        return installed, "cache"
    raise Unavailable(f"Ollama is not on this machine; {GET_IT}")


def _own_runner(binary: Path) -> Path | None:
    """The llama-server that came with this Ollama, where Ollama itself looks for it."""
    folder = binary.resolve().parent
    places = [folder.parent / "lib" / "ollama", folder / "lib" / "ollama"]
    places += [folder] if sys.platform == "darwin" else []
    return next((place / "llama-server" for place in places if (place / "llama-server").exists()), None)


def _has_rpc(runner: Path) -> bool:
    return any(runner.resolve().parent.glob("libggml-rpc.*"))


def _other_runner(hints: Mapping[str, str]) -> Engine:
    from backends.llama_cpp import LlamaCpp

    try:
        found = LlamaCpp().find(hints)
    except Unavailable as error:
        raise Unavailable(f"this Ollama has no llama-server that can be used: {error}") from None
    if "stand-in" in hints and not found.rpc:
        raise Unavailable(
            f"this Ollama has no llama-server that sees a stand-in device: {found} has no RPC; "
            "run `llamaduel engines install llama-cpp`"
        )
    return found


def _name_of(runner: Engine) -> str:
    build, _, wheel = runner.version.partition(" (")
    return f"{'xllamacpp' if wheel else runner.product} {build} (not its own)"


def _look(path: Path, way: _Way) -> tuple[str, tuple[Device, ...]]:
    """Start it for a moment: its version, and the devices that it would use."""
    with _private_folder() as folder:
        log = folder / "serve.log"
        with _serve(_lay_out(folder, path, way), folder / "models", log, {}) as (child, url):
            version = str(ask(f"{url}/api/version")["version"])
            deadline = time.monotonic() + START_S
            while _numbers(version) >= FIRST_WITH_RUNNER and not any(DISCOVERED in line for line in child.tail()):
                if child.returncode() is not None or time.monotonic() > deadline:
                    raise Unavailable(f"Ollama {version} at {path} does not say what devices it has; take another")
                time.sleep(0.02)
            return version, read_devices(log.read_text(errors="replace"))


def read_devices(log: str) -> tuple[Device, ...]:
    """The devices that Ollama found, the CPU left out."""
    found = [log_fields(line) for line in log.splitlines() if DEVICE in line]
    return tuple(
        Device(said["name"], said["description"], _bytes(said["total"]), _bytes(said["available"]))
        for said in found
        if said.get("library") != "cpu"
    )


def _bytes(text: str) -> int | None:
    number, _, unit = text.partition(" ")
    return round(float(number) * SIZES[unit]) if unit in SIZES else None


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 32, 15) of "0.32.15-rc1"; a build that does not know its version (0.0.0) passes for the newest."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    numbers = tuple(int(part) for part in found.groups()) if found else ()
    return numbers if any(numbers) else (sys.maxsize,)


def _check_version(version: str, where: str, *, drives_ours: bool) -> None:
    if _numbers(version) < FIRST_WITH_RUNNER:
        raise Unavailable(f"the Ollama {version} {where} computes in a way that cannot be read; take 0.30 or newer")
    if drives_ours and _numbers(version) < FIRST_WITH_LOAD_MODE:
        raise Unavailable(f"the Ollama {version} {where} cannot drive another llama.cpp; take 0.32.6 or newer")


# ── a server of ours ────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder in the cache that is gone afterwards; those of killed harnesses go with it."""
    sessions = process.cache_folder("sessions")
    for left in sessions.glob("*-*-*"):
        if not process.is_alive(left.name.rpartition("-")[0]):
            shutil.rmtree(left, ignore_errors=True)
    folder = sessions / f"{process.owner()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lay_out(folder: Path, binary: Path, way: _Way) -> Path:
    """The program to start. For a runner that is not its own it gets a layout: it looks only there."""
    if way.runner is None:
        return binary
    program = folder / "bin" / "ollama"
    beside = folder / "lib" / "ollama"
    program.parent.mkdir()
    beside.mkdir(parents=True)
    try:
        program.hardlink_to(binary.resolve())
    except OSError:  # another disk, or not our file
        shutil.copy2(binary.resolve(), program)
    if way.runner.path.suffix == ".py":  # the launcher of the embedded one
        script = beside / "llama-server"
        script.write_text(f'#!/bin/sh\nexec {shlex.join((sys.executable, "-P", str(way.runner.path)))} "$@"\n')
        script.chmod(0o755)
        return program
    build = way.runner.path.resolve().parent
    for pattern in ("llama-server", "llama-quantize", "lib*ggml*", "lib*llama*", "lib*mtmd*"):
        for file in build.glob(pattern):
            (beside / file.name).symlink_to(file)
    return program


def _layout_lines(binary: Path, runner: Engine) -> Iterator[str]:
    """The same layout in `$d`, in shell."""
    build = runner.path.resolve().parent
    links = [shlex.quote(str(path)) for path in (build / "llama-server", _quantize(runner))]
    links += [f"{shlex.quote(str(build))}/lib*"] if any(build.glob("lib*")) else []
    yield f'mkdir -p "$d/bin" "$d/lib/ollama"; cp {shlex.quote(str(binary))} "$d/bin/ollama"'
    yield f'ln -s {" ".join(links)} "$d/lib/ollama"'


def _quantize(runner: Engine) -> Path:
    """Where the program is that `ollama create` checks a GGUF with."""
    return runner.path.resolve().with_name("llama-quantize")


@contextlib.contextmanager
def _serve(program: Path, store: Path, log: Path, told: Mapping[str, str]) -> Iterator[tuple[process.Child, str]]:
    """`ollama serve` with a store and a port of its own, from its first answer on; its child and URL."""
    for left in reversed(range(PORTS)):
        host = f"127.0.0.1:{process.free_port()}"
        fixed = {
            "OLLAMA_HOST": host,
            "OLLAMA_MODELS": str(store),
            "OLLAMA_NO_CLOUD": "1",
            "OLLAMA_KEEP_ALIVE": "-1",
            "OLLAMA_NUM_PARALLEL": "1",
            "OLLAMA_MAX_LOADED_MODELS": "1",
            "OLLAMA_NOPRUNE": "1",  # a blob that no manifest names is a shard of ours
            "OLLAMA_DEBUG": "1",
        }
        with contextlib.ExitStack() as stack:
            environment = process.engine_environment({**fixed, **told})
            try:
                child = stack.enter_context(process.start([str(program), "serve"], log, environment))
            except OSError as error:
                raise Unavailable(f"{program} cannot be started ({error.strerror}); {GET_IT}") from None
            if _answers(child, f"http://{host}", may_lose_port=left > 0):
                yield child, f"http://{host}"
                return


def _answers(child: process.Child, url: str, *, may_lose_port: bool) -> bool:
    """Wait until it serves; False if another program took the port. Raises EngineFailed."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        code = child.returncode()
        if code is not None:
            said = child.last_line() or "its log is empty"
            if "address already in use" in said.lower() and may_lose_port:
                return False
            raise Crashed(f"ollama serve ended while starting: {process.explain_exit(code)} ({said})")
        with contextlib.suppress(*UNREACHABLE):
            if ask(f"{url}/api/version", timeout_s=1.0) and child.returncode() is None:
                return True
        time.sleep(0.02)
    raise TimedOut(f"ollama serve did not answer within {START_S:.0f} s; its log says what it was doing")
