"""All GPUs that engines may see, through whatever drivers answer here.

A vendor that is missing is one module with the functions of `gpu.Provider`, named in `PROVIDERS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness import nvml
from harness.gpu import Glance, Gpu, Holder, Provider, State

PROVIDERS: tuple[Provider, ...] = (nvml,)


@dataclass(frozen=True, slots=True)
class Memory:
    """Of all cards that have memory of their own, over all processes."""

    used_bytes: int
    total_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


def cards() -> tuple[Gpu, ...]:
    return tuple(each for provider in PROVIDERS for each in provider.cards())


def glances() -> tuple[Glance, ...]:
    """Every card now, in the order of `cards`."""
    return tuple(each for provider in PROVIDERS for each in provider.glances())


def holders() -> tuple[tuple[Holder, ...] | None, ...]:
    """Who has memory of each card; None where its driver does not tell."""
    return tuple(each for provider in PROVIDERS for each in provider.holders())


def states() -> tuple[State, ...]:
    """Every card with all that is known of it now."""
    return tuple(
        State(*parts)
        for provider in PROVIDERS
        for parts in zip(provider.cards(), provider.glances(), provider.details(), provider.holders(), strict=True)
    )


def joules() -> float | None:
    """What all cards have used since some moment; None unless each of them counts."""
    known = [each for provider in PROVIDERS for each in provider.joules()]
    return sum(each for each in known if each is not None) if known and None not in known else None


def memory(seen: Iterable[Glance] | None = None) -> Memory | None:
    """None where no card has memory of its own, or one that has says nothing now: without it the sum is another."""
    own = [each for each in (glances() if seen is None else seen) if each.total_bytes is not None]
    used = [each.used_bytes for each in own if each.used_bytes is not None]
    if not own or len(used) < len(own):
        return None
    return Memory(sum(used), sum(each.total_bytes or 0 for each in own))


def busy(seen: Iterable[Glance] | None = None) -> float | None:
    """Share of time that the busiest card worked."""
    known = [each.busy for each in (glances() if seen is None else seen)]
    return max((share for share in known if share is not None), default=None)


def celsius(seen: Iterable[Glance] | None = None) -> float | None:
    """Of the hottest card."""
    known = [each.celsius for each in (glances() if seen is None else seen)]
    return max((heat for heat in known if heat is not None), default=None)


def throttles(seen: Iterable[Glance] | None = None) -> frozenset[str] | None:
    """Why a card runs below its clock now, in words; empty if none does; None if no card tells."""
    known = [each.throttles for each in (glances() if seen is None else seen) if each.throttles is not None]
    return frozenset[str]().union(*known) if known else None
