"""Servers that only speak the OpenAI dialect, and run already: nothing is started, nothing stopped.

They are named in a TOML file and used as `openai@NAME`. Their weights, placement and settings
cannot be proven, so they are shown and never ranked.

    [vllm]
    url = "http://127.0.0.1:8000"
    model = "name-of-the-model"
    headers = { Authorization = "Bearer secret" }  # if it wants any
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from harness.arms import read_arm
from harness.contract import Arm, Chunk, Engine, ModelFile, Prompt, Realised, Request, Settings, Usage
from harness.errors import EngineFailed, Unavailable, UsageError, nearest

LOOPBACK = {"127.0.0.1", "::1", "localhost"}
HOW = 'write a table with url = "http://127.0.0.1:PORT" and model = "…" for each server, give it by --openai FILE'


@dataclass(frozen=True, slots=True)
class Server:
    """One entry of the table, and the session that talks to it."""

    url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def request(self, prompt: Prompt, max_tokens: int) -> Request:
        body = {"model": self.model, "prompt": prompt.text, "max_tokens": max_tokens, "temperature": 0, "seed": 1}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"Content-Type": "application/json", **self.headers}
        return Request(f"{self.url}/v1/completions", headers, json.dumps(body).encode())

    def read(self, line: bytes) -> Chunk | Usage | None:
        if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
            return None
        event = json.loads(line[5:])
        if "error" in event:
            raise EngineFailed(str(event["error"]))
        choice, usage = (event.get("choices") or [{}])[0], event.get("usage") or {}
        generated = usage.get("completion_tokens")
        if choice.get("text"):
            return Chunk(choice["text"], generated)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        prompt, stop = usage.get("prompt_tokens"), choice.get("finish_reason")
        return Usage(prompt_tokens=prompt, cached_tokens=cached, generated_tokens=generated, stop=stop)

    def settle(self, usage: Usage) -> Usage:
        return usage

    def count_tokens(self, text: str) -> int | None:
        return None

    def death(self) -> str | None:
        return None

    def realised(self) -> Realised:
        notes = ("it was running already: its weights, placement and settings are unknown",)
        return Realised(engine=f"{self.model} at {self.url}", argv=(), pids=(), weights=None, notes=notes)


class OpenAI:
    name = "openai"
    servers: Mapping[str, Server] = MappingProxyType({})

    def find(self, hints: Mapping[str, str]) -> Engine:
        if not hints.get("openai"):
            raise Unavailable(f"no table of servers is given; {HOW}")
        path = Path(hints["openai"]).expanduser()
        try:
            self.servers = {name: Server(**entry) for name, entry in tomllib.loads(path.read_text("utf-8")).items()}
        except (OSError, ValueError, TypeError) as error:
            raise Unavailable(f"no table of servers ({error}); {HOW}") from error
        for name, server in self.servers.items():
            if not server.url.startswith("http://"):
                raise Unavailable(f"[{name}] in {path} has no http:// address; {HOW}")
            if urlsplit(server.url).hostname not in LOOPBACK and "allow-remote" not in hints:
                raise Unavailable(f"[{name}] in {path} is not on this machine; add --allow-remote if you mean it")
        return Engine(product="OpenAI-compatible server,", version="version unknown", path=path, origin="attached")

    def parse(self, text: str) -> Arm:
        server = text.partition("@")[2].partition(",")[0]
        if not re.fullmatch(r"[\w.-]+", server):
            raise UsageError(f"{text!r} names no server; write openai@NAME with a NAME from the table (--openai FILE)")
        return read_arm(text, self.name, placements={server}, knobs=())

    def resolve(self, ref: str) -> Path | None:
        return None

    def command(self, arm: Arm, model: ModelFile, settings: Settings) -> str:
        request = self._server(arm).request(Prompt("", "~"), 16)
        headers = [f"-H{key}: {value}" for key, value in request.headers.items()]
        return shlex.join(["curl", "-N", request.url, *headers, "-d", request.body.decode()])

    @contextlib.contextmanager
    def open(self, engine: Engine, model: ModelFile, arm: Arm, settings: Settings, log: Path) -> Iterator[Server]:
        import requests

        server = self._server(arm)
        first = server.request(Prompt("", "~"), 1)
        try:
            answer = requests.post(first.url, first.body, headers=dict(first.headers), timeout=60, proxies={"http": ""})
            answer.raise_for_status()
        except requests.RequestException as error:
            raise Unavailable(f"the server {arm.placement} does not answer ({error}); start it first") from error
        yield server

    def _server(self, arm: Arm) -> Server:
        if str(arm.placement) not in self.servers:
            raise Unavailable(f"no server {arm.placement} in the table; {nearest(str(arm.placement), self.servers)}")
        return self.servers[str(arm.placement)]
