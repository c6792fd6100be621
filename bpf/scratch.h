/* What is too large for the stack of 512 bytes, and what verbs leave for each other; tc programs run one at a time on a
 * CPU.
 *
 * The larger verbs are global functions. The verifier looks at each of these once, by itself, and not again for every
 * way that leads there; in return they are given the packet and numbers alone, and find the rest here.
 */
#ifndef HYBRID_PROXY_SCRATCH_H
#define HYBRID_PROXY_SCRATCH_H

#include "nat.h"
#include "traffic.h"

/* An ICMP error about a flow of ours, taken apart. */
struct inner_packet {
	struct tuple tuple;  /* as the error has it: sent by the receiver of the error */
	struct tuple before; /* as it was before translation */
	__u32 offset;
	__u32 l4;
	__u32 flags; /* of the flow of the opposite direction, which tells */
};

struct scratch {
	struct packet packet;
	struct choice choice;
	__u32 service; /* whose packet it is, as far as is known, and which backend's: for events */
	__u32 backend;
	__u32 avoid; /* a backend that was tried in vain, for the choice of another */
	struct flow flow;
	struct tuple result; /* what the packet becomes */
	struct tuple reply;  /* the key of its answers */
	struct inner_packet inner;
	struct bpf_fib_lookup hop;
	struct fragment_key datagram;
	struct fragments fragments;
	struct queued_fragment first; /* a first fragment, while those that waited for it take its place */
	__u32 next_place;
};

CPU_MAP(scratch, struct scratch, 1);

INLINE struct scratch *scratch_space(void)
{
	__u32 key = 0;

	return bpf_map_lookup_elem(&scratch, &key);
}

/* Where a program runs, which is where its clients are. */
enum place {
	AT_POD,	   /* ingress of a pod's interface */
	AT_UPLINK, /* ingress of an uplink */
	AT_NODE,   /* egress of an uplink: what this node itself sends, past its own sockets' hooks */
};

/* A global verb for each family: `NAME4` and `NAME6` of the inlined `NAME`, which takes scratch space and `v6` beside.
 * The barrier uses both arguments: what the compiler sees unused, its callers leave unset, and the verifier refuses
 * that.
 */
#define GLOBAL_VERB(NAME)                                                                                              \
	__noinline int NAME##4(struct __sk_buff * skb, __u32 detail)                                                   \
	{                                                                                                              \
		struct scratch *space = scratch_space();                                                               \
                                                                                                                       \
		asm volatile("" : "+r"(detail) : "r"(skb));                                                            \
		return space ? NAME(skb, space, detail, false) : TC_ACT_SHOT;                                          \
	}                                                                                                              \
	__noinline int NAME##6(struct __sk_buff * skb, __u32 detail)                                                   \
	{                                                                                                              \
		struct scratch *space = scratch_space();                                                               \
                                                                                                                       \
		asm volatile("" : "+r"(detail) : "r"(skb));                                                            \
		return space ? NAME(skb, space, detail, true) : TC_ACT_SHOT;                                           \
	}

#define CALL(NAME, skb, detail) (v6 ? NAME##6(skb, detail) : NAME##4(skb, detail))

/* What a verb leaves for its program to do: called from there and not from each other, their frames share the stack's
 * 512 bytes one after the other. None of these numbers is a verdict of the kernel's.
 */
enum step {
	STEP_NONE = 0x100, /* the packet was not touched, and is no service's */
	STEP_SERVE,
	STEP_NOT_SERVICE,
	STEP_EGRESS,
	STEP_CREATE_FLOW,
	STEP_CREATE_DIRECT,
	STEP_RESERVE,
	STEP_STORE,
	STEP_FORWARD,
	STEP_REJECT,
	STEP_ECHO,
	STEP_ERROR_INGRESS,
	STEP_ERROR_EGRESS,
	STEP_CREATE_DSR,
	STEP_ENCAP,
	STEP_DECAP,
	STEP_FOLLOW,
};

#endif
