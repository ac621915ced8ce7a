"""The documents hold: the adapter in CONTRIBUTING.md works as it stands, and nothing named is missing."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from backends.llama_cpp import LlamaCpp
from harness import arms, changes, cli, options, physics, placement, plan, terminal, verdict
from harness.errors import Unavailable
from harness.testing.conformance import Conformance
from harness.testing.llama_server import FLAGS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "reports/README.md", "reports/LOG.md"]
DOCUMENTS += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
ADAPTER, PACKAGE, SUITE = "llamaduel_mine.py", "pyproject.toml", "test_mine.py"
MOST_LINES = 60
SUITE_TESTS = sum(name.startswith("test_") for name in vars(Conformance))
OF_LLAMA_CPP = {name for names, _, _ in FLAGS for name in names.split()}


def read(document: str) -> str:
    return (ROOT / document).read_text("utf-8")


def blocks(document: str, *languages: str) -> list[str]:
    """The fenced blocks of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", read(document), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def prose(document: str) -> str:
    """All but the fenced blocks."""
    return re.sub(r"^```.*?^```$", "", read(document), flags=re.DOTALL | re.MULTILINE)


def spans(document: str) -> list[str]:
    """What stands in `code spans`."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(document))]


def shown(name: str) -> str:
    """The block that CONTRIBUTING.md shows as this file: the paragraph before it names the file."""
    guide = read("CONTRIBUTING.md").partition("\n## Add an engine\n")[2]
    parts = re.split(r"^```\w*\n", guide, flags=re.MULTILINE)  # prose and code in turn
    paragraphs = [text.strip().rpartition("\n\n")[2] for text in parts[0:-1:2]]
    return next(code for paragraph, code in zip(paragraphs, parts[1::2], strict=True) if f"`{name}`" in paragraph)


# ── the adapter ─────────────────────────────────────────────────────────────────────────────


def test_the_adapter_shown_is_complete_in_sixty_lines() -> None:
    code = shown(ADAPTER)
    assert "class " in code
    assert "import " in code
    assert len(code.splitlines()) <= MOST_LINES
    assert max(map(len, code.splitlines())) <= 120


def test_the_adapter_shown_keeps_the_contract_for_the_type_checker(tmp_path: Path) -> None:
    """Beside it a mutant without one of the methods: a check that passes both would check nothing."""
    assigned = "from harness.contract import Backend\nfrom {} import Mine\n\nbackend: Backend = Mine()\n"
    mutant = shown(ADAPTER).replace("def resolve(", "def dissolve(")
    for name, code in (("llamaduel_mine", shown(ADAPTER)), ("mutant", mutant)):
        (tmp_path / f"{name}.py").write_text(code, "utf-8")
        (tmp_path / f"check_{name}.py").write_text(assigned.format(name), "utf-8")

    config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *config, *map(str, sorted(tmp_path.glob("*.py")))],
        env=os.environ | {"MYPYPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    errors = [line for line in checked.stdout.splitlines() if ": error: " in line]
    assert [line.partition(":")[0] for line in errors] == ["check_mutant.py"], checked.stdout + checked.stderr
    assert "resolve" in checked.stdout


@dataclass(frozen=True, slots=True)
class Installed:
    """The package of CONTRIBUTING.md, installed by pip into a folder of its own."""

    site: Path
    suite: Path

    def tried_on(self, argv: list[str], folder: Path) -> str:
        """What pytest says of the suite shown, with `argv` as my-server."""
        server = folder / "bin" / "my-server"
        server.parent.mkdir()
        server.write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n', "utf-8")
        server.chmod(0o755)
        changed = {
            "PATH": f"{server.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": str(self.site),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        tests = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", str(self.suite)]
        done = subprocess.run(
            tests, env=os.environ | changed, cwd=folder, capture_output=True, text=True, timeout=600, check=False
        )
        return done.stdout[-8000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in (ADAPTER, PACKAGE):
        (source / name).write_text(shown(name), "utf-8")
    suite = tmp_path_factory.mktemp("suite") / SUITE
    suite.write_text(shown(SUITE), "utf-8")
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *offline, str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Installed(site, suite)


def test_the_adapter_shown_passes_the_conformance_suite(installed: Installed, tmp_path: Path) -> None:
    said = installed.tried_on([sys.executable, "-m", "harness.testing.llama_server"], tmp_path)
    assert f"{SUITE_TESTS} passed" in said, said


@pytest.mark.engine
def test_the_adapter_shown_passes_the_conformance_suite_on_a_real_server(installed: Installed, tmp_path: Path) -> None:
    try:
        engine = LlamaCpp().find({})
    except Unavailable as error:
        pytest.skip(f"this machine has no such engine: {error}")
    embedded = [sys.executable, "-P", str(engine.path)]
    said = installed.tried_on(embedded if engine.origin == "embedded" else [str(engine.path)], tmp_path)
    assert f"{SUITE_TESTS} passed" in said, said


# ── links, files, names ─────────────────────────────────────────────────────────────────────


def anchors(document: Path) -> set[str]:
    """The headings as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", prose(str(document.relative_to(ROOT))), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_reference_is_defined_and_every_definition_is_used(document: str) -> None:
    """`[ollama#2068]` in the text, and its address at the end."""
    text = prose(document)
    defined = re.findall(r"^\[([^\]]+)\]: https?://\S+$", text, re.MULTILINE)
    used = set(re.findall(r"\[([\w.-]+#\d+)\](?![(:])", text))
    assert len(defined) == len(set(defined))
    assert used == set(defined)
    for name, number in re.findall(r"^\[[^\]]*#(\d+)\]: \S+/(\d+)$", text, re.MULTILINE):
        assert name == number


