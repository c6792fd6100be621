/* XDP at an uplink whose driver runs it: packets of known flows between clients beyond the node and backends on other
 * nodes, in both directions, leave before the stack sees them. All else goes on to tc.
 */
#include "driver.h"

/* One function for each family, so that their frames do not add up. */
static __noinline int forward_transit4(struct xdp_md *ctx)
{
	return forward_transit(ctx, false);
}

static __noinline int forward_transit6(struct xdp_md *ctx)
{
	return forward_transit(ctx, true);
}

SEC("xdp")
int xdp_uplink(struct xdp_md *ctx)
{
	struct ethhdr *frame = (void *)(long)ctx->data;

	if ((void *)(frame + 1) > (void *)(long)ctx->data_end)
		return XDP_PASS;
	if (frame->h_proto == bpf_htons(ETH_P_IP))
		return forward_transit4(ctx);
	if (frame->h_proto == bpf_htons(ETH_P_IPV6))
		return forward_transit6(ctx);
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "GPL";
