"""How each tool is asked to measure the same thing, and where it writes what it found.

A tool is asked for one stream at a time, for so many requests of so many tokens, without progress
bars and without telemetry. What it reports for each request is read from the file that it is known
to write; nothing is computed from it but units, and a rate from its time per token where it names
only that.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BOOK = "http://127.0.0.1/book"  # never fetched: llama-benchy finds the text in its cache
PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Report:
    """What a tool says of one request. `gaps_s` lie between chunks, if it keeps them one by one."""

    ttft_s: float
    decode_tps: float
    tokens: int | None = None
    gaps_s: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run of one tool."""

    url: str
    requests: int
    tokens: int
    folder: Path  # empty, for its files and as its home
    tokenizer: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """`counts`: the server tells how many tokens each chunk holds, if asked. `wants` is how it is asked."""

    name: str
    program: str
    command: Callable[[str, Task], list[str]]
    read: Callable[[Path], list[Report]]
    environment: Mapping[str, str] = field(default_factory=dict)
    counts: bool = False
    wants: str = ""
    ours: bool = False


# ── ours ────────────────────────────────────────────────────────────────────────────────────


def ours(dialect: str) -> Callable[[str, Task], list[str]]:
    def command(program: str, task: Task) -> list[str]:
        script = [program, str(HERE / "clients_ours.py"), task.url, "--dialect", dialect]
        return [*script, *f"--requests {task.requests} --tokens {task.tokens}".split(), "--out", str(out(task.folder))]

    return command


def out(folder: Path) -> Path:
    return folder / "samples.jsonl"


def read_ours(folder: Path) -> list[Report]:
    rows = lines(out(folder))
    for reason in (row["invalid"] for row in rows if row["invalid"] is not None):
        print(f"ours did not count one: {reason}", flush=True)
    return [
        Report(row["ttft_s"], row["decode_tps"], row["tokens"], tuple(row["gaps_s"]) if row["gaps_s"] else None)
        for row in rows
        if row["invalid"] is None
    ]


# ── AIPerf ──────────────────────────────────────────────────────────────────────────────────


def aiperf(*more: str) -> Callable[[str, Task], list[str]]:
    def command(program: str, task: Task) -> list[str]:
        return [
            *(program, "profile", "--model", "truth", "--url", task.url, "--tokenizer", str(task.tokenizer)),
            *["--endpoint-type", "chat", "--streaming", "--concurrency", "1", "--warmup-request-count", "2"],
            *f"--request-count {task.requests} --output-tokens-mean {task.tokens} --output-tokens-stddev 0".split(),
            *f"--synthetic-input-tokens-mean {PROMPT_TOKENS} --synthetic-input-tokens-stddev 0".split(),
            *["--use-server-token-count", "--use-legacy-max-tokens", "--random-seed", "42", "--ui", "none"],
            *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "cache_prompt:false"),
            *("--extra-inputs", "temperature:0"),
            *["--no-server-metrics", "--no-gpu-telemetry", "--artifact-dir"],
            *(str(task.folder / "artifacts"), *more),
        ]

    return command


def read_aiperf(folder: Path) -> list[Report]:
    rows = [row for row in lines(folder / "artifacts" / "profile_export.jsonl") if not row.get("error")]
    rows = [row for row in rows if row["metadata"]["benchmark_phase"] == "profiling"]
    rows.sort(key=lambda row: row["metadata"]["request_start_ns"])
    found = [{name: metric["value"] for name, metric in row["metrics"].items()} for row in rows]
    return [
        Report(
            ttft_s=row["time_to_first_token"] / 1e3,
            decode_tps=1e3 / row["inter_token_latency"],
            tokens=row["output_sequence_length"],
            gaps_s=tuple(gap / 1e3 for gap in row["inter_chunk_latency"]),
        )
        for row in found
    ]


# ── GuideLLM ────────────────────────────────────────────────────────────────────────────────


def guidellm(program: str, task: Task) -> list[str]:
    prompts = task.folder / "prompts.jsonl"
    rows = (
        {"prompt": f"[{i}] Explain how a hash table works.", "output_tokens_count": task.tokens} for i in range(999)
    )
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    body = {"cache_prompt": False, "temperature": 0, "seed": 1}
    backend = {"kind": "openai_http", "target": task.url, "model": "truth", "http2": False, "extras": {"body": body}}
    return [
        *(program, "run", "--backend", json.dumps(backend), "--profile", "kind=synchronous"),
        *("--constraint", f"kind=max_requests,count={task.requests}", "--data", f"kind=json_file,path={prompts}"),
        *("--output", f"kind=json,path={task.folder / 'report.json'}", "--disable-console"),
    ]


