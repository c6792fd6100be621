"""The eBPF mode: rows for `bpf/`, the update protocol, attachments."""
