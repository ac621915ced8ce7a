"""Who holds GPU memory before a run, and what is done about it; and what slows a card down."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness import machine, preflight
from harness.contract import Device
from harness.errors import RunRefused
from harness.gpu import Details, Glance, Gpu, Holder, State
from harness.preflight import Foreign

GIB = 1 << 30
CARD = Gpu(name="NVIDIA GeForce RTX 4070", memory_bytes=12 * GIB, clock_mhz=2610)
PLAIN = dataclasses.replace(machine.read(Path("/nowhere")), container=False, gpus=(CARD,))


def state(*holders: Holder, used: int = GIB, reserved: int | None = GIB // 2, gpu: Gpu = CARD) -> State:
    return State(gpu, Glance(used_bytes=used, total_bytes=12 * GIB), Details(reserved_bytes=reserved), holders)


class Cards:
    """Cards played back, one look after the other, on a clock that moves only when somebody waits."""

    def __init__(self, *looks: State) -> None:
        self.looks, self.now_s = list(looks), 0.0
        self.said: list[str] = []

    def look(self) -> tuple[State, ...]:
        return (self.looks.pop(0) if len(self.looks) > 1 else self.looks[0],)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def clear(self, policy: str) -> preflight.Cleared:
        return preflight.clear(
            policy, PLAIN, say=self.said.append, look=self.look, clock=lambda: self.now_s, sleep=self.sleep
        )


# ── who ─────────────────────────────────────────────────────────────────────────────────────


def test_a_holder_is_named_with_pid_program_size_and_card() -> None:
    (found,) = preflight.foreign([state(Holder(os.getpid(), 3 * GIB), used=3 * GIB)], PLAIN)

    assert found.pid == os.getpid()
    assert str(found) == f"{found.process} (pid {os.getpid()}) holds 3.00 GiB of NVIDIA GeForce RTX 4070"
    assert found.process is not None


def test_in_a_container_a_pid_of_the_host_is_not_given_a_name_of_ours() -> None:
    inside = dataclasses.replace(PLAIN, container=True)

    (found,) = preflight.foreign([state(Holder(os.getpid(), 3 * GIB))], inside)

    assert found.process is None


def test_memory_that_nobody_owns_up_to_is_told_as_such() -> None:
    found = preflight.foreign([state(Holder(1, GIB), used=8 * GIB)], PLAIN)

    assert [(each.pid, each.used_bytes) for each in found] == [(1, GIB), (None, 13 * GIB // 2)]
    assert str(found[1]).startswith("programs that cannot be seen from here hold 6.50 GiB of")


@pytest.mark.parametrize(
    "card",
    [
        state(used=GIB // 2 + preflight.HELD_BYTES),  # what drivers and small contexts take
        state(used=8 * GIB, reserved=None),  # how much the driver keeps is not known
        state(Holder(1, None), used=8 * GIB),  # nor how much this one has
    ],
    ids=["little", "reserve unknown", "holder unknown"],
)
def test_what_cannot_be_told_apart_from_the_drivers_own_is_not_claimed(card: State) -> None:
    assert all(each.pid is not None for each in preflight.foreign([card], PLAIN))


def test_of_several_cards_each_is_named_by_its_number() -> None:
    found = preflight.foreign([state(Holder(1, GIB)), state(Holder(1, 2 * GIB), used=2 * GIB)], PLAIN)

    assert [each.card for each in found] == [f"0: {CARD.name}", f"1: {CARD.name}"]


# ── refuse, wait, go on ─────────────────────────────────────────────────────────────────────

BUSY, FREE = state(Holder(1, 4 * GIB), used=4 * GIB), state(used=GIB // 2)


def test_refuse_names_who_holds_memory_and_the_way_on() -> None:
    with pytest.raises(RunRefused, match=r"\(pid 1\) holds 4\.00 GiB of .*; end it, .*--gpu-in-use go-on"):
        Cards(BUSY).clear("refuse")


def test_refuse_runs_on_free_cards() -> None:
    assert Cards(FREE).clear("refuse").large == ()


def test_wait_ends_when_the_memory_is_given_back() -> None:
    cards = Cards(BUSY, BUSY, BUSY, FREE)

    found = cards.clear("wait")

    assert (found.waited_s, found.large) == (3.0, ())
    assert len(cards.said) == 1
    assert "waiting up to 60 s" in cards.said[0]


def test_wait_goes_on_after_a_minute_and_remembers_who_stayed() -> None:
    found = Cards(BUSY).clear("wait")

    assert found.waited_s == 60.0
    assert [(each.pid, each.used_bytes) for each in found.large] == [(1, 4 * GIB)]


def test_go_on_waits_for_nobody_and_remembers() -> None:
    cards = Cards(BUSY)

    assert [each.used_bytes for each in cards.clear("go-on").large] == [4 * GIB]
    assert (cards.now_s, cards.said) == (0.0, [])


@pytest.mark.parametrize(
    "harmless", [Holder(1, 3 * GIB // 2, draws=True), Holder(1, 200 << 20)], ids=["a desktop", "a small one"]
)
def test_a_desktop_and_small_things_hold_nobody_up(harmless: Holder) -> None:
    cards = Cards(state(harmless, used=GIB // 2 + (harmless.used_bytes or 0)))

    assert cards.clear("wait").waited_s == 0.0
    assert cards.clear("refuse").large == ()


# ── the wrong device, a slow one ────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "description",
    [
        "Intel(R) UHD Graphics 770 (ADL-S GT1)",
        "Intel(R) Iris(R) Xe Graphics (RPL-P)",
        "AMD Radeon Graphics (RADV RAPHAEL_MENDOCINO)",
        "AMD Radeon(TM) Graphics",
        "llvmpipe (LLVM 17.0.6, 256 bits)",
    ],
)
def test_an_engine_that_only_sees_the_gpu_inside_the_cpu_is_on_the_wrong_device(description: str) -> None:
    said = preflight.wrong_device([Device("Vulkan0", description)], PLAIN)

    assert said is not None
    assert f"Vulkan0 ({description})" in said
    assert CARD.name in said


@pytest.mark.parametrize(
    "devices",
    [
        [],
        [Device("CUDA0", "NVIDIA GeForce RTX 4070")],
        [Device("Vulkan0", "AMD Radeon RX 7900 XTX (RADV NAVI31)")],
        [Device("Vulkan0", "Intel(R) UHD Graphics 770"), Device("Vulkan1", "NVIDIA GeForce RTX 4070")],
    ],
    ids=["none", "CUDA", "a card", "both"],
)
def test_an_engine_that_sees_the_card_is_on_the_right_device(devices: Sequence[Device]) -> None:
    assert preflight.wrong_device(devices, PLAIN) is None


def test_where_there_is_no_other_gpu_the_one_inside_the_cpu_is_not_wrong() -> None:
    alone = dataclasses.replace(PLAIN, gpus=())

    assert preflight.wrong_device([Device("Vulkan0", "Intel(R) UHD Graphics 770")], alone) is None


@pytest.mark.parametrize(("clock", "low"), [(1500.0, True), (1600.0, False), (2610.0, False), (None, False)])
def test_a_card_that_works_far_below_its_clock_is_told(clock: float | None, low: bool) -> None:
    said = preflight.low_clock(clock, CARD)

    assert (said is not None) == low
    assert said is None or "1500 of 2610 MHz" in said


def test_a_large_holder_is_one_that_computes_with_more_than_a_little() -> None:
    held = Foreign("a card", 1, "python", preflight.HELD_BYTES + 1)

    assert preflight.is_large(held)
    assert preflight.is_large(dataclasses.replace(held, used_bytes=None))
    assert not preflight.is_large(dataclasses.replace(held, used_bytes=preflight.HELD_BYTES))
    assert not preflight.is_large(dataclasses.replace(held, draws=True))
