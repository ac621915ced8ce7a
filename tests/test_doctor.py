"""`doctor`: every trap has a machine on which its line appears and one on which it does not."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fake_nvml
import psutil
import pytest
from fake_nvml import GIB, card

from harness import doctor, gates, listings, process, registry, synth, telemetry
from harness import machine as machines
from harness.cli import main
from harness.contract import Engine, Prospect, Say
from harness.doctor import Finding
from harness.errors import RunRefused, Unavailable
from harness.options import Options
from harness.testing import engines
from harness.testing.script import Script

MODEL = "the model's file is in the page cache"


def write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is found here that a test has not put here: no driver, no engine, no battery, no sensor, no neighbour."""
    fake_nvml.remove(monkeypatch)
    for name in [name for name in os.environ if process.SCRUBBED.match(name)]:
        monkeypatch.delenv(name)
    for name in ("KUBERNETES_SERVICE_HOST", "container"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "backends", dict)
    monkeypatch.setattr(doctor, "recipes", dict)
    monkeypatch.setattr(doctor, "_watch_others", lambda: doctor._Others(0.0, 0.0))
    monkeypatch.setattr(machines, "_on_ac_power", lambda: None)
    monkeypatch.setattr(machines, "_cpu_sensors", list)
    monkeypatch.setattr(machines, "_allowed_cpus", lambda: set(range(psutil.cpu_count() or 1)))
    yield
    monkeypatch.undo()
    fake_nvml.forget()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *cards: fake_nvml.install(monkeypatch, *cards)


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registered backends after all; a test puts fakes of their programs into PATH."""
    monkeypatch.setattr(doctor, "backends", registry.backends)


def topic(name: str, root: Path, **given: Any) -> list[Finding]:
    found = doctor.examine(Options(**{"arms": "llama-cpp", **given}), root)
    return [each for each in found if each.topic == name]


def line(findings: list[Finding], words: str) -> Finding | None:
    """The one finding with these words in its fact."""
    found = [each for each in findings if words in each.fact]
    assert len(found) < 2, found
    return found[0] if found else None


def level(findings: list[Finding], words: str) -> str | None:
    found = line(findings, words)
    if found is not None:
        assert found.level not in ("warn", "fail") or found.next_step, "what is not well has a next step"
        assert found.level != "ok" or not found.next_step
    return found.level if found else None


# ── engines ─────────────────────────────────────────────────────────────────────────────────


def test_engines_are_told_with_version_origin_devices_and_path(real: None, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script(devices=(("CUDA0", "a card", 8000),))) as fakes:
        found = topic("engines", tmp_path, arms="ollama,llama-cpp")

    told = line(found, "llama.cpp b11434")
    assert told is not None
    assert told.fact.startswith("llama.cpp b11434, from PATH, sees CUDA0 (a card)")
    assert told.fact.endswith(str(fakes.llama_server))
    assert level(found, "openai:") == "unknown", "no arm asks for it"
    assert level(found, "different devices") is None
    assert level(found, "no engine here can use") is None


def test_a_runner_that_is_not_ollamas_own_is_told(real: None, tmp_path: Path) -> None:
    with engines.fake(tmp_path, runner=False):
        found = topic("engines", tmp_path, arms="ollama")

    assert line(found, "+ runner llama.cpp b11434 (not its own)") is not None


def test_a_missing_engine_is_a_warning_beside_another_and_a_failure_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Gone:
        def find(self, hints: Mapping[str, str]) -> None:
            raise Unavailable("no llama.cpp here; run this")

    class Here:
        def find(self, hints: Mapping[str, str]) -> Any:
            return Engine(product="Ollama", version="1", path=Path("/o"), origin="PATH")

    monkeypatch.setattr(doctor, "backends", lambda: {"llama-cpp": Gone(), "ollama": Here()})
    assert line(topic("engines", tmp_path, arms="ollama,llama-cpp"), "no llama.cpp here") == Finding(
        "engines", "warn", "llama-cpp: no llama.cpp here", "run this"
    )
    assert level(topic("engines", tmp_path, arms="llama-cpp"), "no llama.cpp here") == "fail"
    assert level(topic("engines", tmp_path, arms="ollama"), "no llama.cpp here; no arm asks for it") == "unknown"


def test_an_adapter_that_breaks_hides_no_other(monkeypatch: pytest.MonkeyPatch, real: None, tmp_path: Path) -> None:
    class Broken:
        def find(self, hints: Mapping[str, str]) -> None:
            raise ZeroDivisionError("boom")

    known = registry.backends()
    monkeypatch.setattr(doctor, "backends", lambda: {"llama-cpp": known["llama-cpp"], "broken": Broken()})
    with engines.fake(tmp_path):
        found = topic("engines", tmp_path)

    assert level(found, "llama.cpp b11434") == "ok"
    assert line(found, "its adapter broke while looking for it (ZeroDivisionError('boom')") is not None


def test_engines_that_see_different_devices_are_not_comparable(real: None, tmp_path: Path) -> None:
    case = {"when": "OLLAMA_", "devices": [["CUDA0", "a card", 8000]]}
    with engines.fake(tmp_path, cases=[case]):
        found = topic("engines", tmp_path, arms="ollama,llama-cpp")
        stand_in = topic("engines", tmp_path, arms="ollama,llama-cpp", stand_in="all")

    told = line(found, "the engines see different devices")
    assert told is not None
    assert "sees CUDA" in told.fact
    assert "llama.cpp b11434 sees none" in told.fact
    assert level(found, "different devices") == "warn"
    assert level(stand_in, "different devices") is None, "there both see the stand-in"


def test_a_gpu_that_no_engine_can_use_is_said_in_those_words(
    real: None, driver: Callable[..., None], tmp_path: Path
) -> None:
    write(tmp_path, "sys/class/drm/card0/device/vendor", "0x1002")
    with engines.fake(tmp_path):
        assert level(topic("engines", tmp_path), "has a GPU (AMD) that no engine here can use") == "warn"
        driver(card())
        assert level(topic("engines", tmp_path), "that no engine here can use") == "fail", "its driver answers"
        assert level(topic("engines", tmp_path, stand_in="all"), "that no engine here can use") is None


# ── GPUs ────────────────────────────────────────────────────────────────────────────────────


def held(pid: int, size: int | None) -> Any:
    return types.SimpleNamespace(pid=pid, usedGpuMemory=size)


def memory(used: int, reserved: int) -> Any:
    return types.SimpleNamespace(used=used, total=12 * GIB, reserved=reserved)


def test_a_card_at_rest_is_well(driver: Callable[..., None], tmp_path: Path) -> None:
    driver(
        card(
            EnforcedPowerLimit=200_000,
            PowerManagementDefaultLimit=200_000,
            Temperature=41,
            TemperatureThreshold=90,
            CurrPcieLinkWidth=16,
            MaxPcieLinkWidth=16,
            CurrentClocksEventReasons=0x1,
            ComputeRunningProcesses=[],
            DisplayActive=0,
            MemoryInfo=memory(GIB, GIB - 1),
        )
    )

    (found,) = topic("GPUs", tmp_path)

    assert found.level == "ok"
    assert found.fact == "NVIDIA GeForce RTX 4070: driver 580.1, 11.0 GiB of 12.0 GiB free, 41 °C, 200 W"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"MigMode": (1, 1)}, "is split by MIG"),
        ({"CurrentClocksEventReasons": 0x40}, "runs below its clock now (heat)"),
        ({"EnforcedPowerLimit": 150_000, "PowerManagementDefaultLimit": 200_000}, "is capped at 150 W of 200 W"),
        ({"CurrPcieLinkWidth": 4, "MaxPcieLinkWidth": 16}, "is linked by 4 of 16 PCIe lanes"),
        ({"DisplayActive": 1}, "draws a screen"),
        ({"Temperature": 80, "TemperatureThreshold": 90}, "has 80 °C and slows down at 90 °C"),
        ({"ComputeRunningProcesses": [held(2**30, GIB)]}, "is held by a process (pid 1073741824) 1.00 GiB"),
        ({"GraphicsRunningProcesses": [held(2**30, None)]}, "is held by a process (pid 1073741824) –"),
        ({"MemoryInfo": memory(2 * GIB, GIB)}, "1.00 GiB of NVIDIA GeForce RTX 4070 are held, by no process"),
    ],
)
def test_what_slows_a_card_or_fills_it_is_a_warning(
    driver: Callable[..., None], tmp_path: Path, answers: dict[str, Any], words: str
) -> None:
    driver(card())
    assert level(topic("GPUs", tmp_path), words) is None

    driver(card(**answers))

    assert level(topic("GPUs", tmp_path), words) == "warn"


def test_who_holds_a_card_is_named_and_in_a_container_only_numbered(
    driver: Callable[..., None], tmp_path: Path
) -> None:
    us = psutil.Process()
    driver(card(ComputeRunningProcesses=[held(us.pid, 5 << 20)], GraphicsRunningProcesses=[held(us.pid, 7 << 20)]))
    told = f"is held by {us.name()} (pid {us.pid}) 7.00 MiB"
    assert level(topic("GPUs", tmp_path), told) == "ok", "so little disturbs nobody"

    write(tmp_path, ".dockerenv")

    assert level(topic("GPUs", tmp_path), f"is held by a process (pid {us.pid})") == "ok", "a number of the host's"


def test_on_wsl2_nobody_tells_who_holds_the_memory(driver: Callable[..., None], tmp_path: Path) -> None:
    write(tmp_path, "proc/sys/kernel/osrelease", "6.6.87.2-microsoft-standard-WSL2")
    driver(card(MemoryInfo=memory(4 * GIB, 0)))

    assert level(topic("GPUs", tmp_path), "4.00 GiB of NVIDIA GeForce RTX 4070 are held, WSL2 does not tell by whom")


def test_equal_cards_are_each_told(driver: Callable[..., None], tmp_path: Path) -> None:
    driver(card(), card())

    assert [each.fact[:9] for each in topic("GPUs", tmp_path)] == ["0: NVIDIA", "1: NVIDIA"]


def test_without_a_driver_only_what_the_kernel_shows_is_told(tmp_path: Path) -> None:
    assert level(topic("GPUs", tmp_path), "no NVIDIA driver answers, and no GPU is visible") == "unknown"

    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)

    assert level(topic("GPUs", tmp_path), "the kernel shows 1 GPU (NVIDIA), and no NVIDIA driver answers") == "warn"


# ── memory ──────────────────────────────────────────────────────────────────────────────────


def with_facts(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """This machine, with some facts of another."""
    read = machines.read
    monkeypatch.setattr(machines, "read", lambda root: dataclasses.replace(read(root), **facts))


def test_one_channel_of_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_facts(monkeypatch, memory_speed_mts=4800, memory_modules=1, memory_channels=1)
    assert level(topic("memory", tmp_path), "4800 MT/s, 1 module, 1 channel") == "warn"

    with_facts(monkeypatch, memory_speed_mts=4800, memory_modules=2, memory_channels=2)
    assert level(topic("memory", tmp_path), "4800 MT/s, 2 modules, 2 channels") == "ok"


def test_much_in_swap_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for used, expected in ((1 << 20, None), (32 * GIB, "warn")):
        swap = types.SimpleNamespace(used=used, total=64 * GIB)
        monkeypatch.setattr(psutil, "swap_memory", lambda swap=swap: swap)
        with_facts(monkeypatch, memory_bytes=64 * GIB)
        assert level(topic("memory", tmp_path), "are swapped out") == expected


def test_a_model_that_is_not_there_fails_and_without_one_nothing_is_said_of_it(tmp_path: Path) -> None:
    assert level(topic("memory", tmp_path), "no model is named") == "unknown"
    found = topic("memory", tmp_path, model=str(tmp_path / "no.gguf"))
    assert [each.level for each in found if "no.gguf" in each.fact] == ["fail"]
    assert level(found, "no model is named") is None


def test_a_model_on_a_hub_is_not_fetched(tmp_path: Path) -> None:
    assert level(topic("memory", tmp_path, model="hf:a/b:c.gguf"), "nothing is fetched here") == "unknown"


@pytest.mark.parametrize("ref", ["hf:zz", "hf:a/../b:c.gguf"])
def test_a_reference_that_is_none_is_the_usage_error_of_a_run(
    ref: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [(main([command, ref, "--arms", "llama-cpp"]), capsys.readouterr().err) for command in ("doctor", "run")]

    assert told[0] == told[1]
    assert told[0][0] == 2
    assert "names no model on a hub; write hf:ORG/REPO:FILE.gguf" in told[0][1]


@pytest.mark.parametrize("command", ["doctor", "run", "inspect"])
def test_ollama_without_a_name_is_a_usage_error(
    command: str, real: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engines.fake(tmp_path):
        assert main([command, "ollama:"]) == 2

    assert "'ollama:' names no model; write ollama:NAME" in capsys.readouterr().err


def test_a_model_without_weights_is_what_a_run_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    header = synth.write(tmp_path / "m.gguf", synth.SHAPES["tiny"], header_only=True)

    found = topic("memory", tmp_path, model=str(header))

    told = line(found, "m.gguf has no weights: it can be planned for, not measured")
    assert told == Finding(
        "memory",
        "fail",
        "m.gguf has no weights: it can be planned for, not measured",
        "name a file that has them",
    )
    assert level(found, "m.gguf: ") in ("ok", "warn"), "whether it would fit is told all the same"
    assert level(found, MODEL) is None


def test_memory_that_holds_no_engine_is_not_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_facts(monkeypatch, memory_bytes=GIB, available_bytes=0)
    assert level(topic("memory", tmp_path), "0 B of 1.00 GiB available, too little for an engine") == "warn"
    with_facts(monkeypatch, memory_bytes=GIB, available_bytes=GIB * 3 // 4)
    assert level(topic("memory", tmp_path), "too little for an engine") is None
    assert level(topic("memory", tmp_path), "0.75 GiB of 1.00 GiB available; ") in ("ok", None)


def test_a_model_of_which_no_arm_fits_is_what_a_run_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    header = synth.write(tmp_path / "m.gguf", synth.SHAPES["tiny"], header_only=True)
    with_facts(monkeypatch, memory_bytes=GIB, available_bytes=GIB)

    arms = "llama-cpp@cpu,c=2000000"
    assert level(topic("memory", tmp_path, model=str(header), arms=arms), f"m.gguf, {arms}: it needs") == "fail"
    both = f"{arms},llama-cpp@cpu"
    assert level(topic("memory", tmp_path, model=str(header), arms=both), f"m.gguf, {arms}: it needs") == "warn"


def test_a_model_is_judged_by_its_arms_and_not_by_its_file(
    monkeypatch: pytest.MonkeyPatch, driver: Callable[..., None], tmp_path: Path
) -> None:
    header = synth.write(tmp_path / "m.gguf", synth.SHAPES["qwen3.5-35b-a3b"], header_only=True)
    driver(card(total=12 * GIB))  # 20 GiB of weights
    arms = {"model": str(header), "arms": "llama-cpp@ncmoe=30,llama-cpp@cpu-moe"}

    with_facts(monkeypatch, memory_bytes=20 * GIB, available_bytes=19 * GIB)
    assert level(topic("memory", tmp_path, **arms), "m.gguf: ") == "ok", "part of it lies on the card"
    with_facts(monkeypatch, available_bytes=2 * GIB)
    assert level(topic("memory", tmp_path, **arms), "and 2.00 GiB are available") == "warn"
    with_facts(monkeypatch, memory_bytes=16 * GIB)
    assert level(topic("memory", tmp_path, **arms), "llama-cpp@cpu-moe: it needs") == "warn"
    with_facts(monkeypatch, memory_bytes=4 * GIB)
    found = topic("memory", tmp_path, **arms)
    assert level(found, "of weights are more than memory (4.00 GiB) and GPUs (12.0 GiB) together") == "fail"


def test_an_arm_too_large_for_the_card_is_named(
    monkeypatch: pytest.MonkeyPatch, driver: Callable[..., None], tmp_path: Path
) -> None:
    header = synth.write(tmp_path / "m.gguf", synth.SHAPES["qwen3.5-35b-a3b"], header_only=True)
    driver(card(total=12 * GIB))
    with_facts(monkeypatch, memory_bytes=64 * GIB, available_bytes=60 * GIB)

    found = topic("memory", tmp_path, model=str(header), arms="llama-cpp@ngl=99,llama-cpp@cpu-moe")

    assert level(found, "m.gguf, llama-cpp@ngl=99: it needs") == "warn"


def test_how_much_of_the_model_lies_in_memory_is_told_and_nothing_is_read(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    for share, told in ((1.0, f"100 % of {MODEL}"), (0.25, f"25 % of {MODEL}, and a run reads the rest once")):
        monkeypatch.setattr(gates, "resident_share", lambda files, share=share: share)
        assert level(topic("memory", tmp_path, model=str(model)), told) == "ok"
    monkeypatch.setattr(gates, "resident_share", lambda files: None)
    assert level(topic("memory", tmp_path, model=str(model)), f"– of {MODEL}") == "unknown"

    with_facts(monkeypatch, available_bytes=30 << 20)
    assert level(topic("memory", tmp_path, model=str(model)), MODEL) == "warn"


def test_a_model_on_a_drive_of_another_system_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    for kind, expected in (("ext4", None), ("9p", "warn")):
        mounts = [types.SimpleNamespace(mountpoint="/", fstype="ext4")]
        mounts += [types.SimpleNamespace(mountpoint=str(model.parent), fstype=kind)]
        monkeypatch.setattr(psutil, "disk_partitions", lambda mounts=mounts, **_: mounts)
        assert level(topic("memory", tmp_path, model=str(model)), "lies on a drive of another system") == expected


def test_a_full_disk_and_one_that_cannot_be_written_to_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = str(tmp_path / "not/yet/there")
    usage = types.SimpleNamespace(free=100 * GIB)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)  # type: ignore[attr-defined]
    assert level(topic("memory", tmp_path, out=out), "disk: 100 GiB free for run folders") == "ok"

    usage.free = 100 << 20
    assert level(topic("memory", tmp_path, out=out), f"100 MiB are free for run folders ({tmp_path})") == "warn"

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert level(topic("memory", tmp_path, out=out), "where run folders would be, cannot be written to") == "fail"


# ── CPU ─────────────────────────────────────────────────────────────────────────────────────


def test_the_threads_of_a_run_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_facts(monkeypatch, cpu="Test CPU", physical_cores=8, logical_cores=16, cpu_max_mhz=5000)

    assert level(topic("CPU", tmp_path), "Test CPU: 8 cores, 16 threads, up to 5000 MHz; a run uses 7 threads") == "ok"
    assert level(topic("CPU", tmp_path, settings="stock"), "each engine chooses its threads") == "ok"


def test_slower_cores_that_all_wait_for_are_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_facts(monkeypatch, physical_cores=12)
    assert level(topic("CPU", tmp_path), "slower ones") is None

    monkeypatch.setattr(machines, "kinds_of_core", lambda root: (8, 4))

    assert level(topic("CPU", tmp_path), "8 fast cores and 4 slower ones") == "warn"


@pytest.mark.parametrize(
    ("driver_name", "facts", "words", "expected"),
    [
        ("acpi-cpufreq", {"governor": "powersave"}, "the clock is held low (governor powersave)", "warn"),
        ("intel_pstate", {"governor": "powersave"}, "governor powersave", "ok"),
        (
            "intel_pstate",
            {"governor": "powersave", "energy_preference": "power"},
            "power is preferred to speed",
            "warn",
        ),
        ("", {"platform_profile": "low-power"}, "power is preferred to speed (profile low-power)", "warn"),
        ("", {"governor": "ondemand, performance"}, "cores have different governors", "warn"),
        ("", {"governor": "performance", "platform_profile": "balanced"}, "governor performance", "ok"),
        ("", {}, "governor and power profile are not told here", "unknown"),
    ],
)
def test_what_holds_the_clock_down_by_choice_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    driver_name: str,
    facts: dict[str, Any],
    words: str,
    expected: str,
) -> None:
    nothing = {"governor": None, "energy_preference": None, "platform_profile": None}
    with_facts(monkeypatch, **{**nothing, **facts})
    write(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", driver_name)

    assert level(topic("CPU", tmp_path), words) == expected


def test_a_battery_is_a_warning_while_it_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for plugged, expected in ((True, None), (None, None), (False, "warn")):
        monkeypatch.setattr(machines, "_on_ac_power", lambda plugged=plugged: plugged)
        assert level(topic("CPU", tmp_path), "runs on its battery") == expected


def test_heat_is_told_with_what_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert level(topic("CPU", tmp_path), "no sensor tells") == "unknown"
    for celsius, words, expected in ((45.0, "45 °C, 55 below its limit", "ok"), (90.0, "90 °C, and 100 °C", "warn")):
        sensor = types.SimpleNamespace(label="Package id 0", current=celsius, high=80.0, critical=100.0)
        monkeypatch.setattr(machines, "_cpu_sensors", lambda sensor=sensor: [sensor])
        assert level(topic("CPU", tmp_path), words) == expected


def test_other_programs_are_named_when_they_disturb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for cores, words, expected in (
        (0.1, "other programs use 0.1 cores", "ok"),
        (2.0, "other programs use 2.0 cores now (make 1.9)", "warn"),
        (None, "what other programs use is not told", "unknown"),
    ):
        monkeypatch.setattr(doctor, "_watch_others", lambda cores=cores: doctor._Others(cores, None, ("make 1.9",)))
        assert level(topic("CPU", tmp_path), words) == expected


# ── traps ───────────────────────────────────────────────────────────────────────────────────


def test_a_machine_without_traps_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with_facts(monkeypatch, system="Some Linux", kernel="6.1")

    assert [(each.level, each.fact) for each in topic("traps", tmp_path)] == [("ok", "Some Linux, kernel 6.1")]


def test_what_the_host_of_a_virtual_machine_takes_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "flags\t\t: hypervisor")
    write(tmp_path, "sys/class/dmi/id/sys_vendor", "QEMU")
    assert level(topic("traps", tmp_path), "virtual machine (QEMU)") == "ok"

    monkeypatch.setattr(doctor, "_watch_others", lambda: doctor._Others(0.0, 0.5))

    assert level(topic("traps", tmp_path), "virtual machine (QEMU); its host took 0.5 cores away") == "warn"


def test_wsl2_limits_memory_and_hides_a_model_that_is_too_large(tmp_path: Path) -> None:
    assert line(topic("traps", tmp_path), "WSL") is None

    write(tmp_path, "proc/sys/kernel/osrelease", "6.6.87.2-microsoft-standard-WSL2")
    write(tmp_path, "dev/dxg")
    found = topic("traps", tmp_path)

    assert level(found, "WSL2 gives Linux") == "warn"
    assert level(found, "spills into system memory") == "warn"


def test_wsl_1_fails(tmp_path: Path) -> None:
    write(tmp_path, "proc/sys/kernel/osrelease", "4.4.0-19041-Microsoft")

    assert level(topic("traps", tmp_path), "WSL 1 has no GPU") == "fail"


def test_limits_below_the_machine_are_warnings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8)
    monkeypatch.setattr(machines, "_allowed_cpus", lambda: set(range(8)))
    write(tmp_path, ".dockerenv")
    write(tmp_path, "proc/self/cgroup", "0::/")
    found = topic("traps", tmp_path)
    assert level(found, "in a container") == "ok"
    assert not [each for each in found if "limited" in each.fact]

    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000")
    write(tmp_path, "sys/fs/cgroup/memory.max", str(256 << 20))
    found = topic("traps", tmp_path)
    assert level(found, "CPU time is limited to 1.5 of 8 CPUs") == "warn"
    assert level(found, "memory is limited to 256 MiB of") == "warn"

    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000")
    monkeypatch.setattr(machines, "_allowed_cpus", lambda: {0, 1})
    assert level(topic("traps", tmp_path), "this process may use 2 of 8 CPUs") == "warn"


def test_a_config_file_of_llama_cpp_is_told_with_the_next_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert line(topic("traps", tmp_path), "config.ini") is None

    write(tmp_path, "etc/llama.cpp/config.ini")

    assert level(topic("traps", tmp_path), "/etc/llama.cpp/config.ini applies to every llama.cpp engine") == "warn"


def test_a_daemon_that_holds_memory_beside_ours_is_named(
    real: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = process.free_port()
    with engines.fake(tmp_path):
        monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{port}")
        assert line(topic("traps", tmp_path), "holds") is None, "no daemon answers"

        told = "the Ollama at http://127.0.0.1:1 holds m:latest, 5.0 GiB on a device"
        ollama = registry.backends()["ollama"]
        monkeypatch.setattr(type(ollama), "beside", lambda _: iter([f"{told}; `ollama stop m:latest` frees it"]))
        assert line(topic("traps", tmp_path), "holds") == Finding(
            "traps", "warn", told, "`ollama stop m:latest` frees it"
        )


def test_variables_that_have_no_effect_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert line(topic("traps", tmp_path), "no effect") is None

    monkeypatch.setenv("OLLAMA_FLASH_ATTENTION", "1")
    assert level(topic("traps", tmp_path), "OLLAMA_FLASH_ATTENTION is set and has no effect") == "warn"
    for number in range(5):
        monkeypatch.setenv(f"GGML_{number}", "1")
    assert level(topic("traps", tmp_path), "GGML_0, GGML_1, GGML_2, GGML_3 and 2 more are set and have no") == "warn"


def test_a_limit_on_locked_memory_matters_to_an_arm_that_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for limit, arms, expected in (
        (8 << 20, "llama-cpp", None),
        (8 << 20, "llama-cpp,lm=mlock", "warn"),
        (resource.RLIM_INFINITY, "llama-cpp,lm=mlock", None),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert level(topic("traps", tmp_path, arms=arms), "locks its weights") == expected


def test_several_numa_nodes_are_a_warning(tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    assert line(topic("traps", tmp_path), "NUMA") is None

    (tmp_path / "sys/devices/system/node/node1").mkdir()

    assert level(topic("traps", tmp_path), "memory lies in 2 NUMA nodes") == "warn"


# ── tools ───────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One that can foretell; `lacks` as a real one would say it."""

    lacks: str | None = None
    name: str = "engine"
    summary: str = "an engine"

    def installed(self) -> Path | None:
        return None

    def install(self, say: Say) -> Path:
        raise AssertionError("nothing is installed by looking")

    def prospect(self) -> Prospect:
        return Prospect(builds="engine 1 for the CPU", lacks=self.lacks, tools=("cc", "cmake 3.25"))


