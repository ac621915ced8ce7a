"""The llama.cpp adapter: its words, its search, and what real and fake servers make of it."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import importlib.util
import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from backends import embedded_server, llama_cpp, llama_failure, ollama, stand_in
from backends.llama_cpp import LlamaCpp, LlamaSession, arguments
from backends.llama_http import GREEDY, read_line
from harness import model as models
from harness import process, synth
from harness.arms import apply_knobs
from harness.contract import Arm, Chunk, Engine, ModelFile, Placement, Prompt, Realised, Settings, Usage
from harness.errors import Crashed, DoesNotFit, EngineFailed, TimedOut, Unavailable, UsageError
from harness.measure import measure
from harness.testing import engines
from harness.testing.conformance import Conformance, Subject, our_processes
from harness.testing.script import Script

MIB = 1024 * 1024
NOTHING = Settings(context=None, batch=None, ubatch=None, flash_attention=None, kv_k=None, kv_v=None)
ALWAYS = "-np 1 --no-webui --offline"
MODEL = Path("model.gguf")
HAS_WHEEL = importlib.util.find_spec("xllamacpp") is not None


def words(placement: str, settings: Settings = NOTHING, **more: Any) -> str:
    """The command line of one placement without what stands on every one."""
    arm = LlamaCpp().parse("llama-cpp" + (f"@{placement}" if placement else ""))
    argv, _ = arguments(MODEL, arm.placement, settings, **more)
    return shlex.join(argv).replace(ALWAYS, "…")


# ── words ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("placement", "argv"),
    [
        ("", "-m model.gguf …"),
        ("auto", "-m model.gguf …"),
        ("ngl=20", "-m model.gguf -fit off -ngl 20 …"),
        ("cpu-moe", "-m model.gguf -fit off -ngl 999 --cpu-moe …"),
        ("ncmoe=0", "-m model.gguf -fit off -ngl 999 --n-cpu-moe 0 …"),
        ("ncmoe=16", "-m model.gguf -fit off -ngl 999 --n-cpu-moe 16 …"),
        ("cpu", "-m model.gguf -fit off -ngl 0 --device none …"),
    ],
)
def test_a_placement_is_a_few_words_of_argv(placement: str, argv: str) -> None:
    assert words(placement) == argv


def test_settings_are_passed_where_they_are_set_and_left_out_where_they_are_not() -> None:
    assert words("", Settings(threads=3, load_mode="none", prompt_cache="off")) == (
        "-m model.gguf -c 4096 -b 512 -ub 512 -t 3 -fa on -ctk f16 -ctv f16 --load-mode none … --cache-ram 0"
    )


def test_rpc_stands_before_everything_that_may_name_a_device() -> None:
    settings = dataclasses.replace(NOTHING, rpc=("a:1", "b:2"))
    assert words("cpu", settings) == "--rpc a:1,b:2 -m model.gguf -fit off -ngl 0 --device none …"


def test_the_size_of_a_stand_in_is_told_only_where_fit_decides() -> None:
    assert words("", fit_target_mib=23000) == "-m model.gguf -fitt 23000 …"
    assert "-fitt" not in words("ncmoe=3", fit_target_mib=23000)


CURRENT = frozenset(["-fit", "--load-mode", *ALWAYS.split()])


@pytest.mark.parametrize(
    ("load_mode", "old"),
    [
        ("auto", ""),
        ("mmap", ""),
        ("none", "--no-mmap "),
        ("mlock", "--no-mmap --mlock "),
        ("mmap+mlock", "--mlock "),
        ("dio", "--direct-io "),
    ],
)
def test_an_older_build_gets_its_own_spelling_of_the_load_mode(load_mode: str, old: str) -> None:
    settings = dataclasses.replace(NOTHING, load_mode=load_mode)
    assert words("", settings, flags=CURRENT) == f"-m model.gguf --load-mode {load_mode} …"
    assert words("", settings, flags=CURRENT - {"--load-mode"}) == f"-m model.gguf {old}…"


def test_what_a_build_does_not_take_is_left_out_and_said() -> None:
    flags = CURRENT - {"-fit", "--no-webui"} | {"--no-ui"}
    argv, notes = arguments(MODEL, Placement("ngl", 5), dataclasses.replace(NOTHING, prompt_cache="off"), flags)
    assert shlex.join(argv) == "-m model.gguf -ngl 5 -np 1 --no-ui --offline"
    assert notes == ("this build has no --cache-ram",)


def test_every_knob_reaches_the_command_line() -> None:
    arm = LlamaCpp().parse("llama-cpp@ngl=1,c=8192,b=64,ub=32,t=2,fa=off,ctk=q8_0,ctv=q4_0,lm=mmap,rpc=h:1+i:2")
    argv, _ = arguments(MODEL, arm.placement, apply_knobs(arm, NOTHING))
    assert shlex.join(argv).replace(ALWAYS, "…") == (
        "--rpc h:1,i:2 -m model.gguf -fit off -ngl 1 -c 8192 -b 64 -ub 32 -t 2 -fa off -ctk q8_0 -ctv q4_0 "
        "--load-mode mmap …"
    )


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("llama-cpp@cpumoe", "cpu-moe"),
        ("llama-cpp,gpu=1", "no knob 'gpu'"),
        ("llama-cpp,rpc=somewhere", "host:port"),
        ("llama-cpp,rpc=a:1+b", "host:port"),
    ],
)
def test_a_word_that_is_not_known_is_a_usage_error_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        LlamaCpp().parse(text)


# ── lines ───────────────────────────────────────────────────────────────────────────────────

FINAL = {
    "content": "",
    "stop": True,
    "stop_type": "limit",
    "tokens_predicted": 8,
    "tokens_evaluated": 10,
    "truncated": False,
    "timings": {"cache_n": 2, "prompt_n": 8, "prompt_ms": 16.0, "predicted_n": 8, "predicted_ms": 35.0},
}


def data(**event: Any) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n"


@pytest.mark.parametrize("line", [b"", b"\n", b"\r\n", b": ping\n", b"data: [DONE]\n"])
def test_a_line_that_carries_nothing_is_skipped(line: bytes) -> None:
    assert read_line(line) is None


def test_text_is_a_chunk_with_the_tokens_so_far() -> None:
    assert read_line(data(content=" naïve", stop=False, tokens_predicted=3)) == Chunk(" naïve", 3)


def test_a_piece_of_a_letter_and_a_progress_event_are_no_text() -> None:
    assert read_line(data(content="", stop=False, tokens_predicted=3)) is None
    assert read_line(data(content="", tokens=[0], stop=False, prompt_progress={"total": 9})) is None


def test_the_last_object_gives_counts_and_seconds_as_they_are() -> None:
    assert read_line(data(**FINAL)) == Usage(
        prompt_tokens=10,
        cached_tokens=2,
        generated_tokens=8,
        prefill_s=0.016,
        decode_s=0.035,
        stop="length",
    )


def test_what_the_last_object_does_not_say_is_unknown() -> None:
    assert read_line(data(stop=True, tokens_predicted=8)) == Usage(generated_tokens=8)


@pytest.mark.parametrize(("stop_type", "stop"), [("eos", "stop"), ("word", "stop"), ("none", "none")])
def test_the_reason_for_the_end_is_in_common_words(stop_type: str, stop: str) -> None:
    usage = read_line(data(**FINAL | {"stop_type": stop_type, "truncated": True}))
    assert isinstance(usage, Usage)
    assert (usage.stop, usage.truncated) == (stop, True)


@pytest.mark.parametrize(
    "line",
    [
        data(error={"code": 500, "message": "context is full", "type": "server_error"}),
        b'error: {"code": 500, "message": "context is full"}\n',
        b'{"error": {"code": 400, "message": "context is full"}}\n',
        data(error="context is full"),
    ],
)
def test_an_error_object_is_a_failure_in_the_words_of_the_engine(line: bytes) -> None:
    with pytest.raises(EngineFailed, match="context is full"):
        read_line(line)


@pytest.mark.parametrize("line", [b"<html>\n", b"data: [1, 2]\n", b"data: {\n"])
def test_what_is_not_the_dialect_is_a_failure(line: bytes) -> None:
    with pytest.raises(EngineFailed, match="no JSON object"):
        read_line(line)


# ── the search ──────────────────────────────────────────────────────────────────────────────


def program(path: Path, version: str = "version: 11434 (abc)", flags: str = "--rpc SERVERS", code: int = 0) -> Path:
    """Something that answers --version, --help and --list-devices."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"#!/bin/sh\n[ {code} -ne 0 ] && echo 'error: broken' >&2 && exit {code}\n"
        f"case $1 in --version) echo '{version}';; --help) echo '{flags}';; "
        "--list-devices) printf 'Available devices:\\n  CUDA0: A card (12282 MiB, 11017 MiB free)\\n';; esac\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No llama-server in PATH, an empty cache, no wheel; the folder that is PATH."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    return folder


