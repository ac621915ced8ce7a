"""What may be said about a run, or about two: sentences and nothing else. Computes nothing."""

from __future__ import annotations

import dataclasses

from harness.arms import KNOBS
from harness.changes import Change, Changes
from harness.compare import Comparison, Row
from harness.placement import Cell
from harness.plan import Status
from harness.record import Search
from harness.verdict import Contrast, telling
from harness.words import NONE, count, percent, plain, spread

ANSWER_CONTRASTS = 4  # more than these are in the table only


def answer(comparison: Comparison) -> str:
    """What may be said, in one paragraph, most important first. Engines and builds are named last."""
    state = comparison.state
    if state.word == "RED":
        said = f"This run ranks nothing. {state.reasons[0]}"
    elif comparison.header.search is not None:
        said = " ".join([_best(comparison), *_claims(comparison)])
    else:
        said = " ".join(_claims(comparison)) or _nothing_to_compare(comparison)
    engines = dict.fromkeys(row.engine for row in comparison.rows if row.engine and row.loads)
    stand_in = any(each.settings.stand_in_bytes is not None for each in comparison.header.contenders)
    label = " Stand-in device: placement is real, speed says nothing about a GPU." if stand_in else ""
    measured = f" Measured with {' and '.join(map(str, engines))}." if engines else ""
    return f"{said}{measured}{label}"


def _best(comparison: Comparison) -> str:
    """What a search came to, by what was confirmed."""
    search = comparison.header.search
    assert search is not None
    among = candidates(search)
    if not comparison.best:
        return f"Picked by a search over {search.over} ({among}): {' and '.join(search.chosen)}."
    names = " and ".join(row.arm for row in comparison.best)
    if len(comparison.best) == 1:
        return f"The best of {among} by {search.over} is {names}."
    same = any(row.contrast is not None and row.contrast.word == "SAME" for row in comparison.best)
    how = f"are the same within {percent(comparison.header.plan.margin)}" if same else "are not told apart"
    return f"The best of {among} by {search.over} are {names}, which {how}."


def candidates(search: Search) -> str:
    return count(len(search.candidates), "value" if search.over in KNOBS else "placement")


def _claims(comparison: Comparison) -> list[str]:
    drawn = comparison.header.plan
    texts = {arm.label: arm.text for arm in drawn.arms}
    found = list(comparison.judgement.contrasts.items())
    claims = [_claim(contrast, texts[a], texts[b]) for (a, b), contrast in found[:ANSWER_CONTRASTS]]
    if found and comparison.state.word == "SCREENING":
        claims.insert(0, f"{count(comparison.judgement.n, 'block')}: too few for a claim.")
    if len(found) > ANSWER_CONTRASTS:
        more = len(found) - ANSWER_CONTRASTS
        claims.append(f"{count(more, 'more comparison')} {'is' if more == 1 else 'are'} in the table.")
    return claims


def _claim(contrast: Contrast, arm: str, reference: str) -> str:
    bounds = f"{contrast.ratio:.2f}×"
    if (told := telling(contrast.low, contrast.high)) is not None:
        bounds += f", {told[0]:.2f}–{told[1]:.2f}"
    match contrast.word:
        case "SAME":
            return f"{arm} and {reference} decode at the same speed within {percent(contrast.margin)} ({bounds})."
        case "DIFFERENT":
            return f"{arm} decodes at {contrast.ratio:.2f} times the speed of {reference} ({bounds})."
        case "INCONCLUSIVE":
            within = percent(contrast.attained_margin) if contrast.attained_margin is not None else NONE
            return f"{arm} and {reference} are not told apart: within {within} ({bounds})."
        case "NOT_COMPARABLE":
            return f"{arm} and {reference} are not comparable: {contrast.reason}."
        case _:
            return f"{arm} / {reference}: {bounds}."


def _nothing_to_compare(comparison: Comparison) -> str:
    row = comparison.reference
    if not row.loads and row.status.word is not Status.OK:
        return f"{row.arm}, the reference, has no numbers ({status_of(row)}), so nothing is compared."
    if not row.loads:
        return "There is no complete block yet."
    same = [other.arm for other in comparison.rows if other.status.alias_of is not None]
    also = f" {', '.join(same)} would be the same placement." if same else ""
    return f"{row.arm} decodes at {spread(row.decode_tps)} tok/s; no other arm could be compared with it.{also}"


