"""A program that pretends to be llama-server: its flags, its log and its HTTP, no model.

`python -m harness.testing.llama_server FLAGS`. Tokens come at absolute deadlines and each chunk
carries `sent_ns`, the moment it was handed to the socket by the clock that a client on this
machine also has, so that a client's own timing error can be measured. See `script.Script`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

from harness.testing import loading
from harness.testing.completion import Handler
from harness.testing.script import WORDS, Script, number_of_start, read

COMMIT = "fake000"
# names, whether a value follows, variable: as the real one has them
FLAGS: tuple[tuple[str, bool, str], ...] = (
    ("-m --model", True, "LLAMA_ARG_MODEL"),
    ("-a --alias", True, "LLAMA_ARG_ALIAS"),
    ("--host", True, "LLAMA_ARG_HOST"),
    ("--port", True, "LLAMA_ARG_PORT"),
    ("--api-key", True, "LLAMA_API_KEY"),
    ("-c --ctx-size", True, "LLAMA_ARG_CTX_SIZE"),
    ("-n --predict --n-predict", True, "LLAMA_ARG_N_PREDICT"),
    ("-b --batch-size", True, "LLAMA_ARG_BATCH"),
    ("-ub --ubatch-size", True, "LLAMA_ARG_UBATCH"),
    ("-t --threads", True, "LLAMA_ARG_THREADS"),
    ("-tb --threads-batch", True, ""),
    ("-ngl --gpu-layers --n-gpu-layers", True, "LLAMA_ARG_N_GPU_LAYERS"),
    ("-cmoe --cpu-moe", False, "LLAMA_ARG_CPU_MOE"),
    ("-ncmoe --n-cpu-moe", True, "LLAMA_ARG_N_CPU_MOE"),
    ("-fit --fit", True, "LLAMA_ARG_FIT"),
    ("-fitt --fit-target", True, "LLAMA_ARG_FIT_TARGET"),
    ("-fitc --fit-ctx", True, "LLAMA_ARG_FIT_CTX"),
    ("-np --parallel", True, "LLAMA_ARG_N_PARALLEL"),
    ("-kvu --kv-unified", False, "LLAMA_ARG_KV_UNIFIED"),
    ("-fa --flash-attn", True, "LLAMA_ARG_FLASH_ATTN"),
    ("-ctk --cache-type-k", True, "LLAMA_ARG_CACHE_TYPE_K"),
    ("-ctv --cache-type-v", True, "LLAMA_ARG_CACHE_TYPE_V"),
    ("-lm --load-mode", True, "LLAMA_ARG_LOAD_MODE"),
    ("-dev --device", True, "LLAMA_ARG_DEVICE"),
    ("--rpc", True, "LLAMA_ARG_RPC"),
    ("-sm --split-mode", True, "LLAMA_ARG_SPLIT_MODE"),
    ("-mg --main-gpu", True, "LLAMA_ARG_MAIN_GPU"),
    ("-nkvo --no-kv-offload", False, ""),
    ("--no-op-offload", False, ""),
    ("-nr --no-repack", False, ""),
    ("--no-host", False, "LLAMA_ARG_NO_HOST"),
    ("--warmup", False, ""),
    ("--no-warmup", False, ""),
    ("--context-shift", False, "LLAMA_ARG_CONTEXT_SHIFT"),
    ("--no-context-shift", False, ""),
    ("--keep", True, ""),
    ("--cache-prompt", False, "LLAMA_ARG_CACHE_PROMPT"),
    ("--no-cache-prompt", False, ""),
    ("--cache-reuse", True, "LLAMA_ARG_CACHE_REUSE"),
    ("-cram --cache-ram", True, "LLAMA_ARG_CACHE_RAM"),
    ("--slots", False, "LLAMA_ARG_ENDPOINT_SLOTS"),
    ("--no-slots", False, ""),
    ("--metrics", False, "LLAMA_ARG_ENDPOINT_METRICS"),
    ("--no-webui --no-ui", False, ""),
    ("--jinja", False, "LLAMA_ARG_JINJA"),
    ("--no-jinja", False, ""),
    ("--chat-template", True, "LLAMA_ARG_CHAT_TEMPLATE"),
    ("-s --seed", True, ""),
    ("--sse-ping-interval", True, "LLAMA_ARG_SSE_PING_INTERVAL"),
    ("--offline", False, "LLAMA_ARG_OFFLINE"),
    ("-lv --verbosity --log-verbosity", True, "LLAMA_ARG_LOG_VERBOSITY"),
    ("-v --verbose", False, ""),
    ("--log-jsonl", False, "LLAMA_ARG_LOG_JSONL"),
    ("--no-log-prefix", False, ""),
    ("--no-log-timestamps", False, ""),
    ("--version", False, ""),
    ("--list-devices", False, ""),
    ("-h --help --usage", False, ""),
)


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """Values by the last name of their flag, without dashes. Ends the program on an unknown one."""
    by_name = {name: (names.split()[-1].lstrip("-"), takes) for names, takes, _ in FLAGS for name in names.split()}
    found = {names.split()[-1].lstrip("-"): os.environ[var] for names, _, var in FLAGS if var and var in os.environ}
    left = iter(arguments)
    for word in left:
        name, takes = by_name.get(word, (None, False))
        value = next(left, None) if takes else "1"
        if name is None or value is None:
            end(f"error: invalid argument: {word}", 1)
        found[name] = value
    return found


def end(text: str, code: int) -> NoReturn:
    """Write, and be gone: below 0 by that signal."""
    sys.stderr.write(text + "\n" if text else "")
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        os.kill(os.getpid(), -code)
        time.sleep(60)
    os._exit(code)


class Server:
    """One fake engine: what it was asked for, what it says, and how it generates."""

    def __init__(self, flags: dict[str, str], script: Script) -> None:
        self.flags, self.script = flags, script
        self.began = time.perf_counter()
        self.ready = False
        self.busy = threading.Lock()  # one slot
        self.last_request: dict[str, Any] = {}  # what `/slots` tells of it
        self.vocabulary: dict[str, int] = {"<s>": 0}
        self.pieces = ["<s>"]
        self.requests = 0
        self.path = Path(flags.get("model", "model.gguf"))
        self.context = int(flags.get("ctx-size", 0)) or 4096
        self.itl_s = script.itl_of(0)
        self.words = script.words or WORDS
        self.build = f"b{script.version}-{COMMIT}"

    # ── log ─────────────────────────────────────────────────────────────────────────────────

    def say(self, text: str, level: str = "I", verbosity: int = 3) -> None:
        if verbosity > int(self.flags.get("log-verbosity", 5 if "verbose" in self.flags else 3)):
            return
        if "log-jsonl" in self.flags:
            word = {"I": "info", "W": "warn", "E": "error"}[level]
            record = {"type": "log", "time": time.monotonic_ns() // 1000, "level": word, "msg": text + "\n"}
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
            return
        micros = int((time.perf_counter() - self.began) * 1e6)
        clock = f"{micros // 60_000_000}.{micros // 10**6 % 60:02}.{micros // 1000 % 1000:03}.{micros % 1000:03}"
        sys.stderr.write(f"{text}\n" if "no-log-prefix" in self.flags else f"{clock} {level} {text}\n")
        sys.stderr.flush()

    # ── loading ─────────────────────────────────────────────────────────────────────────────

    def load(self) -> None:
        script = self.script
        threads = self.flags.get("threads", "2")
        self.say(
            f"cmn  common_param: system_info: n_threads = {threads} (n_threads_batch = {threads}) / 2 | FAKE = 1 |"
        )
        self.say(
            f"cmn  common_param: common_params_print_info: build {script.version} ({COMMIT}) with nothing for Linux"
        )
        self.say(f"srv    load_model: loading model '{self.path}'")
        self.itl_s = script.itl_of(number_of_start(script))
        time.sleep(script.load_s)
        while script.hangs_loading:
            time.sleep(60)
        if script.dies_loading is not None:
            self._fail(script.dies_loading, script.exit_code)
        try:
            placed = self._placed()
        except ValueError as error:
            self._fail(str(error), 1)
        except loading.OutOfMemory as error:
            device, size = error.args
            self.say(
                f"ggml_backend_cuda_buffer_type_alloc_buffer: allocating {size / 2**20:.2f} MiB on device 0: "
                "cudaMalloc failed: out of memory",
                "E",
                1,
            )
            self._fail(f"llama_model_load: error loading model: unable to allocate {device} buffer", 1)
        mode, attention = self.flags.get("load-mode", "auto"), self.flags.get("flash-attn", "auto")
        settings = {
            "n_ctx": self.context,
            "n_ctx_seq": self.context,
            "n_batch": self.flags.get("batch-size", "2048"),
            "n_ubatch": self.flags.get("ubatch-size", "512"),
            "flash_attn": {"on": "enabled", "off": "disabled"}.get(attention, attention),
            "kv_unified": "false",
        }
        self.say(f"load_tensors: loading model tensors, this can take a while... (load_mode = {mode})", "I", 4)
        self.say("load_tensors: offloaded 99/99 layers to GPU", "I", 4)  # as the real one claims, whatever it does
        k, v = self.flags.get("cache-type-k", "f16"), self.flags.get("cache-type-v", "f16")
        for line in loading.lines([each for each in placed if each[1] == "model"]):
            self.say(line, "I", 4)
        for name, value in settings.items():
            self.say(f"llama_context: {name:<13} = {value}", "I", 4)
        for line in loading.lines([each for each in placed if each[1] != "model"]):
            self.say(line, "I", 4)
        self.say(
            f"llama_kv_cache: size = 1.00 MiB ( {self.context} cells), K ({k}): 0.50 MiB, V ({v}): 0.50 MiB", "I", 4
        )
        self.say(f"srv    load_model: initializing, n_slots = 1, n_ctx_slot = {self.context}, kv_unified = 'false'")
        self.ready = True
        self.say("srv  llama_server: model loaded")
        host, port = self.flags.get("host", "127.0.0.1"), self.flags.get("port", "8080")
        self.say(f"srv  llama_server: listening on http://{host}:{port}")

    def complain(self) -> None:
        for text in self.script.last_words:
            self.say(text, "E", 1)

    def _fail(self, text: str, code: int) -> NoReturn:
        self.complain()
        self.say(text, "E", 1)
        if code >= 0:
            self.say("srv  llama_server: exiting due to model loading error", "E", 1)
        end("", code)

    def _placed(self) -> list[tuple[str, str, float]]:
        scripted = None
        if self.script.buffers is not None:
            scripted = [(name, kind, mib) for name, kind, mib in self.script.buffers]
        if scripted is not None and not self.path.is_file():
            return scripted
        if not self.path.is_file():
            raise ValueError(f"llama_model_load_from_file_impl: failed to load model '{self.path}': no such file")
        model = loading.read_weights(self.path)
        self.words = self.script.words or model.words() or WORDS
        if scripted is not None:
            return scripted
        layers = self.flags.get("n-gpu-layers", "auto")
        every = 999_999
        return loading.buffers(
            model,
            loading.Asked(
                devices=tuple(
                    (f"{name}[{description}]" if name.startswith("RPC") else name, mib)
                    for name, description, mib in devices(self.flags, self.script)
                ),
                layers={"auto": None, "all": every, "-1": None, "-2": every}.get(
                    layers, int(layers) if layers.isdigit() else 0
                ),
                expert_layers_on_host=every if "cpu-moe" in self.flags else int(self.flags.get("n-cpu-moe", 0)),
                fit=self.flags.get("fit", "on") in ("on", "1"),
                leave_free_mib=int(self.flags.get("fit-target", loading.FIT_MARGIN_MIB)),
                context=self.context,
                kv_k=self.flags.get("cache-type-k", "f16"),
                kv_v=self.flags.get("cache-type-v", "f16"),
                load_mode=self.flags.get("load-mode", "auto"),
            ),
        )

    end = staticmethod(end)

    # ── text ────────────────────────────────────────────────────────────────────────────────

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        """A token is a word with the space before it."""
        tokens = [0] if add_special and self.script.adds_bos else []
        for piece in re.findall(r"\s*\S+|\s+", text):
            if piece not in self.vocabulary:
                self.vocabulary[piece] = len(self.pieces)
                self.pieces.append(piece)
            tokens.append(self.vocabulary[piece])
        return tokens

    def answer(self, prompt_tokens: list[int]) -> Iterator[str]:
        """The pieces of the cycle that follow the last word of the prompt, for ever."""
        words = self.words
        last = self.pieces[prompt_tokens[-1]].strip() if prompt_tokens else ""
        at = words.index(last) + 1 if last in words else 0
        while True:
            yield f" {words[at % len(words)]}"
            at += 1


def devices(flags: dict[str, str], script: Script) -> list[tuple[str, str, int]]:
    """(name, description, MiB) of what `--list-devices` shows; an RPC server is one more."""
    if flags.get("device") == "none":
        return []
    servers = [server for server in flags.get("rpc", "").split(",") if server]
    memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    return [(f"RPC{index}", server, memory_mib) for index, server in enumerate(servers)] + list(script.devices)


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    script = read(["llama-server", *arguments])
    if script.refuses is not None:
        end(script.refuses, 1)
    flags = parse(arguments)
    if "usage" in flags:
        sys.stdout.write("".join(f"{names.replace(' ', ', ')}{' VALUE' * takes}\n" for names, takes, _ in FLAGS))
        return
    if "version" in flags:
        sys.stderr.write(
            f"version: 0.6.0-dev (build {script.version}, commit {COMMIT})\nbuilt with nothing for Linux\n"
        )
        return
    if "list-devices" in flags:
        found = [
            f"  {name}: {description} ({mib} MiB, {mib} MiB free)" for name, description, mib in devices(flags, script)
        ]
        sys.stdout.write("\n".join(["Available devices:", *(found or ["  (none)"])]) + "\n")
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN if script.ignores_sigterm else lambda *_: end("", 0))
    signal.signal(signal.SIGINT, lambda *_: end("", 0))
    engine = Server(flags, script)
    try:
        server = ThreadingHTTPServer((flags.get("host", "127.0.0.1"), int(flags.get("port", 8080))), Handler)
    except OSError:
        engine.say(
            "srv  couldn't bind HTTP server socket, hostname: 127.0.0.1, port: " + flags.get("port", "8080"), "E", 1
        )
        end("", 1)
    Handler.engine = engine
    server.daemon_threads = True
    if "model" in flags:
        threading.Thread(target=engine.load, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
