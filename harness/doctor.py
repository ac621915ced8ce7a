"""What this machine has for a run, and what would make its numbers lie, looked at before anything is loaded.

`examine` walks once over engines, GPUs, memory, CPU, surroundings and tools. Each check is a small function over facts
that other modules read, and stands alone: one that cannot be made is a finding "unknown", never the end of the others.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import psutil
from typing_extensions import TypedDict

from harness import download, gates, gpus, placement, preflight, process, telemetry
from harness import machine as machines
from harness import model as models
from harness.arms import apply_knobs, parse_arms
from harness.contract import Arm, Engine, Foretelling, Neighbourly
from harness.engines import hints
from harness.errors import DuelError, Unavailable, UsageError
from harness.gpu import State
from harness.machine import Machine
from harness.model import Model
from harness.options import Options
from harness.placement import Predicted
from harness.probe import find_model, limit_bytes, matched_settings, require_weights, stand_in_bytes
from harness.registry import backends, recipes
from harness.sizes import format_bytes
from harness.words import NONE, count, percent

Level = Literal["ok", "warn", "fail", "unknown"]

LOOK_S = 1.0  # over which other programs are watched
MOST_SWAP = 0.1  # of memory, swapped out: less is what a system never asks for again
BUSY = 0.1  # cores of a program worth its name
LEAST_MEMORY_BYTES = 512 << 20  # available: an engine has libraries and buffers of its own, whatever the model
LEAST_OUT_BYTES = 1 << 30  # free for run folders, and for links or copies of models
LEAST_CACHE_BYTES = 3 * 10**9  # free for building an engine
SLOW_DRIVES = frozenset({"9p", "drvfs", "nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs"})
OWN_SPEED = frozenset({"intel_pstate", "amd-pstate-epp"})  # where the governor "powersave" still speeds up by itself
SAVING = frozenset({"power", "balance_power", "low-power", "quiet", "cool"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: a fact, and where it is not well the next step, each half a sentence."""

    topic: str
    level: Level
    fact: str
    next_step: str | None = None


Said = tuple[Level, str, str | None]  # a finding without its topic


class FindingFacts(TypedDict):
    """One finding. `next` is the next step, null where there is none to take."""

    topic: str
    level: Level
    fact: str
    next: str | None


class Diagnosis(TypedDict):
    """All findings; `ok` unless one of them is "fail"."""

    findings: list[FindingFacts]
    ok: bool


def examine(options: Options, root: Path = machines.ROOT) -> tuple[Finding, ...]:
    """Every finding for a run with these options. `root` is where /proc, /sys and /etc are looked for.

    Raises UsageError for what a run would not take either, such as arms that are none.
    """
    here = _Here(options, parse_arms(options.arms), root)
    found: dict[tuple[Level, str], Finding] = {}  # what several checks say is said once
    for topic, group in CHECKS.items():
        for level, fact, step in (said for check in group for said in _guarded(check, here)):
            found.setdefault((level, fact), Finding(topic, level, fact, step))
    return tuple(found.values())


def diagnose(options: Options) -> Diagnosis:
    """What `examine` finds, as `--json` prints it. Raises UsageError."""
    found = examine(options)
    return {
        "findings": [
            {"topic": each.topic, "level": each.level, "fact": each.fact, "next": each.next_step} for each in found
        ],
        "ok": all(each.level != "fail" for each in found),
    }


def _guarded(check: Callable[[_Here], Iterator[Said]], here: _Here) -> list[Said]:
    """What a check says; one that breaks off keeps what it had said, and says that it broke off."""
    said: list[Said] = []
    try:
        said.extend(check(here))
    except UsageError:
        raise
    except DuelError as error:
        said.append(("fail", *_halves(str(error))))
    except Exception as error:
        why = str(error) or type(error).__name__
        said.append(("unknown", f"{check.__name__.strip('_')}: cannot be told ({why[:200]})", None))
    return said


def _halves(sentence: str, between: str = "; ") -> tuple[str, str | None]:
    """Fact and next step of a sentence that holds both."""
    fact, _, step = sentence.partition(between)
    return fact, step or None


