"""Facts of a model file: layers, experts, memory per token, template, and the digest of its weights.

Engines rewrite files but not tensors, so the digest runs over the tensor table: two files with one
digest hold the same weights. What takes time is kept in the cache folder, under the identity of the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from harness import header
from harness.contract import ModelFile, Say
from harness.errors import ModelError
from harness.header import Header
from harness.process import cache_dir
from harness.sizes import format_bytes

FORMAT = 3  # of the cached facts; a change of a field, a formula or what is refused makes it 4
CHUNK = 8 << 20
RACY_NS = 20_000_000  # a file changed this recently may change again within one tick of its clock
OPENERS = 2048
MOST_BLOCKS = 4096  # more are a damaged header
STATE_BYTES = 4  # recurrent states are F32 in every engine

_ARCHITECTURE = re.compile(r"[\w.+-]+", re.ASCII)
_BLOCK = re.compile(r"blk\.(\d+)\.")
_ROUTED = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_(ch)?exps(\.|$)")
_LOOKUPS = ("token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight")

# Of every n layers, n - 1 see a window only, where the file has a window and does not list the layers.
# The layer that sees everything is the last of the n, or the first.
_WINDOW_PERIOD = {
    "afmoe": 4, "cohere2": 4, "cohere2moe": -4, "exaone-moe": 4, "exaone4": 4, "gemma2": 2, "gemma3": 6,
    "gemma3n": 5, "gpt-oss": 2, "laguna": -4, "llama4": 4, "mellum": 4, "muse-glimmer": 4, "olmo2": 4,
    "plamo3": 8, "smallthinker": -4,
}  # fmt: skip
_WINDOW_DEFAULT = {"exaone-moe": 128, "exaone4": 4096, "gemma2": 4096, "llama4": 8192}
_WINDOW_FIXED = {"llama4": 8192, "smallthinker": 4096}  # whatever the file says, unless it says none
# Sparse attention keeps a second set of keys (so do all with `indexer` tensors); others have states of their own.
_MEMORY_UNKNOWN = {"bailingmoe3", "deepseek4", "kimi-k3", "minimax-01", "qwen4exp"}
_RECURRENT = ("ssm_", "shortconv", "time_mix_")
# What a tensor is for, by its name; in this order. The classes of a model are these, "mtp" and "other".
_CLASSES: Sequence[tuple[str, re.Pattern[str]]] = (
    ("other", re.compile(r".*norm|.*(ffn_gate_inp|exp_probs_b)")),  # norms and routers
    ("routed_experts", _ROUTED),
    ("shared_experts", re.compile(r"blk\.\d+\.ffn_.*_shexp(\.|$)")),
    ("dense_ffn", re.compile(r"blk\.\d+\.(ffn_(gate|up|down)|channel_mix_)")),
    ("attention", re.compile(r"blk\.\d+\.(attn_|ssm_|shortconv|time_mix_)")),  # or what stands in its place
    ("embedding", re.compile(r"(token_embd|per_layer_token_embd|position_embd|token_types)\.")),
    ("head", re.compile(r"output\.")),
)
CLASSES = ("embedding", "attention", "dense_ffn", "routed_experts", "shared_experts", "other", "head", "mtp")
_BOS_BY_TOKENIZER = {"llama", "bert"}
_BOS_BY_SPLITTER = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
    "tekken", "chameleon",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    type: str  # "Q4_K"
    shape: tuple[int, ...]  # ggml order: the row length first
    bytes: int

    @property
    def block(self) -> int | None:
        """The block that it belongs to; None for embedding, head and what else stands outside."""
        match = _BLOCK.match(self.name)
        return int(match[1]) if match else None

    @property
    def routed(self) -> bool:
        """Holds routed experts: what `--cpu-moe` moves."""
        return _ROUTED.match(self.name) is not None


@dataclass(frozen=True, slots=True)
class Memory:
    """What one layer keeps of the tokens before: keys and values for each, or one state for all."""

    keys: int = 0  # elements a token
    values: int = 0  # 0 under MLA, where the values are part of the keys
    window: int | None = None  # tokens it looks back; None: all
    state_bytes: int = 0  # recurrent, whatever the context

    def cells(self, context: int, ubatch: int) -> int:
        """Tokens that there is room for, as llama.cpp pads them."""
        seen = context if self.window is None else min(context, self.window + ubatch)
        return -(-seen // 256) * 256


@dataclass(frozen=True, slots=True)
class Attention:
    """How many layers remember in which way. One that attends and recurs counts in both; `none` keep nothing."""

    full: int
    window: int
    latent: int  # MLA
    recurrent: int
    none: int  # have no attention, or share an earlier layer's keys and values
    window_tokens: int | None  # the widest


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """The known answer of a model that `synth` wrote: greedy decoding follows this cycle for ever."""

    generator: int
    seed: int
    cycle: tuple[int, ...]  # token numbers
    words: tuple[str, ...]  # the same, as text

    def word(self, index: int) -> str:
        return self.words[index % len(self.words)]

    def continuation(self, last_word: str, tokens: int) -> str:
        """The exact text after a prompt that ends in this word. Raises ModelError if it is none of the cycle."""
        try:
            start = self.words.index(last_word) + 1
        except ValueError:
            raise ModelError(
                f"{last_word!r} is no word of this model's answer; end the prompt in a word of it"
            ) from None
        return "".join(f" {self.word(start + step)}" for step in range(tokens))


@dataclass(frozen=True, kw_only=True)
class Model:
    """Unknown is None. `layers` are the blocks that run; `blocks` counts those for multi-token prediction too."""

    file: ModelFile  # sha256 and digest are "" if they were not asked for, or there are no weights
    name: str
    file_type: str | None  # "Q4_K_M", as the file says of itself
    layers: int
    blocks: int
    expert_layers: tuple[int, ...]
    experts: int | None
    experts_used: int | None  # a token, the most of any layer
    experts_shared: int | None
    context_train: int | None
    vocab: int
    embedding: int
    memory: tuple[Memory, ...] | None  # one a layer
    tensors: tuple[Tensor, ...]
    chat_template: str | None
    add_bos: bool
    bos: str
    eos: str
    openers: tuple[str, ...]  # words that are one token each at the start of a text
    answer_key: AnswerKey | None
    header_only: bool  # has no weights: it can be planned for, not run
    heads: int | None = None  # of attention, the most of any layer
    identity: tuple[tuple[int, ...], ...] = field(default=(), compare=False, repr=False)  # of the files, as read

    @property
    def leading_dense(self) -> int:
        """Layers before the first one with experts."""
        return self.expert_layers[0] if self.expert_layers else self.layers

    @property
    def draft_blocks(self) -> int:
        """Blocks for multi-token prediction, after the layers; engines load them only to speculate with."""
        return self.blocks - self.layers

    @cached_property
    def tied(self) -> bool:
        """The embedding serves as the head too."""
        return all(tensor.name != "output.weight" for tensor in self.tensors)

    @cached_property
    def loaded(self) -> tuple[Tensor, ...]:
        """The tensors that an engine loads: all but those for multi-token prediction."""
        return tuple(tensor for tensor in self.tensors if tensor.block is None or tensor.block < self.layers)

    def class_of(self, tensor: Tensor) -> str:
        """What a tensor is for: one of CLASSES. "mtp" is all of the blocks for multi-token prediction."""
        if tensor.block is not None and tensor.block >= self.layers:
            return "mtp"
        return next((name for name, pattern in _CLASSES if pattern.match(tensor.name)), "other")

    @cached_property
    def attention(self) -> Attention | None:
        """None where the format keeps more than we know."""
        if self.memory is None:
            return None
        windows = [layer.window for layer in self.memory if layer.window is not None]
        return Attention(
            full=sum(bool(layer.values) and layer.window is None for layer in self.memory),
            window=len(windows),
            latent=sum(bool(layer.keys) and not layer.values and layer.window is None for layer in self.memory),
            recurrent=sum(bool(layer.state_bytes) for layer in self.memory),
            none=self.memory.count(Memory()),
            window_tokens=max(windows, default=None),
        )

    @property
    def states_bytes(self) -> int | None:
        """Recurrent states of all layers, whatever the context. None: unknown."""
        return None if self.memory is None else sum(layer.state_bytes for layer in self.memory)

    @cached_property
    def weights_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.loaded)

    @cached_property
    def bytes_per_token(self) -> float:
        """Weights read for one decoded token, batch 1."""
        return sum(self.read_bytes(tensor) for tensor in self.loaded)

    def read_bytes(self, tensor: Tensor) -> float:
        """Bytes of one tensor that a decoded token reads: its share of experts, a row of a table, or all."""
        if tensor.routed and self.experts_used is not None:
            return tensor.bytes * self.experts_used / tensor.shape[-1]
        if tensor.name in _LOOKUPS:
            row = tensor.bytes / tensor.shape[-1]
            return row + tensor.bytes if self.tied and tensor.name == "token_embd.weight" else row
        return tensor.bytes

    def memory_bytes_per_token(self, type_k: str = "f16", type_v: str = "f16") -> int | None:
        """Bytes that one more token of context takes in all layers, past every window. None: unknown."""
        if self.memory is None:
            return None
        return sum(_row(layer.keys, layer.values, type_k, type_v) for layer in self.memory if layer.window is None)

    def memory_bytes(
        self, context: int, type_k: str = "f16", type_v: str = "f16", *, ubatch: int = 512, flash_attention: bool = True
    ) -> tuple[int, ...] | None:
        """Bytes that each layer allocates for one slot of `context` tokens, as llama.cpp pads it. None: unknown.

        Without flash attention every layer's values take the width of the widest.
        """
        if self.memory is None:
            return None
        widest = max((layer.values for layer in self.memory), default=0)
        allocated = []
        for layer in self.memory:
            values = layer.values if flash_attention or not layer.values else widest
            allocated.append(
                layer.cells(context, ubatch) * _row(layer.keys, values, type_k, type_v) + layer.state_bytes
            )
        return tuple(allocated)


def load(path: Path, *, hashed: bool = True, say: Say | None = None) -> Model:
    """All facts of a model. Raises ModelError, one sentence with the next step.

    The weights are read once for their digests, unless `hashed` is off; then those known from before are given.
    """
    path = path.absolute()
    try:
        str(path).encode()
    except UnicodeEncodeError:  # no JSON and no engine's API can hold it
        shown = os.fsencode(path).decode(errors="replace")
        raise ModelError(f"{shown} has a name that is not UTF-8; rename it") from None
    parts = header.siblings(path)
    began_ns = time.time_ns()
    identity = _identity(parts)
    known = _recall(path, parts, identity)
    record = known or {
        "format": FORMAT,
        "identity": identity,
        "facts": _facts(header.read_all(path)),
        "sha256": "",
        "digest": "",
    }
    if hashed and not record["digest"] and not record["facts"]["header_only"]:
        headers = header.read_all(path)
        total = sum(part.size for part in headers)
        if say is not None and total > 1 << 30:
            say(f"reading {format_bytes(total)} of weights once, for their digest")
        sha256, digest = _digests(headers)
        record = record | {"sha256": sha256, "digest": digest}
    if _identity(parts) != identity:
        raise ModelError(f"{path} changed while it was read; wait until its download is over")
    if record is not known:
        _keep(identity, record, began_ns)
    return _model(path, parts, record)


def unchanged(model: Model) -> bool:
    """Whether its files are still the ones that were read: same place on the same disk, same size and time."""
    return tuple(map(tuple, _identity(model.file.shards))) == model.identity


def digest_of(path: Path) -> str | None:
    """The weights digest of any GGUF, e.g. of another engine's copy. None if it cannot be read."""
    with contextlib.suppress(ModelError):
        return load(path).file.digest or None
    return None


