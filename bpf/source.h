/* Which sources the packets of a new flow may have: the checks of the kernel's that such packets miss.
 *
 * What a program answers, or sends on by its own lookup, never meets ip_route_input_slow(), fib_validate_source(),
 * ip6_rcv_core() and ip6_forward(). What they refuse is refused here, before anything remembers the packet. Packets
 * that are to no service are left to the stack, and so are their sources: a client asks for its address by DHCP from
 * 0.0.0.0.
 */
#ifndef HYBRID_PROXY_SOURCE_H
#define HYBRID_PROXY_SOURCE_H

#include "count.h"
#include "hash.h"
#include "maps.h"
#include "node.h"
#include "route.h"
#include "scratch.h"
#include "service.h"

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

INLINE bool is_local_address(const __u32 *a, const bool v6)
{
	struct own_address key = {.family = v6 ? 6 : 4};

	if (v6)
		copy_address(key.address, a);
	else
		key.address[0] = a[0];
	return bpf_map_lookup_elem(&own_addresses, &key);
}

/* Is the address in a service range, and nobody's? No service has it, unless the caller finds one, and no interface of
 * this node (as with NodeLocal DNSCache).
 */
INLINE bool is_nobodys(const __u32 *a, const bool v6)
{
	return in_service_cidr(a, v6) && !is_local_address(a, v6);
}

/* A ClusterIP, or an address that may become one. External and load-balancer IPs may be another host's own. */
INLINE bool is_virtual(const __u32 *a, const bool v6)
{
	__u32 flags = may_be_service(a, v6) ? find_frontend(a, 0, 0, v6) >> 32 : 0;

	return (flags & FRONTEND_ADDRESS && !(flags & FRONTEND_NODE_PORTS)) || in_service_cidr(a, v6);
}

/* May a packet from outside the node have this source? */
INLINE bool is_martian(const __u32 *a, const bool v6)
{
	return (v6 ? is_martian6(a) : is_martian4(a[0])) || is_local_address(a, v6) || is_virtual(a, v6);
}

#define LOOPBACK_IFINDEX 1

/* Does a route with several next hops lead back by the one that was found, and by the interface that the packet came in
 * at as well? A lookup returns one of them.
 */
INLINE bool is_equal_path(struct __sk_buff *skb, const struct bpf_fib_lookup *hop, const __u32 *source, const bool v6)
{
	struct equal_route to = {.bits = v6 ? 32 + 128 : 32 + 32, .family = v6 ? 6 : 4};
	struct equal_path key = {.ingress = skb->ifindex, .ifindex = hop->ifindex};
	__u32 *route;

	copy_address(to.address, source);
	route = bpf_map_lookup_elem(&equal_routes, &to);
	if (!route)
		return false;
	key.route = *route;
	if (hop->family == AF_INET6)
		copy_address(key.gateway, hop->ipv6_dst);
	else
		key.gateway[0] = hop->ipv4_dst;
	if (same_address(key.gateway, source, v6))
		__builtin_memset(key.gateway, 0, sizeof(key.gateway));
	return bpf_map_lookup_elem(&equal_paths, &key);
}

/* Ask for the next hop of `to` as of a packet of this node's own; in a VRF, of its interface's table. */
INLINE long fib_lookup_as_host(struct __sk_buff *skb, struct bpf_fib_lookup *hop, const struct tuple *to, const bool v6)
{
	__u32 ifindex = skb->ifindex, *flags = bpf_map_lookup_elem(&interfaces, &ifindex);
	bool in_vrf = flags && *flags & INTERFACE_IN_VRF;
	long result = fib_lookup(skb, in_vrf ? ifindex : LOOPBACK_IFINDEX, 0, hop, to, v6);

	return result == BPF_FIB_LKUP_RET_FWD_DISABLED ? fib_lookup(skb, ifindex, 0, hop, to, v6) : result;
}

/* Ask for the way from `space->result.daddr` back to the packet's source, as fib_validate_source() does: as a packet
 * of this node's own. Where forwarding is off, only the stack itself can take the packet. To the stack, what comes in
 * at a bridge's port comes in at the `bridge`.
 */
INLINE bool has_path_back(struct __sk_buff *skb, struct scratch *space, const bool strict, __u32 bridge, const bool v6)
{
	const __u32 *source = space->packet.tuple.saddr;
	struct bpf_fib_lookup *hop = &space->hop;
	struct tuple back = {};
	long result;

	copy_address(back.saddr, space->result.daddr);
	copy_address(back.daddr, source);
	result = fib_lookup_as_host(skb, hop, &back, v6);
	if (result == BPF_FIB_LKUP_RET_FWD_DISABLED)
		return true;
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_NO_NEIGH &&
	    result != BPF_FIB_LKUP_RET_FRAG_NEEDED) {
		NOTE(NOTE_PATH_BACK, 0, strict);
		return false;
	}
	NOTE(NOTE_PATH_BACK, hop->ifindex, strict);
	return !strict || hop->ifindex == (bridge ? bridge : skb->ifindex) || is_equal_path(skb, hop, source, v6);
}

/* The kernel's rp_filter, or stricter (`--source-check`). */
INLINE bool passes_reverse_path(struct __sk_buff *skb, struct scratch *space, __u32 ifindex, const bool v6)
{
	__u32 *flags = bpf_map_lookup_elem(&interfaces, &ifindex);

	if (!flags || !(*flags & (v6 ? INTERFACE_STRICT6 : INTERFACE_STRICT4 | INTERFACE_LOOSE4)))
		return true;
	return has_path_back(skb, space, v6 || *flags & INTERFACE_STRICT4, *flags >> INTERFACE_BRIDGE_SHIFT, v6);
}

/* Checks whether the packet's source may begin a flow, or be answered. `ifindex` is where it came in, on its way to
 * `space->result.daddr`; 0: the reverse path is not checked. Returns STEP_CONTINUE, or a drop.
 */
INLINE enum step check_source(struct __sk_buff *skb, struct scratch *space, __u32 ifindex, const bool v6)
{
	if (is_martian(space->packet.tuple.saddr, v6))
		return drop(space, COUNT_DROP_MARTIAN);
	if (ifindex && !passes_reverse_path(skb, space, ifindex, v6))
		return drop(space, COUNT_DROP_REVERSE_PATH);
	return STEP_CONTINUE;
}

GLOBAL_VERB_WITH(__u32, enum step, check_source, STEP_DROP)

/* May the packet's source talk to a backend directly, and have a tuple reserved for that? If not, the packet is left to
 * the stack, which drops it.
 */
INLINE bool may_create_direct(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const __u32 *source = space->packet.tuple.saddr;

	return !(v6 ? is_martian6(source) : is_martian4(source[0])) &&
	       passes_reverse_path(skb, space, skb->ifindex, v6);
}

GLOBAL_VERB(int, may_create_direct, false)

/* `check_source` for a packet to `target`, where it came in. */
INLINE enum step check_source_towards(struct __sk_buff *skb, struct scratch *space, const __u32 *target, const bool v6)
{
	copy_address(space->result.daddr, target);
	return CALL(check_source, v6, skb, skb->ifindex);
}

#endif
