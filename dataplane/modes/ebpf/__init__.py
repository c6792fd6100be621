"""Implements mode ebpf: rows for `bpf/`, the update protocol, attachments."""
