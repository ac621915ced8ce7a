"""Writes a model whose greedy answer is known, in the shape of a real one: no download, no licence, in seconds.

Speed depends on shapes, types and routing, not on what the weights mean. So the experts are random quantised
blocks, every layer adds a little to the residual stream, and the head maps each word's embedding to the next
word of one long cycle. An engine that computes rightly writes that cycle; garbage, however fast, is caught.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import header, model
from harness.contract import Say
from harness.errors import ModelError, RunRefused, UsageError, nearest
from harness.model import AnswerKey as AnswerKey
from harness.shapes import EXPONENTS, FLOATS, SCALES, SPECIAL, Part, merges, padded, parts, tokens, whole, words
from harness.shapes import SHAPES as SHAPES
from harness.shapes import Shape as Shape
from harness.shapes import scaled as scaled
from harness.shapes import shape_of as shape_of
from harness.shapes import size_of as size_of
from harness.sizes import format_bytes, parse_size

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

VERSION = 1  # of the bytes: one version, shape and seed always make the same file
LAST_SEED = (1 << 64) - 1
TILE = 8 << 20
SPARE = 64 << 20  # left free on the disk
TEMPLATE = "{% for message in messages %}{{ message.content }}{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"

# What all layers together add to the stream, about, against the size 1 of a word. At 4 the answers begin to break.
_ADDED = 1.0
_QUIET = 0.05  # head rows of tokens that must never win, against the others


def synthesize(
    out: Path,
    *,
    like: str | None = None,
    from_header: Path | None = None,
    size: str | None = None,
    seed: int = 0,
    header_only: bool = False,
    say: Say | None = None,
) -> str:
    """Write a model of a named shape or of another model's, scaled to a size; one line about it. Raises DuelError."""
    if like is not None and from_header is not None:
        raise UsageError("--like and --from-header both name a shape; give one of them")
    if from_header is not None:
        shape = shape_of(from_header)
    elif (name := like or "tiny") in SHAPES:
        shape = SHAPES[name]
    else:
        raise UsageError(f"there is no shape {name!r}; {nearest(name, SHAPES)}")
    if size is not None:
        shape = scaled(shape, parse_size(size))
    written = write(out, shape, seed, say, header_only=header_only)
    kind = "a header without weights" if header_only else "a known answer"
    return f"{written}: {format_bytes(written.stat().st_size)}, {shape}, {kind}"


