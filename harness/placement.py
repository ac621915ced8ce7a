"""Where the weights will live, where they do live, and whether that is the same.

The prediction follows llama.cpp's own rules: `-ngl` counts layers from the end, the head first;
embeddings stay on the host; `--cpu-moe` and `--n-cpu-moe` take routed experts by name, from the
first block on; a layer's keys and values follow the layer. Two arms of one engine whose weights
would live in the same places are one placement, whatever their flags say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
TIGHT_SHARE, SPILL_SHARE = 0.2, 0.05  # of the device, where that is less: a stand-in may be small
SWAP_BYTES = 256 << 20  # more than other programs' idle memory that makes room
FAULT_BYTES = 64 << 10  # that one major fault of a mapped file brings in at least: systems read ahead
FEWEST_FAULTS = 4096  # programs and libraries are read from disk too
DRIVER_BYTES = 2 << 30  # a device's context, libraries and scratch memory; 0.7 GiB were seen on a large one
AWAY_SHARE, AWAY_BYTES = 0.1, 256 << 20  # of buffers that another reading need not show
OFFLOADED_TOKENS = 32  # from so many on, a device takes over the products of host layers
MOST_NAMES = 5  # of one placement in a sentence
ON_HOST = ("token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight", "token_types.weight")
WITH_FIRST_BLOCK = ("token_embd_norm.", "rope_freqs.", "rope_factors_", "per_layer_model_proj.", "per_layer_proj_norm.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One placement in bytes, compute buffers apart; what depends on unknown settings is None."""

    placement_class: str  # equal exactly if the same tensors live on the device
    host_bytes: int | None  # weights and what layers remember
    device_bytes: int | None
    bytes_per_token_host: int  # read to decode one token
    bytes_per_token_device: int
    host_weights_bytes: int
    device_weights_bytes: int
    crossings: int = 0  # times that one token's activations change between host and device
    compute_bytes: int | None = None  # on the device besides, about: see `_compute_bytes`

    @property
    def host_memory_bytes(self) -> int | None:
        """Context memory on the host: keys, values and states."""
        return None if self.host_bytes is None else self.host_bytes - self.host_weights_bytes

    @property
    def device_memory_bytes(self) -> int | None:
        """Context memory on the device."""
        return None if self.device_bytes is None else self.device_bytes - self.device_weights_bytes


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
        compute_bytes=_compute_bytes(model, rule, settings, kept) if device and placement.kind != "cpu" else 0,
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


# ── compute buffers: about ──────────────────────────────────────────────────────────────────


def _compute_bytes(model: Model, rule: _Rule, settings: Settings, kept: Sequence[int] | None) -> int | None:
    """Compute buffer of one device, about: what one ubatch needs at its widest step. None: unknown.

    An engine packs the results of all steps into one buffer, and how tightly it packs is its own affair; here
    the widest step of any layer counts, in F32 elements a token. The counts were fitted to llama.cpp b11434
    and fall within 25 % or 64 MiB there. A real device takes over the large products of host layers, and holds
    a copy of the weights (and of keys and values) of one of them at a time; one behind RPC never does. The
    last layer's experts and the head see one token a slot, so they count nothing.
    """
    if model.memory is None or kept is None or settings.ubatch is None or settings.context is None:
        return None
    tokens = min(settings.context, settings.batch or settings.context, settings.ubatch)
    remote = settings.stand_in_bytes is not None or bool(settings.rpc)
    takes_over = not remote and tokens >= OFFLOADED_TOKENS
    flash = settings.flash_attention != "off"
    working = [block for block in range(model.layers) if takes_over or rule.holds_block(block, model)]
    cells = [layer.cells(settings.context, tokens) for layer in model.memory]
    masks = sum({cells[block] for block in working if model.memory[block].keys}) * (2 if flash else 4)
    own: dict[int, dict[str, Tensor]] = {}
    for tensor in model.loaded:
        if tensor.block is not None:
            own.setdefault(tensor.block, {})[tensor.name.split(".", 2)[2].removesuffix(".weight")] = tensor
    widest = 0
    for block in working:
        home, layer = rule.holds_block(block, model), model.memory[block]
        parts = own.get(block, {})
        mixing = _mixing_elements(model, layer, parts, None if flash else cells[block])
        if mixing is None:
            return None
        copied = 0 if home else kept[block]
        if flash and not remote and layer.keys and {settings.kv_k, settings.kv_v} != {"f16"}:
            copied = max(copied, cells[block] * (layer.keys + layer.values) * 2)  # unpacked for flash attention
        steps = [(mixing, copied)]
        if block < model.layers - 1:
            on_host = not home or block < rule.expert_blocks
            steps += _feeding_elements(model, parts, on_host, takes_over, beside=mixing if layer.state_bytes else 0)
        if remote and block and not rule.holds_block(block - 1, model):
            steps.append((_arriving_elements(model, own.get(block - 1, {}), parts), 0))
        widest = max(widest, *(tokens * (4 * elements + masks) + more for elements, more in steps))
    return widest


