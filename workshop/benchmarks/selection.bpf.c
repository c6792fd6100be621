/* The choice of a backend for a new flow, many times, each for a random service.
 *
 * Ours is the production path: `choose_backend()` of bpf/pick.h on maps that the agent's own code filled. The peer's is
 * the layout that is best known: one hash of service slots (slot 0 counts the backends), one hash of backends,
 * with that layout's key and value sizes. The empty loop is what both are corrected by.
 */
#include "../../bpf/pick.h"

#define SERVICE_PORT bpf_htons(80)

struct peer_key {
	__be32 address;
	__be16 port;
	__u16 slot;
	__u8 protocol;
	__u8 scope;
	__u16 pad;
};

struct peer_slot {
	__u32 backend;
	__u16 count;
	__u16 reverse;
	__u32 flags;
};

struct peer_backend {
	__be32 address;
	__be16 port;
	__u8 protocol;
	__u8 state;
	__u32 zone;
};

HASH_MAP(peer_services, struct peer_key, struct peer_slot, 1048576);
HASH_MAP(peer_backends, __u32, struct peer_backend, 1048576);

/* What to do, and what came of it (map `work`, one element). */
struct work {
	__u32 rounds;
	__u32 services;	   /* their addresses follow each other from `first` */
	__u32 first;	   /* host byte order */
	__u32 random;	   /* not 0 */
	__u64 nanoseconds; /* of all rounds */
	__u64 chosen;	   /* rounds that ended with a backend */
	__u64 sum;	   /* of backends' addresses: the answer is used */
};

ARRAY_MAP(work, struct work, 1);

/* A random service's address; xorshift32 (Marsaglia 2003). */
INLINE __be32 next_address(struct work *w)
{
	__u32 x = w->random;

	x ^= x << 13;
	x ^= x >> 17;
	x ^= x << 5;
	w->random = x;
	return bpf_htonl(w->first + (__u32)((__u64)x * w->services >> 32));
}

static long one_empty(__u32 round, struct work *w)
{
	w->sum += next_address(w);
	w->chosen++;
	return 0;
}

static long one_choice(__u32 round, struct work *w)
{
	struct tuple asked = {
		.saddr = {bpf_htonl(0x0a4d010b)},
		.daddr = {next_address(w)},
		.dport = SERVICE_PORT,
		.protocol = IPPROTO_TCP,
	};
	struct choice c = {};

	choose_backend(&c, CLIENT_POD, &asked, false, true);
	if (c.verdict == VERDICT_DNAT) {
		w->sum += c.address[0] + c.port;
		w->chosen++;
	}
	return 0;
}

static long one_of_peer(__u32 round, struct work *w)
{
	struct peer_key key = {.address = next_address(w), .port = SERVICE_PORT, .protocol = IPPROTO_TCP};
	struct peer_slot *slot = bpf_map_lookup_elem(&peer_services, &key);
	struct peer_backend *backend;

	if (!slot || !slot->count)
		return 0;
	key.slot = bpf_get_prandom_u32() % slot->count + 1;
	slot = bpf_map_lookup_elem(&peer_services, &key);
	if (!slot)
		return 0;
	backend = bpf_map_lookup_elem(&peer_backends, &slot->backend);
	if (backend) {
		w->sum += backend->address + backend->port;
		w->chosen++;
	}
	return 0;
}

/* The loop's state is on the stack: bpf_loop takes no other. */
#define LOOP(NAME, ONE)                                                                                                \
	SEC("tc")                                                                                                      \
	int NAME(struct __sk_buff *skb)                                                                                \
	{                                                                                                              \
		__u32 key = 0;                                                                                         \
		struct work *given = bpf_map_lookup_elem(&work, &key), w;                                              \
                                                                                                                       \
		if (!given)                                                                                            \
			return -1;                                                                                     \
		w = *given;                                                                                            \
		w.nanoseconds = bpf_ktime_get_ns();                                                                    \
		bpf_loop(w.rounds, ONE, &w, 0);                                                                        \
		w.nanoseconds = bpf_ktime_get_ns() - w.nanoseconds;                                                    \
		*given = w;                                                                                            \
		return 0;                                                                                              \
	}

LOOP(loop_empty, one_empty)
LOOP(loop_ours, one_choice)
LOOP(loop_peer, one_of_peer)

char LICENSE[] SEC("license") = "GPL";
