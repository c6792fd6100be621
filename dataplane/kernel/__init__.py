"""The only doors to the kernel: libbpf, netlink, namespaces, cgroups."""
