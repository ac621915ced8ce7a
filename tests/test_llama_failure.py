"""Why llama.cpp gave up: the lines that real failures gave, each with what it means and what helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends import llama_failure, llama_log
from backends.llama_failure import Failure, read_failure
from harness.errors import Crashed, DoesNotFit

DATA = Path(__file__).parent / "data"
MIB = 1024 * 1024
PREFIXED = "0.00.123.456 E "


@pytest.mark.parametrize("prefix", ["", PREFIXED])
@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("llama_model_load: error loading model: unknown model architecture: 'qwen9moe'", "architecture"),
        ("gguf_init_from_reader: invalid magic characters: 'abcd', expected 'GGUF'", "not GGUF"),
        ("gguf_init_from_reader: failed to read key-value pairs", "damaged"),
        (
            "llama_model_load: error loading model: tensor 'blk.2.ffn_gate_exps.weight' data is not within the file "
            "bounds, model is corrupted or incomplete",
            "damaged",
        ),
        (
            "llama_model_load: error loading model: illegal split file idx: 1 (file: b.gguf), model must be loaded "
            "with the first split",
            "shards",
        ),
        ("llama_init_from_model: quantized V cache requires flash_attn to be enabled", "KV type"),
        ("llama_model_load: error loading model: wrong number of tensors; expected 5, got 4", "tensors"),
        ("srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080", "port"),
        ("llama-server: error while loading shared libraries: libcudart.so.12: cannot open", "library"),
        ("error: invalid argument: --load-mode", "flag"),
        ("srv    load_model: something new went wrong: it failed", "other"),
    ],
)
def test_a_failure_is_known_by_its_line_with_and_without_prefix(prefix: str, line: str, kind: str) -> None:
    failure = read_failure([f"{prefix}{line}"])
    assert failure is not None
    assert (failure.kind, failure.part) == (kind, None)


def test_a_failure_that_is_no_matter_of_memory_is_no_result_of_the_placement() -> None:
    failure = read_failure([f"{PREFIXED}llama_model_load: unknown model architecture: 'qwen9moe'"])
    assert failure is not None
    assert type(failure.error()) is Crashed
    assert "'qwen9moe'" in str(failure.error())


@pytest.mark.parametrize("log", sorted(path.name for path in DATA.glob("llama-*.log")))
def test_a_load_that_went_well_has_no_failure_in_it(log: str) -> None:
    lines = [line for line in (DATA / log).read_text().splitlines() if not line.startswith("time=")]
    assert read_failure(lines) is None
    assert read_failure(lines, loaded=True) is None


def test_an_info_line_that_speaks_of_an_error_is_no_failure() -> None:
    assert read_failure(["0.00.123.456 I srv  init: unable to allocate CUDA0 buffer is what it would say"]) is None


# ── out of memory: which part, how much, of what ────────────────────────────────────────────

CUDA = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating"
NO_CONTEXT = "llama_init_from_model: failed to initialize the context:"
NO_MODEL = "llama_model_load: error loading model:"
EXITS = "srv  llama_server: exiting due to model loading error"
LOADING = "load_tensors: loading model tensors, this can take a while... (load_mode = none)"
CONTEXT = "llama_context: constructing llama_context"
WITH_KV = "llama_kv_cache:      CUDA0 KV buffer size =   384.00 MiB"
VULKAN = "ggml_vulkan: Device memory allocation of size 118497280 failed."
VULKAN_SAYS = "ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory"

# (lines of the log, part, bytes, device)
FULL: dict[str, tuple[tuple[str, ...], str | None, int | None, str | None]] = {
    "CUDA, weights": (
        (
            f"{CUDA} 16320.00 MiB on device 0: cudaMalloc failed: out of memory",
            "ggml_backend_buft_alloc_buffer_n_default: failed to allocate CUDA0 buffer of size 17112760320",
            f"{NO_MODEL} unable to allocate CUDA0 buffer",
            EXITS,
        ),
        "weights",
        17112760320,
        "CUDA0",
    ),
    "CUDA, weights, builds before September 2026": (
        (
            f"{CUDA} 144817.04 MiB on device 1: cudaMalloc failed: out of memory",
            "alloc_tensor_range: failed to allocate CUDA1 buffer of size 151851674624",
            f"{NO_MODEL} unable to allocate CUDA1 buffer",
        ),
        "weights",
        151851674624,
        "CUDA1",
    ),
    "ROCm, weights, builds of 2024": (
        (
            f"{CUDA} 27846.97 MiB on device 0: cudaMalloc failed: out of memory",
            f"{NO_MODEL} unable to allocate backend buffer",
        ),
        "weights",
        round(27846.97 * MIB),
        "device 0",
    ),
    "as little as Ollama passes on": ((f"{NO_MODEL} unable to allocate CUDA0 buffer",), "weights", None, "CUDA0"),
    "RPC, weights": (
        (
            "alloc_tensor_range: failed to allocate RPC0[127.0.0.1:50052] buffer of size 104857600",
            f"{NO_MODEL} unable to allocate RPC0[127.0.0.1:50052] buffer",
        ),
        "weights",
        100 * MIB,
        "RPC0",
    ),
    "Vulkan, weights": (
        (
            VULKAN,
            VULKAN_SAYS,
            "alloc_tensor_range: failed to allocate Vulkan0 buffer of size 118497280",
            f"{NO_MODEL} unable to allocate Vulkan0 buffer",
        ),
        "weights",
        118497280,
        "Vulkan0",
    ),
    "Vulkan, weights, where it ends with that": ((LOADING, VULKAN, VULKAN_SAYS), "weights", 118497280, None),
    "Vulkan, weights, its first line": ((LOADING, VULKAN), "weights", 118497280, None),
    "Vulkan, weights, its second line": ((LOADING, VULKAN_SAYS), "weights", None, None),
    "Vulkan, weights, thrown": (
        (LOADING, "terminate called after throwing an instance of 'vk::OutOfDeviceMemoryError'"),
        "weights",
        None,
        None,
    ),
    "Metal, weights": (
        (
            "ggml_metal_buffer_init: error: failed to allocate buffer, size =  4096.00 MiB",
            "ggml_backend_metal_buffer_type_alloc_buffer: failed to allocate Metal buffer of 4294967296 bytes "
            "(out of memory)",
            "ggml_backend_buft_alloc_buffer_n_default: failed to allocate MTL0_Private buffer of size 4294967296",
            f"{NO_MODEL} unable to allocate MTL0_Private buffer",
        ),
        "weights",
        4096 * MIB,
        "MTL0",
    ),
    "Metal, weights, where it ends with that": (
        (LOADING, "ggml_backend_metal_buffer_type_alloc_buffer: failed to allocate Metal buffer of 1048576 bytes"),
        "weights",
        MIB,
        None,
    ),
    "Metal, mapped weights": (
        (LOADING, "ggml_metal_buffer_map: error: failed to allocate buffer, size =  4096.00 MiB"),
        "weights",
        4096 * MIB,
        None,
    ),
    "SYCL, weights": (
        (
            LOADING,
            "ggml_backend_sycl_buffer_type_alloc_buffer: can't allocate 5368709120 Bytes of memory on device",
        ),
        "weights",
        5 * 1024 * MIB,
        None,
    ),
    "SYCL, weights, Level Zero": (
        (LOADING, "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        "weights",
        None,
        None,
    ),
    "ROCm's own word": ((LOADING, "hipMalloc failed"), "weights", None, None),
    "pinned host memory, and none beside it": (
        (
            "ggml_cuda_host_malloc: failed to allocate 9466.00 MiB of pinned memory: out of memory",
            "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 9925767168",
            "alloc_tensor_range: failed to allocate CUDA_Host buffer of size 9925767168",
            f"{NO_MODEL} unable to allocate CUDA_Host buffer",
        ),
        "pinned host memory",
        9925767168,
        "CUDA_Host",
    ),
    "pinned host memory of AMD": (
        (f"{NO_MODEL} unable to allocate ROCm_Host buffer",),
        "pinned host memory",
        None,
        "ROCm_Host",
    ),
    "pinned host memory, where it ends with that": (
        ("alloc_tensor_range: failed to allocate CUDA_Host buffer of size 9925767168",),
        "pinned host memory",
        9925767168,
        "CUDA_Host",
    ),
    "weights in host memory": (
        (
            "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 9925767168",
            "ggml_backend_buft_alloc_buffer_n_default: failed to allocate CPU buffer of size 9925767168",
            f"{NO_MODEL} unable to allocate CPU buffer",
        ),
        "weights in host memory",
        9925767168,
        "CPU",
    ),
    "weights in host memory, repacked": (
        (f"{NO_MODEL} unable to allocate CPU_REPACK buffer",),
        "weights in host memory",
        None,
        "CPU_REPACK",
    ),
    "weights in host memory, where it ends with the buffer": (
        (LOADING, "alloc_tensor_range: failed to allocate CPU buffer of size 9925767168"),
        "weights in host memory",
        9925767168,
        "CPU",
    ),
    "weights in host memory, where it ends with its size": (
        (LOADING, "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 9925767168"),
        "weights in host memory",
        9925767168,
        "CPU",
    ),
    "weights in host memory, by the C library": (
        (LOADING, "ggml_aligned_malloc: insufficient memory (attempted to allocate 9466.00 MB)"),
        "weights in host memory",
        9466 * MIB,
        "CPU",
    ),
    "weights in host memory, thrown": ((LOADING, "std::bad_alloc"), "weights in host memory", None, None),
    "weights that cannot be mapped": (
        (f"{NO_MODEL} mmap failed: Cannot allocate memory",),
        "weights in host memory",
        None,
        None,
    ),
    "KV cache": (
        (
            f"{CUDA} 24576.00 MiB on device 0: cudaMalloc failed: out of memory",
            "ggml_backend_buft_alloc_buffer_n_default: failed to allocate CUDA0 buffer of size 25769803776",
            f"{NO_CONTEXT} failed to allocate buffer for kv cache",
        ),
        "the KV cache",
        25769803776,
        "CUDA0",
    ),
    "KV cache in host memory": (
        (
            "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 25769803776",
            "alloc_tensor_range: failed to allocate CPU buffer of size 25769803776",
            f"{NO_CONTEXT} failed to allocate buffer for kv cache",
        ),
        "the KV cache",
        25769803776,
        "CPU",
    ),
    "state of a hybrid model": (
        (f"{NO_CONTEXT} failed to allocate buffer for rs cache",),
        "the KV cache",
        None,
        None,
    ),
    "compressed KV cache": (
        (f"{NO_CONTEXT} failed to allocate buffer for DSV4 compressor state",),
        "the KV cache",
        None,
        None,
    ),
    "KV cache, where it ends with the card": (
        (LOADING, CONTEXT, f"{CUDA} 24576.00 MiB on device 0: cudaMalloc failed: out of memory"),
        "the KV cache",
        24576 * MIB,
        "device 0",
    ),
    "compute buffers": (
        (
            f"{CUDA} 14136.04 MiB on device 0: cudaMalloc failed: out of memory",
            "ggml_gallocr_reserve_n: failed to allocate ROCm0 buffer of size 14822711296",
            "graph_reserve: failed to allocate compute buffers",
            f"{NO_CONTEXT} failed to allocate compute pp buffers",
        ),
        "compute buffers",
        14822711296,
        "ROCm0",
    ),
    "compute buffers, Vulkan": (
        (
            "ggml_vulkan: Requested buffer size exceeds device buffer size limit: ErrorOutOfDeviceMemory",
            "ggml_gallocr_reserve_n_impl: failed to allocate Vulkan0 buffer of size 8753520640",
            "graph_reserve: failed to allocate compute buffers",
            f"{NO_CONTEXT} failed to allocate compute pp buffers",
        ),
        "compute buffers",
        8753520640,
        "Vulkan0",
    ),
    "compute buffers in host memory": (
        (
            "ggml_gallocr_reserve_n_impl: failed to allocate CUDA_Host buffer of size 8753520640",
            f"{NO_CONTEXT} failed to allocate compute tg buffers",
        ),
        "compute buffers",
        8753520640,
        "CUDA_Host",
    ),
    "output buffer": (
        (
            "output_reserve: failed to allocate output buffer of size 593.50 MiB",
            f"{NO_CONTEXT} failed to reserve initial output buffer",
        ),
        "compute buffers",
        round(593.5 * MIB),
        None,
    ),
    "output buffer, by what follows alone": (
        (f"{NO_CONTEXT} failed to reserve initial output buffer",),
        "compute buffers",
        None,
        None,
    ),
    "compute buffers that grow in a request": (
        (
            f"{CUDA} 512.00 MiB on device 0: cudaMalloc failed: out of memory",
            "ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 536870912",
            "ggml_backend_sched_alloc_splits: failed to allocate graph",
            "process_ubatch: failed to allocate graph",
            "srv  Compute error. off = 0, n_batch = 512, ret = -2",
        ),
        "compute buffers",
        512 * MIB,
        "CUDA0",
    ),
    "pool of the warm-up": (
        (
            LOADING,
            CONTEXT,
            WITH_KV,
            "CUDA error: out of memory",
            "  current device: 1, in function alloc at /llama.cpp/ggml/src/ggml-cuda/ggml-cuda.cu:583",
            "  cuMemCreate(&handle, reserve_size, &prop, 0)",
            "/llama.cpp/ggml/src/ggml-cuda/ggml-cuda.cu:107: CUDA error",
        ),
        "compute buffers",
        None,
        "CUDA1",
    ),
    "pool of the warm-up, AMD": (
        (LOADING, CONTEXT, WITH_KV, "ggml-cuda.cu:583: HipVMM Failure: out of memory"),
        "compute buffers",
        None,
        None,
    ),
    "cuBLAS": (
        (LOADING, CONTEXT, WITH_KV, "CUDA error: the resource allocation failed", "  current device: 0, in function x"),
        "compute buffers",
        None,
        "CUDA0",
    ),
    "Metal, in a request": (
        (
            "ggml_metal_synchronize: error: command buffer 0 failed with status 5",
            "error: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        ),
        "compute buffers",
        None,
        None,
    ),
    "a card that others fill": (
        (
            "CUDA error: out of memory",
            "  current device: 0, in function ggml_backend_cuda_device_get_memory at ggml-cuda.cu:5080",
            "  cudaMemGetInfo(free, total)",
        ),
        "the driver's own part of a GPU",
        None,
        "CUDA0",
    ),
    "who knows": (("CUDA error: out of memory",), None, None, None),
    "who knows, without a maker": (("ggml-cuda: insufficient memory",), None, None, None),
}
HELPS = {
    "weights": "larger ncmoe=N, cpu-moe",
    "weights in host memory": "smaller model",
    "the KV cache": "smaller context, or ctk=q8_0,ctv=q8_0",
    "compute buffers": "smaller ub",
    "pinned host memory": "lm=mmap, which needs none",
    "the driver's own part of a GPU": "end what else holds memory of that GPU",
}


@pytest.mark.parametrize("name", FULL)
def test_memory_that_ran_out_is_known_by_part_size_and_device(name: str) -> None:
    lines, part, asked_bytes, device = FULL[name]
    failure = read_failure(lines)
    assert failure is not None
    assert (failure.kind, failure.part, failure.asked_bytes, failure.device) == ("memory", part, asked_bytes, device)
    error = failure.error()
    assert type(error) is DoesNotFit
    assert "\n" not in str(error)
    assert HELPS.get(part or "", "put less on that device") in str(error)


@pytest.mark.parametrize(
    "lines",
    [
        ["CUDA error: out of memory", "  current device: 0, in function alloc at ggml-cuda.cu:583"],
        ["ROCm error: out of memory"],
        [f"{CUDA} 512.00 MiB on device 0: cudaMalloc failed: out of memory"],
        [VULKAN, VULKAN_SAYS],
        ["std::bad_alloc"],
    ],
)
def test_memory_that_runs_out_in_a_request_is_that_of_computing(lines: list[str]) -> None:
    before, after = read_failure(lines), read_failure(lines, loaded=True)
    assert before is not None
    assert after is not None
    assert (before.part, after.part) == (None, "compute buffers")
    assert "while generating" in str(after.error("generating"))


def test_a_full_card_says_in_one_sentence_what_did_not_fit_and_what_helps() -> None:
    failure = read_failure(PREFIXED + line for line in FULL["CUDA, weights"][0])
    assert failure is not None
    assert str(failure.error()) == (
        "out of memory for weights while loading: 15.9 GiB asked of CUDA0 "
        "(error loading model: unable to allocate CUDA0 buffer); "
        "put less on that device (a larger ncmoe=N, cpu-moe, or a smaller ngl=N), or take a smaller quantization"
    )


@pytest.mark.parametrize(
    ("asked_bytes", "device", "words"),
    [
        (3 << 30, "CPU", "while loading: 3.00 GiB asked of host memory ("),
        (3 << 30, None, "while loading: 3.00 GiB asked ("),
        (None, "CUDA1", "while loading on CUDA1 ("),
        (None, "CUDA_Host", "while loading in host memory ("),
        (None, None, "while loading ("),
    ],
)
def test_what_is_not_known_of_the_memory_is_left_out(asked_bytes: int | None, device: str | None, words: str) -> None:
    assert words in str(Failure("memory", "a line", "the KV cache", asked_bytes, device).error())


@pytest.mark.parametrize(
    "line",
    [
        "common_fit_params: failed to fit params to free device memory: n_gpu_layers already set by user, abort",
        "ggml_cuda_host_malloc: failed to allocate 1024.00 MiB of pinned memory: out of memory",
        "ggml_vulkan: Failed to allocate pinned memory (vk::Device::allocateMemory: ErrorOutOfDeviceMemory)",
        "WARNING: failed to allocate 300.00 MB of pinned memory",
        "warning: failed to mlock 5368709120-byte buffer (after previously locking 0 bytes): Cannot allocate memory",
        "srv  failed to allocate memory for prompt cache state: std::bad_alloc",
        "reorder_qw: failed to allocate 4096 bytes for reorder temp buffer, skipping reorder",
        "reorder_qw: device alloc of 4096 bytes failed, using host memory fallback",
        "ggml_backend_sched_alloc_splits: failed to allocate graph, reserving (backend_ids_changed = 1)",
        "load_all_data: failed to allocate host buffer for async uploads for device CUDA0",
        "CUDA pool[0]: alloc of 64.00 MiB failed, flushing 32.00 MiB of cached buffers and retrying",
    ],
)
@pytest.mark.parametrize("prefix", ["", "0.00.123.456 W "])
def test_what_a_load_goes_on_without_is_no_failure(prefix: str, line: str) -> None:
    assert read_failure([prefix + line]) is None
    other = read_failure([prefix + line, f"{NO_MODEL} unable to allocate CUDA0 buffer"])
    assert other is not None
    assert other.asked_bytes is None, "that was asked for something else"


ONE_BY_ONE = "sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism"


def test_a_second_try_with_less_is_judged_by_what_it_says_itself() -> None:
    first = FULL["compute buffers"][0][:3]
    assert read_failure([*first, ONE_BY_ONE]) is None
    second = read_failure([LOADING, CONTEXT, WITH_KV, *first, ONE_BY_ONE, "CUDA error: out of memory"])
    assert second is not None
    assert (second.part, second.asked_bytes) == ("compute buffers", None)


def test_only_the_last_load_of_a_log_explains_its_end() -> None:
    log = [*FULL["KV cache"][0], "srv    load_model: loading model 'tiny.gguf'"]
    assert read_failure(log) is None
    failure = read_failure([*log, *FULL["compute buffers"][0]])
    assert failure is not None
    assert (failure.part, failure.device) == ("compute buffers", "ROCm0")


def test_each_part_has_something_that_helps() -> None:
    parts = {part for _, part, _, _ in FULL.values()}
    assert parts == set(llama_failure.ROOM)
    assert len(set(llama_failure.ROOM.values())) == len(parts)


# ── the system ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("before", "now", "known"), [(3, 4, True), (3, 3, False), (None, 4, False), (3, None, False)])
def test_a_kill_is_for_memory_if_the_system_has_counted_one(
    before: int | None, now: int | None, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_failure, "kills_for_memory", lambda: now)
    killed = llama_failure.killed_for_memory(before)
    assert (killed is not None) is known
    if killed:
        assert "out of memory for weights in host memory" in str(killed.error())
        assert type(killed.error()) is DoesNotFit


def test_a_load_of_the_log_and_its_failure_are_read_from_the_same_lines() -> None:
    lines = FULL["pinned host memory, and none beside it"][0]
    assert "could not be pinned" in llama_log.read_load(lines).notes[0]


@pytest.mark.parametrize("size", ["...", "1.2.3", "."])
def test_a_size_that_is_no_number_stays_unknown(size: str) -> None:
    found = read_failure([f"allocating {size} MiB on device 0: cudaMalloc failed: out of memory"])

    assert found is not None
    assert (found.kind, found.asked_bytes) == ("memory", None)
