"""A whole run without an engine: every load at the speed that a test gives to its arm."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

from harness import plan, record
from harness.contract import Buffer, Device, Engine, Realised, Settings, Usage
from harness.gpu import Gpu
from harness.machine import Machine
from harness.measure import Sample
from harness.plan import ArmStatus, Plan, Status
from harness.record import Contender, Header, LoadRecord, ModelFacts, Run, SampleLine
from harness.walk import write_report

WEIGHTS = "a" * 64
GPU = Gpu(name="a card", memory_bytes=8 << 30, driver="580.1", power_limit_w=300.0)
MACHINE = Machine(
    cpu="a CPU",
    physical_cores=8,
    logical_cores=16,
    memory_bytes=64 << 30,
    available_bytes=32 << 30,
    system="Linux",
    kernel="6.1",
    python="CPython 3.12",
    gpus=(GPU,),
)
REFERENCE, OTHER, THIRD = "llama-cpp", "llama-cpp@cpu-moe", "llama-cpp@ngl=9"
TPS = {REFERENCE: 50.0, OTHER: 40.0, THIRD: 30.0, "llama-cpp@ngl=99": 50.0}
ARMS = (REFERENCE, OTHER, THIRD)
TOKENS = 16


def engine(build: str = "b1", **changed: Any) -> Engine:
    given: dict[str, Any] = {"product": "llama.cpp", "version": build, "path": Path("/bin/llama"), "origin": "PATH"}
    return Engine(**(given | {"devices": (Device("CUDA0"),)} | changed))


def contender(arm: str, **changed: Any) -> Contender:
    realised = Realised(
        engine="llama.cpp b1",
        argv=("llama-server",),
        pids=(1,),
        weights=None,
        settings={"n_ctx": "4096"},
        buffers=(Buffer("CPU", "weights", 1 << 30, on_host=True), Buffer("CUDA0", "weights", 2 << 30, on_host=False)),
    )
    return dataclasses.replace(
        Contender(
            arm=arm,
            status=ArmStatus(Status.OK),
            placement=f"where {arm} puts it",
            settings=Settings(),
            engine=engine(),
            weights_digest=WEIGHTS,
            realised=realised,
        ),
        **changed,
    )


def a_plan(arms: tuple[str, ...], **changed: Any) -> Plan:
    made: dict[str, Any] = {
        "seed": 1,
        "prompts_digest": "b" * 64,
        "weights_digest": WEIGHTS,
        "max_blocks": 6,
        "out_tokens": TOKENS,
    }
    return plan.make(arms, **(made | {"settings": {"kind": "matched", "prompt_tokens": 512}} | changed))


def a_header(*contenders: Contender, started: str = "2026-01-01T00:00:00+00:00", **planned: Any) -> Header:
    found = contenders or tuple(map(contender, ARMS))
    drawn = a_plan(tuple(each.arm for each in found if each.status.word is Status.OK), **planned)
    return Header(
        format=record.FORMAT,
        plan=drawn,
        plan_digest=drawn.digest,
        started=started,
        model=ModelFacts(
            name="m", file="m.gguf", architecture="llama", size_bytes=1, digest=drawn.weights_digest, sha256="c" * 64,
            layers=1, expert_layers=0, experts=None, experts_used=None, has_answer_key=False,
        ),
        contenders=found,
        machine=MACHINE,
        options={"no_wait": True},
        command="llamaduel run",
        versions={"llamaduel": "0.1.0"},
    )  # fmt: skip


def later(*contenders: Contender, **planned: Any) -> Header:
    return a_header(*contenders, started="2026-01-02T00:00:00+00:00", **planned)


def played(
    header: Header,
    tps: dict[str, float] | None = None,
    noise: float = 0.002,
    folder: Path = Path("run"),
    dies: str = "",
    twin: float = 1.0,
    mute: str = "",
    since_block: int = 1,
) -> Run:
    """A whole run without an engine: loads in the order of its plan, each at the speed of its arm.

    `noise` is the standard deviation of a load's log speed; the twin runs at `twin` times the speed.
    `dies` names an arm whose loads crash, `mute` one of whose requests none is valid, since that block.
    """
    speeds, drawn = TPS | (tps or {}), header.plan
    outcomes: list[plan.Outcome] = []
    loads: list[LoadRecord] = []
    samples: dict[str, tuple[Sample, ...]] = {}
    while (load := plan.next_load(drawn, outcomes)) is not None:
        wobble = random.Random(f"{header.started}/{load.block}/{load.label}").gauss(0, noise)
        speed = speeds[load.arm] * math.exp(wobble) * (twin if load.label == drawn.twin else 1.0)
        lost = load.arm in (dies, mute) and load.block >= since_block
        begun = 1e9 + 60.0 * len(loads)
        loads.append(
            LoadRecord(
                id=f"block-{load.block}-{load.attempt}-{load.label}",
                stage="block",
                label=load.label,
                arm=load.arm,
                block=load.block,
                attempt=load.attempt,
                position=load.position,
                started_unix_s=begun,
                ended_unix_s=begun + 50,
                failure=ArmStatus(Status.CRASHED, "it died") if lost and load.arm == dies else None,
                weights_digest=drawn.weights_digest,
            )
        )
        samples[loads[-1].id] = () if lost else tuple(sample(speed, drawn.out_tokens) for _ in range(drawn.requests))
        outcomes.append(
            plan.Outcome(
                block=load.block,
                attempt=load.attempt,
                label=load.label,
                value=None if lost else math.log(speed),
                broken="it died" if lost else None,
                status=Status.CRASHED if lost and load.arm == dies else Status.OK,
            )
        )
    return Run(folder=folder, header=header, loads=tuple(loads), samples=samples)


def sample(tps: float, tokens: int) -> Sample:
    stamps = tuple(round(1e8 + 1e9 * number / tps) for number in range(tokens))
    usage = Usage(
        prompt_tokens=9, cached_tokens=0, generated_tokens=tokens, prefill_s=0.05, decode_s=(tokens - 1) / tps
    )
    return Sample(
        prompt_id="p", max_tokens=tokens, sent_ns=0, chunk_ns=stamps, chunk_tokens=tuple(range(1, tokens + 1)),
        end_ns=stamps[-1], status=200, text="x", usage=usage,
    )  # fmt: skip


def written(run: Run, folder: Path) -> Path:
    """The same on disk."""
    record.create(folder, run.header)
    for load in run.loads:
        for each in run.samples[load.id]:
            record.append(folder, SampleLine(load=load.id, sample=each))
        record.append(folder, load)
    write_report(folder)
    return folder
