/* The entry of the tc programs: packets that are certainly no service's leave here, after a few bits of the prefilters.
 * The others continue to the datapath, by a function that the including file defines.
 */
#ifndef HYBRID_PROXY_PREFILTER_H
#define HYBRID_PROXY_PREFILTER_H

#include "bare.h"
#include "delivery.h"
#include "hash.h"
#include "mark.h"
#include "node.h"
#include "packet.h"
#include "pairs.h"
#include "route.h"
#include "socket_storage.h"

#define VLAN_NUMBER 0x0fff /* of a tag */
#define PRIORITY_TAGS 4	   /* that are taken off */

INLINE int call_datapath(struct __sk_buff *skb, const enum hook hook, const bool v6);

/* Reads addresses and ports of a packet with the common headers, of which IP's is at `offset`; false: it needs the full
 * parser (packet.h).
 */
INLINE bool parse_fast(struct __sk_buff *skb, struct tuple *t, const __u32 offset, const bool v6)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ipv6hdr *ip6 = data + offset;
	struct iphdr *ip4 = data + offset;
	__be16 *ports = v6 ? (void *)(ip6 + 1) : (void *)(ip4 + 1);

	if ((void *)(ports + 2) > end)
		return false;
	if (v6) {
		__builtin_memcpy(t->saddr, &ip6->saddr, 16);
		__builtin_memcpy(t->daddr, &ip6->daddr, 16);
		t->protocol = ip6->nexthdr;
	} else {
		if (((__u8 *)ip4)[0] != 0x45 || ip4->frag_off & IP_FRAGMENT_MASK)
			return false;
		t->saddr[0] = ip4->saddr;
		t->daddr[0] = ip4->daddr;
		t->protocol = ip4->protocol;
	}
	t->sport = ports[0];
	t->dport = ports[1];
	return t->protocol == IPPROTO_TCP || t->protocol == IPPROTO_UDP || t->protocol == IPPROTO_SCTP;
}

/* May the packet be to a service? */
INLINE bool may_be_to_service(const struct tuple *t, const bool v6)
{
	return may_be_service(t->daddr, v6) || may_be_node_port(t->dport, t->protocol) || in_service_cidr(t->daddr, v6);
}

/* Is the packet certainly no service's? Most are not. The datapath repeats these checks for the others. */
INLINE bool is_irrelevant(struct __sk_buff *skb, const struct tuple *t, const enum hook hook, const bool v6)
{
	if (may_be_backend(t->saddr, t->sport, t->protocol, v6) || (!is_ingress(hook) && lost_peer(skb, t, v6)))
		return false;
	if (hook == HOOK_POD_EGRESS)
		return t->protocol != IPPROTO_UDP || !is_awaited(t, v6);
	return !may_be_to_service(t, v6) && !(is_ingress(hook) && may_be_backend(t->daddr, t->dport, t->protocol, v6));
}

/* A packet from a pod that is to no service: it is handed to the pod that its pair leads to, or left to the stack, or
 * the datapath asks whose it is.
 */
INLINE int enter_directly(struct __sk_buff *skb, const struct tuple *t, const bool v6)
{
	bool from_backend = may_be_backend(t->saddr, t->sport, t->protocol, v6);
	bool to_backend = may_be_backend(t->daddr, t->dport, t->protocol, v6);
	bool may_be_ours = from_backend || to_backend;
	struct pair *row = NULL;
	bool known;

	if (!may_be_ours && READ_ONCE(own_node.fast_path) != FAST_PATH_DIRECT)
		return TC_ACT_UNSPEC;
	if (t->protocol != IPPROTO_SCTP)
		row = pair_row(t, v6);
	if (!row)
		return may_be_ours ? call_datapath(skb, HOOK_POD_INGRESS, v6) : TC_ACT_UNSPEC;
	known = is_pair(skb, row, t, v6);
	if (known && may_be_ours && concerns_flow(skb, t, from_backend, to_backend, v6))
		return call_datapath(skb, HOOK_POD_INGRESS, v6);
	if (known && hand_to_pair(skb, t, row, v6))
		return TC_ACT_REDIRECT;
	if (known && !from_backend)
		return TC_ACT_UNSPEC;
	ask(skb, row, t, known);
	if (may_be_ours && !known)
		return call_datapath(skb, HOOK_POD_INGRESS, v6);
	mark_no_flow(skb);
	return TC_ACT_UNSPEC;
}

