"""Commands of a lab that begin without importing anything: they are forked from a process that has imported all of it.

A run of the suite starts hybrid-proxy some two thousand times, and most of what a command costs is its imports. So one
process for each worker imports the agent and its commands once, in no lab, and forks for each command that it is asked
for. The child enters the namespace, the cgroup and the session that a new process would have, and becomes a child of
the worker, who waits for it and signals it as usual.

Tests of the start itself, of a process's memory, or of what /proc says about it are marked `cold`: they use real
processes.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from hybrid_proxy.controller.settings.documents import MODES
from hybrid_proxy.workshop.lab import namespace
from hybrid_proxy.workshop.lab.network import Lab, Place

__all__ = ["warm"]

FORKED: Final = frozenset({"hybrid_proxy.controller", "hybrid_proxy.workshop.lab.traffic", "tests.modes.ebpf.child"})
# What an agent and its commands import, at once or late; all modules of these packages, too.
MODULES: Final = (
    "numpy",
    "pyroute2",
    "hybrid_proxy.controller.cli",
    "hybrid_proxy.controller.agent.loop",
    "hybrid_proxy.controller.kubernetes.manifests",
    *(f"hybrid_proxy.dataplane.modes.{mode}.programmer" for mode in MODES),
    "hybrid_proxy.workshop.lab.traffic",
)
PACKAGES: Final = (
    "hybrid_proxy.controller.agent",
    "hybrid_proxy.controller.commands",
    "hybrid_proxy.controller.serving",
)
PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_ROOM: Final = socket.CMSG_SPACE(3 * array.array("i").itemsize)


class Child(subprocess.Popen[str]):
    """A process that another one forked and that is this one's child."""

    def __init__(self, pid: int, argv: Sequence[str], *streams: IO[str] | None) -> None:
        self.args, self.pid, self.returncode = argv, pid, None
        self.stdin, self.stdout, self.stderr = streams
        self.encoding = self.errors = None
        self.text_mode: bool | None = True
        self.pipesize = -1
        self._child_created = self._closed_child_pipe_fds = True
        self._communication_started = False
        self._input: Any = None
        self._sigint_wait_secs = 0.25
        self._waitpid_lock = threading.Lock()


class Nursery:
    """The process that has imported everything. Safe to use from several threads."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        root = str(Path(__file__).parents[1])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=root,
                env=os.environ | {"PYTHONPATH": root},
            )

    def spawn(
        self, place: Place, argv: Sequence[str], streams: Sequence[IO[str] | int | None],
        environment: Mapping[str, str], *, session: bool,
    ) -> Child:  # fmt: skip
        """As `Popen` of what `_is_forked` in that place, with these standard streams."""
        with contextlib.ExitStack() as ours:
            source, write_in = _stream(streams[0], ours, 0)
            out, read_out = _stream(streams[1], ours, 1)
            err, read_err = (out, None) if streams[2] == subprocess.STDOUT else _stream(streams[2], ours, 2)
            request = [argv, dict(environment), str(place.namespace), str(place.cgroup or ""), str(Path.cwd()), session]
            with self._lock, _adopting():
                self._line.sendmsg(
                    [json.dumps(request).encode()],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [source, out, err]))],
                )
                answer = self._line.recv(64)
            if not answer:
                raise RuntimeError("the process that commands are forked from is gone")
        return Child(int(answer), argv, write_in, read_out, read_err)

    def close(self) -> None:
        """End it; what it forked lives on."""
        self._line.close()
        self._process.wait(timeout=5 * namespace.DEADLINES)


def _stream(which: IO[str] | int | None, ours: contextlib.ExitStack, own: int) -> tuple[int, IO[str] | None]:
    """The descriptor that a child has as standard stream `own`, and, of a pipe, the end that is used here."""
    if which is None:
        return own, None
    if which == subprocess.DEVNULL:
        nothing = ours.enter_context(Path(os.devnull).open("r+"))  # noqa: SIM115 (ours closes it)
        return nothing.fileno(), None
    if which != subprocess.PIPE:
        return which if isinstance(which, int) else which.fileno(), None
    reading, writing = os.pipe()
    theirs, here = (writing, reading) if own else (reading, writing)
    ours.callback(os.close, theirs)
    return theirs, os.fdopen(here, "r" if own else "w")


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Until the block ends, orphans among this process's descendants become its children (prctl(2))."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# In a worker


@functools.cache
def _nursery() -> Nursery:
    """That of this process, made when it is first needed; it ends with this process."""
    return Nursery()


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Until the block ends, labs of this process fork their agents and commands."""
    really = Lab.spawn

    def spawn(lab: Lab, name: str, argv: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        if not _is_forked(*argv[:3]):
            return really(lab, name, argv, **more)
        streams = more.get("stdin", subprocess.DEVNULL), more.get("stdout"), more.get("stderr")
        session = bool(more.get("start_new_session"))
        return _nursery().spawn(lab[name], argv, streams, lab.environment(), session=session)

    Lab.spawn = spawn  # type: ignore[method-assign]
    try:
        yield
    finally:
        Lab.spawn = really  # type: ignore[method-assign]


def _is_forked(program: str, flag: str = "", what: str = "") -> bool:
    """Whether that begins a module of `FORKED`, or a program that is an argument: those of labs alter an agent."""
    return program == sys.executable and (flag == "-c" or (flag == "-m" and what in FORKED))


# In the process that forks


def main(descriptor: int) -> None:
    line = socket.socket(fileno=descriptor)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    folders = [(package, importlib.import_module(package).__path__) for package in PACKAGES]
    parts = (found.name for name, path in folders for found in pkgutil.walk_packages(path, f"{name}."))
    for module in (*MODULES, *parts):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    while True:
        request, ancillary, _, _ = line.recvmsg(1 << 20, _ROOM)
        if not request:
            return
        streams = array.array("i", ancillary[0][2])
        if _forked(line):
            break
        for stream in streams:
            os.close(stream)
    argv, environment, net, cgroup, folder, session = json.loads(request)
    _become(environment, net, cgroup, folder, streams, session=session)
    sys.argv, sys.orig_argv[:] = argv[2:], argv
    if argv[1] == "-m":
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        return
    sys.argv[0], program = "-c", compile(argv[2], "<string>", "exec")
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(program, vars(sys.modules["__main__"]))


def _forked(line: socket.socket) -> bool:
    """Whether this is the child; its number is told when it is an orphan."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child == 0:
            return True
        os.write(writing, str(child).encode())
        os._exit(0)
    os.waitpid(between, 0)
    line.send(os.read(reading, 64))
    os.close(reading)
    os.close(writing)
    return False


def _become(
    environment: dict[str, str], net: str, cgroup: str, folder: str, streams: Sequence[int], *, session: bool
) -> None:
    """What a new process there would be."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.closerange(3, 4096)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    # The cgroup first, as `namespace.command` does it: its folder is found in the first mounts.
    if cgroup:
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    with Path(net).open() as opened:
        if _LIBC.setns(opened.fileno(), namespace.CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {net}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
