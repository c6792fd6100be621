/* Foreign programs at our hooks. Each counts the packets that it sees, remembers the last IPv4 destination, and lets the
 * packet pass.
 */
#include "config.h"

#define AHEAD 0
#define BEHIND 1
#define MESH 2
#define GUARD 3

struct sight {
	__u64 count;
	__be32 destination;
	__u32 pad;
};

ARRAY_MAP(sights, struct sight, 4);

static void note(__u32 place, __be32 destination)
{
	struct sight *sight = bpf_map_lookup_elem(&sights, &place);

	if (!sight)
		return;
	__sync_fetch_and_add(&sight->count, 1);
	sight->destination = destination;
}

static int look(struct __sk_buff *skb, __u32 place)
{
	__be32 destination;

	if (skb->protocol == bpf_htons(ETH_P_IP) && !bpf_skb_load_bytes(skb, ETH_HLEN + 16, &destination, 4))
		note(place, destination);
	return TC_ACT_UNSPEC;
}

SEC("tc")
int plugin_ahead(struct __sk_buff *skb)
{
	return look(skb, AHEAD);
}

SEC("tc")
int plugin_behind(struct __sk_buff *skb)
{
	return look(skb, BEHIND);
}

/* Ends the hook: nothing behind it sees the packet, no filter either. */
SEC("tc")
int plugin_keeps(struct __sk_buff *skb)
{
	look(skb, BEHIND);
	return TC_ACT_OK;
}

SEC("cgroup/connect4")
int mesh_connect(struct bpf_sock_addr *ctx)
{
	note(MESH, ctx->user_ip4);
	return 1;
}

SEC("cgroup/connect4")
int guard_connect(struct bpf_sock_addr *ctx)
{
	note(GUARD, ctx->user_ip4);
	return ctx->user_port != bpf_htons(9);
}

char LICENSE[] SEC("license") = "GPL";
