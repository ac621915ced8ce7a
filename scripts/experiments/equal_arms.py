"""Forty whole comparisons of one placement with itself, on a real engine: how often is it called DIFFERENT?

    .venv/bin/python scripts/experiments/equal_arms.py WORK [--publish FOLDER]

Two names of one placement (`llama-cpp` and `llama-cpp@cpu`, which are equal where there is no GPU) run with the
twin, as in any run: its own plan, its own looks, its own verdict. Whatever is called DIFFERENT is false.
Comparisons that are in the folder WORK are not repeated, so the script can be stopped and started again. With
--publish every load goes into FOLDER, and a result that is computed from those loads alone.
"""

from __future__ import annotations

import argparse
import csv
import math
import shutil
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
from harness import plan, verdict
from harness.compare import MOST_INVALID
from harness.plan import Outcome, Plan

ARMS = "llama-cpp,llama-cpp@cpu"
COMPARISONS = 40
SIZE = "128MiB"  # of the synthetic model: about 250 tokens a second on one core of a server
BUDGET_MINUTES = 2.0  # fixes 6 to 12 blocks, by the speed that the probe sees
COLUMNS = (
    *("seed", "block", "attempt", "position", "label", "minute"),
    *("decode_tps", "requests_tps", "invalid_requests", "foreign_cores"),
)
LOADS, PLANS, RESULT = "loads.csv", "plans.jsonl", "README.md"


# ── measure ─────────────────────────────────────────────────────────────────────────────────


def options(work: Path, seed: int) -> harness.Options:
    return harness.Options(
        model=str(work / "model.gguf"),
        arms=ARMS,
        seed=seed,
        budget=BUDGET_MINUTES,
        prompt_tokens=32,
        context=512,
        out_tokens=128,
        no_wait=True,
        out=str(work / f"seed-{seed:03}"),
    )


def measure(work: Path, seed: int) -> harness.Comparison:
    """The comparison of this seed: read, continued or begun."""
    folder = next((header.parent for header in (work / f"seed-{seed:03}").glob("*/run.json")), None)
    if folder is not None and (found := finished(folder)):
        return found
    with harness.show_progress() as watch:
        if folder is not None:
            return harness.duel(harness.Options(resume=str(folder), no_wait=True), watch)
        shutil.rmtree(work / f"seed-{seed:03}", ignore_errors=True)  # it was stopped before it had a plan
        return harness.duel(options(work, seed), watch, merge_aliases=False)


def finished(folder: Path) -> harness.Comparison | None:
    try:
        found = harness.read(folder)
    except harness.DuelError:  # a plan, and no load yet
        return None
    return found if found.finished else None


def comparisons(work: Path, wanted: int) -> Iterator[harness.Comparison]:
    """One after another, by seed, until `wanted` of them had blocks enough for a claim."""
    seed = claims = 0
    while claims < wanted:
        seed += 1
        found = measure(work, seed)
        claims += found.judgement.n >= verdict.FEWEST_BLOCKS and bool(found.judgement.contrasts)
        yield found


# ── publish ─────────────────────────────────────────────────────────────────────────────────


def publish(found: Sequence[harness.Comparison], out: Path) -> None:
    """Plans, and a line for each load: all that the result is computed from."""
    out.mkdir(parents=True, exist_ok=True)
    (out / PLANS).write_text("".join(f"{each.header.plan.to_json()}\n" for each in found), "utf-8")
    with (out / LOADS).open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for each in found:
            table.writerows(_lines(each))
    again = [run.judgement.state.word for run in read(out)]
    if again != [each.state.word for each in found]:
        raise ValueError(f"the published loads give other states than the runs: {again}")
    (out / RESULT).write_text(result(out), "utf-8")


