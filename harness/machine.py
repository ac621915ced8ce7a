"""What this machine is, as far as speed depends on it: cores, memory, GPUs, power, surroundings.

Everything is read from the system itself, and what cannot be read is None. The record holds
nothing private: no host name, no user, no serial number, no path below a home folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from harness.contract import Device

ROOT = Path("/")
CPU_FLAGS = (  # that inference kernels look for
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_bf16", "avx512_vnni", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "sve", "sve2"),
)
UNIFIED = re.compile(r"\b(GB10|N1X?|Orin|Thor|Xavier|Tegra\w*)\b")  # the GPU has no memory of its own
LEAST_GPU_BYTES = 256 << 20  # a smaller total is a carve-out or a sentinel, never a card
VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
CPU_SENSORS = {  # chip, and how the label of a whole package begins, as Linux names them
    "coretemp": "Package", "k10temp": "Tctl", "zenpower": "Tdie", "cpu_thermal": "", "soc_thermal": "",
}  # fmt: skip
MOST_CELSIUS = 130  # no chip survives it, so it is not measured
THROTTLES = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU. `memory_bytes` is None for unified memory and under MIG: no number is a budget there."""

    name: str
    memory_bytes: int | None = None
    unified: bool = False
    mig: bool = False
    driver: str | None = None
    compute: str | None = None  # compute capability, "9.0"
    bus_width_bits: int | None = None
    memory_clock_mhz: int | None = None  # the highest
    power_limit_w: float | None = None


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU at this moment, over all processes."""

    uuid: str
    name: str
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Cores and memory are those that this process may use: affinity and cgroup limits count.

    `read` knows all that has no default here; of a run that was taken over from elsewhere it may be None.
    """

    cpu: str | None
    physical_cores: int | None
    logical_cores: int | None
    memory_bytes: int | None
    available_bytes: int | None
    swap_bytes: int | None = None
    last_level_cache_bytes: int | None = None  # of all sockets that we run on
    numa_nodes: int | None = None
    cpu_flags: tuple[str, ...] | None = None  # those that inference kernels look for
    governor: str | None = None
    on_ac_power: bool | None = None
    system: str | None
    kernel: str | None
    libc: str | None = None
    python: str | None
    gpus: tuple[Gpu, ...] = ()  # those that NVML answers for
    visible_gpus: tuple[str, ...] = ()  # vendors of all GPUs that the system shows, usable or not
    wsl: bool = False
    container: bool = False
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read(root: Path = ROOT) -> Machine:
    """This machine now. `root` is where /proc, /sys and /etc are looked for."""
    kernel = platform.release()
    wsl = "microsoft" in (_text(root / "proc/sys/kernel/osrelease") or kernel).lower()
    physical, logical = _cores(root)
    memory, available = _memory(root)
    found = tuple(_gpus())
    return Machine(
        cpu=_cpu_name(root),
        physical_cores=physical,
        logical_cores=logical,
        memory_bytes=memory,
        available_bytes=available,
        swap_bytes=_swap_bytes(),
        last_level_cache_bytes=_last_level_cache(root),
        numa_nodes=len([*(root / "sys/devices/system/node").glob("node[0-9]*")]) or None,
        cpu_flags=_cpu_flags(root),
        governor=_governor(root),
        on_ac_power=_on_ac_power(),
        system=_system(),
        kernel=kernel,
        libc=" ".join(platform.libc_ver()).strip() or None,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        gpus=found,
        visible_gpus=tuple(_visible_gpus(root, found)),
        wsl=wsl,
        container=_in_container(root),
        warnings=tuple(_warnings(root)),
    )


def changes(before: Machine, after: Machine) -> tuple[str, ...]:
    """What makes `after` another machine than `before`, in words; memory in use and warnings do not."""
    return tuple(
        f"{name.replace('_', ' ')} was {_plain(old)}, is {_plain(new)}"
        for name in ("cpu", "physical_cores", "logical_cores", "system", "kernel", "gpus", "wsl", "container")
        if (old := getattr(before, name)) != (new := getattr(after, name))
    )


