"""`report.html`: the report as one file that needs no network and no script.

It is made from the Markdown and the charts alone, and says what they say: whatever stands there, nothing but
our own tags, links and pictures becomes one. What looks like HTML is shown as the text that it is.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from harness.words import plain

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

SHORT = {"th_open": 12, "td_open": 28}  # characters of a cell that stay in one line
TEXT_WORD, COMMAND_WORD = 22, 38  # characters of a word that fits beside nothing else on a phone
UNBROKEN = 40  # characters without a space that may be broken anywhere

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
PICTURE = re.compile(
    r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[\w./=-]+-dark\.svg)">'
    r'<img src="(?P<light>[\w./=-]+-light\.svg)" width="(?P<width>\d{1,4})" alt="(?P<alt>[^"<>\n]*)"></picture>'
)
WORD = re.compile(r"(\S+(?: (?:%|[KMGT]i?B|m?s)(?!\w))?)")  # with its unit
BREAKABLE = re.compile(r"\w[-–]\w|^-+\w| ")  # a browser would do so inside the word
STATE = re.compile(r"(GREEN|AMBER|RED|SCREENING)(?![^:.])")
LINK = re.compile(r"https?://|#|(?!//)[^:]*(?:[/?#]|$)", re.IGNORECASE)  # a colon before the first slash is a scheme

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1f2328; --faint: #59636e; --line: #d8dee4; --box: #f6f8fa;
  --link: #0969da; --green: #1a7f37; --amber: #8a5a00; --red: #b3261e; --screening: #59636e; }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --text: #e6edf3; --faint: #9198a1; --line: #30363d;
  --box: #161b22; --link: #6cb6ff; --green: #4ac26b; --amber: #e3b341; --red: #ff8a80; --screening: #9198a1; } }
@media print { :root { color-scheme: light; --ground: #fff; --text: #000; --faint: #444; --line: #bbb; --box: #f4f4f4;
  --link: #000; --green: #1a7f37; --amber: #8a5a00; --red: #b3261e; --screening: #444; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif; }
main { max-width: 78rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; overflow-wrap: anywhere; }
main > * { max-width: 46rem; }
main > h2 { max-width: none; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 2.75rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
h1, h2, h3 { text-wrap: balance; break-after: avoid; }
p, ul, ol { margin: .75rem 0; }
ul, ol { padding-left: 1.4rem; }
li { margin: .2rem 0; }
a { color: var(--link); }
.answer { font-size: 1.2rem; line-height: 1.5; margin: 1rem 0 1.5rem; padding-left: 1rem;
  border-left: .3rem solid var(--faint); }
.state { font-weight: 700; }
blockquote { margin: 1rem 0; padding: .5rem 1rem; background: var(--box); border-radius: .4rem; }
blockquote p { margin: 0; }
a.state { display: inline-block; padding: .1rem .7rem; border: 2px solid; border-radius: 1rem; font-size: .85rem;
  letter-spacing: .06em; text-decoration: none; }
.GREEN { color: var(--green); border-color: var(--green); }
.AMBER { color: var(--amber); border-color: var(--amber); }
.RED { color: var(--red); border-color: var(--red); }
.SCREENING { color: var(--screening); border-color: var(--screening); }
.answer.GREEN, .answer.AMBER, .answer.RED, .answer.SCREENING { color: inherit; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", "DejaVu Sans Mono",
  monospace; }
code { font-size: .875em; background: var(--box); padding: .1em .3em; border-radius: .25rem; }
pre { max-width: 78rem; overflow-x: auto; padding: .75rem 1rem; background: var(--box); border: 1px solid var(--line);
  border-radius: .4rem; font-size: .8125rem; line-height: 1.5; overflow-wrap: normal; }
pre code { font-size: inherit; background: none; padding: 0; }
pre:has(> .language-sh) { max-width: 60rem; }
.language-sh { white-space: pre-wrap; overflow-wrap: anywhere; }
code:not(.language-sh) { line-height: 1.25; }
span { display: inline-block; max-width: 100%; }
td span, th span { display: inline; white-space: nowrap; }
.table { max-width: 100%; overflow-x: auto; margin: 1rem 0; }
table { border-collapse: separate; border-spacing: 0; font-size: .875rem; line-height: 1.25rem;
  font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .375rem .75rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--faint); font-weight: 600; vertical-align: bottom; border-bottom-width: 2px; }
.short { white-space: nowrap; }
td.prose { min-width: 15rem; max-width: 46rem; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--ground) padding-box; }
th.prose { min-width: 6rem; }
.unbroken { min-width: 13rem; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
img { display: block; max-width: 100%; height: auto; }
.dark { display: none; }
@media screen and (prefers-color-scheme: dark) { .dark { display: block; } .light { display: none; } }
@media (max-width: 40rem) { main { padding: 1.25rem 1rem 3rem; }
  h1 { font-size: 1.3rem; } .answer { font-size: 1.1rem; }
  pre { padding: .6rem .7rem; } th, td { padding: .3125rem .5rem; }
  td.prose { min-width: 10rem; } td.prose:first-child { min-width: 8rem; } .unbroken { min-width: 9.5rem; }
  .short:first-child { white-space: normal; } }
@media print { @page { margin: 14mm; } body { font-size: 10pt; } main { padding: 0; max-width: none; }
  main > *, pre { max-width: none; } .answer { font-size: 12pt; } th span, td + td span { white-space: normal; }
  th:first-child, td:first-child { position: static; } .table { overflow: visible; }
  table { font-size: 7.5pt; line-height: 1.35; } th, td { padding: 2pt 4pt; } .short { white-space: normal; }
  td.prose, th.prose, .unbroken { min-width: 0; } th, td { overflow-wrap: anywhere; }
  tr, pre, figure { break-inside: avoid; }
  pre { font-size: 7pt; } pre, pre code { white-space: pre-wrap; } h2 { margin-top: 1.5rem; } }
"""


