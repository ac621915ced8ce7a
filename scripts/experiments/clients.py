"""How exact are the clients? Ours and four others against one server whose timing is known.

    python scripts/experiments/clients.py OUT --tokenizer DIR [--aiperf PATH] [--guidellm PATH] …
    python scripts/experiments/clients.py OUT --again

Every tool measures the same streams, in rotated order, and each of its figures is compared with
the stamps that the server took for that very request. CPU time is that of the whole process tree,
as the difference between a long run and a short one, so that neither start nor report counts.
Tools that are not found are left out, and named. `--again` writes OUT/result.md anew from the
files in OUT. Linux only; nothing but the loopback is used.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from clients_result import CHUNKS, Row, Run, result, write_csv
from clients_tools import HERE, NEED_TOKENIZER, ROOT, TOOLS, Report, Task, Tool, find, version

PR_SET_CHILD_SUBREAPER = 36  # orphans of a tool become our children, so that their CPU time is counted
IDLE_S = 3.0  # a server without a new stream for so long has served them all
LIMIT_S = 600.0  # for one run of a tool


# ── what happened ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Truth:
    """One streamed request as the server saw it."""

    ttft_s: float
    decode_tps: float
    tokens: int
    gaps_s: tuple[float, ...]

    @classmethod
    def of(cls, row: dict[str, Any]) -> Truth:
        """From a line of the server's log. Tokens of the first chunk are none of those that came in the window."""
        sent, counts = row["sent_ns"], row["counts"]
        gaps_s = tuple((after - before) / 1e9 for before, after in pairwise(sent))
        return cls((sent[0] - row["arrived_ns"]) / 1e9, (counts[-1] - counts[0]) / sum(gaps_s), counts[-1], gaps_s)


def matched(reports: Sequence[Report], truths: Sequence[Truth]) -> list[tuple[Report, Truth]]:
    """Each report with its request, in order.

    Warm-up and lost requests have no report. Which they are is found by the time to the first
    token, of which the server gives each request its own: the least sum of differences.
    """
    if len(reports) > len(truths):
        raise ValueError(f"{len(reports)} requests are reported, {len(truths)} were served")
    skips = len(truths) - len(reports)
    # cost[s]: of the reports so far, with s truths skipped before the last of them
    cost, steps = [0.0] * (skips + 1), list[list[int]]()
    for at, report in enumerate(reports):
        best, chosen = list[float](), list[int]()
        for skipped in range(skips + 1):
            before = min(range(skipped + 1), key=cost.__getitem__)
            best.append(cost[before] + abs(report.ttft_s - truths[at + skipped].ttft_s))
            chosen.append(before)
        cost, steps = best, [*steps, chosen]
    skipped, found = min(range(skips + 1), key=cost.__getitem__), []
    for at in range(len(reports) - 1, -1, -1):
        found.append((reports[at], truths[at + skipped]))
        skipped = steps[at][skipped]
    return found[::-1]


# ── one run ─────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def served(log: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    argv = [sys.executable, str(HERE / "truth_server.py"), "--log", str(log), *flags]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1], server
        finally:
            server.terminate()


