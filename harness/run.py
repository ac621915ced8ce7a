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
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness import baseline, energy, gates, physics, placement, plan, record, verdict
from harness import machine as machines
from harness import model as models
from harness.arms import parse_arms
from harness.contract import Placement, Settings
from harness.errors import Interrupted, RunRefused, Unavailable, UsageError, nearest
from harness.gates import Temperatures
from harness.load import Job, Task, run_load
from harness.machine import Machine
from harness.measure import Sample
from harness.model import Model
from harness.options import Options
from harness.physics import HostProbe
from harness.plan import ArmStatus, Aside, Outcome, Plan, Planned, Status
from harness.probe import (
    Field,
    Probe,
    Progress,
    Watch,
    cannot_run,
    equal_placements,
    find_engines,
    find_field,
    job_of,
    no_arm,
    on_gpus,
    probe,
    require_weights,
    task,
    void,
)
from harness.record import Contender, Header, LoadRecord, ModelFacts, Run, Search, Sitting

PACKAGES = ("llamaduel", "ollama", "pytest-benchmark", "numpy", "scipy", "gguf", "xllamacpp")
BALLAST_LOG = Path("engines") / "ballast.log"
OF_THE_START = ("resume", "no_wait", "out", "gpu_in_use")  # options that are none of the plan
SLUG = 48  # signs, at most
DEFAULT_BLOCKS = 6  # of the synthetic default model: a look around in a few minutes


def run(options: Options, watch: Watch, *, merge_aliases: bool = True) -> Run:
    """Measure and return what is in the run folder. Ctrl-C ends it early and loses nothing.

    Arms that are one placement run once, unless `merge_aliases` is False: that tests the protocol itself.
    Raises DuelError where nothing can be measured.
    """
    if options.resume:
        return _resume(Path(options.resume), options, watch)
    field = find_field(options, watch, merge_aliases=merge_aliases)
    options = _check(field, options)
    for told in cannot_run(field.contenders):
        watch(Progress(told))
    with new_folder(options, field) as folder, on_gpus(field, options, folder / BALLAST_LOG, watch) as held:
        return run_field(held, options, folder, {}, watch)


