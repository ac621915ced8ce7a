"""What a run would do, before anything is loaded: its arms with equal placements merged, their bytes, how many loads.

How long it takes only a run can know. Where an earlier one of the same model, engines and settings on this machine
lies under `--out`, its loads say it.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from typing_extensions import TypedDict

from harness import machine, model, plan, record, verdict
from harness.arms import parse_arms
from harness.errors import RunRefused
from harness.inspection import shares
from harness.machine import Machine
from harness.options import Options
from harness.plan import Status
from harness.probe import Field, Watch, find_field, find_model
from harness.record import Contender, Run
from harness.run import DEFAULT_BLOCKS
from harness.sizes import format_bytes
from harness.words import count

LEAST_BLOCKS = plan.max_blocks(0.0, 1.0, 1)  # of a run, however small its budget


class PlannedArm(TypedDict):
    """One arm before anything is loaded. Bytes are predicted; null where the engine chooses."""

    arm: str
    status: Status
    alias_of: str | None
    reason: str | None
    placement: str
    engine: str | None
    predicted_device_bytes: int | None
    predicted_host_bytes: int | None
    predicted_device_weights_bytes: int | None
    predicted_device_context_bytes: int | None
    predicted_device_compute_bytes: int | None
    predicted_host_weights_bytes: int | None
    predicted_host_context_bytes: int | None
    command: str | None


class Loads(TypedDict):
    """Engine starts of the blocks: at the first look, and at the last."""

    fewest: int
    most: int


Minutes = TypedDict("Minutes", {"fewest": float, "most": float, "from": str})  # "from" is a keyword
Minutes.__doc__ = "Of the blocks, and the earlier run that tells it."


class Preview(TypedDict):
    """What a run would do. `minutes` is null where no earlier run of the same work tells it."""

    model: str
    machine: str | None
    arms: list[PlannedArm]
    loads: Loads
    minutes: Minutes | None
    notes: list[str]


def preview_run(options: Options, watch: Watch) -> Preview:
    """The arms of a run after merging equal placements, with predicted bytes. Raises DuelError."""
    parse_arms(options.arms)  # a slip there is told before a model is looked for
    known = model.load(find_model(options.model, watch), hashed=False)  # its weights are for a run to read
    field = find_field(options, watch, model=known)
    running = [each for each in field.contenders if each.status.word is Status.OK]
    copies = len(running) + (options.preset == "confirm" and bool(running))
    known_run = _timed(field, options)
    most = _most_blocks(options, known_run and known_run[1])
    unknown = options.budget is not None and known_run is None
    fewest = min(most, LEAST_BLOCKS if unknown else verdict.FEWEST_BLOCKS)
    return {
        "model": field.model.name,
        "machine": field.machine.cpu,
        "arms": [_arm(each) for each in field.contenders],
        "loads": {"fewest": fewest * copies, "most": most * copies},
        "minutes": _minutes(known_run, fewest, most),
        "notes": [
            *notes(field),
            *_blind(running),
            *_overfull(running, field.machine),
            *_budget_notes(options, known_run, most, copies),
        ],
    }


def _blind(running: Sequence[Contender]) -> Iterator[str]:
    """Arms that would be placed on a stand-in device which their engine does not see: a run finds them VOID."""
    arms: dict[str, list[str]] = {}
    for each in running:
        if each.settings.stand_in_bytes is not None and each.engine is not None and not each.engine.rpc:
            arms.setdefault(str(each.engine), []).append(each.arm)
    for engine, named in arms.items():
        yield (
            f"{engine} has no RPC and does not see the stand-in device, so {', '.join(named)} will be VOID; "
            "`llamaduel engines list` says what has"
        )


def _overfull(running: Iterable[Contender], machine: Machine) -> Iterator[str]:
    """Arms that need more than the GPUs have. Only an engine can refuse them: some drivers page to the machine."""
    sizes = [gpu.memory_bytes for gpu in machine.gpus]
    card = sum(size for size in sizes if size is not None) if sizes and None not in sizes else None
    for each in running:
        settings, predicted = each.settings, each.predicted
        room = card if settings.device_limit_bytes is None else settings.device_limit_bytes
        if predicted is None or predicted.device_bytes is None or room is None:
            continue
        need = predicted.device_bytes + (predicted.compute_bytes or 0)
        if need > room and settings.stand_in_bytes is None and not settings.rpc:
            yield (
                f"{each.arm} needs {format_bytes(need)} of {format_bytes(room)} of GPU memory: a run will find that it "
                "does not load, or on WSL2 that it spills"
            )


def _arm(each: Contender) -> PlannedArm:
    parts = shares(each.predicted)
    return {
        "arm": each.arm,
        "status": each.status.word,
        "alias_of": each.status.alias_of,
        "reason": each.status.reason or None,
        "placement": each.placement,
        "engine": str(each.engine) if each.engine else None,
        "predicted_device_bytes": each.predicted.device_bytes if each.predicted else None,
        "predicted_host_bytes": each.predicted.host_bytes if each.predicted else None,
        "predicted_device_weights_bytes": parts["device_weights_bytes"],
        "predicted_device_context_bytes": parts["device_context_bytes"],
        "predicted_device_compute_bytes": parts["device_compute_bytes"],
        "predicted_host_weights_bytes": parts["host_weights_bytes"],
        "predicted_host_context_bytes": parts["host_context_bytes"],
        "command": each.command,
    }


def notes(field: Field) -> list[str]:
    """How many arms there really are and why, then what else there is to know of this field."""
    words = [each.status.word for each in field.contenders]
    left, merged, large = (words.count(word) for word in (Status.OK, Status.ALIAS, Status.DOES_NOT_FIT))
    if not merged and not large:
        return [*field.notes]
    why = f": {large} {'does' if large == 1 else 'do'} not fit" if large else ""
    sentences = "".join(f" {text[0].upper()}{text[1:]}." for text in field.merged)
    return [f"{count(left, 'arm')}, not {left + merged + large}{why}.{sentences}", *field.notes]


# ── minutes ─────────────────────────────────────────────────────────────────────────────────


def _timed(field: Field, options: Options) -> tuple[Run, float] | None:
    """The newest run of the same work, and the seconds of its blocks."""
    found = ((run, _seconds_per_block(run)) for run in _earlier(field, options))
    return next(((run, block_s) for run, block_s in found if block_s is not None), None)


def _most_blocks(options: Options, block_s: float | None) -> int:
    """As many as a run would plan: of its preset, or of its budget, where it is known how long one takes."""
    most = plan.PRESETS[options.preset]
    if options.budget is None:
        return min(most, DEFAULT_BLOCKS) if options.model is None else most
    return most if block_s is None else min(most, plan.max_blocks(options.budget, block_s, 1))


def _minutes(known_run: tuple[Run, float] | None, fewest: int, most: int) -> Minutes | None:
    """Minutes for so many blocks, and the earlier run that they are from; None without one."""
    if known_run is None:
        return None
    run, block_s = known_run
    return {"fewest": round(block_s * fewest / 60, 1), "most": round(block_s * most / 60, 1), "from": str(run.folder)}


def _budget_notes(options: Options, known_run: tuple[Run, float] | None, most: int, copies: int) -> Iterator[str]:
    """What the budget comes to; only loads tell how long a block takes."""
    if options.budget is None or not copies:
        return
    budget = _time(options.budget)
    if plan.PRESETS[options.preset] == LEAST_BLOCKS:
        yield f"A budget of {budget} changes nothing: {options.preset} has {LEAST_BLOCKS} blocks, the fewest there are."
        return
    if known_run is None:
        yield f"How many blocks a budget of {budget} holds, the probe tells: {LEAST_BLOCKS} at least, {most} at most."
        return
    few = ", too few for a claim" if most < verdict.FEWEST_BLOCKS else ""
    over = known_run[1] * most / 60 > options.budget
    said = f"is less than {most} blocks take, the fewest there are" if over else f"holds {most} blocks"
    yield f"A budget of {budget} {said} ({count(copies, 'load')} each{few})."


def _time(minutes: float) -> str:
    """As a person writes it: "45 s", "20 min"."""
    return f"{60 * minutes:.3g} s" if minutes < 1 else f"{minutes:.1f}".removesuffix(".0") + " min"


def _seconds_per_block(run: Run) -> float | None:
    """From the end of one block to the end of the next, its waits for a quiet machine and repeated loads included."""
    ends: dict[int, float] = {}
    for load in run.loads:
        if load.stage == "block":
            ends[load.block] = max(ends.get(load.block, 0.0), load.ended_unix_s)
    spent_s = [after - before for before, after in pairwise(sorted(ends.values()))]
    return statistics.median(spent_s) if spent_s else None


def _earlier(field: Field, options: Options) -> Iterator[Run]:
    """Runs that did the same work as this one would, the newest first."""
    folder = Path(options.out)
    found = sorted(folder.glob(f"*/{record.HEADER}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found:
        with contextlib.suppress(RunRefused):
            if _same_work(run := record.read(path.parent), field, options):
                yield run


def _same_work(run: Run, field: Field, options: Options) -> bool:
    header = run.header
    digest = field.model.file.digest
    return (
        bool(digest)
        and header.model.digest == digest
        and _hardware(header.machine) == _hardware(field.machine)
        and _work(header.contenders) == _work(field.contenders)
        and all(
            (header.options.get(name) or None) == (getattr(options, name) or None)
            for name in ("prompts", "prompt_tokens", "out_tokens", "no_wait", "thinking", "preset", "depth")
        )
    )


def _hardware(known: machine.Machine) -> tuple[object, ...]:
    return known.cpu, known.physical_cores, known.memory_bytes, tuple(gpu.name for gpu in known.gpus)


def _work(contenders: Sequence[Contender]) -> set[tuple[object, ...]]:
    return {(each.arm, str(each.engine), each.settings) for each in contenders if each.status.word is Status.OK}
