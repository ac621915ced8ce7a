"""`inspect`: bytes against arithmetic by hand, in the numbers of each architecture and in no function of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness import header, inspection, listings, placement, synth
from harness import model as models
from harness.cli import main
from harness.contract import Arm, Engine, Placement, Settings
from harness.display import quiet
from harness.errors import Unavailable
from harness.registry import backend

CONTEXT = 4096
MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# Bytes of so many elements, by the block of each type.


def f32(elements: int) -> int:
    return elements * 4


def q4(elements: int) -> int:
    return elements * 144 // 256  # Q4_K


def q5(elements: int) -> int:
    return elements * 22 // 32  # Q5_0


def q6(elements: int) -> int:
    return elements * 210 // 256  # Q6_K


def q8(elements: int) -> int:
    return elements * 34 // 32  # Q8_0


def mxfp4(elements: int) -> int:
    return elements * 17 // 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """What a person works out on paper. `experts` and `first_n` are bytes of routed experts: all, and of N layers."""

    shape: str
    layers: int
    blocks: int
    expert_layers: int
    leading_dense: int
    attention: Mapping[str, int]
    embedding: int
    head: int
    experts: int
    used: int  # of `of` experts
    of: int
    others: int  # all other weights that are loaded
    n: int
    first_n: int
    per_token: int  # of context
    windows: int = 0
    states: int = 0
    mtp: int = 0
    vocab: int = 0
    classes: Mapping[str, int] = field(default_factory=dict)

    @property
    def weights(self) -> int:
        return self.embedding + self.head + self.experts + self.others

    @property
    def context(self) -> int:
        return CONTEXT * self.per_token + self.windows + self.states


def qwen3_30b() -> ByHand:
    """48 layers, half of them with Q6_K: 0–5, 42–47, and of 6–41 every third from 8 on."""
    width, words, better, usual = 2048, 151936, 24, 24
    attention = q4(width * 4096) + q4(width * 512) + q4(4096 * width)  # 32 heads of 128; keys have 4
    values = better * q6(width * 512) + usual * q4(width * 512)
    norms = f32(2 * width + 2 * 128)
    router = f32(width * 128)
    gate_up, down = 2 * q4(width * 768 * 128), width * 768 * 128
    return ByHand(
        shape="qwen3-30b-a3b", layers=48, blocks=48, expert_layers=48, leading_dense=0, attention={"full": 48},
        embedding=q8(width * words), head=q8(width * words), vocab=words,
        experts=48 * gate_up + better * q6(down) + usual * q4(down), used=8, of=128,
        others=48 * (attention + norms + router) + values + f32(width),
        n=12, first_n=12 * gate_up + 8 * q6(down) + 4 * q4(down),  # Q6_K in 0–5, 8 and 11
        per_token=48 * 2 * (4 * 128) * 2,
        classes={"router, norms": 48 * (norms + router) + f32(width), "attention": 48 * attention + values},
    )  # fmt: skip


def qwen35_35b() -> ByHand:
    """40 layers; every fourth attends, the others are gated delta nets. Q6_K in 0–4, 35–39, and 7, 10, … 34."""
    width, words, better, usual = 2048, 248320, 20, 20
    attending = q4(width * 2 * 4096) + q4(width * 512) + q4(4096 * width) + f32(2 * 256)  # 16 gated heads of 256
    values = 6 * q6(width * 512) + 4 * q4(width * 512)  # Q6_K in 3, 7, 19, 31, 35 and 39 of 3, 7, … 39
    keys, states = 16 * 128, 32 * 128
    inner = 2 * keys + states
    delta = q4(width * inner) + q4(width * states) + q4(states * width)
    delta += f32(4 * inner + 32 + 32 + 2 * width * 32 + 128)  # convolution, dt, a, alpha and beta, norm
    norms = f32(2 * width)
    routers = f32(width * 256 + width)
    shared = 40 * 2 * q4(width * 512) + better * q6(512 * width) + usual * q4(512 * width)
    gate_up, down = 2 * q4(width * 512 * 256), 512 * width * 256
    return ByHand(
        shape="qwen3.5-35b-a3b", layers=40, blocks=40, expert_layers=40, leading_dense=0,
        attention={"full": 10, "recurrent": 30}, embedding=q8(width * words), head=q8(width * words), vocab=words,
        experts=40 * gate_up + better * q6(down) + usual * q4(down), used=8, of=256,
        others=10 * attending + values + 30 * delta + 40 * (norms + routers) + shared + f32(width),
        n=10, first_n=10 * gate_up + 6 * q6(down) + 4 * q4(down),  # Q6_K in 0–4 and 7
        per_token=10 * 2 * (2 * 256) * 2,
        states=30 * 4 * (3 * inner + 128 * states),  # three columns of the convolution, and 128 × 128 a head
        classes={"shared_experts": shared},
    )  # fmt: skip


def glm_air() -> ByHand:
    """46 layers, the first dense, and one block for prediction. Q6_K in 0–4, 40–45, and 7, 10, … 37.

    1408 and 10944 are no whole blocks of 256, so Q4_K becomes Q5_0 there and Q6_K becomes Q8_0.
    """
    width, words = 4096, 151552
    attention = q4(width * 12288) + q4(width * 1024) + q4(12288 * width)  # 96 heads of 128; keys have 8
    biases, norms = f32(12288 + 2 * 1024), f32(2 * width)
    values = 22 * q6(width * 1024) + 24 * q4(width * 1024)
    dense = 2 * q4(width * 10944) + q8(10944 * width)
    routers = f32(width * 128 + 128)
    gate_up, down = 2 * q4(width * 1408 * 128), 1408 * width * 128
    shared = 45 * 2 * q4(width * 1408) + 21 * q8(1408 * width) + 24 * q5(1408 * width)
    draft = attention + q6(width * 1024) + biases + norms + routers + gate_up + q8(down)
    draft += 2 * q4(width * 1408) + q8(1408 * width) + q4(2 * width * width) + f32(3 * width)
    return ByHand(
        shape="glm-4.5-air", layers=46, blocks=47, expert_layers=45, leading_dense=1, attention={"full": 46},
        embedding=q8(width * words), head=q8(width * words), vocab=words,
        experts=45 * gate_up + 21 * q8(down) + 24 * q5(down), used=8, of=128,
        others=46 * (attention + biases + norms) + values + dense + 45 * routers + shared + f32(width),
        n=12, first_n=11 * gate_up + 6 * q8(down) + 5 * q5(down),  # layers 1–11; Q8_0 in 1–4, 7 and 10
        per_token=46 * 2 * (8 * 128) * 2,
        mtp=draft,
        classes={"dense_ffn": dense, "shared_experts": shared, "mtp": draft},
    )  # fmt: skip


def deepseek_lite() -> ByHand:
    """27 layers of latent attention, the first dense. Q6_K in 0–2, 23–26, and 5, 8, … 20; rows of 1408 as above."""
    width, words = 2048, 102400
    attention = q4(width * 16 * 192) + q4(width * (512 + 64)) + q4(512 * 128 * 16) + q4(16 * 128 * width)
    attention += q5(128 * 512 * 16)  # rows of 128
    norms = f32(2 * width + 512)
    dense = 2 * q4(width * 10944) + q8(10944 * width)
    gate_up, down = 2 * q4(width * 1408 * 64), 1408 * width * 64
    shared = 26 * 2 * q4(width * 2816) + 12 * q6(2816 * width) + 14 * q4(2816 * width)
    return ByHand(
        shape="deepseek-v2-lite", layers=27, blocks=27, expert_layers=26, leading_dense=1, attention={"latent": 27},
        embedding=q8(width * words), head=q8(width * words), vocab=words,
        experts=26 * gate_up + 12 * q8(down) + 14 * q5(down), used=6, of=64,
        others=27 * (attention + norms) + dense + 26 * f32(width * 64) + shared + f32(width),
        n=8, first_n=7 * gate_up + 3 * q8(down) + 4 * q5(down),  # layers 1–7; Q8_0 in 1, 2 and 5
        per_token=27 * (512 + 64) * 2,  # one vector, for keys and values
        classes={"attention": 27 * attention, "dense_ffn": dense},
    )  # fmt: skip


def gpt_oss() -> ByHand:
    """24 layers, every other one over 128 tokens; experts in MXFP4 with biases, all else in Q8_0."""
    width, words = 2880, 201088
    attention = q8(width * 4096) + 2 * q8(width * 512) + q8(4096 * width)  # 64 heads of 64; keys have 8
    small = f32(2 * width) + f32(4096 + 512 + 512 + width) + f32(64) + f32(width * 32 + 32)
    layer = 3 * mxfp4(width * width * 32) + f32(3 * width * 32)
    return ByHand(
        shape="gpt-oss-20b", layers=24, blocks=24, expert_layers=24, leading_dense=0,
        attention={"full": 12, "window": 12, "window_tokens": 128},
        embedding=q8(width * words), head=q8(width * words), vocab=words,
        experts=24 * layer, used=4, of=32, others=24 * (attention + small) + f32(width),
        n=9, first_n=9 * layer,
        per_token=12 * 2 * (8 * 64) * 2,
        windows=12 * 768 * 2 * (8 * 64) * 2,  # 128 tokens and a batch of 512, in whole 256
    )  # fmt: skip


HANDS = [qwen3_30b(), qwen35_35b(), glm_air(), deepseek_lite(), gpt_oss()]


def check(found: Mapping[str, Any], hand: ByHand) -> None:
    assert (found["layers"], found["blocks"], found["expert_layers"]) == (hand.layers, hand.blocks, hand.expert_layers)
    assert (found["leading_dense_layers"], found["mtp_blocks"]) == (hand.leading_dense, hand.blocks - hand.layers)
    assert (found["experts"], found["experts_used"], found["vocab"]) == (hand.of, hand.used, hand.vocab)
    assert {kind: number for kind, number in found["attention_layers"].items() if number} == hand.attention

    assert found["weights_bytes"] == hand.weights
    row = hand.embedding // hand.vocab
    assert found["bytes_per_token"] == row + hand.head + hand.others + hand.experts * hand.used // hand.of
    assert found["context_bytes_per_token"] == hand.per_token
    assert (found["window_bytes"], found["states_bytes"]) == (hand.windows, hand.states)
    assert (found["context"], found["context_bytes"]) == (CONTEXT, hand.context)

    classes = {each["class"]: each for each in found["tensor_classes"]}
    assert (classes["embedding"]["bytes"], classes["head"]["bytes"]) == (hand.embedding, hand.head)
    assert classes["routed_experts"]["bytes"] == hand.experts
    assert sum(each["bytes"] for each in classes.values()) == hand.weights + hand.mtp
    assert sum(each["bytes_per_token"] for each in classes.values()) == found["bytes_per_token"]
    for name in classes.keys() & hand.classes.keys():
        assert classes[name]["bytes"] == hand.classes[name], name

    places = {each["placement"]: each for each in found["placements"]}
    on_host = {"ngl=999": 0, f"ncmoe={hand.n}": hand.first_n, "cpu-moe": hand.experts}
    for name, moved in on_host.items():
        place = places[name]
        assert place["host_bytes"] == place["host_weights_bytes"] == hand.embedding + moved, name
        assert place["device_weights_bytes"] == hand.weights - hand.embedding - moved, name
        assert place["device_context_bytes"] == hand.context, name
        assert place["device_bytes"] == hand.weights - hand.embedding - moved + hand.context, name


@pytest.mark.parametrize("hand", HANDS, ids=lambda hand: hand.shape)
def test_bytes_are_those_worked_out_by_hand(hand: ByHand, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    synth.synthesize(path, like=hand.shape, header_only=True)

    assert main(["inspect", str(path), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    check(found, hand)
    assert found["shards"] == ["m.gguf"]
    assert found["weights_digest"] is None


def test_a_split_file_is_the_sum_of_its_parts_by_hand_too(tmp_path: Path) -> None:
    hand = qwen3_30b()
    paths = split(synth.write(tmp_path / "whole.gguf", synth.SHAPES[hand.shape], header_only=True), 3)

    found = inspection.inspect_model(str(paths[0]), quiet)

    check(found, hand)
    assert found["shards"] == [path.name for path in paths]
    assert found["file_bytes"] == sum(path.stat().st_size for path in paths) > hand.weights
    assert "in 3 files" in listings.inspect_table(found)


def split(whole: Path, parts: int) -> list[Path]:
    """The same tensors over several files, as llama-gguf-split names and numbers them; holes in place of weights."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    known = header.read(whole)
    paths = []
    for number in range(parts):
        path = whole.with_name(f"m-{number + 1:05d}-of-{parts:05d}.gguf")
        writer = GGUFWriter(path, known.fields["general.architecture"])
        writer.add_bool("llamaduel.header_only", True)
        for key, value in known.fields.items():
            if number == 0 and key.startswith("qwen3moe.") and isinstance(value, int):
                writer.add_uint32(key, value)
        writer.add_uint16("split.count", parts)
        writer.add_uint16("split.no", number)
        writer.add_int32("split.tensors.count", len(known.entries))
        share = known.entries[number::parts]
        for entry in share:
            kind = GGMLQuantizationType[entry.type]
            writer.add_tensor_info(entry.name, entry.shape[::-1], np.dtype(np.float32), entry.bytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        os.truncate(path, path.stat().st_size + sum(-(-entry.bytes // 32) * 32 for entry in share) + 32)
        paths.append(path)
    return paths


# ── in words ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (
            "qwen3.5-35b-a3b",
            "This model has 40 layers, all with experts: ncmoe=0 is all layers on the GPU, "
            "ncmoe=40 and everything above is --cpu-moe.",
        ),
        (
            "glm-4.5-air",
            "This model has 45 layers with experts after 1 without: ncmoe=0 and ncmoe=1 are all layers on the GPU, "
            "ncmoe=46 and everything above is --cpu-moe.",
        ),
        (
            "tiny-dense",
            "This model has no experts: ncmoe=N and cpu-moe change nothing. "
            "ngl=13 and everything above is all layers on the GPU.",
        ),
    ],
)
def test_the_numbers_that_are_one_placement_are_told_and_are_one(shape: str, says: str, tmp_path: Path) -> None:
    path = synth.write(tmp_path / "m.gguf", synth.SHAPES[shape], header_only=True)
    found = models.load(path, hashed=False)

    assert inspection.notes(found)[0] == says

    def at(kind: str, n: int | None = None) -> str:
        predicted = placement.predict(found, Placement(kind, n), Settings(), device=True)
        assert predicted is not None
        return predicted.placement_class

    whole = range(found.leading_dense + 1) if found.experts else range(99)
    assert {at("ncmoe", n) for n in whole} == {at("ngl", 999)}
    if found.expert_layers:
        last = found.expert_layers[-1]
        assert {at("ncmoe", n) for n in (last + 1, last + 2, 999)} == {at("cpu-moe")}
        assert at("ncmoe", last) != at("cpu-moe")
        assert at("ncmoe", found.leading_dense + 1) != at("ngl", 999)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("shape", synth.SHAPES)
def test_no_line_is_wider_than_the_terminal(shape: str, width: int, tmp_path: Path) -> None:
    path = synth.write(tmp_path / "m.gguf", synth.SHAPES[shape], header_only=True)

    drawn = listings.inspect_table(inspection.inspect_model(str(path), quiet), width)

    assert max(map(len, drawn.splitlines())) <= width
    assert "ngl=999" in drawn
    assert ("all layers on the GPU" in drawn.rpartition("placement ")[2]) is (width == 120)


def test_what_is_not_known_is_a_dash(tmp_path: Path) -> None:
    path = synth.write(tmp_path / "m.gguf", synth.SHAPES["tiny"], header_only=True)
    found = inspection.inspect_model(str(path), quiet)
    unknown = dict.fromkeys(("context_bytes", "context_bytes_per_token", "attention_layers", "context_train"))

    drawn = listings.inspect_table(found | unknown)

    for name in ("attention", "context memory", "trained context"):
        assert f"{name:22}  –" in drawn


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("expert_used_count", 0, "has keys that contradict each other"),
        ("expert_used_count", 17, "has keys that contradict each other"),
        ("expert_count", 0, "has keys that contradict each other"),
        ("block_count", 11, "has keys that contradict each other"),
        ("context_length", 0, "gives 0 as its context_length, and no model has that"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_and_not_described(
    key: str, value: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = synth.write(tmp_path / "m.gguf", synth.SHAPES["tiny"], header_only=True)  # 12 blocks, 4 of 16 experts
    name = f"qwen3moe.{key}".encode()
    with path.open("r+b") as file:
        file.seek(file.read(1 << 16).index(name) + len(name) + 4)  # the type of the value comes first
        file.write(value.to_bytes(4, "little"))

    assert main(["inspect", str(path), "--json"]) == 1

    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"llamaduel: {path} {says}; download it again\n"


# ── what it costs ───────────────────────────────────────────────────────────────────────────


def _inspected(path: Path) -> Mapping[str, Any]:
    """What a process of its own prints of a model, which files it opened, and which modules it has."""
    code = (
        "import json, sys\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)\n"
        "from harness.cli import main\n"
        f"main(['inspect', {str(path)!r}])\n"
        f"print(json.dumps({{'opened': opened.count({str(path)!r}), 'modules': sorted(sys.modules)}}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    table, _, told = done.stdout.rstrip().rpartition("\n")
    found: dict[str, Any] = json.loads(told)
    return found | {"table": table}


def test_a_file_is_opened_once_and_then_known_without_any_heavy_library(tmp_path: Path) -> None:
    path = synth.write(tmp_path / "m.gguf", synth.SHAPES["qwen3.5-35b-a3b"], header_only=True)
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns - 60_000_000_000))

    first, second = _inspected(path), _inspected(path)

    assert (first["opened"], second["opened"]) == (1, 0)
    assert first["table"] == second["table"]
    heavy = {"numpy", "scipy", "matplotlib", "gguf", "pydantic", "jinja2", "ollama", "requests", "rich", "tabulate"}
    assert not heavy & set(second["modules"])
    assert not {"harness.probe", "harness.telemetry", "harness.machine"} & set(second["modules"])


# ── on a real engine ────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def engine() -> Engine:
    """A llama.cpp with RPC, whose stand-in device takes every placement without a GPU."""
    given = {"llama-server": path} if (path := os.environ.get("LLAMADUEL_LLAMA_SERVER")) else {}
    try:
        return backend("llama-cpp").find({"stand-in": "1", **given})
    except Unavailable as error:
        pytest.skip(f"needs a llama.cpp with RPC: {error}")


@pytest.mark.engine
@pytest.mark.parametrize("where", [Placement("ngl", 999), Placement("ncmoe", 3), Placement("cpu-moe")], ids=str)
@pytest.mark.parametrize("shape", [hand.shape for hand in HANDS])
def test_an_engine_puts_each_kind_of_model_where_it_was_predicted(
    engine: Engine, shape: str, where: Placement, tmp_path: Path
) -> None:
    found = models.load(synth.write(tmp_path / "m.gguf", synth.scaled(synth.SHAPES[shape], 60 * MIB)))
    settings = Settings(
        context=1000, ubatch=64, threads=1, flash_attention="off", load_mode="none", stand_in_bytes=4 << 30
    )
    predicted = placement.predict(found, where, settings, device=True)
    assert predicted is not None

    arm = Arm("llama-cpp", where)
    with backend(arm.backend).open(engine, found.file, arm, settings, tmp_path / "engine.log") as session:
        buffers = session.realised().buffers

    host, device = placement.realised_bytes(buffers) or (0, 0)
    assert device == pytest.approx(predicted.device_bytes, rel=0.002)
    assert host == pytest.approx(predicted.host_bytes, rel=0.002)
