"""A model that an Ollama holds: what is sent to it, what its lines mean, what its runner really did.

The runner's argv comes from the process table, its buffers and its evaluated prompt tokens from
the log. `/api/ps` is kept as a claim, for it is wrong as soon as experts lie on the CPU.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from backends import llama_failure, llama_log
from backends.llama_failure import HOST_WEIGHTS, Failure, read_failure
from backends.llama_http import GREEDY
from harness import process
from harness.contract import Chunk, Engine, Prompt, Realised, Request, Usage
from harness.errors import Crashed, EngineFailed, TimedOut

if TYPE_CHECKING:
    import ollama

ANSWER_S = 10.0  # for control calls
SETTLE_S = 2.0  # the runner's log lines come through a pipe, so a little after the answer
STOP_S = 0.3  # from the first of them to the last, which not every build has
UNREACHABLE = (OSError, http.client.HTTPException, EngineFailed)

FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)')
APART = "~"  # no prompt begins with it: Ollama keeps what it has read, and would skip a common beginning
PREFILL = re.compile(rb"prompt eval time = +([\d.]+) ms / +(\d+) tokens")
PREFILL_DIGITS_S = 0.000006  # half of the last digit printed, and a little
STOP = re.compile(rb"stop processing: n_tokens = \d+, truncated = (\d)")
OF_OLLAMA = re.compile(r"^(time=\S+ level=|\[GIN)")  # lines of Ollama's own between those of its runner
ENDED = re.compile(r"^llama-server process has terminated: (exit status \d+: )?")
KILLED = "signal: killed"
SIGNAL = re.compile(r"signal: ([a-z/ ]+)")
SIGNALS = {(signal.strsignal(each) or "").partition(":")[0].lower(): each for each in signal.Signals}  # as Go has them
BUILD = re.compile(r"\bb[1-9]\d*")
TIER = 'msg="vram-based default context"'
LOWERED = 'msg="llama-server load failed; reducing automatic context and retrying once"'
# a setting → the option that asks for it, the flag by which Ollama passes it on, the variable that asks for it instead
OPTIONS = {"context": "num_ctx", "batch": "num_batch", "ubatch": "num_batch", "threads": "num_thread"}
OPTIONS |= {"load_mode": "use_mmap"}
OWN_FLAGS = {
    "context": "-c",
    "batch": "-b",
    "ubatch": "-ub",
    "threads": "-t",
    "load_mode": "--load-mode",
    "flash_attention": "--flash-attn",
    "kv_k": "--cache-type-k",
    "kv_v": "--cache-type-v",
}
ASKED_BY = {"flash_attention": "OLLAMA_FLASH_ATTENTION", "kv_k": "OLLAMA_KV_CACHE_TYPE", "kv_v": "OLLAMA_KV_CACHE_TYPE"}
TOO_LARGE = re.compile(r"requires more system memory|too large for system memory", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class OllamaSession:
    """`child` and `log` are None where the server is not ours."""

    engine: Engine
    url: str
    model: str  # its name in that Ollama
    options: Mapping[str, Any]  # that the runner starts with; None is left out
    pids: Callable[[], tuple[int, ...]]
    weights: Path | None = None  # as Ollama names them, where no runner can be seen
    child: process.Child | None = None
    log: Path | None = None
    log_begin: int = 0  # where this session's part begins, in bytes
    keep_alive: str | None = None
    because: Mapping[str, str] = field(default_factory=dict)  # setting → why the adapter asks for it by itself
    notes: tuple[str, ...] = ()
    load_s: float | None = None
    _runner: psutil.Process | None = field(default=None, init=False)
    _argv: tuple[str, ...] = field(default=(), init=False)
    _kills: int | None = field(default=None, init=False)  # by the system, for lack of memory, before it loaded
    _loaded: int | None = field(default=None, init=False)  # the log from here on is of requests
    _settled: int = field(default=0, init=False)  # the log up to here belongs to requests before

    def load(self, wait_s: float) -> None:
        """One short request with the options of all that follow. Raises EngineFailed."""
        began, self._kills = time.monotonic(), llama_failure.kills_for_memory()
        try:
            answer = _post(self.request(Prompt("load", APART), 1), wait_s)
        except TimeoutError:
            raise TimedOut(f"Ollama did not load the model within {wait_s:.0f} s; its log says why") from None
        except (OSError, http.client.HTTPException) as error:
            raise Crashed(f"Ollama broke off while loading: {self.death() or error}") from None
        usage = None
        for line in answer:
            data = json.loads(line)
            if "error" in data:
                raise failure(str(data["error"]), self._lines(), self._kills)
            usage = _usage(data) if data.get("done") else usage
        if usage is None or not usage.generated_tokens:
            raise EngineFailed("Ollama gave no first token; its log has the rest")
        self.load_s = time.monotonic() - began
        self._look_at_runner()
        self.settle(usage)  # so that its lines in the log are not taken for those of the next request
        self._loaded = self.log.stat().st_size if self.log else None

    def request(self, prompt: Prompt, max_tokens: int) -> Request:
        options = {key: value for key, value in self.options.items() if value is not None}
        body = {
            "model": self.model,
            "prompt": prompt.text,
            "raw": True,
            "think": False,
            "stream": True,
            "truncate": False,
            "shift": False,  # a context that is full is an error, not a cut; it is a flag of the runner too
            "options": {
                **options,
                **GREEDY,
                "num_predict": max(1, max_tokens),  # 0 means without end
                "stop": [],  # a model of the daemon's may bring its own
            },
        }
        if self.keep_alive:
            body["keep_alive"] = self.keep_alive
        return Request(f"{self.url}/api/generate", {"Content-Type": "application/json"}, json.dumps(body).encode())

    def read(self, line: bytes) -> Chunk | Usage | None:
        data = json.loads(line)
        if "error" in data:
            raise failure(str(data["error"]))
        if data.get("done"):
            return _usage(data)
        return Chunk((data.get("thinking") or "") + (data.get("response") or ""))

    def settle(self, usage: Usage) -> Usage:
        """Ollama counts cached prompt tokens in and hides cuts; its runner's log tells of both."""
        if self._runner and not self._runner_lives():
            raise EngineFailed(f"Ollama changed its runner between two requests; {self._last_words()}")
        if usage.prompt_tokens is None or usage.prefill_s is None:
            return usage
        evaluated, truncated = self._told_of_request(usage.prefill_s)
        cached = usage.cached_tokens if evaluated is None else usage.prompt_tokens - evaluated
        return replace(usage, cached_tokens=cached, truncated=truncated)

    def realised(self) -> Realised:
        self._look_at_runner()
        lines = self._lines()
        load = llama_log.read_load(lines)
        environment = self._environment()
        reported = self._reported()
        settings = {**self._told_by_runner(), **load.settings}
        if "build" not in settings and (build := BUILD.search(self.engine.runner or "")):
            settings["build"] = build[0]  # a build outside git does not know its own
        if self._argv:
            settings["context_shift"] = "on" if "--context-shift" in self._argv else "off"
        if who := llama_log.placed_by(load, self._argv, environment):
            settings["placed_by"] = who
        if "context" not in settings and reported.get("context_length"):
            settings["context"] = str(reported["context_length"])
        model = self._after("--model")
        return Realised(
            engine=str(self.engine),
            argv=self._argv,
            pids=self.pids(),
            weights=Path(model) if model else self.weights,
            settings=settings,
            buffers=load.buffers,
            load_s=self.load_s,
            asked=self._asked(),
            explained=self._explained(lines, environment, settings),
            reported=reported,
            notes=(*self.notes, *load.notes),
        )

    def _asked(self) -> dict[str, str]:
        """What every arm of this adapter asks for beside the settings, as far as it can reach this Ollama."""
        asked = {"context_shift": "off", **llama_log.sampling(GREEDY)}
        if self.child is not None:
            asked["slots"] = "1"
        if self.options.get("num_thread") is not None:
            asked["threads_batch"] = str(self.options["num_thread"])  # one flag sets both
        return asked | {setting: str(self.options[OPTIONS[setting]]) for setting in self.because}

    def _explained(
        self, lines: Sequence[str], environment: Mapping[str, str], settings: Mapping[str, str]
    ) -> dict[str, str]:
        """Flags that Ollama gives its runner by its own choice, and what llama.cpp makes of ours."""
        asked = {setting: self.options.get(option) for setting, option in OPTIONS.items()}
        chosen = [setting for setting in OWN_FLAGS if asked.get(setting) is None]
        chosen = [setting for setting in chosen if ASKED_BY.get(setting) not in environment]
        found = {
            setting: f"Ollama passes {flag} {value} by itself"
            for setting in chosen
            if (flag := OWN_FLAGS[setting]) and (value := self._after(flag)) is not None
        }
        if "context" in found and (tier := next((line for line in lines if TIER in line), None)):
            found["context"] += f", for {log_fields(tier).get('total_vram', 'unknown bytes')} of card memory"
        if "context" in found and (lowered := next((line for line in lines if LOWERED in line), None)):
            found["context"] += f", lowered from {log_fields(lowered).get('effective_num_ctx')} as it found no memory"
        limits = llama_log.limits({setting: asked[setting] for setting in ("context", "batch", "ubatch")}, settings)
        because = dict(self.because)
        if "context" in because and int(settings.get("context", sys.maxsize)) < int(self.options["num_ctx"]):
            because["context"] += "; Ollama cuts it to the context that the model was trained for"
        return found | limits | because

    def _environment(self) -> Mapping[str, str]:
        """Of the runner; nothing where this user may not read it."""
        with contextlib.suppress(psutil.Error):
            return self._runner.environ() if self._runner else {}
        return {}

    def _told_by_runner(self) -> dict[str, str]:
        """What the runner says of itself, the last request's sampler first of all; nothing where it does not say."""
        found: dict[str, str] = {}
        if port := self._after("--port"):
            url = f"http://127.0.0.1:{port}"
            with contextlib.suppress(*UNREACHABLE, LookupError, TypeError):
                found |= llama_log.sampling(ask(f"{url}/slots")[0]["params"])
            with contextlib.suppress(*UNREACHABLE, LookupError, TypeError):
                props = ask(f"{url}/props")
                found["slots"] = str(props["total_slots"])
                if build := BUILD.match(str(props["build_info"])):
                    found["build"] = build[0]
        return found

    def count_tokens(self, text: str) -> int | None:
        """By the runner's own tokenizer, as it takes a raw prompt."""
        port = self._after("--port")
        if self.child is None or port is None:
            return None
        with contextlib.suppress(*UNREACHABLE, KeyError):
            body = {"content": text, "add_special": True, "parse_special": True}
            return len(ask(f"http://127.0.0.1:{port}/tokenize", body)["tokens"])
        return None

    def death(self) -> str | None:
        error = self.cause_of_death()
        return str(error) if error else None

    def cause_of_death(self) -> EngineFailed | None:
        """What ended it since it had loaded. A runner that found no memory for a request may live on, of no use."""
        starved = self._starved()
        if starved:
            return starved.error("generating")
        said = self._how_it_ended()
        if said and KILLED in said and (killed := llama_failure.killed_for_memory(self._kills)):
            return killed.error("generating")
        return Crashed(said) if said else None

    def _starved(self) -> Failure | None:
        """Memory that the runner did not get for a request."""
        if self.log is None or self._loaded is None:
            return None
        lines = _bytes_from(self.log, self._loaded).decode(errors="replace").splitlines()
        said = read_failure((line for line in lines if not OF_OLLAMA.match(line)), loaded=True)
        return said if said and said.kind == "memory" else None

    def _how_it_ended(self) -> str | None:
        code = self.child.returncode() if self.child else None
        if code is not None:
            return f"ollama serve ended ({process.explain_exit(code)})"
        if self._runner and not self._runner_lives():
            return f"Ollama's runner ended; {self._last_words()}"
        if self.child is None:
            try:
                ask(f"{self.url}/api/version")
            except UNREACHABLE as error:
                return f"the Ollama at {self.url} answers no more ({error})"
        return None

    # ── its runner and its log ──────────────────────────────────────────────────────────────

    def _look_at_runner(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                candidate = psutil.Process(pid)
                argv = candidate.cmdline()
                if "--model" in argv:
                    self._runner, self._argv = candidate, tuple(argv)

    def _runner_lives(self) -> bool:
        with contextlib.suppress(psutil.Error):
            runner = self._runner
            return runner is not None and runner.is_running() and runner.status() != psutil.STATUS_ZOMBIE
        return False

    def _after(self, flag: str) -> str | None:
        return self._argv[self._argv.index(flag) + 1] if flag in self._argv[:-1] else None

    def _lines(self) -> list[str]:
        return [] if self.log is None else _bytes_from(self.log, self.log_begin).decode(errors="replace").splitlines()

    def _last_words(self) -> str:
        said = [line for line in self._lines() if "llama-server terminated" in line]
        return f"it says {log_fields(said[-1]).get('error', said[-1])!r}" if said else "its log has the rest"

    def _told_of_request(self, prefill_s: float) -> tuple[int | None, bool]:
        """Prompt tokens that the last request computed, and whether the context cut it short.

        Its lines are those that follow the time which it reported.
        """
        if self.log is None:
            return None, False
        begin = max(self._settled, self.log_begin)
        deadline = time.monotonic() + SETTLE_S
        while True:
            text = _bytes_from(self.log, begin)
            found = [
                line for line in PREFILL.finditer(text) if abs(float(line[1]) / 1000 - prefill_s) <= PREFILL_DIGITS_S
            ]
            stop = STOP.search(text, found[-1].end()) if found else None
            if stop or time.monotonic() > deadline:
                break
            if found:
                deadline = min(deadline, time.monotonic() + STOP_S)
            time.sleep(0.01)
        self._settled = begin + len(text)
        return int(found[-1][2]) if found else None, stop is not None and stop[1] == b"1"

    def _reported(self) -> dict[str, Any]:
        """What `/api/ps` says of this model, its share on a device in words and as a number."""
        with contextlib.suppress(*UNREACHABLE, LookupError, TypeError):
            for loaded in ask(f"{self.url}/api/ps")["models"]:
                if str(loaded["name"]).removesuffix(":latest") == self.model.removesuffix(":latest"):
                    told = {key: loaded[key] for key in ("size", "size_vram", "context_length") if key in loaded}
                    if told.get("size"):
                        share = told.get("size_vram", 0) / told["size"]
                        told["claim"] = f"/api/ps: {100 * share:.0f} % on the GPU"
                        told["claimed_device_share"] = share
                    return told
        return {}


def _usage(data: Mapping[str, Any]) -> Usage:
    def seconds(key: str) -> float | None:
        return data[key] / 1e9 if data.get(key) is not None else None

    return Usage(
        prompt_tokens=data.get("prompt_eval_count"),
        cached_tokens=data.get("prompt_eval_cached_count"),
        generated_tokens=data.get("eval_count"),
        prefill_s=seconds("prompt_eval_duration"),
        decode_s=seconds("eval_duration"),
        load_s=seconds("load_duration"),
        stop=data.get("done_reason"),
    )


def failure(text: str, log: Sequence[str] = (), kills: int | None = None) -> EngineFailed:
    """The error for a text that Ollama sent; what its runner wrote before tells more.

    `kills` is how many processes the system had killed for lack of memory before.
    """
    if TOO_LARGE.search(text):
        return Failure("memory", " ".join(text.split()), HOST_WEIGHTS).error()
    sent = read_failure(ENDED.sub("", text).splitlines())
    wrote = read_failure(line for line in log if not OF_OLLAMA.match(line))
    if sent and wrote and sent.kind == wrote.kind == "memory":
        return wrote.error()  # Ollama passes on the ends of some lines only
    for said in (sent, wrote):
        if said and said.kind != "other":
            return said.error()
    if KILLED in text and (killed := llama_failure.killed_for_memory(kills)):
        return killed.error()
    if (found := SIGNAL.search(text)) and (number := SIGNALS.get(found[1].strip())):
        return Crashed(f"Ollama's runner ended: {process.explain_exit(-number)}")
    if "timed out" in text:
        return TimedOut(f"Ollama gave up waiting for its runner ({text}); its log says how far it came")
    return EngineFailed(f"Ollama says: {' '.join(text.split())}; its log has the rest")


def log_fields(line: str) -> dict[str, str]:
    """key=value and key="two words" of a line of Ollama's own."""
    return {key: value.strip('"') for key, value in FIELD.findall(line)}


def _bytes_from(log: Path, begin: int) -> bytes:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read()


# ── control calls ───────────────────────────────────────────────────────────────────────────


def client(url: str, timeout_s: float) -> ollama.Client:
    """Ollama's own client, past any proxy."""
    import ollama

    return ollama.Client(host=url, timeout=timeout_s, trust_env=False)


def ask(url: str, body: Mapping[str, Any] | None = None, timeout_s: float = ANSWER_S) -> Any:
    """JSON that Ollama's client has no call for, or drops fields of. Raises one of UNREACHABLE."""
    connection = _connect(url, timeout_s)
    with contextlib.closing(connection):
        if body is None:
            connection.request("GET", urlsplit(url).path)
        else:
            connection.request("POST", urlsplit(url).path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read()
    if reply.status != 200:
        raise EngineFailed(f"{url} answered {reply.status}: {text[:200].decode(errors='replace')}")
    try:
        return json.loads(text)
    except ValueError:
        raise EngineFailed(f"{url} answered something else than JSON; is it another program's port?") from None


def has_blob(url: str, sha256: str) -> bool:
    """Whether that Ollama has a file already."""
    connection = _connect(url, ANSWER_S)
    with contextlib.closing(connection):
        connection.request("HEAD", f"/api/blobs/sha256:{sha256}")
        return connection.getresponse().status == 200


def _post(request: Request, timeout_s: float) -> list[bytes]:
    """The lines of an answer, whatever its status."""
    connection = _connect(request.url, timeout_s)
    with contextlib.closing(connection):
        connection.request("POST", urlsplit(request.url).path, request.body, dict(request.headers))
        return [line for line in connection.getresponse().read().splitlines() if line.strip()]


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(str(parts.hostname), parts.port, timeout=timeout_s)
