"""The parity table: every difference between arms has its reason, or is said loudest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from short_run import options

from harness import facts, render, terminal
from harness.compare import Comparison
from harness.contract import Buffer, Realised, Settings
from harness.parity import Parity, claims, distance, parity
from harness.record import Contender, Run
from harness.testing import engines
from harness.testing.script import Script
from harness.walk import duel

MIB = 1 << 20
LEFT = Settings(context=None, batch=None, ubatch=None, flash_attention=None, kv_k=None, kv_v=None)
Told = Mapping[str, str]


@pytest.fixture(scope="module")
def measured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("parity")
    with engines.fake(folder, Script(itl_s=0.002)):
        return duel(options(model, folder / "runs", arms="ollama,llama-cpp,llama-cpp@cpu-moe"), lambda _: None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One arm: what it was asked for, and what each of its loads told, the probe first."""

    arm: str
    told: Sequence[Told]
    settings: Settings = dataclasses.field(default_factory=Settings)
    asked: Told = dataclasses.field(default_factory=dict)
    explained: Told = dataclasses.field(default_factory=dict)
    buffers: tuple[Buffer, ...] | None = None
    reported: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def realised(self, told: Told) -> Realised:
        return Realised(
            engine="an engine", argv=("engine",), pids=(), weights=None, settings=told, buffers=self.buffers,
            asked=self.asked, explained=self.explained, reported=self.reported,
        )  # fmt: skip


Make = Callable[..., Run]


@pytest.fixture
def made(measured: Comparison) -> Make:
    """A run whose arms told this, and nothing else."""

    def make(*arms: Said, kind: str = "matched") -> Run:
        header, load = measured.header, measured.run.loads[-1]
        contenders = [
            dataclasses.replace(
                header.contenders[0], arm=each.arm, settings=each.settings, realised=each.realised(told)
            )
            for each in arms
            for told in each.told[:1]
        ]
        loads = [
            dataclasses.replace(load, stage="block", arm=each.arm, realised=each.realised(told))
            for each in arms
            for told in each.told[1:]
        ]
        plan = dataclasses.replace(header.plan, settings=(("kind", kind),))
        header = dataclasses.replace(header, contenders=tuple(contenders), plan=plan)
        return dataclasses.replace(measured.run, header=header, loads=tuple(loads))

    return make


def row(run: Run, setting: str) -> Parity:
    return next(each for each in parity(run) if each.setting == setting)


def shown(comparison: Comparison, run: Run) -> tuple[str, str]:
    """Report and terminal of what the arms of this run told."""
    found = dataclasses.replace(comparison, run=run)
    return render.report(found), terminal.table(found, 200)


# ── why ─────────────────────────────────────────────────────────────────────────────────────


def test_what_is_equal_and_as_asked_has_no_reason(made: Make) -> None:
    found = row(made(Said(arm="a", told=[{"batch": "512"}]), Said(arm="b", told=[{"batch": "512"}])), "batch")

    assert found.asked == {"a": "512", "b": "512"}
    assert found.values == {"a": "512", "b": "512"}
    assert (found.differs, found.why, found.unexplained) == (False, (), ())


def test_a_knob_of_one_arm_is_asked_for_differently(made: Make) -> None:
    knob = Said(arm="b,ub=64", told=[{"ubatch": "64"}], settings=Settings(ubatch=64))
    found = row(made(Said(arm="a", told=[{"ubatch": "512"}]), knob), "ubatch")

    assert found.differs
    assert found.why == ("asked for differently: a: 512; b,ub=64: 64",)
    assert found.unexplained == ()


def test_an_engine_that_does_otherwise_than_asked_is_unexplained(made: Make) -> None:
    run = made(Said(arm="a", told=[{"flash_attention": "off"}]), Said(arm="b", told=[{"flash_attention": "on"}]))
    found = row(run, "flash_attention")

    assert found.unexplained == ("a was asked for on and has off",)
    assert found.why == ()


def test_two_engines_that_stray_alike_are_equal_and_still_unexplained(made: Make) -> None:
    found = row(made(*(Said(arm=arm, told=[{"context": "2048"}]) for arm in "ab")), "context")

    assert not found.differs
    assert len(found.unexplained) == 2


