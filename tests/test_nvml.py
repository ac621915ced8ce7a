"""Every answer of NVIDIA's library guarded on its own: refusals, numbers that mean "none", cards that go away."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import fake_nvml
import pytest
from fake_nvml import GIB, card

from harness import gpus, nvml
from harness.gpu import Details, Glance, Holder

ALL_BITS = 2**64 - 1
UNKNOWN = Glance()


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_nvml.remove(monkeypatch)
    monkeypatch.delenv(nvml.VISIBLE, raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    yield
    monkeypatch.undo()
    fake_nvml.forget()


@pytest.fixture
def driver(no_driver: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return partial(fake_nvml.install, monkeypatch)


def field(value: int, *, kind: int = 3, code: int = 0) -> types.SimpleNamespace:
    """One entry of nvmlDeviceGetFieldValues; kind 3 is an unsigned long long."""
    name = nvml.FIELD_TYPES[kind]
    return types.SimpleNamespace(nvmlReturn=code, valueType=kind, value=types.SimpleNamespace(**{name: value}))


WORKING: dict[str, Any] = {
    "UtilizationRates": types.SimpleNamespace(gpu=87, memory=40),
    "PowerUsage": 180_000,
    "Temperature": 66,
    "ClockInfo": 2475,
    "CurrentClocksEventReasons": 0x4,
    "CurrPcieLinkGeneration": 4,
    "CurrPcieLinkWidth": 16,
    "FieldValues": {186: field(181_500, kind=1), 197: field(5 * GIB), 198: field(7 * GIB)},
    "TotalEnergyConsumption": 4_200_000,
}


def test_a_card_that_works_is_seen_whole(driver: Callable[..., None]) -> None:
    driver(card(**WORKING))

    assert gpus.glances() == (
        Glance(
            used_bytes=GIB,
            total_bytes=12 * GIB,
            busy=0.87,
            power_w=181.5,  # at this instant, not over the last second
            celsius=66.0,
            clock_mhz=2475,
            memory_clock_mhz=2475,
            throttles=frozenset({"power cap"}),
            link_generation=4,
            lanes=16,
            sent_bytes=5 * GIB,
            received_bytes=7 * GIB,
        ),
    )
    assert gpus.joules() == 4200.0


@pytest.mark.parametrize("answer", sorted(WORKING))
@pytest.mark.parametrize("refusal", ["NotSupported", "NoPermission", "FunctionNotFound", "Unknown"])
def test_one_refused_answer_costs_no_other(driver: Callable[..., None], answer: str, refusal: str) -> None:
    driver(card(**WORKING | {answer: fake_nvml.Refused(refusal)}))

    (seen,) = gpus.glances()

    whole = {name: getattr(seen, name) for name in Glance.__dataclass_fields__}
    lost = {name for name, value in whole.items() if value is None}
    assert (
        lost
        == {
            "UtilizationRates": {"busy"},
            "PowerUsage": set(),
            "Temperature": {"celsius"},
            "ClockInfo": {"clock_mhz", "memory_clock_mhz"},
            "CurrentClocksEventReasons": {"throttles"},
            "CurrPcieLinkGeneration": {"link_generation"},
            "CurrPcieLinkWidth": {"lanes"},
            "FieldValues": {"sent_bytes", "received_bytes"},
            "TotalEnergyConsumption": set(),
        }[answer]
    )
    assert (gpus.joules() is None) == (answer == "TotalEnergyConsumption")
    assert seen.power_w == (180.0 if answer == "FieldValues" else 181.5)


@pytest.mark.parametrize("sentinel", [ALL_BITS, 2**32 - 1, None, "N/A", -1], ids=str)
@pytest.mark.parametrize("answer", ["PowerUsage", "Temperature", "ClockInfo", "TotalEnergyConsumption"])
def test_a_number_that_stands_for_none_is_none(driver: Callable[..., None], answer: str, sentinel: Any) -> None:
    driver(card(**{answer: sentinel}))

    assert gpus.glances() == (Glance(used_bytes=GIB, total_bytes=12 * GIB),)
    assert gpus.joules() is None


@pytest.mark.parametrize(
    "told",
    [
        field(181_500, kind=1, code=3),  # NotSupported, beside a value that was never written
        field(ALL_BITS),
        types.SimpleNamespace(nvmlReturn=0, valueType=99, value=None),
        types.SimpleNamespace(nvmlReturn=0, valueType=0, value=types.SimpleNamespace(dVal=1.5)),
        types.SimpleNamespace(),
    ],
    ids=["refused", "all bits", "of no known type", "a fraction", "empty"],
)
def test_a_field_is_believed_only_with_its_own_word_that_it_was_read(
    driver: Callable[..., None], told: types.SimpleNamespace
) -> None:
    driver(card(FieldValues=dict.fromkeys((83, 186, 197, 198), told)))

    (seen,) = gpus.glances()

    assert (seen.power_w, seen.sent_bytes, seen.received_bytes, gpus.joules()) == (None,) * 4


def test_bytes_over_pcie_are_believed_once_the_counter_is_seen_to_be_a_wide_one(driver: Callable[..., None]) -> None:
    driver(card(FieldValues={197: field(4 * GIB - 1), 198: field(4 * GIB)}))

    (seen,) = gpus.glances()

    assert (seen.sent_bytes, seen.received_bytes) == (None, 4 * GIB)


def test_energy_is_read_as_a_field_where_the_driver_has_it(driver: Callable[..., None]) -> None:
    driver(card(FieldValues={83: field(2500)}, TotalEnergyConsumption=9000))

    assert gpus.joules() == 2.5


@pytest.mark.parametrize(
    ("used", "total"), [(13 * GIB, 12 * GIB), (ALL_BITS, 12 * GIB), (0, ALL_BITS), (0, 64 << 20)], ids=str
)
def test_memory_that_cannot_be_is_none(driver: Callable[..., None], used: int, total: int) -> None:
    driver(card(used=used, total=total))

    assert gpus.glances() == (UNKNOWN,)
    assert gpus.memory() is None


@pytest.mark.parametrize("share", [101, ALL_BITS, -3])
def test_a_share_of_time_is_at_most_all_of_it(driver: Callable[..., None], share: int) -> None:
    driver(card(UtilizationRates=types.SimpleNamespace(gpu=share)))

    assert gpus.busy() is None


@pytest.mark.parametrize("answers", [{"MigMode": (1, 1)}, {"Name": "NVIDIA GB10"}], ids=["MIG", "unified memory"])
def test_no_figure_of_the_whole_card_is_a_budget_where_it_is_shared(
    driver: Callable[..., None], answers: dict[str, Any]
) -> None:
    driver(card(**WORKING | answers))

    (seen,) = gpus.glances()

    assert (seen.used_bytes, seen.total_bytes) == (None, None)
    assert seen.celsius == 66.0
    assert gpus.memory() is None


def test_energy_of_a_card_that_mig_splits_is_not_ours_to_claim(driver: Callable[..., None]) -> None:
    driver(card(**WORKING | {"MigMode": (1, 1)}))

    assert gpus.joules() is None


def test_energy_is_that_of_all_cards_or_not_known(driver: Callable[..., None]) -> None:
    driver(card(TotalEnergyConsumption=1000), card(TotalEnergyConsumption=2500))
    assert gpus.joules() == 3.5

    driver(card(TotalEnergyConsumption=1000), card())
    assert gpus.joules() is None


def test_memory_of_all_cards_is_unknown_while_one_of_them_says_nothing(driver: Callable[..., None]) -> None:
    lost = card(used=5 * GIB)
    driver(lost, card(used=3 * GIB))
    before = gpus.memory()
    lost["nvmlDeviceGetMemoryInfo"] = fake_nvml.Refused("GPU is lost")

    assert before is not None
    assert before.used_bytes == 8 * GIB
    assert gpus.memory() is None


def test_a_card_that_is_lost_while_a_run_goes_on_says_nothing_more(driver: Callable[..., None]) -> None:
    lost = card(**WORKING)
    driver(lost, card(**WORKING))
    before = gpus.joules()
    for name in lost:
        lost[name] = fake_nvml.Refused("GPU is lost")

    gone, there = gpus.glances()

    assert gone == dataclasses.replace(UNKNOWN, total_bytes=12 * GIB)
    assert there.celsius == 66.0
    assert before == 8400.0
    assert gpus.joules() is None  # a sum over fewer cards would look like energy given back


def test_who_holds_memory_is_told_largest_first_and_by_what_it_does(driver: Callable[..., None]) -> None:
    def process(pid: int, used: int | None) -> types.SimpleNamespace:
        return types.SimpleNamespace(pid=pid, usedGpuMemory=used)

    driver(
        card(
            ComputeRunningProcesses=[process(7, GIB), process(8, ALL_BITS)],
            GraphicsRunningProcesses=[process(9, 2 * GIB), process(7, 3 * GIB)],
        ),
        card(ComputeRunningProcesses=fake_nvml.Refused("NoPermission")),
    )

    assert gpus.holders() == ((Holder(7, 3 * GIB), Holder(9, 2 * GIB, draws=True), Holder(8, None)), None)


def test_without_a_driver_every_question_has_an_empty_answer() -> None:
    assert (gpus.cards(), gpus.glances(), nvml.details(), gpus.holders(), gpus.states()) == ((), (), (), (), ())
    assert (gpus.memory(), gpus.busy(), gpus.celsius(), gpus.throttles(), gpus.joules()) == (None,) * 5


# ── which cards ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["GPU-b"]),
        ("1,0", ["GPU-b", "GPU-a"]),
        ("GPU-a", ["GPU-a"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["GPU-a"]),  # CUDA stops at the first that is none
        ("MIG-1234", ["GPU-a", "GPU-b"]),
        ("1,1", ["GPU-b"]),
        ("²", []),  # a digit, and no number
    ],
)
def test_cards_that_engines_do_not_see_are_not_counted(
    driver: Callable[..., None], monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    monkeypatch.setenv(nvml.VISIBLE, visible)
    driver(card(UUID="GPU-a"), card(UUID="GPU-b"))

    assert [each.uuid for each in nvml.details()] == names


def test_numbers_of_unlike_cards_mean_what_cuda_was_told_to_mean(
    driver: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(nvml.VISIBLE, "0")
    driver(card("NVIDIA T400"), card("NVIDIA RTX 4090"))
    assert len(gpus.cards()) == 2  # CUDA may count the faster one first

    fake_nvml.forget()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [each.name for each in gpus.cards()] == ["NVIDIA T400"]


def test_what_the_driver_keeps_for_itself_is_told_where_it_tells_it(driver: Callable[..., None]) -> None:
    parts = types.SimpleNamespace(used=2 * GIB, total=12 * GIB, reserved=GIB // 2)
    driver(card(MemoryInfo=parts, UUID="GPU-a", DisplayActive=1, MaxPcieLinkWidth=16), card(MemoryInfo=parts))

    assert nvml.details() == (
        Details(uuid="GPU-a", reserved_bytes=GIB // 2, display=True, most_lanes=16),
        Details(reserved_bytes=GIB // 2),
    )
