"""Where the weights will live, where they do live, and whether that is the same.

The prediction follows llama.cpp's own rules: `-ngl` counts layers from the end, the head first;
embeddings stay on the host; `--cpu-moe` and `--n-cpu-moe` take routed experts by name, from the
first block on; a layer's keys and values follow the layer. Two arms of one engine whose weights
would live in the same places are one placement, whatever their flags say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from harness import header
from harness.contract import Arm, Buffer, Placement, Realised, Settings
from harness.model import Memory, Model, Tensor
from harness.sizes import format_bytes

TOLERANCE_SHARE = 0.01  # of predicted bytes: buffers are padded tensor by tensor
TOLERANCE_BYTES = 1 << 20
HOST_SHARE = 0.1  # host buffers overlap: spans of a mapped file, repacked copies
TIGHT_BYTES = 1 << 30  # free before a load; compute buffers and the driver's own share come out of it
SPILL_BYTES = 256 << 20  # free after a load
ON_HOST = ("token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight", "token_types.weight")
WITH_FIRST_BLOCK = ("token_embd_norm.", "rope_freqs.", "rope_factors_", "per_layer_model_proj.", "per_layer_proj_norm.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One placement in bytes. Without compute buffers; what depends on unknown settings is None."""

    placement_class: str  # equal exactly if the same tensors live on the device
    host_bytes: int | None  # weights and what layers remember
    device_bytes: int | None
    bytes_per_token_host: int  # read to decode one token
    bytes_per_token_device: int
    host_weights_bytes: int
    device_weights_bytes: int
    crossings: int = 0  # times that one token's activations change between host and device


class Cell(StrEnum):
    """How a placement sits in device memory."""

    FITS = "FITS"
    TIGHT = "TIGHT"
    SPILLED = "SPILLED"
    DOES_NOT_FIT = "DOES_NOT_FIT"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class _Rule:
    """A placement as llama.cpp reads it: so many layers from the end, so many blocks' experts taken back."""

    ngl: int
    expert_blocks: int = 0

    def holds_block(self, block: int, model: Model) -> bool:
        return block >= model.blocks + 1 - self.ngl

    def holds_head(self) -> bool:
        return self.ngl >= 1

    def holds(self, tensor: Tensor, model: Model) -> bool:
        """Whether a tensor lives on the device."""
        if tensor.block is not None:
            taken_back = tensor.routed and tensor.block < self.expert_blocks
            return self.holds_block(tensor.block, model) and not taken_back
        if tensor.name.startswith(WITH_FIRST_BLOCK):
            return self.holds_block(0, model)
        return tensor.name not in ON_HOST and self.holds_head()


def predict(
    model: Model, placement: Placement, settings: Settings, device: bool, *, depth: int = 0
) -> Predicted | None:
    """Bytes per device, exactly as the engine will ask for them; None where the engine itself chooses.

    `device` tells whether there is one that the engine can use; `depth` is the number of tokens
    already in the context, whose keys and values a decoded token reads besides the weights.
    """
    rule = _rule(placement, model, device)
    if rule is None:
        return None
    homes = [(tensor, rule.holds(tensor, model)) for tensor in model.loaded]
    copied = tuple(tensor for tensor in model.loaded if _is_copied(tensor, model, rule))
    weights, read = [0, 0], [0.0, 0.0]  # host, device
    for tensor, home in homes:
        weights[home] += tensor.bytes
        if model.tied and tensor.name == "token_embd.weight":  # one row here, all of it as the head
            read[home] += tensor.bytes / tensor.shape[-1]
            read[rule.holds_head()] += tensor.bytes
        else:
            read[home] += model.read_bytes(tensor)
    weights[True] += sum(tensor.bytes for tensor in copied)
    kept = _kept(model, settings)
    memory = None if kept is None else [0, 0]
    for block in range(model.layers):
        home = rule.holds_block(block, model)
        if memory is not None and kept is not None:
            memory[home] += kept[block]
        if model.memory is not None:
            read[home] += _remembered(model.memory[block], settings, depth)
    held = [tensor.name for tensor, home in homes if home] + [f"copy of {tensor.name}" for tensor in copied]
    held += [f"memory of {block}" for block in range(model.layers) if rule.holds_block(block, model)]
    return Predicted(
        placement_class=_class(placement, device, held),
        host_bytes=None if memory is None else weights[False] + memory[False],
        device_bytes=None if memory is None else weights[True] + memory[True],
        bytes_per_token_host=round(read[False]),
        bytes_per_token_device=round(read[True]),
        host_weights_bytes=weights[False],
        device_weights_bytes=weights[True],
        crossings=_crossings(model, rule),
    )


