"""llama-server without a build: the `xllamacpp` wheel behind llama-server's own flags.

It runs as a child process, as a file or with `python -m backends.embedded_server`, for our
llama.cpp adapter and as the runner of Ollama, which starts it as if it were its own. It answers
`--version`, `--list-devices` and `--help` like the real one, refuses in one sentence what the
wheel cannot do, ends within about a second of SIGTERM even with a request in flight, and never
outlives the process that started it. It imports nothing of the harness, for it must start fast.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

POLL_S = 0.2  # how long we may outlive our parent
GRACE_S = 1.0  # the server waits for its requests for ever; the alarm does not
PR_SET_PDEATHSIG = 1
NEEDED_CPU_FLAGS = {"avx2": "AVX2", "fma": "FMA", "f16c": "F16C"}
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # as --cpu-moe matches them

Take = Callable[[str], Any]

# ── flags: (names, value or "", attribute of CommonParams, reader, variable) ────────────────
# A flag with no value sets what its reader makes of ""; "~" before an attribute sets its opposite.
# The attribute "" is taken and ignored; one that starts with "!" is not an attribute: see `_apply`.


def _switch(text: str) -> bool:
    """On or off in llama.cpp's words; a bare flag is on."""
    if text in ("", "on", "enabled", "true", "1"):
        return True
    if text in ("off", "disabled", "false", "0"):
        return False
    raise ValueError(text)


def _layers(text: str) -> int:
    return {"auto": -1, "all": -2}.get(text) or int(text)


def _flash(text: str) -> int:
    known = {
        "auto": -1,
        "-1": -1,
        "on": 1,
        "enabled": 1,
        "true": 1,
        "1": 1,
        "off": 0,
        "disabled": 0,
        "false": 0,
        "0": 0,
    }
    if text not in known:
        raise ValueError(text)
    return known[text]


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _mib(text: str) -> list[int]:
    return [int(part) << 20 for part in text.split(",")]


def _text_of(path: str) -> str:
    with open(path, encoding="utf-8") as file:  # noqa: PTH123 (pathlib costs start-up time)
        return file.read()