def write(out: Path, shape: Shape, seed: int = 0, say: Say | None = None, *, header_only: bool = False) -> Path:
    """Write a model of this shape; the same bytes for the same shape and seed.

    `header_only` leaves a hole where the weights would be: the right size, nothing on the disk, good for
    planning. A model of ours is overwritten, another file is not. Raises RunRefused if the disk is too small,
    UsageError for a place or a shape that cannot be written.
    """
    if not 0 <= seed <= LAST_SEED:
        raise UsageError(f"the seed {seed} is not a whole number from 0 to {LAST_SEED}; give one")
    shape = whole(shape)
    tensors = parts(shape)
    size = sum(padded(tensor.bytes) for tensor in tensors)
    draft = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        _check_place(out, shape)
        free = shutil.disk_usage(out.parent).free
        if not header_only and free < size + SPARE:
            raise RunRefused(
                f"{out} needs {format_bytes(size)} and its disk has {format_bytes(free)} free; "
                f"free some, name another disk, or take a smaller size"
            )
        if say is not None:
            say(f"writing {'only the header of ' if header_only else ''}{format_bytes(size)}: {shape}")
        cycle = _cycle(shape.vocab, seed)
        _write_header(draft, shape, tensors, seed, cycle, header_only)
        with draft.open("r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if header_only:
                file.truncate(end + size)
            else:
                for chunk in _weights(shape, tensors, seed, cycle):
                    _write_all(file, chunk)
        draft.replace(out)
    except OSError as error:
        raise RunRefused(f"{out} cannot be written ({error.strerror}); name another place") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return out


def _check_place(out: Path, shape: Shape) -> None:
    """Raises UsageError where a folder is missing, or a file that is not of ours would be lost."""
    if out.is_dir():
        raise UsageError(f"{out} is a folder; name the file to write, e.g. {out / (shape.name + '.gguf')}")
    if not out.parent.exists():
        raise UsageError(f"there is no folder {out.parent}; make it, or name another place")
    if out.exists() and not _is_ours(out):
        raise UsageError(f"{out} is there already and is no model that synth wrote; name another file, or remove it")


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(ModelError):
        return any(key.startswith("llamaduel.") for key in header.read(path).fields)
    return False


def _cycle(vocab: int, seed: int) -> list[int]:
    """The answer: all ordinary words that are one token after a space, in a random order."""
    import numpy as np

    numbers = {token: number for number, token in enumerate(tokens(vocab))}
    order = model.ranks(merges())
    spaced = [f"Ġ{word}" for word in words()]
    usable = [numbers[word] for word in spaced if word in numbers and model.pieces(word, order) == [word]]
    return [usable[at] for at in np.random.default_rng([VERSION, seed]).permutation(len(usable))]


# ── the bytes ───────────────────────────────────────────────────────────────────────────────


def _write_header(
    out: Path, shape: Shape, tensors: Sequence[Part], seed: int, cycle: Sequence[int], header_only: bool
) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    known = tokens(shape.vocab)
    unused = [f"<|unused{number}|>" for number in range(len(known), shape.vocab)]
    kept = set(known)
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
    writer.add_token_list([*known, *unused])
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(known) - len(SPECIAL)) + [5] * len(unused))
    writer.add_token_merges([text for merge in merges() if (text := merge.decode()).replace(" ", "") in kept])
    writer.add_bos_token_id(SPECIAL.index("<|im_start|>"))
    writer.add_eos_token_id(SPECIAL.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    writer.add_uint32("llamaduel.generator", VERSION)
    writer.add_uint64("llamaduel.seed", seed)
    writer.add_array("llamaduel.cycle", cycle)
    if header_only:
        writer.add_bool("llamaduel.header_only", True)
    for part in tensors:
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
        "block_count": shape.layers + shape.draft_blocks,
        "context_length": shape.context,
        "embedding_length": shape.embedding,
        "feed_forward_length": shape.ff
        or shape.expert_ff * (1 if shape.architecture == "olmoe" else shape.experts_used),
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.heads_kv,
        "attention.key_length": shape.latent + shape.rope_dims if shape.latent else shape.head_dim,
        "attention.value_length": shape.latent or shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": float(shape.rope_base),
    }
    if shape.experts:
        keys |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.experts_used,
            "expert_feed_forward_length": shape.expert_ff,
        }
    if shape.shared:
        keys["expert_shared_count"] = shape.shared
    if shape.leading_dense:
        keys["leading_dense_block_count"] = shape.leading_dense
    if shape.draft_blocks:
        keys["nextn_predict_layers"] = shape.draft_blocks
    if shape.window:
        keys["attention.sliding_window"] = shape.window
    if shape.latent:
        keys |= {
            "attention.key_length_mla": shape.head_dim,
            "attention.value_length_mla": shape.value_dim,
            "attention.kv_lora_rank": shape.latent,
            "attention.q_lora_rank": 0,  # queries are not compressed
        }
    if shape.rope_dims:
        keys["rope.dimension_count"] = shape.rope_dims
    if shape.architecture == "qwen35moe":
        turned = shape.rope_dims // 2
        first = -(-turned // 3)
        second = -(-(turned - first) // 2)
        keys |= {
            "expert_shared_feed_forward_length": shape.shared_ff,
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


def _weights(shape: Shape, tensors: Sequence[Part], seed: int, cycle: Sequence[int]) -> Iterator[memoryview]:
    """The bytes of all tensors in order, padded."""
    tables = _Tables(shape, seed, cycle)
    tiles: dict[tuple[str, float], Bytes] = {}
    for part in tensors:
        if part.role == "embedding":
            yield from tables.embedding(part)
        elif part.role == "head":
            yield from tables.head(part)
        else:
            deviation = _deviation(shape, part)
            if (part.type, deviation) not in tiles:
                tiles[part.type, deviation] = _tile(part.type, deviation, seed)
            yield from _slices(tiles[part.type, deviation], part.bytes, start=zlib.crc32(part.name.encode()))
        yield memoryview(bytes(padded(part.bytes) - part.bytes))


def _deviation(shape: Shape, part: Part) -> float:
    """Of the elements: what goes in with size 1 comes out with size 1, or a layer's share. Infinite: a constant."""
    if part.role == "zero":
        return 0.0
    if part.role in ("one", "minus one"):
        return math.inf if part.role == "one" else -math.inf
    spread = 1 / math.sqrt(part.shape[0])
    return spread * _ADDED / math.sqrt(2 * shape.layers) if part.role.startswith("out") else spread


def _tile(kind: str, deviation: float, seed: int) -> Bytes:
    """Rows of one block each of random weights."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rng = np.random.default_rng([VERSION, seed, zlib.crc32(kind.encode())])
    size = header.block_of(kind)[1]
    rows = TILE // size
    if math.isinf(deviation):
        return np.full((rows, 1), math.copysign(1.0, deviation), "<f4").view(np.uint8)
    if kind in FLOATS:
        values = rng.standard_normal((rows, 1), dtype=np.float32) * np.float32(deviation)
        if kind == "BF16":
            return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        return values.astype("<f4" if kind == "F32" else "<f2").view(np.uint8)
    tile = rng.integers(0, 256, (rows, size), dtype=np.uint8)
    if kind in EXPONENTS:
        # A block can only be twice as large as another, so some are: then the variance of all is the wanted one.
        tile[:, 0] = 127
        steps = math.log2(deviation / float(np.std(dequantize(tile[:1024], GGMLQuantizationType[kind]))))
        whole_steps = math.floor(steps)
        larger = rng.random(rows) < (4 ** (steps - whole_steps) - 1) / 3
        tile[:, 0] = 127 + whole_steps + larger
        return tile

    def scale(blocks: Bytes, unit: float) -> None:
        for at, factor in SCALES[kind]:
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


class _Tables:
    """The two tables that make the answer: embeddings of the words, and a head that looks for the word before."""

    def __init__(self, shape: Shape, seed: int, cycle: Sequence[int]) -> None:
        import numpy as np

        rng = np.random.default_rng([VERSION, seed, 1])
        self.cycle = np.array(cycle)
        self.width, self.seed = shape.embedding, seed
        count = len(tokens(shape.vocab))
        # Q8_0: a scale and 32 whole numbers a block; evenly spread, they have the size 73.3 times the scale.
        self.scale = 1 / math.sqrt((255**2 - 1) / 12)
        self.rows = np.zeros((count, self.width // 32, 34), np.uint8)
        self.rows[:, :, 2:] = rng.integers(-127, 128, (count, self.width // 32, 32), dtype=np.int8).view(np.uint8)
        self.rows[:, :, :2] = np.array([self.scale], "<f2").view(np.uint8)
        # Every other token looks like some word, so that any prompt leads into the cycle.
        others = np.setdiff1d(np.arange(count), self.cycle)
        self.rows[others] = self.rows[rng.choice(self.cycle, len(others))]

    def embedding(self, part: Part) -> Iterator[memoryview]:
        yield self.rows.data.cast("B")
        yield from _slices(_tile("Q8_0", 1.0, self.seed), part.bytes - self.rows.nbytes)

    def head(self, part: Part) -> Iterator[memoryview]:
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
