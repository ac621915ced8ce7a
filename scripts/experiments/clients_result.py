"""The page of the comparison of clients, from the two tables of its raw data.

`requests.csv` has what each tool reported of each request beside what the server saw; `runs.csv`
has one line for each run of a tool, with its CPU time. `machine.json` says where and with what.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients_tools import TOOLS

CHUNKS = (1, 4, 16)  # tokens


# ── the raw data ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request: reported and true. Seconds and tokens a second; `gap_errors_ms` of each gap, if reported."""

    part: str
    round: int
    per_chunk: int
    tool: str
    number: int
    load_average: float
    ttft_s: float
    true_ttft_s: float
    decode_tps: float
    true_decode_tps: float
    tokens: int | None
    true_tokens: int
    gap_errors_ms: str = ""

    @property
    def ttft_error_ms(self) -> float:
        return 1e3 * abs(self.ttft_s - self.true_ttft_s)

    @property
    def itl_error_ms(self) -> float:
        """Of the mean time per token."""
        return 1e3 * abs(1 / self.decode_tps - 1 / self.true_decode_tps)

    @property
    def rate_error(self) -> float:
        return self.decode_tps / self.true_decode_tps - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one tool."""

    part: str
    round: int
    per_chunk: int
    tool: str
    load_average: float
    asked: int
    served: int  # streams that the server began
    reported: int
    tokens: int  # that the server sent, warm-up included
    cpu_s: float
    wall_s: float
    exit_code: int | None


def write_csv(path: Path, kind: type[Row | Run], rows: Sequence[Row | Run]) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [each.name for each in dataclasses.fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)
    partial.replace(path)


def read_csv(path: Path, kind: type[Any]) -> list[Any]:
    readers: dict[str, Any] = {"int": int, "float": float, "str": str}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            kind(**{
                each.name: None if row[each.name] == "" and "None" in str(each.type)
                else readers[str(each.type).split(" ")[0]](row[each.name])
                for each in dataclasses.fields(kind)
            })
            for row in csv.DictReader(file)
        ]  # fmt: skip


# ── the tables ──────────────────────────────────────────────────────────────────────────────


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many per cent do not exceed: one of the values, not a mean of two."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = [f"| {' | '.join(row)} |" for row in (heads, ["---", *["---:"] * (len(heads) - 1)], *rows)]
    return "\n".join(body) + "\n"


def order() -> list[str]:
    return [tool.name for tool in TOOLS]


def timing_table(rows: list[Row], per_chunk: int) -> str:
    found = []
    for name in order():
        mine = [row for row in rows if (row.part, row.per_chunk, row.tool) == ("timing", per_chunk, name)]
        if not mine:
            continue
        ttft, itl = [row.ttft_error_ms for row in mine], [row.itl_error_ms for row in mine]
        rates = [100 * row.rate_error for row in mine]
        gaps = [float(gap) for row in mine for gap in row.gap_errors_ms.split()]
        found.append([
            name,
            str(len(mine)),
            *(f"{percentile(ttft, percent):.2f}" for percent in (50, 99)),
            *(f"{percentile(itl, percent):.4f}" for percent in (50, 99)),
            *(f"{percentile(gaps, percent):.3f}" if gaps else "–" for percent in (50, 99)),
            f"{statistics.median(rates):+.3f}",
            f"{max(rates, key=abs):+.3f}",
        ])  # fmt: skip
    heads = ["client", "requests", "TTFT p50", "p99", "mean ITL p50", "p99", "each gap p50", "p99", "rate, median",
             "worst"]  # fmt: skip
    return table(heads, found)


def cpu_ms(runs: list[Run], tool: str) -> list[float]:
    """CPU milliseconds a token in each round: the long run less the short one."""
    found = []
    for number in sorted({run.round for run in runs}):
        pair = sorted(
            (run for run in runs if (run.part, run.round, run.tool) == ("cpu", number, tool)), key=lambda run: run.asked
        )
        if len(pair) == 2 and all(run.reported for run in pair):
            few, many = pair
            found.append(1e3 * (many.cpu_s - few.cpu_s) / (many.tokens - few.tokens))
    return found


def slow_cpu_ms(runs: list[Run], tool: str) -> float | None:
    """The same at the speed of the timing runs, less precise: a median of those less one of the short runs."""
    slow = [run for run in runs if (run.part, run.per_chunk, run.tool) == ("timing", 1, tool)]
    short = [run for run in runs if (run.part, run.tool) == ("cpu", tool)]
    few = [run for run in short if run.asked == min(each.asked for each in short)]
    if not (slow and few):
        return None
    more_s, more = (
        statistics.median(getattr(run, name) for run in slow) - statistics.median(getattr(run, name) for run in few)
        for name in ("cpu_s", "tokens")
    )
    return 1e3 * more_s / more if more > 0 else None


def cpu_table(runs: list[Run], machine: dict[str, Any]) -> str:
    found = []
    for name in order():
        if values := cpu_ms(runs, name):
            slow, few = slow_cpu_ms(runs, name), [run.cpu_s for run in runs if (run.part, run.tool) == ("cpu", name)]
            each = ", ".join(f"{value:.3f}" for value in values)
            cells = [f"{statistics.median(values):.3f}", each, "–" if slow is None else f"{slow:.2f}"]
            found.append([name, *cells, f"{min(few):.1f}"])
    fast, slow_ms = f"{machine['cpu_itl_ms']:g}", f"{machine['itl_ms']:g}"
    heads = [f"at {fast} ms a token", "each round", f"at {slow_ms} ms a token", "s to start, ask for few and report"]
    return table(["client", *heads], found)


def cpu_part(runs: list[Run], machine: dict[str, Any]) -> str:
    few, many = machine["cpu_requests"]
    if not many:
        return ""
    return f"""## CPU

