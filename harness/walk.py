"""The whole walk in one call, and the same folder read again."""

from __future__ import annotations

import difflib
from pathlib import Path

from harness import baseline, record
from harness.changes import Changes, compare_runs
from harness.charts import draw, is_same
from harness.compare import Comparison, compare
from harness.errors import RunRefused, UsageError
from harness.find import find
from harness.options import Options
from harness.page import page
from harness.probe import Watch
from harness.render import report
from harness.run import run

REPORT, PAGE, CHARTS = "report.md", "report.html", "charts"


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
    for left in {path.name for path in (folder / CHARTS).glob("*.svg")} - {Path(name).name for name in charts}:
        (folder / CHARTS / left).unlink(missing_ok=True)  # of an earlier report, and no more in this one
    for name, content in {**charts, REPORT: text, PAGE: page(text, charts)}.items():
        _write(folder / name, content)
    return comparison


def _write(path: Path, text: str) -> None:
    """A full disk must not cost what is there. Raises RunRefused."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise RunRefused(f"{path} cannot be written ({error.strerror}); make room or copy the run") from None


def verify(folder: Path) -> list[str]:
    """What of a run folder cannot be reproduced from its samples; nothing, if all is well.

    The plan must hash to the digest written before block 1, the report must be the one that the samples give, to
    the letter, the charts those that they give, and the page that of this report and these charts.
    """
    run = record.read(folder)
    problems = []
    if run.header.plan.digest != run.header.plan_digest:
        problems.append(f"the plan was changed: its digest is {run.header.plan.digest}, not {run.header.plan_digest}")
    written = {name: _text(folder / name) for name in (REPORT, PAGE)}
    for name, found in written.items():
        if found is None:
            raise RunRefused(f"{folder} has no {name}; write it with `llamaduel report {folder}`")
    comparison = compare(run)
    again = f"write it again by `llamaduel report {folder}`"
    charts: dict[str, str] = {}
    for name, drawn in draw(comparison).items():
        charts[name] = _text(folder / name) or ""
        if not is_same(charts[name], drawn):
            problems.append(f"{name} is not the chart that the samples give; {again}")
    if written[PAGE] != page(written[REPORT] or "", charts):
        problems.append(f"{PAGE} is not the page of {REPORT} and its charts; {again}")
    changed = difflib.unified_diff(
        (written[REPORT] or "").splitlines(), report(comparison).splitlines(), "written", "computed", lineterm="", n=0
    )
    problems += [
        f"{'the samples give' if line[0] == '+' else 'the report says'}: {line[1:]}"
        for line in list(changed)[2:]
        if not line.startswith("@@")
    ]
    return problems


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
