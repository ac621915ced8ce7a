"""The nine figures of an article, entered as a run: what would the harness have said of them?

    .venv/bin/python scripts/experiments/article.py FOLDER

An article of 2026-06-17 measured Qwen3.5-35B-A3B on an RTX 4070 of 12 GB: Ollama, then `--n-cpu-moe` from 48 down
to 24, then plain `-ngl 99`, once each. It found that experts on the GPU make it slower. The model has 40 layers,
so N = 48, 44 and 40 are one placement. Every figure is the article's; what it does not tell is unknown here.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import tempfile
from pathlib import Path

import harness
from harness import model as models
from harness import placement, plan, record, synth
from harness.contract import Engine, Settings, Usage
from harness.gpu import Gpu
from harness.machine import Machine
from harness.measure import Sample
from harness.plan import ArmStatus, Status
from harness.probe import equal_placements
from harness.record import Contender, Header, LoadRecord, ModelFacts, SampleLine

TPS = {  # as printed, in the order of the article
    "ollama": 12.2,
    "llama-cpp@ncmoe=48": 34.60,
    "llama-cpp@ncmoe=44": 27.19,
    "llama-cpp@ncmoe=40": 16.88,
    "llama-cpp@ncmoe=36": 15.29,
    "llama-cpp@ncmoe=32": 14.06,
    "llama-cpp@ncmoe=28": 12.85,
    "llama-cpp@ncmoe=24": 11.71,
    "llama-cpp@ngl=99": 12.94,
}
SEED = 258368  # the first whose random order of nine arms is the article's own
SHAPE = "qwen3.5-35b-a3b"
FILE = "Qwen3.5-35B-A3B-Q4_K_M.gguf"
DATE = "2026-06-17"
UNKNOWN = "unknown"
NOTHING_ASKED = Settings(context=None, batch=None, ubatch=None, flash_attention=None, kv_k=None, kv_v=None)
ENGINES = {
    "ollama": Engine(product="Ollama", version="of unknown version", path=Path("ollama"), origin="article"),
    "llama-cpp": Engine(
        product="llama.cpp", version="of unknown build", path=Path("build/bin/llama-server"), origin="article"
    ),
}
MACHINE = Machine(
    cpu=None,
    physical_cores=None,
    logical_cores=None,
    memory_bytes=None,
    available_bytes=None,
    system=None,
    kernel=None,
    python=None,
    gpus=(Gpu(name="RTX 4070", memory_bytes=12 << 30),),
    visible_gpus=("NVIDIA",),
)
NOTES = (
    f"Taken over from an article of {DATE}; nothing was measured here.",
    "Each figure was measured once: no second load, no second copy of the reference, no order but the article's.",
    "Reconstructed: each sample is two tokens whose two stamps give the printed rate. Length of prompt and answer, "
    "time to the first token and the engines' own clocks are not told.",
    "Reconstructed: loads stand one minute apart, for their order alone; the article tells no times, and not when "
    "plain -ngl 99 was measured.",
    f"The article counts 48 layers and 128 experts. The model has 40 layers with 256 experts each; placements are "
    f"those of the shape {SHAPE}, and the size is that of its header.",
    "Of Ollama the article also tells: 58 % CPU and 42 % GPU, context 4096, 11.4 GB of VRAM in use. Of llama.cpp: "
    "built with CUDA, -ngl 99 with each N.",
    "Whether Ollama and llama.cpp had the same weights is not told.",
    "GPU memory: 12 GB. An earlier measurement found 9.4 GB of it held by another program; these were made after "
    "that had been stopped.",
)


def replay(folder: Path) -> harness.Comparison:
    """Write the article as a run into this folder, and judge it."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        path = synth.write(Path(scratch) / FILE, synth.SHAPES[SHAPE], header_only=True)
        model = models.load(path, hashed=False)
    drawn, contenders = draw(model)
    record.create(folder, header(model, drawn, contenders))
    for position, label in enumerate(plan.order(drawn, 1)):
        load = load_of(drawn, label, position)
        record.append(folder, SampleLine(load=load.id, sample=sample_of(load.arm)))
        record.append(folder, load)
    (folder / "engines").rmdir()  # no engine ran, and none has a log
    return harness.write_report(folder)


