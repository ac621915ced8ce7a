"""CSV of a run: the numbers of its report, whole, one row each, and nothing that a spreadsheet would compute."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from played_run import TPS, a_header, contender, played, written

from harness import sheets
from harness.cli import main
from harness.compare import Comparison, all_rows, compare
from harness.facts import row_json
from harness.measure import Sample
from harness.plan import ArmStatus, Status
from harness.record import Run
from harness.words import plain

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = sorted(path.parent for path in (ROOT / "reports").rglob("run.json"))


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def drawn(comparison: Comparison, of: str) -> list[dict[str, str]]:
    return rows("".join(sheets.sheet(comparison, of)))


def replaced(run: Run, load: str, **changes: Any) -> Run:
    """The same run with the first measured request of one load changed."""
    first, *rest = run.samples[load]
    changed: tuple[Sample, ...] = (dataclasses.replace(first, **changes), *rest)
    return dataclasses.replace(run, samples={**run.samples, load: changed})


@pytest.fixture
def comparison() -> Comparison:
    return compare(played(a_header()))


@pytest.mark.parametrize("of", sheets.SHEETS)
def test_a_sheet_has_one_header_and_rows_of_its_length(comparison: Comparison, of: str) -> None:
    text = "".join(sheets.sheet(comparison, of))
    lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))

    assert text.endswith("\r\n")
    assert text.count("\r\n") == text.count("\n") == len(lines)
    assert {len(line) for line in lines} == {len(lines[0])}
    assert len(set(lines[0])) == len(lines[0])
    assert lines[0] not in lines[1:]


@pytest.mark.parametrize("folder", [None, *PUBLISHED], ids=lambda path: "played" if path is None else path.name)
def test_medians_and_intervals_of_the_loads_are_those_of_the_table(folder: Path | None) -> None:
    from harness import record

    comparison = compare(played(a_header()) if folder is None else record.read(folder))
    loads = drawn(comparison, "loads")
    for row in comparison.rows:
        mine = [float(each["decode_tps"]) for each in loads if each["arm"] == row.arm and each["is_twin"] == "false"]
        assert len(mine) == len(row.loads)
        if mine and row.decode_tps is not None:
            assert statistics.geometric_mean(mine) == pytest.approx(row.decode_tps.value)
    twins = [float(each["decode_tps"]) for each in loads if each["is_twin"] == "true"]
    assert len(twins) == len(comparison.twin.loads if comparison.twin else ())


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda path: path.name)
def test_medians_of_the_judged_samples_are_the_loads(folder: Path) -> None:
    from harness import record

    comparison = compare(record.read(folder))
    found: dict[tuple[str, ...], list[float]] = {}
    key = ("arm", "is_twin", "block", "attempt")
    for each in drawn(comparison, "samples"):
        if each["judged"] == "true":
            found.setdefault(tuple(each[name] for name in key), []).append(math.log(float(each["decode_tps"])))
    loads = {tuple(each[name] for name in key): float(each["decode_tps"]) for each in drawn(comparison, "loads")}

    assert {load: math.exp(statistics.median(logs)) for load, logs in found.items()} == pytest.approx(loads)


def test_the_arms_are_the_facts_of_the_table(comparison: Comparison) -> None:
    found = drawn(comparison, "arms")

    assert [each["arm"] for each in found] == [row.arm for row in all_rows(comparison)]
    for each, row in zip(found, all_rows(comparison), strict=True):
        facts = row_json(row)
        assert facts["decode_tps"] is not None
        assert float(each["decode_tps_low"]) == facts["decode_tps"]["low"]
        assert each["status"] == facts["status"]
        assert float(each["ratio"]) == facts["ratio"]["value"] if facts["ratio"] else each["ratio"] == ""


def test_every_request_is_there_with_the_reason_why_it_does_not_count() -> None:
    run = played(a_header())
    load = next(iter(run.samples))
    comparison = compare(replaced(run, load, fault="the wire broke"))
    found = drawn(comparison, "samples")

    assert len(found) == sum(map(len, run.samples.values()))
    assert [each["invalid"] for each in found if each["load"] == load][:2] == ["the wire broke", ""]
    assert [each["judged"] for each in found if each["load"] == load][:2] == ["false", "true"]
    assert [each["invalid_samples"] for each in drawn(comparison, "loads")][:2] == ["1", "0"]


def test_numbers_keep_all_their_digits_and_unknown_is_an_empty_cell(comparison: Comparison) -> None:
    (first, *_), sample = drawn(comparison, "loads"), drawn(comparison, "samples")[0]
    load = comparison.run.loads[0]
    speed = comparison.run.samples[load.id][0].decode_tps

    assert float(sample["decode_tps"]) == speed
    assert len(sample["decode_tps"]) >= len("40.123456789")
    assert (first["vram_bytes"], first["cpu_c"], sample["connect_s"]) == ("", "", "")
    assert float(first["started_unix_s"]) == load.started_unix_s


def test_a_run_of_which_nothing_is_judged_is_a_header(tmp_path: Path) -> None:
    run = played(a_header())
    comparison = compare(dataclasses.replace(run, loads=run.loads[:2]))

    assert drawn(comparison, "loads") == []
    assert next(iter(sheets.sheet(comparison))).startswith("run,arm,")


@pytest.mark.parametrize(
    "evil",
    ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", " =1", '=HYPERLINK("http://x","y")', "\N{FULLWIDTH EQUALS SIGN}1"]
    # signs that `plain` takes away, so that what stood behind them comes first
    + [f"{gone}=1" for gone in ("\u200b", "\ufeff", "\x01", "\x1b", "\xad", "\u2028", "\xa0", "\u202e\u200b ")]
    + ["\u2060@SUM(1)"],
)
def test_text_is_no_formula_and_numbers_stay_numbers(evil: str) -> None:
    missing = contender(
        "ollama", status=ArmStatus(Status.UNAVAILABLE, "no"), placement=evil, engine=None, realised=None
    )
    comparison = compare(played(a_header(*map(contender, TPS), missing)))
    found = drawn(comparison, "arms")[-1]

    assert found["placement"] == f"'{plain(evil)}"
    assert found["placement"][1] in "=+-@\N{FULLWIDTH EQUALS SIGN}"
    assert sheets._cell(-0.5) == -0.5
    assert sheets._cell(-7) == -7


def test_text_with_quotes_and_commas_comes_back_as_it_was_and_in_one_line() -> None:
    run = played(a_header())
    comparison = compare(replaced(run, next(iter(run.samples)), fault='a "b", c;d\r\n\x1b[31me\u202e'))

    assert drawn(comparison, "samples")[0]["invalid"] == 'a "b", c;d [31me'


def test_export_writes_the_sheet_asked_for_on_stdout(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    folder = str(written(played(a_header()), tmp_path / "a run"))
    told = {}
    for of in (None, "loads", "samples", "arms"):
        assert main(["export", folder, *(["--of", of] if of else [])]) == 0
        told[of] = capfdbinary.readouterr().out.decode()

    assert told[None] == told["loads"]
    assert len({*map(len, told.values())}) == 3
    assert rows(told["loads"])[0]["run"] == "a run"


def test_a_sheet_that_is_none_is_answered_with_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(written(played(a_header()), tmp_path / "run"))

    assert main(["export", folder, "--of", "sample"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "did you mean 'samples'? known: arms, loads, samples" in err


def test_a_sheet_is_given_line_by_line(comparison: Comparison) -> None:
    lines = sheets.sheet(comparison, "samples")

    assert next(lines).count("\r\n") == 1
    assert next(lines).count("\r\n") == 1
