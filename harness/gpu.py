"""What a GPU is and what it does at this moment, whoever built it; what its driver does not answer is None.

A vendor is one module beside this one that has the functions of `Provider`, and a line in
`harness.gpus`. Each answer is guarded on its own: a driver that knows the name of a card and
nothing else is as welcome as one that knows all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A card, as far as it never changes. `memory_bytes` is None where no number is a budget: unified memory, MIG."""

    name: str
    memory_bytes: int | None = None
    unified: bool = False
    mig: bool = False
    driver: str | None = None
    compute: str | None = None  # compute capability, "9.0"
    bus_width_bits: int | None = None
    memory_clock_mhz: int | None = None  # the highest
    power_limit_w: float | None = None
    clock_mhz: int | None = None  # the highest of its multiprocessors


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """A card at one moment: what changes while it works, and is cheap to ask."""

    used_bytes: int | None = None  # with what is reserved
    total_bytes: int | None = None
    busy: float | None = None  # share of time, over the driver's last window (at most 1 s)
    power_w: float | None = None
    celsius: float | None = None
    clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttles: frozenset[str] | None = None  # why it runs below its clock, in words; empty: it does not
    link_generation: int | None = None  # of PCIe; falls when idle
    lanes: int | None = None
    sent_bytes: int | None = None  # over PCIe by the card, since its driver was loaded
    received_bytes: int | None = None

    @property
    def free_bytes(self) -> int | None:
        return None if self.used_bytes is None or self.total_bytes is None else self.total_bytes - self.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """A card at one moment: what is asked once, before anything runs."""

    uuid: str | None = None
    reserved_bytes: int | None = None  # by the driver itself: 615 MiB on an idle H200
    display: bool | None = None  # a screen is drawn by it
    slowdown_celsius: float | None = None  # where it begins to slow down
    usual_power_w: float | None = None  # its power limit as shipped
    most_lanes: int | None = None  # of PCIe, that card and board have together


@dataclass(frozen=True, slots=True)
class Holder:
    """A process with memory of a card. In a container its number may be the host's."""

    pid: int
    used_bytes: int | None
    draws: bool = False  # it is listed for graphics, not for computing


@dataclass(frozen=True, slots=True)
class State:
    """All that is known of a card at one moment. `holders` is None where its driver does not tell."""

    gpu: Gpu
    glance: Glance = Glance()
    details: Details = Details()
    holders: tuple[Holder, ...] | None = None


class Provider(Protocol):
    """One vendor's driver. Without it every answer is empty; all of them are in the order of `cards`."""

    def cards(self) -> tuple[Gpu, ...]:
        """Those that engines may see."""
        ...

    def glances(self) -> tuple[Glance, ...]: ...

    def details(self) -> tuple[Details, ...]: ...

    def holders(self) -> tuple[tuple[Holder, ...] | None, ...]:
        """Of each card, the largest first; None where the driver does not tell."""
        ...

    def joules(self) -> tuple[float | None, ...]:
        """What each card's own counter has summed up; only differences mean anything."""
        ...
