"""Two runs compared: each arm through the reference that both runs have, so that the day falls out.

An arm's change is the difference of its mean log ratios to the reference, with an interval that is
joint over all arms compared. What would make that ratio mean something else forbids a verdict. A
loss that is shown to be beyond the margin is a regression, and so is an arm that no longer runs,
the reference too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from harness import differences, verdict
from harness.compare import Comparison, Row
from harness.differences import Difference
from harness.errors import RunRefused
from harness.plan import FAILED, Status
from harness.verdict import Interval, Level

Word: TypeAlias = Literal["SAME", "FASTER", "SLOWER", "INCONCLUSIVE", "LOST", "NOT_COMPARABLE"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One arm that both runs were asked for. Ratios are after / before through the reference; unknown is None."""

    arm: str
    word: Word
    before_tps: Interval | None
    after_tps: Interval | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    attained_margin: float | None = None  # within it the two are shown to be the same
    margin: float
    regression: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs."""

    run_dir: str
    started: str
    state: verdict.StateWord
    blocks: int  # judged
    reference: str
    reference_tps: Interval | None  # its own, with the day in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What differs between two runs, first in what they are, then in what they measured.

    `decided`: at least one arm was judged. Without it no regression is no news.
    """

    before: Side
    after: Side
    reference: str | None  # of both
    level: str | None  # of the intervals, in words; None where there is none
    margin: float  # of the later run
    regression: bool
    decided: bool
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    differences: tuple[Difference, ...]


def compare_runs(before: Comparison, after: Comparison) -> Changes:
    """Judge what changed from one run to a later one. Raises RunRefused if they are one run."""
    if before.header == after.header:
        raise RunRefused(f"{before.run.folder} and {after.run.folder} are one run; name another to compare it with")
    found = differences.between(before.header, after.header)
    reference = before.reference.arm if before.reference.arm == after.reference.arm else None
    later = {row.arm: row for row in after.rows}
    pairs = [
        (row, later[row.arm])
        for row in before.rows
        if row.arm in later
        and not (row.arm == reference and row.loads and later[row.arm].loads)  # the others are read through it
        and not row.status.word is later[row.arm].status.word is Status.ALIAS  # it has no numbers of its own
    ]
    reasons = {row.arm: _why_not(row, other, before, after, found) for row, other in pairs}
    judged = sum(reason is None for reason in reasons.values())
    level = verdict.change_level(judged)
    changes = tuple(
        _judge(row, other, before, after, level)
        if (reason := reasons[row.arm]) is None
        else _without_verdict(row, other, reason, after, forbidden=bool(_forbidding(found, row.arm, reference)))
        for row, other in pairs
    )
    return Changes(
        before=_side(before),
        after=_side(after),
        reference=reference,
        level=level.words if judged else None,
        margin=after.header.plan.margin,
        regression=any(change.regression for change in changes),
        decided=any(change.word in ("SAME", "FASTER", "SLOWER", "INCONCLUSIVE", "LOST") for change in changes),
        changes=changes,
        notes=tuple(_notes(before, after, reference, found)),
        differences=found,
    )


def nothing_common(changes: Changes) -> str:
    """Why no arm is in both runs to be compared, in half a sentence."""
    if changes.reference is None:
        return "no arm with numbers of its own is in both runs"
    return f"only the reference, {changes.reference}, is in both runs, and no arm to compare through it"


def _side(comparison: Comparison) -> Side:
    return Side(
        run_dir=str(comparison.run.folder),
        started=comparison.header.started,
        state=comparison.state.word,
        blocks=comparison.judgement.n,
        reference=comparison.reference.arm,
        reference_tps=comparison.reference.decode_tps,
    )


# ── may it be judged ────────────────────────────────────────────────────────────────────────


def _forbidding(found: Sequence[Difference], arm: str, reference: str | None) -> list[Difference]:
    """Differences of the whole run, of this arm or of the reference with which a ratio would mean something else."""
    return [each for each in found if each.forbids and each.arm in (None, arm, reference)]


