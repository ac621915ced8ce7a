"""An engine of a third party: one file and one entry point. It repeats the last word of the prompt.

The engine is a small HTTP server in a child process; the adapter below is all that the harness sees.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from harness import process
from harness.arms import read_arm
from harness.contract import Arm, Chunk, Engine, ModelFile, Prompt, Realised, Request, Settings, Usage
from harness.errors import Crashed, Unavailable


class Perch(BaseHTTPRequestHandler):
    """The engine: one JSON line for each word, then a line of counts."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = asked["prompt"].split()
        self.send_response(200)
        self.end_headers()
        for _ in range(asked["words"]):
            self.wfile.write(json.dumps({"word": words[-1]}).encode() + b"\n")
            time.sleep(0.002)
        self.wfile.write(json.dumps({"heard": len(words), "said": asked["words"]}).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class Talk:
    url: str
    model: ModelFile
    child: process.Child

    def request(self, prompt: Prompt, max_tokens: int) -> Request:
        return Request(self.url, {}, json.dumps({"prompt": prompt.text, "words": max_tokens}).encode())

    def read(self, line: bytes) -> Chunk | Usage | None:
        said = json.loads(line)
        if "word" in said:
            return Chunk(f" {said['word']}")
        return Usage(prompt_tokens=said["heard"], cached_tokens=0, generated_tokens=said["said"], stop="length")

    def settle(self, usage: Usage) -> Usage:
        return usage

    def realised(self) -> Realised:
        argv = tuple(self.child.process.cmdline())
        return Realised(engine="parrot", argv=argv, pids=self.child.pids(), weights=self.model.path)

    def count_tokens(self, text: str) -> int | None:
        return len(text.split())

    def death(self) -> str | None:
        code = self.child.returncode()
        return None if code is None else process.explain_exit(code)


class Parrot:
    name = "parrot"

    def find(self, hints: Mapping[str, str]) -> Engine:
        if "no-parrot" in hints:
            raise Unavailable("the parrot is not at home; run `whistle`")
        return Engine(product="Parrot", version="1.0", path=Path(__file__), origin="PATH")

    def parse(self, text: str) -> Arm:
        return read_arm(text, self.name, placements={"cpu"}, knobs={"t"})

    def resolve(self, ref: str) -> Path | None:
        return None

    def command(self, arm: Arm, model: ModelFile, settings: Settings) -> str:
        return f"python -m llamaduel_parrot 8080 {model.path}"

    @contextlib.contextmanager
    def open(self, engine: Engine, model: ModelFile, arm: Arm, settings: Settings, log: Path) -> Iterator[Talk]:
        port = process.free_port()
        argv = [sys.executable, str(engine.path), str(port), str(model.path)]
        with process.start(argv, log, process.engine_environment()) as child:
            talk = Talk(f"http://127.0.0.1:{port}/", model, child)
            for _ in range(1000):
                with contextlib.suppress(urllib.error.URLError, OSError):
                    urllib.request.urlopen(talk.url, timeout=5).close()
                    break
                if reason := talk.death():
                    raise Crashed(f"the parrot died while loading: {reason}")
                time.sleep(0.02)
            yield talk


if __name__ == "__main__":
    if Path(sys.argv[2]).read_bytes()[:4] != b"GGUF":
        sys.exit("the parrot eats GGUF only")
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Perch).serve_forever()
