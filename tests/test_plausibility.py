"""An arm against memory and physics: what cannot be is said, and what is unknown accuses nobody."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from played_run import MACHINE, OTHER, REFERENCE, a_header, contender, engine, played

from harness.answer import answer
from harness.compare import Comparison, Row, compare
from harness.contract import Buffer, Device
from harness.physics import HostProbe
from harness.placement import Cell, Predicted
from harness.plan import Status
from harness.record import Header
from harness.render import report
from harness.telemetry import Quiet, Telemetry

GIB = 1 << 30
CARD = dataclasses.replace(
    MACHINE.gpus[0], memory_bytes=12 * GIB, bus_width_bits=192, memory_clock_mhz=10_501
)  # 504 GB/s
THIS = dataclasses.replace(MACHINE, gpus=(CARD,), last_level_cache_bytes=32 << 20)
PROBE = HostProbe(kernels={"max": 60e9, "sum": 55e9, "or": 50e9, "add": 64e9}, array_bytes=GIB, threads=8, seconds=4.0)


def placed(host: int, device: int, *, on_device: int = 8 * GIB) -> Predicted:
    """A placement whose token reads so many bytes of host and device."""
    return Predicted(
        placement_class=f"{host}/{device}",
        host_bytes=10 * GIB,
        device_bytes=on_device,
        bytes_per_token_host=host,
        bytes_per_token_device=device,
        host_weights_bytes=10 * GIB,
        device_weights_bytes=on_device,
    )


EXPERTS_ON_HOST, MIXED = placed(2 * GIB, GIB // 2), placed(GIB, 3 * GIB // 2)


def header(other: Predicted | None = EXPERTS_ON_HOST, **changes: Any) -> Header:
    arms = contender(REFERENCE, predicted=MIXED, realised=None), contender(OTHER, predicted=other, realised=None)
    given: dict[str, Any] = {"machine": THIS, "host_probe": PROBE}
    return dataclasses.replace(a_header(*arms), **(given | changes))


def ran(found: Header, tps: float, *, beside: dict[str, Any] | None = None, grown: int = 9 * GIB) -> Comparison:
    """A run in which the second arm decodes at `tps`, and each load was seen so from beside."""
    run = played(found, {REFERENCE: 20.0, OTHER: tps})
    seen = Telemetry(seconds=50.0, vram_bytes=grown, **(beside or {}))
    quiet = Quiet(0.0, 0.0, True, gpu_used_bytes=GIB)
    return compare(
        dataclasses.replace(
            run, loads=tuple(dataclasses.replace(each, telemetry=seen, quiet=quiet) for each in run.loads)
        )
    )


def row(comparison: Comparison) -> Row:
    return comparison.row(OTHER)


def test_an_honest_speed_is_a_share_of_what_memory_allows() -> None:
    comparison = ran(header(), 18.0)
    found = row(comparison)
    assert found.flags == ()
    assert found.ceiling_tps == pytest.approx(1 / (2 * GIB / (1.1 * 64e9) + GIB / 2 / 504e9), rel=0.01)
    assert 0.3 < (found.share or 0) < 0.9
    assert comparison.state.word == "GREEN"
    section = report(comparison).partition("## What memory allows")[2].partition("\n## ")[0]
    assert f"{100 * (found.share or 0):.0f} %" in section


@pytest.mark.parametrize(
    ("tps", "flag"), [(1e6, "IMPOSSIBLE"), (90.0, "IMPOSSIBLE"), (1.5, "TOO_SLOW")], ids=["a million", "3 ×", "0.1 ×"]
)
def test_a_speed_that_cannot_be_is_flagged_in_the_row_and_the_state_and_keeps_its_number(tps: float, flag: str) -> None:
    comparison = ran(header(), tps)
    found = row(comparison)
    assert [each.value for each in found.flags] == [flag]
    assert comparison.state.word == "AMBER"
    assert any(reason.startswith(f"{OTHER} is {flag}: ") for reason in comparison.state.reasons)
    assert found.decode_tps is not None
    assert found.samples > 0
    assert found.invalid_samples == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"host_probe": None, "machine": dataclasses.replace(THIS, gpus=())},
        {"machine": dataclasses.replace(THIS, last_level_cache_bytes=2 * GIB, gpus=())},
    ],
    ids=["bandwidth unknown", "all may come from a cache"],
)
def test_where_nothing_bounds_nothing_is_flagged_and_the_report_says_why(changes: dict[str, Any]) -> None:
    comparison = ran(header(placed(2 * GIB, 0, on_device=0), **changes), 1e5)
    found = row(comparison)
    assert found.flags == ()
    assert found.ceiling_tps is None
    assert found.unbounded is not None
    assert found.unbounded in report(comparison)


def test_the_nearest_placement_bounds_an_arm_that_the_engine_placed() -> None:
    chosen = contender(OTHER, predicted=None, like=EXPERTS_ON_HOST, realised=None)
    found = dataclasses.replace(header(), contenders=(header().contenders[0], chosen))
    assert row(ran(found, 18.0)).ceiling_tps == row(ran(header(), 18.0)).ceiling_tps


@pytest.mark.parametrize(
    ("on_device", "grown", "beside", "cell"),
    [
        (8 * GIB, 9 * GIB, {}, Cell.FITS),
        (8 * GIB, 11 * GIB - (100 << 20), {}, Cell.TIGHT),
        (13 * GIB, 9 * GIB, {}, Cell.SPILLED),
        (8 * GIB, 9 * GIB, {"swap_growth_bytes": GIB}, Cell.SPILLED),
        (8 * GIB, 9 * GIB, {"major_faults": 10**6}, Cell.SPILLED),
    ],
    ids=["room left", "nearly full", "more than there is", "swapped", "read again and again"],
)
def test_a_row_says_how_it_sat_in_memory(on_device: int, grown: int, beside: dict[str, Any], cell: Cell) -> None:
    comparison = ran(header(placed(2 * GIB, GIB // 2, on_device=on_device)), 18.0, grown=grown, beside=beside)
    found = row(comparison)
    assert found.cell is cell
    assert (found.cell_reason is None) is (cell is Cell.FITS)
    if found.cell_reason:
        assert found.cell_reason in report(comparison).replace("\\", "")


def test_memory_counts_only_on_the_devices_that_the_engine_sees() -> None:
    seen = (Device("CUDA0", total_bytes=12 * GIB),)
    two = dataclasses.replace(THIS, gpus=(CARD, CARD))
    arm = contender(
        OTHER, predicted=placed(2 * GIB, GIB // 2, on_device=13 * GIB), realised=None, engine=engine(devices=seen)
    )
    found = dataclasses.replace(header(machine=two), contenders=(header().contenders[0], arm))
    assert row(ran(found, 18.0)).cell is Cell.SPILLED


def test_a_speed_that_cannot_be_is_compared_with_nothing() -> None:
    comparison = ran(header(), 1e6)
    contrast = row(comparison).contrast
    assert contrast is not None
    assert contrast.word == "NOT_COMPARABLE"
    assert "decodes at" not in answer(comparison)


def test_an_arm_without_loads_says_nothing_of_memory() -> None:
    lost = dataclasses.replace(contender(OTHER).status, word=Status.CRASHED)
    found = a_header(
        contender(REFERENCE), dataclasses.replace(contender(OTHER, predicted=EXPERTS_ON_HOST), status=lost)
    )
    assert row(compare(played(found))).cell is Cell.UNKNOWN


@pytest.mark.parametrize("kernels", [{}, {"max": -1.0, "sum": 0.0}])
def test_a_bandwidth_that_is_none_bounds_nothing(kernels: dict[str, float]) -> None:
    found = ran(header(host_probe=dataclasses.replace(PROBE, kernels=kernels)), 18.0)
    assert "0.0 GB/s" not in report(found)
    assert row(found).share is None


def test_a_speed_below_the_floor_on_a_full_card_is_a_spill_that_the_sizes_hide() -> None:
    assert row(ran(header(), 1.5, grown=10 * GIB + (200 << 20))).cell is Cell.SPILLED


def test_an_arm_that_found_no_room_does_not_fit() -> None:
    refused = dataclasses.replace(
        contender(OTHER, predicted=EXPERTS_ON_HOST),
        status=dataclasses.replace(contender(OTHER).status, word=Status.DOES_NOT_FIT),
    )
    found = a_header(contender(REFERENCE), refused)
    assert row(compare(played(found))).cell is Cell.DOES_NOT_FIT


def test_memory_that_the_driver_did_not_see_makes_the_run_amber() -> None:
    found = header()
    run = played(found, {REFERENCE: 20.0, OTHER: 18.0})
    claimed = contender(OTHER).realised
    assert claimed is not None
    buffers = Buffer("CUDA0", "weights", 8 * GIB, on_host=False), Buffer("CPU", "weights", 10 * GIB, on_host=True)
    claimed = dataclasses.replace(claimed, buffers=buffers)
    loads = tuple(
        dataclasses.replace(each, realised=claimed, telemetry=Telemetry(seconds=50.0, vram_bytes=GIB))
        for each in run.loads
    )
    comparison = compare(dataclasses.replace(run, loads=loads))
    assert any("a part of it is not on the device" in reason for reason in comparison.state.reasons)


def test_one_load_that_swapped_is_enough() -> None:
    found = header()
    run = played(found, {REFERENCE: 20.0, OTHER: 18.0})
    swapped = Telemetry(seconds=50.0, vram_bytes=9 * GIB, swap_growth_bytes=GIB)
    calm = dataclasses.replace(swapped, swap_growth_bytes=0)
    loads = tuple(dataclasses.replace(each, telemetry=swapped if each.block == 2 else calm) for each in run.loads)
    assert row(compare(dataclasses.replace(run, loads=loads))).cell is Cell.SPILLED


def test_a_stand_in_is_as_full_as_all_its_buffers() -> None:
    """Weights alone leave room; the context and what is computed in do not."""
    settings = dataclasses.replace(contender(OTHER).settings, stand_in_bytes=10 * GIB)
    realised = contender(OTHER).realised
    assert realised is not None
    held = {"weights": 8 * GIB, "kv": GIB, "compute": 5 * GIB // 4}
    buffers = tuple(Buffer("RPC0", kind, size, on_host=False) for kind, size in held.items())
    realised = dataclasses.replace(realised, buffers=(*buffers, Buffer("CPU", "weights", 10 * GIB, on_host=True)))
    predicted = dataclasses.replace(placed(2 * GIB, GIB // 2, on_device=9 * GIB), device_weights_bytes=8 * GIB)
    arm = contender(OTHER, predicted=predicted, realised=realised, settings=settings)
    found = dataclasses.replace(header(), contenders=(header().contenders[0], arm))
    run = played(found, {REFERENCE: 20.0, OTHER: 18.0})
    loads = tuple(dataclasses.replace(each, realised=realised) if each.arm == OTHER else each for each in run.loads)
    comparison = compare(dataclasses.replace(run, loads=loads))
    assert row(comparison).cell is Cell.SPILLED
    assert row(comparison).cell_reason == "10.2 GiB of 10.0 GiB of device memory are taken"


def test_the_memory_of_other_machines_is_not_known() -> None:
    settings = dataclasses.replace(contender(OTHER).settings, rpc=("box:50052",))
    arm = contender(OTHER, predicted=EXPERTS_ON_HOST, realised=None, settings=settings)
    found = dataclasses.replace(header(), contenders=(header().contenders[0], arm))
    assert row(ran(found, 18.0, grown=0)).cell is Cell.UNKNOWN
