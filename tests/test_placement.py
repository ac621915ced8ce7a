"""Where the weights go: bytes worked out by hand, equal placements found, wrong ones caught."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from gguf import ExpertGatingFuncType, GGUFWriter
from pydantic import TypeAdapter

from harness import header, placement, synth
from harness import model as models
from harness.arms import parse_arms
from harness.contract import Arm, Buffer, Engine, ModelFile, Placement, Realised, Settings
from harness.errors import Unavailable
from harness.model import Memory, Model, Tensor
from harness.placement import (
    Cell,
    Fit,
    Predicted,
    aliases,
    cross_check,
    describe,
    equal_in_words,
    fits,
    is_noop,
    judge,
    predict,
    refusal,
    sits,
)
from harness.registry import backend

MIB = 1 << 20
SETTINGS = Settings(context=1024)
AUTO, CPU, CPU_MOE = Placement(), Placement("cpu"), Placement("cpu-moe")


def ngl(number: int) -> Placement:
    return Placement("ngl", number)


def ncmoe(number: int) -> Placement:
    return Placement("ncmoe", number)


# ── models by hand: sizes are round numbers, so that sums can be read ───────────────────────

EMBEDDING, ROWS = 8_000, 100  # bytes of the embedding, and its vocabulary
ATTENTION, DENSE, EXPERTS, ROUTER, SHARED, NORM, HEAD = 1_000, 3_000, 64_000, 70, 500, 11, 9_000


def make(
    layers: int = 4,
    *,
    dense_first: int = 0,
    shared: bool = False,
    tied: bool = False,
    draft: int = 0,
    memory: Iterable[Memory] | None = None,
) -> Model:
    """16 experts of which 2 are used, in every layer but the first `dense_first`; `draft` blocks on top."""
    tensors = [
        Tensor("token_embd.weight", "Q8_0", (80, ROWS), EMBEDDING),
        Tensor("output_norm.weight", "F32", (4,), NORM),
    ]
    if not tied:
        tensors.append(Tensor("output.weight", "Q8_0", (80, ROWS), HEAD))
    for block in range(layers + draft):
        at = f"blk.{block}."
        tensors.append(Tensor(f"{at}attn_q.weight", "Q4_K", (10, 10), ATTENTION))
        if block < dense_first:
            tensors.append(Tensor(f"{at}ffn_up.weight", "Q4_K", (10, 10), DENSE))
            continue
        tensors += [
            Tensor(f"{at}ffn_gate_inp.weight", "F32", (10, 16), ROUTER),
            Tensor(f"{at}ffn_up_exps.weight", "Q4_K", (10, 10, 16), EXPERTS // 4),
            Tensor(f"{at}ffn_gate_exps.weight", "Q4_K", (10, 10, 16), EXPERTS // 4),
            Tensor(f"{at}ffn_down_exps.weight", "Q4_K", (10, 10, 16), EXPERTS // 2),
        ]
        if shared:
            tensors.append(Tensor(f"{at}ffn_up_shexp.weight", "Q4_K", (10, 10), SHARED))
        if block >= layers:
            tensors.append(Tensor(f"{at}nextn.eh_proj.weight", "Q4_K", (10, 10), 777_777))
    return Model(
        file=ModelFile(Path("m.gguf"), (Path("m.gguf"),), "test", 0, "", ""),
        name="test",
        file_type=None,
        layers=layers,
        blocks=layers + draft,
        expert_layers=tuple(range(dense_first, layers)),
        experts=16,
        experts_used=2,
        experts_shared=int(shared),
        context_train=None,
        vocab=ROWS,
        embedding=80,
        memory=tuple(memory) if memory is not None else (Memory(),) * layers,
        tensors=tuple(tensors),
        chat_template=None,
        add_bos=False,
        bos="",
        eos="",
        openers=(),
        answer_key=None,
        header_only=True,
    )


def sure(
    model: Model, where: Placement, settings: Settings = SETTINGS, device: bool = True, depth: int = 0
) -> Predicted:
    found = predict(model, where, settings, device, depth=depth)
    assert found is not None
    return found


LAYER = ATTENTION + ROUTER + EXPERTS


# ── bytes ───────────────────────────────────────────────────────────────────────────────────


def test_all_layers_on_the_device_leave_only_the_embedding_on_the_host() -> None:
    found = sure(make(), ngl(99))

    assert found.host_bytes == EMBEDDING
    assert found.device_bytes == 4 * LAYER + NORM + HEAD


def test_ngl_counts_from_the_end_and_the_head_goes_first() -> None:
    model = make()

    assert sure(model, ngl(0)).device_bytes == 0
    assert sure(model, ngl(1)).device_bytes == NORM + HEAD
    assert sure(model, ngl(2)).device_bytes == NORM + HEAD + LAYER
    assert sure(model, ngl(5)) == sure(model, ngl(99))


def test_experts_of_the_first_n_blocks_go_back_to_the_host() -> None:
    found = sure(make(), ncmoe(3))

    assert found.host_bytes == EMBEDDING + 3 * EXPERTS
    assert found.device_bytes == 4 * LAYER - 3 * EXPERTS + NORM + HEAD


def test_cpu_moe_moves_all_routed_experts_and_neither_router_nor_shared_expert() -> None:
    found = sure(make(shared=True), CPU_MOE)

    assert found.host_bytes == EMBEDDING + 4 * EXPERTS
    assert found.device_bytes == 4 * (ATTENTION + ROUTER + SHARED) + NORM + HEAD


def test_leading_dense_layers_count_as_blocks_but_have_no_expert_to_move() -> None:
    model = make(dense_first=2)

    assert sure(model, ncmoe(2)) == sure(model, ngl(99))
    assert sure(model, ncmoe(3)).host_bytes == EMBEDDING + EXPERTS
    assert sure(model, CPU_MOE).device_bytes == 4 * ATTENTION + 2 * (DENSE + ROUTER) + NORM + HEAD


def test_a_tied_embedding_lives_on_both_sides_once_the_head_is_on_the_device() -> None:
    model = make(tied=True)

    assert sure(model, ngl(1)).device_bytes == NORM + EMBEDDING
    assert sure(model, ngl(1)).host_bytes == EMBEDDING + 4 * LAYER
    assert sure(model, ngl(0)).host_bytes == EMBEDDING + 4 * LAYER + NORM


def test_blocks_for_multi_token_prediction_are_not_loaded_but_take_their_place_in_ngl() -> None:
    model = make(draft=1)

    assert sure(model, ngl(99)).device_bytes == 4 * LAYER + NORM + HEAD
    assert sure(model, ngl(2)).device_bytes == NORM + HEAD  # the head, and an empty block
    assert sure(model, ngl(3)).device_bytes == NORM + HEAD + LAYER
    assert sure(model, ncmoe(4)).placement_class == sure(model, ncmoe(5)).placement_class


def test_keys_and_values_follow_their_layer_and_not_its_experts() -> None:
    model = make(memory=[Memory(keys=128, values=64)] * 4)
    layer_kv = (128 + 64) * 2 * 1024

    assert sure(model, CPU_MOE).device_bytes == 4 * (ATTENTION + ROUTER) + NORM + HEAD + 4 * layer_kv
    assert sure(model, ngl(3)).host_bytes == EMBEDDING + 2 * LAYER + 2 * layer_kv
    assert sure(model, CPU).host_bytes == EMBEDDING + 4 * LAYER + NORM + HEAD + 4 * layer_kv


def test_quantized_keys_take_their_blocks() -> None:
    model = make(memory=[Memory(keys=128, values=64)] * 4)
    settings = dataclasses.replace(SETTINGS, kv_k="q8_0", kv_v="q4_0")

    whole, bare = sure(model, ngl(99), settings), sure(make(), ngl(99), settings)

    assert whole.device_bytes is not None
    assert bare.device_bytes is not None
    assert whole.device_bytes - bare.device_bytes == 4 * (128 // 32 * 34 + 64 // 32 * 18) * 1024


def test_a_window_bounds_what_its_layer_keeps() -> None:
    """Window and one batch, padded to 256 cells: 300 + 128 → 512 of 1024."""
    model = make(memory=[Memory(keys=64, values=64, window=300), Memory(keys=64, values=64)] * 2)
    settings = dataclasses.replace(SETTINGS, ubatch=128)

    found = sure(model, ngl(99), settings)

    assert found.device_bytes == 4 * LAYER + NORM + HEAD + 2 * (512 + 1024) * 128 * 2


def test_latent_attention_keeps_one_vector_and_no_values() -> None:
    model = make(dense_first=1, memory=[Memory(keys=576)] * 4)

    found = sure(model, CPU_MOE)

    assert found.device_bytes == 4 * ATTENTION + DENSE + 3 * ROUTER + NORM + HEAD + 4 * 576 * 2 * 1024


def test_recurrent_states_are_as_large_for_every_context() -> None:
    model = make(memory=[Memory(state_bytes=5_000)] * 3 + [Memory(keys=64, values=64)])

    found = sure(model, ngl(99), dataclasses.replace(SETTINGS, context=2048))

    assert found.device_bytes == 4 * LAYER + NORM + HEAD + 3 * 5_000 + 128 * 2 * 2048


def test_a_context_left_to_the_engine_makes_totals_unknown_but_not_the_weights() -> None:
    found = sure(make(), ngl(99), dataclasses.replace(SETTINGS, context=None))

    assert (found.host_bytes, found.device_bytes) == (None, None)
    assert found.device_weights_bytes == 4 * LAYER + NORM + HEAD


def test_without_a_device_everything_is_on_the_host_whatever_the_flags_say() -> None:
    model = make()

    found = [sure(model, where, device=False) for where in (AUTO, ngl(99), CPU_MOE, ncmoe(2), CPU)]

    assert len({each.placement_class for each in found}) == 1
    assert {each.host_bytes for each in found} == {EMBEDDING + 4 * LAYER + NORM + HEAD}
    assert {each.device_bytes for each in found} == {0}


def test_the_engines_own_choice_is_not_predicted() -> None:
    assert predict(make(), AUTO, SETTINGS, True) is None


def test_a_placement_of_an_engine_unknown_to_us_is_not_predicted() -> None:
    assert predict(make(), Placement("tensor-parallel", 2), SETTINGS, False) is None


def test_a_model_in_several_files_is_one_table_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by the format's own library, two tensors a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    writer = GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_head_count(2)
    for name, rows in (
        ("token_embd", 10),
        ("output", 10),
        ("blk.0.attn_q", 3),
        ("blk.0.attn_k", 3),
        ("blk.0.ffn_up", 7),
    ):
        writer.add_tensor(f"{name}.weight", np.zeros((rows, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, *others = sorted(tmp_path.glob("m-*.gguf"))
    assert len(others) == 2

    found = sure(models.load(first), ngl(99))

    row = 64 * 4
    assert found.host_weights_bytes == 10 * row
    assert found.device_weights_bytes == (10 + 3 + 3 + 7) * row
    assert found.device_bytes == found.device_weights_bytes + 2 * 64 * 2 * 1024  # two heads of 32, f16


# ── bytes read for one token ────────────────────────────────────────────────────────────────

ACTIVE = EXPERTS * 2 // 16


def test_a_token_reads_two_of_sixteen_experts_and_one_row_of_the_embedding() -> None:
    found = sure(make(shared=True), CPU_MOE)

    assert found.bytes_per_token_host == 4 * ACTIVE + EMBEDDING // ROWS
    assert found.bytes_per_token_device == 4 * (ATTENTION + ROUTER + SHARED) + NORM + HEAD


def test_a_dense_layer_is_read_whole() -> None:
    found = sure(make(dense_first=1), ngl(99))

    assert found.bytes_per_token_device == 4 * ATTENTION + DENSE + 3 * (ROUTER + ACTIVE) + NORM + HEAD


def test_a_tied_embedding_is_read_as_a_row_here_and_as_the_head_there() -> None:
    model = make(tied=True)

    assert sure(model, ngl(1)).bytes_per_token_device == NORM + EMBEDDING
    assert sure(model, CPU).bytes_per_token_host == (
        4 * (ATTENTION + ROUTER + ACTIVE) + NORM + EMBEDDING + EMBEDDING // ROWS
    )


def test_depth_adds_the_keys_and_values_in_use_and_a_window_bounds_them() -> None:
    model = make(memory=[Memory(keys=64, values=32, window=100), Memory(keys=64, values=32)] * 2)

    empty, deep = (sure(model, CPU_MOE, depth=depth).bytes_per_token_device for depth in (0, 700))

    assert deep - empty == 2 * (100 + 700) * 96 * 2


def test_a_recurrent_state_is_read_and_written() -> None:
    model = make(memory=[Memory(state_bytes=5_000)] * 4)

    assert sure(model, ngl(99)).bytes_per_token_device == sure(make(), ngl(99)).bytes_per_token_device + 4 * 2 * 5_000


def test_crossings_between_host_and_device_are_counted_along_the_token() -> None:
    model = make()

    assert sure(model, CPU).crossings == 0
    assert sure(model, ngl(99)).crossings == 2  # in after the embedding, out with the result
    assert sure(model, CPU_MOE).crossings == 2 * 4 + 2
    assert sure(model, ncmoe(1)).crossings == 2 + 2


# ── context memory and compute buffers ──────────────────────────────────────────────────────


def test_weights_and_context_memory_can_be_told_apart() -> None:
    found = sure(make(memory=[Memory(keys=128, values=64)] * 4), ngl(3))
    layer_kv = (128 + 64) * 2 * 1024

    assert (found.host_memory_bytes, found.device_memory_bytes) == (2 * layer_kv, 2 * layer_kv)
    assert found.device_bytes == found.device_weights_bytes + 2 * layer_kv


def test_a_context_left_to_the_engine_leaves_memory_and_compute_unknown() -> None:
    found = sure(make(), ngl(99), dataclasses.replace(SETTINGS, context=None))

    assert (found.host_memory_bytes, found.device_memory_bytes, found.compute_bytes) == (None, None, None)


def test_without_a_device_nothing_is_computed_on_one() -> None:
    assert sure(make(), ngl(99), device=False).compute_bytes == 0
    assert sure(make(), CPU).compute_bytes == 0


def test_a_run_written_before_compute_buffers_were_predicted_still_reads() -> None:
    old = dataclasses.asdict(TEN)
    del old["compute_bytes"]

    assert TypeAdapter(Predicted).validate_python(old) == TEN


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The shape of reports/2026-11-30-find-on-12-gib: 45 layers of Qwen3-30B-A3B. No weights."""
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        shape = dataclasses.replace(synth.SHAPES["qwen3-30b-a3b"], layers=45)
        return models.load(synth.write(folder / "m.gguf", shape, header_only=True))


