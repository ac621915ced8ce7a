"""The schemas are what the code gives, what every command prints keeps to them, and what lies in reports/ too."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jsonschema import Draft202012Validator as Validator
from jsonschema import FormatChecker
from played_run import a_header, contender, engine, later, played, written

from harness import engines as installed
from harness import synth
from harness.cli import main
from harness.plan import ArmStatus, Status
from harness.testing import engines
from harness.testing.script import Script

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = {
    path.name.removesuffix(".schema.json"): json.loads(path.read_text("utf-8")) for path in (ROOT / "schemas").iterdir()
}
RUNS = sorted(path.parent for path in (ROOT / "reports").rglob("run.json"))
GPU = Script(itl_s=0.002, devices=(("CUDA0", "a card", 8000),))
SHORT = ("--preset", "quick", "--out-tokens", "16", "--prompt-tokens", "64", "--context", "512", "--no-wait")
BENCH = """#!/bin/sh
echo '{"n_gen": 128, "samples_ns": [1280000000, 1290000000, 1300000000]}'
"""
Told = Callable[..., Any]


def validator(name: str) -> Validator:
    return Validator(SCHEMAS[name], format_checker=FormatChecker())


def problems(name: str, document: object) -> list[str]:
    return [f"{error.json_path}: {error.message[:300]}" for error in validator(name).iter_errors(document)]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """Type a command with --json in an empty folder; its stdout is one document, or empty."""
    monkeypatch.chdir(tmp_path)

    def type_(*arguments: str) -> Any:
        main([*arguments, "--json"])
        out, _ = capsys.readouterr()
        return json.loads(out) if out else None

    return type_


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two whole runs: the first has an alias and an arm that is not to be had, in the second an arm is slower."""
    folder = tmp_path_factory.mktemp("runs")
    more = (
        contender("llama-cpp@ncmoe=9", status=ArmStatus(Status.ALIAS, "all experts on the CPU", "llama-cpp@cpu-moe")),
        contender("ollama", status=ArmStatus(Status.UNAVAILABLE, "no ollama"), engine=None, realised=None),
    )
    found = tuple(map(contender, ("llama-cpp", "llama-cpp@cpu-moe", "llama-cpp@ngl=9")))
    before = written(played(a_header(*found, *more)), folder / "before")
    newer = (*found[:2], contender("llama-cpp@ngl=9", engine=engine("b2")))
    after = written(played(later(*newer), {"llama-cpp@cpu-moe": 30.0}), folder / "after")
    return before, after


# ── the files ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("schemas_script", ROOT / "scripts/schemas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    return module


def test_the_files_are_what_the_code_gives(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def test_a_file_that_differs_is_named(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "FOLDER", tmp_path / "schemas")
    script.main([])
    (tmp_path / "schemas/run.schema.json").write_text("{}")
    (tmp_path / "schemas/gone.schema.json").write_text("{}")
    capsys.readouterr()

    assert script.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith("not as the code has it: gone.schema.json, run.schema.json;")


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_of_its_dialect_and_says_what_it_is_for(name: str) -> None:
    found = SCHEMAS[name]
    Validator.check_schema(found)
    assert found["title"]
    assert found["description"]
    assert "$id" not in found, "it is found where the repository is"


def objects(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "properties" in node:
            yield node
        for each in node.values():
            yield from objects(each)
    elif isinstance(node, list):
        for each in node:
            yield from objects(each)


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_object_of_ours_may_hold_what_is_not_named(name: str) -> None:
    found = list(objects(SCHEMAS[name]))
    assert found
    assert all(each["additionalProperties"] is False for each in found)


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name.endswith(".output")])
def test_what_is_printed_is_always_whole(name: str) -> None:
    optional = {
        (each.get("description", "")[:20], field)
        for each in objects(SCHEMAS[name])
        for field in each["properties"].keys() - set(each.get("required", ()))
    }
    assert {field for _, field in optional} <= {"changes"}, "which is there where there is a baseline"


# ── what lies in run folders ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: str(folder.relative_to(ROOT / "reports")))
def test_every_published_run_keeps_to_the_schemas(folder: Path) -> None:
    assert problems("run", json.loads((folder / "run.json").read_text("utf-8"))) == []
    line = validator("sample")
    for number, text in enumerate((folder / "samples.jsonl").read_text("utf-8").splitlines(), 1):
        assert line.is_valid(json.loads(text)), f"line {number}: {problems('sample', json.loads(text))}"


def test_a_run_that_is_written_now_keeps_to_them(runs: tuple[Path, Path]) -> None:
    before, _ = runs
    lines = [json.loads(text) for text in (before / "samples.jsonl").read_text("utf-8").splitlines()]

    assert problems("run", json.loads((before / "run.json").read_text("utf-8"))) == []
    assert {line["kind"] for line in lines} == {"load", "sample"}
    assert all(validator("sample").is_valid(line) for line in lines)


# ── what is printed ─────────────────────────────────────────────────────────────────────────