# ── facts ───────────────────────────────────────────────────────────────────────────────────


def _facts(headers: Sequence[Header]) -> dict[str, Any]:
    """The fields of Model, but for `file`, as JSON has them. Raises ModelError."""
    try:
        return _read_facts(headers)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{headers[0].path} has keys that contradict each other; download it again") from error


def _read_facts(headers: Sequence[Header]) -> dict[str, Any]:
    first, entries = headers[0], [entry for part in headers for entry in part.entries]
    architecture = first.text("general.architecture")
    if not _ARCHITECTURE.fullmatch(architecture):
        raise ModelError(f"{first.path} does not name its architecture; it is no language model, or a damaged one")
    kind = first.text("general.type")
    if kind in ("adapter", "mmproj", "imatrix") or architecture in ("clip", "imatrix"):
        what = kind or architecture
        raise ModelError(f"{first.path} is a part for another model ({what}); name the language model's own file")

    blocks = first.fields.get(f"{architecture}.block_count")
    if not entries or type(blocks) is not int or not 0 < blocks <= MOST_BLOCKS:
        raise ModelError(
            f"{first.path} holds no weights of a language model ({architecture}); name the model's own file"
        )
    tensors = [Tensor(entry.name, entry.type, entry.shape, entry.bytes) for entry in entries]
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    layers = blocks - first.number(".nextn_predict_layers", most=blocks - 1)
    tokens = first.texts("tokenizer.ggml.tokens")
    embedding = first.number(".embedding_length", least=1)
    experts, used = _experts(first, blocks, tensors)
    if any(tensor.block is not None and tensor.block >= blocks for tensor in tensors):
        raise ValueError("a tensor of a block that is not counted")

    def token(name: str) -> str:
        number = first.number(f"tokenizer.ggml.{name}_token_id", -1, least=-1)
        return tokens[number].decode(errors="replace") if 0 <= number < len(tokens) else ""

    owners = {tensor.block for tensor in tensors if tensor.routed}
    return {
        "architecture": architecture,
        "name": first.text("general.name") or first.path.stem,
        "file_type": _file_type(first.number("general.file_type", -1)),
        "layers": layers,
        "blocks": blocks,
        "expert_layers": [block for block in range(layers) if block in owners],
        "experts": experts or None,
        "experts_used": used or None,
        "experts_shared": _shared(first, shapes) if experts else None,
        "context_train": first.number(".context_length", least=1) or None,
        "vocab": shapes.get("token_embd.weight", (0, len(tokens)))[-1],
        "embedding": embedding,
        "heads": max(first.numbers(".attention.head_count", layers)) or None,
        "memory": _memory(first, layers, embedding, shapes),
        "tensors": [[tensor.name, tensor.type, list(tensor.shape), tensor.bytes] for tensor in tensors],
        "chat_template": first.text("tokenizer.chat_template") or None,
        "add_bos": _adds_bos(first),
        "bos": token("bos"),
        "eos": token("eos"),
        "openers": _openers(first, tokens),
        "answer_key": _answer_key(first, tokens),
        "header_only": bool(first.fields.get("llamaduel.header_only")),
    }


