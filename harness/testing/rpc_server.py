"""A program that pretends to be ggml-rpc-server: it listens, and that is all that a fake engine needs of it."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("ggml-rpc-server")
    parser.add_argument("-H", "--host", default="127.0.0.1")
    parser.add_argument("-p", "--port", type=int, default=50052)
    parser.add_argument("-t", "--threads", type=int)
    asked = parser.parse_args(arguments)
    with socket.create_server((asked.host, asked.port)) as listener:
        while True:
            listener.accept()[0].close()


if __name__ == "__main__":
    main()
