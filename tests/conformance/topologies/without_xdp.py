"""An uplink whose driver has no XDP, as those of virtual functions: with --xdp=native, tc serves it."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_proxy.dataplane.reports import XdpHooks

from ..kit import Bench, Service
from . import Kind, moved


def _tc_serves(bench: Bench, _: Mapping[str, Service]) -> str:
    ebpf = bench.agent.running_status().dataplane.ebpf
    want = XdpHooks("native", [], {"eth1": "the driver has no native XDP"})
    return "" if ebpf is None or ebpf.xdp == want else f"not as said: {ebpf.xdp}"


KIND = Kind(
    "an uplink without XDP, --xdp=native",
    {"node": f"link add eth1 link eth0 type macvlan mode private\n{moved('node', 'eth1')}"},
    needs="macvlan",
    flags=("--xdp=native",),
    proves=_tc_serves,
    rare=True,
)
