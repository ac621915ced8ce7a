"""Write `schemas/*.schema.json`: what stands in a run folder, and what every command prints with --json.

    .venv/bin/python scripts/schemas.py [--check]

They are made of the very types that the program reads and writes, so nothing is told twice. With --check nothing is
written, and the exit code says whether a file differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from harness import calibration, changes, doctor, engines, facts, inspection, plan, preview, record

FOLDER = Path(__file__).resolve().parent.parent / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class Document:
    """`printed` ones are always whole; a record may lack what a later version added, and is read all the same."""

    title: str
    kind: Any
    description: str
    printed: bool = True


DOCUMENTS: Mapping[str, Document] = {
    "run": Document(
        "run.json", record.Header, "The header of a run folder, written before block 1 and never changed.", False
    ),
    "sample": Document(
        "a line of samples.jsonl",
        record.Line,
        "One line of a run folder's samples.jsonl: a timed request, a load, which comes after its requests, or a rest.",
        False,
    ),
    "run.output": Document("llamaduel run, find, report --json", facts.RunFacts, "What a run says."),
    "compare.output": Document("llamaduel compare --json", changes.Changes, "What changed from one run to another."),
    "verify.output": Document("llamaduel verify --json", facts.Verified, "Whether a run folder is whole."),
    "publish.output": Document("llamaduel publish --json", facts.Shown, "What was published, and what was replaced."),
    "plan.output": Document("llamaduel plan --json", preview.Preview, "What a run would do, nothing loaded."),
    "inspect.output": Document("llamaduel inspect --json", inspection.Inspected, "A model, by its header alone."),
    "calibrate.output": Document(
        "llamaduel calibrate --json", calibration.Calibrated, "llama-bench beside a server, in milliseconds a token."
    ),
    "doctor.output": Document("llamaduel doctor --json", doctor.Diagnosis, "What this machine has for a run."),
    "synth.output": Document("llamaduel synth --json", facts.Written, "The model that was written."),
    "engines-list.output": Document("llamaduel engines list --json", engines.Listing, "Engines that are here."),
    "engines-install.output": Document("llamaduel engines install --json", facts.Installed, "What was installed."),
}  # fmt: skip


DIGEST = {"pattern": "^[0-9a-f]{64}$"}
OR_UNKNOWN = {"pattern": "^([0-9a-f]{64}|unknown)$"}  # where a run was copied from what somebody published
STAMP = {"pattern": r"^\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\d([+-]\d\d:\d\d|Z))?$"}  # or the day alone
NARROWER: Mapping[str, Mapping[str, Any]] = {  # than its type is what we write of a field, by its name
    "plan_digest": DIGEST,
    "prompts_digest": OR_UNKNOWN,
    "weights_digest": OR_UNKNOWN,
    "digest": OR_UNKNOWN,
    "sha256": OR_UNKNOWN,
    "started": STAMP,
    "status": {"minimum": 100, "maximum": 999},  # of HTTP
}
FORMATS: Mapping[str, int] = {"Header": record.FORMAT, "Plan": plan.FORMAT}
SIGNED = frozenset({"Usage.*", "Sample.chunk_tokens", "Settled.over_bytes"})  # an engine's own word; a difference
ELAPSED = ("_s", "seconds")  # ends of names: no span of time and no moment is below 0


class _Whole(GenerateJsonSchema):
    """Of what is printed, a field that has a default is there too."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return bool(field["type"] == "dataclass-field" or super().field_is_required(field, total))


def schema(document: Document) -> dict[str, Any]:
    """As JSON Schema, draft 2020-12. No object of ours has other fields than those it names."""
    generator = _Whole if document.printed else GenerateJsonSchema
    made = TypeAdapter(document.kind).json_schema(mode="serialization", schema_generator=generator)
    if document.kind == record.Line:
        for word, kind in record.KINDS.items():
            line = made["$defs"][kind.__name__]
            line["properties"] = {"format": {"const": record.FORMAT}, "kind": {"const": word}} | line["properties"]
            line["required"] = ["format", "kind", *line["required"]]
    _narrow(made, document.kind.__name__ if isinstance(document.kind, type) else "")
    _close(made)
    head = {"$schema": DIALECT, "title": document.title, "description": document.description}
    return head | {key: value for key, value in made.items() if key not in head}


def _narrow(made: Mapping[str, Any], name: str) -> None:
    """Keep each field to what is ever written of it: its form, and nothing below 0 that counts or measures."""
    for owner, node in {name: made, **made.get("$defs", {})}.items():
        for field, kinds in node.get("properties", {}).items():
            if field == "format" and owner in FORMATS:
                node["properties"][field] = {"const": FORMATS[owner]}
            elif not {f"{owner}.*", f"{owner}.{field}"} & SIGNED:
                _narrow_field(kinds, field)


def _narrow_field(node: Any, field: str) -> None:
    for each in [*node.get("anyOf", ()), *([node["items"]] if "items" in node else [])]:
        _narrow_field(each, field)
    kind = node.get("type")
    if kind in ("string", "integer") and field in NARROWER:
        node.update(NARROWER[field])
    elif kind == "integer" or (kind == "number" and field.endswith(ELAPSED)):
        node["minimum"] = 0


def _close(node: Any) -> None:
    """Forbid unnamed fields, and leave out titles, which repeat the names."""
    if isinstance(node, dict):
        if "properties" in node:
            node["additionalProperties"] = False
            for each in node["properties"].values():
                each.pop("title", None)
        if node.get("format") == "path":
            del node["format"]
        for each in node.values():
            _close(each)
    elif isinstance(node, list):
        for each in node:
            _close(each)


def texts() -> dict[Path, str]:
    """Every file and what belongs in it."""
    return {
        FOLDER / f"{name}.schema.json": json.dumps(schema(document), indent=2, ensure_ascii=False) + "\n"
        for name, document in DOCUMENTS.items()
    }


def main(arguments: list[str]) -> int:
    wanted = texts()
    found = {path: path.read_text("utf-8") for path in FOLDER.glob("*.json")}
    if arguments == ["--check"]:
        wrong = sorted(path.name for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path))
        print(f"not as the code has it: {', '.join(wrong)}; write them by scripts/schemas.py" if wrong else "as it is")
        return 1 if wrong else 0
    if arguments:
        print((__doc__ or "").strip())
        return 2
    FOLDER.mkdir(exist_ok=True)
    for path in found.keys() - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text, "utf-8")
        print(path.relative_to(FOLDER.parent))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
