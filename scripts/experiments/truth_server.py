"""An OpenAI-compatible server whose timing is known: it notes when each request came and each chunk left.

Tokens come at absolute deadlines, some of them to a chunk. The stamps (CLOCK_MONOTONIC, which all
processes of a machine share) go to a file, one JSON line a request, so that what any client
reports can be compared with what really happened. It needs nothing but Python.

    python truth_server.py --log stamps.jsonl [--per-chunk 4] [--itl-ms 10] [--ttft-ms 50]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

WORDS = (" the", " quick", " brown", " fox", " jumps", " over", " a", " lazy", " dog")
SPREAD_MS = 20.0  # the time to the first token differs by up to this from request to request: they can be told apart
SO_TIMESTAMPNS = 35  # of Linux; the note that comes with the bytes has the same number
PAUSE_S = 0.001  # after the last chunk, as after any other: a client on the same core must not wait for our log
DIALECTS = {"/v1/chat/completions": "chat", "/v1/completions": "text", "/completion": "native"}


@dataclass
class Reply:
    """One request: what was asked for, and the truth about it."""

    number: int
    dialect: str
    body: dict[str, Any]
    arrived_ns: int
    wanted: int
    prompt_tokens: int
    itl_ms: float
    tells: bool
    sent_ns: list[int] = field(default_factory=list)  # before each chunk was handed to the socket
    counts: list[int] = field(default_factory=list)  # all tokens up to and with that chunk
    complete: bool = False  # all chunks were handed over

    def truth(self) -> dict[str, Any]:
        asked = {"number": self.number, "dialect": self.dialect, "stream": bool(self.body.get("stream"))}
        return asked | {
            "arrived_ns": self.arrived_ns,
            "sent_ns": self.sent_ns,
            "counts": self.counts,
            "complete": self.complete,
        }

    # ── what it looks like ──────────────────────────────────────────────────────────────────

    def timings(self) -> dict[str, Any]:
        """As llama-server gives them; its rate is over the steps after the first token."""
        tokens = self.counts[-1]
        first_ns = self.sent_ns[0] - int((self.counts[0] - 1) * self.itl_ms * 1e6)  # the first token waits in its chunk
        prompt_ms, decode_ms = (first_ns - self.arrived_ns) / 1e6, (self.sent_ns[-1] - first_ns) / 1e6
        return {
            "cache_n": 0,
            "prompt_n": self.prompt_tokens,
            "prompt_ms": prompt_ms,
            "predicted_n": tokens,
            "predicted_ms": decode_ms,
            "predicted_per_second": 1e3 * (tokens - 1) / decode_ms if decode_ms else None,
        }

    def usage(self) -> dict[str, Any]:
        made = self.counts[-1] if self.counts else 0
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def event(self, choice: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        chat = self.dialect == "chat"
        common: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.number}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.body.get("model", "truth"),
        }
        return common | {"choices": [] if choice is None else [{"index": 0, "finish_reason": None} | choice]} | more

    def chunk(self, text: str) -> list[dict[str, Any]]:
        """The events of some tokens. A chat begins with one that has a role and no text, in the same piece.

        The OpenAI dialects say how many tokens there are only if the server `tells`, and is asked.
        """
        if self.dialect == "native":
            return [{"content": text, "stop": False, "tokens_predicted": self.counts[-1]}]
        options = (self.body.get("stream_options") or {}) if self.tells else {}
        more = {"usage": self.usage()} if options.get("continuous_usage_stats") else {}
        ids: dict[str, Any] = {}
        if self.tells and self.body.get("return_token_ids"):
            ids = {"token_ids": list(range(self.counts[-2] if len(self.counts) > 1 else 0, self.counts[-1]))}
        if self.dialect == "text":
            return [self.event({"text": text} | ids, **more)]
        first = [self.event({"delta": {"role": "assistant", "content": None}})] if len(self.counts) == 1 else []
        return [*first, self.event({"delta": {"content": text}} | ids, **more)]

    def final(self) -> list[dict[str, Any] | str]:
        if self.dialect == "native":
            return [{"content": "", "stop": True, "stop_type": "limit", "truncated": False, "timings": self.timings()}]
        ends: dict[str, Any] = {"delta": {}} if self.dialect == "chat" else {"text": ""}
        last = self.event(ends | {"finish_reason": "length"})
        asked = (self.body.get("stream_options") or {}).get("include_usage")
        usage = [self.event(None, usage=self.usage(), timings=self.timings())] if asked else []
        return [last, *usage, "[DONE]"]

    def whole(self, text: str) -> dict[str, Any]:
        if self.dialect == "native":
            return {"content": text, "stop": True, "stop_type": "limit", "timings": self.timings()}
        says: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        choice = (says if self.dialect == "chat" else {"text": text}) | {"finish_reason": "length"}
        return self.event(choice, usage=self.usage()) | (
            {"object": "chat.completion"} if self.dialect == "chat" else {}
        )


class Server:
    """A thread for each connection; nothing but sleep between deadlines."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.log = Path(options.log).open("a", encoding="utf-8")  # noqa: SIM115 -- open as long as the process
        self.lock = threading.Lock()
        self.requests = 0

    def serve(self) -> NoReturn:
        with socket.create_server(("127.0.0.1", self.options.port), backlog=64) as listener:
            sys.stdout.write(f"listening on http://127.0.0.1:{listener.getsockname()[1]}\n")
            sys.stdout.flush()
            gc.freeze()
            gc.disable()
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            try:
                for method, path, body, arrived_ns in requests(connection):
                    if method == "POST" and path in DIALECTS:
                        self._complete(connection, DIALECTS[path], body, arrived_ns)
                        if self.options.hangs_up and body.get("stream"):
                            return
                    else:
                        connection.sendall(self._other(path, body))
            except OSError:  # the client has gone
                return

    def _other(self, path: str, body: dict[str, Any]) -> bytes:
        model = {"id": "truth", "object": "model", "owned_by": "nobody"}
        known = {
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [model]},
            "/tokenize": {"tokens": list(range(len(str(body.get("content", "")).split())))},
        }
        return whole_reply(known[path]) if path in known else whole_reply({"error": {"message": "no such path"}}, 404)

    def _complete(self, connection: socket.socket, dialect: str, body: dict[str, Any], arrived_ns: int) -> None:
        prompt = body.get("prompt") or " ".join(str(each.get("content")) for each in body.get("messages", ()))
        wanted = body.get("max_tokens") or body.get("max_completion_tokens") or body.get("n_predict")
        with self.lock:
            number = self.requests
            self.requests += 1
        reply = Reply(
            number=number,
            dialect=dialect,
            body=body,
            arrived_ns=arrived_ns,
            wanted=int(wanted or 64),
            prompt_tokens=len(str(prompt).split()),
            itl_ms=self.options.itl_ms,
            tells=self.options.tells,
        )
        try:
            if body.get("stream"):
                sys.stdout.write(f"stream {number}\n")
                sys.stdout.flush()
                head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
                connection.sendall(head + b"Keep-Alive: timeout=5, max=100\r\n\r\n")
                for text in self._tokens(reply):
                    data = b"".join(map(event, reply.chunk(text)))
                    piece = b"%x\r\n%s\r\n" % (len(data), data)
                    reply.sent_ns[-1] = time.monotonic_ns()
                    connection.sendall(piece)
                time.sleep(PAUSE_S)
                data = b"".join(map(event, reply.final()))
                last = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
            else:
                last = whole_reply(reply.whole("".join(self._tokens(reply))))
            reply.complete = True
        finally:  # before the last word, so that whoever has that finds the truth in the file
            with self.lock:
                self.log.write(json.dumps(reply.truth()) + "\n")
                self.log.flush()
        connection.sendall(last)

    def _tokens(self, reply: Reply) -> Iterator[str]:
        """The text of each chunk at its deadline, which is that of its last token."""
        options = self.options
        # 7 and 11 have no common factor: eleven requests in a row have eleven different values
        first_ms = options.ttft_ms + SPREAD_MS * (reply.number * 7 % 11) / 11
        made = 0
        while made < reply.wanted:
            count = min(options.per_chunk, reply.wanted - made)
            due_ns = reply.arrived_ns + int((first_ms + (made + count - 1) * options.itl_ms) * 1e6)
            text = "".join(WORDS[(made + each) % len(WORDS)] for each in range(count))
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            made += count
            reply.counts.append(made)
            reply.sent_ns.append(time.monotonic_ns())
            yield text