class _Here:
    """What several checks ask of this machine, each read once; what raises, raises in every check that asks."""

    def __init__(self, options: Options, arms: Sequence[Arm], root: Path) -> None:
        self.options, self.arms, self.root = options, arms, root

    @cached_property
    def machine(self) -> Machine:
        return machines.read(self.root)

    @cached_property
    def engines(self) -> dict[str, Engine | DuelError]:
        """Every backend, whether an arm asks for it or not."""
        told, found = hints(self.options), dict[str, Engine | DuelError]()
        for name, each in backends().items():
            try:
                found[name] = each.find(told)
            except DuelError as error:
                found[name] = error
            except Exception as error:  # one adapter that breaks hides no other
                found[name] = Unavailable(f"its adapter broke while looking for it ({error!r}); tell its author")
        return found

    @property
    def needed(self) -> dict[str, Engine | DuelError]:
        """Those that arms of this run ask for."""
        return {name: each for name, each in self.engines.items() if name in {arm.backend for arm in self.arms}}

    @property
    def local(self) -> list[Engine]:
        """Needed engines that are here, and that tell what they see."""
        return [each for each in self.needed.values() if isinstance(each, Engine) and each.origin != "attached"]

    @cached_property
    def gpus(self) -> tuple[State, ...]:
        return gpus.states()

    @cached_property
    def others(self) -> _Others:
        return _watch_others()

    @property
    def stand_in_bytes(self) -> int | None:
        return stand_in_bytes(self.options, self.machine)

    @property
    def card_bytes(self) -> int | None:
        """Memory of all GPUs, by the driver or by an engine, or what they are held to; None if a GPU does not tell."""
        if (limit := limit_bytes(self.options, self.machine)) is not None:
            return limit
        seen = [[device.total_bytes for device in each.devices] for each in self.local]
        seen.append([state.glance.total_bytes for state in self.gpus])
        known = [sum(sizes) for each in seen if each and len(sizes := [size for size in each if size]) == len(each)]
        return max(known) if known else None if any(seen) else 0


# ── engines ─────────────────────────────────────────────────────────────────────────────────


def _engines(here: _Here) -> Iterator[Said]:
    missing: Level = "warn" if any(isinstance(each, Engine) for each in here.needed.values()) else "fail"
    for name, engine in here.engines.items():
        if isinstance(engine, Engine):
            yield "ok", f"{engine}, from {engine.origin}, {_sees(engine)}: {engine.path}", None
        elif name in here.needed:
            fact, step = _halves(str(engine))
            yield missing if isinstance(engine, Unavailable) else "fail", f"{name}: {fact}", step
        else:
            yield "unknown", f"{name}: {_halves(str(engine))[0]}; no arm asks for it", None


def _sees(engine: Engine) -> str:
    if engine.origin == "attached":
        return "its devices are its own affair"
    names = ", ".join(
        device.name + (f" ({device.description})" if device.description else "") for device in engine.devices
    )
    return (f"sees {names}" if names else "CPU only") + (", takes a stand-in device" if engine.rpc else "")


def _alike(here: _Here) -> Iterator[Said]:
    kinds = {
        str(each): frozenset(device.name.rstrip("0123456789") for device in each.devices)
        for each in here.local
        if here.options.stand_in is None
    }
    if len(set(kinds.values())) > 1:
        seen = "; ".join(f"{name} sees {', '.join(sorted(kind)) or 'none'}" for name, kind in kinds.items())
        yield (
            "warn",
            f"the engines see different devices, so their speeds are not comparable ({seen})",
            "take builds for the same device; `llamaduel engines list` says what can be installed",
        )


def _wrong(here: _Here) -> Iterator[Said]:
    for each in here.local if here.options.stand_in is None else ():
        if sentence := preflight.wrong_device(each.devices, here.machine):
            fact, _, step = sentence.partition("; ")
            yield "warn", f"{each}: {fact}", step


