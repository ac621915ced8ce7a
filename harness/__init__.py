"""llamaduel: one model on several engines and placements, measured so that the answer can be trusted.

These names are the library; the command line and the pytest plugin use nothing else. They load
on first use, because `--help` should not wait for numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.answer import change_sentence, undecided
    from harness.arms import parse_arms
    from harness.calibration import calibrate
    from harness.changes import Changes, compare_runs
    from harness.compare import Comparison, Row
    from harness.display import show_progress
    from harness.doctor import diagnose
    from harness.engines import install_engine, list_engines
    from harness.errors import DuelError, nearest
    from harness.facts import as_json, row_json
    from harness.inspection import inspect_model
    from harness.listings import doctor_table, engines_table, inspect_table, preview_table
    from harness.options import Options, collect, declare
    from harness.preview import preview_run
    from harness.publication import outcome, publish, published_json, published_text, rebuild_index, verify_all
    from harness.record import to_json
    from harness.render import report
    from harness.sheets import sheet
    from harness.step_summary import append_summary
    from harness.synth import synthesize
    from harness.terminal import changes_table, table
    from harness.walk import changes_since_baseline, duel, find_best, read, verify, write_report
    from harness.words import plain

__all__ = [
    "Changes",
    "Comparison",
    "DuelError",
    "Options",
    "Row",
    "append_summary",
    "as_json",
    "calibrate",
    "change_sentence",
    "changes_since_baseline",
    "changes_table",
    "collect",
    "compare_runs",
    "declare",
    "diagnose",
    "doctor_table",
    "duel",
    "engines_table",
    "find_best",
    "inspect_model",
    "inspect_table",
    "install_engine",
    "list_engines",
    "nearest",
    "outcome",
    "parse_arms",
    "plain",
    "preview_run",
    "preview_table",
    "publish",
    "published_json",
    "published_text",
    "read",
    "rebuild_index",
    "report",
    "row_json",
    "sheet",
    "show_progress",
    "synthesize",
    "table",
    "to_json",
    "undecided",
    "verify",
    "verify_all",
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
    "doctor": ("diagnose",),
    "engines": (
        "install_engine",
        "list_engines",
    ),
    "errors": ("DuelError", "nearest"),
    "options": (
        "Options",
        "collect",
        "declare",
    ),
    "inspection": ("inspect_model",),
    "preview": ("preview_run",),
    "publication": ("outcome", "publish", "published_json", "published_text", "rebuild_index", "verify_all"),
    "record": ("to_json",),
    "answer": ("change_sentence", "undecided"),
    "facts": ("as_json", "row_json"),
    "listings": ("doctor_table", "engines_table", "inspect_table", "preview_table"),
    "render": ("report",),
    "terminal": ("changes_table", "table"),
    "words": ("plain",),
    "sheets": ("sheet",),
    "step_summary": ("append_summary",),
    "synth": ("synthesize",),
    "walk": (
        "changes_since_baseline",
        "duel",
        "find_best",
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
