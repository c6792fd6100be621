"""Waiting for programs, with a program that runs, and where the kernel refuses to wait."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from vm.features import missing

from hybrid_proxy.dataplane.kernel import grace
from hybrid_proxy.dataplane.kernel.bpf import BpfError, Object, has_helper, run_on_packet
from hybrid_proxy.dataplane.kernel.grace import wait_for_programs
from tests.clang import compile_bpf

HERE = Path(__file__).parent
BPF_LOOP = 181  # linux/bpf.h
BPF = {"x86_64": 321, "aarch64": 280}[platform.machine()]
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2  # linux/prctl.h, linux/seccomp.h
REFUSE, ALLOW = 0x00050000 | 22, 0x7FFF0000  # SECCOMP_RET_ERRNO | EINVAL
ATTEMPTS = 20
FALLBACK = 1.0  # seconds: less than the two that a node waits, more than the program takes

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Object]:
    if os.geteuid() != 0:
        pytest.skip("needs root (CAP_BPF)")
    if not has_helper(BPF_LOOP):
        missing("bpf_loop")
    loaded = Object(compile_bpf(HERE / "lingers.bpf.c", tmp_path_factory.mktemp("grace") / "lingers.bpf.o"))
    loaded.load()
    yield loaded
    loaded.close()


def refuse_bpf() -> None:
    """The calling thread gets EINVAL for bpf(2) from now on; other threads do not."""
    code = struct.pack("=HBBI", 0x20, 0, 0, 0) + struct.pack("=HBBI", 0x15, 1, 0, BPF)  # the number of the call
    code += struct.pack("=HBBI", 0x06, 0, 0, ALLOW) + struct.pack("=HBBI", 0x06, 0, 0, REFUSE)
    buffer = ctypes.create_string_buffer(code)
    filters = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filters, 0, 0):
        pytest.skip(f"this kernel filters no system calls: {os.strerror(ctypes.get_errno())}")


def in_a_thread(*steps: Callable[[], None]) -> None:
    """A filter of system calls stays for as long as its thread."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            for step in steps:
                step()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


def waits_while_it_runs(program: Object) -> None:
    """Fails when the call returns before the program, which is running, has ended."""
    marks = program.map("marks")
    view = marks.view(np.dtype(np.uint64))
    try:
        for _ in range(ATTEMPTS):  # a busy machine may look when it is over
            view[:] = 0
            runner = threading.Thread(target=run_on_packet, args=(program.program("lingers"), bytes(64)))
            runner.start()
            while not view[0]:
                time.sleep(0.001)
            running = not view[1]
            wait_for_programs()
            ended = bool(view[1])
            runner.join()
            assert ended, "it returned while the program was running"
            if running:
                return
        pytest.fail(f"the program ended {ATTEMPTS} times before it was looked at: this proves nothing")
    finally:
        del view
        marks.close()


def test_a_change_of_a_map_waits(program: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grace, "FALLBACK_SECONDS", 0)
    waits_while_it_runs(program)


def test_without_the_right_to_that_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grace, "FALLBACK_SECONDS", FALLBACK)

    def waits() -> None:
        with pytest.raises(BpfError, match="creating a map"):
            grace.await_grace_period()
        start = time.monotonic()
        wait_for_programs()
        assert time.monotonic() - start >= FALLBACK

    in_a_thread(refuse_bpf, waits)
