"""What a load finds as it starts: files in the page cache where there is room, and a chip as hot as before."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, BinaryIO

import fake_nvml
import psutil
import pytest
import short_run
from fake_nvml import card

from harness import gates, gpus, machine, record, render, telemetry, words
from harness.compare import Comparison
from harness.display import quiet
from harness.gates import PageCache, Temperatures, Thermal
from harness.options import Options
from harness.probe import Progress
from harness.record import LoadRecord
from harness.run import outcomes_of
from harness.telemetry import Quiet, Settled
from harness.testing import engines
from harness.testing.script import Script
from harness.walk import duel

GIB, MIB = 1 << 30, 1 << 20
LOAD = LoadRecord(id="1", stage="block", label="A", arm="ollama", block=1, started_unix_s=1.0, ended_unix_s=2.0)


class Clock:
    """Stands still but for our own sleeping."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


# ── the page cache ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("file_gib", "host_gib", "available_gib", "allowed"),
    [
        (20, 2, 32, True),
        (20, 2.5, 32, False),  # 22.5 of 22.4
        (20, 16, 64, True),
        (20, None, 64, True),  # unknown: it may be all of the file
        (20, None, 32, False),
        (7, 0, 10, False),  # 70 % exactly is no longer below it
    ],
)
def test_files_are_read_ahead_only_where_they_and_the_engine_fit_together(
    file_gib: float, host_gib: float | None, available_gib: float, allowed: bool
) -> None:
    host = None if host_gib is None else int(host_gib * GIB)

    assert (gates.no_room(int(file_gib * GIB), host, int(available_gib * GIB)) is None) is allowed


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Two parts of a model, the second of them over more than one window."""
    paths = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    paths[0].write_bytes(b"a" * (3 * MIB))
    with paths[1].open("wb") as file:
        file.truncate(gates.WINDOW_BYTES + 5000)
    return paths


SHARDS_BYTES = 3 * MIB + gates.WINDOW_BYTES + 5000


class Memory:
    """A page cache that holds what is named, and then what was read; `blind`: it does not tell."""

    def __init__(self, held: dict[tuple[str, int], float], *, blind: bool = False) -> None:
        self.held, self.blind, self.asked = held, blind, []  # type: ignore[var-annotated]

    def __call__(self, file: BinaryIO, start: int, length: int) -> int | None:
        key = (Path(str(file.name)).name, start)
        self.asked.append(key)
        share = self.held.get(key, 0.0)
        self.held[key] = 1.0  # whoever is asked first is read next
        return None if self.blind else int(share * length)


def test_only_what_is_not_in_memory_is_read(shards: list[Path]) -> None:
    there = {(shards[0].name, 0): 1.0, (shards[1].name, 0): 0.5}
    said: list[str] = []

    found = gates.read_ahead(shards, 0, GIB, resident=Memory(there), say=said.append, clock=lambda: 7.0)

    assert found == PageCache(0.0, gates.WINDOW_BYTES + 5000, 1.0)
    assert said == ["reading the model into memory"]


def test_a_model_that_is_in_memory_is_not_read_again(shards: list[Path]) -> None:
    there = {(shards[0].name, 0): 1.0, (shards[1].name, 0): 1.0, (shards[1].name, gates.WINDOW_BYTES): 1.0}

    assert gates.read_ahead(shards, 0, GIB, resident=Memory(there)).read_bytes == 0


def test_where_the_system_does_not_tell_all_is_read_and_no_share_is_claimed(shards: list[Path]) -> None:
    found = gates.read_ahead(shards, 0, GIB, resident=Memory({}, blind=True))

    assert (found.read_bytes, found.resident, found.skipped) == (SHARDS_BYTES, None, None)


def test_without_room_nothing_is_read_and_the_record_says_why(shards: list[Path]) -> None:
    half = {(shards[0].name, 0): 1.0}

    found = gates.read_ahead(shards, 100 * MIB, 150 * MIB, resident=Memory(half))

    assert found.read_bytes == 0
    assert found.resident == pytest.approx(3 * MIB / SHARDS_BYTES)
    assert found.skipped == "file and engine need 119 MiB, more than 70% of the 150 MiB that are available"


def test_a_file_that_cannot_be_read_is_told_and_does_not_end_the_run(tmp_path: Path) -> None:
    found = gates.read_ahead([tmp_path / "gone.gguf"], 0, GIB)

    assert (found.resident, found.skipped) == (None, "a file cannot be read (No such file or directory)")


def test_a_file_that_was_just_read_is_in_memory(shards: list[Path]) -> None:
    found = gates.read_ahead(shards, 0, 100 * GIB)

    assert found.skipped is None
    if found.resident is not None:  # macOS does not tell
        assert found.resident > 0.9
        assert gates.read_ahead(shards, 0, 100 * GIB).read_bytes < SHARDS_BYTES


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks mincore, which answers so on Linux only")
def test_linux_is_not_believed_about_files_of_others(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shards[0].chmod(0o444)
    with shards[0].open("rb", buffering=0) as file:
        assert gates.resident_bytes(file, 0, MIB) is not None
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        monkeypatch.setattr(os, "access", lambda *_: False)
        assert gates.resident_bytes(file, 0, MIB) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks mincore, which answers so on Linux only")
def test_ctrl_c_while_the_page_cache_is_asked_is_ctrl_c(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(gates, "_mincore", lambda: interrupted)
    with shards[0].open("rb", buffering=0) as file, pytest.raises(KeyboardInterrupt):
        gates.resident_bytes(file, 0, MIB)


# ── heat ────────────────────────────────────────────────────────────────────────────────────


def gpu(*celsius: float) -> list[Temperatures]:
    return [Temperatures(gpu_c=each) for each in celsius]


def cool(starts: Sequence[Temperatures], now: Sequence[Temperatures], **keywords: Any) -> tuple[Thermal, list[str]]:
    """The gate, with a reading for each second; the last one stays."""
    clock, readings, said = Clock(), chain(now, repeat(now[-1])), list[str]()
    found = gates.wait_until_cool(
        starts, read=lambda: next(readings), clock=clock, sleep=clock.sleep, say=said.append, **keywords
    )
    return found, said


def test_the_band_lies_around_what_earlier_loads_began_at() -> None:
    assert gates.middle_of(gpu(50, 52, 60)) == Temperatures(gpu_c=52)
    assert gates.middle_of([Temperatures(60, 40), Temperatures(61, None), Temperatures(62, 44)]) == Temperatures(61)


def test_the_first_loads_have_no_band_and_wait_for_nothing() -> None:
    found, said = cool(gpu(40, 41), gpu(70))

    assert (found, said) == (Thermal(0.0, Temperatures(70), Temperatures(), None), [])


def test_a_chip_hotter_than_before_is_waited_for_and_it_is_said_once() -> None:
    found, said = cool(gpu(50, 50, 51), gpu(60, 56, 54, 53, 40))

    assert found == Thermal(3.0, Temperatures(53), Temperatures(50), True)
    assert said == ["hotter than at earlier loads; waiting up to 60 s (--no-wait skips this)"]


def test_after_a_minute_it_goes_on_and_the_record_says_so() -> None:
    found, _ = cool(gpu(50, 50, 50), gpu(58))

    assert found == Thermal(60.0, Temperatures(58), Temperatures(50), False)


def test_a_colder_chip_is_not_waited_for_because_waiting_only_cools() -> None:
    found, said = cool(gpu(60, 60, 60), gpu(50))

    assert (found.waited_s, found.within, said) == (0.0, False, [])


def test_either_chip_can_be_too_hot() -> None:
    before = [Temperatures(50, 45)] * 3

    assert cool(before, [Temperatures(50, 60), Temperatures(50, 46)])[0].waited_s == 1.0
    assert cool(before, [Temperatures(None, 46)])[0].within is True


def test_without_sensors_nothing_is_waited_for_and_nothing_is_claimed() -> None:
    found, _ = cool([Temperatures()] * 5, [Temperatures()])

    assert found == Thermal(0.0, Temperatures(), Temperatures(), None)


def test_no_wait_still_looks() -> None:
    found, said = cool(gpu(50, 50, 50), gpu(70), wait_s=0.0)

    assert (found, said) == (Thermal(0.0, Temperatures(70), Temperatures(50), False), [])


def test_a_band_that_is_out_of_reach_moves_to_where_the_machine_is() -> None:
    starts, waits = gpu(50, 50, 50), []
    for _ in range(12):
        found, _ = cool(starts, gpu(62))
        starts.append(found.start)
        waits.append(found.waited_s)

    assert waits[0] == 60.0
    assert waits[-1] == 0.0
    assert sum(waits) <= 4 * 60


@pytest.mark.parametrize(
    ("ends", "over"),
    [
        ([], False),
        ([(50.0, 60.0)], False),
        ([(30.0, 60.0), (80.0, 60.0)], False),  # 50 s apart: whole degrees tell nothing yet
        ([(30.0, 60.0), (90.0, 60.0)], True),
        ([(30.0, 60.0), (90.0, 61.0)], False),
        ([(30.0, 60.0), (90.0, 59.0)], False),  # falls as fast
        ([(30.0, 50.0), (60.0, 60.0), (125.0, 60.0)], True),
        ([(100.0, 50.0), (300.0, 70.0)], True),  # five minutes are enough
    ],
)
def test_burn_in_ends_when_the_gpu_gets_no_hotter_or_after_five_minutes(
    ends: list[tuple[float, float]], over: bool
) -> None:
    assert gates.is_warm(ends) is over


def test_the_hottest_gpu_counts_and_absurd_answers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, *(card(Temperature=answer) for answer in (61, 70, 2**32 - 1, None, 255)))

    assert gpus.celsius() == 70.0


def sensors(**chips: list[tuple[str, float | None]]) -> dict[str, list[types.SimpleNamespace]]:
    return {
        chip: [types.SimpleNamespace(label=label, current=current) for label, current in found]
        for chip, found in chips.items()
    }


@pytest.mark.parametrize(
    ("found", "celsius"),
    [
        (sensors(coretemp=[("Package id 0", 48.0), ("Core 0", 60.0), ("Package id 1", 51.0)]), 51.0),
        (sensors(k10temp=[("Tctl", 55.5), ("Tccd1", 70.0)], nvme=[("Composite", 80.0)]), 55.5),
        (sensors(cpu_thermal=[("", 44.0)]), 44.0),
        (sensors(acpitz=[("", 27.8)], coretemp=[("Package id 0", None)]), None),
        ({}, None),
    ],
)
def test_the_temperature_of_a_cpu_is_that_of_its_package(
    found: dict[str, Any], celsius: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)

    assert machine.cpu_celsius() == celsius


def test_a_system_without_sensors_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psutil, "sensors_temperatures", raising=False)  # as on macOS

    assert machine.cpu_celsius() is None


# ── in a run ────────────────────────────────────────────────────────────────────────────────


options = partial(short_run.options, arms="llama-cpp", out_tokens=16)


@pytest.fixture(scope="module")
def comparison(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """A short run on a machine whose GPU has 60 °C as a load begins and 65 °C as it ends."""
    folder = tmp_path_factory.mktemp("gates")
    turns = chain.from_iterable(repeat((Temperatures(60.0), Temperatures(65.0))))
    with pytest.MonkeyPatch.context() as patch, engines.fake(folder, Script(itl_s=0.002)):
        patch.setattr(gates, "temperatures", lambda: next(turns))
        return duel(options(model, folder / "runs", arms="ollama,llama-cpp"), quiet)


def test_each_load_of_a_block_records_what_it_found_and_a_probe_leaves_the_cache_alone(comparison: Comparison) -> None:
    blocks = [load for load in comparison.run.loads if load.stage == "block"]
    probes = [load for load in comparison.run.loads if load.stage == "probe"]

    assert all(load.cache is not None and load.cache.skipped is None for load in blocks)
    assert all(load.cache is None for load in probes)
    assert [load.thermal.start.gpu_c for load in blocks if load.thermal] == [60.0] * len(blocks)
    assert [load.thermal.end.gpu_c for load in blocks if load.thermal] == [65.0] * len(blocks)
    assert blocks[-1].thermal is not None
    assert blocks[-1].thermal.within is True, "the loads before it make the band"
    assert not [load for load in comparison.run.loads if load.stage == "burn-in"], "no claim, no burn-in"


def test_what_a_load_found_is_read_back_and_older_runs_without_it_too(tmp_path: Path) -> None:
    full = dataclasses.replace(
        LOAD,
        settled=Settled(30.0, False, 300 * MIB, (7,), 5 * MIB),
        cache=PageCache(0.5, 100, 0.75, "why not"),
        thermal=Thermal(3.0, Temperatures(50.0, None), Temperatures(49.0), True, Temperatures(70.0, 60.0)),
    )
    record.append(tmp_path, full)
    record.append(tmp_path, LOAD)
    text = (tmp_path / record.LINES).read_text()
    older = text.replace(',"cache":null,"thermal":null', "").replace(',"rss_bytes":5242880', "")
    assert older != text
    (tmp_path / record.LINES).write_text(older)

    first, second = record._lines(tmp_path / record.LINES)

    assert first == dataclasses.replace(full, settled=dataclasses.replace(full.settled, rss_bytes=None))  # type: ignore[type-var]
    assert second == LOAD


def test_a_run_that_makes_claims_first_warms_the_gpu_and_analyses_none_of_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "temperatures", lambda: Temperatures(60.0))
    monkeypatch.setattr(gates, "STEADY_OVER_S", 0.001)
    monkeypatch.setattr(telemetry, "wait_until_quiet", lambda **_: Quiet(1.0, 0.0, True))
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        found = duel(
            options(model, tmp_path / "runs", no_wait=False, preset="confirm", budget=0.2, arms="llama-cpp"), quiet
        )

    stages = [load.stage for load in found.run.loads]
    burnt = stages.count("burn-in")  # 2, or 1 where that alone used up its share of the budget
    assert stages[: burnt + 1] == ["probe", *["burn-in"] * burnt]
    assert burnt in (1, 2)
    assert set(stages[burnt + 1 :]) == {"block"}
    assert not [outcome for outcome in outcomes_of(found.run) if outcome.block == 0]
    assert f"burn-in, not analysed | {words.count(burnt, 'load')} of llama-cpp, GPU 60 °C" in squeezed(found)


@pytest.mark.parametrize(("then_c", "again"), [(60.0, False), (62.0, False), (40.0, True)])
def test_a_run_that_goes_on_is_warmed_again_only_where_the_gpu_has_cooled(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then_c: float, again: bool
) -> None:
    monkeypatch.setattr(gates, "temperatures", lambda: Temperatures(60.0))
    monkeypatch.setattr(gates, "BURN_IN_S", 0.0)  # one load is enough
    monkeypatch.setattr(telemetry, "wait_until_quiet", lambda **_: Quiet(1.0, 0.0, True))

    def stop(block: int, progress: Progress) -> None:
        if progress.block == block:
            raise KeyboardInterrupt

    given = options(model, tmp_path / "runs", no_wait=False, preset="confirm", budget=0.5, arms="llama-cpp,ollama")
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        begun = duel(given, partial(stop, 3))
        monkeypatch.setattr(gates, "temperatures", lambda: Temperatures(then_c))
        ended = duel(Options(resume=str(begun.run.folder)), partial(stop, 4))

    stages = [load.stage for load in ended.run.loads]
    assert stages.count("burn-in") == (2 if again else 1)
    assert len(ended.run.loads) > len(begun.run.loads)


# ── in the report ───────────────────────────────────────────────────────────────────────────


def squeezed(comparison: Comparison) -> str:
    """The report without the blanks that align its tables."""
    return "\n".join(" ".join(line.split()) for line in render.report(comparison).splitlines())


def with_loads(comparison: Comparison, *loads: LoadRecord) -> Comparison:
    return dataclasses.replace(comparison, run=dataclasses.replace(comparison.run, loads=loads))


def test_the_report_says_in_a_line_each_what_loads_found(comparison: Comparison) -> None:
    report = squeezed(comparison)

    assert "| quiet machine before a load | not waited for |" in report
    assert "| memory after a load | every engine that was started is gone" in report
    assert "| page cache before a load | model read before 4 of 4 loads" in report
    assert "| temperature as a load began | GPU 60 °C |" in report
    assert "burn-in" not in report


def test_what_was_not_recorded_is_a_dash(comparison: Comparison) -> None:
    report = squeezed(with_loads(comparison, LOAD))

    for check in ("memory after a load", "page cache before a load", "temperature as a load began"):
        assert f"| {check} | – |" in report


def test_memory_that_did_not_come_back_is_told_with_the_load_that_began_so(comparison: Comparison) -> None:
    loads = (
        dataclasses.replace(LOAD, settled=Settled(30.0, False, GIB, (), None)),
        dataclasses.replace(LOAD, block=2, arm="llama-cpp", settled=Settled(0.0, True, 0)),
        dataclasses.replace(LOAD, block=3, settled=Settled(30.0, False, 0, (7,), 2 * GIB)),
    )

    assert (
        "| memory did not come back after 2 of 3 loads (at most 1.00 GiB of the GPU, 2.00 GiB of the host); "
        "what began so: block 2 llama-cpp |" in squeezed(with_loads(comparison, *loads))
    )


def test_a_busy_machine_a_large_file_and_a_hot_chip_are_told(comparison: Comparison) -> None:
    loads = (
        dataclasses.replace(
            LOAD,
            quiet=Quiet(60.0, 1.0, False),
            cache=PageCache(1.0, 5, 0.25, "too large"),
            thermal=Thermal(60.0, Temperatures(66.0, 50.0), Temperatures(60.0), False),
        ),
        dataclasses.replace(
            LOAD,
            quiet=Quiet(1.0, 0.1, True),
            cache=PageCache(1.0, 5, 0.998),
            thermal=Thermal(0.0, Temperatures(61.0, 52.0), Temperatures(60.0), True),
        ),
    )
    report = squeezed(with_loads(comparison, *loads))

    for line in (
        "waited 1–60 s, still busy before 1 of 2 loads",
        "model read before 1 of 2 loads, 99 % of it in memory; left as it was before 1 of 2 loads: too large",
        "GPU 61–66 °C, CPU 50–52 °C, waited 0–60 s to cool, 1 of 2 loads began outside the band of ±3 °C",
    ):
        assert f"| {line} |" in report
