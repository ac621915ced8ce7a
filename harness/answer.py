"""What may be said about a run, or about two: sentences and nothing else. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from harness.arms import KNOBS
from harness.changes import Change, Changes, nothing_common
from harness.compare import Comparison, Row, all_rows
from harness.placement import Cell
from harness.plan import Status
from harness.record import Search
from harness.verdict import Contrast, telling
from harness.words import NONE, count, held_to, percent, plain, spread

ANSWER_ARMS = 4  # more than these are in the table only
TOO_WIDE = 0.1  # arms not told apart within more than this may differ by what one would care about


def answer(comparison: Comparison) -> str:
    """What may be said and what to do, in a few sentences, most important first. Engines and builds are named last."""
    engines = dict.fromkeys(row.engine for row in comparison.rows if row.engine and row.loads)
    sentences = [
        _finding(comparison),
        _advice(comparison),
        "Stand-in device: placement is real, speed says nothing about a GPU." if _has_stand_in(comparison) else "",
        held_to(comparison.limits),
        f"Measured with {' and '.join(engines)}." if engines else "",
    ]
    return " ".join(filter(None, sentences))


def _has_stand_in(comparison: Comparison) -> bool:
    return any(each.settings.stand_in_bytes is not None for each in comparison.header.contenders)


def _finding(comparison: Comparison) -> str:
    if comparison.state.word == "RED":
        return f"This run ranks nothing. {comparison.state.reasons[0]}"
    claims = _claims(comparison)
    if comparison.header.search is not None:
        return " ".join(filter(None, [_found(comparison), claims]))
    return claims or _nothing_to_compare(comparison)


def _found(comparison: Comparison) -> str:
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


def best(comparison: Comparison) -> tuple[Row, ...]:
    """The arm to take, or all that may be taken because none of them is shown to be faster.

    Empty where nothing is ranked, on a stand-in, and where not every arm met the reference at its own depth: then
    nothing is known of all of them.
    """
    if not comparison.state.ranks or _has_stand_in(comparison):
        return ()
    search, reference = comparison.header.search, comparison.reference
    ahead = _ahead([row for row in comparison.rows if search is None or row.arm not in search.chosen])
    if search is not None:
        return ahead[:1] or comparison.best
    rivals = [row for row in comparison.rows if row.status.word is Status.OK and row.loads and not row.is_reference]
    depths = {each.arm: each.settings.depth for each in comparison.header.contenders}
    if any(row.contrast is None or depths[row.arm] != depths[reference.arm] for row in rivals):
        return ()
    compared = [row for row in rivals if row.contrast is not None and row.contrast.word != "NOT_COMPARABLE"]
    if ahead or not compared:
        return ahead[:1]
    ratios = {reference.arm: (1.0, 1.0, 1.0)} | {row.arm: _ratio_of(row) for row in compared}
    _, least, _ = max(ratios.values())
    return tuple(row for row in (reference, *compared) if ratios[row.arm][2] >= least)


def _ahead(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Those shown to be faster than the reference, the fastest first."""
    found = [row for row in rows if row.contrast and row.contrast.word == "DIFFERENT" and row.contrast.ratio > 1]
    return tuple(sorted(found, key=lambda row: -_ratio_of(row)[0]))


def _ratio_of(row: Row) -> tuple[float, float, float]:
    """To the reference, with its bounds."""
    contrast = row.contrast
    if contrast is None:
        return 1.0, 1.0, 1.0
    return contrast.ratio, contrast.low or 0.0, contrast.high or math.inf


def _advice(comparison: Comparison) -> str:
    """The next step for one who has to choose."""
    compared = any(each.word == "SCREENING" for each in comparison.judgement.contrasts.values())
    if comparison.state.word == "SCREENING" and comparison.finished and compared:
        more = "a longer --budget" if comparison.header.options.get("budget") else "--preset confirm"
        return f"Run it with {more} before you choose by it."
    rows, search = best(comparison), comparison.header.search
    if not rows or (search is not None and rows == comparison.best):
        return ""
    names = [row.arm for row in rows]
    words = {row.contrast.word for row in comparison.rows if row.contrast is not None}
    if len(rows) == 1 and _ahead(rows):
        among = _ahead(comparison.rows)
        return (
            f"Take {names[0]}, {'shown to be faster' if len(among) == 1 else 'the fastest of those shown to be ahead'}."
        )
    if len(rows) == 1:
        return f"Take {names[0]}, the fastest {'of those compared' if 'NOT_COMPARABLE' in words else 'here'}."
    if "DIFFERENT" in words or len(rows) < 1 + sum(row.contrast is not None for row in comparison.rows):
        return f"Take {', '.join(names[:-1])} or {names[-1]}: none of them is shown to be faster."
    either, none = ("either", "Neither") if len(rows) == 2 else ("any", "None of them")
    if words == {"SAME"}:
        return f"Take {either}."
    wide = max((row.contrast.attained_margin or 0.0 for row in rows if row.contrast is not None), default=0.0)
    then = f"take {either}" if wide <= TOO_WIDE else "measure longer, or on a quieter machine, before you choose"
    return f"{none} is shown to be faster: {then}."


def candidates(search: Search) -> str:
    return count(len(search.candidates), "value" if search.over in KNOBS else "placement")


