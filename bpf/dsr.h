/* Direct server return (DSR): only requests cross the node that a client asked; answers go straight from the backend's
 * node to the client.
 *
 * A request from beyond the cluster to a backend on another node is not masqueraded but encapsulated: IP in IP (RFC
 * 2003, RFC 2473) from this node to the backend's address. The outer header carries the backend's port, in the
 * identification field of IPv4 (which means nothing in a packet that must not be fragmented, RFC 6864) or in the flow
 * label of IPv6. The backend's node decapsulates the request and serves it as if the client had come there: that node
 * alone knows the whole flow.
 */
#ifndef HYBRID_PROXY_DSR_H
#define HYBRID_PROXY_DSR_H

#include "classify.h"
#include "flow.h"
#include "flow_state.h"
#include "flow_create.h"
#include "forward.h"
#include "nat.h"
#include "node.h"
#include "origin.h"
#include "packet.h"
#include "pick.h"
#include "reject.h"
#include "scratch.h"
#include "source.h"

#define IP_DF bpf_htons(0x4000)

/* Stores the client's direction; this node sees no other. STEP_FOLLOW: another CPU has begun the flow. */
INLINE enum step create_dsr_flow(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const struct tuple *key = &space->packet.tuple;
	enum flow_table table = initial_table(&space->packet);
	struct flow *f = &space->flow;
	long error;

	fill_flow(f, key, &space->result, v6);
	f->started = start_time(key->protocol);
	f->flags = FLOW_DSR;
	f->ifindex = f->challenges = f->past_stack = 0;
	f->origin = ORIGIN_UPLINKS;
	f->client_seq = space->packet.seq;
	error = flow_update(key, f, table, BPF_NOEXIST, v6);
	if (error == -EEXIST)
		return STEP_FOLLOW;
	if (error) {
		count(COUNT_FLOW_FULL);
		if (table == TABLE_HALF_OPEN || flow_update(key, f, TABLE_HALF_OPEN, BPF_ANY, v6))
			return drop(space, COUNT_DROP_FLOW_FULL);
		note_overflow();
	} else if (table == TABLE_FLOWS) {
		count_half_open(1);
	}
	count_inline(COUNT_NEW_FLOW);
	return STEP_ENCAP;
}

GLOBAL_VERB(enum step, create_dsr_flow, STEP_DROP)

INLINE long write_outer4(struct __sk_buff *skb, const struct tuple *outer, __be16 port)
{
	struct iphdr ip = {.version = 4, .ihl = 5, .ttl = 64, .protocol = IPPROTO_IPIP, .frag_off = IP_DF, .id = port};

	ip.tot_len = bpf_htons(skb->len - L3_OFFSET);
	ip.saddr = outer->saddr[0];
	ip.daddr = outer->daddr[0];
	ip.check = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&ip, sizeof(ip), 0));
	return bpf_skb_store_bytes(skb, L3_OFFSET, &ip, sizeof(ip), 0);
}

INLINE long write_outer6(struct __sk_buff *skb, const struct tuple *outer, __be16 port)
{
	struct ipv6hdr ip = {.version = 6, .hop_limit = 64, .nexthdr = IPPROTO_IPV6};
	__u16 label = bpf_ntohs(port);

	ip.flow_lbl[1] = label >> 8;
	ip.flow_lbl[2] = label;
	ip.payload_len = bpf_htons(skb->len - L3_OFFSET - sizeof(ip));
	__builtin_memcpy(&ip.saddr, outer->saddr, 16);
	__builtin_memcpy(&ip.daddr, outer->daddr, 16);
	return bpf_skb_store_bytes(skb, L3_OFFSET, &ip, sizeof(ip), 0);
}

/* The outer header's addresses: from this node to the backend. False: this node has none of the family. */
INLINE bool fill_outer(struct tuple *outer, const struct tuple *to, const bool v6)
{
	__builtin_memset(outer, 0, sizeof(*outer));
	outer->protocol = v6 ? IPPROTO_IPV6 : IPPROTO_IPIP;
	copy_address(outer->daddr, to->daddr);
	return node_address(outer->saddr, v6);
}

/* Make room for another IP header and write it. FIXED_GSO: the size of segments stays, so that each of those that the
 * packet stands for grows by that header; `encap` has looked for a hop with room for it.
 */
INLINE bool push_outer(struct __sk_buff *skb, const struct tuple *outer, __be16 port, const bool v6)
{
	const __u64 kind = v6 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 : BPF_F_ADJ_ROOM_ENCAP_L3_IPV4;

	if (bpf_skb_adjust_room(skb, v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr), BPF_ADJ_ROOM_MAC,
				kind | BPF_F_ADJ_ROOM_FIXED_GSO))
		return false;
	return v6 ? !write_outer6(skb, outer, port) : !write_outer4(skb, outer, port);
}

