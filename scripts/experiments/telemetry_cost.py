"""Does watching the machine slow what is measured? Equal loads with telemetry and without it, in turn.

    .venv/bin/python scripts/experiments/telemetry_cost.py [--model MODEL] [--arms ARMS] [--out FOLDER]
    .venv/bin/python scripts/experiments/telemetry_cost.py --again --out FOLDER

Each block has one load of an arm with telemetry as in any run, and one that is looked at before its start and after
its end and never between, on the same prompts; the next block has them the other way round. The ratio of their decode
speeds is judged as that of two arms is, with one look after the last block. Beside it stands what the watching thread
itself used, in cores. With a GPU, take the arms that use it (--arms llama-cpp@ngl=99).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import harness
from harness import plan, telemetry, verdict
from harness.errors import UsageError
from harness.load import run_load
from harness.probe import Field, Probe, Progress, find_field, job_of, probe, require_weights, task, void
from harness.record import Contender
from harness.words import NONE, markdown_table, ratio

ARMS = "llama-cpp"
BLOCKS = 12
REQUESTS = 3  # measured, a load
PROMPT_TOKENS = 64  # few, for it is decoding that is timed
ERROR = 0.05  # of one look, fixed before the first block
WITH, WITHOUT = "with", "without"
LOADS, RESULT = "loads.csv", "README.md"
COLUMNS = ("arm", "engine", "block", "telemetry", "decode_tps", "watch_share", "foreign_cores", "failure")


# ── measure ─────────────────────────────────────────────────────────────────────────────────


class Unwatched(telemetry.Watcher):
    """Looks before a load and after it, and never while it runs."""

    def _run(self) -> None:
        return


@contextlib.contextmanager
def watched(mode: str) -> Iterator[None]:
    """Loads of the harness are watched, or are not, while the block runs."""
    with mock.patch.object(telemetry, "Watcher", telemetry.Watcher if mode == WITH else Unwatched):
        yield


def order(block: int) -> tuple[str, str]:
    """With telemetry first in the blocks 1, 4, 5, 8, …: no steady drift takes sides over four blocks."""
    return (WITH, WITHOUT) if block % 4 in (0, 1) else (WITHOUT, WITH)


@dataclass(frozen=True)
class Seen:
    """Where the loads of the harness go, and how long prompts were, which every load must see again."""

    folder: Path
    prompt_tokens: dict[str, int]


def load(
    field: Field, contender: Contender, found: Probe, block: int, mode: str, options: harness.Options, seen: Seen
) -> tuple[object, ...]:
    """One load and its line."""
    first = block * (REQUESTS + 1)
    indices = [first + step for step in range(REQUESTS + 1)]
    if found.pool is not None:  # a real model answers these in full length
        indices = [found.pool[index % len(found.pool)] for index in indices]
    tasks = [
        task(field, contender, index, found.out_tokens, options, warmup=step == 0) for step, index in enumerate(indices)
    ]
    job = dataclasses.replace(job_of(field, contender, "block", tasks), label=mode, block=block)
    with watched(mode):
        done, samples = run_load(job, seen.folder, seen.prompt_tokens, lambda _: None, wait=not options.no_wait)
    valid = [each.decode_tps for each in samples if not each.warmup and each.invalid is None and each.decode_tps]
    value = plan.load_value(valid, REQUESTS)
    failure = done.failure.reason if done.failure else void(contender.predicted, done, samples)
    if failure is None and value is None:
        failure = next((each.invalid for each in samples if each.invalid), "too few valid requests")
    speed = "" if failure or value is None else f"{math.exp(value):.4f}"
    share = getattr(done.telemetry, "watch_share", None)
    foreign = done.telemetry.foreign_cores if done.telemetry else None
    return (
        *(contender.arm, str(contender.engine), block, mode, speed),
        *("" if each is None else f"{each:.6f}" for each in (share, foreign)),
        failure or "",
    )


def measure(options: harness.Options, blocks: int, out: Path) -> None:
    """A line for each load goes into `out`, as soon as it is known. Raises DuelError where no arm can run."""
    with harness.show_progress() as watch, tempfile.TemporaryDirectory(prefix="telemetry-cost-") as name:
        seen = Seen(Path(name), {})
        field = find_field(options, watch)
        require_weights(field.model)
        found = probe(field, options, seen.folder, seen.prompt_tokens, watch)
        able = [each for each in found.contenders if each.status.word is plan.Status.OK]
        out.mkdir(parents=True, exist_ok=True)
        with (out / LOADS).open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(COLUMNS)
            for block in range(1, blocks + 1):
                for contender, mode in ((each, mode) for each in able for mode in order(block)):
                    watch(Progress(f"block {block} of {blocks}: {contender.arm}, {mode} telemetry"))
                    table.writerow(load(field, contender, found, block, mode, options, seen))
                    file.flush()


# ── what was found ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Cost:
    """Of one arm. `contrast` is the speed with telemetry against that without, over whole blocks; None without any."""

    arm: str
    blocks: int
    contrast: verdict.Contrast | None
    watch_share: float | None  # CPU time of the watching thread, in cores: the mean over the loads it watched
    foreign_cores: float | None  # mean of all loads


def costs(lines: Sequence[Mapping[str, str]], margin: float = verdict.MARGIN) -> list[Cost]:
    """By arm, in the order of the lines."""
    return [_cost(arm, [line for line in lines if line["arm"] == arm], margin) for arm in _once(lines, "arm")]


def _cost(arm: str, mine: Sequence[Mapping[str, str]], margin: float) -> Cost:
    logs: dict[str, dict[str, float]] = {WITH: {}, WITHOUT: {}}
    for line in mine:
        if line["decode_tps"]:
            logs[line["telemetry"]][line["block"]] = math.log(float(line["decode_tps"]))
    whole = [block for block in logs[WITH] if block in logs[WITHOUT]]
    sides = [[logs[mode][block] for block in whole] for mode in (WITH, WITHOUT)]
    return Cost(
        arm,
        len(_once(mine, "block")),
        verdict.contrast(sides[0], sides[1], ERROR, margin) if whole else None,
        _mean([line["watch_share"] for line in mine if line["telemetry"] == WITH]),
        _mean([line["foreign_cores"] for line in mine]),
    )


def _once(lines: Sequence[Mapping[str, str]], name: str) -> list[str]:
    return list(dict.fromkeys(line[name] for line in lines))


def _mean(texts: Sequence[str]) -> float | None:
    known = [float(text) for text in texts if text]
    return statistics.mean(known) if known else None


def result(folder: Path) -> str:
    """What the loads in this folder say, in Markdown. Raises UsageError where there is none."""
    with (folder / LOADS).open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    if not lines:
        raise UsageError(f"{folder / LOADS} holds no load; measure again")
    found = costs(lines)
    heads = ("arm", "blocks judged", "speed with / without", "verdict", "watching, cores", "foreign cores")
    cells = [
        (
            each.arm,
            f"{each.contrast.n if each.contrast else 0} of {each.blocks}",
            ratio(each.contrast),
            each.contrast.word if each.contrast else NONE,
            NONE if each.watch_share is None else f"{each.watch_share:.4f}",
            NONE if each.foreign_cores is None else f"{each.foreign_cores:.2f}",
        )
        for each in found
    ]
    said = "\n".join(
        f"- {each.arm}: {each.contrast.sentence('with telemetry', 'without')}" for each in found if each.contrast
    )
    lost = "".join(
        f"\nBlock {line['block']} of {line['arm']} {line['telemetry']} telemetry does not count: {line['failure']}.\n"
        for line in lines
        if line["failure"]
    )
    return f"""# What watching costs