def _claims(comparison: Comparison) -> str:
    """One sentence for each arm that others were compared with."""
    texts = {arm.label: arm.text for arm in comparison.header.plan.arms}
    pairs = sorted(  # what is told apart first, and of those what is farthest
        comparison.judgement.contrasts.items(),
        key=lambda each: (list(KINDS).index(_kind(each[1])), -abs(math.log(each[1].ratio))),
    )
    told: dict[str, list[tuple[str, Contrast]]] = {}
    for (first, second), contrast in pairs[:ANSWER_ARMS]:
        told.setdefault(texts[second], []).append((texts[first], contrast))
    sentences = ["; ".join(_clauses(found, reference)) for reference, found in told.items()]
    if not sentences:
        return ""
    few = f"{count(comparison.judgement.n, 'block')}, too few for a claim."
    said = f"{few if comparison.state.word == 'SCREENING' else 'On this machine'} {'. '.join(sentences)}."
    more = len(pairs) - ANSWER_ARMS
    return said + (f" {count(more, 'more comparison')} {'is' if more == 1 else 'are'} in the table." * (more > 0))


def _clauses(found: Sequence[tuple[str, Contrast]], reference: str) -> Iterator[str]:
    """Arms with one verdict share a clause, each with its ratio."""
    groups: dict[str, list[tuple[str, Contrast]]] = {}
    for arm, contrast in found:
        groups.setdefault(_kind(contrast), []).append((arm, contrast))
    for kind in sorted(groups, key=list(KINDS).index):
        arms = [f"{arm} ({_bounds(contrast)})" for arm, contrast in groups[kind]]
        named = " and ".join(filter(None, [", ".join(arms[:-1]), arms[-1]]))
        yield KINDS[kind].format(
            arms=named,
            reference=reference,
            be="is" if len(arms) == 1 else "are",
            s="s" * (len(arms) == 1),
            margin=percent(groups[kind][0][1].margin),
        )


KINDS = {  # in the order in which they are told
    "faster": "{arms} {be} faster than {reference}",
    "slower": "{arms} {be} slower than {reference}",
    "SAME": "{arms} decode{s} at the same speed as {reference} within {margin}",
    "INCONCLUSIVE": "{arms} {be} not told apart from {reference}",
    "NOT_COMPARABLE": "{arms} {be} not comparable with {reference}",
    "SCREENING": "Against {reference}: {arms}",
}


def _kind(contrast: Contrast) -> str:
    if contrast.word == "DIFFERENT":
        return "faster" if contrast.ratio > 1 else "slower"
    return contrast.word if contrast.word in KINDS else "SCREENING"


def _bounds(contrast: Contrast) -> str:
    """ "0.49×, 0.46–0.52", and what an open verdict comes with."""
    if contrast.word == "NOT_COMPARABLE":
        return contrast.reason or NONE
    told = telling(contrast.low, contrast.high)
    between = "" if told is None else f", {told[0]:.2f}–{told[1]:.2f}"
    open_ = contrast.word == "INCONCLUSIVE" and contrast.attained_margin is not None
    within = f": within {percent(contrast.attained_margin or 0)}" if open_ else ""
    return f"{contrast.ratio:.2f}×{between}{within}"


def _nothing_to_compare(comparison: Comparison) -> str:
    row = comparison.reference
    if not row.loads and row.status.word is not Status.OK:
        return f"{row.arm}, the reference, has no numbers ({status_of(row)}), so nothing is compared."
    if not row.loads:
        failed = [f"{each.arm} {status_of(each)}" for each in comparison.rows if each.failed_loads]
        return f"No block is complete: {'; '.join(failed)}." if failed else "There is no complete block yet."
    same = [other.arm for other in comparison.rows if other.status.alias_of is not None]
    also = f" {', '.join(same)} would be the same placement." if same else ""
    return f"{row.arm} decodes at {spread(row.decode_tps)} tok/s; no other arm could be compared with it.{also}"


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


def word_of(row: Row) -> str:
    """ "DOES_NOT_FIT", or the arm that ran for this one too: "= llama-cpp"."""
    return f"= {row.status.alias_of}" if row.status.alias_of is not None else row.status.word.value


def memory_of(row: Row) -> str:
    return NONE if row.cell is Cell.UNKNOWN else row.cell.value


def ceiling_share_of(row: Row) -> str:
    return NONE if row.share is None else percent(round(row.share, 2))


def best_commands(comparison: Comparison) -> list[tuple[str, str]]:
    """Arm and command, to paste: of the best, one for each engine; of a search what it found too, on each engine."""
    search, rows = comparison.header.search, [row for row in best(comparison) if row.command]
    if search is not None:
        found = [row for row in comparison.best[:1] if row.command]
        first = {row.arm: row.command or "" for row in (*rows[:1], *found)}
        return [*first.items(), *(each for row in found for each in search.elsewhere.get(row.arm, {}).items())]
    leaders = {row.arm.partition("@")[0].partition(",")[0]: row for row in reversed(rows)}
    return [(row.arm, row.command or "") for row in rows if row in leaders.values()]


# ── rows and what is in none of them ────────────────────────────────────────────────────────


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
    reasons = "; ".join(dict.fromkeys(change.reason for change in changes.changes)) or nothing_common(changes)
    return plain(f"not one arm could be judged, so no regression is excluded: {reasons}")