def requests(connection: socket.socket) -> Iterator[tuple[str, str, dict[str, Any], int]]:
    """(method, path, JSON body, when its last byte was here) of each request on a connection."""
    if sys.platform == "linux":
        connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    data, came_ns = b"", 0
    while True:
        while b"\r\n\r\n" not in data:
            more, came_ns = receive(connection)
            if not more:
                return
            data += more
        head, _, rest = data.partition(b"\r\n\r\n")
        start, *lines = head.decode("latin-1").split("\r\n")
        headers = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        size = int(headers.get("content-length", 0))
        while len(rest) < size:
            more, came_ns = receive(connection)
            if not more:
                return
            rest += more
        method, path, _ = start.split(" ", 2)
        yield method, path.partition("?")[0], json.loads(rest[:size]) if size else {}, came_ns
        data = rest[size:]
        if headers.get("connection", "").lower() == "close":
            return


def receive(connection: socket.socket) -> tuple[bytes, int]:
    """Bytes, and when the kernel had them, if it says: a server that is woken late does not shorten what it tells.

    The kernel stamps by the clock of the day; both clocks are read here to get from one to the other.
    """
    data, notes, _, _ = connection.recvmsg(1 << 16, 256)
    now_ns, today_ns = time.monotonic_ns(), time.time_ns()
    for _, kind, note in notes:
        if kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = struct.unpack("qq", note[:16])
            return data, now_ns - (today_ns - (seconds * 10**9 + nanoseconds))
    return data, now_ns


def event(data: dict[str, Any] | str) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


def whole_reply(data: Any, status: int = 200) -> bytes:
    body = json.dumps(data).encode()
    head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Not Found'}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", required=True, help="one JSON line for each request")
    parser.add_argument("--port", type=int, default=0, help="0: any free one; it is printed")
    parser.add_argument("--per-chunk", type=int, default=1, help="tokens in a chunk")
    parser.add_argument("--itl-ms", type=float, default=10.0, help="between tokens")
    parser.add_argument("--ttft-ms", type=float, default=50.0, help=f"to the first token; up to {SPREAD_MS:g} more")
    parser.add_argument("--tells", action="store_true", help="say how many tokens a chunk holds to those who ask")
    parser.add_argument(
        "--hangs-up",
        action="store_true",
        help="close the connection after each stream, unannounced, as llama-server does",
    )
    parser.add_argument("--real-time", action="store_true", help="keep its deadlines on a busy machine; needs root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    options = parser.parse_args()
    if options.real_time:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    Server(options).serve()


if __name__ == "__main__":
    main()