def _why_not(row: Row, other: Row, before: Comparison, after: Comparison, found: Sequence[Difference]) -> str | None:
    """Why nothing may be said about this arm, in words; None if it may be judged."""
    reference = before.reference.arm if before.reference.arm == after.reference.arm else None
    if not row.loads:
        now = "" if other.loads else f", and has none now ({_why_none(other, after)})"
        return f"it had no numbers before ({_why_none(row, before)}){now}"
    if not other.loads:
        return f"it ran before, now {_why_none(other, after)}"
    if forbidding := _forbidding(found, row.arm, reference):
        more = f" (and {len(forbidding) - 1} more)" if len(forbidding) > 1 else ""
        return f"{forbidding[0]}{more}"
    if reference is None:
        return "the runs have no common reference, so the two days are confounded"
    for comparison, which in ((before, "earlier"), (after, "later")):
        if not comparison.reference.loads:
            return f"in the {which} run the reference has no loads"
        if not comparison.state.ranks:
            return f"the {which} run is {comparison.state.word} and ranks nothing"
        mine = comparison.row(row.arm)
        if mine.status.word is not Status.OK:
            return f"in the {which} run it is {mine.status}"
        if mine.contrast is not None and mine.contrast.word == "NOT_COMPARABLE":
            return f"in the {which} run it is not comparable with {reference}: {mine.contrast.reason}"
        digests = {mine.weights_digest, comparison.reference.weights_digest}
        if digests != {comparison.header.model.digest}:
            return f"in the {which} run the weights that were loaded are not proven to be the same"
    return None


def _why_none(row: Row, comparison: Comparison) -> str:
    """Why an arm has no numbers. One that is well has none where its reference fails, or the run was stopped early."""
    stopped = comparison.reference.status.word is Status.OK
    return row.why_not or ("no block is complete" if stopped else "the reference has no loads")


def _without_verdict(row: Row, other: Row, reason: str, after: Comparison, *, forbidden: bool) -> Change:
    """An arm that its engine no longer runs is lost, unless the two runs are of different things.

    So is one of which no load counts: the plan left it out, for too few of its requests were valid.
    """
    fails = other.status.word in FAILED or (other.status.word is Status.UNSTABLE and after.finished)
    lost = bool(row.loads) and not other.loads and fails and not forbidden
    return Change(
        arm=row.arm,
        word="LOST" if lost else "NOT_COMPARABLE",
        before_tps=row.decode_tps,
        after_tps=other.decode_tps,
        margin=after.header.plan.margin,
        regression=lost,
        reason=reason,
    )


# ── the verdict ─────────────────────────────────────────────────────────────────────────────


def _judge(row: Row, other: Row, before: Comparison, after: Comparison, level: Level) -> Change:
    import numpy as np

    margin = after.header.plan.margin
    old, new = (np.asarray(_against(mine, run.reference)) for mine, run in ((row, before), (other, after)))
    test = verdict.changed(old, new, level.alpha, margin)
    mean, half = float(test.mean), float(test.half_width)
    word: Word = "INCONCLUSIVE"
    if test.same:
        word = "SAME"
    elif test.differs:
        word = "FASTER" if mean > 0 else "SLOWER"
    floor, reason = _noise_floor(before, after), ""
    if word in ("FASTER", "SLOWER") and math.expm1(abs(mean)) < floor:
        word = "INCONCLUSIVE"
        reason = f"less than the noise floor of ±{100 * floor:.1f} % that the second copies of the reference show"
    return Change(
        arm=row.arm,
        word=word,
        before_tps=row.decode_tps,
        after_tps=other.decode_tps,
        ratio=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        attained_margin=math.expm1(abs(mean) + float(test.same_half_width)),
        margin=margin,
        regression=word == "SLOWER" and 1 - math.exp(mean + half) > margin,
        reason=reason,
    )


def _against(row: Row, reference: Row) -> list[float]:
    """Log ratios of an arm to its reference, block by block."""
    chief = {load.block: load.decode_tps for load in reference.loads}
    return [math.log(load.decode_tps / chief[load.block]) for load in row.loads if load.block in chief]


def _noise_floor(*runs: Comparison) -> float:
    """What AMBER runs do not tell from nothing: their twins' half-widths, as independent as the runs."""
    twins = [run.judgement.twin for run in runs if run.state.word == "AMBER"]
    return math.hypot(*(twin.contrast.half_width or 0.0 for twin in twins if twin is not None))


def _notes(before: Comparison, after: Comparison, reference: str | None, found: Sequence[Difference]) -> list[str]:
    """What the reader must know of the two runs as a whole, a sentence each."""
    notes = []
    if reference is None:
        notes.append(
            f"The reference was {before.reference.arm} and is {after.reference.arm}: the two days are confounded, "
            "and the numbers only stand side by side."
        )
    else:
        notes.append(f"A change that hits all arms alike, {reference} too, is not visible here.")
        notes += [
            f"The reference is another build ({each.before}, then {each.after}), so a change may be its own."
            for each in found
            if each.arm == reference and each.fact == "engine"
        ]
    for one, rows, which in ((before, after.rows, "earlier"), (after, before.rows, "later")):
        only = [row.arm for row in one.rows if row.arm not in {other.arm for other in rows}]
        if only:
            notes.append(f"Only the {which} run was asked for {', '.join(only)}.")
    if datetime.fromisoformat(before.header.started) > datetime.fromisoformat(after.header.started):
        notes.append("The first of the two runs began after the second.")
    return notes