def _file_type(number: int) -> str | None:
    from gguf import LlamaFileType

    if number not in set(LlamaFileType):
        return None
    return LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _experts(first: Header, blocks: int, tensors: Sequence[Tensor]) -> tuple[int, int]:
    """How many there are, and the most that a token uses. Raises ValueError where no engine could follow."""
    experts = first.number(".expert_count")
    used = max(first.numbers(".expert_used_count", blocks))
    routed = [tensor for tensor in tensors if tensor.routed]
    if used > experts or (experts and not used) or (routed and not experts):
        raise ValueError(f"{used} of {experts} experts, {len(routed)} tensors of them")
    if any(tensor.shape[-1] < used for tensor in routed if tensor.name.endswith("_exps.weight")):
        raise ValueError(f"a tensor of fewer than {used} experts")
    return experts, used


def _shared(first: Header, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Shared experts a layer; where the file does not count them, they are one if it has any."""
    return first.number(".expert_shared_count", int(any("_shexp" in name for name in shapes)))


def _memory(
    first: Header, layers: int, embedding: int, shapes: Mapping[str, tuple[int, ...]]
) -> list[list[Any]] | None:
    """The fields of Memory for every layer, by what tensors it owns. None where the format keeps more than we know."""
    architecture = first.text("general.architecture")
    if architecture in _MEMORY_UNKNOWN or any(".indexer." in name for name in shapes):
        return None
    heads = first.numbers(".attention.head_count", layers)
    heads_kv = first.numbers(".attention.head_count_kv", layers, heads)
    default = embedding // heads[0] if heads[0] else 0
    wide_k, wide_v = first.number(".attention.key_length", default), first.number(".attention.value_length", default)
    swa_k = first.number(".attention.key_length_swa", wide_k)
    swa_v = first.number(".attention.value_length_swa", wide_v)
    latent = bool(first.number(".attention.key_length_mla")) and bool(first.number(".attention.value_length_mla"))
    windows = _windows(first, layers)
    keeping = 20 if architecture == "gemma3n" else layers - first.number(".attention.shared_kv_layers", most=layers)
    found = []
    for layer in range(layers):
        own = {name.split(".")[2] for name in shapes if name.startswith(f"blk.{layer}.")}
        state = _state_bytes(first, embedding, heads[layer]) if any(name.startswith(_RECURRENT) for name in own) else 0
        attends = bool(own & {"attn_k", "attn_kv_a_mqa"}) or ("attn_qkv" in own and not state)
        if not attends or layer >= keeping:
            found.append([0, 0, None, state])
            continue
        window = windows[layer]
        keys = heads_kv[layer] * (wide_k if window is None else swa_k)
        values = 0 if latent else heads_kv[layer] * (wide_v if window is None else swa_v)
        found.append([keys, values, window, state])
    return found


def _state_bytes(first: Header, embedding: int, heads: int) -> int:
    """Size of a recurrent layer's state: what its convolution remembers and the state proper."""
    kernel, inner, state = (first.number(f".ssm.{name}") for name in ("conv_kernel", "inner_size", "state_size"))
    if head := first.number(".wkv.head_size"):
        elements = embedding * (first.number(".token_shift_count", 2) + head)
    elif length := first.number(".shortconv.l_cache"):
        elements = embedding * (length - 1)
    elif head := first.number(".kda.head_dim"):
        elements = heads * head * (3 * (kernel - 1 if kernel else 3) + head)
    else:
        elements = max(kernel - 1, 0) * (inner + 2 * first.number(".ssm.group_count") * state) + state * inner
    return elements * STATE_BYTES


def _windows(first: Header, layers: int) -> list[int | None]:
    architecture = first.text("general.architecture")
    window = first.number(".attention.sliding_window", _WINDOW_DEFAULT.get(architecture, 0))
    if window:
        window = _WINDOW_FIXED.get(architecture, window)
    if not window or (architecture == "exaone4" and layers != 64):
        return [None] * layers
    if isinstance(first.fields.get(f"{architecture}.attention.sliding_window_pattern"), list):
        pattern = first.numbers(".attention.sliding_window_pattern", layers)
        return [window if seen else None for seen in pattern]
    if architecture.startswith("lfm2"):
        return [window] * layers
    period = _WINDOW_PERIOD.get(architecture)
    if period is None:
        return [None] * layers  # a window that engines do not use
    every = first.number(".attention.sliding_window_pattern") or abs(period)
    full = 0 if period < 0 else every - 1
    return [None if layer % every == full else window for layer in range(layers)]


def _row(keys: int, values: int, type_k: str, type_v: str) -> int:
    """Bytes of the keys and values of one token in one layer."""
    (k_elements, k_bytes), (v_elements, v_bytes) = header.block_of(type_k), header.block_of(type_v)
    return keys // k_elements * k_bytes + values // v_elements * v_bytes


# ── words ───────────────────────────────────────────────────────────────────────────────────


def _adds_bos(first: Header) -> bool:
    splitter = first.text("tokenizer.ggml.pre")
    by_default = first.text("tokenizer.ggml.model") in _BOS_BY_TOKENIZER or splitter in _BOS_BY_SPLITTER
    return bool(first.fields.get("tokenizer.ggml.add_bos_token", by_default)) or splitter == "gemma4"


def _openers(first: Header, tokens: Sequence[bytes]) -> list[str]:
    """Capitalised words that the tokenizer gives one token each at the very start of a text.

    Two prompts that begin with different ones share no token at all, whatever an engine caches.
    """
    kind = first.text("tokenizer.ggml.model")
    types = first.fields.get("tokenizer.ggml.token_type", [])
    spaced = kind == "llama" and first.fields.get("tokenizer.ggml.add_space_prefix", True)
    if kind not in ("gpt2", "llama"):
        return []
    word = re.compile(("▁" if spaced else "").encode() + rb"([A-Z][a-z]{2,9})")
    merges = ranks(first.texts("tokenizer.ggml.merges"))
    found: list[str] = []
    for number, token in enumerate(tokens):
        match = word.fullmatch(token)
        if match is None or (types and types[number] != 1):
            continue
        text = match[1].decode()
        if kind == "llama" or pieces(text, merges) == [text]:
            found.append(text)
    return found[:OPENERS]


def ranks(merges: Sequence[bytes]) -> dict[tuple[str, str], int]:
    """The order in which a byte-level BPE joins pairs."""
    pairs = (merge.decode(errors="replace").partition(" ") for merge in merges)
    return {(left, right): rank for rank, (left, _, right) in enumerate(pairs)}


def pieces(word: str, order: Mapping[tuple[str, str], int]) -> list[str]:
    """The tokens of one word, as byte-level BPE splits it."""
    parts = list(word)
    while len(parts) > 1:
        best = min(range(len(parts) - 1), key=lambda at: order.get((parts[at], parts[at + 1]), len(order)))
        if (parts[best], parts[best + 1]) not in order:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def _answer_key(first: Header, tokens: Sequence[bytes]) -> dict[str, Any] | None:
    cycle = first.fields.get("llamaduel.cycle")
    if not isinstance(cycle, list) or not cycle or not all(0 <= number < len(tokens) for number in cycle):
        return None
    return {
        "generator": first.number("llamaduel.generator"),
        "seed": first.number("llamaduel.seed", most=(1 << 64) - 1),
        "cycle": cycle,
        "words": [tokens[number].decode().removeprefix("Ġ") for number in cycle],
    }


# ── digests ─────────────────────────────────────────────────────────────────────────────────


def _digests(headers: Sequence[Header]) -> tuple[str, str]:
    """sha256 of the first file, and the weights digest over all parts, from one read.

    One thread reads, one hashes the file, one hashes the tensors; a few chunks are in memory at a time.
    """
    whole, table = hashlib.sha256(), _Table()
    try:
        with ThreadPoolExecutor(1) as files, ThreadPoolExecutor(1) as tensors:
            for part in headers:
                table.open(part)
                waiting: list[list[Future[None]]] = [[] for _ in range(4)]
                for slot, start, chunk in _chunks(part.path, waiting):
                    waiting[slot] = [tensors.submit(table.feed, start, chunk)]
                    if part is headers[0]:
                        waiting[slot].append(files.submit(whole.update, chunk))
                for future in chain(*waiting):
                    future.result()
    except OSError as error:
        raise ModelError(f"{headers[0].path} cannot be read ({error.strerror}); check its disk") from error
    return whole.hexdigest(), table.digest()


def _chunks(path: Path, waiting: Sequence[Sequence[Future[None]]]) -> Iterator[tuple[int, int, memoryview]]:
    """Slot, place in the file and bytes; a slot is used again when all that waits for it is done."""
    buffers = [memoryview(bytearray(CHUNK)) for _ in waiting]
    start = 0
    with path.open("rb", buffering=0) as file:
        while True:
            slot = start // CHUNK % len(buffers)
            for future in waiting[slot]:
                future.result()
            filled = 0
            while filled < CHUNK and (got := file.readinto(buffers[slot][filled:])):
                filled += got
            if not filled:
                return
            yield slot, start, buffers[slot][:filled]
            start += CHUNK


class _Table:
    """Hashes tensors as their bytes pass by."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.todo: list[header.Entry] = []  # the last one is next
        self.current = hashlib.sha256()

    def open(self, part: Header) -> None:
        self.todo = sorted(part.entries, key=lambda entry: entry.start, reverse=True)

    def feed(self, start: int, chunk: memoryview) -> None:
        end = start + len(chunk)
        while self.todo and (entry := self.todo[-1]).start < end:
            stop = entry.start + entry.bytes
            self.current.update(chunk[max(entry.start, start) - start : min(stop, end) - start])
            if stop > end:
                return
            shape = "x".join(map(str, entry.shape))
            self.rows.append(f"{entry.name}\t{entry.type}\t{shape}\t{self.current.hexdigest()}\n")
            self.current = hashlib.sha256()
            self.todo.pop()

    def digest(self) -> str:
        return hashlib.sha256("".join(sorted(self.rows)).encode()).hexdigest()


# ── cache ───────────────────────────────────────────────────────────────────────────────────


def _identity(parts: Sequence[Path]) -> list[list[int]]:
    """Device, inode, size and time of every part: a hard or symbolic link to a file is that file."""
    found = []
    for part in parts:
        with contextlib.suppress(OSError):
            stat = part.stat()
            found.append([stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns])
    return found


def _record_path(identity: Sequence[Sequence[int]]) -> Path:
    device, inode = identity[0][:2]
    return cache_dir() / "models" / f"{device:x}-{inode:x}.json"


def _recall(path: Path, parts: Sequence[Path], identity: Sequence[Sequence[int]]) -> dict[str, Any] | None:
    """What is known of these files; None if that is nothing, of another format, or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, IndexError):
        record: dict[str, Any] = json.loads(_record_path(identity).read_bytes())
        _model(path, parts, record)
        if record["format"] == FORMAT and record["identity"] == identity and path == parts[0]:
            return record
    return None