def test_what_an_install_would_build_is_told_and_why_not_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = "engine: not installed; `engines install` builds engine 1 for the CPU (cc, cmake 3.25)"
    monkeypatch.setattr(doctor, "recipes", lambda: {"engine": Recipe()})
    assert topic("tools", tmp_path) == [Finding("tools", "ok", told)]

    monkeypatch.setattr(doctor, "recipes", lambda: {"engine": Recipe("a GPU but no nvcc; install CUDA")})
    assert topic("tools", tmp_path) == [Finding("tools", "warn", f"{told}: a GPU but no nvcc", "install CUDA")]


def test_what_a_build_would_lack_does_not_matter_where_an_engine_sees_a_gpu(
    real: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "recipes", lambda: {"engine": Recipe("a GPU but no nvcc; install CUDA")})
    with engines.fake(tmp_path, Script(devices=(("Vulkan0", "a card", 8000),))):
        assert [each.level for each in topic("tools", tmp_path)] == ["ok"]


# ── the whole ───────────────────────────────────────────────────────────────────────────────


def test_a_check_that_breaks_off_is_a_dash_and_ends_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(here: object) -> Iterator[Any]:
        yield "ok", "said before", None
        raise PermissionError("no")

    for name, checks in doctor.CHECKS.items():
        with monkeypatch.context() as patched:
            patched.setitem(doctor.CHECKS, name, (broken, *checks))
            found = doctor.examine(Options(arms="llama-cpp"), tmp_path)
        assert Finding(name, "ok", "said before") in found
        assert Finding(name, "unknown", "broken: cannot be told (no)") in found
        assert {each.topic for each in found} == {"GPUs", "memory", "CPU", "traps", name}