def _lines(found: harness.Comparison) -> Iterator[tuple[object, ...]]:
    loads = [load for load in found.run.loads if load.stage == "block"]
    began = min(load.started_unix_s for load in loads)
    for load in loads:
        samples = found.run.samples_of(load)
        valid = [each.decode_tps for each in samples if each.invalid is None and each.decode_tps]
        value = plan.load_value(valid, found.header.plan.requests)
        foreign = load.telemetry.foreign_cores if load.telemetry else None
        yield (
            found.header.plan.seed,
            load.block,
            load.attempt,
            load.position,
            load.label,
            f"{(load.started_unix_s - began) / 60:.4f}",
            "" if value is None else f"{math.exp(value):.3f}",
            " ".join(f"{tps:.3f}" for tps in valid),
            sum(each.invalid is not None for each in samples),
            "" if foreign is None else f"{foreign:.2f}",
        )


# ── what was found ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Judged:
    """One comparison, judged anew from its published loads.

    `claim` is the test before the state had its say; None where an arm was lost in the probe.
    """

    plan: Plan
    judgement: verdict.Judgement
    claim: verdict.Contrast | None
    variance: verdict.Variance
    foreign_cores: tuple[float, ...]


def read(folder: Path) -> list[Judged]:
    """All comparisons of a published folder."""
    plans = [Plan.from_json(line) for line in (folder / PLANS).read_text("utf-8").splitlines()]
    rows: dict[int, list[dict[str, str]]] = {each.seed: [] for each in plans}
    with (folder / LOADS).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rows[int(row["seed"])].append(row)
    return [judged(each, rows[each.seed]) for each in plans]


def judged(drawn: Plan, rows: Sequence[Mapping[str, str]]) -> Judged:
    requests = {
        (int(row["block"]), int(row["attempt"]), row["label"]): [float(tps) for tps in row["requests_tps"].split()]
        for row in rows
    }
    outcomes = []
    for (block, attempt, label), speeds in requests.items():
        value = plan.load_value(speeds, drawn.requests)
        broken = "too few valid requests" if value is None else None
        outcomes.append(Outcome(block=block, attempt=attempt, label=label, value=value, broken=broken))
    kept = plan.kept(drawn, outcomes)
    values = plan.values(drawn, outcomes)
    minutes = {(int(row["block"]), int(row["attempt"]), row["label"]): float(row["minute"]) for row in rows}
    judgement = verdict.judge(
        values,
        {label: [minutes[load.block, load.attempt, label] for load in loads] for label, loads in kept.items()},
        drawn.contrasts,
        level=drawn.level,
        seed=drawn.seed,
        reference=drawn.reference,
        twin_label=drawn.twin,
        margin=drawn.margin,
        aliases=drawn.aliases,
        unstable=broken_arms(drawn, outcomes, rows),
    )
    spread = {
        label: [[math.log(tps) for tps in requests[load.block, load.attempt, label]] for load in loads]
        for label, loads in kept.items()
    }
    return Judged(
        drawn,
        judgement,
        next((verdict.contrast(values[a], values[b], drawn.level, drawn.margin) for a, b in drawn.contrasts), None),
        verdict.variance(spread),
        tuple(float(row["foreign_cores"]) for row in rows if row["foreign_cores"]),
    )


