"""Two runs: what changed, what differs between them, and when nothing may be said or a gate stays shut."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from played_run import (
    ARMS,
    GPU,
    MACHINE,
    OTHER,
    REFERENCE,
    THIRD,
    TPS,
    a_header,
    contender,
    engine,
    later,
    played,
    written,
)

from harness import answer, baseline, changes, differences, record, terminal, verdict, words
from harness.changes import Changes, compare_runs
from harness.cli import main
from harness.compare import compare
from harness.contract import Buffer, Device, Settings
from harness.errors import RunRefused, UsageError
from harness.gpu import Gpu
from harness.machine import Machine
from harness.options import Options
from harness.plan import ArmStatus, Plan, Status
from harness.record import Contender, Header, Run
from harness.testing import engines
from harness.testing.script import Script
from harness.walk import duel


def since(after: Run, before: Run | None = None) -> Changes:
    return compare_runs(compare(before or played(a_header())), compare(after))


def of(found: Changes, arm: str = OTHER) -> changes.Change:
    return next(each for each in found.changes if each.arm == arm)


# ── what changed ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("factor", "noise", "word", "regression"),
    [
        (0.90, 0.002, "SLOWER", True),
        (0.96, 0.004, "SLOWER", False),  # slower in any case, and by more than 3 % only perhaps
        (0.99, 0.002, "SAME", False),
        (1.00, 0.002, "SAME", False),
        (1.00, 0.100, "INCONCLUSIVE", False),
        (1.10, 0.002, "FASTER", False),
    ],
)
def test_a_loss_beyond_the_margin_is_a_regression(factor: float, noise: float, word: str, regression: bool) -> None:
    found = since(played(later(), {OTHER: factor * TPS[OTHER]}, noise), played(a_header(), noise=noise))

    change = of(found)
    assert (change.word, change.regression) == (word, regression)
    assert change.low is not None
    assert change.high is not None
    assert change.low < factor < change.high
    assert found.regression is regression
    assert found.decided
    assert f"{change.ratio:.3f}× ({change.low:.3f}–{change.high:.3f})" in terminal.changes_table(found)
    assert answer.change_sentence(change) in " ".join(terminal.changes_table(found).split())


def test_the_interval_is_that_of_welch_at_the_joint_level() -> None:
    from scipy import stats

    longer = later(max_blocks=8)
    longer = dataclasses.replace(longer, plan=dataclasses.replace(longer.plan, looks=(8,)))
    before, after = compare(played(a_header(), noise=0.02)), compare(played(longer, noise=0.01))
    found = of(compare_runs(before, after))

    ratios = [
        [math.log(a.decode_tps / b.decode_tps) for a, b in zip(run.row(OTHER).loads, run.reference.loads, strict=True)]
        for run in (before, after)
    ]
    assert [*map(len, ratios)] == [6, 8]
    welch = stats.ttest_ind(ratios[1], ratios[0], equal_var=False)
    bounds = welch.confidence_interval(1 - verdict.CHANGE_ALPHA / 2)  # two changes share the error
    assert math.log(found.low or 0) == pytest.approx(float(bounds.low))
    assert math.log(found.high or 0) == pytest.approx(float(bounds.high))


def test_runs_without_any_noise_have_an_interval_too() -> None:
    same = of(since(played(later(), noise=0.0), played(a_header(), noise=0.0)))
    slow = of(since(played(later(), {OTHER: 30.0}, noise=0.0), played(a_header(), noise=0.0)))

    assert (same.word, slow.word) == ("SAME", "SLOWER")
    assert slow.high == pytest.approx(0.75)


def test_the_level_counts_the_changes_that_are_judged() -> None:
    everything = since(played(later()))
    one = since(played(later(contender(REFERENCE), contender(OTHER))))

    assert everything.level == "joint 95 % over the looks of both runs and 2 changes"
    assert one.level == "joint 95 % over the looks of both runs and 1 change"
    assert f"Only the earlier run was asked for {THIRD}." in one.notes


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            (contender(REFERENCE),),
            "only the reference, llama-cpp, is in both runs, and no arm to compare through it",
        ),
        ((contender("ollama"),), "no arm with numbers of its own is in both runs"),
    ],
)
def test_two_runs_with_nothing_to_compare_say_what_they_share(others: tuple[Contender, ...], said: str) -> None:
    found = since(played(later(*others), {"ollama": 20.0}))

    assert found.changes == ()
    assert f"{said[0].upper()}{said[1:]}." in " ".join(terminal.changes_table(found).split())
    assert answer.undecided(found) == f"not one arm could be judged, so no regression is excluded: {said}"


def test_a_loss_of_all_arms_is_not_visible_and_that_is_said() -> None:
    halved = since(played(later(), {arm: tps / 2 for arm, tps in TPS.items()}))

    assert {change.word for change in halved.changes} == {"SAME"}
    assert f"A change that hits all arms alike, {REFERENCE} too, is not visible here." in halved.notes
    assert halved.before.reference_tps is not None
    assert halved.after.reference_tps is not None
    table = terminal.changes_table(halved)
    assert words.spread(halved.before.reference_tps) in table
    assert words.spread(halved.after.reference_tps) in table
    assert "reference (confounded)" in table


def test_a_change_below_the_noise_floor_of_an_amber_run_is_no_claim() -> None:
    noisy = played(later(), {OTHER: 0.93 * TPS[OTHER]}, twin=1.006)
    amber = compare(noisy)
    loose = dataclasses.replace(
        amber.judgement,
        state=verdict.State("AMBER", ("a reason.",)),
        twin=dataclasses.replace(twin, contrast=dataclasses.replace(twin.contrast, half_width=0.1))
        if (twin := amber.judgement.twin)
        else None,
    )
    found = of(compare_runs(compare(played(a_header())), dataclasses.replace(amber, judgement=loose)))

    assert (found.word, found.regression) == ("INCONCLUSIVE", False)
    assert "noise floor of ±10.0 %" in found.reason


def test_a_run_is_not_compared_with_itself() -> None:
    with pytest.raises(RunRefused, match="are one run; name another"):
        since(played(a_header()))


def test_runs_in_the_wrong_order_are_told() -> None:
    found = since(played(a_header()), played(later()))
    assert "The first of the two runs began after the second." in found.notes


# ── arms that have no numbers ───────────────────────────────────────────────────────────────


def failed(word: Status, arm: str = OTHER) -> Contender:
    return contender(arm, status=ArmStatus(word, "why not"), realised=None)


@pytest.mark.parametrize("word", [Status.DOES_NOT_FIT, Status.CRASHED, Status.TIMEOUT, Status.VOID, Status.NOOP])
def test_an_arm_that_its_engine_no_longer_runs_is_lost(word: Status) -> None:
    found = since(played(later(contender(REFERENCE), failed(word), contender(THIRD))))

    assert (of(found).word, of(found).regression) == ("LOST", True)
    assert answer.change_sentence(of(found)) == f"{OTHER} is lost, a regression: it ran before, now {word}: why not."
    assert of(found, THIRD).word == "SAME"


def test_an_arm_that_dies_in_the_blocks_is_lost_even_where_nothing_else_may_be_said() -> None:
    found = since(played(later(preset="quick"), dies=OTHER))

    assert found.after.state == "SCREENING"
    assert (of(found).word, of(found, THIRD).word) == ("LOST", "NOT_COMPARABLE")
    assert found.regression


@pytest.mark.parametrize(
    ("since_block", "why"),
    [(1, "it ran before, now the reference has no loads"), (7, "in the later run the reference has no loads")],
)
@pytest.mark.parametrize("fault", ["dies", "mute"])
def test_a_reference_that_no_longer_runs_is_lost_and_leaves_the_others_without_a_verdict(
    fault: str, since_block: int, why: str
) -> None:
    fails: dict[str, Any] = {fault: REFERENCE, "since_block": since_block}
    found = since(played(later(max_blocks=8), noise=0.1, **fails))

    reference = of(found, REFERENCE)
    assert (reference.word, reference.regression) == ("LOST", True)
    assert ("it died" if fault == "dies" else "too few valid requests") in reference.reason
    assert (found.regression, found.level) == (True, None)
    for arm in (OTHER, THIRD):
        assert of(found, arm).word == "NOT_COMPARABLE"
        assert of(found, arm).reason == why
    table = terminal.changes_table(found)
    assert "nan" not in table
    assert "confounded" not in table
    assert f"{REFERENCE} is lost, a regression: it ran before, now " in table


def test_through_a_reference_that_never_ran_nothing_is_judged() -> None:
    found = since(played(later()), played(a_header(), dies=REFERENCE))

    assert (found.regression, found.decided) == (False, False)
    assert {change.word for change in found.changes} == {"NOT_COMPARABLE"}
    assert of(found).reason == "it had no numbers before (the reference has no loads)"
    assert of(found, REFERENCE).reason == "it had no numbers before (CRASHED: it died)"
    assert "nan" not in terminal.changes_table(found)
    json.dumps(record.to_json(found), allow_nan=False)


def test_an_arm_of_which_no_load_counts_any_more_is_lost() -> None:
    found = since(played(later(), mute=OTHER))

    assert (of(found).word, found.regression) == ("LOST", True)
    assert of(found).reason.startswith("it ran before, now UNSTABLE: too few valid requests")
    assert of(found, THIRD).word == "SAME"


def test_a_run_that_was_stopped_in_its_first_block_loses_nothing() -> None:
    whole = played(later())
    found = since(dataclasses.replace(whole, loads=whole.loads[:2]))

    assert not found.regression
    assert {change.word for change in found.changes} == {"NOT_COMPARABLE"}
    assert of(found).reason == "it ran before, now no block is complete"


def test_on_another_machine_a_failure_is_no_regression() -> None:
    after = later(contender(REFERENCE), failed(Status.DOES_NOT_FIT), contender(THIRD))
    small = dataclasses.replace(MACHINE, gpus=(dataclasses.replace(GPU, memory_bytes=4 << 30),))
    found = since(played(dataclasses.replace(after, machine=small)))

    assert (of(found).word, found.regression) == ("NOT_COMPARABLE", False)
    assert "DOES_NOT_FIT" in of(found).reason


def test_an_engine_that_is_not_here_or_a_placement_that_is_another_arms_is_no_regression() -> None:
    for status in (ArmStatus(Status.UNAVAILABLE, "get it"), ArmStatus(Status.ALIAS, "no GPU", REFERENCE)):
        gone = contender(OTHER, status=status, realised=None)
        found = since(played(later(contender(REFERENCE), gone, contender(THIRD))))
        assert (of(found).word, found.regression) == ("NOT_COMPARABLE", False)
        assert "it ran before, now " in of(found).reason


def test_an_arm_that_never_had_numbers_says_so_and_an_alias_in_both_is_no_row() -> None:
    alias = contender(THIRD, status=ArmStatus(Status.ALIAS, "no GPU", REFERENCE), realised=None)
    before = played(a_header(contender(REFERENCE), failed(Status.CRASHED), alias))

    found = since(played(later(contender(REFERENCE), contender(OTHER), alias)), before)
    again = since(played(later(contender(REFERENCE), failed(Status.CRASHED), alias)), before)

    assert [change.arm for change in found.changes] == [OTHER]
    assert of(found).reason == "it had no numbers before (CRASHED: why not)"
    assert of(again).reason == "it had no numbers before (CRASHED: why not), and has none now (CRASHED: why not)"
    assert not found.decided
    assert not again.regression


# ── what may not be judged ──────────────────────────────────────────────────────────────────


def test_without_a_common_reference_numbers_stand_side_by_side() -> None:
    found = since(played(later(reference=THIRD)))

    assert found.reference is None
    assert found.level is None
    assert {change.word for change in found.changes} == {"NOT_COMPARABLE"}
    assert all(change.ratio is None and change.before_tps and change.after_tps for change in found.changes)
    assert not found.decided
    assert f"The reference was {REFERENCE} and is {THIRD}: the two days are confounded" in found.notes[0]


@pytest.mark.parametrize("which", ["earlier", "later"])
def test_a_run_that_ranks_nothing_gives_no_verdict(which: str) -> None:
    twin = {which: 0.9}
    before = played(a_header(), twin=twin.get("earlier", 1.0))
    found = since(played(later(), twin=twin.get("later", 1.0)), before)

    assert of(found).word == "NOT_COMPARABLE"
    assert of(found).reason == f"the {which} run is RED and ranks nothing"
    assert not found.decided
    assert not found.regression


def test_weights_that_were_not_read_in_one_run_forbid_a_verdict() -> None:
    blind = contender(OTHER, weights_digest=None)
    found = since(played(later(contender(REFERENCE), blind, contender(THIRD))))

    assert of(found).reason == "in the later run the weights that were loaded are not proven to be the same"
    assert of(found, THIRD).word == "SAME"


# ── what differs ────────────────────────────────────────────────────────────────────────────


def changed_arm(arm: str, **changes: Any) -> Header:
    return later(*(contender(each, **(changes if each == arm else {})) for each in ARMS))


def changed_machine(**changes: Any) -> Header:
    return dataclasses.replace(later(), machine=dataclasses.replace(MACHINE, **changes))


def changed_gpu(**changes: Any) -> Header:
    return changed_machine(gpus=(dataclasses.replace(GPU, **changes),))


def test_equal_runs_differ_in_nothing() -> None:
    found = since(played(later()))

    assert found.differences == ()
    assert "Nothing that was recorded differs beside the speeds." in terminal.changes_table(found)


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (later(weights_digest="v" * 64), "weights digest was aaaaaaaaaaaa, is vvvvvvvvvvvv"),
        (later(prompts_digest="q" * 64), "prompts digest was bbbbbbbbbbbb, is qqqqqqqqqqqq"),
        (later(out_tokens=24), "out tokens was 16, is 24"),
        (later(warmups=0), "warmups was 1, is 0"),
        (later(settings={"kind": "stock", "prompt_tokens": 512}), "setting kind was matched, is stock"),
        (later(settings={"kind": "matched", "prompt_tokens": 64}), "setting prompt_tokens was 512, is 64"),
        (changed_machine(cpu="another CPU"), "cpu was a CPU, is another CPU"),
        (changed_machine(physical_cores=4), "physical cores was 8, is 4"),
        (changed_gpu(name="another card"), "GPU name was a card, is another card"),
        (changed_gpu(memory_bytes=4 << 30), "GPU memory was 8.00 GiB, is 4.00 GiB"),
        (changed_machine(gpus=()), "GPU name was a card, is none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_task_or_another_machine_forbids_every_verdict(after: Header, sentence: str) -> None:
    found = since(played(after))

    assert sentence in [str(each) for each in found.differences if each.forbids]
    assert {change.word for change in found.changes} == {"NOT_COMPARABLE"}
    assert all(sentence in change.reason for change in found.changes)
    assert f"Differs, and forbids a verdict: {sentence}" in terminal.changes_table(found)


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (changed_arm(OTHER, settings=Settings(threads=3)), "llama-cpp@cpu-moe: setting threads was –, is 3"),
        (
            changed_arm(OTHER, placement="elsewhere"),
            "llama-cpp@cpu-moe: placement was where llama-cpp@cpu-moe puts it, is elsewhere",
        ),
        (
            changed_arm(OTHER, engine=engine(devices=(Device("Vulkan0"),))),
            "llama-cpp@cpu-moe: kinds of device was CUDA, is Vulkan",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_differs_of_one_arm_forbids_a_verdict_on_that_arm(after: Header, sentence: str) -> None:
    found = compare_runs(compare(played(a_header())), compare(played(after)))

    assert sentence in [str(each) for each in found.differences if each.forbids]
    assert (of(found).word, of(found, THIRD).word) != ("NOT_COMPARABLE", "NOT_COMPARABLE")
    assert of(found).word == "NOT_COMPARABLE"


def test_another_setting_of_the_reference_forbids_every_verdict() -> None:
    found = since(played(changed_arm(REFERENCE, settings=Settings(threads=3))))
    assert {change.word for change in found.changes} == {"NOT_COMPARABLE"}


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (changed_arm(OTHER, engine=engine("b2")), "llama-cpp@cpu-moe: engine was llama.cpp b1, is llama.cpp b2"),
        (
            changed_arm(OTHER, engine=engine(runner="x b3")),
            "llama-cpp@cpu-moe: engine was llama.cpp b1, is llama.cpp b1 + runner x b3",
        ),
        (
            changed_arm(OTHER, engine=engine(origin="cache")),
            "llama-cpp@cpu-moe: origin of the engine was PATH, is cache",
        ),
        (changed_gpu(driver="590.1"), "GPU driver was 580.1, is 590.1"),
        (changed_gpu(power_limit_w=200.0), "GPU power limit was 300 W, is 200 W"),
        (changed_machine(kernel="6.2"), "kernel was 6.1, is 6.2"),
        (changed_machine(memory_bytes=32 << 30), "memory was 64.0 GiB, is 32.0 GiB"),
        (changed_machine(governor="powersave"), "governor was –, is powersave"),
        (changed_machine(on_ac_power=False), "on ac power was –, is no"),
        (changed_machine(cpu_flags=("avx2", "fma")), "cpu flags was –, is avx2, fma"),
        (later(margin=0.05), "margin was 3 %, is 5 %"),
        (later(requests=5), "requests was 3, is 5"),
        (later(max_blocks=8), "looks was 6, is 6, 8"),
        (later(twin=False), "twin was yes, is no"),
        (
            later(settings={"kind": "matched", "prompt_tokens": 512, "pool": "1,2"}),
            "setting pool was –, is 1,2",
        ),
        (dataclasses.replace(later(), versions={"llamaduel": "0.2.0"}), "version of llamaduel was 0.1.0, is 0.2.0"),
        (dataclasses.replace(later(), options={}), "waits for a quiet machine was no, is yes"),
        (
            dataclasses.replace(later(), model=dataclasses.replace(later().model, sha256="t" * 64)),
            "model file was cccccccccccc, is tttttttttttt",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_differences_are_named_and_leave_the_verdict(after: Header, sentence: str) -> None:
    found = since(played(after))

    assert sentence in [str(each) for each in found.differences]
    assert not any(each.forbids for each in found.differences)
    assert {change.word for change in found.changes} == {"SAME"}
    assert f"Differs: {sentence}" in terminal.changes_table(found)


def test_what_an_engine_reads_back_and_where_it_put_the_weights_are_named() -> None:
    realised = contender(OTHER).realised
    assert realised is not None
    moved = dataclasses.replace(
        realised, settings={"n_ctx": "8192"}, buffers=(Buffer("CPU", "weights", 3 << 30, on_host=True),)
    )
    found = since(played(changed_arm(OTHER, realised=moved)))

    assert {str(each) for each in found.differences} == {
        f"{OTHER}: setting n_ctx as read back was 4096, is 8192",
        f"{OTHER}: memory on the host was 1.00 GiB, is 3.00 GiB",
        f"{OTHER}: memory on the device was 2.00 GiB, is 0 B",
    }
    assert of(found).word == "SAME"


def test_no_fact_of_a_machine_or_its_gpus_goes_unnamed() -> None:
    """Also one that is recorded only from tomorrow on; what is free at the moment is none."""
    for kind, of_header in ((Machine, changed_machine), (Gpu, changed_gpu)):
        for name in {field.name for field in dataclasses.fields(kind)} - {"gpus", "available_bytes", "warnings"}:
            found = differences.between(a_header(), of_header(**{name: "other"}))
            assert [each.after for each in found] == ["other"], name


def test_no_fact_of_a_plan_goes_unnamed() -> None:
    """Arms are rows, and the order of loads is another in every run."""
    old = a_header()
    aside = {"arms", "aside", "reference", "twin", "contrasts", "aliases", "seed", "settings", "format"}
    for name in {field.name for field in dataclasses.fields(Plan)} - aside:
        new = a_header()
        object.__setattr__(new.plan, name, ("other",))  # a plan refuses what it cannot run
        assert [each.after for each in differences.between(old, new)] == ["other"], name


def test_another_build_of_the_reference_is_told() -> None:
    found = since(played(changed_arm(REFERENCE, engine=engine("b2"))))
    assert (
        "The reference is another build (llama.cpp b1, then llama.cpp b2), so a change may be its own." in found.notes
    )


def test_one_difference_of_several_arms_is_one_line() -> None:
    found = since(played(later(*(contender(arm, engine=engine("b2")) for arm in ARMS))))
    line = f"Differs: {REFERENCE}, {OTHER}, {THIRD}: engine was llama.cpp b1, is llama.cpp b2"
    assert line in terminal.changes_table(found)


# ── the command ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("after", "code", "gated"),
    [
        (played(later()), 0, 0),
        (played(later(), {OTHER: 0.9 * TPS[OTHER]}), 0, 4),
        (played(later(contender(REFERENCE), failed(Status.CRASHED), contender(THIRD))), 0, 4),
        (played(later(), dies=REFERENCE), 0, 4),
        (played(later(), twin=0.9), 0, 3),
        (played(later(preset="quick")), 0, 1),
        (played(later(reference=THIRD)), 0, 1),
    ],
    ids=["same", "slower", "lost", "reference lost", "red", "screening", "no common reference"],
)
def test_compare_fails_only_where_it_is_asked_to(
    after: Run, code: int, gated: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(written(played(a_header()), tmp_path / "a")), str(written(after, tmp_path / "b"))]

    assert main(["compare", *folders]) == code
    shown = capsys.readouterr()
    assert main(["compare", *folders, "--fail-on-regression"]) == gated
    again = capsys.readouterr()
    assert again.out == shown.out
    assert shown.err == ""
    assert ("not one arm could be judged" in again.err) == (gated == 1)


def test_compare_in_json_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = written(played(changed_arm(OTHER, engine=engine("b2")), {OTHER: 0.9 * TPS[OTHER]}), tmp_path / "b")
    main(["compare", str(written(played(a_header()), tmp_path / "a")), str(slow), "--json"])

    found = json.loads(capsys.readouterr().out)
    assert found["regression"] is True
    assert found["decided"] is True
    assert found["reference"] == REFERENCE
    assert found["before"]["run_dir"] == str(tmp_path / "a")
    assert found["after"]["reference_tps"]["value"] == pytest.approx(50, rel=0.01)
    assert found["differences"] == [
        {"fact": "engine", "arm": OTHER, "before": "llama.cpp b1", "after": "llama.cpp b2", "forbids": False}
    ]
    (change,) = (each for each in found["changes"] if each["arm"] == OTHER)
    assert change["word"] == "SLOWER"
    assert change["low"] < change["ratio"] < change["high"] < 1
    assert change["regression"] is True
    assert {"before_tps", "after_tps", "attained_margin", "margin", "reason"} <= change.keys()


# ── a run with a baseline ───────────────────────────────────────────────────────────────────

SHORT = {
    "no_wait": True,
    "out_tokens": 16,
    "prompt_tokens": 64,
    "context": 512,
    "arms": "llama-cpp@ngl=99,llama-cpp@cpu-moe",
}
CARD = Script(itl_s=0.004, devices=(("CUDA0", "a card", 8000),))


@pytest.fixture(scope="module")
def begun(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Header:
    """The header of a real run with fake engines: what a baseline on this machine looks like."""
    folder = tmp_path_factory.mktemp("begun")
    given = Options(model=str(model), out=str(folder / "runs"), preset="quick", **SHORT)  # type: ignore[arg-type]
    with engines.fake(folder, CARD):
        return duel(given, lambda _: None).header


def finished(begun: Header, folder: Path, against: Path | None = None, moe: float = 40.0) -> Path:
    """A finished run of six blocks with speeds that are given, as the header says it began."""
    drawn = dataclasses.replace(begun.plan, preset="confirm", looks=(6,), max_blocks=6)
    given = begun.options | {"preset": "confirm"} | ({"fail_on_regression": str(against)} if against else {})
    header = dataclasses.replace(
        begun,
        plan=drawn,
        plan_digest=drawn.digest,
        options=given,
        started="2026-01-02T00:00:00+00:00" if against else "2026-01-01T00:00:00+00:00",
    )
    speeds = {"llama-cpp@ngl=99": 50.0, "llama-cpp@cpu-moe": moe}
    return written(played(header, speeds), folder)


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[engines.Engines]:
    with engines.fake(tmp_path, Script(dies_loading="loaded", devices=CARD.devices)) as found:
        yield found


def test_a_run_prints_what_changed_since_its_baseline_and_fails_on_a_regression(
    begun: Header, fakes: engines.Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = finished(begun, tmp_path / "base")
    for name, moe, code in (("same", 40.0, 0), ("slow", 35.0, 4)):
        folder = finished(begun, tmp_path / name, base, moe)
        assert main(["run", "--resume", str(folder), "--no-wait"]) == code
        shown = " ".join(capsys.readouterr().out.split())
        assert shown.index("Report: ") < shown.index("llama-cpp@cpu-moe ", shown.index("Report: "))
        assert ("a regression" in shown) == (code == 4)
        assert main(["run", "--resume", str(folder), "--no-wait", "--json"]) == code
        found = json.loads(capsys.readouterr().out)
        assert found["changes"]["regression"] is (code == 4)
        assert found["changes"]["before"]["run_dir"] == str(base)


def test_an_arm_that_dies_since_the_baseline_fails_the_run(
    begun: Header, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = finished(begun, tmp_path / "base")
    short = ["--no-wait", "--prompt-tokens=64", "--context=512", f"--arms={SHORT['arms']}", "--budget=1s"]
    dies = [{"when": "--cpu-moe", "dies_loading": "GGML_ASSERT(false) failed", "exit_code": -6}]
    with engines.fake(tmp_path, CARD, cases=dies):
        out = f"--out={tmp_path / 'runs'}"
        code = main(["run", str(model), *short, out, f"--fail-on-regression={base}", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert code == 4
    (change,) = found["changes"]["changes"]
    assert (change["arm"], change["word"]) == ("llama-cpp@cpu-moe", "LOST")
    header = record.read(Path(found["run_dir"])).header
    assert header.plan.out_tokens == begun.plan.out_tokens, "an answer is as long as in the baseline"
    assert header.options["reference"] == "llama-cpp@ngl=99"
    assert "fail-on-regression" not in header.command, "the command repeats the run; what it is held against is no part"


def test_a_reference_that_dies_in_the_probe_is_a_regression_by_itself(
    begun: Header, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = finished(begun, tmp_path / "base")
    short = ["--no-wait", "--prompt-tokens=64", "--context=512", f"--arms={SHORT['arms']}", "--budget=1s"]
    dies = dataclasses.replace(CARD, dies_loading="GGML_ASSERT(false) failed", exit_code=-6)
    with engines.fake(tmp_path, dies, cases=[{"when": "--cpu-moe", "dies_loading": None}]):
        code = main(["run", str(model), *short, f"--out={tmp_path / 'runs'}", f"--fail-on-regression={base}"])

    said = capsys.readouterr().err
    assert code == 4
    assert f"llama-cpp@ngl=99, the reference of the baseline {base}, does not run any more (CRASHED: " in said
    assert "that is a regression by itself" in said
    assert "--reference" not in said
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"the engines' logs are in {folder / 'engines'}" in said
    assert list((folder / "engines").iterdir())


def test_the_reference_that_does_not_run_without_a_baseline_is_to_be_named_anew() -> None:
    crashed = ArmStatus(Status.CRASHED, "it died")
    assert str(baseline.no_reference(Options(), OTHER, crashed)) == (
        f"the reference {OTHER} cannot run (it died); name another with --reference"
    )


def test_a_baseline_is_found_from_every_folder(
    begun: Header, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = finished(begun, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    followed = baseline.follow(Options(model=str(model), fail_on_regression="base", **SHORT))  # type: ignore[arg-type]
    assert followed.fail_on_regression == str(base)

    run = finished(begun, tmp_path / "run", base)
    for given in ("base", str(base), None):
        again = baseline.follow(Options(resume=str(run), fail_on_regression=given))
        assert again.fail_on_regression == str(base)
    assert baseline.follow(Options(resume=str(run), fail_on_regression="other")).fail_on_regression == "other"


def test_a_baseline_that_is_gone_stops_a_run_before_it_goes_on(
    begun: Header, fakes: engines.Engines, tmp_path: Path
) -> None:
    base = finished(begun, tmp_path / "base")
    run = finished(begun, tmp_path / "run", base)
    lines = (run / record.LINES).read_text().splitlines(keepends=True)
    (run / record.LINES).write_text("".join(lines[: len(lines) // 2]))
    before = (run / record.LINES).read_bytes()
    base.rename(tmp_path / "moved")

    with pytest.raises(
        UsageError, match=rf"run was begun with a baseline that is gone .*put it back \({base} holds no"
    ):
        duel(Options(resume=str(run), no_wait=True), lambda _: None)
    assert (run / record.LINES).read_bytes() == before


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"fail_on_regression": "nowhere"}, "there is no baseline to compare with: nowhere holds no run"),
        ({"preset": "quick"}, "--preset quick makes no claims"),
        ({"context": 1024}, "the baseline was measured with context 512, not 1024; set --context 512"),
        ({"settings": "stock"}, "measured with settings matched, not stock"),
        ({"out_tokens": 24}, "the baseline's answers are 16 tokens long, not 24; leave --out-tokens out"),
        ({"arms": "llama-cpp@cpu-moe,ollama"}, "the baseline's reference is llama-cpp@ngl=99; add it to --arms"),
        ({"arms": "llama-cpp@ngl=99,ollama"}, "no arm in common beside its reference llama-cpp@ngl=99"),
        ({"reference": "llama-cpp@cpu-moe"}, "reference is llama-cpp@ngl=99, not llama-cpp@cpu-moe"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_baseline_that_cannot_serve_is_told_before_anything_is_loaded(
    changed: dict[str, object], sentence: str, begun: Header, fakes: engines.Engines, model: Path, tmp_path: Path
) -> None:
    base = finished(begun, tmp_path / "base")
    given = SHORT | {"model": str(model), "out": str(tmp_path / "runs"), "fail_on_regression": str(base)} | changed
    with pytest.raises(UsageError, match=sentence):
        duel(Options(**given), lambda _: None)  # type: ignore[arg-type]

    assert not (tmp_path / "runs").exists()


Alter = Callable[[Header], Header]


@pytest.mark.parametrize(
    ("alter", "sentence"),
    [
        (lambda header: replanned(header, weights_digest="v" * 64), "other weights"),
        (lambda header: replanned(header, prompts_digest="q" * 64), "other prompts"),
        (
            lambda header: dataclasses.replace(header, machine=dataclasses.replace(header.machine, cpu="Z80")),
            "cpu was Z80, is ",
        ),
    ],
    ids=["weights", "prompts", "machine"],
)
def test_a_baseline_of_something_else_is_told_before_anything_is_loaded(
    alter: Alter, sentence: str, begun: Header, fakes: engines.Engines, model: Path, tmp_path: Path
) -> None:
    base = finished(alter(begun), tmp_path / "base")
    given = SHORT | {"model": str(model), "out": str(tmp_path / "runs"), "fail_on_regression": str(base)}
    with pytest.raises(UsageError, match=rf"the baseline is of something else \({sentence}.*; measure a new one"):
        duel(Options(**given), lambda _: None)  # type: ignore[arg-type]

    assert not (tmp_path / "runs").exists()


def replanned(header: Header, **changed: Any) -> Header:
    model = dataclasses.replace(header.model, digest=changed.get("weights_digest", header.model.digest))
    contenders = tuple(dataclasses.replace(each, weights_digest=model.digest) for each in header.contenders)
    return dataclasses.replace(
        header, plan=dataclasses.replace(header.plan, **changed), model=model, contenders=contenders
    )


def test_a_baseline_that_ranks_nothing_is_told_before_anything_is_loaded(
    begun: Header, fakes: engines.Engines, model: Path, tmp_path: Path
) -> None:
    base = written(played(begun), tmp_path / "base")
    given = SHORT | {"model": str(model), "out": str(tmp_path / "runs"), "fail_on_regression": str(base)}
    with pytest.raises(UsageError, match=r"the baseline .*base is SCREENING and ranks nothing; name another run"):
        duel(Options(**given), lambda _: None)  # type: ignore[arg-type]

    assert not (tmp_path / "runs").exists()
