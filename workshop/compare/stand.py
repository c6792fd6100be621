"""A lab with servers, clients and an agent in one mode; without an agent, it is the control."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hybrid_proxy.workshop.compare import objects
from hybrid_proxy.workshop.compare.plan import KUBE_PROXY, Settings
from hybrid_proxy.workshop.lab.agent import Agent, remove, resident
from hybrid_proxy.workshop.lab.network import NODE_NAMES, Lab, LabError
from hybrid_proxy.workshop.lab.objects import manifest
from hybrid_proxy.workshop.measuring.loads import Found, LoadFailed, argv
from hybrid_proxy.workshop.measuring.running import measured

if TYPE_CHECKING:
    from hybrid_proxy.workshop.compare.kube_proxy import KubeProxy

PATIENCE: Final = 900.0  # seconds for a start or a cleanup, also on an emulated processor
SCRIPT: Final = Path(__file__).with_name("latency.lua")
_PROBER: Final = Path(__file__).with_name("prober.py")
_CHANGE: Final = 120.0  # seconds in which a change must count
_END: Final = 120.0  # seconds that processes of an agent may take to end after `cleanup`, as a relay does
_CLIENT, _SERVER = "pod1", "pod2"

_NGINX: Final = """
daemon off;
user root;
worker_processes 1;
pid nginx.pid;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  keepalive_requests 1000000000;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  server {{ {listen} location / {{ default_type text/plain; return 200 "{body}"; }} }}
}}
"""


class Stand:
    """A lab in which a mode is measured. `agent` is None in the control's."""

    def __init__(self, lab: Lab, settings: Settings, mode: str | None, size: int) -> None:
        self.lab = lab
        self.settings = settings
        self.mode = mode
        self.folder = lab.folder / "manifests"
        self.prefix = ("taskset", "-c", str(max(os.sched_getaffinity(0)))) if settings.one_cpu else ()
        self.agent: Agent | None = None
        self._kube_proxy: KubeProxy | None = None
        self._port = objects.CHANGING[0]
        self._serve()
        if mode is not None:
            self._furnish(size)
            self.agent = Agent(lab, self.folder, mode)
            if mode.startswith(KUBE_PROXY):
                from hybrid_proxy.workshop.compare.kube_proxy import KubeProxy  # needs more libraries than the others

                self.agent = self._kube_proxy = KubeProxy(lab, self.folder, mode, settings.kube_proxy)
            self.agent.patience = PATIENCE

    @property
    def pause(self) -> float:
        """Seconds between two changes: a watch of manifests waits for the end of a burst, kube-proxy for a second."""
        return 0.15 if self._kube_proxy is None else 1.2

    @property
    def server(self) -> str:
        """The address of the pod with the servers, which the control's clients use."""
        return self.lab[_SERVER].address4

    def _furnish(self, size: int) -> None:
        self.folder.mkdir()
        items = objects.measured(self.server, NODE_NAMES["node"], self.settings.backends)
        items += objects.filler(size - objects.FEWEST, self.settings.backends)
        (self.folder / "cluster.json").write_text(manifest(items))
        self._write(self._port)

    def _write(self, port: int) -> int:
        """Writes the moving service's manifest; returns CLOCK_MONOTONIC in ns just before readers see it."""
        draft = self.folder / ".moving.draft"
        text = manifest(objects.moving(self.server, NODE_NAMES["node"], port))
        draft.write_text(text)
        now = time.monotonic_ns()
        draft.replace(self.folder / "moving.json")
        if self._kube_proxy is not None:
            self._kube_proxy.put(text.encode())
        return now

    def _serve(self) -> None:
        ports = []
        self.lab.serve(_SERVER, http=objects.CHANGING, udp=())
        with (self.lab.folder / "servers.log").open("a") as log:
            if shutil.which("nginx"):
                home = self.lab.folder / "nginx"
                home.mkdir()
                last = objects.HTTP_PORT + self.settings.backends
                listen = " ".join(f"listen {port} backlog=4096;" for port in range(objects.HTTP_PORT, last))
                (home / "nginx.conf").write_text(_NGINX.format(listen=listen, body="0123456789abcdef" * 8))
                program = ["nginx", "-p", f"{home}/", "-c", "nginx.conf", "-e", "stderr"]
                self.lab.start(_SERVER, [*self.prefix, *program], output=log, errors=log)
                ports.append(objects.HTTP_PORT)
            if shutil.which("iperf3"):
                program = ["iperf3", "-s", "-p", str(objects.STREAM_PORT)]
                self.lab.start(_SERVER, [*self.prefix, *program], output=log, errors=log)
                ports.append(objects.STREAM_PORT)
        for port in ports:
            self._wait_for(port)

    def _wait_for(self, port: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                with self.lab.socket(_CLIENT) as tried:
                    tried.settimeout(1)
                    tried.connect((self.server, port))
                    return
            except OSError as error:
                if time.monotonic() > deadline:
                    log = (self.lab.folder / "servers.log").read_text()[-500:]
                    raise LabError(f"no server at port {port} after a minute ({error}): {log}") from error
                time.sleep(0.02)

    # The agent

    def start(self) -> float:
        """Restarts the agent on a clean node, and returns the seconds until everything is programmed.

        Raises:
            LabError: it did not start; says why.
        """
        assert self.agent is not None
        self.end()
        return self.agent.timed_start(PATIENCE)

    def ready(self) -> None:
        assert self.agent is not None
        if not self.agent.running():
            self.start()

    def end(self) -> None:
        """Ends the agent and removes what it programmed.

        Raises:
            LabError: something stayed.
        """
        if self.agent is None or not self.agent.log.exists():
            return
        family = list(_family(self.agent.process.pid)) if self.agent.process and self.agent.running() else []
        self.agent.end()
        deadline = time.monotonic() + _END
        while alive := [pid for pid in family if resident(pid)]:  # a zombie has no memory
            if time.monotonic() > deadline:
                raise LabError(f"mode {self.mode} is cleaned up, but processes {alive} of it still run")
            time.sleep(0.01)

    def memory(self) -> float:
        """Returns the resident memory of the agent and its child processes, in MB (10^6 bytes)."""
        assert self.agent is not None
        assert self.agent.process is not None
        return sum(resident(pid).get("VmRSS", 0.0) for pid in _family(self.agent.process.pid))

    def close(self) -> None:
        if self._kube_proxy is not None:
            self._kube_proxy.api.stop()

    # Loads

    def load(self, name: str, *, plain: bool = False) -> Found:
        """Has the client make one load, to the service's address or, `plain`, to the server's own.

        Raises:
            LoadFailed: nothing was measured.
        """
        http = name in ("connections", "requests")
        service, port = (objects.HTTP, objects.HTTP_PORT) if http else (objects.STREAM, objects.STREAM_PORT)
        address = self.server if plain else service
        command = argv(name, address, port, self.settings.seconds, SCRIPT)
        return measured(name, self.lab.command(_CLIENT, [*self.prefix, *command]), self.settings.seconds, self._used)

    def _used(self) -> float:
        """Returns the CPU seconds of this lab's processes: clients, servers, the agent and its relay."""
        fields = (self.lab.cgroup / "cpu.stat").read_text().split()
        return int(fields[fields.index("usage_usec") + 1]) / 1e6

    def change(self) -> float:
        """Moves the moving service; returns the milliseconds until a connection reaches its other backend.

        Raises:
            LoadFailed: no connection did.
        """
        wanted = next(port for port in objects.CHANGING if port != self._port)
        program = [sys.executable, "-I", "-S", str(_PROBER), objects.MOVING, "80", str(wanted), str(_CHANGE)]
        prober = self.lab.start(_CLIENT, program, output=subprocess.PIPE)
        assert prober.stdout is not None
        if prober.stdout.readline() != "looking\n":
            raise LoadFailed(f"nobody answers at the service {objects.MOVING}:80")
        wrote = self._write(wanted)
        self._port = wanted
        reached = prober.stdout.readline()
        prober.wait()
        if not reached:
            raise LoadFailed(f"a changed backend was not reached within {_CHANGE:.0f} s")
        return (int(reached) - wrote) / 1e6

    def applied(self) -> float | None:
        """Returns the milliseconds of the last change from the agent's reading to the kernel; None: unknown."""
        assert self.agent is not None
        status = self.agent.status()
        last = status.change_seconds.last if status else None
        return None if last is None else 1000.0 * last


@contextlib.contextmanager
def stand(number: int, settings: Settings, mode: str | None, size: int) -> Iterator[Stand]:
    """Makes a stand in a new lab, which is removed at the end with what its agent programmed."""
    lab = Lab(f"cmp{os.getpid()}x{number}", 2)
    lab.up()
    made = None
    try:
        made = Stand(lab, settings, mode, size)
        yield made
    finally:
        if made is not None and made.agent is not None:
            made.close()
            remove(lab, PATIENCE)
        else:
            lab.down()


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                yield from _family(int(child))