def _mixing_elements(model: Model, layer: Memory, own: Mapping[str, Tensor], scores: int | None) -> int | None:
    """Elements a token while a layer looks back; `scores` is the cells that each head scores, None if it never does.

    Residual, normed input, queries, result, keys and values; without flash attention the result again, and the scores.
    """
    if layer.state_bytes:
        return 5 * model.embedding + 2 * own["attn_qkv"].shape[-1] if "attn_qkv" in own else None
    if not layer.keys:
        return 2 * model.embedding
    memory = layer.keys + layer.values
    if (not layer.values or scores is not None) and model.heads is None:
        return None
    if not layer.values:  # latent: every head works on the whole of the one key
        queries = results = (model.heads or 0) * layer.keys
    elif "attn_q" in own and "attn_output" in own:
        queries, results = own["attn_q"].shape[-1], own["attn_output"].shape[0]
    elif "attn_qkv" in own:
        queries = results = own["attn_qkv"].shape[-1] - memory
    else:
        return None
    found = 2 * model.embedding + queries + results + memory
    return found if scores is None else found + results + (model.heads or 0) * scores


def _feeding_elements(
    model: Model, own: Mapping[str, Tensor], on_host: bool, takes_over: bool, *, beside: int
) -> Iterator[tuple[int, int]]:
    """Elements a token, and bytes of copied weights, in the steps of a layer's experts or dense part.

    Residuals and inputs are four widths. Gate, up and their product are three inner widths; results of the
    experts used fill the gap that gate and up leave, where they fit. Of host experts only the results come.
    """
    width = 4 * model.embedding
    if "ffn_down_exps" in own:
        down = own["ffn_down_exps"]
        inner, results = ((model.experts_used or 0) * each for each in (down.shape[0], model.embedding))
        if on_host and not takes_over:
            yield max(width, beside) + results, 0
            return
        yield width + 3 * inner + (results if results > 2 * inner else 0), 0
        if on_host:
            yield width + inner + results, down.bytes
    elif "ffn_down" in own:
        down = own["ffn_down"]
        yield width + 3 * down.shape[0], 0
        if on_host:
            yield width + model.embedding + down.shape[0], down.bytes


