/* Pairs of addresses between which the stack lately delivered a packet of no flow, from one pod's interface to another.
 *
 * A packet that belongs to no flow first goes through the stack, which checks its source, finds route and neighbour,
 * and applies all rules. The ingress marks it and notes its tuple; the egress of the receiver's interface notes where
 * it was delivered, if it still has this tuple. For a second, further packets of the pair that come in at the same
 * interface need nothing of that: they are handed over (FAST_PATH_DIRECT), or passed on without the datapath. So what a
 * pair may do follows the stack's own decision within a second, with or without an agent.
 *
 * A packet that has another tuple at the egress was translated by another program, which must see its answers. They
 * look like those of direct packets, so from then on nothing is handed over, until the agent has looked (fast_path.py).
 */
#ifndef HYBRID_PROXY_PAIRS_H
#define HYBRID_PROXY_PAIRS_H

#include <linux/if_packet.h>

#include "count.h"
#include "direct_tuples.h"
#include "flow.h"
#include "length.h"
#include "mark.h"
#include "nat.h"
#include "packet.h"
#include "timewait.h"

#define PAIR_BITS 9

struct pair {
	struct tuple last; /* of the last packet that was left to the stack: both addresses, and its ports */
	__u32 from;	   /* the interface where its packets come in */
	__u32 to;	   /* where the stack delivered one; 0: nowhere yet */
	__u32 delivered;   /* when: jiffies */
	__u32 fast_path;   /* enum fast_path at that time */
	__u8 mac[12];	   /* destination and source of the frame */
};

/* By hash of both addresses. Every CPU has its own, because a packet stays on one from ingress to egress. */
CPU_MAP(pairs, struct pair, 1 << PAIR_BITS);

INLINE struct pair *pair_row(const struct tuple *t, const bool v6)
{
	__u32 hash = hash_address(t->saddr, v6) * 31 + hash_address(t->daddr, v6);
	__u32 key = hash * 0x9e3779b1u >> (32 - PAIR_BITS);

	return bpf_map_lookup_elem(&pairs, &key);
}

INLINE bool was_delivered_lately(const struct pair *row)
{
	return row->to && now() - row->delivered < settings.hz;
}

/* Is the row the pair of a packet from a pod, and has the stack delivered one within a second? */
INLINE bool is_pair(struct __sk_buff *skb, const struct pair *row, const struct tuple *t, const bool v6)
{
	return row->from == skb->ifindex && was_delivered_lately(row) && same_address(row->last.daddr, t->daddr, v6) &&
	       same_address(row->last.saddr, t->saddr, v6);
}

/* Notes the tuple of a packet that is left to the stack, in its pair's row or as a new pair. */
INLINE void ask(struct __sk_buff *skb, struct pair *row, const struct tuple *t, bool known)
{
	row->last = *t;
	skb->tc_index = MARK_ASKED;
	if (known)
		return;
	row->from = skb->ifindex;
	row->to = 0;
}

/* Notes where the stack delivers the packet. A port of a bridge may have rules of the bridge's. */
INLINE void note_pair(struct __sk_buff *skb, struct pair *row)
{
	__u32 ifindex = skb->ifindex, *flags = bpf_map_lookup_elem(&interfaces, &ifindex);

	if (flags && *flags & INTERFACE_SHARED)
		return;
	row->to = ifindex;
	row->delivered = now();
	row->fast_path = READ_ONCE(own_node.fast_path);
	bpf_skb_load_bytes(skb, 0, row->mac, sizeof(row->mac));
}

/* Hands no packet over any more that belongs to no flow: the stack translates some. */
INLINE void note_translation(void)
{
	if (READ_ONCE(own_node.fast_path) == FAST_PATH_DIRECT)
		WRITE_ONCE(own_node.fast_path, FAST_PATH_ALWAYS);
}