def test_an_adapter_that_knows_why_explains_what_strays(made: Make) -> None:
    settings, why = Settings(context=1000), {"context": "rounded up"}
    run = made(*(Said(arm=arm, told=[{"context": "1024"}], settings=settings, explained=why) for arm in "ab"))

    assert row(run, "context").why == ("rounded up",)
    assert row(run, "context").unexplained == ()


def test_stock_settings_are_left_to_each_engine_with_its_words(made: Make) -> None:
    own = {"context": "its tier for 24 GiB"}
    one = Said(arm="a", told=[{"context": "32768"}], settings=LEFT, explained=own)
    run = made(one, Said(arm="b", told=[{"context": "4096"}], settings=LEFT), kind="stock")

    assert row(run, "context").why == ("left to each engine", "a: its tier for 24 GiB")
    assert row(run, "context").asked == {"a": None, "b": None}


def test_what_nobody_asks_for_is_unexplained_under_matched_settings(made: Make) -> None:
    told = [Said(arm="a", told=[{"kv_unified": "true"}]), Said(arm="b", told=[{"kv_unified": "false"}])]

    assert len(row(made(*told), "kv_unified").unexplained) == 1
    assert row(made(*told, kind="stock"), "kv_unified").why == ("left to each engine",)


def test_auto_is_left_to_each_engine_under_matched_settings_too(made: Make) -> None:
    auto = Settings(load_mode="auto")
    run = made(*(Said(arm=mode, told=[{"load_mode": mode}], settings=auto) for mode in ("mmap", "dio")))

    assert row(run, "load_mode").why == ("left to each engine",)


def test_a_knob_of_one_arm_does_not_excuse_a_difference_between_the_others(made: Make) -> None:
    left = Settings(threads=None)
    run = made(
        Said(arm="a", told=[{"threads": "4"}], settings=left),
        Said(arm="b", told=[{"threads": "8"}], settings=left),
        Said(arm="c,t=2", told=[{"threads": "2"}], settings=Settings(threads=2)),
    )

    assert row(run, "threads").why == ("asked for differently: a and b: left to the engine; c,t=2: 2",)
    assert len(row(run, "threads").unexplained) == 1


def test_different_builds_are_named_with_their_distance_and_explain_what_nobody_asks_for(made: Make) -> None:
    run = made(
        Said(arm="a", told=[{"build": "b9509", "samplers": "dist", "batch": "512"}]),
        Said(arm="b", told=[{"build": "b11434", "samplers": "greedy", "batch": "256"}]),
    )

    assert row(run, "build").why == ("different builds: b9509 and b11434, 1925 builds apart",)
    assert row(run, "samplers").why == ("left to each build",)
    assert row(run, "batch").unexplained == ("b was asked for 512 and has 256",), "builds excuse nothing asked for"


def test_builds_without_a_number_have_no_distance() -> None:
    assert distance(["b11434", "main"]) == "main and b11434"


def test_what_the_adapter_asks_for_by_itself_is_read_back_like_a_setting(made: Make) -> None:
    greedy = {"temperature": "0"}
    run = made(
        Said(arm="a", told=[{"temperature": "0"}], asked=greedy),
        Said(arm="b", told=[{"temperature": "0.8"}], asked=greedy),
    )

    assert row(run, "temperature").unexplained == ("b was asked for 0 and has 0.8",)


def test_a_value_that_no_engine_tells_is_no_row_and_one_that_some_tell_no_difference(made: Make) -> None:
    run = made(Said(arm="a", told=[{"threads": "4"}]), Said(arm="mute", told=[{}]))

    assert [each.setting for each in parity(run)] == ["threads"]
    assert row(run, "threads").values == {"a": "4", "mute": None}
    assert not row(run, "threads").differs


def test_a_load_that_differs_from_the_probe_is_shown_and_unexplained(made: Make) -> None:
    batches = [{"batch": "512"}, {"batch": "512"}, {"batch": "256"}]
    found = row(made(Said(arm="a", told=batches), Said(arm="b", told=[{"batch": "512"}])), "batch")

    assert found.values["a"] == "512 / 256"
    assert found.differs
    assert found.unexplained == ("a was asked for 512 and has 512 / 256",)


