"""A GPU made smaller: the rest of its memory is held, so that every engine finds a card of the size asked for.

A child process, whose body is `main`, allocates through the CUDA driver what is free beyond the limit. It
sees the cards that engines see, for the driver itself hides what CUDA_VISIBLE_DEVICES leaves out, and it
ends with the pipe to us, however we end.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import heapq
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness import process
from harness.errors import DuelError, Interrupted, RunRefused, Unavailable, UsageError
from harness.sizes import format_bytes, parse_size

MIB = 1 << 20
LEAST_BYTES = 256 * MIB  # less holds no engine's own context
SLACK_BYTES = 64 * MIB  # more than this off the limit is refused
CHUNKS = (1024 * MIB, 64 * MIB, 2 * MIB)  # the driver gives whole pages of 2 MiB
FINE_BYTES = 4 * MIB
ROUNDS = 4  # others allocate beside us
ANSWER_S = 60.0  # for everything that the child is asked
LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY, STUB_LIBRARY, NO_DEVICE = 2, 34, 100  # CUresult
COMPUTE_MODE, INTEGRATED = 20, 18  # CUdevice_attribute
CLOSED_MODES = {2: "prohibited", 3: "exclusive process"}  # CUcomputemode in which two processes cannot share a GPU
INSTEAD = "use --stand-in=SIZE to try placements without a GPU"


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU as the CUDA driver shows it, while the ballast holds."""

    uuid: str  # as NVML spells it: "GPU-" and 32 hexadecimal digits in five groups
    name: str
    total_bytes: int
    free_bytes: int  # what an engine can get, its own CUDA context included
    held_bytes: int  # allocated by the ballast, without its own CUDA context


def limits_of(text: str) -> tuple[int, ...]:
    """Bytes of "12GiB", one for every card, or of "12GiB,8GiB", one for each. Raises UsageError."""
    limits = tuple(parse_size(part) for part in text.split(","))
    if min(limits) < LEAST_BYTES:
        raise UsageError(
            f"{format_bytes(min(limits))} of GPU memory hold no engine; "
            f"name at least {format_bytes(LEAST_BYTES)}, like 12GiB"
        )
    return limits


# ── our side ────────────────────────────────────────────────────────────────────────────────


class Ballast:
    """Memory held on every card that CUDA shows. `cards` is what was told last, `limits` one for each of them."""

    def __init__(self, child: process.Child, limits: Sequence[int]) -> None:
        self._child = child
        self.cards = _answer(child)
        self.limits = tuple(limits) if len(limits) == len(self.cards) else tuple(limits) * len(self.cards)

    def adjust(self) -> tuple[Card, ...]:
        """Make the free memory of every card its limit again, whatever others took or gave back.

        Raises Interrupted if the child is gone, or a limit cannot be met within `SLACK_BYTES`.
        """
        with contextlib.suppress(BrokenPipeError):  # its answer says that it is gone
            self._child.process.stdin.write(b"\n")
        try:
            self.cards = _answer(self._child)
        except Interrupted:
            raise
        except DuelError as error:
            raise Interrupted(str(error)) from None
        return self.cards

    def require(self) -> None:
        """Raises Interrupted if the child is gone, and the engines have seen more than the limit since."""
        if self._child.returncode() is not None:
            raise _gone(self._child)


@contextlib.contextmanager
def hold(limits: Sequence[int], log: Path) -> Iterator[Ballast]:
    """Leave `limits` bytes free (one for every card, or one for each) until the block ends.

    `log` takes what the child has to say besides. Raises UsageError, Unavailable, RunRefused.
    """
    argv = process.python(f"from harness.ballast import main; main({list(limits)})")
    # It compiles nothing, so the driver needs no cache in the user's home.
    environment = os.environ | {process.ASIDE: "1", "CUDA_CACHE_DISABLE": "1"}
    with process.start(argv, log, environment, piped=True) as child:
        yield Ballast(child, limits)


def _answer(child: process.Child) -> tuple[Card, ...]:
    """What it tells of the cards. Raises Interrupted if it tells nothing, else what it raised itself."""
    try:
        line = _line(child)
    except TimeoutError:
        child.process.kill()  # an answer that comes later would be taken for the next one
        raise Interrupted(
            f"the CUDA driver has not answered the ballast for {ANSWER_S:g} s; see whether `nvidia-smi` answers, and "
            "restart the machine if it does not"
        ) from None
    if not line:
        raise _gone(child)
    told = json.loads(line)
    if "error" in told:
        kinds = {kind.__name__: kind for kind in (UsageError, Unavailable, RunRefused)}
        raise kinds[told["error"]](told["message"])
    return tuple(Card(**card) for card in told["cards"])


