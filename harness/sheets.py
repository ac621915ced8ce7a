"""A run as comma-separated values, for spreadsheets and data frames: its loads, its requests, or its arms.

A header row, then one row each, by RFC 4180. An unknown value is an empty cell, numbers have all their digits. The
numbers are those of the report: the medians over an arm's loads are the ones that were judged. Text is inert, for a
terminal as for a spreadsheet.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from harness import plan
from harness.compare import Comparison, LoadValues, Row, all_rows
from harness.contract import Usage
from harness.errors import UsageError, nearest
from harness.facts import row_json
from harness.gates import Temperatures
from harness.measure import Sample
from harness.record import LoadRecord
from harness.run import outcomes_of
from harness.telemetry import Telemetry
from harness.words import plain

FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # a spreadsheet would compute text that begins so
BETWEEN = ("decode_tps", "prefill_tps", "ttft_s", "ratio")  # have bounds
NOT_SEEN = Telemetry(seconds=0.0)
Kind = TypeVar("Kind")
Columns = Mapping[str, Callable[[Kind], object]]


def sheet(comparison: Comparison, of: str = "loads") -> Iterator[str]:
    """The lines of a sheet, one by one, each with its end. Raises UsageError."""
    if of not in SHEETS:
        raise UsageError(f"there is no sheet of {of!r}; {nearest(of, SHEETS)}")
    return SHEETS[of](comparison)


def _drawn(columns: Columns[Kind], things: Iterable[Kind]) -> Iterator[str]:
    cells = tuple(columns.values())
    return _written(list(columns), ([cell(thing) for cell in cells] for thing in things))


def _written(names: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    out = io.StringIO()
    writer = csv.writer(out)  # ends its lines with CR LF
    writer.writerow(names)
    for row in rows:
        yield out.getvalue()
        out.seek(0)
        out.truncate()
        writer.writerow(map(_cell, row))
    yield out.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    return value  # None is an empty cell, and a float is written whole


@functools.lru_cache(maxsize=4096)
def _text(text: str) -> str:
    """One inert line. An apostrophe before it has a spreadsheet take it for text.

    Judged is what is written: signs without width, and all that is no text, are gone by then.
    """
    shown = plain(text)
    return f"'{shown}" if shown.startswith(FORMULA) else shown


# ── loads ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Load:
    """A load; `row` and `values` are None where no verdict is from it."""

    of: Comparison
    load: LoadRecord
    row: Row | None = None
    values: LoadValues | None = None

    @property
    def in_block(self) -> bool:
        return self.load.stage == "block"

    @property
    def heat(self) -> Temperatures:
        return self.load.thermal.start if self.load.thermal else Temperatures()


def _loads(comparison: Comparison) -> list[_Load]:
    """All loads in the order of time. Judged are one of every block, of the arms that ran to the end."""
    drawn, outcomes = comparison.header.plan, outcomes_of(comparison.run)
    kept = plan.kept(drawn, outcomes)
    rows = {plan.public(row.arm): row for row in comparison.rows}
    judged: dict[tuple[int, int, str], tuple[Row, LoadValues]] = {}
    for arm in drawn.arms:
        row = comparison.twin if arm.label == drawn.twin else rows[arm.text]
        for load, values in zip(kept.get(arm.label, ()), row.loads if row else (), strict=True):
            judged[load.block, load.attempt, arm.label] = (row or rows[arm.text], values)
    return [
        _Load(comparison, load, *judged.get((load.block, load.attempt, load.label), ()))
        if load.stage == "block"
        else _Load(comparison, load)
        for load in comparison.run.loads
    ]


WHERE: Columns[_Load] = {
    "run": lambda each: each.of.run.folder.name,
    "arm": lambda each: each.load.arm,
    "is_twin": lambda each: each.in_block and each.load.label == each.of.header.plan.twin,
    "block": lambda each: each.load.block if each.in_block else None,
    "position": lambda each: each.load.position if each.in_block else None,
    "attempt": lambda each: each.load.attempt,
}
LOAD: Columns[_Load] = {
    **WHERE,
    "state": lambda each: each.of.state.word,
    "status": lambda each: each.row and each.row.status.word,
    "verdict": lambda each: each.row and each.row.contrast and each.row.contrast.word,
    "minute": lambda each: each.values and each.values.minutes,
    "decode_tps": lambda each: each.values and each.values.decode_tps,
    "prefill_tps": lambda each: each.values and each.values.prefill_tps,
    "prefill_s": lambda each: each.values and each.values.prefill_s,
    "ttft_s": lambda each: each.values and each.values.ttft_s,
    "load_s": lambda each: each.values and each.values.load_s,
    "vram_bytes": lambda each: (each.load.telemetry or NOT_SEEN).vram_bytes,
    "rss_bytes": lambda each: (each.load.telemetry or NOT_SEEN).peak_rss_bytes,
    "samples": lambda each: len(each.of.run.samples_of(each.load)),
    "invalid_samples": lambda each: sum(one.invalid is not None for one in each.of.run.samples_of(each.load)),
    "foreign_cores": lambda each: (each.load.telemetry or NOT_SEEN).foreign_cores,
    "waited_s": lambda each: each.load.quiet and each.load.quiet.waited_s,
    "gpu_j_per_token": lambda each: each.values and each.values.gpu_j,
    "gpu_power_w": lambda each: (each.load.telemetry or NOT_SEEN).gpu_power_w,
    "gpu_clock_mhz": lambda each: (each.load.telemetry or NOT_SEEN).gpu_clock_mhz,
    "gpu_c": lambda each: each.heat.gpu_c,
    "cpu_c": lambda each: each.heat.cpu_c,
    "started_unix_s": lambda each: each.load.started_unix_s,
    "ended_unix_s": lambda each: each.load.ended_unix_s,
}


def _load_sheet(comparison: Comparison) -> Iterator[str]:
    """The judged loads; their speeds are medians over their valid requests."""
    return _drawn(LOAD, (each for each in _loads(comparison) if each.values is not None))


# ── samples ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Request:
    load: _Load
    number: int
    sample: Sample
    usage: Usage
    invalid: str | None


def _where(cell: Callable[[_Load], object]) -> Callable[[_Request], object]:
    return lambda each: cell(each.load)


REQUEST: Columns[_Request] = {
    **{name: _where(cell) for name, cell in WHERE.items()},
    "stage": lambda each: each.load.load.stage,
    "load": lambda each: each.load.load.id,
    "request": lambda each: each.number,
    "warmup": lambda each: each.sample.warmup,
    "judged": lambda each: each.load.values is not None and not each.sample.warmup and each.invalid is None,
    "invalid": lambda each: each.invalid,
    "short": lambda each: each.sample.short,
    "output_ok": lambda each: each.sample.output_ok,
    "prompt": lambda each: each.sample.prompt_id,
    "prompt_tokens": lambda each: each.usage.prompt_tokens,
    "cached_tokens": lambda each: each.usage.cached_tokens,
    "generated_tokens": lambda each: each.usage.generated_tokens,
    "max_tokens": lambda each: each.sample.max_tokens,
    "stop": lambda each: each.usage.stop,
    "decode_tps": lambda each: each.sample.decode_tps,
    "server_decode_tps": lambda each: each.sample.server_decode_tps,
    "prefill_tps": lambda each: each.sample.prefill_tps,
    "ttft_s": lambda each: each.sample.ttft_s,
    "window_s": lambda each: each.sample.window_s,
    "end_s": lambda each: _seconds(each.sample.end_ns),
    "connect_s": lambda each: _seconds(each.sample.connect_ns),
    "server_prefill_s": lambda each: each.usage.prefill_s,
    "server_decode_s": lambda each: each.usage.decode_s,
    "server_load_s": lambda each: each.usage.load_s,
    "overhead_s": lambda each: each.sample.overhead_s,
    "http_status": lambda each: each.sample.status,
}


def _sample_sheet(comparison: Comparison) -> Iterator[str]:
    """Every request, warm-ups and probes too; speeds that no verdict is from are those where `judged` is false."""
    return _drawn(
        REQUEST,
        (
            _Request(load, number, sample, sample.usage or Usage(), sample.invalid)
            for load in _loads(comparison)
            for number, sample in enumerate(comparison.run.samples.get(load.load.id, ()), 1)
        ),
    )


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9


# ── arms ────────────────────────────────────────────────────────────────────────────────────


def _arm_sheet(comparison: Comparison) -> Iterator[str]:
    """The rows of the table with what `--json` tells of each; bounds stand beside their value."""
    run = {"run": comparison.run.folder.name, "state": comparison.state.word}
    rows = [{**run, **_flat(row_json(row))} for row in all_rows(comparison)]
    return _written(list(rows[0]), (list(row.values()) for row in rows))


def _flat(facts: Mapping[str, Any]) -> dict[str, object]:
    line: dict[str, object] = {}
    for name, value in facts.items():
        if name in BETWEEN:
            ends = {"value": "", "low": "_low", "high": "_high"}
            line |= {name + end: value and value[key] for key, end in ends.items()}
        elif isinstance(value, Mapping):
            line[name] = "; ".join(f"{times} × {text}" for text, times in value.items())
        else:
            line[name] = "; ".join(value) if isinstance(value, list) else value
    return line


SHEETS: Mapping[str, Callable[[Comparison], Iterator[str]]] = {
    "loads": _load_sheet,
    "samples": _sample_sheet,
    "arms": _arm_sheet,
}
