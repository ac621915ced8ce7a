"""Where a real llama.cpp puts a sweep of placements, on a stand-in device and on a build that sees none.

A small mixture of experts of 24 layers has every placement of a large one. Nothing here asserts a speed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
from test_real import found, measured

import harness
from backends import embedded_server
from harness import model as models
from harness import placement, synth
from harness.contract import Arm, Engine, Placement, Realised, Settings
from harness.display import quiet
from harness.errors import RunRefused
from harness.model import Model
from harness.options import collect
from harness.plan import Status
from harness.registry import backend

pytestmark = pytest.mark.engine
LAYERS = 24
BEYOND = ("llama-cpp@ncmoe=28", "llama-cpp@ncmoe=999", "llama-cpp@cpu-moe")  # more than there is, and all of them
SETTINGS = Settings(
    context=1024, ubatch=512, threads=1, flash_attention="off", load_mode="none", stand_in_bytes=4 << 30
)
NEXT_STEP = "this build has no RPC, so it does not see the stand-in device; run `llamaduel engines install llama-cpp`"


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Model:
    shape = dataclasses.replace(synth.scaled(synth.SHAPES["tiny"], 30 << 20), layers=LAYERS)
    return models.load(synth.write(tmp_path_factory.mktemp("model") / "layered.gguf", shape))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return found("llama-cpp", **{"stand-in": "1"})


def placed(engine: Engine, model: Model, where: Placement, log: Path) -> Realised:
    """What the engine did with one placement, after its first token."""
    arm = Arm("llama-cpp", where)
    with backend(arm.backend).open(engine, model.file, arm, SETTINGS, log) as session:
        return session.realised()


def test_every_n_puts_on_the_device_what_was_predicted(engine: Engine, layered: Model, tmp_path: Path) -> None:
    seen = []
    for number in range(LAYERS + 1):
        where = Placement("ncmoe", number)
        predicted = placement.predict(layered, where, SETTINGS, device=True)
        assert predicted is not None

        realised = placed(engine, layered, where, tmp_path / f"{number}.log")

        host, device = placement.realised_bytes(realised.buffers) or (0, 0)
        assert device == pytest.approx(predicted.device_bytes, rel=0.01), where
        assert host == pytest.approx(predicted.host_bytes, rel=0.01), where
        assert placement.judge(predicted, realised.buffers) is None, where
        compute = sum(each.bytes for each in realised.buffers or () if each.kind == "compute" and not each.on_host)
        assert compute == pytest.approx(predicted.compute_bytes, rel=0.25), where
        seen.append(device)
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) == LAYERS + 1


def test_an_n_beyond_the_layers_puts_nothing_elsewhere(engine: Engine, layered: Model, tmp_path: Path) -> None:
    all_of_them = placed(engine, layered, Placement("ncmoe", LAYERS), tmp_path / "all.log").buffers

    for where in (Placement("ncmoe", LAYERS + 4), Placement("ncmoe", 999), Placement("cpu-moe")):
        assert placed(engine, layered, where, tmp_path / f"{where}.log").buffers == all_of_them


def test_all_names_of_one_placement_are_one_arm_that_runs_once(engine: Engine, layered: Model, tmp_path: Path) -> None:
    arms = ",".join(("llama-cpp@ncmoe=0", f"llama-cpp@ncmoe={LAYERS}", *BEYOND))
    options = {"model": str(layered.file.path), "stand_in": "all", "context": "1024"}
    planned = {each["arm"]: each for each in harness.preview_run(collect(options | {"arms": arms}), quiet)["arms"]}
    assert {arm: each["alias_of"] for arm, each in planned.items() if each["status"] == "ALIAS"} == dict.fromkeys(
        BEYOND, f"llama-cpp@ncmoe={LAYERS}"
    )

    comparison = measured(layered.file.path, tmp_path, stand_in="all", arms=arms)

    assert {comparison.row(arm).status.word for arm in BEYOND} == {Status.ALIAS}
    assert {load.arm for load in comparison.run.loads} == {"llama-cpp@ncmoe=0", f"llama-cpp@ncmoe={LAYERS}"}


# ── a build without RPC ─────────────────────────────────────────────────────────────────────


@pytest.fixture
def wheel() -> str:
    if not importlib.util.find_spec("xllamacpp"):
        pytest.skip("the embedded engine is an optional extra")
    return embedded_server.__file__


def test_on_a_build_without_rpc_a_sweep_changes_nothing_and_says_what_to_do(
    wheel: str, layered: Model, tmp_path: Path
) -> None:
    with pytest.raises(RunRefused) as refused:
        measured(layered.file.path, tmp_path, stand_in="all", llama_server=wheel, arms=f"llama-cpp@ncmoe=0..{LAYERS}/6")

    said = str(refused.value)
    nothing = "llama-cpp@ncmoe=6, llama-cpp@ncmoe=12, llama-cpp@ncmoe=18, llama-cpp@ncmoe=24: its flags changed nothing"
    assert "llama-cpp@ncmoe=0: 0 B of weights on the device" in said
    assert f"{nothing}: the buffers are those of llama-cpp@ncmoe=0; {NEXT_STEP}" in said
    assert said.count(NEXT_STEP) == 2


def test_beside_the_cpu_the_whole_sweep_is_the_cpu_and_a_choice_of_the_engine_has_nothing_to_choose(
    wheel: str, layered: Model, tmp_path: Path
) -> None:
    arms = "llama-cpp@cpu,llama-cpp@ncmoe=0,llama-cpp@ncmoe=12,llama-cpp@cpu-moe,llama-cpp"

    comparison = measured(layered.file.path, tmp_path, stand_in="all", llama_server=wheel, arms=arms)

    rows = {row.arm: row for row in comparison.rows}
    sweep = arms.split(",")[1:4]
    assert [rows[arm].status.word for arm in sweep] == [Status.NOOP] * 3
    assert all(NEXT_STEP in rows[arm].status.reason for arm in sweep)
    assert rows["llama-cpp"].status.word is Status.UNAVAILABLE
    assert "has no RPC" in rows["llama-cpp"].status.reason
    assert rows["llama-cpp@cpu"].output_ok


def test_hosts_by_rpc_stay_unavailable_on_such_a_build(wheel: str, layered: Model, tmp_path: Path) -> None:
    arms = "llama-cpp@cpu,llama-cpp@ngl=99,rpc=127.0.0.1:50052"

    comparison = measured(layered.file.path, tmp_path, llama_server=wheel, arms=arms)

    row = comparison.row("llama-cpp@ngl=99,rpc=127.0.0.1:50052")
    assert row.status.word is Status.UNAVAILABLE
    assert "has no RPC" in row.status.reason
