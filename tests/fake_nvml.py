"""A library of NVIDIA's driver that answers as told, in place of the real one."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from harness import nvml

GIB = 1 << 30
Card = dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """An answer that raises, in the library's own words."""

    why: str


ANSWERS = (
    *("HandleByIndex", "Name", "UUID", "MemoryInfo", "MigMode", "CudaComputeCapability", "MemoryBusWidth"),
    *("MaxClockInfo", "EnforcedPowerLimit", "PowerManagementDefaultLimit", "UtilizationRates", "DisplayActive"),
    *("CurrentClocksEventReasons", "CurrentClocksThrottleReasons", "Temperature", "TemperatureThreshold"),
    *("ComputeRunningProcesses", "GraphicsRunningProcesses", "CurrPcieLinkWidth", "MaxPcieLinkWidth"),
    *("CurrPcieLinkGeneration", "PowerUsage", "ClockInfo", "TotalEnergyConsumption"),
    "FieldValues",
)


def forget() -> None:
    """What was learnt of a driver: the next question finds another, or none."""
    nvml.library.cache_clear()
    nvml._devices.cache_clear()


def remove(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the library raises, whatever this machine has."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    forget()


def install(monkeypatch: pytest.MonkeyPatch, *cards: Card) -> None:
    """A driver with these cards; an answer that a card has not raises, as NVML does."""
    library = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def answer(name: str) -> Callable[..., Any]:
        def call(handle: Any = None, *more: Any) -> Any:
            if name == "nvmlDeviceGetHandleByIndex":
                return cards[handle]
            value = (handle or {}).get(name, NVMLError)
            value = value() if isinstance(value, types.FunctionType) else value  # asked at every moment anew
            if value is NVMLError:
                raise NVMLError("Not Supported")
            if isinstance(value, Refused):
                raise NVMLError(value.why)
            return [value.get(number) for number in more[0]] if name == "nvmlDeviceGetFieldValues" else value

        return call

    for name in ANSWERS:
        setattr(library, f"nvmlDeviceGet{name}", answer(f"nvmlDeviceGet{name}"))
    library.__dict__.update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlSystemGetDriverVersion=lambda: b"580.1",
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    forget()


def card(name: str = "NVIDIA GeForce RTX 4070", used: int = GIB, total: int = 12 * GIB, **answers: Any) -> Card:
    """A card that answers with its name, its memory and what else is given, named without `nvmlDeviceGet`."""
    told = {"Name": name, "MemoryInfo": types.SimpleNamespace(used=used, total=total), **answers}
    return {f"nvmlDeviceGet{key}": value for key, value in told.items()}