{said or "No block was whole, so nothing can be said."}

{markdown_table(heads, cells)}

Decode speed of equal loads, with telemetry and without it in turn, on {" and ".join(_once(lines, "engine"))}; intervals
are {100 * (1 - ERROR):g} %, with one look after the last block. Watching is the CPU time of the telemetry thread, in
cores, the mean of the loads it watched.
{lost}
Computed from `{LOADS}` by `scripts/experiments/telemetry_cost.py`.
"""


# ── command line ────────────────────────────────────────────────────────────────────────────


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="MODEL", help="as llamaduel takes it (its small synthetic model)")
    parser.add_argument("--arms", default=ARMS, metavar="ARMS", help=f"each is an experiment of its own ({ARMS})")
    parser.add_argument("--llama-server", metavar="PATH", help="as llamaduel takes it")
    parser.add_argument("--blocks", type=int, default=BLOCKS, metavar="N", help=f"of two loads an arm ({BLOCKS})")
    parser.add_argument("--out-tokens", type=int, metavar="N", help="length of an answer (the probe picks it)")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where every load and the result are written")
    parser.add_argument("--again", action="store_true", help="only the result, from the loads in --out")
    given = parser.parse_args()
    if given.again and given.out is None:
        parser.error("--again reads the loads of --out FOLDER; name it")
    if given.again and not (given.out / LOADS).is_file():
        parser.error(f"there is no {given.out / LOADS} to read again; measure first")
    if given.blocks < 1:
        parser.error("--blocks is 1 or more")
    options = harness.Options(
        model=given.model,
        arms=given.arms,
        llama_server=given.llama_server,
        prompt_tokens=PROMPT_TOKENS,
        out_tokens=given.out_tokens,
        no_wait=given.no_wait,
    )
    with tempfile.TemporaryDirectory(prefix="telemetry-cost-") as scratch:
        out = given.out or Path(scratch)
        try:
            if not given.again:
                measure(options, given.blocks, out)
            text = result(out)
        except harness.DuelError as error:
            raise SystemExit(str(error)) from None
        (out / RESULT).write_text(text, "utf-8")
    print(text)


if __name__ == "__main__":
    main()
