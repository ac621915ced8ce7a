"""What the truth tests attained: gathered while they run, printed as one table at the end of the session.

A row is one claim of the protocol with its id: S for simulated engines, C for the wire, X for whole runs.
Its limit stands beside what was attained, so that the table can be read without the code.
"""

from __future__ import annotations

import operator
import re
from typing import NamedTuple, Protocol

import pytest

HOLDS = {"≤": operator.le, "≥": operator.ge, ">": operator.gt, "<": operator.lt, "=": operator.eq}


class Attained(Protocol):
    def __call__(self, claim: str, what: str, value: float, sign: str, limit: float, unit: str = "%") -> None: ...


class Row(NamedTuple):
    claim: str
    what: str
    limit: str
    attained: str
    failed: str = ""

    @property
    def place(self) -> tuple[bool, str, int]:
        """S1 to S16 in their order, then C, X, and what has no id."""
        found = re.fullmatch(r"([CSX])(\d+)", self.claim)
        return (False, "SCX"[: "SCX".index(found[1]) + 1], int(found[2])) if found else (True, self.claim, 0)


ROWS = pytest.StashKey[list[Row]]()


@pytest.fixture(scope="session")
def attained(request: pytest.FixtureRequest) -> Attained:
    """`attained(claim, what, value, sign, limit, unit)` notes a value, and asserts that it keeps its limit."""
    rows = request.config.stash.setdefault(ROWS, [])

    def note(claim: str, what: str, value: float, sign: str, limit: float, unit: str = "%") -> None:
        def shown(number: float) -> str:
            return f"{100 * number:.1f} %" if unit == "%" else f"{number:.4g} {unit}".strip()

        holds = HOLDS[sign](value, limit)
        rows.append(Row(claim, what, f"{sign} {shown(limit)}", shown(value), "" if holds else "✗"))
        assert holds, f"{claim} {what}: {value:.4f}, wanted {sign} {limit:.4f}"

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash.get(ROWS, [])
    if not found:
        return
    terminalreporter.section("attained against a known truth")
    rows = [Row("id", "what", "limit", "attained"), *sorted(found, key=lambda row: row.place)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = f"{row.limit:>{widths[2]}}  {row.attained:>{widths[3]}}"
        terminalreporter.write_line(f"{row.claim:<{widths[0]}}  {row.what:<{widths[1]}}  {cells} {row.failed}".rstrip())
