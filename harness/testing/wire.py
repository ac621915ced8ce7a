"""Lines of a fake engine's stream on their way out: chunked HTTP, with the tricks of a script."""

from __future__ import annotations

import json
import time
from typing import Any, BinaryIO

from harness.testing.script import Script


class Lines:
    """One reply. Server-sent events, or JSON lines if not `sse`."""

    def __init__(self, socket: Any, script: Script, *, sse: bool) -> None:
        self.socket: BinaryIO = socket
        self.script, self.sse = script, sse
        self.waiting: list[bytes] = []
        self.sent = 0

    def send(self, data: Any, *, stamp: bool = False) -> None:
        """One object, or a word such as `[DONE]`. With `stamp` it says when it left."""
        self.sent += 1
        end = b"\r\n" if self.script.crlf else b"\n"
        if self.sent == 3 and self.script.garbage:
            self.waiting.append((b"data: " if self.sse else b"") + b'{"cut off' + end * (2 if self.sse else 1))
        if self.sent % 2 and self.script.comments and self.sse:
            self.waiting.append(b": keep-alive" + end * 2)
        if stamp:
            data = data | {"sent_ns": time.perf_counter_ns()}
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        self.waiting.append(b"data: " + text.encode() + end * 2 if self.sse else text.encode() + end)
        if len(self.waiting) >= self.script.burst or not stamp:
            self.flush()

    def flush(self) -> None:
        """Hand what waits to the socket in one piece, or in pieces of `split_bytes`."""
        data, self.waiting = b"".join(self.waiting), []
        size = self.script.split_bytes or len(data) or 1
        for at in range(0, len(data), size):
            piece = data[at : at + size]
            self.socket.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def close(self, after_s: float = 0.0) -> None:
        self.flush()
        time.sleep(after_s)
        self.socket.write(b"0\r\n\r\n")
