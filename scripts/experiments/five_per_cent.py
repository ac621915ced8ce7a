"""A difference of five per cent whose true size is known, on a real engine: is it found, and is its interval right?

    .venv/bin/python scripts/experiments/five_per_cent.py WORK [--publish FOLDER] [--precedence]

Every arm is the same llama-server behind a loopback proxy (`slow_proxy.py`), a fresh one for each load. In the first
run the proxy of one arm adds a delay to each token, about five per cent of a token's time; how much slower the
stream really became, the proxy measures itself, by its own clock. In the second run no proxy delays anything, and
the two arms are equal. A third of each run is the twin, as always. --precedence is for a machine that cannot be
made quiet: engine, proxy and client then go before other programs, in every arm alike (Linux, as root; begin with
`setsid`).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import json
import math
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import harness
from backends.llama_cpp import LlamaCpp
from harness import process, publication
from harness.arms import read_arm
from harness.contract import (
    Arm,
    Chunk,
    Engine,
    ModelFile,
    Placement,
    Prompt,
    Realised,
    Request,
    Session,
    Settings,
    Usage,
)
from harness.errors import Crashed

SIZE = "128MiB"  # of the synthetic model
SHARE = 0.05  # of a token's time, added by the proxy
BUDGET_MINUTES = 6.0
PROXY = Path(__file__).with_name("slow_proxy.py")
HANDED_ON = ".handed-on.jsonl"
PRECEDENCE, FIRST = "engine, proxy and client had precedence over other programs", "-15"  # as `nice` counts
TRUTH, RESULT = "proxy.csv", "README.md"
BUSIER = "busier"  # the same, measured earlier
BEFORE = f"""It had been tried before, with more going on beside it: [{BUSIER}]({BUSIER}/README.md).
"""
RUNS = {"different": "slower by about five per cent", "equal": "equal"}


# ── the arm: a real llama-server, and a proxy in front of it ────────────────────────────────


@dataclass(frozen=True, slots=True)
class ProxiedSession:
    """The session of the real engine; only its timed requests take the way through the proxy."""

    session: Session
    proxy: process.Child
    port: int

    def request(self, prompt: Prompt, max_tokens: int) -> Request:
        request = self.session.request(prompt, max_tokens)
        url = urlsplit(request.url)._replace(netloc=f"127.0.0.1:{self.port}")
        return dataclasses.replace(request, url=urlunsplit(url))

    def read(self, line: bytes) -> Chunk | Usage | None:
        """The engine's decode time is left out: it does not know of the proxy."""
        item = self.session.read(line)
        return dataclasses.replace(item, decode_s=None) if isinstance(item, Usage) else item

    def settle(self, usage: Usage) -> Usage:
        return self.session.settle(usage)

    def realised(self) -> Realised:
        realised = self.session.realised()
        return dataclasses.replace(realised, notes=(*realised.notes, *([PRECEDENCE] if Proxied.precedence else [])))

    def count_tokens(self, text: str) -> int | None:
        return self.session.count_tokens(text)

    def death(self) -> str | None:
        ended = "the proxy ended" if self.proxy.returncode() is not None else None
        return self.session.death() or ended


class Proxied:
    """`proxied` and `proxied@us=N`: llama-cpp with N microseconds added to each token."""

    name = "proxied"
    precedence = False

    def __init__(self) -> None:
        self._real = LlamaCpp()

    def find(self, hints: Mapping[str, str]) -> Engine:
        return self._real.find(hints)

    def parse(self, text: str) -> Arm:
        return read_arm(text, self.name, ("us=N",), ())

    def resolve(self, ref: str) -> Path | None:  # noqa: ARG002
        return None

    def command(self, arm: Arm, model: ModelFile, settings: Settings) -> str:
        return f"{self._real.command(_plain(arm), model, settings)}  # behind {PROXY.name}, {_delay_us(arm)} µs"

    @contextlib.contextmanager
    def open(
        self, engine: Engine, model: ModelFile, arm: Arm, settings: Settings, log: Path
    ) -> Iterator[ProxiedSession]:
        with self._real.open(engine, model, _plain(arm), settings, log) as session:
            if self.precedence:
                go_first(session.realised().pids[0])
            upstream, port = urlsplit(session.request(Prompt("", "~"), 1).url).port, process.free_port()
            argv = [PROXY, port, upstream, _delay_us(arm), log.with_name(log.stem + HANDED_ON)]
            own_log = log.with_name(f"{log.stem}-proxy.log")
            environment = process.engine_environment()
            with process.start([sys.executable, *map(str, argv)], own_log, environment) as proxy:
                if self.precedence:
                    go_first(proxy.pid)
                _await(proxy, port)
                yield ProxiedSession(session, proxy, port)


