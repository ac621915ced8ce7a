"""The synthetic model: its answer is in its tables, its bytes in its seed, its size in its shape."""

from __future__ import annotations

import dataclasses
import errno
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import header, model, process, prompts, shapes, sizes, synth
from harness.errors import ModelError, RunRefused, UsageError
from harness.shapes import Shape

MIB = 1 << 20
TINY = synth.SHAPES["tiny"]
LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.write(tmp_path_factory.mktemp("synthetic") / "tiny.gguf", TINY)


def values(path: Path, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A tensor as numbers, rows first, by the format's own package."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    entry = next(entry for entry in header.read(path).entries if entry.name == name)
    raw = np.fromfile(path, np.uint8, entry.bytes, offset=entry.start)
    kind = GGMLQuantizationType[entry.type]
    found = (
        raw.view(np.float32)
        if entry.type == "F32"
        else dequantize(raw.reshape(-1, header.block_of(entry.type)[1]), kind)
    )
    return np.asarray(found, np.float32).reshape(entry.shape[::-1])


def table(shape: Shape) -> list[tuple[str, tuple[int, ...], str]]:
    return [(part.name, part.shape, part.type) for part in shapes.parts(shape)]


# ── the answer ──────────────────────────────────────────────────────────────────────────────


def test_the_head_finds_the_next_word_of_the_cycle_far_before_any_other(tiny: Path) -> None:
    key = model.load(tiny).answer_key
    assert key is not None
    cycle = np.array(key.cycle)
    scores = values(tiny, "token_embd.weight")[cycle] @ values(tiny, "output.weight").T
    assert (scores.argmax(axis=1) == np.roll(cycle, -1)).all()
    best, second = np.sort(scores, axis=1)[:, :-3:-1].T
    assert (best > 2.5 * second).all()


def test_every_other_token_leads_into_the_cycle(tiny: Path) -> None:
    key = model.load(tiny).answer_key
    assert key is not None
    scores = values(tiny, "token_embd.weight")[::5] @ values(tiny, "output.weight").T
    assert set(scores.argmax(axis=1).tolist()) <= set(key.cycle)


def test_the_cycle_is_of_different_plain_words_and_no_special_token(tiny: Path) -> None:
    key = model.load(tiny).answer_key
    assert key is not None
    assert len(key.words) > 1500
    assert len(set(key.words)) == len(key.words)
    assert all(word.isalpha() and word.isascii() and word.islower() for word in key.words)
    assert min(key.cycle) >= len(shapes.SPECIAL) + 256


def test_an_answer_goes_on_after_its_last_word_with_its_first(tiny: Path) -> None:
    key = model.load(tiny).answer_key
    assert key is not None
    assert key.continuation(key.word(-2), 3) == f" {key.words[-1]} {key.words[0]} {key.words[1]}"
    assert key.continuation(key.word(5), 0) == ""
    with pytest.raises(ModelError, match="no word of this model's answer; end the prompt in a word of it"):
        key.continuation("Xylophon", 3)


def test_the_answer_travels_with_seed_and_generator(tmp_path: Path) -> None:
    key = model.load(synth.write(tmp_path / "m.gguf", TINY, seed=9)).answer_key
    assert key is not None
    assert (key.seed, key.generator) == (9, synth.VERSION)


def test_the_tokenizer_writes_each_word_of_the_answer_as_one_token(tiny: Path) -> None:
    keys = header.read(tiny).fields
    key, order = model.load(tiny).answer_key, model.ranks(keys["tokenizer.ggml.merges"])
    assert key is not None
    assert [model.pieces(f"Ġ{word}", order) for word in key.words] == [[f"Ġ{word}"] for word in key.words]


def test_every_merge_makes_a_token_of_the_vocabulary(tmp_path: Path) -> None:
    path = synth.write(tmp_path / "m.gguf", dataclasses.replace(TINY, vocab=6000), header_only=True)
    keys = header.read(path).fields
    tokens = set(keys["tokenizer.ggml.tokens"])
    assert len(tokens) == 6000
    assert all(merge.replace(b" ", b"") in tokens for merge in keys["tokenizer.ggml.merges"])


def test_a_large_vocabulary_is_filled_up_with_unused_tokens(tmp_path: Path) -> None:
    path = synth.write(tmp_path / "m.gguf", dataclasses.replace(TINY, vocab=30000), header_only=True)
    types = header.read(path).fields["tokenizer.ggml.token_type"]
    assert (len(types), types[:3], set(types[20300:])) == (30000, [3, 3, 3], {5})
    assert model.load(path).vocab == 30000


# ── the bytes ───────────────────────────────────────────────────────────────────────────────


def test_one_seed_makes_one_file_and_another_seed_another(tiny: Path, tmp_path: Path) -> None:
    again, other = synth.write(tmp_path / "a.gguf", TINY), synth.write(tmp_path / "b.gguf", TINY, seed=1)
    assert again.read_bytes() == tiny.read_bytes() != other.read_bytes()
    first, second = model.load(again).answer_key, model.load(other).answer_key
    assert first is not None
    assert second is not None
    assert set(first.words) == set(second.words)
    assert first.words != second.words


@pytest.mark.parametrize("quant", [quant for quant in shapes.QUANTS if quant not in shapes.MIXTURES])
def test_weights_of_every_type_have_the_size_that_keeps_the_stream_steady(quant: str, tmp_path: Path) -> None:
    shape = dataclasses.replace(TINY, layers=1, experts=4, quant=quant)
    path = synth.write(tmp_path / "m.gguf", shape)
    found = values(path, "blk.0.ffn_up_exps.weight")
    assert np.std(found) == pytest.approx(1 / 16, rel=0.05)
    assert abs(np.mean(found)) < 0.15 / 16
    assert np.std(values(path, "blk.0.ffn_down_exps.weight")) == pytest.approx(1 / 16 / 2**0.5, rel=0.1)


def test_layers_differ_in_their_routers_and_experts(tiny: Path) -> None:
    for name in ("ffn_gate_inp", "ffn_up_exps"):
        first, second = (values(tiny, f"blk.{layer}.{name}.weight") for layer in (0, 1))
        assert not np.array_equal(first, second)


@pytest.mark.parametrize("name", synth.SHAPES)
def test_a_header_alone_has_the_tensors_and_the_size_but_takes_no_room(name: str, tmp_path: Path) -> None:
    shape = synth.SHAPES[name]
    path = synth.write(tmp_path / "m.gguf", shape, header_only=True)
    entries = header.read(path).entries  # refuses a file that is too short
    assert [(entry.name, entry.shape, entry.type) for entry in entries] == table(shape)
    assert path.stat().st_size == shapes.padded(max(entry.start + entry.bytes for entry in entries))
    assert path.stat().st_blocks * 512 < 12 * MIB
    assert path.stat().st_size == pytest.approx(synth.size_of(shape), rel=0.005)


def test_a_written_model_differs_from_its_header_only_in_weights(tiny: Path, tmp_path: Path) -> None:
    sparse = synth.write(tmp_path / "m.gguf", TINY, header_only=True)
    whole, hole = model.load(tiny), model.load(sparse)
    assert (whole.tensors, whole.memory, whole.answer_key) == (hole.tensors, hole.memory, hole.answer_key)
    assert (whole.header_only, hole.header_only) == (False, True)


def test_mixtures_give_half_the_layers_better_types() -> None:
    types = [part.type for part in shapes.parts(TINY) if part.name.endswith("ffn_down_exps.weight")]
    assert types.count("Q6_K") == types.count("Q4_K") == 6


# ── writing ─────────────────────────────────────────────────────────────────────────────────


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "cache")


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=30 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(RunRefused, match=r"needs 33.8 MiB and its disk has 30.0 MiB free; free some"):
        synth.write(tmp_path / "m.gguf", TINY)
    assert leftovers(tmp_path) == []
    assert synth.write(tmp_path / "m.gguf", TINY, header_only=True).exists()


