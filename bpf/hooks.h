/* The programs at an interface, one for each hook. The file that includes this defines what they do. */
#ifndef HYBRID_PROXY_HOOKS_H
#define HYBRID_PROXY_HOOKS_H

#include "config.h"

/* A packet at an interface whose packets have Ethernet headers; its tc action. */
INLINE int enter(struct __sk_buff *skb, const enum hook hook);

/* The same at a port of a bridge that is an uplink, and has programs of its own. */
INLINE int enter_port(struct __sk_buff *skb, const enum hook hook);

/* A packet at an interface whose packets begin with the IP header (bare.h). */
INLINE int enter_bare(struct __sk_buff *skb, const enum hook hook);

SEC("tc")
int pod_ingress(struct __sk_buff *skb)
{
	return enter(skb, HOOK_POD_INGRESS);
}

SEC("tc")
int pod_egress(struct __sk_buff *skb)
{
	return enter(skb, HOOK_POD_EGRESS);
}

SEC("tc")
int uplink_ingress(struct __sk_buff *skb)
{
	return enter(skb, HOOK_UPLINK_INGRESS);
}

SEC("tc")
int uplink_egress(struct __sk_buff *skb)
{
	return enter(skb, HOOK_UPLINK_EGRESS);
}

SEC("tc")
int port_ingress(struct __sk_buff *skb)
{
	return enter_port(skb, HOOK_UPLINK_INGRESS);
}

SEC("tc")
int port_egress(struct __sk_buff *skb)
{
	return enter_port(skb, HOOK_UPLINK_EGRESS);
}

SEC("tc")
int bare_ingress(struct __sk_buff *skb)
{
	return enter_bare(skb, HOOK_UPLINK_INGRESS);
}

SEC("tc")
int bare_egress(struct __sk_buff *skb)
{
	return enter_bare(skb, HOOK_UPLINK_EGRESS);
}

#endif
