"""Implements mode ebpf: fills maps for the programs in `bpf/`, loads the programs, and attaches them."""
