"""Ollama as an adapter: what it is told, what its lines and its log mean, and that nothing of it stays.

Most tests run against a fake Ollama, which is a real process; those marked `engine` need a real one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from backends import embedded_server, llama_failure, ollama_daemon, ollama_session, ollama_store
from backends.ollama import Ollama, read_devices
from backends.ollama_session import OllamaSession
from harness import model, process, synth
from harness.arms import apply_knobs
from harness.contract import Buffer, Device, Engine, ModelFile, Prompt, Request, Settings
from harness.errors import Crashed, DoesNotFit, EngineFailed, ModelError, TimedOut, Unavailable, UsageError
from harness.measure import measure
from harness.testing import engines
from harness.testing.conformance import PATIENCE, SETTINGS, our_processes
from harness.testing.engines import Engines
from harness.testing.script import Script

DATA = Path(__file__).parent / "data"
MODEL = ModelFile(Path("/models/a b.gguf"), (Path("/models/a b.gguf"),), "qwen3moe", 10**9, "5" * 64, "digest")
LIMIT_S = 60.0  # for what takes a second on a quiet machine
SERVE = "ollama serve > ollama.log 2>&1 & server=$!; sleep 2 && kill -0 $server &&"
NOTHING = Settings(context=None, batch=None, ubatch=None, flash_attention=None, kv_k=None, kv_v=None)


def await_that(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.02)


def sessions() -> list[Path]:
    """Private folders that are left."""
    return sorted((process.cache_dir() / "sessions").glob("*"))


# ── arms ────────────────────────────────────────────────────────────────────────────────────


def test_one_batch_size_sets_both_of_the_harness() -> None:
    settings = apply_knobs(Ollama().parse("ollama,b=1024"), Settings())
    assert (settings.batch, settings.ubatch) == (1024, 1024)
    assert (
        Ollama().parse("ollama,ub=1024") == Ollama().parse("ollama,b=1024") == Ollama().parse("ollama,ub=1024,b=1024")
    )


def test_one_kv_type_sets_both_halves() -> None:
    settings = apply_knobs(Ollama().parse("ollama,ctv=q8_0"), Settings())
    assert (settings.kv_k, settings.kv_v) == ("q8_0", "q8_0")


@pytest.mark.parametrize("text", ["ollama,b=1024,ub=512", "ollama,ctk=q8_0,ctv=f16"])
def test_two_values_for_what_ollama_has_one_of_are_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"Ollama has one .*; give \w+ or \w+"):
        Ollama().parse(text)


@pytest.mark.parametrize("text", ["ollama,lm=mmap", "ollama,rpc=a:1", "ollama,ngl=3"])
def test_a_knob_that_ollama_does_not_have_names_those_it_has(text: str) -> None:
    with pytest.raises(UsageError, match="known: b, c, ctk, ctv, depth, fa, t, ub"):
        Ollama().parse(text)


def test_an_arm_reads_as_it_was_written() -> None:
    for text in ("ollama", "ollama@ngl=20", "ollama@cpu-moe", "ollama@ncmoe=20", "ollama@cpu", "ollama,c=8192,t=3"):
        assert str(Ollama().parse(text)) == text


# ── names of models ─────────────────────────────────────────────────────────────────────────


def test_a_name_of_ollamas_leads_to_its_weights(
    weights: model.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    ollama_store.link(tmp_path / "store", "mine", weights.file)
    for ref in ("ollama:mine", "ollama:mine:latest", "mine"):
        found = Ollama().resolve(ref)
        assert found is not None
        assert found.samefile(weights.file.path)
    assert Ollama().resolve("mime") is None
    with pytest.raises(ModelError, match="did you mean 'mine:latest'"):
        Ollama().resolve("ollama:mime")


# ── what a person pastes ────────────────────────────────────────────────────────────────────


def command(arm: str, settings: Settings, backend: Ollama | None = None) -> list[str]:
    parsed = Ollama().parse(arm)
    return (backend or Ollama()).command(parsed, MODEL, apply_knobs(parsed, settings)).splitlines()


def test_the_command_serves_creates_runs_and_ends_what_it_started() -> None:
    first, trap, export, serve, create, run = command("ollama@ngl=20", Settings(threads=3, load_mode="none"))
    assert first == '(set -m; server= device=; d=$(mktemp -d "$PWD/duel.XXXXXX") || exit'
    assert trap == """trap 'kill $server $device; wait; rm -r "$d"' EXIT"""
    assert export == 'export OLLAMA_HOST=127.0.0.1:11435 OLLAMA_MODELS="$d/models"'
    assert serve == f"OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=f16 {SERVE}"
    assert shlex.split(create)[2:-7] == [
        "FROM /models/a b.gguf",
        "PARAMETER num_ctx 4096",
        "PARAMETER num_batch 512",
        "PARAMETER num_thread 3",
        "PARAMETER num_gpu 20",
        "PARAMETER use_mmap false",
    ]
    assert create.endswith("| ollama create duel -f /dev/stdin &&")  # what failed is not run, for that would pull
    assert run == "ollama run duel --verbose)"


def test_a_forced_placement_of_experts_is_in_the_environment_of_the_server() -> None:
    assert command("ollama@cpu-moe", NOTHING)[3] == f"LLAMA_ARG_CPU_MOE=1 {SERVE}"
    assert command("ollama@ncmoe=20", NOTHING)[3] == f"LLAMA_ARG_N_CPU_MOE=20 {SERVE}"


def test_a_stand_in_device_is_started_first() -> None:
    settings = dataclasses.replace(NOTHING, stand_in_bytes=psutil.virtual_memory().total - (100 << 20))
    assert command("ollama", settings)[3:5] == [
        "ggml-rpc-server -t 1 > /dev/null 2>&1 & device=$!",
        f"LLAMA_ARG_RPC=127.0.0.1:50052 LLAMA_ARG_FIT_TARGET=100 {SERVE}",
    ]


def test_stock_settings_leave_everything_to_ollama() -> None:
    _, _, _, serve, create, _ = command("ollama", NOTHING)
    assert serve == SERVE
    assert "PARAMETER" not in create


# ── cards that are held to less memory than they have ───────────────────────────────────────


H200 = ("CUDA0", "NVIDIA H200", 143_771)
HELD = dataclasses.replace(NOTHING, device_limit_bytes=12 << 30)
WHY = "the default of Ollama on a card of 12.0 GiB; there is more here, and it is held to that"


@pytest.mark.parametrize(("limit_gib", "context"), [(12, 4096), (24, 32768), (23, 32768), (22, 4096)])
def test_a_card_that_is_held_to_less_gets_the_context_of_a_card_of_that_size(
    limit_gib: int, context: int, tmp_path: Path, weights: model.Model
) -> None:
    settings = dataclasses.replace(NOTHING, device_limit_bytes=limit_gib << 30)
    with engines.fake(tmp_path / "fake", Script(devices=(H200,))):
        backend = Ollama()
        with open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log", settings) as opened:
            sent = json.loads(opened.request(Prompt("p", "x"), 1).body)["options"]
            realised = opened.realised()
    assert sent["num_ctx"] == context
    assert "num_batch" not in sent, "Ollama takes it by the context, and by what is free"
    assert realised.settings["context"] == realised.asked["context"] == str(context)
    assert realised.explained["context"] == WHY.replace("12.0", f"{limit_gib}.0")


def test_a_card_that_is_held_to_nothing_less_is_left_to_ollama(tmp_path: Path, weights: model.Model) -> None:
    with engines.fake(tmp_path / "fake", Script(devices=(H200,))):
        backend = Ollama()
        with open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log", NOTHING) as opened:
            assert "num_ctx" not in json.loads(opened.request(Prompt("p", "x"), 1).body)["options"]
            realised = opened.realised()
    assert realised.settings["context"] == "262144"
    assert "context" not in realised.asked
    assert realised.explained["context"] == "Ollama passes -c 262144 by itself, for 140.4 GiB of card memory"


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        ((H200,), dataclasses.replace(HELD, context=2048)),  # a context was asked for
        ((("CUDA0", "NVIDIA GeForce RTX 4070", 12_281),), dataclasses.replace(HELD, device_limit_bytes=8 << 30)),
        (
            (("CUDA0", "a card", 16_000), ("CUDA1", "a card", 16_000)),
            dataclasses.replace(HELD, device_limit_bytes=24 << 30),
        ),
    ],
    ids=["asked for", "the same anyway", "the same of two cards"],
)
def test_a_limit_that_changes_no_context_is_not_sent(
    devices: tuple[tuple[str, str, int], ...], settings: Settings, tmp_path: Path, weights: model.Model
) -> None:
    with engines.fake(tmp_path / "fake", Script(devices=devices)):
        backend = Ollama()
        with open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log", settings) as opened:
            sent = json.loads(opened.request(Prompt("p", "x"), 1).body)["options"]
            assert sent.get("num_ctx") == settings.context
            assert "context" not in opened.realised().asked


def test_a_context_beyond_what_the_model_was_trained_for_is_cut_and_said_to_be(
    tmp_path: Path, weights: model.Model
) -> None:
    settings = dataclasses.replace(NOTHING, device_limit_bytes=24 << 30)
    with engines.fake(tmp_path / "fake", Script(devices=(H200,), trained_context=8192)):
        backend = Ollama()
        with open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log", settings) as opened:
            realised = opened.realised()
    assert (realised.asked["context"], realised.settings["context"]) == ("32768", "8192")
    assert realised.explained["context"].endswith("; Ollama cuts it to the context that the model was trained for")


def test_the_command_of_a_card_that_is_held_to_less_asks_for_the_same_context_and_says_why(tmp_path: Path) -> None:
    with engines.fake(tmp_path / "fake", Script(devices=(H200,))):
        backend = Ollama()
        backend.find({})
        create = command("ollama", HELD, backend)[4]
        assert shlex.split(create)[2:5] == ["FROM /models/a b.gguf", f"# context: {WHY}", "PARAMETER num_ctx 4096"]
        assert "num_ctx" not in "".join(command("ollama", NOTHING, backend))
    assert "PARAMETER num_ctx 4096" in command("ollama", HELD)[4], "of a card that was not looked at"


def test_the_command_names_the_engine_of_the_run(fakes: Engines, tmp_path: Path) -> None:
    other = engines.install(tmp_path / "an other")
    backend = Ollama()
    backend.find({"ollama": str(other.ollama)})
    settings = dataclasses.replace(NOTHING, stand_in_bytes=1 << 30)
    _, _, _, device, serve, create, run = command("ollama", settings, backend)
    assert device.startswith(f"'{other.folder}/lib/ollama/ggml-rpc-server' -t 1 ")
    assert f" '{other.ollama}' serve > " in serve
    assert f"| '{other.ollama}' create " in create
    assert run == f"'{other.ollama}' run duel --verbose)"
    backend.find({})
    assert command("ollama", NOTHING, backend)[-1] == "ollama run duel --verbose)"
    assert fakes.ollama.exists()


def test_a_runner_that_is_not_its_own_is_laid_out_where_ollama_looks_for_it(tmp_path: Path) -> None:
    with engines.fake(tmp_path / "a fake", runner=False) as found:
        (found.bin / "llama-quantize").touch()
        backend = Ollama()
        backend.find({})
        lines = command("ollama", NOTHING, backend)
        layout = "\n".join(lines[2:4])
        subprocess.run(["sh", "-c", layout], env=os.environ | {"d": str(tmp_path / "d")}, check=True)
    beside = tmp_path / "d" / "lib" / "ollama"
    assert (tmp_path / "d" / "bin" / "ollama").read_bytes() == found.ollama.read_bytes()
    assert (beside / "llama-server").samefile(found.llama_server)
    assert (beside / "llama-quantize").samefile(found.bin / "llama-quantize")
    assert '"$d/bin/ollama" serve ' in lines[5]
    assert lines[-1] == '"$d/bin/ollama" run duel --verbose)'


def test_a_runner_that_cannot_take_a_model_gets_a_comment_instead_of_lines_that_fail(tmp_path: Path) -> None:
    with engines.fake(tmp_path / "fake", runner=False):
        backend = Ollama()
        backend.find({})
        (line,) = command("ollama@ngl=3", NOTHING, backend)
    assert line == (
        "# Nothing to paste: the runner, llama.cpp b11434 (not its own), has no llama-quantize for `ollama create`. "
        "With this run's options, `llamaduel run '/models/a b.gguf' --arms ollama@ngl=3` repeats it."
    )


# ── finding it ──────────────────────────────────────────────────────────────────────────────


def test_devices_are_those_that_ollama_found() -> None:
    log = (
        'level=INFO source=types.go:32 msg="inference compute" id=GPU-6a filter_id="" library=CUDA compute=9.0 '
        'name=CUDA0 description="NVIDIA H200" libdirs=ollama,cuda_v13 driver=13.0 pci_id=0000:01:00.0 '
        'type=discrete total="139.7 GiB" available="12.6 GiB"\n'
    )
    assert read_devices(log) == (Device("CUDA0", "NVIDIA H200", round(139.7 * 2**30), round(12.6 * 2**30)),)


def test_a_machine_without_a_device_has_none() -> None:
    assert read_devices((DATA / "ollama-0.32.15-embedded.log").read_text()) == ()


# ── an Ollama of ours, as a fake ────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> model.Model:
    """A small MoE model with a known answer."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return model.load(synth.write(path, synth.scaled(synth.SHAPES["tiny"], 24 << 20)))


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Engines]:
    with engines.fake(tmp_path / "fake") as found:
        yield found