def test_every_document_is_in_the_index() -> None:
    linked = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", read("docs/README.md"))}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= linked


def test_every_picture_is_shown() -> None:
    shown = {target for name in DOCUMENTS for target in re.findall(r"pictures/([\w.-]+)", read(name))}
    assert {path.name for path in (ROOT / "docs/pictures").glob("*")} <= shown


def test_the_first_document_stays_short() -> None:
    assert len(read("README.md").splitlines()) <= 220


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name.startswith(("docs/", "README"))])
def test_no_line_that_a_person_writes_is_longer_than_120(document: str) -> None:
    """Tables and definitions of links cannot be broken, and what is generated is as wide as it is."""
    text = re.sub(r"^<!-- (help|run).*?^<!-- end -->$", "", read(document), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not re.match(r"\||\[[^\]]+\]: ", line)]
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_relative_link_leads_somewhere(document: str) -> None:
    for target in re.findall(r"(?:\]\(|\bsrc(?:set)?=\")([^)\s\"]+)[)\"]", prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), f"{document} links to {target}"
        assert not anchor or anchor in anchors(file.resolve()), f"{document} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_named_is_there(document: str) -> None:
    folders = "harness|backends|tests|scripts|benchmarks|docs|reports"
    for span in spans(document):
        if re.fullmatch(rf"({folders})/[\w./-]*", span):
            assert (ROOT / span).exists(), f"{document} names {span}"


def test_the_tree_in_the_readme_is_there() -> None:
    (tree,) = (block for block in blocks("README.md", "text") if block.startswith("harness/"))
    folder = ROOT
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
        assert (folder if folder == ROOT / name else folder / name).exists(), f"the tree in README.md names {name}"


def test_what_the_log_points_at_is_there() -> None:
    """`name` in `file`: each entry ends with the place where it can be seen."""
    entries = re.split(r"^## ", read("reports/LOG.md"), flags=re.MULTILINE)[1:]
    dates = [entry.partition(" · ")[0] for entry in entries]
    assert dates
    assert dates == sorted(dates, reverse=True)
    for date, entry in zip(dates, entries, strict=True):
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", date), entry
        where = " ".join(entry.rpartition("→")[2].split())
        assert "`" in where, f"no place: {entry}"
        for names, file in re.findall(r"((?:`\w+`(?:, | and )?)+) in `([\w/.]+)`", where):
            text = (ROOT / file).read_text("utf-8") if (ROOT / file).is_file() else ""
            for name in re.findall(r"`(\w+)`", names):
                assert not text or re.search(rf"\b{name}\b", text), f"{file} has no {name}"


