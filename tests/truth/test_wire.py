"""The client where the truth is known to the nanosecond: its clock moves in lockstep with the server (C2, C4).

Every way of cutting a stream, and every fault of one, is in test_measure.py and test_client_timing.py; here are
the figures of the table.
"""

from __future__ import annotations

import json

import pytest
from test_measure import PROMPT, Client, Uncounted, chunked, in_lockstep

from harness.measure import Sample, measure
from truth.table import Attained

TOKENS, ITL_MS = 64, 10
TRUE_TPS = 1000 / ITL_MS
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def streamed(kind: type[Client], together: int = 1, **timings: float) -> Sample:
    """64 tokens, 10 ms each, some of them in one chunk; `timings` is what the engine says, where it is not true."""
    chunk = {"content": " w" * together, "stop": False, "sent_ns": 0}
    lines = [chunk | {"tokens_predicted": at} for at in range(together, TOKENS + 1, together)]
    true = {"cache_n": 0, "prompt_n": 4, "prompt_ms": 1, "predicted_n": TOKENS, "predicted_ms": ITL_MS * (TOKENS - 1)}
    last = {"content": "", "stop": True, "stop_type": "limit", "truncated": False, "timings": true | timings}
    pieces = [chunked(f"data: {json.dumps(line)}\n\n".encode()) for line in (*lines, last)]
    with in_lockstep([HEAD, *pieces, b"0\r\n\r\n"], together * ITL_MS * 10**6) as (port, clock):
        return measure(kind(port), PROMPT, TOKENS, clock=clock)


@pytest.mark.parametrize("together", [4, 16])
def test_tokens_that_share_a_chunk_do_not_raise_the_speed(together: int, attained: Attained) -> None:
    samples = [streamed(kind, together) for kind in (Client, Uncounted)]
    assert [(sample.invalid, sample.generated_tokens) for sample in samples] == [(None, TOKENS)] * 2
    off = max(abs((sample.decode_tps or 0) / TRUE_TPS - 1) for sample in samples)
    attained("C2", f"{together} tokens a chunk: rate off by", off, "≤", 0.005)
    naive = (TOKENS - 1) / (samples[0].window_s or 1) / TRUE_TPS - 1
    attained("C2", f"mutant: a client that counts N - 1, {together} tokens a chunk: rate off by", naive, ">", 0.005)


def test_the_engines_own_rate_is_read_by_steps_and_its_lies_are_invalid(attained: Attained) -> None:
    ms = ITL_MS * (TOKENS - 1)
    old, new = (streamed(Client, predicted_per_second=1000 * steps / ms) for steps in (TOKENS, TOKENS - 1))
    apart = abs((old.server_decode_tps or 0) / (new.server_decode_tps or 1) - 1)
    attained("C4", "engines that count n or n - 1 steps: rates apart by", apart, "≤", 0.001)
    lies = {"predicted_ms": 1.05 * ms}, {"predicted_ms": 0.95 * ms}, {"cache_n": 3, "prompt_n": 1}
    caught = [bool(streamed(Client, **lie).invalid) for lie in lies]
    attained("C4", "decode time 5 % off either way, prompt from a cache: INVALID", sum(caught), "=", len(lies), "")
    assert streamed(Client).invalid is None
