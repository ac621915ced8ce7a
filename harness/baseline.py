"""The earlier run that a new one will be compared with: what cannot work is told before anything is measured.

What the options leave open and two runs must share, the reference and the length of an answer, is
taken from the baseline.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from harness import differences, plan, record
from harness.arms import parse_arms
from harness.errors import Regression, RunRefused, UsageError
from harness.machine import Machine
from harness.options import Options
from harness.plan import FAILED, ArmStatus, Status
from harness.record import Header

EQUAL = ("settings", "prompt_tokens", "context", "depth", "thinking")  # options that make another task


def header(options: Options) -> Header | None:
    """Of the run that `fail_on_regression` names. Raises UsageError if it cannot be read."""
    if options.fail_on_regression is None:
        return None
    try:
        return record.read(Path(options.fail_on_regression)).header
    except RunRefused as error:
        raise UsageError(f"there is no baseline to compare with: {error}") from None


def follow(options: Options) -> Options:
    """The options with the baseline's reference. Raises UsageError where no regression could ever be found.

    The baseline is named by its whole path, for a run may be continued from another folder.
    """
    if options.resume:
        return _as_begun(options)
    before = header(options)
    if before is None or options.fail_on_regression is None:
        return options
    if options.preset == "quick":
        raise UsageError("--preset quick makes no claims, so it finds no regression; leave it out")
    for name in EQUAL:
        now, then = getattr(options, name), before.options.get(name, getattr(Options(), name))
        if now != then:
            flag = name.replace("_", "-")
            raise UsageError(f"the baseline was measured with {flag} {then}, not {now}; set --{flag} {then}")
    if options.out_tokens not in (None, before.plan.out_tokens):
        raise UsageError(
            f"the baseline's answers are {before.plan.out_tokens} tokens long, not {options.out_tokens}; "
            "leave --out-tokens out"
        )
    reference = _reference(before)
    arms = [str(arm) for arm in parse_arms(options.arms)]
    if reference not in arms:
        raise UsageError(f"the baseline's reference is {reference}; add it to --arms")
    if not {each.arm for each in before.contenders if each.status.word is Status.OK} & set(arms) - {reference}:
        raise UsageError(f"the baseline has no arm in common beside its reference {reference}; name one with --arms")
    same = {each.arm for each in before.contenders if reference in (each.arm, each.status.alias_of)}
    if options.reference is not None and not same & {str(arm) for arm in parse_arms(options.reference)}:
        raise UsageError(f"the baseline's reference is {reference}, not {options.reference}; leave --reference out")
    return dataclasses.replace(options, reference=reference, fail_on_regression=_whole(options.fail_on_regression))


def _as_begun(options: Options) -> Options:
    """With the baseline of the run that is continued, which must still be there: it is read at the end."""
    now, then = options.fail_on_regression, _of_run(Path(str(options.resume)))
    if then is None or (now not in (None, then) and _whole(str(now)) != then):
        return options  # another one is refused with the other options of a run that was begun
    try:
        record.read(Path(then))
    except RunRefused as error:
        raise UsageError(
            f"{options.resume} was begun with a baseline that is gone or damaged; put it back ({error})"
        ) from None
    return dataclasses.replace(options, fail_on_regression=then)


def _of_run(folder: Path) -> str | None:
    found = record.read(folder).header.options.get("fail_on_regression")
    return None if found is None else str(found)


def _whole(folder: str) -> str:
    return str(Path(folder).absolute())


def require_same(options: Options, weights_digest: str, prompts_digest: str, machine: Machine) -> None:
    """Raises UsageError if the run would be of another task, or on another machine, than its baseline."""
    before = header(options)
    if before is None:
        return
    others = [str(each) for each in differences.of_machines(before.machine, machine) if each.forbids]
    if before.plan.weights_digest != weights_digest:
        others.insert(0, f"other weights ({before.model.name})")
    if before.plan.prompts_digest != prompts_digest:
        others.insert(0, "other prompts")
    if others:
        raise UsageError(f"the baseline is of something else ({'; '.join(others)}); measure a new one")


def out_tokens(options: Options) -> int | None:
    """The length of an answer in the baseline."""
    before = header(options)
    return before.plan.out_tokens if before else None


def no_reference(options: Options, arm: str, status: ArmStatus) -> RunRefused:
    """The error of a run whose reference does not run; that of a baseline ran before, and none can stand for it."""
    if options.fail_on_regression is None:
        return RunRefused(f"the reference {arm} cannot run ({status.reason}); name another with --reference")
    said = f"{arm}, the reference of the baseline {options.fail_on_regression}, does not run any more ({status})"
    if status.word in FAILED:
        return Regression(f"{said}: that is a regression by itself, and without it no other arm can be compared")
    return RunRefused(f"{said}, so nothing can be compared with it; measure a new baseline")


def _reference(before: Header) -> str:
    text = next(arm.text for arm in before.plan.arms if arm.label == before.plan.reference)
    return next(
        each.arm for each in before.contenders if plan.public(each.arm) == text and each.status.word is Status.OK
    )