def broken_arms(drawn: Plan, outcomes: Sequence[Outcome], rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Labels of arms that a run calls unstable for what broke, as `compare` does."""
    found = {
        label: status.reason
        for label, status in plan.statuses(drawn, outcomes).items()
        if status.word is plan.Status.UNSTABLE
    }
    for label in drawn.labels:
        mine = [row for row in rows if row["label"] == label]
        invalid = sum(int(row["invalid_requests"]) for row in mine)
        if invalid > MOST_INVALID * (invalid + sum(len(row["requests_tps"].split()) for row in mine)):
            found[label] = f"{invalid} of its samples are invalid"
    return found


def result(folder: Path) -> str:
    """What the published loads say, in Markdown."""
    found = read(folder)
    able = [each for each in found if each.judgement.n >= verdict.FEWEST_BLOCKS and each.claim is not None]
    claims = [each.claim for each in able if each.claim is not None]
    n = len(able)
    claimed = sum(each.word == "DIFFERENT" for each in claims)
    told = sum(each.word == "DIFFERENT" for run in able for each in run.judgement.contrasts.values())
    words = [each.word for each in claims]
    states = [each.judgement.state.word for each in able]
    blocks = [each.judgement.n for each in able]
    twins = sum(run.judgement.twin is not None and run.judgement.twin.contrast.differs for run in able)
    margins = [each.attained_margin for each in claims if each.attained_margin is not None]
    between = [each.variance.between_loads for each in able if each.variance.between_loads is not None]
    within = [each.variance.within_load for each in able if each.variance.within_load is not None]
    foreign = [cores for each in found for cores in each.foreign_cores]
    loads = sum(each.judgement.n * len(each.plan.arms) for each in able)
    few = len(found) - n
    named = "".join(
        f"\nSeed {run.plan.seed}: {claim.sentence('the one name', 'the other')}, after {claim.n} blocks; the state of "
        f"the run is {run.judgement.state.word}.\n"
        for run, claim in zip(able, claims, strict=True)
        if claim.word == "DIFFERENT"
    )
    return f"""# Equal arms on a real engine

{_claim(claimed, n)}

Two names of one placement in {n} whole comparisons, each with the harness's own plan, looks and verdict. The machine
had two cores and was busy with other work all the time (builds, tests, other measurements:
{statistics.mean(foreign):.2f} foreign cores on average during a load, {max(foreign):.1f} at most). That makes intervals
wide and runs RED; it must not make equal things different.

| what | found |
|---|---|
| called DIFFERENT by the test | {claimed} of {n}, {_binomial(claimed, n)} |
| printed as DIFFERENT, after the state of the run had its say | {told} of {n}, {_binomial(told, n)} |
| verdicts of the test | {_counts(words)} |
| states | {_counts(states)} |
| twin's own 95 % interval leaves out 1 (5 % expected) | {twins} of {n}, {_binomial(twins, n)} |
| blocks a comparison | {min(blocks)} to {max(blocks)}, mean {statistics.mean(blocks):.1f} |
| loads judged | {loads} |
| noise between loads, σb | {_range(between)} |
| noise between requests of a load, σw | {_range(within)} |
| attained margin | {_range(margins)} |
{named}{_too_few(few)}
`{LOADS}` has a line for each load, with the speeds of its requests, and `{PLANS}` the plan of each comparison as it was
hashed before its first block; this page is computed from the two. Made by `scripts/experiments/equal_arms.py`.
"""


def _claim(claimed: int, n: int) -> str:
    verb = "was" if claimed == 1 else "were"
    return (
        f"Of {n} comparisons of equal arms, {claimed or 'none'} {verb} called DIFFERENT ({_binomial(claimed, n)}; "
        f"at most 5 % are promised)."
    )


def _too_few(count: int) -> str:
    if not count:
        return ""
    return f"""
{count} more make no claim and are not counted: their probe was so slow that the budget was for fewer than
{verdict.FEWEST_BLOCKS} blocks, or lost one of the arms. Both are fixed before the first block.
"""


def _binomial(k: int, n: int) -> str:
    """Exact 95 % interval of a share."""
    from scipy.stats import binomtest

    bounds = binomtest(k, n).proportion_ci(0.95, method="exact")
    return f"{100 * k / n:.1f} % (95 %: {100 * bounds.low:.1f}–{100 * bounds.high:.1f} %)"


def _range(shares: Sequence[float]) -> str:
    low, mean, high = min(shares), statistics.mean(shares), max(shares)
    return f"mean {100 * mean:.1f} %, from {100 * low:.1f} to {100 * high:.1f} %"


def _counts(words: Iterable[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(words).most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, metavar="WORK", help="folder for the model and the runs")
    parser.add_argument("--comparisons", type=int, default=COMPARISONS, metavar="N", help=f"how many ({COMPARISONS})")
    parser.add_argument("--publish", type=Path, metavar="FOLDER", help="where every load and the result are written")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if not (given.work / "model.gguf").exists():
        print(harness.synthesize(given.work / "model.gguf", size=SIZE))
    found = []
    for each in comparisons(given.work, given.comparisons):
        found.append(each)
        seed, n, state = each.header.plan.seed, each.judgement.n, each.state
        print(f"seed {seed}: {n} blocks, {state.word}: {state.reasons[0]}", flush=True)
    if given.publish:
        publish(found, given.publish)


if __name__ == "__main__":
    main()