def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = synth.write(tmp_path / "m.gguf", TINY, seed=1)
    before = out.read_bytes()

    def fill(*_: object) -> Iterator[memoryview]:
        yield memoryview(bytes(32))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(synth, "_weights", fill)
    with pytest.raises(RunRefused, match=r"No space left on device.*; name another place"):
        synth.write(out, TINY)
    assert leftovers(tmp_path) == ["m.gguf"]
    assert out.read_bytes() == before


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> Iterator[memoryview]:
        yield memoryview(bytes(32))
        raise KeyboardInterrupt

    monkeypatch.setattr(synth, "_weights", interrupt)
    with pytest.raises(KeyboardInterrupt):
        synth.write(tmp_path / "m.gguf", TINY)
    assert leftovers(tmp_path) == []


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunRefused, match=r"cannot be written .*; name another place"):
        synth.write(tmp_path / "file" / "m.gguf", TINY)
    with pytest.raises(UsageError, match="is a folder; name the file to write"):
        synth.write(tmp_path, TINY)
    with pytest.raises(UsageError, match=r"there is no folder .*gone; make it, or name another place"):
        synth.write(tmp_path / "gone" / "m.gguf", TINY)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("theirs", [b"", b"precious", b"GGUF\x03\0\0\0" + bytes(16)])