def test_an_unasked_value_that_changes_between_loads_is_unexplained_under_matched_settings(made: Make) -> None:
    run = made(Said(arm="a", told=[{"kv_unified": "true"}, {"kv_unified": "false"}]))

    assert row(run, "kv_unified").differs
    assert row(run, "kv_unified").unexplained == ("a had not the same in every load",)


@pytest.mark.parametrize(
    ("stage", "differs"), [("burn-in", False), ("search", False), ("probe", False), ("block", True)]
)
def test_only_loads_of_blocks_count_beside_the_probe(made: Make, stage: Any, differs: bool) -> None:
    run = made(Said(arm="a", told=[{"batch": "512"}, {"batch": "256"}]))
    run = dataclasses.replace(run, loads=tuple(dataclasses.replace(load, stage=stage) for load in run.loads))

    assert row(run, "batch").differs is differs


# ── where things lay ────────────────────────────────────────────────────────────────────────


def weights(device_mib: int, host_mib: int) -> tuple[Buffer, ...]:
    return (Buffer("GPU0", "weights", device_mib * MIB, False), Buffer("CPU", "weights", host_mib * MIB, True))


def test_buffers_follow_from_the_placement_asked_for(made: Make) -> None:
    run = made(
        Said(arm="a", told=[{"placed_by": "engine's fit"}], buffers=weights(80, 20)),
        Said(arm="a@cpu-moe", told=[{"placed_by": "user"}], buffers=weights(20, 80)),
    )

    assert row(run, "weights").values == {
        "a": "80.0 MiB GPU0, 20.0 MiB CPU",
        "a@cpu-moe": "20.0 MiB GPU0, 80.0 MiB CPU",
    }
    assert row(run, "weights").why == ("follows from the placement asked for",)
    assert row(run, "placed_by").why == ("asked for differently: a: left to the engine; a@cpu-moe: cpu-moe",)
    assert not any(each.unexplained for each in parity(run))


def test_one_placement_with_other_weights_on_two_engines_is_unexplained(made: Make) -> None:
    run = made(
        Said(arm="a@cpu-moe", told=[{"placed_by": "user"}], buffers=weights(20, 80)),
        Said(arm="b@cpu-moe", told=[{"placed_by": "user"}], buffers=weights(30, 70)),
    )

    assert len(row(run, "weights").unexplained) == 1


def fixed(mode: str = "mmap") -> Settings:
    return Settings(ubatch=64, load_mode=mode)


def test_weights_that_were_fixed_follow_from_how_they_are_loaded_and_from_no_other_setting(made: Make) -> None:
    """A repacked copy is no mapped file; a batch moves no weights."""
    one = Said(arm="a@cpu-moe", told=[{"ubatch": "512", "load_mode": "mmap"}], buffers=weights(20, 80))
    batch = {"ubatch": "64", "load_mode": "mmap"}
    other = Said(arm="a@cpu-moe,ub=64", told=[batch], settings=fixed(), buffers=weights(30, 70))
    read = dataclasses.replace(other, told=[batch | {"load_mode": "none"}], settings=fixed("none"))

    assert len(row(made(one, other), "weights").unexplained) == 1
    assert row(made(one, read), "weights").why == ("follows from load mode",)


def test_weights_that_an_engine_places_follow_from_all_that_takes_room(made: Make) -> None:
    run = made(
        Said(arm="a", told=[{"ubatch": "512"}], buffers=weights(20, 80)),
        Said(arm="a,ub=64", told=[{"ubatch": "64"}], settings=Settings(ubatch=64), buffers=weights(30, 70)),
    )

    assert row(run, "weights").why == ("follows from ubatch",)


def test_engines_that_place_may_be_called_differently(made: Make) -> None:
    run = made(*(Said(arm=arm, told=[{"placed_by": f"the fit of {arm}"}]) for arm in "ab"))

    assert row(run, "placed_by").why == ("left to each engine",)
    assert row(run, "placed_by").unexplained == ()


