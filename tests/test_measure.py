"""The clock against an engine whose timing is known: a process that says when it sent each chunk."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import re
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import process
from harness.contract import Chunk, Prompt, Realised, Request, Usage
from harness.errors import EngineFailed
from harness.measure import Sample, Timeouts, measure
from harness.testing.script import Script

PROMPT = Prompt("p", "how it began: the")
ANSWER = " quick brown fox naïve zebras over 東京 apples near cold wäter jump the"


class Client:
    """A session in the dialect of the fake llama-server. It notes every event and when it was read."""

    def __init__(self, port: int, child: process.Child | None = None) -> None:
        self.port, self.child = port, child
        self.events: list[dict[str, Any]] = []
        self.first_read_ns: int | None = None

    def request(self, prompt: Prompt, max_tokens: int) -> Request:
        body = {"prompt": prompt.text, "n_predict": max_tokens, "stream": True}
        return Request(f"http://127.0.0.1:{self.port}/completion", {"X": "y"}, json.dumps(body).encode())

    def read(self, line: bytes) -> Chunk | Usage | None:
        self.first_read_ns = self.first_read_ns or time.perf_counter_ns()
        assert line == line.strip(b"\r\n"), "an adapter need not know how lines end"
        if line.startswith(b":"):
            return None
        event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise EngineFailed(event["error"]["message"])
        self.events.append(event)
        if not event["stop"]:
            return Chunk(event["content"], event["tokens_predicted"])
        timings = event["timings"]
        return Usage(
            prompt_tokens=timings["cache_n"] + timings["prompt_n"],
            cached_tokens=timings["cache_n"],
            generated_tokens=timings["predicted_n"],
            prefill_s=timings["prompt_ms"] / 1000,
            decode_s=timings["predicted_ms"] / 1000,
            stop={"limit": "length", "eos": "stop"}[event["stop_type"]],
            truncated=event["truncated"],
        )

    def settle(self, usage: Usage) -> Usage:
        return usage

    def realised(self) -> Realised:
        return Realised(engine="fake", argv=(), pids=(), weights=None)

    def count_tokens(self, text: str) -> int | None:
        return len(text.split())

    def death(self) -> str | None:
        code = self.child.returncode() if self.child else None
        return None if code is None else process.explain_exit(code)

    def sent_ns(self) -> list[int]:
        """When the engine handed each chunk to its socket, by the clock that we have too."""
        return [event["sent_ns"] for event in self.events if not event["stop"]]


class Uncounted(Client):
    """The same, but chunks do not say how many tokens they end."""

    def read(self, line: bytes) -> Chunk | Usage | None:
        item = super().read(line)
        return Chunk(item.text) if isinstance(item, Chunk) else item


Start = Callable[[Script], Client]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts fake engines; they are gone after the test."""
    with contextlib.ExitStack() as stack:

        def starts(script: Script, kind: type[Client] = Client) -> Client:
            return stack.enter_context(running(script, tmp_path, kind))

        yield starts


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One engine in good order for all tests that ask for nothing else."""
    with running(Script(), tmp_path_factory.mktemp("sound")) as client:
        yield client


@pytest.fixture
def client(sound: Client) -> Client:
    return Client(sound.port, sound.child)


@contextlib.contextmanager
def running(script: Script, folder: Path, kind: type[Client] = Client) -> Iterator[Client]:
    port = process.free_port()
    script = dataclasses.replace(script, buffers=())
    argv = [sys.executable, "-m", "harness.testing.llama_server", "-m", "none.gguf", "--port", str(port)]
    environment = process.engine_environment({**script.environment(), "HOME": str(folder)})
    with process.start(argv, folder / f"{port}.log", environment) as child:
        deadline = time.monotonic() + 30
        while "listening on" not in "\n".join(child.tail()):
            assert child.returncode() is None, child.tail()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield kind(port, child)


def sample(**changes: Any) -> Sample:
    """A valid one: 101 tokens, 10 ms apart, the first after 0.5 s."""
    usage = Usage(prompt_tokens=40, cached_tokens=0, generated_tokens=101, prefill_s=0.49, decode_s=1.0, stop="length")
    known: dict[str, Any] = {
        "prompt_id": "p",
        "max_tokens": 101,
        "sent_ns": 7,
        "connect_ns": 50_000,
        "chunk_ns": tuple(500_000_000 + 10_000_000 * i for i in range(101)),
        "chunk_tokens": tuple(range(1, 102)),
        "end_ns": 1_501_000_000,
        "status": 200,
        "text": "x",
        "usage": usage,
    }
    inner = {field.name for field in dataclasses.fields(Usage)} & changes.keys()
    if inner:
        known["usage"] = dataclasses.replace(usage, **{name: changes.pop(name) for name in inner})
    return Sample(**(known | changes))


# ── what is derived from raw stamps ─────────────────────────────────────────────────────────


def test_ttft_is_the_time_from_the_request_to_the_first_text() -> None:
    assert sample().ttft_s == 0.5


def test_decode_speed_counts_the_tokens_after_the_first_text_over_the_window() -> None:
    assert sample().decode_tps == pytest.approx(100.0)


def test_the_engines_own_speed_does_not_count_the_first_token() -> None:
    assert sample(decode_s=2.0).server_decode_tps == pytest.approx(50.0)


def test_tokens_of_the_first_chunk_are_not_counted_into_the_window() -> None:
    in_fours = sample(
        max_tokens=100,
        generated_tokens=100,
        chunk_ns=tuple(500_000_000 + 40_000_000 * i for i in range(25)),
        chunk_tokens=tuple(range(4, 101, 4)),
        decode_s=0.99,
    )
    assert in_fours.decode_tps == pytest.approx(100.0)
    assert dataclasses.replace(in_fours, chunk_tokens=None).decode_tps == pytest.approx(100.0)
    assert in_fours.invalid is None


def test_lines_that_came_together_are_one_piece_for_the_window() -> None:
    stamps = tuple(500_000_000 + 40_000_000 * (i // 4) for i in range(100))
    in_bursts = sample(
        max_tokens=100, generated_tokens=100, chunk_ns=stamps, chunk_tokens=tuple(range(1, 101)), decode_s=0.99
    )
    assert in_bursts.decode_tps == pytest.approx(100.0)
    assert dataclasses.replace(in_bursts, chunk_tokens=None).decode_tps == pytest.approx(100.0)


def test_an_end_of_text_token_is_counted_by_the_engine_but_brings_no_text() -> None:
    ended = sample(generated_tokens=102, max_tokens=200, stop="stop", decode_s=1.01, chunk_tokens=None)
    assert ended.decode_tps == pytest.approx(100.0)


def test_prefill_speed_needs_to_know_what_came_from_a_cache() -> None:
    assert sample(prefill_s=0.4).prefill_tps == pytest.approx(100.0)
    assert sample(prefill_s=0.4, cached_tokens=1).prefill_tps == pytest.approx(97.5)
    assert sample(cached_tokens=None).prefill_tps is None


def test_gaps_between_tokens_exist_only_where_a_chunk_is_a_token() -> None:
    assert sample().itl_s == pytest.approx((0.01,) * 100)
    assert sample(chunk_ns=(1, 2, 3), chunk_tokens=(30, 60, 101)).itl_s is None


def test_what_is_unknown_is_none_and_not_zero() -> None:
    nothing = Sample(prompt_id="p", max_tokens=5, sent_ns=0)
    derived = (
        "ttft_s",
        "window_s",
        "decode_tps",
        "server_decode_tps",
        "prefill_tps",
        "itl_s",
        "overhead_s",
        "output_ok",
    )
    assert [getattr(nothing, name) for name in derived] == [None] * len(derived)
    assert nothing.invalid


def test_the_output_is_right_wrong_or_unknown() -> None:
    assert sample(expected="x").output_ok is True
    assert sample(expected="y").output_ok is False
    assert sample().output_ok is None
    assert sample(expected="y", fault="it died").output_ok is None


# ── what does not count, and why ────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fault": "the stream broke off"}, "the stream broke off"),
        ({"status": 503}, "HTTP 503"),
        ({"usage": None}, "without its final object"),
        ({"truncated": True}, "cut to the context"),
        ({"load_s": 0.51}, "loaded again"),
        ({"cached_tokens": 3}, "3 prompt tokens came from a cache"),
        ({"expected_prompt_tokens": 41}, "the prompt had 40 tokens, not 41"),
        ({"generated_tokens": None}, "no token count"),
        ({"generated_tokens": 0}, "no text came"),
        ({"chunk_ns": (), "chunk_tokens": None}, "no text came"),
        ({"max_tokens": 100}, "101 tokens came, 100 were asked for"),
        ({"chunk_tokens": (*range(1, 101), 102)}, "contradict"),
        ({"chunk_tokens": (2, 1, *range(3, 102))}, "contradict"),
        ({"chunk_ns": (500_000_000,) * 101}, "all 101 tokens came in one piece"),
        ({"max_tokens": 200}, "short answer: 101 of 200 tokens in 1.00 s"),
        ({"decode_s": 1.05}, "CLOCK_MISMATCH: the engine claims 95.2 tok/s, its text came at 100.0"),
        ({"decode_s": 0.97}, "CLOCK_MISMATCH: the engine claims"),
        ({"decode_s": 1.03}, "CLOCK_MISMATCH: the engine claims"),
        ({"decode_s": 1e-4}, "CLOCK_MISMATCH: the engine claims"),
        ({"prefill_s": 0.503}, "CLOCK_MISMATCH: text came"),
        (
            {"decode_s": None, "chunk_ns": tuple(500_000_000 + 1000 * (i // 30) for i in range(101))},
            "101 lines came in 4 pieces",
        ),
    ],
)
def test_a_mechanical_reason_makes_a_sample_invalid(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(sample(**changes).invalid)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"load_s": 0.49},
        {"cached_tokens": None},
        {"cached_tokens": 1, "shared_tokens": 1},
        {"expected_prompt_tokens": 40},
        {"prompt_tokens": None, "expected_prompt_tokens": 40},
        {"decode_s": 0.985},
        {"decode_s": None, "prefill_s": None},
        {"chunk_tokens": None},
        {"stop": "stop"},
    ],
)
def test_what_is_odd_but_sound_counts(changes: dict[str, Any]) -> None:
    assert sample(**changes).invalid is None


def test_a_short_answer_counts_if_its_window_is_long_enough() -> None:
    slow = tuple(500_000_000 + 20_000_000 * i for i in range(101))
    early = sample(max_tokens=200, stop="stop", chunk_ns=slow, decode_s=2.0)
    assert early.short
    assert early.invalid is None
    assert not sample().short


def test_a_few_tokens_may_come_together_if_the_engine_took_no_longer_than_the_clocks_differ() -> None:
    together = sample(max_tokens=3, generated_tokens=3, chunk_ns=(500_000_000,) * 3, chunk_tokens=None, decode_s=0.004)
    assert together.invalid is None
    assert together.decode_tps is None


def test_one_token_needs_no_window() -> None:
    assert sample(max_tokens=1, generated_tokens=1, chunk_ns=(5,), chunk_tokens=(1,), prefill_s=None).invalid is None


def test_a_claim_beyond_the_text_is_caught_in_the_shortest_window() -> None:
    """10 tokens in 9 ms: both clocks agree to within 20 ms, yet no engine makes a million tokens a second."""
    stamps = tuple(1_000_000 * i for i in range(1, 11))
    fast = sample(max_tokens=10, generated_tokens=10, chunk_ns=stamps, chunk_tokens=None, prefill_s=None, decode_s=9e-6)
    assert "CLOCK_MISMATCH" in str(fast.invalid)


def whole(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


@st.composite
def timed(draw: st.DrawFn) -> Sample:
    """Full-length answers of every speed and shape, honest or lying, sound or mechanically broken."""
    tokens = draw(whole(2, 300))
    window_s = draw(st.floats(0.5, 20.0))
    ttft_s = draw(st.floats(0.01, 30.0))
    steps = sorted(draw(st.lists(st.floats(0.0, 1.0), min_size=tokens - 2, max_size=tokens - 2)))
    stamps = tuple(round((ttft_s + window_s * at) * 1e9) for at in (0.0, *steps, 1.0))
    base = sample(
        max_tokens=tokens,
        chunk_ns=stamps,
        chunk_tokens=draw(st.sampled_from([None, tuple(range(1, tokens + 1))])),
        generated_tokens=tokens,
    )
    honest = (tokens - 1) / base.decode_tps if base.decode_tps else window_s
    decode_s = honest * draw(st.sampled_from([1.0, 0.995, 1.005, 0.3, 2.0]))
    faults: list[dict[str, Any]] = [{}, {}, {"cached_tokens": 9}, {"load_s": 3.0}, {"generated_tokens": tokens + 1}]
    broken = draw(st.sampled_from(faults))
    usage = dataclasses.replace(base.usage or Usage(), decode_s=decode_s, prefill_s=ttft_s * 0.9, **broken)
    return dataclasses.replace(base, usage=usage)


@given(timed(), st.floats(0.2, 5.0))
def test_being_slow_or_fast_never_decides_whether_a_sample_counts(each: Sample, factor: float) -> None:
    usage = each.usage or Usage()
    scaled = dataclasses.replace(
        each,
        chunk_ns=tuple(round(stamp * factor) for stamp in each.chunk_ns),
        usage=dataclasses.replace(
            usage, decode_s=(usage.decode_s or 0) * factor, prefill_s=(usage.prefill_s or 0) * factor
        ),
    )
    kind, scaled_kind = (re.sub(r"[\d.]+", "#", str(reason)) for reason in (each.invalid, scaled.invalid))
    assert kind == scaled_kind


usages = st.builds(
    Usage,
    prompt_tokens=st.none() | whole(0, 10**6),
    cached_tokens=st.none() | whole(0, 10**6),
    generated_tokens=st.none() | whole(0, 10**6),
    prefill_s=st.none() | st.floats(0, 1e6),
    decode_s=st.none() | st.floats(0, 1e6),
    load_s=st.none() | st.floats(0, 1e6),
    stop=st.none() | st.text(),
    truncated=st.booleans(),
)


def rows(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    return tuple(draw(st.lists(whole(0, 2**62), min_size=size, max_size=size)))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Any sample at all, however little sense it makes."""
    size = draw(whole(0, 20))
    counts = rows(draw, size) if draw(st.booleans()) else None
    return dataclasses.replace(draw(bare_samples), chunk_ns=rows(draw, size), chunk_tokens=counts)