@pytest.mark.parametrize("number", [14, 15, 16, 17, 19, 45])
def test_the_compute_buffer_of_a_real_card_is_about_what_it_was(published: Model, number: int) -> None:
    """As the engine told it in that run, for every N: one layer's largest expert weights are copied into it."""
    seen = 232_270_070

    assert sure(published, ncmoe(number), Settings(threads=15)).compute_bytes == pytest.approx(seen, rel=0.02)


# Compute buffers in MiB that llama.cpp b11434 reserved on a device behind RPC for these widths; 16 or 4 experts.
WIDE = {"layers": 2, "embedding": 2048, "heads": 32, "heads_kv": 8, "head_dim": 128, "ff": 6144}
SEEN = [
    ("tiny", {"layers": 3}, 4096, 512, "on", ngl(99), 12.01),
    ("tiny", {"layers": 3}, 4096, 512, "on", CPU_MOE, 8.01),
    ("tiny", {"layers": 3}, 4096, 2048, "off", ngl(99), 172.04),
    ("tiny-dense", WIDE, 4096, 512, "on", ngl(99), 56.01),
    ("tiny-dense", WIDE, 32768, 512, "off", ngl(99), 2148.01),
    ("qwen3-30b-a3b", {"layers": 2}, 4096, 2048, "on", ngl(99), 352.05),
    ("qwen3-30b-a3b", {"layers": 2}, 32768, 512, "on", CPU_MOE, 80.01),
    ("qwen3-30b-a3b", {"layers": 2}, 4096, 512, "off", CPU_MOE, 298.01),
    ("qwen3-30b-a3b", {"layers": 2}, 4096, 512, "on", ngl(2), 44.03),
    ("qwen3.5-35b-a3b", {"layers": 4}, 4096, 512, "on", ngl(99), 76.02),
    ("qwen3.5-35b-a3b", {"layers": 4}, 4096, 512, "off", ngl(99), 178.02),
    ("olmoe-7b-a1b", {"layers": 2}, 4096, 512, "on", ngl(99), 68.01),
]


