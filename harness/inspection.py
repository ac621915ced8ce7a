"""What a model file says of itself: layers, bytes by what they are for, memory of the context, placements.

Nothing is loaded and no engine is asked. From the second time on the file is not even opened: its facts
are in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import TypedDict

from harness import model, placement
from harness.contract import Placement, Settings
from harness.model import CLASSES, Model, Tensor
from harness.placement import Predicted

if TYPE_CHECKING:
    from harness.probe import Watch

EVERYTHING = 999  # layers; more than any model has
STEPS = 8  # values of N shown, about


class Shares(TypedDict):
    """What makes up the bytes of a placement, and what an engine computes in besides. Null: its own affair."""

    device_weights_bytes: int | None
    device_context_bytes: int | None
    device_compute_bytes: int | None
    host_weights_bytes: int | None
    host_context_bytes: int | None


Labelled = TypedDict("Labelled", {"class": str})  # a keyword


class Placed(Labelled, Shares):
    """One placement: its bytes on each side, and what one decoded token reads there. Equal classes are one."""

    placement: str
    words: str
    device_bytes: int | None
    host_bytes: int | None
    host_bytes_per_token: int
    device_bytes_per_token: int


class TensorClass(Labelled):
    """Tensors of one use. `types` are bytes by quantization; multi-token prediction is in the file and not read."""

    tensors: int
    bytes: int
    bytes_per_token: int
    types: dict[str, int]


class AttentionLayers(TypedDict):
    """How many layers remember in which way."""

    full: int
    window: int
    latent: int
    recurrent: int
    none: int
    window_tokens: int | None


class ContextBytes(TypedDict):
    """Memory of one slot: what grows with the context, what a window bounds, what is constant."""

    context_bytes: int | None
    context_bytes_per_token: int | None
    window_bytes: int | None
    states_bytes: int | None


class Inspected(ContextBytes):
    """A model by its header: shape, bytes by what they are for, and where placements put them. Unknown is null."""

    name: str
    file: str
    shards: list[str]
    file_bytes: int
    weights_digest: str | None
    header_only: bool
    arch: str
    type: str | None
    layers: int
    blocks: int
    mtp_blocks: int
    leading_dense_layers: int
    expert_layers: int
    experts: int | None
    experts_used: int | None
    experts_shared: int | None
    attention_layers: AttentionLayers | None
    context_train: int | None
    vocab: int
    weights_bytes: int
    bytes_per_token: int
    tensor_classes: list[TensorClass]
    context: int
    placements: list[Placed]
    notes: list[str]


def inspect_model(ref: str, watch: Watch) -> Inspected:
    """Shape, bytes and placements of a model, from its header alone. Raises DuelError."""
    found = model.load(_file_of(ref, watch), hashed=False)
    settings = Settings()
    assert settings.context is not None
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
        "attention_layers": _attention(found),
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


def _attention(found: Model) -> AttentionLayers | None:
    if (known := found.attention) is None:
        return None
    return {
        "full": known.full,
        "window": known.window,
        "latent": known.latent,
        "recurrent": known.recurrent,
        "none": known.none,
        "window_tokens": known.window_tokens,
    }


def _class(found: Model, name: str) -> TensorClass:
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


def _context(found: Model, settings: Settings) -> ContextBytes:
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


def _placements(found: Model, settings: Settings) -> Iterable[Placed]:
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


def shares(predicted: Predicted | None) -> Shares:
    """The parts of a placement's bytes under our names; all None where the engine chooses."""
    return {
        "device_weights_bytes": predicted.device_weights_bytes if predicted else None,
        "device_context_bytes": predicted.device_memory_bytes if predicted else None,
        "device_compute_bytes": predicted.compute_bytes if predicted else None,
        "host_weights_bytes": predicted.host_weights_bytes if predicted else None,
        "host_context_bytes": predicted.host_memory_bytes if predicted else None,
    }


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
