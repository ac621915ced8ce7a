"""Shapes of models: all that decides speed and placement, and nothing of what a model knows.

A shape can be taken from a real model's header, made larger or smaller, and listed as the tensors that
engines expect of its architecture. `synth` fills them.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from harness import header, model
from harness.errors import UsageError
from harness.sizes import format_bytes

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Main type and the type of what suffers most, as llama.cpp's own mixtures have them.
MIXTURES = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K")}
EXPERT_MIXTURES = {"MXFP4_MOE": ("MXFP4", "Q8_0")}  # type of the routed experts, and of what else is quantised
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
FLOATS = ("F32", "F16", "BF16")
# Quantised types that can be filled with noise: where the scales of a block lie, and how large each is against
# the first. The second recentres values that have no sign.
SCALES: Mapping[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 1),), "Q4_1": ((0, 1), (2, -7.5)), "Q5_0": ((0, 1),), "Q5_1": ((0, 1), (2, -15.5)), "Q8_0": ((0, 1),),
    "Q2_K": ((80, 1), (82, 1.5)), "Q3_K": ((108, 1),), "Q4_K": ((0, 1), (2, 7.5)), "Q5_K": ((0, 1), (2, 15.5)),
    "Q6_K": ((208, 1),), "IQ4_NL": ((0, 1),), "IQ4_XS": ((0, 1),), "IQ3_S": ((0, 1),), "IQ3_XXS": ((0, 1),),
    "IQ2_S": ((0, 1),), "IQ2_XS": ((0, 1),), "IQ2_XXS": ((0, 1),),
}  # fmt: skip
EXPONENTS = ("MXFP4",)  # a block begins with a power of two in one byte, and has no other scale
QUANTS = (*MIXTURES, *EXPERT_MIXTURES, *SCALES, *EXPONENTS, *FLOATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Widths are in elements. `types` names the tensors whose type is another than `quant` gives."""

    name: str
    architecture: str = "qwen3moe"
    layers: int
    embedding: int
    vocab: int = 0  # 0: as many as the shipped tokenizer has
    heads: int
    heads_kv: int
    head_dim: int
    ff: int = 0  # of dense layers
    leading_dense: int = 0  # layers before the first one with experts
    experts: int = 0
    experts_used: int = 0
    expert_ff: int = 0
    shared: int = 0  # shared experts that the file counts; they are one tensor, `shared_ff` wide
    shared_ff: int = 0
    draft_blocks: int = 0  # for multi-token prediction, after the layers
    context: int = 32768
    rope_base: float = 1e6
    rope_dims: int = 0  # 0: the whole head
    window: int = 0  # tokens that every other layer looks back
    latent: int = 0  # width of the one vector that latent attention (MLA) keeps, without its `rope_dims`
    value_dim: int = 0  # of a head under latent attention; elsewhere it is `head_dim`
    delta_keys: int = 0  # heads of a gated delta net, in three of four layers
    delta_values: int = 0
    delta_dim: int = 128
    quant: str = "Q4_K_M"
    types: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        experts = f", {self.experts} experts of which {self.experts_used} a token" if self.experts else ""
        return f"{self.name} ({self.architecture}), {self.layers} layers{experts}, {self.quant}"


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
        Shape(
            name="glm-4.5-air", architecture="glm4moe", layers=46, draft_blocks=1, embedding=4096, vocab=151552,
            heads=96, heads_kv=8, head_dim=128, ff=10944, leading_dense=1, experts=128, experts_used=8, expert_ff=1408,
            shared=1, shared_ff=1408, context=131072, rope_dims=64,
        ),
        Shape(
            name="deepseek-v2-lite", architecture="deepseek2", layers=27, embedding=2048, vocab=102400,
            heads=16, heads_kv=1, head_dim=192, latent=512, value_dim=128, ff=10944, leading_dense=1, experts=64,
            experts_used=6, expert_ff=1408, shared=2, shared_ff=2816, context=163840, rope_base=1e4, rope_dims=64,
        ),
        Shape(
            name="gpt-oss-20b", architecture="gpt-oss", layers=24, embedding=2880, vocab=201088, heads=64, heads_kv=8,
            head_dim=64, window=128, experts=32, experts_used=4, expert_ff=2880, context=131072, rope_base=1.5e5,
            quant="MXFP4_MOE",
        ),
    )
}  # fmt: skip


