/* Routes and neighbours, which the kernel's own tables have. */
#ifndef HYBRID_PROXY_ROUTE_H
#define HYBRID_PROXY_ROUTE_H

#include "config.h"
#include "hash.h"
#include "maps.h"
#include "packet.h"

#define NEIGHBOUR_SECONDS 16
#define NEIGHBOUR_BITS 10

/* When the last packet to a neighbour went out by the kernel, by hash of its address; jiffies. */
ARRAY_MAP(neighbour_times, __u64, 1 << NEIGHBOUR_BITS);

/* Ask for the next hop of `to`, a packet of `length` bytes: a BPF_FIB_LKUP_RET_*, or a negative errno. */
INLINE long fib_lookup(void *context, __u32 ifindex, __u32 length, struct bpf_fib_lookup *hop, const struct tuple *to,
		       const bool v6)
{
	__builtin_memset(hop, 0, sizeof(*hop));
	hop->family = v6 ? AF_INET6 : AF_INET;
	hop->l4_protocol = to->protocol;
	hop->sport = to->sport;
	hop->dport = to->dport;
	hop->tot_len = length < 0xffff ? length : 0xffff;
	hop->ifindex = ifindex;
	if (v6) {
		copy_address(hop->ipv6_src, to->saddr);
		copy_address(hop->ipv6_dst, to->daddr);
	} else {
		hop->ipv4_src = to->saddr[0];
		hop->ipv4_dst = to->daddr[0];
	}
	return bpf_fib_lookup(context, hop, sizeof(*hop), 0);
}

/* Has the lookup found a next hop, whether or not its neighbour is resolved? */
INLINE bool has_next_hop(long result)
{
	return result == BPF_FIB_LKUP_RET_SUCCESS || result == BPF_FIB_LKUP_RET_NO_NEIGH;
}

/* Is the packet for this node itself, or for its stack to decide? Then it needs no next hop. */
INLINE bool is_local_delivery(long result)
{
	return result == BPF_FIB_LKUP_RET_NOT_FWDED || result == BPF_FIB_LKUP_RET_FWD_DISABLED ||
	       result == BPF_FIB_LKUP_RET_UNSUPP_LWT;
}

/* bpf_fib_lookup() returns a neighbour's address, but does not mark the neighbour as used: the kernel would let it grow
 * stale, and notice nothing when its address changes. So now and then a packet goes out through the kernel's own
 * output, which probes a stale neighbour.
 */
INLINE bool neighbour_needs_refresh(const struct bpf_fib_lookup *hop, const bool v6)
{
	__u32 key = hash_address(v6 ? hop->ipv6_dst : &hop->ipv4_dst, v6) >> (32 - NEIGHBOUR_BITS), time = now();
	__u64 *last = bpf_map_lookup_elem(&neighbour_times, &key);

	if (!last || time - (__u32)READ_ONCE(*last) < NEIGHBOUR_SECONDS * settings.hz)
		return false;
	WRITE_ONCE(*last, time);
	return true;
}

#endif
