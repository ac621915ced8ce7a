"""llamaduel: one model on several engines and placements, measured so that the answer can be trusted.

These names are the library; the command line and the pytest plugin use nothing else. They load
on first use, because `--help` should not wait for numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.arms import parse_arms
    from harness.calibration import calibrate
    from harness.changes import Changes, compare_runs
    from harness.compare import Comparison, Row
    from harness.display import show_progress
    from harness.engines import install_engine, list_engines
    from harness.errors import DuelError
    from harness.options import Options, collect, declare
    from harness.preview import inspect_model, preview_run
    from harness.record import to_json
    from harness.render import (
        as_json,
        change_sentence,
        changes_table,
        engines_table,
        inspect_table,
        plain,
        preview_table,
        report,
        row_json,
        table,
        undecided,
    )
    from harness.synth import synthesize
    from harness.walk import changes_since_baseline, duel, find, read, verify, write_report

__all__ = [
    "Changes",
    "Comparison",
    "DuelError",
    "Options",
    "Row",
    "as_json",
    "calibrate",
    "change_sentence",
    "changes_since_baseline",
    "changes_table",
    "collect",
    "compare_runs",
    "declare",
    "duel",
    "engines_table",
    "find",
    "inspect_model",
    "inspect_table",
    "install_engine",
    "list_engines",
    "parse_arms",
    "plain",
    "preview_run",
    "preview_table",
    "read",
    "report",
    "row_json",
    "show_progress",
    "synthesize",
    "table",
    "to_json",
    "undecided",
    "verify",
    "write_report",
]

_MODULES = {
    "arms": ("parse_arms",),
    "calibration": ("calibrate",),
    "changes": (
        "Changes",
        "compare_runs",
    ),
    "compare": (
        "Comparison",
        "Row",
    ),
    "display": ("show_progress",),
    "engines": (
        "install_engine",
        "list_engines",
    ),
    "errors": ("DuelError",),
    "options": (
        "Options",
        "collect",
        "declare",
    ),
    "preview": (
        "inspect_model",
        "preview_run",
    ),
    "record": ("to_json",),
    "render": (
        "as_json",
        "change_sentence",
        "changes_table",
        "engines_table",
        "inspect_table",
        "plain",
        "preview_table",
        "report",
        "row_json",
        "table",
        "undecided",
    ),
    "synth": ("synthesize",),
    "walk": (
        "changes_since_baseline",
        "duel",
        "find",
        "read",
        "verify",
        "write_report",
    ),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"harness.{module}"), name)
    raise AttributeError(f"module 'harness' has no attribute {name!r}")