/* Encapsulate the packet, to `space->result`, and send it on. */
INLINE enum step encap(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const __u32 head = v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	struct packet *p = &space->packet;
	struct bpf_fib_lookup *hop = &space->hop;
	struct tuple *outer = &space->reply;
	__u32 length = packet_length(skb, p, v6);
	long result;

	if (!fill_outer(outer, &space->result, v6))
		return drop(space, COUNT_DROP_NO_ADDRESS);
	result = fib_lookup_skb(skb, hop, p, outer, head, v6);
	if (result == BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return CALL(send_icmp_error, v6, skb,
			    hop->tot_len < length + head ? hop->tot_len - head : SMALLEST_MTU);
	if (!has_next_hop(result))
		return drop(space, COUNT_DROP_NO_ROUTE);
	if (p->ttl <= 1)
		return CALL(send_icmp_error, v6, skb, TTL_EXPIRED);
	store_dec_ttl(skb, p, v6);
	if (!push_outer(skb, outer, space->result.dport, v6))
		return drop(space, COUNT_DROP_ENCAP);
	count_inline(COUNT_ENCAP);
	return redirect_neigh(hop, false);
}

GLOBAL_VERB(enum step, encap, STEP_DROP)

/* The backend's port, from the outer header. */
INLINE __be16 encap_port(struct __sk_buff *skb, const bool v6)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ipv6hdr *ip6 = data + L3_OFFSET;
	struct iphdr *ip4 = data + L3_OFFSET;

	if (v6)
		return (void *)(ip6 + 1) <= end ? bpf_htons((__u16)ip6->flow_lbl[1] << 8 | ip6->flow_lbl[2]) : 0;
	return (void *)(ip4 + 1) <= end ? ip4->id : 0;
}

/* Is the outer packet to an address and port of a backend? Any other encapsulated packet belongs to a foreign tunnel.
 */
INLINE bool is_encapsulated(const struct packet *outer, __be16 port, const bool v6)
{
	const __u32 *address = outer->tuple.daddr;

	if (outer->l4 != L3_OFFSET + (v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) || !port)
		return false;
	return may_be_backend(address, port, IPPROTO_TCP, v6) || may_be_backend(address, port, IPPROTO_UDP, v6) ||
	       may_be_backend(address, port, IPPROTO_SCTP, v6);
}

/* Takes the inner packet out; `space->result` is then its tuple from the client to the backend. False: the inner packet
 * is malformed.
 */
INLINE bool pop_outer(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const int head = v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	const struct tuple *inner = &space->packet.tuple;

	if (bpf_skb_adjust_room(skb, -head, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO))
		return false;
	if (CALL(load_packet, v6, skb, HOOK_UPLINK_INGRESS) != PACKET_TRANSPORT)
		return false;
	copy_address(space->result.saddr, inner->saddr);
	space->result.sport = inner->sport;
	space->result.protocol = inner->protocol;
	return true;
}

/* No flow to this backend is known: reserve the tuple for one, if the client's address is not a pod's of this node,
 * nor otherwise impossible.
 */
INLINE enum step prepare_decapped(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const struct tuple *t = &space->packet.tuple;
	enum step checked = CALL(check_source, v6, skb, 0);

	if (checked != STEP_CONTINUE)
		return checked;
	reverse_tuple(&space->reply, &space->result);
	if (has_link(CALL(origin_by_route, v6, skb) | 1u << LINK_POD_BIT))
		return drop(space, COUNT_DROP_REVERSE_PATH);
	__builtin_memset(&space->choice, 0, sizeof(space->choice));
	space->flow.flags = space->flow.backend = 0;
	space->flow.service = (__u32)frontend_at(&space->choice, t->daddr, t->dport, t->protocol, v6);
	return STEP_RESERVE;
}

/* The inner packet is the client's, and goes to the backend that the outer header names. */
INLINE enum step decap(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	struct packet *p = &space->packet;
	struct found found;

	space->result = p->tuple;
	space->result.dport = encap_port(skb, v6);
	if (!is_encapsulated(p, space->result.dport, v6))
		return STEP_PASS;
	if (!pop_outer(skb, space, v6))
		return drop(space, COUNT_DROP_ENCAP);
	count_inline(COUNT_DECAP);
	find_flow(&found, &p->tuple, v6);
	if (found.entry && found.entry->origin != ORIGIN_UPLINKS)
		return drop(space, COUNT_DROP_FOREIGN);
	if (found.entry && found.entry->dport == space->result.dport &&
	    same_address(found.entry->daddr, space->result.daddr, v6))
		return STEP_FOLLOW;
	if (found.entry)
		delete_pair(&p->tuple, found.entry, found.table, v6);
	return prepare_decapped(skb, space, v6);
}

GLOBAL_VERB(enum step, decap, STEP_DROP)

#endif
