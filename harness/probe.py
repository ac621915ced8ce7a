"""Everything before block 1: find the model and the engines, and load every arm once.

The probe fixes what runs and how: which arms are one placement, which do not fit, what each
engine really did, how long the answers are and how long it will take. Its loads are kept in the
run folder and never analysed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import ballast, baseline, download, gpus, likeness, placement, plan, preflight, process, prompts, synth
from harness import machine as machines
from harness import model as models
from harness.arms import apply_knobs, parse_arms
from harness.ballast import Ballast
from harness.contract import Arm, Engine, Placement, Realised, Settings
from harness.engines import hints
from harness.errors import ModelError, RunRefused, Unavailable, UsageError
from harness.load import Job, Task, run_load
from harness.machine import Machine
from harness.measure import Sample
from harness.model import Model
from harness.options import WHOLE, Options
from harness.placement import Predicted
from harness.plan import ArmStatus, Status
from harness.record import Contender, LoadRecord
from harness.registry import backend, backends
from harness.sizes import format_bytes, parse_size
from harness.words import count

PROBES = 2  # one stall of the machine must not cost an arm
PROBE_TOKENS = plan.OUT_TOKENS[0]
WRONG = "its output differs from the known answer, so this engine computes wrongly"
MOST_REASONS = 4  # in one sentence
POOL = 6  # prompts that a real model is tried with, for answers of full length
DEEPER = 1.15  # than a long prompt is meant to be; tokenizers were seen to make 1.02 to 1.09 of it


@dataclass(frozen=True, slots=True)
class Progress:
    """One thing worth telling; one that is not `lasting` is what goes on just now.

    `done` of `total` loads, once a plan exists, and the seconds left of it. Where an arm is loaded, `text` is
    "stage: arm: phase".
    """

    text: str
    lasting: bool = True
    done: int | None = None
    total: int | None = None
    seconds_left: float | None = None
    arm: str | None = None
    block: int | None = None
    most_blocks: int | None = None
    speeds: tuple[tuple[str, str], ...] = ()  # of each arm so far, in words, the reference first


Watch = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """What a run is made of, before anything is loaded."""

    model: Model
    machine: Machine
    prompts: prompts.PromptSet
    contenders: tuple[Contender, ...]
    notes: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()  # which arms are one placement, and why, in sentences
    ballast: Ballast | None = None  # that holds the GPUs to a smaller size
    foreign_gpu: tuple[str, ...] = ()  # who else holds much of their memory, in sentences

    @property
    def context(self) -> int | None:
        """Tokens that fit on every arm; None where the engines choose."""
        return min((each.settings.context for each in self.contenders if each.settings.context), default=None)


# ── the field: model, engines, placements ───────────────────────────────────────────────────


def find_field(options: Options, watch: Watch, *, model: Model | None = None, merge_aliases: bool = True) -> Field:
    """Read the model unless it is given, find every engine, merge equal placements. Raises DuelError."""
    ended = process.end_leftovers()
    if ended:
        watch(Progress(f"ended {len(ended)} processes that a killed run had left: {', '.join(map(str, ended))}"))
    machine = machines.read()
    _check_limit(options, machine)
    arms = parse_arms(options.arms)
    model = model or find_facts(options.model, watch)
    given, options = options, dataclasses.replace(options, context=_context(arms, options, model))
    engines = find_engines(arms, options)
    contenders = tuple(_contender(arm, engines[arm.backend], model, machine, options) for arm in arms)
    contenders = _merge(contenders) if merge_aliases else contenders
    return Field(
        model=model,
        machine=machine,
        prompts=prompts.load(Path(options.prompts) if options.prompts else None),
        contenders=contenders,
        notes=(
            *machine.warnings,
            *_unused_gpus(machine, engines, options),
            *_wrong_devices(machine, engines, options),
            *_setting_notes(options, given),
            *_prompt_notes(model),
        ),
        merged=_same_placements(model, contenders),
    )


def _context(arms: Sequence[Arm], options: Options, model: Model) -> int:
    """Equal on all arms, so what the deepest of them needs: lengths of prompts are estimates. Raises UsageError."""
    asked = {arm: apply_knobs(arm, Settings(context=None, depth=options.depth)) for arm in arms}
    for arm, settings in asked.items():
        prompt = settings.depth + options.prompt_tokens
        if settings.depth and settings.context is not None and settings.context < prompt:
            raise UsageError(f"{arm}: a context of {settings.context} does not hold its prompts of {prompt}; raise c")
    deepest = max(settings.depth for settings in asked.values())
    if not deepest:
        return options.context
    prompt = int((deepest + options.prompt_tokens) * DEEPER) + prompts.MARGIN
    needed = prompt + (options.out_tokens or plan.OUT_TOKENS[-1])
    context = max(options.context, -(-needed // 256) * 256)
    if model.context_train is None or context <= model.context_train or options.context > model.context_train:
        return context
    least = deepest + options.prompt_tokens + (options.out_tokens or plan.OUT_TOKENS[0])
    if least > model.context_train:
        raise UsageError(
            f"a depth of {deepest} needs a context of {least} and {model.name} is made for {model.context_train}; "
            "take a smaller depth"
        )
    return model.context_train


def _setting_notes(options: Options, given: Options) -> Iterator[str]:
    """What settings stand for more than they say."""
    if options.context != given.context and options.settings == "matched":
        yield f"the context is {options.context} tokens on every arm, to hold the deepest prompts"
    if options.settings == "stock" and options.stand_in is not None:
        yield (
            "a stand-in device shows engines all memory of this machine: what they choose by the size of the card, "
            "as Ollama does its context, is not what they would choose on a card of that size"
        )


def _unused_gpus(machine: Machine, engines: Mapping[str, Engine | Unavailable], options: Options) -> Iterator[str]:
    """Of each engine that does not see a GPU which is there. What an engine does not tell is not held against it."""
    for engine in engines.values():
        if isinstance(engine, Engine) and options.stand_in is None and engine.origin != "attached":
            sentence = machines.unused_gpu(machine, engine.devices)
            if sentence:
                yield f"{engine}: {sentence}"


def _wrong_devices(machine: Machine, engines: Mapping[str, Engine | Unavailable], options: Options) -> Iterator[str]:
    for engine in engines.values():
        if isinstance(engine, Engine) and options.stand_in is None:
            sentence = preflight.wrong_device(engine.devices, machine)
            if sentence:
                yield f"{engine}: {sentence}"


def _prompt_notes(model: Model) -> Iterator[str]:
    if problem := prompts.template_problem(model):
        yield problem


def require_weights(model: Model) -> None:
    """A model that is only a header cannot be loaded. Raises RunRefused."""
    if model.header_only:
        raise RunRefused(
            f"{model.file.path.name} has no weights: it can be planned for, not measured; name a file that has them"
        )


def find_facts(ref: str | None, watch: Watch) -> Model:
    """The facts of a model reference; reading it takes a while once. Raises ModelError."""
    path = find_model(ref, watch)
    watch(Progress(f"reading {path.name}"))
    return models.load(path)


def find_model(ref: str | None, watch: Watch) -> Path:
    """The (first) file of a model reference; without one the synthetic default, written once."""
    if ref is None:
        return _default_model(watch)
    if download.is_reference(ref):
        return download.fetch(ref, lambda text: watch(Progress(text, lasting=False)))
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
    path = process.cache_folder("models") / f"synthetic-v{synth.VERSION}-150MiB.gguf"
    if not path.exists():
        watch(Progress(f"writing a synthetic model with a known answer: {path.name}"))
        synth.write(path, shape)
    return path


def find_engines(arms: Sequence[Arm], options: Options) -> Mapping[str, Engine | Unavailable]:
    """Every backend of these arms once: what was found, or why not."""
    told = hints(options)
    found: dict[str, Engine | Unavailable] = {}
    for name in dict.fromkeys(arm.backend for arm in arms):
        try:
            found[name] = backend(name).find(told)
        except Unavailable as error:
            found[name] = error
    return found


def matched_settings(machine: Machine, options: Options, has_device: bool) -> Settings:
    """Equal on all arms. One core stays free: with all cores one foreign process stalls spinning workers."""
    stand_in, limit = stand_in_bytes(options, machine), limit_bytes(options, machine)
    if options.settings == "stock":
        return Settings(
            context=None,
            batch=None,
            ubatch=None,
            flash_attention=None,
            kv_k=None,
            kv_v=None,
            depth=options.depth,
            stand_in_bytes=stand_in,
            device_limit_bytes=limit,
        )
    return Settings(
        context=options.context,
        depth=options.depth,
        threads=1 if stand_in is not None else max(1, (machine.physical_cores or 1) - 1),
        flash_attention="off" if stand_in is not None else "on",
        load_mode="auto" if has_device and stand_in is None else "none",
        prompt_cache="off",
        stand_in_bytes=stand_in,
        device_limit_bytes=limit,
    )


def stand_in_bytes(options: Options, machine: Machine) -> int | None:
    """Memory of the stand-in device; None without one."""
    if options.stand_in is None:
        return None
    return machine.memory_bytes if options.stand_in == WHOLE else parse_size(options.stand_in)


def limit_bytes(options: Options, machine: Machine) -> int | None:
    """What all GPUs together are held to; None without a limit. Raises UsageError."""
    if options.vram_limit is None:
        return None
    limits = ballast.limits_of(options.vram_limit)
    return sum(limits) if len(limits) > 1 else limits[0] * max(1, len(machine.gpus))


def _check_limit(options: Options, machine: Machine) -> None:
    if options.vram_limit is None:
        return
    if options.stand_in is not None:
        raise UsageError("--vram-limit holds a real GPU and --stand-in needs none; give one of the two")
    limits = ballast.limits_of(options.vram_limit)
    if not machine.gpus:
        size = "SIZE" if "," in options.vram_limit else options.vram_limit  # a stand-in is one device
        raise UsageError(
            f"--vram-limit needs an NVIDIA GPU and this machine shows none; --stand-in={size} shows where weights "
            "would go"
        )
    for gpu in machine.gpus if len(limits) == 1 else ():
        if gpu.memory_bytes is not None and limits[0] > gpu.memory_bytes:
            raise UsageError(
                f"--vram-limit={options.vram_limit} is more than {gpu.name} has ({format_bytes(gpu.memory_bytes)}); "
                "name less, or run without it"
            )


@contextlib.contextmanager
def on_gpus(field: Field, options: Options, log: Path, watch: Watch) -> Iterator[Field]:
    """The field once others have left its GPUs, which are held to a smaller size, if so asked, until the block ends.

    Raises RunRefused, Unavailable or UsageError.
    """
    if options.stand_in is not None or not field.machine.gpus:
        yield field
        return
    policy = "go-on" if options.no_wait and options.gpu_in_use == "wait" else options.gpu_in_use
    cleared = preflight.clear(policy, field.machine, say=lambda text: watch(Progress(text, lasting=False)))
    notes: list[str] = []
    states = gpus.states()
    for number, state in enumerate(states):
        notes += [f"{fact}; {step}" for _, fact, step in preflight.slowing(state, preflight.name_of(number, states))]
    with contextlib.ExitStack() as stack:
        held = None
        if options.vram_limit is not None:
            watch(Progress("holding GPU memory", lasting=False))
            held = stack.enter_context(ballast.hold(ballast.limits_of(options.vram_limit), log))
            if sum(held.limits) != limit_bytes(options, field.machine):  # arms are judged by what all cards have
                raise UsageError(
                    f"CUDA shows {count(len(held.cards), 'GPU')} and NVML {len(field.machine.gpus)}, so it is unknown "
                    "which are held; name them by their UUIDs in CUDA_VISIBLE_DEVICES (`nvidia-smi -L` lists them), "
                    "or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
                )
            notes += [_held(card, limit) for card, limit in zip(held.cards, held.limits, strict=True)]
        yield dataclasses.replace(
            field, ballast=held, foreign_gpu=tuple(map(str, cleared.large)), notes=(*field.notes, *notes)
        )


def _held(card: ballast.Card, limit: int) -> str:
    return (
        f"{card.name}, a card of {format_bytes(card.total_bytes)}, is held to {format_bytes(limit)} of free memory: "
        "its capacity is emulated, its bandwidth is its own"
    )


def _contender(arm: Arm, engine: Engine | Unavailable, model: Model, machine: Machine, options: Options) -> Contender:
    has_device = options.stand_in is not None or bool(machine.gpus)
    if isinstance(engine, Engine) and options.stand_in is None:
        has_device = bool(engine.devices) or (bool(machine.gpus) and engine.origin == "PATH")
    settings = apply_knobs(arm, matched_settings(machine, options, has_device))
    predicted = placement.predict(
        model, arm.placement, settings, has_device or bool(settings.rpc), depth=settings.depth + options.prompt_tokens
    )
    words = placement.describe(arm.placement, model, has_device or bool(settings.rpc))
    contender = Contender(
        arm=str(arm),
        status=ArmStatus(Status.OK),
        placement=words,
        settings=settings,
        predicted=predicted,
    )
    if isinstance(engine, Unavailable):  # nor is it known what devices it would see
        return dataclasses.replace(contender, status=ArmStatus(Status.UNAVAILABLE, str(engine)), predicted=None)
    if settings.stand_in_bytes is not None and not engine.rpc and arm.placement == Placement():
        reason = f"{engine} has no RPC, so it does not see the stand-in device; `llamaduel engines list` says what has"
        return dataclasses.replace(contender, engine=engine, status=ArmStatus(Status.UNAVAILABLE, reason))
    try:
        command = backend(arm.backend).command(arm, model.file, settings)
    except Unavailable as error:
        return dataclasses.replace(contender, status=ArmStatus(Status.UNAVAILABLE, str(error)))
    contender = dataclasses.replace(contender, engine=engine, command=command)
    stand_in = settings.stand_in_bytes
    if predicted is not None:
        memory = machine.memory_bytes
        too_large = placement.refusal(predicted, memory, stand_in, device_is_host=stand_in is not None)
        if too_large:
            return dataclasses.replace(contender, status=ArmStatus(Status.DOES_NOT_FIT, too_large))
    return contender


def _merge(contenders: Sequence[Contender]) -> tuple[Contender, ...]:
    """Arms of one engine that are one placement: the later ones become aliases of the first."""
    same = equal_placements(contenders)
    return tuple(
        dataclasses.replace(each, status=ArmStatus(Status.ALIAS, each.placement, same[each.arm]))
        if each.arm in same
        else each
        for each in contenders
    )


def _same_placements(model: Model, contenders: Iterable[Contender]) -> tuple[str, ...]:
    """One sentence for each placement that goes by several names."""
    merged = {each.arm: each.status.alias_of for each in contenders if each.status.alias_of is not None}
    device = any(each.predicted and each.predicted.placement_class != "host" for each in contenders)
    return placement.equal_in_words(model, merged, device)


def equal_placements(contenders: Sequence[Contender]) -> dict[str, str]:
    """Arms that can run and are the same placement as an earlier one, with that one."""
    able = [(read_arm(each), each.predicted) for each in contenders if each.status.word is Status.OK]
    return {str(arm): str(first) for arm, first in placement.aliases(able).items()}


# ── one load of every arm ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the probe found: contenders with their final status, and what the plan needs."""

    contenders: tuple[Contender, ...]
    out_tokens: int
    seconds_per_load: Mapping[str, float]  # by arm, for one warm-up and `requests` requests
    requests: int
    pool: tuple[int, ...] | None  # indices of prompts that reach the wanted length; None: all do
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Seen:
    contender: Contender
    load_s: float
    decode_tps: float
    ttft_s: float
    prompt_tokens: int | None


