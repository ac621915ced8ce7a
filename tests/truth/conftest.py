"""Gathers what the truth tests attained, and prints it as one table at the end of the session."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest


class Attained(Protocol):
    def __call__(self, test: str, case: str, value: float, sign: str, limit: float, unit: str = "%") -> None: ...


ROWS = pytest.StashKey[list[tuple[str, str, str, str]]]()
HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.truth)


@pytest.fixture(scope="session")
def attained(request: pytest.FixtureRequest) -> Attained:
    """`attained(test, case, value, sign, limit, unit)` records a value and asserts that it keeps its limit."""

    def record(test: str, case: str, value: float, sign: str, limit: float, unit: str = "%") -> None:
        scale = 100 if unit == "%" else 1
        request.config.stash[ROWS].append(
            (test, case, f"{scale * value:.1f} {unit}".strip(), f"{sign} {scale * limit:.1f} {unit}".strip())
        )
        holds = {"≤": value <= limit, "≥": value >= limit, ">": value > limit, "<": value < limit}[sign]
        assert holds, f"{test} {case}: {value:.4f}, wanted {sign} {limit:.4f}"

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    gathered = config.stash[ROWS]
    rows = sorted(gathered, key=lambda row: (not row[0].startswith("S"), len(row[0]), row[0]))
    if not rows:
        return
    terminalreporter.section("attained against a known truth")
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for test, case, value, limit in rows:
        terminalreporter.write_line(
            f"{test:<{widths[0]}}  {case:<{widths[1]}}  {value:>{widths[2]}}  {limit:>{widths[3]}}"
        )