def test_facts_that_cannot_be_read_are_dashes_and_no_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(root: Path) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(machines, "read", broken)

    found = doctor.examine(Options(arms="llama-cpp"), tmp_path)

    assert "ram: cannot be told (no such kernel)" in [each.fact for each in found]
    assert "disk:" in " ".join(each.fact for each in found)


def test_an_entry_point_that_cannot_be_loaded_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> None:
        raise RunRefused("the entry point 'x' cannot be loaded; install its package anew")

    monkeypatch.setattr(doctor, "backends", broken)

    found = doctor.examine(Options(arms="llama-cpp"), tmp_path)

    assert [each for each in found if each.level == "fail"] == [
        Finding("engines", "fail", "the entry point 'x' cannot be loaded", "install its package anew")
    ]


def test_what_others_use_is_really_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "LOOK_S", 0.05)
    mine = (os.getpid(), psutil.Process().name())

    before = doctor._spent_s()
    found = doctor._watch_others()

    assert mine not in before
    assert len(before) > 1, "others are seen"
    assert found.foreign_cores is not None or not telemetry.HAS_PROC
    assert all(float(name.rpartition(" ")[2]) >= doctor.BUSY for name in found.names)


# ── the screen ──────────────────────────────────────────────────────────────────────────────


def told(*findings: tuple[str, str, str, str | None]) -> dict[str, Any]:
    return {"findings": [dict(zip(("topic", "level", "fact", "next"), each, strict=True)) for each in findings]}


