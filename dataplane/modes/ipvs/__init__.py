"""Mode ipvs: virtual servers of the kernel's load balancer, sets, and a constant number of iptables rules."""
