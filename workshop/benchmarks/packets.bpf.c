/* What packets cost, many in one run: of established flows, and such as are no service's.
 *
 * Each loop writes the next packet's header into the buffer; `loop_nothing` does only that, and the others are corrected
 * by it. `loop_lookup` is the floor: one look into the table of flows. The rest is the production path, `prefilter()` of
 * bpf/prefilter.h and `datapath()` of bpf/datapath.h, on maps that were filled by the same layout.
 */
#include "../../bpf/datapath.h"
#include "../../bpf/prefilter.h"

/* Here a tail call would end the loop. */
INLINE int call_datapath(struct __sk_buff *skb, const enum hook hook, const bool v6)
{
	return datapath(skb, hook, v6);
}

#define PACKETS 64 /* in one run: the verifier walks through all of them */

/* What to do, and what came of it (map `work`, one element). */
struct work {
	__u32 flows;  /* their clients' addresses follow each other from `first` */
	__u32 first;  /* host byte order */
	__u32 random; /* not 0 */
	__u32 target; /* where they send to, network byte order; this and the next two */
	__be16 sport;
	__be16 dport;
	__u32 header; /* the sum of IPv4's header but for the addresses, as it lies in memory */
	__u64 found;  /* packets that ended as wanted */
};

ARRAY_MAP(work, struct work, 1);

INLINE struct work *the_work(void)
{
	__u32 key = 0;

	return bpf_map_lookup_elem(&work, &key);
}

/* IPv4's checksum (RFC 1071). The header is not read: what was just written would come late, at a program's expense. */
INLINE __u16 header_sum(__u32 rest, __be32 saddr, __be32 daddr)
{
	__u64 sum = (__u64)rest + saddr + daddr;

	sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~((sum & 0xffff) + (sum >> 16));
}

/* The next packet: a random client's; xorshift32 (Marsaglia 2003). */
INLINE bool next_packet(struct __sk_buff *skb, struct work *w, struct tuple *t)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct iphdr *ip = data + ETH_HLEN;
	__be16 *ports = data + ETH_HLEN + sizeof(*ip);
	__u32 x = w->random;

	if ((void *)(ports + 2) > end)
		return false;
	x ^= x << 13;
	x ^= x >> 17;
	x ^= x << 5;
	w->random = x;
	t->saddr[0] = bpf_htonl(w->first + (__u32)((__u64)x * w->flows >> 32));
	t->daddr[0] = w->target;
	t->sport = w->sport;
	t->dport = w->dport;
	t->protocol = IPPROTO_TCP;
	ip->saddr = t->saddr[0];
	ip->daddr = t->daddr[0];
	ip->check = header_sum(w->header, t->saddr[0], t->daddr[0]);
	ports[0] = t->sport;
	ports[1] = t->dport;
	return true;
}

/* Each of these is a function that the verifier looks at once; the loops differ in which one they call. */
#define LOOP(NAME, WANTED, STEP)                                                                                       \
	__noinline int one_##NAME(struct __sk_buff * skb)                                                              \
	{                                                                                                              \
		struct work *w = the_work();                                                                           \
		struct tuple t = {};                                                                                   \
                                                                                                                       \
		return w && next_packet(skb, w, &t) ? (STEP) : -2;                                                     \
	}                                                                                                              \
                                                                                                                       \
	SEC("tc")                                                                                                      \
	int loop_##NAME(struct __sk_buff *skb)                                                                         \
	{                                                                                                              \
		struct work *w = the_work();                                                                           \
                                                                                                                       \
		if (!w)                                                                                                \
			return -1;                                                                                     \
		for (int i = 0; i < PACKETS; i++)                                                                      \
			if (one_##NAME(skb) == (WANTED))                                                               \
				w->found++;                                                                            \
		return 0;                                                                                              \
	}

INLINE bool look_up(const struct tuple *t)
{
	struct flow4_key key;

	flow4_key(&key, t);
	return bpf_map_lookup_elem(&flows4, &key);
}

LOOP(nothing, TC_ACT_UNSPEC, TC_ACT_UNSPEC)
LOOP(lookup, 1, look_up(&t))
LOOP(established, TC_ACT_REDIRECT, prefilter(skb, HOOK_POD_INGRESS))
LOOP(passing, TC_ACT_UNSPEC, prefilter(skb, HOOK_POD_INGRESS))
LOOP(passing_out, TC_ACT_UNSPEC, prefilter(skb, HOOK_POD_EGRESS))
LOOP(passing_uplink, TC_ACT_UNSPEC, prefilter(skb, HOOK_UPLINK_INGRESS))

char LICENSE[] SEC("license") = "GPL";
