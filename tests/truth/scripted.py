"""Whole runs whose clocks are scripted: each speed is a function of what is measured, and of nothing else.

The harness is the real one, from options to report; only its clocks are replaced. So two runs of one seed
give the same numbers to the last bit, and a run that was killed can be held against one that was not. The
engines are fakes, or none at all: a backend that starts no process.

`Runs` does them in processes of their own, some of which are killed at a chosen line of their file;
`clocks` scripts the clocks of this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import harness
from harness import load, plan, probe, record, registry, run
from harness import measure as measures
from harness.arms import read_arm
from harness.contract import Arm, Chunk, Engine, ModelFile, Prompt, Realised, Request, Session, Settings, Usage
from harness.display import quiet
from harness.load import Job
from harness.measure import Sample
from harness.options import Options
from harness.plan import Outcome, Plan
from harness.record import LoadRecord, Run, SampleLine
from harness.walk import duel

ITL_S, TTFT_S = 0.05, 0.5  # of an arm that is neither fast nor slow
STARTED_UNIX_S = 1_700_000_000.0


@dataclass(frozen=True, slots=True)
class Moment:
    """One request: the load that it belongs to, its number there (from 0), the command line that computes."""

    job: Job
    request: int
    argv: tuple[str, ...]


Script = Callable[[Moment, Sample], Sample]  # what a request becomes
Measure = Callable[..., Sample]


def noise(*key: object) -> float:
    """Standard normal, the same whenever the key is."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return statistics.NormalDist().inv_cdf((int.from_bytes(digest[:7], "big") + 0.5) / 2**56)


@contextlib.contextmanager
def clocks(script: Script, measure: Measure = measures.measure) -> Iterator[None]:
    """Until the block ends, samples are what `script` makes of them, and a load starts by its place in the plan."""
    current: list[Job] = []
    requests = 0

    def run_load(job: Job, *rest: Any, **more: Any) -> tuple[LoadRecord, tuple[Sample, ...]]:
        nonlocal requests
        current[:], requests = [job], 0
        return load.run_load(job, *rest, **more)

    def timed(session: Session, *rest: Any, **more: Any) -> Sample:
        nonlocal requests
        sample = measure(session, *rest, **more)
        moment = Moment(current[0], requests, session.realised().argv)
        requests += 1
        return script(moment, sample)

    def now() -> float:
        job = current[0]
        return STARTED_UNIX_S + 60 * (10 * job.block + job.position)

    with (
        mock.patch.object(run, "run_load", run_load),
        mock.patch.object(probe, "run_load", run_load),
        mock.patch.object(load, "measure", timed),
        mock.patch.object(load, "time", SimpleNamespace(time=now, time_ns=time.time_ns)),
    ):
        yield


def stamped(sample: Sample, log_speed: float) -> Sample:
    """The sample as it would have been, had both clocks seen this speed."""
    if sample.usage is None:
        return sample
    itl_ns = round(1e9 * ITL_S * math.exp(-log_speed))
    first_ns = round(1e9 * TTFT_S)
    stamps = tuple(first_ns + itl_ns * number for number in range(len(sample.chunk_ns)))
    counts = tuple(range(1, len(stamps) + 1))
    usage = dataclasses.replace(
        sample.usage, prefill_s=TTFT_S - 0.01, decode_s=itl_ns * (len(stamps) - 1) / 1e9, load_s=None
    )
    end_ns = stamps[-1] + 10**6
    return dataclasses.replace(
        sample, sent_ns=0, connect_ns=0, chunk_ns=stamps, chunk_tokens=counts, end_ns=end_ns, usage=usage
    )


# ── an engine that is none ──────────────────────────────────────────────────────────────────


class Toy:
    """A backend without a process: it is always there, and every answer is the right one."""

    name = "toy"

    def find(self, hints: Mapping[str, str]) -> Engine:
        return Engine(product="Toy", version="1", path=Path(__file__), origin="PATH")

    def parse(self, text: str) -> Arm:
        return read_arm(text, self.name, placements=(), knobs=("t",))

    def resolve(self, ref: str) -> Path | None:
        return None

    def command(self, arm: Arm, model: ModelFile, settings: Settings) -> str:
        return f"toy {arm}"

    @contextlib.contextmanager
    def open(self, engine: Engine, model: ModelFile, arm: Arm, settings: Settings, log: Path) -> Iterator[Session]:
        yield Playing(model.path)


