"""A run as plain data: the fields that scripts may rely on, and `schemas/run.output.schema.json` describes."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from harness.answer import answer, best_commands
from harness.changes import Changes
from harness.compare import Comparison, Row
from harness.curve import Curve, curves
from harness.parity import Parity, parity
from harness.physics import Flag
from harness.placement import Cell
from harness.plan import Status
from harness.verdict import Interval, StateWord, Word
from harness.words import plain


class Between(TypedDict):
    """A value and its interval; without bounds where one value is all there is."""

    value: float
    low: float | None
    high: float | None


class ArmFacts(TypedDict):
    """One arm. Unknown is null, never 0. Intervals are of this arm alone; only `ratio` compares."""

    arm: str
    status: Status
    alias_of: str | None
    reason: str | None
    placement: str
    engine: str | None
    weights_digest: str | None
    output_ok: bool | None
    decode_tps: Between | None
    prefill_tps: Between | None
    ttft_s: Between | None
    load_s: float | None
    vram_bytes: int | None
    rss_bytes: int | None
    predicted_device_bytes: int | None
    realised_device_bytes: int | None
    predicted_host_bytes: int | None
    realised_host_bytes: int | None
    expected_vram_bytes: int | None
    reported_vram_bytes: int | None
    energy_j_per_token: Between | None
    energy_above_idle_j_per_token: float | None
    memory: Cell
    memory_reason: str | None
    ceiling_tps: float | None
    floor_tps: float | None
    ceiling_share: float | None
    flags: list[Flag]
    ratio: Between | None
    verdict: Word | None
    is_reference: bool
    samples: int
    invalid_samples: int
    invalid_reasons: dict[str, int]


class ParityFacts(TypedDict):
    """One setting, by arm: as asked for and as the engine read it back."""

    setting: str
    asked: dict[str, str | None]
    values: dict[str, str | None]
    differs: bool
    unexplained: bool
    why: str | None


class PointFacts(TypedDict):
    """One placement of a sweep, under every value that is it."""

    values: list[str]
    arm: str
    decode_tps: float | None
    memory: Cell
    fitted_tps: float | None
    flags: list[Flag]


class CurveFacts(TypedDict):
    """Decode speed over a number that was swept."""

    over: str
    arms: str
    finding: str
    edge: str | None
    best: list[str]
    points: list[PointFacts]


class RunFacts(TypedDict):
    """What a run says. `changes` is there where it was compared with a baseline."""

    run_dir: str
    state: StateWord
    reasons: list[str]
    answer: str
    plan_digest: str
    best: list[str]
    commands: dict[str, str]
    arms: list[ArmFacts]
    parity: list[ParityFacts]
    curves: list[CurveFacts]
    changes: NotRequired[Changes]


class Verified(TypedDict):
    """Whether a run folder is what its samples give; `problems` are sentences."""

    run_dir: str
    verified: bool
    problems: list[str]


class Shown(TypedDict):
    """What `publish` did: the new folder, what was replaced by kind, and the index. Null: no run was named."""

    folder: str | None
    state: str | None
    replaced: dict[str, int]
    index: str
    damaged: list[str]


class Written(TypedDict):
    """A synthetic model on the disk."""

    path: str
    size_bytes: int


class Installed(TypedDict):
    """An engine in the cache."""

    name: str
    path: str


def as_json(comparison: Comparison) -> RunFacts:
    """The fields that scripts may rely on."""
    return {
        "run_dir": str(comparison.run.folder),
        "state": comparison.state.word,
        "reasons": list(comparison.state.reasons),
        "answer": plain(answer(comparison)),
        "plan_digest": comparison.header.plan_digest,
        "best": [row.arm for row in comparison.best],
        "commands": dict(best_commands(comparison)),
        "arms": [row_json(row) for row in comparison.rows],
        "parity": [parity_json(row) for row in parity(comparison.run)],
        "curves": [curve_json(curve) for curve in curves(comparison)],
    }


def curve_json(curve: Curve) -> CurveFacts:
    return {
        "over": curve.over,
        "arms": curve.arms,
        "finding": curve.finding,
        "edge": curve.edge,
        "best": list(curve.best),
        "points": [
            {
                "values": list(point.values),
                "arm": point.arm,
                "decode_tps": point.tps,
                "memory": point.state,
                "fitted_tps": point.fitted_tps,
                "flags": list(point.flags),
            }
            for point in curve.points
        ],
    }


def row_json(row: Row) -> ArmFacts:
    contrast = row.contrast
    comparable = contrast is not None and contrast.word != "NOT_COMPARABLE"
    return {
        "arm": row.arm,
        "status": row.status.word,
        "alias_of": row.status.alias_of,
        "reason": row.why_not,
        "placement": row.placement,
        "engine": row.engine,
        "weights_digest": row.weights_digest,
        "output_ok": row.output_ok,
        "decode_tps": _interval_json(row.decode_tps),
        "prefill_tps": _interval_json(row.prefill_tps),
        "ttft_s": _interval_json(row.ttft_s),
        "load_s": row.load_s,
        "vram_bytes": row.vram_bytes,
        "rss_bytes": row.rss_bytes,
        "predicted_device_bytes": row.predicted_device_bytes,
        "realised_device_bytes": row.realised_device_bytes,
        "predicted_host_bytes": row.predicted.host_bytes if row.predicted else None,
        "realised_host_bytes": row.realised_host_bytes,
        "expected_vram_bytes": row.expected_vram_bytes,
        "reported_vram_bytes": row.reported_vram_bytes,
        "energy_j_per_token": _interval_json(row.gpu_j),
        "energy_above_idle_j_per_token": row.gpu_energy.above_idle_j if row.gpu_energy else None,
        "memory": row.cell,
        "memory_reason": row.cell_reason,
        "ceiling_tps": row.ceiling_tps,
        "floor_tps": row.floor_tps,
        "ceiling_share": row.share,
        "flags": list(row.flags),
        "ratio": {"value": contrast.ratio, "low": contrast.low, "high": contrast.high}
        if comparable and contrast
        else None,
        "verdict": None if contrast is None else contrast.word,
        "is_reference": row.is_reference,
        "samples": row.samples,
        "invalid_samples": row.invalid_samples,
        "invalid_reasons": dict(row.invalid_reasons),
    }


def parity_json(row: Parity) -> ParityFacts:
    return {
        "setting": row.setting,
        "asked": dict(row.asked),
        "values": dict(row.values),
        "differs": row.differs,
        "unexplained": bool(row.unexplained),
        "why": "; ".join((*row.unexplained, *row.why)) or None,
    }


def _interval_json(interval: Interval | None) -> Between | None:
    return None if interval is None else {"value": interval.value, "low": interval.low, "high": interval.high}
