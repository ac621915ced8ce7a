"""The records that pass between the harness and an engine."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

from harness import contract
from harness.contract import Arm, Backend, Engine, Placement, Session, Settings, Usage

RECORDS = [each for _, each in inspect.getmembers(contract, dataclasses.is_dataclass) if isinstance(each, type)]


def test_there_are_records() -> None:
    assert len(RECORDS) >= 10


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_record_is_frozen_and_slotted(record: type) -> None:
    assert record.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(record)


@pytest.mark.parametrize("record", [Usage, Settings], ids=lambda record: record.__name__)
def test_what_an_engine_does_not_say_is_none(record: type) -> None:
    """Only `truncated` and lists have a value of their own; what is asked for by default is set on purpose."""
    asked = {"context", "batch", "ubatch", "flash_attention", "kv_k", "kv_v", "rpc", "truncated", "depth"}
    for field in dataclasses.fields(record):
        assert field.name in asked or field.default is None


def test_an_arm_reads_as_it_is_typed() -> None:
    assert str(Arm("ollama")) == "ollama"
    assert (
        str(Arm("llama-cpp", Placement("ncmoe", 20), (("c", "2048"), ("ub", "64"))))
        == "llama-cpp@ncmoe=20,c=2048,ub=64"
    )
    assert str(Arm("llama-cpp", Placement("cpu-moe"))) == "llama-cpp@cpu-moe"


def test_equal_arms_are_one_key() -> None:
    assert len({Arm("a", Placement("ngl", 1)), Arm("a", Placement("ngl", 1))}) == 1


def test_an_engine_names_the_runner_that_is_not_its_own() -> None:
    engine = Engine(product="Ollama", version="0.32.15", path=Path("/x"), origin="PATH")
    assert str(engine) == "Ollama 0.32.15"
    assert str(dataclasses.replace(engine, runner="llama.cpp b1")) == "Ollama 0.32.15 + runner llama.cpp b1"


def test_the_contract_fits_on_one_screen() -> None:
    """What an adapter must write: a name and five methods, and six for its session."""

    def public(protocol: type) -> list[str]:
        return sorted(name for name in vars(protocol) if not name.startswith("_"))

    assert public(Backend) == ["command", "find", "open", "parse", "resolve"]
    assert public(Session) == ["count_tokens", "death", "read", "realised", "request", "settle"]
    assert list(Backend.__annotations__) == ["name"]