@dataclass(frozen=True, slots=True)
class Playing:
    weights: Path

    def request(self, prompt: Prompt, max_tokens: int) -> Request:
        raise AssertionError("nothing is sent to a toy")

    def read(self, line: bytes) -> Chunk | Usage | None:
        raise AssertionError("nothing comes from a toy")

    def settle(self, usage: Usage) -> Usage:
        return usage

    def realised(self) -> Realised:
        return Realised(engine="Toy 1", argv=(), pids=(), weights=self.weights, load_s=1.0)

    def count_tokens(self, text: str) -> int | None:
        return len(text.split())

    def death(self) -> str | None:
        return None


def answer(session: Session, prompt: Prompt, max_tokens: int, **more: Any) -> Sample:
    """What `measure` gives for a toy: the right text in full length. The stamps are yet to come."""
    counted = len(prompt.text.split())
    usage = Usage(prompt_tokens=counted, cached_tokens=0, generated_tokens=max_tokens, stop="length")
    return Sample(
        prompt_id=prompt.id,
        max_tokens=max_tokens,
        sent_ns=0,
        chunk_ns=(0,) * max_tokens,
        status=200,
        text=more["expected"],
        usage=usage,
        **more,
    )


# ── what is left of a run ────────────────────────────────────────────────────────────────────


def lines_of(run: Run) -> list[str]:
    """The lines of the judged loads as they are in the file, but for times, ports, processes and attempts.

    A block that was run again is judged by its last attempt.
    """
    text = (run.folder / record.LINES).read_text(encoding="utf-8").splitlines()
    judged = {(load.block, load.label): load.id for load in run.loads if load.stage == "block"}
    kept = set(judged.values())
    lines = [json.loads(line) for line in text]
    return [_timeless(line) for line in lines if line.get("load", line.get("id")) in kept]


def _timeless(data: dict[str, Any]) -> str:
    """Without what no second run can have again."""
    for key in ("id", "load", "attempt", "telemetry", "quiet", "settled", "cache", "thermal"):
        data.pop(key, None)
    if realised := data.get("realised"):
        del realised["pids"], realised["load_s"], realised["reported"]
    return re.sub(r'sessions/[^/"]+|"--port", "\d+"', "…", json.dumps(data))


