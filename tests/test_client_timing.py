"""The clock beside a bare socket, against a server that notes when it sent what; and the comparison of clients."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_measure import PROMPT, Client, Uncounted, answering, chunked, in_lockstep

from backends import openai
from harness.contract import Chunk, Request, Session, Usage
from harness.measure import Sample, measure

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = ROOT / "scripts/experiments"
PUBLISHED = sorted(page.parent for page in (ROOT / "reports").glob("*-client-timing*/**/result.md"))
TOKENS = 64


@pytest.fixture(autouse=True)
def scripts_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))


@contextlib.contextmanager
def telling_the_truth(folder: Path, *flags: str) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """The server of the comparison: its address, and what it noted so far."""
    log = folder / "server.jsonl"
    argv = [sys.executable, str(EXPERIMENTS / "truth_server.py"), "--log", str(log), *flags]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        try:
            yield url, lambda: [json.loads(line) for line in log.read_text("utf-8").splitlines()]
        finally:
            server.terminate()


def session(dialect: str, url: str) -> Session:
    kind: type[openai.Server] = importlib.import_module("clients_ours").DIALECTS[dialect]
    return kind(url, "truth")


# ── C1: as good as a bare socket ────────────────────────────────────────────────────────────

FLOOR_MS = 1.0  # added to both: less than this is nothing
PAIRS, MORE_PAIRS = 12, 48


def bare(request: Request) -> tuple[int, list[int]]:
    """The same request with nothing between the socket and the clock: when it was sent, when each chunk came."""
    port = int(request.url.split(":")[2].split("/")[0])
    head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request.body)}\r\n\r\n".encode()
    data, stamps = b"", list[int]()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent_ns = time.perf_counter_ns()
        sock.sendall(head + request.body)
        while not data.endswith(b"\r\n0\r\n\r\n"):
            data += sock.recv(65536)
            now_ns = time.perf_counter_ns()
            stamps += [now_ns] * (data.count(b'"stop":false') - len(stamps))
    return sent_ns, stamps


def errors_ms(sent_ns: int, stamps: list[int], truth: dict[str, Any]) -> tuple[float, float]:
    """(of the time to the first token, of the worst gap but one): those of 64 gaps that 99 of 100 do not exceed."""
    assert len(stamps) == len(truth["sent_ns"])
    ttft_ms = abs((stamps[0] - sent_ns) - (truth["sent_ns"][0] - truth["arrived_ns"])) / 1e6
    gaps = zip(pairwise(stamps), pairwise(truth["sent_ns"]), strict=True)
    return ttft_ms, sorted(abs((b - a) - (d - c)) / 1e6 for (a, b), (c, d) in gaps)[-2]


def clock_that_is_late(by_ns: int) -> Callable[[], int]:
    """For one request: right when it connects and sends, and late in all that it stamps after."""
    looks = itertools.count()
    return lambda: time.perf_counter_ns() + (by_ns if next(looks) > 1 else 0)


def beside_a_bare_socket(folder: Path, most: int, late_ns: int = 0) -> tuple[float, float]:
    """Ratios of errors, ours to those of a bare socket, each the median of pairs taken in turn.

    A stall of the machine hits one of a pair as often as the other, so it moves the median little;
    more pairs are taken while it is in doubt.
    """
    ratios: list[tuple[float, float]] = []
    medians = (0.0, 0.0)
    with telling_the_truth(folder, "--itl-ms", "3", "--ttft-ms", "20") as (url, noted):
        client = session("llama-server", url)
        for number in range(most):
            sample = measure(client, PROMPT, TOKENS, clock=clock_that_is_late(late_ns))
            assert sample.fault is None
            assert sample.chunk_tokens == tuple(range(1, TOKENS + 1))
            assert sample.generated_tokens == TOKENS
            sent_ns, stamps = bare(client.request(PROMPT, TOKENS))
            ours = errors_ms(0, list(sample.chunk_ns), noted()[2 * number])
            theirs = errors_ms(sent_ns, stamps, noted()[2 * number + 1])
            pair = [(a + FLOOR_MS) / (b + FLOOR_MS) for a, b in zip(ours, theirs, strict=True)]
            ratios.append((pair[0], pair[1]))
            medians = (statistics.median(r[0] for r in ratios), statistics.median(r[1] for r in ratios))
            if number + 1 >= PAIRS and max(medians) <= 1.5:
                break
    return medians


@pytest.mark.truth
def test_errors_are_at_most_half_above_those_of_a_bare_socket(tmp_path: Path) -> None:
    ttft, gaps = beside_a_bare_socket(tmp_path, MORE_PAIRS)

    assert ttft <= 1.5
    assert gaps <= 1.5


@pytest.mark.truth
def test_a_client_that_is_late_with_its_stamps_would_be_seen(tmp_path: Path) -> None:
    """By 0.2 s, so that it is seen on a machine that has other work, too."""
    assert beside_a_bare_socket(tmp_path, PAIRS, late_ns=200_000_000)[0] > 1.5


@pytest.mark.truth
@pytest.mark.parametrize("dialect", ["llama-server", "openai"])
@pytest.mark.parametrize("per_chunk", [1, 4, 16])
def test_the_speed_is_the_true_one_however_many_tokens_a_chunk_holds(
    tmp_path: Path, per_chunk: int, dialect: str
) -> None:
    """Half of the requests at least are right to 0.5 %. A client that counts (N - 1) is 5 % or 31 % off on all."""
    clients = importlib.import_module("clients")
    with telling_the_truth(tmp_path, "--per-chunk", str(per_chunk), "--itl-ms", "5") as (url, noted):
        client = session(dialect, url)
        samples = [measure(client, PROMPT, TOKENS) for _ in range(7)]
        truths = [clients.Truth.of(row) for row in noted()]

    assert [sample.fault for sample in samples] == [None] * 7
    assert {sample.generated_tokens for sample in samples} == {TOKENS}
    counted = tuple(range(per_chunk, TOKENS + 1, per_chunk))
    assert {sample.chunk_tokens for sample in samples} == {counted if dialect == "llama-server" else None}
    errors = [abs((s.decode_tps or 0) / t.decode_tps - 1) for s, t in zip(samples, truths, strict=True)]
    assert statistics.median(errors) <= 0.005


def test_a_request_goes_out_in_one_piece() -> None:
    """The engine is woken once, and nothing of the request is written after the clock has begun."""
    pieces: list[bytes] = []

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                pieces.append(connection.recv(1 << 20))

        thread = threading.Thread(target=serve)
        thread.start()
        measure(openai.Server(url, "m", {"X-Key": "its"}), PROMPT, 3)
        thread.join()
    head, _, body = pieces[0].partition(b"\r\n\r\n")
    assert json.loads(body)["prompt"] == PROMPT.text
    assert b"X-Key: its" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert f"Host: {url.removeprefix('http://')}".encode() in head


def test_a_request_that_cannot_be_written_is_a_fault() -> None:
    sample = measure(openai.Server("http://127.0.0.1:1/a b", "m"), PROMPT, 3)

    assert "no such request can be sent" in str(sample.invalid)


# ── C2: wherever the bytes are cut ──────────────────────────────────────────────────────────


def native(text: str, tokens: int) -> dict[str, Any]:
    return {"content": text, "stop": False, "tokens_predicted": tokens, "sent_ns": 0}


def last(tokens: int, predicted_ms: float, **timings: Any) -> dict[str, Any]:
    known = {"cache_n": 0, "prompt_n": 4, "prompt_ms": 1, "predicted_n": tokens, "predicted_ms": predicted_ms}
    return {"content": "", "stop": True, "stop_type": "limit", "truncated": False, "timings": known | timings}


def event(data: dict[str, Any], end: str = "\n") -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}{end}{end}".encode()


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.truth
def test_the_sample_is_the_same_wherever_the_stream_is_cut_in_two() -> None:
    """At every offset: inside a number, a letter of three bytes, a line end of two, the size of a chunk."""
    words = [" naïve", " 東京"]
    lines = [event(native(word, number), "\r\n") for number, word in enumerate(words, 1)]
    body = chunked(b": ping\r\n\r\n" + lines[0]) + chunked(lines[1] + event(last(2, 1.0))) + b"0\r\n\r\n"
    found = set()
    for at in range(len(HEAD + body) + 1):
        pieces = [(HEAD + body)[:at], (HEAD + body)[at:]]
        with in_lockstep([piece for piece in pieces if piece], 10**6) as (port, clock):
            sample = measure(Client(port), PROMPT, 2, clock=clock)
        found.add((sample.fault, sample.text, sample.chunk_tokens, sample.generated_tokens))

    assert found == {(None, " naïve 東京", (1, 2), 2)}


OPENAI: list[dict[str, Any]] = [
    {"choices": [{"text": " a b", "finish_reason": None}]},
    {"choices": [{"text": " c d", "finish_reason": None}]},
    {"choices": [{"text": "", "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 4}},
]


@pytest.mark.truth
@pytest.mark.parametrize("done", [b"data: [DONE]\n\n", b"data:[DONE]\n\n", b""], ids=["done", "close", "none"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_usage_that_trails_is_read_with_and_without_a_done(done: bytes, end: str) -> None:
    pieces = [HEAD, *(chunked(event(each, end)) for each in OPENAI), *([chunked(done)] if done else []), b"0\r\n\r\n"]
    with in_lockstep(pieces, 10**7) as (port, clock):
        sample = measure(openai.Server(f"http://127.0.0.1:{port}", "m"), PROMPT, 4, clock=clock)

    assert sample.invalid is None
    assert sample.usage == Usage(prompt_tokens=4, generated_tokens=4, stop="length")
    assert sample.decode_tps == pytest.approx(200)


@pytest.mark.truth
def test_an_error_in_the_stream_or_no_last_word_is_invalid() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    broken = event(OPENAI[0]) + event({"error": {"message": "out of patience"}}) + event(OPENAI[3])
    for body, reason in ((broken, "out of patience"), (event(OPENAI[0]), "without its final object")):
        with answering(head + body) as port:
            sample = measure(openai.Server(f"http://127.0.0.1:{port}", "m"), PROMPT, 4)
        assert reason in str(sample.invalid)


# ── C4: figures of the engine's own ─────────────────────────────────────────────────────────


def timed(kind: type[Client], predicted_ms: float, **timings: Any) -> Sample:
    """64 tokens 10 ms apart by a clock of the test's own, and what the engine says of them."""
    lines = [chunked(event(native(" w", number))) for number in range(1, 65)]
    final = chunked(event(last(64, predicted_ms, **timings))) + b"0\r\n\r\n"
    with in_lockstep([HEAD, *lines, final], 10**7) as (port, clock):
        return measure(kind(port), PROMPT, 64, clock=clock)


