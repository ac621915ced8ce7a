"""A run as plain data: the fields that scripts may rely on."""

from __future__ import annotations

from typing import Any

from harness.answer import answer, best_commands
from harness.compare import Comparison, Row
from harness.curve import Curve, curves
from harness.parity import Parity, parity
from harness.verdict import Interval
from harness.words import plain


def as_json(comparison: Comparison) -> dict[str, Any]:
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


def curve_json(curve: Curve) -> dict[str, Any]:
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
                "memory": point.state.value,
                "fitted_tps": point.fitted_tps,
                "flags": list(point.flags),
            }
            for point in curve.points
        ],
    }


def row_json(row: Row) -> dict[str, Any]:
    contrast = row.contrast
    comparable = contrast is not None and contrast.word != "NOT_COMPARABLE"
    return {
        "arm": row.arm,
        "status": row.status.word.value,
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
        "memory": row.cell.value,
        "memory_reason": row.cell_reason,
        "ceiling_tps": row.ceiling_tps,
        "floor_tps": row.floor_tps,
        "ceiling_share": row.share,
        "flags": [flag.value for flag in row.flags],
        "ratio": {"value": contrast.ratio, "low": contrast.low, "high": contrast.high}
        if comparable and contrast
        else None,
        "verdict": None if contrast is None else contrast.word,
        "is_reference": row.is_reference,
        "samples": row.samples,
        "invalid_samples": row.invalid_samples,
        "invalid_reasons": dict(row.invalid_reasons),
    }


def parity_json(row: Parity) -> dict[str, Any]:
    return {
        "setting": row.setting,
        "asked": dict(row.asked),
        "values": dict(row.values),
        "differs": row.differs,
        "unexplained": bool(row.unexplained),
        "why": "; ".join((*row.unexplained, *row.why)) or None,
    }


def _interval_json(interval: Interval | None) -> dict[str, float | None] | None:
    return None if interval is None else {"value": interval.value, "low": interval.low, "high": interval.high}
