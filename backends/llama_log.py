"""What llama.cpp says about itself while it loads and serves, as data.

The only proof of placement is the buffer lines at verbosity 4, so they are read here for every
engine that runs llama.cpp inside: with or without the line prefix, as text or JSONL, and inside
another program's log. What is not said stays unknown; nothing is guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from harness.contract import Buffer, Device
from harness.errors import Crashed, DoesNotFit, EngineFailed

MIB = 1024 * 1024
LEVELS = {"info": "I", "warn": "W", "error": "E", "debug": "D"}

PREFIX = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} ([IWEDO]) ")
BUFFER = re.compile(r"(\S+) +(model|KV|RS|compute|output|LoRA|DSV4 \w+ state) buffer size = +([\d.]+) MiB")
KINDS = {"model": "weights", "LoRA": "weights", "KV": "kv", "RS": "rs", "compute": "compute", "output": "output"}
LOADS = re.compile(r"\bload_model: loading model '")  # the first line of a load in every build so far
LISTED = re.compile(r"^\s+(\S+): (.*) \((\d+) MiB, (\d+) MiB free\)")
USING = re.compile(r"using device (\S+) \((.*?)\) \(.*\) - (\d+) MiB free")
EVALUATED = re.compile(r"prompt eval time = +[\d.]+ ms / +(\d+) tokens")

# name in Settings (or in the engine, where we do not set it) → the line that tells it
SETTINGS = {
    "context": re.compile(r"\bllama_context: n_ctx += (\d+)"),
    "batch": re.compile(r"\bllama_context: n_batch += (\d+)"),
    "ubatch": re.compile(r"\bllama_context: n_ubatch += (\d+)"),
    "flash_attention": re.compile(r"\bllama_context: flash_attn += (\w+)|\bFlash Attention .*?(enabled|disabled)\s*$"),
    "kv_k": re.compile(r"\bllama_kv_cache\w*: size = .* K \((\w+)\)"),
    "kv_v": re.compile(r"\bllama_kv_cache\w*: size = .* V \((\w+)\)"),
    "load_mode": re.compile(r"\bload_tensors: loading model tensors.*\(load_mode = ([\w+]+)\)"),
    "threads": re.compile(r"\bsystem_info: n_threads = (\d+)"),
    "threads_batch": re.compile(r"\bsystem_info: .*\(n_threads_batch = (\d+)\)"),
    "slots": re.compile(r"\bn_slots = (\d+)"),
    "kv_unified": re.compile(r"\bllama_context: kv_unified += (\w+)"),
}
SPOKEN = {"enabled": "on", "disabled": "off"}

FIT = (
    re.compile(r"common_params_fit_impl: +- (?P<device>\S+) .*: +\d+ layers \( *(?P<moved>\d+) overflowing\)"),
    re.compile(r"common_params_fit_impl: context size reduced from (?P<was>\d+) to (?P<now>\d+)"),
    re.compile(r"failed to fit params to free device memory: (?P<why>.*)"),
)


@dataclass(frozen=True, slots=True)
class Load:
    """The last load of a log. `buffers` is None where the log has no buffer line at all."""

    buffers: tuple[Buffer, ...] | None
    settings: Mapping[str, str]
    devices: tuple[Device, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an engine gave up: a kind that we know a next step for, and the engine's own words.

    `part` is what did not fit, where it is known: a key of ROOM.
    """

    kind: str
    line: str
    part: str | None = None

    def error(self, doing: str = "loading") -> EngineFailed:
        """The error to raise, in one sentence with the next step."""
        if self.kind == "memory":
            what = self.part or "the model"
            return DoesNotFit(f"out of memory for {what} while {doing} ({self.line}); {ROOM[self.part]}")
        return Crashed(f"{SENTENCES[self.kind].format(doing=doing)} ({self.line})")


ROOM: Mapping[str | None, str] = {
    "weights": "put less on that device (ngl=N, ncmoe=N or cpu-moe), or take a smaller quantization",
    "weights in host memory": "take a smaller model or quantization, or close other programs",
    "the KV cache": "take a smaller context, or ctk=q8_0,ctv=q8_0,fa=on",
    "compute buffers": "take a smaller ub",
    "pinned host memory": "take lm=mmap, which needs none, or leave more on the device",
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

# In order: the first that matches anywhere in the log wins, so causes stand before their consequences.
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
        (r"unable to allocate \S+_Host buffer|failed to allocate \S+_Host buffer", "memory", "pinned host memory"),
        (r"failed to allocate buffer for (?:kv|rs) cache|failed to allocate buffer for DSV4", "memory", "the KV cache"),
        (r"failed to allocate compute|failed to reserve (?:graph|initial output)", "memory", "compute buffers"),
        (r"unable to allocate CPU\w* buffer", "memory", "weights in host memory"),
        (r"unable to allocate \S+ buffer", "memory", "weights"),
        (r"out of memory|insufficient memory|failed to allocate|bad_alloc|ErrorOutOfDeviceMemory", "memory", None),
        (r"failed to open GGUF file|no such file|permission denied", "missing", None),
        (r"^this launcher|^llamaduel: ", "refused", None),
    )
)
WARNING = re.compile(r"failed to fit params|MiB of pinned memory")  # said in loads that go well too
SAYS_ERROR = re.compile(r"\berror\b|\bfailed\b|couldn't|\bunable\b|\bcannot\b|\babort", re.IGNORECASE)