def _gone(child: process.Child) -> Interrupted:
    how, said = _end(child), child.last_line()
    why = how if said is None else f"{how}: {said.strip()}"
    return Interrupted(f"the ballast is gone ({why}), so engines would see the whole GPU")


def _line(child: process.Child) -> bytes:
    """The next document that it writes, empty if it is gone; what a sitecustomize prints before it is left out.

    Raises TimeoutError.
    """
    said = b""
    deadline = time.monotonic() + ANSWER_S
    with selectors.DefaultSelector() as selector:
        selector.register(child.process.stdout, selectors.EVENT_READ)
        while not (said.endswith(b"\n") and said.splitlines()[-1].startswith(b"{")):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = os.read(child.process.stdout.fileno(), 1 << 16)
            if not part:
                return b""
            said += part
    return said.splitlines()[-1]


def _end(child: process.Child) -> str:
    """How it ended, which is known a moment after its pipes closed."""
    with contextlib.suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
        child.process.wait(5)
    code = child.returncode()
    if code is None or code >= 0:
        return "it closed its pipe" if code is None else f"exited with code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


# ── the child's side ────────────────────────────────────────────────────────────────────────


class _CudaError(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


class _Driver:
    """The CUDA driver's own library. Every call raises _CudaError for what is not success."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise Unavailable(
                f"no CUDA driver here ({error}), and only memory of NVIDIA GPUs can be held; {INSTEAD}"
            ) from None

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise Unavailable(f"the CUDA driver here has no {name}; update it, or {INSTEAD}") from None
        if code := function(*arguments):
            raise _CudaError(int(code))

    def number(self, name: str, *arguments: Any, kind: type[Any] = ctypes.c_int) -> int:
        """What a function writes through its first argument."""
        found = kind()
        self.call(name, ctypes.byref(found), *arguments)
        return int(found.value or 0)

    def refusal(self, error: _CudaError, of: str) -> DuelError:
        """The sentence for a code that has no sentence of its own."""
        said = ctypes.c_char_p()
        with contextlib.suppress(_CudaError, Unavailable):
            self.call("cuGetErrorName", error.code, ctypes.byref(said))
        name = said.value.decode(errors="replace") if said.value else "an error without a name"
        return RunRefused(
            f"the CUDA driver answers {name} ({error.code}) for {of}, so its memory cannot be held; "
            "see what `llamaduel doctor` and `nvidia-smi` say of it, or run without --vram-limit"
        )


@dataclass(slots=True)
class _Share:
    """One GPU, and the blocks that we hold of it, as (bytes, address): the smallest is given back first."""

    driver: _Driver
    limit_bytes: int
    uuid: str
    name: str
    context: ctypes.c_void_p
    total_bytes: int
    blocks: list[tuple[int, int]] = field(default_factory=list)
    is_held: bool = False  # its limit was met once, so a run may have begun

    def free_bytes(self) -> int:
        return _memory(self.driver, self.context)[0]

    def held_bytes(self) -> int:
        return sum(size for size, _ in self.blocks)

    def card(self) -> Card:
        return Card(self.uuid, self.name, self.total_bytes, self.free_bytes(), self.held_bytes())

    def settle(self) -> None:
        """Give back and allocate until the limit is free, as nearly as it goes. Raises RunRefused."""
        for _ in range(ROUNDS):
            while self.blocks and self.free_bytes() < self.limit_bytes:
                self._give_back()
            for size in CHUNKS:  # a large one leaves room for small ones, for it may take more than its size
                room = size if size == CHUNKS[-1] else 2 * size
                while self.free_bytes() - self.limit_bytes >= room and self._take(size):
                    pass
            if abs(self.free_bytes() - self.limit_bytes) <= FINE_BYTES:
                return
        over = self.free_bytes() - self.limit_bytes
        if over < -SLACK_BYTES:
            most = self.limit_bytes + over
            less = f", or name at most {most // MIB}MiB for it" if most >= LEAST_BYTES and not self.is_held else ""
            raise RunRefused(
                f"{self.name} lacks {-over // MIB} MiB for --vram-limit={_typed(self.limit_bytes)}, because other "
                f"programs and the driver hold them; end those that `llamaduel doctor` names{less}"
            )
        if over > SLACK_BYTES:
            larger = "" if self.is_held else "; try a larger limit, or run without --vram-limit"
            raise RunRefused(
                f"{self.name} has {over // MIB} MiB more free than --vram-limit={_typed(self.limit_bytes)}, and its "
                f"driver lets nobody hold them{larger}"
            )

    def _take(self, size: int) -> bool:
        """Whether there was so much. A driver that pages to the machine's memory could give for ever."""
        if self.held_bytes() + size > self.total_bytes:
            return False
        try:
            address = self.driver.number("cuMemAlloc_v2", ctypes.c_size_t(size), kind=ctypes.c_uint64)
        except _CudaError as error:
            if error.code == OUT_OF_MEMORY:
                return False
            raise
        heapq.heappush(self.blocks, (size, address))
        return True

    def _give_back(self) -> None:
        _, address = heapq.heappop(self.blocks)
        self.driver.call("cuMemFree_v2", ctypes.c_uint64(address))


def _memory(driver: _Driver, context: ctypes.c_void_p) -> tuple[int, int]:
    """Free and total bytes of the card of this context, which is the current one from then on."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    driver.call("cuCtxSetCurrent", context)
    driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def _typed(size: int) -> str:
    """As one would type it, and exact."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if not size % (1 << shift):
            return f"{size >> shift}{unit}"
    return f"{size}B"


def _shares(driver: _Driver, limits: Sequence[int]) -> list[_Share]:
    """Every card that CUDA shows, with its limit; nothing is held yet. Raises UsageError, Unavailable, RunRefused."""
    try:
        driver.call("cuInit", 0)
        count = driver.number("cuDeviceGetCount")
    except _CudaError as error:
        if error.code == STUB_LIBRARY:
            raise Unavailable(f"no CUDA driver here, only its stub for builds ({LIBRARY}); {INSTEAD}") from None
        if error.code != NO_DEVICE:
            raise driver.refusal(error, "this machine") from None
        count = 0
    if not count:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "see whether `nvidia-smi` shows one" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden!r} may hide it"
        raise Unavailable(f"CUDA shows no GPU here whose memory could be held: {why}, or {INSTEAD}")
    if len(limits) not in (1, count):
        shown = "1 GPU" if count == 1 else f"{count} GPUs"
        raise UsageError(
            f"--vram-limit names {len(limits)} sizes and CUDA shows {shown}; name one size for every GPU or one for "
            "each, or choose GPUs by CUDA_VISIBLE_DEVICES"
        )
    return [_share(driver, index, limits[index % len(limits)]) for index in range(count)]


