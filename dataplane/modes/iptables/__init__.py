"""Mode iptables: rules of xtables, as kube-proxy's mode of that name, behind trees of chains."""