def go_first(pid: int) -> None:
    """Linux shares a busy machine among sessions: that of this process gets the largest share."""
    Path(f"/proc/{pid}/autogroup").write_text(FIRST, "ascii")


def _plain(arm: Arm) -> Arm:
    return Arm("llama-cpp", Placement(), arm.knobs)


def _delay_us(arm: Arm) -> int:
    return arm.placement.n or 0


def _await(proxy: process.Child, port: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and proxy.returncode() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise Crashed(f"the proxy did not start; see {proxy.log.name}")


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """The backend of this script beside those that are installed, by an entry point as a third party has it."""
    with tempfile.TemporaryDirectory() as folder:
        facts = Path(folder) / "five_per_cent-0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: five-per-cent\nVersion: 0\n")
        (facts / "entry_points.txt").write_text("[llamaduel.backends]\nproxied = five_per_cent:Proxied\n")
        sys.path[:0] = [folder, str(PROXY.parent)]
        try:
            yield
        finally:
            del sys.path[:2]


# ── measure ─────────────────────────────────────────────────────────────────────────────────


def options(work: Path, arms: str, name: str, preset: str = "confirm") -> harness.Options:
    return harness.Options(
        model=str(work / "model.gguf"),
        arms=arms,
        preset=preset,
        budget=BUDGET_MINUTES,
        seed=5,
        prompt_tokens=32,
        context=512,
        out_tokens=256,
        no_wait=True,
        out=str(work / name),
    )


def measure(work: Path, arms: str, name: str, preset: str = "confirm") -> harness.Comparison:
    """A run of these arms, new; its folder is the only one in `work/name`."""
    shutil.rmtree(work / name, ignore_errors=True)
    with harness.show_progress() as watch:
        return harness.duel(options(work, arms, name, preset), watch)


def measure_both(work: Path) -> dict[str, harness.Comparison]:
    """The two runs. The delay is set by a look at the speed, and never by what the run says."""
    pilot = measure(work, "proxied", "pilot", "quick").reference.decode_tps
    if pilot is None:
        raise SystemExit("the engine gave no speed; see the logs in the folder of the pilot run")
    delay_us = round(1e6 * SHARE / pilot.value)
    return {
        "different": measure(work, f"proxied,proxied@us={delay_us}", "different"),
        "equal": measure(work, "proxied,proxied@us=0", "equal"),
    }


# ── publish ─────────────────────────────────────────────────────────────────────────────────


def publish_both(runs: Mapping[str, harness.Comparison], out: Path) -> None:
    """Both run folders, what their proxies measured, and the result."""
    for name, found in runs.items():
        shutil.rmtree(out / name, ignore_errors=True)
        publication.publish_as(found.run.folder, out / name, anyway=True)
    with (out / TRUTH).open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("run", "load", "label", "request", "tokens", "came_s", "sent_s"))
        for name, found in runs.items():
            for load in found.run.loads:
                path = found.run.folder / "engines" / f"{load.id}{HANDED_ON}"
                if load.stage == "block" and path.exists():
                    for number, line in enumerate(path.read_text("utf-8").splitlines()):
                        seen = json.loads(line)
                        spans = (f"{seen[key]:.6f}" for key in ("came_s", "sent_s"))
                        table.writerow((name, load.id, load.label, number, seen["tokens"], *spans))
    (out / RESULT).write_text(result(out), "utf-8")


# ── what was found ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Truth:
    """What the proxies of one arm did, over its judged loads: medians of a load, then means of loads."""

    token_s: float  # a token's time as it came from the engine
    delay_s: float  # added to it
    ratio: float  # speed of what was handed on against what came