def probe(field: Field, options: Options, folder: Path, prompt_tokens: dict[str, int], watch: Watch) -> Probe:
    """Load every arm that may run once, or twice where answers may end early. Raises RunRefused if none can."""
    contenders = list(field.contenders)
    seen: dict[str, _Seen] = {}
    for index, contender in enumerate(contenders):
        if contender.status.word is not Status.OK:
            continue
        for attempt in range(PROBES):
            load, samples = _probe_load(
                field, contender, attempt, PROBE_TOKENS, range(1), options, folder, prompt_tokens, watch
            )
            if load.failure is not None or all(sample.invalid is None for sample in samples):
                break
        contenders[index] = contender = after_load(contender, load, samples, field.model)
        if contender.status.word is Status.OK:
            sample = samples[-1]
            load_s = (load.realised and load.realised.load_s) or 0.0
            seen[contender.arm] = _Seen(
                contender, load_s, sample.decode_tps or 0.0, sample.ttft_s or 0.0, sample.prompt_tokens
            )
    contenders = _name_noops(contenders)
    if not seen:
        raise RunRefused(no_arm(contenders))
    running = {arm: each for arm, each in seen.items() if _status(contenders, arm) is Status.OK}
    same = baseline.out_tokens(options)
    out_tokens = options.out_tokens or same or plan.out_tokens(max(each.decode_tps for each in running.values()))
    _check_context(running.values(), out_tokens)
    pool: tuple[int, ...] | None = None
    notes: list[str] = []
    if field.model.answer_key is None and options.out_tokens is None:
        pool, notes = _find_pool(field, list(running), out_tokens, options, folder, prompt_tokens, watch)
    slowest_load_s = max(each.load_s for each in running.values())
    requests = 2 if options.model is None or options.preset == "quick" else plan.requests_per_load(slowest_load_s)
    return Probe(
        contenders=tuple(contenders),
        out_tokens=out_tokens,
        seconds_per_load={
            arm: each.load_s + 1.0 + (1 + requests) * (each.ttft_s + out_tokens / each.decode_tps)
            for arm, each in running.items()
        },
        requests=requests,
        pool=pool,
        notes=tuple(notes),
    )


