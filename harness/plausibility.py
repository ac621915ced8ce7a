"""Can it be? One arm against memory and physics: how it sits on the device, how fast it may be, what contradicts it.

The bounds need bandwidth: of the host by the probe in the header, of a GPU by its driver. Where the
engine chose the placement, the nearest one of ours stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness import physics, placement
from harness.contract import Realised
from harness.physics import Band, Flag
from harness.placement import Cell, Fit
from harness.plan import Status
from harness.record import Contender, Header, LoadRecord
from harness.words import number

Loads = Sequence[LoadRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plausibility:
    """Of one arm. `contradictions` are sentences on what the driver or the system saw otherwise."""

    fit: Fit
    band: Band
    flag: Flag | None = None
    contradictions: tuple[str, ...] = ()


def check(header: Header, contender: Contender, loads: Loads, tps: float | None) -> Plausibility:
    """An arm by the loads that are judged; `tps` is its decode speed, None if it has none."""
    predicted = contender.predicted or contender.like
    stand_in = contender.settings.stand_in_bytes is not None
    band = physics.band(
        predicted,
        physics.bandwidth(header.machine, header.host_probe),
        host_cache_bytes=header.machine.last_level_cache_bytes,
        stand_in=stand_in,
    )
    flag = None if tps is None else band.flag(tps)
    refused = contender.status.word is Status.DOES_NOT_FIT
    fit = Fit(Cell.UNKNOWN)
    if loads or refused:
        fit = placement.sits(
            predicted,
            device_bytes(header, contender),
            loaded=not refused,
            free_bytes=_least(_free_bytes(header, contender, each) for each in loads),
            major_faults=most(each.telemetry.major_faults for each in loads if each.telemetry),
            swap_growth_bytes=most(each.telemetry.swap_growth_bytes for each in loads if each.telemetry),
            too_slow=flag is Flag.TOO_SLOW,
        )
    found = (_contradiction(each) for each in loads)
    return Plausibility(
        fit=fit,
        band=band,
        flag=flag,
        contradictions=tuple(dict.fromkeys(each for each in found if each)),
    )


def sentence(arm: str, tps: float, band: Band, flag: Flag) -> str:
    """What is wrong with a speed outside its band."""
    if flag is Flag.IMPOSSIBLE:
        return (
            f"{arm} is IMPOSSIBLE: {number(tps)} tok/s where the bytes of one token allow "
            f"{number(band.ceiling_tps)} at most, so a count, a clock or a placement is not what it seems"
        )
    return (
        f"{arm} is TOO_SLOW: {number(tps)} tok/s where {number(band.floor_tps)} is the least of this memory, so a "
        "part of it lies elsewhere, or something holds it up"
    )


def device_bytes(header: Header, contender: Contender) -> int | None:
    """Device memory in all; 0 without a device, None if nobody tells."""
    if contender.settings.stand_in_bytes is not None:
        return contender.settings.stand_in_bytes
    if contender.settings.device_limit_bytes is not None:
        return contender.settings.device_limit_bytes
    devices = contender.engine.devices if contender.engine else ()
    if contender.settings.rpc:
        return None
    if not devices and not header.machine.gpus:
        return 0 if contender.engine is not None else None
    sizes = [each.total_bytes for each in devices]
    if (None in sizes and len(devices) == len(header.machine.gpus)) or not devices:
        sizes = [gpu.memory_bytes for gpu in header.machine.gpus]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _free_bytes(header: Header, contender: Contender, load: LoadRecord) -> int | None:
    """Of the device, at the fullest moment of a load. A stand-in is as full as the engine says it filled it."""
    total = device_bytes(header, contender)
    if total is None:
        return None
    if contender.settings.stand_in_bytes is not None:
        buffers = load.realised.buffers if load.realised else None
        return None if buffers is None else total - sum(each.bytes for each in buffers if not each.on_host)
    if contender.engine is not None and len(contender.engine.devices) not in (0, len(header.machine.gpus)):
        return None  # the driver tells of GPUs that this engine does not see
    if load.telemetry is not None and load.telemetry.gpu_free_bytes is not None:
        return load.telemetry.gpu_free_bytes
    before = load.quiet.gpu_used_bytes if load.quiet else None
    grown = load.telemetry.vram_bytes if load.telemetry else None
    return None if before is None or grown is None else total - before - grown


def _contradiction(load: LoadRecord) -> str | None:
    realised: Realised | None = load.realised
    if realised is None or load.telemetry is None:
        return None
    return placement.cross_check(realised, load.telemetry.vram_bytes, load.telemetry.peak_rss_bytes)


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def most(values: Iterable[int | None]) -> int | None:
    """Of those that are known."""
    return max((value for value in values if value is not None), default=None)
