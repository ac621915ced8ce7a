"""A run on a card that is held to a smaller size: seen to before every load, labelled, refused where it cannot be."""

from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_nvml
import pytest
from fake_nvml import card
from test_ballast import CONTEXT, GIB, TOTAL, Cuda, another_program, cuda, driver

from harness import nvml, probe, render
from harness.errors import RunRefused, UsageError
from harness.options import Options
from harness.testing import engines
from harness.testing.script import Script
from harness.walk import duel, find_best

__all__ = ["cuda", "driver"]  # fixtures
LIMIT = 2 * GIB

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("cc") is None,
    reason="the driver in these tests is built by a C compiler, and found as on Linux",
)


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_nvml.remove(monkeypatch)
    monkeypatch.delenv(nvml.VISIBLE, raising=False)
    yield
    monkeypatch.undo()
    fake_nvml.forget()


def same_card(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> None:
    """NVML sees the memory that the CUDA driver gives."""
    fake_nvml.install(
        monkeypatch,
        card("Fake 8", MemoryInfo=lambda: types.SimpleNamespace(used=TOTAL - cuda.free(), total=TOTAL)),
    )


def options(model: Path, folder: Path, **changed: Any) -> Options:
    given: dict[str, Any] = {
        "model": str(model), "arms": "ollama,llama-cpp", "preset": "quick", "no_wait": True, "out_tokens": 16,
        "out": str(folder / "runs"), "prompt_tokens": 64, "context": 512, "vram_limit": "2GiB",
    }  # fmt: skip
    return Options(**given | changed)


def test_a_card_is_held_to_its_limit_before_every_load_and_the_report_says_so(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_card(monkeypatch, cuda)
    free: list[int] = []
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        found = duel(
            options(model, tmp_path), lambda each: free.append(cuda.free()) if "loading" in each.text else None
        )

    assert len(free) == 6  # two probes, two blocks of two
    assert all(abs(size - LIMIT) <= 4 << 20 for size in free)
    assert cuda.free() > 7 * GIB
    assert found.limits == (LIMIT,)
    text = render.report(found)
    assert "GPU memory was held to 2.00 GiB: capacity is emulated, bandwidth is this card's." in text
    assert "Fake 8, a card of 8.00 GiB, is held to 2.00 GiB of free memory" in text
    assert "--vram-limit=2GiB" in found.header.command


def test_memory_that_another_program_takes_meanwhile_is_made_up_for(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_card(monkeypatch, cuda)
    with engines.fake(tmp_path, Script(itl_s=0.002)), another_program(GIB):
        found = duel(options(model, tmp_path), lambda _: None)

    assert found.blocks_run == 2


def test_a_run_that_goes_on_holds_the_card_again(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_card(monkeypatch, cuda)
    free: list[int] = []

    def stop(progress: probe.Progress) -> None:
        if progress.block == 2:
            raise KeyboardInterrupt

    with engines.fake(tmp_path, Script(itl_s=0.002)):
        begun = duel(options(model, tmp_path), stop)
        assert cuda.free() > 7 * GIB
        ended = duel(
            Options(resume=str(begun.run.folder), no_wait=True),
            lambda each: free.append(cuda.free()) if "loading" in each.text else None,
        )

    assert (begun.finished, ended.finished) == (False, True)
    assert free
    assert all(abs(size - LIMIT) <= 4 << 20 for size in free)


def test_a_search_is_held_to_the_limit_too(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_card(monkeypatch, cuda)
    free: list[int] = []
    arms = "ollama,llama-cpp,ub=64/128/256"
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        found = find_best(
            options(model, tmp_path, arms=arms),
            lambda each: free.append(cuda.free()) if "loading" in each.text else None,
        )

    assert found.header.search is not None
    assert all(abs(size - LIMIT) <= 4 << 20 for size in free)
    assert len(free) >= len(found.header.search.tried)


def test_a_ballast_that_nvml_does_not_see_ends_the_run_with_what_it_has(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml.install(monkeypatch, card("Fake 8", used=0, total=TOTAL))

    with (
        engines.fake(tmp_path, Script()),
        pytest.raises(RunRefused, match=r"left 2\.00 GiB of GPU memory and NVML sees 8\.00 GiB; go on with --resume"),
    ):
        duel(options(model, tmp_path), lambda _: None)

    assert cuda.free() > 7 * GIB


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stand_in": "1GiB"}, "--vram-limit holds a real GPU and --stand-in needs none; give one of the two"),
        ({"vram_limit": "much"}, "much"),
        ({"vram_limit": "1MiB"}, "hold no engine"),
        ({"vram_limit": "64GiB"}, "is more than Fake 8 has"),
        ({"vram_limit": "2GiB,2GiB"}, "names 2 sizes and CUDA shows 1 GPU"),
    ],
)
def test_a_limit_that_cannot_be_meant_is_one_sentence(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], said: str
) -> None:
    same_card(monkeypatch, cuda)

    with engines.fake(tmp_path, Script()), pytest.raises(UsageError, match=said):
        duel(options(model, tmp_path, **given), lambda _: None)

    assert not list((tmp_path / "runs").glob("*/run.json"))


def test_without_a_gpu_a_limit_points_to_the_stand_in(model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script()), pytest.raises(UsageError, match="--stand-in=2GiB"):
        probe.find_field(options(model, tmp_path), lambda _: None)


def test_placements_are_judged_by_the_limit_and_not_by_the_card(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_card(monkeypatch, cuda)

    with engines.fake(tmp_path, Script()):
        field = probe.find_field(options(model, tmp_path), lambda _: None)

    assert {each.settings.device_limit_bytes for each in field.contenders} == {LIMIT}
    assert CONTEXT < LIMIT