@pytest.mark.parametrize(
    ("name", "changes", "context", "ubatch", "flash", "where", "mib"), SEEN, ids=lambda value: str(value)[:20]
)
def test_a_compute_buffer_is_predicted_to_a_quarter(
    name: str,
    changes: dict[str, int],
    context: int,
    ubatch: int,
    flash: str,
    where: Placement,
    mib: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = dataclasses.replace(synth.SHAPES[name], vocab=4096, **changes)  # type: ignore[arg-type]
    model = models.load(synth.write(tmp_path / "m.gguf", shape, header_only=True))
    settings = Settings(context=context, batch=ubatch, ubatch=ubatch, flash_attention=flash, stand_in_bytes=1 << 40)

    assert sure(model, where, settings).compute_bytes == pytest.approx(mib * MIB, rel=0.25)


def test_only_a_real_device_takes_over_the_products_of_host_layers(published: Model) -> None:
    local, remote = (Settings(), Settings(stand_in_bytes=1 << 40))

    assert sure(published, ngl(0), remote).compute_bytes == 0
    assert (sure(published, ngl(0), local).compute_bytes or 0) > 150 * MIB
    assert sure(published, ngl(0), dataclasses.replace(local, ubatch=16)).compute_bytes == 0


def test_a_compute_buffer_that_nothing_is_known_of_is_unknown() -> None:
    """Scores need the number of heads, which these tensors do not tell."""
    model = make(memory=[Memory(keys=128, values=64)] * 4)
    settings = dataclasses.replace(SETTINGS, flash_attention="off")

    assert model.heads is None
    assert sure(model, ngl(99), settings).compute_bytes is None
    assert sure(model, ngl(99), settings).device_bytes is not None


# ── equal placements ────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def article(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The shape of Qwen3.5-35B-A3B: 40 layers with 256 experts and a shared one each. No weights."""
    folder = tmp_path_factory.mktemp("article")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return models.load(synth.write(folder / "m.gguf", synth.SHAPES["qwen3.5-35b-a3b"], header_only=True))


def test_the_article_compared_two_placements_and_not_four(article: Model) -> None:
    arms = [Arm("llama-cpp", ncmoe(number)) for number in (48, 44, 40, 36)]

    found = aliases((arm, predict(article, arm.placement, SETTINGS, True)) for arm in arms)

    assert found == {arms[1]: arms[0], arms[2]: arms[0]}
    assert {describe(arm.placement, article) for arm in arms[:3]} == {"all experts on the CPU"}
    assert describe(arms[3].placement, article) == "experts of the first 36 of 40 layers on the CPU"


def test_cpu_moe_is_the_same_placement_as_an_n_beyond_all_layers(article: Model) -> None:
    one, other = Arm("llama-cpp", CPU_MOE), Arm("llama-cpp", ncmoe(48))

    assert aliases((arm, predict(article, arm.placement, SETTINGS, True)) for arm in (one, other)) == {other: one}


def test_every_n_up_to_the_number_of_layers_is_a_placement_of_its_own(article: Model) -> None:
    classes = {sure(article, ncmoe(number)).placement_class for number in range(60)}

    assert len(classes) == 41


def test_engines_and_knobs_are_never_merged() -> None:
    model = make()
    predicted = sure(model, ngl(99))
    arms = [
        Arm("llama-cpp", ngl(99)),
        Arm("ollama", ngl(99)),
        Arm("llama-cpp", ngl(99), (("ub", "256"),)),
        Arm("llama-cpp", ngl(50)),
    ]

    assert aliases((arm, predicted) for arm in arms) == {arms[3]: arms[0]}


def test_without_a_device_all_arms_of_an_engine_are_one(article: Model) -> None:
    arms = [Arm("llama-cpp", where) for where in (AUTO, ngl(99), CPU_MOE, CPU)]

    found = aliases((arm, predict(article, arm.placement, SETTINGS, False)) for arm in arms)

    assert found == dict.fromkeys(arms[1:], arms[0])


def test_a_choice_of_the_engine_is_an_alias_of_nothing() -> None:
    assert aliases([(Arm("a"), None), (Arm("a", ngl(9)), None)]) == {}


def test_no_layer_on_a_device_is_not_the_same_as_no_device() -> None:
    """Prompts may be computed on a device that holds no weights."""
    model = make()

    assert sure(model, ngl(0)).placement_class != sure(model, CPU).placement_class


# ── in words ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (AUTO, "engine's own choice"),
        (CPU, "whole model on the CPU"),
        (CPU_MOE, "all experts on the CPU"),
        (ncmoe(9), "all experts on the CPU"),
        (ncmoe(3), "experts of the first 3 of 4 layers on the CPU"),
        (ncmoe(0), "all layers on the GPU"),
        (ngl(99), "all layers on the GPU"),
        (ngl(5), "all layers on the GPU"),
        (ngl(4), "the last 3 of 4 layers and the head on the GPU"),
        (ngl(1), "only the output head on the GPU"),
        (ngl(0), "no layer on the GPU"),
        (Placement("other", 3), "other=3"),
    ],
    ids=str,
)
def test_a_placement_is_said_in_words(where: Placement, words: str) -> None:
    assert describe(where, make()) == words


