"""The whole walk in one call, and the same folder read again."""

from __future__ import annotations

import difflib
import os
from importlib import metadata
from pathlib import Path

from harness import baseline, record
from harness.changes import Changes, compare_runs
from harness.charts import draw, is_same
from harness.charts.canvas import drawn_by
from harness.compare import Comparison, compare
from harness.errors import RunRefused, UsageError
from harness.find import find
from harness.options import Options
from harness.page import page
from harness.probe import Watch
from harness.render import report
from harness.run import run

REPORT, PAGE, CHARTS = "report.md", "report.html", "charts"
SHOWN = frozenset({".html", ".htm", ".xhtml", ".svg", ".svgz"})  # what a browser opens


def duel(options: Options, watch: Watch, *, merge_aliases: bool = True) -> Comparison:
    """Run, judge, and leave `report.md` in the run folder. Raises DuelError.

    With a baseline to compare with, what cannot work is told first; see `changes_since_baseline`.
    """
    options = baseline.follow(options)
    if (folder := options.fail_on_regression) is not None and not (before := read(Path(folder))).state.ranks:
        raise UsageError(f"the baseline {folder} is {before.state.word} and ranks nothing; name another run")
    return write_report(run(options, watch, merge_aliases=merge_aliases).folder)


def find_best(options: Options, watch: Watch) -> Comparison:
    """Search the best value of a sweep, confirm it, judge, and leave `report.md`. Raises DuelError."""
    if options.fail_on_regression is not None:
        raise UsageError("a search is compared with no earlier run; give --fail-on-regression to `llamaduel run`")
    return write_report(find(options, watch).folder)


def read(folder: Path) -> Comparison:
    """The comparison of a run folder. Raises RunRefused."""
    return compare(record.read(folder))


def changes_since_baseline(comparison: Comparison) -> Changes | None:
    """What changed since the run that `fail_on_regression` named; None if it named none, or this run was stopped."""
    folder = comparison.header.options.get("fail_on_regression")
    return compare_runs(read(Path(folder)), comparison) if folder and comparison.finished else None


def write_report(folder: Path) -> Comparison:
    """Judge a run folder and write its charts and its report into it, as Markdown and as a page. Raises RunRefused."""
    comparison = read(folder)
    text, charts = report(comparison), draw(comparison)
    _require_inside(folder / CHARTS, folder)
    for left in {path.name for path in (folder / CHARTS).glob("*.svg*")} - {Path(name).name for name in charts}:
        (folder / CHARTS / left).unlink(missing_ok=True)  # of an earlier report, and no more in this one
    for name, content in {**charts, REPORT: text, PAGE: page(text, charts)}.items():
        _write(folder / name, content, folder)
    return comparison


def _require_inside(path: Path, folder: Path) -> None:
    """A link may lead anywhere, and nothing there is ours. Raises RunRefused."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise RunRefused(f"{path} leads out of {folder} by a link, and nothing is written there; remove the link")


def _write(path: Path, text: str, folder: Path) -> None:
    """A full disk must not cost what is there. Raises RunRefused."""
    partial = path.with_name(f"{path.name}.partial")
    _require_inside(partial, folder)
    try:
        path.parent.mkdir(exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise RunRefused(f"{path} cannot be written ({error.strerror}); make room or copy the run") from None


def verify(folder: Path) -> list[str]:
    """What of a run folder cannot be reproduced from its samples; nothing, if all is well.

    The plan must hash to the digest written before block 1, the report must be the one that the samples give, to
    the byte, the charts those that they give, and the page that of this report and these charts. Nothing else may
    lie there that a browser shows.
    """
    run = record.read(folder)
    problems = []
    if run.header.plan.digest != run.header.plan_digest:
        problems.append(f"the plan was changed: its digest is {run.header.plan.digest}, not {run.header.plan_digest}")
    written = {name: _bytes(folder / name) for name in (REPORT, PAGE)}
    for name, found in written.items():
        if found is None:
            raise RunRefused(f"{folder} has no {name}; write it with `llamaduel report {folder}`")
    comparison = compare(run)
    again = f"write it again by `llamaduel report {folder}`"
    charts: dict[str, str] = {}
    for name, drawn in draw(comparison).items():
        charts[name] = _text(_bytes(folder / name))
        if not is_same(charts[name], drawn):
            problems.append(f"{name} is not the chart that the samples give; {again}")
    problems += [f"{name} is no part of this report; remove it" for name in _others(folder, {PAGE, *charts})]
    if written[PAGE] != page(_text(written[REPORT]), charts).encode():
        problems.append(f"{PAGE} is not the page of {REPORT} and its charts; {again}")
    computed = report(comparison)
    changed = difflib.unified_diff(
        _text(written[REPORT]).splitlines(), computed.splitlines(), "written", "computed", lineterm="", n=0
    )
    told = [
        f"{'the samples give' if line[0] == '+' else 'the report says'}: {line[1:]}"
        for line in list(changed)[2:]
        if not line.startswith("@@")
    ]
    if not told and written[REPORT] != computed.encode():
        told = [f"{REPORT} has the words that the samples give, with other line ends or bytes; {again}"]
    return problems + told


def drawn_elsewhere(folder: Path) -> tuple[str, ...]:
    """Versions of matplotlib, other than the one here, that drew charts of a run: those are compared nearly."""
    here = metadata.version("matplotlib")
    found = {drawn_by(_text(_bytes(path))) or "unknown" for path in (folder / CHARTS).glob("*.svg")}
    return tuple(sorted(found - {here}))


def _others(folder: Path, ours: set[str]) -> list[str]:
    """What lies among the charts, or would open in a browser, beside the files of a report. Another run is its own."""
    found = []
    for place, folders, files in os.walk(folder):
        inside = Path(place)
        folders[:] = [name for name in folders if not (inside / name / record.HEADER).is_file()]
        for path in (inside / file for file in files):
            name = path.relative_to(folder).as_posix()
            is_shown = path.suffix.lower() in SHOWN or (inside == folder / CHARTS and not path.name.startswith("."))
            found += [name] if is_shown and name not in ours else []
    return sorted(found)


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _text(found: bytes | None) -> str:
    return (found or b"").decode(errors="replace")
