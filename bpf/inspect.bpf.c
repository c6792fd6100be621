/* Programs that the agent runs by BPF_PROG_TEST_RUN, attached nowhere: the same verbs on the same maps. See also
 * explain.bpf.c.
 */
#include "abi.h"
#include "config.h"
#include "flow.h"
#include "packet.h"

/* The clock of time stamps, as the return value. */
SEC("tc")
int read_clock(struct __sk_buff *skb)
{
	return (int)now();
}

INLINE void named_tuple(struct tuple *t, const struct flow6_key *key)
{
	__builtin_memset(t, 0, sizeof(*t));
	t->sport = key->sport;
	t->dport = key->dport;
	t->protocol = key->protocol;
	copy_address(t->saddr, key->saddr);
	copy_address(t->daddr, key->daddr);
}

INLINE void sweep_flow(const struct tuple *t, __u32 idle, const bool v6)
{
	struct flow *f = flow_lookup(t, TABLE_FLOWS, v6);

	if (f && now() - READ_ONCE(f->seen) >= idle)
		delete_pair(t, f, TABLE_FLOWS, v6);
}

INLINE void leave_flow(const struct tuple *t, const bool v6)
{
	struct flow f = {.flags = FLOW_OTHERS | FLOW_ESTABLISHED};

	fill_flow(&f, t, t, v6);
	flow_update(t, &f, TABLE_FLOWS, BPF_NOEXIST, v6);
}

INLINE void for_named(const struct flow6_key *key, __u32 idle, const bool leaves, const bool v6)
{
	struct tuple t;

	named_tuple(&t, key);
	if (leaves)
		leave_flow(&t, v6);
	else
		sweep_flow(&t, idle, v6);
}

/* What the packet asks for; NULL: it is too short. */
INLINE struct sweep *read_request(struct __sk_buff *skb)
{
	struct sweep *request;

	if (bpf_skb_pull_data(skb, ETH_HLEN + sizeof(struct sweep)))
		return NULL;
	request = (void *)(long)skb->data + ETH_HLEN;
	return (void *)(request + 1) > (void *)(long)skb->data_end ? NULL : request;
}

INLINE int for_each_named(struct __sk_buff *skb, const bool leaves)
{
	struct sweep *request = read_request(skb);

	if (!request)
		return -1;
	for (int i = 0; i < SWEEP_KEYS && i < request->count; i++) {
		struct flow6_key key = request->keys[i];

		if (request->family == 6)
			for_named(&key, request->idle[i], leaves, true);
		else
			for_named(&key, request->idle[i], leaves, false);
	}
	return 0;
}

/* Delete the flows named in the packet that are still idle: user space proposes, here it is checked again
 * beside the programs that refresh them.
 */
SEC("tc")
int sweep(struct __sk_buff *skb)
{
	return for_each_named(skb, false);
}

/* Leave the flows named in the packet to others, unless one is known here already. */
SEC("tc")
int leave(struct __sk_buff *skb)
{
	return for_each_named(skb, true);
}

char LICENSE[] SEC("license") = "GPL";
