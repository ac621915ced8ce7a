"""A loopback proxy that makes a streaming server slower by so much a token, and says by how much it did.

    python scripts/experiments/slow_proxy.py PORT UPSTREAM_PORT DELAY_US LOG

Token k of an answer is handed on k delays after it came, however late the server is read, so that the stream is
slower by exactly one delay a token. For each request a line goes into LOG: tokens, the seconds between first and
last as they came from the server, and as they were handed on.
"""

from __future__ import annotations

import json
import queue
import re
import socket
import sys
import threading
import time
from pathlib import Path

END = b"\r\n\r\n"
LAST = re.compile(rb'"stop": ?true')  # in the event after the last token, which brings none
SPIN_S = 0.0002  # a sleep wakes up this much too late, so the last bit is waited for awake


def serve(port: int, upstream: int, delay_s: float, log: Path) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            client, _ = server.accept()
            with client:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hand_on(client, upstream, delay_s, log)


def hand_on(client: socket.socket, upstream: int, delay_s: float, log: Path) -> None:
    """One request and its answer. A connection that asks nothing is only a look whether we are there."""
    request = receive_request(client)
    if not request:
        return
    with socket.create_connection(("127.0.0.1", upstream)) as server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.sendall(request.replace(END, b"\r\nConnection: close" + END, 1))
        pieces: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threading.Thread(target=receive, args=(server, pieces), daemon=True).start()
        tokens, came, sent = 0, [], []
        while (piece := pieces.get())[1]:
            stamp, data = piece
            events = data.count(b"data: ") - len(LAST.findall(data))
            tokens += events
            if events:
                wait_until(stamp + delay_s * (tokens - 1))
            client.sendall(data)
            if events:
                came.append(stamp)
                sent.append(time.perf_counter())
    if came:
        line = {"tokens": tokens, "came_s": came[-1] - came[0], "sent_s": sent[-1] - sent[0]}
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def receive_request(client: socket.socket) -> bytes:
    data = b""
    while END not in data:
        if not (piece := client.recv(65536)):
            return b""
        data += piece
    head, _, body = data.partition(END)
    length = next(
        int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
    )
    while len(body) < length:
        body += client.recv(65536)
    return head + END + body


def receive(server: socket.socket, pieces: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    """What the server sends, stamped as it comes; an empty piece is the end."""
    data = b"-"
    while data:
        data = server.recv(65536)
        pieces.put((time.perf_counter(), data))


def wait_until(due: float) -> None:
    while (left := due - time.perf_counter()) > 0:
        if left > SPIN_S:
            time.sleep(left - SPIN_S)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) / 1e6, Path(sys.argv[4]))
