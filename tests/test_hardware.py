"""What a report says of the GPUs: how they worked, who saw their memory, joules a token; and that it may be nothing."""

from __future__ import annotations

import dataclasses
import json
import re
import time
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fake_nvml
import pytest
from fake_nvml import GIB, card
from played_run import ARMS, GPU, MACHINE, OTHER, REFERENCE, a_header, contender, played

from harness import facts, hardware, nvml, record, render, terminal
from harness.compare import Comparison, compare
from harness.contract import Buffer, Realised
from harness.energy import Idle, Spent
from harness.options import Options
from harness.placement import Predicted
from harness.record import LoadRecord, Sitting
from harness.telemetry import Telemetry
from harness.testing import engines
from harness.testing.script import Script
from harness.walk import duel

MIB = 1 << 20
DRIVER = 700 * MIB
JOULES = {REFERENCE: 2.0, OTHER: 3.0}  # a token


def predicted(device_mib: int, compute_mib: int = 200) -> Predicted:
    return Predicted(
        placement_class=str(device_mib), host_bytes=GIB, device_bytes=device_mib * MIB, bytes_per_token_host=1,
        bytes_per_token_device=1, host_weights_bytes=GIB, device_weights_bytes=device_mib * MIB,
        compute_bytes=compute_mib * MIB,
    )  # fmt: skip


def placed(arm: str, device_mib: int, **changed: Any) -> Any:
    """A contender whose engine allocates what was predicted."""
    buffers = (
        Buffer("CUDA0", "weights", device_mib * MIB, on_host=False),
        Buffer("CUDA0", "compute", 200 * MIB, on_host=False),
        Buffer("CUDA_Host", "compute", 30 * MIB, on_host=True),
    )
    realised = Realised(engine="llama.cpp b1", argv=("x",), pids=(1,), weights=None, buffers=buffers)
    return contender(arm, **({"predicted": predicted(device_mib), "realised": realised} | changed))


def seen(vram_mib: int, **changed: Any) -> Telemetry:
    told: dict[str, Any] = {
        "seconds": 20.0, "vram_bytes": vram_mib * MIB, "gpu_busy": 0.8, "gpu_power_w": 210.0, "gpu_celsius": 61.0,
        "gpu_clock_mhz": 2500.0, "link_generation": 4, "lanes": 16, "throttles": (), "watch_share": 0.0042,
    }  # fmt: skip
    return Telemetry(**(told | changed))


def a_run(sizes: dict[str, int], *, watts: float = 50.0, window_s: float = 12.0, **changed: Any) -> Comparison:
    """Every load took its predicted memory and the driver's share, and `JOULES` a token over `window_s` seconds."""
    header = dataclasses.replace(
        a_header(*(placed(arm, size) for arm, size in sizes.items())),
        machine=dataclasses.replace(MACHINE, gpus=(dataclasses.replace(GPU, clock_mhz=2610),)),
    )
    run = played(header)
    steps = 600

    def watched(load: LoadRecord) -> LoadRecord:
        spent = Spent(JOULES[load.arm] * steps * (1 + 0.01 * (load.block % 2)), window_s, steps, 8.0)
        telemetry = seen(sizes[load.arm] + 200 + 700, **changed)
        return dataclasses.replace(load, telemetry=telemetry, gpu_energy=spent)

    idle = (Idle(started_unix_s=1.0, seconds=10.0, gpu_w=watts), Idle(started_unix_s=9.0, seconds=10.0, gpu_w=watts))
    return compare(dataclasses.replace(run, loads=tuple(map(watched, run.loads)), idle=idle))


SIZES = {REFERENCE: 6000, OTHER: 1200}


def narrow(parts: Iterable[str]) -> str:
    """Without what pads the cells of a table."""
    return re.sub(" +", " ", "\n\n".join(parts))


# ── who saw how much memory ─────────────────────────────────────────────────────────────────