@pytest.mark.truth
@pytest.mark.parametrize("kind", [Client, Uncounted])
def test_an_engine_whose_clock_is_five_per_cent_off_is_a_mismatch(kind: type[Client]) -> None:
    assert timed(kind, 630).invalid is None
    assert timed(kind, 630).server_decode_tps == pytest.approx(100, rel=0.001)
    for factor in (1.05, 0.95):
        assert "CLOCK_MISMATCH" in str(timed(kind, 630 * factor).invalid)


@pytest.mark.truth
def test_a_prompt_from_a_cache_or_a_reload_is_invalid() -> None:
    class Reloading(Client):
        def read(self, line: bytes) -> Chunk | Usage | None:
            item = super().read(line)
            return Usage(generated_tokens=item.generated_tokens, load_s=0.8) if isinstance(item, Usage) else item

    assert "3 prompt tokens came from a cache" in str(timed(Client, 630, cache_n=3, prompt_n=1).invalid)
    assert "loaded again during the request (0.8 s)" in str(timed(Reloading, 630).invalid)


# ── the comparison of clients ───────────────────────────────────────────────────────────────


def test_reports_are_matched_with_their_requests_past_warm_up_and_loss() -> None:
    clients, tools = importlib.import_module("clients"), importlib.import_module("clients_tools")
    truths = [clients.Truth(0.05 + 0.02 * (n * 7 % 11) / 11, 100.0, 64, ()) for n in range(12)]
    kept = [2, 3, 4, 6, 7, 8, 9, 11]  # two of warm-up, two lost
    reports = [tools.Report(truths[n].ttft_s + 0.0008, 100.0) for n in kept]

    assert [truth for _, truth in clients.matched(reports, truths)] == [truths[n] for n in kept]
    assert clients.matched([], truths) == []
    with pytest.raises(ValueError, match="8 requests are reported, 3 were served"):
        clients.matched(reports, truths[:3])


