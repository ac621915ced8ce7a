"""Writes a model whose greedy answer is known, in the shape of a real one: no download, no licence, in seconds.

Speed depends on shapes, types and routing, not on what the weights mean. So the experts are random quantised
blocks, every layer adds little to the residual stream, and the head maps each word's embedding to the next
word of one long cycle. Any engine that computes rightly writes that cycle; a fast one that does not is caught.
"""

from __future__ import annotations

import gzip
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from io import FileIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import header, model
from harness.contract import Say
from harness.errors import RunRefused, UsageError
from harness.model import AnswerKey as AnswerKey
from harness.sizes import format_bytes

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

GENERATOR = 1  # of the bytes: a file of one generator, shape and seed is always the same
TILE = 8 << 20
SPARE = 64 << 20  # left free on the disk
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n\\n' }}{% endif %}{{ message.content }}{% endfor %}"
)

# What a layer adds to the stream, against the embedding's size 1: all layers together stay below about a third.
_ADDED = 0.5
_QUIET = 0.05  # head rows of tokens that must never win, against the others

# Main type and the type of what suffers most, as llama.cpp's own mixtures have them.
_MIXTURES = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K")}

# Where the scales of a block lie, and how large each is against the first: the second recentres unsigned values.
_SCALES: Mapping[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 1),), "Q4_1": ((0, 1), (2, -7.5)), "Q5_0": ((0, 1),), "Q5_1": ((0, 1), (2, -15.5)), "Q8_0": ((0, 1),),
    "Q2_K": ((80, 1), (82, 1.5)), "Q3_K": ((108, 1),), "Q4_K": ((0, 1), (2, 7.5)), "Q5_K": ((0, 1), (2, 15.5)),
    "Q6_K": ((208, 1),), "IQ4_NL": ((0, 1),), "IQ4_XS": ((0, 1),), "IQ3_S": ((0, 1),), "IQ3_XXS": ((0, 1),),
    "IQ2_S": ((0, 1),), "IQ2_XS": ((0, 1),), "IQ2_XXS": ((0, 1),),
}  # fmt: skip
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What decides speed and placement. Widths are in elements; `types` names tensors that differ from `quant`."""

    name: str
    architecture: str = "qwen3moe"
    layers: int
    embedding: int
    vocab: int = 0  # 0: as many as the tokenizer that is shipped has
    heads: int
    heads_kv: int
    head_dim: int
    ff: int = 0  # of dense layers
    experts: int = 0
    experts_used: int = 0
    expert_ff: int = 0
    shared_ff: int = 0
    context: int = 32768
    rope_base: float = 1e6
    rope_dims: int = 0  # 0: the whole head
    delta_keys: int = 0  # heads of a gated delta net, in three of four layers
    delta_values: int = 0
    delta_dim: int = 128
    quant: str = "Q4_K_M"
    types: Mapping[str, str] = field(default_factory=dict)


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
            name="tiny", layers=12, embedding=256, heads=4, heads_kv=2, head_dim=64,
            experts=16, experts_used=4, expert_ff=256,
        ),
        Shape(
            name="tiny-dense", architecture="qwen3", layers=12, embedding=256, heads=4, heads_kv=2, head_dim=64, ff=768,
        ),
        Shape(
            name="qwen3-30b-a3b", layers=48, embedding=2048, vocab=151936, heads=32, heads_kv=4, head_dim=128,
            experts=128, experts_used=8, expert_ff=768, context=40960,
        ),
        Shape(
            name="qwen3.5-35b-a3b", architecture="qwen35moe", layers=40, embedding=2048, vocab=248320,
            heads=16, heads_kv=2, head_dim=256, experts=256, experts_used=8, expert_ff=512, shared_ff=512,
            context=262144, rope_base=1e7, rope_dims=64, delta_keys=16, delta_values=32,
        ),
        Shape(
            name="olmoe-7b-a1b", architecture="olmoe", layers=16, embedding=2048, vocab=50304, heads=16, heads_kv=16,
            head_dim=128, experts=64, experts_used=8, expert_ff=1024, context=4096, rope_base=1e4,
        ),
    )
}  # fmt: skip


def write(out: Path, shape: Shape, seed: int = 0, say: Say | None = None, *, header_only: bool = False) -> Path:
    """Write a model of this shape; the same bytes for the same shape and seed.

    `header_only` leaves a hole where the weights would be: the right size, nothing on the disk, good for
    planning. Raises RunRefused if the disk is too small, UsageError for a shape that cannot be written.
    """
    if out.is_dir():
        raise UsageError(f"{out} is a folder; name the file to write, e.g. {out / (shape.name + '.gguf')}")
    shape = _whole(shape)
    parts = _parts(shape)
    size = sum(_padded(part.bytes) for part in parts)
    part_file = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if not header_only and free < size + SPARE:
            raise RunRefused(
                f"{out} needs {format_bytes(size)} and its disk has {format_bytes(free)} free; "
                f"free some, name another disk, or take a smaller size"
            )
        if say is not None:
            say(f"writing {format_bytes(size)}: {describe(shape)}")
        _write_header(part_file, shape, parts, seed, header_only)
        with part_file.open("r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if header_only:
                file.truncate(end + size)
            else:
                for chunk in _weights(shape, parts, seed):
                    _write_all(file, chunk)
        part_file.replace(out)
    except OSError as error:
        raise RunRefused(f"{out} cannot be written ({error.strerror}); name another place") from error
    finally:
        part_file.unlink(missing_ok=True)
    return out


def describe(shape: Shape) -> str:
    """The shape in a few words."""
    experts = f", {shape.experts} experts of which {shape.experts_used} a token" if shape.experts else ""
    return f"{shape.name} ({shape.architecture}), {shape.layers} layers{experts}, {shape.quant}, known answer"


def size_of(shape: Shape) -> int:
    """Bytes of the file, to within a few kilobytes."""
    shape = _whole(shape)
    tokens = _tokens(shape.vocab)
    vocabulary = (
        sum(len(token.encode()) + 8 for token in tokens) * 2 + 12 * shape.vocab + 28 * (shape.vocab - len(tokens))
    )
    return vocabulary + sum(_padded(part.bytes) + len(part.name) + 50 for part in _parts(shape))


def scaled(shape: Shape, size_bytes: int) -> Shape:
    """The shape made larger or smaller, to within 4 % of this size.

    Layers and experts, which placement is about, are kept as long as the widths can give; all ratios move
    as little as they can. Raises UsageError where no such shape exists.
    """
    shape = _whole(shape)
    best: tuple[float, Shape] | None = None
    for candidate in _candidates(shape):
        eight, sixteen = (size_of(replace(candidate, layers=layers)) for layers in (8, 16))
        per_layer = (sixteen - eight) / 8
        layers = round((size_bytes - eight) / per_layer) + 8
        if not 4 <= layers <= 4 * shape.layers:
            continue
        fitted = replace(candidate, layers=layers)
        cost = _distance(shape, fitted)
        if (best is None or cost < best[0]) and abs(size_of(fitted) / size_bytes - 1) < 0.04:
            best = (cost, fitted)
    if best is None:
        raise UsageError(f"{shape.name} cannot be made {format_bytes(size_bytes)} large; give a size nearer to its own")
    return replace(best[1], name=f"{shape.name}-{format_bytes(size_bytes).replace(' ', '').lower()}")


def shape_of(path: Path) -> Shape:
    """The shape of a real GGUF, read from its header. Raises ModelError for what is none.

    An architecture that cannot be written with a known answer becomes qwen3moe (qwen3 if dense) of the same
    layers, widths, experts and types.
    """
    headers = header.read_all(path)
    keys = headers[0].fields
    architecture = str(keys.get("general.architecture", ""))
    facts = model.load(path, hashed=False)

    def key(name: str, default: Any = 0) -> Any:
        value = keys.get(f"{architecture}.{name}", default)
        return max(value, default=0) if isinstance(value, list) else value

    shapes = {tensor.name.split(".", 2)[-1]: tensor.shape for tensor in facts.loaded if tensor.block is not None}
    known = architecture in _LAYERS
    heads = int(key("attention.head_count", 1)) or 1
    head_dim = int(key("attention.key_length", facts.embedding // heads))
    types = {tensor.name: tensor.type for tensor in facts.loaded if known or tensor.routed}
    main = max(set(types.values()), key=lambda kind: sum(t.bytes for t in facts.loaded if t.type == kind), default="")
    return Shape(
        name=f"like-{facts.name}".replace(" ", "-").lower(),
        architecture=architecture if known else "qwen3moe" if facts.experts else "qwen3",
        layers=facts.layers,
        embedding=facts.embedding,
        vocab=facts.vocab,
        heads=heads,
        heads_kv=max(1, int(key("attention.head_count_kv", heads))),
        head_dim=head_dim,
        ff=0 if facts.experts else int(key("feed_forward_length")),
        experts=facts.experts or 0,
        experts_used=facts.experts_used or 0,
        expert_ff=shapes["ffn_down_exps.weight"][0] if facts.experts else 0,
        shared_ff=shapes.get("ffn_up_shexp.weight", (0, 0))[1] if architecture == "qwen35moe" else 0,
        context=facts.context_train or 32768,
        rope_base=float(key("rope.freq_base", 1e4)),
        rope_dims=int(key("rope.dimension_count")),
        delta_keys=int(key("ssm.group_count")),
        delta_values=int(key("ssm.time_step_rank")),
        delta_dim=int(key("ssm.state_size", 128)),
        quant=main if main in _SCALES or main in _FLOATS else "Q4_K_M",
        types={name: kind for name, kind in types.items() if kind in _SCALES or kind in _FLOATS},
    )


# ── the shape, as tensors ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor to write. `role` says how it is filled."""

    name: str
    shape: tuple[int, ...]
    type: str
    role: str

    @property
    def bytes(self) -> int:
        elements, size = header.block_of(self.type)
        return math.prod(self.shape) // elements * size


