/* tc at all hooks, while flows are carried over from maps of another layout (carry.py).
 *
 * Two datapaths are loaded: the former one with its maps, and ours. Each packet goes to the one that knows its flow,
 * and neither sees the other's packets. So both directions of a flow, and all its packets, meet the same entries at
 * every hook. One store to map `carrying` moves all hooks to the next state at once.
 *
 * The former maps' keys are another struct. `carrying` has the offsets of their fields; the rest of a key is 0.
 */
#include "flow.h"
#include "fragment.h"
#include "hooks.h"
#include "icmp_error.h"
#include "packet.h"
#include "prefilter.h"

#define FORMER_KEY_MASK 63 /* where a field may begin */

/* Longer than any key of flows. */
struct former_key {
	__u8 bytes[FORMER_KEY_MASK + 1 + 16];
};

/* Stand for the former flow tables and the former datapath, which replace them before the load. */
HASH_MAP(former_flows4, struct former_key, __u32, 1);
HASH_MAP(former_flows6, struct former_key, __u32, 1);
HASH_MAP(former_half4, struct former_key, __u32, 1);
HASH_MAP(former_half6, struct former_key, __u32, 1);
MAP(former_paths, BPF_MAP_TYPE_PROG_ARRAY, 0, __u32, __u32, DATAPATHS);

ARRAY_MAP(carrying, struct carrying, 1);
CPU_MAP(former_keys, struct former_key, 1);

INLINE void put_address(struct former_key *key, __u32 place, const __u32 *address, const bool v6)
{
	__u32 *words = (void *)(key->bytes + (place & FORMER_KEY_MASK));

	words[0] = address[0];
	if (!v6)
		return;
	words[1] = address[1];
	words[2] = address[2];
	words[3] = address[3];
}

INLINE void put_port(struct former_key *key, __u32 place, __be16 port)
{
	*(__be16 *)(key->bytes + (place & FORMER_KEY_MASK)) = port;
}

/* Do the former tables have a flow with this tuple? */
INLINE bool is_former(const struct carrying *self, const struct tuple *t, const bool v6)
{
	const struct flow_key_places *at = v6 ? &self->places6 : &self->places4;
	struct former_key *key;
	__u32 first = 0;

	key = bpf_map_lookup_elem(&former_keys, &first);
	if (!key)
		return false;
	__builtin_memset(key, 0, sizeof(*key));
	put_address(key, at->saddr, t->saddr, v6);
	put_address(key, at->daddr, t->daddr, v6);
	put_port(key, at->sport, t->sport);
	put_port(key, at->dport, t->dport);
	key->bytes[at->protocol & FORMER_KEY_MASK] = t->protocol;
	if (v6)
		return bpf_map_lookup_elem(&former_flows6, key) || bpf_map_lookup_elem(&former_half6, key);
	return bpf_map_lookup_elem(&former_flows4, key) || bpf_map_lookup_elem(&former_half4, key);
}

/* Reads the tuple by which the packet's flow is known. False: the packet has none, like a fragment before its first
 * one.
 */
INLINE bool read_tuple(struct __sk_buff *skb, struct tuple *t, const bool v6)
{
	struct fragments *datagram;
	struct fragment_key id;
	struct packet p = {};
	struct tuple inner = {};

	parse_packet(skb, &p, v6);
	*t = p.tuple;
	if (p.kind == PACKET_ICMP_ERROR) {
		if (!parse_inner(skb, p.l4 + ICMP_HEADER, &inner, v6))
			return false;
		reverse_tuple(t, &inner);
		return true;
	}
	if (p.kind != PACKET_FRAGMENT || p.fragment.part == FIRST_FRAGMENT)
		return p.kind == PACKET_TRANSPORT || p.kind == PACKET_FRAGMENT;
	write_datagram_key(&id, &p);
	datagram = bpf_map_lookup_elem(&fragments, &id);
	if (!datagram || !datagram->known)
		return false;
	t->sport = datagram->sport;
	t->dport = datagram->dport;
	t->protocol = datagram->protocol;
	return true;
}

/* Does the former datapath serve this packet? It also keeps packets without a tuple, as long as it has flows. */
INLINE bool serves_former(struct __sk_buff *skb, const bool v6)
{
	struct carrying *self;
	struct tuple t = {};
	__u32 first = 0;

	self = bpf_map_lookup_elem(&carrying, &first);
	if (!self || READ_ONCE(self->state) == CARRY_NEW_FLOWS_OURS)
		return !self || !read_tuple(skb, &t, v6) || is_former(self, &t, v6);
	return READ_ONCE(self->state) == CARRY_ALL_FORMER;
}

INLINE int call_datapath(struct __sk_buff *skb, const enum hook hook, const bool v6)
{
	bool former = serves_former(skb, v6);

	skb->cb[0] = hook;
	if (former)
		bpf_tail_call(skb, &former_paths, v6 ? DATAPATH6 : DATAPATH4);
	else
		bpf_tail_call(skb, &datapaths, v6 ? DATAPATH6 : DATAPATH4);
	return pass_without_datapath(skb);
}

/* The prefilter's bitmaps are not asked: each of the two generations has its own. */
INLINE int enter(struct __sk_buff *skb, const enum hook hook)
{
	return enter_wanted(skb, hook, ALL_PACKETS);
}

/* It waits for the agent while flows are carried over. */
INLINE int enter_port(struct __sk_buff *skb, const enum hook hook)
{
	return TC_ACT_UNSPEC;
}

/* The former datapath gets none of these packets. Older versions had no programs at interfaces without Ethernet
 * headers, and would leave the added header on the packet.
 */
INLINE int enter_bare(struct __sk_buff *skb, const enum hook hook)
{
	struct carrying *self;
	__u32 first = 0;

	self = bpf_map_lookup_elem(&carrying, &first);
	if (!self || READ_ONCE(self->state) == CARRY_ALL_FORMER)
		return TC_ACT_UNSPEC;
	return prefilter_bare(skb, hook);
}

char LICENSE[] SEC("license") = "GPL";