def test_two_engines_that_choose_may_choose_differently(made: Make) -> None:
    run = made(
        Said(arm="a", told=[{"placed_by": "engine's fit"}], buffers=weights(20, 80)),
        Said(arm="b", told=[{"placed_by": "engine's fit"}], buffers=weights(30, 70)),
    )

    assert row(run, "weights").why == ("left to each engine, whose choice hangs on what is free",)


def test_a_placement_that_the_engine_took_over_is_unexplained(made: Make) -> None:
    run = made(Said(arm="a@ngl=9", told=[{"placed_by": "engine's fit"}], buffers=weights(20, 80)))

    assert row(run, "placed_by").unexplained == ("a@ngl=9 was asked for ngl=9 and has engine's fit",)


# ── claims ──────────────────────────────────────────────────────────────────────────────────


def claim(share: float) -> Mapping[str, Any]:
    return {"claim": f"says {100 * share:.0f} % on the GPU", "claimed_device_share": share}


def sized(run: Run, most_mib: int | None = None) -> Run:
    """Its model has 100 MiB, of which so many can be on a device; older records do not tell."""
    most = None if most_mib is None else most_mib * MIB
    known = dataclasses.replace(run.header.model, size_bytes=100 * MIB, device_weights_bytes=most)
    return dataclasses.replace(run, header=dataclasses.replace(run.header, model=known))


@pytest.mark.parametrize(
    ("share", "device_mib", "host_mib", "wrong"),
    [
        (1.0, 38, 62, True),
        (1.0, 90, 10, False),  # embeddings stay on the host
        (0.4, 40, 60, False),
        (0.9, 40, 60, True),
        (0.0, 40, 60, False),  # nobody boasts with less
    ],
)
@pytest.mark.parametrize("most_mib", [None, 90])
def test_a_claim_is_wrong_where_the_buffers_are_far_below_it(
    made: Make, measured: Comparison, share: float, device_mib: int, host_mib: int, wrong: bool, most_mib: int | None
) -> None:
    run = sized(made(Said(arm="a", told=[{}], buffers=weights(device_mib, host_mib), reported=claim(share))), most_mib)
    (found,) = claims(run)

    assert found.wrong is wrong
    assert found.weights_share == pytest.approx(device_mib / 100)
    report, _ = shown(measured, run)
    assert (
        f"{100 * share:.0f} % on the GPU — **wrong**: by its buffers {device_mib} % of the weights" in report
    ) is wrong


@pytest.mark.parametrize("most_mib", [None, 100])
@pytest.mark.parametrize(
    ("share", "device_mib", "kv_mib", "kv_on_host", "wrong"),
    [
        (1.0, 60, 300, False, True),  # 90 % of all bytes, and yet 40 % of the weights are elsewhere
        (0.9, 60, 300, False, False),  # a part may be one of all bytes
        (1.0, 100, 300, True, True),  # all weights, and yet most bytes are elsewhere
    ],
)
def test_a_claim_of_all_is_one_of_all_weights_and_of_all_bytes(
    made: Make, share: float, device_mib: int, kv_mib: int, kv_on_host: bool, wrong: bool, most_mib: int | None
) -> None:
    kv = Buffer("somewhere", "kv", kv_mib * MIB, kv_on_host)
    parts = (*weights(device_mib, 100 - device_mib), kv)
    (found,) = claims(sized(made(Said(arm="a", told=[{}], buffers=parts, reported=claim(share))), most_mib))

    assert found.wrong is wrong


@pytest.mark.parametrize(("device_mib", "most_mib", "wrong"), [(88, 90, True), (90, 90, False), (88, None, False)])
def test_a_claim_of_all_is_one_of_all_weights_that_can_be_on_a_device(
    made: Make, device_mib: int, most_mib: int | None, wrong: bool
) -> None:
    run = made(Said(arm="a", told=[{}], buffers=weights(device_mib, 100 - device_mib), reported=claim(1.0)))
    (found,) = claims(sized(run, most_mib))

    assert found.wrong is wrong


