"""A program that pretends to be Ollama: a store, a scheduler for one model, and a real child that computes.

`ollama serve` with OLLAMA_HOST and OLLAMA_MODELS. Its child is the `llama-server` that lies in
`../lib/ollama` beside it, as with the real one, or a fake one; prompts go there and come back in
Ollama's own wire format. What the child writes lands in Ollama's log.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import psutil

from harness.testing.completion import SAMPLING
from harness.testing.script import PLAIN, read
from harness.testing.wire import Lines

VERSION = "0.32.15"
RELOADS = ("num_ctx", "num_batch", "num_gpu", "num_thread", "use_mmap", "main_gpu", "shift")
SAYS_ERROR = re.compile(r"error|failed|unable", re.IGNORECASE)


class Gone(Exception):
    """The child did not load, has ended or refused; what Ollama says then, and its HTTP status."""

    def __init__(self, text: str, status: int = 500) -> None:
        super().__init__(text)
        self.status = status


class Store:
    """Models by name, read from the manifests."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def models(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        library = self.root / "manifests" / "registry.ollama.ai" / "library"
        for manifest in sorted(library.glob("*/*")):
            for layer in json.loads(manifest.read_text("utf-8"))["layers"]:
                if layer["mediaType"] == "application/vnd.ollama.image.model":
                    name = f"{manifest.parent.name}:{manifest.name}"
                    found[name] = self.root / "blobs" / layer["digest"].replace(":", "-")
        return found

    def find(self, name: str) -> tuple[str, Path] | None:
        full = name if ":" in name else f"{name}:latest"
        blob = self.models().get(full)
        return (full, blob) if blob else None


class Runner:
    """The child: one model with one set of options."""

    def __init__(
        self, program: Sequence[str], name: str, blob: Path, options: Mapping[str, Any], device: bool, context: int
    ) -> None:
        self.name, self.key = name, (name, *(options.get(key) for key in RELOADS))
        self.context = int(options.get("num_ctx") or os.environ.get("OLLAMA_CONTEXT_LENGTH") or context)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        batch = options.get("num_batch") or 512
        attention = {None: "auto", "1": "on", "true": "on"}.get(os.environ.get("OLLAMA_FLASH_ATTENTION"), "off")
        self.context = min(self.context, read(["ollama"]).trained_context or self.context)
        argv = [*program, "--model", str(blob), "--port", str(self.port), "--host", "127.0.0.1", "--no-webui"]
        argv += ["--offline", "-c", str(self.context), "-np", "1", "--log-verbosity", "4"]
        argv += ["--no-log-prefix", "--no-log-timestamps"]
        argv += ["--load-mode", "none"] if not device and not options.get("use_mmap") else []
        if kind := os.environ.get("OLLAMA_KV_CACHE_TYPE"):
            argv += ["--cache-type-k", kind, "--cache-type-v", kind]
        argv += ["--flash-attn", attention, "-b", str(batch), "-ub", str(batch)]
        argv += ["-ngl", str(options["num_gpu"])] if options.get("num_gpu", -1) >= 0 else []
        argv += ["-t", str(options["num_thread"])] if options.get("num_thread") else []
        argv += ["--context-shift", "--keep", "4"] if options.get("shift", True) else []
        say(f'msg="starting llama-server" cmd="{" ".join(argv)}"')
        self.errors: list[str] = []
        environment = os.environ | {PLAIN: "1"}
        self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=sys.stderr, env=environment)
        self.copier = threading.Thread(target=self._copy, daemon=True)
        self.copier.start()
        self._wait()

    def _copy(self) -> None:
        for line in self.process.stderr or ():
            text = line.decode(errors="replace")
            if SAYS_ERROR.search(text):
                self.errors.append(text.strip())
            sys.stderr.write(text)
            sys.stderr.flush()

    def _wait(self) -> None:
        while True:
            if self.process.poll() is not None:
                raise Gone(f"llama-server process has terminated: {self.last_words()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.01)

    def runs(self) -> bool:
        """False from the moment it was killed; it can be waited for only after its last thread has ended."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.process.pid).status() != psutil.STATUS_ZOMBIE
        return False

    def last_words(self) -> str:
        self.copier.join(1)
        code = self.process.wait()
        words = (signal.strsignal(-code) or "").partition(":")[0].lower() if code < 0 else ""  # as Go has them
        status = f"exit status {code}" if code >= 0 else f"signal: {words}"
        say(f'msg="llama-server terminated" error="{status}"', "ERROR")
        return ": ".join([status, *self.errors[:1]])

    def complete(self, prompt: str, options: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of its stream. Raises Gone if it dies, http.client's errors if it says no."""
        body = {"prompt": prompt, "n_predict": options.get("num_predict", -1), "stream": True, "cache_prompt": True}
        body |= {key: options[key] for key in SAMPLING if key in options}
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        with contextlib.closing(connection):
            try:
                connection.request("POST", "/completion", json.dumps(body))
                response = connection.getresponse()
            except (OSError, http.client.HTTPException):
                raise Gone(f"do completion request: {self.last_words()}") from None
            if response.status != 200:
                raise Gone(json.loads(response.read())["error"]["message"], response.status)
            ended = False
            with contextlib.suppress(http.client.HTTPException, OSError):
                while line := response.readline():
                    if line.startswith(b"data: "):
                        event: dict[str, Any] = json.loads(line[6:])
                        ended = ended or bool(event.get("stop"))
                        yield event
            if not ended:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.2)
                    self.last_words()
                    raise Gone("an error was encountered while running the model: unexpected EOF")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def say(text: str, level: str = "INFO") -> None:
    sys.stderr.write(f"time={datetime.now(UTC).isoformat()} level={level} source=fake.go:1 {text}\n")
    sys.stderr.flush()


