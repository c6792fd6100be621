/* tc at the host side of pods' interfaces and at uplinks: packets that may be a service's continue to
 * tc_datapath.bpf.c.
 *
 * Ingress of a pod's interface (from the pod) translates a service address into a backend's, and egress (to the pod) a
 * backend's reply into the service's. Between the two, routing, rp_filter, conntrack and policies see one plain,
 * symmetric flow from client to backend. Once that flow is established, both ends are handed over directly.
 *
 * Behind an uplink are clients beyond the node, and other nodes' pods. This node's own packets that bypass its socket
 * hooks leave there. Ingress translates packets to a service, and restores clients' addresses where the node's replaced
 * them. Egress translates backends' answers, and the packets of kernel clients and raw sockets of this node, and drops
 * packets to addresses that no service has. Tunnels whose packets have no Ethernet header are uplinks with programs of
 * their own (bare.h).
 */
#include "config.h"
#include "hooks.h"
#include "maps.h"
#include "prefilter.h"

/* One program for all hooks: the verifier checks it once, and one store replaces it for all of them. */
INLINE int call_datapath(struct __sk_buff *skb, const enum hook hook, const bool v6)
{
	skb->cb[0] = hook;
	bpf_tail_call(skb, &datapaths, v6 ? DATAPATH6 : DATAPATH4);
	return pass_without_datapath(skb);
}

INLINE int enter(struct __sk_buff *skb, const enum hook hook)
{
	return prefilter(skb, hook);
}

INLINE int enter_port(struct __sk_buff *skb, const enum hook hook)
{
	return enter_wanted(skb, hook, LEFT_BRIDGE);
}

INLINE int enter_bare(struct __sk_buff *skb, const enum hook hook)
{
	return prefilter_bare(skb, hook);
}

char LICENSE[] SEC("license") = "GPL";
