"""What a fake llama-server says while it loads: every tensor of the model on a device, as buffer lines.

It follows llama.cpp's own rules for `-ngl`, `--cpu-moe`, `--n-cpu-moe` and `--fit`, written down
here a second time on purpose: a placement that the harness predicts is proven against them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import header
from harness.errors import ModelError

MIB = 1024 * 1024
COMPUTE_MIB, OUTPUT_MIB = 4.5, 0.19  # of the smallest real model; the harness keeps them apart
FIT_MARGIN_MIB = 1024  # that --fit leaves free
EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32}
KV_BYTES |= {"q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32}


class OutOfMemory(Exception):
    """Carries the device and the bytes that it could not give."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of all parts of a model: the header's values, and the bytes of each tensor by name."""

    values: Mapping[str, Any]
    tensors: Mapping[str, int]

    @property
    def blocks(self) -> int:
        return self.of_architecture("block_count")

    def of_architecture(self, key: str, default: int = 0) -> int:
        """A whole number; of an array its largest."""
        value = self.values.get(f"{self.values.get('general.architecture')}.{key}", default)
        return int(max(value) if isinstance(value, list) else value)

    def words(self) -> tuple[str, ...] | None:
        """The answer of a model that knows one."""
        cycle, tokens = self.values.get("llamaduel.cycle"), self.values.get("tokenizer.ggml.tokens")
        return tuple(tokens[each].decode().removeprefix("Ġ") for each in cycle) if cycle and tokens else None


def read_weights(path: Path) -> Weights:
    """Raises ValueError with llama.cpp's words."""
    try:
        parts = header.read_all(path)
    except ModelError as error:
        whole = path.is_file() and path.read_bytes()[:4] == b"GGUF"
        said = "failed to read key-value pairs" if whole else "invalid magic characters: '????', expected 'GGUF'"
        raise ValueError(f"gguf_init_from_reader: {said} ({error})") from None
    return Weights(parts[0].fields, {entry.name: entry.bytes for part in parts for entry in part.entries})


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line asks of a placement. `layers` None is auto, `devices` (name, free MiB)."""

    devices: tuple[tuple[str, int], ...] = ()
    layers: int | None = None
    expert_layers_on_host: int = 0
    fit: bool = True
    leave_free_mib: int = FIT_MARGIN_MIB
    context: int = 4096
    kv_k: str = "f16"
    kv_v: str = "f16"
    load_mode: str = "auto"


def buffers(model: Weights, asked: Asked) -> list[tuple[str, str, float]]:
    """(buffer name, kind, MiB) of one load. Raises OutOfMemory."""
    host_experts = asked.expert_layers_on_host
    placed = _place(model, asked, host_experts, from_front=True)
    if asked.devices and asked.fit and asked.layers is None and not host_experts:
        room = asked.devices[0][1] - asked.leave_free_mib
        for moved in range(model.blocks + 1):
            placed = _place(model, asked, moved, from_front=False)
            if _on_device(placed) <= room:
                break
    if asked.devices and _on_device(placed) > asked.devices[0][1]:
        raise OutOfMemory(asked.devices[0][0], round(_on_device(placed) * MIB))
    return placed


def _on_device(placed: list[tuple[str, str, float]]) -> float:
    return sum(mib for name, _, mib in placed if not name.startswith("CPU"))


def _place(model: Weights, asked: Asked, moved: int, *, from_front: bool) -> list[tuple[str, str, float]]:
    """Weights, KV, compute and output, with the experts of `moved` blocks in host memory."""
    device = asked.devices[0][0] if asked.devices else None
    layers = model.blocks + 1 if asked.layers is None else asked.layers
    host = "CPU" if asked.load_mode == "none" or (asked.load_mode == "auto" and not device) else "CPU_Mapped"
    moved_blocks = range(moved) if from_front else range(model.blocks - moved, model.blocks)
    weights = {host: 0.0} | ({device: 0.0} if device else {})
    for name, size in model.tensors.items():
        block = re.match(r"blk\.(\d+)\.", name)
        on_device = layers >= 1 if block is None else int(block[1]) >= model.blocks + 1 - layers
        if name.startswith(("token_embd", "per_layer_token_embd")):
            on_device = False
        if block and int(block[1]) in moved_blocks and EXPERTS.search(name):
            on_device = False
        weights[device if on_device and device else host] += size / MIB
    if device and layers >= 1 and "output.weight" not in model.tensors:  # a tied head is there twice
        weights[device] += model.tensors.get("token_embd.weight", 0) / MIB
    kv = {host: 0.0} | ({device: 0.0} if device else {})
    for index in range(model.blocks):
        kv[device if device and index >= model.blocks + 1 - layers else host] += _kv_mib(model, asked)
    found = [(name, "model", mib) for name, mib in weights.items() if mib]
    found += [(name.replace("CPU_Mapped", "CPU"), "KV", mib) for name, mib in kv.items() if mib]
    found += [(name, "compute", COMPUTE_MIB) for name in ([device] if device else []) + ["CPU"]]
    return [*found, ("CPU", "output", OUTPUT_MIB)]


def _kv_mib(model: Weights, asked: Asked) -> float:
    """Of one layer of plain attention."""
    heads = model.of_architecture("attention.head_count_kv", 1)
    width = model.of_architecture("embedding_length") // max(1, model.of_architecture("attention.head_count", 1))
    k = model.of_architecture("attention.key_length", width) * KV_BYTES[asked.kv_k]
    v = model.of_architecture("attention.value_length", width) * KV_BYTES[asked.kv_v]
    return heads * (k + v) * asked.context / MIB


def lines(placed: list[tuple[str, str, float]]) -> Iterator[str]:
    """The buffer lines of llama.cpp at verbosity 4."""
    says = {"model": "load_tensors", "output": "llama_context", "KV": "llama_kv_cache", "compute": "sched_reserve"}
    for kind, function in says.items():
        for name, found, mib in placed:
            if found == kind:
                yield f"{function}: {name:>10} {' output' if kind == 'output' else kind} buffer size = {mib:8.2f} MiB"