def test_a_run_prints_what_its_schema_says(told: Told, model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, GPU):
        found = told("run", str(model), "--arms", "llama-cpp,llama-cpp@ncmoe=0..2,openai@nobody", *SHORT)

    assert problems("run.output", found) == []
    assert found["curves"], "there is a sweep in it"
    assert found["parity"]


def test_a_find_prints_what_its_schema_says(told: Told, model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, GPU):
        found = told("find", str(model), "--arms", "llama-cpp@cpu-moe,ub=128..256/128", *SHORT)

    assert problems("run.output", found) == []


def test_reports_and_comparisons_print_what_their_schemas_say(told: Told, runs: tuple[Path, Path]) -> None:
    before, after = map(str, runs)

    report, comparison = told("report", before), told("compare", before, after)

    assert problems("run.output", report) == []
    assert {arm["status"] for arm in report["arms"]} == {"OK", "ALIAS", "UNAVAILABLE"}
    assert problems("run.output", report | {"changes": comparison}) == []
    assert problems("compare.output", comparison) == []
    assert comparison["regression"]
    assert comparison["differences"]


def test_verify_prints_what_its_schema_says(told: Told, runs: tuple[Path, Path], tmp_path: Path) -> None:
    whole = told("verify", str(runs[0]))
    changed = written(played(a_header()), tmp_path / "changed")
    (changed / "report.md").write_text("better\n")

    assert problems("verify.output", whole) == problems("verify.output", told("verify", str(changed))) == []
    assert (whole["verified"], whole["problems"]) == (True, [])