def unused_gpu(machine: Machine, devices: Iterable[Device]) -> str | None:
    """A sentence if the system shows a GPU but the engine sees no device; None if all is well."""
    if not machine.visible_gpus or any(devices):
        return None
    vendors = " and ".join(sorted(set(machine.visible_gpus)))
    return (
        f"this machine has a GPU ({vendors}) that this engine cannot use: the engine is built without it, or its "
        "driver is missing; take an engine built for it, or read the numbers as those of the CPU"
    )


# ── CPU and memory ──────────────────────────────────────────────────────────────────────────


def _cpu_name(root: Path) -> str:
    info = _text(root / "proc/cpuinfo") or ""
    found = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", info, re.M)
    name = found[1] if found else _sysctl("machdep.cpu.brand_string") or platform.processor()
    return " ".join(name.split()) or f"unknown {platform.machine()} CPU"


def _cores(root: Path) -> tuple[int, int]:
    """Physical and logical cores within affinity and cgroup quota, each at least 1."""
    allowed = _allowed_cpus()
    logical = len(allowed) if allowed else psutil.cpu_count() or 1
    places = {place for cpu in allowed or () if (place := _core_of(root, cpu))}
    physical = len(places) or min(psutil.cpu_count(logical=False) or logical, logical)
    quota = _cpu_quota(root)
    if quota is not None:
        logical, physical = min(logical, math.ceil(quota)), min(physical, math.floor(quota))
    return max(1, physical), max(1, logical)


def _allowed_cpus() -> set[int] | None:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _core_of(root: Path, cpu: int) -> tuple[str, str] | None:
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    package, core = _text(folder / "physical_package_id"), _text(folder / "core_id")
    return None if package is None or core is None else (package, core)


def _cpu_quota(root: Path) -> float | None:
    """CPUs that the cgroup grants, the smallest on the way up; None if unlimited."""
    limits = []
    for folder in _cgroups(root, "cpu"):
        pair = (_text(folder / "cpu.max") or "").split()
        if not pair:
            pair = [_text(folder / f"cpu.cfs_{word}_us") or "" for word in ("quota", "period")]
        if len(pair) == 2 and pair[0].isdigit() and pair[1].isdigit() and int(pair[1]):
            limits.append(int(pair[0]) / int(pair[1]))
    return min(limits, default=None)


def _memory(root: Path) -> tuple[int, int]:
    """Total and available bytes; where a cgroup limits us, its limit and what is left of it."""
    system = psutil.virtual_memory()
    total, available = int(system.total), int(system.available)
    for folder in _cgroups(root, "memory"):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is None:
            continue
        total = min(total, limit)
        if used is not None:  # file pages that nobody uses are given up before anything is refused
            stat = _text(folder / "memory.stat") or ""
            idle = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.M)
            available = min(available, max(0, limit - used + (int(idle[1]) if idle else 0)))
    return total, available


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of our cgroup and of every one above it, in version 2 and in version 1."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            bases = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            bases = [root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup" / controller]
        else:
            continue
        inner = Path(path.lstrip("/"))
        for base in bases:
            if base.is_dir():
                yield from (base / part for part in (inner, *inner.parents))
                break


def _swap_bytes() -> int | None:
    with warnings.catch_warnings(), contextlib.suppress(OSError, RuntimeError):
        warnings.simplefilter("ignore")  # psutil warns where a kernel hides its swap counters
        return int(psutil.swap_memory().total)
    return None


def _last_level_cache(root: Path) -> int | None:
    caches: dict[int, dict[str, int]] = {}  # level → CPUs that share it → bytes
    for cpu in _allowed_cpus() or ():
        for index in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*"):
            level, size = _text(index / "level"), _text(index / "size")
            found = re.fullmatch(r"(\d+)([KM]?)", size or "")
            if level and level.isdigit() and found:
                shared = _text(index / "shared_cpu_list") or str(cpu)
                caches.setdefault(int(level), {})[shared] = int(found[1]) << {"K": 10, "M": 20, "": 0}[found[2]]
    if caches:
        return sum(caches[max(caches)].values())
    size = _sysctl("hw.l3cachesize") or _sysctl("hw.l2cachesize")
    return int(size) if size and size.isdigit() and int(size) else None