def test_words_count_expert_layers_where_some_have_none() -> None:
    model = make(dense_first=1)

    assert describe(ncmoe(2), model) == "experts of the first of 3 expert layers on the CPU"
    assert describe(ncmoe(1), model) == "all layers on the GPU"


def test_words_for_a_model_without_experts() -> None:
    assert describe(CPU_MOE, make(dense_first=4)) == "all layers on the GPU (this model has no experts)"


def test_draft_blocks_are_not_counted_as_layers() -> None:
    assert describe(ngl(3), make(draft=1)) == "the last 1 of 4 layers and the head on the GPU"


def test_without_a_gpu_there_is_one_placement() -> None:
    assert {describe(where, make(), device=False) for where in (AUTO, ngl(9), CPU_MOE, CPU)} == {
        "no GPU: one placement"
    }


# ── one placement by several names ──────────────────────────────────────────────────────────


def alias_texts(model: Model, texts: Iterable[str], device: bool = True) -> dict[str, str]:
    """What `aliases` finds among these arms, as texts."""
    arms = [arm for text in texts for arm in parse_arms(text)]
    found = aliases((arm, predict(model, arm.placement, SETTINGS, device)) for arm in arms)
    return {str(arm): str(first) for arm, first in found.items()}


def test_a_placement_by_several_names_is_one_sentence(article: Model) -> None:
    found = alias_texts(article, ["llama-cpp@ncmoe=48", "llama-cpp@ncmoe=44", "llama-cpp@ncmoe=40"])

    assert equal_in_words(article, found, device=True) == (
        "this model has 40 layers: ncmoe=48, ncmoe=44 and ncmoe=40 are one placement, all experts on the CPU",
    )


def test_cpu_moe_is_named_among_the_equal(article: Model) -> None:
    found = alias_texts(article, ["llama-cpp@cpu-moe", "llama-cpp@ncmoe=40", "llama-cpp@ncmoe=36"])

    assert equal_in_words(article, found, device=True) == (
        "this model has 40 layers: cpu-moe and ncmoe=40 are one placement, all experts on the CPU",
    )


