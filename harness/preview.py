"""What a run would do, before anything is loaded: its arms with equal placements merged, their bytes, how many loads.

How long it takes only a run can know. Where an earlier one of the same model, engines and settings on this machine
lies under `--out`, its loads say it.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import machine, model, plan, record, verdict
from harness.arms import parse_arms
from harness.errors import RunRefused
from harness.inspection import shares
from harness.options import Options
from harness.plan import Status
from harness.probe import Field, Watch, find_field, find_model
from harness.record import Contender, Run
from harness.words import count


def preview_run(options: Options, watch: Watch) -> dict[str, Any]:
    """The arms of a run after merging equal placements, with predicted bytes. Raises DuelError."""
    parse_arms(options.arms)  # a slip there is told before a model is looked for
    known = model.load(find_model(options.model, watch), hashed=False)  # its weights are for a run to read
    field = find_field(options, watch, model=known)
    running = [each for each in field.contenders if each.status.word is Status.OK]
    blocks = plan.PRESETS[options.preset]
    copies = len(running) + (options.preset == "confirm" and bool(running))
    fewest = min(blocks, verdict.FEWEST_BLOCKS)
    return {
        "model": field.model.name,
        "machine": field.machine.cpu,
        "arms": [
            {
                "arm": each.arm,
                "status": each.status.word.value,
                "alias_of": each.status.alias_of,
                "reason": each.status.reason or None,
                "placement": each.placement,
                "engine": str(each.engine) if each.engine else None,
                "predicted_device_bytes": each.predicted.device_bytes if each.predicted else None,
                "predicted_host_bytes": each.predicted.host_bytes if each.predicted else None,
                **{f"predicted_{name}": size for name, size in shares(each.predicted).items()},
                "command": each.command,
            }
            for each in field.contenders
        ],
        "loads": {"fewest": fewest * copies, "most": blocks * copies},
        "minutes": _minutes(field, options, fewest, blocks),
        "notes": notes(field),
    }


def notes(field: Field) -> list[str]:
    """How many arms there really are and why, then what else there is to know of this field."""
    words = [each.status.word for each in field.contenders]
    left, merged, large = (words.count(word) for word in (Status.OK, Status.ALIAS, Status.DOES_NOT_FIT))
    if not merged and not large:
        return [*field.notes]
    why = f": {large} {'does' if large == 1 else 'do'} not fit" if large else ""
    sentences = "".join(f" {text[0].upper()}{text[1:]}." for text in field.merged)
    return [f"{count(left, 'arm')}, not {left + merged + large}{why}.{sentences}", *field.notes]


# ── minutes ─────────────────────────────────────────────────────────────────────────────────


def _minutes(field: Field, options: Options, fewest: int, most: int) -> dict[str, Any] | None:
    """Minutes for so many blocks, and the earlier run that they are from; None without one."""
    for run in _earlier(field, options):
        if (block_s := _seconds_per_block(run)) is not None:
            longest = min(block_s * most / 60, options.budget or math.inf)
            shortest = min(block_s * fewest / 60, longest)
            return {"fewest": round(shortest, 1), "most": round(longest, 1), "from": str(run.folder)}
    return None


def _seconds_per_block(run: Run) -> float | None:
    """From the end of one block to the end of the next, its waits for a quiet machine and repeated loads included."""
    ends: dict[int, float] = {}
    for load in run.loads:
        if load.stage == "block":
            ends[load.block] = max(ends.get(load.block, 0.0), load.ended_unix_s)
    spent_s = [after - before for before, after in pairwise(sorted(ends.values()))]
    return statistics.median(spent_s) if spent_s else None


def _earlier(field: Field, options: Options) -> Iterator[Run]:
    """Runs that did the same work as this one would, the newest first."""
    folder = Path(options.out)
    found = sorted(folder.glob(f"*/{record.HEADER}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found:
        with contextlib.suppress(RunRefused):
            if _same_work(run := record.read(path.parent), field, options):
                yield run


def _same_work(run: Run, field: Field, options: Options) -> bool:
    header = run.header
    digest = field.model.file.digest
    return (
        bool(digest)
        and header.model.digest == digest
        and _hardware(header.machine) == _hardware(field.machine)
        and _work(header.contenders) == _work(field.contenders)
        and all(
            (header.options.get(name) or None) == (getattr(options, name) or None)
            for name in ("prompts", "prompt_tokens", "out_tokens", "no_wait", "thinking", "preset", "depth")
        )
    )


def _hardware(known: machine.Machine) -> tuple[object, ...]:
    return known.cpu, known.physical_cores, known.memory_bytes, tuple(gpu.name for gpu in known.gpus)


def _work(contenders: Sequence[Contender]) -> set[tuple[object, ...]]:
    return {(each.arm, str(each.engine), each.settings) for each in contenders if each.status.word is Status.OK}
