"""Which placement of ours an engine's own choice is like: by the bytes that it put on the device.

`--fit` moves experts first and may move a part of a layer, so that its choice lies between two
values of N. The nearest one names it, and tells what a decoded token reads where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness import placement
from harness.contract import Buffer, Placement, Settings
from harness.model import Model
from harness.placement import Predicted

SAME_BYTES = 256 << 10  # off in all: buffers are printed to 10 KiB, and padded tensor by tensor


@dataclass(frozen=True, slots=True)
class Likeness:
    """The nearest placement. `exact`: the same bytes, as far as an engine prints them; a part of a layer is not."""

    placement: Placement
    predicted: Predicted
    exact: bool

    def in_words(self, model: Model) -> str:
        """ "engine's choice = ncmoe=16: experts of the first 16 of 48 layers on the CPU"; `≈` where it is only near."""
        sign = "=" if self.exact else "≈"
        return f"engine's choice {sign} {self.placement}: {placement.describe(self.placement, model)}"


def nearest(model: Model, buffers: Sequence[Buffer] | None, settings: Settings, *, depth: int = 0) -> Likeness | None:
    """The placement whose weights and context memory on the device are nearest to these buffers. None: unknown.

    What the engine read back as its context belongs into `settings`, else only weights are compared.
    """
    if buffers is None or placement.maps_file(buffers):
        return None
    weights, memory = (placement.held_bytes(buffers, kinds, on_host=False) for kinds in (("weights",), ("kv", "rs")))
    best: Likeness | None = None
    least = 0
    for where in _candidates(model):
        predicted = placement.predict(model, where, settings, device=True, depth=depth)
        assert predicted is not None
        off = abs(predicted.device_weights_bytes - weights)
        if predicted.device_memory_bytes is not None:
            off += abs(predicted.device_memory_bytes - memory)
        if best is None or off < least:
            best, least = Likeness(where, predicted, off <= SAME_BYTES), off
    return best


def _candidates(model: Model) -> list[Placement]:
    """From all on the device to nothing there; of equal ones the first is taken."""
    experts = [*(Placement("ncmoe", n) for n in range(1, model.blocks)), Placement("cpu-moe")]
    return [
        Placement("ngl", model.blocks + 1),
        *(experts if model.expert_layers else ()),
        *(Placement("ngl", n) for n in range(model.blocks, -1, -1)),
    ]