_Layer = Iterator[tuple[str, tuple[int, ...], str]]


def _attention(shape: Shape, *, gated: bool = False, whole_norm: bool = False) -> _Layer:
    inner, width = shape.heads * shape.head_dim, shape.embedding
    yield "attn_q.weight", (width, inner * (2 if gated else 1)), "in"
    yield "attn_k.weight", (width, shape.heads_kv * shape.head_dim), "in"
    yield "attn_v.weight", (width, shape.heads_kv * shape.head_dim), "in more"
    yield "attn_output.weight", (inner, width), "out"
    yield "attn_q_norm.weight", (inner if whole_norm else shape.head_dim,), "one"
    yield "attn_k_norm.weight", (shape.heads_kv * shape.head_dim if whole_norm else shape.head_dim,), "one"


def _experts(shape: Shape) -> _Layer:
    width, inner, count = shape.embedding, shape.expert_ff, shape.experts
    yield "ffn_gate_inp.weight", (width, count), "router"
    yield "ffn_gate_exps.weight", (width, inner, count), "in"
    yield "ffn_up_exps.weight", (width, inner, count), "in"
    yield "ffn_down_exps.weight", (inner, width, count), "out more"


def _delta_net(shape: Shape) -> _Layer:
    width, keys, values = shape.embedding, shape.delta_keys * shape.delta_dim, shape.delta_values * shape.delta_dim
    yield "attn_qkv.weight", (width, 2 * keys + values), "in"
    yield "attn_gate.weight", (width, values), "in"
    yield "ssm_conv1d.weight", (4, 2 * keys + values), "router"
    yield "ssm_dt.bias", (shape.delta_values,), "one"
    yield "ssm_a", (shape.delta_values,), "minus one"  # how fast the state fades
    yield "ssm_beta.weight", (width, shape.delta_values), "router"
    yield "ssm_alpha.weight", (width, shape.delta_values), "router"
    yield "ssm_norm.weight", (shape.delta_dim,), "one"
    yield "ssm_out.weight", (values, width), "out"


