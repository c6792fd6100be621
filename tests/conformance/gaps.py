"""The expected failures, by name: what the eBPF datapath does not carry yet. Nothing else may fail as expected."""

from __future__ import annotations

from typing import Final

import pytest

__all__ = ["EBPF", "REASON", "is_gap", "mark", "name_of"]

REASON: Final = "the whole eBPF dataplane: it serves ClusterIPs for pods and for the node's own sockets so far"

# Test and case (or place and way), without mode and family; a test's name alone means all of its cases.
EBPF: Final[frozenset[str]] = frozenset()


def mark(item: pytest.Item) -> None:
    """A case of the eBPF mode that waits for the rest of its datapath is an expected failure, and strictly so."""
    spec = getattr(item, "callspec", None)
    if spec is not None and is_gap(spec.params.get("mode", ""), name_of(item)):
        item.add_marker(pytest.mark.xfail(reason=REASON, strict=True))


def is_gap(mode: str, name: str) -> bool:
    """Whether a case is not expected to work in that mode yet."""
    return mode == "ebpf" and (name in EBPF or name.partition("[")[0] in EBPF)


def name_of(item: pytest.Item) -> str:
    """`test_row[2.6-pod1-to-web-lb]`, `test_x[pod1-nodeport]`, or the name of a test without cases."""
    params = item.callspec.params  # type: ignore[attr-defined]
    base = item.name.partition("[")[0]
    if "case" in params:
        return f"{base}[{params['case'].name}]"
    parts = [params[key] for key in ("place", "way", "setting") if key in params]
    return f"{base}[{'-'.join(parts)}]" if parts else base
