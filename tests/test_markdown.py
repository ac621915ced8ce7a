"""Every Markdown file passes a linter: documents, and the reports that the harness writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pymarkdown.api import PyMarkdownApi

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
    path.relative_to(ROOT) for pattern in ("*.md", "docs/*.md", "reports/**/*.md") for path in ROOT.glob(pattern)
)
ALLOWED = {
    "md013": "sentences and tables of a report are as long as they are",
    "md033": "<picture> is the only way to a chart for light and for dark pages",
    "md024": "a changelog has one `Added` for each version",
}


def linter() -> PyMarkdownApi:
    api = PyMarkdownApi()
    for rule in ALLOWED:
        api = api.disable_rule_by_identifier(rule)
    return api


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_document_is_markdown_that_a_linter_takes(path: Path) -> None:
    found = linter().scan_path(str(ROOT / path))

    told = [f"{each.line_number}: {each.rule_id} {each.rule_description}" for each in found.scan_failures]
    assert told == []
    assert not found.pragma_errors


def test_the_linter_finds_what_is_wrong(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.md"
    wrong.write_text("# one\n# two\n\n\n\n* a\n- b\n", "utf-8")

    assert {"MD022", "MD012"} <= {each.rule_id for each in linter().scan_path(str(wrong)).scan_failures}


def test_reports_are_among_them() -> None:
    assert sum(path.name == "report.md" for path in FILES) >= 10
