"""Pods at a bridge whose packets netfilter does not see: what goes from port to port has no rules."""

from . import bridged

KIND = bridged("pods at a bridge, bridge-nf-call-iptables 0", filtered=False, lost=("nftables", "iptables", "ipvs"))
