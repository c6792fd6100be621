"""Pods in the node's own network: their sockets are in pods' cgroups, and their addresses are the node's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hybrid_proxy.workshop.lab.network import Lab

from ..cases import own
from ..probes import To
from . import Check, Kind


@contextmanager
def _hosted(lab: Lab) -> Iterator[None]:
    lab.places["hosted"] = replace(lab["node"], name="hosted", cgroup=lab["pod1"].cgroup)
    try:
        yield
    finally:
        del lab.places["hosted"]


# In mode ipvs ClusterIPs are the node's own addresses: such a client's is one, until it is masqueraded.
_CLUSTER = [
    Check("hosted", name, "cluster", To(frozenset({pod}), "any"), large=True)
    for name, pod in (("far", "remote1"), ("near", "pod2"))
]
_NODE_PORTS = [Check("hosted", "far", "nodeport", own("remote1")), Check("hosted", "names", "nodeport", own("remote1"))]
KIND = Kind("hostNetwork pods as clients", {}, begin=_hosted, checks=(*_CLUSTER, *_NODE_PORTS), rare=True)