def test_expert_layers_are_named_where_they_are_fewer_than_layers() -> None:
    model = make(dense_first=1)
    found = alias_texts(model, ["llama-cpp@ncmoe=0..1", "llama-cpp@ngl=99"])

    assert equal_in_words(model, found, device=True) == (
        "this model has 3 expert layers of 4 layers: ncmoe=0, ncmoe=1 and ngl=99 are one placement, "
        "all layers on the GPU",
    )


def test_numbers_of_layers_beyond_the_model_are_one_placement() -> None:
    model = make()
    found = alias_texts(model, ["llama-cpp@ngl=99", "llama-cpp@ngl=5", "llama-cpp@ngl=3"])

    assert equal_in_words(model, found, device=True) == (
        "this model has 4 layers: ngl=99 and ngl=5 are one placement, all layers on the GPU",
    )


def test_a_model_without_experts_says_that_their_place_is_no_matter() -> None:
    model = make(dense_first=4)
    found = alias_texts(model, ["llama-cpp@cpu-moe", "llama-cpp@ngl=99"])

    assert equal_in_words(model, found, device=True) == (
        "this model has no experts: cpu-moe and ngl=99 are one placement, all layers on the GPU",
    )


def test_without_a_device_the_sentence_says_so() -> None:
    model = make()
    found = alias_texts(model, ["llama-cpp", "llama-cpp@ngl=99", "llama-cpp@cpu-moe"], device=False)

    assert equal_in_words(model, found, device=False) == ("no GPU: llama-cpp, ngl=99 and cpu-moe are one placement",)


def test_a_long_list_of_names_is_shortened_and_knobs_are_told() -> None:
    model = make()
    found = alias_texts(model, ["llama-cpp@ncmoe=4..40,ub=64"])

    assert equal_in_words(model, found, device=True) == (
        "this model has 4 layers: ncmoe=4, ncmoe=5, … and ncmoe=40 are one placement (with ub=64), "
        "all experts on the CPU",
    )


def test_two_engines_with_the_same_names_need_one_sentence() -> None:
    model = make()
    found = alias_texts(model, [f"{engine}@ncmoe={number}" for engine in ("llama-cpp", "ollama") for number in (4, 5)])

    assert len(found) == 2
    assert len(equal_in_words(model, found, device=True)) == 1


def test_where_all_placements_differ_there_is_nothing_to_say() -> None:
    assert equal_in_words(make(), {}, device=True) == ()


# ── does it fit ─────────────────────────────────────────────────────────────────────────────

GIB = 1 << 30
TEN = Predicted(
    placement_class="x",
    host_bytes=2 * GIB,
    device_bytes=10 * GIB,
    bytes_per_token_host=1,
    bytes_per_token_device=1,
    host_weights_bytes=2 * GIB,
    device_weights_bytes=9 * GIB,
)


@pytest.mark.parametrize(
    ("device_gib", "loaded", "free", "cell"),
    [
        (16.0, None, None, Cell.FITS),
        (10.5, None, None, Cell.TIGHT),
        (9.5, None, None, Cell.DOES_NOT_FIT),
        (9.5, True, None, Cell.SPILLED),
        (9.5, False, None, Cell.DOES_NOT_FIT),
        (16.0, False, None, Cell.DOES_NOT_FIT),
        (10.5, True, 300 * MIB, Cell.FITS),
        (16.0, True, 100 * MIB, Cell.TIGHT),
        (None, True, None, Cell.UNKNOWN),
    ],
)
def test_a_cell_says_how_it_sits_in_memory(
    device_gib: float | None, loaded: bool | None, free: int | None, cell: Cell
) -> None:
    size = None if device_gib is None else int(device_gib * GIB)

    assert fits(TEN, size, loaded=loaded, free_bytes=free) is cell


def test_what_was_not_predicted_is_unknown_and_a_host_placement_is_never_tight() -> None:
    on_host = dataclasses.replace(TEN, device_bytes=0, device_weights_bytes=0)

    assert fits(None, 16 * GIB) is Cell.UNKNOWN
    assert fits(on_host, 64 * MIB) is Cell.FITS


def test_what_loaded_although_it_needs_more_than_there_is_has_spilled() -> None:
    assert sits(TEN, int(9.5 * GIB), loaded=True) == Fit(
        Cell.SPILLED, "it needs 10.0 GiB of 9.50 GiB of device memory, so the rest lies on the host", "device"
    )


def test_what_fits_has_no_reason() -> None:
    assert sits(TEN, 16 * GIB, loaded=True, free_bytes=5 * GIB, major_faults=5, swap_growth_bytes=0) == Fit(Cell.FITS)


def test_a_device_that_is_full_after_the_load_is_tight_also_where_the_engine_chose() -> None:
    assert sits(None, 16 * GIB, loaded=True, free_bytes=100 * MIB) == Fit(
        Cell.TIGHT, "only 100 MiB of the device were left after the load", "device"
    )
    assert sits(None, 16 * GIB, loaded=True, free_bytes=2 * GIB).cell is Cell.UNKNOWN


def test_a_speed_below_the_floor_is_a_spill_only_on_a_nearly_full_device() -> None:
    full = sits(TEN, 16 * GIB, loaded=True, free_bytes=900 * MIB, too_slow=True)

    assert full.cell is Cell.SPILLED
    assert (
        full.why == "it is slower than this memory can be, with 900 MiB of the device left: a part lies in host memory"
    )
    assert sits(TEN, 16 * GIB, loaded=True, free_bytes=2 * GIB, too_slow=True).cell is Cell.FITS
    assert sits(TEN, int(10.5 * GIB), loaded=True, too_slow=True).cell is Cell.SPILLED


@pytest.mark.parametrize("too_slow", [False, True])
def test_an_arm_with_nothing_on_a_full_device_neither_is_tight_there_nor_has_spilled(too_slow: bool) -> None:
    on_host = dataclasses.replace(TEN, device_bytes=0, device_weights_bytes=0)

    assert sits(on_host, 16 * GIB, loaded=True, free_bytes=100 * MIB, too_slow=too_slow) == Fit(Cell.FITS)


