"""The command line. It parses, calls the library, prints, and returns an exit code.

0 fine · 1 could not run · 2 usage · 3 the run is RED · 4 a regression · 130 stopped. With `--json` stdout is one
JSON document and everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import io
import json
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import harness

RED, REGRESSION, STOPPED = 3, 4, 130
EPILOG = """Every option can also stand in [tool.llamaduel] of pyproject.toml, in a variable as LLAMADUEL_SEED,
and on the command line of pytest as --duel-seed. The nearest source wins: command line, variable, file."""
Command = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors as one sentence on stderr like all of ours."""

    def error(self, message: str) -> NoReturn:
        print(f"llamaduel: {message}; see {self.prog} --help", file=sys.stderr)  # noqa: T201
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point `llamaduel`."""
    if sys.platform == "win32":
        print("llamaduel: native Windows is not supported; run it inside WSL2", file=sys.stderr)  # noqa: T201
        return 1
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets question marks, not a traceback
    arguments = _parser().parse_args(argv)
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), _interrupt)  # so that every engine is stopped on the way out
    command: Command = arguments.command
    try:
        return command(arguments)
    except harness.DuelError as error:
        _say(f"llamaduel: {harness.plain(error)}")
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        _say(f"llamaduel: {harness.plain(error)}; check that it can be read and written, and that the disk has room")
        return 1
    except KeyboardInterrupt:
        _say("llamaduel: stopped; no engine of ours is left running")
        return STOPPED


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="llamaduel", description="Compare Ollama and llama.cpp on the same weights, in every placement."
    )
    parser.add_argument("--version", action="version", version=f"llamaduel {metadata.version('llamaduel')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    def add(name: str, command: Command, help_: str, *, json_: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_, description=help_[0].upper() + help_[1:] + ".")
        sub.set_defaults(command=command)
        if name in ("run", "find", "plan", "calibrate"):
            sub.epilog = EPILOG
        if json_:
            sub.add_argument("--json", action="store_true", help="one JSON document on stdout")
        return sub

    for name, command, help_ in (
        ("run", _run, "measure the arms on a model and write a run folder"),
        ("find", _find, "search the best value of a sweep in at most ten loads, then confirm it like a run"),
        ("plan", _plan, "show the arms of a run, equal placements merged, without loading anything"),
        ("calibrate", _calibrate, "set llama-bench beside a server arm, in milliseconds a token"),
    ):
        sub = add(name, command, help_)
        sub.add_argument("model", nargs="?", metavar="MODEL", help="the same as --model")
        harness.declare(sub.add_argument)

    sub = add("report", _report, "write report.md of a run folder again, and print the table")
    sub.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    sub = add("verify", _verify, "recompute every number of a run's report from its samples")
    sub.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    sub = add("compare", _compare, "compare two runs through their common reference arm")
    sub.add_argument("before", type=Path, metavar="RUN", help="a run folder")
    sub.add_argument("after", type=Path, metavar="RUN", help="a later one")
    sub.add_argument(
        "--fail-on-regression", action="store_true", help="exit with 4 if an arm lost more than the margin"
    )
    sub = add("inspect", _inspect, "show a model's layers, experts and bytes, and where placements put them")
    sub.add_argument("model", metavar="MODEL", help="a GGUF file, a folder with one, or ollama:NAME")
    sub = add("synth", _synth, "write a synthetic model whose output is known", json_=False)
    sub.add_argument("out", type=Path, metavar="OUT.gguf")
    sub.add_argument("--like", metavar="SHAPE", help="a known shape, such as tiny or qwen3-30b-a3b")
    sub.add_argument("--from-header", type=Path, metavar="FILE.gguf", help="the shape of this model")
    sub.add_argument("--size", metavar="SIZE", help="scale the shape to about this file size, as in 800MiB")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="other weights of the same shape (0)")
    sub.add_argument("--header-only", action="store_true", help="no weights, only a header to plan with")
    engines = commands.add_parser("engines", help="list engines, or get one into the cache")
    actions = engines.add_subparsers(metavar="ACTION", required=True, parser_class=_Parser)
    sub = actions.add_parser("list", help="what is found, and what can be installed")
    sub.add_argument("--json", action="store_true", help="one JSON document on stdout")
    sub.set_defaults(command=_engines_list)
    sub = actions.add_parser("install", help="build or fetch an engine into the cache")
    sub.add_argument("name", metavar="NAME", help="as `engines list` shows it")
    sub.set_defaults(command=_engines_install)
    return parser


def _options(arguments: argparse.Namespace) -> harness.Options:
    given = {name[5:]: value for name, value in vars(arguments).items() if name.startswith("duel_")}
    if arguments.model is not None:
        given["model"] = arguments.model
    return harness.collect(given)


def _print(text: str) -> None:
    print(text)  # noqa: T201


def _print_json(data: Any) -> None:
    _print(json.dumps(data, indent=1, allow_nan=False))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


# ── commands ────────────────────────────────────────────────────────────────────────────────


def _run(arguments: argparse.Namespace) -> int:
    with harness.show_progress() as watch:
        comparison = harness.duel(_options(arguments), watch)
    changes = harness.changes_since_baseline(comparison)
    if changes is None:
        return _show(comparison, arguments.json)
    if arguments.json:
        _print_json(harness.as_json(comparison) | {"changes": harness.to_json(changes)})
    else:
        _print(f"{harness.table(comparison)}\n\n{harness.changes_table(changes)}")
    return _gate(changes)


def _gate(changes: harness.Changes) -> int:
    """What --fail-on-regression makes of two runs. One that can decide nothing is no pass."""
    if changes.regression:
        return REGRESSION
    if changes.after.state == "RED":
        return RED
    if not changes.decided:
        _say(f"llamaduel: {harness.undecided(changes)}")
        return 1
    return 0


def _find(arguments: argparse.Namespace) -> int:
    with harness.show_progress() as watch:
        comparison = harness.find_best(_options(arguments), watch)
    return _show(comparison, arguments.json)


def _show(comparison: harness.Comparison, as_json: bool) -> int:
    if as_json:
        _print_json(harness.as_json(comparison))
    else:
        _print(harness.table(comparison))
    if not comparison.finished:
        _say(f"llamaduel: stopped; go on with `llamaduel run --resume {comparison.run.folder}`")
        return STOPPED
    if not comparison.has_numbers:
        return 1
    return RED if comparison.state.word == "RED" else 0


def _report(arguments: argparse.Namespace) -> int:
    return _show(harness.write_report(arguments.folder), arguments.json)


def _verify(arguments: argparse.Namespace) -> int:
    problems = harness.verify(arguments.folder)
    if arguments.json:
        _print_json({"run_dir": str(arguments.folder), "verified": not problems, "problems": problems})
    else:
        _print("\n".join(problems) or f"{arguments.folder}: plan and every number of the report are reproduced")
    return 1 if problems else 0


def _compare(arguments: argparse.Namespace) -> int:
    changes = harness.compare_runs(harness.read(arguments.before), harness.read(arguments.after))
    if arguments.json:
        _print_json(harness.to_json(changes))
    else:
        _print(harness.changes_table(changes))
    return _gate(changes) if arguments.fail_on_regression else 0


def _plan(arguments: argparse.Namespace) -> int:
    with harness.show_progress() as watch:
        found = harness.preview_run(_options(arguments), watch)
    if arguments.json:
        _print_json(found)
    else:
        _print(harness.preview_table(found))
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    with harness.show_progress() as watch:
        found = harness.inspect_model(arguments.model, watch)
    if arguments.json:
        _print_json(found)
    else:
        _print(harness.inspect_table(found))
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    with harness.show_progress() as watch:
        found = harness.calibrate(_options(arguments), watch)
    if arguments.json:
        _print_json(harness.to_json(found))
    else:
        _print(found.sentence())
    return 0


def _synth(arguments: argparse.Namespace) -> int:
    written = harness.synthesize(
        arguments.out,
        like=arguments.like,
        from_header=arguments.from_header,
        size=arguments.size,
        seed=arguments.seed,
        header_only=arguments.header_only,
        say=_say,
    )
    _print(written)
    return 0


def _engines_list(arguments: argparse.Namespace) -> int:
    found = harness.list_engines(harness.collect({}))
    if arguments.json:
        _print_json(found)
    else:
        _print(harness.engines_table(found))
    return 0


def _engines_install(arguments: argparse.Namespace) -> int:
    _print(str(harness.install_engine(arguments.name, _say)))
    return 0
