"""llamaduel: one model on several engines and placements, measured so that the answer can be trusted.

These names are the library; the command line and the pytest plugin use nothing else. They load
on first use, because `--help` should not wait for numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.calibrate import calibrate
    from harness.compare import Comparison, Row, compare_runs
    from harness.display import show_progress
    from harness.duel import duel, read, verify, write_report
    from harness.errors import DuelError
    from harness.inspect import inspect, preview
    from harness.options import Options, collect, declare
    from harness.registry import recipes
    from harness.render import as_json, changes_table, report, row_json, table
    from harness.synth import synthesize

_WHERE = {
    "Comparison": "compare",
    "DuelError": "errors",
    "Options": "options",
    "Row": "compare",
    "as_json": "render",
    "calibrate": "calibrate",
    "changes_table": "render",
    "collect": "options",
    "compare_runs": "compare",
    "declare": "options",
    "duel": "duel",
    "inspect": "inspect",
    "parse_arms": "arms",
    "preview": "inspect",
    "read": "duel",
    "recipes": "registry",
    "report": "render",
    "row_json": "render",
    "show_progress": "display",
    "synthesize": "synth",
    "table": "render",
    "verify": "duel",
    "write_report": "duel",
}
__all__ = sorted(_WHERE)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    return getattr(importlib.import_module(f"harness.{_WHERE[name]}"), name)