bare_samples = st.builds(
    Sample,
    prompt_id=st.text(),
    max_tokens=whole(0, 10**6),
    warmup=st.booleans(),
    shared_tokens=whole(0, 2),
    expected=st.none() | st.text(),
    expected_prompt_tokens=st.none() | whole(0, 10**6),
    sent_ns=whole(0, 2**62),
    connect_ns=st.none() | whole(0, 2**40),
    end_ns=st.none() | whole(0, 2**62),
    status=st.none() | whole(100, 599),
    text=st.text(),
    usage=st.none() | usages,
    fault=st.none() | st.text(),
)


@given(samples())
def test_a_sample_comes_back_from_json_exactly(each: Sample) -> None:
    assert Sample.from_json(json.loads(json.dumps(each.to_json()))) == each


@given(samples())
def test_any_sample_at_all_can_be_judged(each: Sample) -> None:
    assert each.invalid is None or each.invalid
    for name in ("ttft_s", "decode_tps", "server_decode_tps", "prefill_tps", "itl_s", "short", "output_ok"):
        getattr(each, name)


# ── the stream ──────────────────────────────────────────────────────────────────────────────


def test_a_stream_becomes_text_counts_and_stamps(client: Client) -> None:
    each = measure(client, PROMPT, 13, expected=ANSWER, expected_prompt_tokens=4)
    assert each.fault is None
    assert each.text == ANSWER
    assert each.output_ok
    assert each.chunk_tokens == tuple(range(1, 14))
    assert list(each.chunk_ns) == sorted(each.chunk_ns)
    assert each.connect_ns is not None
    assert each.status == 200
    assert each.usage is not None
    assert each.usage.prompt_tokens == 4


