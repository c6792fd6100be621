/* Forwards packets of known flows in the driver (XDP), before the kernel has allocated an skb.
 *
 * This is a shortcut and decides nothing: tc creates, establishes and ends flows. Whatever this code does not handle,
 * it leaves to tc untouched, and tc handles it as if there were no shortcut.
 */
#ifndef HYBRID_PROXY_DRIVER_H
#define HYBRID_PROXY_DRIVER_H

#include "count.h"
#include "events.h"
#include "flow.h"
#include "flow_state.h"
#include "form.h"
#include "hash.h"
#include "nat.h"
#include "packet.h"
#include "route.h"
#include "service.h"
#include "traffic.h"

#define MULTICAST_BIT 1 /* of a frame's first byte */

/* Interfaces that accept frames from XDP, with their own addresses. A frame redirected to any other is lost. */
struct xdp_link {
	__u8 mac[6];
	__u8 pad[2];
};

HASH_MAP(xdp_links, __u32, struct xdp_link, 256);

/* Leave the packet to the stack, and tc there. */
INLINE int leave_to_tc(enum counter why)
{
	count_inline(why);
	return XDP_PASS;
}

/* Is the packet simple? It is a unicast frame, UDP or TCP in the midst of a connection, without options or extension
 * headers, and its TTL does not expire here.
 */
INLINE bool is_plain(const struct ethhdr *frame, const struct packet *p, const bool v6)
{
	if (p->kind != PACKET_TRANSPORT || frame->h_dest[0] & MULTICAST_BIT || p->ttl <= 1)
		return false;
	if (p->l4 != L3_OFFSET + (v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)))
		return false;
	if (p->tuple.protocol == IPPROTO_TCP)
		return !(p->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST));
	return p->tuple.protocol == IPPROTO_UDP;
}

/* May the packet have a flow? While something is traced, all packets are left to tc, which reports each of them. */
INLINE bool may_have_flow(const struct tuple *t, const bool v6)
{
	if (is_tracing())
		return false;
	return may_be_service(t->daddr, v6) || may_be_node_port(t->dport, t->protocol) ||
	       may_be_backend(t->saddr, t->sport, t->protocol, v6);
}

/* Does this flow's packet need nothing but translation? It crosses the node under the node's address, neither end is a
 * pod here, and tc has nothing to learn from it: a client's datagrams change nothing. A flow of which anything else is
 * known is tc's.
 */
INLINE bool is_transit(const struct flow *f, __u8 protocol)
{
	const __u32 plain = FLOW_MASQUERADE | FLOW_REPLY | FLOW_REPLIED | FLOW_ESTABLISHED | FLOW_FIN | FLOW_FIN_ACKED;
	__u32 flags = f->flags;

	if (!(flags & FLOW_MASQUERADE) || flags & ~plain || f->ifindex || f->origin != ORIGIN_UPLINKS)
		return false;
	return flags & FLOW_ESTABLISHED || (protocol == IPPROTO_UDP && !(flags & FLOW_REPLY));
}

/* Datagrams to a backend that is gone get another one from tc. */
INLINE bool has_backend(const struct flow *f, __u8 protocol)
{
	return protocol == IPPROTO_TCP || f->flags & FLOW_REPLY ||
	       is_serving(f->backend, f->service, f->daddr, f->dport);
}

/* The transport's checksum after a difference; 0 in UDP says that there is none, and stays. */
INLINE void update_checksum(__u16 *check, __s64 difference, __u8 protocol)
{
	if (protocol == IPPROTO_UDP && !*check)
		return;
	*check = updated_checksum(*check, difference);
	if (protocol == IPPROTO_UDP && !*check)
		*check = 0xffff;
}

/* Addresses and one hop less to live. */
INLINE void write_ip4(struct iphdr *ip, const struct tuple *to, __s64 difference)
{
	__u32 before = bpf_htons(ip->ttl << 8), after = bpf_htons((ip->ttl - 1) << 8);

	ip->saddr = to->saddr[0];
	ip->daddr = to->daddr[0];
	ip->ttl -= 1;
	ip->check = updated_checksum(ip->check, exchange(difference, before, after));
}

INLINE void write_ip6(struct ipv6hdr *ip, const struct tuple *to)
{
	__builtin_memcpy(&ip->saddr, to->saddr, 16);
	__builtin_memcpy(&ip->daddr, to->daddr, 16);
	ip->hop_limit -= 1;
}