def no_arm(contenders: Sequence[Contender]) -> str:
    """Why nothing can be measured: of a long sweep the two ends."""
    told = cannot_run(contenders)
    if len(told) > MOST_REASONS:
        told = [told[0], told[-1], f"and {len(told) - 2} more, of the arms between"]
    return f"no arm can be measured. {'; '.join(told)}"


def cannot_run(contenders: Iterable[Contender]) -> list[str]:
    """Every reason why arms do not run, with its arms; those that are another arm's placement do."""
    arms: dict[str, list[str]] = {}
    for each in contenders:
        if each.status.word not in (Status.OK, Status.ALIAS):
            arms.setdefault(each.status.reason or each.status.word, []).append(each.arm)
    return [f"{', '.join(names)}: {reason}" for reason, names in arms.items()]


def _probe_load(
    field: Field,
    contender: Contender,
    attempt: int,
    out_tokens: int,
    indices: Sequence[int],
    options: Options,
    folder: Path,
    prompt_tokens: dict[str, int],
    watch: Watch,
) -> tuple[LoadRecord, tuple[Sample, ...]]:
    job = job_of(field, contender, "probe", [task(field, contender, index, out_tokens, options) for index in indices])
    return run_load(
        dataclasses.replace(job, attempt=attempt),
        folder,
        prompt_tokens,
        lambda text: watch(Progress(f"probe: {contender.arm}: {text}", lasting=False, arm=contender.arm)),
        wait=False,
    )


