"""Programs are loaded whatever else the kernel wants of the thread that loads them."""

from __future__ import annotations

import signal
from contextlib import closing
from itertools import count

import pytest

from hybrid_proxy.dataplane.kernel.bpf import Object
from hybrid_proxy.dataplane.modes.ebpf.maps.abi import OBJECTS

pytestmark = pytest.mark.root

EVERY = 0.001  # seconds: the verifier takes a hundred times as long, and libbpf tries five times


def test_signals_do_not_keep_the_verifier_from_finishing() -> None:
    arrived = count()
    before = signal.signal(signal.SIGALRM, lambda *_: next(arrived))
    try:
        with closing(Object(OBJECTS / "hooks.bpf.o")) as programs:
            signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)
            try:
                programs.load()
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert min(map(programs.program, programs.program_names)) > 0
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not mask, "signals are let in again"
    assert next(arrived) > 0