def read_guidellm(folder: Path) -> list[Report]:
    rows = whole(folder / "report.json")["benchmarks"][0]["requests"]["successful"]
    rows.sort(key=lambda row: row["request_start_time"])
    return [
        Report(row["time_to_first_token_ms"] / 1e3, 1e3 / row["inter_token_latency_ms"], row["output_tokens"])
        for row in rows
    ]


# ── llama-benchy ────────────────────────────────────────────────────────────────────────────


def benchy(program: str, task: Task) -> list[str]:
    cache = task.folder / ".cache" / "llama-benchy"
    cache.mkdir(parents=True)
    text = "\n".join(path.read_text("utf-8") for path in sorted(ROOT.glob("docs/*.md")))
    (cache / f"{hashlib.md5(BOOK.encode(), usedforsecurity=False).hexdigest()}.txt").write_text(text, "utf-8")
    return [
        *(program, "--base-url", f"{task.url}/v1", "--model", "truth", "--tokenizer", str(task.tokenizer)),
        *f"--pp {PROMPT_TOKENS} --tg {task.tokens} --exact-tg --depth 0 --runs {task.requests}".split(),
        *f"--concurrency 1 --latency-mode none --no-cache --skip-coherence --book-url {BOOK}".split(),
        *("--format", "json", "--save-result", str(task.folder / "report.json")),
    ]


def read_benchy(folder: Path) -> list[Report]:
    found = whole(folder / "report.json")["benchmarks"][0]
    pairs = zip(found["e2e_ttft"]["values"], found["tg_throughput"]["values"], strict=True)
    return [Report(ttft_ms / 1e3, tps) for ttft_ms, tps in pairs]


# ── genai-bench ─────────────────────────────────────────────────────────────────────────────


def genai(program: str, task: Task) -> list[str]:
    return [
        *(program, "benchmark", "--api-backend", "vllm", "--api-base", task.url, "--api-key", "none"),
        *("--api-model-name", "truth", "--model-tokenizer", str(task.tokenizer), "--task", "text-to-text"),
        *("--traffic-scenario", f"D({PROMPT_TOKENS},{task.tokens})", "--num-concurrency", "1"),
        *f"--max-requests-per-run {task.requests} --max-time-per-run 30".split(),  # minutes
        *("--experiment-base-dir", str(task.folder), "--experiment-folder-name", "run"),
        *("--additional-request-params", json.dumps({"cache_prompt": False})),
    ]


def read_genai(folder: Path) -> list[Report]:
    (report,) = (folder / "run").glob(f"D{PROMPT_TOKENS}_*.json")
    data = whole(report)
    second = {"s": 1.0, "ms": 1e3}[data.get("_time_unit", "s")]
    return [
        Report(row["ttft"] / second, row["output_inference_speed"], row["num_output_tokens"])
        for row in data["individual_request_metrics"]
        if not row["error_code"] and row["tpot"] is not None
    ]


# ── all of them ─────────────────────────────────────────────────────────────────────────────

OFFLINE = {"HF_HUB_OFFLINE": "1"}  # AIPerf would then refuse the path of a tokenizer
TOOLS = (
    Tool(
        name="llamaduel",
        program="python",
        command=ours("llama-server"),
        read=read_ours,
        wants="llama-server's own dialect, which always tells",
        ours=True,
    ),
    Tool(name="llamaduel, OpenAI dialect", program="python", command=ours("openai"), read=read_ours, ours=True),
    Tool(name="AIPerf", program="aiperf", command=aiperf(), read=read_aiperf),
    Tool(name="GuideLLM", program="guidellm", command=guidellm, read=read_guidellm, environment=OFFLINE),
    Tool(name="llama-benchy", program="llama-benchy", command=benchy, read=read_benchy, environment=OFFLINE),
    Tool(
        name="genai-bench",
        program="genai-bench",
        command=genai,
        read=read_genai,
        environment=OFFLINE | {"ENABLE_UI": "false"},
    ),
    Tool(
        name="AIPerf, told",
        program="aiperf",
        command=aiperf("--per-chunk-usage"),
        read=read_aiperf,
        counts=True,
        wants="--per-chunk-usage",
    ),
    Tool(
        name="llama-benchy, told",
        program="llama-benchy",
        command=benchy,
        read=read_benchy,
        environment=OFFLINE,
        counts=True,
        wants="return_token_ids",
    ),
)
NEED_TOKENIZER = {"aiperf", "llama-benchy", "genai-bench"}


def find(program: str, given: Path | None) -> Path | None:
    """The executable that was named, or the one in PATH; for ours, this Python."""
    if program == "python":
        return Path(sys.executable)
    path = given or shutil.which(program)
    return Path(path).absolute() if path else None


def version(program: str, path: Path) -> str:
    """As the package says it, asked of the Python that the executable belongs to."""
    package = "llamaduel" if program == "python" else program
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    python = path if program == "python" else path.with_name("python")
    told = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    return told.stdout.strip() or "version unknown"


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def whole(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