def _rule(placement: Placement, model: Model, device: bool) -> _Rule | None:
    everything = model.blocks + 1
    number = placement.n or 0
    if not device or placement.kind == "cpu":
        known = placement.kind in ("auto", "cpu", "ngl", "cpu-moe", "ncmoe")
        return _Rule(0) if known else None
    match placement.kind:
        case "ngl":
            return _Rule(min(number, everything))
        case "cpu-moe":
            return _Rule(everything, model.blocks)
        case "ncmoe":
            return _Rule(everything, number)
    return None


def _is_copied(tensor: Tensor, model: Model, rule: _Rule) -> bool:
    """A tied embedding is looked up on the host and serves as the head on the device: it is in both."""
    return model.tied and tensor.name == "token_embd.weight" and rule.holds_head()


def _class(placement: Placement, device: bool, held: Sequence[str]) -> str:
    """`host` where no device takes part. With one, prompts may run on it even if it holds no weight."""
    if not device or placement.kind == "cpu":
        return "host"
    return hashlib.sha256("\n".join(sorted(held)).encode()).hexdigest()[:12]


def _kept(model: Model, settings: Settings) -> tuple[int, ...] | None:
    """Bytes that each layer allocates for keys, values and states; None if a setting is the engine's own."""
    if settings.context is None or settings.kv_k is None or settings.kv_v is None:
        return None
    batch = min(settings.context, settings.batch or settings.context)
    return model.memory_bytes(
        settings.context,
        settings.kv_k,
        settings.kv_v,
        ubatch=min(batch, settings.ubatch or 512),
        flash_attention=settings.flash_attention != "off",
    )


def _remembered(layer: Memory, settings: Settings, depth: int) -> float:
    """Bytes of a layer's memory that one token touches: keys and values read, a state read and written.

    A type left to the engine counts as f16, the default of all.
    """
    seen = depth if layer.window is None else min(depth, layer.window)
    row = 0.0
    for elements, kind in ((layer.keys, settings.kv_k or "f16"), (layer.values, settings.kv_v or "f16")):
        block, size = header.block_of(kind)
        row += elements / block * size
    return seen * row + 2 * layer.state_bytes


def _crossings(model: Model, rule: _Rule) -> int:
    """Changes of place on the way of one token: embedding, each layer's attention and experts, head, result."""
    experts = frozenset(model.expert_layers)
    path = [False]
    for block in range(model.layers):
        home = rule.holds_block(block, model)
        path += [home, home and not (block in experts and block < rule.expert_blocks)]
    path += [rule.holds_head(), False]
    return sum(a != b for a, b in pairwise(path))


# ── in words ────────────────────────────────────────────────────────────────────────────────


def describe(placement: Placement, model: Model, device: bool = True) -> str:
    """One placement of this model as a person would say it."""
    rule = _rule(placement, model, device)
    if rule is None:
        return "engine's own choice" if placement.kind == "auto" else str(placement)
    if not device:
        return "no GPU: one placement"
    if placement.kind == "cpu":
        return "whole model on the CPU"
    total = len(model.expert_layers)
    taken = sum(block < rule.expert_blocks for block in model.expert_layers)
    if placement.kind in ("cpu-moe", "ncmoe"):
        kind = "layers" if total == model.layers else "expert layers"
        if not total:
            return "all layers on the GPU (this model has no experts)"
        if not taken:
            return "all layers on the GPU"
        return (
            "all experts on the CPU" if taken == total else f"experts of the first {taken} of {total} {kind} on the CPU"
        )
    held = sum(rule.holds_block(block, model) for block in range(model.layers))
    if held == model.layers:
        return "all layers on the GPU"
    if not held:
        return "no layer on the GPU" if not rule.holds_head() else "only the output head on the GPU"
    return f"the last {held} of {model.layers} layers and the head on the GPU"


def aliases(arms: Iterable[tuple[Arm, Predicted | None]]) -> dict[Arm, Arm]:
    """Each arm that is the same placement as an earlier one, with that one. Engine and knobs must be equal."""
    first: dict[tuple[str, tuple[tuple[str, str], ...], str], Arm] = {}
    found: dict[Arm, Arm] = {}
    for arm, predicted in arms:
        if predicted is not None:
            key = (arm.backend, arm.knobs, predicted.placement_class)
            if key in first:
                found[arm] = first[key]
            else:
                first[key] = arm
    return found


# ── does it fit ─────────────────────────────────────────────────────────────────────────────


def fits(
    predicted: Predicted | None,
    device_bytes: int | None,
    *,
    loaded: bool | None = None,
    free_bytes: int | None = None,
) -> Cell:
    """How a placement sits in `device_bytes` of device memory.

    Before a load `loaded` is None. Loaded although it needs more than there is: spilled into host
    memory, as WSL2 and Windows drivers do without a word. `free_bytes` is what is free after it.
    """
    if predicted is None or predicted.device_bytes is None or device_bytes is None:
        return Cell.UNKNOWN
    if predicted.device_bytes > device_bytes:
        return Cell.SPILLED if loaded else Cell.DOES_NOT_FIT
    if loaded is False:
        return Cell.DOES_NOT_FIT
    if free_bytes is not None:
        return Cell.TIGHT if free_bytes < SPILL_BYTES else Cell.FITS
    return Cell.TIGHT if device_bytes - predicted.device_bytes < TIGHT_BYTES and predicted.device_bytes else Cell.FITS