def unfinished(comparison: Comparison, folder: object) -> str:
    """What to do about a run that was stopped."""
    done = count(comparison.blocks_run, "block")
    return f"Stopped after {done}; go on with `llamaduel run --resume {folder}`"


def verdict_of(row: Row) -> str:
    if row.is_reference:
        return "reference"
    if row.contrast is None:
        return NONE
    if row.contrast.word == "INCONCLUSIVE" and row.contrast.attained_margin is not None:
        return f"INCONCLUSIVE (within {percent(row.contrast.attained_margin)})"
    return row.contrast.word


def status_of(row: Row) -> str:
    return row.why_not or str(row.status)


def memory_of(row: Row) -> str:
    return NONE if row.cell is Cell.UNKNOWN else row.cell.value


def ceiling_share_of(row: Row) -> str:
    return NONE if row.share is None else percent(round(row.share, 2))


def best_commands(comparison: Comparison) -> list[tuple[str, str]]:
    """Arm and command: of the best that a search found, then the same placement on other engines."""
    search = comparison.header.search
    if search is None or not comparison.best or comparison.best[0].command is None:
        return []
    best = comparison.best[0]
    return [(best.arm, best.command or ""), *search.elsewhere.get(best.arm, {}).items()]


# ── rows and what is in none of them ────────────────────────────────────────────────────────


def all_rows(comparison: Comparison) -> list[Row]:
    """All arms, and the twin after its original."""
    rows = list(comparison.rows)
    if comparison.twin is not None:
        twin = dataclasses.replace(
            comparison.twin,
            arm=f"{comparison.twin.arm} (twin)",
            is_reference=False,
            contrast=comparison.judgement.twin.contrast if comparison.judgement.twin else None,
        )
        rows.insert(rows.index(comparison.reference) + 1, twin)
    return rows


def not_counted(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """What is in the samples and in no number: how many of a kind, and each reason with its arm."""
    rows = all_rows(comparison)
    kinds = {
        "invalid sample": [(row.arm, row.invalid_reasons) for row in rows],
        "failed load": [(row.arm, row.failed_loads) for row in rows],
    }
    return [
        (count(total, kind), [f"{times} × {arm}: {why}" for arm, reasons in found for why, times in reasons.items()])
        for kind, found in kinds.items()
        if (total := sum(times for _, reasons in found for times in reasons.values()))
    ]


# ── two runs ────────────────────────────────────────────────────────────────────────────────


def change_sentence(change: Change) -> str:
    """What may be said about one arm in two runs."""
    arm, ratio_ = change.arm, ""
    if change.ratio is not None:
        ratio_ = f" ({change.ratio:.3f}×, {change.low:.3f}–{change.high:.3f})"
    within = percent(change.attained_margin) if change.attained_margin is not None else NONE
    match change.word:
        case "SAME":
            said = f"{arm} decodes as before within {percent(change.margin)}{ratio_}."
        case "SLOWER" if change.regression:
            said = f"{arm} is slower than before{ratio_}, by more than {percent(change.margin)}: a regression."
        case "SLOWER":
            said = f"{arm} is slower than before{ratio_}, not shown to be by more than {percent(change.margin)}."
        case "FASTER":
            said = f"{arm} is faster than before{ratio_}."
        case "INCONCLUSIVE" if change.reason:
            said = f"{arm} is not told apart from before{ratio_}: {change.reason}."
        case "INCONCLUSIVE":
            said = f"{arm} is not told apart from before: within {within}{ratio_}."
        case "LOST":
            said = f"{arm} is lost, a regression: {change.reason}."
        case _:
            said = f"{arm} has no verdict: {change.reason}."
    return plain(said)


def undecided(changes: Changes) -> str:
    """Why no regression could be found, for one that has to be excluded."""
    reasons = "; ".join(dict.fromkeys(change.reason for change in changes.changes)) or "no arm is in both runs"
    return plain(f"not one arm could be judged, so no regression is excluded: {reasons}")
