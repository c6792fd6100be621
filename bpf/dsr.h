/* Direct server return: only requests cross the node that was asked, answers go straight from the backend's node.
 *
 * A request from beyond the cluster to a backend on another node is not masqueraded but wrapped: IP in IP (RFC 2003,
 * RFC 2473) from this node to the backend's address, with the backend's port in the outer header, in the identification
 * of IPv4 (which says nothing of a packet that may not be fragmented, RFC 6864) or the flow label of IPv6. The
 * backend's node unwraps it and serves it as if the client had come there: it alone knows the whole flow.
 */
#ifndef HYBRID_PROXY_DSR_H
#define HYBRID_PROXY_DSR_H

#include "form.h"
#include "fragment.h"

#define IP_DF bpf_htons(0x4000)
#define DSR_WINDOW (1u << 20) /* by how much a client's segment may be ahead of its last */

/* Remember the client's direction, which is all that this node will see. */
INLINE int create_dsr_flow(struct __sk_buff *skb, struct scratch *space, __u32 unused, const bool v6)
{
	const struct tuple *key = &space->packet.tuple;
	enum flow_table table = initial_table(key->protocol);
	struct flow *f = &space->flow;

	fill_flow(f, key, &space->result, v6);
	f->started_or_fin = start_time(key->protocol);
	f->flags = FLOW_DSR;
	f->ifindex = f->challenges = 0;
	f->origin = ORIGIN_UPLINKS;
	f->ack = space->packet.seq;
	if (flow_update(key, f, table, BPF_ANY, v6)) {
		count(COUNT_FLOW_FULL);
		if (table == TABLE_HALF_OPEN || flow_update(key, f, TABLE_HALF_OPEN, BPF_ANY, v6))
			return drop(COUNT_DROP_FLOW_FULL);
		note_overflow();
	} else if (table == TABLE_FLOWS) {
		count_half_open(1);
	}
	count(COUNT_NEW_FLOW);
	return STEP_ENCAP;
}

GLOBAL_VERB(create_dsr_flow)

/* What is seen of the connection: the client goes on after its SYN, or ends it. What its segments may be is judged by
 * the last one, because nothing of the backend's comes here.
 */
INLINE void refresh_dsr(const struct packet *p, struct flow *f, const enum flow_table table)
{
	WRITE_ONCE(f->seen, now());
	if (p->tuple.protocol != IPPROTO_TCP)
		return;
	if (is_syn(p)) {
		if (!(f->flags & FLOW_ESTABLISHED))
			f->ack = p->seq;
		return;
	}
	if (!is_ahead(p->seq, f->ack, DSR_WINDOW)) {
		if (p->tcp_flags & (TCP_FIN | TCP_RST))
			count(COUNT_OUT_OF_WINDOW);
		return;
	}
	f->ack = p->seq;
	f->flags &= ~FLOW_CHALLENGED;
	f->challenges = 0;
	if (!(f->flags & FLOW_ESTABLISHED) && (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_ACK) {
		f->flags |= FLOW_ESTABLISHED;
		note_success(f->backend, f->service);
		if (table == TABLE_FLOWS)
			count_half_open(-1);
	}
	if (p->tcp_flags & TCP_FIN)
		f->flags |= FLOW_FIN;
	if (p->tcp_flags & TCP_RST)
		f->flags |= FLOW_RESET;
}

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

/* Put the packet into another one, to `space->result`, and send that on. */
INLINE int encap(struct __sk_buff *skb, struct scratch *space, __u32 unused, const bool v6)
{
	const __u32 head = v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	const __u64 kind = v6 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 : BPF_F_ADJ_ROOM_ENCAP_L3_IPV4;
	const struct packet *p = &space->packet;
	struct bpf_fib_lookup *hop = &space->hop;
	struct tuple *outer = &space->reply;
	__u32 length = packet_length(skb, p, v6);
	long result;

	__builtin_memset(outer, 0, sizeof(*outer));
	outer->protocol = v6 ? IPPROTO_IPV6 : IPPROTO_IPIP;
	copy_address(outer->daddr, space->result.daddr);
	if (!node_address(outer->saddr, v6))
		return drop(COUNT_DROP_NO_ADDRESS);
	result = fib_lookup_skb(skb, hop, p, outer, head, v6);
	if (result == BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return CALL(send_icmp_error, skb, hop->tot_len < length + head ? hop->tot_len - head : SMALLEST_MTU);
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_NO_NEIGH)
		return drop(COUNT_DROP_NO_ROUTE);
	if (bpf_skb_adjust_room(skb, head, BPF_ADJ_ROOM_MAC, kind | BPF_F_ADJ_ROOM_FIXED_GSO))
		return drop(COUNT_DROP_ENCAP);
	if (v6 ? write_outer6(skb, outer, space->result.dport) : write_outer4(skb, outer, space->result.dport))
		return drop(COUNT_DROP_ENCAP);
	count(COUNT_ENCAP);
	return redirect_neigh(hop);
}

GLOBAL_VERB(encap)

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

/* A packet in a packet, to an address of a backend of this node: what is inside is the client's, and goes to that
 * backend. Anything else that comes so is somebody's tunnel. Nothing of a pod of this node comes so.
 */
INLINE int decap(struct __sk_buff *skb, struct scratch *space, __u32 unused, const bool v6)
{
	const int head = v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	struct packet *p = &space->packet;
	struct found found;
	int checked;

	space->result = p->tuple;
	space->result.dport = encap_port(skb, v6);
	if (p->l4 != L3_OFFSET + head || !space->result.dport ||
	    !(may_be_backend(p->tuple.daddr, space->result.dport, IPPROTO_TCP, v6) ||
	      may_be_backend(p->tuple.daddr, space->result.dport, IPPROTO_UDP, v6) ||
	      may_be_backend(p->tuple.daddr, space->result.dport, IPPROTO_SCTP, v6)))
		return pass();
	if (bpf_skb_adjust_room(skb, -head, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO))
		return drop(COUNT_DROP_ENCAP);
	__builtin_memset(p, 0, sizeof(*p));
	parse_packet(skb, p, v6);
	if (p->kind != PACKET_TRANSPORT || !is_well_formed(skb, p, v6))
		return drop(COUNT_DROP_ENCAP);
	count(COUNT_DECAP);
	copy_address(space->result.saddr, p->tuple.saddr);
	space->result.sport = p->tuple.sport;
	space->result.protocol = p->tuple.protocol;
	find_flow(&found, &p->tuple, v6);
	if (found.entry && found.entry->origin != ORIGIN_UPLINKS)
		return drop(COUNT_DROP_FOREIGN);
	if (found.entry && found.entry->dport == space->result.dport &&
	    same_address(found.entry->daddr, space->result.daddr, v6))
		return STEP_FOLLOW;
	if (found.entry)
		delete_pair(&p->tuple, found.entry, found.table, v6);
	checked = CALL(check_source, skb, 0);
	if (checked != STEP_NONE)
		return checked;
	reverse_tuple(&space->reply, &space->result);
	if (has_link((__u32)CALL(origin_by_route, skb, 0) | 1u << LINK_POD_BIT))
		return drop(COUNT_DROP_REVERSE_PATH);
	__builtin_memset(&space->choice, 0, sizeof(space->choice));
	space->flow.flags = space->flow.backend = 0;
	space->flow.service = (__u32)frontend_at(&space->choice, p->tuple.daddr, p->tuple.dport, p->tuple.protocol, v6);
	return STEP_RESERVE;
}

GLOBAL_VERB(decap)

#endif
