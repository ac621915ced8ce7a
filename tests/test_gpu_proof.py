"""The experiment on a GPU, against a command that only writes down what it is asked and answers what it is told."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts/gpu_proof.py"
SEARCHED = ROOT / "reports/2026-11-30-find-on-12-gib/run.json"  # it picked ncmoe=15 and 16 by ten loads
BEST = "llama-cpp@ncmoe=15"
GIB = 1 << 30
FAKE = """
import json, os, shutil, sys, time
from pathlib import Path

words = [word for word in sys.argv[1:] if word != "--json"]
notes = Path(os.environ["NOTES"])
with (notes / "log").open("a") as log:
    log.write(json.dumps(words) + "\\n")
verb = "-".join(words[:2]) if words[0] == "engines" else words[0]
answer = verb


def step_of():
    if verb == "report":
        return Path(words[1]).parent.name
    if "--resume" in words:
        return Path(words[words.index("--resume") + 1]).parent.name
    return Path(words[words.index("--out") + 1]).name if "--out" in words else verb


step = step_of()
if (notes / f"{step}.fails").exists() and verb != "report":
    print("llamaduel: the cat sat on it; move the cat", file=sys.stderr)
    sys.exit(1)
if (notes / f"{step}.refuses").exists() and verb != "report":
    print("llamaduel: '12GiBB' is not a size; write it like 12GiB", file=sys.stderr)
    sys.exit(2)
if verb == "synth":
    Path(words[1]).write_text("weights")
if verb == "engines-install" and (notes / "engines-list.after").exists():
    shutil.copy(notes / "engines-list.after", notes / "engines-list.json")
if verb in ("find", "run") and "--resume" not in words and not (notes / "searches").exists():
    folder = Path(words[words.index("--out") + 1]) / "2026-01-01-m"
    folder.mkdir(parents=True)
    header = json.loads((notes / "run.json").read_text())
    header["options"]["arms"] = words[words.index("--arms") + 1]
    (folder / "run.json").write_text(json.dumps(header))
if verb in ("find", "run", "report"):
    answer = step
code = 1 if (notes / f"{step}.finds").exists() else 0
if (notes / f"{step}.waits").exists() and verb != "report":
    (notes / f"{step}.waits").unlink()
    try:
        (notes / f"{step}.waiting").touch()
        time.sleep(600)
        code = 1
    except KeyboardInterrupt:
        with (notes / "interrupted").open("a") as file:
            file.write("once\\n")
        code = 130
