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

INLINE void sweep_one(const struct flow6_key *key, __u32 idle, const bool v6)
{
	struct tuple t = {.sport = key->sport, .dport = key->dport, .protocol = key->protocol};
	struct flow *f;

	copy_address(t.saddr, key->saddr);
	copy_address(t.daddr, key->daddr);
	f = flow_lookup(&t, TABLE_FLOWS, v6);
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
