"""NVIDIA's cards through NVML, each answer guarded on its own.

A driver, a card or a permission may refuse any call, and may answer with a number that stands for
"not available". Both are None here. A card that was lost while a run went on answers nothing more.
"""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from harness.gpu import Details, Glance, Gpu, Holder

UNIFIED = re.compile(r"\b(GB10|N1X?|Orin|Thor|Xavier|Tegra\w*)\b")  # the GPU has no memory of its own
LEAST_GPU_BYTES = 256 << 20  # a smaller total is a carve-out or a sentinel, never a card
MOST_CELSIUS = 130  # no chip survives it, so it is not measured
MOST_WATTS = 20_000  # nor is that
THROTTLES = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
ENERGY, INSTANT_POWER, SENT, RECEIVED = 83, 186, 197, 198  # numbers of NVML's fields
NARROW = 1 << 32  # a counter that stays below it may be one of 32 bits, which wraps within a load
MULTIPROCESSORS, MEMORY = 1, 2  # kinds of clock
FIELD_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by NVML's number of a type
VISIBLE = "CUDA_VISIBLE_DEVICES"


# ── the driver ──────────────────────────────────────────────────────────────────────────────


@cache
def library() -> Any | None:
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
    found = library()
    if found is None:
        return None
    try:
        answer = getattr(found, call)(*arguments)
    except (found.NVMLError, AttributeError, ValueError, TypeError, UnicodeDecodeError, ctypes.ArgumentError):
        return None
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


@dataclass(frozen=True, slots=True)
class _Device:
    """A card's handle, and what stays as it is while the driver runs."""

    handle: Any
    name: str
    is_unified: bool
    is_mig: bool
    total_bytes: int | None  # None where it is no budget: unified memory, MIG, a number that stands for something else


@cache
def _devices() -> tuple[_Device, ...]:
    """Those that engines may see. Looked up once: a card that is lost stays in its place and says nothing."""
    found = [ask("nvmlDeviceGetHandleByIndex", index) for index in range(_real(ask("nvmlDeviceGetCount"), 1) or 0)]
    return tuple(map(_device, _visible([handle for handle in found if handle is not None])))


def _device(handle: Any) -> _Device:
    name = str(ask("nvmlDeviceGetName", handle) or "NVIDIA GPU")
    is_unified, mode = bool(UNIFIED.search(name)), ask("nvmlDeviceGetMigMode", handle)
    is_mig = bool(mode and mode[0] == 1)
    memory = None if is_unified or is_mig else ask("nvmlDeviceGetMemoryInfo", handle)
    total_bytes = _real(getattr(memory, "total", None), LEAST_GPU_BYTES)
    return _Device(handle, name, is_unified, is_mig, None if _used(memory, total_bytes) is None else total_bytes)


def _visible(handles: list[Any]) -> list[Any]:
    """Without those that CUDA_VISIBLE_DEVICES hides, where it is certain which it means.

    CUDA counts the fastest card first, NVML by place on the bus: numbers mean the same only among
    equal cards, or where CUDA is told to count as NVML does.
    """
    words = os.environ.get(VISIBLE)
    if words is None:
        return handles
    names = {ask("nvmlDeviceGetName", handle) for handle in handles}
    by_number = len(names) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    shown = []
    for word in (each.strip() for each in words.split(",")):
        if word.startswith("MIG-"):
            return handles
        if word.isascii() and word.isdecimal():
            if not by_number:
                return handles
            if int(word) >= len(handles):
                break  # CUDA ends the list at the first that is none
            shown.append(handles[int(word)])
        elif word.startswith("GPU-"):
            shown += [each for each in handles if str(ask("nvmlDeviceGetUUID", each)).startswith(word)]
        else:
            break
    return [each for number, each in enumerate(shown) if each not in shown[:number]]  # no card counts twice


def _real(value: Any, least: int) -> int | None:
    """A whole number that NVML really measured: not "not available" (all bits set), not below `least`."""
    if not isinstance(value, int) or value in (2**32 - 1, 2**64 - 1) or value < least:
        return None
    return value


def _fields(handle: Any, *numbers: int) -> dict[int, int]:
    """Values of NVML's fields by number, those that were really measured."""
    found: dict[int, int] = {}
    for number, each in zip(numbers, ask("nvmlDeviceGetFieldValues", handle, list(numbers)) or (), strict=False):
        kind = getattr(each, "valueType", -1)
        if getattr(each, "nvmlReturn", 1) == 0 and 0 < kind < len(FIELD_TYPES):
            value = _real(getattr(getattr(each, "value", None), FIELD_TYPES[kind], None), 0)
            found |= {} if value is None else {number: value}
    return found


# ── what it answers ─────────────────────────────────────────────────────────────────────────


def cards() -> tuple[Gpu, ...]:
    return tuple(map(_card, _devices()))


