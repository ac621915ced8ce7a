"""Text from engines, models, files and people does nothing but be read, wherever a run is shown.

Every text field of a run is found by its type and planted with a hostile text, so that a new field is covered
by itself. What is drawn from it must have the same shape as what is drawn from a harmless text in its place.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
import unicodedata
from collections.abc import Mapping
from enum import Enum
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from played_run import ARMS, OTHER, REFERENCE, THIRD, a_header, contender, later, played

from harness import charts, facts, render, terminal, words
from harness.changes import compare_runs
from harness.compare import Comparison, compare
from harness.measure import Sample
from harness.page import page
from harness.plan import ArmStatus, Plan, Status
from harness.record import Header, LoadRecord, Run, Search, SearchLoad

HARMLESS = "word"
FOURTH, LAST, SAME = "llama-cpp@ngl=50", "llama-cpp@ngl=99", "llama-cpp@ncmoe=3"
NAMES = {*ARMS, FOURTH, LAST, SAME}
HOSTILE = {
    "pipe": "a|b|c",
    "emphasis": "*a* **b** _c_ __d__ ~~e~~",
    "backticks": "`a` ``b`` ```",
    "a fence": "```\n<b>x</b>\n~~~",
    "script link": "[x](javascript:alert(1))",
    "reference": "[x]: http://evil.example 'y'\n[x] [^1]",
    "remote picture": "![x](http://evil.example/x.png)",
    "autolinks": "<http://evil.example> http://evil.example www.evil.example me@evil.example",
    "upper-case autolinks": "HTTPS://EVIL.EXAMPLE (WWW.EVIL.EXAMPLE) _www.evil.example_",
    "a person and an issue": "@someone #123 GH-12 owner/name#7 (@someone) _@someone",
    "image that fails": "<img src=x onerror=alert(1)>",
    "end of a picture": '"></picture><script>alert(1)</script>',
    "a picture of ours": '<picture><source media="(prefers-color-scheme: dark)" srcset="charts/a-dark.svg">',
    "end of the page": "</code></pre></td></table></main></body></html><style>*{display:none}</style>",
    "end of an SVG": "</title></text></svg><svg onload=alert(1)>",
    "CDATA": "<![CDATA[ x ]]> ]]> <!DOCTYPE x [<!ENTITY e 'x'>]> &e;",
    "HTML comment": "<!-- x",
    "entities": "&lt;b&gt; &#60;b&#62; &amp;lt; &nbsp; &copy",
    "heading": "# heading\n## another",
    "underlined heading": "heading\n=======\nanother\n---",
    "rule": "---",
    "starred rule": "* * *",
    "list": "- a\n- b",
    "other list": "+ a",
    "starred list": "* a",
    "numbers": "1. a",
    "numbers in brackets": "12) a",
    "task": "- [ ] a",
    "quotation": "> a",
    "indented": "\t    code\n\n    code",
    "table": "a | b\n--- | ---\nc | d",
    "mathematics": "$x$ $$y$$ $`z`$",
    "backslashes": "\\ \\\\ \\| \\` ends in one \\",
    "colours": "\x1b[31mred\x1b[0m \x9b31m",
    "title and clipboard": "\x1b]8;;http://evil.example\x07x\x1b]8;;\x07 \x1b]52;c;ZXZpbA==\x07 \x1b]0;x\x1b\\",
    "screen": "\x1b[2J\x1b[H\x1b[?1049h\x1bc",
    "carriage return": "good\rbad\r\nx\x08\x08",
    "vertical": "a\x0bb\x0cc\x85d\u2028e\u2029f\x1cg",
    "right to left": "\u202eabc\u202c \u2067abc\u2069 \u200fx\u061c",
    "no width": "a\u200bb\u200cc\u200dd\u2060e\ufefff\u00adg",
    "tags": "a\U000e0041\U000e0042b",
    "NUL": "a\x00b",
    "half a character": "a\ud800b\udfffc\udc80",
    "no character": "a\uffffb\ufffec",
    "long word": "x" * 2000,
    "long line of signs": "`*_[<|" * 50,
    "emoji": "🦙🏽‍🚀 👨‍👩‍👧 é",
    "braces": "{x!r} %s %(x)d {{x}} ${x} $(x)",
    "rich": "[bold red]x[/] [link=http://evil.example]y[/link]",
}
TAGS = """html head meta title style body main h1 h2 h3 p a strong code pre span div table thead tbody tr th td ul li
figure img blockquote br"""
ATTRIBUTES = "lang charset http-equiv content name class id href src width alt"
# What holds a run together: its own words and labels, which no engine and no file gives.
KEPT = {
    ("LoadRecord", "id"),
    ("LoadRecord", "stage"),
    ("LoadRecord", "label"),
    ("PlannedArm", "label"),
    ("Plan", "reference"),
    ("Plan", "twin"),
    ("Plan", "contrasts"),
    ("Plan", "aliases"),
    ("Header", "started"),  # a time
}
NOT_MADE = {("LoadRecord", "failure"), ("Sample", "fault")}  # else nothing would be measured


# ── planting ────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass
class Planter:
    """Puts `text` into every text of a value; arms get it behind their name, the same everywhere.

    `fill`: texts that are not there are made too, with all that they stand in. Without `arms` those stay as they are.
    """

    text: str
    fill: bool
    arms: bool = True
    planted: int = 0

    def into(self, value: Any, hint: Any) -> Any:
        kinds = [each for each in _kinds(hint) if each is not type(None)]
        if value is None:
            return self._made(kinds[0]) if self.fill and kinds and _holds_text(kinds[0]) else None
        if isinstance(value, str) and not isinstance(value, Enum):
            return self._text(value)
        if isinstance(value, Path):
            return Path(self._text(str(value)))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._record(value)
        if isinstance(value, Mapping):
            inner = (typing.get_args(_with_arguments(kinds)) or (Any, Any))[1]
            return {key: self.into(each, inner) for key, each in value.items()} | {self.text: self._text("")}
        if isinstance(value, tuple):
            arguments = typing.get_args(_with_arguments(kinds)) or (Any,)
            inner = [arguments[0]] * len(value) if arguments[-1] in (..., arguments[0]) else list(arguments)
            return tuple(self.into(each, kind) for each, kind in zip(value, inner, strict=True))
        return value

    def arm(self, name: str) -> str:
        return name + re.sub(r"[/\\]", "", self.text) * self.arms  # a plan holds nothing that looks like a path

    def _text(self, value: str) -> str:
        self.planted += 1
        return self.arm(value) if value in NAMES else self.text

    def _record(self, value: Any) -> Any:
        planter = self
        if isinstance(value, Plan):
            planter = Planter(re.sub(r"[/\\]", "", self.text), fill=False, arms=self.arms)
        hints = hints_of(type(value))
        changed = {
            each.name: planter.into(getattr(value, each.name), hints[each.name])
            for each in dataclasses.fields(value)
            if (type(value).__name__, each.name) not in KEPT
            and not (getattr(value, each.name) is None and (type(value).__name__, each.name) in NOT_MADE)
        }
        return dataclasses.replace(value, **changed)

    def _made(self, kind: Any) -> Any:
        if kind is str:
            return self._text("")
        if kind is Path:
            return Path(self._text(""))
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            hints = hints_of(kind)
            return kind(**{each.name: self._made(_kinds(hints[each.name])[0]) for each in dataclasses.fields(kind)})
        origin = typing.get_origin(kind) or kind
        inner = typing.get_args(kind)
        if origin in (tuple, frozenset, list):
            return origin([self._made(_kinds(each)[0]) for each in inner if each is not ...])
        if origin is dict or origin is Mapping:
            return {self.text: self._made(_kinds(inner[1])[0])}
        if isinstance(kind, type) and issubclass(kind, Enum):
            return next(iter(kind))
        if typing.get_origin(kind) is typing.Literal:
            return inner[0]
        return {bool: True, int: 1, float: 1.0}.get(kind, self.text)


_HINTS: dict[str, dict[str, Any]] = {}


def hints_of(kind: type) -> dict[str, Any]:
    """Kept, for they take a while."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in _HINTS:
        _HINTS[name] = typing.get_type_hints(kind)
    return _HINTS[name]