def test_what_was_expected_takes_the_drivers_share_from_the_other_arms() -> None:
    found = a_run(SIZES)

    for row in found.rows:
        assert row.driver_bytes == DRIVER
        assert row.planned_vram_bytes == (SIZES[row.arm] + 200) * MIB
        assert row.reported_vram_bytes == row.planned_vram_bytes
        assert row.expected_vram_bytes == row.vram_bytes
    assert "| +0.0 % |" in narrow(hardware.witnesses(found))


def test_an_arm_that_takes_more_than_expected_is_named() -> None:
    found = a_run(SIZES)
    swollen = tuple(
        dataclasses.replace(row, vram_bytes=row.vram_bytes + 500 * MIB) if row.arm == OTHER else row
        for row in found.rows
        if row.vram_bytes is not None
    )

    said = hardware.witnesses(dataclasses.replace(found, rows=swollen))

    assert said[-1] == f"More than 5 % off: `{OTHER}`."


def test_one_arm_alone_has_nothing_to_be_expected_by() -> None:
    (row,) = a_run({REFERENCE: 6000}).rows

    assert (row.driver_bytes, row.expected_vram_bytes) == (DRIVER, None)


def test_where_no_driver_tells_there_is_no_table_of_witnesses() -> None:
    found = compare(played(a_header()))

    assert hardware.witnesses(found) == []
    assert all(row.expected_vram_bytes is None for row in found.rows)


# ── joules ──────────────────────────────────────────────────────────────────────────────────


def test_joules_a_token_stand_in_report_table_and_json() -> None:
    found = a_run(SIZES)

    section = narrow(hardware.joules(found))
    assert section in narrow([render.report(found)])
    assert "| llama-cpp@cpu-moe | 3.015 (" in section
    assert "| 1.500 (1.500–1.500) |" in section
    assert "At rest the GPUs drew 50.0 W, then 50.0 W." in section
    assert "J/token" in terminal.table(found, 200)
    told = facts.as_json(found)["arms"][1]
    assert told["energy_j_per_token"] is not None
    assert told["energy_j_per_token"]["value"] == pytest.approx(3.015, rel=0.001)
    assert told["energy_above_idle_j_per_token"] == pytest.approx(3.015 - 50.0 * 12 / 600, rel=0.001)


def test_windows_of_less_than_ten_seconds_in_all_give_no_joules_and_say_why() -> None:
    found = a_run(SIZES, window_s=1.0)

    assert "Joules a token: –. That takes windows of 10 s" in "\n".join(hardware.joules(found))
    assert "J/token" not in terminal.table(found, 200)
    assert all(row.gpu_j is None for row in found.rows)


def test_an_arm_without_a_figure_of_energy_is_named_beside_those_that_have_one() -> None:
    run = a_run(SIZES).run
    loads = tuple(dataclasses.replace(each, gpu_energy=None) if each.arm == OTHER else each for each in run.loads)

    section = "\n".join(hardware.joules(compare(dataclasses.replace(run, loads=loads))))

    assert f"No figure for `{OTHER}`: windows of 10 s" in section


def test_a_counter_that_was_read_at_rest_is_not_said_to_be_none() -> None:
    run = a_run(SIZES).run
    loads = tuple(dataclasses.replace(each, gpu_energy=None) for each in run.loads)

    assert "That takes windows of 10 s" in "\n".join(hardware.joules(compare(dataclasses.replace(run, loads=loads))))


def test_a_machine_that_draws_more_at_rest_afterwards_is_a_doubt() -> None:
    run = a_run(SIZES).run
    warmer = (run.idle[0], dataclasses.replace(run.idle[1], gpu_w=56.0))

    doubts = compare(dataclasses.replace(run, idle=warmer)).state.reasons

    assert "At rest the GPUs drew 12 % more at one look than at another." in doubts


