"""Runs the real agent on a lab's node, as a child process."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from hybrid_proxy.controller.errors import ControllerError
from hybrid_proxy.controller.serving.admin import ask, socket_path
from hybrid_proxy.controller.serving.protocol import AgentStatus, GetStatus, StatusAnswer
from hybrid_proxy.controller.settings.config import ADMIN_SOCKET
from hybrid_proxy.workshop.lab import namespace
from hybrid_proxy.workshop.lab.network import CLUSTER_CIDRS, NODE_NAMES, RUN, Lab, LabError


class Agent:
    """One `hybrid-proxy run` on the node of a lab; may be started, killed and started again.

    Args:
        lab: a lab that stands.
        manifests: folder that the agent watches.
        mode: `--proxy-mode`.
        flags: more flags of `run`.
        place: the node, where there are several. A second one leaves the sockets of its processes alone.
        under: a command that starts another one with less than root has, such as `setpriv ...`.
    """

    ready = "after the start"  # what its log says when everything is programmed

    def __init__(
        self,
        lab: Lab,
        manifests: Path,
        mode: str = "ebpf",
        flags: Sequence[str] = (),
        place: str = "node",
        under: Sequence[str] = (),
    ) -> None:
        self.lab = lab
        self.manifests = manifests
        self.kubeconfig: Path | str | None = None  # of an API server that it reads instead
        self.hostname, self.cluster_cidr = NODE_NAMES[place], ",".join(CLUSTER_CIDRS)
        self.mode = mode
        self.flags = tuple(flags)
        self.place = place
        self.under = tuple(under)
        second = "" if place == "node" else f"-{place}"
        self.log = lab.folder / f"agent{second}.log"
        self.process: subprocess.Popen[str] | None = None
        self.patience = 60.0  # seconds for another command

    @functools.cached_property
    def socket(self) -> Path:
        """The path of its socket: the default of its network namespace, so that commands there need no flag."""
        with self.lab.inside(self.place):
            return socket_path(ADMIN_SOCKET)

    @property
    def argv(self) -> list[str]:
        """The command that runs it, as a person would type it inside the node."""
        return [
            *self.under, *_PROXY, "run",
            *(("--kubeconfig", str(self.kubeconfig)) if self.kubeconfig else ("--manifests", str(self.manifests))),
            "--proxy-mode", self.mode,
            "--strict-mode",
            "--hostname-override", self.hostname,
            "--cluster-cidr", self.cluster_cidr,
            *(("--cgroup", str(self.lab.cgroup)) if self.place == "node" else ("--socket-scope", "off")),
            "--metrics-bind-address", "",
            *self.flags,
        ]  # fmt: skip

    @property
    def configuration(self) -> Path:
        return self.log.with_suffix(".conf")

    def write_configuration(self) -> None:
        """Write a file with which `hybrid-proxy run --config` on the node starts the same agent.

        Raises:
            LabError: it was not written; says why.
        """
        argv = [*self.argv, "--write-config-to", str(self.configuration)]
        done = self.lab.run(self.place, argv, timeout=self.patience)
        if done.returncode:
            raise LabError(f"the agent's configuration was not written: {done.stderr.strip()}")

    def start(self, timeout: float = 60.0, *, follow: bool = False) -> None:
        """Start it and wait until everything in the folder is programmed; with `follow` by its configuration's file.

        Raises:
            LabError: it ended, or was not ready in time; with the end of its log.
        """
        self._refuse_the_machine_itself()
        with self.log.open("a") as log:
            argv = [*self.under, *_PROXY, "run", "--config", str(self.configuration)] if follow else self.argv
            self.process = self.lab.start(self.place, argv, output=log, errors=log)
        self.wait(lambda status: status.synced, timeout, "ready")

    def timed_start(self, timeout: float = 60.0) -> float:
        """Start it with an empty log; seconds from the fork until its log says that everything is programmed.

        Raises:
            LabError: it ended, or was not ready in time; with the end of its log.
        """
        self._refuse_the_machine_itself()
        with self.log.open("w") as log:
            start = time.monotonic()
            self.process = self.lab.start(self.place, self.argv, output=log, errors=log)
        with self.log.open() as log:
            text = ""
            while self.ready not in text:
                text += log.read()
                now = time.monotonic()
                if self.process.poll() is not None or now - start > timeout:
                    raise LabError(f"the agent did not get ready:\n{self.tail()}")
                time.sleep(0.002)
        return now - start

    @contextlib.contextmanager
    def serving(self, timeout: float = 60.0) -> Iterator[Self]:
        """Start it; at the end it is stopped, and what it left is removed."""
        self.start(timeout)
        try:
            yield self
        finally:
            self.end()

    def end(self) -> None:
        """Stop it and remove what it left in the namespace.

        Raises:
            LabError: something stayed.
        """
        if self.running():
            self.terminate()
        cleaned = self.cleanup()
        if cleaned.returncode:
            raise LabError(f"cleaning up after mode {self.mode} failed: {cleaned.stderr.strip()}")

    def _refuse_the_machine_itself(self) -> None:
        """Refuses to attach anything to the network namespace or the cgroup of the machine that runs the lab."""
        if namespace.is_current(self.lab[self.place].namespace):
            raise LabError("the node's namespace is the one that the lab was started in: no agent is started there")
        if self.lab.cgroup.resolve() == namespace.cgroup2_root().resolve():
            raise LabError("the lab's cgroup is the machine's root cgroup: no agent is started there")

    def wait(self, reached: Callable[[AgentStatus], object], timeout: float = 10.0, what: str = "there") -> AgentStatus:
        """Ask for the status until `reached(status)`; returns that status."""
        began = time.monotonic()
        while True:
            status = self.status()
            if status is not None and reached(status):
                return status
            if self.process is not None and self.process.poll() is not None:
                raise LabError(f"the agent ended with exit code {self.process.returncode}:\n{self.tail()}")
            waited = time.monotonic() - began
            if waited > timeout * namespace.DEADLINES:
                raise LabError(f"the agent is not {what} in time, its status is {status}:\n{self.tail()}")
            time.sleep(min(max(0.05, waited / 20), 0.5))  # each question takes the agent some time

    def status(self) -> AgentStatus | None:
        """Returns the status, or None while the agent does not answer."""
        try:
            return ask(str(self.socket), GetStatus(), StatusAnswer).status
        except (ControllerError, OSError):
            return None

    def running_status(self) -> AgentStatus:
        """Returns the status of an agent that must answer.

        Raises:
            LabError: it does not; with the end of its log.
        """
        status = self.status()
        if status is None:
            raise LabError(f"the agent does not answer:\n{self.tail()}")
        return status

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.lab.run(self.place, [*_PROXY, *arguments], timeout=self.patience)

    def kill(self) -> None:
        """Sends SIGKILL, so that it cannot clean up."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        assert self.process is not None, "the agent was not started"
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout=10 * namespace.DEADLINES)
        finally:
            self.process = None

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def processor_seconds(self) -> float:
        """Returns the CPU seconds of all its threads, user and system."""
        assert self.process is not None
        return time.clock_gettime(-8 * (self.process.pid + 1) + 2)  # MAKE_PROCESS_CPUCLOCK, linux/posix-timers.h

    def cleanup(self) -> subprocess.CompletedProcess[str]:
        return self.command("cleanup", "--cgroup", str(self.lab.cgroup))

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text().splitlines()[-lines:]) if self.log.exists() else "(no log)"


