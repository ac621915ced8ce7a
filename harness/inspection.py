"""What a model file says of itself: layers, bytes by what they are for, memory of the context, placements.

Nothing is loaded and no engine is asked. From the second time on the file is not even opened: its facts
are in the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import model, placement
from harness.contract import Placement, Settings
from harness.model import CLASSES, Model, Tensor
from harness.placement import Predicted

if TYPE_CHECKING:
    from harness.probe import Watch

EVERYTHING = 999  # layers; more than any model has
STEPS = 8  # values of N shown, about
SHARES = {  # our name of each part of a placement's bytes → its name in Predicted
    "device_weights_bytes": "device_weights_bytes", "device_context_bytes": "device_memory_bytes",
    "device_compute_bytes": "compute_bytes", "host_weights_bytes": "host_weights_bytes",
    "host_context_bytes": "host_memory_bytes",
}  # fmt: skip


def inspect_model(ref: str, watch: Watch) -> dict[str, Any]:
    """Shape, bytes and placements of a model, from its header alone. Raises DuelError."""
    found = model.load(_file_of(ref, watch), hashed=False)
    settings = Settings()
    return {
        "name": found.name,
        "file": str(found.file.path),
        "shards": [path.name for path in found.file.shards],
        "file_bytes": found.file.size_bytes,
        "weights_digest": found.file.digest or None,
        "header_only": found.header_only,
        "arch": found.file.architecture,
        "type": found.file_type,
        "layers": found.layers,
        "blocks": found.blocks,
        "mtp_blocks": found.draft_blocks,
        "leading_dense_layers": found.leading_dense,
        "expert_layers": len(found.expert_layers),
        "experts": found.experts,
        "experts_used": found.experts_used,
        "experts_shared": found.experts_shared,
        "attention_layers": found.attention and dataclasses.asdict(found.attention),
        "context_train": found.context_train,
        "vocab": found.vocab,
        "weights_bytes": found.weights_bytes,
        "bytes_per_token": round(found.bytes_per_token),
        "tensor_classes": [_class(found, name) for name in CLASSES if _tensors(found, name)],
        "context": settings.context,
        **_context(found, settings),
        "placements": list(_placements(found, settings)),
        "notes": notes(found),
    }


def _file_of(ref: str, watch: Watch) -> Path:
    path = Path(ref).expanduser()
    if path.is_file():
        return path
    from harness.probe import find_model  # knows folders and engines' own names, and takes its time to import

    return find_model(ref, watch)


def _tensors(found: Model, name: str) -> list[Tensor]:
    return [tensor for tensor in found.tensors if found.class_of(tensor) == name]


def _class(found: Model, name: str) -> dict[str, Any]:
    """One class of tensors. Those for multi-token prediction are in the file, and neither loaded nor read."""
    tensors = _tensors(found, name)
    types: dict[str, int] = {}
    for tensor in tensors:
        types[tensor.type] = types.get(tensor.type, 0) + tensor.bytes
    return {
        "class": name,
        "tensors": len(tensors),
        "bytes": sum(types.values()),
        "bytes_per_token": 0 if name == "mtp" else round(sum(map(found.read_bytes, tensors))),
        "types": dict(sorted(types.items(), key=lambda item: -item[1])),
    }


def _context(found: Model, settings: Settings) -> dict[str, int | None]:
    """Memory of one slot at the shown context: what grows with it, what a window bounds, what is constant."""
    assert settings.context is not None
    sizes = found.memory_bytes(settings.context)
    layers = zip(found.memory or (), sizes or (), strict=True)
    return {
        "context_bytes": None if sizes is None else sum(sizes),
        "context_bytes_per_token": found.memory_bytes_per_token(),
        "window_bytes": None if sizes is None else sum(size for layer, size in layers if layer.window is not None),
        "states_bytes": found.states_bytes,
    }


def _placements(found: Model, settings: Settings) -> Iterable[dict[str, Any]]:
    for kind in _shown(found):
        predicted = placement.predict(found, kind, settings, device=True)
        if predicted is not None:
            yield {
                "placement": str(kind),
                "words": placement.describe(kind, found),
                "class": predicted.placement_class,
                "device_bytes": predicted.device_bytes,
                "host_bytes": predicted.host_bytes,
                **shares(predicted),
                "host_bytes_per_token": predicted.bytes_per_token_host,
                "device_bytes_per_token": predicted.bytes_per_token_device,
            }


def _shown(found: Model) -> Iterable[Placement]:
    """Most on the device first: about eight values of N over a model with experts, or of layers without."""
    yield Placement("ngl", EVERYTHING)
    most = found.expert_layers[-1] + 1 if found.expert_layers else found.blocks + 1
    step = max(1, -(-most // STEPS))
    if found.expert_layers:
        yield from (Placement("ncmoe", n) for n in [*range(0, most, step), most])
        yield Placement("cpu-moe")
    else:
        yield from (Placement("ngl", n) for n in [*range(most, 0, -step), 0])


def shares(predicted: Predicted | None) -> dict[str, int | None]:
    """What makes up the bytes of a placement, and what an engine computes in besides. None: its own affair."""
    return {name: None if predicted is None else getattr(predicted, field) for name, field in SHARES.items()}


# ── in words ────────────────────────────────────────────────────────────────────────────────


def notes(found: Model) -> list[str]:
    """Which placements of this model are one, and what of its file is not loaded."""
    told = [one_placement(found)]
    if drafts := found.draft_blocks:
        of = "1 block" if drafts == 1 else f"{drafts} blocks"
        told.append(f"The file has {of} more, for multi-token prediction: not loaded, and counted in its own row only.")
    if found.memory is None:
        told.append("How much its attention keeps of a token is not known here, nor is memory for context.")
    return told


def one_placement(found: Model) -> str:
    """Which values of N put the same weights in the same places."""
    if not found.expert_layers:
        return (
            "This model has no experts: ncmoe=N and cpu-moe change nothing. "
            f"ngl={found.blocks + 1} and everything above is all layers on the GPU."
        )
    first, last = found.expert_layers[0], found.expert_layers[-1]
    least = "ncmoe=0 is" if not first else f"ncmoe=0 {'and' if first == 1 else 'to'} ncmoe={first} are"
    return (
        f"This model has {layers_in_words(found)}: {least} all layers on the GPU, "
        f"ncmoe={last + 1} and everything above is --cpu-moe."
    )


def layers_in_words(found: Model) -> str:
    """ "40 layers, all with experts", "46 layers with experts after 1 dense one"."""
    count, first = len(found.expert_layers), found.leading_dense
    if not count:
        return f"{found.layers} layers"
    if count == found.layers:
        return f"{count} layers, all with experts"
    if count == found.layers - first:
        return f"{count} layers with experts after {first} without"
    return f"{found.layers} layers, {count} of them with experts"