def test_no_stamp_is_earlier_than_the_moment_of_sending(start: Start) -> None:
    client = start(Script(ttft_s=0.02))
    each = measure(client, PROMPT, 20)
    assert each.ttft_s is not None
    assert each.ttft_s >= 0.02
    assert all(each.sent_ns + got >= sent for got, sent in zip(each.chunk_ns, client.sent_ns(), strict=True))


def test_nothing_is_parsed_before_the_last_stamp(client: Client) -> None:
    each = measure(client, PROMPT, 10)
    assert client.first_read_ns is not None
    assert each.end_ns is not None
    assert client.first_read_ns >= each.sent_ns + each.end_ns


def test_the_clock_is_a_parameter(client: Client) -> None:
    """A clock that moves 1 ms at each look: stamps are whole milliseconds, whatever the machine does."""
    ticks = iter(range(0, 10**12, 10**6))
    each = measure(client, PROMPT, 10, clock=lambda: next(ticks))
    assert each.sent_ns == 10**6
    assert each.connect_ns == 10**6
    assert all(stamp % 10**6 == 0 for stamp in each.chunk_ns)


def test_each_request_has_a_connection_of_its_own(client: Client) -> None:
    assert [measure(client, PROMPT, 2).fault for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("fault", [Script(), Script(error_after=2)], ids=["sound", "broken"])
def test_garbage_collection_rests_during_the_stream_only(start: Start, fault: Script) -> None:
    client = start(fault)
    during: list[bool] = []

    def clock() -> int:
        during.append(gc.isenabled())
        return time.perf_counter_ns()

    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(0.003)
    measure(client, PROMPT, 5, clock=clock)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert sys.getswitchinterval() == pytest.approx(0.003)
    sys.setswitchinterval(switch_s)
    assert not all(during)


def test_settling_may_complete_the_usage(start: Start) -> None:
    class Settling(Client):
        def settle(self, usage: Usage) -> Usage:
            return dataclasses.replace(usage, cached_tokens=2)

    client = start(Script())
    each = measure(Settling(client.port), PROMPT, 5)
    assert "2 prompt tokens came from a cache" in str(each.invalid)


def test_a_failure_while_settling_is_a_fault_of_the_sample(client: Client) -> None:
    class Settling(Client):
        def settle(self, usage: Usage) -> Usage:
            raise EngineFailed("the runner was replaced")

    assert measure(Settling(client.port), PROMPT, 5).invalid == "the runner was replaced"


def test_a_last_word_in_several_lines_is_put_together(client: Client) -> None:
    class Halting(Client):
        def read(self, line: bytes) -> Chunk | Usage | None:
            item = super().read(line)
            if isinstance(item, Chunk) and item.generated == 5:
                return Usage(stop="length", prompt_tokens=99)
            return dataclasses.replace(item, stop=None) if isinstance(item, Usage) else item

    usage = measure(Halting(client.port), PROMPT, 5).usage
    assert usage is not None
    assert (usage.stop, usage.prompt_tokens, usage.generated_tokens) == ("length", 4, 5)


# ── C2: however the bytes are cut ───────────────────────────────────────────────────────────


@pytest.mark.truth
@pytest.mark.parametrize(
    "changes",
    [{"split_bytes": size} for size in (1, 2, 3, 5, 7, 11, 64)]
    + [{"crlf": True}, {"comments": True}, {"crlf": True, "comments": True, "split_bytes": 3}, {"lingers_s": 0.1}],
    ids=str,
)
def test_the_sample_does_not_depend_on_how_the_stream_is_cut(start: Start, changes: dict[str, Any]) -> None:
    each = measure(start(Script(**changes)), PROMPT, 26, expected=ANSWER * 2)
    assert each.fault is None
    assert each.output_ok
    assert each.chunk_tokens == tuple(range(1, 27))


@contextlib.contextmanager
def in_lockstep(pieces: list[bytes], step_ns: int) -> Iterator[tuple[int, Callable[[], int]]]:
    """A server and a clock that move together: the next piece leaves when the one before has been stamped."""
    now, sending = [0], [False]
    stamped, over = threading.Event(), threading.Event()

    def clock() -> int:
        if sending[0]:
            stamped.set()
        return now[0]

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.recv(65536)
                sending[0] = True
                for piece in pieces:
                    if over.is_set():
                        break
                    now[0] += step_ns
                    stamped.clear()
                    connection.sendall(piece)
                    stamped.wait(30)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], clock
        over.set()
        stamped.set()
        thread.join()


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.truth
@pytest.mark.parametrize("kind", [Client, Uncounted])
@pytest.mark.parametrize("together", [1, 4, 16])
@pytest.mark.parametrize("cut", ["one line", "lines in one chunk", "chunks in one packet"])
def test_tokens_that_come_together_do_not_raise_the_speed(together: int, cut: str, kind: type[Client]) -> None:
    """64 tokens at 100 a second. A client that counts (N - 1) reads 5 % too much with 4 at once, 31 % with 16."""

    def line(at: int, tokens: int) -> bytes:
        event = {"content": " w" * tokens, "stop": False, "tokens_predicted": at + tokens, "sent_ns": 0}
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    timings = {"cache_n": 0, "prompt_n": 4, "prompt_ms": 1, "predicted_n": 64, "predicted_ms": 630}
    last = {"content": "", "stop": True, "stop_type": "limit", "truncated": False, "timings": timings}
    final = chunked(b"data: " + json.dumps(last).encode() + b"\n\n") + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    starts = range(0, 64, together)
    if cut == "one line":
        pieces = [chunked(line(at, together)) for at in starts]
    elif cut == "lines in one chunk":
        pieces = [chunked(b"".join(line(at + i, 1) for i in range(together))) for at in starts]
    else:
        pieces = [b"".join(chunked(line(at + i, 1)) for i in range(together)) for at in starts]
    with in_lockstep([head, *pieces, final], together * 10**7) as (port, clock):
        each = measure(kind(port), PROMPT, 64, clock=clock)
    assert each.invalid is None
    assert each.decode_tps == pytest.approx(100, rel=1e-9)
    assert each.generated_tokens == 64
    assert each.ttft_s == pytest.approx(together * 0.02)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e300", "-1e300", "1" + 400 * "0"])