def resident(pid: int) -> dict[str, float]:
    """Returns VmHWM, VmRSS, RssAnon, RssFile and RssShmem of a process in MB (10^6 bytes); empty once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    kept = (line.split() for line in lines if line.startswith(("VmHWM", "VmRSS", "Rss")))
    return {fields[0].rstrip(":"): int(fields[1]) * 1024 / 1e6 for fields in kept}


def remove(lab: Lab, patience: float = 60.0) -> None:
    """Ends all processes of a lab, cleans up after its agent (within so many seconds), and removes the lab.

    Raises:
        LabError: the lab is gone, but `cleanup` failed before: pins of the agent may be left.
    """
    lab.end_processes()
    agent = Agent(lab, lab.folder / "manifests")
    agent.patience = patience
    cleaned = agent.cleanup() if "node" in lab.places else None
    lab.down()
    if cleaned is not None and cleaned.returncode:
        raise LabError(f"the lab is removed, but cleaning up after its agent failed: {cleaned.stderr.strip()}")


def remove_forsaken(prefix: str) -> None:
    """Removes the labs of processes that have ended, one process at a time.

    Args:
        prefix: with which their names begin; then comes the number of the process, and there may be an `x` and a count.
    """
    RUN.mkdir(parents=True, exist_ok=True)
    named = re.compile(rf"{re.escape(prefix)}(\d+)(x\d+)?")
    with (RUN / ".leftovers").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for folder in RUN.glob(f"{prefix}*"):
            owner = named.fullmatch(folder.name)
            if owner and not Path("/proc", owner[1]).exists():
                with contextlib.suppress(ControllerError):
                    remove(Lab.standing(folder.name))
                Lab(folder.name, 0).down()


_PROXY = (sys.executable, "-m", "hybrid_proxy.controller")
