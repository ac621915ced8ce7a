"""The best value of one number of an arm: searched in at most ten loads, then confirmed by a run of its own.

One arm of the list is a sweep, as in `llama-cpp@ncmoe=0..48`; its values that are one placement are
one candidate. The search (see `edge`) picks two of them. A speed that was picked for being high is
flattered, so none of the search is published: the two meet the other arms in blocks, like any run.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from harness import edge, gpus, placement, plan, probe
from harness.arms import KNOBS, NUMBERS, parse_sweeps
from harness.contract import Arm, Settings
from harness.edge import Found, Tried
from harness.errors import RunRefused, Unavailable, UsageError
from harness.load import run_load
from harness.model import Model
from harness.options import DEFAULT_ARMS, FOUND_ARMS, Options
from harness.placement import Cell
from harness.plan import ArmStatus, Status
from harness.probe import Field, Progress, Watch
from harness.record import Contender, Run, Search, SearchLoad
from harness.registry import backend
from harness.run import BALLAST_LOG, command_of, new_folder, run, run_field

CHOSEN = 2  # candidates that are confirmed
FREES_DEVICE = frozenset({"ncmoe"})  # numbers that leave more on the host as they grow; all others leave less
AGREE = 0.05  # two loads of one placement further apart mean that the machine changed meanwhile
TRIES = 2  # loads of one candidate until its samples are valid


def find(options: Options, watch: Watch) -> Run:
    """Search, then confirm, in one run folder. Raises DuelError."""
    if options.resume:
        return run(dataclasses.replace(options, arms=DEFAULT_ARMS), watch)  # its plan names the arms
    if options.reference or options.contrast:
        raise UsageError(
            "the best value found is the reference here; leave out --reference and --contrast, "
            "in variables and pyproject.toml too"
        )
    field, sweep, options = _field(options, watch)
    over = _number_of(sweep)
    candidates, refused = _candidates(field, sweep, over)
    others = [each for each in field.contenders if each.arm not in map(str, sweep)]
    with (
        new_folder(options, field) as folder,
        probe.on_gpus(field, options, folder / BALLAST_LOG, watch) as field,
    ):
        prompt_tokens: dict[str, int] = {}
        found, tried = _search(field, candidates, over, options, folder, prompt_tokens, watch)
        chosen = [candidates[index] for index in found.ranked[:CHOSEN]]
        if not chosen:
            reasons = "; ".join(dict.fromkeys(f"{each.arm}: {each.status.reason}" for each in tried))
            raise RunRefused(f"no value of {over} could be measured: {reasons}")
        watch(Progress(f"confirming {' and '.join(each.arm for each in chosen)} with fresh loads"))
        running = [*chosen, *(each for each in others if each not in chosen)]  # the first that loads is the reference
        confirmed = dataclasses.replace(options, arms=",".join(each.arm for each in running))
        search = Search(
            over=over,
            candidates=tuple(each.arm for each in candidates),
            refused=refused,
            tried=tried,
            chosen=tuple(each.arm for each in chosen),
            elsewhere={each.arm: _elsewhere(each, others, field) for each in chosen},
            command=command_of(options, options.seed, "find"),
            notes=tuple(_notes(found)),
        )
        field = dataclasses.replace(field, contenders=tuple(running))
        return run_field(field, confirmed, folder, prompt_tokens, watch, search)


# ── the candidates ──────────────────────────────────────────────────────────────────────────


def _field(options: Options, watch: Watch) -> tuple[Field, tuple[Arm, ...], Options]:
    """The field with the sweep last, so that its values yield to the arms named beside it; the options it is of."""
    if options.arms != DEFAULT_ARMS:
        _sweep_of(options.arms)  # what cannot be meant is told before a model is read
    model = probe.find_facts(options.model, watch)
    if options.arms == DEFAULT_ARMS:
        options = dataclasses.replace(options, arms=FOUND_ARMS.format(sweep=_whole_sweep(model)))
    others, sweep = _sweep_of(options.arms)
    listed = ",".join(map(str, (*others, *sweep)))
    field = probe.find_field(dataclasses.replace(options, arms=listed), watch, model=model)
    probe.require_weights(field.model)
    return field, sweep, options


def _sweep_of(arms: str) -> tuple[tuple[Arm, ...], tuple[Arm, ...]]:
    """The arms beside the one sweep, and those in it. Raises UsageError."""
    groups = parse_sweeps(arms)
    sweeps = [each for each in groups if len(each) > 1]
    if len(sweeps) != 1:
        raise UsageError(
            f"a search goes over one sweep and {arms!r} has {len(sweeps)}; write for example llama-cpp@ncmoe=0..48"
        )
    _number_of(sweeps[0])
    return tuple(arm for each in groups if each not in sweeps for arm in each), sweeps[0]


def _whole_sweep(model: Model) -> str:
    """Every placement that this model has."""
    return f"ncmoe=0..{model.blocks}" if model.expert_layers else f"ngl=0..{model.blocks + 1}"


def _number_of(sweep: Sequence[Arm]) -> str:
    """The one number in which the arms of a sweep differ. Raises UsageError."""
    names = [sweep[0].placement.kind] if len({arm.placement.n for arm in sweep}) > 1 else []
    names += [key for key, _ in sweep[0].knobs if len({dict(arm.knobs)[key] for arm in sweep}) > 1]
    if len(names) != 1 or (names[0] in KNOBS and names[0] not in NUMBERS):
        raise UsageError(f"a search goes over one number, not over {' and '.join(names)}")
    return names[0]


def _value(arm: Arm, over: str) -> int:
    return int(dict(arm.knobs).get(over, arm.placement.n or 0))


def _candidates(field: Field, sweep: Sequence[Arm], over: str) -> tuple[list[Contender], tuple[str, ...]]:
    """One contender for each placement, least on the host first, and the arms that cannot fit. Raises RunRefused."""
    by_arm = {each.arm: each for each in field.contenders}
    candidates: list[Contender] = []
    refused = []
    for arm in sorted(sweep, key=lambda arm: _value(arm, over), reverse=over not in FREES_DEVICE):
        found = by_arm[str(arm)]
        found = by_arm[found.status.alias_of] if found.status.alias_of is not None else found
        if found.status.word is Status.OK:
            candidates += [] if found in candidates else [found]
        elif found.status.word is Status.DOES_NOT_FIT:
            refused.append(found.arm)
        else:
            raise RunRefused(f"{found.arm} cannot be searched: {found.status.reason}")
    if not candidates:
        raise RunRefused(probe.no_arm([by_arm[text] for text in refused]))
    if len(candidates) == 1 and not refused:
        raise RunRefused(
            f"every value of {over} is one placement here ({candidates[0].placement}), so there is nothing to search; "
            "run it as it is, or see --stand-in"
        )
    return candidates, tuple(refused)


def _guess(field: Field, candidates: Sequence[Contender], over: str, options: Options) -> int:
    """The first thought: the least on the host that should fit, or the usual value of a knob."""
    if over in KNOBS:
        usual: Settings = probe.matched_settings(field.machine, options, has_device=True)
        aim = getattr(usual, KNOBS[over]) or getattr(Settings(), KNOBS[over]) or 0
        values = [abs(_value(probe.read_arm(each), over) - aim) for each in candidates]
        return values.index(min(values))
    _, free = _device_memory(field, options)
    spare = 0 if options.stand_in is not None else placement.TIGHT_BYTES
    for index, each in enumerate(candidates):
        predicted = each.predicted
        if free is not None and predicted is not None:
            need = predicted.device_bytes or predicted.device_weights_bytes
            if need + spare <= free:
                return index
    return len(candidates) // 2 if free is None else len(candidates) - 1


def _device_memory(field: Field, options: Options) -> tuple[int | None, int | None]:
    """Bytes of device memory in all, and those that a model may take; None if nobody tells."""
    if options.stand_in is not None:
        size = probe.stand_in_bytes(options, field.machine)
        return size, size
    if (limit := probe.limit_bytes(options, field.machine)) is not None:
        return limit, limit
    memory = gpus.memory()
    return (None, None) if memory is None else (memory.total_bytes, memory.free_bytes)


# ── the search ──────────────────────────────────────────────────────────────────────────────


def _search(
    field: Field,
    candidates: Sequence[Contender],
    over: str,
    options: Options,
    folder: Path,
    prompt_tokens: dict[str, int],
    watch: Watch,
) -> tuple[Found, tuple[SearchLoad, ...]]:
    """One load and one answer a candidate, in the order that `edge.search` asks for.

    The first load also tells how long an answer must be for a decode window of two seconds.
    """
    total, _ = _device_memory(field, options)
    done: list[SearchLoad] = []
    seen: dict[str, str] = {}
    lengths = [options.out_tokens or probe.PROBE_TOKENS]

    def measure(index: int) -> Tried:
        contender = candidates[index]
        spent = sum(each.loads for each in done)
        told = f"search, load {spent + 1} of {edge.MOST_LOADS} at most: {contender.arm}"
        known_length = bool(done) or options.out_tokens is not None
        loads, speeds, status = 0, list[float](), ArmStatus(Status.OK)
        tries = min(TRIES, edge.MOST_LOADS - spent)
        now = Progress(told, False, arm=contender.arm, speeds=tuple(seen.items()))
        while not speeds and status.word in (Status.OK, Status.UNSTABLE) and loads < tries:
            loads += 1
            status, speeds = _load(field, contender, lengths[-1], options, folder, prompt_tokens, now, watch)
            if speeds and not known_length and loads < tries and plan.out_tokens(max(speeds)) > lengths[-1]:
                lengths.append(plan.out_tokens(max(speeds)))
                speeds, known_length = [], True
        cell = placement.fits(contender.predicted, total, loaded=status.word is not Status.DOES_NOT_FIT)
        done.append(SearchLoad(contender.arm, status, cell.value, loads))
        value = statistics.median(map(math.log, speeds)) if speeds else None
        result = f"{math.exp(value):.1f} tok/s" if value is not None else str(status)
        word = status.word if value is None else f"{math.exp(value):.1f}"
        seen[contender.arm] = f"{word} {cell.value}" if value is not None and cell is not Cell.UNKNOWN else str(word)
        watch(dataclasses.replace(now, text=f"{told}: {result}", lasting=True))
        return Tried(index, value, cell is Cell.SPILLED, loads)

    found = edge.search(len(candidates), _guess(field, candidates, over, options), measure)
    return found, tuple(done)


def _load(
    field: Field,
    contender: Contender,
    out_tokens: int,
    options: Options,
    folder: Path,
    prompt_tokens: dict[str, int],
    now: Progress,
    watch: Watch,
) -> tuple[ArmStatus, list[float]]:
    """Status and decode speeds of one load. Answers of a real model may end early, so it is asked twice."""
    asked = 1 if field.model.answer_key is not None else 2
    tasks = (
        probe.task(field, contender, asked, out_tokens, options, warmup=True),
        *(probe.task(field, contender, index, out_tokens, options) for index in range(asked)),
    )
    load, samples = run_load(
        probe.job_of(field, contender, "search", tasks),
        folder,
        prompt_tokens,
        lambda text: watch(dataclasses.replace(now, text=f"{now.text}: {text}")),
        wait=not options.no_wait,
    )
    measured = tuple(sample for sample in samples if not sample.warmup)
    valid = tuple(each for each in measured if each.invalid is None)
    speeds = [each.decode_tps for each in valid if each.decode_tps is not None]
    status = probe.after_load(contender, load, valid or measured, field.model).status
    return status, speeds if status.word is Status.OK else []


def _notes(found: Found) -> list[str]:
    """What the search noticed about itself."""
    values = edge.by_candidate(found.tried).values()
    apart = max((math.expm1(max(each) - min(each)) for each in values), default=0.0)
    if apart <= AGREE:
        return []
    return [f"Two loads of one candidate were {100 * apart:.0f} % apart, so the search may have picked by luck."]


def _elsewhere(contender: Contender, others: Sequence[Contender], field: Field) -> dict[str, str]:
    """By arm, the command that gives this placement on the other engines of the run, where they know it."""
    arm = probe.read_arm(contender)
    found = {}
    for name in dict.fromkeys(probe.read_arm(each).backend for each in others):
        twin = dataclasses.replace(arm, backend=name)
        if name != arm.backend:
            try:
                backend(name).parse(str(twin))
                found[str(twin)] = backend(name).command(twin, field.model.file, contender.settings)
            except (UsageError, Unavailable):
                continue
    return found