def _unused(here: _Here) -> Iterator[Said]:
    if here.options.stand_in is not None or not here.local or any(each.devices for each in here.local):
        return
    if here.machine.visible_gpus:
        vendors = " and ".join(sorted(set(here.machine.visible_gpus)))
        yield (
            "fail" if here.machine.gpus else "warn",  # one whose driver answers was meant to compute
            f"this machine has a GPU ({vendors}) that no engine here can use",
            "take an engine built for it, or read all numbers as those of the CPU",
        )


# ── GPUs ────────────────────────────────────────────────────────────────────────────────────


def _gpus(here: _Here) -> Iterator[Said]:
    held = preflight.foreign(here.gpus, here.machine)
    for number, state in enumerate(here.gpus):
        name = preflight.name_of(number, here.gpus)
        yield "ok", f"{name}: {_card(state)}", None
        yield from preflight.holding(state, name, held, here.machine)
        yield from preflight.slowing(state, name)
    if not here.gpus:
        visible = here.machine.visible_gpus
        shown = (
            f"the kernel shows {count(len(visible), 'GPU')} ({', '.join(visible)})" if visible else "no GPU is visible"
        )
        if "NVIDIA" in visible:
            yield (
                "warn",
                f"{shown}, and no NVIDIA driver answers",
                "install NVIDIA's driver until `nvidia-smi` lists it",
            )
        else:
            yield "unknown", f"no NVIDIA driver answers, and {shown}", None


def _card(state: State) -> str:
    gpu, now = state.gpu, state.glance
    room = f"memory {NONE}"
    if gpu.unified:
        room = "its memory is the machine's"
    elif now.free_bytes is not None and now.total_bytes is not None:
        room = f"{format_bytes(now.free_bytes)} of {format_bytes(now.total_bytes)} free"
    told = [f"driver {gpu.driver or NONE}", room]
    told += [f"{now.celsius:.0f} °C"] if now.celsius is not None else []
    told += [f"{gpu.power_limit_w:.0f} W"] if gpu.power_limit_w is not None else []
    return ", ".join(told)


# ── memory and disks ────────────────────────────────────────────────────────────────────────


def _ram(here: _Here) -> Iterator[Said]:
    machine = here.machine
    known = [
        f"{machine.memory_speed_mts} MT/s" if machine.memory_speed_mts else "",
        count(machine.memory_modules, "module") if machine.memory_modules else "",
        count(machine.memory_channels, "channel") if machine.memory_channels else "",
    ]
    speed = ", ".join(filter(None, known))
    if not speed:
        virtual = machine.hypervisor or machine.wsl
        speed = (
            f"speed and channels {NONE} ({'a virtual machine hides them' if virtual else 'only root may read them'})"
        )
    available = machine.available_bytes
    room = f"{_bytes(available)} of {_bytes(machine.memory_bytes)} available"
    if available is not None and available < LEAST_MEMORY_BYTES:
        yield "warn", f"{room}, too little for an engine", "end other programs, or raise the limit of memory"
        fact = speed
    else:
        fact = f"{room}; {speed}"
    if machine.memory_channels == 1 and not (machine.gpus and machine.gpus[0].unified):
        yield "warn", fact, "a module in a second channel doubles the bandwidth, and decoding on the CPU waits for it"
    else:
        yield "ok", fact, None


def _swap(here: _Here) -> Iterator[Said]:
    swap, memory = psutil.swap_memory(), here.machine.memory_bytes or 0
    if swap.used > MOST_SWAP * memory:
        fact = f"{format_bytes(swap.used)} are swapped out, of {format_bytes(swap.total)} of swap"
        yield "warn", fact, "end what filled the memory, or what is swapped in during a load disturbs it"


def _model(here: _Here) -> Iterator[Said]:
    ref = here.options.model
    if ref is None:
        yield "unknown", "no model is named; `llamaduel doctor MODEL` says whether it fits", None
        return
    if download.is_reference(ref):
        download.parse(ref)
        step = f"`llamaduel inspect {ref}` fetches it; then name the file that it shows"
        yield "unknown", f"{ref} lies on a hub, and nothing is fetched here", step
        return
    model = models.load(find_model(ref, lambda _: None), hashed=False)
    needs = dict(_needs(model, here))
    yield _fit(model, needs, here)
    require_weights(model)
    yield from _cached(model, needs.values(), here)