def read_load(lines: Iterable[str]) -> Load:
    """The last load that a log tells of; buffers of one kind on one device are summed."""
    sizes: dict[tuple[str, str], float] = {}
    settings: dict[str, str] = {}
    devices: dict[str, Device] = {}
    notes: list[str] = []
    for _, text in messages(lines):
        if LOADS.search(text):
            sizes, devices, notes = {}, {}, []
            settings = {key: value for key, value in settings.items() if key.startswith("threads")}
        if found := BUFFER.search(text):
            key = (device_of(found[1]), KINDS.get(found[2], "kv"))
            sizes[key] = sizes.get(key, 0.0) + float(found[3])
        for name, line in SETTINGS.items():
            if found := line.search(text):
                value = next(group for group in found.groups() if group is not None)
                settings[name] = SPOKEN.get(value, value)
        if found := USING.search(text):
            devices[found[1]] = Device(found[1], found[2], free_bytes=int(found[3]) * MIB)
        notes += _fit_note(text)
    buffers = tuple(
        Buffer(device, kind, round(mib * MIB), is_host(device)) for (device, kind), mib in sorted(sizes.items())
    )
    return Load(buffers or None, MappingProxyType(settings), tuple(devices.values()), tuple(dict.fromkeys(notes)))


def read_failure(lines: Iterable[str]) -> Failure | None:
    """Why the engine gave up, from its log or from the error text it sent; None if it does not say."""
    said = [(level, text) for level, text in messages(lines) if not WARNING.search(text)]
    for pattern, kind, part in PATTERNS:
        for level, text in said:
            if level not in ("I", "D") and pattern.search(text):
                return Failure(kind, _short(text), part)
    errors = [text for level, text in said if level == "E"]
    errors = errors or [text for level, text in said if level is None and SAYS_ERROR.search(text)]
    return Failure("other", _short(errors[0])) if errors else None


def evaluated_tokens(lines: Iterable[str]) -> tuple[int, ...]:
    """Prompt tokens that were computed (not taken from a cache), one number a request, in order."""
    return tuple(int(found[1]) for _, text in messages(lines) if (found := EVALUATED.search(text)))


def listed_devices(lines: Iterable[str]) -> tuple[Device, ...]:
    """What `--list-devices` printed."""
    found = (LISTED.match(line) for line in lines)
    return tuple(Device(at[1], at[2], int(at[3]) * MIB, int(at[4]) * MIB) for at in found if at)


def messages(lines: Iterable[str]) -> Iterator[tuple[str | None, str]]:
    """(level, text) of every line; level is I, W, E, D or None where the line does not tell."""
    for raw in lines:
        line = raw.rstrip()
        if line.startswith('{"'):
            try:
                record = json.loads(line)
            except ValueError:
                record = {}
            if record.get("type") == "log":
                yield LEVELS.get(record.get("level")), str(record.get("msg", "")).rstrip()
                continue
        if found := PREFIX.match(line):
            yield found[1], line[found.end() :]
        else:
            yield None, line


def device_of(buffer_name: str) -> str:
    """The device of a buffer. The endpoint of an RPC device is left out, for it changes with every run."""
    name = buffer_name.partition("[")[0]
    return name if is_host(name) else re.sub(r"_(Mapped|Private)$", "", name)


def is_host(device: str) -> bool:
    """Whether a buffer type lives in host memory, by its name."""
    return device in {"CPU", "BLAS", "AMX"} or device.startswith("CPU_") or device.endswith("_Host")


def _fit_note(text: str) -> Iterator[str]:
    overflow, shrunk, gave_up = (line.search(text) for line in FIT)
    if overflow and int(overflow["moved"]):
        yield f"--fit left parts of {overflow['moved']} layers of {overflow['device']} in host memory"
    if shrunk:
        yield f"--fit lowered the context from {shrunk['was']} to {shrunk['now']}"
    if gave_up:
        yield f"--fit gave up: {gave_up['why'].strip()}"


def _short(text: str, most: int = 200) -> str:
    """The engine's words without its function name, on one line."""
    words = " ".join(re.sub(r"^(?:(?:srv|slot|cmn) +)?\w+: +", "", text).split())
    return words if len(words) <= most else words[: most - 1] + "…"