/* Ports and checksum; false: the header is not there, and nothing was written. */
INLINE bool write_transport(void *data, void *end, const struct packet *p, const struct tuple *to, __s64 difference,
			    const bool v6)
{
	void *transport = data + L3_OFFSET + (v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
	__u32 old = (__u32)p->tuple.sport << 16 | p->tuple.dport, new = (__u32)to->sport << 16 | to->dport;
	struct tcphdr *tcp = transport;
	struct udphdr *udp = transport;

	difference = exchange(difference, old, new);
	if (p->tuple.protocol == IPPROTO_TCP) {
		if ((void *)(tcp + 1) > end)
			return false;
		update_checksum(&tcp->check, difference, IPPROTO_TCP);
	} else {
		if ((void *)(udp + 1) > end)
			return false;
		update_checksum(&udp->check, difference, IPPROTO_UDP);
	}
	udp->source = to->sport;
	udp->dest = to->dport;
	return true;
}

/* Rewrite the packet to `to`, and the frame for the next hop. */
INLINE bool write_packet(struct xdp_md *ctx, const struct packet *p, const struct tuple *to,
			 const struct bpf_fib_lookup *hop, const bool v6)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__s64 difference = address_difference(&p->tuple, to, v6);
	struct ethhdr *frame = data;

	if (!write_transport(data, end, p, to, difference, v6))
		return false;
	if (v6)
		write_ip6(data + L3_OFFSET, to);
	else
		write_ip4(data + L3_OFFSET, to, difference);
	__builtin_memcpy(frame->h_dest, hop->dmac, ETH_ALEN);
	__builtin_memcpy(frame->h_source, hop->smac, ETH_ALEN);
	return true;
}

INLINE bool same_mac(const __u8 *a, const __u8 *b)
{
	const __u16 *left = (const __u16 *)a, *right = (const __u16 *)b;

	return left[0] == right[0] && left[1] == right[1] && left[2] == right[2];
}

/* Is the frame for this node? A promiscuous device receives frames for others too. `hop` names the device's own address
 * where the packet goes back by it.
 */
INLINE bool is_for_this_device(struct xdp_md *ctx, const struct bpf_fib_lookup *hop)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 ingress = ctx->ingress_ifindex;
	struct xdp_link *link;
	struct ethhdr *frame = data;

	if ((void *)(frame + 1) > end)
		return false;
	if (hop->ifindex == ingress)
		return same_mac(frame->h_dest, hop->smac);
	link = bpf_map_lookup_elem(&xdp_links, &ingress);
	return link && same_mac(frame->h_dest, link->mac);
}

/* Finds the next hop; false: tc forwards the packet. The MTU may be too small, the neighbour unresolved, or the route
 * may end at this node or a pod.
 */
INLINE bool fib_lookup_xdp(struct xdp_md *ctx, struct bpf_fib_lookup *hop, const struct tuple *to, __u32 length,
			   const bool v6)
{
	__u32 target;

	if (fib_lookup(ctx, ctx->ingress_ifindex, length, hop, to, v6) != BPF_FIB_LKUP_RET_SUCCESS)
		return false;
	target = hop->ifindex;
	if (target != ctx->ingress_ifindex && !bpf_map_lookup_elem(&xdp_links, &target))
		return false;
	return is_for_this_device(ctx, hop) && !neighbour_needs_refresh(hop, v6);
}

INLINE int transmit(struct xdp_md *ctx, const struct bpf_fib_lookup *hop, __u32 flags)
{
	count_inline(flags & FLOW_REPLY ? COUNT_XDP_REPLY : COUNT_XDP_DNAT);
	return hop->ifindex == ctx->ingress_ifindex ? XDP_TX : bpf_redirect(hop->ifindex, 0);
}

/* Copies the packet's flow into `flow`; false: it has none, or one that tc handles. */
INLINE bool find_transit_flow(struct found *found, struct flow *flow, const struct packet *p, const bool v6)
{
	find_flow(found, &p->tuple, v6);
	if (!found->entry)
		return false;
	*flow = *found->entry;
	return flow->tag == flow_tag(&p->tuple, v6) && is_transit(flow, p->tuple.protocol) &&
	       has_backend(flow, p->tuple.protocol);
}

/* All of it, in order. */
INLINE int forward_transit(struct xdp_md *ctx, const bool v6)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u64 length = end_of_packet(data, end, v6);
	struct bpf_fib_lookup hop;
	struct packet p = {};
	struct found found;
	struct flow flow;
	struct tuple to, way;

	parse_bytes(data, end, end - data, &p, v6);
	if (!is_plain(data, &p, v6) || !may_have_flow(&p.tuple, v6) ||
	    !is_sound(data, end, end - data, length, &p, v6) || !find_transit_flow(&found, &flow, &p, v6))
		return XDP_PASS;
	translated_tuple(&to, &flow, p.tuple.protocol);
	routed_tuple(&way, &p.tuple, &to, flow.flags);
	if (!fib_lookup_xdp(ctx, &hop, &way, length - L3_OFFSET, v6))
		return leave_to_tc(COUNT_XDP_PASS);
	refresh(&p, found.entry, found.table, v6);
	if (!write_packet(ctx, &p, &to, &hop, v6))
		return XDP_PASS;
	account_bytes(flow.backend, flow.flags & FLOW_REPLY, 1, length - L3_OFFSET, 0);
	return transmit(ctx, &hop, flow.flags);
}

#endif
