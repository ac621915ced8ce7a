"""The whole experiment on a GPU: find the best placement, look around it, calibrate, and print one table.

    python3 scripts/gpu_proof.py OUT [options] [-- OPTIONS OF llamaduel run]

A mixture of experts is larger than the memory it may take. Which is fastest: Ollama, llama.cpp as it is, all on the
GPU, all experts on the CPU, or the experts of the best number of layers? Every step is a command of llamaduel, shown
before it runs. What it leaves lies in OUT/STEP, so the same command goes on where it was stopped. The table comes
last and alone on stdout; nothing in it is computed here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

MINUTES = {  # by step, in the order in which they run
    "doctor": 2.0,
    "build": 60.0,
    "model": 30.0,
    "find": 45.0,
    "curve": 30.0,
    "calibrate": 15.0,
    "stock": 15.0,
    "depth": 20.0,
    "unlimited": 15.0,
    "forced": 15.0,
    "telemetry": 30.0,
}
USUAL = tuple(MINUTES)[:6]  # the others run when they are asked for
MEASURING = tuple(MINUTES)[3:]
SHAPE, LIMIT, SEED = "qwen3-30b-a3b", "12GiB", 48
SWEEP = "llama-cpp@ncmoe="
NEAR, FAR = "llama-cpp@ngl=99", "llama-cpp@cpu-moe"  # the same as the two ends of the sweep
BESIDE = f"ollama,llama-cpp,{NEAR},{FAR}"
TELEMETRY = Path(__file__).resolve().parent / "experiments" / "telemetry_cost.py"
ENDINGS = ((signal.SIGINT, 180.0), (signal.SIGTERM, 60.0), (signal.SIGKILL, None))  # and the seconds each is given
TICK_S = 0.1
USAGE, RED, STOPPED = 2, 3, 130  # of llamaduel: it cannot take an option, the run ranks nothing, it was ended early
GIB = 1 << 30
MOST_TELLING = 10.0  # between the ends of an interval that is shown, as in the tables of llamaduel
NONE = "–"


class Failed(Exception):
    """A step did not run, or not to its end; the message is one sentence."""


class Refused(Failed):
    """An option was not taken."""


class Experiment(NamedTuple):
    """What was asked for. `limit` and `no_limit` are options of llamaduel."""

    out: Path
    llamaduel: list[str]
    model: str
    synth: list[str]  # how to make the model; empty if it is the person's own
    engines: list[str]
    limit: list[str]
    no_limit: list[str]
    more: list[str]  # of every run
    budget: list[str]  # of find and of curve
    minutes: dict[str, float]
    stand_in: bool
    llama_server: str | None


class Step(NamedTuple):
    """A step that is running, until `ends_s` of the monotonic clock."""

    of: Experiment
    name: str
    ends_s: float

    @property
    def folder(self) -> Path:
        return self.of.out / self.name


# ── one command ─────────────────────────────────────────────────────────────────────────────


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def perform(
    step: Step,
    name: str,
    argv: Sequence[str],
    fine: Sequence[int] = (0,),
    is_run: bool = False,
    again: bool = False,
) -> None:
    """Run one command of a step to its end, or to that of its time. Raises Failed.

    What it prints is in NAME.json or NAME.txt once it has ended well, and then it runs no more, but for `again`. A run
    that was ended early is continued, with the budget that it was begun with or not at all.
    """
    step.folder.mkdir(parents=True, exist_ok=True)
    done, log = answer_of(step.of, step.name, name, is_json="--json" in argv), step.folder / f"{name}.log"
    if done.exists() and not again:
        say(f"{name}: done before, see {done}")
        return
    begun = run_folder(step.of, step.name) if is_run else None
    if begun is not None:
        words = [word for word in step.of.more if word == "--no-wait"]
        words += step.of.budget if "--budget" in argv else []
        argv = [*step.of.llamaduel, "run", "--resume", str(begun), *words, "--json"]
    partial = done.with_name(f"{done.name}.partial")
    with partial.open("wb") as output:
        code, in_time = execute(argv, output, log, step.ends_s)
    if code in fine and partial.stat().st_size:  # doctor's 1 is a finding, or that it could not look
        partial.replace(done)
    elif in_time:
        anew = f"; to begin it anew, move or remove {begun}" if begun else ""
        told = f"{last_line(log) or f'it ended with {code}'} (all it said: {log}{anew})"
        raise Refused(told) if code == USAGE else Failed(told)
    elif is_run and run_folder(step.of, step.name) is None:
        raise Failed("its time was over before there was anything to keep; give it more by --minutes")
    else:
        raise Failed(f"its time was over; the same command {'goes on with it' if is_run else 'begins it again'}")


def execute(argv: Sequence[str], output: IO[bytes], log: Path, ends_s: float) -> tuple[int, bool]:
    """Exit code, and whether it ended by itself in time. Ctrl-C, or the end of its time, ends it as Ctrl-C would."""
    say(f"$ {shlex.join(argv)}")
    if time.monotonic() >= ends_s:
        say("not begun: the time of its step is over")
        return STOPPED, False
    with log.open("ab") as kept, started(argv, output) as child:
        assert child.stderr is not None
        copier = threading.Thread(target=copy, args=(child.stderr, kept), daemon=True)
        copier.start()
        try:
            while child.poll() is None and time.monotonic() < ends_s:
                time.sleep(TICK_S)
            in_time = child.poll() is not None
            if not in_time:
                say("the time of this step is over: ending it, as Ctrl-C would")
                end(child)
        except KeyboardInterrupt:
            end(child)
            raise
        finally:
            copier.join(5)  # what it left running may hold the pipe
    return child.returncode, in_time


@contextlib.contextmanager
def started(argv: Sequence[str], output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own: a terminal's Ctrl-C reaches it by us, and once. Raises Failed."""
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise Failed(f"{argv[0]} cannot be started ({error.strerror}); name another by --llamaduel") from None
    with child:
        yield child


