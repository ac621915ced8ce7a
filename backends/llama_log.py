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
from itertools import pairwise
from types import MappingProxyType
from typing import Any

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

# name in Settings (or in the engine, where we do not set it) → the lines that tell it, one spelling a group
SETTINGS = {
    "build": re.compile(r"\bbuild:? ([1-9]\d*) \(|\bbuild_info: b([1-9]\d*)"),
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
    "prompt_cache": re.compile(r"\bprompt cache is (disabled)|\bprompt cache is enabled, size limit: (.+?)\s*$"),
    "checkpoints": re.compile(r"\bcontext checkpoints (disabled)|\bcontext checkpoints enabled, max = (\d+)"),
}
OLD_LOAD_MODE = re.compile(r"\bload_tensors: loading model tensors.*\(mmap = (\w+)(?:, direct_io = (\w+))?\)")
ON_OFF = {"enabled": "on", "disabled": "off", "1": "on", "0": "off"}
SPOKEN = {"flash_attention": ON_OFF, "prompt_cache": ON_OFF, "checkpoints": ON_OFF}
BEFORE_LOAD = ("build", "threads")  # said once, before the first line of a load

# of the last request that began; a sampler with a question mark is in the chain and does nothing
CHAIN = re.compile(r"\bsampler chain: (.+)")
SAMPLING = re.compile(r"\b(temp|top_k|top_p|min_p|repeat_last_n|(?:repeat|frequency|presence)_penalty) = ([\d.+-]+)")
PARAMETERS = re.compile(r"^[ \t]+(?:repeat_last_n|top_k) = ", re.MULTILINE)  # the lines after "sampler params:"
OFFLOADED = re.compile(r"\bload_tensors: offloaded (\d+)/(\d+) layers to GPU")

FIT = (
    re.compile(r"common_params_fit_impl: +- (?P<device>\S+) .*: +\d+ layers \( *(?P<moved>\d+) overflowing\)"),
    re.compile(r"common_params_fit_impl: context size reduced from (?P<was>\d+) to (?P<now>\d+)"),
    re.compile(r"failed to fit params to free device memory: (?P<why>.*)"),
)
FITTED = re.compile(r"\b(?:successfully fit|(failed to fit)) params to free device memory")
PLACING = {"-ngl", "--gpu-layers", "--n-gpu-layers", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-ot", "-ts"}
PLACING_VARIABLES = {f"LLAMA_ARG_{name}" for name in ("N_GPU_LAYERS", "CPU_MOE", "N_CPU_MOE", "OVERRIDE_TENSOR")}
PAD = 256  # tokens: a context is a multiple of it


@dataclass(frozen=True, slots=True)
class Load:
    """The last load of a log. `buffers` is None where the log has no buffer line at all."""

    buffers: tuple[Buffer, ...] | None
    settings: Mapping[str, str]
    devices: tuple[Device, ...]
    notes: tuple[str, ...]
    fitted: bool | None = None  # whether `--fit` ran and came to an end; None: the log does not tell
    offloaded: tuple[int, int] | None = None  # layers, of how many: a claim, printed without any device too


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
    fitted: bool | None = None
    offloaded: tuple[int, int] | None = None
    for _, text in messages(lines):
        if LOADS.search(text):
            sizes, devices, notes, fitted, offloaded = {}, {}, [], None, None
            settings = {key: value for key, value in settings.items() if key.startswith(BEFORE_LOAD)}
        if found := BUFFER.search(text):
            key = (device_of(found[1]), KINDS.get(found[2], "kv"))
            sizes[key] = sizes.get(key, 0.0) + float(found[3])
        settings.update(_settings(text))
        if found := USING.search(text):
            devices[found[1]] = Device(found[1], found[2], free_bytes=int(found[3]) * MIB)
        if found := FITTED.search(text):
            fitted = found[1] is None
        if found := OFFLOADED.search(text):
            offloaded = int(found[1]), int(found[2])
        notes += _fit_note(text)
    buffers = tuple(
        Buffer(device, kind, round(mib * MIB), is_host(device)) for (device, kind), mib in sorted(sizes.items())
    )
    return Load(
        buffers or None,
        MappingProxyType(settings),
        tuple(devices.values()),
        tuple(dict.fromkeys(notes)),
        fitted,
        offloaded,
    )


def _settings(text: str) -> Iterator[tuple[str, str]]:
    """What one line tells, in our words."""
    for name, line in SETTINGS.items():
        if found := line.search(text):
            value = next(group for group in found.groups() if group is not None)
            yield name, f"b{value}" if name == "build" else SPOKEN.get(name, {}).get(value, value)
    if found := OLD_LOAD_MODE.search(text):
        yield "load_mode", "dio" if found[2] == "true" else "mmap" if found[1] == "true" else "none"
    if found := CHAIN.search(text):
        links = [link.strip() for link in found[1].split("->")]
        yield "samplers", " → ".join(link for link in links if link != "logits" and not link.startswith("?"))
    if PARAMETERS.search(text):
        yield from sampling({name: float(value) for name, value in SAMPLING.findall(text)}).items()


def sampling(told: Mapping[str, Any]) -> dict[str, str]:
    """How it samples, from the parameters of a request as the engine has them; what is not in them is left out."""
    named = {"temp": "temperature", "temperature": "temperature", "seed": "seed"}
    named |= {name: name for name in ("top_k", "top_p", "min_p")}
    found = {name: f"{round(told[key], 3):g}" for key, name in named.items() if key in told and key != "seed"}
    if "seed" in told:
        found["seed"] = str(told["seed"])
    if "repeat_penalty" in told:
        repeat, last = float(told["repeat_penalty"]), int(told.get("repeat_last_n", -1))
        parts = [f"repeat {repeat:g} over {last}"] if repeat != 1 and last else []
        for kind in ("presence", "frequency"):
            parts += [f"{kind} {value:g}"] if (value := float(told.get(f"{kind}_penalty", 0))) and last else []
        found["penalties"] = ", ".join(parts) or "off"
    return found


def placed_by(load: Load, argv: Iterable[str], environment: Mapping[str, str]) -> str | None:
    """Who decided where the weights lie: flags of ours, or the engine's own `--fit`; None if it cannot be told."""
    words = tuple(argv)
    fit_off = any(pair in (("-fit", "off"), ("--fit", "off")) for pair in pairwise(words))
    if fit_off or PLACING & set(words) or PLACING_VARIABLES & environment.keys():
        return "user"
    return "engine's fit" if load.fitted else None


def claim(load: Load) -> dict[str, Any]:
    """What the log claims of the placement, for `Realised.reported`: whole layers, whatever was left out of them."""
    if load.offloaded is None:
        return {}
    there, layers = load.offloaded
    return {
        "claim": f"its log: {there} of {layers} layers on the GPU",
        "claimed_device_share": there / layers if layers else 0.0,
    }


def limits(asked: Mapping[str, int | None], told: Mapping[str, str]) -> dict[str, str]:
    """Why llama.cpp has another context or batch than asked for, where that is its rule."""
    found = {}
    context, most = asked.get("context"), int(told.get("context", 0))
    if context and most == -(-context // PAD) * PAD != context:
        found["context"] = f"llama.cpp rounds a context up to a multiple of {PAD}"
    for name, above in (("batch", "context"), ("ubatch", "batch")):
        wanted, got = asked.get(name), told.get(name)
        if wanted and got and int(got) < wanted and got == told.get(above):
            found[name] = f"llama.cpp makes no {name} larger than the {above}"
    return found


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