FLAGS: tuple[tuple[str, str, str, Take, str], ...] = (
    ("-m --model", "FNAME", "model.path", str, "LLAMA_ARG_MODEL"),
    ("-a --alias", "STRING", "!alias", _list, "LLAMA_ARG_ALIAS"),
    ("--host", "HOST", "hostnames", _list, "LLAMA_ARG_HOST"),
    ("--port", "PORT", "port", int, "LLAMA_ARG_PORT"),
    ("--api-key", "KEY", "api_keys", _list, "LLAMA_API_KEY"),
    ("-c --ctx-size", "N", "n_ctx", int, "LLAMA_ARG_CTX_SIZE"),
    ("-np --parallel", "N", "!parallel", int, "LLAMA_ARG_N_PARALLEL"),
    ("-b --batch-size", "N", "n_batch", int, "LLAMA_ARG_BATCH"),
    ("-ub --ubatch-size", "N", "n_ubatch", int, "LLAMA_ARG_UBATCH"),
    ("-t --threads", "N", "cpuparams.n_threads", int, "LLAMA_ARG_THREADS"),
    ("-tb --threads-batch", "N", "cpuparams_batch.n_threads", int, ""),
    ("--poll", "N", "cpuparams.poll", int, ""),
    ("-fa --flash-attn", "[on|off|auto]", "!flash", _flash, "LLAMA_ARG_FLASH_ATTN"),
    ("-ctk --cache-type-k", "TYPE", "!type cache_type_k", str, "LLAMA_ARG_CACHE_TYPE_K"),
    ("-ctv --cache-type-v", "TYPE", "!type cache_type_v", str, "LLAMA_ARG_CACHE_TYPE_V"),
    ("-ngl --gpu-layers --n-gpu-layers", "N", "n_gpu_layers", _layers, "LLAMA_ARG_N_GPU_LAYERS"),
    ("-cmoe --cpu-moe", "", "!override", lambda _: [f"{EXPERTS}=CPU"], ""),
    ("-ncmoe --n-cpu-moe", "N", "!override", lambda n: [rf"blk\.{i}{EXPERTS}=CPU" for i in range(int(n))], ""),
    ("-ot --override-tensor", "PATTERN=TYPE", "!override", _list, "LLAMA_ARG_OVERRIDE_TENSOR"),
    ("-lm --load-mode", "MODE", "!load_mode", str, "LLAMA_ARG_LOAD_MODE"),
    ("-lzm --lazy-mode", "MODE", "!lazy_mode", str, "LLAMA_ARG_LAZY_MODE"),
    ("-fit --fit", "[on|off]", "fit_params", _switch, "LLAMA_ARG_FIT"),
    ("-fitt --fit-target", "MiB", "fit_params_target", _mib, "LLAMA_ARG_FIT_TARGET"),
    ("-fitc --fit-ctx", "N", "fit_params_min_ctx", int, "LLAMA_ARG_FIT_CTX"),
    ("-sm --split-mode", "MODE", "!split_mode", str, "LLAMA_ARG_SPLIT_MODE"),
    ("-mg --main-gpu", "INDEX", "main_gpu", int, "LLAMA_ARG_MAIN_GPU"),
    ("-kvu --kv-unified", "", "kv_unified", _switch, "LLAMA_ARG_KV_UNIFIED"),
    ("-no-kvu --no-kv-unified", "", "~kv_unified", _switch, ""),
    ("-kvo --kv-offload", "", "~no_kv_offload", _switch, "LLAMA_ARG_KV_OFFLOAD"),
    ("-nkvo --no-kv-offload", "", "no_kv_offload", _switch, ""),
    ("--op-offload", "", "~no_op_offload", _switch, ""),
    ("--no-op-offload", "", "no_op_offload", _switch, ""),
    ("--repack", "", "~no_extra_bufts", _switch, "LLAMA_ARG_REPACK"),
    ("-nr --no-repack", "", "no_extra_bufts", _switch, ""),
    ("--no-host", "", "no_host", _switch, "LLAMA_ARG_NO_HOST"),
    ("--swa-full", "", "swa_full", _switch, "LLAMA_ARG_SWA_FULL"),
    ("--check-tensors", "", "check_tensors", _switch, ""),
    ("--warmup", "", "warmup", _switch, ""),
    ("--no-warmup", "", "~warmup", _switch, ""),
    ("--context-shift", "", "ctx_shift", _switch, "LLAMA_ARG_CONTEXT_SHIFT"),
    ("--no-context-shift", "", "~ctx_shift", _switch, ""),
    ("--keep", "N", "n_keep", int, ""),
    ("-n --predict --n-predict", "N", "n_predict", int, "LLAMA_ARG_N_PREDICT"),
    ("-s --seed", "SEED", "sampling.seed", int, ""),
    ("-cram --cache-ram", "MiB", "cache_ram_mib", int, "LLAMA_ARG_CACHE_RAM"),
    ("--cache-prompt", "", "cache_prompt", _switch, "LLAMA_ARG_CACHE_PROMPT"),
    ("--no-cache-prompt", "", "~cache_prompt", _switch, ""),
    ("--cache-idle-slots", "", "cache_idle_slots", _switch, "LLAMA_ARG_CACHE_IDLE_SLOTS"),
    ("--no-cache-idle-slots", "", "~cache_idle_slots", _switch, ""),
    ("--cache-reuse", "N", "n_cache_reuse", int, "LLAMA_ARG_CACHE_REUSE"),
    ("-ctxcp --ctx-checkpoints --swa-checkpoints", "N", "n_ctx_checkpoints", int, "LLAMA_ARG_CTX_CHECKPOINTS"),
    ("-cms --checkpoint-min-step", "N", "checkpoint_min_step", int, "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT"),
    ("-sps --slot-prompt-similarity", "X", "slot_prompt_similarity", float, ""),
    ("--jinja", "", "use_jinja", _switch, "LLAMA_ARG_JINJA"),
    ("--no-jinja", "", "~use_jinja", _switch, ""),
    ("--chat-template", "TEMPLATE", "chat_template", str, "LLAMA_ARG_CHAT_TEMPLATE"),
    ("--chat-template-file", "FNAME", "chat_template", _text_of, "LLAMA_ARG_CHAT_TEMPLATE_FILE"),
    ("--embedding --embeddings", "", "embedding", _switch, "LLAMA_ARG_EMBEDDINGS"),
    ("--mmproj", "FILE", "mmproj.path", str, "LLAMA_ARG_MMPROJ"),
    ("--mmproj-offload", "", "mmproj_use_gpu", _switch, "LLAMA_ARG_MMPROJ_OFFLOAD"),
    ("--no-mmproj-offload", "", "~mmproj_use_gpu", _switch, ""),
    ("--image-min-tokens", "N", "image_min_tokens", int, "LLAMA_ARG_IMAGE_MIN_TOKENS"),
    ("--spec-type", "TYPE", "!spec_type", _list, "LLAMA_ARG_SPEC_TYPE"),
    ("--spec-draft-n-max", "N", "speculative.draft.n_max", int, "LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    ("--spec-draft-model", "FNAME", "speculative.draft.mparams.path", str, "LLAMA_ARG_SPEC_DRAFT_MODEL"),
    ("--spec-draft-backend-sampling", "", "speculative.draft.backend_sampling", _switch, ""),
    ("--metrics", "", "endpoint_metrics", _switch, "LLAMA_ARG_ENDPOINT_METRICS"),
    ("--props", "", "endpoint_props", _switch, "LLAMA_ARG_ENDPOINT_PROPS"),
    ("--slots", "", "endpoint_slots", _switch, "LLAMA_ARG_ENDPOINT_SLOTS"),
    ("--no-slots", "", "~endpoint_slots", _switch, ""),
    ("--slot-save-path", "PATH", "slot_save_path", str, ""),
    ("--ui --webui", "", "ui", _switch, "LLAMA_ARG_UI"),
    ("--no-ui --no-webui", "", "~ui", _switch, ""),
    ("--threads-http", "N", "n_threads_http", int, "LLAMA_ARG_THREADS_HTTP"),
    ("-to --timeout", "N", "!timeout", int, "LLAMA_ARG_TIMEOUT"),
    ("--sse-ping-interval", "N", "sse_ping_interval", int, "LLAMA_ARG_SSE_PING_INTERVAL"),
    ("--offline", "", "offline", _switch, "LLAMA_ARG_OFFLINE"),
    ("-lv --verbosity --log-verbosity", "N", "verbosity", int, "LLAMA_ARG_LOG_VERBOSITY"),
    ("-v --verbose --log-verbose", "", "verbosity", lambda _: 5, ""),
    ("-dev --device", "none", "!device", str, "LLAMA_ARG_DEVICE"),
    ("--rpc", "SERVERS", "!rpc", str, "LLAMA_ARG_RPC"),
    ("--log-prefix", "", "", str, ""),
    ("--no-log-prefix", "", "", str, ""),
    ("--log-timestamps", "", "", str, ""),
    ("--no-log-timestamps", "", "", str, ""),
    ("--log-colors", "[on|off|auto]", "", str, ""),
    ("--perf", "", "", str, ""),
    ("--no-perf", "", "", str, ""),
)
MOE_VARIABLES = {"LLAMA_ARG_CPU_MOE": "--cpu-moe", "LLAMA_ARG_N_CPU_MOE": "--n-cpu-moe"}
BY_NAME = {name: row for row in FLAGS for name in row[0].split()}

Wanted = list[tuple[str, Any]]  # (attribute, value) in the order given; the last one wins


class Refused(Exception):
    """What was asked cannot be done; the text is for the user."""


def read_arguments(argv: Sequence[str], environment: Mapping[str, str]) -> Wanted:
    """What variables and then flags ask for. Raises Refused, in llama-server's words where it has some."""
    wanted: Wanted = []
    for _, _, attribute, take, variable in FLAGS:
        if variable in environment:
            wanted.append(_pair(variable, attribute, take, environment[variable]))
    for variable, flag in MOE_VARIABLES.items():
        text = environment.get(variable)
        if text is not None and (flag != "--cpu-moe" or _read(variable, _switch, text)):
            wanted.append(_pair(variable, BY_NAME[flag][2], BY_NAME[flag][3], text))
    words = iter(argv)
    for word in words:
        row = BY_NAME.get(word.replace("_", "-") if word.startswith("--") else word)
        if row is None:
            raise Refused(f"error: invalid argument: {word}")
        _, value, attribute, take, _ = row
        text = ""
        if value and (text := next(words, "\0")) == "\0":
            raise Refused(f'error while handling argument "{word}": expected value for argument')
        wanted.append(_pair(word, attribute, take, text))
    return wanted


def _pair(name: str, attribute: str, take: Take, text: str) -> tuple[str, Any]:
    value = _read(name, take, text)
    if attribute == "!rpc":
        raise Refused(f"error: {name}: the wheel has no RPC; use a full build (`llamaduel engines install llama-cpp`)")
    if attribute == "!device" and value != "none":
        raise Refused(f"error: {name}: the wheel takes no device by name; give none, or use a full build")
    return (attribute[1:], not value) if attribute.startswith("~") else (attribute, value)


def _read(name: str, take: Take, text: str) -> Any:
    try:
        return take(text)
    except (ValueError, OSError) as error:
        raise Refused(f'error while handling argument "{name}": invalid value: {text} ({error})') from None


# ── the wheel ───────────────────────────────────────────────────────────────────────────────


def cpu_lacks(cpuinfo: str = "/proc/cpuinfo") -> str | None:
    """Why this CPU cannot run the wheel, or None. It would die of SIGILL at the first matrix."""
    if os.uname().machine not in ("x86_64", "amd64") or not os.path.exists(cpuinfo):  # noqa: PTH110
        return None
    for line in _text_of(cpuinfo).splitlines():
        if line.startswith("flags"):
            have = set(line.split())
            missing = [name for flag, name in NEEDED_CPU_FLAGS.items() if flag not in have]
            if missing:
                return f"this CPU has no {', '.join(missing)}, which the wheel needs; build llama.cpp on this machine"
            return None
    return None


def load_wheel() -> Any:
    """The xllamacpp module. Raises Refused with the next step; may start this program once more."""
    if reason := cpu_lacks():
        raise Refused(f"error: {reason} (`llamaduel engines install llama-cpp`)")
    try:
        import xllamacpp
    except ModuleNotFoundError:
        raise Refused("error: xllamacpp is not installed; run `pip install 'llamaduel[embedded]'`") from None
    except ImportError as error:
        if "libgomp" not in str(error):
            raise Refused(f"error: the wheel cannot be loaded: {error}") from None
        _start_again_with_libgomp()
        raise Refused(
            "error: the system has no libgomp.so.1, which the wheel needs; install it (Debian: `apt-get install "
            "libgomp1`), or a wheel that brings one (`pip install scikit-learn`)"
        ) from None
    return xllamacpp


def libgomps(folders: Sequence[str]) -> Iterator[str]:
    """Copies of libgomp that installed wheels brought with them (`<package>.libs/libgomp-<hash>.so.1…`)."""
    for folder in folders:
        try:
            packages = sorted(name for name in os.listdir(folder) if name.endswith(".libs"))  # noqa: PTH208
        except OSError:
            continue
        for package in packages:
            for name in sorted(os.listdir(f"{folder}/{package}")):  # noqa: PTH208
                if name.startswith("libgomp"):
                    yield f"{folder}/{package}/{name}"


def _start_again_with_libgomp() -> None:
    """Run this program again with a wheel's libgomp under the name that the loader looks for."""
    cache = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '')}/.cache"
    folder = f"{cache}/llamaduel/lib"
    for library in libgomps(sys.path) if "LLAMADUEL_LIBGOMP" not in os.environ else ():
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
        os.symlink(library, own := f"{folder}/{os.getpid()}")  # noqa: PTH211
        os.replace(own, f"{folder}/libgomp.so.1")  # noqa: PTH105
        paths = [folder, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        environment = os.environ | {"LLAMADUEL_LIBGOMP": library, "LD_LIBRARY_PATH": ":".join(paths)}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def parameters(wheel: Any, wanted: Wanted) -> Any:
    """CommonParams of the wheel with everything that was asked for."""
    params = wheel.CommonParams()
    params.n_parallel, params.kv_unified = 4, True  # llama-server's own default; the wheel's is 1
    overrides: list[str] = []
    for attribute, value in wanted:
        _apply(wheel, params, overrides, attribute, value)
    if overrides:
        params.tensor_buft_overrides = ",".join(overrides)
    return params


def _apply(wheel: Any, params: Any, overrides: list[str], attribute: str, value: Any) -> None:
    match attribute.split():
        case []:
            pass
        case ["!override"]:
            overrides += value  # all of them hold, wherever they came from
        case ["!parallel"]:
            params.n_parallel, params.kv_unified = (value, False) if value > 0 else (4, True)
        case ["!alias"]:
            params.model_alias = set(value)
        case ["!flash"]:
            params.flash_attn_type = wheel.llama_flash_attn_type(value)
        case ["!type", name]:
            setattr(params, name, _member(wheel.ggml_type, "GGML_TYPE_", value))
        case ["!load_mode"]:
            mode = {"mmap+mlock": "mmap_mlock", "dio": "direct_io"}.get(value, value)
            params.load_mode = _member(wheel.llama_load_mode, "LLAMA_LOAD_MODE_", mode)
        case ["!lazy_mode"]:
            params.lazy_mode = _member(wheel.llama_lazy_mode, "LLAMA_LAZY_MODE_", value)
        case ["!split_mode"]:
            params.split_mode = _member(wheel.llama_split_mode, "LLAMA_SPLIT_MODE_", value)
        case ["!spec_type"]:
            kinds = wheel.common_speculative_type
            params.speculative.types = [_member(kinds, "COMMON_SPECULATIVE_TYPE_", kind) for kind in value]
        case ["!timeout"]:
            params.timeout_read = params.timeout_write = value
        case ["!device"]:
            params.n_gpu_layers = 0
        case [path]:
            *owners, name = path.split(".")
            target = params
            for owner in owners:
                target = getattr(target, owner)
            setattr(target, name, value)


def _member(kind: Any, prefix: str, word: str) -> Any:
    name = prefix + word.upper().replace("-", "_")
    if name not in kind.__members__:
        known = ", ".join(sorted(member[len(prefix) :].lower() for member in kind.__members__))
        raise Refused(f"error: invalid value: {word}; known: {known}")
    return kind[name]


# ── the process ─────────────────────────────────────────────────────────────────────────────


def serve(params: Any, wheel: Any, parent: int) -> int:
    """Load, serve until SIGTERM, SIGINT or the end of our parent; the exit code."""
    die_with_parent = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only
    # While loading, the wheel holds the interpreter: no Python handler would run. Once loaded,
    # death by the kernel must be off: it comes when the *thread* that started us ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if die_with_parent:
        die_with_parent(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        return 1
    try:
        server = wheel.Server(params)
    except Exception as error:  # the engine has already said why, on stderr
        print(f"llama_server: exiting: {error}", file=sys.stderr)  # noqa: T201
        return 1
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the pipe wakes us
    if die_with_parent:
        die_with_parent(PR_SET_PDEATHSIG, 0)
    while os.getppid() == parent and not select.select([read_end], [], [], POLL_S)[0]:
        pass
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, GRACE_S)
    del server  # waits for requests in flight, and holds the interpreter meanwhile
    return 0


def wheel_version() -> str:
    """`11549 (xllamacpp 2026.10.11549)`; the last part is the build of llama.cpp inside."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        whole = version("xllamacpp")
    except PackageNotFoundError:
        return "0 (xllamacpp is not installed)"
    return f"{whole.rpartition('.')[2]} (xllamacpp {whole})"


def devices(wheel: Any) -> Iterator[str]:
    """Lines of `--list-devices`: everything but the CPU, in llama-server's form."""
    yield "Available devices:"
    found = [device for device in wheel.get_device_info() if not device["type"].name.endswith("TYPE_CPU")]
    for device in found:
        total, free = (device[key] >> 20 for key in ("memory_total", "memory_free"))
        yield f"  {device['name']}: {device['description']} ({total} MiB, {free} MiB free)"
    if not found:
        yield "  (none)"


def usage() -> Iterator[str]:
    """Lines of `--help`, in the form that llama-server prints."""
    yield "llama-server of the xllamacpp wheel; flags as in llama.cpp's llama-server:\n"
    for names, value, attribute, _, variable in FLAGS:
        if attribute != "!rpc":
            words = ", ".join(names.split()) + (f" {value}" if value else "")
            yield f"{words:40}{'env: ' + variable if variable else ''}".rstrip()
    yield f"\n{', '.join(MOE_VARIABLES)} are read too."


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """What llama-server does with these arguments; the exit code."""
    parent = os.getppid()
    try:
        if {"-h", "--help", "--usage"} & set(argv):
            print(*usage(), sep="\n")  # noqa: T201
            return 0
        if "--version" in argv:
            print(f"version: {wheel_version()}")  # noqa: T201
            return 0
        listing = "--list-devices" in argv
        wanted = read_arguments([word for word in argv if word != "--list-devices"], environment)
        wheel = load_wheel()
        if listing:
            print(*devices(wheel), sep="\n")  # noqa: T201
            return 0
        params = parameters(wheel, wanted)
        if not params.model.path:
            print(f"system_info: {wheel.get_system_info()}", file=sys.stderr)  # noqa: T201 (Ollama looks for it)
            raise Refused("error: no model given; add -m FILE")
    except Refused as reason:
        print(reason, file=sys.stderr)  # noqa: T201
        return 1
    return serve(params, wheel, parent)


def run() -> NoReturn:
    """Entry of the process."""
    code = main(sys.argv[1:], os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown: native threads may still run


if __name__ == "__main__":
    run()
