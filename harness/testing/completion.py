"""What a fake llama-server answers: completions in its three dialects, at absolute deadlines.

Each streamed chunk carries `sent_ns`, the moment it was handed to the socket.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from harness.testing.wire import Lines

if TYPE_CHECKING:
    from harness.testing.llama_server import Server


SAMPLING = ("temperature", "seed", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n")  # as /slots has them


class Handler(BaseHTTPRequestHandler):
    """The endpoints that adapters use."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    engine: Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- its name in the standard library
        pass

    def reply(self, data: Any, status: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def fail(self, status: int, message: str, kind: str) -> None:
        self.reply({"error": {"code": status, "message": message, "type": kind}}, status)

    def _admitted(self) -> bool:
        key = self.engine.flags.get("api-key")
        given = {self.headers.get("X-Api-Key"), (self.headers.get("Authorization") or "").removeprefix("Bearer ")}
        if not self.engine.ready:
            self.fail(503, "Loading model", "unavailable_error")
        elif key and key not in given and self.path != "/health":
            self.fail(401, "Invalid API Key", "authentication_error")
        else:
            return True
        return False

    def do_GET(self) -> None:
        if not self._admitted():
            return
        engine = self.engine
        found: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/props": {
                "default_generation_settings": {"params": {}, "n_ctx": engine.context},
                "total_slots": 1,
                "model_alias": engine.flags.get("alias", engine.path.name),
                "model_path": str(engine.path),
                "chat_template": "",
                "bos_token": "<s>" if engine.script.adds_bos else "",
                "build_info": engine.build,
            },
            "/v1/models": {"object": "list", "data": [{"id": engine.path.name, "object": "model", "meta": {}}]},
            "/slots": [
                {"id": 0, "n_ctx": engine.context, "is_processing": engine.busy.locked(), **engine.last_request}
            ],
        }
        if self.path in found:
            self.reply(found[self.path])
        else:
            self.fail(404, "File Not Found", "not_found_error")

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self._admitted():
            return
        try:
            body: dict[str, Any] = json.loads(text)
        except ValueError as error:
            self.fail(400, f"[json.exception.parse_error.101] {error}", "invalid_request_error")
            return
        if self.path == "/tokenize":
            self.reply({"tokens": self.engine.tokenize(body.get("content", ""), bool(body.get("add_special")))})
        elif self.path in ("/completion", "/completions", "/v1/completions", "/v1/chat/completions"):
            with contextlib.suppress(OSError), self.engine.busy:
                self._complete(body)
        else:
            self.fail(404, "File Not Found", "not_found_error")

    def _complete(self, body: dict[str, Any]) -> None:
        began = time.perf_counter()
        script, engine = self.engine.script, self.engine
        prompt = body.get("prompt", "".join(message["content"] for message in body.get("messages", ())))
        tokens = (
            engine.tokenize(prompt, add_special=True) if isinstance(prompt, str) else [int(each) for each in prompt]
        )
        engine.last_request = {"params": {key: body[key] for key in SAMPLING if key in body}}
        wanted = body.get("n_predict", body.get("max_completion_tokens", body.get("max_tokens", -1)))
        if script.http_error is not None and len(tokens) > script.fails_above:
            engine.complain()
            self.fail(script.http_error, "scripted error", "server_error")
            return
        if len(tokens) >= engine.context:
            text = f"request ({len(tokens)} tokens) exceeds the available context size ({engine.context} tokens)"
            self.fail(400, f"{text}, try increasing it", "exceed_context_size_error")
            return
        task = Task(engine, tokens, max(1, int(wanted)) if int(wanted) >= 0 else engine.context, began)
        if not body.get("stream"):
            text = "".join(text for text, _ in task.chunks())
            self.reply(self._dialect(task, body).whole(text))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        stream = Lines(self.wfile, script, sse=True)
        self._stream(stream, task, self._dialect(task, body))
        stream.close(script.lingers_s)
        self.close_connection = True

    def _dialect(self, task: Task, body: dict[str, Any]) -> Native:
        kind = {"/v1/completions": Completions, "/v1/chat/completions": Chat}.get(self.path, Native)
        return kind(task, body)

    def _stream(self, stream: Lines, task: Task, dialect: Native) -> None:
        script = self.engine.script
        for text, generated in task.chunks():
            if text:
                stream.send(dialect.chunk(text, generated), stamp=True)
            if script.error_after is not None and generated >= script.error_after:
                stream.send({"error": {"code": 500, "message": "scripted error in mid-stream", "type": "server_error"}})
                return
            if script.dies_after is not None and generated >= script.dies_after:
                stream.flush()
                self.engine.complain()
                self.engine.end("", script.exit_code)
            if script.silent_after is not None and generated >= script.silent_after:
                stream.flush()
                time.sleep(3600)
        if not script.no_final:
            for data in dialect.final():
                stream.send(data)


