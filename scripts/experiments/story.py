"""The article's question asked again on a stand-in for its card: its own sweep, on today's engines.

    .venv/bin/python scripts/experiments/story.py WORK [--publish FOLDER]

The model has the layers of Qwen3.5-35B-A3B, all 40 with experts, but narrow ones, so that it loads in seconds. A
stand-in device holds the share of it that a card of 12 GB holds of the real one. Placement is real there, speed is that
of the CPU on both sides: what is to be seen is which of the article's points are one placement, and what is said of the
others. It needs a full build of llama.cpp (`llamaduel engines install llama-cpp`).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import harness
from harness import publication, synth

SHAPE, LAYERS, WIDTHS = "qwen3.5-35b-a3b", 40, 120 << 20  # widths of a model of this many bytes
CARD_GB, FILE_GB = 12.0, 22.0  # of the article
ARMS = "ollama,llama-cpp,llama-cpp@ngl=99,llama-cpp@ncmoe=48/44/40/36/32/24"
BUDGET_MINUTES = 9.5
MIB = 1 << 20


def write_model(work: Path) -> Path:
    """The article's layers at smaller widths."""
    narrow = synth.scaled(synth.SHAPES[SHAPE], WIDTHS)
    shape = dataclasses.replace(narrow, name=f"{SHAPE}-narrow", layers=LAYERS)
    return synth.write(work / f"{shape.name}.gguf", shape)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path, help="where the model and the run go")
    parser.add_argument("--publish", type=Path, metavar="FOLDER", help="copy the run there, without what is private")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    model = write_model(given.work)
    card = round(model.stat().st_size * CARD_GB / FILE_GB / MIB)
    base = harness.collect({"model": str(model), "out": str(given.work / "runs"), "stand_in": f"{card}MiB"})
    options = dataclasses.replace(
        base, arms=ARMS, budget=BUDGET_MINUTES, seed=48, context=512, prompt_tokens=96, out_tokens=32
    )
    with harness.show_progress() as watch:
        comparison = harness.duel(options, watch)
    print(harness.table(comparison))
    if given.publish:
        print(publication.publish_as(comparison.run.folder, given.publish, anyway=True).folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