def _share(driver: _Driver, index: int, limit_bytes: int) -> _Share:
    name = f"GPU {index}"
    try:
        device = driver.number("cuDeviceGet", index)
        said = ctypes.create_string_buffer(256)
        driver.call("cuDeviceGetName", said, len(said), device)
        name = said.value.decode(errors="replace") or name
        if driver.number("cuDeviceGetAttribute", INTEGRATED, device):
            raise Unavailable(
                f"{name} has no memory of its own, so a ballast would take the machine's from the engines; {INSTEAD}"
            )
        if mode := CLOSED_MODES.get(driver.number("cuDeviceGetAttribute", COMPUTE_MODE, device)):
            raise Unavailable(
                f"{name} is in the compute mode {mode!r}, in which a ballast shuts every engine out; "
                "allow several processes with `sudo nvidia-smi -c DEFAULT`, or run without --vram-limit"
            )
        context = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _, total_bytes = _memory(driver, context)
        if limit_bytes > total_bytes:
            raise UsageError(
                f"--vram-limit={_typed(limit_bytes)} is more than {name} has ({total_bytes // MIB} MiB); "
                "name less, or run without it"
            )
        return _Share(driver, limit_bytes, _uuid(driver, device), name, context, total_bytes)
    except _CudaError as error:
        raise driver.refusal(error, name) from None


def _uuid(driver: _Driver, device: int) -> str:
    raw = ctypes.create_string_buffer(16)
    try:
        driver.call("cuDeviceGetUuid_v2", raw, device)
    except Unavailable:  # a driver before 11.4
        driver.call("cuDeviceGetUuid", raw, device)
    return f"GPU-{uuid.UUID(bytes=raw.raw)}"


def _settle(shares: Sequence[_Share]) -> tuple[Card, ...]:
    cards = []
    for share in shares:
        try:
            share.settle()
            share.is_held = True
            cards.append(share.card())
        except _CudaError as error:
            raise share.driver.refusal(error, share.name) from None
    return tuple(cards)


def _tell(told: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more: stdin has ended too
        os.write(sys.stdout.fileno(), json.dumps(told).encode() + b"\n")


def main(limits: Sequence[int]) -> None:
    """Body of the child: hold, tell, and again for every line on stdin, until it ends."""
    shares = None
    while True:
        try:
            shares = shares or _shares(_Driver(), limits)
            _tell({"cards": [dataclasses.asdict(card) for card in _settle(shares)]})
        except DuelError as error:
            _tell({"error": type(error).__name__, "message": str(error)})
        if not sys.stdin.readline():
            return