def _needs(model: Model, here: _Here) -> Iterator[tuple[str, Predicted]]:
    """Bytes of each arm that does not leave its placement to the engine."""
    for arm in here.arms:
        engine = here.engines.get(arm.backend)
        device = here.options.stand_in is not None or (
            bool(engine.devices) if isinstance(engine, Engine) else bool(here.machine.gpus)
        )
        settings = apply_knobs(arm, matched_settings(here.machine, here.options, device))
        device = device or bool(settings.rpc)
        if found := placement.predict(model, arm.placement, settings, device, depth=settings.depth):
            yield str(arm), found


def _fit(model: Model, needs: dict[str, Predicted], here: _Here) -> Said:
    """Judged by the bytes of each arm and not by the file: a model may be larger than the memory of the host."""
    memory, available, stand_in = here.machine.memory_bytes, here.machine.available_bytes, here.stand_in_bytes
    cards = here.card_bytes if stand_in is None else 0
    name, size = model.file.path.name, model.weights_bytes
    if memory is not None and cards is not None and size > memory + cards:
        both = f"memory ({format_bytes(memory)})" + (f" and GPUs ({format_bytes(cards)}) together" if cards else "")
        return "fail", f"{name}: {format_bytes(size)} of weights are more than {both}", "take a smaller quantization"
    device_bytes = stand_in if stand_in is not None else cards or None
    refused: dict[str, list[str]] = {}
    for arm, predicted in needs.items():
        why = placement.refusal(predicted, memory, device_bytes, device_is_host=stand_in is not None)
        if why:
            refused.setdefault(why, []).append(arm)
    if refused:
        why, arms = next(iter(refused.items()))
        fact, step = _halves(why)
        more = f" ({sum(map(len, refused.values()))} of {len(needs)} arms do not fit)" if len(refused) > 1 else ""
        level: Level = "warn" if _any_runs(needs, here) else "fail"
        return level, f"{name}, {', '.join(arms)}: {fact}{more}", step
    host = [_host_bytes(each) + (_device_bytes(each) if stand_in is not None else 0) for each in needs.values()]
    need = f"; its arms need up to {format_bytes(max(host))} on the host" if host else ""
    fact = f"{name}: {format_bytes(size)} of weights{need}"
    if available is not None and max(host, default=0) > available:
        return "warn", f"{fact}, and {format_bytes(available)} are available", "end other programs before a run"
    return "ok", fact, None


def _any_runs(needs: dict[str, Predicted], here: _Here) -> bool:
    """Whether a run would load an arm: of GPUs it lets the engine tell whether they are large enough."""
    stand_in = here.stand_in_bytes
    return any(
        str(arm) not in needs
        or not placement.refusal(
            needs[str(arm)], here.machine.memory_bytes, stand_in, device_is_host=stand_in is not None
        )
        for arm in here.arms
        if not isinstance(here.engines.get(arm.backend), DuelError)
    )


def _host_bytes(predicted: Predicted) -> int:
    return predicted.host_bytes or predicted.host_weights_bytes


def _device_bytes(predicted: Predicted) -> int:
    return predicted.device_bytes or predicted.device_weights_bytes


def _cached(model: Model, needs: Iterable[Predicted], here: _Here) -> Iterator[Said]:
    """Whether its file lies in memory already, and whether it can beside the engine."""
    drive = _drive(model.file.path)
    if drive in SLOW_DRIVES:
        fact = f"{model.file.path.name} lies on a drive of another system ({drive})"
        yield "warn", fact, "copy it to a disk of this one, for every load reads it"
    share = gates.resident_share(model.file.shards)
    fact = f"{NONE if share is None else percent(share)} of the model's file is in the page cache"
    host_bytes = max(map(_host_bytes, needs), default=None)
    available = here.machine.available_bytes
    if available is not None and (why := gates.no_room(model.file.size_bytes, host_bytes, available)):
        yield "warn", f"{fact}; {why}", "loads will read the disk and take longer; end other programs to make room"
    else:
        rest = ", and a run reads the rest once" if share is not None and share < 1 else ""
        yield "unknown" if share is None else "ok", fact + rest, None


