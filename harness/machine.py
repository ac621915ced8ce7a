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
from pathlib import Path
from typing import Any

import psutil

from harness import gpus
from harness.contract import Device
from harness.gpu import Gpu

ROOT = Path("/")
CPU_FLAGS = (  # that inference kernels look for
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_bf16", "avx512_vnni", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "sve", "sve2"),
)
CHANNEL = re.compile(r".*?channel[ _-]*[a-z0-9]", re.I)  # of "P0 CHANNEL A", "Controller0-ChannelA-DIMM0"
VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
CPU_SENSORS = {  # chip, and how the label of a whole package begins, as Linux names them
    "coretemp": "Package", "k10temp": "Tctl", "zenpower": "Tdie", "cpu_thermal": "", "soc_thermal": "",
}  # fmt: skip
MOST_CELSIUS = 130  # no chip survives it, so it is not measured
HYPERVISORS = {  # what stands in maker, product or hypervisor type → its name
    "kvm": "KVM", "qemu": "QEMU", "vmware": "VMware", "virtualbox": "VirtualBox", "xen": "Xen", "amazon ec2": "EC2",
    "google compute engine": "Google Compute Engine", "virtual machine": "Hyper-V", "parallels": "Parallels",
    "bhyve": "bhyve", "apple virtualization": "Apple Virtualization",
}  # fmt: skip
MODULE, LAST_STRUCTURE = 17, 127  # types of SMBIOS structures
NO_RAM = frozenset({0x05, 0x06, 0x08, 0x09, 0x0A, 0x0B, 0x0C})  # kinds of module: video memory, caches, ROM, flash


@dataclass(frozen=True, slots=True)
class Modules:
    """Memory as the board describes it."""

    speed_mts: int | None = None  # as configured, of the slowest module
    modules: int | None = None
    channels: int | None = None  # with a module in them


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
    memory_speed_mts: int | None = None  # million transfers a second, as configured; tables of a board are root's
    memory_modules: int | None = None
    memory_channels: int | None = None  # with a module in them
    cpu_max_mhz: int | None = None  # of the fastest core
    cpu_quota_cores: float | None = None  # CPU time that a cgroup grants; None: all
    energy_preference: str | None = None
    platform_profile: str | None = None
    hypervisor: str | None = None  # whose virtual machine this is; None: of none that is known
    wsl_version: int | None = None
    wsl: bool = False
    container: bool = False
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read(root: Path = ROOT) -> Machine:
    """This machine now. `root` is where /proc, /sys and /etc are looked for."""
    kernel = platform.release()
    release = _text(root / "proc/sys/kernel/osrelease") or kernel
    wsl = "microsoft" in release.lower()
    physical, logical = _cores(root)
    memory, available = _memory(root)
    found = gpus.cards()
    hypervisor = _hypervisor(root)
    modules = Modules() if hypervisor or wsl else _modules(root)  # a virtual board makes them up
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
        governor=_one_word(root, "scaling_governor"),
        on_ac_power=_on_ac_power(),
        system=_system(),
        kernel=kernel,
        libc=" ".join(platform.libc_ver()).strip() or None,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        gpus=found,
        visible_gpus=tuple(_visible_gpus(root, found)),
        memory_speed_mts=modules.speed_mts,
        memory_modules=modules.modules,
        memory_channels=modules.channels,
        cpu_max_mhz=_cpu_max_mhz(root),
        cpu_quota_cores=_cpu_quota(root),
        energy_preference=_one_word(root, "energy_performance_preference"),
        platform_profile=_text(root / "sys/firmware/acpi/platform_profile") or None,
        hypervisor=hypervisor,
        wsl_version=(2 if "wsl2" in release.lower() or "microsoft-standard" in release else 1) if wsl else None,
        wsl=wsl,
        container=in_container(root),
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
        total, available = min(total, limit), min(available, limit)
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


def _one_word(root: Path, name: str) -> str | None:
    """What all cores say of their frequency under this name; several words where they differ."""
    found = {_text(path) for path in (root / "sys/devices/system/cpu").glob(f"cpu[0-9]*/cpufreq/{name}")}
    return ", ".join(sorted(word for word in found if word)) or None


def frequency_driver(root: Path = ROOT) -> str | None:
    """Which driver sets the frequency; what a governor means depends on it."""
    return _one_word(root, "scaling_driver")


def _cpu_max_mhz(root: Path) -> int | None:
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/cpuinfo_max_freq")
    khz = max((_number(path) or 0 for path in files), default=0)
    return khz // 1000 or None


