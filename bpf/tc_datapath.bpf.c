/* The datapath, one program for each family: hooks.bpf.c calls them for packets that may be a service's. */
#include "bare.h"
#include "datapath.h"

/* Reads and clears the call's argument. Other programs use the field, too, and must find it empty. */
INLINE __u32 take_hook(struct __sk_buff *skb)
{
	__u32 hook = skb->cb[0];

	skb->cb[0] = 0;
	return hook;
}

INLINE int carry_through(struct __sk_buff *skb, const bool v6)
{
	__u32 taken = take_hook(skb);
	enum hook hook = taken & CALL_HOOK_MASK;
	int action = datapath(skb, hook, v6);

	return taken & CALL_BARE ? leave_bare(skb, hook, action) : action;
}

SEC("tc")
int datapath4(struct __sk_buff *skb)
{
	return carry_through(skb, false);
}

SEC("tc")
int datapath6(struct __sk_buff *skb)
{
	return carry_through(skb, true);
}

char LICENSE[] SEC("license") = "GPL";