def cached(monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    from backends.install import LlamaCppRecipe

    monkeypatch.setattr(LlamaCppRecipe, "installed", lambda self: path)
    return path


def test_nothing_found_says_how_to_get_it(bare: Path) -> None:
    with pytest.raises(Unavailable, match="llamaduel engines install llama-cpp"):
        LlamaCpp().find({})


def test_a_given_path_comes_before_path_before_cache_before_wheel(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if HAS_WHEEL:
        monkeypatch.delitem(sys.modules, "xllamacpp")
        assert LlamaCpp().find({}).origin == "embedded"
    cached(monkeypatch, program(tmp_path / "cached" / "llama-server"))
    assert LlamaCpp().find({}).origin == "cache"
    program(bare / "llama-server")
    assert LlamaCpp().find({}).origin == "PATH"
    own = program(tmp_path / "own" / "llama-server")
    assert LlamaCpp().find({"llama-server": str(own)}) == Engine(
        product="llama.cpp",
        version="b11434",
        path=own,
        origin="option",
        devices=LlamaCpp().find({}).devices,
        rpc=True,
    )


@pytest.mark.parametrize("inside", ["llama-server", "bin/llama-server", "build/bin/llama-server"])
def test_a_folder_may_be_given(bare: Path, tmp_path: Path, inside: str) -> None:
    path = program(tmp_path / "folder" / inside)
    assert LlamaCpp().find({"llama-server": str(tmp_path / "folder")}).path == path


def test_a_given_path_without_a_server_is_said_and_not_replaced(bare: Path, tmp_path: Path) -> None:
    program(bare / "llama-server")
    with pytest.raises(Unavailable, match="no llama-server at"):
        LlamaCpp().find({"llama-server": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("version: 0.6.0-dev (build 11434, commit abc)", "b11434"),
        ("version: 9453 (abc)", "b9453"),
        ("version: 0.6.0-dev (build 0, commit unknown)", "of unknown build"),
        ("version: 0 (unknown)", "of unknown build"),
        ("something else", "of unknown build"),
    ],
)
def test_a_build_is_named_as_it_names_itself(bare: Path, said: str, version: str) -> None:
    program(bare / "llama-server", version=said)
    assert LlamaCpp().find({}).version == version


def test_a_build_that_does_not_know_its_number_is_named_for_our_folder(bare: Path, tmp_path: Path) -> None:
    path = program(tmp_path / "llama-cpp-b11434-cpu" / "llama-server", version="version: 0 (unknown)")
    assert LlamaCpp().find({"llama-server": str(path)}).version == "b11434"


def test_devices_and_rpc_are_read_from_the_binary(bare: Path) -> None:
    program(bare / "llama-server", flags="-ngl N")
    engine = LlamaCpp().find({})
    assert [(device.name, device.total_bytes) for device in engine.devices] == [("CUDA0", 12282 * MIB)]
    assert not engine.rpc


def test_a_binary_is_asked_again_only_when_it_has_changed(bare: Path) -> None:
    path = program(bare / "llama-server")
    assert LlamaCpp().find({}).version == "b11434"
    program(path, version="version: 11500 (abc)", flags="--rpc SERVERS, changed")
    assert LlamaCpp().find({}).version == "b11500"


def test_a_binary_that_does_not_run_is_named_with_its_reason(bare: Path) -> None:
    program(bare / "llama-server", code=1)
    with pytest.raises(Unavailable, match=r"llama-server does not run: broken; .*--llama-server"):
        LlamaCpp().find({})


def test_a_binary_for_another_cpu_is_named_as_that(bare: Path) -> None:
    path = bare / "llama-server"
    path.write_text("#!/bin/sh\nkill -ILL $$\n")
    path.chmod(0o755)
    with pytest.raises(Unavailable, match="built for another CPU"):
        LlamaCpp().find({})


def test_a_stand_in_takes_the_first_engine_that_can_do_rpc(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = program(bare / "llama-server", flags="-ngl N")
    assert LlamaCpp().find({"stand-in": "1"}).path == without, "it is all there is"
    able = cached(monkeypatch, program(tmp_path / "cached" / "llama-server"))
    assert LlamaCpp().find({"stand-in": "1"}).path == without, "the RPC server of the other is not beside it"
    program(able.with_name("ggml-rpc-server"))
    assert LlamaCpp().find({"stand-in": "1"}).path == able
    assert LlamaCpp().find({}).path == bare / "llama-server"


def test_the_command_can_be_pasted_and_holds_no_key_and_no_port(bare: Path) -> None:
    program(bare / "llama-server", flags="-m\n-fit\n--load-mode\n-np\n--cache-ram\n--keep\n--offline")
    backend = LlamaCpp()
    backend.find({})
    file = ModelFile(Path("/with space/m.gguf"), (), "", 0, "", "")
    line = backend.command(backend.parse("llama-cpp@ncmoe=3"), file, NOTHING)
    assert line == ("llama-server -m '/with space/m.gguf' -fit off -ngl 999 --n-cpu-moe 3 -np 1 --offline")


def test_the_command_for_a_stand_in_starts_it_first(bare: Path) -> None:
    file = ModelFile(Path("m.gguf"), (), "", 0, "", "")
    line = LlamaCpp().command(Arm("llama-cpp"), file, dataclasses.replace(NOTHING, stand_in_bytes=4 << 30))
    left = (psutil.virtual_memory().total - (4 << 30)) // MIB
    device, _, server = line.partition("; sleep 1; ")
    assert device == """(set -m; ggml-rpc-server -t 1 & trap "kill $!" EXIT"""
    assert server.startswith(f"llama-server --rpc 127.0.0.1:50052 -m m.gguf -fitt {left} ")


# ── servers ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> models.Model:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return models.load(synth.write(path, synth.scaled(synth.SHAPES["tiny"], 24 << 20)))


@contextlib.contextmanager
def opened(hints: Mapping[str, str], file: ModelFile, arm: str, log: Path, **settings: Any) -> Iterator[LlamaSession]:
    backend = LlamaCpp()
    engine, parsed = backend.find(hints), backend.parse(arm)
    asked = apply_knobs(parsed, Settings(context=1024, threads=1, load_mode="none", **settings))
    with backend.open(engine, file, parsed, asked, log) as session:
        yield session


def stream(session: LlamaSession, prompt: str, max_tokens: int) -> Iterator[Chunk | Usage]:
    request = session.request(Prompt("p", prompt), max_tokens)
    at = urlsplit(request.url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
    try:
        connection.request("POST", at.path, request.body, dict(request.headers))
        for line in connection.getresponse():
            if (item := session.read(line)) is not None:
                yield item
    finally:
        connection.close()


OUT_OF_MEMORY = "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache"


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[engines.Engines]:
    with engines.fake(tmp_path) as found:
        yield found


def play(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    for name, value in script.environment().items():
        monkeypatch.setenv(name, value)


class TestFake(Conformance):
    """The whole contract against the fake llama-server."""

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, model: models.Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
        with engines.fake(tmp_path_factory.mktemp("fake")) as found:
            arms = ("llama-cpp@cpu", "llama-cpp", "llama-cpp@ncmoe=3,ub=64")
            missing = {"llama-server": str(found.folder / "nowhere")}
            yield Subject(backend=LlamaCpp(), model=model.file, arms=arms, missing=missing)


def test_a_request_asks_for_greedy_text_that_nothing_else_decides(
    fakes: engines.Engines, model: models.Model, tmp_path: Path
) -> None:
    with opened({}, model.file, "llama-cpp", tmp_path / "log") as session:
        request = session.request(Prompt("p", "some text"), 7)
    body = json.loads(request.body)
    assert body["prompt"] == "some text"
    assert (body["n_predict"], body["stream"], body["cache_prompt"]) == (7, True, False)
    assert "ignore_eos" not in body
    assert GREEDY.items() <= body.items()


def test_the_key_is_in_no_command_line(fakes: engines.Engines, model: models.Model, tmp_path: Path) -> None:
    with opened({}, model.file, "llama-cpp", tmp_path / "log") as session:
        key = session.request(Prompt("p", ""), 1).headers["Authorization"].removeprefix("Bearer ")
        argv = session.realised().argv
    assert len(key) >= 32
    assert key not in " ".join(argv)


def test_the_argv_is_that_of_the_process_and_effective_settings_are_read_back(
    fakes: engines.Engines, model: models.Model, tmp_path: Path
) -> None:
    with opened({}, model.file, "llama-cpp@ncmoe=3,ub=64,ctk=q8_0", tmp_path / "log") as session:
        realised = session.realised()
    assert "--n-cpu-moe 3" in " ".join(realised.argv)
    assert realised.settings["ubatch"] == "64"
    assert realised.settings["kv_k"] == "q8_0"
    assert realised.settings["context"] == "1024"
    assert realised.settings["slots"] == "1"
    assert realised.reported["settings_from"]["context"] == "/props"
    assert realised.reported["settings_from"]["ubatch"] == "log"
    assert realised.weights == model.file.path
    assert realised.load_s is not None


def test_a_log_that_lags_behind_is_waited_for(bare: Path, model: models.Model, tmp_path: Path) -> None:
    found = engines.install(tmp_path / "engines")
    late = bare / "llama-server"
    late.write_text(
        f'#!/bin/bash\nfor word; do [ $word = -m ] && exec {found.llama_server} "$@" 2> >(sleep 1; exec cat >&2)\n'
        f'done; exec {found.llama_server} "$@"\n'
    )
    late.chmod(0o755)
    with opened({}, model.file, "llama-cpp@cpu", tmp_path / "log") as session:
        assert session.realised().buffers


def test_what_cannot_be_read_back_is_said(
    fakes: engines.Engines, model: models.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "OURS", ("-lv", "3", "--host", "127.0.0.1"))
    with opened({}, model.file, "llama-cpp@cpu", tmp_path / "log") as session:
        realised = session.realised()
    assert realised.buffers is None
    assert "the log has no buffer lines, so the placement is unknown" in realised.notes
    assert any(note.startswith("not read back: batch, ubatch") for note in realised.notes)


def test_a_taken_port_is_tried_again_on_another(
    fakes: engines.Engines, model: models.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [int(taken.getsockname()[1]), process.free_port()]
        monkeypatch.setattr(process, "free_port", lambda: ports.pop(0))
        with opened({}, model.file, "llama-cpp", tmp_path / "log") as session:
            assert [item for item in stream(session, "the", 2) if isinstance(item, Usage)]
            assert session.realised().settings["slots"] == "1"  # the failed start before it does not disturb
    assert not ports


def test_another_server_that_answers_on_the_port_is_not_taken_for_ours(
    fakes: engines.Engines, model: models.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened({}, model.file, "llama-cpp", tmp_path / "first") as first:
        ports = [first._server.port, process.free_port()]
        monkeypatch.setattr(process, "free_port", lambda: ports.pop(0))
        with opened({}, model.file, "llama-cpp", tmp_path / "second") as second:
            assert second._server.port != first._server.port


def test_a_start_that_lost_its_port_does_not_explain_the_next_one(
    fakes: engines.Engines, model: models.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, Script(dies_loading=OUT_OF_MEMORY))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [int(taken.getsockname()[1]), process.free_port()]
        monkeypatch.setattr(process, "free_port", lambda: ports.pop(0))
        with pytest.raises(DoesNotFit), opened({}, model.file, "llama-cpp", tmp_path / "log"):
            pass


def test_three_taken_ports_are_a_failure(
    fakes: engines.Engines, model: models.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(process, "free_port", lambda: int(taken.getsockname()[1]))
        with pytest.raises(Crashed, match="no free port"), opened({}, model.file, "llama-cpp", tmp_path / "log"):
            pass


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        (Script(dies_loading=OUT_OF_MEMORY), DoesNotFit, "KV cache while loading.*smaller context"),
        (Script(dies_loading="unknown model architecture: 'new'"), Crashed, "newer llama.cpp.*'new'"),
        (
            Script(dies_loading="a new trouble: failed"),
            Crashed,
            "ended while loading: exited with code 1.*failed",
        ),
        (Script(dies_loading="", exit_code=-signal.SIGILL), Crashed, "built for another CPU"),
        (Script(dies_loading="", exit_code=-signal.SIGSEGV), Crashed, "SIGSEGV"),
        (Script(dies_loading="", exit_code=-signal.SIGKILL), Crashed, "SIGKILL"),
    ],
)
def test_death_while_loading_is_a_failure_with_its_reason(
    fakes: engines.Engines,
    model: models.Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: Script,
    error: type[EngineFailed],
    words: str,
) -> None:
    play(monkeypatch, script)
    with pytest.raises(error, match=words) as caught, opened({}, model.file, "llama-cpp", tmp_path / "log"):
        pass
    assert type(caught.value) is error


def test_a_kill_that_the_system_counts_as_for_memory_is_a_result(
    fakes: engines.Engines, model: models.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, Script(dies_loading="", exit_code=-signal.SIGKILL))
    kills = iter((3, 4))
    monkeypatch.setattr(llama_failure, "kills_for_memory", lambda: next(kills))
    with (
        pytest.raises(DoesNotFit, match=r"host memory while loading.*lack of memory"),
        opened({}, model.file, "llama-cpp", tmp_path / "log"),
    ):
        pass


GROWS = (
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 512.00 MiB on device 0: cudaMalloc failed: out of memory",
    "ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 536870912",
    "process_ubatch: failed to allocate graph",
    "srv  Compute error. off = 0, n_batch = 512, ret = -2",
)
ABORTS = (
    "CUDA error: out of memory",
    "  current device: 0, in function alloc at ggml-cuda.cu:583",
    "  cuMemCreate(&handle, reserve_size, &prop, 0)",
)


def generate(session: LlamaSession, prompt: str) -> None:
    """A request, and what the harness makes of an engine that has ended."""
    measure(session, Prompt("p", prompt), 12)
    deadline = time.monotonic() + 30
    while not (death := session.death()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    raise Crashed(death)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            Script(dies_after=5, exit_code=-signal.SIGABRT, last_words=ABORTS),
            r"compute buffers while generating on CUDA0 \(CUDA error: out of memory\); take a smaller ub",
        ),
        (
            Script(http_error=500, fails_above=2, last_words=GROWS),
            r"compute buffers while generating: 512 MiB asked of CUDA0 \(failed to allocate graph\)",
        ),
    ],
    ids=["it aborts", "it lives on"],
)
def test_memory_that_runs_out_in_a_request_is_a_result_too(
    fakes: engines.Engines,
    model: models.Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: Script,
    words: str,
) -> None:
    play(monkeypatch, script)
    with pytest.raises(DoesNotFit, match=words), opened({}, model.file, "llama-cpp", tmp_path / "log") as session:
        generate(session, "the quick brown fox")


def test_memory_that_runs_out_for_the_first_token_is_a_result_too(
    fakes: engines.Engines, model: models.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, Script(http_error=500, last_words=GROWS))
    with (
        pytest.raises(DoesNotFit, match="compute buffers while answering: 512 MiB asked of CUDA0"),
        opened({}, model.file, "llama-cpp", tmp_path / "log"),
    ):
        pass


def test_a_request_that_fails_for_another_reason_ends_no_engine(
    fakes: engines.Engines, model: models.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, Script(http_error=500, fails_above=2, last_words=("srv  a new trouble: it failed",)))
    with opened({}, model.file, "llama-cpp", tmp_path / "log") as session:
        assert "HTTP 500" in str(measure(session, Prompt("p", "the quick brown fox"), 12).fault)
        assert session.death() is None


def test_an_engine_that_ends_for_another_reason_is_no_result(
    fakes: engines.Engines, model: models.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, Script(dies_after=5, exit_code=-signal.SIGSEGV))
    with (
        pytest.raises(Crashed, match=r"ended while generating: .*SIGSEGV"),
        opened({}, model.file, "llama-cpp", tmp_path / "log") as session,
    ):
        generate(session, "the quick brown fox")


def test_a_load_without_end_is_given_up_and_leaves_nothing(
    fakes: engines.Engines, model: models.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, Script(hangs_loading=True))
    monkeypatch.setattr(llama_cpp, "LOAD_S", -1.0)
    with pytest.raises(TimedOut, match="not loaded within"), opened({}, model.file, "llama-cpp", tmp_path / "log"):
        pass
    assert not our_processes()


def test_a_build_with_rpc_but_no_rpc_server_says_how_to_get_one(bare: Path) -> None:
    program(bare / "llama-server")
    with pytest.raises(Unavailable, match=r"no ggml-rpc-server beside it; run `llamaduel engines install llama-cpp`"):
        LlamaCpp().find({"stand-in": "1"})


def test_an_engine_without_rpc_takes_no_hosts(bare: Path, model: models.Model, tmp_path: Path) -> None:
    program(bare / "llama-server", flags="-ngl N")
    with (
        pytest.raises(Unavailable, match="no RPC"),
        opened({}, model.file, "llama-cpp,rpc=127.0.0.1:1", tmp_path / "log"),
    ):
        pass


def test_an_engine_without_rpc_is_told_of_no_stand_in(bare: Path) -> None:
    program(bare / "llama-server", flags="-m\n-ngl N")
    backend = LlamaCpp()
    backend.find({"stand-in": "1"})
    file = ModelFile(Path("m.gguf"), (), "", 0, "", "")
    line = backend.command(Arm("llama-cpp"), file, dataclasses.replace(NOTHING, stand_in_bytes=4 << 30))
    assert line == "llama-server -m m.gguf"


def test_ollama_takes_no_runner_without_rpc_for_a_stand_in(bare: Path) -> None:
    program(bare / "llama-server", flags="-ngl N")
    with pytest.raises(Unavailable, match=r"b11434 has no RPC; run `llamaduel engines install llama-cpp`"):
        ollama._other_runner({"stand-in": "1"})
    assert ollama._other_runner({}).path == bare / "llama-server"


@pytest.mark.engine
def test_an_engine_without_rpc_runs_without_the_stand_in_and_says_so(model: models.Model, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the embedded engine is an optional extra")
    with opened(EMBEDDED, model.file, "llama-cpp@ngl=99", tmp_path / "log", stand_in_bytes=1 << 30) as session:
        realised = session.realised()
    assert realised.buffers is not None
    assert all(buffer.on_host for buffer in realised.buffers)
    assert llama_cpp.NO_RPC in realised.notes
    assert "--rpc" not in realised.argv


# ── real engines ────────────────────────────────────────────────────────────────────────────

HUGE = 2 * psutil.virtual_memory().total // 6144  # tokens; one takes 6 KiB in the model here
EMBEDDED = {"llama-server": embedded_server.__file__}


def full() -> dict[str, str]:
    """Hints for a full build: named by LLAMADUEL_LLAMA_SERVER, in PATH, or in our cache."""
    named = os.environ.get("LLAMADUEL_LLAMA_SERVER")
    hints = {"llama-server": named} if named else {}
    try:
        engine = LlamaCpp().find(hints | {"stand-in": "1"})
    except Unavailable as error:
        pytest.skip(f"needs a full llama.cpp with RPC: {error}")
    if not engine.rpc:
        pytest.skip(f"needs a full llama.cpp with RPC, and {engine} has none")
    return {"llama-server": str(engine.path)}


@pytest.fixture(params=["embedded", "full"])
def real(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.param == "full":
        return full()
    pytest.importorskip("xllamacpp", reason="the embedded engine is an optional extra")
    return EMBEDDED


NOWHERE = {"llama-server": "/no/such/folder"}


@pytest.mark.engine
class TestEmbedded(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, model: models.Model) -> Subject:
        pytest.importorskip("xllamacpp", reason="the embedded engine is an optional extra")
        arms = ("llama-cpp@cpu", "llama-cpp")
        return Subject(backend=LlamaCpp(), model=model.file, arms=arms, missing=NOWHERE, hints=EMBEDDED)


@pytest.mark.engine
class TestFull(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, model: models.Model) -> Subject:
        arms = ("llama-cpp@cpu", "llama-cpp")
        return Subject(backend=LlamaCpp(), model=model.file, arms=arms, missing=NOWHERE, hints=full())


@pytest.mark.engine
class TestStandIn(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, model: models.Model) -> Subject:
        return Subject(
            backend=LlamaCpp(),
            model=model.file,
            arms=("llama-cpp@ncmoe=3",),
            missing=NOWHERE | {"stand-in": "1"},
            hints=full() | {"stand-in": "1"},
            settings=Settings(
                context=1024, threads=1, flash_attention="off", load_mode="none", stand_in_bytes=64 * MIB
            ),
        )


def bytes_of(realised: Realised, kind: str, *, on_host: bool) -> int:
    assert realised.buffers is not None
    return sum(buffer.bytes for buffer in realised.buffers if buffer.kind == kind and buffer.on_host is on_host)


def near(expected: int, lines: int = 2) -> Any:
    """The log says MiB to two places; tensors are padded by a few bytes."""
    return pytest.approx(expected, abs=lines * 0.01 * MIB)


def answer(session: LlamaSession, model: models.Model, tokens: int) -> tuple[str, str]:
    """(what came, what a correct engine writes)."""
    assert model.answer_key is not None
    first, last = model.answer_key.word(7), model.answer_key.word(8)
    text = "".join(item.text for item in stream(session, f"{first} {last}", tokens) if isinstance(item, Chunk))
    return text, model.answer_key.continuation(last, tokens)


@pytest.mark.engine
@pytest.mark.parametrize("placement", ["", "@cpu", "@cpu-moe", "@ncmoe=5", "@ngl=4"])
def test_without_a_device_every_placement_is_the_same_and_the_answer_right(
    real: dict[str, str], model: models.Model, tmp_path: Path, placement: str
) -> None:
    with opened(real, model.file, f"llama-cpp{placement}", tmp_path / "log") as session:
        came, right = answer(session, model, 24)
        realised = session.realised()
    assert came == right
    assert bytes_of(realised, "weights", on_host=True) == near(model.weights_bytes)
    assert bytes_of(realised, "weights", on_host=False) == 0
    asked = {"batch": "512", "ubatch": "512", "threads": "1", "flash_attention": "on", "kv_k": "f16", "kv_v": "f16"}
    assert (asked | {"context": "1024", "slots": "1", "load_mode": "none"}).items() <= realised.settings.items()
    assert not realised.notes


@pytest.mark.engine
@pytest.mark.parametrize(
    ("arm", "first_experts_on_host", "last_layers_on_device"),
    [
        ("llama-cpp@ngl=99", 0, 99),
        ("llama-cpp@cpu-moe", 99, 99),
        ("llama-cpp@ncmoe=0", 0, 99),
        ("llama-cpp@ncmoe=1", 1, 99),
        ("llama-cpp@ncmoe=3", 3, 99),
        ("llama-cpp@ncmoe=48", 48, 99),
        ("llama-cpp@ngl=3", 0, 2),  # the head is the third
        ("llama-cpp@cpu", 99, 0),
    ],
)
def test_on_a_stand_in_device_every_tensor_is_where_the_placement_says(
    model: models.Model, tmp_path: Path, arm: str, first_experts_on_host: int, last_layers_on_device: int
) -> None:
    layers_on_host = range(model.layers - last_layers_on_device)
    hosted = sum(
        tensor.bytes
        for tensor in model.tensors
        if tensor.name.startswith("token_embd")
        or tensor.block in layers_on_host
        or (tensor.routed and tensor.block is not None and tensor.block < first_experts_on_host)
        or (arm.endswith("@cpu") and tensor.block is None)
    )
    hints = full() | {"stand-in": "1"}
    with opened(hints, model.file, arm, tmp_path / "log", flash_attention="off", stand_in_bytes=1 << 30) as session:
        came, right = answer(session, model, 8)
        realised = session.realised()
    assert came == right
    assert bytes_of(realised, "weights", on_host=True) == near(hosted)
    assert bytes_of(realised, "weights", on_host=False) == near(model.weights_bytes - hosted)
    kv = list(model.memory_bytes(1024) or ())
    on_host = sum(kv[layer] for layer in layers_on_host)
    assert bytes_of(realised, "kv", on_host=True) == near(on_host)
    assert bytes_of(realised, "kv", on_host=False) == near(sum(kv) - on_host)


@pytest.mark.engine
def test_on_a_small_stand_in_device_fit_splits_the_experts(model: models.Model, tmp_path: Path) -> None:
    experts = sum(tensor.bytes for tensor in model.tensors if tensor.routed)
    hints = full() | {"stand-in": "1"}

    def on(size_bytes: int) -> contextlib.AbstractContextManager[LlamaSession]:
        log = tmp_path / f"{size_bytes}.log"
        return opened(hints, model.file, "llama-cpp", log, flash_attention="off", stand_in_bytes=size_bytes)

    with on(1 << 30) as session:
        whole = session.realised()
    used = sum(buffer.bytes for buffer in whole.buffers or () if not buffer.on_host)
    small = used - experts // 2
    with on(small) as session:
        came, right = answer(session, model, 8)
        split = session.realised()
    assert came == right
    moved = bytes_of(split, "weights", on_host=True) - bytes_of(whole, "weights", on_host=True)
    assert experts // 3 < moved < experts
    assert sum(buffer.bytes for buffer in split.buffers or () if not buffer.on_host) <= small + MIB
    assert any("in host memory" in note for note in split.notes)


@pytest.mark.engine
def test_recurrent_layers_are_read_back_as_state(tmp_path: Path) -> None:
    shape = synth.scaled(synth.SHAPES["qwen3.5-35b-a3b"], 60 << 20)
    hybrid = models.load(synth.write(tmp_path / "hybrid.gguf", shape))
    hints = full() | {"stand-in": "1"}
    more = {"flash_attention": "off", "stand_in_bytes": 1 << 30}
    with opened(hints, hybrid.file, "llama-cpp@cpu-moe", tmp_path / "log", **more) as session:
        realised = session.realised()
    assert bytes_of(realised, "rs", on_host=False) > 0
    sizes = hybrid.memory_bytes(1024)
    assert sizes is not None
    device = bytes_of(realised, "rs", on_host=False) + bytes_of(realised, "kv", on_host=False)
    assert device == near(sum(sizes))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("change", "arm", "error", "words"),
    [
        ("cut", "llama-cpp", Crashed, "cut off or damaged"),
        ("header", "llama-cpp", Crashed, "cut off or damaged"),
        ("magic", "llama-cpp", Crashed, "no GGUF model"),
        ("architecture", "llama-cpp", Crashed, "does not know the model's architecture.*qwen9moe"),
        ("", "llama-cpp@cpu,ctv=q8_0,fa=off", Crashed, "needs flash attention; add fa=on"),
        ("", f"llama-cpp@cpu,c={HUGE}", DoesNotFit, "KV cache.*smaller context"),
    ],
)
def test_a_load_that_cannot_work_fails_with_its_own_sentence(
    real: dict[str, str],
    model: models.Model,
    tmp_path: Path,
    change: str,
    arm: str,
    error: type[EngineFailed],
    words: str,
) -> None:
    whole = model.file.path.read_bytes()
    changed = {
        "": whole,
        "cut": whole[: len(whole) // 2],
        "header": whole[:2000],
        "magic": b"what" + whole[4:],
        "architecture": whole.replace(b"qwen3moe", b"qwen9moe"),
    }[change]
    path = tmp_path / "changed.gguf"
    path.write_bytes(changed)
    file = dataclasses.replace(model.file, path=path, shards=(path,), size_bytes=len(changed))
    with pytest.raises(error, match=words) as caught, opened(real, file, arm, tmp_path / "log"):
        pass
    assert type(caught.value) is error


@pytest.mark.engine
def test_a_server_with_more_slots_than_one_is_refused(
    real: dict[str, str], model: models.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "ALWAYS", ((("-np",), "2"),))
    with pytest.raises(EngineFailed, match="2 slots, not 1"), opened(real, model.file, "llama-cpp", tmp_path / "log"):
        pass


@pytest.mark.engine
def test_a_server_that_is_killed_in_mid_stream_leaves_a_cause(
    real: dict[str, str], model: models.Model, tmp_path: Path
) -> None:
    with opened(real, model.file, "llama-cpp@cpu", tmp_path / "log") as session:
        server = session.realised().pids[0]
        assert session.death() is None
        with contextlib.suppress(OSError, http.client.HTTPException):
            for item in stream(session, "the", 900):
                assert not isinstance(item, Usage)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server, signal.SIGKILL)
        death = session.death()
    assert death is not None
    assert "SIGKILL" in death


@pytest.mark.engine
def test_closing_with_a_request_in_flight_takes_about_a_second(
    real: dict[str, str], model: models.Model, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(opened(real, model.file, "llama-cpp@cpu", tmp_path / "log"))
        answers = stream(session, "the", 900)
        assert isinstance(next(answers), Chunk)
        began = time.monotonic()
        stack.close()
        took_s = time.monotonic() - began
    with contextlib.suppress(OSError, http.client.HTTPException):
        list(answers)
    assert took_s < 10  # by itself it takes 30 s, or for ever
    assert not our_processes()


@pytest.mark.engine
def test_a_prompt_is_counted_as_it_will_be_evaluated(real: dict[str, str], model: models.Model, tmp_path: Path) -> None:
    assert model.answer_key is not None
    prompt = " ".join(model.answer_key.word(index) for index in range(20))
    with opened(real, model.file, "llama-cpp@cpu", tmp_path / "log") as session:
        counted = session.count_tokens(prompt)
        usage = [item for item in stream(session, prompt, 2) if isinstance(item, Usage)]
    assert usage[0].prompt_tokens == counted
    assert usage[0].cached_tokens == 0


@pytest.mark.engine
def test_the_stand_in_of_a_full_build_is_beside_it() -> None:
    assert stand_in.program(Path(full()["llama-server"]))
