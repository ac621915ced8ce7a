"""The client of this project as a program of its own, so that its CPU time can be told apart.

One request after the other through `harness.measure`, as a run does it; a JSON line for each sample.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from urllib.parse import urlsplit

from backends import llama_http, openai
from harness.contract import Chunk, Prompt, Request, Usage
from harness.measure import measure


class LlamaServer(openai.Server):
    """The dialect that is used with llama-server: each chunk says how many tokens there are so far."""

    def request(self, prompt: Prompt, max_tokens: int) -> Request:
        return llama_http.Server(urlsplit(self.url).port or 80, "none").completion(prompt, max_tokens)

    def read(self, line: bytes) -> Chunk | Usage | None:
        return llama_http.read_line(line)


DIALECTS = {"llama-server": LlamaServer, "openai": openai.Server}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--dialect", choices=DIALECTS, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    session = DIALECTS[options.dialect](options.url, "truth")
    with options.out.open("w", encoding="utf-8") as out:
        for number in range(options.requests):
            prompt = Prompt(str(number), f"[{number}] Explain how a hash table works.")
            sample = measure(session, prompt, options.tokens)
            found = {"ttft_s": sample.ttft_s, "decode_tps": sample.decode_tps, "gaps_s": sample.itl_s}
            out.write(json.dumps(found | {"tokens": sample.generated_tokens, "invalid": sample.invalid}) + "\n")


if __name__ == "__main__":
    main()