/* Does the packet have a VLAN tag? Then it belongs to the VLAN's own device, whose programs see it without the tag.
 * Number 0 only carries a priority. The stack removes such tags, as many as there are, but does not run the programs
 * again (__netif_receive_skb_core).
 */
INLINE bool is_tagged(struct __sk_buff *skb, const enum hook hook)
{
	if (!skb->vlan_present)
		return false;
	for (int i = 0; is_ingress(hook) && i < PRIORITY_TAGS; i++) {
		bool another = skb->protocol == bpf_htons(ETH_P_8021Q) || skb->protocol == bpf_htons(ETH_P_8021AD);

		if (skb->vlan_tci & VLAN_NUMBER || !another || bpf_skb_vlan_pop(skb))
			break;
	}
	return skb->vlan_tci & VLAN_NUMBER;
}

/* Which packets go on to the datapath. */
enum wanted {
	MAYBE_SERVICES, /* those that the bitmaps do not rule out */
	ALL_PACKETS,	/* all of IPv4 and IPv6 */
	LEFT_BRIDGE,	/* the first, once the port has left its bridge */
};

/* Does the way to the packet's peer lead by this very interface? It does not while it is a port of a bridge. Once
 * addresses and routes have moved to it, its packets must find a program: the stack would reset their connections
 * before the agent hears of the change.
 */
INLINE bool has_left_bridge(struct __sk_buff *skb, const struct tuple *t, const enum hook hook, const bool v6)
{
	struct tuple to = *t;
	struct bpf_fib_lookup hop;

	if (is_ingress(hook))
		reverse_tuple(&to, t);
	return has_next_hop(fib_lookup(skb, skb->ifindex, 0, &hop, &to, v6)) && hop.ifindex == skb->ifindex;
}

INLINE int enter_family(struct __sk_buff *skb, const enum hook hook, const enum wanted wanted, const bool v6)
{
	struct tuple t = {};
	bool marked = take_mark(skb);

	if (wanted == ALL_PACKETS || !parse_fast(skb, &t, L3_OFFSET, v6))
		return wanted == LEFT_BRIDGE ? TC_ACT_UNSPEC : call_datapath(skb, hook, v6);
	if (hook == HOOK_POD_EGRESS && marked && is_untouched(skb, &t, v6))
		return TC_ACT_UNSPEC;
	if (hook == HOOK_POD_INGRESS)
		return may_be_to_service(&t, v6) ? call_datapath(skb, hook, v6) : enter_directly(skb, &t, v6);
	if (is_irrelevant(skb, &t, hook, v6) || (wanted == LEFT_BRIDGE && !has_left_bridge(skb, &t, hook, v6)))
		return TC_ACT_UNSPEC;
	return call_datapath(skb, hook, v6);
}

INLINE int enter_wanted(struct __sk_buff *skb, const enum hook hook, const enum wanted wanted)
{
	if (is_tagged(skb, hook))
		return TC_ACT_UNSPEC;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return enter_family(skb, hook, wanted, false);
	return skb->protocol == bpf_htons(ETH_P_IPV6) ? enter_family(skb, hook, wanted, true) : TC_ACT_UNSPEC;
}

/* Handles a packet at one of the hooks of an interface. */
INLINE int prefilter(struct __sk_buff *skb, const enum hook hook)
{
	return enter_wanted(skb, hook, MAYBE_SERVICES);
}

INLINE int enter_bare_family(struct __sk_buff *skb, const enum hook hook, const bool v6)
{
	struct tuple t = {};

	if (parse_fast(skb, &t, 0, v6) && is_irrelevant(skb, &t, hook, v6))
		return TC_ACT_UNSPEC;
	return call_bare_datapath(skb, hook, v6);
}

/* A packet at one of the hooks of an interface whose packets have no Ethernet header. */
INLINE int prefilter_bare(struct __sk_buff *skb, const enum hook hook)
{
	if (!is_ingress(hook) && skb->tc_index == BARE_DONE) {
		skb->tc_index = 0;
		return TC_ACT_UNSPEC;
	}
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return enter_bare_family(skb, hook, false);
	return skb->protocol == bpf_htons(ETH_P_IPV6) ? enter_bare_family(skb, hook, true) : TC_ACT_UNSPEC;
}

#endif
