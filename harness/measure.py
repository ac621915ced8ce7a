"""The only clock: one timed stream, from the request to its last byte.

`measure` sends what a session asks for and notes when each line came; the session says what the
lines mean only after the last one. A `Sample` keeps the raw stamps as integers, and every speed,
and whether the sample counts, is derived from them.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import io
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, cast
from urllib.parse import urlsplit

from harness.contract import Chunk, Prompt, Request, Session, Usage, is_measurable
from harness.errors import EngineFailed

CLOCKS_DIFFER_S = 0.020  # client and engine may differ by this, or by 1 % of the window
CLOCKS_DIFFER = 0.01
PREFILL_AHEAD_S = 0.002  # rounding of the engine's own prefill time
CLAIM = 1.02  # no clock may show more than this times the tokens in the time they had
SHORT_WINDOW_S = 2.0  # a short answer counts if its decode window is this long
RELOAD_S = 0.5  # Ollama reports a few ms of "loading" for a model that is loaded
TOKEN_BY_TOKEN = 0.95  # chunks per token from which a gap between chunks is one between tokens
DEATH_S = 0.5  # a process may still be ending when its socket is closed
NO_END = "the stream ended without its final object"
SWITCH_S = 0.0005  # how long another thread of ours may keep a stamp waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the engine may be silent. The whole prefill lies before the first line."""

    connect_s: float = 10.0
    first_s: float = 600.0
    gap_s: float = 60.0
    total_s: float = 3600.0


