"""One placement under four names while the machine gets busier: what the usual way finds, and what the harness finds.

    .venv/bin/python scripts/experiments/same_placement.py WORK [--publish FOLDER]

Without a GPU, `llama-cpp`, `llama-cpp@ngl=99`, `llama-cpp@cpu-moe` and `llama-cpp@cpu` are one placement. A child
process takes more and more of every core. First the usual way: one arm after the other, one load each, many
requests, and a t test over the requests. Then the harness with its blocks and its twin, under the same rise from
the start. Equal things differ for both; what counts is what is said about it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import harness
from harness import publication, verdict
from harness.load import run_load
from harness.probe import find_field, job_of, task

ARMS = "llama-cpp,llama-cpp@ngl=99,llama-cpp@cpu-moe,llama-cpp@cpu"
SIZE = "128MiB"  # of the synthetic model
RISE_S = 180.0  # until all cores are taken; both ways take about as long
REQUESTS = 60  # of one arm, the usual way: as many in all as the harness makes in 12 blocks
BUDGET_MINUTES = 4.0
OUT_TOKENS = 128
HABIT, RUN, RESULT = "one-after-another.csv", "run", "README.md"


# ── measure ─────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def rising_load() -> Iterator[None]:
    """All cores get busier while the block runs."""
    program = Path(__file__).with_name("burn.py")
    argv = [sys.executable, str(program), str(RISE_S), str(os.getpid())]
    burner = subprocess.Popen(argv, start_new_session=True)
    try:
        yield
    finally:
        burner.terminate()
        burner.wait()


def options(work: Path) -> harness.Options:
    return harness.Options(
        model=str(work / "model.gguf"),
        arms=ARMS,
        budget=BUDGET_MINUTES,
        seed=4,
        prompt_tokens=32,
        context=512,
        out_tokens=OUT_TOKENS,
        no_wait=True,
        out=str(work / RUN),
    )


def measure_in_turn(work: Path) -> None:
    """The usual way: arm after arm, one load each. A line for each request goes into `work`."""
    folder = work / "one-after-another"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with harness.show_progress() as watch, (work / HABIT).open("w", encoding="utf-8", newline="") as file:
        field = find_field(options(work), watch, merge_aliases=False)
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("arm", "request", "second", "decode_tps", "invalid"))
        began_ns = None
        for contender in field.contenders:
            if contender.engine is None:
                raise SystemExit(f"{contender.arm} cannot run: {contender.status}")
            tasks = [task(field, contender, n, OUT_TOKENS, options(work), warmup=n == 0) for n in range(REQUESTS + 1)]
            load, samples = run_load(job_of(field, contender, "block", tasks), folder, {}, lambda _: None, wait=False)
            if load.failure is not None:
                raise SystemExit(f"{contender.arm} failed: {load.failure}")
            for number, sample in enumerate(samples):
                began_ns = sample.sent_ns if began_ns is None else began_ns
                if not sample.warmup:
                    second, speed = (sample.sent_ns - began_ns) / 1e9, sample.decode_tps or math.nan
                    table.writerow((contender.arm, number, f"{second:.2f}", f"{speed:.3f}", sample.invalid or ""))


def measure_in_blocks(work: Path) -> None:
    """The harness, told to keep equal placements apart."""
    shutil.rmtree(work / RUN, ignore_errors=True)
    with harness.show_progress() as watch:
        harness.duel(options(work), watch, merge_aliases=False)


def measure(work: Path) -> None:
    """Both, each under the rise from its start, in processes of their own: to them the load is somebody else's."""
    for way in (measure_in_turn, measure_in_blocks):
        with rising_load(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as one:
            one.submit(way, work).result()


# ── what was found ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Welch:
    """An arm against the first, requests taken for replicates: what two lines of code would say."""

    arm: str
    mean_tps: float
    deviation_tps: float
    requests: int
    ahead: float | None  # of the first arm; None for the first itself
    p: float | None


def welch(path: Path) -> list[Welch]:
    """Welch's t test over the requests of each arm, against the arm that ran first."""
    from scipy.stats import ttest_ind

    speeds: dict[str, list[float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if not row["invalid"]:
                speeds.setdefault(row["arm"], []).append(float(row["decode_tps"]))
    first = next(iter(speeds.values()))
    return [
        Welch(
            arm,
            statistics.fmean(found),
            statistics.stdev(found),
            len(found),
            None if found is first else statistics.fmean(found) / statistics.fmean(first) - 1,
            None if found is first else float(ttest_ind(found, first, equal_var=False).pvalue),
        )
        for arm, found in speeds.items()
    ]


def result(folder: Path) -> str:
    """The two analyses side by side, in Markdown, from what is published."""
    usual, found = welch(folder / HABIT), harness.read(folder / RUN)
    false = [each for each in usual if each.p is not None and each.p < 0.05]
    texts = {arm.label: arm.text for arm in found.header.plan.arms}
    printed = {texts[a]: each for (a, _), each in found.judgement.contrasts.items()}
    tests = {texts[a]: each for (a, _), each in tests_of(found).items()}
    told = sum(each.word == "DIFFERENT" for each in printed.values())
    worst = max(false, key=lambda each: abs(each.ahead or 0.0), default=None)
    usually = f"The usual way finds {len(false)} of {len(usual) - 1} differences that do not exist" + (
        f", up to {100 * (worst.ahead or 0.0):+.0f} % (p = {worst.p:.1g})." if worst else "."
    )
    lines = [
        f"| {each.arm} | {each.mean_tps:.1f} ± {each.deviation_tps:.1f} | {_usual(each)} | {_harness(each, tests)} | "
        f"{printed[each.arm].word if each.arm in printed else 'reference'} |"
        for each in usual
    ]
    twin, drift = found.judgement.twin, found.judgement.drift
    copies = twin.contrast.sentence("the twin", "the reference") if twin else "no twin ran"
    trend = f"{100 * drift.per_minute:+.1f} % a minute, p = {drift.p_slope:.1g}" if drift else "not known"
    foreign = [load.telemetry.foreign_cores for load in found.run.loads if load.stage == "block" and load.telemetry]
    known = [cores for cores in foreign if cores is not None]
    rows = "\n".join(lines)
    return f"""# One placement under four names, on a machine that gets busier

{usually} The harness says {told or "no"} DIFFERENT, and {found.state.word}: {found.state.reasons[0]}

| arm, all the same | usual: tok/s, mean ± sd | usual: t test against the first | harness: ratio | harness: verdict |
|---|---|---|---|---|
{rows}

Usual: one arm after the other, one load each, {usual[0].requests} valid requests of the first as replicates, Welch's t
test (`{HABIT}`). Harness: {found.judgement.n} blocks, mirrored, in random order, one fresh start of each arm in each
([report]({RUN}/report.md)). Both were measured on the same engine while a child process took more and more of every
core, from nothing to all in {RISE_S:.0f} s; the machine was shared with other work besides ({known[0]:.1f} foreign
cores during the first load of the harness, {known[-1]:.1f} during the last, the child included).

- state: {found.state.word}; {" ".join(found.state.reasons)}
- twin: {copies}
- drift: {trend}

The run folder verifies with `llamaduel verify`; this page is computed from it and from the table of requests. Made by
`scripts/experiments/same_placement.py`.
"""


def tests_of(found: harness.Comparison) -> dict[tuple[str, str], verdict.Contrast]:
    """Each contrast as the test alone has it, before the state of the run had its say."""
    drawn = found.header.plan
    values = {
        arm.label: [math.log(load.decode_tps) for load in row.loads]
        for arm in drawn.arms
        for row in found.rows
        if row.arm == arm.text and arm.label != drawn.twin
    }
    return {
        (a, b): verdict.contrast(values[a], values[b], drawn.level, drawn.margin)
        for a, b in drawn.contrasts
        if values[a] and values[b]
    }


def _usual(each: Welch) -> str:
    if each.ahead is None or each.p is None:
        return "–"
    return f"{100 * each.ahead:+.1f} %, p = {each.p:.1g}" + (", “significant”" if each.p < 0.05 else "")


def _harness(each: Welch, tests: dict[str, verdict.Contrast]) -> str:
    if each.arm not in tests:
        return "1"
    test = tests[each.arm]
    return f"{test.ratio:.3f}× ({test.low:.3f}–{test.high:.3f}), test alone: {test.word}"


def publish_both(work: Path, out: Path) -> None:
    (run,) = (header.parent for header in (work / RUN).glob("*/run.json"))
    shutil.rmtree(out / RUN, ignore_errors=True)
    publication.publish_as(run, out / RUN, anyway=True)  # RED is what it shows
    shutil.copy(work / HABIT, out / HABIT)
    (out / RESULT).write_text(result(out), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, metavar="WORK", help="folder for the model and what is measured")
    parser.add_argument("--publish", type=Path, metavar="FOLDER", help="where both and the result are written")
    given = parser.parse_args()
    work = given.work
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "model.gguf").exists():
        print(harness.synthesize(work / "model.gguf", size=SIZE))
    measure(work)
    if given.publish:
        publish_both(work, given.publish)
        print((given.publish / RESULT).read_text("utf-8"))


if __name__ == "__main__":
    main()