class Handler(BaseHTTPRequestHandler):
    """The endpoints that adapters use."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: Store
    program: Sequence[str]
    runner: Runner | None = None
    device: bool
    context: int  # where none is asked for
    one = threading.Lock()

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that hung up; a traceback would cut through the log
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- its name in the standard library
        pass

    def reply(self, data: Any, status: int = 200) -> None:
        body = data.encode() if isinstance(data, str) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(b"" if self.command == "HEAD" else body)

    def do_GET(self) -> None:
        if self.path == "/":
            self.reply("Ollama is running")
        elif self.path == "/api/version":
            self.reply({"version": VERSION})
        elif self.path == "/api/tags":
            self.reply({"models": [self._entry(name, blob) for name, blob in self.store.models().items()]})
        elif self.path == "/api/ps":
            self.reply({"models": self._loaded()})
        else:
            self.reply({"error": "not found"}, 404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _entry(self, name: str, blob: Path) -> dict[str, Any]:
        details = {"format": "gguf", "family": "fake", "families": ["fake"], "quantization_level": ""}
        size = blob.stat().st_size if blob.exists() else 0
        digest = blob.name.removeprefix("sha256-")
        return {"name": name, "model": name, "size": size, "digest": digest, "details": details}

    def _loaded(self) -> list[dict[str, Any]]:
        runner = Handler.runner
        found = self.store.find(runner.name) if runner else None
        if runner is None or found is None:
            return []
        entry = self._entry(*found)
        vram = entry["size"] if self.device else 0
        return [entry | {"size_vram": vram, "context_length": runner.context, "expires_at": "2319-03-11T23:55:48Z"}]

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        found = self.store.find(str(body.get("model") or body.get("name")))
        if self.path not in ("/api/generate", "/api/show"):
            self.reply({"error": "not found"}, 404)
        elif found is None:
            self.reply({"error": f"model '{body.get('model')}' not found"}, 404)
        elif self.path == "/api/show":
            shown = f"FROM {found[1]}\nTEMPLATE {{{{ .Prompt }}}}\n"
            details = self._entry(*found)["details"]
            self.reply(
                {"modelfile": shown, "template": "{{ .Prompt }}", "details": details, "capabilities": ["completion"]}
            )
        else:
            with self.one, contextlib.suppress(OSError):
                self._generate(body, *found)

    def _generate(self, body: dict[str, Any], name: str, blob: Path) -> None:
        began = time.perf_counter()
        options = {**(body.get("options") or {}), "shift": body.get("shift", True)}
        script = read(["ollama"])
        if not body.get("prompt") and body.get("keep_alive") == 0:
            self._unload()
            self.reply(self._line(body, done=True, done_reason="unload"))
            return
        try:
            runner = self._runner(name, blob, options)
        except Gone as error:
            self.reply({"error": str(error)}, 500)
            return
        loaded_ns = int((time.perf_counter() - began + script.reload_s) * 1e9)
        if not body.get("prompt"):
            self.reply(self._line(body, done=True, done_reason="load"))
            return
        events = runner.complete(body["prompt"], options)
        try:
            first = next(events, None)
        except Gone as error:
            self.reply({"error": str(error)}, error.status)
            return
        lines = self._lines(body, began, loaded_ns, chain([first] if first else [], events))
        if body.get("stream") is False:
            *pieces, last = list(lines)
            text = "".join(piece.get("response", "") for piece in pieces)
            self.reply(last | {"response": text} if "error" not in last else last, 500 if "error" in last else 200)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        stream = Lines(self.wfile, script, sse=False)
        with contextlib.closing(events):
            for line in lines:
                stream.send(line, stamp=not line.get("done") and "error" not in line)
        stream.close()

    def _lines(
        self, body: Mapping[str, Any], began: float, loaded_ns: int, events: Iterator[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """Ollama's lines for the child's events. Without a final event there is no last line, and no word about it."""
        try:
            for event in events:
                if "error" in event:
                    yield {"error": event["error"]["message"]}
                    return
                if event["content"]:
                    yield self._line(body, response=event["content"], done=False)
                if event["stop"]:
                    timings = event["timings"]
                    yield self._line(
                        body,
                        done=True,
                        done_reason="length" if event["stop_type"] == "limit" else "stop",
                        total_duration=int((time.perf_counter() - began) * 1e9),
                        load_duration=loaded_ns,
                        prompt_eval_count=timings["cache_n"] + timings["prompt_n"],
                        prompt_eval_duration=int(timings["prompt_ms"] * 1e6),
                        eval_count=timings["predicted_n"],
                        eval_duration=int(timings["predicted_ms"] * 1e6),
                    )
        except Gone as error:
            yield {"error": str(error)}

    def _line(self, body: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        return {"model": body["model"], "created_at": datetime.now(UTC).isoformat(), "response": ""} | more

    def _runner(self, name: str, blob: Path, options: Mapping[str, Any]) -> Runner:
        """The child for these options; another one if they changed or it is gone."""
        runner = Handler.runner
        key = (name, *(options.get(option) for option in RELOADS))
        if runner is None or runner.key != key or not runner.runs():
            self._unload()
            Handler.runner = Runner(self.program, name, blob, options, self.device, self.context)
        assert Handler.runner is not None
        return Handler.runner

    def _unload(self) -> None:
        runner, Handler.runner = Handler.runner, None
        if runner is not None:
            runner.stop()


def _end(*_: object) -> NoReturn:
    if Handler.runner is not None:
        Handler.runner.process.kill()
    os._exit(0)


def main(arguments: Sequence[str] | None = None, program: str | None = None) -> None:
    """`program` is the path of the executable, to find the runner beside it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    script = read(["ollama", *arguments])
    if script.refuses is not None:
        sys.exit(script.refuses)
    if "--version" in arguments or "-v" in arguments:
        sys.stdout.write(
            f"Warning: could not connect to a running Ollama instance\nWarning: client version is {VERSION}\n"
        )
        return
    if list(arguments) != ["serve"]:
        sys.exit(f'Error: unknown command {" ".join(arguments)!r} for "ollama"')
    runner = Path(program or "").resolve().parent.parent / "lib" / "ollama" / "llama-server"
    fake = [sys.executable, "-m", "harness.testing.llama_server"]
    Handler.program = [str(runner)] if program and runner.exists() else fake
    Handler.store = Store(Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN if script.ignores_sigterm else _end)
    signal.signal(signal.SIGINT, _end)
    say('msg="discovering available GPUs..."')
    listed = subprocess.run([*Handler.program, "--list-devices"], capture_output=True, text=True, check=False).stdout
    found = re.findall(r"^  (\S+): (.*) \((\d+) MiB, (\d+) MiB free\)$", listed, re.MULTILINE)
    Handler.device = bool(found)
    for name, description, total, free in found or [("cpu", "cpu", "24105", "23000")]:
        kind = "discrete" if found else ""
        say(
            f'msg="inference compute" id={name} library={name.rstrip("0123456789")} compute="" name={name} '
            f'description="{description}" libdirs=ollama driver="" pci_id="" type="{kind}" '
            f'total="{int(total) / 1024:.1f} GiB" available="{int(free) / 1024:.1f} GiB"'
        )
    total_gib = sum(int(total) for _, _, total, _ in found) / 1024
    Handler.context = 262144 if total_gib >= 47 else 32768 if total_gib >= 23 else 4096
    say(f'msg="vram-based default context" total_vram="{total_gib:.1f} GiB" default_num_ctx={Handler.context}')
    host, _, port = os.environ.get("OLLAMA_HOST", "127.0.0.1:11434").removeprefix("http://").partition(":")
    try:
        server = ThreadingHTTPServer((host, int(port or 11434)), Handler)
    except OSError:
        sys.exit(f"Error: listen tcp {host}:{port}: bind: address already in use")
    server.daemon_threads = True
    say(f'msg="Listening on {host}:{port} (version {VERSION})"')
    server.serve_forever()


if __name__ == "__main__":
    main()
