/* Programs that the agent runs by BPF_PROG_TEST_RUN, attached nowhere: the same verbs on the same maps. */
#include "flow.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct answer);
} answer SEC(".maps");

/* The clock of time stamps, as the return value. */
SEC("tc")
int read_clock(struct __sk_buff *skb)
{
	return (int)now();
}

INLINE bool answer_from_flow(struct answer *a, const struct packet *p, const bool v6)
{
	struct found found;

	find_flow(&found, &p->tuple, v6);
	if (!found.entry)
		return false;
	a->verdict = VERDICT_DNAT;
	a->known_flow = 1;
	a->service = found.entry->service;
	a->backend = found.entry->backend;
	a->port = found.entry->dport;
	copy_address(a->address, found.entry->daddr);
	return true;
}

INLINE int answer_for(struct __sk_buff *skb, struct answer *a, const bool v6)
{
	struct choice choice = {};
	struct packet p = {};

	parse_packet(skb, &p, v6);
	if (p.kind != PACKET_TRANSPORT || answer_from_flow(a, &p, v6))
		return 0;
	choice.sport = p.tuple.sport;
	choose(&choice, classify(p.tuple.saddr, skb->ifindex, v6), p.tuple.saddr, p.tuple.daddr, p.tuple.dport,
	       p.tuple.protocol, v6, false);
	a->verdict = choice.verdict;
	if (choice.verdict == VERDICT_UNTOUCHED && is_unallocated(p.tuple.daddr, v6))
		a->verdict = VERDICT_DROP;
	a->service = choice.service;
	a->backend = choice.backend;
	a->route = choice.route;
	a->port = choice.port;
	copy_address(a->address, choice.address);
	return 0;
}

/* What would happen to this packet if a pod sent it now; nothing is remembered. */
SEC("tc")
int explain(struct __sk_buff *skb)
{
	__u32 key = 0;
	struct answer *a = bpf_map_lookup_elem(&answer, &key);

	if (!a)
		return -1;
	__builtin_memset(a, 0, sizeof(*a));
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return answer_for(skb, a, true);
	return answer_for(skb, a, false);
}

INLINE void sweep_one(const struct flow6_key *key, __u32 idle, const bool v6)
{
	struct tuple t = {.sport = key->sport, .dport = key->dport, .protocol = key->protocol};
	struct flow *f;

	copy_address(t.saddr, key->saddr);
	copy_address(t.daddr, key->daddr);
	f = flow_in(&t, TABLE_FLOWS, v6);
	if (f && now() - READ_ONCE(f->seen) >= idle)
		delete_pair(&t, f, TABLE_FLOWS, v6);
}

/* Delete the flows named in the packet that are still idle: user space proposes, here it is checked again
 * beside the programs that refresh them.
 */
SEC("tc")
int sweep(struct __sk_buff *skb)
{
	struct sweep *request;
	void *data, *end;

	if (bpf_skb_pull_data(skb, ETH_HLEN + sizeof(struct sweep)))
		return -1;
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	request = data + ETH_HLEN;
	if ((void *)(request + 1) > end)
		return -1;
	for (int i = 0; i < SWEEP_KEYS; i++) {
		struct flow6_key key;

		if (i >= request->count)
			break;
		key = request->keys[i];
		if (request->family == 6)
			sweep_one(&key, request->idle[i], true);
		else
			sweep_one(&key, request->idle[i], false);
	}
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