def test_the_first_faults_of_a_cold_file_are_no_spill() -> None:
    """2 GiB on the host: 32768 reads of 64 KiB bring it in."""
    assert sits(TEN, 16 * GIB, loaded=True, major_faults=32_768).cell is Cell.FITS

    again = sits(TEN, 16 * GIB, loaded=True, major_faults=32_769)
    assert (again.cell, again.side) == (Cell.SPILLED, "host")
    assert again.why == (
        "its processes waited 32769 times for the disk, more than reading the 2.00 GiB of the host once takes: "
        "host memory is full"
    )


def test_keys_and_values_on_the_host_may_fault_as_its_weights_may() -> None:
    deep = dataclasses.replace(TEN, host_bytes=4 * GIB)

    assert sits(deep, 16 * GIB, loaded=True, major_faults=65_536).cell is Cell.FITS
    assert "reading the 4.00 GiB of the host" in (sits(deep, 16 * GIB, loaded=True, major_faults=65_537).why or "")


def test_a_small_host_part_may_fault_for_programs_and_libraries() -> None:
    small = dataclasses.replace(TEN, host_bytes=MIB, host_weights_bytes=MIB)

    assert sits(small, 16 * GIB, loaded=True, major_faults=4096).cell is Cell.FITS
    assert sits(small, 16 * GIB, loaded=True, major_faults=4097).cell is Cell.SPILLED


def test_swap_that_grows_by_more_than_idle_memory_is_a_spill_of_the_host() -> None:
    assert sits(TEN, 16 * GIB, loaded=True, swap_growth_bytes=255 * MIB).cell is Cell.FITS
    assert sits(TEN, 16 * GIB, loaded=True, swap_growth_bytes=256 * MIB) == Fit(
        Cell.SPILLED, "swap grew by 256 MiB during the load: host memory is full", "host"
    )


@pytest.mark.parametrize(
    "fit",
    [
        sits(None, 16 * GIB),
        sits(TEN, None),
        sits(TEN, 8 * GIB),
        sits(TEN, 16 * GIB, loaded=False),
        sits(TEN, int(10.5 * GIB)),
    ],
    ids=lambda fit: str(fit.why),
)
def test_a_cell_that_does_not_simply_fit_has_a_reason(fit: Fit) -> None:
    assert fit.cell is not Cell.FITS
    assert fit.why


def test_a_device_that_never_refuses_is_refused_for() -> None:
    assert refusal(TEN, 64 * GIB, 12 * GIB) is None
    said = refusal(TEN, 64 * GIB, 8 * GIB)
    assert said is not None
    assert said.startswith("it needs 10.0 GiB on a device of 8.00 GiB; put fewer layers or experts there")


def test_host_memory_is_judged_by_what_this_arm_puts_there() -> None:
    assert refusal(TEN, 3 * GIB, None) is None
    assert "2.00 GiB of host memory" in (refusal(TEN, GIB, None) or "")
    assert "12.0 GiB of host memory" in (refusal(TEN, 11 * GIB, None, device_is_host=True) or "")


def test_an_unknown_context_refuses_by_the_weights_alone() -> None:
    unknown = dataclasses.replace(TEN, host_bytes=None, device_bytes=None)

    assert refusal(unknown, 64 * GIB, int(9.5 * GIB)) is None
    assert refusal(unknown, 64 * GIB, 8 * GIB)


# ── what the engine did ─────────────────────────────────────────────────────────────────────


def buffers(device: int, host: int, kv: int = GIB, *, mapped: bool = False) -> tuple[Buffer, ...]:
    return (
        Buffer("CUDA0", "weights", device, on_host=False),
        Buffer("CPU_Mapped" if mapped else "CUDA_Host", "weights", host, on_host=True),
        Buffer("CUDA0", "kv", kv, on_host=False),
        Buffer("CUDA0", "compute", 300 * MIB, on_host=False),
        Buffer("CUDA_Host", "compute", 20 * MIB, on_host=True),
        Buffer("CUDA_Host", "output", MIB, on_host=True),
    )


def test_what_lies_where_it_was_predicted_is_fine_to_one_percent() -> None:
    assert judge(TEN, buffers(9 * GIB, 2 * GIB)) is None
    assert judge(TEN, buffers(9 * GIB + 90 * MIB, 2 * GIB)) is None
    assert judge(TEN, buffers(9 * GIB + 95 * MIB, 2 * GIB)) == (
        "9.09 GiB of weights on the device, where 9.00 GiB were predicted"
    )


def test_small_models_are_judged_to_one_mebibyte() -> None:
    small = dataclasses.replace(TEN, device_bytes=10 * MIB, device_weights_bytes=10 * MIB, host_bytes=0)

    assert judge(small, buffers(11 * MIB, 0, kv=0)) is None
    assert judge(small, buffers(12 * MIB, 0, kv=0)) is not None


def test_a_context_memory_elsewhere_is_caught() -> None:
    assert "of context memory on the device" in (judge(TEN, buffers(9 * GIB, 2 * GIB, kv=0)) or "")


