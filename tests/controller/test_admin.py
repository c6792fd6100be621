"""The admin socket by itself."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from pathlib import Path
from typing import Any

from controller.serving.admin import REST_SECONDS, Server


class _Counting(Server):
    """Notes when it tried to accept."""

    def __init__(self, path: Path) -> None:
        self.tries: list[float] = []
        self.tried_thrice = threading.Event()
        super().__init__(path, lambda request: request)

    def get_request(self) -> Any:
        self.tries.append(time.monotonic())
        if len(self.tries) == 3:
            self.tried_thrice.set()
        return super().get_request()


def test_accepting_rests_while_descriptors_lack(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = _Counting(tmp_path / "socket")
    try:
        with socket.socket(socket.AF_UNIX) as asker:
            asker.settimeout(10)
            free = os.dup(asker.fileno())
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            asker.connect(str(tmp_path / "socket"))
            assert server.tried_thrice.wait(60)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert server.tries[2] - server.tries[0] >= 2 * REST_SECONDS, "it does not spin"
            asker.sendall(b'{"command": "x"}\n')
            assert asker.recv(100) == b'{"command":"x"}\n'
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        server.close()
