"""The command line. It parses, calls the library, prints, and returns an exit code.

0 fine · 1 could not run · 2 usage · 3 the run is RED · 4 a regression · 130 stopped. With `--json` stdout is one
JSON document and everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import harness

if TYPE_CHECKING:
    from harness.facts import Installed, Verified, Written

RED, REGRESSION, STOPPED = 3, 4, 130
EPILOG = """Every option can also stand in [tool.llamaduel] of pyproject.toml, in a variable as LLAMADUEL_SEED,
and on the command line of pytest as --duel-seed. The nearest source wins: command line, variable, file."""
Command = Callable[[argparse.Namespace], int]
GROUPS = {
    "start here": ("doctor", "run"),
    "measure": ("find", "plan", "calibrate"),
    "read": ("report", "export", "compare", "verify", "publish"),
    "models and engines": ("inspect", "synth", "engines"),
}
FIRST = """llamaduel compares Ollama and llama.cpp on the same weights, in every placement. Type first:

  llamaduel doctor        what this machine has, and what to mend
  llamaduel run           the whole walk on a small synthetic model, in minutes
  llamaduel run MODEL     your model: a GGUF file, a folder with one, or ollama:NAME

All commands: llamaduel --help"""


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors as one sentence on stderr like all of ours. What was parsed knows its parser."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        if (missing := message.removeprefix("the following arguments are required: ")) != message:
            message = f"{missing} {'are' if ', ' in missing else 'is'} missing"
        stop = "" if message.endswith("?") else ";"
        print(f"llamaduel: {harness.plain(message)}{stop} see {self.prog} --help", file=sys.stderr)  # noqa: T201
        raise SystemExit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """An unknown command, answered by the nearest."""
        if not isinstance(action, argparse._SubParsersAction) or value in action.choices:
            super()._check_value(action, value)
        elif Path(value).suffix == ".gguf":
            self.error(f"{value!r} is a model and no command; type llamaduel run {value}")
        else:
            self.error(f"no {str(action.metavar).lower()} {value!r}; {harness.nearest(value, action.choices)}")

    def refuse(self, extras: Sequence[str]) -> NoReturn:
        """Refuse what was left over after this command, with the nearest of its options."""
        named = [word.partition("=")[0] for word in extras if word.startswith("-")]
        if not named:
            self.error(f"{extras[0]!r} is one argument too many")
        known = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        close = difflib.get_close_matches(named[0], known, n=1, cutoff=0.5)
        self.error(f"no option {named[0]!r}" + (f"; did you mean {close[0]!r}?" if close else ""))


class _Main(_Parser):
    """The parser of all commands, listed by what they are for."""

    def format_help(self) -> str:
        (listed,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        grouped = {name for names in GROUPS.values() for name in names}
        others = tuple(name for name in listed.choices if name not in grouped)
        sections = {
            title: [each for name in names for each in listed._choices_actions if each.dest == name]
            for title, names in {**GROUPS, "more": others}.items()
        } | {"options": [action for action in self._actions if action is not listed]}
        formatter = self._get_formatter()
        formatter.add_usage("llamaduel COMMAND … (llamaduel COMMAND --help for its options)", [], [])
        formatter.add_text(self.description)
        for title, actions in sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point `llamaduel`."""
    if sys.platform == "win32":
        print("llamaduel: native Windows is not supported; run it inside WSL2", file=sys.stderr)  # noqa: T201
        return 1
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets question marks, not a traceback
    arguments = _parsed(sys.argv[1:] if argv is None else argv)
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


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """What was typed. Left over is told by the command that it was typed to."""
    parser = _parser()
    if not argv:
        _say(FIRST)
        raise SystemExit(2)
    if argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version"):
        command = next((word for word in argv if any(word in names for names in GROUPS.values())), "COMMAND")
        parser.error(f"options come after the command: llamaduel {command} {argv[0]}")
    arguments, extras = parser.parse_known_args(argv)
    if extras:
        arguments.parser.refuse(extras)
    return arguments


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = _Main(
        prog="llamaduel",
        description="Compare Ollama and llama.cpp on the same weights, in every placement.",
    )
    parser.add_argument("--version", action="version", version=f"llamaduel {metadata.version('llamaduel')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    def add(name: str, command: Command, help_: str, *, json_: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_, description=help_[0].upper() + help_[1:] + ".")
        sub.set_defaults(command=command)
        if name in ("run", "find", "plan", "doctor", "calibrate"):
            sub.epilog = EPILOG
        if json_:
            sub.add_argument("--json", action="store_true", help="one JSON document on stdout")
        return sub

    for name, command, help_ in (
        ("run", _run, "measure the arms on a model and write a run folder"),
        ("find", _find, "search the best value of a sweep in at most ten loads, then confirm it like a run"),
        ("plan", _plan, "show the arms of a run, equal placements merged, without loading anything"),
        ("doctor", _doctor, "look over engines, GPUs, memory, CPU and traps of this machine before a run"),
        ("calibrate", _calibrate, "set llama-bench beside a server arm, in milliseconds a token"),
    ):
        sub = add(name, command, help_)
        sub.add_argument("model", nargs="?", metavar="MODEL", help="the same as --model")
        harness.declare(sub.add_argument)

    sub = add("report", _report, "write report.md of a run folder again, and print the table")
    sub.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    sub = add("export", _export, "write a run as comma-separated values on stdout", json_=False)
    sub.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    sub.add_argument(
        "--of", default="loads", metavar="SHEET", help="loads (judged ones), samples (every request) or arms (loads)"
    )
    sub = add("verify", _verify, "recompute every number of a run's report from its samples")
    sub.add_argument("folder", type=Path, metavar="RUN", help="a run folder, or one that holds several")
    sub = add("publish", _publish, "copy a run without what is private, and list it in the index of published runs")
    sub.add_argument("folder", nargs="?", type=Path, metavar="RUN", help="a run folder; without one only the index")
    sub.add_argument("--into", type=Path, default=Path("reports"), metavar="DIR", help="where it goes (reports)")
    sub.add_argument("--name", metavar="SLUG", help="of its folder, after the date (machine and model)")
    sub.add_argument("--anyway", action="store_true", help="a RED run too, marked as one that ranks nothing")
    sub = add("compare", _compare, "compare two runs through their common reference arm")
    sub.add_argument("before", type=Path, metavar="RUN", help="a run folder")
    sub.add_argument("after", type=Path, metavar="RUN", help="a later one")
    sub.add_argument(
        "--fail-on-regression", action="store_true", help="exit with 4 if an arm lost more than the margin"
    )
    sub = add("inspect", _inspect, "show a model's layers, experts and bytes, and where placements put them")
    sub.add_argument("model", metavar="MODEL", help="a GGUF file, a folder with one, ollama:NAME or hf:ORG/REPO:FILE")
    sub = add("synth", _synth, "write a synthetic model whose output is known")
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
    sub.add_argument("--json", action="store_true", help="one JSON document on stdout")
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
    harness.append_summary(_say, comparison, changes)
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
    harness.append_summary(_say, comparison)
    return _show(comparison, arguments.json)


def _show(comparison: harness.Comparison, as_json: bool) -> int:
    if as_json:
        _print_json(harness.as_json(comparison))
    else:
        _print(harness.table(comparison))
    if not comparison.finished:
        if as_json:  # the table says it too
            from harness.record import resuming

            _say(f"llamaduel: stopped; go on with `{resuming(comparison.run.folder)}`")
        return STOPPED
    if not comparison.has_numbers:
        return 1
    return RED if comparison.state.word == "RED" else 0


def _report(arguments: argparse.Namespace) -> int:
    return _show(harness.write_report(arguments.folder), arguments.json)


def _export(arguments: argparse.Namespace) -> int:
    sys.stdout.writelines(harness.sheet(harness.read(arguments.folder), arguments.of))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    checked = harness.verify_all(arguments.folder)
    several = len(checked) > 1
    problems = [f"{each.folder}: {text}" if several else text for each in checked for text in each.problems]
    if arguments.json:
        found: Verified = {"run_dir": str(arguments.folder), "verified": not problems, "problems": problems}
        _print_json(found)
    else:
        is_told = several or not problems or any(each.drawn_elsewhere for each in checked)
        told = [f"{arguments.folder}: {harness.outcome(checked)}"] if is_told else []
        _print("\n".join([*problems, *told]))
    return 1 if problems else 0


def _publish(arguments: argparse.Namespace) -> int:
    done = None
    if arguments.folder is None and (arguments.name is not None or arguments.anyway):
        arguments.parser.error("--name and --anyway are about a run, and none is named; type llamaduel publish RUN")
    if arguments.folder is not None:
        done = harness.publish(arguments.folder, arguments.into, name=arguments.name, anyway=arguments.anyway)
    damaged = harness.rebuild_index(arguments.into)
    for sentence in damaged:
        _say(f"llamaduel: {harness.plain(sentence)}")
    if arguments.json:
        _print_json(harness.published_json(done, arguments.into, damaged))
    else:
        _print(harness.published_text(done, arguments.into))
    return 1 if damaged else 0


def _compare(arguments: argparse.Namespace) -> int:
    changes = harness.compare_runs(harness.read(arguments.before), harness.read(arguments.after))
    harness.append_summary(_say, None, changes)
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


def _doctor(arguments: argparse.Namespace) -> int:
    found = harness.diagnose(_options(arguments))
    if arguments.json:
        _print_json(found)
    else:
        _print(harness.doctor_table(found))
    return 0 if found["ok"] else 1


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
        _print_json(found.to_json())
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
    if arguments.json:
        found: Written = {"path": str(arguments.out), "size_bytes": arguments.out.stat().st_size}
        _print_json(found)
    else:
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
    path = harness.install_engine(arguments.name, _say)
    if arguments.json:
        found: Installed = {"name": arguments.name, "path": path}
        _print_json(found)
    else:
        _print(path)
    return 0