print((notes / f"{answer}.json").read_text())
sys.exit(code)
"""


# ── what it answers ─────────────────────────────────────────────────────────────────────────


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"schemas/{name}.schema.json").read_text("utf-8"))
    return found


def arm(text: str, **known: Any) -> dict[str, Any]:
    """An arm of which all is unknown but what is told."""
    required = schema("run.output")["$defs"]["ArmFacts"]["required"]
    usual = {
        "status": "OK", "placement": "somewhere", "memory": "UNKNOWN", "flags": [], "is_reference": False,
        "samples": 0, "invalid_samples": 0, "invalid_reasons": {},
    }  # fmt: skip
    return dict.fromkeys(required) | usual | {"arm": text} | known


def between(value: float, low: float | None, high: float | None) -> dict[str, float | None]:
    return {"value": value, "low": low, "high": high}


def a_run(*arms: dict[str, Any], **known: Any) -> dict[str, Any]:
    return {
        "run_dir": "somewhere", "state": "GREEN", "reasons": [], "answer": "Take it.", "plan_digest": "a" * 64,
        "best": [], "commands": {}, "arms": list(arms), "parity": [], "curves": [], **known,
    }  # fmt: skip


FOUND = a_run(
    arm(
        BEST,
        is_reference=True,
        decode_tps=between(50.0, 49.5, 50.5),
        predicted_device_bytes=11 * GIB,
        realised_device_bytes=10 * GIB,
        vram_bytes=12 * GIB,
    ),
    arm("ollama", decode_tps=between(25.0, 24.0, 26.0), ratio=between(0.5, 0.48, 0.52), verdict="DIFFERENT"),
    arm("llama-cpp", decode_tps=between(40.0, 1.0, 1600.0), ratio=between(0.8, None, None), verdict="SCREENING"),
    arm("llama-cpp@ngl=99", status="DOES_NOT_FIT", memory="DOES_NOT_FIT"),
    arm("llama-cpp@cpu-moe", status="ALIAS", alias_of="llama-cpp@ncmoe=48"),
    best=[BEST],
    answer="The best of 46 placements by ncmoe is llama-cpp@ncmoe=15.",
)
CURVE = a_run(
    arm(BEST, is_reference=True),
    state="SCREENING",
    curves=[
        {
            "over": "ncmoe",
            "arms": "llama-cpp@ncmoe=…",
            "finding": "ncmoe=16 reads highest, 51.0 tok/s",
            "edge": None,
            "best": ["16"],
            "points": [],
        }
    ],
)
CALIBRATED = {
    "arm": "llama-cpp@ngl=99", "engine": "llama.cpp b1", "depth": 9, "out_tokens": 128,
    "bench_ms": [3.0, 3.1], "server_ms": [3.3, 3.25], "difference_ms": 0.225, "told_apart": True,
    "client_adds_ms": [0.002, 0.004], "client_adds_median_ms": 0.003, "client_limit_ms": 0.02, "client_accepted": True,
}  # fmt: skip


def listed(*devices: str, rpc: bool = False) -> dict[str, Any]:
    found = {
        "backend": "llama-cpp", "found": True, "engine": "llama.cpp b1", "path": "/bin/llama-server", "from": "PATH",
        "rpc": rpc, "devices": list(devices),
    }  # fmt: skip
    return {"engines": [found, {"backend": "ollama", "found": False, "next": "get it"}], "recipes": []}


ANSWERS: dict[str, dict[str, Any]] = {
    "doctor": {"findings": [], "ok": False},
    "engines-list": listed("CUDA0"),
    "engines-install": {"name": "llama-cpp", "path": "/bin/llama-server"},
    "synth": {"path": "m.gguf", "size_bytes": 7},
    "find": FOUND,
    "curve": CURVE,
    "calibrate": CALIBRATED,
    **dict.fromkeys(("stock", "depth", "unlimited", "forced"), a_run()),
}
RUNS = ("find", "curve", "stock", "depth", "unlimited", "forced")


def inspected(expert_layers: int = 45) -> dict[str, Any]:
    """What this project's own command says of a model has many fields, and these two are read."""
    return {"blocks": 48, "expert_layers": expert_layers}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_answered_here_keeps_to_the_schemas(name: str) -> None:
    validator = Draft202012Validator(schema("run.output" if name in RUNS else f"{name}.output"))
    assert [error.message for error in validator.iter_errors(ANSWERS[name])] == []


def test_the_fields_that_are_read_without_an_answer_here_are_in_the_schemas() -> None:
    assert set(inspected()) <= set(schema("inspect.output")["required"])
    assert Draft202012Validator(schema("run")).is_valid(json.loads(SEARCHED.read_text("utf-8")))


# ── a place to run it ───────────────────────────────────────────────────────────────────────