def test_only_a_model_of_ours_is_overwritten(theirs: bytes, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    out.write_bytes(theirs)
    with pytest.raises(UsageError, match="is there already and is no model that synth wrote; name another file"):
        synth.write(out, TINY, header_only=True)
    assert out.read_bytes() == theirs
    assert leftovers(tmp_path) == ["m.gguf"]
    out.unlink()
    for seed in (1, 2):
        synth.write(out, TINY, seed, header_only=True)
    key = model.load(out).answer_key
    assert key is not None
    assert key.seed == 2


# ── shapes ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name in synth.SHAPES
        for size in ("60MiB", "0.15GiB", "0.6GiB", "1GiB", *(() if "tiny" in name else ("4GiB", "16GiB")))
    ],
)
def test_a_scaled_shape_has_about_the_size_that_was_asked_for(name: str, size: str, tmp_path: Path) -> None:
    wanted = sizes.parse_size(size)
    shape = synth.scaled(synth.SHAPES[name], wanted)
    path = synth.write(tmp_path / "m.gguf", shape, header_only=True)
    assert path.stat().st_size == pytest.approx(wanted, rel=0.05)
    assert shape.architecture == synth.SHAPES[name].architecture


def test_scaling_keeps_the_share_of_experts_and_prefers_layers_to_widths() -> None:
    full = synth.SHAPES["qwen3-30b-a3b"]
    half = synth.scaled(full, 8 << 30)
    assert (half.experts, half.experts_used) == (full.experts, full.experts_used)
    assert half.layers > 40
    small = synth.scaled(full, 600 * MIB)
    assert small.experts_used / small.experts == full.experts_used / full.experts
    assert small.layers > 30


def test_scaling_to_the_own_size_changes_nothing_but_the_name() -> None:
    full = dataclasses.replace(synth.SHAPES["olmoe-7b-a1b"])
    same = synth.scaled(full, synth.size_of(full))
    assert dataclasses.replace(same, name=full.name) == full


def test_a_size_out_of_reach_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"cannot be made 1.00 MiB large; give a size nearer"):
        synth.scaled(synth.SHAPES["qwen3-30b-a3b"], MIB)


@pytest.mark.parametrize("name", synth.SHAPES)
def test_a_shape_read_from_a_header_makes_the_same_tensors(name: str, tmp_path: Path) -> None:
    path = synth.write(tmp_path / "Some Model.gguf", synth.SHAPES[name], header_only=True)
    shape = synth.shape_of(path)
    assert table(shape) == table(synth.SHAPES[name])
    assert shape.name == "like-some model"
    again = synth.write(tmp_path / "again.gguf", shape, header_only=True)
    theirs, ours = header.read(path).fields, header.read(again).fields
    assert {key for key in theirs if theirs[key] != ours[key]} == {"general.name"}