def open_arm(
    backend: Ollama, engine: Engine, weights: model.Model, arm: str, log: Path, settings: Settings = SETTINGS
) -> contextlib.AbstractContextManager[OllamaSession]:
    parsed = backend.parse(arm)
    return backend.open(engine, weights.file, parsed, apply_knobs(parsed, settings), log)


def test_a_path_that_is_given_wins_over_path(fakes: Engines, tmp_path: Path) -> None:
    other = engines.install(tmp_path / "other")
    for given in (other.ollama, other.bin, other.folder):
        engine = Ollama().find({"ollama": str(given)})
        assert (engine.path, engine.origin) == (other.ollama, "option")
    assert Ollama().find({}).path == fakes.ollama


def test_ollama_with_a_runner_of_its_own_is_started_where_it_lies(
    fakes: Engines, weights: model.Model, tmp_path: Path
) -> None:
    backend = Ollama()
    engine = backend.find({})
    assert (engine.runner, str(engine)) == (None, "Ollama 0.32.15")
    with open_arm(backend, engine, weights, "ollama", tmp_path / "log") as opened:
        assert str(fakes.folder / "lib" / "ollama" / "llama-server") in opened.realised().argv


def test_ollama_without_a_runner_gets_a_build_of_ours_and_says_so(tmp_path: Path, weights: model.Model) -> None:
    with engines.fake(tmp_path / "fake", runner=False) as found:
        backend = Ollama()
        engine = backend.find({})
        assert str(engine) == "Ollama 0.32.15 + runner llama.cpp b11434 (not its own)"
        with open_arm(backend, engine, weights, "ollama", tmp_path / "log") as opened:
            (folder,) = sessions()
            assert (folder / "lib" / "ollama" / "llama-server").samefile(found.llama_server)
            assert (folder / "bin" / "ollama").samefile(found.ollama)
            assert str(folder / "lib" / "ollama" / "llama-server") in opened.realised().argv
        assert sessions() == []


