/* What a socket asks for at a cgroup hook, and whose socket it is. */
#ifndef HYBRID_PROXY_TARGET_H
#define HYBRID_PROXY_TARGET_H

#include "packet.h"

#define PROCEED 1
#define MAPPED_PREFIX bpf_htonl(0xffff) /* ::ffff:0:0/96, an IPv4 address in an IPv6 socket */

ARRAY_MAP(host_netns, struct host_netns, 1);

/* An address and port as a socket names it; `mapped` remembers how to write an IPv4 one back. */
struct target {
	__u32 address[4];
	__be16 port;
	bool v6;
	bool mapped;
};

INLINE bool is_host_netns(struct bpf_sock_addr *ctx)
{
	__u64 netns = bpf_get_netns_cookie(ctx);
	struct host_netns *known;
	__u32 first = 0;

	known = bpf_map_lookup_elem(&host_netns, &first);
	if (!known)
		return false;
	if (known->teaching_socket && known->teaching_socket == bpf_get_socket_cookie(ctx))
		known->netns = netns;
	return known->netns == netns;
}

INLINE void read_target(struct bpf_sock_addr *ctx, struct target *t, const bool v6)
{
	__builtin_memset(t, 0, sizeof(*t));
	t->port = (__be16)ctx->user_port;
	if (!v6) {
		t->address[0] = ctx->user_ip4;
		return;
	}
	t->address[0] = ctx->user_ip6[0];
	t->address[1] = ctx->user_ip6[1];
	t->address[2] = ctx->user_ip6[2];
	t->address[3] = ctx->user_ip6[3];
	t->v6 = true;
	if (!t->address[0] && !t->address[1] && t->address[2] == MAPPED_PREFIX) {
		t->address[0] = t->address[3];
		t->address[1] = t->address[2] = t->address[3] = 0;
		t->v6 = false;
		t->mapped = true;
	}
}

INLINE bool is_to_localhost(const struct target *t)
{
	return t->v6 ? is_localhost(t->address, true) : is_localhost(t->address, false);
}

/* The address that the socket is bound to, zeros: none. Of one that is mapped the kernel keeps the IPv4 address, too.
 * All of it is read, whatever is used: the verifier refuses a pointer that the compiler moved to one or the other.
 */
INLINE void read_bound(struct bpf_sock *sk, __u32 *source, const struct target *t, const bool v6)
{
	__u32 mapped;

	if (!sk)
		return;
	mapped = READ_ONCE(sk->src_ip4);
	if (v6) {
		source[0] = READ_ONCE(sk->src_ip6[0]);
		source[1] = READ_ONCE(sk->src_ip6[1]);
		source[2] = READ_ONCE(sk->src_ip6[2]);
		source[3] = READ_ONCE(sk->src_ip6[3]);
	}
	if (!t->v6) {
		source[0] = mapped;
		source[1] = source[2] = source[3] = 0;
	}
}

/* The address that a datagram is sent from: the socket's, or one that came with the datagram (IP_PKTINFO). */
INLINE void read_source(struct bpf_sock_addr *ctx, __u32 *source, const bool v6)
{
	if (!v6) {
		source[0] = ctx->msg_src_ip4;
		return;
	}
	source[0] = ctx->msg_src_ip6[0];
	source[1] = ctx->msg_src_ip6[1];
	source[2] = ctx->msg_src_ip6[2];
	source[3] = ctx->msg_src_ip6[3];
}

#endif
