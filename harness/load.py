"""One Load: make the start equal, start the engine, warm up, measure, stop, write it all down.

This is the unit of replication. The probe and the blocks go through the same code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import gates, gpus, record, telemetry
from harness import model as models
from harness.ballast import Ballast
from harness.contract import Arm, Engine, ModelFile, Prompt, Realised, Session, Settings
from harness.energy import Window
from harness.errors import Crashed, DoesNotFit, EngineFailed, Interrupted, TimedOut, Unavailable
from harness.gates import Temperatures
from harness.measure import Sample, measure
from harness.plan import ArmStatus, Status
from harness.preflight import HELD_BYTES
from harness.record import LoadRecord, SampleLine
from harness.registry import backend
from harness.sizes import format_bytes

STATUS_OF = {DoesNotFit: Status.DOES_NOT_FIT, TimedOut: Status.TIMEOUT, Crashed: Status.CRASHED}
Tell = Callable[[str], None]
WARM_UP, REQUEST = "warming up", "request"


@dataclass(frozen=True, slots=True)
class Task:
    """One request of a load, with the exact answer where it is known."""

    prompt: Prompt
    out_tokens: int
    warmup: bool = False
    expected: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one load is to do, and where it stands in the plan."""

    stage: str  # "probe", "burn-in" or "block"
    label: str
    arm: Arm
    engine: Engine
    model: ModelFile
    settings: Settings
    tasks: tuple[Task, ...]
    shared_tokens: int = 0  # that the tokenizer puts before every prompt, and that may be cached
    block: int = 0
    attempt: int = 0
    position: int = 0
    host_bytes: int | None = None  # that the engine will hold, as far as it is known before
    available_bytes: int | None = None  # of memory, before any load; None: the page cache is left as it is
    ballast: Ballast | None = None  # that holds the GPUs to a smaller size

    def name_start(self) -> str:
        """An id for one start of this job; a run that is continued may start the same job again."""
        place = f"{self.stage}-{self.block}.{self.attempt}.{self.position}-{self.label}"
        return f"{place}-{time.time_ns() // 1_000_000:x}"


def run_load(
    job: Job,
    folder: Path,
    prompt_tokens: dict[str, int],
    tell: Tell,
    *,
    wait: bool,
    starts: Sequence[Temperatures] = (),
) -> tuple[LoadRecord, tuple[Sample, ...]]:
    """Do the job and write it into the run folder; an engine's failure is part of the record.

    `prompt_tokens` by prompt id is what every arm must see; counts that are new go into it.
    `starts` is how hot it was when earlier loads began. The engine is gone when this returns or raises.
    """
    cache = None
    if job.available_bytes is not None:
        cache = gates.read_ahead(job.model.shards, job.host_bytes, job.available_bytes, say=tell)
    thermal = gates.wait_until_cool(starts, gates.COOL_S if wait else 0.0, say=tell)
    quiet = telemetry.wait_until_quiet(say=tell) if wait else None
    baseline = quiet.gpu_used_bytes if quiet else None
    if job.ballast is not None:  # after the waits, in which others may take memory or give it back
        _set_limit(job.ballast)
        baseline = None  # as it is from now on
    started = time.time()
    samples: list[Sample] = []
    realised: Realised | None = None
    digest: str | None = None
    failure: ArmStatus | None = None
    load_id = job.name_start()
    log = folder / "engines" / f"{re.sub(r'[^A-Za-z0-9.@=-]+', '_', load_id)}.log"
    with telemetry.watch(baseline_bytes=baseline) as watcher:
        try:
            tell("loading")
            with backend(job.arm.backend).open(job.engine, job.model, job.arm, job.settings, log) as session:
                warmups = sum(task.warmup for task in job.tasks)
                for number, task in enumerate(job.tasks, 1):
                    tell(WARM_UP if task.warmup else f"{REQUEST} {number - warmups} of {len(job.tasks) - warmups}")
                    watcher.meter.read()  # beside the answer, so that its ends are known well
                    sample = _measure(session, task, job.shared_tokens, prompt_tokens)
                    watcher.meter.read()
                    samples.append(sample)
                    record.append(folder, SampleLine(load=load_id, sample=sample))
                    if death := session.death():
                        raise Crashed(death)
                tell("stopping")
                thermal = dataclasses.replace(thermal, end=gates.temperatures())
                realised = session.realised()
                digest = _digest(realised.weights, job.model)
        except Unavailable as error:
            failure = ArmStatus(Status.UNAVAILABLE, str(error))
        except EngineFailed as error:
            failure = ArmStatus(STATUS_OF.get(type(error), Status.CRASHED), str(error))
    if job.ballast is not None:
        job.ballast.require()  # else the engine may have had the whole card, and the load is not one of this limit
    settled = telemetry.memory_settled(watcher.baseline_bytes)
    windows = [window for sample in samples if (window := _window(sample)) is not None]
    done = LoadRecord(
        id=load_id,
        stage=job.stage,
        label=job.label,
        arm=str(job.arm),
        block=job.block,
        attempt=job.attempt,
        position=job.position,
        started_unix_s=started,
        ended_unix_s=time.time(),
        failure=failure,
        realised=realised,
        weights_digest=digest,
        telemetry=watcher.summary(),
        quiet=quiet,
        settled=settled,
        cache=cache,
        thermal=thermal,
        gpu_energy=watcher.meter.gpu_spent(windows),
        cpu_energy=watcher.meter.cpu_spent(windows),
    )
    record.append(folder, done)
    return done, tuple(samples)


