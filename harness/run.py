"""From options to a finished run folder: field, probe, plan, then load after load.

This module obeys `plan.next_load` and decides nothing. Killed at any moment, the folder can be
read and continued; a run whose machine, engines or plan changed is not continued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import re
import secrets
import shlex
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness import machine as machines
from harness import plan, record
from harness.arms import parse_arms
from harness.errors import RunRefused, Unavailable, UsageError, nearest
from harness.load import Job, Task, run_load
from harness.measure import Sample
from harness.options import Options
from harness.plan import Aside, Outcome, Plan, Planned, Status
from harness.probe import Field, Probe, Progress, Watch, find_engines, find_field, probe, shared_tokens, task
from harness.record import Contender, Header, LoadRecord, ModelFacts, Run

PACKAGES = ("llamaduel", "ollama", "pytest-benchmark", "numpy", "scipy", "gguf", "xllamacpp")
DEFAULT_BLOCKS = 6  # of the synthetic default model: a look around in a few minutes


def run(options: Options, watch: Watch) -> Run:
    """Measure and return what is in the run folder. Ctrl-C ends it early and loses nothing.

    Raises DuelError where nothing can be measured.
    """
    if options.resume:
        return _resume(Path(options.resume), options, watch)
    field = find_field(options, watch)
    _check(field, options)
    folder = _new_folder(Path(options.out), field)
    prompt_tokens: dict[str, int] = {}
    found = probe(field, options, folder, prompt_tokens, watch)
    drawn = _draw(field, found, options)
    header = _header(field, found, drawn, options)
    record.create(folder, header)
    minutes = plan.estimate_minutes(drawn, _by_label(drawn, found))
    watch(Progress(f"{drawn.max_blocks} blocks of {len(drawn.arms)} loads, at most {minutes:.0f} min, into {folder}"))
    _run_blocks(record.read(folder), field, options, prompt_tokens, watch)
    return record.read(folder)


def _check(field: Field, options: Options) -> None:
    """The model has weights, reference and contrasts are arms: told before anything is loaded. Raises DuelError."""
    if field.model.header_only:
        raise RunRefused(f"{field.model.file.path.name} has no weights: it can be planned for, not measured")
    arms = [each.arm for each in field.contenders]
    reference = _canonical(options.reference)
    if reference is not None and reference not in arms:
        raise UsageError(f"the reference {reference!r} is no arm of this run; {nearest(reference, arms)}")
    for pair in options.contrast:
        plan.read_contrast(pair, arms)


def _new_folder(out: Path, field: Field) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", field.model.name.lower()).strip("-")[:40] or "model"
    stem = f"{datetime.date.today().isoformat()}-{slug}"
    for number in range(1, 1000):
        folder = out / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise RunRefused(f"{out} holds too many runs of {stem}; name another folder with --out")


# ── the plan and the header ─────────────────────────────────────────────────────────────────


def _draw(field: Field, found: Probe, options: Options) -> Plan:
    """The plan of the arms that can run; those that cannot are named in it."""
    running = [each for each in found.contenders if each.status.word is Status.OK]
    arms = [each.arm for each in running]
    loads = len(arms) + (options.preset == "confirm")
    if options.budget is not None:
        seconds = max(found.seconds_per_load.values())
        blocks = plan.max_blocks(options.budget, seconds, loads)
    else:
        blocks = DEFAULT_BLOCKS if options.model is None else plan.PRESETS[options.preset]
    first = running[0]
    settings = dataclasses.asdict(first.settings) | {
        "kind": options.settings,
        "prompt_tokens": options.prompt_tokens,
        "thinking": int(options.thinking),
        "pool": None if found.pool is None else ",".join(map(str, found.pool)),
    }
    return plan.make(
        arms,
        seed=secrets.randbelow(10**9) if options.seed is None else options.seed,
        prompts_digest=field.prompts.digest,
        weights_digest=field.model.file.digest,
        reference=_canonical(options.reference),
        contrasts=[plan.read_contrast(pair, arms) for pair in options.contrast],
        preset=options.preset,
        max_blocks=blocks,
        margin=options.margin,
        requests=found.requests,
        out_tokens=found.out_tokens,
        settings={key: "+".join(value) if isinstance(value, tuple) else value for key, value in settings.items()},
        aside=[
            Aside(each.arm, each.status.word, each.status.alias_of)
            for each in found.contenders
            if each.status.word is not Status.OK
        ],
    )


def _canonical(arm: str | None) -> str | None:
    return None if arm is None else str(parse_arms(arm)[0])


def _by_label(drawn: Plan, found: Probe) -> dict[str, float]:
    chief = next(arm.text for arm in drawn.arms if arm.label == drawn.reference)
    return {arm.label: found.seconds_per_load.get(arm.text, found.seconds_per_load[chief]) for arm in drawn.arms}


def _header(field: Field, found: Probe, drawn: Plan, options: Options) -> Header:
    model = field.model
    return Header(
        format=record.FORMAT,
        plan=drawn,
        plan_digest=drawn.digest,
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        model=ModelFacts(
            name=model.name,
            file=str(model.file.path),
            architecture=model.file.architecture,
            size_bytes=model.file.size_bytes,
            digest=model.file.digest,
            sha256=model.file.sha256,
            layers=model.layers,
            expert_layers=len(model.expert_layers),
            experts=model.experts,
            experts_used=model.experts_used,
            has_answer_key=model.answer_key is not None,
        ),
        contenders=found.contenders,
        machine=field.machine,
        options={key: value for key, value in dataclasses.asdict(options).items() if value not in (None, ())},
        command=shlex.join(["llamaduel", *sys.argv[1:]]),
        versions={name: installed for name in PACKAGES if (installed := _version(name))},
        notes=(*field.notes, *found.notes),
    )


def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


# ── the blocks ──────────────────────────────────────────────────────────────────────────────


def _run_blocks(begun: Run, field: Field, options: Options, prompt_tokens: dict[str, int], watch: Watch) -> None:
    """Load after load until the plan says that it is enough, or Ctrl-C."""
    drawn = begun.header.plan
    contenders = {arm.label: _contender_of(begun.header, arm.text) for arm in drawn.arms}
    pool = _pool(drawn)
    outcomes = list(plan.abandon(drawn, outcomes_of(begun)))
    began, loads_before = time.monotonic(), len(outcomes)
    with interruptible():
        while (planned := plan.next_load(drawn, outcomes)) is not None:
            done = len(outcomes)
            left = plan.loads_left(drawn, outcomes)
            each_s = (time.monotonic() - began) / (done - loads_before) if done > loads_before else None
            now = Progress(
                f"block {planned.block}: {planned.arm}",
                False,
                done,
                done + left,
                None if each_s is None else each_s * left,
            )

            def tell(text: str, now: Progress = now) -> None:
                watch(dataclasses.replace(now, text=f"{now.text}: {text}"))

            contender = contenders[planned.label]
            assert contender.engine is not None
            job = Job(
                stage="block",
                label=planned.label,
                arm=parse_arms(contender.arm)[0],
                engine=contender.engine,
                model=field.model.file,
                settings=contender.settings,
                tasks=_tasks(field, planned, pool, drawn.out_tokens, options),
                shared_tokens=shared_tokens(field.model),
                block=planned.block,
                attempt=planned.attempt,
                position=planned.position,
            )
            load, samples = run_load(job, begun.folder, prompt_tokens, tell, wait=not options.no_wait)
            outcomes.append(outcome_of(drawn, load, samples, watched=not options.no_wait))
            watch(Progress(_told(load, outcomes[-1]), True, len(outcomes), done + left))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the block quietly: what was measured is in the folder."""
    with contextlib.suppress(KeyboardInterrupt):
        yield