def test_recurrent_states_count_as_context_memory() -> None:
    parts = (*buffers(9 * GIB, 2 * GIB, kv=GIB // 2), Buffer("CUDA0", "rs", GIB // 2, on_host=False))

    assert judge(TEN, parts) is None


def test_a_mapped_span_on_the_host_may_be_larger_than_its_tensors_but_not_far_smaller() -> None:
    assert judge(TEN, buffers(9 * GIB, 7 * GIB, mapped=True)) is None
    assert "on the host" in (judge(TEN, buffers(9 * GIB, GIB, mapped=True)) or "")


def test_unknown_stays_unknown() -> None:
    assert judge(TEN, None) is None
    assert judge(None, buffers(1, 1)) is None
    assert placement.realised_bytes(None) is None


def test_a_device_that_maps_the_file_proves_nothing() -> None:
    assert judge(TEN, (Buffer("MTL0_Mapped", "weights", 15 * GIB, on_host=False),)) is None


def test_an_unknown_context_is_judged_by_the_weights_alone() -> None:
    unknown = dataclasses.replace(TEN, host_bytes=None, device_bytes=None)

    assert judge(unknown, buffers(9 * GIB, 0, kv=7 * GIB)) is None
    assert judge(unknown, buffers(5 * GIB, 0)) is not None


# of the published run on a card of 12 GiB: llama-cpp@ncmoe=19, by its log, by NVML and by the system
ON_CARD = (
    Buffer("CPU_Mapped", "weights", 7_807_812_239, on_host=True),
    Buffer("CUDA0", "compute", 232_270_070, on_host=False),
    Buffer("CUDA0", "kv", 377_487_360, on_host=False),
    Buffer("CUDA0", "weights", 10_370_259_354, on_host=False),
    Buffer("CUDA_Host", "compute", 20_992_492, on_host=True),
    Buffer("CUDA_Host", "output", 608_174, on_host=True),
)


def test_what_the_driver_takes_for_itself_is_no_contradiction() -> None:
    assert cross_check(realised(ON_CARD), 11_716_329_472, 17_959_215_104) is None


def test_device_memory_that_did_not_grow_by_the_buffers_is_told() -> None:
    assert cross_check(realised(ON_CARD), 5 * GIB, None) == (
        "device memory grew by 5.00 GiB while the engine tells of 10.2 GiB there: a part of it is not on the device"
    )


def test_device_memory_that_grew_by_far_more_is_told() -> None:
    said = cross_check(realised(ON_CARD), 21 * GIB, None)

    assert said is not None
    assert said.endswith("something else took device memory too, or the engine keeps a copy")
    assert cross_check(realised(()), 5 * GIB, None), "an engine without a buffer there"


def test_processes_that_hold_less_than_their_host_buffers_are_told() -> None:
    host = (Buffer("CPU", "weights", 6 * GIB, on_host=True), Buffer("CPU_REPACK", "weights", 4 * GIB, on_host=True))

    assert cross_check(realised(host), None, 10 * GIB) is None
    assert cross_check(realised(host), None, 5 * GIB) == (
        "the engine's processes held 5.00 GiB of host memory at most while it tells of 10.0 GiB there: "
        "a part of it was swapped out, or is not there"
    )


def test_mapped_and_pinned_host_buffers_need_not_be_counted() -> None:
    assert cross_check(realised(ON_CARD), None, GIB) is None
    assert cross_check(realised((Buffer("CUDA_Host", "weights", 9 * GIB, on_host=True),)), None, GIB) is None


def test_a_device_behind_rpc_is_no_matter_of_a_driver() -> None:
    parts = (Buffer("RPC0[127.0.0.1:5]", "weights", 9 * GIB, on_host=False),)

    assert cross_check(realised(parts), 0, None) is None
    assert cross_check(realised(parts), 20 * GIB, 10 * GIB) is None


def test_where_a_reading_is_missing_nothing_is_contradicted() -> None:
    assert cross_check(realised(None), 0, 0) is None
    assert cross_check(realised(ON_CARD), None, None) is None


def test_realised_bytes_leave_compute_and_output_apart() -> None:
    assert placement.realised_bytes(buffers(9 * GIB, 2 * GIB)) == (2 * GIB, 10 * GIB)


def realised(parts: tuple[Buffer, ...] | None) -> Realised:
    return Realised(engine="x", argv=(), pids=(), weights=None, buffers=parts)


def test_a_flag_that_changed_nothing_is_found_by_the_buffers_of_another_arm() -> None:
    five = dataclasses.replace(TEN, placement_class="y", device_weights_bytes=5 * GIB)
    whole = realised(buffers(9 * GIB, 2 * GIB))

    assert is_noop(five, whole, TEN, realised(buffers(9 * GIB + MIB, 5 * GIB, mapped=True)))
    assert not is_noop(five, realised(buffers(5 * GIB, 6 * GIB)), TEN, whole)


def test_nothing_is_called_a_noop_that_cannot_be_told_apart() -> None:
    whole = realised(buffers(9 * GIB, 2 * GIB))
    near = dataclasses.replace(TEN, placement_class="y", device_weights_bytes=9 * GIB + MIB)

    assert not is_noop(near, whole, TEN, whole)
    assert not is_noop(TEN, whole, TEN, whole)
    assert not is_noop(None, whole, TEN, whole)
    assert not is_noop(TEN, realised(None), dataclasses.replace(TEN, placement_class="y"), whole)


# ── the same on a real engine ───────────────────────────────────────────────────────────────

WIDTH, HEADS, HEAD_WIDTH, RANK = 256, 4, 64, 64
Extents = dict[str, tuple[int, ...]]
ON_ENGINE = Settings(
    context=1000, ubatch=64, threads=1, flash_attention="off", load_mode="none", stand_in_bytes=4 << 30
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """A llama.cpp with RPC, whose stand-in device takes every placement without a GPU."""
    given = {"llama-server": path} if (path := os.environ.get("LLAMADUEL_LLAMA_SERVER")) else {}
    try:
        found = backend("llama-cpp").find({"stand-in": "1", **given})
    except Unavailable as error:
        pytest.skip(f"needs a llama.cpp with RPC: {error}")
    if not found.rpc:
        pytest.skip(f"needs a llama.cpp with RPC, and {found} has none")
    return found


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts of 24 layers, whose tokenizer the other models take over."""
    shape = dataclasses.replace(synth.SHAPES["tiny"], layers=24)
    return synth.write(tmp_path_factory.mktemp("engine") / "moe.gguf", shape)


def written(path: Path, donor: Path, architecture: str, numbers: dict[str, int | float], tensors: Extents) -> Path:
    """A model of random F32 weights, small and loadable."""
    keys = header.read_all(donor)[0].fields
    writer = GGUFWriter(path, architecture)
    for name, number in numbers.items():
        if isinstance(number, float):
            writer.add_float32(f"{architecture}.{name}", number)
        else:
            writer.add_uint32(f"{architecture}.{name}", number)
    for word in ("model", "pre"):
        writer.add_string(f"tokenizer.ggml.{word}", keys[f"tokenizer.ggml.{word}"])
    writer.add_token_list(keys["tokenizer.ggml.tokens"])
    writer.add_token_types(keys["tokenizer.ggml.token_type"])
    writer.add_token_merges([merge.decode() for merge in keys["tokenizer.ggml.merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(1)
    words = len(keys["tokenizer.ggml.tokens"])
    for name, extent in {"token_embd": (words, WIDTH), "output_norm": (WIDTH,), **tensors}.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal([n or words for n in extent], np.float32) * 0.02)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def windowed(path: Path, donor: Path) -> Path:
    """Tied embedding; five of six layers look back 128 tokens."""
    layer: Extents = {
        **dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (WIDTH,)),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (HEAD_WIDTH,)),
        **dict.fromkeys(("attn_k", "attn_v"), (2 * HEAD_WIDTH, WIDTH)),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (512, WIDTH)),
        "attn_q": (HEADS * HEAD_WIDTH, WIDTH),
        "attn_output": (WIDTH, HEADS * HEAD_WIDTH),
        "ffn_down": (WIDTH, 512),
    }
    numbers: dict[str, int | float] = {
        "block_count": 6,
        "context_length": 4096,
        "embedding_length": WIDTH,
        "feed_forward_length": 512,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 2,
        "attention.key_length": HEAD_WIDTH,
        "attention.value_length": HEAD_WIDTH,
        "attention.sliding_window": 128,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    tensors = {f"blk.{block}.{name}": extent for block in range(6) for name, extent in layer.items()}
    return written(path, donor, "gemma3", numbers, tensors)


def latent(path: Path, donor: Path) -> Path:
    """Latent attention, one leading dense layer, three with 8 experts and a shared one, one draft block."""
    attention: Extents = {
        **dict.fromkeys(("attn_norm", "ffn_norm"), (WIDTH,)),
        **dict.fromkeys(("attn_q_a_norm", "attn_kv_a_norm"), (RANK,)),
        "attn_q_a": (RANK, WIDTH),
        "attn_q_b": (HEADS * 64, RANK),
        "attn_kv_a_mqa": (RANK + 32, WIDTH),
        "attn_k_b": (HEADS, RANK, 32),
        "attn_v_b": (HEADS, 32, RANK),
        "attn_output": (WIDTH, HEADS * 32),
    }
    dense: Extents = {**dict.fromkeys(("ffn_gate", "ffn_up"), (512, WIDTH)), "ffn_down": (WIDTH, 512)}
    experts: Extents = {
        **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (8, 128, WIDTH)),
        **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), (128, WIDTH)),
        "ffn_gate_inp": (8, WIDTH),
        "ffn_down_exps": (8, WIDTH, 128),
        "ffn_down_shexp": (WIDTH, 128),
    }
    draft: Extents = {"nextn.eh_proj": (WIDTH, 2 * WIDTH), "nextn.enorm": (WIDTH,), "nextn.hnorm": (WIDTH,)}
    numbers: dict[str, int | float] = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "leading_dense_block_count": 1,
        "context_length": 4096,
        "embedding_length": WIDTH,
        "feed_forward_length": 512,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": RANK + 32,
        "attention.value_length": RANK,
        "attention.key_length_mla": 64,
        "attention.value_length_mla": 32,
        "attention.kv_lora_rank": RANK,
        "attention.q_lora_rank": RANK,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 32,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 128,
        "expert_weights_scale": 1.0,
        "expert_gating_func": ExpertGatingFuncType.SIGMOID.value,
    }
    tensors: Extents = {"output": (0, WIDTH)}  # 0: as many as there are words
    for block, parts in enumerate([(attention, dense), *[(attention, experts)] * 3, (attention, experts, draft)]):
        tensors |= {f"blk.{block}.{name}": extent for part in parts for name, extent in part.items()}
    return written(path, donor, "deepseek2", numbers, tensors)


def seen_on(engine: Engine, model: Model, where: Placement, folder: Path) -> tuple[Buffer, ...]:
    arm = Arm("llama-cpp", where)
    with backend(arm.backend).open(engine, model.file, arm, ON_ENGINE, folder / "engine.log") as session:
        buffers = session.realised().buffers
    assert buffers is not None
    return buffers


@pytest.mark.engine
@pytest.mark.parametrize("where", [ncmoe(0), ncmoe(7), ncmoe(20), ncmoe(24), CPU_MOE, ngl(9), ngl(1), CPU], ids=str)
def test_an_engine_puts_a_mixture_of_experts_where_it_was_predicted(
    engine: Engine, donor: Path, where: Placement, tmp_path: Path
) -> None:
    model = models.load(donor)
    predicted = sure(model, where, ON_ENGINE)

    buffers = seen_on(engine, model, where, tmp_path)

    host, device = placement.realised_bytes(buffers) or (0, 0)
    assert device == pytest.approx(predicted.device_bytes, rel=0.01)
    assert host == pytest.approx(predicted.host_bytes, rel=0.01)
    assert judge(predicted, buffers) is None
    assert judge(sure(model, ncmoe(13), ON_ENGINE), buffers) is not None


@pytest.mark.engine
@pytest.mark.parametrize(
    ("make_file", "where"),
    [
        (windowed, ngl(99)),
        (windowed, ngl(4)),
        (latent, ncmoe(1)),
        (latent, ncmoe(2)),
        (latent, ngl(2)),
        (latent, ngl(4)),
    ],
    ids=lambda value: str(value) if isinstance(value, Placement) else value.__name__,
)
def test_an_engine_agrees_on_windows_latent_attention_and_draft_blocks(
    engine: Engine, donor: Path, make_file: Callable[[Path, Path], Path], where: Placement, tmp_path: Path
) -> None:
    model = models.load(make_file(tmp_path / "m.gguf", donor))
    predicted = sure(model, where, ON_ENGINE)

    host, device = placement.realised_bytes(seen_on(engine, model, where, tmp_path)) or (0, 0)

    assert device == pytest.approx(predicted.device_bytes, rel=0.002)
    assert host == pytest.approx(predicted.host_bytes, rel=0.002)