def page(markdown: str, charts: Mapping[str, str], title: str | None = None) -> str:
    """The report as HTML. `charts` holds the SVGs by the names that the Markdown has for them.

    `title` is that of the window, the first heading if it is not given. The same input gives the same bytes.
    """
    parser = _parser()
    tokens = parser.parse(markdown)
    blocks = list(_pictures(tokens, charts))
    headings = _headings(blocks)
    _mark_state(blocks)
    _cells(blocks)
    title = title or next(iter(headings), "Report")
    body = parser.renderer.render(blocks, parser.options, {})
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{html.escape(plain(title))}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _parser() -> MarkdownIt:
    """CommonMark with tables, as GitHub reads them; HTML is text, and only harmless addresses are links."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table").disable("image")
    parser.validateLink = lambda url: LINK.match(url) is not None  # type: ignore[method-assign]
    parser.add_render_rule("table_open", lambda *_: '<div class="table">\n<table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table>\n</div>\n")
    parser.add_render_rule("text", lambda _, tokens, at, *__: _whole(tokens[at].content, TEXT_WORD))
    parser.add_render_rule(
        "code_inline", lambda _, tokens, at, *__: f"<code>{_whole(tokens[at].content, TEXT_WORD)}</code>"
    )
    parser.add_render_rule("fence", lambda _, tokens, at, *__: _fence(tokens[at]))
    return parser


def _whole(text: str, longest: int) -> str:
    """Escaped, and arms, options and intervals are not broken at their hyphens, unless they are too long."""
    return "".join(
        f"<span>{html.escape(part)}</span>"
        if place % 2 and len(part) <= longest and BREAKABLE.search(part)
        else html.escape(part)
        for place, part in enumerate(WORD.split(text))
    )


def _fence(token: Token) -> str:
    if token.info == "sh":
        return f'<pre><code class="language-sh">{_whole(token.content, COMMAND_WORD)}</code></pre>\n'
    return f"<pre><code>{html.escape(token.content)}</code></pre>\n"


def _pictures(tokens: Sequence[Token], charts: Mapping[str, str]) -> Iterator[Token]:
    """The same tokens, with each paragraph that is one of our pictures, and nothing else, drawn.

    Both shades are there and the style shows one: a <picture> would print the one that the screen had.
    """
    from markdown_it.token import Token

    source = partial(_address, charts)
    opened: Token | None = None
    drawn = False
    for token in tokens:
        if drawn:  # the end of its paragraph
            drawn = False
        elif token.type == "paragraph_open" and token.level == 0:
            opened = token
        elif opened is None:
            yield token
        elif (found := PICTURE.fullmatch(token.content)) and found["dark"] in charts and found["light"] in charts:
            size = f'width="{found["width"]}" alt="{html.escape(html.unescape(found["alt"]))}"'
            images = (f'<img class="{shade}" src="{source(found[shade])}" {size}>' for shade in ("light", "dark"))
            tag = f"<figure>{''.join(images)}</figure>\n"
            yield Token("html_block", "", 0, content=tag)
            opened, drawn = None, True
        else:
            yield from (opened, token)
            opened = None


def _address(charts: Mapping[str, str], name: str) -> str:
    """A chart as a data: URI. Shown as a picture it loads nothing and runs nothing."""
    return f"data:image/svg+xml;base64,{base64.b64encode(charts[name].encode()).decode()}"


def _text(inline: Token) -> str:
    """What a reader sees of a line."""
    return "".join(" " if each.type == "softbreak" else each.content for each in inline.children or ())


def _headings(blocks: Sequence[Token]) -> list[str]:
    """Give each heading the id that GitHub gives it, so that links hold in both; their texts."""
    texts: list[str] = []
    taken: dict[str, int] = {}
    for opening, inline in pairwise(blocks):
        if opening.type == "heading_open":
            texts.append(_text(inline))
            name = re.sub(r"[^\w\- ]", "", texts[-1].lower()).replace(" ", "-")
            taken[name] = taken.get(name, -1) + 1
            opening.attrSet("id", f"{name}-{taken[name]}" if taken[name] else name)
    return texts


def _mark_state(blocks: list[Token]) -> None:
    """Colour the state of the run where it is told, and make the answer stand out in its colour.

    What tells the state is a paragraph that begins with it in bold: text from elsewhere has no bold. Where nothing
    stands above the answer, the word is set there too, and leads to why it is so.
    """
    from markdown_it.token import Token

    heading, state, section = "", "", ""
    for opening, inline in pairwise(blocks):
        begins = [each for each in inline.children or () if each.type != "text" or each.content][:2]
        if opening.type == "heading_open":
            heading = str(opening.attrGet("id"))
        if [each.type for each in begins] == ["strong_open", "text"] and (found := STATE.match(begins[1].content)):
            state, section = found[1], heading
            begins[0].attrSet("class", f"state {state}")
    at = next((place for place, each in enumerate(blocks) if each.type == "paragraph_open" and not each.level), None)
    if at is None:
        return
    blocks[at].attrSet("class", f"answer {state}".rstrip())
    if state and at and blocks[at - 1].type == "heading_close":
        link = f'<p><a class="state {state}" href="#{html.escape(section)}">{state}</a></p>\n'
        blocks.insert(at, Token("html_block", "", 0, content=link))


def _cells(blocks: Sequence[Token]) -> None:
    """Short cells stay in one line, sentences get room, and a digest may be broken."""
    for opening, inline in pairwise(blocks):
        if opening.type in SHORT:
            text = _text(inline)
            longest = max(map(len, text.split()), default=0)
            kind = "unbroken" if longest > UNBROKEN else "short" if len(text) <= SHORT[opening.type] else "prose"
            opening.attrSet("class", kind)