def test_without_any_llama_server_ollama_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engines.fake(tmp_path / "fake", runner=False) as found:
        with pytest.raises(Unavailable, match="no llama-server that can be used"):
            Ollama().find({"llama-server": str(tmp_path / "nowhere")})
        assert found.ollama.exists()


def test_a_stand_in_device_needs_a_runner_with_rpc(tmp_path: Path) -> None:
    with (
        engines.fake(tmp_path / "fake", rpc=False),
        pytest.raises(Unavailable, match="`llamaduel engines install llama-cpp`"),
    ):
        Ollama().find({"stand-in": "1"})


def test_settings_and_placement_reach_the_runner(fakes: Engines, weights: model.Model, tmp_path: Path) -> None:
    backend = Ollama()
    settings = Settings(threads=1, load_mode="none")
    engine = backend.find({})
    with open_arm(backend, engine, weights, "ollama@ngl=3,c=2048,b=256,ctk=q8_0", tmp_path / "log", settings) as opened:
        realised = opened.realised()
    words = shlex.join(realised.argv)
    for flags in ("-c 2048", "-b 256 -ub 256", "-ngl 3", "-t 1", "--flash-attn on", "--load-mode none"):
        assert flags in words
    assert "--cache-type-k q8_0 --cache-type-v q8_0" in words
    assert realised.settings["context"] == "2048"


def test_stock_settings_are_not_sent(fakes: Engines, weights: model.Model, tmp_path: Path) -> None:
    backend = Ollama()
    with open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log", NOTHING) as opened:
        assert (
            json.loads(opened.request(Prompt("p", "x"), 1).body)["options"]
            .keys()
            .isdisjoint({"num_ctx", "num_batch", "num_thread", "num_gpu", "use_mmap"})
        )
        assert {"-t", "-ngl", "--cache-type-k"}.isdisjoint(opened.realised().argv)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ubatch": 256}, "one batch size"),
        ({"kv_v": "q8_0"}, "one KV cache type"),
        ({"load_mode": "dio"}, "cannot load by 'dio'"),
        ({"rpc": ("a:1",)}, "over RPC"),
    ],
)
def test_settings_that_ollama_cannot_have_are_unavailable(
    changes: dict[str, Any], words: str, fakes: Engines, weights: model.Model, tmp_path: Path
) -> None:
    backend = Ollama()
    settings = dataclasses.replace(SETTINGS, **changes)
    with (
        pytest.raises(Unavailable, match=words),
        open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log", settings),
    ):
        pass


def test_a_stand_in_device_is_seen_by_the_runner(fakes: Engines, weights: model.Model, tmp_path: Path) -> None:
    backend = Ollama()
    engine = backend.find({"stand-in": "1"})
    settings = dataclasses.replace(SETTINGS, stand_in_bytes=8 << 20)
    with open_arm(backend, engine, weights, "ollama@cpu-moe", tmp_path / "log", settings) as opened:
        realised = opened.realised()
        assert len(realised.pids) == 3  # the server, its runner, the device
        assert [buffer for buffer in realised.buffers or () if not buffer.on_host]
        assert "not stock: LLAMA_ARG_CPU_MOE=1" in realised.notes
    assert our_processes() == set()