def _arriving_elements(model: Model, before: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> int:
    """Elements a token where the results of a host layer's experts reach the first layer on the device."""
    if "ffn_down_exps" not in before:
        return 0
    queries = own["attn_q"].shape[-1] if "attn_q" in own else 0
    return (2 + (model.experts_used or 0)) * model.embedding + queries


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
        few = f"{taken} " if taken > 1 else ""
        return "all experts on the CPU" if taken == total else f"experts of the first {few}of {total} {kind} on the CPU"
    held = sum(rule.holds_block(block, model) for block in range(model.layers))
    if held == model.layers:
        return "all layers on the GPU"
    if not held:
        return "no layer on the GPU" if not rule.holds_head() else "only the output head on the GPU"
    return f"the last {held} of {model.layers} layers and the head on the GPU"


def equal_in_words(model: Model, aliases: Mapping[str, str], device: bool) -> tuple[str, ...]:
    """One sentence for each placement that goes by several names: "this model has 40 layers: ncmoe=48, ncmoe=44 …".

    `aliases` is arm text → text of the arm that it stands for, all as `str(Arm)` writes them.
    """
    groups: dict[str, list[str]] = {}
    for alias, first in aliases.items():
        groups.setdefault(first, [first]).append(alias)
    return tuple(dict.fromkeys(_equal(model, texts, device) for texts in groups.values()))


def _equal(model: Model, texts: Sequence[str], device: bool) -> str:
    names = [_name(text) for text in texts]
    knobs = texts[0].partition(",")[2]
    listed = [*names[:2], "…", names[-1]] if len(names) > MOST_NAMES else names
    equal = f"{', '.join(listed[:-1])} and {listed[-1]} are one placement" + (f" (with {knobs})" if knobs else "")
    if not device:
        return f"no GPU: {equal}"
    kind, _, number = texts[0].partition(",")[0].partition("@")[2].partition("=")
    words = describe(Placement(kind or "auto", int(number) if number else None), model)
    experts = len(model.expert_layers)
    has = f"{model.layers} layers"
    if any("moe" in name for name in names):
        has = "no experts" if not experts else has if experts == model.layers else f"{experts} expert layers of {has}"
    return f"this model has {has}: {equal}, {words.removesuffix(' (this model has no experts)')}"


def _name(text: str) -> str:
    """The placement of an arm's text; without one its engine, whose choice it is."""
    engine, _, place = text.partition(",")[0].partition("@")
    return place or engine


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


@dataclass(frozen=True, slots=True)
class Fit:
    """How a placement sits in memory, and why it does not simply fit. `side` is what is full: device or host."""

    cell: Cell
    why: str | None = None  # one sentence; None where it fits
    side: str | None = None


def sits(
    predicted: Predicted | None,
    device_bytes: int | None,
    *,
    loaded: bool | None = None,
    free_bytes: int | None = None,
    major_faults: int | None = None,
    swap_growth_bytes: int | None = None,
    too_slow: bool = False,
) -> Fit:
    """How a placement sits in `device_bytes` of device memory, and in that of the host.

    Before a load `loaded` is None. Loaded although it needs more than there is: spilled into host memory, as WSL2
    and Windows drivers do without a word. `free_bytes` is what is free on the device after it. `too_slow` is a speed
    below the physical floor: with a nearly full device, a spill that the sizes do not show.

    The host spilled if its processes read from disk oftener than once for each 64 KiB of what they keep there: what
    is mapped cold is read once, in pieces that are as large or larger, and then stays; or if swap grew by 256 MiB:
    less is the idle memory of other programs that made room.
    """
    need = None if predicted is None else predicted.device_bytes
    if need is not None and device_bytes is not None and need > device_bytes:
        if not loaded:
            return Fit(Cell.DOES_NOT_FIT, _needs(need, device_bytes), "device")
        return Fit(Cell.SPILLED, f"{_needs(need, device_bytes)}, so the rest lies on the host", "device")
    if loaded is False:
        return Fit(Cell.DOES_NOT_FIT, "the engine found no room for it", "device")
    spare = free_bytes
    if spare is None and need is not None and device_bytes is not None:
        spare = device_bytes - need
    on_device = need is None or need > 0
    if free_bytes is not None and device_bytes is not None and free_bytes < 0:
        took, there = format_bytes(device_bytes - free_bytes), format_bytes(device_bytes)
        return Fit(Cell.SPILLED, f"{took} of {there} of device memory are taken", "device")
    if too_slow and on_device and spare is not None and spare < TIGHT_BYTES:
        return Fit(
            Cell.SPILLED,
            f"it is slower than this memory can be, with {format_bytes(max(0, spare))} of the device left: "
            "a part lies in host memory",
            "device",
        )
    if full := _host_spill(predicted, major_faults, swap_growth_bytes):
        return Fit(Cell.SPILLED, full, "host")
    least = SPILL_BYTES if device_bytes is None else min(SPILL_BYTES, int(SPILL_SHARE * device_bytes))
    if free_bytes is not None and on_device and free_bytes < least:
        return Fit(Cell.TIGHT, f"only {format_bytes(free_bytes)} of the device were left after the load", "device")
    if need is None or device_bytes is None:
        return Fit(Cell.UNKNOWN, f"it is not known what {'it needs' if need is None else 'the device holds'}")
    if free_bytes is None and device_bytes - need < min(TIGHT_BYTES, int(TIGHT_SHARE * device_bytes)):
        left = format_bytes(device_bytes - need)
        return Fit(Cell.TIGHT, f"only {left} are left for compute buffers and the driver", "device")
    return Fit(Cell.FITS)


def fits(
    predicted: Predicted | None,
    device_bytes: int | None,
    *,
    loaded: bool | None = None,
    free_bytes: int | None = None,
) -> Cell:
    """The cell of `sits` by sizes alone."""
    return sits(predicted, device_bytes, loaded=loaded, free_bytes=free_bytes).cell


def _needs(need: int, device_bytes: int) -> str:
    return f"it needs {format_bytes(need)} of {format_bytes(device_bytes)} of device memory"


def _host_spill(predicted: Predicted | None, major_faults: int | None, swap_growth_bytes: int | None) -> str | None:
    if swap_growth_bytes is not None and swap_growth_bytes >= SWAP_BYTES:
        return f"swap grew by {format_bytes(swap_growth_bytes)} during the load: host memory is full"
    if predicted is not None and major_faults is not None:
        kept = predicted.host_bytes or predicted.host_weights_bytes
        if major_faults > max(FEWEST_FAULTS, kept // FAULT_BYTES):
            return (
                f"its processes waited {major_faults} times for the disk, more than reading the "
                f"{format_bytes(kept)} of the host once takes: host memory is full"
            )
    return None


def refusal(
    predicted: Predicted, memory_bytes: int | None, device_bytes: int | None, *, device_is_host: bool = False
) -> str | None:
    """Why this cannot be loaded, in one sentence with the next step; None if it may.

    `device_bytes` is the size of a device that never refuses by itself (a stand-in). With
    `device_is_host` what lives on the device takes host memory too. Unknown sizes refuse nothing.
    """
    need = predicted.device_bytes or predicted.device_weights_bytes
    compute = predicted.compute_bytes or 0
    if device_bytes is not None and need + compute > device_bytes:
        room = f", and {format_bytes(compute)} to compute in," if compute else ""
        return (
            f"it needs {format_bytes(need)}{room} on a device of {format_bytes(device_bytes)}; "
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
    if maps_file(buffers):
        return None
    parts = [("weights", predicted.device_weights_bytes, held_bytes(buffers, ("weights",), on_host=False))]
    if predicted.device_bytes is not None:
        memory = predicted.device_bytes - predicted.device_weights_bytes
        parts.append(("context memory", memory, held_bytes(buffers, ("kv", "rs"), on_host=False)))
    for what, expected, seen in parts:
        if not same_bytes(expected, seen):
            return f"{format_bytes(seen)} of {what} on the device, where {format_bytes(expected)} were predicted"
    if predicted.host_bytes is not None:
        host = held_bytes(buffers, ("weights", "kv", "rs"), on_host=True)
        if host + TOLERANCE_BYTES < predicted.host_bytes * (1 - HOST_SHARE):
            return f"{format_bytes(host)} on the host, where {format_bytes(predicted.host_bytes)} were predicted"
    return None


def cross_check(realised: Realised, vram_bytes: int | None, rss_bytes: int | None) -> str | None:
    """Where the driver's or the system's figures contradict the engine's buffers, in one sentence.

    `vram_bytes` is what device memory grew by (NVML, all GPUs), `rss_bytes` the most that the engine's processes
    held. None: nothing does, or it is not known. A device behind RPC is a process somewhere, and no driver counts it;
    mapped files and pinned memory may be there without being counted.
    """
    if realised.buffers is None:
        return None
    devices = [each for each in realised.buffers if not each.on_host and not _counted_elsewhere(each)]
    if vram_bytes is not None and not any(each.device.startswith("RPC") for each in realised.buffers):
        size = sum(each.bytes for each in devices)
        if vram_bytes < size * (1 - AWAY_SHARE) - AWAY_BYTES:
            return (
                f"device memory grew by {format_bytes(vram_bytes)} while the engine tells of {format_bytes(size)} "
                "there: a part of it is not on the device"
            )
        names = len({each.device for each in devices})
        if vram_bytes > size * (1 + AWAY_SHARE) + DRIVER_BYTES * max(1, names):
            return (
                f"device memory grew by {format_bytes(vram_bytes)} while the engine tells of {format_bytes(size)} "
                "there: something else took device memory too, or the engine keeps a copy"
            )
    kept = sum(
        each.bytes
        for each in realised.buffers
        if each.on_host and each.kind in ("weights", "kv", "rs") and not _counted_elsewhere(each)
    )
    if rss_bytes is not None and rss_bytes < kept * (1 - AWAY_SHARE) - AWAY_BYTES:
        return (
            f"the engine's processes held {format_bytes(rss_bytes)} of host memory at most while it tells of "
            f"{format_bytes(kept)} there: a part of it was swapped out, or is not there"
        )
    return None


def _counted_elsewhere(buffer: Buffer) -> bool:
    """Spans of a mapped file, memory that the driver pins, and what another process holds."""
    return buffer.device.endswith(("_Mapped", "_Host")) or buffer.device.startswith("RPC")


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
    return held_bytes(kept, kinds, on_host=True), held_bytes(kept, kinds, on_host=False)


def maps_file(buffers: Iterable[Buffer]) -> bool:
    """Whether the device maps the file itself, so that sizes are spans of the file and prove nothing."""
    return any(buffer.device.endswith("_Mapped") and not buffer.on_host for buffer in buffers)


def held_bytes(buffers: Iterable[Buffer], kinds: Sequence[str], *, on_host: bool) -> int:
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