def kinds_of_core(root: Path = ROOT) -> tuple[int, int] | None:
    """Physical cores that are fast, and those that are slower, among the ones we may use; None if all are alike."""
    allowed = _allowed_cpus() or set()
    fast, slow = (
        _cpu_list(_text(root / f"sys/devices/{name}/cpus") or "") & allowed for name in ("cpu_core", "cpu_atom")
    )
    if not fast or not slow:
        folder = root / "sys/devices/system/cpu"
        powers = {cpu: power for cpu in allowed if (power := _number(folder / f"cpu{cpu}/cpu_capacity"))}
        fast = {cpu for cpu, power in powers.items() if power == max(powers.values())}
        slow = powers.keys() - fast
    cores = tuple(len({_core_of(root, cpu) or ("", str(cpu)) for cpu in kind}) for kind in (fast, slow))
    if all(cores):
        return cores[0], cores[1]
    found = _sysctl("hw.perflevel0.physicalcpu", "hw.perflevel1.physicalcpu") or ""
    numbers = [int(word) for word in found.split() if word.isdigit()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 and all(numbers) else None


def _cpu_list(text: str) -> set[int]:
    """CPUs of "0-3,8"."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in spans for cpu in range(int(first), int(last or first) + 1)}


# ── memory modules ──────────────────────────────────────────────────────────────────────────


def _modules(root: Path) -> Modules:
    try:
        found = read_modules((root / "sys/firmware/dmi/tables/DMI").read_bytes())
    except OSError:  # only root may
        found = Modules()
    return found if found.channels else dataclasses.replace(found, channels=_edac_channels(root))


def read_modules(table: bytes) -> Modules:
    """Memory modules of an SMBIOS table, whatever it holds; serial numbers in it are not looked at.

    A structure is its type, its length, a handle, fields at fixed places and then its texts, each
    ended by a zero, the last by two. Fields that a board fills with 0 or all ones are unknown.
    """
    speeds: list[int | None] = []
    channels: list[str | None] = []
    at = 0
    while at + 4 <= len(table) and table[at] != LAST_STRUCTURE and table[at + 1] >= 4:
        fields = table[at : at + table[at + 1]]
        end = table.find(b"\0\0", at + len(fields))
        if end < 0:
            break
        size, kind = _field(fields, 0x0C, 2), _field(fields, 0x12, 1)
        if fields[0] == MODULE and size and kind not in NO_RAM:
            texts = table[at + len(fields) : end].split(b"\0")
            named = (_field(fields, place, 1) for place in (0x10, 0x11))
            told = [texts[number - 1].decode(errors="replace") for number in named if number and number <= len(texts)]
            channels.append(next((found[0].upper() for text in told if (found := CHANNEL.match(text))), None))
            speeds.append(_field(fields, 0x20, 2) or _field(fields, 0x58, 4))
        at = end + 2
    return Modules(
        speed_mts=min((speed for speed in speeds if speed), default=None) if all(speeds) else None,
        modules=len(speeds) or None,
        channels=len(set(channels)) or None if all(channels) else None,
    )


def _field(fields: bytes, place: int, length: int) -> int | None:
    raw = fields[place : place + length]
    unknown = len(raw) < length or set(raw) in ({0}, {0xFF})
    return None if unknown else int.from_bytes(raw, "little")


def _edac_channels(root: Path) -> int | None:
    """Channels with a module, as the error counters of server boards know them."""
    found = set()
    for folder in (root / "sys/devices/system/edac/mc").glob("mc[0-9]*/dimm[0-9]*"):
        channel = re.search(r"channel (\d+)", _text(folder / "dimm_location") or "")
        if channel and _number(folder / "size"):
            found.add((folder.parent.name, channel[1]))
    return len(found) or None


def _on_ac_power() -> bool | None:
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # absent on some systems
        battery = psutil.sensors_battery()
        return None if battery is None or battery.power_plugged is None else bool(battery.power_plugged)
    return None


# ── heat ────────────────────────────────────────────────────────────────────────────────────


def cpu_celsius() -> float | None:
    """Of the hottest CPU package; None where the system shows no such sensor (most virtual machines, macOS)."""
    return _hottest(each.current for each in _cpu_sensors() if each.current is not None)


def cpu_critical_celsius() -> float | None:
    """Where its maker says that a CPU package is too hot; the lowest of them."""
    known = (limit for each in _cpu_sensors() if (limit := _hottest([each.critical or each.high or 0])) is not None)
    return min(known, default=None)


def _cpu_sensors() -> list[Any]:
    sensors: dict[str, Any] = {}
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # absent on some systems
        sensors = psutil.sensors_temperatures()
    return [
        each for chip, label in CPU_SENSORS.items() for each in sensors.get(chip, ()) if each.label.startswith(label)
    ]


def _hottest(celsius: Iterable[float]) -> float | None:
    """A sensor that is not there reads 0 or an absurd figure."""
    return max((each for each in celsius if 0 < each < MOST_CELSIUS), default=None)


# ── GPUs ────────────────────────────────────────────────────────────────────────────────────


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


def in_container(root: Path) -> bool:
    if any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv")):
        return True
    if "KUBERNETES_SERVICE_HOST" in os.environ or os.environ.get("container"):  # noqa: SIM112
        return True
    return bool(re.search(r"docker|kubepods|containerd|lxc|podman", _text(root / "proc/self/cgroup") or ""))


def _hypervisor(root: Path) -> str | None:
    """Whose virtual machine this is, by its board and what its CPU says; WSL is told apart elsewhere."""
    flags = re.search(r"^flags\s*:(.*)$", _text(root / "proc/cpuinfo") or "", re.M)
    guest = None if flags is None else "hypervisor" in flags[1].split()
    if guest is False:  # rented metal has the name of its owner on the board
        return None
    names = ("hypervisor/type", "class/dmi/id/sys_vendor", "class/dmi/id/product_name")
    told = " ".join(_text(root / "sys" / name) or "" for name in names).lower()
    return next((name for word, name in HYPERVISORS.items() if word in told), "unnamed" if guest else None)


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