def test_the_true_speed_leaves_out_the_tokens_of_the_first_chunk() -> None:
    row = {"arrived_ns": 0, "sent_ns": [10**8 * n for n in (1, 2, 3)], "counts": [16, 32, 40]}
    truth = importlib.import_module("clients").Truth.of(row)

    assert truth.ttft_s == pytest.approx(0.1)
    assert truth.decode_tps == pytest.approx(24 / 0.2)
    assert truth.gaps_s == pytest.approx((0.1, 0.1))


def written(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_the_reports_of_all_tools_are_read_into_the_same_units(tmp_path: Path) -> None:
    """60 ms to the first token, then 100 tokens a second, as each of them writes it."""
    tools = importlib.import_module("clients_tools")
    metrics = {"time_to_first_token": 60.0, "inter_token_latency": 10.0, "inter_chunk_latency": [9.0, 11.0]}
    values = {name: {"value": value} for name, value in (metrics | {"output_sequence_length": 64}).items()}
    phases = [
        {"metadata": {"benchmark_phase": p, "request_start_ns": 1}, "metrics": values} for p in ("warmup", "profiling")
    ]
    lost = {"metadata": {"benchmark_phase": "profiling", "request_start_ns": 2}, "metrics": {}, "error": {"code": 1}}
    written(tmp_path / "aiperf/artifacts/profile_export.jsonl", *phases, lost)
    row = {"request_start_time": 1, "time_to_first_token_ms": 60.0, "inter_token_latency_ms": 10.0, "output_tokens": 64}
    written(tmp_path / "guidellm/report.json", {"benchmarks": [{"requests": {"successful": [row]}}]})
    found = {"e2e_ttft": {"values": [60.0]}, "tg_throughput": {"values": [100.0]}}
    written(tmp_path / "benchy/report.json", {"benchmarks": [found]})
    each = {"ttft": 0.06, "tpot": 0.01, "output_inference_speed": 100.0, "num_output_tokens": 64, "error_code": None}
    written(tmp_path / "genai/run/D128_64_x.json", {"individual_request_metrics": [each, each | {"error_code": 503}]})
    sample = {"ttft_s": 0.06, "decode_tps": 100.0, "gaps_s": [0.009, 0.011], "tokens": 64, "invalid": None}
    written(tmp_path / "ours/samples.jsonl", sample, sample | {"invalid": "the stream broke off"})

    for name in ("aiperf", "guidellm", "benchy", "genai", "ours"):
        (report,) = getattr(tools, f"read_{name}")(tmp_path / name)
        assert (report.ttft_s, report.decode_tps) == (pytest.approx(0.06), pytest.approx(100.0))
        assert report.gaps_s in (None, pytest.approx((0.009, 0.011)))


@pytest.mark.skipif(sys.platform != "linux", reason="the CPU time of a process tree is counted on Linux only")
def test_the_comparison_runs_with_what_is_there_and_names_what_is_not(tmp_path: Path) -> None:
    script = [sys.executable, str(EXPERIMENTS / "clients.py"), str(tmp_path / "out")]
    few = ["--rounds", "1", "--requests", "2", "--tokens", "32", "--itl-ms", "2"]
    few += ["--cpu-few", "1", "--cpu-requests", "3"]
    done = subprocess.run(
        [*script, *few, "--tokenizer", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/nowhere"},
    )
    assert "guidellm is left out: not in PATH; give its path by --guidellm" in done.stdout
    page = (tmp_path / "out/result.md").read_text("utf-8")
    assert re.search(r"\| llamaduel, OpenAI dialect \| \d of 6 \| \d of 2 \|", page)
    assert len((tmp_path / "out/runs.csv").read_text("utf-8").splitlines()) == 1 + 2 * (3 + 1 + 2)

    again = subprocess.run([*script, "--again"], capture_output=True, text=True, check=True)
    assert again.stdout.strip() == page.strip()


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_the_published_page_is_what_its_data_say(folder: Path) -> None:
    assert (folder / "result.md").read_text("utf-8") == importlib.import_module("clients").result(folder)
    for path in filter(Path.is_file, folder.iterdir()):
        assert not re.search(r"/(home|root|tmp|Users|work|mnt|var)/", path.read_text("utf-8")), path.name