/* Is a packet to a pod that its ingress marked still the same behind the stack? Then it is no flow's here either. */
INLINE bool is_untouched(struct __sk_buff *skb, const struct tuple *t, const bool v6)
{
	struct pair *row = pair_row(t, v6);

	if (!row || row->last.protocol != t->protocol || !same_tuple(&row->last, t, v6)) {
		note_translation();
		return false;
	}
	if (row->from != skb->ingress_ifindex)
		return false;
	if (!was_delivered_lately(row))
		note_pair(skb, row);
	return true;
}

INLINE __u8 *transport_byte(struct __sk_buff *skb, __u32 offset, const bool v6)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u8 *byte = data + L3_OFFSET + (v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) + offset;

	return (void *)(byte + 1) <= end ? byte : NULL;
}

/* May the packet, which is to a backend's address, be a flow's, or meet one's reply tuple? A connection is checked when
 * it opens. Once a direct flow had to change its port, every packet is.
 */
INLINE bool meets_flow(struct __sk_buff *skb, const struct tuple *t, const bool v6)
{
	__u8 *flags = t->protocol == IPPROTO_TCP ? transport_byte(skb, 13, v6) : NULL;
	struct found found = {};
	struct tuple reply;

	if (READ_ONCE(own_node.direct_flows))
		find_flow(&found, t, v6);
	if (found.entry || (t->protocol == IPPROTO_TCP && !flags))
		return true;
	if (t->protocol == IPPROTO_TCP && (*flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return false;
	reverse_tuple(&reply, t);
	find_flow(&found, &reply, v6);
	if (found.entry || (t->protocol == IPPROTO_TCP && in_timewait(&reply, t, v6)))
		return true;
	if (t->protocol == IPPROTO_TCP)
		timewait_add(&reply, t, v6);
	else
		note_direct_datagram(&reply, v6);
	return false;
}

/* May a packet whose source or destination may be a backend be a flow's? */
INLINE bool concerns_flow(struct __sk_buff *skb, const struct tuple *t, bool from_backend, bool to_backend,
			  const bool v6)
{
	struct found found = {};

	if (from_backend)
		find_flow(&found, t, v6);
	return found.entry || (to_backend && meets_flow(skb, t, v6));
}

/* Do the packet's frame, hops and size let it go to the pod without the stack, which sends the ICMP errors? */
INLINE bool can_skip_stack(struct __sk_buff *skb, const struct tuple *t, __u32 ifindex, const bool v6)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ipv6hdr *ip6 = data + L3_OFFSET;
	struct iphdr *ip4 = data + L3_OFFSET;
	__u8 *tcp_length;
	__u32 header = sizeof(struct udphdr);

	if (skb->pkt_type != PACKET_HOST || (void *)(v6 ? (void *)(ip6 + 1) : (void *)(ip4 + 1)) > end ||
	    (v6 ? ip6->hop_limit : ip4->ttl) <= 1)
		return false;
	if (always_fits(skb))
		return true;
	tcp_length = t->protocol == IPPROTO_TCP ? transport_byte(skb, 12, v6) : NULL;
	if (tcp_length)
		header = (*tcp_length >> 4) * 4;
	return length_fits(skb, ifindex, length_at(skb, L3_OFFSET + (v6 ? sizeof(*ip6) : sizeof(*ip4)), header, v6));
}

/* Hands the packet to the pod of its pair. False: the stack has to deliver it. */
INLINE bool hand_to_pair(struct __sk_buff *skb, const struct tuple *t, const struct pair *pair, const bool v6)
{
	__u32 ifindex = pair->to;

	if (READ_ONCE(own_node.fast_path) != FAST_PATH_DIRECT || pair->fast_path != FAST_PATH_DIRECT ||
	    !bpf_map_lookup_elem(&links, &ifindex) || !can_skip_stack(skb, t, ifindex, v6))
		return false;
	set_macs(skb, pair->mac);
	count_inline(COUNT_FAST);
	bpf_redirect_peer(ifindex, 0);
	return true;
}

#endif