def _qwen3(shape: Shape, _layer: int) -> _Layer:
    yield "attn_norm.weight", (shape.embedding,), "one"
    yield from _attention(shape, whole_norm=shape.architecture == "olmoe")
    yield "ffn_norm.weight", (shape.embedding,), "one"
    if shape.experts:
        yield from _experts(shape)
        return
    yield "ffn_gate.weight", (shape.embedding, shape.ff), "in"
    yield "ffn_up.weight", (shape.embedding, shape.ff), "in"
    yield "ffn_down.weight", (shape.ff, shape.embedding), "out more"


def _qwen35moe(shape: Shape, layer: int) -> _Layer:
    yield "attn_norm.weight", (shape.embedding,), "one"
    yield from _attention(shape, gated=True) if layer % 4 == 3 else _delta_net(shape)
    yield "post_attention_norm.weight", (shape.embedding,), "one"
    yield from _experts(shape)
    yield "ffn_gate_inp_shexp.weight", (shape.embedding,), "router"
    yield "ffn_gate_shexp.weight", (shape.embedding, shape.shared_ff), "in"
    yield "ffn_up_shexp.weight", (shape.embedding, shape.shared_ff), "in"
    yield "ffn_down_shexp.weight", (shape.shared_ff, shape.embedding), "out more"