@dataclass(frozen=True, kw_only=True)  # without slots: what a report asks for again and again is kept
class Sample:
    """One timed generation, raw. Stamps are whole nanoseconds since the request was sent.

    `chunk_ns` has one stamp for each line that carried text: when its last byte came. Lines that
    came together have the same stamp. `chunk_tokens` counts all tokens up to and with each of
    them, where the engine says so. `shared_tokens` may come from a cache: tokens with which every
    prompt of this model begins. `fault` is what broke on the wire.
    """

    prompt_id: str
    max_tokens: int
    warmup: bool = False
    shared_tokens: int = 0
    expected: str | None = None
    expected_prompt_tokens: int | None = None
    sent_ns: int  # by the client's clock; the zero of all other stamps
    connect_ns: int | None = None  # spent before the request, on TCP alone
    chunk_ns: tuple[int, ...] = ()
    chunk_tokens: tuple[int, ...] | None = None
    end_ns: int | None = None
    status: int | None = None
    text: str = ""
    usage: Usage | None = None
    fault: str | None = None

    # ── speeds ──────────────────────────────────────────────────────────────────────────────

    @property
    def ttft_s(self) -> float | None:
        """From the request to the first text."""
        return self.chunk_ns[0] / 1e9 if self.chunk_ns else None

    @property
    def window_s(self) -> float | None:
        """From the first text to the last: what the decode speed is measured over."""
        return (self.chunk_ns[-1] - self.chunk_ns[0]) / 1e9 if self.chunk_ns else None

    @property
    def prompt_tokens(self) -> int | None:
        return self.usage.prompt_tokens if self.usage else None

    @property
    def generated_tokens(self) -> int | None:
        return self.usage.generated_tokens if self.usage else None

    @cached_property
    def decode_tps(self) -> float | None:
        """Tokens per second by the client's clock: those after the first text came, over the window.

        Without counts per chunk, the lines that came first hold their share of all tokens; and an
        end-of-text token is counted by engines but brings no text.
        """
        if not (self.window_s and self.generated_tokens):
            return None
        together = self.chunk_ns.count(self.chunk_ns[0])
        if self.chunk_tokens is not None:
            first, last = float(self.chunk_tokens[together - 1]), self.chunk_tokens[-1]
        else:
            last = self.generated_tokens - (self.usage is not None and self.usage.stop == "stop")
            first = together * max(1.0, last / len(self.chunk_ns))
        return (last - first) / self.window_s if last > first else None

    @property
    def server_decode_tps(self) -> float | None:
        """The same by the engine's clock: its time starts when the first token is there."""
        seconds = self.usage.decode_s if self.usage else None
        tokens = (self.usage.generated_tokens if self.usage else None) or 0
        return (tokens - 1) / seconds if seconds is not None and seconds > 0 and tokens >= 2 else None

    @property
    def prefill_tps(self) -> float | None:
        """Evaluated prompt tokens per second by the engine's clock. None if the cached part is unknown."""
        if self.usage is None or self.usage.prompt_tokens is None or self.usage.cached_tokens is None:
            return None
        evaluated, seconds = self.usage.prompt_tokens - self.usage.cached_tokens, self.usage.prefill_s
        return evaluated / seconds if seconds is not None and seconds > 0 and evaluated > 0 else None

    @property
    def overhead_s(self) -> float | None:
        """TTFT beyond the engine's prefill: queue, template, tokenizer, first flush."""
        if self.ttft_s is None or self.usage is None or self.usage.prefill_s is None:
            return None
        return self.ttft_s - self.usage.prefill_s

    @property
    def itl_s(self) -> tuple[float, ...] | None:
        """Gaps between tokens. None where a chunk is not a token."""
        if not self.generated_tokens or len(self.chunk_ns) < TOKEN_BY_TOKEN * self.generated_tokens:
            return None
        return tuple((after - before) / 1e9 for before, after in pairwise(self.chunk_ns))

    # ── whether it counts ───────────────────────────────────────────────────────────────────

    @property
    def short(self) -> bool:
        """Fewer tokens than asked for, over a window that is long enough to count."""
        return (self.generated_tokens or 0) < self.max_tokens and (self.window_s or 0.0) >= SHORT_WINDOW_S

    @property
    def output_ok(self) -> bool | None:
        """Whether the text is the one that a correct engine writes; None if that is not known."""
        return None if self.expected is None or self.usage is None or self.fault else self.text == self.expected

    @cached_property
    def invalid(self) -> str | None:
        """The mechanical reason why this sample does not count. Slow or fast is never one."""
        return self.fault or self._incomplete() or self._other_work() or self._miscounted() or self._clock_mismatch()

    def _incomplete(self) -> str | None:
        if self.status != 200:
            return f"HTTP {self.status}"
        if self.usage is None:
            return NO_END
        if self.usage.truncated:
            return "the prompt or the answer was cut to the context; raise the context"
        return None

    def _other_work(self) -> str | None:
        usage = self.usage or Usage()
        if usage.load_s is not None and usage.load_s > RELOAD_S:
            return f"the model was loaded again during the request ({usage.load_s:.1f} s)"
        if usage.cached_tokens is not None and usage.cached_tokens > self.shared_tokens:
            return f"{usage.cached_tokens} prompt tokens came from a cache"
        if None not in (usage.prompt_tokens, self.expected_prompt_tokens) and (
            usage.prompt_tokens != self.expected_prompt_tokens
        ):
            return f"the prompt had {usage.prompt_tokens} tokens, not {self.expected_prompt_tokens}"
        return None

    def _miscounted(self) -> str | None:
        tokens, window_s = self.generated_tokens, self.window_s
        if tokens is None:
            return "the engine gave no token count"
        if not tokens or window_s is None:
            return f"no text came ({tokens} tokens by the engine's count)"
        if tokens > self.max_tokens:
            return f"{tokens} tokens came, {self.max_tokens} were asked for"
        counts = self.chunk_tokens or (1,)
        if counts[0] < 1 or counts[-1] > tokens or sorted(counts) != list(counts):
            return f"the counts in the stream (last {counts[-1]}) contradict the final one ({tokens})"
        if tokens < self.max_tokens and not self.short:
            return f"short answer: {tokens} of {self.max_tokens} tokens in {window_s:.2f} s"
        decode_s = self.usage.decode_s if self.usage else None
        if tokens > 1 and not window_s and (decode_s is None or decode_s > CLOCKS_DIFFER_S):
            return f"all {tokens} tokens came in one piece, so they were not timed"
        return None

    def _clock_mismatch(self) -> str | None:
        """Client and engine must have seen the same decode steps, and the prefill before the first text."""
        if self.overhead_s is not None and self.overhead_s < -PREFILL_AHEAD_S:
            return f"CLOCK_MISMATCH: text came {-self.overhead_s:.3f} s before the engine says its prefill ended"
        pieces = len(set(self.chunk_ns))
        if (self.usage is None or self.usage.decode_s is None) and 2 * pieces < len(self.chunk_ns):
            return f"{len(self.chunk_ns)} lines came in {pieces} pieces, and the engine has no clock to check with"
        client, server, window_s = self.decode_tps, self.server_decode_tps, self.window_s
        if client is None or server is None or not window_s or not self.generated_tokens:
            return None
        steps = self.generated_tokens - 1
        apart_s = abs(steps / client - steps / server)
        # in a window shorter than the tolerance a claim is still bounded by the text itself
        most_tps = CLAIM * self.generated_tokens / max(window_s - CLOCKS_DIFFER_S, window_s / 2)
        if apart_s <= max(CLOCKS_DIFFER_S, CLOCKS_DIFFER * window_s) and server <= most_tps:
            return None
        return f"CLOCK_MISMATCH: the engine claims {server:.1f} tok/s, its text came at {client:.1f}"

    # ── on disk ─────────────────────────────────────────────────────────────────────────────

    def to_json(self) -> dict[str, Any]:
        """As JSON data; `from_json` gives the same sample back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sample:
        values = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        values["chunk_ns"] = tuple(values.get("chunk_ns", ()))
        if values.get("chunk_tokens") is not None:
            values["chunk_tokens"] = tuple(values["chunk_tokens"])
        if values.get("usage") is not None:
            values["usage"] = Usage(**values["usage"])
        return cls(**values)


# ── the stream ──────────────────────────────────────────────────────────────────────────────


def measure(
    session: Session,
    prompt: Prompt,
    max_tokens: int,
    *,
    warmup: bool = False,
    expected: str | None = None,
    expected_prompt_tokens: int | None = None,
    shared_tokens: int = 0,
    clock: Callable[[], int] = time.perf_counter_ns,
    timeouts: Timeouts = Timeouts(),
) -> Sample:
    """Time one request. What goes wrong on the wire is in the sample, nothing is raised for it.

    `clock` counts nanoseconds. `expected` is the text of a correct engine; `shared_tokens`, the
    number of tokens with which every prompt begins (a BOS token), may come from a cache.
    """
    stream = _receive(session.request(prompt, max_tokens), clock, timeouts)
    chunks, usage, fault = _interpret(session, stream)
    counts = [chunk.generated for _, chunk in chunks if chunk.generated is not None]
    return Sample(
        prompt_id=prompt.id,
        max_tokens=max_tokens,
        warmup=warmup,
        shared_tokens=shared_tokens,
        expected=expected,
        expected_prompt_tokens=expected_prompt_tokens,
        sent_ns=stream.sent_ns,
        connect_ns=stream.connect_ns,
        chunk_ns=tuple(stamp for stamp, _ in chunks),
        chunk_tokens=tuple(counts) if counts and len(counts) == len(chunks) else None,
        end_ns=stream.end_ns,
        status=stream.status,
        text="".join(chunk.text for _, chunk in chunks),
        usage=usage,
        fault=fault,
    )


@dataclass(slots=True)
class _Stream:
    """What came over the wire: lines with their stamps since `sent_ns`, and what broke."""

    sent_ns: int
    connect_ns: int | None = None
    status: int | None = None
    lines: list[tuple[int, bytes]] = field(default_factory=list)
    end_ns: int | None = None
    fault: str | None = None


class _Wire(io.RawIOBase):
    """The receiving end of a socket that notes when bytes came, before anything looks at them."""

    def __init__(self, sock: socket.socket, clock: Callable[[], int], timeouts: Timeouts) -> None:
        self.sock, self.clock, self.timeouts = sock, clock, timeouts
        self.silence_s = timeouts.first_s
        self.sent_ns = self.came_ns = clock()

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002 -- what http.client asks of a socket
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self.timeouts.total_s - (self.came_ns - self.sent_ns) / 1e9
        if left_s <= 0:
            raise TimeoutError
        self.sock.settimeout(min(self.silence_s, left_s))
        count = self.sock.recv_into(buffer)
        self.came_ns = self.clock()
        return count

    def why_timed_out(self, lines: int) -> str:
        if (self.clock() - self.sent_ns) / 1e9 >= self.timeouts.total_s:
            return f"the request took longer than {self.timeouts.total_s:g} s"
        return f"nothing came for {self.silence_s:g} s after {lines} lines"


def _receive(request: Request, clock: Callable[[], int], timeouts: Timeouts) -> _Stream:
    """Connect, send, and stamp each line; parse none."""
    url = urlsplit(request.url)
    host, port = url.hostname or "127.0.0.1", url.port or 80
    try:
        message = _message(request, host, port)
    except http.client.HTTPException as error:
        return _Stream(clock(), fault=f"no such request can be sent: {error}")
    began_ns = clock()
    try:
        sock = socket.create_connection((host, port), timeouts.connect_s)
    except OSError as error:
        return _Stream(began_ns, fault=f"no connection to {host}:{port}: {error}")
    with sock, _undisturbed():
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = _Wire(sock, clock, timeouts)
        stream = _Stream(wire.sent_ns, connect_ns=wire.sent_ns - began_ns)
        try:
            sock.sendall(message)
            response = http.client.HTTPResponse(cast("socket.socket", wire), method="POST")
            response.begin()
            stream.status = response.status
            while line := response.readline():
                stream.lines.append((wire.came_ns - wire.sent_ns, line))
                wire.silence_s = timeouts.gap_s
        except TimeoutError:
            stream.fault = wire.why_timed_out(len(stream.lines))
        except (http.client.HTTPException, OSError) as error:
            stream.fault = f"the stream broke off after {len(stream.lines)} lines ({type(error).__name__})"
        stream.end_ns = clock() - wire.sent_ns
    return stream


def _message(request: Request, host: str, port: int) -> bytes:
    """The whole request in one piece: two would wake the engine twice, and be written on the engine's time."""
    url = urlsplit(request.url)
    connection, kept = http.client.HTTPConnection(host, port), _Kept()
    connection.sock = cast("socket.socket", kept)
    target = url.path + (f"?{url.query}" if url.query else "")
    connection.request("POST", target, request.body, dict(request.headers))
    return b"".join(kept.parts)