def test_each_line_begins_with_its_word_and_its_topic_once() -> None:
    drawn = listings.doctor_table(
        told(
            ("engines", "ok", "one", None),
            ("engines", "unknown", "two", None),
            ("CPU", "warn", "three", "mend it"),
            ("CPU", "fail", "four\x1b[31m", "or that"),
        ),
        100,
        colour=False,
    )

    assert drawn.splitlines() == [
        "ok    engines  one",
        "–              two",
        "warn  CPU      three",
        "               → mend it",
        "fail           four [31m",
        "               → or that",
        "1 thing to mend before a run, 1 warning",
    ]


@pytest.mark.parametrize(("warnings", "left_out"), [(14, 0), (18, 8)])
@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_worst_machine_is_one_screen(width: int, warnings: int, left_out: int) -> None:
    long = "a fact of a usual length that fills about one line of a terminal of a hundred columns and a bit"
    worst = told(
        *(
            ("CPU", "warn", f"{number} is {long}", "one sentence that says what to do next")
            for number in range(warnings)
        ),
        *(("traps", "ok", f"well is {long}", None) for _ in range(8)),
    )

    lines = listings.doctor_table(worst, width, colour=False).splitlines()
    text = " ".join(" ".join(lines).split())

    assert max(map(len, lines)) <= width
    assert text.count("says what to do next") == warnings, "no next step is lost"
    if width >= 100:
        assert len(lines) <= 40
        assert text.count("well is") == 8 - left_out
        assert (f"{left_out} lines of what is well are left out" in text) == bool(left_out)


