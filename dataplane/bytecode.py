"""PURE. Builds programs of classic BPF for iptables' match bpf."""

from __future__ import annotations

_LOAD, _TO_X, _EQUALS_X, _RETURN = 0x20, 0x07, 0x1D, 0x06  # ld [k]; tax; jeq x; ret k (linux/bpf_common.h)


def same_addresses(family: int) -> str:
    """Returns a program that matches packets whose source is their destination, which no other match can compare.

    Offsets are those of the IP header (RFC 791, RFC 8200).
    """
    source, target, words = (12, 16, 1) if family == 4 else (8, 24, 4)
    code = []
    for word in range(words):
        differs = 4 * (words - 1 - word) + 1  # instructions to skip
        code += [(_LOAD, 0, 0, source + 4 * word), (_TO_X, 0, 0, 0), (_LOAD, 0, 0, target + 4 * word)]
        code += [(_EQUALS_X, 0, differs, 0)]
    code += [(_RETURN, 0, 0, 0xFFFF), (_RETURN, 0, 0, 0)]
    return ",".join([str(len(code)), *(" ".join(map(str, instruction)) for instruction in code)])
