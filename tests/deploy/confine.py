"""Run a command under a seccomp profile, as a container runtime does: `python confine.py PROFILE -- COMMAND ...`.

Reads the profile in the form of the OCI runtime specification and loads it with the runtimes' own library,
libseccomp. What the profile forbids fails in the command and in whatever it starts.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

ACTIONS = {"SCMP_ACT_ALLOW": 0x7FFF0000, "SCMP_ACT_ERRNO": 0x00050000}  # seccomp.h
COMPARE = {"SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}
UNKNOWN = -1  # __NR_SCMP_ERROR: a name of a later kernel


class Compare(ctypes.Structure):
    """`struct scmp_arg_cmp`."""

    _fields_ = (("index", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def action(name: str, code: int) -> int:
    """An action as libseccomp takes it; errors carry their number."""
    return ACTIONS[name] | (code if name == "SCMP_ACT_ERRNO" else 0)


def load(profile: dict[str, Any]) -> None:
    """Put this process and all its children under the profile.

    Raises:
        OSError: libseccomp or the kernel refuses it.
    """
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(
        library.seccomp_init(ctypes.c_uint32(action(profile["defaultAction"], profile["defaultErrnoRet"])))
    )
    for rule in profile["syscalls"]:
        tests = [Compare(a["index"], COMPARE[a["op"]], a["value"], a["valueTwo"]) for a in rule.get("args", ())]
        array = (Compare * len(tests))(*tests)
        what = ctypes.c_uint32(action(rule["action"], rule.get("errnoRet", 0)))
        for name in rule["names"]:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number != UNKNOWN:
                check(library.seccomp_rule_add_array(context, what, number, len(tests), array), name)
    check(library.seccomp_load(context), "seccomp_load")


def check(code: int, what: str) -> None:
    if code:
        raise OSError(-code, f"{what}: {os.strerror(-code)}")


if __name__ == "__main__":
    load(json.loads(Path(sys.argv[1]).read_text()))
    os.execvp(sys.argv[3], sys.argv[3:])