def test_an_architecture_that_cannot_be_written_becomes_one_of_the_same_experts(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "m.gguf", "mixtral9")
    keys = {"block_count": 2, "embedding_length": 256, "attention.head_count": 4, "attention.head_count_kv": 1}
    for key, value in {**keys, "expert_count": 8, "expert_used_count": 2, "context_length": 512}.items():
        writer.add_uint32(f"mixtral9.{key}", value)
    tensors = {"token_embd.weight": (256, 8192), "blk.0.attn_k.weight": (256, 64)}
    for name, extent in {**tensors, "blk.1.ffn_down_exps.weight": (512, 256, 8)}.items():
        writer.add_tensor(name, np.zeros(extent[::-1], np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = synth.shape_of(tmp_path / "m.gguf")
    assert (shape.architecture, shape.layers, shape.embedding, shape.vocab) == ("qwen3moe", 2, 256, 8192)
    assert (shape.experts, shape.experts_used, shape.expert_ff) == (8, 2, 512)
    assert (shape.heads, shape.heads_kv, shape.head_dim, shape.quant) == (4, 1, 64, "F16")
    assert {part.type for part in shapes.parts(shape) if "ffn_down_exps" in part.name} == {"F16"}


def test_rows_that_are_no_whole_blocks_take_a_type_of_smaller_blocks() -> None:
    shape = dataclasses.replace(TINY, expert_ff=288)
    types = {part.name: part.type for part in shapes.parts(shape)}
    assert types["blk.0.ffn_up_exps.weight"] == "Q4_K"
    assert types["blk.0.ffn_down_exps.weight"] == "Q8_0", "in place of Q6_K"
    assert types["blk.1.ffn_down_exps.weight"] == "Q5_0", "in place of Q4_K"


@pytest.mark.parametrize(
    ("change", "says"),
    [({"quant": "Q9"}, "'Q9' is no type .*; known: Q4_K_M"), ({"embedding": 100}, "cannot be filled; take tiny")],
)
def test_a_shape_that_cannot_be_written_is_a_usage_error(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        synth.write(tmp_path / "m.gguf", dataclasses.replace(TINY, **change))


# ── the one call of the command line ────────────────────────────────────────────────────────


def test_synthesize_says_what_it_wrote(tmp_path: Path) -> None:
    said: list[str] = []
    out = tmp_path / "m.gguf"
    line = synth.synthesize(out, like="qwen3-30b-a3b", size="60MiB", header_only=True, say=said.append)
    assert out.exists()
    assert line.startswith(f"{out}: ")
    assert "qwen3moe" in line
    assert "header without weights" in line
    assert [text.split()[0] for text in said] == ["writing"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"like": "qwen3-30b"}, "did you mean 'qwen3-30b-a3b'"),
        ({"like": "tiny", "from_header": Path("m.gguf")}, "give one of them"),
        ({"size": "10 parsecs"}, "is not a size"),
        ({"seed": -1}, "seed -1 is not a whole number from 0 to 18446744073709551615; give one"),
        ({"seed": 1 << 64}, "is not a whole number from 0 to 18446744073709551615; give one"),
    ],
)
def test_synthesize_refuses_what_it_cannot_take(asked: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        synth.synthesize(tmp_path / "m.gguf", **asked)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0.15GiB", 161061273), ("800MiB", 800 * MIB), ("12G", 12 << 30), ("20GB", 20 * 10**9), ("1048576", MIB)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert sizes.parse_size(text) == size
    assert sizes.parse_size(f" {text.lower()} ") == size


@pytest.mark.parametrize("text", ["", "12", "x", "-3G", "0GiB", "3 apples", "1e3G", "9" * 400 + "G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write"):
        sizes.parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (MIB, "1.00 MiB"), (123 * MIB, "123 MiB"), (17_534_203_986, "16.3 GiB")],
)
def test_sizes_are_shown_with_three_digits(size: int, text: str) -> None:
    assert sizes.format_bytes(size) == text


# ── a real engine ───────────────────────────────────────────────────────────────────────────


@pytest.mark.engine
@pytest.mark.parametrize("name", [name for name in synth.SHAPES if name != "qwen3-30b-a3b"])  # that one is like tiny
def test_an_engine_writes_the_known_answer_token_by_token(name: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="needs the embedded llama.cpp: pip install llamaduel[embedded]")
    shape = synth.scaled(synth.SHAPES[name], 60 * MIB)
    known = model.load(synth.write(tmp_path / "m.gguf", shape))
    prompt_set = prompts.load()
    prompt = prompt_set.for_request(known, 3, tokens=200)
    port = process.free_port()
    flags = f"--port {port} -c 1024 -np 1 -b 256 -ub 256 -t 1 --load-mode none --no-webui --offline --cache-ram 0"
    argv = [sys.executable, "-m", "backends.embedded_server", "-m", str(known.file.path), *flags.split()]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(argv, stderr=log, stdout=log) as server:
        try:
            answer = _complete(server, port, prompt.text, 320)
        finally:
            server.kill()
    assert answer["content"] == prompt_set.expected(known, prompt, 320)
    assert answer["timings"]["predicted_n"] == 320
    assert answer["timings"]["prompt_n"] == pytest.approx(200, rel=0.2)


def _complete(server: subprocess.Popen[bytes], port: int, prompt: str, tokens: int) -> Any:
    """Its answer, once it has loaded."""
    body = json.dumps({"prompt": prompt, "n_predict": tokens, "temperature": 0})
    deadline = time.monotonic() + LIMIT_S
    while True:
        assert server.poll() is None, "the engine ended by itself"
        assert time.monotonic() < deadline
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        try:
            connection.request("POST", "/completion", body)
            response = connection.getresponse()
            if response.status == 200:
                return json.load(response)
            response.read()
        except ConnectionError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