def truth_of(folder: Path, name: str, found: harness.Comparison, label: str) -> Truth:
    warmups = found.header.plan.warmups
    blocks = {load.id for load in found.run.loads if load.label == label and load.block <= found.judgement.n}
    loads: dict[str, list[tuple[float, float]]] = {}
    with (folder / TRUTH).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["run"] == name and row["load"] in blocks and int(row["request"]) >= warmups:
                steps = int(row["tokens"]) - 1
                loads.setdefault(row["load"], []).append((float(row["came_s"]) / steps, float(row["sent_s"]) / steps))
    return Truth(
        token_s=_mean_of_medians([[came for came, _ in load] for load in loads.values()]),
        delay_s=_mean_of_medians([[sent - came for came, sent in load] for load in loads.values()]),
        ratio=math.exp(_mean_of_medians([[math.log(came / sent) for came, sent in load] for load in loads.values()])),
    )


def _mean_of_medians(loads: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(statistics.median(load) for load in loads)


def result(folder: Path) -> str:
    """What the published runs and the proxies' own measurements say, in Markdown."""
    rows, sentences, foreign = [], [], []
    for name, words in RUNS.items():
        found = harness.read(folder / name)
        slow = next(row for row in found.rows if not row.is_reference)
        label = next(arm.label for arm in found.header.plan.arms if arm.text == slow.arm)
        theirs, ours = (truth_of(folder, name, found, each) for each in (label, found.header.plan.reference))
        contrast, true = slow.contrast, theirs.ratio / ours.ratio
        if contrast is None or contrast.low is None or contrast.high is None:
            raise SystemExit(f"{folder / name} has no interval; measure again")
        inside = "inside" if contrast.low <= true <= contrast.high else "OUTSIDE"
        interval = f"{contrast.ratio:.3f}× ({contrast.low:.3f}–{contrast.high:.3f})"
        sentences.append(
            f"Two arms that are {words}, truly {true:.3f}×: {contrast.word}, {interval}; the truth is {inside} the "
            f"interval. State {found.state.word}."
        )
        rows.append(
            f"| [{name}]({name}/report.md) | {slow.arm} | {1e3 * theirs.token_s:.3f} ms | "
            f"{1e3 * (theirs.delay_s - ours.delay_s):.3f} ms | {true:.4f}× | {interval} | {contrast.word} | "
            f"{found.state.word} | {found.judgement.n} |"
        )
        loads = [load.telemetry.foreign_cores for load in found.run.loads if load.telemetry]
        foreign += [cores for cores in loads if cores is not None]
    listed = "\n".join(f"- {sentence}" for sentence in sentences)
    table = "\n".join(rows)
    before = BEFORE if (folder / BUSIER).is_dir() else ""
    busy = f"{statistics.fmean(foreign):.2f} foreign cores on average during a load, {max(foreign):.1f} at most"
    if all(PRECEDENCE in load.realised.notes for load in found.run.loads if load.realised):
        busy += "; in all arms alike engine, proxy and client had precedence over it"
    return f"""# Five per cent, and nothing, with the truth known

{listed}

Every arm is the same llama-server, started anew for each load, behind a loopback proxy of the same code. What differs
is a delay that the proxy adds to each token. The proxy stamps what comes from the engine and what it hands on, by its
own clock; from these two the true ratio is computed, and the harness sees neither.

The machine was shared with other work: {busy}.
{before}
| run | arm, against `proxied` | token of the engine | added | true ratio | measured | verdict | state | blocks |
|---|---|---|---|---|---|---|---|---|
{table}

`{TRUTH}` has what the proxies measured, a line for each request (request 0 is the warm-up). The run folders verify
with `llamaduel verify`; this page is computed from them and from the lines of the proxies. Made by
`scripts/experiments/five_per_cent.py`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, metavar="WORK", help="folder for the model and the runs")
    parser.add_argument("--publish", type=Path, metavar="FOLDER", help="where runs, truth and result are written")
    parser.add_argument("--precedence", action="store_true", help="go before other programs (Linux, root)")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if not (given.work / "model.gguf").exists():
        print(harness.synthesize(given.work / "model.gguf", size=SIZE))
    if given.precedence:
        Proxied.precedence = True
        go_first(os.getpid())
    with registered():
        runs = measure_both(given.work)
    for found in runs.values():
        print(harness.table(found))
    if given.publish:
        publish_both(runs, given.publish)


if __name__ == "__main__":
    import five_per_cent  # the module that the entry point names, and not a second copy of it

    five_per_cent.main()
