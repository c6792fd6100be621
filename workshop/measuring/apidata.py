"""A cluster of a wanted size behind a fake API server (TLS), in a process of its own: its work is not measured.

with ApiProcess(services=10_000, endpoints=10) as api:
    Kubernetes("node-0", kubeconfig=api.kubeconfig) ...
    api.send_endpoints(7, [0, 1, 2])
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hybrid_proxy.workshop.lab.network import Lab

ROOT = Path(__file__).resolve().parents[2]


class ApiProcess(AbstractContextManager["ApiProcess"]):
    """`workshop.lab.apiserver` as a child process.

    `kubeconfig` is the path of a kubeconfig for it. Objects are made by `service`, `endpoint_slice` and `node` of
    that module, by number. With a `lab` it listens on the lab's node, where an agent can reach it.
    """

    def __init__(
        self,
        services: int,
        endpoints: int,
        lab: Lab | None = None,
        health_checks: int = 0,
        watch_list: bool = False,
        window: int = 4096,
    ) -> None:
        command = [
            sys.executable, "-m", "hybrid_proxy.workshop.lab.apiserver", "--services", str(services),
            "--endpoints", str(endpoints), "--health-checks", str(health_checks), "--window", str(window),
            *(["--watch-list"] if watch_list else []),
        ]  # fmt: skip
        if lab is None:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        else:
            self._process = lab.start("node", command, output=subprocess.PIPE)
        assert self._process.stdout is not None
        self.kubeconfig = self._process.stdout.readline().strip()
        control = self._process.stdout.readline().strip()
        if not control:
            raise RuntimeError(f"the fake API server ended with status {self._process.wait()}")
        self._control = http.client.HTTPConnection(urlsplit(control).netloc, timeout=60)
        if lab is not None:
            self._control.sock = lab.socket("node")
            self._control.sock.connect((self._control.host, self._control.port))
            self._control.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __exit__(self, *_: object) -> None:
        self._control.close()
        self._process.terminate()
        self._process.wait(10)

    def control(self, name: str, **body: Any) -> dict[str, Any]:
        """One call of the control endpoint; see `workshop.lab.apiserver.ApiServer.control_app`."""
        self._ask(name, **body)
        return self._answer(name)

    def send_endpoints(self, index: int, which: list[int]) -> None:
        """Asks for these endpoints of service `index`, by number, and does not wait."""
        self._ask("endpoints", service=index, endpoints=which)

    def sent_endpoints(self) -> int:
        """Waits until the event of `send_endpoints` went out to a watcher: CLOCK_MONOTONIC in ns just before.

        Raises:
            RuntimeError: nobody watches.
        """
        written: int | None = self._answer("endpoints")["written_ns"]
        if written is None:
            raise RuntimeError("no watcher took the change within 2 s")
        return written

    def table(self) -> dict[str, set[str]]:
        """Returns the sockets behind each ClusterIP."""
        return {address: set(sockets) for address, sockets in self.control("table").items()}

    def churned(self) -> list[tuple[int, int | None, int]]:
        """Wait for the end of `control("churn")`; returns each change's service, and when it was written and made.

        Both are CLOCK_MONOTONIC in ns; written is None where nobody watched at that moment, or too long ago.
        """
        while (answer := self.control("churned"))["running"]:
            time.sleep(0.1)
        return [(index, written, made) for index, written, made in answer["writes"]]

    def _ask(self, name: str, **body: Any) -> None:
        self._control.request("POST", f"/control/{name}", json.dumps(body))

    def _answer(self, name: str) -> dict[str, Any]:
        answer = self._control.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"control {name}: {answer.status} {text.decode(errors='replace')}")
        found: dict[str, Any] = json.loads(text)
        return found