def test_a_claim_without_buffers_is_shown_and_not_judged(made: Make, measured: Comparison) -> None:
    run = made(Said(arm="a", told=[{}], reported=claim(1.0)))

    assert [(each.wrong, each.weights_share) for each in claims(run)] == [(False, None)]
    assert "its buffers are not known" in shown(measured, run)[0]


def test_the_claim_of_a_runner_with_experts_on_the_host_is_not_believed(model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        given = options(model, tmp_path / "runs", arms="ollama,ollama@cpu-moe", stand_in="all")
        run = duel(given, lambda _: None).run

    found = {each.arm: each for each in claims(run)}
    assert found["ollama@cpu-moe"].wrong
    assert (found["ollama@cpu-moe"].weights_share or 0) < (found["ollama"].weights_share or 0)
    assert {each.text for each in found.values()} == {"/api/ps: 100 % on the GPU"}


# ── how it reads ────────────────────────────────────────────────────────────────────────────


def test_matched_arms_of_a_run_have_nothing_unexplained_and_greedy_is_read_back(measured: Comparison) -> None:
    rows = {each.setting: each for each in parity(measured.run)}

    assert [each.unexplained for each in rows.values() if each.unexplained] == []
    assert set(rows["temperature"].values.values()) == {"0"}
    assert set(rows["seed"].values.values()) == {"1"}
    assert "Settings as read back from the engines are equal on all arms." in terminal.table(measured, 200)
    assert "Equal on all arms, as asked for: context 512; batch 512" in render.report(measured)


def test_what_is_unexplained_stands_first_in_words(made: Make, measured: Comparison) -> None:
    run = made(
        Said(arm="a", told=[{"batch": "512", "ubatch": "512", "threads": "1"}], settings=Settings(threads=1)),
        Said(arm="b", told=[{"batch": "512", "ubatch": "256", "threads": "4"}], settings=Settings(threads=4)),
    )
    report, table = shown(measured, run)
    section = report[report.index("## Settings") :]

    assert section.index("**Unexplained:**") < section.index("| setting")
    assert "- **ubatch**: b was asked for 512 and has 256" in section
    assert section.index("| ubatch ≠") < section.index("| threads ≠"), "the unexplained row stands first"
    assert "256 (asked 512)" in section
    assert "- threads: asked for differently: a: 1; b: 4" in section
    assert "UNEXPLAINED settings: ubatch: b was asked for 512 and has 256." in table
    assert "Settings that differ, asked for differently: threads (a 1, b 4)." in table


def test_settings_that_nobody_read_back_are_not_called_equal(made: Make, measured: Comparison) -> None:
    report, table = shown(measured, made(Said(arm="a", told=[{}]), Said(arm="b", told=[{}])))

    assert "equal on all arms" not in table
    assert "Settings cannot be read back from a, b." in table
    assert "No engine told its settings." in report


def test_an_arm_that_tells_nothing_is_named_beside_those_that_do(made: Make, measured: Comparison) -> None:
    report, table = shown(measured, made(Said(arm="a", told=[{"batch": "512"}]), Said(arm="b", told=[{}])))

    assert "Settings as read back from a are as asked for." in table
    assert "Settings cannot be read back from b." in table
    assert "Not told by b: batch." in report


def test_scripts_get_every_row(measured: Comparison) -> None:
    rows = {each["setting"]: each for each in facts.as_json(measured)["parity"]}

    arms = [each.arm for each in measured.header.contenders if each.realised]
    assert rows["batch"] == {
        "setting": "batch",
        "asked": dict.fromkeys(arms, "512"),
        "values": dict.fromkeys(arms, "512"),
        "differs": False,
        "unexplained": False,
        "why": None,
    }


def test_records_from_before_there_was_a_table_can_still_be_read(made: Make) -> None:
    old = Realised(engine="e", argv=(), pids=(), weights=None, settings={"batch": "512", "slots": "1"})
    run = made(Said(arm="a", told=[{}]))
    contender: Contender = dataclasses.replace(run.header.contenders[0], realised=old)
    run = dataclasses.replace(run, header=dataclasses.replace(run.header, contenders=(contender,)))

    assert [(each.setting, each.asked["a"]) for each in parity(run)] == [("batch", "512"), ("slots", None)]
    assert claims(run) == ()
