/* ICMP errors quote the packet that they are about: translate the inner_packet, and the outer address with it. */
#ifndef HYBRID_PROXY_ICMP_ERROR_H
#define HYBRID_PROXY_ICMP_ERROR_H

#include "origin.h"

#define ICMP_HEADER 8

/* Read the quoted tuple; its transport's offset, 0: nothing of ours. */
INLINE __u32 parse_inner(struct __sk_buff *skb, __u32 offset, struct tuple *quoted, const bool v6)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct fragment fragment = {};
	__u32 l4 = offset <= HEADERS_MASK ? parse_ip(data, end, bounded(offset), quoted, &fragment, v6) : 0;

	return l4 && fragment.part != LATER_FRAGMENT && parse_ports(data, end, l4, quoted) ? l4 : 0;
}

/* Replace the quoted tuple by `to`. For IPv4 the quoted header's own checksum absorbs the addresses, so that
 * ICMP's changes by the ports alone; ICMPv6 covers everything that it quotes.
 */
INLINE void rewrite_inner(struct __sk_buff *skb, const struct packet *p, __u32 offset, __u32 l4,
			  const struct tuple *quoted, const struct tuple *to, const bool v6)
{
	__s64 difference = address_difference(quoted, to, v6);
	__u32 check = p->l4 + offsetof(struct icmp_header, checksum);
	__u32 old = (__u32)quoted->sport << 16 | quoted->dport, new = (__u32)to->sport << 16 | to->dport;
	__be16 ports[2] = {to->sport, to->dport};

	if (v6)
		bpf_l4_csum_replace(skb, check, 0, difference, 0);
	if (old != new) {
		bpf_l4_csum_replace(skb, check, old, new, 4);
		bpf_skb_store_bytes(skb, l4, ports, sizeof(ports), 0);
	}
	rewrite_addresses(skb, offset, to, difference, v6);
}

INLINE void rewrite_outer(struct __sk_buff *skb, const struct packet *p, const struct tuple *to, const bool v6)
{
	__s64 difference = address_difference(&p->tuple, to, v6);

	if (v6)
		bpf_l4_csum_replace(skb, p->l4 + offsetof(struct icmp_header, checksum), 0, difference,
				    BPF_F_PSEUDO_HDR);
	rewrite_addresses(skb, L3_OFFSET, to, difference, v6);
}

/* Who follows a redirect that was translated goes past the translation: netfilter drops those, too (nf_nat). */
INLINE bool is_redirect(struct __sk_buff *skb, const struct packet *p, const bool v6)
{
	__u8 *type = (void *)(long)skb->data + (p->l4 & HEADERS_MASK), *end = (void *)(long)skb->data_end;

	return !v6 && type + 1 <= end && *type == ICMP_REDIRECT;
}

/* Read what an ICMP error quotes, and whose it is. `place`: where it came in, which must be where the flow's own
 * packets from there come in; AT_NODE: behind routing. STEP_NONE, or a verdict.
 */
INLINE int read_inner(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	const struct packet *p = &space->packet;
	struct inner_packet *q = &space->inner;
	struct tuple key;
	struct found found;

	__builtin_memset(q, 0, sizeof(*q));
	if (is_redirect(skb, p, v6))
		return pass();
	q->offset = p->l4 + ICMP_HEADER;
	q->l4 = parse_inner(skb, q->offset, &q->tuple, v6);
	if (!q->l4)
		return pass();
	reverse_tuple(&key, &q->tuple);
	find_flow(&found, &key, v6);
	if (!found.entry)
		return pass();
	if (place != AT_NODE && !comes_from_origin(skb, space, &key, found.entry, place, v6))
		return drop(COUNT_DROP_FOREIGN);
	peer_key(&q->before, found.entry, key.protocol);
	q->flags = found.entry->flags;
	return STEP_NONE;
}

/* Translate it: the quoted packet, whom it is for, and, where the receiver's peer itself complains, whom it is from. */
INLINE void translate_icmp_error(struct __sk_buff *skb, const struct packet *p, const struct inner_packet *q,
				 struct tuple *outer, const bool v6)
{
	*outer = p->tuple;
	copy_address(outer->daddr, q->before.saddr);
	if (same_address(outer->saddr, q->tuple.daddr, v6))
		copy_address(outer->saddr, q->before.daddr);
	rewrite_inner(skb, p, q->offset, q->l4, &q->tuple, &q->before, v6);
	rewrite_outer(skb, p, outer, v6);
	count(COUNT_ICMP_RELATED);
}

#endif