_LAYERS: Mapping[str, Callable[[Shape, int], _Layer]] = {
    "qwen3": _qwen3, "qwen3moe": _qwen3, "olmoe": _qwen3, "qwen35moe": _qwen35moe,
}  # fmt: skip


def _parts(shape: Shape) -> list[_Part]:
    shape = _whole(shape)
    rows = (shape.embedding, shape.vocab)
    parts = [
        _Part("token_embd.weight", rows, "Q8_0", "embedding"),
        _Part("output_norm.weight", (shape.embedding,), "F32", "one"),
        _Part("output.weight", rows, "Q8_0", "head"),
    ]
    for layer in range(shape.layers):
        for suffix, extent, role in _LAYERS[shape.architecture](shape, layer):
            name = f"blk.{layer}.{suffix}"
            parts.append(_Part(name, extent, _type(shape, name, extent, role, layer), role))
    return parts


def _type(shape: Shape, name: str, extent: Sequence[int], role: str, layer: int) -> str:
    if role in ("one", "minus one", "router"):
        return "F32"
    main, better = _MIXTURES.get(shape.quant, (shape.quant, shape.quant))
    eighth = shape.layers // 8
    more = "more" in role and (layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2)
    wanted = shape.types.get(name, better if more else main)
    # Rows that are no whole number of blocks fall back as llama.cpp's quantiser does.
    return wanted if extent[0] % header.block_of(wanted)[0] == 0 else "Q5_0" if extent[0] % 32 == 0 else "F16"


def _whole(shape: Shape) -> Shape:
    """The shape with its vocabulary counted, if it can be written. Raises UsageError otherwise."""
    if shape.embedding % 32 or 0 < shape.vocab < 4096:
        raise UsageError(
            f"{shape.name} has rows or a vocabulary that cannot be filled; take one of {', '.join(SHAPES)}"
        )
    if shape.quant not in {*_MIXTURES, *_SCALES, *_FLOATS}:
        known = ", ".join([*_MIXTURES, *_SCALES, *_FLOATS])
        raise UsageError(f"{shape.quant!r} is no type that can be written; known: {known}")
    return shape if shape.vocab else replace(shape, vocab=len(_tokens(0)))