def _kinds(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return list(typing.get_args(hint))
    return [hint]


def _with_arguments(kinds: list[Any]) -> Any:
    return next((kind for kind in kinds if typing.get_args(kind)), None)


def _holds_text(kind: Any) -> bool:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return any(_holds_text(part) for hint in hints_of(kind).values() for part in _kinds(hint))
    return kind in (str, Path, Any) or any(_holds_text(each) for each in typing.get_args(kind))


def a_run(text: str, *, fill: bool, arms: bool = True, is_later: bool = False) -> Run:
    """A run with a search, notes, failures and invalid samples, with `text` wherever it can be.

    Where the arms stay as they are, three of them are a sweep.
    """
    found = [contender(arm, command="a command") for arm in (*ARMS, FOURTH)]
    found.append(contender(LAST, status=ArmStatus(Status.CRASHED, "why") if arms else ArmStatus(Status.OK)))
    found.append(contender(SAME, status=ArmStatus(Status.ALIAS, "why", OTHER)))
    header = (later if is_later else a_header)(*found)
    search = Search(
        over="ngl", candidates=(REFERENCE, OTHER, THIRD), refused=("1",),
        tried=(SearchLoad(OTHER, ArmStatus(Status.DOES_NOT_FIT, "why"), "DOES_NOT_FIT"),),
        chosen=(REFERENCE,), elsewhere={REFERENCE: {"ollama": "a command"}}, command="a command", notes=("a note",),
    )  # fmt: skip
    header = dataclasses.replace(header, notes=("a note", "another"), search=search if fill else None)
    run = played(header, {FOURTH: 45.0}, dies=OTHER, since_block=5)
    planter = Planter(text, fill, arms)
    first, *rest = run.samples[run.loads[0].id]
    samples = run.samples | {run.loads[0].id: (dataclasses.replace(first, fault="a fault"), *rest)}
    changed = dataclasses.replace(
        run,
        header=planter.into(header, Header),
        loads=tuple(planter.into(load, LoadRecord) for load in run.loads),
        samples={load: tuple(planter.into(each, Sample) for each in told) for load, told in samples.items()},
    )
    assert planter.planted > 50
    return changed


@functools.cache
def judged(text: str, *, fill: bool) -> Comparison:
    return compare(a_run(text, fill=fill))


@functools.cache
def markdown(text: str, *, fill: bool) -> str:
    return render.report(judged(text, fill=fill))


@functools.cache
def drawn(text: str, *, fill: bool) -> dict[str, str]:
    return charts.draw(judged(text, fill=fill)) | charts.draw(compare(a_run(text, fill=fill, arms=False)))


# ── shapes ──────────────────────────────────────────────────────────────────────────────────


def shape(report: str) -> list[object]:
    """What Markdown makes of a report, without its words."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])

    def told(tokens: list[Token]) -> list[object]:
        return [
            (each.type, each.tag, sorted(each.attrs.items()), told(each.children or []))
            for each in tokens
            if each.type not in ("text", "text_special")
        ]

    return told(parser.parse(re.sub(r'alt="[^"]*"', "", report)))


def spoken(report: str) -> str:
    """The words of a report outside of code and of our own tags."""
    tokens = MarkdownIt("commonmark").enable("table").parse(report)
    return "\n".join(
        "".join(part.content if part.type in ("text", "text_special") else " " for part in each.children or ())
        for each in tokens
        if each.type == "inline"
    )


def uncoded(report: str) -> str:
    """The Markdown itself, outside of code and of our pictures."""
    report = re.sub(r"^<picture>.*</picture>$", "", report, flags=re.MULTILINE)
    outside = re.sub(r"^(`{3,})\w+\n.*?\n\1$", "", report, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<![\\`])(`+)(?!`).*?(?<!`)\1(?!`)", "", outside)


class Elements(HTMLParser):
    """Elements and attributes of a page, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "span":  # of words that are kept whole
            self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_comment(self, data: str) -> None:
        self.tags.append("a comment")


def obeyed(text: str) -> set[str]:
    """Characters that a terminal or an editor would obey instead of showing them."""
    return {
        f"U+{ord(sign):04X}"
        for sign in text
        if sign != "\n" and unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    }


hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
filled = pytest.mark.parametrize("fill", [False, True], ids=["as-measured", "every-field"])


@hostile
@filled
def test_a_report_has_the_shape_that_harmless_text_gives(text: str, fill: bool) -> None:
    assert shape(markdown(text, fill=fill)) == shape(markdown(HARMLESS, fill=fill))


@hostile
def test_a_report_holds_nothing_that_an_editor_obeys(text: str) -> None:
    report = markdown(text, fill=True)

    assert obeyed(report) == set()
    assert report.encode()


@hostile
def test_github_makes_no_link_and_calls_nobody(text: str) -> None:
    report = markdown(text, fill=True)

    assert re.findall(r"(?i)(?:https?|ftp)://|(?<![a-z0-9])www\.", uncoded(report)) == []
    assert re.findall(r"(?i)(?<![a-z0-9])@\w|@[\w-]+\.\w|#\d|(?<![a-z0-9])gh-\d", spoken(report)) == []
    assert re.findall(r"(?<!\\)\$", uncoded(report)) == []


@hostile
@filled
def test_a_page_has_the_elements_that_harmless_text_gives(text: str, fill: bool) -> None:
    made = Elements(page(markdown(text, fill=fill), drawn(HARMLESS, fill=fill)))
    harmless = Elements(page(markdown(HARMLESS, fill=fill), drawn(HARMLESS, fill=fill)))

    assert made.tags == harmless.tags
    assert set(made.tags) <= set(TAGS.split())
    assert {name for name, _ in made.attributes} <= set(ATTRIBUTES.split())
    assert all(value.startswith("#") for name, value in made.attributes if name == "href")
    assert all(value.startswith("data:image/svg+xml;base64,") for name, value in made.attributes if name == "src")


@hostile
@filled
def test_a_terminal_only_shows_what_a_table_says(text: str, fill: bool) -> None:
    assert obeyed(terminal.table(judged(text, fill=fill), 100)) == set()


@hostile
def test_a_terminal_only_shows_what_two_runs_say(text: str) -> None:
    before, after = judged(text, fill=False), compare(a_run(text, fill=False, is_later=True))

    assert obeyed(terminal.changes_table(compare_runs(before, after))) == set()


@hostile
def test_json_can_be_read_and_says_the_text_as_it_was(text: str) -> None:
    comparison = judged(text, fill=True)
    told = json.dumps(facts.as_json(comparison), allow_nan=False)

    assert told.isascii()
    assert json.loads(told)["arms"][0]["placement"] == text


@pytest.mark.parametrize(
    "name",
    ["end of an SVG", "CDATA", "mathematics", "half a character", "no character", "colours", "pipe", "right to left"],
)
def test_a_chart_shows_text_as_text(name: str) -> None:
    made, harmless = drawn(HOSTILE[name], fill=False), drawn(HARMLESS, fill=False)

    assert len(made) == len(harmless) == 8
    for svg in made.values():
        tags = {each.tag.rpartition("}")[2] for each in ElementTree.fromstring(svg).iter()}
        assert obeyed(svg) == set()
        assert tags <= {
            "svg",
            "title",
            "desc",
            "defs",
            "style",
            "g",
            "path",
            "use",
            "text",
            "tspan",
            "clipPath",
            "rect",
            "metadata",
        }
        assert "onload" not in re.sub(r">[^<]*<", "><", svg)


def test_the_texts_are_there_to_be_seen() -> None:
    """Else the tests above would hold for a report that says nothing."""
    for fill, least in ((False, 20), (True, 40)):
        assert markdown("seen", fill=fill).count("seen") > least


def test_every_text_field_of_a_run_is_planted() -> None:
    text = "planted"
    run = a_run(text, fill=True)

    def bare(value: Any, where: str) -> list[str]:
        if isinstance(value, str) and not isinstance(value, Enum):
            return [] if text in value else [where]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            name = type(value).__name__
            fields = [each.name for each in dataclasses.fields(value) if (name, each.name) not in KEPT]
            return [each for field in fields for each in bare(getattr(value, field), f"{name}.{field}")]
        if isinstance(value, Mapping):
            return [each for inner in value.values() for each in bare(inner, where)]
        if isinstance(value, (tuple, list, frozenset)):
            return [each for inner in value for each in bare(inner, where)]
        return []

    assert bare((run.header, run.loads, list(run.samples.values())), "") == []


@pytest.mark.parametrize("text", ["", " ", "\u200b"], ids=["nothing", "a space", "no width"])
@filled
def test_empty_texts_leave_a_report(text: str, fill: bool) -> None:
    report = markdown(text, fill=fill)

    assert obeyed(report) == set()
    assert "``" not in uncoded(report)
    assert terminal.table(judged(text, fill=fill), 100)


@pytest.mark.parametrize("text", ["\N{NO-BREAK SPACE}", *HOSTILE.values()], ids=["no-break space", *HOSTILE])
def test_escaped_text_reads_as_it_was(text: str) -> None:
    """Inert is not enough: a reader sees the same words."""
    tokens = MarkdownIt("commonmark").parse(f"x {words.markdown(text)}")
    shown = "".join(each.content for each in tokens[1].children or ()).replace("\u200b", "")

    assert len(tokens) == 3
    assert shown == f"x {words.plain(text)}".rstrip()
