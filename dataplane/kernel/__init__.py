"""The kernel interfaces, which nothing else opens: libbpf, netlink, namespaces, cgroups."""