def end(child: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then less kindly. llamaduel stops its engines and writes its report on the way out."""
    for sign, seconds in ENDINGS:
        child.send_signal(sign)
        try:
            child.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            say(f"it has not ended {seconds:.0f} s after {sign.name}")


def copy(source: IO[bytes], kept: IO[bytes]) -> None:
    for line in iter(source.readline, b""):
        kept.write(line)
        kept.flush()
        say(f"  {line.decode(errors='replace').rstrip()}")


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def ask(of: Experiment, *words: str, fine: Sequence[int] = (0,)) -> Any:
    """What a command that takes no time answers. Raises Failed."""
    argv = [*of.llamaduel, *words, "--json"]
    say(f"$ {shlex.join(argv)}")
    try:
        told = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if told.returncode in fine:
            return json.loads(told.stdout)
    except OSError as error:
        raise Failed(f"{argv[0]} cannot be started ({error.strerror}); name another by --llamaduel") from None
    except ValueError:
        raise Failed(f"`{shlex.join(argv)}` gave no JSON; run it by hand") from None
    raise Failed((told.stderr.strip().splitlines() or [f"it ended with {told.returncode}"])[-1])


def answer_of(of: Experiment, step: str, name: str, is_json: bool = True) -> Path:
    return of.out / step / f"{name}.{'json' if is_json else 'txt'}"


def run_folder(of: Experiment, name: str) -> Path | None:
    """The latest run of a step."""
    found = sorted((of.out / name).glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


# ── the steps ───────────────────────────────────────────────────────────────────────────────


def doctor(step: Step) -> None:
    """Never taken for done: what counts is the machine as it is now."""
    of = step.of
    perform(step, "doctor", [*of.llamaduel, "doctor", *of.engines, *of.limit, "--json"], fine=(0, 1), again=True)


def build(step: Step) -> None:
    """Never taken for done: what counts is the engine that is here now."""
    of = step.of
    if of.llama_server is not None:
        say("not needed: --llama-server names one")
    elif sees_device(of):
        say("not needed: a llama.cpp that sees a device is here")
    else:
        perform(step, "build", [*of.llamaduel, "engines", "install", "llama-cpp", "--json"], again=True)
        if not sees_device(of):
            raise Failed("the llama.cpp that was built sees no device here; see `llamaduel doctor`")


def sees_device(of: Experiment) -> bool:
    """Whether the llama.cpp that would be taken sees a GPU, or takes a stand-in for one."""
    listed = [each for each in ask(of, "engines", "list")["engines"] if each["found"]]
    return any(each["rpc" if of.stand_in else "devices"] for each in listed if each["backend"] == "llama-cpp")


def model(step: Step) -> None:
    of = step.of
    if not of.synth:
        say(f"not needed: {of.model} is your own")
    elif Path(of.model).exists():
        say(f"done before, see {of.model}")
    else:
        perform(step, "model", [*of.llamaduel, "synth", of.model, *of.synth, "--json"], again=True)


def layers(of: Experiment) -> int:
    """Layers that `ncmoe` counts. Raises Failed where none has experts."""
    found = ask(of, "inspect", of.model)
    if not found["expert_layers"]:
        raise Failed(f"{of.model} has no experts to place; take a mixture of experts")
    return int(found["blocks"])


def find(step: Step) -> None:
    """The best value found is the reference: `llamaduel find` takes no other."""
    arms = f"{BESIDE},{SWEEP}0..{layers(step.of)}"
    measure(step, arms, *step.of.limit, *step.of.budget, verb="find")


def curve(step: Step) -> None:
    values = around(best_value(step), layers(step.of))
    measure(step, SWEEP + "/".join(map(str, values)), *step.of.limit, *step.of.budget)


def around(best: int, most: int) -> list[int]:
    """The best first, for it is the reference; its neighbours, then larger and larger steps up to `most`."""
    found = [n for n in range(best - 2, best + 3) if 0 <= n <= most]
    gap = 4
    while found[-1] + 1.5 * gap < most:
        found.append(found[-1] + gap)
        gap *= 2
    return list(dict.fromkeys([best, *found, most]))


def best_value(step: Step) -> int:
    """The best N. Raises Failed, also where the step was measured around another one."""
    of = step.of
    folder = run_folder(of, "find")
    if folder is None:
        raise Failed("it needs the best value of `find`, and there is none yet")
    best = best_values(of, ask(of, "report", str(folder), fine=(0, 1, RED, STOPPED)), read(folder / "run.json"))
    if not best:
        raise Failed("no value was picked by `find`; see its report")
    outdated = around_another(of, step.name, best)
    if outdated:
        raise Failed(outdated)
    return best[0]


def best_values(of: Experiment, told: dict[str, Any], header: dict[str, Any]) -> list[int]:
    """Those that the search confirmed, the best first; where nothing may be ranked, those that it picked."""
    for arms in (told["best"], header["search"]["chosen"]):
        values = []
        for arm in arms:
            named = re.fullmatch(rf"{SWEEP}(\d+)", arm)
            if named:
                values.append(int(named[1]))
            elif arm in (NEAR, FAR):  # of equal placements the arm beside the sweep gives its name
                values.append(layers(of) if arm == FAR else 0)
        if values:
            return values
    return []


def around_another(of: Experiment, name: str, best: Sequence[int]) -> str:
    """That a step was measured around a value which is none of the best now; nothing if it was not."""
    folder = run_folder(of, name)
    then = re.match(rf"{SWEEP}(\d+)", read(folder / "run.json")["options"]["arms"]) if folder else None
    if then is None or int(then[1]) in best:
        return ""
    anew = f"to measure it anew, move or remove {of.out / name}"
    return f"it was measured around {then[0]}, and the best is {SWEEP}{best[0]} now; {anew}"


def calibrate(step: Step) -> None:
    """Without a limit. A stand-in says nothing about speed, so a rehearsal calibrates on the CPU."""
    of = step.of
    for arm in ("llama-cpp",) if of.stand_in else (NEAR, FAR):
        words = ["calibrate", of.model, "--arms", arm, *of.engines, *of.more, "--json"]
        perform(step, arm, [*of.llamaduel, *words])


def stock(step: Step) -> None:
    measure(step, "ollama,llama-cpp", *step.of.limit, "--settings", "stock", "--preset", "quick")


def depth(step: Step) -> None:
    arm = f"{SWEEP}{best_value(step)}"
    measure(step, f"{arm},{arm},ctk=q8_0,ctv=q8_0", *step.of.limit, "--depth", "16k", "--preset", "quick")


def unlimited(step: Step) -> None:
    measure(step, f"ollama,llama-cpp,{FAR}", *step.of.no_limit, "--preset", "quick")


def forced(step: Step) -> None:
    measure(step, "ollama,ollama@cpu-moe", *step.of.limit, "--preset", "quick")


def telemetry(step: Step) -> None:
    of = step.of
    if importlib.util.find_spec("harness") is None:
        raise Failed(f"it needs a Python that has llamaduel, and {sys.executable} has not; take that of its venv")
    options = ["--llama-server", of.llama_server] if of.llama_server else []
    options += [word for word in of.more if word == "--no-wait"]
    arm = "llama-cpp" if of.stand_in else NEAR
    words = ["--model", of.model, "--arms", arm, "--blocks", "12", *options, "--out", str(step.folder)]
    perform(step, "telemetry", [sys.executable, str(TELEMETRY), *words])


def measure(step: Step, arms: str, *words: str, verb: str = "run") -> None:
    of = step.of
    command = [*of.llamaduel, verb, of.model, "--arms", arms, *words, "--seed", str(SEED), *of.engines, *of.more]
    perform(step, step.name, [*command, "--out", str(step.folder), "--json"], fine=(0, RED), is_run=True)


STEPS: dict[str, Callable[[Step], None]] = {
    each.__name__: each
    for each in (doctor, build, model, find, curve, calibrate, stock, depth, unlimited, forced, telemetry)
}


def take(of: Experiment, names: Iterable[str]) -> dict[str, str]:
    """Run the steps; those that did not run to their end, with the reason."""
    failed = {}
    for name in names:
        say(f"\n── {name}, {of.minutes[name]:g} min at most")
        try:
            STEPS[name](Step(of, name, time.monotonic() + 60 * of.minutes[name]))
        except Failed as error:
            if name == "doctor" and isinstance(error, Refused):
                raise  # the other steps could not take it either, and some would find that out late
            failed[name] = str(error)
            say(f"{name}: {error}")
    return failed


# ── the table ───────────────────────────────────────────────────────────────────────────────

HEAD = ("arm", "status", "decode tok/s", "to the reference", "predicted", "engine", "NVML", "J/token")


def summary(of: Experiment) -> str:
    """All that lies in the folder, from this start or an earlier one."""
    rows: list[Sequence[str]] = []
    said = []
    best: list[int] = []
    for name in MINUTES:
        folder = run_folder(of, name)
        if folder is None:
            continue
        try:
            told = ask(of, "report", str(folder), fine=(0, 1, RED, STOPPED))
        except Failed as error:
            said.append(f"{name}: {error}")
            continue
        rows += [(f"{name}:", *[""] * (len(HEAD) - 1)), *map(row, told["arms"])]
        ended = "" if answer_of(of, name, name).exists() else ", ended early"
        said.append(f"{name}: {told['state']}{ended}. {told['answer']}")
        if name == "find":
            header = read(folder / "run.json")
            said += searched(told, header)
            with contextlib.suppress(Failed):  # the model may be gone
                best = best_values(of, told, header)
        elif name == "curve":
            said += [f"curve: {each['finding']} (best: {', '.join(each['best']) or NONE})" for each in told["curves"]]
        outdated = around_another(of, name, best) if best and name in ("curve", "depth") else ""
        said += [f"{name}: {outdated}"] if outdated else []
    said += [*calibrated(of), *watched(of)]
    note = "Memory in GiB of the device: predicted, as the engine reports it, as NVML sees it." if rows else ""
    return "\n".join(filter(None, [aligned([HEAD, *rows]) if rows else "No run is there.", note, *said]))


def row(arm: dict[str, Any]) -> Sequence[str]:
    ratio = "reference" if arm["is_reference"] else " ".join(filter(None, [between(arm["ratio"]), arm["verdict"]]))
    memory = (arm["predicted_device_bytes"], arm["realised_device_bytes"], arm["vram_bytes"])
    return (
        arm["arm"],
        arm["status"] if arm["alias_of"] is None else f"= {arm['alias_of']}",
        between(arm["decode_tps"]) or NONE,
        ratio or NONE,
        *(NONE if each is None else f"{each / GIB:.2f}" for each in memory),
        between(arm.get("energy_j_per_token"), 3) or NONE,
    )


def between(value: Any, digits: int = 2) -> str:
    """A number, or one with its bounds; nothing where it is unknown."""
    if value is None:
        return ""
    if not isinstance(value, dict):
        return f"{value:.{digits}f}"
    low, high = value["low"], value["high"]
    told = "" if low is None or high is None or high > MOST_TELLING * low else f" ({low:.{digits}f}–{high:.{digits}f})"
    return f"{value['value']:.{digits}f}{told}"


def searched(told: dict[str, Any], header: dict[str, Any]) -> Iterator[str]:
    search = header["search"]
    loads = sum(each["loads"] for each in search["tried"])
    yield f"find: best {', '.join(told['best']) or NONE}; picked {', '.join(search['chosen'])} by {loads} loads"


def calibrated(of: Experiment) -> Iterator[str]:
    for path in sorted((of.out / "calibrate").glob("*.json")):
        told = read(path)
        bench, server = (", ".join(f"{each:.3f}" for each in told[side]) for side in ("bench_ms", "server_ms"))
        apart = "told apart" if told["told_apart"] else "not told apart"
        yield (
            f"calibrate: {told['arm']}: llama-bench {bench} ms a token, the server {server}, a difference of "
            f"{told['difference_ms']:+.3f} ({apart}); timing it adds {told['client_adds_median_ms']:+.4f}"
        )


def watched(of: Experiment) -> Iterator[str]:
    path = answer_of(of, "telemetry", "telemetry", is_json=False)
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return (f"telemetry: {line[2:]}" for line in lines if line.startswith("- "))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(each[column]) for each in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, each, widths)).rstrip() for each in rows)


# ── what was asked for ──────────────────────────────────────────────────────────────────────


def experiment(given: argparse.Namespace, more: Sequence[str]) -> Experiment:
    """Raises Failed where the folder holds another experiment, of which something was measured."""
    shape = given.like or SHAPE
    path = given.out / f"{shape}{f'-{given.size}' if given.size else ''}.gguf"
    engines = {"--llama-server": given.llama_server, "--ollama": given.ollama}
    limit = [] if given.vram_limit == "none" else ["--vram-limit", given.vram_limit]
    found = Experiment(
        out=given.out,
        llamaduel=given.llamaduel,
        model=given.model or str(path),
        synth=[] if given.model else ["--like", shape, *(["--size", given.size] if given.size else [])],
        engines=[word for name, value in engines.items() if value for word in (name, value)],
        limit=["--stand-in", given.stand_in] if given.stand_in else limit,
        no_limit=["--stand-in"] if given.stand_in else [],
        more=[*(["--no-wait"] if given.no_wait else []), *more],
        budget=["--budget", given.budget] if given.budget else [],
        minutes={**MINUTES, **dict(given.minutes)},
        stand_in=bool(given.stand_in),
        llama_server=given.llama_server,
    )
    begun = given.out / "experiment.json"
    facts = {"model": given.model or path.name, "limit": found.limit, "options": list(more)}
    try:
        held = read(begun) if begun.exists() else None
        if held not in (None, facts) and has_measured(given.out):
            raise Failed(f"{given.out} holds an experiment with other options (see {begun}); name another folder")
        if held != facts:
            given.out.mkdir(parents=True, exist_ok=True)
            partial = begun.with_name(f"{begun.name}.partial")
            partial.write_text(json.dumps(facts, indent=1), "utf-8")
            partial.replace(begun)
    except (OSError, ValueError) as error:
        raise Failed(f"{given.out} cannot hold an experiment ({error}); name another folder") from None
    return found


def has_measured(out: Path) -> bool:
    """Whether a step that measures has left an answer, or a run."""
    kept = ("*.json", "*.txt", "*/run.json")
    return any(path for name in MEASURING for each in kept for path in (out / name).glob(each))


def minutes_of(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in MINUTES:
        raise argparse.ArgumentTypeError(f"no step {name!r}; the steps are {', '.join(MINUTES)}")
    try:
        minutes = float(value)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not STEP=MINUTES, as in find=30")
    return name, minutes


def steps_of(text: str) -> list[str]:
    """In the order in which they run, however they were named."""
    asked = [name.strip() for name in text.split(",")]
    for name in asked:
        minutes_of(f"{name}=1")
    return [name for name in MINUTES if name in asked]


def usual_llamaduel() -> list[str]:
    """The one beside this Python, else the one on PATH."""
    beside = shutil.which("llamaduel", path=str(Path(sys.executable).parent))
    return [beside or shutil.which("llamaduel") or "llamaduel"]


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="the folder for all of it")
    add("--model", metavar="MODEL", help="your own, as llamaduel takes it, in place of a synthetic one")
    add("--like", metavar="SHAPE", help=f"shape of the synthetic model ({SHAPE})")
    add("--size", metavar="SIZE", help="scale it to about this file size")
    add("--vram-limit", default=LIMIT, metavar="SIZE", help=f"device memory that it may take, or none ({LIMIT})")
    add("--stand-in", metavar="SIZE", help="a rehearsal without a GPU: a stand-in device of this size")
    add(
        "--steps",
        type=steps_of,
        default=list(USUAL),
        metavar="LIST",
        help=f"{','.join(USUAL)}; also {', '.join(name for name in MINUTES if name not in USUAL)}",
    )
    usual = ", ".join(f"{name}={value:g}" for name, value in MINUTES.items())
    add("--minutes", type=minutes_of, action="append", default=[], metavar="STEP=MIN", help=f"at most ({usual})")
    add("--budget", metavar="TIME", help="time for the blocks of find, and of curve, as llamaduel takes it")
    add("--llamaduel", type=shlex.split, default=usual_llamaduel(), metavar="COMMAND", help="the command to use")
    add("--llama-server", metavar="PATH", help="path of llama-server, or of the folder that holds it")
    add("--ollama", metavar="PATH", help="path of ollama, or `attach`")
    add("--no-wait", action="store_true", help="do not wait for a quiet machine")
    return parser.parse_args(argv)


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main(words: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored, and children inherit that
    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, interrupt)  # so that the step is ended on the way out
    ours = list(takewhile(lambda word: word != "--", words))
    given = parsed(ours)
    try:
        of = experiment(given, words[len(ours) + 1 :])
        failed = take(of, given.steps)
        print(summary(of), flush=True)
    except Failed as error:
        say(f"gpu_proof: {error}")
        return 1
    except KeyboardInterrupt:
        say("gpu_proof: stopped; the same command goes on from here")
        return STOPPED
    for name, reason in failed.items():
        say(f"gpu_proof: {name} is not done: {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
