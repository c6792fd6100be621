/* ICMP errors quote the packet that they are about: translate this inner packet, and the outer addresses with it. */
#ifndef HYBRID_PROXY_ICMP_ERROR_H
#define HYBRID_PROXY_ICMP_ERROR_H

#include "flow.h"
#include "forward.h"
#include "nat.h"
#include "origin.h"
#include "packet.h"
#include "scratch.h"
#include "source.h"

/* Reads the inner packet's tuple. Returns its transport's offset; 0: it is no service's. */
INLINE __u32 parse_inner(struct __sk_buff *skb, __u32 offset, struct tuple *inner, const bool v6)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct fragment fragment = {};
	__u32 l4 = offset <= HEADERS_MASK ? parse_ip(data, end, bounded(offset), inner, &fragment, v6) : 0;

	return l4 && fragment.part != LATER_FRAGMENT && parse_ports(data, end, l4, inner) ? l4 : 0;
}

/* Replace the inner tuple by that from before translation. The checksum of an inner IPv4 header absorbs the addresses,
 * so that ICMP's changes by the ports alone; ICMPv6's covers everything that it quotes.
 */
INLINE void rewrite_inner(struct __sk_buff *skb, const struct packet *p, const struct inner_packet *inner,
			  const bool v6)
{
	const struct tuple *from = &inner->tuple, *to = &inner->before;
	__u32 old = (__u32)from->sport << 16 | from->dport, new = (__u32)to->sport << 16 | to->dport;
	__u32 check = p->l4 + offsetof(struct icmp_header, checksum);
	__s64 difference = address_difference(from, to, v6);
	__be16 ports[2] = {to->sport, to->dport};

	if (v6)
		bpf_l4_csum_replace(skb, check, 0, difference, 0);
	if (old != new) {
		bpf_l4_csum_replace(skb, check, old, new, 4);
		bpf_skb_store_bytes(skb, inner->l4, ports, sizeof(ports), 0);
	}
	rewrite_addresses(skb, inner->offset, to, difference, v6);
}

INLINE void rewrite_outer(struct __sk_buff *skb, const struct packet *p, const struct tuple *to, const bool v6)
{
	__s64 difference = address_difference(&p->tuple, to, v6);

	if (v6)
		bpf_l4_csum_replace(skb, p->l4 + offsetof(struct icmp_header, checksum), 0, difference,
				    BPF_F_PSEUDO_HDR);
	rewrite_addresses(skb, L3_OFFSET, to, difference, v6);
}

/* A host that follows a redirect which was translated sends past the translation: netfilter drops those, too (nf_nat).
 */
INLINE bool is_redirect(struct __sk_buff *skb, const struct packet *p, const bool v6)
{
	__u8 *type = (void *)(long)skb->data + (p->l4 & HEADERS_MASK), *end = (void *)(long)skb->data_end;

	return !v6 && type + 1 <= end && *type == ICMP_REDIRECT;
}

/* Read the inner packet, and find its flow. Before routing the error must come in where the flow's own packets from
 * there do. STEP_CONTINUE, or what becomes of an error that is not translated.
 */
INLINE enum step read_inner(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	const struct packet *p = &space->packet;
	struct inner_packet *inner = &space->inner;
	struct tuple key;
	struct found found;

	__builtin_memset(inner, 0, sizeof(*inner));
	if (is_redirect(skb, p, v6))
		return STEP_PASS;
	inner->offset = p->l4 + ICMP_HEADER;
	inner->l4 = parse_inner(skb, inner->offset, &inner->tuple, v6);
	if (!inner->l4)
		return STEP_PASS;
	reverse_tuple(&key, &inner->tuple);
	find_flow(&found, &key, v6);
	if (!found.entry || found.entry->flags & FLOW_OTHERS)
		return STEP_PASS;
	if (is_ingress(hook) && !comes_from_origin(skb, space, &key, found.entry, hook, v6))
		return drop(space, COUNT_DROP_FOREIGN);
	peer_key(&inner->before, found.entry, key.protocol);
	inner->flags = found.entry->flags;
	return STEP_CONTINUE;
}

/* Translate the error: the inner packet, the receiver and, where the receiver's peer itself sent it, the sender. */
INLINE void translate_icmp_error(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const struct inner_packet *inner = &space->inner;
	const struct packet *p = &space->packet;
	struct tuple *outer = &space->result;

	*outer = p->tuple;
	copy_address(outer->daddr, inner->before.saddr);
	if (same_address(outer->saddr, inner->tuple.daddr, v6))
		copy_address(outer->saddr, inner->before.daddr);
	rewrite_inner(skb, p, inner, v6);
	rewrite_outer(skb, p, outer, v6);
	count(COUNT_ICMP_RELATED);
}

/* Is the error about a flow whose answers are translated at the client's interface, and not before they are routed? */
INLINE bool is_plain_reply(const struct inner_packet *inner)
{
	return inner->flags & FLOW_REPLY && !(inner->flags & FLOW_AS_NODE);
}

/* Behind routing, to a client: an error from a backend, or from a router on the way to it. */
INLINE enum step translate_error_egress(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	if (read_inner(skb, space, hook, v6) == STEP_CONTINUE && is_plain_reply(&space->inner))
		translate_icmp_error(skb, space, v6);
	return STEP_PASS;
}

GLOBAL_VERB_WITH(enum hook, enum step, translate_error_egress, STEP_DROP)

/* Send on the error about a flow that is masqueraded, as the flow's packets are. */
INLINE enum step forward_error(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	__u32 flags = space->inner.flags;

	if (flags & FLOW_HAIRPIN)
		return hairpin(skb);
	if (!(flags & FLOW_MASQUERADE) || flags & FLOW_NODE)
		return STEP_PASS;
	if (!has_next_hop(fib_lookup_skb(skb, &space->hop, &space->packet, &space->result, 0, v6)))
		return STEP_PASS;
	if (space->packet.ttl <= 1)
		return drop(space, COUNT_DROP_EXPIRED); /* no error is sent about an error (RFC 1122, RFC 4443) */
	store_dec_ttl(skb, &space->packet, v6);
	return redirect_neigh(&space->hop, false);
}

/* Before routing: an error to a service's address, about its answers, or to this node, about a packet whose source it
 * gave.
 */
INLINE enum step translate_error_ingress(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	enum step checked = read_inner(skb, space, hook, v6);

	if (checked != STEP_CONTINUE)
		return checked;
	if (is_plain_reply(&space->inner))
		return STEP_PASS;
	checked = check_source_towards(skb, space, space->packet.tuple.daddr, v6);
	if (checked != STEP_CONTINUE)
		return checked;
	translate_icmp_error(skb, space, v6);
	return forward_error(skb, space, v6);
}

GLOBAL_VERB_WITH(enum hook, enum step, translate_error_ingress, STEP_DROP)

#endif
