/* What becomes of a packet that may be a service's: hooks.bpf.c calls these programs, one for each family. */
#include "datapath.h"

/* At which hook the packet is. The field is everybody's: the program that sees the packet next finds it empty. */
INLINE enum hook take_hook(struct __sk_buff *skb)
{
	__u32 hook = skb->cb[0];

	skb->cb[0] = 0;
	return (enum hook)hook;
}

SEC("tc")
int datapath4(struct __sk_buff *skb)
{
	return datapath(skb, take_hook(skb), false);
}

SEC("tc")
int datapath6(struct __sk_buff *skb)
{
	return datapath(skb, take_hook(skb), true);
}

char LICENSE[] SEC("license") = "GPL";
