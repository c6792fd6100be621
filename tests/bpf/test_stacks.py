"""A program and the functions that it calls share 512 bytes of stack. Linux 5.10 and 6.1 count frames in steps of 32.

Which kernel runs the tests does not matter: frames and calls are read from the objects.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import pytest

from hybrid_proxy.dataplane.modes.ebpf.maps import layout
from hybrid_proxy.workshop.benchmarks.verifier import objects

MOST, STEP = 512, 32  # MAX_BPF_STACK; check_max_stack_depth of Linux 5.10 and 6.1
FUNCTION = re.compile(r"^[0-9a-f]+ <(?!LBB)(\w+)>:$")
FRAME = re.compile(r"\(r10 - (\d+)\)|r\d \+= -(\d+)$")
CALL = re.compile(r"R_BPF_64_32\s+(\w+)$")


class Function(NamedTuple):
    """Bytes of its frame, and whom it calls."""

    frame: int
    calls: frozenset[str]


def functions_of(disassembly: str) -> dict[str, Function]:
    """By name. A frame ends where the lowest address on the stack is used."""
    found: dict[str, Function] = {}
    name = ""
    for line in disassembly.splitlines():
        if match := FUNCTION.match(line):
            name = match[1]
            found[name] = Function(0, frozenset())
        elif match := FRAME.search(line):
            offset = int(match[1] or match[2])
            found[name] = found[name]._replace(frame=max(found[name].frame, offset if offset <= MOST else 0))
        elif match := CALL.search(line):
            found[name] = found[name]._replace(calls=found[name].calls | {match[1]})
    return found


def deepest(functions: Mapping[str, Function]) -> tuple[int, tuple[str, ...]]:
    """The most bytes that a function needs with those it calls, and which these are."""

    @cache
    def below(name: str) -> tuple[int, tuple[str, ...]]:
        own = functions[name]
        bytes_below, names = max((below(called) for called in own.calls), default=(0, ()))
        return -(-max(own.frame, 1) // STEP) * STEP + bytes_below, (name, *names)

    return max(map(below, functions))


@pytest.mark.parametrize("name", objects())
def test_frames_of_a_program_and_of_what_it_calls_fit_the_stack(name: str) -> None:
    path = layout.OBJECTS / f"{name}.bpf.o"
    read = ["llvm-objdump", "--disassemble", "--reloc", "--no-show-raw-insn", str(path)]
    functions = functions_of(subprocess.run(read, capture_output=True, text=True, check=True).stdout)
    assert functions, path
    needed, chain = deepest(functions)
    assert needed <= MOST, f"{' > '.join(chain)}: {needed} bytes"


DISASSEMBLY = """
0000000000000000 <leaf>:
       0:	r1 = 1
       1:	*(u64 *)(r10 - 8) = r1
       2:	r2 = r10
       3:	r2 += -40
       4:	call 1
0000000000000028 <LBB0_1>:
       5:	exit
0000000000000030 <verb>:
       6:	*(u64 *)(r10 - 200) = r1
       7:	call -1
		0000000000000038:  R_BPF_64_32	leaf
0000000000000040 <program>:
       8:	call -1
		0000000000000040:  R_BPF_64_32	verb
       9:	call -1
		0000000000000048:  R_BPF_64_32	leaf
"""


def test_what_is_read_of_a_disassembly() -> None:
    functions = functions_of(DISASSEMBLY)
    assert functions == {
        "leaf": Function(40, frozenset()),
        "verb": Function(200, frozenset({"leaf"})),
        "program": Function(0, frozenset({"verb", "leaf"})),
    }
    assert deepest(functions) == (32 + 224 + 64, ("program", "verb", "leaf"))