@pytest.mark.parametrize("shape", ["qwen3.5-35b-a3b", "tiny"])
def test_inspect_and_plan_print_what_their_schemas_say(told: Told, shape: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert problems("synth.output", told("synth", str(path), "--like", shape, "--header-only")) == []

    inspected = told("inspect", str(path))
    with engines.fake(tmp_path, GPU):
        planned = told("plan", str(path), "--arms", "ollama,llama-cpp@ncmoe=0..48/16,openai@nobody")

    assert problems("inspect.output", inspected) == []
    assert problems("plan.output", planned) == []
    assert {"arch", "layers", "experts", "experts_used", "weights_bytes", "bytes_per_token"} <= inspected.keys()


def test_a_plan_that_knows_its_minutes_prints_what_its_schema_says(told: Told, model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, GPU):
        told("run", str(model), "--arms", "llama-cpp", *SHORT)
        planned = told("plan", str(model), "--arms", "llama-cpp", *SHORT)

    assert planned["minutes"] is not None
    assert problems("plan.output", planned) == []


def test_calibrate_prints_what_its_schema_says(told: Told, model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, GPU) as found:
        (found.bin / "llama-bench").write_text(BENCH)
        (found.bin / "llama-bench").chmod(0o755)
        calibrated = told("calibrate", str(model), "--arms", "llama-cpp", *SHORT)

    assert problems("calibrate.output", calibrated) == []
    assert len(calibrated["bench_ms"]) == len(calibrated["server_ms"])


def test_engines_print_what_their_schemas_say(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recipe:
        def install(self, say: object) -> Path:
            return tmp_path / "ollama"

    with engines.fake(tmp_path, GPU):
        listed = told("engines", "list")
    monkeypatch.setattr(installed, "recipe", lambda name: Recipe())
    got = told("engines", "install", "ollama")

    assert problems("engines-list.output", listed) == []
    assert {each["found"] for each in listed["engines"]} == {True, False}, "openai has no table here"
    assert problems("engines-install.output", got) == []
    assert got == {"name": "ollama", "path": str(tmp_path / "ollama")}


def test_doctor_prints_what_its_schema_says(told: Told, tmp_path: Path) -> None:
    with engines.fake(tmp_path, GPU):
        found = told("doctor")

    assert problems("doctor.output", found) == []
    assert found["findings"]


def test_publish_prints_what_its_schema_says(told: Told, runs: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    shown = told("publish", str(runs[0]), "--into", str(tmp_path / "reports"))
    listed = told("publish", "--into", str(tmp_path / "reports"))

    assert problems("publish.output", shown) == problems("publish.output", listed) == []
    assert Path(shown["folder"]).is_dir()
    assert listed["folder"] is None


def test_what_cannot_be_done_prints_nothing_on_stdout(told: Told, tmp_path: Path) -> None:
    for arguments in (
        ("run", "missing.gguf"), ("find", "missing.gguf"), ("plan", "missing.gguf"), ("inspect", "missing.gguf"),
        ("report", "."), ("verify", "."), ("compare", ".", "."), ("calibrate", "missing.gguf"),
        ("synth", "out.gguf", "--like", "nothing"), ("engines", "install", "nothing"), ("publish", "."),
    ):  # fmt: skip
        assert told(*arguments) is None, arguments


# ── a schema that takes anything would say nothing ──────────────────────────────────────────


def removals(document: Any, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The document once for each field of ours, without it."""

    def walk(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(node, dict):
            for key, each in node.items():
                yield (*path, key)
                yield from walk(each, (*path, key))
        elif isinstance(node, list):
            for number, each in enumerate(node[:1]):
                yield from walk(each, (*path, number))

    required = {field for each in objects(schema) for field in each.get("required", ())}
    by_name = {"invalid_reasons", "asked", "values", "commands", "types"}  # whose keys are names of things
    for path in walk(document, ()):
        if path[-1] in required and not by_name & set(path[:-1]):
            changed = copy.deepcopy(document)
            node = changed
            for key in path[:-1]:
                node = node[key]
            del node[path[-1]]
            yield ".".join(map(str, path)), changed


def test_no_required_field_may_be_missing(told: Told, runs: tuple[Path, Path], tmp_path: Path) -> None:
    before, after = map(str, runs)
    synth.synthesize(tmp_path / "m.gguf", size="24MiB", header_only=True)
    with engines.fake(tmp_path, GPU):
        documents = {
            "run.output": told("report", before),
            "compare.output": told("compare", before, after),
            "verify.output": told("verify", before),
            "inspect.output": told("inspect", "m.gguf"),
            "plan.output": told("plan", "m.gguf", "--arms", "llama-cpp@ncmoe=0/1"),
            "engines-list.output": told("engines", "list"),
            "doctor.output": told("doctor"),
        }
    for name, document in documents.items():
        removed = dict(removals(document, SCHEMAS[name]))
        assert removed
        accepted = [path for path, changed in removed.items() if validator(name).is_valid(changed)]
        assert accepted == [], name


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("run.output", ("state",), "PURPLE"),
        ("run.output", ("arms", 0, "status"), "FINE"),
        ("run.output", ("arms", 0, "decode_tps"), 50.0),
        ("run.output", ("arms", 0, "vram_bytes"), "12 GiB"),
        ("run.output", ("arms", 0, "colour"), "red"),
        ("run.output", ("surprise",), 1),
        ("compare.output", ("changes", 0, "word"), "BETTER"),
        ("compare.output", ("regression",), None),
    ],
)
def test_a_document_that_means_something_else_is_refused(
    told: Told, runs: tuple[Path, Path], name: str, path: tuple[Any, ...], value: object
) -> None:
    before, after = map(str, runs)
    document = told("report", before) if name == "run.output" else told("compare", before, after)
    assert validator(name).is_valid(document)
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value

    assert not validator(name).is_valid(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), 2),
        (("plan", "format"), 2),
        (("started",), "yesterday"),
        (("started",), "2026-01-01 00:00"),
        (("plan_digest",), "zz"),
        (("plan_digest",), "A" * 64),
        (("plan", "weights_digest"), ""),
        (("model", "sha256"), "0" * 63),
        (("model", "size_bytes"), -1),
        (("contenders", 0, "weights_digest"), "w" * 64),
        (("contenders", 0, "realised", "buffers", 0, "bytes"), -1),
        (("machine", "memory_bytes"), -1),
    ],
)
def test_a_header_that_we_never_write_is_refused(path: tuple[Any, ...], value: object, runs: tuple[Path, Path]) -> None:
    header = json.loads((runs[0] / "run.json").read_text("utf-8"))
    assert validator("run").is_valid(header)
    node = header
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value

    assert not validator("run").is_valid(header)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("sample", ("sample", "status"), -200),
        ("sample", ("sample", "sent_ns"), -1),
        ("sample", ("sample", "chunk_ns"), [-1]),
        ("sample", ("sample", "max_tokens"), -16),
        ("load", ("started_unix_s",), -1.0),
        ("load", ("block",), -1),
        ("load", ("weights_digest",), "zz"),
    ],
)
def test_a_line_that_we_never_write_is_refused(
    kind: str, path: tuple[str, ...], value: object, runs: tuple[Path, Path]
) -> None:
    lines = map(json.loads, (runs[0] / "samples.jsonl").read_text("utf-8").splitlines())
    line = next(each for each in lines if each["kind"] == kind)
    node = line
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value

    assert not validator("sample").is_valid(line)


def test_what_an_engine_says_of_itself_is_taken_as_it_is(runs: tuple[Path, Path]) -> None:
    line = json.loads((runs[0] / "samples.jsonl").read_text("utf-8").splitlines()[0])
    line["sample"] |= {"usage": line["sample"]["usage"] | {"prompt_tokens": -1, "decode_s": -0.5}, "chunk_tokens": [-1]}

    assert problems("sample", line) == []


def test_a_line_of_another_format_or_kind_is_refused(runs: tuple[Path, Path]) -> None:
    line = json.loads((runs[0] / "samples.jsonl").read_text("utf-8").splitlines()[0])
    assert validator("sample").is_valid(line)

    for change in ({"format": 2}, {"kind": "load"}, {"load": None}, {"more": 1}):
        assert not validator("sample").is_valid(line | change)