class Bench:
    """A folder with the pretended command, what it answers, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.notes, self.out = folder / "notes", folder / "out"
        self.notes.mkdir()
        (self.notes / "fake.py").write_text(FAKE)
        (self.notes / "run.json").write_bytes(SEARCHED.read_bytes())
        for name, answer in {**ANSWERS, "inspect": inspected()}.items():
            self.answer(name, answer)
        self.command = shlex.join([sys.executable, str(self.notes / "fake.py")])
        self.environment = {**os.environ, "NOTES": str(self.notes)}

    def answer(self, name: str, document: object) -> None:
        (self.notes / f"{name}.json").write_text(json.dumps(document))

    def note(self, name: str) -> None:
        (self.notes / name).touch()

    def begin(self, name: str) -> None:
        """A run of this step that was not ended."""
        folder = self.out / FOLDERS[name]
        folder.mkdir(parents=True)
        (folder / "run.json").write_bytes(SEARCHED.read_bytes())

    def words(self, *more: str) -> list[str]:
        return [str(self.out), "--llamaduel", self.command, *more]

    @contextlib.contextmanager
    def start(self, *more: str) -> Iterator[subprocess.Popen[str]]:
        argv = [sys.executable, str(SCRIPT), *self.words(*more)]
        with subprocess.Popen(
            argv, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise

    def run(self, *more: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        with self.start(*more) as process:
            output, errors = process.communicate(timeout=120)
            return process.returncode, output, errors

    def asked(self) -> list[list[str]]:
        """What the command was asked since it was last looked at, without the paths."""
        log = self.notes / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [[word.replace(f"{self.out}/", "") for word in json.loads(line)] for line in lines]

    def wait_for(self, name: str, process: subprocess.Popen[str]) -> None:
        while not (self.notes / name).exists():
            assert process.poll() is None, process.stderr
            time.sleep(0.01)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; what it does to signals is undone."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    signs = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(sign) for sign in signs]
    yield importlib.import_module("gpu_proof")
    for sign, handler in zip(signs, before, strict=True):
        signal.signal(sign, handler)


MODEL = "qwen3-30b-a3b.gguf"
FOLDERS = {name: f"{name}/2026-01-01-m" for name in RUNS}
LIMIT = ["--vram-limit", "12GiB"]


# ── the steps ───────────────────────────────────────────────────────────────────────────────


def test_the_usual_steps_run_in_their_order_each_by_one_command(bench: Bench) -> None:
    code, _, errors = bench.run("--budget", "9min", "--no-wait", "--", "--context", "512")

    beside = "ollama,llama-cpp,llama-cpp@ngl=99,llama-cpp@cpu-moe"
    curve = "llama-cpp@ncmoe=15/13/14/16/17/21/29/48"
    more = ["--no-wait", "--context", "512"]
    assert bench.asked() == [
        ["doctor", *LIMIT],
        ["engines", "list"],
        ["synth", MODEL, "--like", "qwen3-30b-a3b"],
        ["inspect", MODEL],
        [
            "find", MODEL, "--arms", f"{beside},llama-cpp@ncmoe=0..48", *LIMIT, "--budget", "9min", "--seed", "48",
            *more, "--out", "find",
        ],
        ["report", FOLDERS["find"]],
        ["inspect", MODEL],
        [
            "run", MODEL, "--arms", curve, *LIMIT, "--budget", "9min", "--seed", "48", *more,
            "--out", "curve",
        ],
        ["calibrate", MODEL, "--arms", "llama-cpp@ngl=99", *more],
        ["calibrate", MODEL, "--arms", "llama-cpp@cpu-moe", *more],
        ["report", FOLDERS["find"]],
        ["report", FOLDERS["curve"]],
    ]  # fmt: skip
    assert code == 0
    assert f"$ {bench.command} doctor --vram-limit 12GiB --json\n" in errors


def test_what_is_done_is_not_done_again(bench: Bench) -> None:
    assert bench.run()[0] == 0
    bench.asked()

    code, table, _ = bench.run()

    assert code == 0
    assert {words[0] for words in bench.asked()} == {"doctor", "engines", "inspect", "report"}
    assert BEST in table


def test_the_steps_that_are_asked_for_run_as_well_and_in_the_same_order(bench: Bench) -> None:
    code, _, _ = bench.run("--steps", "forced,unlimited,depth,stock,find", "--model", "m.gguf")

    runs = [words[words.index("--arms") + 1 : words.index("--seed")] for words in bench.asked() if words[0] == "run"]
    assert runs == [
        ["ollama,llama-cpp", *LIMIT, "--settings", "stock", "--preset", "quick"],
        [f"{BEST},{BEST},ctk=q8_0,ctv=q8_0", *LIMIT, "--depth", "16k", "--preset", "quick"],
        ["ollama,llama-cpp,llama-cpp@cpu-moe", "--preset", "quick"],
        ["ollama,ollama@cpu-moe", *LIMIT, "--preset", "quick"],
    ]
    assert code == 0


def test_a_rehearsal_has_a_stand_in_and_an_engine_that_takes_one(bench: Bench) -> None:
    bench.answer("engines-list", listed(rpc=True))

    code, _, _ = bench.run("--stand-in", "90MiB", "--size", "1GiB", "--steps", "build,model,find,unlimited,calibrate")

    asked = bench.asked()
    (find,) = (words for words in asked if words[0] == "find")
    (unlimited,) = (words for words in asked if words[0] == "run")
    assert code == 0
    assert not any("--vram-limit" in words or "install" in words for words in asked)
    assert find[find.index("--stand-in") + 1] == "90MiB"
    assert unlimited[unlimited.index("--stand-in") + 1] == "--preset", "one as large as the machine"
    assert ["calibrate", "qwen3-30b-a3b-1GiB.gguf", "--arms", "llama-cpp"] in asked


def test_the_cost_of_telemetry_is_told_by_its_own_script(
    bench: Bench, proof: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = bench.notes / "telemetry_cost.py"
    script.write_text("import sys; print('# What watching costs\\n\\n- it costs', *sys.argv[1:])")
    monkeypatch.setattr(proof, "TELEMETRY", script)

    assert proof.main(bench.words("--steps", "telemetry", "--model", "m.gguf", "--no-wait")) == 0

    given = f"--model m.gguf --arms llama-cpp@ngl=99 --blocks 12 --no-wait --out {bench.out}/telemetry"
    assert capsys.readouterr().out.splitlines()[-1] == f"telemetry: it costs {given}"


def test_the_script_of_telemetry_is_there(proof: ModuleType) -> None:
    assert proof.TELEMETRY.is_file()


def test_no_limit_is_no_option(bench: Bench) -> None:
    assert bench.run("--steps", "doctor", "--vram-limit", "none")[0] == 0
    assert bench.asked() == [["doctor"]]


def test_engines_that_are_named_go_to_every_command_and_none_is_built(bench: Bench) -> None:
    bench.answer("engines-list", listed())
    named = ["--llama-server", "/x/llama-server", "--ollama", "attach"]

    assert bench.run("--steps", "doctor,build,model,find,calibrate", *named)[0] == 0

    asked = [words for words in bench.asked() if words[0] in ("doctor", "find", "calibrate", "engines")]
    assert len(asked) == 4
    assert all(named == words[words.index("--llama-server") :][:4] for words in asked)


def test_llama_cpp_is_built_where_none_sees_a_gpu(bench: Bench) -> None:
    bench.answer("engines-list", listed())
    (bench.notes / "engines-list.after").write_text(json.dumps(listed("CUDA0")))

    assert bench.run("--steps", "build")[0] == 0
    assert bench.asked() == [["engines", "list"], ["engines", "install", "llama-cpp"], ["engines", "list"]]


def test_a_build_that_sees_no_gpu_is_no_step_done(bench: Bench) -> None:
    bench.answer("engines-list", listed())

    code, _, errors = bench.run("--steps", "build")

    assert code == 1
    assert "gpu_proof: build is not done: the llama.cpp that was built sees no device" in errors


@pytest.mark.parametrize(
    ("best", "most", "values"),
    [
        (15, 48, [15, 13, 14, 16, 17, 21, 29, 48]),
        (0, 24, [0, 1, 2, 6, 14, 24]),
        (48, 48, [48, 46, 47]),
        (1, 3, [1, 0, 2, 3]),
    ],
)
def test_a_curve_is_fine_around_the_best_and_coarse_beyond(
    proof: ModuleType, best: int, most: int, values: list[int]
) -> None:
    assert proof.around(best, most) == values


@pytest.mark.parametrize(("named", "first"), [("llama-cpp@cpu-moe", "48/46/47"), ("llama-cpp@ngl=99", "0/1/2/6")])
def test_a_best_placement_of_another_name_has_its_number(bench: Bench, named: str, first: str) -> None:
    bench.answer("find", {**FOUND, "best": [named]})

    assert bench.run("--steps", "find,curve", "--model", "m.gguf")[0] == 0

    (curve,) = (words for words in bench.asked() if words[0] == "run")
    assert curve[curve.index("--arms") + 1].startswith(f"llama-cpp@ncmoe={first}")


@pytest.mark.parametrize("best", [["ollama", BEST], ["llama-cpp"], ["ollama", "llama-cpp"]])
def test_an_engine_that_chooses_its_placement_is_no_value_of_the_curve(bench: Bench, best: list[str]) -> None:
    bench.answer("find", {**FOUND, "best": best})

    assert bench.run("--steps", "find,curve", "--model", "m.gguf")[0] == 0

    (curve,) = (words for words in bench.asked() if words[0] == "run")
    assert curve[curve.index("--arms") + 1].startswith("llama-cpp@ncmoe=15/13/")


def test_where_nothing_is_ranked_the_curve_is_around_what_the_search_picked(bench: Bench) -> None:
    bench.answer("find", {**FOUND, "best": [], "state": "SCREENING"})

    assert bench.run("--steps", "find,curve", "--model", "m.gguf")[0] == 0

    (curve,) = (words for words in bench.asked() if words[0] == "run")
    assert curve[curve.index("--arms") + 1].startswith("llama-cpp@ncmoe=15/13/")


@pytest.mark.parametrize("name", ["curve", "depth"])
def test_what_was_measured_around_another_best_value_is_told_and_left_alone(bench: Bench, name: str) -> None:
    words = ("--model", "m.gguf", "--steps", f"find,{name}")
    assert bench.run(*words)[0] == 0
    bench.answer("find", {**FOUND, "best": ["llama-cpp@ncmoe=20"]})
    bench.asked()

    code, table, errors = bench.run(*words)

    outdated = (
        "it was measured around llama-cpp@ncmoe=15, and the best is llama-cpp@ncmoe=20 now; "
        f"to measure it anew, move or remove {bench.out / name}"
    )
    assert code == 1
    assert f"gpu_proof: {name} is not done: {outdated}\n" in errors
    assert not any(asked[0] == "run" for asked in bench.asked())
    told = f"{name}: {outdated}"
    assert told in table.splitlines()
    assert told in bench.run("--model", "m.gguf", "--steps", "find")[1].splitlines(), "whatever is asked for"

    shutil.rmtree(bench.out / name)
    bench.asked()
    assert bench.run(*words)[0] == 0
    (run,) = (asked for asked in bench.asked() if asked[0] == "run")
    assert run[run.index("--arms") + 1].startswith("llama-cpp@ncmoe=20")


@pytest.mark.parametrize("best", [["llama-cpp@ncmoe=16", BEST], []])
def test_a_curve_around_one_of_several_best_values_stays(bench: Bench, best: list[str]) -> None:
    words = ("--model", "m.gguf", "--steps", "find,curve")
    assert bench.run(*words)[0] == 0
    bench.answer("find", {**FOUND, "best": best})

    code, table, _ = bench.run(*words)

    assert code == 0
    assert "measured around" not in table


# ── the time of a step, and Ctrl-C ──────────────────────────────────────────────────────────


def test_a_step_whose_time_is_over_is_ended_kindly_and_continued_later(
    bench: Bench, proof: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOTES", str(bench.notes))
    waiting = bench.notes / "find.waiting"
    clock = SimpleNamespace(monotonic=lambda: 1e9 if waiting.exists() else 0.0, sleep=time.sleep)
    monkeypatch.setattr(proof, "time", clock)
    bench.note("find.waits")
    words = bench.words("--steps", "find", "--model", "m.gguf", "--no-wait")

    code = proof.main(words)
    table, errors = capsys.readouterr()

    assert code == 1
    assert (bench.notes / "interrupted").read_text() == "once\n"
    assert "gpu_proof: find is not done: its time was over; the same command goes on with it" in errors
    assert "find: GREEN, ended early. The best of 46" in table
    waiting.unlink()
    bench.asked()

    assert proof.main(words) == 0
    assert bench.asked() == [
        ["inspect", "m.gguf"],
        ["run", "--resume", FOLDERS["find"], "--no-wait"],
        ["report", FOLDERS["find"]],
    ]
    assert "find: GREEN. The best of 46" in capsys.readouterr().out


def test_a_search_without_a_run_yet_asks_for_more_time(
    bench: Bench, proof: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOTES", str(bench.notes))
    waiting = bench.notes / "find.waiting"
    clock = SimpleNamespace(monotonic=lambda: 1e9 if waiting.exists() else 0.0, sleep=time.sleep)
    monkeypatch.setattr(proof, "time", clock)
    bench.note("find.waits")
    bench.note("searches")

    assert proof.main(bench.words("--steps", "find", "--model", "m.gguf")) == 1

    assert "before there was anything to keep; give it more by --minutes" in capsys.readouterr().err


def test_ctrl_c_ends_the_command_too_and_says_one_sentence(bench: Bench) -> None:
    bench.note("find.waits")
    with bench.start("--steps", "find", "--model", "m.gguf") as process:
        bench.wait_for("find.waiting", process)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)

    assert (process.returncode, output) == (130, "")
    assert (bench.notes / "interrupted").read_text() == "once\n"
    assert errors.splitlines()[-1] == "gpu_proof: stopped; the same command goes on from here"
    assert "Traceback" not in errors


def test_a_run_goes_on_with_the_budget_that_is_given_or_says_that_it_was_begun_with_another(bench: Bench) -> None:
    bench.begin("find")
    bench.begin("stock")

    assert bench.run("--model", "m.gguf", "--steps", "find,stock", "--budget", "20min")[0] == 0

    assert [words for words in bench.asked() if words[0] == "run"] == [
        ["run", "--resume", FOLDERS["find"], "--budget", "20min"],
        ["run", "--resume", FOLDERS["stock"]],
    ]


# ── what can go wrong ───────────────────────────────────────────────────────────────────────


def test_a_step_that_fails_is_named_with_its_reason_and_the_others_go_on(bench: Bench) -> None:
    bench.note("find.fails")

    code, table, errors = bench.run()

    assert code == 1
    said = [line for line in errors.splitlines() if line.startswith("gpu_proof:")]
    log = bench.out / "find/find.log"
    assert said == [
        "gpu_proof: find is not done: llamaduel: the cat sat on it; move the cat (all it said: " + f"{log})",
        "gpu_proof: curve is not done: it needs the best value of `find`, and there is none yet",
    ]
    assert "calibrate: llama-cpp@ngl=99" in table
    assert "the cat sat on it" in log.read_text()


def test_a_doctor_that_finds_trouble_ran_and_one_that_cannot_look_did_not(bench: Bench) -> None:
    bench.note("doctor.fails")
    assert bench.run("--steps", "doctor")[0] == 1
    (bench.notes / "doctor.fails").unlink()
    bench.note("doctor.finds")

    assert bench.run("--steps", "doctor")[0] == 0
    assert json.loads((bench.out / "doctor/doctor.json").read_text()) == ANSWERS["doctor"]


def test_a_failed_step_runs_again(bench: Bench) -> None:
    bench.note("calibrate.fails")
    assert bench.run("--steps", "calibrate", "--model", "m.gguf")[0] == 1
    (bench.notes / "calibrate.fails").unlink()

    assert bench.run("--steps", "calibrate", "--model", "m.gguf")[0] == 0


def test_a_run_that_cannot_go_on_says_what_to_move_away(bench: Bench) -> None:
    bench.begin("find")
    bench.note("find.fails")
    words = ("--model", "m.gguf", "--steps", "find")

    code, _, errors = bench.run(*words)

    assert code == 1
    folder = bench.out / FOLDERS["find"]
    assert errors.splitlines()[-1].endswith(f"; to begin it anew, move or remove {folder})")
    shutil.rmtree(folder)
    (bench.notes / "find.fails").unlink()
    bench.asked()
    assert bench.run(*words)[0] == 0
    assert "find" in {asked[0] for asked in bench.asked()}


def test_an_option_that_doctor_does_not_take_ends_it_there(bench: Bench) -> None:
    bench.note("doctor.refuses")

    code, table, errors = bench.run("--vram-limit", "12GiBB")

    assert (code, table) == (1, "")
    assert errors.splitlines()[-1].startswith("gpu_proof: llamaduel: '12GiBB' is not a size; write it like 12GiB")
    assert bench.asked() == [["doctor", "--vram-limit", "12GiBB"]]


def test_another_python_than_that_of_llamaduel_is_no_python_for_telemetry(bench: Bench) -> None:
    bare = [sys.executable, "-S", str(SCRIPT), *bench.words("--steps", "telemetry", "--model", "m.gguf")]
    environment = {name: value for name, value in bench.environment.items() if name != "PYTHONPATH"}

    done = subprocess.run(bare, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert f"it needs a Python that has llamaduel, and {sys.executable} has not" in done.stderr.splitlines()[-1]


def test_a_model_without_experts_is_no_model_for_this(bench: Bench) -> None:
    bench.answer("inspect", inspected(expert_layers=0))

    code, _, errors = bench.run("--steps", "find", "--model", "dense.gguf")

    assert code == 1
    assert "dense.gguf has no experts to place" in errors


def test_a_command_that_is_not_there_is_named(bench: Bench) -> None:
    argv = [sys.executable, str(SCRIPT), str(bench.out), "--llamaduel", "/nowhere/llamaduel", "--steps", "doctor"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "/nowhere/llamaduel cannot be started (No such file or directory); name another" in done.stderr


def test_a_folder_that_holds_no_experiment_is_a_sentence(bench: Bench) -> None:
    bench.out.mkdir()
    (bench.out / "experiment.json").write_text("{")

    code, _, errors = bench.run("--steps", "doctor")

    assert code == 1
    assert "cannot hold an experiment" in errors
    assert "Traceback" not in errors


def test_a_folder_of_another_experiment_is_left_alone(bench: Bench) -> None:
    assert bench.run("--steps", "model,find")[0] == 0
    bench.asked()

    code, _, errors = bench.run("--steps", "doctor", "--vram-limit", "8GiB")

    assert code == 1
    assert "holds an experiment with other options" in errors
    assert bench.asked() == []


def test_a_folder_in_which_nothing_was_measured_takes_other_options(bench: Bench) -> None:
    bench.note("find.refuses")
    assert bench.run("--steps", "doctor,model,find", "--", "--contxt", "512")[0] == 1
    (bench.notes / "find.refuses").unlink()

    assert bench.run("--steps", "doctor,model,find", "--", "--context", "512")[0] == 0

    held = json.loads((bench.out / "experiment.json").read_text())
    assert held["options"] == ["--context", "512"]


def test_a_full_disk_costs_no_folder_its_experiment(
    bench: Bench, proof: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_nothing(path: Path, *_: object) -> None:
        path.touch()
        os.truncate(path, 0)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("NOTES", str(bench.notes))
    words = bench.words("--steps", "doctor")
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", write_nothing)
        assert proof.main(words) == 1
    assert proof.main(words) == 0, "it became no experiment of nothing"
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", write_nothing)
        assert proof.main(words) == 0, "what stands there is not written again"


@pytest.mark.parametrize(
    "words",
    [
        ("--steps", "find,nothing"),
        ("--minutes", "nothing=3"),
        ("--minutes=find",),
        *(("--minutes", f"find={value}") for value in ("soon", "nan", "inf", "-1", "0")),
    ],
)
def test_an_unknown_step_or_time_is_a_usage_error(bench: Bench, words: tuple[str, ...]) -> None:
    code, _, _ = bench.run(*words)

    assert code == 2
    assert not bench.out.exists()


# ── the table ───────────────────────────────────────────────────────────────────────────────


def test_the_table_tells_what_is_known_and_shows_what_is_not(bench: Bench) -> None:
    _, table, _ = bench.run()

    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table.splitlines()]
    assert lines[1] == ["find:"]
    assert lines[2:7] == [
        [BEST, "OK", "50.00 (49.50–50.50)", "reference", "11.00", "10.00", "12.00", "–"],
        ["ollama", "OK", "25.00 (24.00–26.00)", "0.50 (0.48–0.52) DIFFERENT", "–", "–", "–", "–"],
        ["llama-cpp", "OK", "40.00", "0.80 SCREENING", "–", "–", "–", "–"],
        ["llama-cpp@ngl=99", "DOES_NOT_FIT", "–", "–", "–", "–", "–", "–"],
        ["llama-cpp@cpu-moe", "= llama-cpp@ncmoe=48", "–", "–", "–", "–", "–", "–"],
    ]
    calibrated = (
        "calibrate: llama-cpp@ngl=99: llama-bench 3.000, 3.100 ms a token, the server 3.300, 3.250, "
        "a difference of +0.225 (told apart); timing it adds +0.0030"
    )
    assert table.splitlines()[-6:] == [
        "find: GREEN. The best of 46 placements by ncmoe is llama-cpp@ncmoe=15.",
        "find: best llama-cpp@ncmoe=15; picked llama-cpp@ncmoe=15, llama-cpp@ncmoe=16 by 10 loads",
        "curve: SCREENING. Take it.",
        "curve: ncmoe=16 reads highest, 51.0 tok/s (best: 16)",
        calibrated,
        calibrated,
    ]


@pytest.mark.parametrize("energy", [1.25, between(1.25, 1.2, 1.3)])
def test_energy_is_shown_where_it_is_told(proof: ModuleType, energy: Any) -> None:
    assert proof.row(arm(BEST, energy_j_per_token=energy))[-1].startswith("1.250")


def test_without_a_run_the_table_says_so(bench: Bench) -> None:
    assert bench.run("--steps", "doctor")[:2] == (0, "No run is there.\n")