def _told(load: LoadRecord, outcome: Outcome) -> str:
    """One load in a line."""
    if outcome.value is None:
        return f"block {load.block}: {load.arm}: {outcome.broken}"
    return f"block {load.block}: {load.arm}: {math.exp(outcome.value):.1f} tok/s" + (
        ", disturbed by other programs" if outcome.disturbed else ""
    )


def _contender_of(header: Header, text: str) -> Contender:
    """The contender of a planned arm; hosts are numbers in the plan, so compare as the plan writes them."""
    return next(each for each in header.contenders if plan.public(each.arm) == text and each.status.word is Status.OK)


def _pool(drawn: Plan) -> tuple[int, ...] | None:
    text = dict(drawn.settings).get("pool")
    return None if text is None else tuple(int(index) for index in str(text).split(","))


def _tasks(
    field: Field, planned: Planned, pool: tuple[int, ...] | None, out_tokens: int, options: Options
) -> tuple[Task, ...]:
    """Warm-ups, then requests. Prompts of a pool are used in turn, each once a load: a fresh engine knows none."""
    measured, warmups = planned.prompts, planned.warmups
    if pool is not None:
        turn = [pool[(measured[0] + step) % len(pool)] for step in range(len(measured) + len(warmups))]
        measured, warmups = tuple(turn[: len(measured)]), tuple(turn[len(measured) :])
    return (
        *(task(field, index, out_tokens, options, warmup=True) for index in warmups),
        *(task(field, index, out_tokens, options) for index in measured),
    )


