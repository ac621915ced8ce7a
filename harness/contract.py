"""The contract between the harness and an engine.

An engine is one file in `backends/` with one class that has these five methods, and one entry
point in the group `llamaduel.backends`. The harness owns the clock and the socket: a session
says what to send and what a received line means; it never times anything.
Adapters match these protocols, they do not inherit from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

# ── what goes in ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the weights live: `auto` (the engine's own choice), `ngl=N`, `cpu-moe`, `ncmoe=N`, `cpu`."""

    kind: str = "auto"
    n: int | None = None

    def __str__(self) -> str:
        return self.kind if self.n is None else f"{self.kind}={self.n}"


@dataclass(frozen=True, slots=True)
class Arm:
    """One contender: an engine, a placement and knobs (sorted pairs)."""

    backend: str
    placement: Placement = Placement()
    knobs: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        at = "" if self.placement == Placement() else f"@{self.placement}"
        return self.backend + at + "".join(f",{key}={value}" for key, value in self.knobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an arm is asked for, its knobs applied. None leaves the engine's own default."""

    context: int | None = 4096
    batch: int | None = 512
    ubatch: int | None = 512
    threads: int | None = None
    flash_attention: str | None = "on"
    kv_k: str | None = "f16"
    kv_v: str | None = "f16"
    load_mode: str | None = None
    prompt_cache: str | None = None  # "off": no copies of earlier prompts in host memory
    rpc: tuple[str, ...] = ()
    stand_in_bytes: int | None = None  # memory of the stand-in device; None: no stand-in
    device_limit_bytes: int | None = None  # memory that all GPUs together are held to; None: what they have
    depth: int = 0  # tokens that stand before the usual prompt; no engine is told


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The weights on disk. `digest` is over the tensors, `sha256` over the (first) file."""

    path: Path
    shards: tuple[Path, ...]
    architecture: str
    size_bytes: int
    sha256: str
    digest: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """Raw text, sent as it stands: the chat template is already in it."""

    id: str
    text: str
    kind: str = ""


# ── what comes out ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    description: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine that was found. `runner` names the build that computes, where it is another one."""

    product: str
    version: str
    path: Path
    origin: str  # "option", "PATH", "cache", "embedded" or "attached"
    devices: tuple[Device, ...] = ()
    rpc: bool = False
    runner: str | None = None

    def __str__(self) -> str:
        return f"{self.product} {self.version}" + (f" + runner {self.runner}" if self.runner else "")


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request to a loopback server. `body` is JSON, ready to send."""

    url: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """Generated text. `generated` counts all tokens up to and with this chunk, if the engine says."""

    text: str
    generated: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The engine's own last word on a request. Unknown is None, never 0.

    `decode_s` runs from the first token to the last: `generated_tokens - 1` steps.
    `prefill_s` covers `prompt_tokens - cached_tokens` tokens.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    load_s: float | None = None  # spent on loading inside this request
    stop: str | None = None  # "length", "stop", or the engine's own word
    truncated: bool = False


MOST = 1e18  # of any number in a record: beyond it arithmetic breaks, and nothing here was ever measured so large


def is_measurable(number: float) -> bool:
    """False for what is infinite, beyond reason or, like NaN, no number at all."""
    return -MOST < number < MOST


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation that the engine reported while loading. `kind`: weights, kv, compute, output."""

    device: str
    kind: str
    bytes: int
    on_host: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Realised:
    """What the engine really did. None is unknown, and is never taken as evidence."""

    engine: str
    argv: tuple[str, ...]  # of the process that computes
    pids: tuple[int, ...]  # every process of this session, the server first
    weights: Path | None  # the file it loaded
    settings: Mapping[str, str] = field(default_factory=dict)  # effective, as read back; `placed_by` too
    buffers: tuple[Buffer, ...] | None = None
    load_s: float | None = None
    asked: Mapping[str, str] = field(default_factory=dict)  # by the adapter itself, beside what Settings ask
    explained: Mapping[str, str] = field(default_factory=dict)  # setting → why the engine has this value
    # the engine's claims, not believed; `claim` is one in words, `claimed_device_share` (0 to 1) one of placement
    reported: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


# ── the contract ────────────────────────────────────────────────────────────────────────────


class Session(Protocol):
    """A loaded model, ready to stream."""

    def request(self, prompt: Prompt, max_tokens: int) -> Request: ...

    def read(self, line: bytes) -> Chunk | Usage | None:
        """Pure, called after the last stamp. Raises EngineFailed for an error object."""
        ...

    def settle(self, usage: Usage) -> Usage:
        """After the stream, untimed: add what only the log tells (evaluated prompt tokens, a reload)."""
        ...

    def realised(self) -> Realised: ...

    def count_tokens(self, text: str) -> int | None: ...

    def death(self) -> str | None:
        """Why the engine ended, if it did."""
        ...


class Backend(Protocol):
    """An engine that can be opened."""

    name: str

    def find(self, hints: Mapping[str, str]) -> Engine:
        """Look, start nothing that stays. Raises Unavailable with the way to get it."""
        ...

    def parse(self, text: str) -> Arm:
        """One arm from its text. Raises UsageError with the nearest valid word."""
        ...

    def resolve(self, ref: str) -> Path | None:
        """A model name of this engine to its weights file; None if it is not one."""
        ...

    def command(self, arm: Arm, model: ModelFile, settings: Settings) -> str:
        """What a person pastes into a shell to get this arm."""
        ...

    def open(
        self, engine: Engine, model: ModelFile, arm: Arm, settings: Settings, log: Path
    ) -> AbstractContextManager[Session]:
        """Start, wait until one token came back, yield, stop. Raises EngineFailed or Unavailable."""
        ...


@runtime_checkable
class Neighbourly(Protocol):
    """A backend may have this besides: what of it a user runs already, beside the engines that we start."""

    def beside(self) -> Iterable[str]:
        """One sentence for each thing that holds memory, `what; next step`. Nothing of it is stopped."""
        ...


class Recipe(Protocol):
    """How to get an engine that is not here. Entry-point group `llamaduel.engines`."""

    name: str
    summary: str

    def installed(self) -> Path | None: ...

    def install(self, say: Say) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What a recipe would make on this machine. `lacks`: why not more, and how to get it, `why; next step`."""

    builds: str  # "llama.cpp b11434 with CUDA"
    lacks: str | None = None
    tools: tuple[str, ...] = ()  # "cmake 3.25", "ninja fetched"


@runtime_checkable
class Foretelling(Protocol):
    """A recipe may have this besides: what `install` would do here, before anything is fetched or built."""

    def prospect(self) -> Prospect: ...


class Say(Protocol):
    """Progress, one line at a time."""

    def __call__(self, line: str, /) -> None: ...
