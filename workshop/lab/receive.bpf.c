/* The other end of a veth must run an XDP program, any one, to be given frames by XDP. */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

SEC("xdp")
int take(struct xdp_md *ctx)
{
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "GPL";
