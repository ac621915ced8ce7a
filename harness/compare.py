"""From a run to what may be said about it: a row per arm, a verdict per contrast, a state.

Everything is computed from the folder, so that the same folder always gives the same numbers.
Nothing here prints.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness import energy, placement, plan, plausibility, verdict
from harness.contract import Buffer
from harness.energy import PerToken
from harness.errors import RunRefused
from harness.physics import Flag
from harness.placement import Cell, Predicted
from harness.plan import ArmStatus, Status
from harness.plausibility import Plausibility, most
from harness.record import Contender, Header, LoadRecord, Run, resuming
from harness.run import outcomes_of
from harness.sizes import format_bytes
from harness.verdict import Contrast, Interval, Judgement, State
from harness.words import percent

MOST_INVALID = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadValues:
    """One judged load of an arm: medians over its valid requests."""

    block: int
    minutes: float  # since the first load of the run
    decode_tps: float
    prefill_tps: float | None
    prefill_s: float | None
    ttft_s: float | None
    load_s: float | None
    gpu_j: float | None = None  # energy of a decoded token


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm. Intervals are of this arm alone; only `contrast` compares. Unknown is None."""

    arm: str
    status: ArmStatus
    placement: str
    engine: str | None
    command: str | None
    weights_digest: str | None
    output_ok: bool | None
    is_reference: bool
    decode_tps: Interval | None = None
    prefill_tps: Interval | None = None
    ttft_s: Interval | None = None
    load_s: float | None = None
    vram_bytes: int | None = None
    rss_bytes: int | None = None
    predicted: Predicted | None = None
    predicted_device_bytes: int | None = None
    like: Predicted | None = None  # where the engine chose: the nearest placement of ours
    cell: Cell = Cell.UNKNOWN  # how it sits in memory
    cell_reason: str | None = None
    ceiling_tps: float | None = None  # of this placement, by what memory moves
    floor_tps: float | None = None
    unbounded: str | None = None  # why there is no ceiling, or which bytes it leaves out
    flags: tuple[Flag, ...] = ()
    buffers: tuple[Buffer, ...] | None = None  # of the last load
    contradictions: tuple[str, ...] = ()  # what the driver or the system saw otherwise
    realised_device_bytes: int | None = None
    realised_host_bytes: int | None = None
    contrast: Contrast | None = None  # against the reference
    prompt_tokens: tuple[int, int] | None = None  # fewest and most that the engine counted
    samples: int = 0
    invalid_samples: int = 0
    invalid_reasons: Mapping[str, int] = dataclasses.field(default_factory=dict)
    failed_loads: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by reason; their blocks were run again
    loads: tuple[LoadValues, ...] = ()
    gpu_j: Interval | None = None  # joules a decoded token, over loads
    gpu_j_ratio: Interval | None = None  # to the reference, block by block; no claim
    gpu_energy: PerToken | None = None  # by the counter of the GPUs; None: none, or too little was measured
    cpu_energy: PerToken | None = None
    process_vram_bytes: int | None = None  # the driver's list of processes, where it names them
    expected_vram_bytes: int | None = None  # predicted, and what the driver took for itself on the other arms

    @property
    def reported_vram_bytes(self) -> int | None:
        """All that the engine says it allocated on devices of this machine."""
        if self.buffers is None or placement.maps_file(self.buffers):
            return None
        return sum(each.bytes for each in self.buffers if not each.on_host and not each.device.startswith("RPC"))

    @property
    def planned_vram_bytes(self) -> int | None:
        """Weights, context memory and compute buffers as predicted, of the nearest placement where the engine chose."""
        known = self.predicted or self.like
        if known is None or known.device_bytes is None or known.compute_bytes is None:
            return None
        return known.device_bytes + known.compute_bytes

    @property
    def driver_bytes(self) -> int | None:
        """What device memory grew by beyond the engine's own buffers: contexts, libraries, scratch memory."""
        told = self.reported_vram_bytes
        return None if told is None or not told or self.vram_bytes is None else self.vram_bytes - told

    @property
    def why_not(self) -> str | None:
        """Why this arm has no numbers of its own, in one line."""
        if self.status.word is Status.OK:
            return None
        if self.status.alias_of is not None:
            return f"= {self.status.alias_of} ({self.status.reason})"
        return str(self.status)

    @property
    def share(self) -> float | None:
        """Decode speed over the ceiling, where that is one of all bytes."""
        if self.decode_tps is None or self.ceiling_tps is None or self.unbounded is not None:
            return None
        return self.decode_tps.value / self.ceiling_tps

    def rounds(self, metric: str) -> list[float]:
        """Seconds, one per judged load: per token (decode), for a whole prefill, to the first token (ttft)."""
        found: dict[str, list[float | None]] = {
            "decode": [1 / load.decode_tps for load in self.loads],
            "prefill": [load.prefill_s for load in self.loads],
            "ttft": [load.ttft_s for load in self.loads],
        }
        return [seconds for seconds in found[metric] if seconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run, judged. `twin` is the row of the second copy of the reference."""

    run: Run
    rows: tuple[Row, ...]
    twin: Row | None
    judgement: Judgement
    warm_up: verdict.WarmUp | None
    variance: verdict.Variance
    blocks_run: int
    repeated_loads: int
    finished: bool  # the plan asks for no further load

    @property
    def header(self) -> Header:
        return self.run.header

    @property
    def state(self) -> State:
        return self.judgement.state

    @property
    def reference(self) -> Row:
        return next(row for row in self.rows if row.is_reference)

    def row(self, arm: str) -> Row:
        return next(row for row in self.rows if row.arm == arm)

    @property
    def best(self) -> tuple[Row, ...]:
        """Of the candidates that a search picked, those not told apart from the fastest, which is first.

        By their confirmed loads alone; empty without a search, or where the run ranks nothing.
        """
        search = self.header.search
        if search is None or not self.state.ranks:
            return ()
        chosen = [
            row
            for row in self.rows
            if row.arm in search.chosen
            and row.loads
            and row.status.word is Status.OK
            and Flag.IMPOSSIBLE not in row.flags
            and (row.is_reference or (row.contrast is not None and row.contrast.word != "NOT_COMPARABLE"))
        ]
        ranked = sorted(chosen, key=lambda row: -(row.contrast.ratio if row.contrast else 1.0))
        apart = any(row.contrast is not None and row.contrast.word == "DIFFERENT" for row in ranked)
        return tuple(ranked[:1] if apart else ranked)

    @property
    def limits(self) -> tuple[int, ...]:
        """What GPU memory was held to, of any arm."""
        found = {each.settings.device_limit_bytes for each in self.header.contenders}
        return tuple(sorted(size for size in found if size is not None))

    @property
    def has_numbers(self) -> bool:
        """Whether any arm has a load that counts."""
        return any(row.loads for row in self.rows)


def compare(run: Run) -> Comparison:
    """Judge a run. Raises RunRefused if it has no load yet."""
    drawn = run.header.plan
    if not any(load.stage == "block" for load in run.loads):
        raise RunRefused(f"{run.folder} has no finished load; go on with it by `{resuming(run.folder)}`")
    outcomes = outcomes_of(run)
    kept = plan.kept(drawn, outcomes)
    loads = {(load.block, load.attempt, load.label): load for load in run.loads if load.stage == "block"}
    judged = {
        label: tuple(loads[outcome.block, outcome.attempt, label] for outcome in found) for label, found in kept.items()
    }
    began = min(load.started_unix_s for load in loads.values())
    contenders = {plan.public(each.arm): each for each in run.header.contenders}
    if unlisted := {arm.text for arm in drawn.arms} - set(contenders):
        raise RunRefused(f"{run.folder} is damaged: its plan has {', '.join(sorted(unlisted))} and its header has not")
    names = {arm.label: "its twin" if arm.label == drawn.twin else arm.text for arm in drawn.arms}
    statuses = plan.statuses(drawn, outcomes)
    often = _often_invalid(run, loads.values())
    # what an engine did wrong weighs more than how it stumbled
    statuses |= {shown: status for shown, status in often.items() if statuses[shown].word is Status.OK}
    if drawn.twin is not None and statuses[drawn.twin].word is Status.VOID:  # it is the same arm
        statuses[drawn.reference] = statuses[drawn.twin]
    running = {arm.label: contenders[arm.text] for arm in drawn.arms}
    values = plan.values(drawn, outcomes)
    speeds = {label: math.exp(statistics.median(logs)) for label, logs in values.items() if logs}
    found = {
        label: plausibility.check(run.header, each, judged.get(label, ()), speeds.get(label))
        for label, each in running.items()
    }
    claims = len(next(iter(judged.values()), ())) >= verdict.FEWEST_BLOCKS
    judgement = verdict.judge(
        values,
        {label: [(load.started_unix_s - began) / 60 for load in found] for label, found in judged.items()},
        drawn.contrasts,
        level=drawn.level,
        seed=drawn.seed,
        reference=drawn.reference,
        twin_label=drawn.twin,
        margin=drawn.margin,
        aliases=drawn.aliases,
        unstable={
            label: found.reason for label, found in statuses.items() if found.word in (Status.UNSTABLE, Status.VOID)
        },
        disturbed=sum(outcome.disturbed for found in kept.values() for outcome in found),
        doubts=[*_shared(run), *_moved(names, running, judged), *_flagged(names, speeds, found)],
        names=names,
    )
    if claims and judgement.spread is not None:
        limit = f"{100 * judgement.spread.limit:.0f} %"
        for loose in judgement.spread.unstable:
            if statuses[loose].word is Status.OK:
                reason = f"{judgement.spread.far[loose]} of its loads are more than {limit} off its median"
                statuses[loose] = ArmStatus(Status.UNSTABLE, reason)
    label_of = {arm.text: arm.label for arm in drawn.arms if arm.label != drawn.twin}
    judgement = dataclasses.replace(
        judgement,
        contrasts={
            (a, b): _if_comparable(
                contrast, (running[a], judged[a]), (running[b], judged[b]), impossible=_impossible((a, b), found)
            )
            for (a, b), contrast in judgement.contrasts.items()
        },
    )

    def row(contender: Contender, label: str | None, status: ArmStatus) -> Row:
        sound = found[label] if label else plausibility.check(run.header, contender, (), None)
        return _row(run, contender, label, status, judged.get(label or "", ()), judgement, began, outcomes, sound)

    rows = []
    for contender in run.header.contenders:
        label = label_of.get(plan.public(contender.arm)) if contender.status.word is Status.OK else None
        rows.append(row(contender, label, statuses[label] if label else contender.status))
    twin = None
    if drawn.twin is not None:
        twin = row(contenders[_text(drawn, drawn.reference)], drawn.twin, statuses[drawn.twin])
    twin = twin and _with_others(twin, rows)
    rows = [_with_others(each, rows) for each in rows]
    requests = {label: [_logs(run, load) for load in its] for label, its in judged.items()}
    return Comparison(
        run=run,
        rows=tuple(rows),
        twin=twin,
        judgement=judgement,
        warm_up=verdict.warm_up([load for its in requests.values() for load in its]),
        variance=verdict.variance(
            {label: [[log for log in load if log is not None] for load in its] for label, its in requests.items()}
        ),
        blocks_run=plan.blocks_done(drawn, outcomes),
        repeated_loads=sum(outcome.attempt > 1 for outcome in outcomes),
        finished=plan.next_load(drawn, plan.abandon(drawn, outcomes)) is None,
    )


def all_rows(comparison: Comparison) -> list[Row]:
    """All arms, and the twin after its original."""
    rows = list(comparison.rows)
    if comparison.twin is not None:
        twin = dataclasses.replace(
            comparison.twin,
            arm=f"{comparison.twin.arm} (twin)",
            is_reference=False,
            contrast=comparison.judgement.twin.contrast if comparison.judgement.twin else None,
        )
        rows.insert(rows.index(comparison.reference) + 1, twin)
    return rows


def _often_invalid(run: Run, loads: Iterable[LoadRecord]) -> dict[str, ArmStatus]:
    """Arms of whose requests more than one in ten is invalid: the rest may not stand for them."""
    counts: dict[str, list[bool]] = {}
    for load in loads:
        counts.setdefault(load.label, []).extend(each.invalid is not None for each in run.samples_of(load))
    return {
        label: ArmStatus(Status.UNSTABLE, f"{sum(found)} of its {len(found)} samples are invalid")
        for label, found in counts.items()
        if sum(found) > MOST_INVALID * len(found)
    }


def _text(drawn: plan.Plan, label: str) -> str:
    return next(arm.text for arm in drawn.arms if arm.label == label)


Loaded = tuple[Contender, Sequence[LoadRecord]]


def _impossible(pair: Iterable[str], found: Mapping[str, Plausibility]) -> bool:
    return any(found[label].flag is Flag.IMPOSSIBLE for label in pair)


def _if_comparable(found: Contrast, one: Loaded, other: Loaded, *, impossible: bool) -> Contrast:
    """No ratio without the same weights, in every load, on the same devices, and none of a speed that cannot be."""
    (first, first_loads), (second, second_loads) = one, other
    digests = {load.weights_digest for load in (*first_loads, *second_loads)}
    reason = None
    if impossible:
        reason = "a speed that no memory allows is compared with nothing"
    elif None in digests:
        blind = first.arm if any(load.weights_digest is None for load in first_loads) else second.arm
        reason = f"the weights that {blind} loaded cannot be read, so identity is not proven"
    elif len(digests) > 1:
        reason = "not every load was of the same weights"
    elif first.device_kinds and second.device_kinds and first.device_kinds != second.device_kinds:
        kinds = " and ".join(", ".join(sorted(each.device_kinds)) for each in (first, second))
        reason = f"the engines see different devices ({kinds})"
    if reason is None:
        return found
    return dataclasses.replace(found, word="NOT_COMPARABLE", reason=reason)


def _row(
    run: Run,
    contender: Contender,
    label: str | None,
    status: ArmStatus,
    judged: Sequence[LoadRecord],
    judgement: Judgement,
    began: float,
    outcomes: Sequence[plan.Outcome],
    sound: Plausibility,
) -> Row:
    drawn = run.header.plan
    mine = [load for load in run.loads if load.stage == "block" and load.label == label]
    samples = [sample for load in mine for sample in run.samples_of(load)]
    values = tuple(_values(run, load, began) for load in judged)
    counts = [each.prompt_tokens for each in samples if each.prompt_tokens is not None]
    checked = [sample.output_ok for load in mine for sample in run.samples.get(load.id, ())]
    host_bytes, device_bytes = next(reversed(_placed(contender, judged)), (None, None))
    return Row(
        arm=contender.arm,
        status=status,
        placement=contender.placement,
        engine=str(contender.engine) if contender.engine else None,
        command=contender.command,
        weights_digest=contender.weights_digest,
        output_ok=all(ok for ok in checked if ok is not None) if any(ok is not None for ok in checked) else None,
        is_reference=label == drawn.reference,
        decode_tps=_interval(load.decode_tps for load in values),
        prefill_tps=_interval(load.prefill_tps for load in values),
        ttft_s=_interval(load.ttft_s for load in values),
        load_s=_median(load.load_s for load in values),
        vram_bytes=most(load.telemetry.vram_bytes for load in mine if load.telemetry),
        rss_bytes=most(load.telemetry.peak_rss_bytes for load in mine if load.telemetry),
        predicted=contender.predicted,
        predicted_device_bytes=contender.predicted.device_bytes if contender.predicted else None,
        like=contender.like,
        cell=sound.fit.cell,
        cell_reason=sound.fit.why,
        ceiling_tps=sound.band.ceiling_tps,
        floor_tps=sound.band.floor_tps,
        unbounded=sound.band.reason,
        flags=(sound.flag,) if sound.flag else (),
        contradictions=sound.contradictions,
        buffers=_buffers(contender, judged),
        realised_host_bytes=host_bytes,
        realised_device_bytes=device_bytes,
        contrast=judgement.contrasts.get((label or "", drawn.reference)),
        prompt_tokens=(min(counts), max(counts)) if counts else None,
        samples=len(samples),
        invalid_samples=sum(sample.invalid is not None for sample in samples),
        invalid_reasons=dict(Counter(sample.invalid for sample in samples if sample.invalid)),
        failed_loads=dict(Counter(each.broken for each in outcomes if each.label == label and each.broken)),
        loads=values,
        gpu_energy=energy.per_token((load.gpu_energy for load in judged), _mean(run.rest_gpu_w)),
        cpu_energy=energy.per_token((load.cpu_energy for load in judged), _mean(run.rest_cpu_w)),
        process_vram_bytes=most(load.telemetry.engine_vram_bytes for load in mine if load.telemetry),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def _with_others(row: Row, rows: Sequence[Row]) -> Row:
    """With what is known of an arm only beside the others."""
    joules = None if row.gpu_energy is None else _interval(load.gpu_j for load in row.loads)
    return dataclasses.replace(
        row, expected_vram_bytes=_expected(row, rows), gpu_j=joules, gpu_j_ratio=_energy_ratio(row, rows)
    )


def _energy_ratio(row: Row, rows: Sequence[Row]) -> Interval | None:
    """Joules a token against those of the reference in the same block; None where too little was measured."""
    reference = next(each for each in rows if each.is_reference)
    if row.gpu_energy is None or reference.gpu_energy is None:
        return None
    usual = {load.block: load.gpu_j for load in reference.loads}
    ratios = [load.gpu_j / other for load in row.loads if load.gpu_j and (other := usual.get(load.block))]
    return _interval(ratios)


def _expected(row: Row, rows: Sequence[Row]) -> int | None:
    """What device memory should grow by for this arm. The driver's share is the median of the other arms', so that
    no arm is compared with itself; None where nothing is predicted or no other arm shows it.
    """
    others = [each.driver_bytes for each in rows if each.arm != row.arm and each.driver_bytes is not None]
    if row.planned_vram_bytes is None or not row.planned_vram_bytes or not others:
        return None
    return row.planned_vram_bytes + round(statistics.median(others))


def _buffers(contender: Contender, judged: Sequence[LoadRecord]) -> tuple[Buffer, ...] | None:
    """As the engine reported them at the last load, or at the probe."""
    realised = [contender.realised, *(load.realised for load in judged)]
    return next((each.buffers for each in reversed(realised) if each and each.buffers is not None), None)


def _placed(contender: Contender, judged: Sequence[LoadRecord]) -> list[tuple[int, int]]:
    """Host and device bytes as the engine reported them, of the probe and then of each judged load."""
    realised = [contender.realised, *(load.realised for load in judged)]
    return [found for each in realised if each and (found := placement.realised_bytes(each.buffers)) is not None]


def _shared(run: Run) -> Iterator[str]:
    """Who else held memory of the GPUs, and whether they drew the same at rest, before and after."""
    yield from (f"{who[0].upper()}{who[1:]}." for sitting in run.sittings for who in sitting.foreign_gpu)
    drift = energy.idle_drift(run.rest_gpu_w)
    if drift is not None and drift > energy.IDLE_DRIFT:
        yield f"At rest the GPUs drew {percent(drift)} more at one look than at another."


def _moved(
    names: Mapping[str, str], contenders: Mapping[str, Contender], judged: Mapping[str, Sequence[LoadRecord]]
) -> Iterator[str]:
    """Arms that did not place the weights alike in all their loads: engines that choose may."""
    for label, loads in judged.items():
        device = [bytes_ for _, bytes_ in _placed(contenders[label], loads)]
        if device and not placement.same_bytes(min(device), max(device)):
            between = f"{format_bytes(min(device))} to {format_bytes(max(device))}"
            yield f"{names[label]} did not place the weights alike in all its loads: {between} on the device."


def _flagged(names: Mapping[str, str], speeds: Mapping[str, float], found: Mapping[str, Plausibility]) -> Iterator[str]:
    """Arms that no memory can be so fast or so slow as, and those whose bytes another witness did not see."""
    for label, each in found.items():
        if each.flag is not None:
            yield plausibility.sentence(names[label], speeds[label], each.band, each.flag) + "."
        yield from (f"{names[label]}: {sentence}." for sentence in each.contradictions)


def _values(run: Run, load: LoadRecord, began: float) -> LoadValues:
    valid = [sample for sample in run.samples_of(load) if sample.invalid is None]
    decode = [sample.decode_tps for sample in valid if sample.decode_tps]
    return LoadValues(
        block=load.block,
        minutes=(load.started_unix_s - began) / 60,
        decode_tps=math.exp(statistics.median(math.log(tps) for tps in decode)),
        prefill_tps=_median(sample.prefill_tps for sample in valid),
        prefill_s=_median(sample.usage.prefill_s if sample.usage else None for sample in valid),
        ttft_s=_median(sample.ttft_s for sample in valid),
        load_s=load.realised.load_s if load.realised else None,
        gpu_j=load.gpu_energy.joules / load.gpu_energy.steps if load.gpu_energy and load.gpu_energy.steps else None,
    )


def _logs(run: Run, load: LoadRecord) -> list[float | None]:
    """Log speed of every request in order; None where it is invalid."""
    return [
        math.log(sample.decode_tps) if sample.invalid is None and sample.decode_tps else None
        for sample in run.samples_of(load)
    ]


def _interval(speeds: Iterable[float | None]) -> Interval | None:
    logs = [math.log(speed) for speed in speeds if speed]
    return verdict.interval(logs) if logs else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
