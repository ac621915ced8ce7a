"""The whole walk in one call, and the same folder read again."""

from __future__ import annotations

import difflib
from pathlib import Path

from harness import baseline, record
from harness.changes import Changes, compare_runs
from harness.charts import is_same
from harness.compare import Comparison, compare
from harness.errors import RunRefused, UsageError
from harness.find import find
from harness.options import Options
from harness.probe import Watch
from harness.render import charts, report
from harness.run import run

REPORT = "report.md"


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
    """Judge a run folder and write its report and charts into it. Raises RunRefused."""
    comparison = read(folder)
    for name, text in {**charts(comparison), REPORT: report(comparison)}.items():
        _write(folder / name, text)
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

    The plan must hash to the digest written before block 1, and the report must be the one that
    the samples give, to the letter.
    """
    run = record.read(folder)
    problems = []
    if run.header.plan.digest != run.header.plan_digest:
        problems.append(f"the plan was changed: its digest is {run.header.plan.digest}, not {run.header.plan_digest}")
    path = folder / REPORT
    if not path.is_file():
        raise RunRefused(f"{folder} has no {REPORT}; write it with `llamaduel report {folder}`")
    written = path.read_text(encoding="utf-8", errors="replace").splitlines()
    comparison = compare(run)
    computed = report(comparison).splitlines()
    changed = difflib.unified_diff(written, computed, "written", "computed", lineterm="", n=0)
    for name, text in charts(comparison).items():
        found = (folder / name).read_text(encoding="utf-8", errors="replace") if (folder / name).is_file() else ""
        if not is_same(found, text):
            problems.append(f"{name} is not the chart that the samples give; draw it by `llamaduel report {folder}`")
    problems += [
        f"{'the samples give' if line[0] == '+' else 'the report says'}: {line[1:]}"
        for line in list(changed)[2:]
        if not line.startswith("@@")
    ]
    return problems
