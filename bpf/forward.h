/* Forwards a translated packet by a route lookup of the program's own.
 *
 * A packet whose source became the node's cannot go through the stack: it came in at an interface, and the stack
 * accepts no packet from outside with an address of its own as the source. So the program asks the kernel's tables for
 * the next hop, the kernel resolves the neighbour, and the program sends the ICMP errors that the stack would send (too
 * big, expired).
 */
#ifndef HYBRID_PROXY_FORWARD_H
#define HYBRID_PROXY_FORWARD_H

#include "flow.h"
#include "length.h"
#include "nat.h"
#include "packet.h"
#include "reject.h"
#include "route.h"
#include "scratch.h"

/* The next hop of a packet that would be forwarded from the interface where it came in, and grows by `more` bytes. */
INLINE long fib_lookup_skb(struct __sk_buff *skb, struct bpf_fib_lookup *hop, const struct packet *p,
			   const struct tuple *to, __u32 more, const bool v6)
{
	return fib_lookup(skb, skb->ifindex, packet_length(skb, p, v6) + more, hop, to, v6);
}

/* Decrement the TTL, as every router does, in the packet. */
INLINE void store_dec_ttl(struct __sk_buff *skb, struct packet *p, const bool v6)
{
	const __u32 offset =
		v6 ? L3_OFFSET + offsetof(struct ipv6hdr, hop_limit) : L3_OFFSET + offsetof(struct iphdr, ttl);
	__u32 before = bpf_htons(p->ttl << 8), after = bpf_htons((p->ttl - 1) << 8);

	p->ttl -= 1;
	if (!v6)
		bpf_l3_csum_replace(skb, L3_OFFSET + offsetof(struct iphdr, check), before, after, 2);
	bpf_skb_store_bytes(skb, offset, &p->ttl, sizeof(p->ttl), 0);
}

/* The same before `rewrite`, which writes IPv4's with the addresses. */
INLINE void dec_ttl(struct __sk_buff *skb, struct packet *p, const bool v6)
{
	__u32 before = bpf_htons(p->ttl << 8), after = bpf_htons((p->ttl - 1) << 8);

	if (v6 || p->fragment.part == LATER_FRAGMENT) {
		store_dec_ttl(skb, p, v6);
		return;
	}
	p->ttl -= 1;
	p->ip_check = updated_checksum(p->ip_check, exchange(0, before, after));
}

/* Back out of the interface that the packet came in at: client and backend are one pod. */
INLINE enum step hairpin(struct __sk_buff *skb)
{
	swap_macs(skb);
	bpf_redirect(skb->ifindex, 0);
	return STEP_REDIRECT;
}

/* Out of the interface that the lookup found. The kernel writes the frame's addresses, and resolves the neighbour's if
 * need be. A packet that was routed already is routed once more: while it waits for the neighbour, the kernel would ask
 * its former route for another one (neigh_update), and send it there.
 */
INLINE enum step redirect_neigh(const struct bpf_fib_lookup *hop, bool routed)
{
	struct bpf_redir_neigh next = {.nh_family = hop->family};

	if (routed) {
		bpf_redirect_neigh(hop->ifindex, NULL, 0, 0);
		return STEP_REDIRECT;
	}
	if (hop->family == AF_INET6)
		copy_address(next.ipv6_nh, hop->ipv6_dst);
	else
		next.ipv4_nh = hop->ipv4_dst;
	bpf_redirect_neigh(hop->ifindex, &next, sizeof(next), 0);
	return STEP_REDIRECT;
}

/* The same to a neighbour whose address the lookup returned, without asking the kernel for it again. */
INLINE enum step rewrite_and_redirect(struct __sk_buff *skb, const struct packet *p, const struct tuple *to,
				      const struct bpf_fib_lookup *hop, const bool v6)
{
	__u16 mac[6];

	__builtin_memcpy(mac, hop->dmac, 6);
	__builtin_memcpy(mac + 3, hop->smac, 6);
	if (v6 || !rewrite_with_macs(skb, p, to, mac)) {
		rewrite(skb, p, to, v6);
		set_macs(skb, (const __u8 *)mac);
	}
	bpf_redirect(hop->ifindex, 0);
	return STEP_REDIRECT;
}

/* The size that the next hop has room for. Linux before 5.12 does not report it. */
INLINE __u32 size_that_fits(const struct bpf_fib_lookup *hop, __u32 length)
{
	return hop->tot_len < length ? hop->tot_len : SMALLEST_MTU;
}

/* Rewrite the packet to `space->result` and send it on. */
INLINE enum step forward(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	struct bpf_fib_lookup *hop = &space->hop;
	struct packet *p = &space->packet;
	long result;

	routed_tuple(&space->reply, &p->tuple, &space->result, space->flow.flags);
	result = fib_lookup_skb(skb, hop, p, &space->reply, 0, v6);
	NOTE(NOTE_HOP, hop->ifindex, result);
	if (result == BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return CALL(send_icmp_error, v6, skb, size_that_fits(hop, packet_length(skb, p, v6)));
	if (is_local_delivery(result)) {
		rewrite(skb, p, &space->result, v6);
		return STEP_PASS;
	}
	if (!has_next_hop(result))
		return drop(space, COUNT_DROP_NO_ROUTE);
	if (p->ttl <= 1)
		return CALL(send_icmp_error, v6, skb, TTL_EXPIRED);
	dec_ttl(skb, p, v6);
	if (result == BPF_FIB_LKUP_RET_SUCCESS && !neighbour_needs_refresh(hop, v6))
		return rewrite_and_redirect(skb, p, &space->result, hop, v6);
	rewrite(skb, p, &space->result, v6);
	return redirect_neigh(hop, (space->flow.flags & (FLOW_NODE | FLOW_REPLY)) == FLOW_NODE);
}

GLOBAL_VERB(enum step, forward, STEP_DROP)

#endif
