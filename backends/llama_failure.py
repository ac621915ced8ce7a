"""Why an engine that runs llama.cpp gave up: a kind that we know a next step for, in the engine's own words.

Memory may run out for several parts of a load, each with a remedy of its own, so a failure says
which part, how much was asked for and of what device. All of it is read from the log, or from
what another program passes on of it; what is not said stays unknown.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.llama_log import LOADS, MIB, device_of, is_host, messages
from harness.errors import Crashed, DoesNotFit, EngineFailed
from harness.sizes import format_bytes

WEIGHTS, HOST_WEIGHTS, PINNED = "weights", "weights in host memory", "pinned host memory"
KV, COMPUTE, DRIVER = "the KV cache", "compute buffers", "the driver's own part of a GPU"

ROOM: Mapping[str | None, str] = {
    WEIGHTS: "put less on that device (a larger ncmoe=N, cpu-moe, or a smaller ngl=N), or take a smaller quantization",
    HOST_WEIGHTS: "take a smaller model or quantization, put more on a device, or close other programs",
    KV: "take a smaller context, or ctk=q8_0,ctv=q8_0,fa=on",
    COMPUTE: "take a smaller ub, or put less on that device",
    PINNED: "take lm=mmap, which needs none, put more on a device, or add host memory",
    DRIVER: "end what else holds memory of that GPU, which a run on the CPU needs a little of too",
    None: "put less on that device, or take a smaller context",
}
SENTENCES = {
    "port": "the port was taken by another program; try again",
    "architecture": "this build does not know the model's architecture; take a newer llama.cpp",
    "not GGUF": "the file is no GGUF model; download it again and check its size",
    "damaged": "the file is cut off or damaged; download it again",
    "shards": "a shard is missing or is not the first; give the path that ends in -00001-of-…",
    "tensors": "the file and this build do not agree on the tensors; take the build that the file was made for",
    "KV type": "a quantized V cache needs flash attention; add fa=on or take ctv=f16",
    "flag": "this build does not take one of the flags; take a newer llama.cpp",
    "library": "a library that the engine needs is missing; install it or run `llamaduel engines install llama-cpp`",
    "missing": "the engine cannot open the file; check the path and its permissions",
    "refused": "the engine refused",
    "other": "the engine failed while {doing}; its log has the rest",
}

# In order: the first that matches anywhere in the log wins, so causes stand before their consequences,
# and what memory was for before the line that only says how much.
PATTERNS: tuple[tuple[re.Pattern[str], str, str | None], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), kind, part)
    for pattern, kind, part in (
        (r"couldn't bind .*socket|address already in use", "port", None),
        (r"error: invalid (?:argument|value)|error while handling argument", "flag", None),
        (r"error while loading shared libraries|cannot open shared object|ImportError", "library", None),
        (r"un(?:known|supported) model architecture", "architecture", None),
        (r"invalid magic|failed to read magic|bad GGUF version|GGUFv1 is no longer", "not GGUF", None),
        (
            r"not within the file bounds|exceeds file size|invalid data|unexpectedly reached end of file",
            "damaged",
            None,
        ),
        (r"failed to read (?:key-value pairs|tensor|header)|exceeds remaining file size", "damaged", None),
        (r"illegal split file|invalid split|failed to load GGUF split|first split", "shards", None),
        (r"wrong number of tensors|missing tensor|tensor '.*' not found|has wrong shape", "tensors", None),
        (r"quantized V cache .*requires? (?:flash)", "KV type", None),
        (r"unable to allocate \S+_Host buffer", "memory", PINNED),
        (r"mmap failed: cannot allocate memory", "memory", HOST_WEIGHTS),
        (r"unable to allocate \S+ buffer", "memory", WEIGHTS),
        (r"failed to allocate buffer for (?:kv|rs) cache|failed to allocate buffer for DSV4", "memory", KV),
        (r"failed to allocate (?:compute|graph|output buffer)", "memory", COMPUTE),
        (r"failed to reserve (?:graph|initial output)|kIOGPUCommandBufferCallbackErrorOutOfMemory", "memory", COMPUTE),
        (r"failed to allocate \S+_Host buffer", "memory", PINNED),
        (r"(?:CUDA|ROCm|MUSA) error: (?:out of memory|(?:the )?resource allocation failed)", "memory", None),
        (r"failed to allocate|can't allocate|bad_alloc", "memory", None),
        (r"out[ -]of[ -](?:device[ -])?memory|insufficient memory|(?:cuda|hip)Malloc failed", "memory", None),
        (r"memory allocation of size \d+ failed", "memory", None),
        (r"ErrorOutOf(?:Device|Host)Memory|OutOf(?:Device|Host)MemoryError", "memory", None),
        (r"OUT_OF_(?:DEVICE_|HOST_)?MEMORY", "memory", None),
        (r"failed to open GGUF file|no such file|permission denied", "missing", None),
        (r"^this launcher|^llamaduel: ", "refused", None),
    )
)
# said by loads and requests that go on without what they did not get
GOES_ON = re.compile(
    r"failed to fit params|pinned memory|failed to mlock|prompt cache state|reorder temp buffer|host memory fallback"
    r"|failed to allocate graph, reserving|host buffer for async uploads|cached buffers and retrying",
    re.IGNORECASE,
)
STARTS_AGAIN = re.compile(r"retrying without pipeline parallelism")  # what was said before it came to nothing
SAYS_ERROR = re.compile(r"\berror\b|\bfailed\b|couldn't|\bunable\b|\bcannot\b|\babort", re.IGNORECASE)

# what a load says it begins → what it asks for memory from then on, in this order
PHASES = (
    (re.compile(r"\bload_tensors: "), WEIGHTS),
    (re.compile(r"\bllama_context: "), KV),
    (re.compile(r"\b(?:KV|RS) buffer size ="), COMPUTE),
)
FOR_DRIVER = re.compile(r"\b(?:cuda|hip)(?:MemGetInfo|SetDevice|StreamCreate|DeviceReset)")  # the statement that failed
ASKED = (  # how much was asked for; `unit` is of `size`, bytes where there is none
    re.compile(r"allocating (?P<size>\d+(?:\.\d+)?) (?P<unit>MiB) on device (?P<index>\d+)"),
    re.compile(r"failed to allocate output buffer of size (?P<size>\d+(?:\.\d+)?) (?P<unit>MiB)"),
    re.compile(r"failed to allocate (?P<device>\S+) buffer of size (?P<size>\d+)"),
    re.compile(r"_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size (?P<size>\d+)"),
    re.compile(r"insufficient memory \(attempted to allocate +(?P<size>\d+(?:\.\d+)?) (?P<unit>MB)\)"),  # of 1024 KiB
    re.compile(r"memory allocation of size (?P<size>\d+) failed", re.IGNORECASE),
    re.compile(r"can't allocate (?P<size>\d+) Bytes"),
    re.compile(r"failed to allocate Metal buffer of (?P<size>\d+) bytes"),
    re.compile(r"failed to allocate buffer, size = +(?P<size>\d+(?:\.\d+)?) (?P<unit>MiB)"),
    re.compile(r"unable to allocate (?!backend)(?P<device>\S+) buffer"),
    re.compile(r"current device: (?P<index>\d+)"),
)
IN_HOST_MEMORY = re.compile(r"_cpu_buffer_type_|_aligned_malloc:")
MAKER = re.compile(r"\b(CUDA|ROCm|MUSA) error")


@dataclass(frozen=True, slots=True)
class Failure:
    """`part` is what did not fit, where it is known: a key of ROOM. `device` is a name as in a buffer."""

    kind: str
    line: str
    part: str | None = None
    asked_bytes: int | None = None
    device: str | None = None

    def error(self, doing: str = "loading") -> EngineFailed:
        """The error to raise, in one sentence with the next step."""
        if self.kind == "memory":
            what = self.part or "the model"
            return DoesNotFit(f"out of memory for {what} while {doing}{self._asked()} ({self.line}); {ROOM[self.part]}")
        return Crashed(f"{SENTENCES[self.kind].format(doing=doing)} ({self.line})")

    def _asked(self) -> str:
        on_host = self.device is not None and is_host(self.device)
        if self.asked_bytes is None:
            return " in host memory" if on_host else f" on {self.device}" if self.device else ""
        place = "host memory" if on_host else self.device
        return f": {format_bytes(self.asked_bytes)} asked" + (f" of {place}" if place else "")


def read_failure(lines: Iterable[str], *, loaded: bool = False) -> Failure | None:
    """Why the engine gave up, from its log or from the error text it sent; None if it does not say.

    `loaded` tells that these lines come after a load that went well.
    """
    told = list(messages(lines))
    told = told[_after_last(LOADS, told) :]
    again = _after_last(STARTS_AGAIN, told)
    said = [(at, *line) for at, line in enumerate(told) if at >= again and not GOES_ON.search(line[1])]
    for pattern, kind, part in PATTERNS:
        for at, level, text in said:
            if level not in ("I", "D") and pattern.search(text):
                if kind != "memory":
                    return Failure(kind, _short(text))
                words = [each for _, _, each in said]
                part = part or _part(words, [each for _, each in told[:at]], loaded=loaded)
                return _out_of_memory(text, part, words)
    errors = [text for _, level, text in said if level == "E"]
    errors = errors or [text for _, level, text in said if level is None and SAYS_ERROR.search(text)]
    return Failure("other", _short(errors[0])) if errors else None


def _after_last(line: re.Pattern[str], told: Sequence[tuple[str | None, str]]) -> int:
    """Where that goes on which the line begins anew; 0 if it is not there."""
    return max((at + 1 for at, (_, text) in enumerate(told) if line.search(text)), default=0)


def _part(words: Sequence[str], before: Sequence[str], *, loaded: bool) -> str | None:
    """What memory was for, where the line that says it is full does not tell: by what had begun before."""
    if any(FOR_DRIVER.search(text) for text in words):
        return DRIVER
    reached = [part for begin, part in PHASES if loaded or any(begin.search(text) for text in before)]
    return reached[-1] if reached else None


def _out_of_memory(line: str, part: str | None, said: Sequence[str]) -> Failure:
    asked_bytes = device = index = None
    for text in said:
        for each in ASKED:
            if found := each.search(text):
                parts = found.groupdict()
                if size := parts.get("size"):
                    asked_bytes = round(float(size) * (MIB if parts.get("unit") else 1))
                if parts.get("device") or IN_HOST_MEMORY.search(text):
                    device = device_of(parts.get("device") or "CPU")
                index = parts.get("index") or index
                break
    if device is None and index is not None:
        maker = next((found[1] for text in said if (found := MAKER.search(text))), None)
        device = f"{maker}{index}" if maker else f"device {index}"
    if part == WEIGHTS and (is_host(device) if device else "bad_alloc" in line):
        part = HOST_WEIGHTS
    return Failure("memory", _short(line), part, asked_bytes, device)


def _short(text: str, most: int = 200) -> str:
    """The engine's words without its function name, on one line."""
    words = " ".join(re.sub(r"^(?:(?:srv|slot|cmn) +)?\w+: +", "", text).split())
    return words if len(words) <= most else words[: most - 1] + "…"


# ── the system, which says it elsewhere ─────────────────────────────────────────────────────


def kills_for_memory() -> int | None:
    """How many processes this system has killed for lack of memory so far; None where it does not count."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def killed_for_memory(before: int | None) -> Failure | None:
    """The failure of a process that was killed, if the system has counted a kill since `before`."""
    if before is None or kills_for_memory() in (None, before):
        return None
    return Failure("memory", "the system killed it for lack of memory", HOST_WEIGHTS, device="CPU")
