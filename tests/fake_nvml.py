"""A library of NVIDIA's driver that answers as told, in place of the real one."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from harness import machine

GIB = 1 << 30
Card = dict[str, Any]
ANSWERS = (
    *("HandleByIndex", "Name", "UUID", "MemoryInfo", "MigMode", "CudaComputeCapability", "MemoryBusWidth"),
    *("MaxClockInfo", "EnforcedPowerLimit", "PowerManagementDefaultLimit", "UtilizationRates", "DisplayActive"),
    *("CurrentClocksEventReasons", "CurrentClocksThrottleReasons", "Temperature", "TemperatureThreshold"),
    *("ComputeRunningProcesses", "GraphicsRunningProcesses", "CurrPcieLinkWidth", "MaxPcieLinkWidth"),
)


def remove(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the library raises, whatever this machine has."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    machine.nvml.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, *cards: Card) -> None:
    """A driver with these cards; an answer that a card has not raises, as NVML does."""
    library = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def answer(name: str) -> Callable[..., Any]:
        def call(handle: Any = None, *_: Any) -> Any:
            if name == "nvmlDeviceGetHandleByIndex":
                return cards[handle]
            value = (handle or {}).get(name, NVMLError)
            if value is NVMLError:
                raise NVMLError("Not Supported")
            return value

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
    machine.nvml.cache_clear()


def card(name: str = "NVIDIA GeForce RTX 4070", used: int = GIB, total: int = 12 * GIB, **answers: Any) -> Card:
    """A card that answers with its name, its memory and what else is given, named without `nvmlDeviceGet`."""
    told = {"Name": name, "MemoryInfo": types.SimpleNamespace(used=used, total=total), **answers}
    return {f"nvmlDeviceGet{key}": value for key, value in told.items()}