def _drive(path: Path) -> str | None:
    """Kind of the file system that this file is on."""
    at = path.resolve()
    mounted = [each for each in psutil.disk_partitions(all=True) if at.is_relative_to(each.mountpoint)]
    return max(mounted, key=lambda each: len(each.mountpoint)).fstype if mounted else None


def _disks(here: _Here) -> Iterator[Said]:
    places = (
        (Path(here.options.out), "run folders", LEAST_OUT_BYTES, "--out DIR"),
        (process.cache_dir(), "the cache", LEAST_CACHE_BYTES, "XDG_CACHE_HOME"),
    )
    roomy = []
    for path, what, least, option in places:
        folder = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        free = shutil.disk_usage(folder).free
        if not os.access(folder, os.W_OK):
            yield "fail", f"{folder}, where {what} would be, cannot be written to", f"choose another by {option}"
        elif free < least:
            step = f"make room, or choose another disk by {option}"
            yield "warn", f"{format_bytes(free)} are free for {what} ({folder})", step
        else:
            roomy.append(f"{format_bytes(free)} free for {what}")
    if roomy:
        yield "ok", f"disk: {', '.join(roomy)}", None


def _bytes(size: int | None) -> str:
    return NONE if size is None else format_bytes(size)


# ── CPU ─────────────────────────────────────────────────────────────────────────────────────


def _cpu(here: _Here) -> Iterator[Said]:
    machine = here.machine
    threads = matched_settings(machine, here.options, bool(machine.gpus)).threads
    run = "each engine chooses its threads" if threads is None else f"a run uses {count(threads, 'thread')}"
    cores, logical = machine.physical_cores, machine.logical_cores
    smt = f", {logical} threads" if cores and logical and logical > cores else ""
    clock = f", up to {machine.cpu_max_mhz} MHz" if machine.cpu_max_mhz else ""
    yield "ok", f"{machine.cpu or NONE}: {count(cores, 'core') if cores else NONE}{smt}{clock}; {run}", None
    if (kinds := machines.kinds_of_core(here.root)) and threads is not None and threads > kinds[0]:
        yield (
            "warn",
            f"{kinds[0]} fast cores and {kinds[1]} slower ones, and all threads wait for the slowest",
            f"add an arm with t={kinds[0]} to see whether the fast ones alone do better",
        )


def _speed(here: _Here) -> Iterator[Said]:
    """What holds the clock down by choice: governor, preference, profile, battery."""
    machine = here.machine
    if machine.on_ac_power is False:
        yield "warn", "this machine runs on its battery", "plug it in, for most slow down without"
    told = {
        "governor": machine.governor,
        "preference": machine.energy_preference,
        "profile": machine.platform_profile,
    }
    words = ", ".join(f"{name} {word}" for name, word in told.items() if word)
    saves = machine.governor is not None and "powersave" in machine.governor
    driver = machines.frequency_driver(here.root)
    if saves and driver not in OWN_SPEED:
        step = "`sudo cpupower frequency-set -g performance` for as long as you measure"
        yield "warn", f"the clock is held low ({words})", step
    elif SAVING & {machine.energy_preference, machine.platform_profile}:
        step = "`powerprofilesctl set performance`, or the system's power settings, for as long as you measure"
        yield "warn", f"power is preferred to speed ({words})", step
    elif ", " in (machine.governor or ""):
        step = "set one for all, as in `sudo cpupower frequency-set -g performance`"
        yield "warn", f"cores have different governors ({words})", step
    else:
        yield "ok" if words else "unknown", words or "governor and power profile are not told here", None


