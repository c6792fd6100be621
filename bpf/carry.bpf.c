/* What becomes of a packet that is, or may be, of a service: hooks.bpf.c hands it over, by family. */
#include "client.h"

/* Which hook it came in at. The field is everybody's: whoever sees the packet next finds it empty. */
INLINE enum hook entered(struct __sk_buff *skb)
{
	__u32 hook = skb->cb[0];

	skb->cb[0] = 0;
	return (enum hook)hook;
}

SEC("tc")
int carry4(struct __sk_buff *skb)
{
	return carry(skb, entered(skb), false);
}

SEC("tc")
int carry6(struct __sk_buff *skb)
{
	return carry(skb, entered(skb), true);
}

char LICENSE[] SEC("license") = "GPL";