class Task:
    """One request: tokens at absolute deadlines, and what llama-server says of their timing."""

    def __init__(self, engine: Server, tokens: list[int], wanted: int, began: float) -> None:
        self.engine, self.tokens, self.wanted, self.began = engine, tokens, wanted, began
        self.generated = 0
        self.first = self.last = began
        self.stop_type = "limit"

    def chunks(self) -> Iterator[tuple[str, int]]:
        """(text, tokens so far): one at the deadline of its last token."""
        script = self.engine.script
        held: list[str] = []
        for piece in self.engine.answer(self.tokens):
            due = self.began + script.ttft_s + self.generated * self.engine.itl_s
            time.sleep(max(0.0, due - time.perf_counter()))
            self.generated += 1
            self.last = time.perf_counter()
            if self.generated == 1:
                self.first = self.last
            ended = script.ends_after is not None and self.generated > script.ends_after
            if not ended:
                held.append(piece)
            if ended or self.generated >= self.wanted or len(held) >= script.tokens_per_chunk:
                yield "".join(held), self.generated
                held = []
            if ended:
                self.stop_type = "eos"
            if ended or self.generated >= self.wanted:
                break
        self._log()

    def _log(self) -> None:
        """As llama-server does for each request, at verbosity 3."""
        self.engine.requests += 1
        timings, say = self.timings(), self.engine.say
        task = f"id  0 | task {self.engine.requests} |"
        say(f"slot   operator(): {task} cached n_tokens = {timings['cache_n']}, memory_seq_rm")
        for name, part in (("prompt eval", "prompt"), ("       eval", "predicted")):
            n, ms, rate = timings[f"{part}_n"], timings[f"{part}_ms"], timings[f"{part}_per_second"]
            each = f"({ms / n:8.2f} ms per token, {rate:8.2f} tokens per second)"
            say(f"slot print_timing: {task} {name} time = {ms:10.2f} ms / {n:5} tokens {each}")

    def timings(self) -> dict[str, Any]:
        script = self.engine.script
        cached = min(script.cached, len(self.tokens) - 1)
        evaluated, generated = len(self.tokens) - cached, self.generated + script.counts_off
        prompt_ms = (self.first - self.began) * 1e3
        predicted_ms = max(0.001, (self.last - self.first) * 1e3 * script.decode_time_factor)
        steps = generated if script.counts_first_token else generated - 1
        return {
            "cache_n": cached,
            "prompt_n": evaluated,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / evaluated,
            "prompt_per_second": 1e3 * evaluated / prompt_ms,
            "predicted_n": generated,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
            "predicted_per_second": 1e3 * steps / predicted_ms,
        }


class Native:
    """`POST /completion`."""

    def __init__(self, task: Task, body: dict[str, Any]) -> None:
        self.task, self.body = task, body

    def chunk(self, text: str, generated: int) -> dict[str, Any]:
        data: dict[str, Any] = {"index": 0, "content": text, "tokens": [], "stop": False, "id_slot": -1}
        data |= {"tokens_predicted": generated, "tokens_evaluated": len(self.task.tokens)}
        if self.body.get("timings_per_token"):
            data["timings"] = self.task.timings() | {"predicted_n": generated}
        return data

    def final(self) -> list[Any]:
        return [self.whole("")]

    def whole(self, text: str) -> dict[str, Any]:
        task, timings = self.task, self.task.timings()
        return {
            "index": 0,
            "content": text,
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": task.engine.path.name,
            "tokens_predicted": timings["predicted_n"],
            "tokens_evaluated": len(task.tokens),
            "truncated": task.engine.script.truncated,
            "stop_type": task.stop_type,
            "stopping_word": "",
            "tokens_cached": len(task.tokens) + task.generated - 1,
            "timings": timings,
        }


class Completions(Native):
    """`POST /v1/completions`."""

    object = "text_completion"

    def choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _event(self, text: str, finish: str | None, **more: Any) -> dict[str, Any]:
        choice = self.choice(text) | {"index": 0, "logprobs": None, "finish_reason": finish}
        model = self.task.engine.path.name
        return {"choices": [choice], "created": int(time.time()), "model": model, "object": self.object} | more

    def _usage(self) -> dict[str, Any]:
        timings = self.task.timings()
        usage = {
            "completion_tokens": timings["predicted_n"],
            "prompt_tokens": len(self.task.tokens),
            "total_tokens": timings["predicted_n"] + len(self.task.tokens),
            "prompt_tokens_details": {"cached_tokens": timings["cache_n"]},
        }
        return {"usage": usage, "timings": timings}

    def chunk(self, text: str, generated: int) -> dict[str, Any]:  # noqa: ARG002 -- it has no counts
        return self._event(text, None)

    def finish(self) -> str:
        return "length" if self.task.stop_type == "limit" else "stop"

    def final(self) -> list[Any]:
        return [self._event("", self.finish(), **self._usage()), "[DONE]"]

    def whole(self, text: str) -> dict[str, Any]:
        return self._event(text, self.finish(), **self._usage())


class Chat(Completions):
    """`POST /v1/chat/completions`: usage comes in a chunk of its own."""

    object = "chat.completion.chunk"

    def choice(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def final(self) -> list[Any]:
        last = self._event("", self.finish()) | {"choices": []} | self._usage()
        wanted = (self.body.get("stream_options") or {}).get("include_usage")
        return [self._event("", self.finish()), *([last] if wanted else []), "[DONE]"]

    def whole(self, text: str) -> dict[str, Any]:
        message = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": self.finish()}
        return self._event("", self.finish(), **self._usage()) | {"choices": [message], "object": "chat.completion"}