def _heat(_: _Here) -> Iterator[Said]:
    now, limit = machines.cpu_celsius(), machines.cpu_critical_celsius()
    if now is None:
        yield "unknown", "no sensor tells how hot the CPU is", None
    elif preflight.near(now, limit):
        yield "warn", f"{now:.0f} °C, and {limit:.0f} °C is too hot", "let it cool, and look at its fan"
    else:
        yield "ok", f"{now:.0f} °C" + (f", {limit - now:.0f} below its limit" if limit is not None else ""), None


@dataclass(frozen=True, slots=True)
class _Others:
    """What was not ours, over a moment, in cores; None: not told."""

    foreign_cores: float | None
    steal_cores: float | None
    names: tuple[str, ...] = ()


def _watch_others() -> _Others:
    reader = telemetry.Reader()
    before, first = _spent_s(), reader.read()
    time.sleep(LOOK_S)
    last, after = reader.read(), _spent_s()
    seconds = last.at_s - first.at_s
    stolen = None if first.steal_s is None or last.steal_s is None else (last.steal_s - first.steal_s) / seconds
    cores = {who: (spent_s - before[who]) / seconds for who, spent_s in after.items() if who in before}
    busiest = sorted(((each, name) for (_, name), each in cores.items() if each > BUSY), reverse=True)[:2]
    return _Others(
        telemetry.foreign_between(first, last), stolen, tuple(f"{name} {each:.1f}" for each, name in busiest)
    )


def _spent_s() -> dict[tuple[int, str], float]:
    """Seconds of CPU time of every process that is not ours, by pid and name."""
    found = {}
    for each in psutil.process_iter(["name", "cpu_times"]):
        if (times := each.info["cpu_times"]) is not None and each.pid != os.getpid():
            found[each.pid, each.info["name"] or NONE] = times.user + times.system
    return found


def _load(here: _Here) -> Iterator[Said]:
    found = here.others
    if found.foreign_cores is None:
        yield "unknown", "what other programs use is not told here", None
        return
    used = f"other programs use {max(0.0, found.foreign_cores):.1f} cores"
    if found.foreign_cores > telemetry.FOREIGN_CORES:
        who = f" ({', '.join(found.names)})" if found.names else ""
        step = f"end them: a run waits for {telemetry.FOREIGN_CORES} or less, a minute before each load"
        yield "warn", f"{used} now{who}", step
    else:
        yield "ok", used, None


# ── traps ───────────────────────────────────────────────────────────────────────────────────


def _surroundings(here: _Here) -> Iterator[Said]:
    machine = here.machine
    told = [machine.system or NONE, f"kernel {machine.kernel or NONE}"]
    told += [f"WSL {machine.wsl_version}"] if machine.wsl_version else ["WSL"] if machine.wsl else []
    told += ["in a container"] if machine.container else []
    virtual = machine.hypervisor is not None and not machine.wsl
    told += [f"virtual machine ({machine.hypervisor})"] if virtual else []
    stolen = here.others.steal_cores if virtual else None
    if stolen is not None and stolen > BUSY:
        yield "warn", f"{', '.join(told)}; its host took {stolen:.1f} cores away", "measure when the host is quiet"
    else:
        yield "ok", ", ".join(told), None
    if sys.platform == "darwin":
        yield "unknown", "on macOS the page cache, memory modules and most sensors are not told", None


def _wsl(here: _Here) -> Iterator[Said]:
    machine = here.machine
    if machine.wsl_version == 1:
        yield "fail", "WSL 1 has no GPU, and its files are slow", "on Windows run `wsl --set-version DISTRO 2`"
    elif machine.wsl:
        yield (
            "warn",
            f"WSL2 gives Linux {_bytes(machine.memory_bytes)} of the memory of Windows",
            "raise `memory=` below [wsl2] in .wslconfig on Windows, then `wsl --shutdown`",
        )
        if machine.visible_gpus:
            yield (
                "warn",
                "on WSL2 a model too large for the card spills into system memory and is slow, where Linux refuses it",
                "choose 'Prefer No Sysmem Fallback' for CUDA in NVIDIA's control panel on Windows",
            )


