"""What can be known without loading anything: facts of a model, and the arms that a run would have."""

from __future__ import annotations

from typing import Any

from harness import machine, model, placement, plan, verdict
from harness.contract import Placement, Settings
from harness.options import Options
from harness.plan import Status
from harness.probe import Watch, find_field, find_model


def inspect_model(ref: str, watch: Watch) -> dict[str, Any]:
    """Shape, bytes and placements of a model, from its header alone. Raises DuelError."""
    found = model.load(find_model(ref, watch), hashed=False)
    settings = Settings()
    placements = []
    for kind in [Placement("ngl", 999), *(Placement("ncmoe", n) for n in _steps(found.blocks)), Placement("cpu-moe")]:
        predicted = placement.predict(found, kind, settings, device=True)
        if predicted is not None:
            placements.append(
                {
                    "placement": str(kind),
                    "words": placement.describe(kind, found),
                    "class": predicted.placement_class,
                    "device_bytes": predicted.device_bytes,
                    "host_bytes": predicted.host_bytes,
                }
            )
    return {
        "name": found.name,
        "file": str(found.file.path),
        "arch": found.file.architecture,
        "type": found.file_type,
        "layers": found.layers,
        "expert_layers": len(found.expert_layers),
        "experts": found.experts,
        "experts_used": found.experts_used,
        "experts_shared": found.experts_shared,
        "context_train": found.context_train,
        "vocab": found.vocab,
        "weights_bytes": found.weights_bytes,
        "bytes_per_token": round(found.bytes_per_token),
        "placements": placements,
        "context": settings.context,
    }


def _steps(blocks: int) -> list[int]:
    """About eight values of N over a model."""
    step = max(1, -(-blocks // 8))
    return [*range(0, blocks, step), blocks]


def preview_run(options: Options, watch: Watch) -> dict[str, Any]:
    """The arms of a run after merging equal placements, with predicted bytes. Raises DuelError.

    Minutes are None: only the probe of the run knows how fast this machine is.
    """
    field = find_field(options, watch)
    running = [each for each in field.contenders if each.status.word is Status.OK]
    blocks = plan.PRESETS[options.preset]
    copies = len(running) + (options.preset == "confirm" and bool(running))
    return {
        "model": field.model.name,
        "machine": machine.read().cpu,
        "arms": [
            {
                "arm": each.arm,
                "status": each.status.word.value,
                "alias_of": each.status.alias_of,
                "reason": each.status.reason or None,
                "placement": each.placement,
                "engine": str(each.engine) if each.engine else None,
                "predicted_device_bytes": each.predicted.device_bytes if each.predicted else None,
                "predicted_host_bytes": each.predicted.host_bytes if each.predicted else None,
                "command": each.command,
            }
            for each in field.contenders
        ],
        "loads": {"fewest": min(blocks, verdict.FEWEST_BLOCKS) * copies, "most": blocks * copies},
        "minutes": None,
    }
