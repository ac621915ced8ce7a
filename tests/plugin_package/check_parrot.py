"""The conformance suite, as the author of an adapter runs it."""

from pathlib import Path

import pytest

from harness import registry
from harness.arms import parse_arms
from harness.testing.conformance import Conformance, Subject, model_file


class TestParrot(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Subject:
        weights = tmp_path_factory.mktemp("weights") / "seeds.gguf"
        weights.write_bytes(b"GGUF and nothing else")
        return Subject(
            backend=registry.backend("parrot"),
            model=model_file(weights),
            arms=("parrot", "parrot@cpu,t=2"),
            missing={"no-parrot": "1"},
        )


def test_it_stands_beside_the_engines_that_came_with_the_project() -> None:
    assert {"parrot", "llama-cpp", "ollama", "openai"} <= set(registry.backends())
    assert [str(arm) for arm in parse_arms("ollama,parrot@cpu,t=2")] == ["ollama", "parrot@cpu,t=2"]
    assert Path(registry.backend("parrot").find({}).path).parent.name == "site"