# ── a process that is killed ────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """At this line of the run's file (the first is 1, the probe's are not counted), of which so much got to the disk.

    `poisoned` is the block that the kill cuts off: until then its loads run at double speed, so that any
    trace of them in the analysis shows.
    """

    line: int
    kept: str  # none, half, unended (all but the end of the line) or whole
    poisoned: int | None = None


def blocks_by_line(run: Run) -> list[int]:
    """The block of every line that was written after the probe."""
    lines = map(json.loads, (run.folder / record.LINES).read_text(encoding="utf-8").splitlines())
    names = [line.get("load", line.get("id")) for line in lines]
    blocks = {load.id: load.block for load in run.loads if load.stage == "block"}
    return [blocks[name] for name in names if name in blocks]


def kill_at(line: int, kept: str, blocks: list[int]) -> Kill:
    """A kill cuts its block off, unless it comes after the last line of it: then no load of it may be lost."""
    block = blocks[line - 1]
    is_done = kept == "whole" and block not in blocks[line:]
    return Kill(line=line, kept=kept, poisoned=None if is_done else block)


def lethal(kill: Kill) -> Callable[[Path, record.Line], None]:
    """`record.append`, up to the line of a load at which its process is gone."""
    append, written = record.append, 0

    def appending(folder: Path, each: record.Line) -> None:
        nonlocal written
        written += isinstance(each, LoadRecord | SampleLine) and (folder / record.HEADER).exists()
        if written < kill.line:
            append(folder, each)
            return
        path = folder / record.LINES
        before = path.stat().st_size
        append(folder, each)
        size = path.stat().st_size - before
        os.truncate(path, before + {"none": 0, "half": size // 2, "unended": size - 1, "whole": size}[kill.kept])
        os.kill(os.getpid(), signal.SIGKILL)

    return appending


def fakes(moment: Moment, sample: Sample, poisoned: int | None) -> Sample:
    """By the command line of the process that computes: experts on the CPU cost a fifth. The machine is quiet."""
    behind = math.log(0.8) if "--cpu-moe" in moment.argv else 0.0
    return stamped(sample, behind + doubled(moment, poisoned) + jitter(moment, 0.004, 0.006))


BROKEN = (3, 1, "B")  # block, attempt, label


def toys(moment: Moment, sample: Sample, poisoned: int | None) -> Sample:
    """The second arm is 3 % faster, on a machine so noisy that it takes eight blocks to tell.

    In one load, the first time, two requests find their prompt in a cache: its block is repeated.
    """
    job = moment.job
    ahead = math.log1p(0.03) if "t=2" in str(job.arm) else 0.0
    sample = stamped(sample, ahead + doubled(moment, poisoned) + jitter(moment, 0.020, 0.015))
    if (job.block, job.attempt, job.label) == BROKEN and 0 < moment.request < 3 and sample.usage is not None:
        return dataclasses.replace(sample, usage=dataclasses.replace(sample.usage, cached_tokens=9))
    return sample


def doubled(moment: Moment, poisoned: int | None) -> float:
    return math.log(2) if moment.job.block == poisoned else 0.0


def jitter(moment: Moment, between: float, within: float) -> float:
    """Log speed of a load, and of a request in it, about the usual one; equal in every attempt at a block."""
    place = (moment.job.block, moment.job.label)
    return between * noise(*place) + within * noise(*place, moment.request)


def keeping(drawn: Plan, outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """A wrong `plan.abandon`: what was measured of a block that was cut off is not measured again."""
    return tuple(outcomes)


def do(engine: str, options: Options, kill: Kill | None, *, keeps_abandoned: bool) -> None:
    """One run, in this process."""
    with contextlib.ExitStack() as stack:
        if kill is not None:
            stack.enter_context(mock.patch.object(record, "append", lethal(kill)))
        if keeps_abandoned:
            stack.enter_context(mock.patch.object(plan, "abandon", keeping))
        script, measure = (toys, answer) if engine == "toy" else (fakes, measures.measure)
        if engine == "toy":
            only = MappingProxyType({"toy": Toy()})
            stack.enter_context(mock.patch.object(registry, "_load", return_value=only))
        stack.enter_context(clocks(partial(script, poisoned=kill.poisoned if kill else None), measure))
        duel(options, quiet)


def main() -> None:
    import scipy.special  # noqa: F401 -- here, or each of the processes would import it anew

    ends = []
    for wanted in json.loads(sys.stdin.read()):
        child = os.fork()
        if not child:
            kill = Kill(**wanted["kill"]) if wanted["kill"] else None
            do(wanted["engine"], Options(**wanted["options"]), kill, keeps_abandoned=wanted["keeps_abandoned"])
            sys.exit()
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(ends))


class Runs:
    """Scripted runs, each in a process of its own and in the folder of its name."""

    def __init__(self, engine: str, folder: Path, **options: Any) -> None:
        self.engine, self.folder = engine, folder
        self.options = {"no_wait": True, "out_tokens": 24, "prompt_tokens": 64, "context": 512} | options
        places = (Path(__file__).parent.parent, Path(harness.__file__).parent.parent)
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "OPENBLAS_NUM_THREADS": "1",  # a process with threads must not fork
        }

    def begin(
        self, *names: str, seed: Mapping[str, int] | None = None, kills: Mapping[str, Kill] | None = None
    ) -> list[int]:
        """How the runs ended, by their exit codes."""
        seeds = {name: {"seed": number} for name, number in (seed or {}).items()}
        options = [self.options | {"out": str(self.folder / name)} | seeds.get(name, {}) for name in names]
        return self._do(options, [(kills or {}).get(name) for name in names])

    def resume(self, *names: str, keeps_abandoned: bool = False) -> list[int]:
        options = [{"resume": str(self.find(name)), "no_wait": True} for name in names]
        return self._do(options, [None] * len(names), keeps_abandoned)

    def find(self, name: str) -> Path:
        (found,) = (self.folder / name).iterdir()
        return found

    def _do(
        self, options: Sequence[Mapping[str, Any]], kills: Sequence[Kill | None], keeps_abandoned: bool = False
    ) -> list[int]:
        wanted = [
            {"engine": self.engine, "options": each, "kill": kill and asdict(kill), "keeps_abandoned": keeps_abandoned}
            for each, kill in zip(options, kills, strict=True)
        ]
        given = json.dumps(wanted, default=str)
        command = [sys.executable, "-m", "truth.scripted"]
        done = subprocess.run(command, env=self.environment, input=given, stdout=subprocess.PIPE, text=True, check=True)
        ends: list[int] = json.loads(done.stdout)
        return ends


if __name__ == "__main__":
    main()
