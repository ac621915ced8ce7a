"""What a person types, gets wrong, and reads: one sentence, an exit code, no traceback."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import cli, machine, synth
from harness.cli import main
from harness.testing import engines
from harness.testing.script import Script

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Type a command in an empty folder; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:9")

    def type_(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return type_


def write_second_shard(path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "qwen3moe")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("run", "missing.gguf"), 1, "missing.gguf"),
        (("run", "text.gguf"), 1, "not a GGUF"),
        (("run", "empty.gguf"), 1, "empty"),
        (("run", "pointer.gguf"), 1, "git lfs pull"),
        (("run", "cut.gguf"), 1, "download"),
        (("run", "part-00002-of-00002.gguf"), 1, "part-00001-of-00002.gguf"),
        (("run", "models"), 1, "0 models"),
        (("run", "good.gguf", "--arms", "olama"), 2, "did you mean 'ollama'?"),
        (("run", "good.gguf", "--arms", "llama-cpp@cpumoe"), 2, "did you mean 'cpu-moe'?"),
        (("run", "good.gguf", "--arms", "llama-cpp,ubb=4"), 2, "did you mean 'ub'?"),
        (("run", "good.gguf", "--arms", "ollama@cpu-moe,ub=512,fit=1"), 2, "ollama has no knob 'fit'"),
        (("run", "good.gguf", "--reference", "llama-cp"), 2, "did you mean 'llama-cpp'?"),
        (("run", "good.gguf", "--stand-in=huge"), 2, "is not a size"),
        (("run", "good.gguf", "--ollama", "attach", "--arms", "ollama"), 1, "127.0.0.1:9"),
        (("run", "ollama:nosuchmodel"), 1, "nosuchmodel"),
        (("run", "hollow.gguf"), 1, "has no weights"),
        (("verify", "models"), 1, "holds no run"),
        (("compare", "models", "models"), 1, "holds no run"),
        (("report", "models"), 1, "holds no run"),
        (("run", "--resume", "models"), 1, "holds no run"),
        (("inspect", "text.gguf"), 1, "not a GGUF"),
        (("engines", "install", "lama-cpp"), 2, "did you mean 'llama-cpp'?"),
        (("synth", "out.gguf", "--like", "qwen3-30b"), 2, "did you mean 'qwen3-30b-a3b'?"),
        (("runn",), 2, "no command 'runn'; did you mean 'run'?"),
        (("good.gguf",), 2, "is a model and no command; type llamaduel run good.gguf"),
        (("run", "good.gguf", "--presett", "quick"), 2, "did you mean '--preset'? see llamaduel run --help"),
        (("engines", "list", "--jsn"), 2, "did you mean '--json'? see llamaduel engines list --help"),
        (("engines", "instal"), 2, "no action 'instal'; did you mean 'install'?"),
        (("run", "good.gguf", "cut.gguf"), 2, "'cut.gguf' is one argument too many; see llamaduel run --help"),
        (("--json", "plan"), 2, "options come after the command: llamaduel plan --json"),
        (("--preset", "quick", "run"), 2, "options come after the command: llamaduel run --preset"),
        (("inspect",), 2, "MODEL is missing; see llamaduel inspect --help"),
        (("compare",), 2, "RUN, RUN are missing"),
        ((), 2, "llamaduel --help"),
    ],
)
def test_bad_input_is_one_sentence(
    typed: Typed, model: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, sentence: str
) -> None:
    good = model.read_bytes()
    (tmp_path / "good.gguf").write_bytes(good)
    (tmp_path / "cut.gguf").write_bytes(good[: len(good) // 2])
    (tmp_path / "text.gguf").write_text("once upon a time")
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "pointer.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    write_second_shard(tmp_path / "part-00002-of-00002.gguf")
    synth.synthesize(tmp_path / "hollow.gguf", size="24MiB", header_only=True)
    (tmp_path / "models").mkdir()

    with engines.fake(tmp_path / "fakes", Script(itl_s=0.001)):
        got, out, err = typed(*arguments)

    assert got == code, err
    assert sentence in last_line(err), err
    assert "Traceback" not in err
    assert out == ""


def test_an_engine_that_dies_on_load_is_told_with_its_own_words(typed: Typed, model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script(dies_loading="unknown model architecture: 'qwen9'")):
        code, _, err = typed("run", str(model), "--arms", "llama-cpp")

    assert code == 1
    assert "unknown model architecture: 'qwen9'" in last_line(err)


def test_an_arm_that_exceeds_the_memory_is_refused_before_it_is_loaded(
    typed: Typed, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    small = dataclasses.replace(machine.read(), memory_bytes=16 << 20)
    monkeypatch.setattr(machine, "read", lambda: small)
    with engines.fake(tmp_path, Script()):
        code, _, err = typed("run", str(model), "--arms", "llama-cpp")

    assert code == 1
    assert "of host memory and this machine has 16.0 MiB; take a smaller model" in last_line(err)


def test_engines_are_listed_as_a_run_would_find_them(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines.fake(tmp_path, Script()) as fakes:
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.setenv("LLAMADUEL_LLAMA_SERVER", str(fakes.llama_server))
        _, out, _ = typed("engines", "list", "--json")

    found = {each["backend"]: each for each in json.loads(out)["engines"]}
    assert found["llama-cpp"]["path"] == str(fakes.llama_server)
    assert found["llama-cpp"]["from"] == "option"


def test_a_run_in_json_is_one_document_and_its_progress_is_on_stderr(typed: Typed, model: Path, tmp_path: Path) -> None:
    with engines.fake(tmp_path, Script(itl_s=0.002)):
        short = ("--preset", "quick", "--out-tokens", "16", "--prompt-tokens", "64", "--context", "512", "--no-wait")
        code, out, err = typed("run", str(model), "--arms", "llama-cpp", *short, "--json")
        found = json.loads(out)
        again = json.loads(typed("report", found["run_dir"], "--json")[1])
        verified = typed("verify", found["run_dir"])

    assert code == 0
    assert "block 1" in err
    assert again == found
    assert verified[0] == 0
    assert {"run_dir", "state", "answer", "arms"} <= found.keys()
    assert {
        "arm", "status", "reason", "weights_digest", "output_ok", "decode_tps", "prefill_tps", "ttft_s", "load_s",
        "vram_bytes", "predicted_device_bytes", "realised_device_bytes", "ratio", "verdict", "samples",
        "invalid_samples",
    } <= found["arms"][0].keys()  # fmt: skip
    assert found["arms"][0]["vram_bytes"] is None, "unknown is null, never 0"


def test_plan_merges_placements_before_anything_is_loaded(typed: Typed, model: Path, tmp_path: Path) -> None:
    gpu = Script(devices=(("CUDA0", "a card", 8000),), dies_loading="loaded")
    with engines.fake(tmp_path, gpu):
        code, out, _ = typed("plan", str(model), "--arms", "llama-cpp@ncmoe=999,llama-cpp@cpu-moe", "--json")

    found = json.loads(out)
    assert code == 0
    assert [arm["alias_of"] for arm in found["arms"]] == [None, "llama-cpp@ncmoe=999"]


def test_inspect_names_layers_and_experts(typed: Typed, model: Path) -> None:
    code, out, _ = typed("inspect", str(model), "--json")

    found = json.loads(out)
    assert code == 0
    assert found["experts_used"] < found["experts"]
    assert found["expert_layers"] == found["layers"]
    assert found["placements"][-1]["words"] == "all experts on the CPU"


def test_help_names_every_command_once_under_what_it_is_for(typed: Typed) -> None:
    code, out, _ = typed("--help")

    (listed,) = (each for each in cli._parser()._actions if isinstance(each, argparse._SubParsersAction))
    named = re.findall(r"^  ([a-z]+)  +\w", out, re.MULTILINE)
    assert code == 0
    assert sorted(named) == sorted(listed.choices)
    assert "\nmore:" not in out, "a command without a group"
    assert out.index("start here:") < out.index("  run ") < out.index("measure:")


def test_without_a_command_one_is_told_what_to_type_first(typed: Typed) -> None:
    _, _, err = typed()

    assert re.search(r"llamaduel doctor .*\n.*llamaduel run ", err)


def test_help_needs_no_heavy_library() -> None:
    code = (
        "import sys\n"
        "from harness.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'scipy', 'requests', 'ollama', 'pydantic', 'gguf', 'psutil'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
