"""The wheel behind llama-server's flags: what it takes and refuses, and that it always ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends import embedded_server
from backends.embedded_server import Refused, read_arguments
from harness import model, process, synth

LAUNCHER = (sys.executable, "-P", embedded_server.__file__)
EXPERTS = embedded_server.EXPERTS
LIMIT_S = 60.0  # for what takes a second on a quiet machine


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCHER, *argv], env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def last(argv: Sequence[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """The value that wins for each attribute."""
    return dict(read_arguments(argv, environment or {}))


# ── flags, without the wheel ────────────────────────────────────────────────────────────────


def test_an_unknown_flag_is_refused_in_the_words_of_llama_server() -> None:
    done = run("--no-such-flag")
    assert (done.returncode, done.stderr) == (1, "error: invalid argument: --no-such-flag\n")


@pytest.mark.parametrize("argv", [("--rpc", "127.0.0.1:50052"), ("--device", "CUDA0"), ("-dev", "CUDA0")])
def test_what_the_wheel_cannot_do_is_refused_with_the_next_step(argv: tuple[str, ...]) -> None:
    with pytest.raises(Refused, match="full build"):
        read_arguments(argv, {})


def test_rpc_by_variable_is_refused_too() -> None:
    with pytest.raises(Refused, match="LLAMA_ARG_RPC"):
        read_arguments((), {"LLAMA_ARG_RPC": "127.0.0.1:50052"})


def test_device_none_keeps_every_layer_on_the_cpu() -> None:
    assert last(["--device", "none"]) == {"!device": "none"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-c", "many"], "invalid value: many"),
        (["--flash-attn", "perhaps"], "invalid value: perhaps"),
        (["--fit", "perhaps"], "invalid value: perhaps"),
        (["-m"], "expected value"),
        (["--chat-template-file", "/no/such/file"], "invalid value: /no/such/file"),
    ],
)
def test_a_bad_value_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(Refused, match=words):
        read_arguments(argv, {})


def test_logging_flags_that_mean_nothing_here_are_taken() -> None:
    assert set(last(["--no-log-prefix", "--no-log-timestamps", "--log-colors", "off"])) == {""}


def test_the_last_of_two_equal_flags_wins_and_a_flag_wins_over_its_variable() -> None:
    assert last(["-c", "1024", "--ctx-size", "2048"])["n_ctx"] == 2048
    assert last(["-c", "1024"], {"LLAMA_ARG_CTX_SIZE": "4096"})["n_ctx"] == 1024
    assert last([], {"LLAMA_ARG_CTX_SIZE": "4096"})["n_ctx"] == 4096


def test_underscores_in_long_flags_are_dashes() -> None:
    assert last(["--ctx_size", "512"])["n_ctx"] == 512


@pytest.mark.parametrize("flag", ["--warmup", "--jinja", "--slots", "--context-shift", "--kv-unified"])
def test_every_switch_has_its_opposite(flag: str) -> None:
    ((attribute, value),) = read_arguments([flag], {})
    ((negated, opposite),) = read_arguments([f"--no-{flag[2:]}"], {})
    assert (negated, opposite) == (attribute, not value)


def test_expert_placement_is_a_union_of_flags_and_variables() -> None:
    wanted = read_arguments(["-ncmoe", "1", "-ot", "a=CPU,b=CPU"], {"LLAMA_ARG_N_CPU_MOE": "2"})
    assert [value for attribute, value in wanted if attribute == "!override"] == [
        [rf"blk\.0{EXPERTS}=CPU", rf"blk\.1{EXPERTS}=CPU"],
        [rf"blk\.0{EXPERTS}=CPU"],
        ["a=CPU", "b=CPU"],
    ]


@pytest.mark.parametrize(("text", "moved"), [("1", True), ("on", True), ("0", False), ("false", False)])
def test_the_variable_that_keeps_all_experts_on_the_cpu_can_be_off(text: str, moved: bool) -> None:
    assert (last([], {"LLAMA_ARG_CPU_MOE": text}) == {"!override": [f"{EXPERTS}=CPU"]}) is moved


def test_help_names_every_flag_that_is_taken_and_none_that_is_not() -> None:
    text = run("--help").stdout
    words = {word.rstrip(",") for line in text.splitlines() if line.startswith("-") for word in line.split()}
    assert {name for name in embedded_server.BY_NAME if name != "--rpc"} <= words
    assert "--rpc" not in words


def test_help_and_refusals_do_not_wait_for_heavy_imports() -> None:
    done = subprocess.run(
        [LAUNCHER[0], "-X", "importtime", *LAUNCHER[1:], "--help"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not imported & {"xllamacpp", "harness", "numpy", "psutil", "requests", "argparse", "dataclasses"}


# ── this machine ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ("sse4_2 avx avx2 fma f16c", None),
        ("sse4_2 avx avx2 avx512f fma", "F16C"),
        ("sse4_2 avx", "AVX2, FMA, F16C"),
    ],
)
def test_a_cpu_that_the_wheel_would_crash_on_is_named_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, missing: str | None
) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "here", "6", "1", "x86_64")))
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    reason = embedded_server.cpu_lacks(str(cpuinfo))
    assert (reason is None) is (missing is None)
    assert missing is None or f"no {missing}," in str(reason)


def test_another_architecture_is_not_asked_for_x86_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "here", "6", "1", "aarch64")))
    (tmp_path / "cpuinfo").write_text("flags : none\n")
    assert embedded_server.cpu_lacks(str(tmp_path / "cpuinfo")) is None


def test_a_libgomp_that_another_wheel_brought_is_found(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "scikit_learn.libs" / "libgomp-abcdef.so.1.0.0"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "site-packages" / "numpy.libs").mkdir()
    folders = [str(tmp_path / "gone"), str(tmp_path / "site-packages")]
    assert list(embedded_server.libgomps(folders)) == [str(library)]


# ── the wheel ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def wheel() -> Any:
    return pytest.importorskip("xllamacpp", reason="the embedded engine is an optional extra")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("argv", "read", "expected"),
    [
        (["-m", "x.gguf"], lambda p: p.model.path, "x.gguf"),
        (["-a", "x,y"], lambda p: p.model_alias, {"x", "y"}),
        (["--host", "127.0.0.1"], lambda p: p.hostnames, ["127.0.0.1"]),
        (["--port", "1234"], lambda p: p.port, 1234),
        (["--api-key", "k"], lambda p: p.api_keys, ["k"]),
        (["-c", "512", "-b", "64", "-ub", "32"], lambda p: (p.n_ctx, p.n_batch, p.n_ubatch), (512, 64, 32)),
        (["-np", "1"], lambda p: (p.n_parallel, p.kv_unified), (1, False)),
        (["-np", "-1"], lambda p: (p.n_parallel, p.kv_unified), (4, True)),
        ([], lambda p: (p.n_parallel, p.kv_unified), (4, True)),
        (["-t", "3", "-tb", "2"], lambda p: (p.cpuparams.n_threads, p.cpuparams_batch.n_threads), (3, 2)),
        (["-fa", "off"], lambda p: p.flash_attn_type.value, 0),
        (["-fa", "auto"], lambda p: p.flash_attn_type.value, -1),
        (["-ctk", "q8_0", "-ctv", "iq4_nl"], lambda p: (p.cache_type_k.value, p.cache_type_v.value), (8, 20)),
        (["-ngl", "all"], lambda p: p.n_gpu_layers, -2),
        (["-ngl", "7"], lambda p: p.n_gpu_layers, 7),
        (["--device", "none"], lambda p: p.n_gpu_layers, 0),
        (["--cpu-moe"], lambda p: p.tensor_buft_overrides, f"{EXPERTS}=CPU"),
        (["-lm", "mmap+mlock"], lambda p: p.load_mode.value, 3),
        (["-lm", "dio"], lambda p: p.load_mode.value, 4),
        (["-fit", "off"], lambda p: p.fit_params, False),
        (["-fitt", "100,200"], lambda p: list(p.fit_params_target)[:2], [100 << 20, 200 << 20]),
        (["--cache-ram", "0"], lambda p: p.cache_ram_mib, 0),
        (["--context-shift", "--keep", "4"], lambda p: (p.ctx_shift, p.n_keep), (True, 4)),
        (["--no-webui", "--offline"], lambda p: (p.ui, p.offline), (False, True)),
        (["-lv", "4"], lambda p: p.verbosity, 4),
        (["-lv", "4", "--verbose"], lambda p: p.verbosity, 5),
        (["--no-jinja", "--chat-template", "chatml"], lambda p: (p.use_jinja, p.chat_template), (False, "chatml")),
        (["--no-repack"], lambda p: p.no_extra_bufts, True),
        (["--no-warmup"], lambda p: p.warmup, False),
        (["-sm", "none", "-mg", "1"], lambda p: (p.split_mode.value, p.main_gpu), (0, 1)),
        (["--spec-type", "draft-mtp"], lambda p: [kind.value for kind in p.speculative.types], [3]),
        (["--spec-draft-n-max", "5"], lambda p: p.speculative.draft.n_max, 5),
        (["-to", "7"], lambda p: (p.timeout_read, p.timeout_write), (7, 7)),
        (["--metrics", "--no-slots"], lambda p: (p.endpoint_metrics, p.endpoint_slots), (True, False)),
        (["-s", "42"], lambda p: p.sampling.seed, 42),
    ],
)
def test_a_flag_reaches_the_parameter_of_the_wheel(
    wheel: Any, argv: list[str], read: Callable[[Any], object], expected: object
) -> None:
    assert read(embedded_server.parameters(wheel, read_arguments(argv, {}))) == expected


@pytest.mark.engine
def test_every_attribute_that_a_flag_names_exists(wheel: Any) -> None:
    params = wheel.CommonParams()
    for names, _, attribute, _, _ in embedded_server.FLAGS:
        if attribute and not attribute.startswith("!"):
            owner = params
            for part in attribute.lstrip("~").split("."):
                assert hasattr(owner, part), f"{names}: {attribute}"
                owner = getattr(owner, part)


@pytest.mark.engine
def test_an_unknown_type_is_refused_with_the_known_ones(wheel: Any) -> None:
    with pytest.raises(Refused, match="q8_0"):
        embedded_server.parameters(wheel, read_arguments(["-ctk", "q99"], {}))


@pytest.mark.engine
def test_version_names_the_build_and_the_wheel(wheel: Any) -> None:
    whole = embedded_server.wheel_version()
    assert run("--version").stdout == f"version: {whole}\n"
    number, _, rest = whole.partition(" (xllamacpp ")
    assert rest.removesuffix(")").endswith(f".{number}")


@pytest.mark.engine
def test_the_device_list_has_the_form_of_llama_server(wheel: Any) -> None:
    done = run("--list-devices", "--offline", "--verbose")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "Available devices:"
    assert all(line.startswith("  ") for line in done.stdout.splitlines()[1:])


@pytest.mark.engine
def test_without_a_model_it_says_so_after_the_line_that_ollama_looks_for(wheel: Any) -> None:
    done = run("--port", "0", "--host", "127.0.0.1", "--no-webui", "--offline", "--verbose")
    assert done.returncode == 1
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["system_info", "error"]


# ── the process ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def weights(wheel: Any, tmp_path_factory: pytest.TempPathFactory) -> model.Model:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return model.load(synth.write(path, synth.scaled(synth.SHAPES["tiny"], 24 << 20)))


def argv_for(weights: model.Model, port: int) -> list[str]:
    fixed = "-c 2048 -np 1 -b 256 -ub 256 -t 1 --load-mode none -lv 4 --no-webui --offline --cache-ram 0"
    return [*LAUNCHER, "-m", str(weights.file.path), "--port", str(port), *fixed.split()]


@contextmanager
def served(weights: model.Model, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = process.free_port()
    with log.open("wb") as sink, subprocess.Popen(argv_for(weights, port), stderr=sink) as server:
        try:
            until(lambda: healthy(port), server)
            yield server, port
        finally:
            server.kill()


def until(condition: Callable[[], bool], server: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert server is None or server.poll() is None, f"it ended with {server.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def ask(port: int, **body: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    connection.request("POST", "/completion", json.dumps({"temperature": 0, **body}))
    return connection


@pytest.mark.engine
def test_it_completes_the_known_answer(weights: model.Model, tmp_path: Path) -> None:
    assert weights.answer_key is not None
    word = weights.answer_key.word(5)
    with served(weights, tmp_path / "log") as (_, port):
        connection = ask(port, prompt=f"{weights.answer_key.word(4)} {word}", n_predict=12)
        answer = json.load(connection.getresponse())
        connection.close()
    assert answer["content"] == weights.answer_key.continuation(word, 12)


@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_cleanly(weights: model.Model, tmp_path: Path, number: signal.Signals) -> None:
    with served(weights, tmp_path / "log") as (server, _):
        server.send_signal(number)
        assert server.wait(LIMIT_S) == 0


@pytest.mark.engine
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_in_flight_does_not_keep_it_alive(weights: model.Model, tmp_path: Path, stream: bool) -> None:
    with served(weights, tmp_path / "log") as (server, port):
        connection = ask(port, prompt="a", n_predict=100_000, stream=stream)
        until(lambda: "processing task" in (tmp_path / "log").read_text(errors="replace"), server)
        server.send_signal(signal.SIGTERM)
        assert server.wait(15) in (0, -signal.SIGALRM)  # by itself it takes 30 s, or for ever
        connection.close()


PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stderr=open("log", "wb"))
print(child.pid, flush=True)
child.wait()
"""


