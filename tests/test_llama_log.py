"""llama.cpp's log as data: recorded logs of real runs, and the error lines that real failures gave."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends import llama_log
from harness.contract import Buffer, Device

DATA = Path(__file__).parent / "data"
MIB = 1024 * 1024


def recorded(name: str) -> list[str]:
    return (DATA / name).read_text().splitlines()


def sizes(load: llama_log.Load) -> dict[tuple[str, str], float]:
    """(device, kind) → MiB."""
    assert load.buffers is not None
    return {(buffer.device, buffer.kind): round(buffer.bytes / MIB, 2) for buffer in load.buffers}


HOST_ONLY = {
    ("CPU", "weights"): 51.80,
    ("CPU_REPACK", "weights"): 85.22,
    ("CPU", "output"): 0.19,
}


@pytest.mark.parametrize(
    ("log", "kv", "compute"),
    [
        ("llama-embedded-b11549.log", 9.19, 13.03),
        ("llama-full-b11434-cpu.log", 12.00, 13.02),
        ("llama-ollama-0.32.15-embedded.log", 12.00, 13.02),
        ("llama-ollama-0.32.15-full.log", 12.00, 13.02),
    ],
)
def test_the_buffers_of_a_run_on_the_cpu_are_all_on_the_host(log: str, kv: float, compute: float) -> None:
    load = llama_log.read_load(recorded(log))
    assert sizes(load) == HOST_ONLY | {("CPU", "kv"): kv, ("CPU", "compute"): compute}
    assert load.buffers is not None
    assert all(buffer.on_host for buffer in load.buffers)
    assert load.devices == ()


def test_experts_of_the_first_layers_are_on_the_host_and_the_rest_on_the_device() -> None:
    load = llama_log.read_load(recorded("llama-full-b11434-stand-in-ncmoe5.log"))
    assert sizes(load) == {
        ("CPU", "weights"): 25.50,
        ("CPU_REPACK", "weights"): 33.75,
        ("RPC0", "weights"): 77.77,
        ("RPC0", "kv"): 12.00,
        ("RPC0", "compute"): 41.51,
        ("CPU", "compute"): 8.51,
        ("CPU", "output"): 0.19,
    }
    assert [device.name for device in load.devices] == ["RPC0"]
    assert load.devices[0].free_bytes == 24105 * MIB


def test_the_endpoint_of_an_rpc_device_does_not_reach_its_name() -> None:
    assert llama_log.device_of("RPC0[127.0.0.1:50052]") == "RPC0"


def test_what_fit_moved_is_noted_and_its_probes_leave_no_buffers() -> None:
    load = llama_log.read_load(recorded("llama-full-b11434-stand-in-fit.log"))
    assert sizes(load)["RPC0", "weights"] == 55.27
    assert load.notes == ("--fit left parts of 10 layers of RPC0 in host memory",)


def test_a_fit_that_changed_nothing_leaves_no_note() -> None:
    assert llama_log.read_load(recorded("llama-ollama-0.32.15-full.log")).notes == ()


@pytest.mark.parametrize(
    ("line", "note"),
    [
        (
            "common_params_fit_impl: context size reduced from 32768 to 4096 -> need 168 MiB less memory in total",
            "--fit lowered the context from 32768 to 4096",
        ),
        (
            "common_fit_params: failed to fit params to free device memory: n_gpu_layers already set by user to 99",
            "--fit gave up: n_gpu_layers already set by user to 99",
        ),
    ],
)
def test_a_context_that_fit_lowered_and_a_fit_that_gave_up_are_noted(line: str, note: str) -> None:
    assert llama_log.read_load([line]).notes == (note,)


def test_jsonl_says_the_same_as_text() -> None:
    load = llama_log.read_load(recorded("llama-full-b11434-jsonl.log"))
    assert sizes(load)["CPU_Mapped", "weights"] == 130.27
    assert load.settings["load_mode"] == "mmap"
    assert llama_log.evaluated_tokens(recorded("llama-full-b11434-jsonl.log")) == (3,)


def test_effective_settings_are_read_in_the_words_of_our_own_settings() -> None:
    load = llama_log.read_load(recorded("llama-embedded-b11549.log"))
    assert load.settings == {
        "context": "2048",
        "batch": "512",
        "ubatch": "512",
        "threads": "1",
        "threads_batch": "1",
        "flash_attention": "on",
        "kv_k": "q8_0",
        "kv_v": "f16",
        "load_mode": "none",
        "slots": "1",
        "kv_unified": "false",
        "prompt_cache": "off",
        "checkpoints": "32",
        "samplers": "top-k → temp-ext → greedy",
    }


MATCHED = {
    "context": "1024",
    "batch": "512",
    "ubatch": "512",
    "threads": "1",
    "flash_attention": "on",
    "kv_k": "f16",
    "kv_v": "f16",
    "load_mode": "none",
    "slots": "1",
    "kv_unified": "false",
    "prompt_cache": "off",
    "temperature": "0",
    "top_k": "40",
    "top_p": "1",
    "min_p": "0",
    "penalties": "off",
}


@pytest.mark.parametrize(
    ("log", "changed"),
    [
        ("llama-wheel-b9538.log", {}),
        ("llama-wheel-b10566.log", {"load_mode": "mmap"}),  # its wheel was not told
        ("llama-embedded-b11549-matched.log", {}),
        ("llama-full-b11434-stand-in-cpu-moe.log", {"flash_attention": "off", "build": "b11434"}),
        ("ollama-0.32.15-embedded-matched.log", {}),
        ("ollama-0.32.15-stand-in-cpu-moe.log", {"flash_attention": "off", "build": "b11434"}),
    ],
)
def test_builds_of_half_a_year_are_read_alike(log: str, changed: dict[str, str]) -> None:
    settings = llama_log.read_load(recorded(log)).settings
    assert {name: settings.get(name) for name in MATCHED | changed} == MATCHED | changed


def test_the_sampler_is_that_of_the_last_request_and_lists_what_acts() -> None:
    first = recorded("llama-full-b11434-jsonl.log")  # one request, some of its samplers by default
    settings = llama_log.read_load(first).settings
    assert settings["samplers"] == "top-k → top-p → min-p → temp-ext → dist"
    assert (settings["top_p"], settings["min_p"]) == ("0.95", "0.05")
    later = [
        "slot launch_slot_: id  0 | task -1 | sampler chain: logits -> penalties -> ?dry -> top-k -> temp-ext -> dist ",
        "\trepeat_last_n = 64, repeat_penalty = 1.100, frequency_penalty = 0.000, presence_penalty = 0.500",
        "\ttop_k = 20, top_p = 0.900, min_p = 0.000, typical_p = 1.000, top_n_sigma = -1.000, temp = 0.800",
    ]
    settings = llama_log.read_load([*first, *later]).settings
    assert settings["samplers"] == "penalties → top-k → temp-ext → dist"
    assert settings["penalties"] == "repeat 1.1 over 64, presence 0.5"
    assert (settings["temperature"], settings["top_k"]) == ("0.8", "20")


def test_parameters_of_a_slot_are_put_in_the_words_of_the_log() -> None:
    told = {"seed": 1, "temperature": 0.0, "top_k": 40, "top_p": 0.949999988079071, "min_p": 0.05, "repeat_penalty": 1}
    assert llama_log.sampling(told) == {
        "seed": "1", "temperature": "0", "top_k": "40", "top_p": "0.95", "min_p": "0.05", "penalties": "off",
    }  # fmt: skip
    assert llama_log.sampling({}) == {}, "what is not told stays unknown"


# Written by hand after builds that no wheel has: older spellings of lines that are recorded above.
@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("build: 9453 (0123abc) with cc (Debian 12.2.0-14) 12.2.0 for x86_64-linux-gnu", "build", "b9453"),
        ("srv          init: build_info: b9538-0123abc", "build", "b9538"),
        ("load_tensors: loading model tensors, this can take a while... (mmap = true)", "load_mode", "mmap"),
        (
            "load_tensors: loading model tensors, this can take a while... (mmap = false, direct_io = true)",
            "load_mode",
            "dio",
        ),
        ("llama_context: flash_attn    = 1", "flash_attention", "on"),
        ("srv          load_model: prompt cache is enabled, size limit: no limit", "prompt_cache", "no limit"),
    ],
)
def test_older_spellings_are_read(line: str, name: str, value: str) -> None:
    assert llama_log.read_load([line]).settings == {name: value}


def test_a_build_without_a_number_is_unknown() -> None:
    assert "build" not in llama_log.read_load(recorded("llama-wheel-b9538.log")).settings


@pytest.mark.parametrize(
    ("log", "argv", "environment", "who"),
    [
        ("llama-full-b11434-stand-in-fit.log", "llama-server -fitt 0", {}, "engine's fit"),
        ("ollama-0.32.15-stand-in-64mib.log", "llama-server -c 1024", {}, "engine's fit"),
        ("llama-full-b11434-stand-in-cpu-moe.log", "llama-server -fit off -ngl 999 --cpu-moe", {}, "user"),
        ("ollama-0.32.15-stand-in-cpu-moe.log", "llama-server -c 1024", {"LLAMA_ARG_CPU_MOE": "1"}, "user"),
        ("llama-full-b11434-stand-in-fit.log", "llama-server -ngl 20", {}, "user"),  # fit is left the rest at most
        ("llama-full-b11434-cpu.log", "llama-server -c 2048", {}, None),  # it does not speak of fit
    ],
)
def test_who_placed_the_weights_is_proven_by_flags_or_by_the_log(
    log: str, argv: str, environment: dict[str, str], who: str | None
) -> None:
    assert llama_log.placed_by(llama_log.read_load(recorded(log)), argv.split(), environment) == who


def test_a_fit_that_gave_up_placed_nothing() -> None:
    line = "common_fit_params: failed to fit params to free device memory: not enough, abort"
    load = llama_log.read_load([line])
    assert (load.fitted, llama_log.placed_by(load, (), {})) == (False, None)


def test_layers_offloaded_are_a_claim_that_buffers_belie() -> None:
    load = llama_log.read_load(recorded("llama-full-b11434-stand-in-cpu-moe.log"))
    assert llama_log.claim(load) == {"claim": "its log: 19 of 19 layers on the GPU", "claimed_device_share": 1.0}
    assert sizes(load)["CPU_REPACK", "weights"] > sizes(load)["RPC0", "weights"]
    assert llama_log.claim(llama_log.read_load(recorded("llama-wheel-b9538.log"))) == {}


@pytest.mark.parametrize(
    ("asked", "told", "named"),
    [
        ({"context": 1000}, {"context": "1024"}, {"context"}),
        ({"context": 1024}, {"context": "512"}, set()),  # that is no rounding
        ({"context": 512, "batch": 2048}, {"context": "512", "batch": "512"}, {"batch"}),
        ({"batch": 256, "ubatch": 512}, {"batch": "256", "ubatch": "256"}, {"ubatch"}),
        ({"batch": 512}, {"context": "1024", "batch": "256"}, set()),
    ],
)
def test_what_llama_cpp_makes_of_a_number_is_explained_only_by_its_rules(
    asked: dict[str, int | None], told: dict[str, str], named: set[str]
) -> None:
    assert set(llama_log.limits(asked, told)) == named


@pytest.mark.parametrize(
    ("resolved", "effective"),
    [
        ("resolve_fused_ops: Flash Attention enabled", "on"),
        ("resolve_fused_ops: Flash Attention not supported, set to disabled", "off"),
        ("llama_context: Flash Attention was auto, set to enabled", "on"),
    ],
)
def test_automatic_flash_attention_is_reported_as_what_it_became(resolved: str, effective: str) -> None:
    lines = ["llama_context: flash_attn            = auto", resolved]
    assert llama_log.read_load(lines[:1]).settings["flash_attention"] == "auto"
    assert llama_log.read_load(lines).settings["flash_attention"] == effective


def test_two_kv_caches_of_one_model_are_added_up() -> None:
    load = llama_log.read_load(
        [
            "llama_kv_cache_iswa: creating non-SWA KV cache, size = 4096 cells",
            "llama_kv_cache:      CUDA0 KV buffer size =    80.00 MiB",
            "llama_kv_cache: size =   80.00 MiB (  4096 cells,   5 layers,  1/1 seqs), K (f16):   40.00 MiB, V (f16):"
            "   40.00 MiB",
            "llama_kv_cache_iswa: creating     SWA KV cache, size = 1536 cells",
            "llama_kv_cache:      CUDA0 KV buffer size =   150.00 MiB",
            "llama_kv_cache:        CPU KV buffer size =     7.50 MiB",
        ]
    )
    assert sizes(load) == {("CUDA0", "kv"): 230.0, ("CPU", "kv"): 7.5}


def test_recurrent_state_and_every_other_kind_of_buffer_is_known_by_name() -> None:
    load = llama_log.read_load(
        [
            "load_tensors:        CUDA0 model buffer size =  1000.00 MiB",
            "load_tensors:   CUDA_Host model buffer size =   200.00 MiB",
            "llama_memory_recurrent:      CUDA0 RS buffer size =    19.50 MiB",
            "sched_reserve:  CUDA_Host compute buffer size =     4.00 MiB",
            "load_tensors:  MTL0_Mapped model buffer size =    50.00 MiB",
        ]
    )
    assert load.buffers == (
        Buffer("CUDA0", "rs", round(19.5 * MIB), on_host=False),
        Buffer("CUDA0", "weights", 1000 * MIB, on_host=False),
        Buffer("CUDA_Host", "compute", 4 * MIB, on_host=True),
        Buffer("CUDA_Host", "weights", 200 * MIB, on_host=True),
        Buffer("MTL0", "weights", 50 * MIB, on_host=False),
    )


def test_only_the_last_load_of_a_log_counts() -> None:
    first = recorded("llama-full-b11434-stand-in-ncmoe5.log")
    second = recorded("llama-full-b11434-cpu.log")
    assert llama_log.read_load([*first, *second]) == llama_log.read_load(second)


def test_a_log_without_buffer_lines_is_unknown_not_empty() -> None:
    quiet = [line for line in recorded("llama-full-b11434-cpu.log") if "buffer size" not in line]
    assert llama_log.read_load(quiet).buffers is None


def test_evaluated_prompt_tokens_tell_a_cached_prompt_from_a_new_one() -> None:
    for log in ("llama-ollama-0.32.15-full.log", "llama-ollama-0.32.15-embedded.log"):
        assert llama_log.evaluated_tokens(recorded(log)) == (3, 4, 1)  # the third repeats the second


# Lines as the backends of llama.cpp print them, those of the load around them included.
LISTED = """\
ggml_cuda_init: found 1 CUDA devices (Total VRAM: 12281 MiB):
  Device 0: NVIDIA GeForce RTX 4070, compute capability 8.9, VMM: yes, VRAM: 12281 MiB