@contextlib.contextmanager
def new_folder(options: Options, field: Field) -> Iterator[Path]:
    """A run folder, locked. It goes again if nothing begins in it; where nothing can run, its logs are named."""
    folder = _new_folder(Path(options.out), field)
    with record.lock(folder):
        try:
            with _told_how_to_go_on(folder):
                yield folder
        except RunRefused as error:
            if record.exists(folder):
                raise
            if not any(each.stat().st_size for each in (folder / "engines").glob("*")):
                shutil.rmtree(folder, ignore_errors=True)
                raise
            raise type(error)(f"{error}; the engines' logs are in {folder / 'engines'}") from None
        except BaseException:
            if not record.exists(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise


@contextlib.contextmanager
def _told_how_to_go_on(folder: Path) -> Iterator[None]:
    """Where something was measured, what ended it is told with the command that goes on."""
    try:
        yield
    except Interrupted as error:
        if not record.exists(folder):
            raise RunRefused(str(error)) from None
        raise RunRefused(f"{error.reason}; go on with `{record.resuming(folder)}`") from None


def run_field(
    field: Field,
    options: Options,
    folder: Path,
    prompt_tokens: dict[str, int],
    watch: Watch,
    search: Search | None = None,
) -> Run:
    """Probe, plan and blocks of a field that was found; `search` tells how its arms were picked."""
    host = _host_probe(field, watch)
    found = probe(field, options, folder, prompt_tokens, watch)
    drawn = _draw(field, found, options)
    record.create(folder, _header(field, found, drawn, options, search, host))
    record.append(folder, _sitting(field, "the run began"))
    minutes = plan.estimate_minutes(drawn, _by_label(drawn, found))
    blocks = f"{drawn.max_blocks} blocks of {len(drawn.arms)} {'load' if len(drawn.arms) == 1 else 'loads'}"
    few = ", too few for a claim" if drawn.max_blocks < verdict.FEWEST_BLOCKS else ""
    watch(Progress(f"{blocks}{few}, about {max(1, round(minutes))} min if none is repeated, into {folder}"))
    load_s = 60 * minutes / (drawn.max_blocks * len(drawn.arms))
    _run_blocks(record.read(folder), field, options, prompt_tokens, watch, load_s)
    return record.read(folder)


def _sitting(field: Field, what: str) -> Sitting:
    return Sitting(started_unix_s=time.time(), foreign_gpu=tuple(f"{who} as {what}" for who in field.foreign_gpu))


def _host_probe(field: Field, watch: Watch) -> HostProbe | None:
    """Bandwidth of this machine's memory, where a bound can be made of it: not for what caches may serve."""
    cache = field.machine.last_level_cache_bytes
    bound = [each for each in field.contenders if each.settings.stand_in_bytes is None]
    if not bound or cache is None or field.model.bytes_per_token < physics.CACHES * cache:
        return None
    watch(Progress("measuring the bandwidth of memory, once for this machine", lasting=False))
    return physics.host_probe(field.machine)


def _check(field: Field, options: Options) -> Options:
    """The options with aliases replaced, or a DuelError: what cannot work is told before anything is loaded."""
    require_weights(field.model)
    baseline.require_same(options, field.model.file.digest, field.prompts.digest, field.machine)
    arms = [each.arm for each in field.contenders]
    if all(each.status.word is not Status.OK for each in field.contenders):
        raise RunRefused(no_arm(field.contenders))
    reference = None if options.reference is None else _able(field, _one_arm(options.reference))
    contrasts = [plan.read_contrast(pair, arms) for pair in options.contrast]
    pairs = [(_able(field, a), _able(field, b)) for a, b in contrasts]
    for a, b in pairs:
        if a == b:
            raise UsageError(f"the contrast {a}:{b} compares one placement with itself; name two that differ")
    if len({frozenset(pair) for pair in pairs}) != len(pairs):
        raise UsageError("a contrast is declared twice; name each once")
    return dataclasses.replace(options, reference=reference, contrast=tuple(f"{a}:{b}" for a, b in pairs))


def _one_arm(text: str) -> str:
    arms = parse_arms(text)
    if len(arms) != 1:
        raise UsageError(f"the reference is one arm, and {text!r} is {len(arms)}")
    return str(arms[0])


def _able(field: Field, arm: str) -> str:
    """The arm that runs for this one. Raises UsageError if there is none of that name or it cannot run."""
    found = next((each for each in field.contenders if each.arm == arm), None)
    if found is None:
        raise UsageError(f"{arm!r} is no arm of this run; {nearest(arm, [each.arm for each in field.contenders])}")
    if found.status.alias_of is not None:
        return found.status.alias_of
    if found.status.word is not Status.OK:
        raise UsageError(f"{arm} is to be compared and cannot run: {found.status.reason}")
    return arm


def slug(name: str) -> str:
    """A name for a folder: whole words of the model's, as many as go into `SLUG` signs."""
    words: list[str] = re.findall(r"[a-z0-9]+", name.lower()) or ["model"]
    kept: str = words[0][:SLUG]
    for word in words[1:]:
        if len(kept) + 1 + len(word) > SLUG:
            break
        kept += f"-{word}"
    return kept


def _new_folder(out: Path, field: Field) -> Path:
    stem = f"{datetime.date.today().isoformat()}-{slug(field.model.name)}"
    for number in range(1, 1000):
        folder = out / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not out.is_dir():
                raise RunRefused(f"{out} is no folder; name another with --out") from None
        except OSError as error:
            raise RunRefused(
                f"no run folder can be made in {out} ({error.strerror}); name another with --out"
            ) from None
        else:
            return folder
    raise RunRefused(f"{out} holds too many runs of {stem}; name another folder with --out")


# ── the plan and the header ─────────────────────────────────────────────────────────────────


def _draw(field: Field, found: Probe, options: Options) -> Plan:
    """The plan of the arms that can run; those that cannot are named in it."""
    running = [each for each in found.contenders if each.status.word is Status.OK]
    arms = [each.arm for each in running]
    if options.reference is not None and options.reference not in arms:
        lost = next(each for each in found.contenders if each.arm == options.reference)
        raise baseline.no_reference(options, lost.arm, lost.status)
    contrasts = [plan.read_contrast(pair, [each.arm for each in found.contenders]) for pair in options.contrast]
    contrasts = [(a, b) for a, b in contrasts if a in arms and b in arms]
    if options.contrast and not contrasts:
        raise RunRefused("of every declared contrast one arm cannot run; declare others with --contrast")
    if options.budget is not None:
        seconds = {arm: found.seconds_per_load[arm] for arm in arms}
        if options.preset == "confirm":
            seconds["the twin"] = seconds[options.reference or arms[0]]
        blocks = plan.max_blocks(options.budget, seconds, len(seconds))
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
        reference=options.reference,
        contrasts=contrasts,
        aliases=list(equal_placements(running).items()),
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


def _by_label(drawn: Plan, found: Probe) -> dict[str, float]:
    seconds = {plan.public(arm): each for arm, each in found.seconds_per_load.items()}
    return {arm.label: seconds[arm.text] for arm in drawn.arms}


def _header(
    field: Field, found: Probe, drawn: Plan, options: Options, search: Search | None, host: HostProbe | None
) -> Header:
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
            device_weights_bytes=_most_on_device(model),
        ),
        contenders=found.contenders,
        machine=field.machine,
        options={key: value for key, value in dataclasses.asdict(options).items() if value not in (None, ())},
        command=command_of(options, drawn.seed),
        search=search,
        host_probe=host,
        versions={name: installed for name in PACKAGES if (installed := _version(name))},
        notes=(*field.notes, *field.merged, *found.notes),
    )


