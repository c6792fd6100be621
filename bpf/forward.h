/* Send a translated packet on by our own route lookup.
 *
 * A packet whose source became the node's cannot go through the stack: it came in at an interface, and the stack takes
 * nothing from outside that claims to be from here. The kernel's tables say where it goes, the kernel resolves the
 * neighbour; what the stack would have said to the sender (too big, expired) is said here.
 */
#ifndef HYBRID_PROXY_FORWARD_H
#define HYBRID_PROXY_FORWARD_H

#include "reject.h"
#include "source.h"

#define SMALLEST_MTU 1280
#define GSO_BY_FRAGS 0xffff /* linux/skbuff.h: SCTP's packets in one, each as long as its sender made it */
#define JUMBO_HEADER 8	    /* hop-by-hop options with the length (RFC 2675), IPV6_TLV_JUMBO alone */

/* Does it stand for more than IPv6's header can say? */
INLINE bool is_jumbo(struct __sk_buff *skb, const bool v6)
{
	return v6 && skb->len > L3_OFFSET + sizeof(struct ipv6hdr) + 0xffff;
}

/* Bytes of the IP packet, of the largest of those that it stands for. Linux before 7.0 writes the length of BIG TCP's
 * into a header that it takes away when it cuts them.
 */
INLINE __u32 packet_length(struct __sk_buff *skb, const struct packet *p, const bool v6)
{
	__u32 segment = skb->gso_size, length = p->l4 - L3_OFFSET;

	if (!segment)
		return skb->len - L3_OFFSET;
	if (segment == GSO_BY_FRAGS)
		return SMALLEST_MTU;
	if (is_jumbo(skb, v6) && length > sizeof(struct ipv6hdr))
		length -= JUMBO_HEADER;
	return length + (p->tuple.protocol == IPPROTO_TCP ? p->header : sizeof(struct udphdr)) + segment;
}

/* The next hop of a packet that was in the stack's hands and grows by `more` bytes. */
INLINE long fib_lookup_skb(struct __sk_buff *skb, struct bpf_fib_lookup *hop, const struct packet *p,
			   const struct tuple *to, __u32 more, const bool v6)
{
	return fib_lookup(skb, skb->ifindex, packet_length(skb, p, v6) + more, hop, to, v6);
}

/* One hop less to live, as every router does; before `rewrite`, which writes IPv4's with the addresses. */
INLINE void dec_ttl(struct __sk_buff *skb, struct packet *p, const bool v6)
{
	const __u32 offset =
		v6 ? L3_OFFSET + offsetof(struct ipv6hdr, hop_limit) : L3_OFFSET + offsetof(struct iphdr, ttl);
	__u32 before = bpf_htons(p->ttl << 8), after = bpf_htons((p->ttl - 1) << 8);

	p->ttl -= 1;
	if (!v6 && p->fragment.part != LATER_FRAGMENT) {
		p->ip_check = updated_checksum(p->ip_check, exchange(0, before, after));
		return;
	}
	if (!v6)
		bpf_l3_csum_replace(skb, L3_OFFSET + offsetof(struct iphdr, check), before, after, 2);
	bpf_skb_store_bytes(skb, offset, &p->ttl, sizeof(p->ttl), 0);
}

/* Out of the interface that the lookup named; the kernel writes the frame's addresses, and asks for them if need be. */
INLINE int redirect_neigh(const struct bpf_fib_lookup *hop)
{
	struct bpf_redir_neigh next = {.nh_family = hop->family};

	if (hop->family == AF_INET6)
		copy_address(next.ipv6_nh, hop->ipv6_dst);
	else
		next.ipv4_nh = hop->ipv4_dst;
	return bpf_redirect_neigh(hop->ifindex, &next, sizeof(next), 0);
}

/* The same to a neighbour whose address the lookup told, without asking the kernel for it again. */
INLINE int rewrite_and_redirect(struct __sk_buff *skb, const struct packet *p, const struct tuple *to,
				const struct bpf_fib_lookup *hop, const bool v6)
{
	__u16 mac[6];

	__builtin_memcpy(mac, hop->dmac, 6);
	__builtin_memcpy(mac + 3, hop->smac, 6);
	if (v6 || !rewrite_with_macs(skb, p, to, mac)) {
		rewrite(skb, p, to, v6);
		set_macs(skb, (const __u8 *)mac);
	}
	return bpf_redirect(hop->ifindex, 0);
}

/* Rewrite the packet to `space->result` and send it on. Linux before 5.12 does not tell the size that would fit. */
INLINE int forward(struct __sk_buff *skb, struct scratch *space, __u32 unused, const bool v6)
{
	struct bpf_fib_lookup *hop = &space->hop;
	struct packet *p = &space->packet;
	long result = fib_lookup_skb(skb, hop, p, &space->result, 0, v6);

	NOTE(NOTE_HOP, hop->ifindex, result);
	if (result == BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return CALL(send_icmp_error, skb,
			    hop->tot_len < packet_length(skb, p, v6) ? hop->tot_len : SMALLEST_MTU);
	if (!is_local_delivery(result)) {
		if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_NO_NEIGH)
			return drop(COUNT_DROP_NO_ROUTE);
		if (p->ttl <= 1)
			return CALL(send_icmp_error, skb, TTL_EXPIRED);
		dec_ttl(skb, p, v6);
	}
	if (result == BPF_FIB_LKUP_RET_SUCCESS && !neighbour_needs_refresh(hop, v6))
		return rewrite_and_redirect(skb, p, &space->result, hop, v6);
	rewrite(skb, p, &space->result, v6);
	return is_local_delivery(result) ? pass() : redirect_neigh(hop);
}

GLOBAL_VERB(forward)

/* To a client, behind routing: what a backend, or a router on the way to it, has to say. */
INLINE int translate_error_egress(struct __sk_buff *skb, struct scratch *space, __u32 unused, const bool v6)
{
	struct inner_packet *q = &space->inner;

	if (read_inner(skb, space, AT_NODE, v6) != STEP_NONE || !(q->flags & FLOW_REPLY) ||
	    q->flags & (FLOW_HAIRPIN | FLOW_MASQUERADE))
		return pass();
	translate_icmp_error(skb, &space->packet, q, &space->result, v6);
	return pass();
}

GLOBAL_VERB(translate_error_egress)

/* Before routing: an ICMP error to a service's address, about its answers, or to this node, about a packet whose source
 * it gave. The latter, and what concerns such flows, goes on by our own lookup, as their packets do.
 */
INLINE int translate_error_ingress(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	struct inner_packet *q = &space->inner;
	int checked;
	long result;

	checked = read_inner(skb, space, place, v6);
	if (checked != STEP_NONE)
		return checked;
	if (q->flags & FLOW_REPLY && !(q->flags & (FLOW_HAIRPIN | FLOW_MASQUERADE)))
		return pass(); /* about a plain flow between client and backend: translated at the client's interface */
	checked = check_source_towards(skb, space, space->packet.tuple.daddr, v6);
	if (checked != STEP_NONE)
		return checked;
	translate_icmp_error(skb, &space->packet, q, &space->result, v6);
	if (q->flags & FLOW_HAIRPIN) {
		swap_macs(skb);
		return bpf_redirect(skb->ifindex, 0);
	}
	if (!(q->flags & FLOW_MASQUERADE) || q->flags & FLOW_NODE)
		return pass();
	result = fib_lookup_skb(skb, &space->hop, &space->packet, &space->result, 0, v6);
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_NO_NEIGH)
		return pass();
	return redirect_neigh(&space->hop);
}

GLOBAL_VERB(translate_error_ingress)

#endif