ggml_vulkan: Found 1 Vulkan devices:
ggml_vulkan: 0 = AMD Radeon 780M Graphics (RADV PHOENIX) (radv) | uma: 1 | fp16: 1 | bf16: 0 | warp size: 64
ggml_metal_device_init: recommendedMaxWorkingSetSize  = 103079.22 MB
Available devices:
  CUDA0: NVIDIA GeForce RTX 4070 (12281 MiB, 11017 MiB free)
  CUDA1: NVIDIA H200 (dev p0/v1) (143771 MiB, 143000 MiB free)
  Vulkan0: AMD Radeon 780M Graphics (RADV PHOENIX) (15360 MiB, 14211 MiB free) | uma: 1
  ROCm0: AMD Radeon(TM) Graphics (110511 MiB, 110357 MiB free)
  SYCL0: Intel(R) Arc(TM) A770 Graphics (15473 MiB, 15473 MiB free)
  MTL0: Apple M4 Max (98304 MiB, 98303 MiB free)
  Metal: Apple M4 Max (98304 MiB, 98303 MiB free)
  RPC0: 127.0.0.1:50052 (24105 MiB, 0 MiB free)
  BLAS: Accelerate (0 MiB, 0 MiB free)
  OpenCL0: QUALCOMM Adreno(TM) (0 MiB, 0 MiB free)
