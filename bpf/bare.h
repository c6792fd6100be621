/* Interfaces whose packets begin with the IP header: tunnels such as IPIP, GRE, WireGuard and TUN devices.
 *
 * The datapath expects an Ethernet header. So a packet that may be a service's gets an empty one. It does not disturb
 * the stack, which finds the IP header by skb->network_header. A redirect removes the header, or fills it in, as its
 * target needs. Only a packet that continues to the device itself must not have it. No helper removes it, but a
 * redirect to the same device does. Then the packet reaches the same hook again, with BARE_DONE in tc_index, a field
 * that belongs to tc alone.
 */
#ifndef HYBRID_PROXY_BARE_H
#define HYBRID_PROXY_BARE_H

#include "maps.h"
#include "packet.h"

#define BARE_DONE 0x4850 /* "HP" */

/* How the programs at interfaces call the datapath, in skb->cb[0]. */
enum datapath_call {
	CALL_HOOK_MASK = 0xff, /* enum hook */
	CALL_BARE = 1 << 8,    /* the packet got its Ethernet header here */
};

/* Let the packet go on from its hook: to the stack, or out of the device without the header. */
INLINE int leave_bare(struct __sk_buff *skb, const enum hook hook, int action)
{
	if (action != TC_ACT_UNSPEC || is_ingress(hook))
		return action;
	skb->tc_index = BARE_DONE;
	return bpf_redirect(skb->ifindex, 0);
}

/* At egress the checksum of the whole packet, where a device has computed it, covers the header. */
INLINE long push_ethernet(struct __sk_buff *skb, const enum hook hook)
{
	__be16 protocol = skb->protocol;

	if (bpf_skb_change_head(skb, ETH_HLEN, 0))
		return -1;
	return bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_proto), &protocol, sizeof(protocol),
				   is_ingress(hook) ? 0 : BPF_F_RECOMPUTE_CSUM);
}

/* On to the datapath, which finds CALL_BARE. */
INLINE int call_bare_datapath(struct __sk_buff *skb, const enum hook hook, const bool v6)
{
	if (push_ethernet(skb, hook))
		return TC_ACT_SHOT; /* no memory: untranslated it would only do harm */
	skb->cb[0] = hook | CALL_BARE;
	bpf_tail_call(skb, &datapaths, v6 ? DATAPATH6 : DATAPATH4);
	return leave_bare(skb, hook, pass_without_datapath(skb));
}

#endif
