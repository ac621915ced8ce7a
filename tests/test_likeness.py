"""What an engine chose by itself, named as a placement of ours."""

from __future__ import annotations

import dataclasses

import pytest

from harness import likeness, model, placement, synth
from harness.contract import Buffer, Placement, Settings
from harness.model import Model

SETTINGS = Settings(context=1024)


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("model") / "layered.gguf"
    synth.write(path, dataclasses.replace(synth.scaled(synth.SHAPES["tiny"], 64 << 20), layers=12))
    return model.load(path)


def buffers(found: Model, where: Placement, *, extra: int = 0) -> tuple[Buffer, ...]:
    """What an engine would report of this placement, with so many bytes of weights more on the device."""
    predicted = placement.predict(found, where, SETTINGS, device=True)
    assert predicted is not None
    return (
        Buffer("CUDA0", "weights", predicted.device_weights_bytes + extra, False),
        Buffer("CUDA0", "kv", predicted.device_memory_bytes or 0, False),
        Buffer("CPU", "weights", predicted.host_weights_bytes - extra, True),
        Buffer("CPU", "kv", predicted.host_memory_bytes or 0, True),
        Buffer("CUDA0", "compute", 123 << 20, False),
    )


@pytest.mark.parametrize("where", ["ncmoe=1", "ncmoe=7", "cpu-moe", "ngl=13", "ngl=6", "ngl=1", "ngl=0"])
def test_every_placement_is_found_again_by_its_bytes(where: str, layered: Model) -> None:
    kind, _, number = where.partition("=")
    found = likeness.nearest(layered, buffers(layered, Placement(kind, int(number) if number else None)), SETTINGS)
    assert found is not None
    assert str(found.placement) == where
    assert found.exact


def test_a_part_of_a_layer_is_between_two_placements_and_only_near_one(layered: Model) -> None:
    one, two = (placement.predict(layered, Placement("ncmoe", n), SETTINGS, device=True) for n in (4, 5))
    assert one is not None
    assert two is not None
    step = one.device_weights_bytes - two.device_weights_bytes
    found = likeness.nearest(layered, buffers(layered, Placement("ncmoe", 5), extra=step // 3), SETTINGS)
    assert found is not None
    assert not found.exact
    assert found.in_words(layered) == "engine's choice ≈ ncmoe=5: experts of the first 5 of 12 layers on the CPU"


def test_what_cannot_be_seen_is_like_nothing(layered: Model) -> None:
    assert likeness.nearest(layered, None, SETTINGS) is None
    assert likeness.nearest(layered, (Buffer("MTL0_Mapped", "weights", 5 << 20, False),), SETTINGS) is None


def test_a_context_left_to_the_engine_is_compared_by_weights(layered: Model) -> None:
    found = likeness.nearest(layered, buffers(layered, Placement("ncmoe", 3)), Settings(context=None))
    assert found is not None
    assert str(found.placement) == "ncmoe=3"


def test_what_the_found_placement_reads_grows_with_the_depth(layered: Model) -> None:
    seen = buffers(layered, Placement("ncmoe", 3))
    empty, deep = (likeness.nearest(layered, seen, SETTINGS, depth=depth) for depth in (0, 700))
    assert empty is not None
    assert deep is not None
    assert layered.memory is not None
    row_bytes = sum(layer.keys + layer.values for layer in layered.memory) * 2
    grown = deep.predicted.bytes_per_token_device - empty.predicted.bytes_per_token_device
    assert grown == 700 * row_bytes > 0
