"""A model that Ollama holds: what is sent, what a line means, and what its runner's log proves."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from backends import llama_failure, ollama_session
from backends.llama_http import GREEDY
from backends.ollama_session import OllamaSession, failure
from harness.contract import Chunk, Engine, Prompt, Usage
from harness.errors import Crashed, DoesNotFit, EngineFailed, TimedOut

DATA = Path(__file__).parent / "data"


# ── the wire ────────────────────────────────────────────────────────────────────────────────


def session(**changed: Any) -> OllamaSession:
    """A session that is only read with."""
    engine = Engine(product="Ollama", version="0.32.15", path=Path("/bin/ollama"), origin="PATH")
    fixed: dict[str, Any] = {"engine": engine, "url": "http://127.0.0.1:9", "model": "m", "options": {}, "pids": tuple}
    return OllamaSession(**fixed | changed)


def test_a_request_is_raw_streamed_and_leaves_no_sampler_to_a_default() -> None:
    opened = session(options={"num_ctx": 4096, "num_gpu": None})
    request = opened.request(Prompt("p", "a <tag>\n"), 64)
    body = json.loads(request.body)
    assert request.url == "http://127.0.0.1:9/api/generate"
    assert (body["prompt"], body["raw"], body["stream"], body["think"]) == ("a <tag>\n", True, True, False)
    assert (body["truncate"], body["shift"]) == (False, False)
    assert "keep_alive" not in body
    assert body["options"] == {"num_ctx": 4096, "num_predict": 64, "stop": [], **GREEDY}
    assert (GREEDY["temperature"], GREEDY["repeat_penalty"], GREEDY["min_p"]) == (0.0, 1.0, 0.0)


def test_no_request_asks_for_zero_tokens_for_that_means_without_end() -> None:
    assert json.loads(session().request(Prompt("p", "x"), 0).body)["options"]["num_predict"] == 1


def test_text_and_thinking_are_both_text() -> None:
    assert session().read(b'{"model":"m","response":" cold","done":false}') == Chunk(" cold")
    assert session().read(b'{"thinking":"hm","response":"","done":false}') == Chunk("hm")


def test_the_last_line_holds_counts_and_seconds() -> None:
    line = (
        b'{"response":"","done":true,"done_reason":"length","total_duration":600480398,"load_duration":580702485,'
        b'"prompt_eval_count":3,"prompt_eval_duration":7367000,"eval_count":4,"eval_duration":9758000}'
    )
    assert session().read(line) == Usage(
        prompt_tokens=3, generated_tokens=4, prefill_s=0.007367, decode_s=0.009758, load_s=0.580702485, stop="length"
    )


def test_what_the_last_line_leaves_out_is_unknown() -> None:
    assert session().read(b'{"done":true,"done_reason":"stop"}') == Usage(stop="stop")


def test_newer_versions_tell_the_cached_tokens_themselves() -> None:
    usage = session().read(b'{"done":true,"prompt_eval_count":21,"prompt_eval_cached_count":16}')
    assert usage == Usage(prompt_tokens=21, cached_tokens=16)


def test_an_error_in_the_stream_is_a_failure() -> None:
    with pytest.raises(EngineFailed, match="unexpected EOF"):
        session().read(b'{"error":"an error was encountered while running the model: unexpected EOF"}')


# ── the log ─────────────────────────────────────────────────────────────────────────────────


def settled(log: Path, usage: Usage) -> Usage:
    return session(log=log).settle(usage)


@pytest.mark.parametrize(
    ("name", "prompt_tokens", "prefill_s", "cached", "truncated"),
    [
        ("stand-in", 2, 0.015376, 0, False),
        ("stand-in", 2, 0.026499, 1, False),
        ("stand-in", 230, 0.633967, 0, True),
        ("embedded", 2, 0.008362, 0, False),
        ("embedded", 2, 0.006143, 1, False),
    ],
)
def test_cached_tokens_and_cuts_come_from_the_log(
    name: str, prompt_tokens: int, prefill_s: float, cached: int, truncated: bool
) -> None:
    usage = Usage(prompt_tokens=prompt_tokens, prefill_s=prefill_s)
    found = settled(DATA / f"ollama-0.32.15-{name}.log", usage)
    assert (found.cached_tokens, found.truncated) == (cached, truncated)


def test_a_request_that_the_log_does_not_tell_of_keeps_its_cache_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ollama_session, "SETTLE_S", 0.0)
    usage = Usage(prompt_tokens=2, prefill_s=9.0)
    assert settled(DATA / "ollama-0.32.15-embedded.log", usage) == usage


def test_each_line_of_the_log_is_taken_for_one_request_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ollama_session, "SETTLE_S", 0.0)
    log = tmp_path / "log"
    log.write_text("prompt eval time = 5.10 ms / 1 tokens\nstop processing: n_tokens = 1, truncated = 0\n")
    opened, usage = session(log=log), Usage(prompt_tokens=2, prefill_s=0.0051)
    assert opened.settle(usage).cached_tokens == 1
    assert opened.settle(usage).cached_tokens is None
    with log.open("a") as file:
        file.write("prompt eval time = 5.10 ms / 2 tokens\nstop processing: n_tokens = 2, truncated = 0\n")
    assert opened.settle(usage).cached_tokens == 0


def test_settling_waits_for_a_log_that_comes_late(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")

    def write() -> None:
        with log.open("a") as file:
            file.write("prompt eval time = 5.10 ms / 2 tokens\n")

    late = threading.Timer(0.1, write)
    late.start()
    assert settled(log, Usage(prompt_tokens=2, prefill_s=0.0051)).cached_tokens == 0
    late.join()


def test_buffers_and_settings_of_the_runner_come_from_the_log() -> None:
    realised = session(log=DATA / "ollama-0.32.15-stand-in.log").realised()
    assert realised.buffers is not None
    on_device = {buffer.kind: buffer.bytes for buffer in realised.buffers if not buffer.on_host}
    assert on_device == {"weights": round(93.46 * 2**20), "kv": round(1.5 * 2**20), "compute": round(5.5 * 2**20)}
    asked = ("context", "batch", "ubatch", "threads", "flash_attention", "kv_k", "kv_v", "load_mode", "slots", "build")
    assert [realised.settings[name] for name in asked] == [
        *("256", "256", "256", "1", "off", "f16", "f16", "none", "1", "b11434")
    ]


def test_experts_on_the_cpu_are_seen_in_the_buffers_alone() -> None:
    realised = session(log=DATA / "ollama-0.32.15-stand-in-cpu-moe.log").realised()
    assert realised.buffers is not None
    weights = {buffer.device: round(buffer.bytes / 2**20, 2) for buffer in realised.buffers if buffer.kind == "weights"}
    assert weights == {"RPC0": 19.04, "CPU": 25.28, "CPU_REPACK": 50.62}


def test_what_it_asks_for_by_itself_is_told_in_the_words_that_are_read_back() -> None:
    realised = session(log=DATA / "ollama-0.32.15-stand-in-cpu-moe.log", options={"num_thread": 1}).realised()
    read_back = {name: realised.settings.get(name) for name in realised.asked if name not in ("seed", "context_shift")}
    assert read_back == {name: realised.asked[name] for name in read_back}
    assert read_back["temperature"] == "0"
    assert realised.asked["seed"] == "1"
    assert "seed" not in realised.settings, "its log does not tell it"


def test_flags_that_ollama_chose_by_itself_are_its_own_words() -> None:
    argv = "llama-server -c 32768 --flash-attn off -b 1024 -ub 1024"
    opened = session(log=DATA / "ollama-0.32.15-stand-in-stock.log", options={"num_batch": 1024})
    opened._argv = tuple(argv.split())
    explained = opened.realised().explained
    assert explained["context"] == "Ollama passes -c 32768 by itself, for 23.5 GiB of card memory"
    assert explained["flash_attention"] == "Ollama passes --flash-attn off by itself"
    assert "batch" not in explained, "it was asked for"
    assert "threads" not in explained, "there is no such flag"


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (
            "llama-server process has terminated: exit status 1: cudaMalloc failed: out of memory\n"
            "error loading model: unable to allocate CUDA0 buffer",
            DoesNotFit,
            "out of memory for weights while loading on CUDA0",
        ),
        (
            "llama-server reported out-of-memory during startup: cudaMalloc failed: out of memory\n"
            "ggml_backend_buft_alloc_buffer_n_default: failed to allocate CUDA0 buffer of size 25769803776\n"
            "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
            DoesNotFit,
            "out of memory for the KV cache while loading: 24.0 GiB asked of CUDA0",
        ),
        (
            "llama-server startup failed after projector CPU offload retry: llama-server process has terminated: "
            "exit status 1: ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 9925767168\n"
            "alloc_tensor_range: failed to allocate CUDA_Host buffer of size 9925767168\n"
            "error loading model: unable to allocate CUDA_Host buffer",
            DoesNotFit,
            "out of memory for pinned host memory while loading: 9.24 GiB asked of host memory",
        ),
        (
            "model requires more system memory (24.1 GiB) than is available (3.0 GiB)",
            DoesNotFit,
            "out of memory for weights in host memory while loading (model requires more system memory (24.1 GiB)",
        ),
        (
            "llama-server process has terminated: exit status 1: error loading model: "
            "unknown model architecture: 'qwen9moe'",
            Crashed,
            "does not know the model's architecture",
        ),
        ("llama-server process has terminated: signal: killed", Crashed, "lack of memory"),
        (
            "llama-server process has terminated: signal: illegal instruction (core dumped)",
            Crashed,
            "runner ended: SIGILL: this binary was built for another CPU",
        ),
        ("timed out waiting for llama-server to start - ", TimedOut, "gave up waiting"),
        ("something new\nin two lines", EngineFailed, "Ollama says: something new in two lines"),
    ],
)
def test_a_failed_load_is_classified(text: str, kind: type[EngineFailed], words: str) -> None:
    error = failure(text)
    assert type(error) is kind
    assert words in str(error)
    assert "\n" not in str(error)


def test_what_the_runner_wrote_explains_an_error_that_says_nothing() -> None:
    log = (
        'time=2026-11-30T00:15:43.930Z level=INFO msg=x error="no such file"',
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 15000.00 MiB on device 0: cudaMalloc failed",
        "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
    )
    assert isinstance(failure("llama-server process has terminated: exit status 1", log), DoesNotFit)


def test_what_the_runner_wrote_tells_more_of_memory_than_what_ollama_passes_on() -> None:
    log = (
        "srv    load_model: loading model '/blobs/sha256-5'",
        'time=2026-11-30T00:15:43.930Z level=ERROR msg=x error="cannot allocate memory for the KV cache"',
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 512.00 MiB on device 0: cudaMalloc failed: x",
        "ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 536870912",
        "llama_init_from_model: failed to initialize the context: failed to allocate compute pp buffers",
    )
    error = failure("llama-server process has terminated: exit status 1: cudaMalloc failed: out of memory", log)
    assert "out of memory for compute buffers while loading: 512 MiB asked of CUDA0" in str(error)


def test_a_runner_that_the_system_killed_for_memory_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_failure, "kills_for_memory", lambda: 4)
    text = "llama-server process has terminated: signal: killed"
    assert type(failure(text, kills=4)) is Crashed
    error = failure(text, kills=3)
    assert type(error) is DoesNotFit
    assert "weights in host memory" in str(error)


def test_a_context_that_ollama_lowered_to_load_at_all_says_so(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        (DATA / "ollama-0.32.15-stand-in-stock.log").read_text()
        + 'time=2026-11-30T00:15:43.930Z level=WARN source=sched.go:653 msg="llama-server load failed; reducing '
        'automatic context and retrying once" model=m old_num_ctx=262144 effective_num_ctx=40960 new_num_ctx=32768 '
        'old_num_batch=2048 new_num_batch=1024 loaded_count=0 evict_all=false error="out of memory"\n'
    )
    opened = session(log=log)
    opened._argv = ("llama-server", "-c", "32768")
    assert opened.realised().explained["context"].endswith(", lowered from 40960 as it found no memory")
