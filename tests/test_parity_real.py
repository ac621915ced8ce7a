"""The parity table of real engines: their settings, their buffers, and what they claim beside them.

Nothing here asserts a speed. Ollama and llama.cpp are asked for the same, so whatever differs must
have a reason, on a whole card, on a small one, without one, and as they are shipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path

import pytest
from test_real import found, measured
from test_real import moe as moe
from test_real import nothing_is_left_running as nothing_is_left_running

from harness import render
from harness.compare import Comparison
from harness.parity import Parity, claims, parity

pytestmark = pytest.mark.engine
GREEDY = {"temperature": "0", "top_k": "40", "top_p": "1", "min_p": "0", "penalties": "off", "seed": "1"}


def table(comparison: Comparison) -> dict[str, Parity]:
    return {row.setting: row for row in parity(comparison.run)}


def unexplained(comparison: Comparison) -> list[str]:
    return [f"{row.setting}: {text}" for row in parity(comparison.run) for text in row.unexplained]


def test_matched_arms_differ_by_their_placement_alone_and_a_claim_of_all_is_not_believed(
    moe: Path, tmp_path: Path
) -> None:
    found("llama-cpp", **{"stand-in": "1"})
    found("ollama", **{"stand-in": "1"})
    arms = "ollama,ollama@cpu-moe,llama-cpp,llama-cpp@cpu-moe"

    comparison = measured(moe, tmp_path, arms=arms, stand_in="all")

    rows, report = table(comparison), render.report(comparison)
    assert unexplained(comparison) == []
    assert {name for name, row in rows.items() if row.differs and not row.is_placement} == set()
    assert set(rows["context"].values.values()) == {"1024"}
    assert set(rows["prompt_cache"].values.values()) == {"off"}
    for name, value in GREEDY.items():
        assert set(rows[name].values.values()) == {value}, name
        assert set(rows[name].asked.values()) == {value}, name

    by, weights = rows["placed_by"].values, rows["weights"].values
    assert by == {arm: "user" if "@" in arm else "engine's fit" for arm in arms.split(",")}
    assert weights["ollama@cpu-moe"] == weights["llama-cpp@cpu-moe"] != weights["ollama"] == weights["llama-cpp"]
    assert re.match(r"[\d.]+ MiB RPC0, [\d.]+ MiB CPU", weights["ollama@cpu-moe"] or "")

    (forced,) = (each for each in comparison.header.contenders if each.arm == "ollama@cpu-moe")
    assert forced.realised is not None
    assert "--model" in forced.realised.argv, "of its child, not of the server"
    assert "-c 1024" in (argv := " ".join(forced.realised.argv))
    assert argv in report
    assert forced.realised.reported["size"] == forced.realised.reported["size_vram"] > 0
    judged = {each.arm: each for each in claims(comparison.run)}
    assert judged["ollama@cpu-moe"].text == "/api/ps: 100 % on the GPU"
    assert {arm for arm, each in judged.items() if each.wrong} == {"ollama@cpu-moe", "llama-cpp@cpu-moe"}
    share = f"{100 * round(judged['ollama@cpu-moe'].weights_share or 0, 2):.0f} %"
    assert f"- `ollama@cpu-moe`: /api/ps: 100 % on the GPU — **wrong**: by its buffers {share} of the weights" in report
    assert 2 * (comparison.row("ollama@cpu-moe").realised_device_bytes or 0) < moe.stat().st_size


def test_on_a_small_card_both_engines_choose_and_their_choice_is_read_from_their_buffers(
    moe: Path, tmp_path: Path
) -> None:
    found("llama-cpp", **{"stand-in": "1"})
    found("ollama", **{"stand-in": "1"})

    comparison = measured(moe, tmp_path, arms="ollama,ollama@cpu-moe,llama-cpp", stand_in="64MiB")

    rows = table(comparison)
    assert unexplained(comparison) == []
    assert rows["placed_by"].values == {"ollama": "engine's fit", "ollama@cpu-moe": "user", "llama-cpp": "engine's fit"}
    for arm in ("ollama", "llama-cpp"):
        assert re.match(r"[\d.]+ MiB RPC0, .*CPU", rows["weights"].values[arm] or ""), "some here, some there"
    wrong = {each.arm for each in claims(comparison.run) if each.wrong}
    assert {"ollama@cpu-moe", "llama-cpp"} <= wrong, "layers are counted though their experts are not there"


@pytest.mark.parametrize("stand_in", [None, "all"])
def test_as_shipped_each_difference_has_its_reason(moe: Path, tmp_path: Path, stand_in: str | None) -> None:
    hints = {"stand-in": "1"} if stand_in else {}
    found("llama-cpp", **hints)
    found("ollama", **hints)

    comparison = measured(moe, tmp_path, settings="stock", stand_in=stand_in, arms="ollama,llama-cpp,llama-cpp@cpu-moe")

    rows = table(comparison)
    assert unexplained(comparison) == []
    apart = {name: row for name, row in rows.items() if row.differs}
    assert "batch" in apart, "the two have other defaults"
    assert all(row.why for row in apart.values())
    assert set(rows["batch"].asked.values()) == {None}
    assert apart["batch"].why[0] == "left to each engine"
    assert any("Ollama passes -b " in text for text in apart["batch"].why)


def test_two_builds_are_named_with_their_distance(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, ollama = found("llama-cpp").path, found("ollama").path
    if server.suffix == ".py" or importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("two builds are needed: a full one, and the wheel")
    (tmp_path / "bin").mkdir()
    shutil.copy(ollama.resolve(), tmp_path / "bin" / "ollama")
    beside = tmp_path / "lib" / "ollama"  # now the full build is this Ollama's own
    beside.mkdir(parents=True)
    for file in server.resolve().parent.iterdir():
        (beside / file.name).symlink_to(file)
    monkeypatch.setenv("PATH", f"{os.defpath}:/usr/bin:/bin")
    monkeypatch.delenv("LLAMADUEL_LLAMA_SERVER", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no full build in it: the wheel is what is left

    comparison = measured(moe, tmp_path / "runs", arms="ollama,llama-cpp", ollama=str(tmp_path / "bin" / "ollama"))

    rows = table(comparison)
    assert unexplained(comparison) == []
    numbers = sorted(int((build or "")[1:]) for build in rows["build"].values.values())
    assert numbers[0] < numbers[1]
    assert rows["build"].why == (
        f"different builds: b{numbers[0]} and b{numbers[1]}, {numbers[1] - numbers[0]} builds apart",
    )