def _keep(identity: Sequence[Sequence[int]], record: Mapping[str, Any], began_ns: int) -> None:
    """Best effort: a full disk or a read-only home costs time, not the run."""
    if max(part[3] for part in identity) > began_ns - RACY_NS:
        return
    path = _record_path(identity)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        with os.fdopen(handle, "w") as file:
            json.dump(record, file)
        Path(name).replace(path)


def _model(path: Path, parts: Sequence[Path], record: Mapping[str, Any]) -> Model:
    facts = dict(record["facts"])
    memory, key = facts["memory"], facts["answer_key"]
    file = ModelFile(
        path=path,
        shards=tuple(parts),
        architecture=facts.pop("architecture"),
        size_bytes=sum(part[2] for part in record["identity"]),
        sha256=str(record["sha256"]),
        digest=str(record["digest"]),
    )
    facts |= {
        "expert_layers": tuple(facts["expert_layers"]),
        "memory": None if memory is None else tuple(Memory(*layer) for layer in memory),
        "tensors": tuple(Tensor(name, kind, tuple(shape), size) for name, kind, shape, size in facts["tensors"]),
        "openers": tuple(facts["openers"]),
        "answer_key": key and AnswerKey(key["generator"], key["seed"], tuple(key["cycle"]), tuple(key["words"])),
    }
    return Model(file=file, identity=tuple(tuple(part) for part in record["identity"]), **facts)
