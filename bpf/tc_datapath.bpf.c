/* What becomes of a packet that may be a service's: hooks.bpf.c calls these programs, one for each family. */
#include "bare.h"
#include "datapath.h"

/* At which hook the packet is. The field is everybody's: the program that sees the packet next finds it empty. */
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
