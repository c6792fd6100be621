/* What becomes of a packet that is, or may be, of a service: hooks.bpf.c hands it over, by family. */
#include "datapath.h"

/* Which hook it came in at. The field is everybody's: whoever sees the packet next finds it empty. */
INLINE enum hook entered(struct __sk_buff *skb)
{
	__u32 hook = skb->cb[0];

	skb->cb[0] = 0;
	return (enum hook)hook;
}

SEC("tc")
int datapath4(struct __sk_buff *skb)
{
	return datapath(skb, entered(skb), false);
}

SEC("tc")
int datapath6(struct __sk_buff *skb)
{
	return datapath(skb, entered(skb), true);
}

char LICENSE[] SEC("license") = "GPL";
