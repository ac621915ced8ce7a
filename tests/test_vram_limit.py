"""A run on a card that is held to a smaller size: seen to before every load, labelled, refused where it cannot be."""

from __future__ import annotations

import contextlib
import dataclasses
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

from harness import ballast, nvml, preview, probe, record, registry, render
from harness.calibration import calibrate
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


def remembered(monkeypatch: pytest.MonkeyPatch) -> list[ballast.Ballast]:
    """Every ballast that begins from here on."""
    held: list[ballast.Ballast] = []
    beginning = ballast.Ballast.__init__

    def begin(self: ballast.Ballast, *given: Any) -> None:
        beginning(self, *given)
        held.append(self)

    monkeypatch.setattr(ballast.Ballast, "__init__", begin)
    return held


def stop_in_block_2(progress: probe.Progress) -> None:
    if progress.block == 2:
        raise KeyboardInterrupt


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

    with engines.fake(tmp_path, Script(itl_s=0.002)):
        begun = duel(options(model, tmp_path), stop_in_block_2)
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
        pytest.raises(RunRefused, match=r"left 2\.00 GiB of GPU memory and NVML sees 8\.00 GiB; .*; start it again$"),
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


def test_plan_names_what_a_card_that_is_held_has_no_room_for(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_card(monkeypatch, cuda)
    monkeypatch.setattr(ballast, "LEAST_BYTES", 1)
    given = options(model, tmp_path, arms="llama-cpp@ngl=99,llama-cpp@cpu-moe")

    with engines.fake(tmp_path, Script()):
        large, small = (
            (each["predicted_device_bytes"] or 0) + (each["predicted_device_compute_bytes"] or 0)
            for each in preview.preview_run(given, lambda _: None)["arms"]
        )
        between = dataclasses.replace(given, vram_limit=f"{(large + small) // 2}B")
        told = preview.preview_run(between, lambda _: None)["notes"]

    assert large > small > 0
    assert [note.split(" needs ")[0] for note in told if " of GPU memory: " in note] == ["llama-cpp@ngl=99"]


def test_placements_are_judged_by_the_limit_and_not_by_the_card(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_card(monkeypatch, cuda)

    with engines.fake(tmp_path, Script()):
        field = probe.find_field(options(model, tmp_path), lambda _: None)

    assert {each.settings.device_limit_bytes for each in field.contenders} == {LIMIT}
    assert CONTEXT < LIMIT


def test_a_load_during_which_the_ballast_went_does_not_count(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_card(monkeypatch, cuda)
    held = remembered(monkeypatch)

    def kill(progress: probe.Progress) -> None:
        if progress.block == 1 and progress.text.endswith("stopping"):
            held[0]._child.process.kill()

    with (
        engines.fake(tmp_path, Script(itl_s=0.002)),
        pytest.raises(RunRefused, match=r"the ballast is gone \(SIGKILL\)") as refused,
    ):
        duel(options(model, tmp_path), kill)

    (folder,) = (tmp_path / "runs").iterdir()
    assert str(refused.value).endswith(f"; go on with `llamaduel run --resume {folder}`")
    assert not [load for load in record.read(folder).loads if load.stage == "block"]


def test_a_ballast_that_went_before_anything_counts_names_the_next_step_once(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_card(monkeypatch, cuda)
    held = remembered(monkeypatch)

    def kill(progress: probe.Progress) -> None:
        if progress.text.startswith("probe:") and progress.text.endswith("stopping"):
            held[0]._child.process.kill()

    with engines.fake(tmp_path, Script(itl_s=0.002)), pytest.raises(RunRefused) as refused:
        duel(options(model, tmp_path), kill)

    (folder,) = (tmp_path / "runs").iterdir()
    assert str(refused.value).count("start it again") == 1
    assert str(refused.value).endswith(f"; the engines' logs are in {folder / 'engines'}")


def test_memory_that_others_took_in_the_middle_of_a_run_is_told_with_the_way_to_go_on(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_card(monkeypatch, cuda)
    with contextlib.ExitStack() as others, engines.fake(tmp_path, Script(itl_s=0.002)):

        def take(progress: probe.Progress) -> None:
            if progress.block == 1 and progress.text.endswith("stopping"):
                others.enter_context(another_program(2 * GIB))

        with pytest.raises(RunRefused, match=r"lacks \d+ MiB for --vram-limit=7000MiB") as refused:
            duel(options(model, tmp_path / "a b", vram_limit="7000MiB"), take)
    (folder,) = (tmp_path / "a b" / "runs").iterdir()
    assert str(refused.value).endswith(f"names; go on with `llamaduel run --resume '{folder}'`")

    with engines.fake(tmp_path, Script(itl_s=0.002)):
        assert duel(Options(resume=str(folder), no_wait=True), lambda _: None).finished


def test_a_calibration_during_which_the_ballast_went_gives_no_figure(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_card(monkeypatch, cuda)
    held = remembered(monkeypatch)

    def bench(*_: object) -> tuple[float, ...]:
        held[0]._child.process.kill()
        held[0]._child.process.wait(5)
        return (0.002,)

    engine = type(registry.backend("llama-cpp"))
    monkeypatch.setattr(engine, "require_bench", staticmethod(lambda *_: None))
    monkeypatch.setattr(engine, "bench", staticmethod(bench))
    with (
        engines.fake(tmp_path, Script(itl_s=0.002)),
        pytest.raises(RunRefused, match=r"the ballast is gone \(SIGKILL\)"),
    ):
        calibrate(options(model, tmp_path, arms="llama-cpp"), lambda _: None, 1)


def test_a_run_that_goes_on_may_go_on_all_the_same_beside_other_programs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[types.SimpleNamespace] = []
    fake_nvml.install(monkeypatch, card(ComputeRunningProcesses=lambda: list(others), GraphicsRunningProcesses=[]))

    with engines.fake(tmp_path, Script(itl_s=0.002)):
        begun = duel(options(model, tmp_path, vram_limit=None, gpu_in_use="refuse"), stop_in_block_2)
        others.append(types.SimpleNamespace(pid=1, usedGpuMemory=GIB))
        again = Options(resume=str(begun.run.folder), no_wait=True)
        with pytest.raises(RunRefused, match="or go on all the same with --gpu-in-use go-on"):
            duel(again, lambda _: None)
        assert duel(dataclasses.replace(again, gpu_in_use="go-on"), lambda _: None).finished


def test_a_card_without_figures_beside_one_that_is_held_refuses_nothing(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.show("Fake 8|8192|0|0", "Fake 8|8192|0|0")
    told = card("Fake 8", MemoryInfo=lambda: types.SimpleNamespace(used=TOTAL - cuda.free(), total=TOTAL))
    fake_nvml.install(monkeypatch, told, card("Fake 8", MigMode=(1, 1)))

    with engines.fake(tmp_path, Script(itl_s=0.002)):
        assert duel(options(model, tmp_path), lambda _: None).limits == (2 * LIMIT,)


def test_a_limit_is_refused_where_it_is_not_known_how_many_cards_it_is_for(
    model: Path, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.show("Fake 8|8192|0|0", "Fake 4|4096|0|0")
    fake_nvml.install(monkeypatch, card("Fake 8"), card("Fake 4"))
    monkeypatch.setenv(nvml.VISIBLE, "1")

    with engines.fake(tmp_path, Script()), pytest.raises(UsageError, match=r"CUDA shows 1 GPU and NVML 2.*PCI_BUS_ID"):
        duel(options(model, tmp_path), lambda _: None)


def test_a_refusal_before_any_engine_started_leaves_no_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = types.SimpleNamespace(pid=1, usedGpuMemory=GIB)
    fake_nvml.install(monkeypatch, card(ComputeRunningProcesses=[holder], GraphicsRunningProcesses=[]))

    with engines.fake(tmp_path, Script()), pytest.raises(RunRefused) as raised:
        duel(options(model, tmp_path, vram_limit=None, gpu_in_use="refuse"), lambda _: None)

    assert "logs" not in str(raised.value)
    assert not list((tmp_path / "runs").iterdir())