def _most_on_device(model: Model) -> int | None:
    whole = placement.predict(model, Placement("ngl", model.blocks + 1), Settings(), device=True)
    return whole.device_weights_bytes if whole else None


def command_of(options: Options, seed: int | None, verb: str = "run") -> str:
    """What repeats this run, whichever door it came through: every option that is not the usual one, and the seed."""
    words = ["llamaduel", verb]
    for each in dataclasses.fields(Options):
        value = seed if each.name == "seed" else getattr(options, each.name)
        if each.name in ("resume", "out", "fail_on_regression") or (value == each.default and each.name != "arms"):
            continue
        text = (
            {"budget": f"{value}min", "margin": f"{100 * value:g}%"}[each.name] if isinstance(value, float) else value
        )
        text = ";".join(value) if isinstance(value, tuple) else text
        flag = f"--{each.name.replace('_', '-')}"
        words.append(_quoted(flag if value is True else f"{flag}={text}"))
    return " ".join(words)


def _quoted(word: str) -> str:
    """For a shell, and for the eye: signs that a terminal would obey are spelled out."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.encode("unicode_escape").decode().replace("'", "\\'")
    return f"$'{escaped}'"


def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


# ── the blocks ──────────────────────────────────────────────────────────────────────────────


def _run_blocks(
    begun: Run,
    field: Field,
    options: Options,
    prompt_tokens: dict[str, int],
    watch: Watch,
    load_s: float | None = None,
) -> None:
    """Load after load until the plan says that it is enough, or Ctrl-C. `load_s` is what one is thought to take."""
    drawn = begun.header.plan
    contenders = {arm.label: _contender_of(begun.header, arm.text) for arm in drawn.arms}
    outcomes = list(plan.abandon(drawn, outcomes_of(begun)))
    starts = [load.thermal.start for load in begun.loads if load.stage == "block" and load.thermal is not None]
    with contextlib.suppress(KeyboardInterrupt):  # what was measured is in the folder
        if (planned := plan.next_load(drawn, outcomes)) is not None:
            _burn_in(begun, planned, contenders[drawn.reference], field, options, prompt_tokens, watch, starts)
            _rest(begun, options, watch)
        began, loads_before = time.monotonic(), len(outcomes)
        while (planned := plan.next_load(drawn, outcomes)) is not None:
            done = len(outcomes)
            left = plan.loads_left(drawn, outcomes)
            each_s = (time.monotonic() - began) / (done - loads_before) if done > loads_before else load_s
            now = Progress(
                f"block {planned.block}: {planned.arm}",
                False,
                done,
                done + left,
                None if each_s is None else each_s * left,
                planned.arm,
                planned.block,
                drawn.max_blocks,
                _speeds(drawn, outcomes),
            )

            def tell(text: str, now: Progress = now) -> None:
                watch(dataclasses.replace(now, text=f"{now.text}: {text}"))

            if not models.unchanged(field.model):
                raise RunRefused(f"{field.model.file.path} changed while it was measured; start a new run")
            job = _job("block", begun.header, planned, contenders[planned.label], field, options)
            load, samples = run_load(job, begun.folder, prompt_tokens, tell, wait=not options.no_wait, starts=starts)
            if load.thermal is not None:
                starts.append(load.thermal.start)
            outcomes.append(outcome_of(begun.header, load, samples, watched=not options.no_wait))
            told = _told(load, outcomes[-1])
            watch(
                dataclasses.replace(
                    now, text=told, lasting=True, done=done + 1, seconds_left=None, speeds=_speeds(drawn, outcomes)
                )
            )
        if len(outcomes) > loads_before:
            _rest(begun, options, watch)
    watch(Progress("judging, and writing the report", lasting=False))


def _job(stage: str, header: Header, planned: Planned, contender: Contender, field: Field, options: Options) -> Job:
    tasks = _tasks(field, contender, planned, _pool(header.plan), header.plan.out_tokens, options)
    return dataclasses.replace(
        job_of(field, contender, stage, tasks),
        label=planned.label,
        block=planned.block,
        attempt=planned.attempt,
        position=planned.position,
        host_bytes=_host_bytes(contender, header.machine),
        available_bytes=header.machine.available_bytes,  # as the run began: one answer for all loads of an arm
    )


def _host_bytes(contender: Contender, machine: Machine) -> int | None:
    """What the engine will hold of this machine's memory: predicted, else as the probe saw it; None if neither."""
    seen = placement.realised_bytes(contender.realised.buffers) if contender.realised else None
    host, device = seen or (None, None)
    if contender.predicted is not None and contender.predicted.host_bytes is not None:
        host, device = contender.predicted.host_bytes, contender.predicted.device_bytes
    device_is_host = contender.settings.stand_in_bytes is not None or any(gpu.unified for gpu in machine.gpus)
    return host if host is None or not device_is_host else host + (device or 0)


