/* cgroup hooks for modes that translate by netfilter: a socket of the node that talks to a node port at 127.0.0.1 or
 * ::1 gets one of the node's addresses as its source. Its packets can then leave the node once netfilter has translated
 * their destination, and answers come back: with a loopback address as the source that takes route_localnet, which
 * opens whatever listens at loopback addresses to neighbours (CVE-2020-8558).
 */
#include "target.h"

#define PORT_WORDS 2048 /* of 32 ports each */

/* The node's addresses, in the order of the network; zeros: it has none of the family. */
struct own_sources {
	__u32 v4;
	__u32 v6[4];
};

enum served {
	SERVED,
	NOT_SERVED, /* the socket is bound to a loopback address, or its port is taken already */
};

ARRAY_MAP(own_sources, struct own_sources, 1);

/* Bits of TCP's node ports, then of UDP's. */
ARRAY_MAP(local_ports, __u32, 2 * PORT_WORDS);

ARRAY_MAP(served, __u64, 2);

INLINE void count_served(__u32 what)
{
	__u64 *counted = bpf_map_lookup_elem(&served, &what);

	if (counted)
		__sync_fetch_and_add(counted, 1);
}

INLINE bool is_node_port(__be16 port, __u32 protocol)
{
	__u32 number = bpf_ntohs(port), word = number >> 5, *bits;

	if (protocol == IPPROTO_UDP)
		word += PORT_WORDS;
	else if (protocol != IPPROTO_TCP)
		return false;
	bits = bpf_map_lookup_elem(&local_ports, &word);
	return bits && *bits >> (number & 31) & 1;
}

/* Does the socket talk to a node port of its own node? Then its target, and the sources that there are. */
INLINE struct own_sources *sources_for(struct bpf_sock_addr *ctx, struct target *t, __u32 protocol, const bool v6)
{
	__u32 first = 0;

	read_target(ctx, t, v6);
	if (!is_to_localhost(t) || !is_host_netns(ctx) || !is_node_port(t->port, protocol))
		return NULL;
	return bpf_map_lookup_elem(&own_sources, &first);
}

INLINE long bind4(struct bpf_sock_addr *ctx, const struct own_sources *own)
{
	struct sockaddr_in source = {.sin_family = AF_INET};

	source.sin_addr.s_addr = own->v4;
	return own->v4 ? bpf_bind(ctx, (struct sockaddr *)&source, sizeof(source)) : -1;
}

INLINE long bind6(struct bpf_sock_addr *ctx, const struct own_sources *own, const struct target *t)
{
	struct sockaddr_in6 source = {.sin6_family = AF_INET6};
	__u32 *address = source.sin6_addr.in6_u.u6_addr32;

	if (t->v6) {
		copy_address(address, own->v6);
	} else {
		address[2] = MAPPED_PREFIX;
		address[3] = own->v4;
	}
	return address[3] ? bpf_bind(ctx, (struct sockaddr *)&source, sizeof(source)) : -1;
}

INLINE int connect_socket(struct bpf_sock_addr *ctx, const bool v6)
{
	__u32 protocol = READ_ONCE(ctx->protocol), bound[4] = {};
	struct bpf_sock *sk = READ_ONCE(ctx->sk);
	struct own_sources *own;
	struct target target;
	long failed;

	own = sources_for(ctx, &target, protocol, v6);
	if (!own)
		return PROCEED;
	read_bound(sk, bound, &target, v6);
	if (is_zero_address(bound))
		failed = v6 ? bind6(ctx, own, &target) : bind4(ctx, own);
	else
		failed = target.v6 ? is_loopback(bound, true) : is_loopback(bound, false);
	count_served(failed ? NOT_SERVED : SERVED);
	return PROCEED;
}

INLINE int send_datagram(struct bpf_sock_addr *ctx, const bool v6)
{
	__u32 source[4] = {};
	struct own_sources *own;
	struct target target;

	own = sources_for(ctx, &target, IPPROTO_UDP, v6);
	if (!own)
		return PROCEED;
	read_source(ctx, source, v6);
	if (!is_zero_address(source)) {
		count_served(is_loopback(source, v6) ? NOT_SERVED : SERVED);
		return PROCEED;
	}
	if (v6) {
		ctx->msg_src_ip6[0] = own->v6[0];
		ctx->msg_src_ip6[1] = own->v6[1];
		ctx->msg_src_ip6[2] = own->v6[2];
		ctx->msg_src_ip6[3] = own->v6[3];
	} else {
		ctx->msg_src_ip4 = own->v4;
	}
	count_served(SERVED);
	return PROCEED;
}

SEC("cgroup/connect4")
int localhost_connect4(struct bpf_sock_addr *ctx)
{
	return connect_socket(ctx, false);
}

SEC("cgroup/connect6")
int localhost_connect6(struct bpf_sock_addr *ctx)
{
	return connect_socket(ctx, true);
}

SEC("cgroup/sendmsg4")
int localhost_sendmsg4(struct bpf_sock_addr *ctx)
{
	return send_datagram(ctx, false);
}

SEC("cgroup/sendmsg6")
int localhost_sendmsg6(struct bpf_sock_addr *ctx)
{
	return send_datagram(ctx, true);
}

char LICENSE[] SEC("license") = "GPL";