def job_of(field: Field, contender: Contender, stage: str, tasks: Sequence[Task]) -> Job:
    """One load of a contender that has an engine. Where it stands in a plan is for the caller to add."""
    assert contender.engine is not None
    return Job(
        stage=stage,
        label=contender.arm,
        arm=read_arm(contender),
        engine=contender.engine,
        model=field.model.file,
        settings=contender.settings,
        tasks=tuple(tasks),
        ballast=field.ballast,
        shared_tokens=int(field.model.add_bos),  # a BOS token stands before every prompt and may come from a cache
    )


def read_arm(contender: Contender) -> Arm:
    """The arm behind the text that a record holds."""
    return parse_arms(contender.arm)[0]


def task(
    field: Field, contender: Contender, index: int, out_tokens: int, options: Options, *, warmup: bool = False
) -> Task:
    """The request with this index; the same for every arm of one depth."""
    depth = contender.settings.depth
    prompt = field.prompts.for_request(
        field.model,
        index,
        tokens=depth + options.prompt_tokens,
        thinking=options.thinking,
        room=None if depth else (field.context or options.context) - out_tokens,
    )
    return Task(prompt, out_tokens, warmup, field.prompts.expected(field.model, prompt, out_tokens))


def after_load(contender: Contender, load: LoadRecord, samples: tuple[Sample, ...], model: Model) -> Contender:
    """The contender with what was seen, and the status that follows from it."""
    if load.failure is not None:
        return dataclasses.replace(contender, status=load.failure)
    assert load.realised is not None
    realised, digest = load.realised, load.weights_digest
    contender = dataclasses.replace(contender, realised=realised, weights_digest=digest)
    if contender.predicted is None:
        contender = _with_likeness(contender, realised, model, samples)
    broken = next((sample.invalid for sample in samples if sample.invalid), None)
    if broken:
        return dataclasses.replace(contender, status=ArmStatus(Status.UNSTABLE, f"its samples are invalid: {broken}"))
    if digest is not None and digest != model.file.digest:
        reason = f"it loaded other weights ({digest[:12]}, not {model.file.digest[:12]})"
        return dataclasses.replace(contender, status=ArmStatus(Status.VOID, reason))
    wrong = void(contender.predicted, load, samples)
    return dataclasses.replace(contender, status=ArmStatus(Status.VOID, wrong)) if wrong else contender


