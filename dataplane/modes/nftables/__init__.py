"""The nftables mode: constant rules, services as elements of maps."""