def test_a_number_that_no_record_can_hold_is_a_fault_of_the_engine(
    number: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Client.read

    def absurd(client: Client, line: bytes) -> Chunk | Usage | None:
        item = read(client, line)
        return dataclasses.replace(item, decode_s=json.loads(number)) if isinstance(item, Usage) else item

    monkeypatch.setattr(Client, "read", absurd)
    each = measure(start(Script()), PROMPT, 8)
    assert each.usage is None
    assert re.fullmatch(
        r"line \d+ of the stream cannot be read: ValueError: decode_s is \S{1,20}, which was never measured",
        each.invalid or "",
    )
    json.dumps(each.to_json(), allow_nan=False)


def test_a_slow_close_changes_no_speed(start: Start) -> None:
    each = measure(start(Script(lingers_s=0.3)), PROMPT, 32)
    assert each.end_ns is not None
    assert each.window_s is not None
    assert each.end_ns / 1e9 - each.window_s > 0.3
    assert each.decode_tps == pytest.approx(31 / each.window_s)


# ── what goes wrong ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script(error_after=3), "the engine reported an error in its stream: scripted error in mid-stream"),
        (Script(no_final=True), "the stream ended without its final object"),
        (Script(garbage=True), "line 5 of the stream cannot be read: JSONDecodeError"),
        (Script(http_error=503), "HTTP 503: scripted error"),
        (Script(dies_after=3, exit_code=-9), "SIGKILL"),
        (Script(dies_after=3, exit_code=5), "exited with code 5"),
        (Script(ends_after=3), "short answer: 4 of 9 tokens"),
        (Script(counts_off=1), "10 tokens came, 9 were asked for"),
        (Script(counts_off=-1), "contradict"),
        (Script(truncated=True), "cut to the context"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_what_breaks_is_named_and_nothing_is_raised(start: Start, script: Script, reason: str) -> None:
    each = measure(start(script), PROMPT, 9)
    assert reason in str(each.invalid)


def test_an_engine_that_died_is_explained_although_the_stream_looked_whole(start: Start) -> None:
    each = measure(start(Script(dies_after=3, exit_code=5)), PROMPT, 9)
    assert len(each.chunk_ns) == 3
    assert each.text == " quick brown fox"


def test_silence_ends_in_a_fault_and_never_in_a_hang(start: Start) -> None:
    client = start(Script(silent_after=2))
    each = measure(client, PROMPT, 9, timeouts=Timeouts(gap_s=0.5))
    assert each.invalid == "nothing came for 0.5 s after 4 lines"
    assert len(each.chunk_ns) == 2


def test_a_first_token_that_does_not_come_is_a_fault(start: Start) -> None:
    each = measure(start(Script(ttft_s=30)), PROMPT, 9, timeouts=Timeouts(first_s=0.2))
    assert each.invalid == "nothing came for 0.2 s after 0 lines"


def test_a_stream_that_never_ends_is_given_up(start: Start) -> None:
    each = measure(start(Script(itl_s=0.01)), PROMPT, 100_000, timeouts=Timeouts(total_s=0.3))
    assert "the request took longer than 0.3 s" in str(each.invalid)


def test_a_stream_that_flows_without_end_is_given_up() -> None:
    line = b'data: {"stop":false,"content":" word","tokens_predicted":1,"sent_ns":1}\n'
    with in_lockstep([b"HTTP/1.1 200 OK\r\n\r\n", *[line] * 1000], 10**8) as (port, clock):
        each = measure(Client(port), PROMPT, 9, clock=clock, timeouts=Timeouts(total_s=2.0))
    assert "the request took longer than 2 s" in str(each.invalid)
    assert len(each.chunk_ns) == 19


def test_a_refused_connection_is_a_fault() -> None:
    each = measure(Client(process.free_port()), PROMPT, 9)
    assert "no connection to 127.0.0.1" in str(each.invalid)


def test_a_server_that_hangs_up_at_once_is_a_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=lambda: listener.accept()[0].close())
        thread.start()
        each = measure(Client(port), PROMPT, 9)
        thread.join()
    assert "the stream broke off" in str(each.invalid)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": "plain text"}', "HTTP 500: plain text"),
        (b'{"error": {"message": "inside", "code": 500}}', "HTTP 500: inside"),
        (b"<html>proxy</html>", "HTTP 500: <html>proxy</html>"),
        (b"", "HTTP 500: no reason given"),
        (b'"error"', 'HTTP 500: "error"'),
    ],
)
def test_the_reason_of_an_error_reply_is_read_whatever_its_shape(body: bytes, message: str) -> None:
    with answering(b"HTTP/1.1 500 No\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) as port:
        assert measure(Client(port), PROMPT, 9).invalid == message


@pytest.mark.parametrize("cut", [20, 60, 200])
def test_a_stream_cut_inside_a_line_is_a_stream_without_an_end(cut: int) -> None:
    line = b'data: {"stop":false,"content":" word","tokens_predicted":1,"sent_ns":1}\n'
    body = (line * 3)[: len(line) + cut]
    with answering(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + body) as port:
        each = measure(Client(port), PROMPT, 9)
    assert each.invalid == "the stream ended without its final object"
    assert each.text


@contextlib.contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """A server for one request, whatever it is; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


# ── C4: figures of the engine's own ─────────────────────────────────────────────────────────


@pytest.mark.truth
def test_engines_that_count_the_first_token_read_the_same_as_those_that_do_not(start: Start) -> None:
    old, new = (start(Script(itl_s=0.002, counts_first_token=old)) for old in (True, False))
    for client in (old, new):
        each = measure(client, PROMPT, 64)
        timings = client.events[-1]["timings"]
        steps = 64 if client is old else 63
        assert timings["predicted_per_second"] == pytest.approx(1000 * steps / timings["predicted_ms"])
        assert each.server_decode_tps == pytest.approx(63_000 / timings["predicted_ms"], rel=0.001)
        assert each.fault is None


@pytest.mark.truth
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_wrong_clock_of_the_engine_is_a_mismatch(start: Start, factor: float) -> None:
    each = measure(start(Script(itl_s=0.01, decode_time_factor=factor)), PROMPT, 64)
    assert "CLOCK_MISMATCH" in str(each.invalid)


@pytest.mark.truth
def test_a_cached_prompt_is_invalid_but_a_shared_token_is_not(start: Start) -> None:
    client = start(Script(cached=1))
    assert "1 prompt tokens came from a cache" in str(measure(client, PROMPT, 5).invalid)
    assert "cache" not in str(measure(client, PROMPT, 5, shared_tokens=1).invalid)


# ── C1: as good as a bare socket ────────────────────────────────────────────────────────────


def bare(port: int, request: Request) -> list[tuple[int, int]]:
    """The same request with nothing between the socket and the clock: (received, sent) of each chunk."""
    head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request.body)}\r\n\r\n".encode()
    received: list[tuple[int, bytes]] = []
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(head + request.body)
        while data := sock.recv(65536):
            received.append((time.perf_counter_ns(), data))
            if data.endswith(b"\r\n0\r\n\r\n"):
                break
    return [(now, int(sent)) for now, data in received for sent in re.findall(rb'"sent_ns":(\d+)', data)]


@pytest.mark.truth
def test_stamps_are_as_good_as_those_of_a_bare_socket(start: Start) -> None:
    """Interleaved, in one run, against the moments of sending; in ratio, for the machine may be busy."""
    client = start(Script(itl_s=0.004, ttft_s=0.02))
    late_ms: dict[str, list[float]] = {"ours": [], "bare": []}
    gap_ms: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(8):
        each = measure(client, PROMPT, 48)
        assert each.fault is None
        ours = [each.sent_ns + stamp for stamp in each.chunk_ns]
        pairs = {
            "ours": list(zip(ours, client.sent_ns(), strict=True)),
            "bare": bare(client.port, client.request(PROMPT, 48)),
        }
        client.events.clear()
        for name, found in pairs.items():
            assert len(found) == 48
            late = [(got - sent) / 1e6 for got, sent in found]
            late_ms[name] += late
            gap_ms[name] += [abs(after - before) for before, after in pairwise(late)]
    for errors in (late_ms, gap_ms):
        for percent, slack_ms in ((50, 0.2), (90, 2.0)):
            ours_ms, bare_ms = (statistics.quantiles(errors[name], n=100)[percent - 1] for name in ("ours", "bare"))
            assert ours_ms <= 1.5 * bare_ms + slack_ms, f"p{percent}: {ours_ms:.3f} ms, a bare socket {bare_ms:.3f} ms"