"""


@pytest.mark.parametrize(
    ("name", "description", "total_mib", "free_mib"),
    [
        ("CUDA0", "NVIDIA GeForce RTX 4070", 12281, 11017),
        ("CUDA1", "NVIDIA H200 (dev p0/v1)", 143771, 143000),
        ("Vulkan0", "AMD Radeon 780M Graphics (RADV PHOENIX)", 15360, 14211),
        ("ROCm0", "AMD Radeon(TM) Graphics", 110511, 110357),
        ("SYCL0", "Intel(R) Arc(TM) A770 Graphics", 15473, 15473),
        ("MTL0", "Apple M4 Max", 98304, 98303),
        ("Metal", "Apple M4 Max", 98304, 98303),  # builds of 2025
        ("RPC0", "127.0.0.1:50052", 24105, 0),
    ],
)
def test_devices_of_every_maker_are_listed_with_their_memory(
    name: str, description: str, total_mib: int, free_mib: int
) -> None:
    listed = {device.name: device for device in llama_log.listed_devices(LISTED.splitlines())}
    assert listed[name] == Device(name, description, total_mib * MIB, free_mib * MIB)


def test_what_is_no_device_or_tells_no_memory_is_not_taken_for_a_card_of_none() -> None:
    listed = {device.name: device for device in llama_log.listed_devices(LISTED.splitlines())}
    assert len(listed) == 9
    assert "BLAS" not in listed, "it computes in host memory"
    assert listed["OpenCL0"] == Device("OpenCL0", "QUALCOMM Adreno(TM)", None, None)
    assert llama_log.listed_devices(["Available devices:", "  (none)"]) == ()


@pytest.mark.parametrize(
    ("line", "name", "description", "free_mib"),
    [
        ("using device CUDA0 (NVIDIA H200) (0000:18:00.0) - 142810 MiB free", "CUDA0", "NVIDIA H200", 142810),
        (
            "using device Vulkan0 (AMD Radeon 780M Graphics (RADV PHOENIX)) (0000:c1:00.0) - 14211 MiB free",
            "Vulkan0",
            "AMD Radeon 780M Graphics (RADV PHOENIX)",
            14211,
        ),
        (
            "using device SYCL0 (Intel(R) Arc(TM) A770 Graphics) (unknown id) - 15473 MiB free",
            "SYCL0",
            "Intel(R) Arc(TM) A770 Graphics",
            15473,
        ),
        ("using device MTL0 (Apple M4 Max) (unknown id) - 98303 MiB free", "MTL0", "Apple M4 Max", 98303),
    ],
)
def test_the_device_of_a_load_is_told_with_what_is_free_of_it(
    line: str, name: str, description: str, free_mib: int
) -> None:
    load = llama_log.read_load([f"llama_model_load_from_file_impl: {line}"])
    assert load.devices == (Device(name, description, free_bytes=free_mib * MIB),)


# ── what a load did without ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        (["ggml_cuda_host_malloc: failed to allocate 1024.00 MiB of pinned memory: out of memory"], "1.00 GiB"),
        (
            [
                "ggml_cuda_host_malloc: failed to allocate 1024.00 MiB of pinned memory: out of memory",
                "ggml_cuda_host_malloc: failed to allocate 512.00 MiB of pinned memory: invalid argument",
            ],
            "1.50 GiB",
        ),
        (["0.00.123.456 D ggml_cuda_host_malloc: failed to allocate 1024.00 MiB of pinned memory: x"], "1.00 GiB"),
        (["ggml_backend_sycl_host_malloc: failed to allocate 300.00 MiB of pinned memory"], "300 MiB"),
        (["WARNING: failed to allocate 300.00 MB of pinned memory"], "300 MiB"),  # Vulkan, and it means MiB
        (
            [
                "ggml_vulkan: Failed to allocate pinned memory (vk::Device::allocateMemory: ErrorOutOfDeviceMemory)",
                "ggml_cuda_host_malloc: failed to allocate 512.00 MiB of pinned memory: out of memory",
            ],
            "some",
        ),
    ],
)
def test_host_memory_that_could_not_be_pinned_is_one_note_for_it_changes_speed(lines: list[str], size: str) -> None:
    assert llama_log.read_load(lines).notes == (
        f"{size} of host memory could not be pinned, so copies between it and a GPU are slower",
    )


def test_what_an_earlier_load_could_not_pin_is_no_note_of_the_last() -> None:
    line = "ggml_cuda_host_malloc: failed to allocate 1024.00 MiB of pinned memory: out of memory"
    assert llama_log.read_load([line, "srv    load_model: loading model 'tiny.gguf'"]).notes == ()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism",
            "several GPUs take turns",
        ),
        (
            "warning: failed to mlock 5368709120-byte buffer (after previously locking 0): Cannot allocate memory",
            "could not all be locked in memory",
        ),
    ],
)
def test_what_a_load_gave_up_to_fit_is_noted(line: str, words: str) -> None:
    (note,) = llama_log.read_load([line, line]).notes
    assert words in note