def _burn_in(
    begun: Run,
    planned: Planned,
    reference: Contender,
    field: Field,
    options: Options,
    prompt_tokens: dict[str, int],
    watch: Watch,
    starts: Sequence[Temperatures],
) -> None:
    """Loads of the reference until a GPU is warm: recorded, never analysed. Again where it cooled before a run went on.

    Only where claims are made, and for a tenth of the budget at most.
    """
    drawn = begun.header.plan
    if options.no_wait or drawn.preset != "confirm":
        return
    now = gates.temperatures()
    if now.gpu_c is None or gates.within(now, gates.middle_of(starts)):
        return
    limit_s = min(gates.BURN_IN_S, math.inf if options.budget is None else 60 * options.budget / 10)
    ends: list[tuple[float, float]] = []
    began = time.monotonic()

    def tell(text: str) -> None:
        watch(Progress(f"burn-in: {reference.arm}: {text}", lasting=False, arm=reference.arm))

    while not gates.is_warm(ends, limit_s):
        place = dataclasses.replace(
            planned, label=drawn.reference, arm=reference.arm, block=0, attempt=len(ends), position=0
        )
        job = _job("burn-in", begun.header, place, reference, field, options)
        load, _ = run_load(job, begun.folder, prompt_tokens, tell, wait=False)
        if load.failure is not None or load.thermal is None or load.thermal.end.gpu_c is None:
            return
        ends.append((time.monotonic() - began, load.thermal.end.gpu_c))
        tell(f"GPU at {load.thermal.end.gpu_c:.0f} °C")


def _rest(begun: Run, options: Options, watch: Watch) -> None:
    """What the machine draws while no engine runs, where it counts that and claims are made."""
    if options.no_wait or begun.header.plan.preset != "confirm":
        return
    watch(Progress("measuring what the machine draws at rest", lasting=False))
    if (idle := energy.measure_idle()) is not None:
        record.append(begun.folder, idle)