def refusal(
    predicted: Predicted, memory_bytes: int | None, device_bytes: int | None, *, device_is_host: bool = False
) -> str | None:
    """Why this cannot be loaded, in one sentence with the next step; None if it may.

    `device_bytes` is the size of a device that never refuses by itself (a stand-in). With
    `device_is_host` what lives on the device takes host memory too. Unknown sizes refuse nothing.
    """
    need = predicted.device_bytes or predicted.device_weights_bytes
    if device_bytes is not None and need > device_bytes:
        return (
            f"it needs {format_bytes(need)} on a device of {format_bytes(device_bytes)}; "
            "put fewer layers or experts there (ngl=N, ncmoe=N, cpu-moe), or take a smaller context"
        )
    need_host = predicted.host_bytes or predicted.host_weights_bytes
    need_host += need if device_is_host else 0
    if memory_bytes is not None and need_host > memory_bytes:
        return (
            f"it needs {format_bytes(need_host)} of host memory and this machine has {format_bytes(memory_bytes)}; "
            "take a smaller model or context, or put more of it on a GPU"
        )
    return None


# ── what the engine did ─────────────────────────────────────────────────────────────────────


def judge(predicted: Predicted | None, buffers: Sequence[Buffer] | None) -> str | None:
    """Why the realised placement is not the predicted one; None if it is, or if one of them is unknown.

    Device bytes count, to 1 % or 1 MiB. Host buffers overlap, so they only must not be far too few.
    Where the device maps the file itself, its sizes are spans of the file and prove nothing.
    """
    if predicted is None or buffers is None:
        return None
    if any(buffer.device.endswith("_Mapped") and not buffer.on_host for buffer in buffers):
        return None
    parts = [("weights", predicted.device_weights_bytes, _sum(buffers, ("weights",), on_host=False))]
    if predicted.device_bytes is not None:
        memory = predicted.device_bytes - predicted.device_weights_bytes
        parts.append(("context memory", memory, _sum(buffers, ("kv", "rs"), on_host=False)))
    for what, expected, seen in parts:
        if not same_bytes(expected, seen):
            return f"{format_bytes(seen)} of {what} on the device, where {format_bytes(expected)} were predicted"
    if predicted.host_bytes is not None:
        host = _sum(buffers, ("weights", "kv", "rs"), on_host=True)
        if host + TOLERANCE_BYTES < predicted.host_bytes * (1 - HOST_SHARE):
            return f"{format_bytes(host)} on the host, where {format_bytes(predicted.host_bytes)} were predicted"
    return None


def is_noop(
    predicted: Predicted | None, realised: Realised | None, other: Predicted | None, other_realised: Realised | None
) -> bool:
    """Whether this placement was to differ from the other one, and put its bytes where the other did."""
    if predicted is None or other is None or realised is None or other_realised is None:
        return False
    if realised.buffers is None or other_realised.buffers is None:
        return False
    if predicted.placement_class == other.placement_class:
        return False
    if same_bytes(predicted.device_weights_bytes, other.device_weights_bytes):
        return False  # too alike to tell by sizes
    mine, theirs = _by_place(realised.buffers), _by_place(other_realised.buffers)
    return mine.keys() == theirs.keys() and all(same_bytes(size, theirs[place]) for place, size in mine.items())


def realised_bytes(buffers: Iterable[Buffer] | None) -> tuple[int, int] | None:
    """Host and device bytes of weights and context memory that the engine reported; None if it did not."""
    if buffers is None:
        return None
    kept = tuple(buffers)
    kinds = ("weights", "kv", "rs")
    return _sum(kept, kinds, on_host=True), _sum(kept, kinds, on_host=False)


def _sum(buffers: Iterable[Buffer], kinds: Sequence[str], *, on_host: bool) -> int:
    return sum(buffer.bytes for buffer in buffers if buffer.kind in kinds and buffer.on_host is on_host)


def _by_place(buffers: Iterable[Buffer]) -> dict[tuple[bool, str], int]:
    """Sizes by place and kind; host weights are left out, for they overlap."""
    sizes: dict[tuple[bool, str], int] = {}
    for buffer in buffers:
        if buffer.kind in ("kv", "rs") or (buffer.kind == "weights" and not buffer.on_host):
            place = (buffer.on_host, buffer.kind)
            sizes[place] = sizes.get(place, 0) + buffer.bytes
    return {place: size for place, size in sizes.items() if size}


def same_bytes(expected: int, seen: int) -> bool:
    """To 1 % or 1 MiB: buffers are padded tensor by tensor."""
    return abs(seen - expected) <= max(TOLERANCE_BYTES, TOLERANCE_SHARE * expected)
