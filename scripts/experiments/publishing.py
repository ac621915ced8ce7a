"""A run folder as it may be published: no path, no user and no host of the machine that measured.

The plan is copied as it is, so its digest stays; elsewhere a path becomes the name at its end. The report is
written again from the copy, and `llamaduel verify` must find nothing in it.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import harness

HEADER, LINES = "run.json", "samples.jsonl"
FOLDERS = re.compile(r"(?<![\w./:~-])~?/(?!dev/)(?:[^\s'\"/]+/)*(?=[^\s'\"/])")  # of an absolute path; a URL has none


def publish(folder: Path, out: Path) -> Path:
    """Copy header and samples without their paths, and write the report. Raises DuelError, or ValueError."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    header = json.loads((folder / HEADER).read_text("utf-8"))
    header = {key: value if key == "plan" else without_paths(value) for key, value in header.items()}
    (out / HEADER).write_text(json.dumps(header, indent=1, ensure_ascii=False) + "\n", "utf-8")
    with (folder / LINES).open(encoding="utf-8") as lines, (out / LINES).open("w", encoding="utf-8") as copy:
        for line in lines:
            record = json.loads(line)
            if record["kind"] == "load":
                record = without_paths(record)
            copy.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
    harness.write_report(out)
    problems = [*harness.verify(out), *private(out)]
    if problems:
        raise ValueError(f"{folder} cannot be published as it is: {'; '.join(problems)}")
    return out


def without_paths(value: Any) -> Any:
    """JSON data in which every absolute path is the name at its end."""
    if isinstance(value, str):
        return FOLDERS.sub("", value)
    if isinstance(value, dict):
        return {key: without_paths(each) for key, each in value.items()}
    return [without_paths(each) for each in value] if isinstance(value, list) else value


def private(folder: Path) -> list[str]:
    """What of this machine is still named in a published folder."""
    words = {str(Path.home()), str(Path.cwd()), socket.gethostname()} - {"/", "localhost"}
    texts = {path.name: path.read_text("utf-8") for path in folder.iterdir() if path.is_file()}
    return [f"{name} names {word!r}" for name, text in texts.items() for word in words if word in text]