def _speeds(drawn: Plan, outcomes: Sequence[Outcome]) -> tuple[tuple[str, str], ...]:
    """Median tok/s of each arm's loads so far, a twin's among them; the reference first."""
    texts = {arm.label: arm.text for arm in drawn.arms}
    loads: dict[str, list[float]] = {texts[drawn.reference]: []}
    for each in outcomes:
        if each.value is not None:
            loads.setdefault(texts[each.label], []).append(each.value)
    return tuple((arm, f"{math.exp(statistics.median(values)):.1f}") for arm, values in loads.items() if values)


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
    field: Field,
    contender: Contender,
    planned: Planned,
    pool: tuple[int, ...] | None,
    out_tokens: int,
    options: Options,
) -> tuple[Task, ...]:
    """Warm-ups, then requests. Prompts of a pool are used in turn, each once a load: a fresh engine knows none."""
    measured, warmups = planned.prompts, planned.warmups
    if pool is not None:
        turn = [pool[(measured[0] + step) % len(pool)] for step in range(len(measured) + len(warmups))]
        measured, warmups = tuple(turn[: len(measured)]), tuple(turn[len(measured) :])
    return (
        *(task(field, contender, index, out_tokens, options, warmup=True) for index in warmups),
        *(task(field, contender, index, out_tokens, options) for index in measured),
    )


def outcome_of(header: Header, load: LoadRecord, samples: tuple[Sample, ...], *, watched: bool) -> Outcome:
    """What the plan needs to know of a load. One that did something else than asked is VOID, whatever its speed."""
    valid = [s.decode_tps for s in samples if not s.warmup and s.invalid is None and s.decode_tps is not None]
    predicted = next((each.predicted for each in header.contenders if each.arm == load.arm), None)
    failure = load.failure
    if failure is None and (wrong := void(predicted, load, samples)) is not None:
        failure = ArmStatus(Status.VOID, wrong)
    value = None if failure else plan.load_value(valid, header.plan.requests)
    broken = failure.reason if failure else None
    if value is None and failure is None:
        reasons = [sample.invalid for sample in samples if sample.invalid]
        broken = f"too few valid requests: {'; '.join(reasons) or 'none ran'}"
    return Outcome(
        block=load.block,
        attempt=load.attempt,
        label=load.label,
        value=value,
        broken=broken,
        disturbed=bool(watched and load.telemetry and load.telemetry.disturbed),
        status=failure.word if failure else Status.OK,
    )


def outcomes_of(run: Run) -> tuple[Outcome, ...]:
    """The outcomes of a run in its folder, in the order they were written."""
    watched = not run.header.options.get("no_wait", False)
    return tuple(
        outcome_of(run.header, load, run.samples.get(load.id, ()), watched=watched)
        for load in run.loads
        if load.stage == "block"
    )


# ── going on with a killed run ──────────────────────────────────────────────────────────────


def _resume(folder: Path, options: Options, watch: Watch) -> Run:
    """Go on where the folder ends, with the options it was begun with."""
    begun = record.read(folder)
    _check_same(options, begun.header)
    given = {**begun.header.options, "resume": str(folder), "contrast": tuple(begun.header.options.get("contrast", ()))}
    then = Options(**given)
    policy = options.gpu_in_use if options.gpu_in_use != Options().gpu_in_use else then.gpu_in_use
    options = dataclasses.replace(then, no_wait=options.no_wait or then.no_wait, gpu_in_use=policy)
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
    with record.lock(folder), _told_how_to_go_on(folder), on_gpus(field, options, folder / BALLAST_LOG, watch) as held:
        record.repair(folder)
        record.append(folder, _sitting(held, "it went on"))
        _run_blocks(record.read(folder), held, options, {}, watch)
    return record.read(folder)


def _check_same(options: Options, header: Header) -> None:
    """A plan is fixed before block 1: a run is continued with its own options or not at all. Raises UsageError."""
    usual = Options()
    for each in dataclasses.fields(Options):
        now, then = getattr(options, each.name), header.options.get(each.name, getattr(usual, each.name))
        now = list(now) if isinstance(now, tuple) else now
        if each.name not in OF_THE_START and now not in (getattr(usual, each.name), then, []):
            flag = each.name.replace("_", "-")
            raise UsageError(
                f"--{flag} {now} does not go with --resume: the run was begun with {then}; start a new run"
            )
