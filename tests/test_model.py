"""Facts of model files: against the format's own package, against arithmetic, and for every kind of bad file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import arms, header, model, process, synth
from harness.errors import ModelError
from harness.model import Memory

MIB = 1 << 20
Tensors = Mapping[str, tuple[int, ...]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return process.cache_dir() / "models"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = synth.write(tmp_path_factory.mktemp("synthetic") / "tiny.gguf", synth.SHAPES["tiny"])
    return _older(path)


def _older(path: Path) -> Path:
    """As if it had been written a minute ago: a file that is being written is not remembered."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns - 60_000_000_000))
    return path


def gguf(
    path: Path,
    architecture: str = "llama",
    keys: Mapping[str, Any] | None = None,
    tensors: Tensors | None = None,
    plain: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """A small file of this format. `keys` get the architecture in front, `plain` do not; shapes are in ggml order."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    named = {f"{architecture}.{key}": value for key, value in (keys or {}).items()}
    for key, value in {**named, **(plain or {})}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    rng = np.random.default_rng(seed)
    for name, shape in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(rng.standard_normal(shape[::-1]), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _older(path)


SMALL = {"block_count": 2, "embedding_length": 32, "attention.head_count": 4, "context_length": 64}
SMALL_TENSORS: Tensors = {
    "token_embd.weight": (32, 10),
    "blk.0.attn_k.weight": (32, 32),
    "blk.1.attn_k.weight": (32, 32),
    "output.weight": (32, 10),
}

EXPERTS = {**SMALL, "expert_count": 8, "expert_used_count": 2}
EXPERT_TENSORS: Tensors = {**SMALL_TENSORS, "blk.1.ffn_up_exps.weight": (32, 16, 8)}


def attending(layers: int, *extra: str) -> Tensors:
    """Tensors by which every layer is seen to keep keys and values."""
    names = [f"blk.{layer}.{name}.weight" for layer in range(layers) for name in ("attn_k", *extra)]
    return {"token_embd.weight": (4, 8), **dict.fromkeys(names, (1,))}


def facts(path: Path, architecture: str, keys: Mapping[str, Any], tensors: Tensors) -> model.Model:
    return model.load(gguf(path / "m.gguf", architecture, keys, tensors), hashed=False)


# ── the header ──────────────────────────────────────────────────────────────────────────────


def test_a_header_reads_as_the_formats_own_package_reads_it(tiny: Path) -> None:
    from gguf import GGUFReader

    theirs, ours = GGUFReader(tiny), header.read(tiny)
    assert [entry.name for entry in ours.entries] == [tensor.name for tensor in theirs.tensors]
    for entry, tensor in zip(ours.entries, theirs.tensors, strict=True):
        assert (entry.type, entry.shape) == (tensor.tensor_type.name, tuple(tensor.shape.tolist()))
        assert (entry.start, entry.bytes) == (tensor.data_offset, tensor.n_bytes)
    names = [name for name in theirs.fields if not name.startswith("GGUF.")]
    assert list(ours.fields) == names
    for name in names:
        wanted, got = theirs.fields[name].contents(), ours.fields[name]
        assert (
            [item.decode() if isinstance(item, bytes) else item for item in got] == wanted
            if isinstance(got, list)
            else got == wanted
        )


@pytest.mark.parametrize("kind", sorted(arms.CHOICES["ctk"] | arms.CHOICES["ctv"]))
def test_the_types_of_a_cache_have_the_sizes_of_the_formats_own_package(kind: str) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    assert header.block_of(kind) == GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]


def test_a_type_that_is_newer_than_the_package_has_the_size_of_its_span(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", keys=SMALL, tensors=SMALL_TENSORS)
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.attn_k.weight") + len("blk.0.attn_k.weight") + 4 + 2 * 8
    assert data[at : at + 4] == bytes(4)  # F32
    data[at] = 99
    path.write_bytes(data)
    found = {entry.name: entry for entry in header.read(path).entries}["blk.0.attn_k.weight"]
    assert (found.type, found.bytes) == ("TYPE_99", 32 * 32 * 4)


def _become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


BAD: Mapping[str, Callable[[Path], object]] = {
    "not there": lambda path: path.unlink(),
    "a folder": _become_folder,
    "empty": lambda path: path.write_bytes(b""),
    "a Git-LFS pointer": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
    "a web page": lambda path: path.write_text("\n<!doctype html><title>404</title>"),
    "another format": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)),
    "only the magic": lambda path: path.write_bytes(b"GGUF"),
    "an old version": lambda path: path.write_bytes(b"GGUF\x01\0\0\0" + bytes(100)),
    "big-endian": lambda path: path.write_bytes(b"GGUF\0\0\0\x03" + bytes(100)),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:300]),
    "cut in the weights": lambda path: path.write_bytes(path.read_bytes()[:-4096]),
    "no architecture": lambda path: gguf(path, "", tensors=SMALL_TENSORS),
    "a vision projector": lambda path: gguf(path, "clip", tensors=SMALL_TENSORS),
    "an adapter": lambda path: gguf(path, keys=SMALL, tensors=SMALL_TENSORS, plain={"general.type": "adapter"}),
    "a vocabulary": lambda path: gguf(path, keys=SMALL),
    "no language model": lambda path: gguf(path, "t2i", tensors=SMALL_TENSORS),
    "absurdly deep": lambda path: gguf(path, keys={**SMALL, "block_count": 4_000_000_000}, tensors=SMALL_TENSORS),
    "an architecture that is a number": lambda path: gguf(
        path, keys=SMALL, tensors=SMALL_TENSORS, plain={"general.architecture": 5}
    ),
    "an architecture with a line end": lambda path: gguf(path, "a\nb", SMALL, SMALL_TENSORS),
    "a tensor without extents": lambda path: gguf(path, keys=SMALL, tensors={**SMALL_TENSORS, "x": ()}),
    "a tensor without rows": lambda path: gguf(path, keys=SMALL, tensors={**SMALL_TENSORS, "x": (32, 0)}),
    "a tensor without width": lambda path: gguf(path, keys=SMALL, tensors={**SMALL_TENSORS, "x": (0, 32)}),
    "tokens that are numbers": lambda path: gguf(
        path, keys=SMALL, tensors=SMALL_TENSORS, plain={"tokenizer.ggml.tokens": [1, 2]}
    ),
    "tokens that are one text": lambda path: gguf(
        path, keys=SMALL, tensors=SMALL_TENSORS, plain={"tokenizer.ggml.tokens": "abc"}
    ),
    "fewer kinds than tokens": lambda path: gguf(
        path,
        keys=SMALL,
        tensors=SMALL_TENSORS,
        plain={
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["a", "▁Cat"],
            "tokenizer.ggml.token_type": [1],
        },
    ),
    "experts and none used": lambda path: gguf(path, keys={**SMALL, "expert_count": 8}, tensors=SMALL_TENSORS),
    "more used than there are": lambda path: gguf(
        path, keys={**SMALL, "expert_count": 8, "expert_used_count": [2, 9]}, tensors=SMALL_TENSORS
    ),
    "used and not counted": lambda path: gguf(path, keys={**SMALL, "expert_used_count": 2}, tensors=SMALL_TENSORS),
    "experts that are not counted": lambda path: gguf(path, keys=SMALL, tensors=EXPERT_TENSORS),
    "a tensor of fewer than are used": lambda path: gguf(
        path, keys={**EXPERTS, "expert_count": 99, "expert_used_count": 9}, tensors=EXPERT_TENSORS
    ),
    "a block too many": lambda path: gguf(
        path, keys={**SMALL, "nextn_predict_layers": 1}, tensors={**SMALL_TENSORS, "blk.2.attn_k.weight": (32, 32)}
    ),
    "blocks for prediction only": lambda path: gguf(
        path, keys={**SMALL, "nextn_predict_layers": 2}, tensors=SMALL_TENSORS
    ),
    "no context": lambda path: gguf(path, keys={**SMALL, "context_length": 0}, tensors=SMALL_TENSORS),
    "no width": lambda path: gguf(path, keys={**SMALL, "embedding_length": 0}, tensors=SMALL_TENSORS),
}
WORDS = {
    "not there": "no file",
    "a folder": "is a folder",
    "empty": "is empty; download",
    "a Git-LFS pointer": "git lfs pull",
    "a web page": "a web page",
    "another format": r"begins with b'PK",
    "only the magic": "inside its header; download",
    "an old version": "version 1",
    "big-endian": "big-endian",
    "cut in the header": "inside its header; download",
    "cut in the weights": "cut short: .*4.00 KiB before.*; download",
    "no architecture": "architecture",
    "a vision projector": "part for another model",
    "an adapter": "part for another model",
    "a vocabulary": "no weights",
    "no language model": "no weights of a language model",
    "absurdly deep": "no weights of a language model",
    "an architecture that is a number": "does not name its architecture",
    "an architecture with a line end": "does not name its architecture",
    "a tensor without extents": "a tensor of no size; download",
    "a tensor without rows": "a tensor of no size; download",
    "a tensor without width": "a tensor of no size; download",
    "tokens that are numbers": "no list of texts as its tokenizer.ggml.tokens; download",
    "tokens that are one text": "no list of texts as its tokenizer.ggml.tokens; download",
    "fewer kinds than tokens": "contradict each other; download",
    "experts and none used": "contradict each other; download",
    "more used than there are": "contradict each other; download",
    "used and not counted": "contradict each other; download",
    "experts that are not counted": "contradict each other; download",
    "a tensor of fewer than are used": "contradict each other; download",
    "a block too many": "contradict each other; download",
    "blocks for prediction only": "gives 2 as its nextn_predict_layers, and no model has that; download",
    "no context": "gives 0 as its context_length, and no model has that; download",
    "no width": "gives 0 as its embedding_length, and no model has that; download",
}


@pytest.mark.parametrize("case", BAD)
def test_each_bad_file_gets_one_sentence_with_the_next_step(case: str, tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", keys=SMALL, tensors={**SMALL_TENSORS, "output.weight": (32, 100)})
    BAD[case](path)
    with pytest.raises(ModelError, match=WORDS[case]) as raised:
        model.load(path)
    assert re.fullmatch(r"[^\n]*(;|,) [^\n]*", str(raised.value))
    assert str(path) in str(raised.value)
    assert model.digest_of(path) is None


NUMBERS = (
    "context_length", "embedding_length", "expert_count", "expert_used_count", "expert_shared_count",
    "nextn_predict_layers", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.key_length_swa", "attention.value_length_swa", "attention.key_length_mla",
    "attention.value_length_mla", "attention.shared_kv_layers", "attention.sliding_window",
    "attention.sliding_window_pattern", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.group_count",
    "general.file_type", "split.count", "llamaduel.seed", "tokenizer.ggml.bos_token_id",
)  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["x", math.nan, math.inf, 2.5, -5, True, ["x", "y"], [-1, -1], [1.5, 1.5]], ids=str)
def test_a_key_that_is_no_count_is_refused_by_its_name(name: str, value: Any, tmp_path: Path) -> None:
    tensors: Tensors = {**EXPERT_TENSORS, "blk.1.ssm_in.weight": (1,)}
    base = {**EXPERTS, "attention.key_length_mla": 4, "attention.sliding_window": 8}
    ours = {"tokenizer.ggml.tokens": ["▁Cat"], "llamaduel.cycle": [0]}
    alone = name.startswith(("general.", "split.", "llamaduel.", "tokenizer."))
    path = gguf(tmp_path / "m.gguf", "gpt-oss", base, tensors, ours)
    model.load(path, hashed=False)

    keys, plain = (base, {**ours, name: value}) if alone else ({**base, name: value}, ours)
    gguf(path, "gpt-oss", keys, tensors, plain)

    what = f"(no whole number as its {name}|-[15] as its {name}, and no model has that); download it again"
    with pytest.raises(ModelError, match=f"{path} gives {what}"):
        model.load(path, hashed=False)


@pytest.mark.parametrize("value", [5, True, ["a", "b"], ""], ids=str)
def test_a_name_or_template_that_is_no_text_is_as_if_it_were_not_there(value: Any, tmp_path: Path) -> None:
    names = ("general.name", "general.type", "tokenizer.chat_template", "tokenizer.ggml.model", "tokenizer.ggml.pre")
    path = gguf(tmp_path / "m.gguf", keys=SMALL, tensors=SMALL_TENSORS, plain=dict.fromkeys(names, value))
    found = model.load(path, hashed=False)
    assert (found.name, found.chat_template, found.add_bos, found.openers) == ("m", None, False, ())
    assert model.load(path, hashed=False) == found, "from the cache"


def test_an_answer_of_no_words_is_none(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", keys=SMALL, tensors=SMALL_TENSORS, plain={"llamaduel.cycle": []})
    assert model.load(path, hashed=False).answer_key is None


def test_a_header_cut_anywhere_is_a_model_error(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", keys=SMALL, tensors=SMALL_TENSORS, plain={"tokenizer.ggml.tokens": ["a", "bc"]})
    whole = path.read_bytes()
    for length in range(1, min(entry.start for entry in header.read(path).entries)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            header.read(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = {"tokenizer.ggml.tokens": ["a", "bc"], "general.name": "x"}
    return gguf(tmp_path_factory.mktemp("small") / "m.gguf", keys=EXPERTS, tensors=EXPERT_TENSORS, plain=plain)


@given(st.lists(st.tuples(st.integers(4, 900), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_file_is_read_or_refused_and_nothing_else(small: Path, damage: Sequence[tuple[int, int]]) -> None:
    data = bytearray(small.read_bytes())
    for at, value in damage:
        data[at % len(data)] = value
    damaged = small.with_name("damaged.gguf")
    damaged.write_bytes(data)
    with contextlib.suppress(ModelError):
        found = model.load(damaged, hashed=False)
        assert 0 <= found.bytes_per_token <= 2 * found.weights_bytes
        assert all(size >= 0 for size in found.memory_bytes(4096) or ())
        json.dumps(found.context_train, allow_nan=False)


# ── split models ────────────────────────────────────────────────────────────────────────────


def split(folder: Path, parts: int = 2, name: str = "m") -> list[Path]:
    """SMALL_TENSORS over several files, as llama-gguf-split names and numbers them."""
    rows = list(SMALL_TENSORS.items())
    paths = []
    for number in range(parts):
        share = dict(rows[number::parts])
        plain = {"split.count": parts, "split.no": number, "split.tensors.count": len(rows)}
        path = folder / f"{name}-{number + 1:05d}-of-{parts:05d}.gguf"
        paths.append(gguf(path, keys=SMALL if number == 0 else None, tensors=share, plain=plain, seed=number))
    return paths


def test_a_split_model_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    paths = split(tmp_path)
    found = model.load(paths[0])
    assert found.file.shards == tuple(paths)
    assert found.file.size_bytes == sum(path.stat().st_size for path in paths)
    assert {tensor.name for tensor in found.tensors} == set(SMALL_TENSORS)
    assert found.file.sha256 == hashlib.sha256(paths[0].read_bytes()).hexdigest()


def test_splitting_does_not_change_the_weights_digest(tmp_path: Path) -> None:
    from gguf import GGUFReader, GGUFWriter

    paths = split(tmp_path)
    writer = GGUFWriter(tmp_path / "joined.gguf", "llama")
    for key, value in SMALL.items():
        writer.add_uint32(f"llama.{key}", value)
    for path in reversed(paths):
        for tensor in GGUFReader(path).tensors:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert model.digest_of(tmp_path / "joined.gguf") == model.load(paths[0]).file.digest is not None


def test_a_later_part_names_the_first_even_when_the_first_is_known(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    model.load(first)
    with pytest.raises(ModelError, match=f"part 2 of 2; give the first one, {first}"):
        model.load(second)


def test_a_missing_part_is_named_even_when_the_whole_was_known(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    model.load(first)
    second.unlink()
    with pytest.raises(ModelError, match=f"{second.name} is missing; download it"):
        model.load(first)


def test_a_part_with_another_name_asks_for_its_own_back(tmp_path: Path) -> None:
    first, _ = split(tmp_path)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="one of 2 parts; give it its name back, X-00001"):
        model.load(renamed)


def test_a_part_of_another_model_is_refused(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    shutil.copy(first, second)
    with pytest.raises(ModelError, match=r"no part of .*; download that part again"):
        model.load(first)


@pytest.mark.parametrize("name", ["split.no", "split.tensors.count"])
@pytest.mark.parametrize("value", ["x", math.nan, [1], -1], ids=str)
def test_a_part_with_a_number_that_is_none_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    first, _ = split(tmp_path)
    plain = {"split.count": 2, "split.no": 0, "split.tensors.count": 4, name: value}
    gguf(first, keys=SMALL, tensors=dict(list(SMALL_TENSORS.items())[::2]), plain=plain)
    with pytest.raises(ModelError, match=f" as its {name}.*; download it again"):
        model.load(first)


def test_parts_that_lost_tensors_are_refused(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    gguf(second, tensors={"one.weight": (4,)}, plain={"split.count": 2, "split.no": 1})
    with pytest.raises(ModelError, match="hold 3 tensors and should hold 4"):
        model.load(first)


# ── digests and the cache ───────────────────────────────────────────────────────────────────


def test_both_digests_come_from_the_bytes_of_the_file(tiny: Path) -> None:
    found, data = model.load(tiny), tiny.read_bytes()
    assert found.file.sha256 == hashlib.sha256(data).hexdigest()
    rows = []
    for entry in header.read(tiny).entries:
        digest = hashlib.sha256(data[entry.start : entry.start + entry.bytes]).hexdigest()
        rows.append(f"{entry.name}\t{entry.type}\t{'x'.join(map(str, entry.shape))}\t{digest}\n")
    assert found.file.digest == hashlib.sha256("".join(sorted(rows)).encode()).hexdigest()


def test_the_weights_digest_ignores_metadata_and_order_and_sees_every_byte(tmp_path: Path) -> None:
    rows = list(SMALL_TENSORS.items())
    base = gguf(tmp_path / "a.gguf", keys=SMALL, tensors=dict(rows[:1]))
    renamed = gguf(tmp_path / "b.gguf", keys=SMALL, tensors=dict(rows[:1]), plain={"general.name": "other"})
    other = gguf(tmp_path / "c.gguf", keys=SMALL, tensors=dict(rows[:1]))
    with other.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert model.digest_of(base) == model.digest_of(renamed) != model.digest_of(other)
    assert model.load(base).file.sha256 != model.load(renamed).file.sha256


def test_a_known_file_leaves_the_cache_alone(tiny: Path, cache: Path) -> None:
    model.load(tiny)
    (record,) = cache.iterdir()
    os.utime(record, ns=(0, 0))
    model.load(tiny)
    model.load(tiny, hashed=False)
    assert record.stat().st_mtime_ns == 0


def test_a_known_file_is_not_read_again(tiny: Path, tmp_path: Path) -> None:
    path = _older(Path(shutil.copy(tiny, tmp_path / "m.gguf")))
    before, stat = model.load(path), path.stat()
    path.write_bytes(bytes(stat.st_size))  # what cannot be parsed is not parsed
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert model.load(path) == before


def test_a_changed_file_is_read_again(tiny: Path, tmp_path: Path) -> None:
    path = _older(Path(shutil.copy(tiny, tmp_path / "m.gguf")))
    before = model.load(path).file
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01" if path.read_bytes()[-1:] != b"\x01" else b"\x02")
    after = model.load(path).file
    assert (after.size_bytes, after.digest) != (before.size_bytes, before.digest)


def test_a_link_to_a_known_file_is_known(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = model.load(tiny).file.digest
    monkeypatch.setattr(model, "_digests", lambda *_: pytest.fail("the weights were read again"))
    hard, soft = tmp_path / "sha256-1", tmp_path / "sha256-2"
    hard.hardlink_to(tiny)
    soft.symlink_to(tiny)
    assert model.digest_of(hard) == model.digest_of(soft) == wanted


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 0}', "null"])
def test_a_damaged_cache_is_ignored_and_mended(tiny: Path, cache: Path, text: str) -> None:
    before = model.load(tiny)
    (record,) = cache.iterdir()
    kept = record.read_text()
    record.write_text(text)
    assert model.load(tiny) == before
    assert json.loads(record.read_text()) == json.loads(kept)


def test_facts_of_another_format_are_not_taken(tiny: Path, cache: Path) -> None:
    model.load(tiny)
    (record,) = cache.iterdir()
    stale = json.loads(record.read_text())
    stale["facts"]["layers"] = 1
    record.write_text(json.dumps(stale | {"format": model.FORMAT + 1}))
    assert model.load(tiny).layers == 12


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tiny: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("in the way")
    assert model.load(tiny).layers == 12


def test_a_file_that_has_just_changed_is_not_remembered(tiny: Path, tmp_path: Path, cache: Path) -> None:
    path = Path(shutil.copy(tiny, tmp_path / "m.gguf"))
    os.utime(path, ns=(2**62, 2**62))
    assert model.load(path).layers == 12
    assert not cache.exists()


def test_a_model_is_unchanged_until_a_file_of_it_is_another(tiny: Path, tmp_path: Path) -> None:
    path = _older(Path(shutil.copy(tiny, tmp_path / "m.gguf")))
    first = model.load(path, hashed=False)
    assert model.unchanged(first)
    assert model.unchanged(model.load(path, hashed=False)), "known from before"
    for change in (_touch, _lengthen, _replace_by_copy, Path.unlink):
        before = model.load(path, hashed=False)
        assert model.unchanged(before)
        change(path)
        assert not model.unchanged(before), change.__name__
    assert not model.unchanged(first)


def _touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))


def _lengthen(path: Path) -> None:
    stat = path.stat()
    with path.open("ab") as file:
        file.write(bytes(32))
    os.utime(path, ns=(0, stat.st_mtime_ns))


def _replace_by_copy(path: Path) -> None:
    """The same name, bytes and times, and yet another file."""
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.replace(path)


def test_a_part_that_is_gone_is_a_change(tmp_path: Path) -> None:
    first, *others = split(tmp_path)
    found = model.load(first, hashed=False)
    assert model.unchanged(found)
    others[-1].unlink()
    assert not model.unchanged(found)


def test_a_name_that_is_not_utf_8_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.gguf"))
    shutil.copy(tiny, path)
    with pytest.raises(ModelError, match=r"caf\ufffd\.gguf has a name that is not UTF-8; rename it"):
        model.load(path)


def test_a_file_that_grows_while_it_is_read_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(tiny, tmp_path / "m.gguf"))

    def grow(_: object) -> tuple[str, str]:
        with path.open("ab") as file:
            file.write(b"more")
        return "", "x"

    monkeypatch.setattr(model, "_digests", grow)
    with pytest.raises(ModelError, match="changed while it was read; wait"):
        model.load(path)


def test_facts_alone_leave_the_weights_unread_until_digests_are_wanted(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(model, "_digests", lambda *_: pytest.fail("the weights were read"))
        assert model.load(tiny, hashed=False).file.digest == ""
    digest = model.load(tiny).file.digest
    assert digest
    assert model.load(tiny, hashed=False).file.digest == digest


def test_a_header_without_weights_has_no_digest(tmp_path: Path) -> None:
    path = synth.write(tmp_path / "m.gguf", synth.SHAPES["tiny"], header_only=True)
    found = model.load(path)
    assert found.header_only
    assert (found.file.sha256, found.file.digest, model.digest_of(path)) == ("", "", None)


# ── facts ───────────────────────────────────────────────────────────────────────────────────


def test_the_facts_of_a_mixture_of_experts(tmp_path: Path) -> None:
    found = model.load(synth.write(tmp_path / "m.gguf", synth.SHAPES["qwen3.5-35b-a3b"], header_only=True))
    assert (found.file.architecture, found.layers, found.blocks) == ("qwen35moe", 40, 40)
    assert (found.experts, found.experts_used, found.experts_shared) == (256, 8, 1)
    assert found.expert_layers == tuple(range(40))
    assert (found.leading_dense, found.vocab, found.embedding, found.tied) == (0, 248320, 2048, False)
    assert (found.context_train, found.file_type, found.add_bos) == (262144, "Q4_K_M", False)


def test_prediction_blocks_are_counted_but_neither_loaded_nor_read(tmp_path: Path) -> None:
    keys = {**SMALL, "block_count": 3, "nextn_predict_layers": 1}
    found = facts(tmp_path, "glm4moe", keys, {**SMALL_TENSORS, "blk.2.attn_k.weight": (32, 32)})
    assert (found.layers, found.blocks, len(found.memory or ())) == (2, 3, 2)
    assert found.weights_bytes == 4 * (2 * 320 + 2 * 1024)
    assert found.bytes_per_token == 4 * (32 + 320 + 2 * 1024)  # one row of the embedding, the head, two layers


def test_a_tied_head_is_read_whole_besides_its_row(tmp_path: Path) -> None:
    tensors = {name: shape for name, shape in SMALL_TENSORS.items() if name != "output.weight"}
    found = facts(tmp_path, "llama", SMALL, tensors)
    assert found.tied
    assert found.bytes_per_token == 4 * (32 + 320 + 2 * 1024)


def test_a_token_reads_its_share_of_the_experts(tmp_path: Path) -> None:
    tensors = {
        **SMALL_TENSORS,
        "blk.1.ffn_up_exps.weight": (32, 16, 8),
        "blk.1.ffn_up_exps.scale": (8,),
        "blk.1.ffn_up_shexp.weight": (32, 16),
        "blk.1.ffn_gate_inp.weight": (32, 8),
    }
    found = facts(tmp_path, "deepseek2", {**SMALL, "expert_count": 8, "expert_used_count": 2}, tensors)
    assert (found.expert_layers, found.leading_dense, found.experts_shared) == ((1,), 1, 1)
    dense = 4 * (32 + 320 + 2 * 1024 + 32 * 16 + 32 * 8)
    assert found.bytes_per_token == dense + 4 * (32 * 16 * 8 + 8) * 2 / 8
    assert [tensor.name for tensor in found.tensors if tensor.routed] == [
        "blk.1.ffn_up_exps.weight",
        "blk.1.ffn_up_exps.scale",
    ]


def test_experts_used_may_differ_by_layer_and_the_most_counts(tmp_path: Path) -> None:
    found = facts(tmp_path, "x", {**SMALL, "expert_count": 8, "expert_used_count": [2, 6]}, SMALL_TENSORS)
    assert found.experts_used == 6


@pytest.mark.parametrize(
    ("plain", "adds"),
    [
        ({"tokenizer.ggml.model": "llama"}, True),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}, False),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gemma4", "tokenizer.ggml.add_bos_token": False}, True),
        ({}, False),
    ],
)
def test_a_leading_token_is_expected_where_engines_add_one(plain: Any, adds: bool, tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf", keys=SMALL, tensors=SMALL_TENSORS, plain=plain)
    assert model.load(path, hashed=False).add_bos is adds


def test_openers_are_words_that_the_tokenizer_leaves_whole(tmp_path: Path) -> None:
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["C", "a", "t", "Ca", "Cat", "Dog", "cat", "Ġcat", "Act", "ct", "Cats"],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["C a", "Ca t", "c t"],
    }
    path = gguf(tmp_path / "m.gguf", keys=SMALL, tensors=SMALL_TENSORS, plain=vocabulary)
    assert model.load(path, hashed=False).openers == ("Cat",)


def test_openers_of_a_sentencepiece_vocabulary_begin_with_its_space(tmp_path: Path) -> None:
    vocabulary = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["▁Cat", "Dog", "▁cat", "▁A"]}
    path = gguf(tmp_path / "m.gguf", keys=SMALL, tensors=SMALL_TENSORS, plain=vocabulary)
    assert model.load(path, hashed=False).openers == ("Cat",)
    path = gguf(
        tmp_path / "n.gguf",
        keys=SMALL,
        tensors=SMALL_TENSORS,
        plain={**vocabulary, "tokenizer.ggml.add_space_prefix": False},
    )
    assert model.load(path, hashed=False).openers == ("Dog",)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("token_embd.weight", "embedding"),
        ("per_layer_token_embd.weight", "embedding"),
        ("output.weight", "head"),
        ("output_norm.weight", "other"),
        ("rope_freqs.weight", "other"),
        ("blk.1.attn_norm.weight", "other"),
        ("blk.1.attn_q_norm.weight", "other"),
        ("blk.1.ssm_norm.weight", "other"),
        ("blk.1.attn_q.bias", "attention"),
        ("blk.1.attn_kv_a_mqa.weight", "attention"),
        ("blk.1.attn_sinks.weight", "attention"),
        ("blk.1.ssm_a", "attention"),
        ("blk.1.time_mix_key.weight", "attention"),
        ("blk.1.shortconv.conv.weight", "attention"),
        ("blk.1.ffn_gate_inp.weight", "other"),
        ("blk.1.ffn_gate_inp_shexp.weight", "other"),
        ("blk.1.exp_probs_b.bias", "other"),
        ("blk.1.ffn_gate_up_exps.weight", "routed_experts"),
        ("blk.1.ffn_down_exps.bias", "routed_experts"),
        ("blk.1.ffn_down_shexp.weight", "shared_experts"),
        ("blk.1.ffn_down.weight", "dense_ffn"),
        ("blk.2.ffn_down_exps.weight", "mtp"),
        ("blk.2.nextn.enorm.weight", "mtp"),
    ],
)
def test_every_tensor_is_for_one_thing(name: str, kind: str, tmp_path: Path) -> None:
    keys = {**EXPERTS, "block_count": 3, "nextn_predict_layers": 1}
    found = facts(tmp_path, "glm4moe", keys, {**SMALL_TENSORS, name: (32,)})
    assert {each.name: found.class_of(each) for each in found.tensors}[name] == kind
    assert kind in model.CLASSES


# ── memory of the context ───────────────────────────────────────────────────────────────────

HEADS = {"embedding_length": 64, "attention.head_count": 8, "attention.key_length": 16, "attention.value_length": 16}


def test_keys_and_values_follow_the_heads_and_their_type(tmp_path: Path) -> None:
    found = facts(tmp_path, "llama", {**HEADS, "block_count": 2, "attention.head_count_kv": 4}, attending(2))
    assert found.memory == (Memory(64, 64),) * 2
    assert found.memory_bytes(1000) == (1024 * 2 * 64 * 2,) * 2
    assert found.memory_bytes(1024, "q8_0", "q4_0") == (1024 * (2 * 34 + 2 * 18),) * 2


def test_head_sizes_default_to_the_width_over_the_heads(tmp_path: Path) -> None:
    keys = {"block_count": 1, "embedding_length": 64, "attention.head_count": 4}
    assert facts(tmp_path, "llama", keys, attending(1)).memory == (Memory(64, 64),)


def test_layers_may_have_heads_of_their_own_or_none(tmp_path: Path) -> None:
    keys = {**HEADS, "block_count": 3, "attention.head_count_kv": [2, 0, 4]}
    found = facts(tmp_path, "deci", keys, attending(3))
    assert found.memory == (Memory(32, 32), Memory(), Memory(64, 64))
    assert found.memory_bytes(256, flash_attention=False) == (256 * 2 * (32 + 64), 0, 256 * 2 * 128)


def test_every_other_layer_of_gpt_oss_sees_a_window(tmp_path: Path) -> None:
    keys = {
        "block_count": 24,
        "embedding_length": 2880,
        "attention.head_count": 64,
        "attention.head_count_kv": 8,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.sliding_window": 128,
    }
    sizes = facts(tmp_path, "gpt-oss", keys, attending(24)).memory_bytes(8192)
    assert sizes is not None
    assert (sum(sizes[::2]), sum(sizes[1::2])) == (18 * MIB, 192 * MIB)  # as llama.cpp logs for this model


@pytest.mark.parametrize(
    ("architecture", "keys", "windowed"),
    [
        ("gemma3", {"attention.sliding_window": 512}, [0, 1, 2, 3, 4, 6]),
        ("gemma2", {}, [0, 2, 4, 6]),
        ("smallthinker", {"attention.sliding_window": 99}, [1, 2, 3, 5, 6]),
        ("smallthinker", {}, []),
        ("llama4", {}, [0, 1, 2, 4, 5, 6]),
        ("llama4", {"attention.sliding_window": 0}, []),
        ("exaone4", {}, []),
        ("cohere2", {"attention.sliding_window": 4096, "attention.sliding_window_pattern": 2}, [0, 2, 4, 6]),
        ("gemma4", {"attention.sliding_window": 512, "attention.sliding_window_pattern": [True, False] * 3 + [True]},
         [0, 2, 4, 6]),
        ("phi3", {"attention.sliding_window": 2047}, []),
    ],
)  # fmt: skip
def test_layers_see_a_window_where_their_family_does(
    architecture: str, keys: Any, windowed: list[int], tmp_path: Path
) -> None:
    found = facts(tmp_path, architecture, {**HEADS, "block_count": 7, **keys}, attending(7))
    assert [layer for layer, it in enumerate(found.memory or ()) if it.window is not None] == windowed


def test_windowed_layers_may_have_heads_of_another_size(tmp_path: Path) -> None:
    keys = {
        **HEADS,
        "block_count": 4,
        "attention.head_count_kv": 2,
        "attention.sliding_window": 300,
        "attention.sliding_window_pattern": [True, True, False, False],
        "attention.key_length_swa": 8,
        "attention.value_length_swa": 8,
        "attention.shared_kv_layers": 1,
    }
    found = facts(tmp_path, "gemma4", keys, attending(4))
    assert found.memory == (Memory(16, 16, 300), Memory(16, 16, 300), Memory(32, 32), Memory())
    assert found.memory_bytes(4096, ubatch=64) == (512 * 64, 512 * 64, 4096 * 128, 0)


def test_latent_attention_keeps_one_vector(tmp_path: Path) -> None:
    keys = {
        "block_count": 2,
        "embedding_length": 2048,
        "attention.head_count": 16,
        "attention.head_count_kv": 1,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
    }
    tensors: Tensors = {"token_embd.weight": (4, 8), **{f"blk.{at}.attn_kv_a_mqa.weight": (1,) for at in range(2)}}
    found = facts(tmp_path, "deepseek2", keys, tensors)
    assert found.memory == (Memory(576, 0),) * 2
    assert found.memory_bytes(256) == (256 * 576 * 2,) * 2


def test_three_of_four_layers_of_a_gated_delta_net_keep_a_state_instead(tmp_path: Path) -> None:
    found = model.load(synth.write(tmp_path / "m.gguf", synth.SHAPES["qwen3.5-35b-a3b"], header_only=True))
    state = Memory(state_bytes=4 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096))
    assert found.memory == ((state,) * 3 + (Memory(512, 512),)) * 10


@pytest.mark.parametrize(
    ("architecture", "keys", "tensor", "elements"),
    [
        ("mamba2", {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.group_count": 1},
         "ssm_in", 3 * (128 + 2 * 16) + 16 * 128),
        ("rwkv6", {"wkv.head_size": 8}, "time_mix_key", 2 * 64 + 64 * 8),
        ("lfm2", {"shortconv.l_cache": 3}, "shortconv.conv", 2 * 64),
        ("kimi-linear", {"kda.head_dim": 8, "ssm.conv_kernel": 4}, "ssm_f_a", 3 * 3 * 64 + 8 * 8 * 8),
    ],
)  # fmt: skip
def test_recurrent_layers_keep_a_state_of_their_kind(
    architecture: str, keys: Any, tensor: str, elements: int, tmp_path: Path
) -> None:
    tensors: Tensors = {"token_embd.weight": (64, 8), f"blk.0.{tensor}.weight": (1,)}
    found = facts(tmp_path, architecture, {**HEADS, "block_count": 1, **keys}, tensors)
    assert found.memory == (Memory(state_bytes=4 * elements),)
    assert found.memory_bytes(99_999) == (4 * elements,)


def test_a_layer_may_attend_and_recur(tmp_path: Path) -> None:
    keys = {**HEADS, "block_count": 1, "ssm.conv_kernel": 2, "ssm.inner_size": 8, "ssm.state_size": 4}
    found = facts(tmp_path, "falcon-h1", keys, attending(1, "ssm_in"))
    assert found.memory == (Memory(128, 128, None, 4 * (8 + 32)),)


def test_memory_of_sparse_attention_is_unknown(tmp_path: Path) -> None:
    found = facts(tmp_path, "glm-dsa", {**HEADS, "block_count": 1}, attending(1, "indexer.k_norm"))
    assert found.memory is None
    assert found.memory_bytes(4096) is None
    assert (found.memory_bytes_per_token(), found.states_bytes, found.attention) == (None, None, None)


def test_layers_are_counted_by_what_they_remember(tmp_path: Path) -> None:
    keys = {
        **HEADS,
        "block_count": 6,
        "attention.sliding_window": 300,
        "attention.sliding_window_pattern": [True, True, False, False, False, False],
        "attention.shared_kv_layers": 1,
        "ssm.conv_kernel": 2,
        "ssm.inner_size": 8,
        "ssm.state_size": 4,
    }
    attends = {name: shape for name, shape in attending(6).items() if not name.startswith("blk.3")}
    tensors: Tensors = {**attends, "blk.3.ssm_in.weight": (1,), "blk.4.ssm_in.weight": (1,)}
    found = facts(tmp_path, "x-gemma4", keys, tensors)
    assert found.attention == model.Attention(full=2, window=2, latent=0, recurrent=2, none=1, window_tokens=300)
    assert found.states_bytes == 2 * 4 * (8 + 32)
    assert found.memory_bytes_per_token() == 2 * 2 * 128 * 2, "keys and values of two full layers"
    longer, shorter = found.memory_bytes(4096), found.memory_bytes(2048)
    assert longer is not None
    assert shorter is not None
    assert sum(longer) - sum(shorter) == 2048 * (found.memory_bytes_per_token() or 0)