def shape_of(path: Path) -> Shape:
    """The shape of a real GGUF, read from its header. Raises ModelError for a file that is none.

    An architecture that is not among ours becomes qwen3moe (qwen3 if dense) of the same layers, widths,
    experts and expert types; its attention may then differ.
    """
    facts = model.load(path, hashed=False)
    architecture = facts.file.architecture
    keys = header.read(path).fields
    known = architecture in _LAYERS

    def key(name: str, default: Any = 0) -> Any:
        value = keys.get(f"{architecture}.{name}", default)
        return max(value, default=0) if isinstance(value, list) else value

    extents = {tensor.name.split(".", 2)[-1]: tensor.shape for tensor in facts.loaded if tensor.block is not None}
    heads = int(key("attention.head_count", 1)) or 1
    latent = int(key("attention.kv_lora_rank")) if known else 0
    leading = facts.leading_dense if known and facts.experts else 0
    types = {tensor.name: tensor.type for tensor in facts.tensors if known or tensor.routed}
    weight: dict[str, int] = {}
    for tensor in facts.loaded:
        weight[tensor.type] = weight.get(tensor.type, 0) + tensor.bytes
    main = max(weight, key=weight.__getitem__)
    return Shape(
        name=f"like-{path.stem.lower()}",
        architecture=architecture if known else "qwen3moe" if facts.experts else "qwen3",
        layers=facts.layers,
        embedding=facts.embedding,
        vocab=facts.vocab,
        heads=heads,
        heads_kv=int(key("attention.head_count_kv", heads)) or 1,
        head_dim=int(key("attention.key_length_mla" if latent else "attention.key_length", facts.embedding // heads)),
        ff=int(key("feed_forward_length")) if leading or not facts.experts else 0,
        leading_dense=leading,
        experts=facts.experts or 0,
        experts_used=facts.experts_used or 0,
        expert_ff=extents["ffn_down_exps.weight"][0] if facts.experts else 0,
        shared=int(key("expert_shared_count")) if known else 0,
        shared_ff=extents.get("ffn_up_shexp.weight", (0, 0))[1] if known else 0,
        draft_blocks=facts.draft_blocks if known else 0,
        context=facts.context_train or 32768,
        rope_base=float(key("rope.freq_base", 1e4)),
        rope_dims=int(key("rope.dimension_count")),
        window=int(key("attention.sliding_window")) if known else 0,
        latent=latent,
        value_dim=int(key("attention.value_length_mla")) if latent else 0,
        delta_keys=int(key("ssm.group_count")) if known else 0,
        delta_values=int(key("ssm.time_step_rank")) if known else 0,
        delta_dim=int(key("ssm.state_size", 128)),
        quant=next((kind for kind in (facts.file_type, main) if kind in QUANTS), "Q4_K_M"),
        types={name: kind for name, kind in types.items() if kind in QUANTS},
    )


# ── a shape as tensors ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor to write. `role` says how it is filled: in, out, router, one, minus one, embedding, head."""

    name: str
    shape: tuple[int, ...]
    type: str
    role: str

    @property
    def bytes(self) -> int:
        elements, size = header.block_of(self.type)
        return math.prod(self.shape) // elements * size


_Layer = Iterator[tuple[str, tuple[int, ...], str]]


def parts(shape: Shape) -> list[Part]:
    """All tensors of a shape, in the order of the file. Raises UsageError if it cannot be written."""
    shape = whole(shape)
    rows = (shape.embedding, shape.vocab)
    outside = [
        Part("token_embd.weight", rows, "Q8_0", "embedding"),
        Part("output_norm.weight", (shape.embedding,), "F32", "one"),
        Part("output.weight", rows, "Q8_0", "head"),
    ]
    return outside + [part for block in range(shape.layers + shape.draft_blocks) for part in _layer_parts(shape, block)]


def whole(shape: Shape) -> Shape:
    """The shape with its vocabulary counted. Raises UsageError if it cannot be written."""
    if shape.quant not in QUANTS:
        raise UsageError(f"{shape.quant!r} is no type that can be written; known: {', '.join(QUANTS)}")
    if shape.embedding % 32 or 0 < shape.vocab < 4096:
        raise UsageError(f"{shape.name} has a width or a vocabulary that cannot be filled; take {', '.join(SHAPES)}")
    return shape if shape.vocab else replace(shape, vocab=len(tokens(0)))


def padded(size: int) -> int:
    """Tensors begin at multiples of 32 bytes."""
    return -(-size // 32) * 32


def size_of(shape: Shape) -> int:
    """Bytes of the file, to within half a percent."""
    return _fixed_bytes(shape) + sum(_layer_bytes(shape, block) for block in range(shape.layers + shape.draft_blocks))


def _fixed_bytes(shape: Shape) -> int:
    shape = whole(shape)
    outside = parts(replace(shape, layers=0, draft_blocks=0))
    return _vocabulary_bytes(shape.vocab) + sum(map(_space, outside))


def _layer_bytes(shape: Shape, block: int) -> int:
    return sum(map(_space, _layer_parts(shape, block)))


@cache
def _vocabulary_bytes(vocab: int) -> int:
    known = tokens(vocab)
    return sum(2 * len(token.encode()) + 21 for token in known) + 29 * (vocab - len(known))


def _space(part: Part) -> int:
    return padded(part.bytes) + len(part.name) + 50


def _layer_parts(shape: Shape, layer: int) -> list[Part]:
    eighth, last = shape.layers // 8, 7 * shape.layers // 8
    better = layer < eighth or layer >= last or (layer - eighth) % 3 == 2  # llama.cpp's choice of layers
    return [
        Part(f"blk.{layer}.{suffix}", extent, _type(shape, f"blk.{layer}.{suffix}", extent, role, better), role)
        for suffix, extent, role in _LAYERS[shape.architecture](shape, layer)
    ]


def _type(shape: Shape, name: str, extent: Sequence[int], role: str, better: bool) -> str:
    if role in ("one", "minus one", "zero", "router"):
        return "F32"
    if shape.quant in EXPERT_MIXTURES:
        usual = best = EXPERT_MIXTURES[shape.quant][0 if "_exps" in name else 1]
    else:
        usual, best = MIXTURES.get(shape.quant, (shape.quant, shape.quant))
    wanted = shape.types.get(name, best if better and "more" in role else usual)
    # Rows that are no whole number of blocks fall back as llama.cpp's quantiser does.
    if extent[0] % header.block_of(wanted)[0] == 0:
        return wanted
    return FALLBACKS.get(wanted, "IQ4_NL") if extent[0] % 32 == 0 else "F16"


def _attention(shape: Shape, *, gated: bool = False, normed: bool = True, whole_norm: bool = False) -> _Layer:
    width, inner, inner_kv = shape.embedding, shape.heads * shape.head_dim, shape.heads_kv * shape.head_dim
    yield "attn_q.weight", (width, inner * (2 if gated else 1)), "in"
    yield "attn_k.weight", (width, inner_kv), "in"
    yield "attn_v.weight", (width, inner_kv), "in more"
    yield "attn_output.weight", (inner, width), "out"
    if not normed:
        return
    yield "attn_q_norm.weight", (inner if whole_norm else shape.head_dim,), "one"
    yield "attn_k_norm.weight", (inner_kv if whole_norm else shape.head_dim,), "one"


def _feed_forward(shape: Shape, suffix: str, inner: int, count: tuple[int, ...] = ()) -> _Layer:
    yield f"ffn_gate{suffix}.weight", (shape.embedding, inner, *count), "in"
    yield f"ffn_up{suffix}.weight", (shape.embedding, inner, *count), "in"
    yield f"ffn_down{suffix}.weight", (inner, shape.embedding, *count), "out more"


def _mixture(shape: Shape) -> _Layer:
    yield "ffn_gate_inp.weight", (shape.embedding, shape.experts), "router"
    yield from _feed_forward(shape, "_exps", shape.expert_ff, (shape.experts,))


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
    if not shape.experts:
        yield from _feed_forward(shape, "", shape.ff)
        return
    yield from _mixture(shape)


def _glm4moe(shape: Shape, block: int) -> _Layer:
    width = shape.embedding
    yield "attn_norm.weight", (width,), "one"
    yield from _attention(shape, normed=False)
    for name, heads in (("q", shape.heads), ("k", shape.heads_kv), ("v", shape.heads_kv)):
        yield f"attn_{name}.bias", (heads * shape.head_dim,), "zero"
    yield "post_attention_norm.weight", (width,), "one"
    if block < shape.leading_dense:
        yield from _feed_forward(shape, "", shape.ff)
    else:
        yield "exp_probs_b.bias", (shape.experts,), "zero"
        yield from _mixture(shape)
        yield from _feed_forward(shape, "_shexp", shape.shared_ff)
    if block >= shape.layers:
        yield "nextn.eh_proj.weight", (2 * width, width), "in"
        yield from ((f"nextn.{name}.weight", (width,), "one") for name in ("enorm", "hnorm", "shared_head_norm"))


def _deepseek2(shape: Shape, block: int) -> _Layer:
    width, heads, unturned = shape.embedding, shape.heads, shape.head_dim - shape.rope_dims
    yield "attn_norm.weight", (width,), "one"
    yield "attn_q.weight", (width, heads * shape.head_dim), "in"
    yield "attn_kv_a_mqa.weight", (width, shape.latent + shape.rope_dims), "in"
    yield "attn_kv_a_norm.weight", (shape.latent,), "one"
    yield "attn_k_b.weight", (unturned, shape.latent, heads), "in"
    yield "attn_v_b.weight", (shape.latent, shape.value_dim, heads), "in"
    yield "attn_output.weight", (heads * shape.value_dim, width), "out"
    yield "ffn_norm.weight", (width,), "one"
    if block < shape.leading_dense:
        yield from _feed_forward(shape, "", shape.ff)
    else:
        yield from _mixture(shape)
        yield from _feed_forward(shape, "_shexp", shape.shared_ff)


def _gpt_oss(shape: Shape, _block: int) -> _Layer:
    width, inner, inner_kv = shape.embedding, shape.heads * shape.head_dim, shape.heads_kv * shape.head_dim
    yield "attn_norm.weight", (width,), "one"
    yield from _attention(shape, normed=False)
    for name, extent in (("q", inner), ("k", inner_kv), ("v", inner_kv), ("output", width)):
        yield f"attn_{name}.bias", (extent,), "zero"
    yield "attn_sinks.weight", (shape.heads,), "zero"
    yield "post_attention_norm.weight", (width,), "one"
    yield from _mixture(shape)
    yield "ffn_gate_inp.bias", (shape.experts,), "zero"
    for name, extent in (("gate", shape.expert_ff), ("up", shape.expert_ff), ("down", width)):
        yield f"ffn_{name}_exps.bias", (extent, shape.experts), "zero"


def _qwen35moe(shape: Shape, layer: int) -> _Layer:
    yield "attn_norm.weight", (shape.embedding,), "one"
    yield from _attention(shape, gated=True) if layer % 4 == 3 else _delta_net(shape)
    yield "post_attention_norm.weight", (shape.embedding,), "one"
    yield from _mixture(shape)
    yield "ffn_gate_inp_shexp.weight", (shape.embedding,), "router"
    yield from _feed_forward(shape, "_shexp", shape.shared_ff)


_LAYERS: Mapping[str, Callable[[Shape, int], _Layer]] = {
    "qwen3": _qwen3, "qwen3moe": _qwen3, "olmoe": _qwen3, "qwen35moe": _qwen35moe, "glm4moe": _glm4moe,
    "deepseek2": _deepseek2, "gpt-oss": _gpt_oss,
}  # fmt: skip


# ── scaling ─────────────────────────────────────────────────────────────────────────────────


def scaled(shape: Shape, size_bytes: int) -> Shape:
    """The shape made larger or smaller, to within 4 % of this size.

    Layers and experts, which placement is about, are kept as long as the widths can give; all ratios move
    as little as they can. Raises UsageError where no such shape exists.
    """
    shape = whole(shape)
    best: tuple[float, Shape] = (math.inf, shape)
    table_share = shape.vocab * shape.embedding / size_of(shape)
    for cost, candidate in sorted(((_distance(shape, it), it) for it in _candidates(shape)), key=lambda pair: pair[0]):
        if cost >= best[0]:
            break
        # Four layers, half of them in the better types of a mixture: what any number of layers costs on average.
        # Those before the first with experts, and those after the layers, cost what they cost.
        twelve = replace(candidate, layers=12, leading_dense=0, draft_blocks=0)
        usual = sum(_layer_bytes(twelve, layer) for layer in (0, 1, 2, 3)) / 4
        first, leading = candidate.leading_dense, range(candidate.leading_dense)
        drafts = candidate.draft_blocks * _layer_bytes(replace(candidate, layers=12), 12) if shape.draft_blocks else 0
        others = sum(_layer_bytes(replace(candidate, layers=12), layer) for layer in leading) + drafts
        layers = first + round((size_bytes - _fixed_bytes(candidate) - others) / usual)
        if not 4 <= layers <= 4 * shape.layers:
            continue
        fitted = replace(candidate, layers=layers)
        cost += 3 * math.log(layers / shape.layers) ** 2
        cost += 0.2 * math.log(fitted.vocab * fitted.embedding / size_bytes / table_share) ** 2
        if cost < best[0] and abs(size_of(fitted) / size_bytes - 1) < 0.04:
            best = (cost, fitted)
    if math.isinf(best[0]):
        raise UsageError(f"{shape.name} cannot be made {format_bytes(size_bytes)} large; give a size nearer to its own")
    return replace(best[1], name=f"{shape.name}-{format_bytes(size_bytes).replace(' ', '').lower()}")


def _candidates(shape: Shape) -> Iterator[Shape]:
    """Shapes of the family with other widths, experts and vocabularies; the number of layers is still open."""
    inner = shape.expert_ff or shape.ff
    counts = {shape.experts << step for step in range(2)} | {shape.experts >> step for step in range(5)}
    counts = {count for count in counts if count >= 4 or not shape.experts}
    vocabs = {min(shape.vocab, vocab) for vocab in (len(tokens(0)), 32768, 65536, shape.vocab)}
    for width, wide, count, vocab in product(_widths(shape.embedding), _widths(inner), counts, vocabs):
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
            ff=_whole_blocks(shape.ff * wide / inner),
            experts=count,
            experts_used=max(1, round(shape.experts_used * count / shape.experts)) if shape.experts else 0,
            expert_ff=wide if shape.experts else 0,
            shared_ff=shape.shared * wide or _whole_blocks(shape.shared_ff * wide / inner),
            delta_keys=keys if shape.delta_keys else 0,
            delta_values=keys * (shape.delta_values // shape.delta_keys) if shape.delta_keys else 0,
            types={},
        )


def _widths(full: int) -> list[int]:
    """Widths around a given one, in whole blocks of the large quantised types."""
    return sorted({*range(256, min(full, 2048) + 1, 256), *(full << step for step in range(4))})


def _whole_blocks(width: float) -> int:
    """A width in whole blocks of 256, at least one; 0 stays 0."""
    return max(1, round(width / 256)) * 256 if width else 0


def _distance(shape: Shape, other: Shape) -> float:
    """How far the widths and experts of one shape are from another's, over their logarithms."""
    weights = {"experts": 2, "embedding": 1, "expert_ff": 1, "ff": 1}
    ratios = {name: getattr(other, name) / getattr(shape, name) for name in weights if getattr(shape, name)}
    return sum(weights[name] * math.log(ratio) ** 2 for name, ratio in ratios.items())


# ── the shipped tokenizer ───────────────────────────────────────────────────────────────────


@cache
def merges() -> tuple[bytes, ...]:
    """Pairs that a byte-level BPE joins, in their order: "t h"."""
    return tuple(gzip.decompress(_data("merges.txt.gz")).splitlines())


@cache
def tokens(vocab: int) -> tuple[str, ...]:
    """The first `vocab` tokens (0: all): special ones, single bytes, joined pairs."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    joined = dict.fromkeys(merge.decode().replace(" ", "") for merge in merges())
    return (*SPECIAL, *(alphabet[byte] for byte in range(256)), *joined)[: vocab or None]


@cache
def words() -> tuple[str, ...]:
    """Ordinary words, which a known answer is made of."""
    return tuple(_data("words.txt").decode().split())


def _data(name: str) -> bytes:
    return (resources.files("harness") / "data" / name).read_bytes()