def test_prompt_tokens_from_a_cache_are_told(tmp_path: Path, weights: model.Model) -> None:
    with engines.fake(tmp_path / "fake", Script(cached=2)):
        backend = Ollama()
        with open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log") as opened:
            sample = measure(opened, Prompt("p", "the quick brown fox"), 4)
    assert sample.usage is not None
    assert sample.usage.cached_tokens == 2
    assert sample.invalid == "2 prompt tokens came from a cache"


def test_another_runner_between_two_requests_is_a_failure(fakes: Engines, weights: model.Model, tmp_path: Path) -> None:
    backend = Ollama()
    with open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log") as opened:
        _, runner = opened.realised().pids
        psutil.Process(runner).kill()
        await_that(lambda: is_gone(runner), "the end of the runner")
        sample = measure(opened, Prompt("p", "the quick brown"), 4, timeouts=PATIENCE)
        assert sample.usage is not None  # Ollama started another one and said nothing
        assert "changed its runner" in str(sample.fault)


def test_when_serve_is_killed_its_runner_goes_with_it(fakes: Engines, weights: model.Model, tmp_path: Path) -> None:
    backend = Ollama()
    with open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log") as opened:
        serve, _ = opened.realised().pids
        psutil.Process(serve).kill()
        await_that(opened.death, "its death")
        assert "SIGKILL" in str(opened.death())
    assert our_processes() == set()
    assert sessions() == []


def test_a_runner_that_does_not_fit_is_told_from_one_that_crashes(tmp_path: Path, weights: model.Model) -> None:
    text = "llama_model_load: error loading model: unable to allocate CUDA0 buffer"
    with engines.fake(tmp_path / "fake", Script(dies_loading=text)):
        backend = Ollama()
        with (
            pytest.raises(DoesNotFit, match="unable to allocate CUDA0 buffer"),
            open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log"),
        ):
            pass
    assert our_processes() == set()


GROWS = (
    "ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 536870912",
    "process_ubatch: failed to allocate graph",
)


def die(opened: OllamaSession) -> None:
    """A request, and what the harness makes of an engine that has ended."""
    measure(opened, Prompt("p", "the quick brown fox"), 12, timeouts=PATIENCE)
    await_that(lambda: "out of memory" in str(opened.death()), "its death for lack of memory")
    raise Crashed(str(opened.death()))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            Script(dies_after=5, exit_code=-signal.SIGABRT, last_words=("CUDA error: out of memory",)),
            r"compute buffers while generating \(CUDA error: out of memory\)",
        ),
        (
            Script(http_error=500, fails_above=2, last_words=GROWS),
            "compute buffers while generating: 512 MiB asked of CUDA0",
        ),
    ],
    ids=["it aborts", "it lives on"],
)
def test_memory_that_runs_out_in_a_request_is_a_result_too(
    script: Script, words: str, tmp_path: Path, weights: model.Model
) -> None:
    with engines.fake(tmp_path / "fake", script):
        backend = Ollama()
        with (
            pytest.raises(DoesNotFit, match=words),
            open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log") as opened,
        ):
            die(opened)


