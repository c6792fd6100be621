/* Programs that the agent runs by BPF_PROG_TEST_RUN and that are attached nowhere. See also explain.bpf.c. */
#include "abi.h"
#include "config.h"
#include "count.h"
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

/* Did the client give up before its SYN, or a repeated one, had an answer? Of DSR no answer comes here. */
INLINE bool is_unanswered(const struct tuple *t, const struct flow *f)
{
	const __u32 others = FLOW_REPLIED | FLOW_ESTABLISHED | FLOW_RESET | FLOW_DSR | FLOW_DIRECT | FLOW_OTHERS;

	return t->protocol == IPPROTO_TCP && !(f->flags & others);
}

/* Whichever half comes first deletes both. */
INLINE void sweep_flow(const struct tuple *t, __u32 idle, const bool v6)
{
	struct flow *f = flow_lookup(t, TABLE_FLOWS, v6);

	if (!f || now() - READ_ONCE(f->seen) < idle)
		return;
	if (is_unanswered(t, f))
		count(COUNT_BACKEND_UNANSWERED);
	delete_pair(t, f, TABLE_FLOWS, v6);
}

INLINE void leave_flow(const struct tuple *t, const bool v6)
{
	struct flow f = {.flags = FLOW_OTHERS | FLOW_ESTABLISHED};

	fill_flow(&f, t, t, v6);
	flow_update(t, &f, TABLE_FLOWS, BPF_NOEXIST, v6);
}

/* One of the flows that the packet names. A function of its own, so that the verifier checks it once. */
__noinline int for_named(struct __sk_buff *skb, __u32 number, __u32 family, __u32 leaves)
{
	const __u32 keys = ETH_HLEN + offsetof(struct sweep, keys), idles = ETH_HLEN + offsetof(struct sweep, idle);
	struct flow6_key key;
	struct tuple t;
	__u32 idle;

	if (bpf_skb_load_bytes(skb, keys + number * sizeof(key), &key, sizeof(key)) ||
	    bpf_skb_load_bytes(skb, idles + number * sizeof(idle), &idle, sizeof(idle)))
		return -1;
	named_tuple(&t, &key);
	if (leaves)
		family == 6 ? leave_flow(&t, true) : leave_flow(&t, false);
	else
		family == 6 ? sweep_flow(&t, idle, true) : sweep_flow(&t, idle, false);
	return 0;
}

INLINE int for_each_named(struct __sk_buff *skb, const bool leaves)
{
	__u32 request[2]; /* count and family */

	if (bpf_skb_load_bytes(skb, ETH_HLEN, request, sizeof(request)))
		return -1;
	for (int i = 0; i < SWEEP_KEYS && i < request[0]; i++)
		for_named(skb, i, request[1], leaves);
	return 0;
}

/* Deletes those flows named in the packet that are still idle. User space proposes them, and the check is repeated here
 * because packets may have refreshed them since.
 */
SEC("tc")
int sweep(struct __sk_buff *skb)
{
	return for_each_named(skb, false);
}

/* Marks the flows named in the packet as another mode's (FLOW_OTHERS), unless a flow is known here already. */
SEC("tc")
int leave(struct __sk_buff *skb)
{
	return for_each_named(skb, true);
}

char LICENSE[] SEC("license") = "GPL";
