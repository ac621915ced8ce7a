"""The page says what the report says, stands alone, and makes nothing of what it is told but text."""

from __future__ import annotations

import base64
import html
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from played_run import ARMS, a_header, contender, played

from harness import charts, render
from harness.compare import Comparison, compare
from harness.page import page
from harness.plan import ArmStatus, Status

NAME = "charts/ngl"
ALT = "50 is best &amp; &quot;fits&quot;"
PICTURE = (
    f'<picture><source media="(prefers-color-scheme: dark)" srcset="{NAME}-dark.svg">'
    f'<img src="{NAME}-light.svg" width="600" alt="{ALT}"></picture>'
)
SVGS = {f"{NAME}-light.svg": "<svg>light</svg>", f"{NAME}-dark.svg": "<svg>dark</svg>"}
BLOCKS = frozenset({"h1", "h2", "h3", "p", "li", "td", "th", "pre", "div"})
VOID = frozenset({"meta", "img", "br", "hr"})


class Page(HTMLParser):
    """A page as a browser would see it, which fails where a tag is not closed by its own."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self._text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag in BLOCKS:
            self._text += "\n"

    def handle_data(self, data: str) -> None:
        if "main" in self._open:
            self._text += data

    @property
    def words(self) -> list[str]:
        return self._text.split()

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def words_of(report: str) -> list[str]:
    """What a reader of the Markdown reads."""
    parts: list[str] = []
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(report):
        if token.type == "inline":
            shown = [each for each in token.children or () if each.type != "html_inline"]
            parts.append("".join(" " if "break" in each.type else each.content for each in shown))
        elif token.type == "fence":
            parts.append(token.content)
    return " ".join(parts).split()


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    found = [contender(arm, command="llama-server -m m.gguf") for arm in ARMS]
    found += [contender("llama-cpp@ngl=50"), contender("llama-cpp@ngl=99", status=ArmStatus(Status.CRASHED, "a|b <i>"))]
    return compare(played(a_header(*found), {"llama-cpp@ngl=50": 45.0}))


@pytest.fixture(scope="module")
def report(comparison: Comparison) -> str:
    return render.report(comparison)


@pytest.fixture(scope="module")
def drawn(comparison: Comparison) -> dict[str, str]:
    return charts.draw(comparison)


def test_a_page_says_what_the_report_says(report: str, drawn: dict[str, str], comparison: Comparison) -> None:
    found, told = Page(page(report, drawn)).words, words_of(report)

    assert len(told) > 300
    found.remove(comparison.state.word)  # once more, above the answer
    assert " ".join(found) == " ".join(told)


def test_a_page_stands_alone(report: str, drawn: dict[str, str]) -> None:
    made = page(report, drawn)
    found = Page(made)

    for tag, attributes in found.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base", "form")
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("src", "data:").startswith("data:")
    assert "url(" not in made
    assert "@import" not in made
    policy = next(each["content"] for each in found.all("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'")


def test_a_page_tells_language_width_colours_and_title(report: str) -> None:
    made = page(report, {})
    found = Page(made)

    assert found.all("html") == [{"lang": "en"}]
    named = {each.get("name"): each["content"] for each in found.all("meta") if "content" in each}
    assert named["viewport"] == "width=device-width, initial-scale=1"
    assert named["color-scheme"] == "light dark"
    assert "<title>llama-cpp, llama-cpp@cpu-moe" in made
    assert "<title>a &lt;b&gt;</title>" in page(report, {}, title="a <b>")


def test_every_picture_of_the_report_is_inside(report: str, drawn: dict[str, str]) -> None:
    assert len(Page(page(report, drawn)).all("img")) == 2 * report.count("<picture>") == len(drawn) > 2


def test_the_same_report_gives_the_same_page(report: str, drawn: dict[str, str]) -> None:
    assert page(report, drawn) == page(report, dict(reversed(drawn.items())))


def test_a_chart_is_inside_for_light_and_for_dark() -> None:
    light, dark = Page(page(f"# a\n\nb\n\n{PICTURE}\n", SVGS)).all("img")

    assert (light["class"], dark["class"]) == ("light", "dark")
    for image, shade in ((light, "light"), (dark, "dark")):
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert base64.b64decode(data).decode() == f"<svg>{shade}</svg>"
        assert image["alt"] == '50 is best & "fits"'
        assert image["width"] == "600"


@pytest.mark.parametrize(
    "block",
    [
        PICTURE.replace(NAME, "charts/other"),
        PICTURE.replace("-dark.svg", ".svg"),
        PICTURE.replace('width="600"', 'width="600" onload="x()"'),
        PICTURE.replace('srcset="', 'srcset="http://evil.example/'),
        PICTURE.replace(f'src="{NAME}', f'src="../{NAME}'),
        PICTURE.replace("</picture>", "<b>x</b></picture>"),
        PICTURE.replace(ALT, 'a" onerror="x()'),
        f"{PICTURE} and more",
        f"before\n{PICTURE}",
        f"- {PICTURE}",
        f"> {PICTURE}",
        f"```\n{PICTURE}\n```",
        f"    {PICTURE}",
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "<!-- a comment -->",
        "<div>\n\n**bold**\n\n</div>",
        "a <b onclick=x()>word</b>",
        "![a](http://evil.example/a.png)",
    ],
)
def test_all_other_html_is_shown_as_text(block: str) -> None:
    made = page(f"# a\n\nanswer\n\n{block}\n", SVGS)
    found = Page(made)

    assert not {tag for tag, _ in found.tags} & {"img", "picture", "script", "b", "source"}
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    if "<" in block:
        assert html.escape(block.split("<")[1].split("\n")[0]).split("&")[0] in made


@pytest.mark.parametrize(
    ("address", "is_link"),
    [
        ("http://a.example/b", True),
        ("HTTPS://a.example", True),
        ("#the-curve", True),
        ("../other/report.html", True),
        ("samples.jsonl", True),
        ("charts/a:b.svg", True),
        ("javascript:alert(1)", False),
        ("JaVaScRiPt:alert(1)", False),
        ("&#106;avascript:alert(1)", False),
        ("java%0Ascript:alert(1)", False),
        ("data:text/html,x", False),
        ("vbscript:x", False),
        ("file:///etc/passwd", False),
        ("//evil.example", False),
        ("mailto:a@b.example", False),
    ],
)
def test_only_harmless_addresses_are_links(address: str, is_link: bool) -> None:
    found = Page(page(f"[text]({address})\n\n<{address}>\n", {})).all("a")

    assert bool(found) == is_link
    assert all(":" not in each["href"].split("/")[0] or each["href"].lower().startswith("http") for each in found)


def test_headings_are_named_as_on_github() -> None:
    found = Page(page("# A `b-c`: d, e\n\n## Again\n\n### Again\n\n## Settings, asked for and read back\n", {}))

    ids = [attributes["id"] for tag, attributes in found.tags if re.fullmatch(r"h\d", tag)]
    assert ids == ["a-b-c-d-e", "again", "again-1", "settings-asked-for-and-read-back"]


@pytest.mark.parametrize("state", ["GREEN", "AMBER", "RED", "SCREENING"])
def test_the_state_is_a_word_and_a_colour_and_leads_to_its_reasons(state: str) -> None:
    made = Page(page(f"# a\n\nThe answer.\n\n## Can it be trusted\n\n**{state}**:\n\n- a reason\n", {}))

    assert {"class": f"state {state}", "href": "#can-it-be-trusted"} in made.all("a")
    assert {"class": f"answer {state}"} in made.all("p")
    assert made.all("strong") == [{"class": f"state {state}"}]


def test_a_watermark_stands_above_the_answer_and_is_not_said_again() -> None:
    made = Page(page("# a\n\n> **RED: do not quote.**\n\nThe answer.\n\n## Why\n\n**RED**:\n\n- a reason\n", {}))

    assert made.all("a") == []
    assert made.all("p")[1] == {"class": "answer RED"}
    assert {"class": "state RED"} in made.all("strong")


def test_a_report_tells_its_state_so_that_the_page_finds_it(report: str, comparison: Comparison) -> None:
    assert {"class": f"state {comparison.state.word}"} in Page(page(report, {})).all("strong")


@pytest.mark.parametrize("text", ["GREENER", "not GREEN", "GREEN day"])
def test_other_bold_words_are_no_state(text: str) -> None:
    assert "state" not in str(Page(page(f"# a\n\nThe answer.\n\n**{text}** x\n", {})).tags)


def test_a_page_of_anything_is_whole() -> None:
    for text in (
        "",
        "\n",
        "no heading",
        "# only",
        "> quoted",
        "| a |\n|---|\n| b |",
        "- x",
        "```\nopen",
        "\x00",
        "a\n\n# b",
    ):
        Page(page(text, {}))


def test_a_long_word_takes_no_longer_than_short_ones() -> None:
    def seconds(text: str) -> float:
        began = time.process_time()
        page(text, {})
        return time.process_time() - began

    seconds("warm")
    assert seconds("a-b" * 100_000) < 20 * seconds("a-b " * 75_000) + 1


def test_the_published_pages_are_the_ones_that_their_reports_give() -> None:
    """Where a folder has one."""
    for path in Path(__file__).parents[1].glob("reports/**/report.html"):
        svgs = {f"charts/{each.name}": each.read_text() for each in path.parent.glob("charts/*.svg")}
        assert Page(page((path.parent / "report.md").read_text(), svgs)).words == Page(path.read_text()).words
