"""The HTTP dialect of llama-server: what to send, and what a received line means.

Nothing is timed here. Requests are complete and explicit, so that no default of an engine or of
a model file decides what is measured.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from harness.contract import Chunk, Prompt, Request, Usage
from harness.errors import EngineFailed

# Greedy, and every sampler that a default or the model's own header could switch on is off.
GREEDY: Mapping[str, float | int] = {
    "temperature": 0.0,
    "seed": 1,
    "top_k": 40,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "repeat_last_n": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
ONLY_HERE: Mapping[str, float | int] = {  # samplers that Ollama neither has nor sends
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
    "dynatemp_range": 0.0,
    "mirostat": 0,
}
STOPS = {"limit": "length", "eos": "stop", "word": "stop"}


@dataclass(frozen=True, slots=True)
class Server:
    """A llama-server on the loopback."""

    port: int
    key: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def completion(self, prompt: Prompt, max_tokens: int) -> Request:
        """A streamed greedy completion of raw text, with nothing taken from a cache."""
        asked = {"prompt": prompt.text, "n_predict": max_tokens, "stream": True, "cache_prompt": False}
        body = {**GREEDY, **ONLY_HERE, **asked}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        return Request(f"{self.url}/completion", headers, json.dumps(body).encode())

    def call(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 10.0) -> tuple[int, Any]:
        """(status, JSON) of an untimed request; POST if there is a body. Raises OSError where nobody answers."""
        import requests

        with requests.Session() as session:
            session.trust_env = False  # no proxy to the loopback
            reply = session.request(
                "GET" if body is None else "POST",
                self.url + path,
                json=body,
                headers={"Authorization": f"Bearer {self.key}", "Connection": "close"},
                timeout=timeout_s,
            )
            try:
                return reply.status_code, reply.json()
            except ValueError:
                return reply.status_code, None


def read_line(line: bytes) -> Chunk | Usage | None:
    """One line of the stream. Raises EngineFailed for an error object and for what is not the dialect."""
    text = line.strip()
    if not text or text.startswith(b":"):  # keep-alive
        return None
    field, colon, rest = text.partition(b":")
    data = rest.strip() if colon and field in (b"data", b"error") else text
    if data == b"[DONE]":
        return None
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise EngineFailed(f"the engine sent a line that is no JSON object: {text[:80].decode(errors='replace')!r}")
    if "error" in event or field == b"error":
        raise EngineFailed(error_text(event))
    if event.get("stop"):
        return _usage(event)
    content = event.get("content")
    return Chunk(content, _whole(event.get("tokens_predicted"))) if content else None


def error_text(event: Any) -> str:
    """The message of an error object, whatever its depth."""
    error = event.get("error", event) if isinstance(event, dict) else event
    return f"the engine refused: {error.get('message', error) if isinstance(error, dict) else error}"


def _usage(event: Mapping[str, Any]) -> Usage:
    timings = event.get("timings") or {}
    cached, evaluated = _whole(timings.get("cache_n")), _whole(timings.get("prompt_n"))
    total = cached + evaluated if cached is not None and evaluated is not None else None
    stop = event.get("stop_type")
    return Usage(
        prompt_tokens=_whole(event.get("tokens_evaluated")) if total is None else total,
        cached_tokens=cached,
        generated_tokens=_whole(timings.get("predicted_n", event.get("tokens_predicted"))),
        prefill_s=_seconds(timings.get("prompt_ms")),
        decode_s=_seconds(timings.get("predicted_ms")),
        stop=STOPS.get(stop, stop) if isinstance(stop, str) else None,
        truncated=bool(event.get("truncated")),
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _seconds(milliseconds: Any) -> float | None:
    return milliseconds / 1000 if isinstance(milliseconds, int | float) else None


def listens(pids: Iterable[int], port: int) -> bool | None:
    """Whether one of these processes listens on that port; None where the system does not say."""
    known = False
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            connections = psutil.Process(pid).net_connections("tcp")
            known = True
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
                return True
    return False if known else None