def _card(device: _Device) -> Gpu:
    handle = device.handle
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    limit_mw = _real(ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1)
    return Gpu(
        name=device.name,
        memory_bytes=device.total_bytes,
        unified=device.is_unified,
        mig=device.is_mig,
        driver=ask("nvmlSystemGetDriverVersion"),
        compute=".".join(str(number) for number in capability) if capability else None,
        bus_width_bits=_real(ask("nvmlDeviceGetMemoryBusWidth", handle), 1),
        memory_clock_mhz=_real(ask("nvmlDeviceGetMaxClockInfo", handle, MEMORY), 1),
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
        clock_mhz=_real(ask("nvmlDeviceGetMaxClockInfo", handle, MULTIPROCESSORS), 1),
    )


def glances() -> tuple[Glance, ...]:
    return tuple(map(_glance, _devices()))


def _glance(device: _Device) -> Glance:
    handle, total_bytes = device.handle, device.total_bytes
    memory = None if total_bytes is None else ask("nvmlDeviceGetMemoryInfo", handle)
    rates = ask("nvmlDeviceGetUtilizationRates", handle)
    busy = _real(getattr(rates, "gpu", None), 0)
    fields = _fields(handle, INSTANT_POWER, SENT, RECEIVED)
    power_mw = fields.get(INSTANT_POWER) or _real(ask("nvmlDeviceGetPowerUsage", handle), 1)
    return Glance(
        used_bytes=_used(memory, total_bytes),
        total_bytes=total_bytes,
        busy=None if busy is None or busy > 100 else busy / 100,
        power_w=None if power_mw is None or power_mw > 1000 * MOST_WATTS else power_mw / 1000,
        celsius=_celsius(ask("nvmlDeviceGetTemperature", handle, 0)),  # 0: the chip
        clock_mhz=_real(ask("nvmlDeviceGetClockInfo", handle, MULTIPROCESSORS), 1),
        memory_clock_mhz=_real(ask("nvmlDeviceGetClockInfo", handle, MEMORY), 1),
        throttles=_throttles(handle),
        link_generation=_real(ask("nvmlDeviceGetCurrPcieLinkGeneration", handle), 1),
        lanes=_real(ask("nvmlDeviceGetCurrPcieLinkWidth", handle), 1),
        sent_bytes=_wide(fields.get(SENT)),
        received_bytes=_wide(fields.get(RECEIVED)),
    )


def details() -> tuple[Details, ...]:
    return tuple(map(_details, _devices()))


def _details(device: _Device) -> Details:
    handle = device.handle
    usual_mw = _real(ask("nvmlDeviceGetPowerManagementDefaultLimit", handle), 1)
    display = ask("nvmlDeviceGetDisplayActive", handle)
    parts = ask("nvmlDeviceGetMemoryInfo", handle, getattr(library(), "nvmlMemory_v2", None))
    return Details(
        uuid=ask("nvmlDeviceGetUUID", handle),
        reserved_bytes=_real(getattr(parts, "reserved", None), 0) if device.total_bytes is not None else None,
        display=None if display is None else bool(display),
        slowdown_celsius=_celsius(ask("nvmlDeviceGetTemperatureThreshold", handle, 1)),  # 1: slowdown
        usual_power_w=None if usual_mw is None else usual_mw / 1000,
        most_lanes=_real(ask("nvmlDeviceGetMaxPcieLinkWidth", handle), 1),
    )


def holders() -> tuple[tuple[Holder, ...] | None, ...]:
    return tuple(map(_holders, _devices()))


def _holders(device: _Device) -> tuple[Holder, ...] | None:
    handle = device.handle
    computing, drawing = (ask(f"nvmlDeviceGet{kind}RunningProcesses", handle) for kind in ("Compute", "Graphics"))
    if computing is None and drawing is None:
        return None
    sizes: dict[int, list[int]] = {}
    for each in chain(computing or (), drawing or ()):
        used = _real(getattr(each, "usedGpuMemory", None), 0)
        sizes.setdefault(int(each.pid), []).extend([] if used is None else [used])
    computes = {int(each.pid) for each in computing or ()}
    found = [Holder(pid, max(used, default=None), pid not in computes) for pid, used in sizes.items()]
    return tuple(sorted(found, key=lambda each: -(each.used_bytes or 0)))


def joules() -> tuple[float | None, ...]:
    """A part of a card that MIG splits has no counter of its own."""
    return tuple(map(_joules, _devices()))


def _joules(device: _Device) -> float | None:
    if device.is_mig:
        return None
    handle = device.handle
    used_mj = _fields(handle, ENERGY).get(ENERGY) or _real(ask("nvmlDeviceGetTotalEnergyConsumption", handle), 1)
    return None if used_mj is None else used_mj / 1000


def _wide(counter: int | None) -> int | None:
    return None if counter is None or counter < NARROW else counter


def _used(memory: Any, total_bytes: int | None) -> int | None:
    used = _real(getattr(memory, "used", None), 0)
    return None if used is None or total_bytes is None or used > total_bytes else used


def _throttles(handle: Any) -> frozenset[str] | None:
    bits = _real(ask("nvmlDeviceGetCurrentClocksEventReasons", handle), 0)
    if bits is None:
        bits = _real(ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle), 0)
    return None if bits is None else frozenset(word for bit, word in THROTTLES.items() if bits & bit)


def _celsius(answer: Any) -> float | None:
    """A sensor that is not there reads 0 or an absurd figure."""
    return float(answer) if isinstance(answer, int) and 0 < answer < MOST_CELSIUS else None