def _set_limit(ballast: Ballast) -> None:
    """Leave every GPU as much free memory as the limit says, and believe it when NVML does. Raises Interrupted."""
    cards, seen = ballast.adjust(), gpus.glances()
    memory, wanted = gpus.memory(seen), sum(card.free_bytes for card in cards)
    all_tell = len(seen) == len(cards) and all(each.free_bytes is not None for each in seen)
    if memory is not None and all_tell and abs(memory.free_bytes - wanted) > HELD_BYTES:
        raise Interrupted(
            f"the ballast left {format_bytes(wanted)} of GPU memory and NVML sees {format_bytes(memory.free_bytes)}; "
            "see that no other program uses the GPU"
        )


def _window(sample: Sample) -> Window | None:
    """The decoding of a measured answer that counts."""
    if sample.warmup or sample.invalid is not None or len(sample.chunk_ns) < 2 or not sample.generated_tokens:
        return None
    first, last = sample.sent_ns + sample.chunk_ns[0], sample.sent_ns + sample.chunk_ns[-1]
    return Window(first, last, sample.generated_tokens - 1)


def is_timed(phase: str) -> bool:
    """Does a request run while this is told? Then nobody else should need the processor."""
    return phase.startswith((WARM_UP, REQUEST))


def _digest(weights: Path | None, model: ModelFile) -> str | None:
    """Of the weights that the engine loaded, while they are there: a store by link ends with its session."""
    if weights is None:
        return None
    with contextlib.suppress(OSError):
        if weights.samefile(model.path):
            return model.digest
    return models.digest_of(weights)


def _measure(session: Session, task: Task, shared_tokens: int, prompt_tokens: dict[str, int]) -> Sample:
    """One sample; the first engine that counts a prompt's tokens sets what the others must see."""
    prompt = task.prompt
    if prompt.id not in prompt_tokens and (count := session.count_tokens(prompt.text)) is not None:
        prompt_tokens[prompt.id] = count
    sample = measure(
        session,
        prompt,
        task.out_tokens,
        warmup=task.warmup,
        expected=task.expected,
        expected_prompt_tokens=prompt_tokens.get(prompt.id),
        shared_tokens=shared_tokens,
    )
    if sample.invalid is None and sample.prompt_tokens is not None:
        prompt_tokens.setdefault(prompt.id, sample.prompt_tokens)
    return sample