def test_words_are_coloured_on_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(("CPU", "ok", "one", None), ("CPU", "unknown", "ok then", None), ("CPU", "fail", "two", "do"))
    assert "\x1b" not in listings.doctor_table(found, 100), "a pipe"

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert listings.doctor_table(found, 100).splitlines()[:3] == [
        "\x1b[32mok\x1b[0m    CPU  one",
        "–          ok then",
        "\x1b[31mfail\x1b[0m       two",
    ]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in listings.doctor_table(found, 100)


def test_the_command_prints_a_screen_or_json_and_exits_by_what_fails(
    real: None, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "runs")]
    with engines.fake(tmp_path):
        assert main(["doctor", str(model), *out]) == 0
        drawn = capsys.readouterr().out
        assert main(["doctor", str(model), *out, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["doctor", str(tmp_path / "no.gguf"), *out]) == 1
        failed = capsys.readouterr().out
        assert main(["doctor", "--arms", "llama-cpq", *out]) == 2

    assert drawn.startswith("ok    engines  llama.cpp b11434, from PATH")
    assert len(drawn.splitlines()) <= 40
    assert found["ok"] is True
    assert {tuple(each) for each in found["findings"]} == {("topic", "level", "fact", "next")}
    assert {each["level"] for each in found["findings"]} <= {"ok", "warn", "fail", "unknown"}
    assert "1 thing to mend before a run" in failed
    assert not (tmp_path / "runs").exists(), "looking leaves nothing behind"
