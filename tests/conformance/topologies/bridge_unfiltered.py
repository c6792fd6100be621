"""Pods at a bridge whose packets netfilter does not see: what goes from port to port has no rules."""

from . import bridged

_WHY = "an answer that goes from port to port is not translated back: the connection fails"
KIND = bridged(
    "pods at a bridge, bridge-nf-call-iptables 0",
    filtered=False,
    instead={mode: {"pod1-near-cluster": _WHY} for mode in ("nftables", "iptables", "ipvs")},
)
