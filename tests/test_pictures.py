"""All charts of a run: their words, what they leave out, and that nothing of them is clipped, covered or markup."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from played_run import OTHER, REFERENCE, THIRD, a_header, contender, played

import harness
from harness.charts import canvas, draw, forest, memory, pictures, speeds, strip
from harness.compare import Comparison, compare
from harness.contract import Buffer, Settings
from harness.physics import Flag
from harness.placement import Cell, Predicted
from harness.plan import ArmStatus, Status
from harness.record import Contender
from harness.verdict import Interval

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "$x^2$ <script>alert(1) & \x1b[31m\"' | `c` \u202eabc 漢字 \ufffe #0072b2 " + "W" * 90
GIB = 1 << 30
DRAWN_BY = {"ratios": forest.draw, "loads": strip.draw, "speeds": speeds.draw, "memory": memory.draw}
KINDS = ["ratios", "curve", "loads", "speeds", "memory"]


def predicted(device: int, host: int, context: int | None = GIB // 2) -> Predicted:
    """In GiB; all of the context on the device."""
    return Predicted(
        placement_class=f"{device}/{host}",
        host_bytes=None if context is None else host * GIB,
        device_bytes=None if context is None else device * GIB + context,
        bytes_per_token_host=1,
        bytes_per_token_device=1,
        host_weights_bytes=host * GIB,
        device_weights_bytes=device * GIB,
        compute_bytes=GIB // 4,
    )


def held(arm: str, device: int, host: int, **changed: object) -> Contender:
    """An arm whose engine tells these GiB of weights."""
    found = contender(arm, **changed)
    assert found.realised is not None
    buffers = (
        Buffer("CPU", "weights", host * GIB, on_host=True),
        Buffer("CUDA0", "weights", device * GIB, on_host=False),
        Buffer("CUDA0", "kv", GIB // 2, on_host=False),
        Buffer("CUDA0", "compute", GIB // 4, on_host=False),
    )
    return dataclasses.replace(found, realised=dataclasses.replace(found.realised, buffers=buffers))


def failed(arm: str, word: Status, reason: str, **changed: object) -> Contender:
    return contender(arm, status=ArmStatus(word, reason), realised=None, **changed)


@pytest.fixture(scope="module")
def whole() -> Comparison:
    """Every verdict and every word for an arm without numbers."""
    arms = [
        held(REFERENCE, 3, 2, predicted=predicted(3, 2)),
        held(OTHER, 1, 4, predicted=predicted(1, 4)),
        held(THIRD, 2, 3),
        held("ollama", 3, 2),
        held("llama-cpp@ngl=99", 3, 2, predicted=predicted(3, 2)),
        failed("llama-cpp@ngl=1", Status.DOES_NOT_FIT, "out of memory", predicted=predicted(6, 0)),
        contender("llama-cpp@ngl=98", status=ArmStatus(Status.ALIAS, "all layers", "llama-cpp@ngl=99"), realised=None),
        failed("ollama@cpu", Status.UNAVAILABLE, "no Ollama here", engine=None),
    ]
    tps = {"ollama": 50.2, THIRD: 61.0, "llama-cpp@ngl=99": 50.9}
    return compare(played(a_header(*arms), tps, noise=0.012))


@pytest.fixture(scope="module")
def many() -> Comparison:
    """Thirty arms with long names."""
    arms = [f"llama-cpp@ncmoe={n},ctk=q8_0,ctv=q8_0,depth={100 * n}" for n in range(30)]
    contenders = [held(arm, 31 - n, n, predicted=predicted(31 - n, n)) for n, arm in enumerate(arms)]
    return compare(played(a_header(*contenders), {arm: 100 - 2.5 * n for n, arm in enumerate(arms)}, noise=0.01))


@pytest.fixture(scope="module")
def hostile() -> Comparison:
    names = [REFERENCE, HOSTILE, "x" * 500]
    reason = HOSTILE * 9
    arms = [*(held(name, 3, 2) for name in names), failed("sick", Status.CRASHED, reason)]
    return compare(played(a_header(*arms), {HOSTILE: 20.0, "x" * 500: 55.0}, noise=0.05))


@pytest.fixture(scope="module")
def every(whole: Comparison, many: Comparison, hostile: Comparison) -> list[dict[str, str]]:
    """All charts of all three."""
    return [draw(whole), draw(many), draw(hostile)]


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(svg: str) -> list[str]:
    return ["".join(each.itertext()) for each in parsed(svg).iter(f"{SVG}text")]


def drawn(comparison: Comparison, kind: str) -> str:
    """One chart for a light page."""
    assert kind in kinds(comparison)
    with canvas.style():
        return DRAWN_BY[kind](comparison)


def kinds(comparison: Comparison) -> list[str]:
    return [picture.kind for picture in pictures(comparison)]


def alt(comparison: Comparison, kind: str) -> str:
    return next(picture.alt for picture in pictures(comparison) if picture.kind == kind)


def boxes(svg: str) -> Iterator[tuple[str, float, float, float, float]]:
    """Every level text with its left, top, right and bottom, as wide as the widest font would draw it."""
    for each in parsed(svg).iter(f"{SVG}text"):
        style, text = each.get("style", ""), "".join(each.itertext())
        if "rotate(-90" in each.get("transform", ""):
            continue
        size = float(re.findall(r"([\d.]+)px", style)[0])
        x, y = float(each.get("x", "nan")), float(each.get("y", "nan"))
        width = canvas.width_px(text, size, bold="700" in style or "bold" in style) * 72 / canvas.DPI
        left = x - (width / 2 if "middle" in style else width if "anchor: end" in style else 0)
        yield text, left, y - 0.73 * size, left + width, y + 0.2 * size


# ── the set ─────────────────────────────────────────────────────────────────────────────────


def test_pictures_come_in_reading_order_each_for_a_light_and_a_dark_page(whole: Comparison) -> None:
    found = pictures(whole)

    assert [picture.kind for picture in found] == KINDS
    assert [picture.name for picture in found] == [f"charts/{'ngl' if kind == 'curve' else kind}" for kind in KINDS]
    assert list(draw(whole)) == [f"{picture.name}-{page}.svg" for picture in found for page in ("light", "dark")]


def test_the_title_of_a_chart_is_its_finding_and_so_is_its_text_for_those_who_do_not_see(whole: Comparison) -> None:
    charts = draw(whole)
    for picture in pictures(whole):
        root = parsed(charts[f"{picture.name}-dark.svg"])

        assert root.findtext(f"{SVG}title") == picture.alt
        assert (root.get("width"), root.get("role")) == ("600", "img")
        assert set(picture.alt.split()) <= set(" ".join(texts(charts[f"{picture.name}-light.svg"])).split())


def test_a_chart_with_nothing_to_show_is_not_there() -> None:
    alone = compare(played(a_header(contender(REFERENCE), twin=True)))
    blind = compare(played(a_header(*(contender(arm, realised=None) for arm in (REFERENCE, OTHER)))))
    once = dataclasses.replace(alone, rows=tuple(dataclasses.replace(row, loads=row.loads[:1]) for row in alone.rows))
    once = dataclasses.replace(once, twin=None)
    mute = dataclasses.replace(alone, rows=tuple(dataclasses.replace(row, prefill_tps=None) for row in alone.rows))
    mute = dataclasses.replace(mute, twin=None)

    assert kinds(alone) == ["loads", "speeds", "memory"]
    assert kinds(blind) == ["ratios", "loads", "speeds"]
    assert "loads" not in kinds(once)
    assert "speeds" not in kinds(mute)


def test_light_and_dark_differ_in_colours_alone(every: list[dict[str, str]]) -> None:
    for charts in every:
        for name, light in charts.items():
            if name.endswith("-light.svg"):
                dark = charts[name.replace("-light", "-dark")]

                assert texts(light) == texts(dark)
                assert light != dark
                for before, after in canvas.ON_DARK.items():
                    assert f": {before}" not in dark, f"{before} became {after}"


def test_what_is_defined_in_a_light_and_in_a_dark_chart_has_two_names(whole: Comparison) -> None:
    """Both may stand in one page, where a name means the first that has it."""
    charts = draw(whole)
    for picture in pictures(whole):
        light, dark = (
            {each.get("id") for each in parsed(charts[f"{picture.name}-{page}.svg"]).iter() if each.get("id")}
            for page in ("light", "dark")
        )
        assert not {name for name in light & dark if name and re.fullmatch(r"[mph][0-9a-f]{10}", name)}
        hashes = set(re.findall(r"[\"(]#([^\")]+)", charts[f"{picture.name}-dark.svg"]))
        assert hashes <= dark


def test_the_same_run_is_the_same_bytes_in_another_process(tmp_path: Path, whole: Comparison) -> None:
    """Whatever that process has in its matplotlibrc and its hash seed."""
    (tmp_path / "matplotlibrc").write_text("font.size: 30\naxes.facecolor: red\nsvg.fonttype: path\nhatch.color: red\n")
    code = (
        "import hashlib, test_pictures as t; "
        "print(hashlib.sha256(repr(t.draw(t.whole.__wrapped__())).encode()).hexdigest(), end='')"
    )
    roots = os.pathsep.join([str(Path(__file__).parent), str(Path(harness.__file__).parent.parent)])
    environment = os.environ | {"PYTHONPATH": roots, "PYTHONHASHSEED": "7", "PYTHONUTF8": "1"}
    other = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert other.stdout.decode() == hashlib.sha256(repr(draw(whole)).encode()).hexdigest()


# ── every chart ─────────────────────────────────────────────────────────────────────────────


def elsewhere(svg: str) -> str:
    """As if another matplotlib had drawn it."""
    return re.sub(r'data-matplotlib="[^"]*"', 'data-matplotlib="3.0.0"', svg)


def test_a_chart_of_another_matplotlib_may_be_a_little_off_in_its_places(whole: Comparison) -> None:
    for name, svg in draw(whole).items():
        moved = re.sub(r'(?<= x=")[\d.]+(?=")', lambda found: f"{float(found[0]) + 0.3:.4f}", svg)
        renamed = re.sub(r"\b([mph])([0-9a-f]{9})[0-9a-f](?=[-\")])", r"\g<1>\g<2>0", moved)

        assert canvas.is_same(svg, svg)
        assert canvas.is_same(elsewhere(svg), svg), name
        assert moved != svg
        assert canvas.is_same(elsewhere(renamed), svg), name
        assert not canvas.is_same(renamed, svg), "by the same matplotlib to the letter"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"</svg>", r'<text x="9" y="9">9x faster</text></svg>'),
        (r"</svg>", r'<text x="9" y="9">ollama is <a>9x</a> faster<tspan/></text></svg>'),
        (r"</svg>", r"9x faster</svg>"),
        (r"</svg>", r'<image href="http://evil.example/x.png"/></svg>'),
        (r"</svg>", r"<script>alert(1)</script></svg>"),
        (r"</svg>", r"<!-- 9x --></svg>"),
        (r"</svg>", r""),
        (r"<svg ", r'<svg onload="alert(1)" '),
        (r"<svg ", r'<svg style="opacity: 0" '),
        (r"^", r'<!DOCTYPE svg [<!ENTITY a "b">]>'),
        (r'xlink:href="#', r'xlink:href="http://evil.example/#'),
        (r' d="M [^"]*"', r' d="M 0 0 L 1 1"'),
        (r"<use [^>]*/>", r""),
        (r'(<use [^>]*) y="[^"]*"', r'\1 y="9"'),
        (r"stroke: #[0-9a-f]{6}", r"stroke: #ffffff"),
        (r"stroke-width: [\d.]+", r"stroke-width: 0"),
        (r"(<text [^>]*>)[^<]", r"\1 9"),
        (r"(<title>)", r"\g<1>9"),
        (r"rotate\(-90", r"rotate(-91"),
    ],
)
def test_whoever_forges_a_chart_cannot_say_that_another_matplotlib_drew_it(
    whole: Comparison, old: str, new: str
) -> None:
    for name, svg in draw(whole).items():
        forged = re.sub(old, new, elsewhere(svg))

        assert forged == elsewhere(svg) or not canvas.is_same(forged, svg), name
    assert any(re.search(old, svg) for svg in draw(whole).values()) or "rotate" in old


def test_charts_are_well_formed_and_point_to_nothing_outside(every: list[dict[str, str]]) -> None:
    for charts in every:
        for name, svg in charts.items():
            root = parsed(svg)
            attributes = [(key, value) for each in root.iter() for key, value in each.attrib.items()]

            assert svg.startswith("<svg "), name
            assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {
                "svg", "title", "defs", "style", "g", "path", "use", "text", "clipPath", "rect", "pattern",
            }, name  # fmt: skip
            assert not [key for key, _ in attributes if key.startswith("on")]
            assert all(value.startswith("#") for key, value in attributes if key.endswith("href"))
            assert all("url(" not in value or "url(#" in value for _, value in attributes)


def test_names_and_reasons_from_elsewhere_are_text_in_every_chart(hostile: Comparison) -> None:
    for name, svg in draw(hostile).items():
        assert "<script" not in svg, name
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e\ufffe]", svg), name
        assert any("$x^2$ <script>alert(1)" in text for text in texts(svg)), name


def test_a_colour_in_a_name_is_no_colour(hostile: Comparison) -> None:
    assert any("#0072b2" in text for text in texts(draw(hostile)["charts/speeds-dark.svg"]))


def test_no_text_is_clipped_and_none_covers_another(every: list[dict[str, str]]) -> None:
    for charts in every:
        for name, svg in charts.items():
            width, height = map(float, parsed(svg).get("viewBox", "").split()[2:])
            found = list(boxes(svg))

            assert not [text for text, left, top, right, bottom in found if left < 0 or top < 0], name
            assert not [text for text, left, top, right, bottom in found if right > width or bottom > height], name
            for (one, a, b, c, d), (other, e, f, g, h) in itertools.combinations(found, 2):
                assert c <= e or g <= a or d <= f or h <= b, f"{name}: {one!r} and {other!r}"


def test_a_name_too_long_for_its_column_goes_on_in_the_next_line(many: Comparison) -> None:
    for kind in ("ratios", "loads", "speeds", "memory"):
        told = texts(drawn(many, kind))

        assert "ctk=q8_0,ctv=q8_0,depth=2900" in told
        assert "llama-cpp@ncmoe=29," in told


def test_a_stand_in_says_so_wherever_speeds_are() -> None:
    settings = Settings(stand_in_bytes=4 * GIB)
    found = compare(played(a_header(*(held(arm, 3, 2, settings=settings) for arm in (REFERENCE, OTHER)))))
    said = {kind: "speed says nothing about a GPU" in " ".join(texts(drawn(found, kind))) for kind in kinds(found)}

    assert said == {"ratios": True, "loads": True, "speeds": True, "memory": False}


# ── ratios ──────────────────────────────────────────────────────────────────────────────────


def test_each_declared_contrast_and_the_twin_has_its_word_and_its_ratio(whole: Comparison) -> None:
    told = texts(drawn(whole, "ratios"))

    assert f"{REFERENCE} (twin)" in told
    words = [text for text in told if text in ("SAME", "DIFFERENT", "INCONCLUSIVE", "no claim")]
    assert words == ["SAME", "DIFFERENT", "DIFFERENT", "SAME", "INCONCLUSIVE"]
    assert sum("×" in text for text in told) == len(words)
    assert alt(whole, "ratios") == (
        "Against llama-cpp: llama-cpp@ngl=9 is faster; llama-cpp@cpu-moe is slower; ollama is the same within 3 %; "
        "llama-cpp@ngl=99 is not told apart"
    )


def test_an_arm_without_a_ratio_is_a_row_of_words(whole: Comparison) -> None:
    told = texts(drawn(whole, "ratios"))

    for name, why in (
        ("llama-cpp@ngl=1", "DOES_NOT_FIT: out of memory"),
        ("llama-cpp@ngl=98", "= llama-cpp@ngl=99 (all layers)"),
        ("ollama@cpu", "UNAVAILABLE: no Ollama here"),
    ):
        assert told.index(why) == told.index(name) + 1


def test_a_pair_that_may_not_be_compared_has_its_reason_and_no_ratio(whole: Comparison) -> None:
    found = with_contrasts(whole, word="NOT_COMPARABLE", reason="other weights", ratio=7.77)
    told = texts(drawn(found, "ratios"))

    assert told.count("not comparable: other weights") == 4
    assert not [text for text in told if "7.77" in text]
    assert sum("×" in text for text in told) == 1, "the twin's"


def test_a_red_run_ranks_nothing_in_its_chart() -> None:
    red = compare(played(a_header(), twin=1.3))
    svg = drawn(red, "ratios")
    told = texts(svg)

    assert red.state.word == "RED"
    assert alt(red, "ratios") == "This run is RED and ranks nothing"
    assert "llama-cpp (twin)" in told
    assert sum("×" in text for text in told) == 1, "the twin's, which shows why"
    assert canvas.VERMILLION not in svg
    assert canvas.BLUE not in svg


def test_a_screening_says_that_it_claims_nothing() -> None:
    few = compare(played(a_header(preset="quick")))
    svg = drawn(few, "ratios")

    assert "no claim" in alt(few, "ratios")
    assert not {"SAME", "DIFFERENT", "INCONCLUSIVE"} & set(texts(svg))
    assert canvas.VERMILLION not in svg


def test_each_verdict_has_a_mark_of_its_own_shape(whole: Comparison) -> None:
    shapes = set()
    for word in ("SAME", "DIFFERENT", "INCONCLUSIVE"):
        root = parsed(drawn(with_contrasts(whole, twin=True, word=word), "ratios"))
        shapes.add(frozenset(path.get("d") for defs in root.iter(f"{SVG}defs") for path in defs.iter(f"{SVG}path")))

    assert len(shapes) == 3


def test_an_interval_that_says_nothing_is_not_drawn(whole: Comparison) -> None:
    wide = drawn(with_contrasts(whole, twin=True, word="INCONCLUSIVE", ratio=1.0, low=0.01, high=100.0), "ratios")
    told = drawn(with_contrasts(whole, twin=True, word="INCONCLUSIVE", ratio=1.0, low=0.5, high=2.0), "ratios")

    assert sum("×" in text and "(" not in text for text in texts(wide)) == 5
    assert not {"0.01", "100"} & set(texts(wide)), "nor is there room for it"
    assert len(list(parsed(told).iter(f"{SVG}path"))) > len(list(parsed(wide).iter(f"{SVG}path")))


def test_pairs_without_a_common_reference_are_named_whole() -> None:
    pairs = ((OTHER, REFERENCE), (THIRD, OTHER))
    found = compare(played(a_header(contrasts=pairs)))
    told = texts(drawn(found, "ratios"))

    assert f"{OTHER} / {REFERENCE}" in told
    assert alt(found, "ratios").startswith("Decode speed: ")


@pytest.mark.parametrize("ratio", [1e-9, 1e9])
def test_a_ratio_beyond_all_reason_has_its_place(whole: Comparison, ratio: float) -> None:
    svg = drawn(with_contrasts(whole, word="DIFFERENT", ratio=ratio, low=ratio / 2, high=ratio * 2), "ratios")

    assert "1" in texts(svg)
    assert not [text for text, left, _, right, _ in boxes(svg) if left < 0 or right > 450]


def with_contrasts(comparison: Comparison, *, twin: bool = False, **changed: object) -> Comparison:
    """The same with other contrasts, and with another twin if asked."""
    judgement = comparison.judgement
    contrasts = {
        pair: dataclasses.replace(each, **changed)  # type: ignore[arg-type]
        for pair, each in judgement.contrasts.items()
    }
    copy = judgement.twin
    if twin and copy is not None:
        copy = dataclasses.replace(copy, contrast=dataclasses.replace(copy.contrast, **changed))  # type: ignore[arg-type]
    judgement = dataclasses.replace(judgement, contrasts=contrasts, twin=copy)
    return dataclasses.replace(comparison, judgement=judgement)


# ── loads ───────────────────────────────────────────────────────────────────────────────────


def test_every_arm_and_the_twin_has_a_row_with_its_median(whole: Comparison) -> None:
    told = texts(drawn(whole, "loads"))
    rows = [f"{REFERENCE}", f"{REFERENCE} (twin)", OTHER, THIRD, "ollama", "llama-cpp@ngl=99"]

    assert [text for text in told if text in rows] == rows
    assert sum(text.startswith("median ") for text in told) == len(rows)
    assert "block 1" in told
    assert "judged" not in told, "a key says what is other than usual"


def test_loads_that_broke_or_are_not_judged_have_marks_and_words_of_their_own() -> None:
    told = texts(drawn(compare(played(a_header(), dies=THIRD, since_block=3)), "loads"))

    assert {"judged", "broke, without a speed"} <= set(told)
    assert [text for text in told if text.startswith("not judged: its block was run again")]
    assert "3 (2)" in told, "the second attempt at block 3"


def test_a_load_far_off_is_at_the_edge_with_its_speed() -> None:
    """And does not press the others flat."""
    run = played(a_header(), noise=0.005)
    last = max((load for load in run.loads if load.arm == OTHER), key=lambda load: load.block)
    slow = tuple(
        dataclasses.replace(
            each,
            chunk_ns=tuple(3 * stamp for stamp in each.chunk_ns),
            end_ns=3 * (each.end_ns or 0),
            usage=each.usage and dataclasses.replace(each.usage, decode_s=3 * (each.usage.decode_s or 0.0)),
        )
        for each in run.samples[last.id]
    )
    found = compare(dataclasses.replace(run, samples=run.samples | {last.id: slow}))
    told = texts(drawn(found, "loads"))
    (speed,) = (load.decode_tps for load in found.row(OTHER).loads if load.block == last.block)

    assert f"{speed:.2f}" in told
    assert any("30 % above it" in text for text in told)


def test_a_pause_of_a_resumed_run_is_cut_out() -> None:
    run = played(a_header())
    night = 12 * 3600.0
    loads = tuple(
        dataclasses.replace(load, started_unix_s=load.started_unix_s + night * (load.block > 2)) for load in run.loads
    )
    told = texts(drawn(compare(dataclasses.replace(run, loads=loads)), "loads"))

    assert "minutes since the first load; 1 pause cut out, dotted" in told
    assert [text for text in told if text.isdecimal() and int(text) > 700], "and the clock went on"


# ── speeds ──────────────────────────────────────────────────────────────────────────────────


def test_speeds_are_not_for_comparing_arms_and_say_so(whole: Comparison) -> None:
    told = texts(drawn(whole, "speeds"))

    assert any("not for comparing arms" in text for text in told)
    assert told.count("–") == 4, "two arms have neither speed"
    assert "0.00" not in told
    assert "llama-cpp@ngl=98" not in told, "an alias is its original"


def test_a_speed_that_cannot_be_is_flagged(whole: Comparison) -> None:
    rows = tuple(dataclasses.replace(row, flags=(Flag.IMPOSSIBLE,)) if row.arm == THIRD else row for row in whole.rows)
    told = texts(drawn(dataclasses.replace(whole, rows=rows), "speeds"))

    assert sum(text.endswith(" !") for text in told) == 1
    assert any(text.startswith("! flagged") for text in told)


def test_an_interval_of_one_load_leaves_the_speed(whole: Comparison) -> None:
    speed = Interval(40.0, None, None, 1)
    rows = tuple(dataclasses.replace(row, decode_tps=row.decode_tps and speed) for row in whole.rows)
    told = texts(drawn(dataclasses.replace(whole, rows=rows), "speeds"))

    assert told.count("40.00") == 5


# ── memory ──────────────────────────────────────────────────────────────────────────────────


def test_memory_is_told_in_numbers_and_words_and_what_nobody_told_is_a_dash(whole: Comparison) -> None:
    told = texts(drawn(whole, "memory"))

    assert {"device, GiB", "host, GiB", "weights", "KV and state", "compute"} <= set(told)
    assert told.count("3.75 GiB") == 3
    assert "≈ 6.75 GiB" in told, "predicted for the arm that does not fit"
    assert "does not fit" in told
    assert told.count("–") == 2, "the arm that never started, on both sides"
    assert not [text for text in told if text.startswith("0 B")]
    assert alt(whole, "memory") == (
        "On the device 1.75 GiB to 3.75 GiB, as predicted; nothing was predicted for 2 arms"
    )


def test_what_is_not_as_predicted_is_the_finding() -> None:
    arms = [held(REFERENCE, 3, 2, predicted=predicted(3, 2)), held(OTHER, 3, 2, predicted=predicted(1, 4))]
    found = compare(played(a_header(*arms)))

    assert alt(found, "memory").endswith(f"{OTHER} is not as predicted")


def test_a_prediction_without_the_context_is_a_least() -> None:
    arms = [contender(arm, realised=None, predicted=predicted(3, 2, None)) for arm in (REFERENCE, OTHER)]
    told = texts(drawn(compare(played(a_header(*arms))), "memory"))

    assert told.count("≥ 3.25 GiB") == 2
    assert "…" in told


@pytest.mark.parametrize(("device", "near"), [(6, True), (1, False)])
def test_the_whole_memory_of_the_device_is_a_line_where_it_is_near(device: int, near: bool) -> None:
    """A card of 8 GiB."""
    found = compare(played(a_header(*(held(arm, device, 1) for arm in (REFERENCE, OTHER)))))
    svg = drawn(found, "memory")

    assert ("The device has 8.00 GiB in all: the dashed line." in texts(svg)) == near
    assert ("The device has 8.00 GiB in all." in texts(svg)) != near
    assert (canvas.VERMILLION in svg) == near


def test_without_a_device_there_is_one_plot() -> None:
    found = compare(played(a_header(*(contender(arm) for arm in (REFERENCE, OTHER)))))
    rows = tuple(
        dataclasses.replace(row, buffers=(Buffer("CPU", "weights", 100 << 20, on_host=True),), cell=Cell.FITS)
        for row in found.rows
    )
    found = dataclasses.replace(found, rows=rows)
    told = texts(drawn(found, "memory"))

    assert alt(found, "memory") == "All of it is host memory"
    assert "host, MiB" in told
    assert "device, MiB" not in told