def outcome_of(drawn: Plan, load: LoadRecord, samples: tuple[Sample, ...], *, watched: bool) -> Outcome:
    """What the plan needs to know of a load."""
    valid = [s.decode_tps for s in samples if not s.warmup and s.invalid is None and s.decode_tps is not None]
    value = None if load.failure else plan.load_value(valid, drawn.requests)
    broken = None
    if value is None:
        reasons = [sample.invalid for sample in samples if sample.invalid]
        broken = load.failure.reason if load.failure else f"too few valid requests: {'; '.join(reasons) or 'none ran'}"
    return Outcome(
        block=load.block,
        attempt=load.attempt,
        label=load.label,
        value=value,
        broken=broken,
        disturbed=bool(watched and load.telemetry and load.telemetry.disturbed),
        status=load.failure.word if load.failure else Status.OK,
    )


def outcomes_of(run: Run) -> tuple[Outcome, ...]:
    """The outcomes of a run in its folder, in the order they were written."""
    watched = not run.header.options.get("no_wait", False)
    return tuple(
        outcome_of(run.header.plan, load, run.samples.get(load.id, ()), watched=watched)
        for load in run.loads
        if load.stage == "block"
    )


# ── going on with a killed run ──────────────────────────────────────────────────────────────


def _resume(folder: Path, options: Options, watch: Watch) -> Run:
    """Go on where the folder ends, with the options it was begun with."""
    begun = record.read(folder)
    given = {**begun.header.options, "resume": str(folder), "contrast": tuple(begun.header.options.get("contrast", ()))}
    options = dataclasses.replace(Options(**given), no_wait=options.no_wait or bool(given.get("no_wait")))
    field = find_field(dataclasses.replace(options, model=begun.header.model.file), watch)
    changes = list(machines.changes(begun.header.machine, field.machine))
    if field.model.file.digest != begun.header.model.digest:
        changes.append("the weights are others")
    if field.prompts.digest != begun.header.plan.prompts_digest:
        changes.append("the prompts are others")
    engines = find_engines([parse_arms(each.arm)[0] for each in begun.header.contenders], options)
    for contender in begun.header.contenders:
        engine = engines[parse_arms(contender.arm)[0].backend]
        if contender.engine is not None and (isinstance(engine, Unavailable) or str(engine) != str(contender.engine)):
            changes.append(f"{contender.engine} is now {'gone' if isinstance(engine, Unavailable) else engine}")
    if changes:
        raise RunRefused(f"{folder} cannot be continued: {'; '.join(dict.fromkeys(changes))}; start a new run")
    record.repair(folder)
    _run_blocks(begun, field, options, {}, watch)
    return record.read(folder)