def draw(model: models.Model) -> tuple[plan.Plan, tuple[Contender, ...]]:
    """One block of nine arms without a twin, equal placements kept apart: what the article did."""
    contenders = tuple(contender_of(model, text) for text in TPS)
    drawn = plan.make(
        list(TPS),
        seed=SEED,
        prompts_digest=UNKNOWN,
        weights_digest=UNKNOWN,
        aliases=list(equal_placements(contenders).items()),
        preset="quick",
        requests=1,
        warmups=0,
        out_tokens=2,
    )
    return dataclasses.replace(drawn, max_blocks=1, max_repeats=0), contenders


def contender_of(model: models.Model, text: str) -> Contender:
    (arm,) = harness.parse_arms(text)
    return Contender(
        arm=text,
        status=ArmStatus(Status.OK),
        placement=placement.describe(arm.placement, model),
        settings=NOTHING_ASKED,
        engine=ENGINES[arm.backend],
        predicted=placement.predict(model, arm.placement, NOTHING_ASKED, True),
    )


def header(model: models.Model, drawn: plan.Plan, contenders: tuple[Contender, ...]) -> Header:
    return Header(
        format=record.FORMAT,
        plan=drawn,
        plan_digest=drawn.digest,
        started=DATE,
        model=ModelFacts(
            name="Qwen3.5-35B-A3B Q4_K_M, as an article measured it",
            file=FILE,
            architecture=model.file.architecture,
            size_bytes=model.file.size_bytes,
            digest=UNKNOWN,
            sha256=UNKNOWN,
            layers=model.layers,
            expert_layers=len(model.expert_layers),
            experts=model.experts,
            experts_used=model.experts_used,
            has_answer_key=False,
        ),
        contenders=contenders,
        machine=MACHINE,
        options={},
        command=f"llamaduel run {FILE} --arms ollama,llama-cpp@ngl=99,llama-cpp@ncmoe=48..24/4",
        versions={},
        notes=NOTES,
    )


def load_of(drawn: plan.Plan, label: str, position: int) -> LoadRecord:
    text = next(arm.text for arm in drawn.arms if arm.label == label)
    began = 60.0 * position
    return LoadRecord(
        id=f"block-1.1.{position}-{label}",
        stage="block",
        label=label,
        arm=text,
        block=1,
        attempt=1,
        position=position,
        started_unix_s=began,
        ended_unix_s=began,
    )


def sample_of(arm: str) -> Sample:
    """Two tokens, a step apart that gives the printed rate."""
    return Sample(
        prompt_id=UNKNOWN,
        max_tokens=2,
        sent_ns=0,
        chunk_ns=(0, math.floor(1e9 / TPS[arm] + 0.5)),
        chunk_tokens=(1, 2),
        status=200,
        usage=Usage(generated_tokens=2),
    )


def readme(found: harness.Comparison) -> str:
    equal = [arm.text for arm in found.header.plan.arms if arm.text.startswith("llama-cpp@ncmoe=4")]
    speeds = ", ".join(f"{TPS[arm]:.2f}" for arm in equal)
    return f"""# An article, replayed

State {found.state.word}: it ranks nothing, because {equal[0]} and {equal[2]} are one placement and yet stand at
{TPS[equal[0]]:.2f} and {TPS[equal[2]]:.2f} tok/s.

What would the harness have said of an article that measured Qwen3.5-35B-A3B on a card of 12 GB, once for each
placement, and found that experts on the GPU make it slower? Its nine figures are entered as they were printed, in
its order. The model has 40 layers, so {", ".join(equal)} are the same bytes in the same places: they read
{speeds} tok/s. What moves equal things by a factor of {TPS[equal[0]] / TPS[equal[2]]:.1f} may have moved all others.

- [report.md](report.md) shows every figure, and ranks none
- `run.json`, `samples.jsonl`: the run; what had to be reconstructed is named in its notes
- made by `scripts/experiments/article.py`; `llamaduel verify` reproduces it
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the run is written, anew each time")
    folder = parser.parse_args().folder
    found = replay(folder)
    (folder / "README.md").write_text(readme(found), "utf-8")
    print(f"{found.state.word}: {found.state.reasons[0]}")


if __name__ == "__main__":
    main()
