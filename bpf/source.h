/* Which sources the packets of a new flow may have: the checks of the kernel's that such packets miss.
 *
 * What a program answers, or sends on by its own lookup, never meets ip_route_input_slow(), fib_validate_source(),
 * ip6_rcv_core() and ip6_forward(). What they refuse is refused here, before anything remembers the packet. Packets
 * that are for no service are the stack's, and so are their sources: 0.0.0.0 asks for an address by DHCP.
 */
#ifndef HYBRID_PROXY_SOURCE_H
#define HYBRID_PROXY_SOURCE_H

#include "route.h"
#include "scratch.h"

/* As ip_route_input_slow(): multicast, limited broadcast, 0.0.0.0, loopback. Linux takes the rest of 0/8 and 240/4 for
 * plain addresses, and clusters number their pods from them.
 */
INLINE bool is_martian4(__be32 source)
{
	__u32 address = bpf_ntohl(source);

	return !address || address >> 24 == 127 || address >> 28 == 0xe || address == 0xffffffff;
}

/* As ip6_rcv_core() and ip6_forward(): multicast, ::, ::1, and IPv4's addresses in IPv6's form. */
INLINE bool is_martian6(const __u32 *a)
{
	if ((a[0] & bpf_htonl(0xff000000)) == bpf_htonl(0xff000000))
		return true;
	if (a[0] || a[1])
		return false;
	return a[2] == bpf_htonl(0xffff) || (!a[2] && (!a[3] || a[3] == bpf_htonl(1)));
}

/* fe80::/10 */
INLINE bool is_link_local(const __u32 *a)
{
	return (a[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000);
}

INLINE bool is_own(const __u32 *a, const bool v6)
{
	struct own_address key = {.family = v6 ? 6 : 4};

	if (v6)
		copy_address(key.address, a);
	else
		key.address[0] = a[0];
	return bpf_map_lookup_elem(&own_addresses, &key);
}

/* A ClusterIP, or an address that may become one. External and load-balancer IPs may be another host's own. */
INLINE bool is_virtual(const __u32 *a, const bool v6)
{
	__u32 flags = may_be_service(a, v6) ? find_frontend(a, 0, 0, v6) >> 32 : 0;

	return (flags & FRONTEND_ADDRESS && !(flags & FRONTEND_NODE_PORTS)) || is_unallocated(a, v6);
}

/* May a packet from outside the node have this source? */
INLINE bool is_martian(const __u32 *a, const bool v6)
{
	return (v6 ? is_martian6(a) : is_martian4(a[0])) || is_own(a, v6) || is_virtual(a, v6);
}

/* May the packet's source begin a flow, or be answered? STEP_NONE, or a drop. */
INLINE int check_source(struct __sk_buff *skb, struct scratch *space, __u32 unused, const bool v6)
{
	return is_martian(space->packet.tuple.saddr, v6) ? drop(COUNT_DROP_MARTIAN) : STEP_NONE;
}

GLOBAL_VERB(check_source)

#endif