def test_memory_that_others_held_is_a_doubt() -> None:
    run = a_run(SIZES).run
    sittings = (
        Sitting(started_unix_s=1.0),
        Sitting(started_unix_s=2.0, foreign_gpu=("x (pid 7) holds it as it went on",)),
    )

    doubts = compare(dataclasses.replace(run, sittings=sittings)).state.reasons

    assert "X (pid 7) holds it as it went on." in doubts


# ── how they worked ─────────────────────────────────────────────────────────────────────────


def test_how_the_gpus_worked_is_told_with_what_watching_cost() -> None:
    told = dict(hardware.watched(a_run(SIZES)))

    assert (
        told["GPUs while loads ran"] == "busy 80 % of the time, 210 W, 61 °C at most, 2500 MHz when busy, PCIe 4 × 16"
    )
    assert told["GPUs below their clock"] == "never"
    assert told["CPU time of watching"] == "0.4 % of a core at most"


def test_throttling_and_low_clocks_are_told() -> None:
    told = dict(hardware.watched(a_run(SIZES, throttles=("power cap",), gpu_clock_mhz=1200.0)))

    assert (
        told["GPUs below their clock"] == "power cap in 18 of 18 loads; a card ran at 1200 of 2610 MHz while it worked"
    )


def test_without_a_gpu_everything_is_a_dash() -> None:
    found = compare(played(a_header(*map(contender, ARMS))))

    assert dict(hardware.watched(found)) == {
        "GPUs while loads ran": "–", "GPUs below their clock": "–", "CPU time of watching": "–",
    }  # fmt: skip
    assert hardware.joules(found) == [
        "## Energy\n\nJoules a token: –. No counter of a GPU's energy could be read here."
    ]


# ── a whole run beside a driver that answers as told ────────────────────────────────────────


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_nvml.remove(monkeypatch)
    monkeypatch.delenv(nvml.VISIBLE, raising=False)
    yield
    monkeypatch.undo()
    fake_nvml.forget()


def options(model: Path, folder: Path) -> Options:
    return Options(
        model=str(model), arms="ollama,llama-cpp", preset="quick", no_wait=True, out=str(folder / "runs"),
        out_tokens=32, prompt_tokens=64, context=512,
    )  # fmt: skip


def test_a_counter_of_200_watts_is_read_as_such_while_answers_come(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    fake_nvml.install(
        monkeypatch,
        card(
            TotalEnergyConsumption=lambda: 1 + int(10 * (time.monotonic() - began)) * 20_000,
            UtilizationRates=types.SimpleNamespace(gpu=90),
            PowerUsage=200_000,
        ),
    )
    with engines.fake(tmp_path, Script(itl_s=0.03)):
        found = duel(options(model, tmp_path), lambda _: None)

    blocks = [load for load in found.run.loads if load.stage == "block"]
    assert blocks
    for load in blocks:
        assert load.gpu_energy is not None
        assert load.gpu_energy.watts == pytest.approx(200.0, rel=0.2)
        assert load.telemetry is not None
        assert load.telemetry.gpu_power_w == pytest.approx(200.0)
        assert load.telemetry.watch_share is not None
    lines = [json.loads(line) for line in (found.run.folder / record.LINES).read_text().splitlines()]
    assert all("gpu_energy" in line for line in lines if line["kind"] == "load")


def test_a_gpu_that_is_lost_in_the_middle_of_a_run_costs_its_figures_and_nothing_else(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = card(TotalEnergyConsumption=1000, PowerUsage=90_000)
    fake_nvml.install(monkeypatch, answers)

    def lose(progress: Any) -> None:
        if progress.block == 2:
            for name in answers:
                answers[name] = fake_nvml.Refused("GPU is lost")

    with engines.fake(tmp_path, Script(itl_s=0.002)):
        found = duel(options(model, tmp_path), lose)

    last = found.run.loads[-1].telemetry
    assert found.blocks_run == 2
    assert last is not None
    assert (last.gpu_power_w, last.gpu_free_bytes) == (None, None)
    assert "Joules a token: –" in render.report(found)
