"""What this machine is: limits, GPUs that answer half of what they are asked, and no private facts."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import platform
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import fake_nvml
import psutil
import pytest
from fake_nvml import GIB, card
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from harness import differences, gpus, machine
from harness.contract import Device
from harness.gpu import Gpu
from harness.machine import Machine, Modules

NOT_AVAILABLE = 2**64 - 1


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


# ── GPUs: a driver library that answers as told ─────────────────────────────────────────────


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever this machine has: importing the driver's library raises."""
    fake_nvml.remove(monkeypatch)
    yield
    monkeypatch.undo()
    fake_nvml.forget()


@pytest.fixture
def driver(no_driver: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a driver with these cards in place of the real one."""
    return partial(fake_nvml.install, monkeypatch)


def test_a_card_that_answers_everything_is_recorded_in_full(driver: Callable[..., None], tmp_path: Path) -> None:
    driver(
        card(
            UUID="GPU-1",
            MigMode=(0, 0),
            CudaComputeCapability=(8, 9),
            MemoryBusWidth=192,
            MaxClockInfo=10501,
            EnforcedPowerLimit=200_000,
            UtilizationRates=types.SimpleNamespace(gpu=42, memory=1),
            CurrentClocksEventReasons=0x4 | 0x20 | 0x1,
        )
    )

    found = machine.read(tmp_path)

    assert found.gpus == (
        Gpu(
            name="NVIDIA GeForce RTX 4070",
            memory_bytes=12 * GIB,
            driver="580.1",
            compute="8.9",
            bus_width_bits=192,
            memory_clock_mhz=10501,
            clock_mhz=10501,
            power_limit_w=200.0,
        ),
    )
    assert found.visible_gpus == ("NVIDIA",)
    assert gpus.memory() == gpus.Memory(GIB, 12 * GIB)
    assert gpus.busy() == 0.42
    assert gpus.throttles() == frozenset({"power cap", "heat"})


def test_a_card_that_only_knows_its_name_does_no_harm(driver: Callable[..., None], tmp_path: Path) -> None:
    driver({"nvmlDeviceGetName": "Some GPU"})

    assert machine.read(tmp_path).gpus == (Gpu(name="Some GPU", driver="580.1"),)
    assert (gpus.memory(), gpus.busy(), gpus.throttles()) == (None, None, None)


@pytest.mark.parametrize(
    ("used", "total"),
    [(0, NOT_AVAILABLE), (NOT_AVAILABLE, 12 * GIB), (0, 0), (0, 64 << 20), (13 * GIB, 12 * GIB)],
    ids=["total not available", "used not available", "zero", "a carve-out", "more used than there is"],
)
def test_a_sentinel_is_no_amount_of_memory(driver: Callable[..., None], tmp_path: Path, used: int, total: int) -> None:
    driver(card(used=used, total=total))

    assert gpus.memory() is None
    assert machine.read(tmp_path).gpus[0].memory_bytes is None


def test_unified_memory_is_no_budget_whatever_the_driver_says(driver: Callable[..., None], tmp_path: Path) -> None:
    driver(card("NVIDIA GB10", total=2 * GIB), card())

    unified, plain = machine.read(tmp_path).gpus

    assert (unified.unified, unified.memory_bytes) == (True, None)
    assert (plain.unified, plain.memory_bytes) == (False, 12 * GIB)
    assert gpus.memory() == gpus.Memory(GIB, 12 * GIB)


def test_under_mig_the_card_as_a_whole_is_no_budget(driver: Callable[..., None], tmp_path: Path) -> None:
    driver(card("NVIDIA H100", MigMode=(1, 1)))

    gpu = machine.read(tmp_path).gpus[0]

    assert (gpu.mig, gpu.memory_bytes) == (True, None)


def test_an_older_driver_names_throttling_by_its_old_call(driver: Callable[..., None]) -> None:
    driver(card(CurrentClocksThrottleReasons=0x8))

    assert gpus.throttles() == frozenset({"hardware slowdown"})


def test_a_card_that_does_not_throttle_says_so_with_an_empty_set(driver: Callable[..., None]) -> None:
    driver(card(CurrentClocksEventReasons=0x1))

    assert gpus.throttles() == frozenset()


def test_without_a_driver_there_are_no_gpus_and_no_error(tmp_path: Path) -> None:
    found = machine.read(tmp_path)

    assert (found.gpus, found.visible_gpus) == ((), ())
    assert (gpus.memory(), gpus.busy(), gpus.throttles()) == (None, None, None)


def test_a_gpu_that_no_engine_can_use_is_said_in_those_words(tmp_path: Path) -> None:
    write(tmp_path, "sys/class/drm/card0/device/vendor", "0x1002")
    write(tmp_path, "sys/class/drm/card0-DP-1/device/vendor", "0x1002")
    write(tmp_path, "sys/class/drm/card1/device/vendor", "0x1234")  # the display of a virtual machine

    found = machine.read(tmp_path)

    assert found.visible_gpus == ("AMD",)
    assert "has a GPU (AMD) that this engine cannot use" in (machine.unused_gpu(found, ()) or "")
    assert machine.unused_gpu(found, (Device("Vulkan0"),)) is None


def test_a_card_that_is_seen_in_three_ways_is_one_card(driver: Callable[..., None], tmp_path: Path) -> None:
    driver(card())
    write(tmp_path, "sys/class/drm/card0/device/vendor", "0x10de")
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)

    assert machine.read(tmp_path).visible_gpus == ("NVIDIA",)


def test_an_nvidia_card_whose_driver_library_is_missing_is_still_visible(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)

    assert machine.read(tmp_path).visible_gpus == ("NVIDIA",)


def test_no_gpu_at_all_is_nothing_to_say(tmp_path: Path) -> None:
    assert machine.unused_gpu(machine.read(tmp_path), ()) is None


# ── limits ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def eight_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of four cores with two threads each, three caches deep."""
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: set(range(8)))
    for cpu in range(8):
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        write(tmp_path, f"{folder}/topology/physical_package_id", "0")
        write(tmp_path, f"{folder}/topology/core_id", str(cpu // 2))
        write(tmp_path, f"{folder}/cpufreq/scaling_governor", "powersave")
        halves = "0-3" if cpu < 4 else "4-7"
        for level, size, shared in (("1", "48K", str(cpu // 2)), ("2", "1024K", str(cpu // 2)), ("3", "16M", halves)):
            for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                write(tmp_path, f"{folder}/cache/index{level}/{name}", text)
    write(tmp_path, "proc/cpuinfo", "model name\t: Test CPU   @ 3 GHz\nflags\t\t: sse2 avx2 f16c fma avx512f")
    return tmp_path


def test_threads_of_one_core_count_once(eight_threads: Path) -> None:
    found = machine.read(eight_threads)

    assert (found.cpu, found.physical_cores, found.logical_cores) == ("Test CPU @ 3 GHz", 4, 8)
    assert found.cpu_flags == ("avx2", "fma", "f16c", "avx512f")
    assert found.governor == "powersave"


def test_the_last_level_cache_is_the_sum_over_its_parts(eight_threads: Path) -> None:
    assert machine.read(eight_threads).last_level_cache_bytes == 32 << 20


def test_affinity_limits_the_cores(eight_threads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: {0, 1, 5})

    found = machine.read(eight_threads)

    assert (found.physical_cores, found.logical_cores) == (2, 3)


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("250000 100000", (2, 3)), ("50000 100000", (1, 1)), ("max 100000", (4, 8)), ("", (4, 8))],
    ids=["two and a half", "half", "unlimited", "empty"],
)
def test_a_cpu_quota_of_version_2_limits_the_cores(eight_threads: Path, limit: str, cores: tuple[int, int]) -> None:
    write(eight_threads, "proc/self/cgroup", "0::/pod/inner")
    write(eight_threads, "sys/fs/cgroup/pod/cpu.max", limit)  # set above us, as a container runtime does
    write(eight_threads, "sys/fs/cgroup/pod/inner/cpu.max", "700000 100000" if limit[:1].isdigit() else "max 100000")

    found = machine.read(eight_threads)

    assert (found.physical_cores, found.logical_cores) == cores


def test_a_cpu_quota_of_version_1_limits_the_cores(eight_threads: Path) -> None:
    write(eight_threads, "proc/self/cgroup", "4:cpu,cpuacct:/job\n0::/")
    write(eight_threads, "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "300000")
    write(eight_threads, "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000")

    assert machine.read(eight_threads).physical_cores == 3


@pytest.mark.parametrize("version", [1, 2])
def test_a_memory_limit_is_the_memory_there_is(tmp_path: Path, version: int) -> None:
    mib = 1 << 20
    if version == 2:
        write(tmp_path, "proc/self/cgroup", "0::/")
        folder, names = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
    else:
        write(tmp_path, "proc/self/cgroup", "9:memory:/job")
        folder = "sys/fs/cgroup/memory/job"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    write(tmp_path, f"{folder}/{names[0]}", str(100 * mib))
    write(tmp_path, f"{folder}/{names[1]}", str(80 * mib))
    write(tmp_path, f"{folder}/memory.stat", f"anon 5\n{names[2]} {30 * mib}\n{names[2]}_x 7")

    found = machine.read(tmp_path)

    assert (found.memory_bytes, found.available_bytes) == (100 * mib, 50 * mib)


def test_no_more_is_available_than_a_limit_whose_use_is_not_told(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/memory.max", str(50 << 20))

    assert machine.read(tmp_path).available_bytes == 50 << 20


def test_an_unlimited_cgroup_leaves_the_memory_of_the_machine(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "9:memory:/")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")

    assert machine.read(tmp_path).memory_bytes == psutil.virtual_memory().total


# ── surroundings ────────────────────────────────────────────────────────────────────────────


def test_wsl_is_known_by_its_kernel(tmp_path: Path) -> None:
    write(tmp_path, "proc/sys/kernel/osrelease", "6.6.87.2-microsoft-standard-WSL2")
    write(tmp_path, "dev/dxg", "")

    found = machine.read(tmp_path)

    assert found.wsl
    assert found.visible_gpus == ("through WSL2",)


@pytest.mark.parametrize(
    ("path", "text"), [(".dockerenv", ""), ("proc/self/cgroup", "0::/kubepods/besteffort/pod1")], ids=["file", "cgroup"]
)
def test_a_container_is_known_by_its_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, text: str
) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "container"):
        monkeypatch.delenv(name, raising=False)
    assert not machine.read(tmp_path).container

    write(tmp_path, path, text)

    assert machine.read(tmp_path).container


def test_a_config_file_of_llama_cpp_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert machine.read(tmp_path).warnings == ()

    write(tmp_path, "etc/llama.cpp/config.ini", "n-cpu-moe = 7")
    write(tmp_path, "config/llama.cpp/config.ini", "")
    system, own = machine.read(tmp_path).warnings

    assert system.startswith("/etc/llama.cpp/config.ini applies to every llama.cpp engine")
    assert own.startswith("your own llama.cpp/config.ini is kept from the engines started here")


def test_a_bare_system_is_read_without_an_error_and_claims_nothing(tmp_path: Path) -> None:
    found = machine.read(tmp_path)

    assert (found.governor, found.numa_nodes, found.wsl) == (None, None, False)
    assert (found.physical_cores or 0) >= 1
    assert str(found.python).endswith(platform.python_version())


def test_the_record_of_this_machine_is_json_and_holds_nothing_private() -> None:
    found = machine.read()

    text = json.dumps(found.to_json())

    private = {platform.node(), str(Path.home()), os.environ.get("HOSTNAME", "")}
    if getpass.getuser() != "root":  # a word that kernels and systems use themselves
        private.add(getpass.getuser())
    assert not [word for word in private if len(word) > 3 and word in text]
    assert (found.memory_bytes or 0) >= (found.available_bytes or 0) > 0


def test_another_machine_is_told_by_what_changed_and_memory_in_use_is_not_a_change() -> None:
    before = machine.read()
    busier = dataclasses.replace(before, available_bytes=1)
    other = dataclasses.replace(
        before, cpu="Other CPU", physical_cores=(before.physical_cores or 0) + 1, gpus=(Gpu(name="X"),)
    )

    assert machine.changes(before, busier) == ()
    assert machine.changes(before, other)[0] == f"cpu was {before.cpu}, is Other CPU"
    assert machine.changes(before, other)[-1].endswith("is X")


def test_a_virtual_machine_is_known_by_its_board_and_its_cpu(tmp_path: Path) -> None:
    assert machine.read(tmp_path).hypervisor is None

    write(tmp_path, "proc/cpuinfo", "flags\t\t: avx2 hypervisor")
    assert machine.read(tmp_path).hypervisor == "unnamed"

    write(tmp_path, "sys/class/dmi/id/sys_vendor", "Microsoft Corporation")
    write(tmp_path, "sys/class/dmi/id/product_name", "Virtual Machine")
    assert machine.read(tmp_path).hypervisor == "Hyper-V"


def test_rented_metal_is_no_virtual_machine(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "flags\t\t: avx2")
    write(tmp_path, "sys/class/dmi/id/sys_vendor", "Amazon EC2")

    assert machine.read(tmp_path).hypervisor is None


@pytest.mark.parametrize(
    ("release", "version"),
    [("6.6.87.2-microsoft-standard-WSL2", 2), ("4.4.0-19041-Microsoft", 1), ("6.1.0-amd64", None)],
)
def test_the_two_kinds_of_wsl_are_told_apart(tmp_path: Path, release: str, version: int | None) -> None:
    write(tmp_path, "proc/sys/kernel/osrelease", release)

    assert machine.read(tmp_path).wsl_version == version


def test_what_decides_the_clock_is_recorded(eight_threads: Path) -> None:
    for cpu in range(8):
        folder = f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        write(eight_threads, f"{folder}/energy_performance_preference", "balance_power")
        write(eight_threads, f"{folder}/cpuinfo_max_freq", str(4_000_000 + cpu * 100_000))
    write(eight_threads, "sys/firmware/acpi/platform_profile", "balanced")

    found = machine.read(eight_threads)

    assert (found.energy_preference, found.platform_profile) == ("balance_power", "balanced")
    assert found.cpu_max_mhz == 4700


def test_a_quota_of_cpu_time_is_recorded_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pod")
    write(tmp_path, "sys/fs/cgroup/pod/cpu.max", "150000 100000")

    assert machine.read(tmp_path).cpu_quota_cores == 1.5


def test_fast_and_slow_cores_are_counted_apart(eight_threads: Path) -> None:
    assert machine.kinds_of_core(eight_threads) is None

    write(eight_threads, "sys/devices/cpu_core/cpus", "0-3")
    write(eight_threads, "sys/devices/cpu_atom/cpus", "4-5,6-7,8-99")

    assert machine.kinds_of_core(eight_threads) == (2, 2)


def test_fast_and_slow_cores_are_known_by_their_capacity_too(eight_threads: Path) -> None:
    for cpu in range(8):
        write(eight_threads, f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", "1024" if cpu < 2 else "446")

    assert machine.kinds_of_core(eight_threads) == (1, 3)


# ── memory modules ──────────────────────────────────────────────────────────────────────────

SERIAL = b"S3R1AL"


def structure(kind: int, fields: bytes, *texts: bytes) -> bytes:
    return (
        bytes([kind, 4 + len(fields), 0x34, 0x12]) + fields + b"".join(text + b"\0" for text in texts or (b"",)) + b"\0"
    )


def module(*texts: bytes, size_mib: int = 16384, speed: int = 4800, kind: int = 0x22) -> bytes:
    """A memory module of SMBIOS 2.8: its places, and among the texts its serial number."""
    fields = bytearray(0x28 - 4)
    fields[0x0C - 4 : 0x0E - 4] = size_mib.to_bytes(2, "little")
    fields[0x10 - 4 : 0x13 - 4] = bytes([1, 2, kind])
    fields[0x15 - 4 : 0x17 - 4] = (5600).to_bytes(2, "little")  # what is printed on it
    fields[0x18 - 4] = 3
    fields[0x20 - 4 : 0x22 - 4] = speed.to_bytes(2, "little")
    return structure(17, bytes(fields), *texts, SERIAL)


END = structure(127, b"")
OTHER = structure(0, bytes(20), b"A board", b"1.0")


def test_modules_are_counted_with_their_channels_and_the_speed_of_the_slowest() -> None:
    table = OTHER + module(b"DIMM 0", b"P0 CHANNEL A") + module(b"DIMM 1", b"P0 CHANNEL A", speed=4400)
    table += module(b"DIMM 0", b"P0 CHANNEL B") + module(b"DIMM 1", b"P0 CHANNEL B", size_mib=0)
    table += module(b"BIOS", b"CHANNEL C", kind=0x09) + END + module(b"after", b"the end")

    assert machine.read_modules(table) == Modules(speed_mts=4400, modules=3, channels=2)


@pytest.mark.parametrize(
    ("texts", "speed", "known"),
    [
        ((b"DIMM_A1", b"BANK 0"), 4800, Modules(4800, 1, None)),
        ((b"Controller0-ChannelA-DIMM0", b"BANK 0"), 4800, Modules(4800, 1, 1)),
        ((b"ChannelA-DIMM0", b""), 0, Modules(None, 1, 1)),
        ((b"ChannelA-DIMM0", b""), 0xFFFF, Modules(None, 1, 1)),
    ],
    ids=["no channel named", "channel in the place", "speed of 0", "speed of all ones"],
)
def test_what_a_board_leaves_open_is_unknown(texts: tuple[bytes, bytes], speed: int, known: Modules) -> None:
    assert machine.read_modules(module(*texts, speed=speed) + END) == known


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"\x11",
        bytes(64),
        b"\xff" * 64,
        b"\x11\x00" + bytes(40),  # a structure without a length would never end
        module(b"a", b"b")[:30],
        module(b"a", b"b").rstrip(b"\0"),
        structure(17, bytes([0xFF] * 200)),
        structure(17, bytes([9] * 16), b"only one text"),
    ],
    ids=["empty", "one byte", "zeros", "ones", "no length", "cut off", "no end of texts", "all ones", "no such text"],
)
def test_a_damaged_table_of_modules_does_no_harm(table: bytes) -> None:
    assert machine.read_modules(table).channels is None


@given(st.binary(max_size=300))
def test_any_table_of_modules_can_be_read(table: bytes) -> None:
    assert (machine.read_modules(module(b"a", b"Channel A") + table).modules or 0) >= 1


def test_modules_are_read_where_root_may_and_hold_no_serial_number(tmp_path: Path) -> None:
    (tmp_path / "sys/firmware/dmi/tables").mkdir(parents=True)
    (tmp_path / "sys/firmware/dmi/tables/DMI").write_bytes(module(b"DIMM 0", b"P0 CHANNEL A") + END)

    found = machine.read(tmp_path)

    assert (found.memory_speed_mts, found.memory_modules, found.memory_channels) == (4800, 1, 1)
    assert SERIAL.decode() not in json.dumps(found.to_json())


def test_a_virtual_board_is_not_believed_its_modules(tmp_path: Path) -> None:
    (tmp_path / "sys/firmware/dmi/tables").mkdir(parents=True)
    (tmp_path / "sys/firmware/dmi/tables/DMI").write_bytes(module(b"DIMM 0", b"P0 CHANNEL A") + END)
    write(tmp_path, "proc/cpuinfo", "flags\t\t: hypervisor")

    assert machine.read(tmp_path).memory_modules is None


def test_channels_are_known_from_error_counters_without_root(tmp_path: Path) -> None:
    for name, size, place in (("0", "16384", "channel 0 slot 0"), ("1", "16384", "channel 1 slot 0"), ("2", "0", "x")):
        write(tmp_path, f"sys/devices/system/edac/mc/mc0/dimm{name}/size", size)
        write(tmp_path, f"sys/devices/system/edac/mc/mc0/dimm{name}/dimm_location", place)

    found = machine.read(tmp_path)

    assert (found.memory_channels, found.memory_modules, found.memory_speed_mts) == (2, None, None)


# ── records of before ───────────────────────────────────────────────────────────────────────

LATER = (
    *("memory_speed_mts", "memory_modules", "memory_channels", "cpu_max_mhz", "cpu_quota_cores"),
    *("energy_preference", "platform_profile", "hypervisor", "wsl_version"),
)


def test_a_run_from_before_a_fact_was_recorded_is_read_compared_and_resumed(eight_threads: Path) -> None:
    now = dataclasses.replace(machine.read(eight_threads), memory_speed_mts=4800, hypervisor="KVM", cpu_max_mhz=4000)
    kept = {name: value for name, value in now.to_json().items() if name not in LATER}

    before = TypeAdapter(Machine).validate_python(kept)

    assert (before.memory_speed_mts, before.hypervisor) == (None, None)
    assert machine.changes(before, now) == ()
    named = {str(each): each.forbids for each in differences.of_machines(before, now)}
    assert named["memory speed was –, is 4800 MT/s"] is False
    assert not any(named.values())


def test_a_plug_pulled_does_not_forbid_to_go_on_and_another_governor_is_named() -> None:
    before = dataclasses.replace(machine.read(), on_ac_power=True, governor="performance")
    after = dataclasses.replace(before, on_ac_power=False, governor="powersave")

    assert machine.changes(before, after) == ()
    assert "governor was performance, is powersave" in [str(each) for each in differences.of_machines(before, after)]
