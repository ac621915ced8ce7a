"""Options of a run that is over in seconds, against engines that only pretend."""

from __future__ import annotations

from pathlib import Path

from harness.options import Options


def options(model: Path, out: Path, **changes: object) -> Options:
    """Two blocks of short answers without waiting, unless changed."""
    given: dict[str, object] = {
        "model": str(model),
        "arms": "ollama,llama-cpp",
        "out": str(out),
        "no_wait": True,
        "out_tokens": 24,
        "preset": "quick",
        "prompt_tokens": 64,
        "context": 512,
        "seed": 1,
    }
    return Options(**(given | changes))  # type: ignore[arg-type]
