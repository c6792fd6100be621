"""Connects to a service again and again until the wanted backend answers.

    python prober.py ADDRESS PORT WANTED SECONDS

Prints `looking` after the first answer, then the CLOCK_MONOTONIC time in nanoseconds at which the first connection to
that backend was there. The answer has the backend's port. It runs alone and imports nothing of this project.
"""

from __future__ import annotations

import json
import socket
import sys
import time

_REQUEST = b"GET / HTTP/1.1\r\nHost: compare\r\nConnection: close\r\n\r\n"


def main() -> int:
    """Returns 1 if it did not answer in time."""
    address, port, wanted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    deadline = time.monotonic() + float(sys.argv[4])
    looking = False
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((address, port), 2) as connection:
                connected = time.monotonic_ns()
                connection.sendall(_REQUEST)
                answer = b""
                while piece := connection.recv(4096):
                    answer += piece
        except OSError:
            answer, connected = b"", 0
        if not looking and answer:
            looking = True
            print("looking", flush=True)
        elif answer and json.loads(answer.partition(b"\r\n\r\n")[2])["local"][1] == wanted:
            print(connected, flush=True)
            return 0
        time.sleep(0.0003)
    return 1


if __name__ == "__main__":
    sys.exit(main())
