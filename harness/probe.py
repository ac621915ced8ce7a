"""Everything before block 1: find the model and the engines, and load every arm once.

The probe fixes what runs and how: which arms are one placement, which do not fit, what each
engine really did, how long the answers are and how long it will take. Its loads are kept in the
run folder and never analysed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import machine as machines
from harness import model as models
from harness import placement, process, prompts, record, synth, telemetry
from harness.arms import apply_knobs, parse_arms
from harness.contract import Arm, Engine, Prompt, Session, Settings
from harness.errors import Crashed, DoesNotFit, DuelError, EngineFailed, ModelError, RunRefused, TimedOut, Unavailable
from harness.machine import Machine
from harness.measure import Sample, measure
from harness.model import Model
from harness.options import WHOLE, Options
from harness.plan import ArmStatus, Status
from harness.record import Contender, LoadRecord, SampleLine
from harness.registry import backend, backends
from harness.sizes import parse_size

OUT_TOKENS = (128, 256, 512, 1024)
WINDOW_S = 2.0  # shortest decode window that a rate is taken from
POOL = 6  # base prompts that a real model is tried with


@dataclass(frozen=True, slots=True)
class Progress:
    """One thing worth telling. `done` of `total` loads, if a plan exists; `seconds_left` of it."""

    text: str
    done: int | None = None
    total: int | None = None
    seconds_left: float | None = None


Watch = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """What a run is made of, before anything is loaded."""

    model: Model
    machine: Machine
    prompts: prompts.PromptSet
    contenders: tuple[Contender, ...]
    notes: tuple[str, ...] = ()


# ── the field: model, engines, placements ───────────────────────────────────────────────────


def find_field(options: Options, watch: Watch) -> Field:
    """Read the model, find every engine, merge equal placements. Raises DuelError."""
    ended = process.end_leftovers()
    if ended:
        watch(Progress(f"ended {len(ended)} processes that a killed run had left: {', '.join(map(str, ended))}"))
    machine = machines.read()
    arms = parse_arms(options.arms)
    path = find_model(options.model, watch)
    watch(Progress(f"reading {path.name}"))
    model = models.load(path)
    engines = find_engines(arms, options)
    contenders = _merge(tuple(_contender(arm, engines[arm.backend], model, machine, options) for arm in arms))
    return Field(
        model=model,
        machine=machine,
        prompts=prompts.load(Path(options.prompts) if options.prompts else None),
        contenders=contenders,
        notes=tuple(machine.warnings),
    )


def find_model(ref: str | None, watch: Watch) -> Path:
    """The (first) file of a model reference; without one the synthetic default, written once."""
    if ref is None:
        return _default_model(watch)
    path = Path(ref).expanduser()
    if path.is_dir():
        found = sorted(p for p in path.glob("*.gguf") if "-of-" not in p.name or "-00001-of-" in p.name)
        if len(found) != 1:
            names = ", ".join(p.name for p in found[:5]) or "none"
            raise ModelError(f"{ref} is a folder with {len(found)} models ({names}); name one file")
        return found[0]
    if not path.exists():
        for engine in backends().values():
            resolved = engine.resolve(ref)
            if resolved is not None:
                return resolved
    return path


def _default_model(watch: Watch) -> Path:
    shape = synth.scaled(synth.SHAPES["tiny"], parse_size("0.15GiB"))
    path = process.cache_dir() / "models" / f"synthetic-v{synth.VERSION}-150MiB.gguf"
    if not path.exists():
        watch(Progress(f"writing a synthetic model with a known answer: {path.name}"))
        path.parent.mkdir(parents=True, exist_ok=True)
        synth.write(path, shape)
    return path


def find_engines(arms: Sequence[Arm], options: Options) -> Mapping[str, Engine | Unavailable]:
    """Every backend of these arms once: what was found, or why not."""
    given = {
        "llama-server": options.llama_server,
        "ollama": options.ollama,
        "openai": options.openai,
        "stand-in": "1" if options.stand_in is not None else None,
        "allow-remote": "1" if options.allow_remote else None,
    }
    hints = {key: value for key, value in given.items() if value is not None}
    found: dict[str, Engine | Unavailable] = {}
    for name in dict.fromkeys(arm.backend for arm in arms):
        try:
            found[name] = backend(name).find(hints)
        except Unavailable as error:
            found[name] = error
    return found


def matched_settings(machine: Machine, options: Options, has_device: bool) -> Settings:
    """Equal on all arms. One core stays free: with all cores one foreign process stalls spinning workers."""
    stand_in = stand_in_bytes(options, machine)
    if options.settings == "stock":
        nothing = {field.name: None for field in dataclasses.fields(Settings) if field.name != "rpc"}
        return dataclasses.replace(Settings(), **nothing, stand_in_bytes=stand_in)  # type: ignore[arg-type]
    return Settings(
        context=options.context,
        threads=1 if stand_in is not None else max(1, machine.physical_cores - 1),
        flash_attention="off" if stand_in is not None else "on",
        load_mode="auto" if has_device and stand_in is None else "none",
        stand_in_bytes=stand_in,
    )


def stand_in_bytes(options: Options, machine: Machine) -> int | None:
    """Memory of the stand-in device; None without one."""
    if options.stand_in is None:
        return None
    return machine.memory_bytes if options.stand_in == WHOLE else parse_size(options.stand_in)


def _contender(
    arm: Arm, engine: Engine | Unavailable, model: Model, machine: Machine, options: Options
) -> Contender:
    has_device = options.stand_in is not None or bool(machine.gpus)
    if isinstance(engine, Engine) and options.stand_in is None:
        has_device = bool(engine.devices) or (bool(machine.gpus) and not engine.devices and engine.origin == "PATH")
    settings = apply_knobs(arm, matched_settings(machine, options, has_device))
    predicted = placement.predict(model, arm.placement, settings, has_device or bool(settings.rpc))
    words = placement.describe(arm.placement, model, has_device or bool(settings.rpc))
    contender = Contender(
        arm=str(arm),
        status=ArmStatus(Status.OK),
        placement=words,
        settings=settings,
        predicted=predicted,
        command=backend(arm.backend).command(arm, model.file, settings),
    )
    if isinstance(engine, Unavailable):
        return dataclasses.replace(contender, status=ArmStatus(Status.UNAVAILABLE, str(engine)))
    contender = dataclasses.replace(contender, engine=engine)
    reason = predicted and placement.refusal(predicted, machine.memory_bytes, _device_bytes(settings, engine))
    if reason:
        return dataclasses.replace(contender, status=ArmStatus(Status.DOES_NOT_FIT, reason))
    return contender


def _device_bytes(settings: Settings, engine: Engine) -> int | None:
    """Total memory of the devices; a stand-in never refuses, so its size is the limit."""
    if settings.stand_in_bytes is not None:
        return settings.stand_in_bytes
    totals = [device.total_bytes for device in engine.devices]
    return sum(total for total in totals if total) if totals and all(totals) else None


def _merge(contenders: tuple[Contender, ...]) -> tuple[Contender, ...]:
    """Equal placement class, backend and settings: the later ones become aliases of the first."""
    first: dict[object, str] = {}
    merged = []
    for contender in contenders:
        name = contender.arm.split(",")[0].split("@")[0]
        key = contender.predicted and (name, contender.predicted.placement_class, contender.settings)
        if key and contender.status.word is Status.OK:
            if key in first:
                status = ArmStatus(Status.ALIAS, f"the same placement as {first[key]}", first[key])
                contender = dataclasses.replace(contender, status=status)  # noqa: PLW2901
            else:
                first[key] = contender.arm
        merged.append(contender)
    return tuple(merged)