def test_a_runner_that_the_system_kills_in_a_request_is_a_result(
    tmp_path: Path, weights: model.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines.fake(tmp_path / "fake", Script(dies_after=5, exit_code=-signal.SIGKILL)):
        backend = Ollama()
        with open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log") as opened:
            measure(opened, Prompt("p", "the quick brown fox"), 12, timeouts=PATIENCE)
            await_that(lambda: "killed" in str(opened.death()).lower(), "its death")
            assert type(opened.cause_of_death()) is Crashed
            monkeypatch.setattr(llama_failure, "kills_for_memory", lambda: sys.maxsize)
            assert type(opened.cause_of_death()) is DoesNotFit


def test_a_load_that_never_ends_is_given_up(
    tmp_path: Path, weights: model.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.ollama.LOAD_S", 1.0)
    with engines.fake(tmp_path / "fake", cases=[{"when": "--model", "hangs_loading": True}]):
        backend = Ollama()
        with (
            pytest.raises(TimedOut, match="did not load the model within"),
            open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log"),
        ):
            pass
    assert our_processes() == set()


def test_an_ollama_that_does_not_start_is_unavailable_with_its_last_words(tmp_path: Path) -> None:
    with (
        engines.fake(tmp_path / "fake", cases=[{"when": "ollama serve", "refuses": "Error: no such thing"}]),
        pytest.raises(Unavailable, match=r"ended while starting: .*\(Error: no such thing\)"),
    ):
        Ollama().find({})


def test_a_port_that_is_taken_meanwhile_is_left_for_another(
    fakes: Engines, weights: model.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Ollama()
    engine = backend.find({})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([int(taken.getsockname()[1]), process.free_port()])
        monkeypatch.setattr(process, "free_port", lambda: next(ports))
        with open_arm(backend, engine, weights, "ollama", tmp_path / "log") as opened:
            assert opened.death() is None
    assert next(ports, None) is None


@pytest.mark.parametrize(("version", "words"), [("0.24.0", "take 0.30 or newer"), ("0.32.5", "take 0.32.6 or newer")])
def test_an_ollama_that_is_too_old_is_unavailable(version: str, words: str, fakes: Engines, tmp_path: Path) -> None:
    old = tmp_path / "old" / "bin" / "ollama"  # without a runner beside it
    old.parent.mkdir(parents=True)
    old.write_text(fakes.ollama.read_text().replace("main(", f"main.__globals__.update(VERSION={version!r}); main("))
    old.chmod(0o755)
    with pytest.raises(Unavailable, match=words):
        Ollama().find({"ollama": str(old)})


# ── private folders ─────────────────────────────────────────────────────────────────────────

HOLD = """
import json, sys
from pathlib import Path
from backends.ollama import Ollama
from harness import model
from harness.contract import Settings
backend = Ollama()
weights, log, hints = model.load(Path(sys.argv[1])).file, Path(sys.argv[2]), json.loads(sys.argv[3])
settings = Settings(context=1024, threads=1, flash_attention="off", load_mode="none")
with backend.open(backend.find(hints), weights, backend.parse("ollama"), settings, log) as session:
    print(*session.realised().pids, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def harness_holding(
    weights: model.Model, log: Path, hints: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Another harness with a loaded model; the pids of its engine."""
    argv = [sys.executable, "-c", HOLD, str(weights.file.path), str(log), json.dumps(dict(hints))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            yield other, [int(pid) for pid in other.stdout.readline().split()]
        finally:
            other.kill()


def is_gone(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_a_killed_harness_leaves_no_engine_and_its_folder_goes_with_the_next_start(
    tmp_path: Path, weights: model.Model
) -> None:
    with engines.fake(tmp_path / "fake", runner=False):
        with harness_holding(weights, tmp_path / "log") as (other, pids):
            assert len(pids) == 2
            (folder,) = sessions()
            Ollama().find({})
            assert sessions() == [folder]  # of a harness that lives
            other.kill()
            other.wait()
        await_that(lambda: all(is_gone(pid) for pid in pids), "the end of its engine")
        assert sessions() == [folder]
        Ollama().find({})
        assert sessions() == []


def test_an_interrupted_harness_leaves_nothing(tmp_path: Path, weights: model.Model) -> None:
    with engines.fake(tmp_path / "fake", runner=False), harness_holding(weights, tmp_path / "log") as (other, pids):
        other.send_signal(signal.SIGINT)
        other.wait(LIMIT_S)
        assert all(is_gone(pid) for pid in pids)
        assert sessions() == []


# ── the daemon of a user ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("", "http://127.0.0.1:11434"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("0.0.0.0:8080", "http://127.0.0.1:8080"),
        (":8080", "http://127.0.0.1:8080"),
        ("localhost:1", "http://localhost:1"),
        ("http://host", "http://host:80"),
        ("https://host/path", "https://host:443"),
        ("host:99/path", "http://host:99"),
        ("::1", "http://[::1]:11434"),
        ("[::]:7", "http://[::1]:7"),
        (" 10.0.0.1 ", "http://10.0.0.1:11434"),
    ],
)
def test_the_host_is_read_as_ollama_reads_it(text: str, url: str) -> None:
    assert ollama_daemon.url_of(text) == url


@pytest.mark.parametrize("text", ["ftp://host", "host:port", "1.2.3.4:99999"])
def test_a_host_that_is_none_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="OLLAMA_HOST"):
        ollama_daemon.url_of(text)


def test_another_machine_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "192.0.2.1")
    with pytest.raises(Unavailable, match="--allow-remote"):
        Ollama().find({"ollama": "attach"})


def test_a_daemon_that_does_not_run_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{process.free_port()}")
    with pytest.raises(Unavailable, match="start it by `ollama serve`"):
        Ollama().find({"ollama": "attach"})


@dataclasses.dataclass(slots=True)
class Daemon:
    """A daemon that somebody runs: what it is asked, and what it has."""

    models: dict[str, dict[str, Any]]  # name → reply of /api/show
    sizes: dict[str, int]
    loaded: set[str] = dataclasses.field(default_factory=set)
    blobs: set[str] = dataclasses.field(default_factory=set)
    asked: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    store: Path = Path("/daemon")

    def reply(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path.startswith("/api/blobs/"):
            digest = path.rpartition("/")[2]
            if method == "HEAD":
                return (200 if digest in self.blobs else 404), {}
            self.blobs.add(digest)
            (self.store / digest.replace(":", "-")).write_bytes(body)
            return 201, {}
        data = json.loads(body or b"{}")
        self.asked.append((path, data))
        name = str(data.get("model"))
        match path:
            case "/api/version":
                return 200, {"version": "0.32.15"}
            case "/api/tags":
                return 200, {
                    "models": [{"model": each, "name": each, "size": self.sizes[each]} for each in self.models]
                }
            case "/api/ps":
                return 200, {
                    "models": [{"name": each, "model": each, "size_vram": 3 << 30} for each in sorted(self.loaded)]
                }
            case "/api/show":
                return 200, self.models[name]
            case "/api/create":
                self.models[name] = {"modelfile": f"FROM {self.store}/sha256-rewritten\n"}
                self.sizes[name] = 1
                return 200, {"status": "success"}
            case "/api/delete":
                return (200 if self.models.pop(name, None) else 404), {}
            case "/api/generate" if data.get("keep_alive") == 0:
                self.loaded.discard(name)
                return 200, {"done": True, "done_reason": "unload"}
            case "/api/generate":
                self.loaded.add(name)
                return 200, {"done": True, "done_reason": "length", "eval_count": 1, "load_duration": 5 * 10**8}
        return 404, {"error": "not found"}


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    store = tmp_path / "blobs"
    store.mkdir()
    state = Daemon({}, {}, store=store)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(self.chunks())
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, data = state.reply(self.command, self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else json.dumps(data).encode() + b"\n")

        def chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        do_GET = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{server.server_port}")
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def attached(
    weights: model.Model, arm: str, log: Path, settings: Settings = SETTINGS, *, allow_remote: bool = False
) -> contextlib.AbstractContextManager[OllamaSession]:
    backend = Ollama()
    engine = backend.find({"ollama": "attach"} | ({"allow-remote": "1"} if allow_remote else {}))
    return open_arm(backend, engine, weights, arm, log, settings)


def has(daemon: Daemon, weights: model.Model, name: str, **more: Any) -> None:
    """Give the daemon a model of exactly these weights."""
    daemon.models[name] = {"modelfile": f"# FROM x\nFROM /store/blobs/sha256-{weights.file.sha256}\n", **more}
    daemon.sizes[name] = weights.file.size_bytes + 100


def test_the_daemons_own_model_is_used_by_its_digest_and_unloaded_afterwards(
    daemon: Daemon, weights: model.Model, tmp_path: Path
) -> None:
    daemon.models["other:latest"] = {"modelfile": "FROM /store/blobs/sha256-" + "0" * 64}
    daemon.sizes["other:latest"] = weights.file.size_bytes
    has(daemon, weights, "mine:latest")
    with attached(weights, "ollama@ngl=3", tmp_path / "log") as opened:
        assert (opened.model, daemon.loaded) == ("mine:latest", {"mine:latest"})
        realised = opened.realised()
    assert daemon.loaded == set()
    assert set(daemon.models) == {"other:latest", "mine:latest"}
    assert realised.buffers is None
    assert realised.weights == Path(f"/store/blobs/sha256-{weights.file.sha256}")
    loads = [body for path, body in daemon.asked if path == "/api/generate"]
    assert loads[0]["options"]["num_gpu"] == 3
    assert loads[0]["keep_alive"] == "10m"


def test_what_was_loaded_before_us_stays_loaded(daemon: Daemon, weights: model.Model, tmp_path: Path) -> None:
    has(daemon, weights, "mine:latest")
    daemon.loaded |= {"mine:latest", "other:latest"}
    with attached(weights, "ollama", tmp_path / "log") as opened:
        assert any("`ollama stop other:latest`" in note for note in opened.realised().notes)
    assert daemon.loaded == {"mine:latest", "other:latest"}


def test_weights_that_the_daemon_does_not_have_are_copied_and_deleted_again(
    daemon: Daemon, weights: model.Model, tmp_path: Path
) -> None:
    with attached(weights, "ollama", tmp_path / "log") as opened:
        assert opened.model == f"llamaduel-{weights.file.sha256[:12]}:latest"
        assert daemon.blobs == {f"sha256:{weights.file.sha256}"}
        assert set(daemon.models) == daemon.loaded == {opened.model}
        assert any("got a copy" in note for note in opened.realised().notes)
    assert (daemon.models, daemon.loaded) == ({}, set())
    assert list(daemon.store.iterdir()) == []


def test_an_upload_that_was_there_before_us_is_not_deleted(
    daemon: Daemon, weights: model.Model, tmp_path: Path
) -> None:
    blob = daemon.store / f"sha256-{weights.file.sha256}"
    blob.write_bytes(b"theirs")
    daemon.blobs.add(f"sha256:{weights.file.sha256}")
    with attached(weights, "ollama", tmp_path / "log"):
        pass
    assert blob.read_bytes() == b"theirs"


@pytest.mark.parametrize("more", ["ADAPTER /store/blobs/sha256-1\n", "FROM /store/blobs/sha256-2\n"])
def test_weights_with_something_on_top_are_not_the_same(
    more: str, daemon: Daemon, weights: model.Model, tmp_path: Path
) -> None:
    has(daemon, weights, "mine:latest")
    daemon.models["mine:latest"]["modelfile"] += more
    with attached(weights, "ollama", tmp_path / "log") as opened:
        assert opened.model != "mine:latest"


def test_a_model_that_runs_elsewhere_is_refused_unless_allowed(
    daemon: Daemon, weights: model.Model, tmp_path: Path
) -> None:
    has(daemon, weights, "mine:latest", remote_host="https://ollama.com:443", remote_model="m")
    with (
        pytest.raises(Unavailable, match=r"runs on https://ollama\.com.*--allow-remote"),
        attached(weights, "ollama", tmp_path / "log"),
    ):
        pass
    with attached(weights, "ollama", tmp_path / "log", allow_remote=True) as opened:
        assert opened.model == "mine:latest"


@pytest.mark.parametrize("call", ["/api/ps", "/api/tags", "/api/create", "/api/blobs/"])
def test_a_daemon_that_breaks_off_is_an_engine_that_failed(
    call: str, daemon: Daemon, weights: model.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = Daemon.reply

    def break_off(self: Daemon, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path.startswith(call) and method != "HEAD":
            raise ConnectionAbortedError  # ends this connection without an answer
        return reply(self, method, path, body)

    monkeypatch.setattr(Daemon, "reply", break_off)
    with (
        pytest.raises(EngineFailed, match=r"the Ollama at http://127.0.0.1:\d+ broke off \(.*; its log says why"),
        attached(weights, "ollama", tmp_path / "log"),
    ):
        pass


@pytest.mark.parametrize("arm", ["ollama@cpu-moe", "ollama@ncmoe=3", "ollama,fa=on", "ollama,ctk=q8_0"])
def test_what_needs_the_daemons_environment_is_unavailable(
    arm: str, daemon: Daemon, weights: model.Model, tmp_path: Path
) -> None:
    with (
        pytest.raises(Unavailable, match="leave out `--ollama attach`"),
        attached(weights, arm, tmp_path / "log"),
    ):
        pass
    assert daemon.loaded == set()


def test_a_daemon_beside_ours_that_holds_a_model_is_named_and_left_alone(
    daemon: Daemon, fakes: Engines, weights: model.Model, tmp_path: Path
) -> None:
    daemon.loaded.add("big:70b")
    backend = Ollama()
    with open_arm(backend, backend.find({}), weights, "ollama", tmp_path / "log") as opened:
        (note,) = [note for note in opened.realised().notes if "big:70b" in note]
    assert "3.0 GiB on a device; `ollama stop big:70b` frees it" in note
    assert daemon.loaded == {"big:70b"}
    assert {path for path, _ in daemon.asked} == {"/api/ps"}


# ── real engines ────────────────────────────────────────────────────────────────────────────

KNOWN = Settings(context=1024, threads=1, load_mode="none")
GIVEN = {
    hint: path
    for hint, variable in (("ollama", "LLAMADUEL_OLLAMA"), ("llama-server", "LLAMADUEL_LLAMA_SERVER"))
    if (path := os.environ.get(variable))
}
WORDS = 300
TERMINAL = re.compile(r"\S*\x1b\[\d+D|\x1b\[[0-9;?]*[A-Za-z]")  # a word is taken back before it is wrapped


@pytest.fixture(scope="module", params=["full", "embedded"])
def real_hints(request: pytest.FixtureRequest) -> Mapping[str, str]:
    """A real Ollama, with a full build of llama.cpp as its runner and with the wheel."""
    if request.param == "full":
        return GIVEN
    pytest.importorskip("xllamacpp", reason="the embedded engine is an optional extra")
    return GIVEN | {"llama-server": embedded_server.__file__}


@pytest.fixture(scope="module")
def real(real_hints: Mapping[str, str]) -> tuple[Ollama, Engine]:
    backend = Ollama()
    try:
        engine = backend.find(real_hints)
    except Unavailable as error:
        pytest.skip(str(error))
    if real_hints != GIVEN and engine.runner is None:
        pytest.skip("this Ollama has a runner of its own")
    if real_hints == GIVEN and "xllamacpp" in str(engine):
        pytest.skip("no full build of llama.cpp on this machine")
    return backend, engine


@pytest.fixture(scope="module")
def real_device() -> tuple[Ollama, Engine]:
    backend = Ollama()
    try:
        return backend, backend.find(GIVEN | {"stand-in": "1"})
    except Unavailable as error:
        pytest.skip(str(error))


def prompt_of(weights: model.Model, number: int) -> Prompt:
    key = weights.answer_key
    assert key is not None
    return Prompt(str(number), "".join(f" {key.word(number * 1009 + step * 37)}" for step in range(20)))


def answer_to(weights: model.Model, prompt: Prompt, tokens: int) -> str:
    assert weights.answer_key is not None
    return weights.answer_key.continuation(prompt.text.split()[-1], tokens)


@pytest.mark.engine
def test_every_token_of_a_known_answer_is_right_and_nothing_is_cached(
    real: tuple[Ollama, Engine], weights: model.Model, tmp_path: Path
) -> None:
    with open_arm(*real, weights, "ollama", tmp_path / "log", KNOWN) as opened:
        for number in range(2):
            prompt = prompt_of(weights, number)
            counted = opened.count_tokens(prompt.text)
            expected = answer_to(weights, prompt, WORDS)
            sample = measure(opened, prompt, WORDS, expected=expected)
            assert (sample.fault, sample.output_ok) == (None, True)
            assert sample.usage is not None
            assert (sample.usage.generated_tokens, sample.usage.cached_tokens) == (WORDS, 0)
            assert sample.usage.prompt_tokens == counted
        realised = opened.realised()
    assert realised.weights is not None
    assert realised.weights.name == f"sha256-{weights.file.sha256}"
    assert realised.settings["context"] == "1024"
    assert our_processes() == set()


@pytest.mark.engine
def test_one_shared_token_is_counted_as_cached(
    real: tuple[Ollama, Engine], weights: model.Model, tmp_path: Path
) -> None:
    first = prompt_of(weights, 1).text
    second = " ".join(["", first.split()[0], *prompt_of(weights, 2).text.split()])
    with open_arm(*real, weights, "ollama", tmp_path / "log", KNOWN) as opened:
        measure(opened, Prompt("a", first), 4)
        sample = measure(opened, Prompt("b", second), 4)
    assert sample.usage is not None
    assert sample.usage.cached_tokens == 1


@pytest.mark.engine
def test_an_answer_that_the_context_cuts_is_told(
    real: tuple[Ollama, Engine], weights: model.Model, tmp_path: Path
) -> None:
    settings = dataclasses.replace(KNOWN, context=256)
    with open_arm(*real, weights, "ollama", tmp_path / "log", settings) as opened:
        sample = measure(opened, prompt_of(weights, 3), 400)
        assert sample.usage is not None
        assert sample.usage.truncated
        longer = Prompt("long", "".join(prompt_of(weights, number).text for number in range(20)))
        assert "exceeds the available context size" in str(measure(opened, longer, 4).invalid)


@pytest.mark.engine
@pytest.mark.parametrize("victim", [0, 1], ids=["serve", "runner"])
def test_a_kill_in_mid_stream_is_noticed_and_leaves_nothing(
    victim: int, real: tuple[Ollama, Engine], weights: model.Model, tmp_path: Path
) -> None:
    before = sessions()
    with open_arm(*real, weights, "ollama", tmp_path / "log", KNOWN) as opened:
        killed = psutil.Process(opened.realised().pids[victim])
        calls = count()

        def clock() -> int:
            if next(calls) == 12:
                killed.kill()
            return time.perf_counter_ns()

        sample = measure(opened, prompt_of(weights, 4), 900, clock=clock, timeouts=PATIENCE)
        assert sample.usage is None
        assert sample.invalid
        assert opened.death()
    assert our_processes() == set()
    assert set(sessions()) <= set(before)


@pytest.mark.engine
def test_a_request_in_flight_does_not_keep_ollama_alive(
    real: tuple[Ollama, Engine], weights: model.Model, tmp_path: Path
) -> None:
    started = threading.Event()

    def stream(request: Request) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(urlsplit(request.url).netloc, timeout=LIMIT_S)
            with contextlib.closing(connection):
                connection.request("POST", "/api/generate", request.body, dict(request.headers))
                for _ in connection.getresponse():
                    started.set()

    with open_arm(*real, weights, "ollama", tmp_path / "log", KNOWN) as opened:
        flight = threading.Thread(target=stream, args=(opened.request(prompt_of(weights, 5), 900),))
        flight.start()
        assert started.wait(LIMIT_S)
        began = time.monotonic()
    assert time.monotonic() - began < 20  # the runner by itself would take 30 s
    flight.join()
    assert our_processes() == set()


@pytest.mark.engine
def test_an_unknown_architecture_is_told(real: tuple[Ollama, Engine], weights: model.Model, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(weights.file.path.read_bytes().replace(b"qwen3moe", b"qwen9moe"))
    odd = dataclasses.replace(weights.file, path=path, shards=(path,), sha256=ollama_store.sha256(path))
    backend, engine = real
    with (
        pytest.raises(EngineFailed, match="qwen9moe"),
        backend.open(engine, odd, backend.parse("ollama"), KNOWN, tmp_path / "log"),
    ):
        pass
    assert our_processes() == set()


@pytest.mark.engine
@pytest.mark.usefixtures("real")
def test_a_model_in_shards_is_merged_once_with_the_same_weights(
    real_hints: Mapping[str, str], weights: model.Model, tmp_path: Path
) -> None:
    split = model.load(split_in_two(weights.file.path, tmp_path))
    assert split.file.digest == weights.file.digest
    backend = Ollama()
    engine = backend.find(real_hints)
    has_quantize = "xllamacpp" not in str(engine)
    merged = set()
    with backend._kept:
        for _ in range(2):
            why_not = pytest.raises(Unavailable, match="llama-gguf-split --merge")
            with (
                contextlib.nullcontext() if has_quantize else why_not,
                backend.open(engine, split.file, backend.parse("ollama"), KNOWN, tmp_path / "log") as opened,
            ):
                realised = opened.realised()
                assert realised.weights is not None
                assert model.digest_of(realised.weights) == weights.file.digest
                assert any("merged by Ollama" in note for note in realised.notes)
                merged.add(realised.weights.stat().st_ino)
    assert len(merged) == has_quantize
    assert our_processes() == set()


def split_in_two(path: Path, folder: Path) -> Path:
    """The first shard of the same model in two files."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(path)
    writer = GGUFWriter(folder / "split.gguf", "qwen3moe", split_max_tensors=len(reader.tensors) // 2 + 1)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        plain = tensor.tensor_type == GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=None if plain else tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "split-00001-of-00002.gguf"


def on_device(buffers: tuple[Buffer, ...] | None, kind: str) -> int:
    assert buffers is not None
    return sum(buffer.bytes for buffer in buffers if buffer.kind == kind and not buffer.on_host)


@pytest.mark.engine
def test_the_placements_of_a_stand_in_device_differ_in_their_buffers(
    real_device: tuple[Ollama, Engine], weights: model.Model, tmp_path: Path
) -> None:
    memory = psutil.virtual_memory().total
    found = {}
    small = weights.file.size_bytes // 2
    for arm, size in (
        ("ollama", memory),
        ("ollama@ncmoe=2", memory),
        ("ollama@cpu-moe", memory),
        ("ollama@ngl=2", memory),
        ("ollama@cpu", memory),
        ("ollama", small),
    ):
        settings = dataclasses.replace(KNOWN, flash_attention="off", stand_in_bytes=size)
        with open_arm(*real_device, weights, arm, tmp_path / f"{arm}-{size}.log", settings) as opened:
            prompt = prompt_of(weights, 6)
            sample = measure(opened, prompt, 20, expected=answer_to(weights, prompt, 20))
            assert sample.output_ok
            found[arm, size] = on_device(opened.realised().buffers, "weights")
    whole = found["ollama", memory]
    assert whole > found["ollama@ncmoe=2", memory] > found["ollama@cpu-moe", memory] > 0
    assert whole > found["ollama@ngl=2", memory] > 0
    assert found["ollama@cpu", memory] == 0
    assert whole > found["ollama", small] > 0
    assert our_processes() == set()


@pytest.mark.engine
@pytest.mark.parametrize("arm", ["ollama", "ollama@ncmoe=3"])
def test_the_pasted_command_answers_and_leaves_nothing(
    arm: str, real_device: tuple[Ollama, Engine], weights: model.Model, tmp_path: Path
) -> None:
    backend, _ = real_device
    parsed, port = backend.parse(arm), process.free_port()
    device = dataclasses.replace(KNOWN, flash_attention="off", stand_in_bytes=psutil.virtual_memory().total)
    text = backend.command(parsed, weights.file, apply_knobs(parsed, device))
    assert not text.startswith("#"), text
    free = text.replace("11435", str(port)).replace("50052", str(device_port := process.free_port()))
    bounded = free.replace(" -t 1 >", f" -t 1 -p {device_port} >").replace(
        "'PARAMETER num_ctx", "'PARAMETER num_predict 12' 'PARAMETER num_ctx"
    )
    prompt = prompt_of(weights, 8)
    mark = {"HOME": str(tmp_path), "PASTED": (pasted := uuid.uuid4().hex)}
    try:
        done = subprocess.run(
            ["bash", "-c", f"{bounded}\necho after ${{OLLAMA_HOST-none}}"],
            input=prompt.text,
            env=process.engine_environment(mark),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=5 * LIMIT_S,
            check=False,
        )
    finally:
        left = process.end_marked("PASTED", pasted)
    answer, _, after = TERMINAL.sub("", done.stdout).partition("after ")
    assert answer.split() == answer_to(weights, prompt, 12).split(), done.stderr
    assert re.search(r"eval count: +12 token", done.stderr)
    assert after.strip() == "none"
    assert left == []
    assert {path.name for path in tmp_path.iterdir()} == {"ollama.log", ".ollama"}
    assert "using device RPC0" in (tmp_path / "ollama.log").read_text(errors="replace")


@pytest.mark.engine
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_the_harness_ends_a_real_ollama_and_its_runner_end_too(
    how: signal.Signals,
    real: tuple[Ollama, Engine],
    real_hints: Mapping[str, str],
    weights: model.Model,
    tmp_path: Path,
) -> None:
    with harness_holding(weights, tmp_path / "log", real_hints) as (other, pids):
        assert len(pids) == 2, real
        other.send_signal(how)
        other.wait(LIMIT_S)
        await_that(lambda: all(is_gone(pid) for pid in pids), "the end of its engine")


@pytest.mark.engine
def test_a_real_daemon_is_attached_to_and_left_as_it_was(
    weights: model.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Ollama()
    try:
        engine = backend.find(GIVEN)
    except Unavailable as error:
        pytest.skip(str(error))
    own = model.load(synth.write(tmp_path / "own.gguf", synth.scaled(synth.SHAPES["tiny"], 16 << 20)))
    with open_arm(backend, engine, own, "ollama", tmp_path / "daemon.log", KNOWN) as daemon:
        monkeypatch.setenv("OLLAMA_HOST", daemon.url)
        has_quantize = "xllamacpp" not in str(engine)
        for each in (own, weights) if has_quantize else (own,):
            with attached(each, "ollama@ngl=1", tmp_path / "log", KNOWN) as opened:
                prompt = prompt_of(each, 7)
                sample = measure(opened, prompt, 50, expected=answer_to(each, prompt, 50))
                assert sample.output_ok
                realised = opened.realised()
                assert (realised.buffers, "-ngl" in realised.argv) == (None, True)
                assert realised.weights is not None
                assert model.digest_of(realised.weights) == each.file.digest
        with ollama_session.client(daemon.url, LIMIT_S) as client:
            assert [listed.model for listed in client.list().models] == ["llamaduel:latest"]
        blob = daemon.realised().weights
        assert blob is not None
        assert len(list(blob.parent.iterdir())) == 2  # weights and configuration of its own model