def _with_likeness(contender: Contender, realised: Realised, model: Model, samples: Sequence[Sample]) -> Contender:
    """The placement that the engine chose in words, and the nearest one of ours."""
    context = realised.settings.get("context")
    settings = contender.settings
    if settings.context is None and context is not None and context.isdecimal():
        settings = dataclasses.replace(settings, context=int(context))
    counts = [each.prompt_tokens for each in samples if each.prompt_tokens is not None]
    found = likeness.nearest(model, realised.buffers, settings, depth=max(counts, default=settings.depth))
    if found is None:
        return contender
    return dataclasses.replace(contender, like=found.predicted, placement=found.in_words(model))


def void(predicted: Predicted | None, load: LoadRecord, samples: Sequence[Sample]) -> str | None:
    """Why a load says nothing of its arm: it computed wrongly, or placed the weights otherwise; None if neither."""
    if any(sample.output_ok is False for sample in samples):
        return WRONG
    if load.realised is None:
        return None
    wrong = placement.judge(predicted, load.realised.buffers)
    return wrong and _with_next_step(wrong, load.realised)


def _with_next_step(reason: str, realised: Realised | None) -> str:
    """The reason, and what the engine's adapter noted with a command that mends it."""
    notes = realised.notes if realised is not None else ()
    return "; ".join((reason, *(note for note in notes if "; run `" in note)))


