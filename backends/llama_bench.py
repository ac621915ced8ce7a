"""llama-bench, the program that lies beside llama-server: the same build without sampling and HTTP."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from harness import process
from harness.contract import Arm, Engine, ModelFile, Settings
from harness.errors import Crashed, TimedOut, Unavailable

PROGRAM = "llama-bench"
REPEATS = 3
PATIENCE_S = 1800.0


def require_bench(engine: Engine, settings: Settings) -> Path:
    """The program, where it can measure with these settings. Raises Unavailable."""
    program = engine.path.parent / PROGRAM
    if not program.is_file():
        raise Unavailable(f"no {PROGRAM} beside {engine.path}; run `llamaduel engines install llama-cpp`")
    if settings.stand_in_bytes is not None:
        raise Unavailable("a stand-in device says nothing about speed; calibrate without --stand-in")
    return program


def bench(
    engine: Engine, model: ModelFile, arm: Arm, settings: Settings, tokens: int, depth: int, log: Path
) -> tuple[float, ...]:
    """Seconds per token generated after `depth` others, one value per repetition, none of them the warm-up.

    Raises Unavailable as `require_bench` does, Crashed or TimedOut.
    """
    argv = [str(require_bench(engine, settings)), "-m", str(model.path), *_placed(arm), "-p", "0", "-n", str(tokens)]
    argv += ["-d", str(depth), "-r", str(REPEATS)]
    given = {
        "-b": settings.batch,
        "-ub": settings.ubatch,
        "-t": settings.threads,
        "-fa": settings.flash_attention,
        "-ctk": settings.kv_k,
        "-ctv": settings.kv_v,
        "-lm": settings.load_mode,
        "--rpc": ",".join(settings.rpc) or None,
    }
    argv += [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
    argv += ["-o", "jsonl"]
    with process.start(argv, log, process.engine_environment()) as child:
        deadline = time.monotonic() + PATIENCE_S
        while (code := child.returncode()) is None:
            if time.monotonic() > deadline:
                raise TimedOut(f"{PROGRAM} did not end within {PATIENCE_S:g} s; take fewer tokens")
            time.sleep(0.05)
        lines = child.tail()
    for line in lines:
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            return tuple(nanoseconds / 1e9 / found["n_gen"] for nanoseconds in found["samples_ns"])
    said = next((line for line in lines if "error" in line), process.explain_exit(code))
    raise Crashed(f"{PROGRAM} gave no result: {said}")


def _placed(arm: Arm) -> tuple[str, ...]:
    """llama-bench has no --cpu-moe, and never fits by itself unless told."""
    match arm.placement.kind:
        case "auto":
            return ()
        case "ngl":
            return ("-ngl", str(arm.placement.n))
        case "cpu-moe":
            return ("-ngl", "999", "-ncmoe", "999")
        case "ncmoe":
            return ("-ngl", "999", "-ncmoe", str(arm.placement.n))
        case _:
            return ("-ngl", "0", "-dev", "none")
