"""Pods at a bridge whose packets netfilter sees (flannel and the bridge plugin, with br_netfilter)."""

from . import bridged

KIND = bridged("pods at a bridge, bridge-nf-call-iptables 1", filtered=True)
