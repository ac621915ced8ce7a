"""A sweep becomes a curve: what is one placement is one point, and the edge, the best and the line are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import short_run

from harness import compare, record, synth, verdict, walk
from harness.compare import Comparison, Row
from harness.curve import Curve, Point, at, curves, draw
from harness.display import quiet
from harness.physics import Flag
from harness.placement import Cell, Predicted
from harness.plan import ArmStatus, Status
from harness.record import Search, SearchLoad
from harness.testing import engines
from harness.testing.script import Script
from harness.verdict import Contrast, Interval

OK = ArmStatus(Status.OK)
REPORTS = Path(__file__).parent.parent / "reports"
LAYERS = 12
OOM = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 900.00 MiB on device 0: cudaMalloc failed: out of memory"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """A real run through engines that only pretend: values above the layers are one placement, the first is too big."""
    folder = tmp_path_factory.mktemp("curve")
    model = folder / "layered.gguf"
    synth.write(model, dataclasses.replace(synth.scaled(synth.SHAPES["tiny"], 16 << 20), layers=LAYERS))
    card = Script(devices=(("CUDA0", "a card", 8000),), itl_s=0.002)
    with engines.fake(folder, card, cases=[{"when": "--n-cpu-moe 0 ", "dies_loading": OOM}]):
        return walk.duel(short_run.options(model, folder / "runs", arms="llama-cpp@ncmoe=0..18/6"), quiet)


def row(arm: str, tps: float | None, ratio: float | None = None, *, width: float = 0.02, **facts: object) -> Row:
    """A row whose ratio to the reference is known to ± `width`; the reference itself has none."""
    contrast = None
    if ratio is not None:
        low, high = ratio * (1 - width), ratio * (1 + width)
        contrast = Contrast(word="DIFFERENT", n=6, ratio=ratio, low=low, high=high, level="joint 95 %", margin=0.03)
    given: dict[str, object] = {
        "status": OK,
        "placement": "somewhere",
        "engine": "an engine",
        "command": None,
        "weights_digest": "d",
        "output_ok": True,
        "is_reference": False,
        "decode_tps": None if tps is None else Interval(tps, tps * 0.97, tps * 1.03, 6),
        "contrast": contrast,
        "cell": Cell.FITS,
    }
    return Row(arm=arm, **(given | facts))  # type: ignore[arg-type]


def sweep(speeds: dict[int, float]) -> list[Row]:
    return [row(f"llama-cpp@ncmoe={n}", tps, tps / 50) for n, tps in speeds.items()]


def judged(run: Comparison, rows: Sequence[Row], state: verdict.StateWord = "GREEN") -> Comparison:
    """The comparison with other rows; the first is the reference where none is."""
    judgement = dataclasses.replace(run.judgement, state=verdict.State(state, ("a reason.",)))
    return dataclasses.replace(run, rows=tuple(rows), judgement=judgement)


def only(run: Comparison, rows: Sequence[Row], state: verdict.StateWord = "GREEN") -> Curve:
    (found,) = curves(judged(run, rows, state))
    return found


def traffic(n: int, layers: int = 40) -> Predicted:
    host = 2_000_000_000 * n // layers
    return Predicted(
        placement_class=str(n), host_bytes=host, device_bytes=2_000_000_000 - host, bytes_per_token_host=host,
        bytes_per_token_device=2_000_000_000 - host, host_weights_bytes=host,
        device_weights_bytes=2_000_000_000 - host,
    )  # fmt: skip


# ── a run ───────────────────────────────────────────────────────────────────────────────────


def test_a_run_with_a_sweep_has_its_curve(run: Comparison) -> None:
    (found,) = curves(run)

    assert (found.over, found.arms) == ("ncmoe", "llama-cpp@ncmoe=…")
    assert [point.label for point in found.points] == ["0", "6", "≥12"]
    assert [point.tps is not None for point in found.points] == [False, True, True]
    assert found.points[0].state is Cell.DOES_NOT_FIT
    assert "out of memory" in (found.points[0].why or "")
    assert found.points[2].values == ("12", "18")
    assert found.points[2].arm == "llama-cpp@ncmoe=12"
    assert "ncmoe = 12, 18: one placement, measured once." in found.notes
    assert found.best == (), "two blocks are no claim"
    assert found.finding.endswith("too few blocks for a claim") or "memory is full" in found.finding


def test_a_published_search_has_a_curve_of_its_candidates() -> None:
    (found,) = curves(compare.compare(record.read(REPORTS / "2026-11-30-find-on-12-gib")))

    assert (found.over, len(found.points)) == ("ncmoe", 46)
    assert [point.label for point in found.points if point.tps is not None] == ["15", "16"], "the confirmed alone"
    assert (found.edge, found.beyond) == ("14", "13")
    assert found.best == ("15", "16")
    assert sum(point.tried for point in found.points) == 8
    text = draw(found)
    assert " 0–10  –" in text
    assert text.count("not tried") == 4


def test_an_article_is_told_what_is_odd_about_its_sweep() -> None:
    """Three values are one placement and read twofold; beyond them more on the device is slower at every step."""
    (found,) = curves(compare.compare(record.read(REPORTS / "2026-06-17-article-replay")))

    assert [point.label for point in found.points if Flag.WRONG_SIGN in point.flags] == ["24", "28", "32", "36"]
    notes = " ".join(found.notes)
    assert "ncmoe = 48, 44, 40 are one placement, measured as 16.9 to 34.6 tok/s." in notes
    assert "More on the device is slower" in notes
    assert "ncmoe = 40, 36, 32, 28, 24 run at 16.9, 15.3, 14.1, 12.8, 11.7 tok/s" in notes
    assert found.finding == "ncmoe=48 reads highest, 34.6 tok/s: this run ranks nothing"


# ── which rows are a sweep ──────────────────────────────────────────────────────────────────


def test_two_values_are_no_sweep_and_neither_is_one_placement_under_many_names(run: Comparison) -> None:
    assert curves(judged(run, sweep({0: 50.0, 4: 40.0}))) == ()
    alias = ArmStatus(Status.ALIAS, "no GPU: one placement", alias_of="llama-cpp@ncmoe=0")
    names = [row(f"llama-cpp@ncmoe={n}", None, status=alias) for n in (4, 8)]
    assert curves(judged(run, [*sweep({0: 50.0}), *names])) == ()


def test_only_arms_that_differ_in_one_number_share_a_curve(run: Comparison) -> None:
    mixed = [
        *sweep({0: 50.0, 4: 40.0, 8: 30.0}),
        row("ollama@ncmoe=4", 38.0, 0.8),
        row("llama-cpp@ngl=20", 20.0, 0.4),
        row("llama-cpp@ncmoe=12,ub=256", 20.0, 0.4),
        row("an engine that is gone@ncmoe=16", 10.0, 0.2),
    ]

    assert [point.label for point in only(run, mixed).points] == ["0", "4", "8"]


def test_a_grid_is_a_curve_for_each_row_and_column_that_is_long_enough(run: Comparison) -> None:
    grid = [row(f"llama-cpp@ncmoe={n},ub={ub}", 50.0 - n + ub / 100, 1.0) for n in (0, 8, 16) for ub in (128, 256)]
    found = curves(judged(run, grid))

    assert [(curve.over, curve.arms) for curve in found] == [
        ("ncmoe", "llama-cpp@ncmoe=…,ub=128"),
        ("ncmoe", "llama-cpp@ncmoe=…,ub=256"),
    ]


def test_machines_behind_rpc_are_no_sweep(run: Comparison) -> None:
    rows = [row(f"llama-cpp@cpu-moe,rpc=10.0.0.{n}:50052", 40.0 + n, 0.8) for n in (1, 2, 3)]

    assert curves(judged(run, rows)) == ()


def test_a_knob_of_words_keeps_the_order_it_was_given_in(run: Comparison) -> None:
    found = only(run, [row(f"llama-cpp@cpu-moe,ctk={kind}", 40.0, 0.8) for kind in ("f16", "q8_0", "q4_0")])

    assert (found.over, [point.label for point in found.points]) == ("ctk", ["f16", "q8_0", "q4_0"])
    assert [point.x for point in found.points] == [0, 1, 2]


@pytest.mark.parametrize(
    ("alias_of", "names", "labels"),
    [
        (40, (44, 48), ["24", "32", "≥40"]),
        (24, (8, 16), ["≤24", "32", "40"]),
        (32, (33, 34), ["24", "32–34", "40"]),
        (24, (48,), ["24, 48", "32", "40"]),
    ],
)
def test_values_that_are_one_placement_are_one_label(
    run: Comparison, alias_of: int, names: tuple[int, ...], labels: list[str]
) -> None:
    alias = ArmStatus(Status.ALIAS, "the same", alias_of=f"llama-cpp@ncmoe={alias_of}")
    aside = [row(f"llama-cpp@ncmoe={n}", None, status=alias) for n in names]

    found = only(run, [*sweep({24: 50.0, 32: 40.0, 40: 30.0}), *aside])

    assert [point.label for point in found.points] == labels


def test_a_value_that_is_another_arm_has_the_numbers_of_that_arm(run: Comparison) -> None:
    alias = ArmStatus(Status.ALIAS, "the same", alias_of="llama-cpp@cpu-moe")
    rows = [
        row("llama-cpp@cpu-moe", 30.0, 0.6),
        *sweep({24: 50.0, 32: 40.0}),
        *(row(f"llama-cpp@ncmoe={n}", None, status=alias) for n in (40, 48)),
    ]

    last = only(run, rows).points[-1]

    assert (last.label, last.arm, last.tps) == ("≥40", "llama-cpp@cpu-moe", 30.0)


# ── the best and the edge ───────────────────────────────────────────────────────────────────


def test_the_best_are_the_fastest_and_those_whose_interval_overlaps_its(run: Comparison) -> None:
    found = only(run, sweep({16: 92.0, 20: 90.0, 24: 83.0, 28: 70.0}))

    assert found.best == ("16", "20")
    assert found.finding == "ncmoe = 16, 20 are fastest and not told apart: 92.0 tok/s"
    assert "Best by intervals: those of the speed ratios of ncmoe = 16, 20 overlap." in found.notes


def test_the_reference_counts_with_a_ratio_of_one(run: Comparison) -> None:
    rows = [row("llama-cpp@ncmoe=16", 50.0, is_reference=True), *sweep({20: 49.5, 24: 30.0})]

    assert only(run, rows).best == ("16", "20")
    assert only(run, [rows[0], *sweep({20: 40.0, 24: 30.0})]).finding == "ncmoe=16 is fastest: 50.0 tok/s"


def test_a_flat_curve_is_not_told_apart(run: Comparison) -> None:
    assert (
        only(run, sweep({0: 50.0, 4: 50.4, 8: 49.8})).finding == "No value of ncmoe is told apart: 50.4 tok/s at most"
    )


@pytest.mark.parametrize("state", ["RED", "SCREENING"])
def test_a_run_that_ranks_nothing_has_no_best(run: Comparison, state: verdict.StateWord) -> None:
    found = only(run, sweep({16: 92.0, 20: 40.0, 24: 30.0}), state)

    assert found.best == ()
    assert "is fastest" not in found.finding


@pytest.mark.parametrize(
    ("over", "cells", "edge"),
    [
        ("ncmoe", ["DOES_NOT_FIT", "DOES_NOT_FIT", "TIGHT", "FITS"], ("16", "8", "below")),
        ("ncmoe", ["SPILLED", "FITS", "FITS", "FITS"], ("8", "0", "below")),
        ("ngl", ["FITS", "FITS", "TIGHT", "DOES_NOT_FIT"], ("16", "24", "above")),
        ("ngl", ["FITS", "SPILLED", "SPILLED", "SPILLED"], ("0", "8", "above")),
        ("ngl", ["FITS", "FITS", "FITS", "FITS"], None),
        ("ngl", ["UNKNOWN"] * 4, None),
        ("ngl", ["UNKNOWN", "UNKNOWN", "UNKNOWN", "DOES_NOT_FIT"], None),
    ],
)
def test_the_edge_is_the_last_value_before_memory_is_full(
    run: Comparison, over: str, cells: list[str], edge: tuple[str, str, str] | None
) -> None:
    rows = [
        row(f"llama-cpp@{over}={8 * index}", None if cell == "DOES_NOT_FIT" else 40.0, 0.8, cell=Cell(cell))
        for index, cell in enumerate(cells)
    ]
    found = only(run, rows)

    assert (found.edge, found.beyond) == (edge[:2] if edge else (None, None))
    assert ("memory is full" in found.finding) == (edge is not None)
    if edge is not None:
        assert f"memory is full {edge[2]} {over}={edge[0]}" in found.finding


def test_nearly_full_and_clearly_slower_is_beyond_the_edge(run: Comparison) -> None:
    rows = [
        row("llama-cpp@ncmoe=8", 30.0, 0.6, cell=Cell.TIGHT),
        row("llama-cpp@ncmoe=12", 60.0, 1.2, cell=Cell.TIGHT),
        row("llama-cpp@ncmoe=16", 58.0, 1.16),
    ]

    found = only(run, rows)

    assert (found.edge, found.beyond) == ("12", "8")
    assert not any(point.flags for point in found.points), "a full card is no riddle"


def test_slower_with_room_to_spare_is_the_wrong_sign_and_no_edge(run: Comparison) -> None:
    found = only(run, sweep({8: 30.0, 12: 60.0, 16: 58.0}))

    assert found.edge is None
    assert [point.label for point in found.points if Flag.WRONG_SIGN in point.flags] == ["8"]


def test_an_arm_that_did_something_else_has_no_speed_here(run: Comparison) -> None:
    rows = sweep({0: 50.0, 4: 40.0, 8: 30.0})
    rows[1] = dataclasses.replace(rows[1], status=ArmStatus(Status.VOID, "other buffers"))

    point = only(run, rows).point("4")

    assert (point.tps, point.low, point.why) == (None, None, "VOID: other buffers")


def test_a_search_shows_states_of_what_was_tried_and_what_was_refused(run: Comparison) -> None:
    name = "llama-cpp@ncmoe={}".format
    search = Search(
        over="ncmoe",
        candidates=tuple(map(name, (4, 8, 12, 16))),
        refused=(name(0),),
        tried=(
            SearchLoad(name(4), ArmStatus(Status.DOES_NOT_FIT, "out of memory"), "DOES_NOT_FIT"),
            SearchLoad(name(8), OK, "FITS"),
        ),
        chosen=(name(8),),
        elsewhere={},
        command="llamaduel find",
    )
    header = dataclasses.replace(run.header, search=search)
    searched = dataclasses.replace(run, run=dataclasses.replace(run.run, header=header))

    found = only(searched, [row(name(8), 50.0, is_reference=True)])

    assert [(point.label, point.state.value, point.tried) for point in found.points] == [
        ("0", "DOES_NOT_FIT", True),
        ("4", "DOES_NOT_FIT", True),
        ("8", "FITS", True),
        ("12", "UNKNOWN", False),
        ("16", "UNKNOWN", False),
    ]
    assert (found.edge, found.beyond) == ("8", "4")
    assert found.finding == "Only ncmoe=8 has a speed: 50.0 tok/s; memory is full below ncmoe=8"


# ── physics ─────────────────────────────────────────────────────────────────────────────────


def lined(off: dict[int, float] | None = None) -> list[Row]:
    """A sweep on the line of 10 ms and 15 ms a GB, some points so much faster."""
    speeds = {n: (off or {}).get(n, 1.0) / (0.01 + 15e-12 * traffic(n).bytes_per_token_host) for n in range(0, 48, 8)}
    return [row(f"llama-cpp@ncmoe={n}", tps, tps / 50, predicted=traffic(n)) for n, tps in speeds.items()]


def test_every_point_stands_beside_the_line_of_physics(run: Comparison) -> None:
    found = only(run, lined())

    assert [point.fitted_tps for point in found.points] == pytest.approx([point.tps for point in found.points])
    assert (
        "The line of physics: 10.0 ms a token, and 15.0 ms more for each GB that it reads on the host." in found.notes
    )
    assert not any(point.flags for point in found.points)


def test_a_point_far_off_the_line_is_flagged_and_told(run: Comparison) -> None:
    found = only(run, lined({16: 0.5}))

    assert [point.label for point in found.points if Flag.OFF_CURVE in point.flags] == ["16"]
    assert any(note.startswith("ncmoe=16 runs at 0.50 times the speed") for note in found.notes)


def test_a_spilled_point_does_not_bend_the_line(run: Comparison) -> None:
    rows = lined({0: 0.1})
    rows[0] = dataclasses.replace(rows[0], cell=Cell.SPILLED, flags=(Flag.TOO_SLOW,))
    found = only(run, rows)

    assert found.points[0].flags == (Flag.TOO_SLOW,)
    assert found.points[0].fitted_tps == pytest.approx(100.0)


@pytest.mark.parametrize("off", [1.05, 2.0])
def test_an_impossible_point_neither_bends_the_line_nor_is_judged_by_it(run: Comparison, off: float) -> None:
    rows = lined({16: off})
    rows[2] = dataclasses.replace(rows[2], flags=(Flag.IMPOSSIBLE,))
    found = only(run, rows)

    assert [point.fitted_tps for point in found.points] == pytest.approx([row.tps for row in only(run, lined()).points])
    assert found.point("16").flags == (Flag.IMPOSSIBLE,)


def test_an_impossible_speed_is_neither_best_nor_the_finding_nor_a_wrong_sign(run: Comparison) -> None:
    rows = sweep({16: 92.0, 20: 200.0, 24: 83.0, 28: 70.0})
    rows[1] = dataclasses.replace(rows[1], flags=(Flag.IMPOSSIBLE,))
    found = only(run, rows)

    assert found.best == ("16",)
    assert found.finding == "ncmoe=16 is fastest: 92.0 tok/s"
    assert not any(Flag.WRONG_SIGN in point.flags for point in found.points)
    assert only(run, rows, "RED").finding.startswith("ncmoe=16 reads highest, 92.0 tok/s")


def test_a_stand_in_device_has_no_physics(run: Comparison) -> None:
    contenders = tuple(
        dataclasses.replace(each, settings=dataclasses.replace(each.settings, stand_in_bytes=1 << 30))
        for each in run.header.contenders
    )
    header = dataclasses.replace(run.header, contenders=contenders)
    found = only(dataclasses.replace(run, run=dataclasses.replace(run.run, header=header)), lined({16: 0.5}))

    assert all(point.fitted_tps is None and not point.flags for point in found.points)
    assert found.notes[-1].startswith("Stand-in device:")


def test_the_share_is_of_what_the_memory_allows(run: Comparison) -> None:
    rows = [dataclasses.replace(each, ceiling_tps=200.0) for each in sweep({0: 50.0, 4: 40.0})]
    found = only(run, [*rows, *sweep({8: 30.0})])

    assert [point.share for point in found.points] == [0.25, 0.2, None]
    assert "25 % of the ceiling" in draw(found)


# ── the drawing ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", [40, 72, 100, 200])
def test_a_drawing_is_plain_and_keeps_its_width(run: Comparison, width: int) -> None:
    rows = [
        row("llama-cpp@ncmoe=0", None, status=ArmStatus(Status.DOES_NOT_FIT, "out of memory"), cell=Cell.DOES_NOT_FIT),
        row("llama-cpp@ncmoe=4", 12.0, 0.24, cell=Cell.SPILLED, flags=(Flag.TOO_SLOW,)),
        *sweep({8: 92.0, 12: 50.0}),
        row("llama-cpp@ncmoe=16", None, status=ArmStatus(Status.CRASHED, "\x1b[31msignal 11")),
    ]
    text = draw(only(run, rows), width)
    lines = text.splitlines()

    assert max(map(len, lines)) <= min(width, 100)
    assert "\x1b" not in text
    assert [line.split()[0] for line in lines[3:]][:2] == ["0", "4"]
    assert sum("memory is full" in line for line in lines[2:]) == 1
    if width >= 72:
        bars = {line.split()[0]: line.count("█") for line in lines[3:]}
        assert bars["8"] > bars["12"] > bars["4"] > bars["0"] == bars["16"] == 0
        for label, words in {"0": "DOES_NOT_FIT", "4": "SPILLED, TOO_SLOW", "8": "best, FITS"}.items():
            assert any(line.split()[0] == label and line.endswith(words) for line in lines[3:])


def test_a_drawing_without_any_speed_has_no_bar() -> None:
    labels = ("0", "1", "≥2")
    points = tuple(Point(label=label, values=(str(n),), x=n, arm="a", why="CRASHED") for n, label in enumerate(labels))
    text = draw(Curve(over="ngl", arms="a@ngl=…", axis="ngl", points=points, finding="nothing"))

    assert "█" not in text
    assert text.splitlines()[-1].split() == ["≥0", "–", "CRASHED"], "one row for what is said once"


def test_values_are_named_as_a_person_would() -> None:
    assert at("ncmoe", "16") == "ncmoe=16"
    assert at("ncmoe", "≥40") == "ncmoe≥40"
    assert at("ncmoe", "16", "≥40") == "ncmoe = 16, ≥40"
