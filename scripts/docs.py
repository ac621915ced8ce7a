"""Write the generated parts of the documents anew: the commands, and the output of published runs.

    .venv/bin/python scripts/docs.py [--check]

A part lies between two lines of Markdown that nobody sees, `<!-- help -->` or `<!-- run: FOLDER -->` and
`<!-- end -->`. With --check nothing is written: what is not current is shown as a diff, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import harness
from harness.cli import _parser

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 100  # columns, whatever the terminal
HELP_AT = 30  # column where the text of an option begins
FEW = 1000  # characters of arguments that may stand twice
PART = re.compile(r"^(<!-- (help|run: ([\w./-]+)) -->)\n.*?^(<!-- end -->)$", re.DOTALL | re.MULTILINE)


def documents() -> list[Path]:
    """All that may hold generated parts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def current(text: str) -> str:
    """A document with its parts as they should be. Raises DuelError if a run folder cannot be read."""

    def part(found: re.Match[str]) -> str:
        made = commands() if found[2] == "help" else output(Path(found[3]))
        return f"{found[1]}\n\n{made}\n\n{found[4]}"

    return PART.sub(part, text)


# ── the output of a run ─────────────────────────────────────────────────────────────────────


def output(folder: Path) -> str:
    """What a terminal of WIDTH columns shows of a run folder, named from the root of the repository."""
    with contextlib.chdir(ROOT):
        shown = harness.table(harness.read(folder), width=WIDTH)
    return f"```text\n{shown.strip()}\n```"


# ── the commands ────────────────────────────────────────────────────────────────────────────
# argparse draws its help differently from version to version; so it is drawn here, from what the parser knows.


def commands() -> str:
    """All commands, then each with its arguments. What is the same as of an earlier one is not repeated."""
    found = list(_leaves(_parser(), ""))
    lines = [f"| [{parser.prog}](#{parser.prog.replace(' ', '-')}) | {text} |" for parser, text in found]
    sections = ["\n".join(["| command | what it does |", "| --- | --- |", *lines])]
    first: dict[str, str] = {}
    for parser, text in found:
        arguments = _arguments(parser)
        same = first.setdefault(arguments, parser.prog)
        sections.append(_section(parser, text, arguments if same == parser.prog or len(arguments) < FEW else "", same))
    return "\n\n".join(sections)


def _leaves(parser: argparse.ArgumentParser, text: str) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """The parsers that do something, each with the line that a list of commands has for it."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser, text
    for group in groups:
        helps = {each.dest: each.help or "" for each in group._choices_actions}
        for name, sub in group.choices.items():
            yield from _leaves(sub, helps.get(name, ""))


def _section(parser: argparse.ArgumentParser, text: str, arguments: str, same: str) -> str:
    said = parser.description or f"{text[:1].upper()}{text[1:]}."
    told = [_paragraph(parser.epilog)] if parser.epilog and arguments else []
    if not arguments:
        told = [f"Arguments and options are those of `{same}`."]
    drawn = f"```text\nusage: {_usage(parser)}{arguments}\n```"
    return "\n\n".join([f"## {parser.prog}", _paragraph(said), drawn, *told])


def _arguments(parser: argparse.ArgumentParser) -> str:
    drawn = []
    for group in parser._action_groups:
        rows = [_row(action, parser.prog) for action in group._group_actions if action.help != argparse.SUPPRESS]
        drawn += ["", f"{group.title}:", *rows] if rows else []
    return "".join(f"\n{line}" for line in drawn)


def _usage(parser: argparse.ArgumentParser) -> str:
    named = [action for action in parser._actions if not action.option_strings]
    words = [f"[{_metavar(each)}]" if each.nargs == "?" else _metavar(each) for each in named]
    return " ".join([parser.prog, "[OPTIONS]", *words])


def _row(action: argparse.Action, prog: str) -> str:
    value = "" if action.nargs == 0 else _metavar(action)
    name = ", ".join(action.option_strings) or value
    if action.option_strings and value:
        name += f"[={value}]" if action.nargs == "?" else f" {value}"
    text = (action.help or "") % {"prog": prog, "default": action.default}
    lines = textwrap.wrap(text, WIDTH - HELP_AT, break_on_hyphens=False) or [""]
    head = f"  {name}".ljust(HELP_AT)
    first = [head + lines[0]] if len(name) + 4 <= HELP_AT else [f"  {name}", " " * HELP_AT + lines[0]]
    return "\n".join(line.rstrip() for line in [*first, *(" " * HELP_AT + line for line in lines[1:])])


def _metavar(action: argparse.Action) -> str:
    given = action.metavar or action.dest.upper()
    return given if isinstance(given, str) else " ".join(given)


def _paragraph(text: str) -> str:
    """Names of options in it are code, so that Markdown leaves their dashes alone."""
    marked = re.sub(r"(?<![\w`])(--[a-z][\w-]*|LLAMADUEL_\w+|\[tool\.llamaduel\])", r"`\1`", " ".join(text.split()))
    return textwrap.fill(marked, 120, break_on_hyphens=False)


def main(check: bool) -> int:
    changed = 0
    for path in documents():
        written = path.read_text(encoding="utf-8")
        wanted = current(written)
        if wanted == written:
            continue
        changed += 1
        name = str(path.relative_to(ROOT))
        if check:
            lines = (written.splitlines(keepends=True), wanted.splitlines(keepends=True))
            sys.stdout.writelines(difflib.unified_diff(*lines, f"{name}, as it is", f"{name}, as it should be"))
        else:
            path.write_text(wanted, encoding="utf-8")
            print(f"{name} written")
    if check and changed:
        print("these parts are not current; `.venv/bin/python scripts/docs.py` writes them", file=sys.stderr)
    return int(check and bool(changed))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="write nothing; fail with a diff if a part is old")
    sys.exit(main(arguments.parse_args().check))
