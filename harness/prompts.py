# temporary stand-in so that the lead can integrate; builder MODEL replaces this whole file
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.contract import Prompt
from harness.model import Model


@dataclass(frozen=True)
class PromptSet:
    digest: str = "0" * 64

    def for_request(
        self, model: Model, index: int, *, tokens: int = 512, thinking: bool = False, room: int = 4096
    ) -> Prompt:
        key = model.answer_key
        assert key
        n = min(tokens, room)
        words = [key.word((index * 7919 + 37 * i * (index + 1)) % len(key.words)) for i in range(n)]
        return Prompt(f"p{index}", " ".join(words))

    def expected(self, model: Model, prompt: Prompt, tokens: int) -> str | None:
        key = model.answer_key
        return key and key.continuation(prompt.text.split(" ")[-1], tokens)


def load(path: Path | None) -> PromptSet:
    return PromptSet()