@contextmanager
def orphaned(argv: list[str], folder: Path, ready: Callable[[], bool]) -> Iterator[psutil.Process]:
    """The child of a parent that was killed as soon as the child was ready."""
    whole = [sys.executable, "-c", PARENT, *argv]
    with subprocess.Popen(whole, stdout=subprocess.PIPE, cwd=folder, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            until(ready)
            parent.kill()
            yield child
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def gone(child: psutil.Process) -> bool:
    return not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.engine
def test_an_idle_server_ends_with_its_parent(weights: model.Model, tmp_path: Path) -> None:
    port = process.free_port()
    with orphaned(argv_for(weights, port), tmp_path, lambda: healthy(port)) as child:
        until(lambda: gone(child))


@pytest.mark.engine
def test_a_load_that_takes_for_ever_ends_with_its_parent(wheel: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")  # nobody writes, so that reading it never ends
    argv = [*LAUNCHER, "-m", str(tmp_path / "model.gguf"), "--port", str(process.free_port())]
    log = tmp_path / "log"
    with orphaned(argv, tmp_path, lambda: log.exists() and b"loading model" in log.read_bytes()) as child:
        until(lambda: gone(child))


@pytest.mark.engine
def test_it_outlives_the_thread_that_started_it(weights: model.Model, tmp_path: Path) -> None:
    port = process.free_port()
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        with (tmp_path / "log").open("wb") as sink:
            started.append(subprocess.Popen(argv_for(weights, port), stderr=sink))
        until(lambda: healthy(port), started[0])

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with started[0] as server:
        try:
            connection = ask(port, prompt="a", n_predict=200)
            assert json.load(connection.getresponse())["tokens_predicted"] == 200
            connection.close()
            assert server.poll() is None
        finally:
            server.kill()


@pytest.mark.engine
def test_a_model_that_cannot_be_loaded_is_exit_code_1(wheel: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"this is no model")
    done = run("-m", str(tmp_path / "bad.gguf"), "--port", str(process.free_port()))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.engine
def test_it_takes_the_command_line_of_ollama(weights: model.Model, tmp_path: Path) -> None:
    """As Ollama 0.32.15 writes it, with everything that options can add."""
    port = process.free_port()
    text = (
        f"--port {port} --host 127.0.0.1 --no-webui --offline -c 2048 -np 1 --log-verbosity 4 --no-log-prefix "
        "--no-log-timestamps --no-jinja --chat-template chatml --load-mode none --cache-type-k q8_0 "
        "--cache-type-v q8_0 --flash-attn on -b 256 -ub 256 -ngl 5 -t 1 --context-shift --keep 4"
    )
    argv = [*LAUNCHER, "--model", str(weights.file.path), *shlex.split(text)]
    with (tmp_path / "log").open("wb") as sink, subprocess.Popen(argv, stderr=sink) as server:
        try:
            until(lambda: healthy(port), server)
        finally:
            server.kill()
    assert "K (q8_0)" in (tmp_path / "log").read_text(errors="replace")