def _cpu_flags(root: Path) -> tuple[str, ...] | None:
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _text(root / "proc/cpuinfo") or "", re.M)
    listed = found[1] if found else _sysctl("machdep.cpu.features", "machdep.cpu.leaf7_features")
    if not listed:
        return None
    words = set(listed.lower().split())
    return tuple(flag for flag in CPU_FLAGS if flag in words)


def _governor(root: Path) -> str | None:
    found = {_text(path) for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")}
    return ", ".join(sorted(word for word in found if word)) or None


def _on_ac_power() -> bool | None:
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # absent on some systems
        battery = psutil.sensors_battery()
        return None if battery is None or battery.power_plugged is None else bool(battery.power_plugged)
    return None


# ── GPUs ────────────────────────────────────────────────────────────────────────────────────


@cache
def nvml() -> Any | None:
    """The NVML module, started; None without a driver. Every call on it can still fail: use `ask`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the deprecated wrapper of the same name warns when imported
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:
            return None
    return pynvml


def ask(call: str, *arguments: Any) -> Any | None:
    """One NVML call by name; None where this driver, card or permission does not answer it."""
    library = nvml()
    if library is None:
        return None
    try:
        answer = getattr(library, call)(*arguments)
    except (library.NVMLError, AttributeError, ValueError, UnicodeDecodeError):
        return None
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def _handles() -> Iterator[Any]:
    for index in range(_real(ask("nvmlDeviceGetCount"), 1) or 0):
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        if handle is not None:
            yield handle


def _gpus() -> Iterator[Gpu]:
    for handle in _handles():
        name = ask("nvmlDeviceGetName", handle) or "NVIDIA GPU"
        memory = _gpu_bytes(handle, name)
        capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
        limit_mw = _real(ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1)
        yield Gpu(
            name=name,
            memory_bytes=memory[1] if memory else None,
            unified=bool(UNIFIED.search(name)),
            mig=_is_mig(handle),
            driver=ask("nvmlSystemGetDriverVersion"),
            compute=".".join(str(number) for number in capability) if capability else None,
            bus_width_bits=_real(ask("nvmlDeviceGetMemoryBusWidth", handle), 1),
            memory_clock_mhz=_real(ask("nvmlDeviceGetMaxClockInfo", handle, 2), 1),  # 2: memory
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
        )


def gpu_memory() -> tuple[GpuMemory, ...] | None:
    """Used and total memory of every GPU that has its own; None where no GPU says so."""
    found: list[GpuMemory] = []
    for handle in _handles():
        name = ask("nvmlDeviceGetName", handle) or "NVIDIA GPU"
        if memory := _gpu_bytes(handle, name):
            found.append(GpuMemory(ask("nvmlDeviceGetUUID", handle) or str(len(found)), name, *memory))
    return tuple(found) or None


def gpu_busy() -> float | None:
    """Share of time that the busiest GPU worked, over its driver's last window (at most 1 s)."""
    shares = [rates.gpu / 100 for handle in _handles() if (rates := ask("nvmlDeviceGetUtilizationRates", handle))]
    return max(shares, default=None)


def gpu_throttles() -> frozenset[str] | None:
    """Why a GPU runs below its clock right now, in words; empty if none does; None if no GPU says."""
    answers = [
        _real(answer, 0)
        for handle in _handles()
        if (answer := ask("nvmlDeviceGetCurrentClocksEventReasons", handle)) is not None
        or (answer := ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)) is not None
    ]
    bits = [answer for answer in answers if answer is not None]
    return frozenset(word for bit, word in THROTTLES.items() if any(each & bit for each in bits)) if bits else None