def _status(contenders: Sequence[Contender], arm: str) -> Status:
    return next(each.status.word for each in contenders if each.arm == arm)


def _name_noops(contenders: Sequence[Contender]) -> list[Contender]:
    """Arms that were to differ and put every buffer where another arm of their engine has it.

    Where no arm has what it asked for, the first of them is VOID and the others changed nothing against it.
    """
    compared = [each for each in contenders if each.status.word in (Status.OK, Status.VOID)]

    def named(each: Contender) -> Contender:
        others = (other for other in compared if read_arm(other).backend == read_arm(each).backend and other != each)
        for other in others if each in compared else ():
            beaten = each.status.word is Status.VOID and other.status.word is Status.OK
            first = beaten or (
                each.status.word is other.status.word and contenders.index(other) < contenders.index(each)
            )
            if first and placement.is_noop(each.predicted, each.realised, other.predicted, other.realised):
                reason = f"its flags changed nothing: the buffers are those of {other.arm}"
                return dataclasses.replace(each, status=ArmStatus(Status.NOOP, _with_next_step(reason, each.realised)))
        return each

    return [named(each) for each in contenders]


def _check_context(running: Iterable[_Seen], out_tokens: int) -> None:
    for each in running:
        context, needed = each.contender.settings.context, (each.prompt_tokens or 0) + out_tokens
        if context is not None and needed > context:
            raise RunRefused(
                f"prompt and answer of {each.contender.arm} need {needed} tokens and its context has {context}; "
                f"take --context {-(-needed // 256) * 256} or fewer --out-tokens"
            )


def _find_pool(
    field: Field,
    arms: Sequence[str],
    out_tokens: int,
    options: Options,
    folder: Path,
    prompt_tokens: dict[str, int],
    watch: Watch,
) -> tuple[tuple[int, ...] | None, list[str]]:
    """Prompts whose answers reach the wanted length on every arm: no engine may be told to ignore end of text."""
    reached = set(range(POOL))
    for contender in (each for each in field.contenders if each.arm in arms):
        _, samples = _probe_load(
            field, contender, PROBES, out_tokens, range(POOL), options, folder, prompt_tokens, watch
        )
        reached &= {index for index, sample in enumerate(samples) if sample.generated_tokens == out_tokens}
    if len(reached) < 3:
        return None, [
            f"only {len(reached)} of {POOL} prompts were answered in full length ({out_tokens} tokens) by every arm, "
            "so all are used and short answers are marked"
        ]
    return tuple(sorted(reached)), []