def _limits(here: _Here) -> Iterator[Said]:
    """What a container, a service or `taskset` takes away from us."""
    machine = here.machine
    quota, cpus = machine.cpu_quota_cores, psutil.cpu_count() or 0
    if quota is not None and quota < cpus:
        yield (
            "warn",
            f"CPU time is limited to {quota:g} of {count(cpus, 'CPU')}, and threads beyond it stop for moments",
            "raise the limit (`--cpus`), or keep to threads below it (knob t)",
        )
    elif machine.logical_cores is not None and machine.logical_cores < cpus:
        fact = f"this process may use {machine.logical_cores} of {count(cpus, 'CPU')}"
        yield "warn", fact, "lift the affinity (`taskset`, `--cpuset-cpus`) if all are meant"
    total = psutil.virtual_memory().total
    if machine.memory_bytes is not None and machine.memory_bytes < total:
        fact = (
            f"memory is limited to {format_bytes(machine.memory_bytes)} of {format_bytes(total)}, page cache included"
        )
        yield "warn", fact, "raise the limit (`--memory`) if the model needs more"


def _configured(here: _Here) -> Iterator[Said]:
    for sentence in here.machine.warnings:
        fact, step = _halves(sentence, ": ")
        yield "warn" if step else "ok", fact, step


def _neighbours(here: _Here) -> Iterator[Said]:
    """Engines that a user runs already; one that we attach to is meant to run."""
    for name, backend in backends().items():
        engine = here.engines.get(name)
        attached = isinstance(engine, Engine) and engine.origin == "attached"
        if isinstance(backend, Neighbourly) and not attached:
            for sentence in backend.beside():
                yield "warn", *_halves(sentence)


def _environment(_: _Here) -> Iterator[Said]:
    if names := sorted(name for name in os.environ if process.SCRUBBED.match(name)):
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        has = "is set and has" if len(names) == 1 else "are set and have"
        yield "warn", f"{shown} {has} no effect on engines started here", "say it by an option or a knob of an arm"


def _mlock(here: _Here) -> Iterator[Said]:
    settings = matched_settings(here.machine, here.options, False)
    if not any("mlock" in (apply_knobs(arm, settings).load_mode or "") for arm in here.arms):
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < (here.machine.memory_bytes or 0):
        fact = f"an arm locks its weights in memory, and only {format_bytes(limit)} may be locked"
        yield "warn", fact, "run `ulimit -l unlimited` first, or take another load mode (knob lm)"


def _nodes(here: _Here) -> Iterator[Said]:
    if (nodes := here.machine.numa_nodes or 1) > 1:
        yield (
            "warn",
            f"memory lies in {nodes} NUMA nodes, and how weights fall on them changes from load to load",
            "keep to one: `numactl --cpunodebind=0 --membind=0 llamaduel …`",
        )


# ── tools ───────────────────────────────────────────────────────────────────────────────────


def _tools(here: _Here) -> Iterator[Said]:
    """What `engines install` would make here. What a build lacks matters where no engine sees a GPU."""
    served = any(isinstance(each, Engine) and each.devices for each in here.engines.values())
    for recipe in recipes().values():
        there = "installed" if recipe.installed() else "not installed"
        if not isinstance(recipe, Foretelling):
            yield "ok", f"{recipe.name}: {there}; {recipe.summary}", None
            continue
        found = recipe.prospect()
        tools = f" ({', '.join(found.tools)})" if found.tools else ""
        fact = f"{recipe.name}: {there}; `engines install` builds {found.builds}{tools}"
        if found.lacks and not served:
            why, step = _halves(found.lacks)
            yield "warn", f"{fact}: {why}", step
        else:
            yield "ok", fact, None


CHECKS: dict[str, tuple[Callable[[_Here], Iterator[Said]], ...]] = {  # by topic, in the order of the screen
    "engines": (_engines, _alike, _wrong, _unused),
    "GPUs": (_gpus,),
    "memory": (_ram, _swap, _model, _disks),
    "CPU": (_cpu, _speed, _heat, _load),
    "traps": (_surroundings, _wsl, _limits, _configured, _neighbours, _environment, _mlock, _nodes),
    "tools": (_tools,),
}