def run(tool: Tool, program: Path, part: str, turn: tuple[int, int], asked: int, options: argparse.Namespace) -> Run:
    """Run it once. Its raw rows go to the caller by `options.rows`."""
    number, per_chunk = turn
    with tempfile.TemporaryDirectory(prefix="clients-") as name:
        folder = Path(name)
        fast = part == "cpu"
        flags = ["--per-chunk", str(per_chunk), "--itl-ms", str(options.cpu_itl_ms if fast else options.itl_ms)]
        flags += ["--tells"] * tool.counts + ["--hangs-up"] * (part == "hangs up")
        flags += ["--real-time"] * options.real_time
        log = folder / "server.jsonl"
        home = folder / "tool"
        home.mkdir()
        load = os.getloadavg()[0]
        with served(log, *flags) as (url, server):
            task = Task(url=url, requests=asked, tokens=options.tokens, folder=home, tokenizer=options.tokenizer)
            command = tool.command(str(program), task)
            code, cpu_s, wall_s = spend(command, home, tool, server, real_time=options.real_time)
        rows = [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
        streams = [row for row in rows if row["stream"] and row["counts"]]
        complete = [Truth.of(row) for row in streams if row["complete"] and len(row["counts"]) > 1]
        pairs: list[tuple[Report, Truth]] = []
        try:
            pairs = matched(tool.read(home), complete)
        except (OSError, ValueError, KeyError, IndexError) as error:
            tail = (home / "output.txt").read_text("utf-8", errors="replace")[-2000:]
            print(f"{tool.name}: no report ({type(error).__name__}: {error}); exit code {code}\n{tail}", flush=True)
        for index, (report, truth) in enumerate([] if part == "cpu" else pairs):
            options.rows.append(compare(report, truth, part, turn, tool.name, index, load))
        return Run(
            part=part,
            round=number,
            per_chunk=per_chunk,
            tool=tool.name,
            load_average=round(load, 2),
            asked=asked,
            served=len(streams),
            reported=len(pairs),
            tokens=sum(row["counts"][-1] for row in streams),
            cpu_s=round(cpu_s, 4),
            wall_s=round(wall_s, 2),
            exit_code=code,
        )


def compare(report: Report, truth: Truth, part: str, turn: tuple[int, int], tool: str, number: int, load: float) -> Row:
    errors: list[str] = []
    if report.gaps_s and len(report.gaps_s) == len(truth.gaps_s):
        errors = [f"{1e3 * abs(a - b):.4f}" for a, b in zip(report.gaps_s, truth.gaps_s, strict=True)]
    return Row(
        part=part,
        round=turn[0],
        per_chunk=turn[1],
        tool=tool,
        number=number,
        load_average=round(load, 2),
        ttft_s=round(report.ttft_s, 7),
        true_ttft_s=round(truth.ttft_s, 7),
        decode_tps=round(report.decode_tps, 5),
        true_decode_tps=round(truth.decode_tps, 5),
        tokens=report.tokens,
        true_tokens=truth.tokens,
        gap_errors_ms=" ".join(errors),
    )


def spend(
    command: list[str], home: Path, tool: Tool, server: subprocess.Popen[str], *, real_time: bool
) -> tuple[int | None, float, float]:
    """(exit code, CPU seconds of the process and all that it started, seconds) of a command."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    kept.pop("HF_HUB_OFFLINE", None)
    environment = kept | {"HOME": str(home), "PYTHONPATH": str(ROOT) if tool.ours else ""} | dict(tool.environment)
    before_s, began = spent_s(), time.monotonic()
    code: int | None = None
    with (home / "output.txt").open("w", encoding="utf-8") as out:
        child = subprocess.Popen(
            command, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        threading.Thread(target=follow, args=(server, child.pid, real_time), daemon=True).start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(LIMIT_S)
        wall_s = time.monotonic() - began
        end(orphans(server.pid))
    return code, spent_s() - before_s, wall_s


def follow(server: subprocess.Popen[str], pid: int, real_time: bool) -> None:
    """Read what the server says. While it streams, the tool goes before all else on the machine.

    Not before and not after: to start and to write a report is not what is timed, and takes long.
    """
    assert server.stdout is not None
    urgent, said = False, os.dup(server.stdout.fileno())  # the other end of it is closed at once
    while True:
        readable = select.select([said], [], [], IDLE_S)[0]
        if readable and not os.read(said, 4096):
            os.close(said)
            return
        if real_time and bool(readable) != urgent:
            urgent = bool(readable)
            schedule(pid, os.SCHED_RR if urgent else os.SCHED_OTHER)


def schedule(pid: int, policy: int) -> None:
    """For every thread of a process and of all that it started; what they start later has the same."""
    with contextlib.suppress(psutil.Error):
        tool = psutil.Process(pid)
        for process in (tool, *tool.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                for thread in process.threads():
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setscheduler(thread.id, policy, os.sched_param(int(policy == os.SCHED_RR)))


def spent_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def orphans(server: int) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.pid != server]


def end(left: Iterable[psutil.Process]) -> None:
    """Wait for what the tool left behind, and end it if it stays."""
    _, alive = psutil.wait_procs(list(left), timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


# ── all runs ────────────────────────────────────────────────────────────────────────────────


def measure(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    programs: dict[str, Path] = {}
    for name in dict.fromkeys(tool.program for tool in TOOLS):
        given = getattr(options, name.replace("-", "_"), None)
        if name in NEED_TOKENIZER and options.tokenizer is None:
            print(f"{name} is left out: it needs --tokenizer DIR", flush=True)
        elif path := find(name, given):
            programs[name] = path
        else:
            print(f"{name} is left out: not in PATH; give its path by --{name}", flush=True)
    tools = [tool for tool in TOOLS if tool.program in programs]
    options.rows = []
    runs: list[Run] = []
    machine = describe(programs, options)
    (options.out / "machine.json").write_text(json.dumps(machine, indent=1) + "\n", "utf-8")
    for part, number, per_chunk, group, sizes in plan(tools, options):
        shift = (number + CHUNKS.index(per_chunk)) % len(group)
        for tool in group[shift:] + group[:shift]:
            for asked in sizes:
                each = run(tool, programs[tool.program], part, (number, per_chunk), asked, options)
                runs.append(each)
                print(
                    f"{part} {number + 1}, {per_chunk} a chunk: {tool.name}: {each.reported} of {each.asked} in "
                    f"{each.wall_s:.0f} s, {each.cpu_s:.2f} s CPU",
                    flush=True,
                )
                write_csv(options.out / "runs.csv", Run, runs)
                write_csv(options.out / "requests.csv", Row, options.rows)
    write_result(options.out)


def plan(tools: list[Tool], options: argparse.Namespace) -> Iterator[tuple[str, int, int, list[Tool], tuple[int, ...]]]:
    """(part, round, tokens a chunk, tools, numbers of requests). Being told changes nothing at a token a chunk."""
    plain = [tool for tool in tools if not tool.counts]
    for number in range(options.rounds):
        for per_chunk in CHUNKS:
            yield "timing", number, per_chunk, plain if per_chunk == 1 else tools, (options.requests,)
        if not number:
            yield "hangs up", number, 1, plain, (options.requests,)
        if options.cpu_requests:
            yield "cpu", number, 1, plain, (options.cpu_few, options.cpu_requests)


def describe(programs: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()
             if line.startswith("model name")]  # fmt: skip
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name, path) for name, path in programs.items() if name != "python"},
        "rounds": options.rounds,
        "requests": options.requests,
        "tokens": options.tokens,
        "itl_ms": options.itl_ms,
        "cpu_itl_ms": options.cpu_itl_ms,
        "cpu_requests": [options.cpu_few, options.cpu_requests],
        "real_time": options.real_time,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def write_result(folder: Path) -> None:
    text = result(folder)
    (folder / "result.md").write_text(text, "utf-8")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--again", action="store_true", help="only write the result anew")
    parser.add_argument("--tokenizer", type=lambda text: Path(text).absolute(), help="a folder with tokenizer.json")
    for name in dict.fromkeys(tool.program for tool in TOOLS if not tool.ours):
        parser.add_argument(f"--{name}", type=Path, help="its executable; else the one in PATH")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--itl-ms", type=float, default=10.0)
    parser.add_argument("--real-time", action="store_true", help="server and clients before all else; needs root")
    parser.add_argument("--cpu-itl-ms", type=float, default=2.0)
    parser.add_argument("--cpu-few", type=int, default=5)
    parser.add_argument("--cpu-requests", type=int, default=155, help="0: leave it out")
    options = parser.parse_args()
    if options.again:
        write_result(options.out)
    else:
        measure(options)


if __name__ == "__main__":
    main()