def gpu_celsius() -> float | None:
    """Of the hottest GPU; None where no driver tells."""
    answers = (_real(ask("nvmlDeviceGetTemperature", handle, 0), 1) for handle in _handles())  # 0: the chip
    return _hottest(answer for answer in answers if answer is not None)


def cpu_celsius() -> float | None:
    """Of the hottest CPU package; None where the system shows no such sensor (most virtual machines, macOS)."""
    sensors: dict[str, Any] = {}
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # absent on some systems
        sensors = psutil.sensors_temperatures()
    return _hottest(
        each.current
        for chip, label in CPU_SENSORS.items()
        for each in sensors.get(chip, ())
        if each.label.startswith(label) and each.current is not None
    )


def _hottest(celsius: Iterable[float]) -> float | None:
    """A sensor that is not there reads 0 or an absurd figure."""
    return max((each for each in celsius if 0 < each < MOST_CELSIUS), default=None)


def _gpu_bytes(handle: Any, name: str) -> tuple[int, int] | None:
    """Used and total bytes, or None where they are no budget: unified memory, MIG, sentinels."""
    if UNIFIED.search(name) or _is_mig(handle):
        return None
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    total = _real(getattr(memory, "total", None), LEAST_GPU_BYTES)
    used = _real(getattr(memory, "used", None), 0)
    return None if total is None or used is None or used > total else (used, total)


def _is_mig(handle: Any) -> bool:
    mode = ask("nvmlDeviceGetMigMode", handle)
    return bool(mode and mode[0] == 1)


def _real(value: Any, least: int) -> int | None:
    """A whole number that NVML really measured: not "not available" (all bits set), not below `least`."""
    if not isinstance(value, int) or value in (2**32 - 1, 2**64 - 1) or value < least:
        return None
    return value


def _visible_gpus(root: Path, found: Iterable[Gpu]) -> Iterator[str]:
    """Vendor of each GPU that the kernel shows; virtual display adapters do not count."""
    cards = [path for path in sorted((root / "sys/class/drm").glob("card*")) if path.name[4:].isdigit()]
    vendors = [VENDORS[word] for card in cards if (word := _text(card / "device/vendor")) in VENDORS]
    nvidia = max(len([*(root / "proc/driver/nvidia/gpus").glob("*")]), len(list(found)))
    yield from ["NVIDIA"] * max(0, nvidia - vendors.count("NVIDIA"))
    yield from vendors
    if not vendors and not nvidia:
        if (root / "dev/dxg").exists():
            yield "through WSL2"
        elif (root / "dev/kfd").exists():
            yield "AMD"
        elif sys.platform == "darwin" and platform.machine() == "arm64":
            yield "Apple"


# ── surroundings ────────────────────────────────────────────────────────────────────────────


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME") or platform.system()
    return platform.system()


def _in_container(root: Path) -> bool:
    if any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv")):
        return True
    if "KUBERNETES_SERVICE_HOST" in os.environ or os.environ.get("container"):  # noqa: SIM112
        return True
    return bool(re.search(r"docker|kubepods|containerd|lxc|podman", _text(root / "proc/self/cgroup") or ""))


def _warnings(root: Path) -> Iterator[str]:
    if (root / "etc/llama.cpp/config.ini").is_file():
        yield (
            "/etc/llama.cpp/config.ini applies to every llama.cpp engine on this machine and no flag turns it off: "
            "move it away, or read all results as measured with it"
        )
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    if (Path(base) / "llama.cpp/config.ini").is_file():
        yield (
            "your own llama.cpp/config.ini is kept from the engines started here, "
            "but an engine that runs already (attached) may follow it"
        )


def _sysctl(*names: str) -> str | None:
    if sys.platform != "darwin":
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["sysctl", "-n", *names], capture_output=True, text=True, timeout=5, check=False)
        return done.stdout.strip() or None
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(*paths: Path) -> int | None:
    """The first of these files that holds a whole number."""
    return next((int(text) for path in paths if (text := _text(path)) and text.isdigit()), None)


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(gpu.name for gpu in value) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
