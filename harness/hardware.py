"""What the hardware itself tells of a run: how the GPUs worked, who saw how much of their memory, joules a token.

Each of these is a witness beside the engine. Where none is heard, the report says "–" and goes on.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from harness import energy, preflight
from harness.compare import Comparison, Row
from harness.gpu import Gpu
from harness.telemetry import Telemetry
from harness.words import NONE, code, markdown_table, memory, number, percent, span, spread

NEAR = 0.05  # of NVML: what is expected may be off by so much
WITNESSES = (
    "Expected is what was predicted from the file before anything was loaded (where the engine chose, of the nearest "
    "placement), and what the driver took for itself on the other arms. NVML counts all that device memory grew by."
)
ENERGY = (
    "By the counter of the GPUs alone, from the first token of an answer to its last; the rest of the machine is not "
    "in it. Intervals are over loads; the error is one standard deviation of what the counter tells. The sensor may be "
    "off by several per cent besides, for all arms alike."
)
TAKES = (
    f"windows of {energy.WINDOW_S:.0f} s on an arm, together, and a counter that covers them all; take longer answers, "
    "more requests or more blocks."
)


# ── how the GPUs worked ─────────────────────────────────────────────────────────────────────


def watched(comparison: Comparison) -> list[tuple[str, str]]:
    """What was seen from beside while loads ran, as checks and results."""
    seen = [load.telemetry for load in comparison.run.loads if load.stage == "block" and load.telemetry is not None]
    slow = list(dict.fromkeys(_slow(seen, comparison.header.machine.gpus)))
    return [
        ("GPUs while loads ran", ", ".join(_worked(seen)) or NONE),
        ("GPUs below their clock", "; ".join([*_throttled(seen), *slow]) or _never(seen)),
        ("CPU time of watching", _watching(seen)),
    ]


def _worked(seen: Sequence[Telemetry]) -> Iterator[str]:
    shares = [100 * each.gpu_busy for each in seen if each.gpu_busy is not None]
    watts = [each.gpu_power_w for each in seen if each.gpu_power_w is not None]
    heat = [each.gpu_celsius for each in seen if each.gpu_celsius is not None]
    clocks = [each.gpu_clock_mhz for each in seen if each.gpu_clock_mhz is not None]
    yield from [f"busy {span(shares)} % of the time"] if shares else []
    yield from [f"{span(watts)} W"] if watts else []
    yield from [f"{max(heat):.0f} °C at most"] if heat else []
    yield from [f"{span(clocks)} MHz when busy"] if clocks else []
    links = {(each.link_generation, each.lanes) for each in seen} - {(None, None)}
    yield from (f"PCIe {generation or NONE} × {lanes or NONE}" for generation, lanes in sorted(links, key=str))


def _throttled(seen: Sequence[Telemetry]) -> Iterator[str]:
    for reason in sorted({reason for each in seen for reason in each.throttles or ()}):
        often = sum(reason in (each.throttles or ()) for each in seen)
        yield f"{reason} in {often} of {len(seen)} loads"


def _slow(seen: Sequence[Telemetry], cards: Sequence[Gpu]) -> Iterator[str]:
    """Cards that worked far below their highest clock in most loads. Of unlike cards the driver's clocks are a mix."""
    clocks = [each.gpu_clock_mhz for each in seen if each.gpu_clock_mhz is not None]
    for gpu in cards if clocks and len({each.clock_mhz for each in cards}) == 1 else ():
        if text := preflight.low_clock(statistics.median(clocks), gpu):
            yield text


def _never(seen: Sequence[Telemetry]) -> str:
    return "never" if any(each.throttles is not None for each in seen) else NONE


def _watching(seen: Sequence[Telemetry]) -> str:
    shares = [each.watch_share for each in seen if each.watch_share is not None]
    return f"{percent(round(max(shares), 4))} of a core at most" if shares else NONE


# ── who saw how much memory ─────────────────────────────────────────────────────────────────


def witnesses(comparison: Comparison) -> list[str]:
    """Device memory by prediction, by the engine and by the driver; nothing where the driver tells nothing."""
    rows = [row for row in comparison.rows if row.status.alias_of is None and row.vram_bytes]
    if not rows:
        return []
    cells = [
        (
            row.arm,
            memory(row.planned_vram_bytes) + ("" if row.predicted or row.planned_vram_bytes is None else " (nearest)"),
            memory(row.reported_vram_bytes),
            memory(row.driver_bytes),
            memory(row.expected_vram_bytes),
            memory(row.vram_bytes),
            _off(row),
            memory(row.process_vram_bytes),
        )
        for row in rows
    ]
    headers = ("arm", "predicted", "engine tells", "driver's own", "expected", "NVML", "off NVML", "its processes")
    far = [code(row.arm) for row in rows if (off := _share_off(row)) is not None and abs(off) > NEAR]
    said = [f"More than {percent(NEAR)} off: {', '.join(far)}."] if far else []
    return ["### Who saw how much device memory", markdown_table(headers, cells), WITNESSES, *said]


def _share_off(row: Row) -> float | None:
    if row.expected_vram_bytes is None or not row.vram_bytes:
        return None
    return row.expected_vram_bytes / row.vram_bytes - 1


def _off(row: Row) -> str:
    off = _share_off(row)
    return NONE if off is None else f"{100 * off:+.1f} %".replace("-", "−")


# ── joules ──────────────────────────────────────────────────────────────────────────────────


def joules(comparison: Comparison) -> list[str]:
    """Energy of a decoded token, arm by arm, or why there is none."""
    rows = [row for row in comparison.rows if row.gpu_energy is not None]
    if not rows:
        return [f"## Energy\n\nJoules a token: {NONE}. {_why_not(comparison)}"]
    cells = [
        (
            row.arm,
            spread(row.gpu_j),
            number(row.gpu_energy.above_idle_j if row.gpu_energy else None),
            "1" if row.is_reference else spread(row.gpu_j_ratio),
            number(row.gpu_energy.watts if row.gpu_energy else None, " W"),
            number(row.gpu_energy.error_j if row.gpu_energy else None),
            number(row.gpu_energy.seconds if row.gpu_energy else None, " s"),
            number(row.cpu_energy.joules if row.cpu_energy else None),
        )
        for row in rows
    ]
    headers = ("arm", "J a token", "above idle", "against the reference", "power", "error", "over", "CPU, J a token")
    without = [code(row.arm) for row in comparison.rows if row.loads and row.gpu_energy is None]
    said = [f"No figure for {', '.join(without)}: {TAKES}"] if without else []
    return ["## Energy", markdown_table(headers, cells), *said, ENERGY, *_rest(comparison)]


def _rest(comparison: Comparison) -> list[str]:
    idle = comparison.run.rest_gpu_w
    if not idle:
        return ["What the GPUs draw at rest was not measured."]
    return [f"At rest the GPUs drew {' W, then '.join(f'{watts:.1f}' for watts in idle)} W."]


def _why_not(comparison: Comparison) -> str:
    """In one sentence."""
    judged = [load for load in comparison.run.loads if load.stage == "block" and load.failure is None]
    known = [load.gpu_energy for load in judged if load.gpu_energy is not None]
    if not known and not comparison.run.rest_gpu_w:
        return "No counter of a GPU's energy could be read here."
    return f"That takes {TAKES}"