Milliseconds a token, user and system, of the whole process tree: {many} requests less {few}, over the tokens between,
one token a chunk. A client that polls spends more the slower the tokens come.

{cpu_table(runs, machine)}
"""


def lost_table(runs: list[Run]) -> str:
    found = []
    for name in order():
        mine = [run for run in runs if run.tool == name]
        if not mine:
            continue
        cells = [name]
        for part in ("timing", "hangs up"):
            these = [run for run in mine if run.part == part]
            lost = sum(max(0, run.asked - run.reported) for run in these)
            cells.append(f"{lost} of {sum(run.asked for run in these)}" if these else "–")
        found.append(cells)
    return table(["client", "keeps connections", "closes them unannounced, as llama-server does"], found)


def best(rows: list[Row], runs: list[Run]) -> str:
    """Ours beside the best of the others, measure by measure."""
    ours = {tool.name: tool.ours for tool in TOOLS}
    names = [name for name in order() if any(row.tool == name for row in rows)]
    found = []

    def line(title: str, values: dict[str, float], digits: int) -> None:
        mine = {name: value for name, value in values.items() if ours[name]}
        others = {name: value for name, value in values.items() if not ours[name]}
        if not mine or not others:
            return
        name = min(others, key=others.__getitem__)
        cells = [f"{value:.{digits}f}" for value in mine.values()]
        worst = max(mine.values())
        word = "yes" if worst <= others[name] else "one of two" if min(mine.values()) <= others[name] else "no"
        found.append([title, *cells, f"{others[name]:.{digits}f} ({name})", word])

    for per_chunk in CHUNKS:
        by = {
            name: [row for row in rows if (row.part, row.per_chunk, row.tool) == ("timing", per_chunk, name)]
            for name in names
        }
        by = {name: mine for name, mine in by.items() if mine}
        for percent in (50, 99):
            title = f"TTFT error p{percent}, {per_chunk} a chunk, ms"
            line(title, {name: percentile([r.ttft_error_ms for r in mine], percent) for name, mine in by.items()}, 2)
        for percent in (50, 99):
            title = f"mean ITL error p{percent}, {per_chunk} a chunk, ms"
            line(title, {name: percentile([r.itl_error_ms for r in mine], percent) for name, mine in by.items()}, 4)
        for percent in (50, 100):
            title = f"rate error {'worst' if percent == 100 else 'p50'}, {per_chunk} a chunk, %"
            rates = {name: percentile([100 * abs(r.rate_error) for r in mine], percent) for name, mine in by.items()}
            line(title, rates, 3)
    line("CPU a token, ms", {name: statistics.median(cpu_ms(runs, name)) for name in names if cpu_ms(runs, name)}, 3)
    said = f"Ours is no worse, in both dialects, in {sum(row[-1] == 'yes' for row in found)} of {len(found)} lines.\n\n"
    heads = ["", *(tool.name for tool in TOOLS if tool.ours), "best of the others", "ours no worse"]
    return said + table(heads, found)


# ── the page ────────────────────────────────────────────────────────────────────────────────


def result(folder: Path) -> str:
    rows: list[Row] = read_csv(folder / "requests.csv", Row)
    runs: list[Run] = read_csv(folder / "runs.csv", Run)
    machine = json.loads((folder / "machine.json").read_text("utf-8"))
    loads = [run.load_average for run in runs]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    names = {run.tool for run in runs}
    wants = "; ".join(f"{tool.name} by {tool.wants}" for tool in TOOLS if tool.wants and tool.name in names)
    first = (
        "The machine had other work; the server, and the client while it streams, went before it (SCHED_RR)."
        if machine["real_time"]
        else "Server and clients had no priority over other work."
    )
    timings = "\n".join(
        f"### {per_chunk} {'token' if per_chunk == 1 else 'tokens'} a chunk\n\n{timing_table(rows, per_chunk)}"
        for per_chunk in CHUNKS
    )
    return f"""# Client timing against a known truth

Written by `scripts/experiments/clients.py` from `requests.csv` and `runs.csv`, never by hand.

{machine["cpu"]}, {machine["cores"]} cores, Linux {machine["kernel"]}, Python {machine["python"]}; {versions}.
{machine["rounds"]} rounds in rotated order, {machine["requests"]} requests a run, {machine["tokens"]} tokens a request,
{machine["itl_ms"]:g} ms between tokens. Load average before the runs: {min(loads):.2f} to {max(loads):.2f}, median
{statistics.median(loads):.2f}. {first}

The kernel's stamp of the last byte of a request, and a stamp of the server's before each chunk goes to its socket, are
the truth. An error is the difference between what a client reports for a request and that; all are absolute but the
median and the worst of the rate. "Mean ITL" is the time per token of a request, "each gap" the time between two chunks,
where a client keeps it. A rate is taken as it is reported, or as one over the time per token. Percentiles are over
requests, those of gaps over all gaps; the worst of a few dozen requests is one stall of the machine, and whom it hits
is chance. Our clock starts when the connection is there. All chunks of an answer are equally large: where they are not,
a client without counts can only estimate how many tokens the first one held, ours included.

Every client gets the number of tokens at the end. In each chunk it is told to these, too: {wants}.

## Ours beside the best of the others

{best(rows, runs)}
## Errors, ms and %

{timings}
{cpu_part(runs, machine)}## Lost requests

Asked for and not reported.

{lost_table(runs)}"""