class _Kept:
    """Stands for a socket, and keeps what is sent."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self.parts.append(data)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection, and short turns for our other threads, while a stream is timed."""
    collects, switch_s = gc.isenabled(), sys.getswitchinterval()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(switch_s)
        gc.unfreeze()
        if collects:
            gc.enable()


def _interpret(session: Session, stream: _Stream) -> tuple[list[tuple[int, Chunk]], Usage | None, str | None]:
    """What the lines mean: stamped text, the last word of the engine, and what went wrong."""
    chunks: list[tuple[int, Chunk]] = []
    usage: Usage | None = None
    if stream.status not in (None, 200):
        body = b"".join(line for _, line in stream.lines)
        return chunks, usage, f"HTTP {stream.status}: {_error_text(body)}"
    for number, (stamp, line) in enumerate(stream.lines, 1):
        try:
            item = _with_numbers(session.read(line.rstrip(b"\r\n"))) if line.strip() else None
        except EngineFailed as error:
            return chunks, usage, f"the engine reported an error in its stream: {error}"
        except Exception as error:  # an adapter may trip over anything that a broken engine sends
            if not line.endswith(b"\n"):
                break  # cut off in the middle of a line
            return chunks, usage, f"line {number} of the stream cannot be read: {type(error).__name__}: {error}"
        if isinstance(item, Usage):
            usage = _merged(usage, item)
        elif item is not None and item.text:
            chunks.append((stamp, item))
    if stream.fault or usage is None:
        fault = stream.fault or NO_END
        death = _cause_of_death(session)
        return chunks, usage, f"{fault}: {death}" if death else fault
    try:
        return chunks, session.settle(usage), None
    except EngineFailed as error:
        return chunks, usage, str(error)


def _with_numbers(item: Chunk | Usage | None) -> Chunk | Usage | None:
    """The same. Raises ValueError for a number that no record can hold, such as NaN."""
    for each in fields(item) if item is not None else ():
        value = getattr(item, each.name)
        if isinstance(value, int | float) and not is_measurable(value):
            raise ValueError(f"{each.name} is {str(value)[:20]}, which was never measured")
    return item


def _merged(before: Usage | None, after: Usage) -> Usage:
    """An engine may give its last word in several lines; what is known stays known."""
    if before is None:
        return after
    known = {each.name: getattr(after, each.name) for each in fields(after)}
    return replace(before, **{name: value for name, value in known.items() if value not in (None, False)})


def _cause_of_death(session: Session) -> str | None:
    """Ask for a little while: a process may still be ending when its socket is closed."""
    deadline = time.monotonic() + DEATH_S
    while not (death := session.death()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return death


def _error_text(body: bytes) -> str:
    """The message of an error reply: `{"error": text}`, `{"error": {"message": text}}`, or as it stands."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(body)["error"]
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return body.decode(errors="replace")[:200].strip() or "no reason given"
