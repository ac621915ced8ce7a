"""What llama.cpp says about itself while it loads and serves, as data.

The only proof of placement is the buffer lines at verbosity 4, so they are read here for every
engine that runs llama.cpp inside: with or without the line prefix, as text or JSONL, and inside
another program's log. What is not said stays unknown; nothing is guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from harness.contract import Buffer, Device
from harness.sizes import format_bytes

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
NOT_PINNED = re.compile(r"failed to allocate (?:([\d.]+) (?:MiB|MB) of )?pinned memory", re.IGNORECASE)
WITHOUT = (  # what a load that goes well did without for lack of memory, and what that changes
    (
        re.compile(r"retrying without pipeline parallelism"),
        "the compute buffers of pipeline parallelism did not fit, so it is off: several GPUs take turns at a prompt",
    ),
    (
        re.compile(r"failed to mlock "),
        "the weights could not all be locked in memory, so the system may take some out of it; raise `ulimit -l`",
    ),
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


def read_load(lines: Iterable[str]) -> Load:
    """The last load that a log tells of; buffers of one kind on one device are summed."""
    sizes: dict[tuple[str, str], float] = {}
    settings: dict[str, str] = {}
    devices: dict[str, Device] = {}
    notes: list[str] = []
    not_pinned: list[float | None] = []
    fitted: bool | None = None
    offloaded: tuple[int, int] | None = None
    for _, text in messages(lines):
        if LOADS.search(text):
            sizes, devices, notes, not_pinned, fitted, offloaded = {}, {}, [], [], None, None
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
        if found := NOT_PINNED.search(text):
            not_pinned.append(float(found[1]) if found[1] else None)
        notes += _notes(text)
    buffers = tuple(
        Buffer(device, kind, round(mib * MIB), is_host(device)) for (device, kind), mib in sorted(sizes.items())
    )
    return Load(
        buffers or None,
        MappingProxyType(settings),
        tuple(devices.values()),
        tuple(dict.fromkeys([*notes, *_not_pinned(not_pinned)])),
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


def evaluated_tokens(lines: Iterable[str]) -> tuple[int, ...]:
    """Prompt tokens that were computed (not taken from a cache), one number a request, in order."""
    return tuple(int(found[1]) for _, text in messages(lines) if (found := EVALUATED.search(text)))


def listed_devices(lines: Iterable[str]) -> tuple[Device, ...]:
    """What `--list-devices` printed, without what computes in host memory (BLAS). A size of 0 is unknown."""
    found = (LISTED.match(line) for line in lines)
    return tuple(
        Device(at[1], at[2], total, int(at[4]) * MIB if total else None)
        for at in found
        if at and not is_host(at[1])
        for total in [int(at[3]) * MIB or None]
    )


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


def _notes(text: str) -> Iterator[str]:
    overflow, shrunk, gave_up = (line.search(text) for line in FIT)
    if overflow and int(overflow["moved"]):
        yield f"--fit left parts of {overflow['moved']} layers of {overflow['device']} in host memory"
    if shrunk:
        yield f"--fit lowered the context from {shrunk['was']} to {shrunk['now']}"
    if gave_up:
        yield f"--fit gave up: {gave_up['why'].strip()}"
    yield from (note for line, note in WITHOUT if line.search(text))


def _not_pinned(mib: Sequence[float | None]) -> Iterator[str]:
    """One note for all host memory that llama.cpp wanted pinned and took as it comes; a size may be unknown."""
    if mib:
        known = [each for each in mib if each is not None]
        size = format_bytes(round(sum(known) * MIB)) if len(known) == len(mib) else "some"
        yield f"{size} of host memory could not be pinned, so copies between it and a GPU are slower"