def _padded(size: int) -> int:
    return -(-size // 32) * 32


# ── scaling ─────────────────────────────────────────────────────────────────────────────────


def _candidates(shape: Shape) -> Iterator[Shape]:
    """Shapes of the family with other widths and expert counts; the number of layers is still open."""
    widths = {*range(256, min(shape.embedding, 2048) + 1, 256), shape.embedding, 2 * shape.embedding}
    inner = shape.expert_ff or shape.ff
    inners = {*range(256, min(inner, 2048) + 1, 256), inner, 2 * inner}
    counts = {shape.experts >> step for step in range(5) if not shape.experts or shape.experts >> step >= 4}
    vocabs = {shape.vocab, min(shape.vocab, 32768), min(shape.vocab, _whole(replace(shape, vocab=0)).vocab)}
    for width, wide, count, vocab in product(sorted(widths), sorted(inners), sorted(counts), sorted(vocabs)):
        ratio = width / shape.embedding
        groups = max(1, round(shape.heads_kv * ratio))
        heads = max(1, round(shape.heads * ratio / groups)) * groups
        while heads * shape.head_dim % 256:
            heads += groups
        keys = max(1, round(shape.delta_keys * ratio))
        yield replace(
            shape,
            embedding=width,
            vocab=vocab,
            heads=heads,
            heads_kv=groups,
            ff=wide if shape.ff else 0,
            experts=count,
            experts_used=max(1, round(shape.experts_used * count / shape.experts)) if shape.experts else 0,
            expert_ff=wide if shape.experts else 0,
            shared_ff=max(256, round(shape.shared_ff * wide / inner / 256) * 256) if shape.shared_ff else 0,
            delta_keys=keys if shape.delta_keys else 0,
            delta_values=keys * (shape.delta_values // shape.delta_keys) if shape.delta_keys else 0,
            types={},
        )


def _distance(shape: Shape, other: Shape) -> float:
    """How far one shape is from another, over the logarithms of what they share."""

    def apart(name: str) -> float:
        left, right = getattr(shape, name), getattr(other, name)
        return math.log(left / right) ** 2 if left else 0.0

    weights = {"layers": 3, "experts": 2, "embedding": 1, "expert_ff": 1, "ff": 1, "vocab": 0.2}
    return sum(weight * apart(name) for name, weight in weights.items())


# ── the words ───────────────────────────────────────────────────────────────────────────────


def _data(name: str) -> bytes:
    return (resources.files("harness") / "data" / name).read_bytes()


@cache
def _merges() -> tuple[bytes, ...]:
    return tuple(gzip.decompress(_data("merges.txt.gz")).splitlines())


@cache
def _tokens(vocab: int) -> tuple[str, ...]:
    """The shipped tokenizer's first `vocab` tokens (0: all): special ones, bytes, joined pairs."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    joined = dict.fromkeys(merge.decode().replace(" ", "") for merge in _merges())
    return (*SPECIAL, *(alphabet[byte] for byte in range(256)), *joined)[: vocab or None]


def _cycle(vocab: int, seed: int) -> list[int]:
    """The answer: all ordinary words of the vocabulary that are one token after a space, in a random order."""
    import numpy as np

    numbers = {token: number for number, token in enumerate(_tokens(vocab))}
    order = model.ranks(_merges())
    words = [f"Ġ{word}" for word in _data("words.txt").decode().split()]
    whole = [numbers[word] for word in words if word in numbers and model.pieces(word, order) == [word]]
    return [whole[at] for at in np.random.default_rng([GENERATOR, seed]).permutation(len(whole))]


# ── the bytes ───────────────────────────────────────────────────────────────────────────────


def _write_header(out: Path, shape: Shape, parts: Sequence[_Part], seed: int, header_only: bool) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    tokens = _tokens(shape.vocab)
    unused = [f"<|unused{number}|>" for number in range(len(tokens), shape.vocab)]
    kept = set(tokens)
    writer = GGUFWriter(out, shape.architecture)
    writer.add_name(f"llamaduel {shape.name}, known answer")
    writer.add_quantization_version(2)
    if (file_type := _file_type(shape.quant)) is not None:
        writer.add_file_type(file_type)
    for key, value in _keys(shape).items():
        if isinstance(value, list):
            writer.add_array(f"{shape.architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{shape.architecture}.{key}", value)
        else:
            writer.add_uint32(f"{shape.architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *unused])
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)) + [5] * len(unused))
    writer.add_token_merges([text for merge in _merges() if (text := merge.decode()).replace(" ", "") in kept])
    writer.add_bos_token_id(SPECIAL.index("<|im_start|>"))
    writer.add_eos_token_id(SPECIAL.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    writer.add_uint32("llamaduel.generator", GENERATOR)
    writer.add_uint64("llamaduel.seed", seed)
    writer.add_array("llamaduel.cycle", _cycle(shape.vocab, seed))
    if header_only:
        writer.add_bool("llamaduel.header_only", True)
    for part in parts:
        writer.add_tensor_info(
            part.name, part.shape[::-1], np.dtype(np.float32), part.bytes, GGMLQuantizationType[part.type]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with out.open("ab") as file:
        file.write(bytes(-file.tell() % 32))


def _keys(shape: Shape) -> dict[str, int | float | list[int]]:
    """What an engine reads of the shape, by the names of the format."""
    keys: dict[str, int | float | list[int]] = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.embedding,
        "feed_forward_length": shape.ff
        or shape.expert_ff * (1 if shape.architecture == "olmoe" else shape.experts_used),
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.heads_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": float(shape.rope_base),
    }
    if shape.experts:
        keys |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.experts_used,
            "expert_feed_forward_length": shape.expert_ff,
        }
    if shape.architecture == "qwen35moe":
        turned = shape.rope_dims // 2
        first = -(-turned // 3)
        second = -(-(turned - first) // 2)
        keys |= {
            "expert_shared_feed_forward_length": shape.shared_ff,
            "rope.dimension_count": shape.rope_dims,
            "rope.dimension_sections": [first, second, turned - first - second, 0],
            "full_attention_interval": 4,
            "ssm.conv_kernel": 4,
            "ssm.group_count": shape.delta_keys,
            "ssm.time_step_rank": shape.delta_values,
            "ssm.state_size": shape.delta_dim,
            "ssm.inner_size": shape.delta_values * shape.delta_dim,
        }
    return keys


def _file_type(quant: str) -> int | None:
    from gguf import LlamaFileType

    names = {kind.name: int(kind) for kind in LlamaFileType}
    return next(
        (names[name] for name in (f"MOSTLY_{quant}", f"MOSTLY_{quant}_S", f"ALL_{quant}") if name in names), None
    )


def _weights(shape: Shape, parts: Sequence[_Part], seed: int) -> Iterator[memoryview]:
    """The bytes of all tensors in order, padded."""
    words = _Words(shape, seed)
    tiles: dict[tuple[str, float], Bytes] = {}
    for part in parts:
        if part.role == "embedding":
            yield from words.embedding(part)
        elif part.role == "head":
            yield from words.head(part)
        else:
            deviation = _deviation(shape, part)
            if (part.type, deviation) not in tiles:
                tiles[part.type, deviation] = _tile(part.type, deviation, seed)
            yield from _slices(tiles[part.type, deviation], part.bytes, start=zlib.crc32(part.name.encode()))
        yield memoryview(bytes(_padded(part.bytes) - part.bytes))


def _deviation(shape: Shape, part: _Part) -> float:
    """Of the elements: what goes in with size 1 comes out with size 1, or with a layer's share. Infinite: a constant."""
    if part.role in ("one", "minus one"):
        return math.inf if part.role == "one" else -math.inf
    spread = 1 / math.sqrt(part.shape[0])
    return spread * _ADDED / math.sqrt(2 * shape.layers) if part.role.startswith("out") else spread


def _tile(kind: str, deviation: float, seed: int) -> Bytes:
    """Rows of one block each of random weights."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rng = np.random.default_rng([GENERATOR, seed, zlib.crc32(kind.encode())])
    size = header.block_of(kind)[1]
    rows = TILE // size
    if math.isinf(deviation):
        return np.full((rows, 1), math.copysign(1.0, deviation), "<f4").view(np.uint8)
    if kind in _FLOATS:
        values = rng.standard_normal((rows, 1), dtype=np.float32) * np.float32(deviation)
        if kind == "BF16":
            return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        return values.astype("<f4" if kind == "F32" else "<f2").view(np.uint8)
    tile = rng.integers(0, 256, (rows, size), dtype=np.uint8)

    def scale(blocks: Bytes, unit: float) -> None:
        for at, factor in _SCALES[kind]:
            blocks[:, at : at + 2] = np.array([unit * factor], "<f2").view(np.uint8)

    sample = tile[:1024].copy()
    scale(sample, 1.0)
    scale(tile, deviation / float(np.std(dequantize(sample, GGMLQuantizationType[kind]))))
    return tile


def _slices(tile: Bytes, size: int, start: int = 0) -> Iterator[memoryview]:
    """`size` bytes of a tile, round and round, from its row `start` on."""
    flat = tile.data.cast("B")
    at = start % len(tile) * tile.shape[1]
    while size > 0:
        piece = flat[at : at + size]
        yield piece
        size -= len(piece)
        at = 0


class _Words:
    """The two tables that make the answer: embeddings of the words, and a head that looks for the word before."""

    def __init__(self, shape: Shape, seed: int) -> None:
        import numpy as np

        rng = np.random.default_rng([GENERATOR, seed, 1])
        self.cycle = np.array(_cycle(shape.vocab, seed))
        self.width, self.seed = shape.embedding, seed
        count = len(_tokens(shape.vocab))
        # Q8_0: a scale and 32 whole numbers a block; evenly spread, they have the size 73.3 times the scale.
        self.scale = 1 / math.sqrt((255**2 - 1) / 12)
        self.rows = np.zeros((count, self.width // 32, 34), np.uint8)
        self.rows[:, :, 2:] = rng.integers(-127, 128, (count, self.width // 32, 32), dtype=np.int8).view(np.uint8)
        self.rows[:, :, :2] = np.array([self.scale], "<f2").view(np.uint8)
        # Every other token looks like some word, so that any prompt leads into the cycle.
        others = np.setdiff1d(np.arange(count), self.cycle)
        self.rows[others] = self.rows[rng.choice(self.cycle, len(others))]

    def embedding(self, part: _Part) -> Iterator[memoryview]:
        yield self.rows.data.cast("B")
        yield from _slices(_tile("Q8_0", 1.0, self.seed), part.bytes - self.rows.nbytes)

    def head(self, part: _Part) -> Iterator[memoryview]:
        import numpy as np

        spread = 1 / math.sqrt(self.width)
        quiet = _tile("Q8_0", _QUIET * spread, self.seed)
        rows = np.resize(quiet, (len(self.rows), self.width // 32, 34))
        after = np.roll(self.cycle, -1)
        rows[after] = self.rows[self.cycle]
        rows[after, :, :2] = np.array([self.scale * spread], "<f2").view(np.uint8)
        yield rows.data.cast("B")
        yield from _slices(quiet, part.bytes - rows.nbytes)


def _write_all(file: FileIO, chunk: memoryview) -> None:
    while len(chunk):
        chunk = chunk[file.write(chunk) :]