# ── commands and options ────────────────────────────────────────────────────────────────────


def commands(document: str) -> Iterator[str]:
    """Command lines of llamaduel: whole lines of shell blocks, continued ones joined, and code spans."""
    joined = [re.sub(r"\\\n\s*", "", block) for block in blocks(document, "sh")]
    lines = [line for block in joined for line in block.splitlines()] + spans(document)
    for line in lines:
        if found := re.match(r"(?:\.venv/bin/)?llamaduel (\w.*)", line):
            yield found[1]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_shown_is_taken_by_the_parser(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that is only named, `llamaduel verify`, is looked up by its help, and COMMAND stands for any."""
    refused = []
    for command in commands(document):
        words = ["run" if word == "COMMAND" else word for word in shlex.split(command, comments=True)]
        try:
            cli._parser().parse_args([*words, "--help"] if len(words) == 1 else words)
        except SystemExit as stop:
            refused += [(command, capsys.readouterr().err)] if stop.code else []
    assert refused == []


def test_the_readme_shows_commands_at_all() -> None:
    assert len(list(commands("README.md"))) >= 8


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of commands that do something."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for each in {id(sub): sub for action in below for sub in action.choices.values()}.values():
        yield from leaves(each)


def test_every_command_is_in_the_readme_and_every_option_in_the_list_of_commands() -> None:
    readme, listed = read("README.md"), read("docs/commands.md")
    for parser in leaves(cli._parser()):
        assert re.search(rf"\b{parser.prog}\b", readme), f"README.md does not name `{parser.prog}`"
        assert f"\n## {parser.prog}\n" in listed
        for flag in (flag for action in parser._actions for flag in action.option_strings):
            assert re.search(rf"(?<![\w-]){flag}(?![\w-])", listed), f"docs/commands.md does not name {flag}"


def test_every_knob_is_in_the_readme() -> None:
    knobs = read("README.md").partition("\nKnobs: ")[2].partition("\n\n")[0]
    assert {*arms.KNOBS} <= {re.split(r"\W", span)[0] for span in re.findall(r"`([^`]+)`", knobs)}


# ── what is generated, and what was copied from a terminal ──────────────────────────────────


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that writes the generated parts."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("docs")


def test_the_generated_parts_are_current(docs: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(check=True) == 0, capsys.readouterr().out


def test_a_part_that_is_not_current_is_found_and_written(
    docs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside it stands what no part is, and stays."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# A title\n\n<!-- help -->\nold\n<!-- end -->\n\nwords\n", "utf-8")
    monkeypatch.setattr(docs, "ROOT", tmp_path)

    assert docs.main(check=True) == 1
    assert "-old" in capsys.readouterr().out
    assert docs.main(check=False) == 0
    assert docs.main(check=True) == 0
    written = (tmp_path / "README.md").read_text("utf-8")
    assert written.startswith("# A title\n\n<!-- help -->\n")
    assert written.endswith("\n<!-- end -->\n\nwords\n")
    assert "## llamaduel run" in written


def test_the_commands_are_drawn_alike_in_any_terminal(docs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = docs.commands()
    for name, value in (("COLUMNS", "40"), ("FORCE_COLOR", "1"), ("LANG", "de_DE.UTF-8")):
        monkeypatch.setenv(name, value)
    assert docs.commands() == drawn
    assert max(len(line) for line in re.findall(r"^ .*$", drawn, re.MULTILINE)) <= docs.WIDTH


def shown_outputs(document: str, command: str) -> list[tuple[list[str], str]]:
    """The last line of each shell block that is this command of llamaduel, and the text block after it."""
    pairs = re.findall(r"^```sh\n((?:(?!^```).)*)^```\n+```text\n(.*?)^```$", read(document), re.DOTALL | re.MULTILINE)
    lines = [(block.strip().splitlines()[-1], text) for block, text in pairs]
    return [(shlex.split(line)[1:], text) for line, text in lines if line.startswith(f"llamaduel {command} ")]


def lines_in_order(shown: str, said: str) -> list[str]:
    """The first line of `shown` that `said` lacks behind the one before; "…" stands for any number of lines."""
    rest = iter(said.splitlines())
    return next(([line] for line in shown.splitlines() if line not in ("…", "") and line not in rest), [])


@pytest.fixture(scope="module")
def article_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tutorial begins with."""
    folder = tmp_path_factory.mktemp("tutorial")
    assert cli.main(["synth", str(folder / "qwen.gguf"), "--like", "qwen3.5-35b-a3b", "--header-only"]) == 0
    return folder


def test_the_tutorial_shows_what_inspect_says(
    article_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(article_model)
    shown = shown_outputs("docs/tutorial.md", "inspect")
    assert shown
    for words, text in shown:
        assert cli.main(words) == 0
        assert lines_in_order(text, capsys.readouterr().out) == []


@pytest.mark.engine
def test_the_tutorial_shows_what_plan_says(
    article_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = LlamaCpp().find({})
    if not engine.rpc:
        pytest.skip("the llama.cpp of this machine has no RPC, so it takes no stand-in device")
    monkeypatch.chdir(article_model)
    shown = shown_outputs("docs/tutorial.md", "plan")
    assert len(shown) >= 2
    for words, text in shown:
        assert cli.main(words) == 0
        assert lines_in_order(text, capsys.readouterr().out) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_option_named_exists(document: str, pytestconfig: pytest.Config) -> None:
    """In prose, and in commands of our scripts: ours, a subcommand's, pytest-benchmark's, or llama.cpp's."""
    ours = {f"--{name}" for name in options.names()} | {f"--duel-{name}" for name in options.names()}
    ours |= set(re.findall(r"--[a-z][\w-]+", read("harness/cli.py")))
    scripts = {name: set(re.findall(r"--[a-z][\w-]*", read(name))) for name in ("scripts/bench.py", "scripts/test.py")}
    lines = [line for block in blocks(document, "sh") for line in block.splitlines() if "scripts/" in line]
    for text in [*spans(document), *lines]:
        known = ours.union(OF_LLAMA_CPP, *(flags for name, flags in scripts.items() if name in text))
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", text):
            in_pytest = re.match(r"--benchmark-", option) and pytestconfig.getoption(option, None) is not None
            in_pytest = in_pytest or option[2:].replace("-", "_") in vars(pytestconfig.option)
            assert option in known or in_pytest, f"{document} names {option}"


def test_every_option_of_a_run_is_one_of_pytest(
    pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli._parser().parse_args(["run", "--help"])
    listed = set(re.findall(r"^ +(?:-h, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help", "--json"}

    assert listed == {f"--{name}" for name in options.names()}
    for option in listed:
        pytestconfig.getoption(option.replace("--", "--duel-", 1))  # ValueError, if there is none


# ── tables ──────────────────────────────────────────────────────────────────────────────────


def first_column(document: str, heading: str) -> list[str]:
    """Words of the first column of the table below a heading, several in a cell one by one."""
    section = re.split(r"^#+ ", read(document).partition(f"\n## {heading}\n")[2], flags=re.MULTILINE)[0]
    rows = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)[2:]
    assert rows, f"{document} has no table below {heading!r}"
    return [word.strip("` ") for row in rows for word in row.split(", ")]


def test_the_guide_explains_exactly_what_a_report_can_say() -> None:
    guide = "docs/how-to-read-a-report.md"
    assert sorted(first_column(guide, "Statuses")) == sorted(plan.Status)
    assert sorted(first_column(guide, "Where the weights were")) == sorted(placement.Cell)
    assert sorted(first_column(guide, "The state of the run")) == sorted(get_args(verdict.StateWord))
    assert sorted(first_column(guide, "The verdicts")) == sorted(get_args(verdict.Word))
    assert sorted(first_column(guide, "Two runs")) == sorted(get_args(changes.Word))
    assert sorted(first_column(guide, "The columns")) == sorted(name for name, _ in terminal.CELLS)


def defined_words() -> list[str]:
    """What the glossary explains, in its order."""
    entries = re.findall(r"^- ((?:\*\*[^*]+\*\*(?:, )?)+):", read("docs/glossary.md"), re.MULTILINE)
    return [word for entry in entries for word in re.findall(r"\*\*([^*]+)\*\*", entry)]


def test_the_glossary_has_every_word_that_a_report_can_say() -> None:
    words = defined_words()
    assert len(words) == len(set(words))
    said = {*plan.Status, *placement.Cell, *physics.Flag, "INVALID", "CLOCK_MISMATCH"}
    said |= {*get_args(verdict.Word), *get_args(verdict.StateWord), *get_args(changes.Word)}
    said |= {name for name, _ in terminal.CELLS} - {"verdict", "status", "memory", "of ceiling"}
    said |= {"matched", "stock", "short"}
    assert said - {*words} == set()


def declared() -> set[str]:
    """All requirements of the project by name."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    return {re.split(r"[^\w-]", each)[0] for each in wanted}


def test_every_dependency_is_explained() -> None:
    explained = {re.sub("…$", "", name) for name in first_column("CONTRIBUTING.md", "Dependencies")}
    explained = {word.strip("`") for word in explained}
    assert {name for name in declared() if not name.startswith("types-")} == explained - {"types-"}


def test_every_module_that_is_imported_comes_from_a_declared_dependency() -> None:
    modules = {name.replace("-", "_") for name in declared()} - {"nvidia_ml_py", "markdown_it_py"}
    modules |= {"pynvml", "markdown_it"}
    for file in sorted([*(ROOT / "harness").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in {name.partition(".")[0] for name in names}:
                ours = name in ("harness", "backends") or name in sys.stdlib_module_names
                assert ours or name in modules, f"{file.name} imports {name}"


def test_the_package_of_the_deprecated_name_is_not_asked_for() -> None:
    assert "pynvml" not in declared()
    assert importlib.util.find_spec("pynvml")


# ── what must stand nowhere ─────────────────────────────────────────────────────────────────


def tracked() -> list[Path]:
    """Files of the repository; outside git, all that is not made by running it."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if not listing.returncode:
        return [ROOT / os.fsdecode(name) for name in listing.stdout.split(b"\0") if name]
    made = {".venv", "__pycache__", "build", "dist", "runs"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not made & set(path.relative_to(ROOT).parts)]


def indexes() -> set[str]:
    """Hosts of package indexes: the public ones, and what this machine is set up with."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    set_up = told.stdout + " ".join(value for name, value in os.environ.items() if re.search("INDEX|GOPROXY", name))
    public = {"py" + "pi.org", "files.python" + "hosted.org", "proxy." + "golang.org"}
    return public.union(re.findall(r"https?://(?:[^/@\s']+@)?([\w.-]+\.[a-z]{2,})", set_up))


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    """Absolute paths of a workplace, a home, a scratch folder; hosts of package indexes."""
    paths = ("/wo" + "rk/", "/ro" + "ot/", "/tmp/d" + "ev")
    hosts = "|".join(map(re.escape, sorted(indexes())))
    forbidden = re.compile(rf"(?<![\w.}}-])({'|'.join(paths)})|{hosts}")
    files = tracked()
    assert ROOT / "README.md" in files
    for file in files:
        if file.is_file() and not file.is_symlink():
            found = forbidden.search(file.read_bytes().decode("utf-8", errors="replace"))
            assert not found, f"{file.relative_to(ROOT)} holds {found[0]}"
