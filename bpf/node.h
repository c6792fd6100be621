/* This node's own settings, which may change while programs run: its addresses, how pods are recognized (map `node`),
 * and ranges of addresses.
 */
#ifndef HYBRID_PROXY_NODE_H
#define HYBRID_PROXY_NODE_H

#include "maps.h"
#include "packet.h"

/* This node's primary address, zeros where it has none of the family. */
INLINE void primary_address(__u32 *address, const bool v6)
{
	const struct node *self = &own_node;

	if (v6)
		copy_address(address, self->primary6);
	else
		address[0] = self->primary4;
}

/* Classifies the source of a packet, by its address or by the interface at which it came in. */
INLINE enum client classify_client(const __u32 *a, __u32 ifindex, const bool v6)
{
	const struct node *self = &own_node;

	if (self->pods_by_link)
		return bpf_map_lookup_elem(&pod_links, &ifindex) ? CLIENT_POD : CLIENT_EXTERNAL;
	if (!v6)
		return self->pod4_known && (a[0] & self->pod4_mask) == self->pod4 ? CLIENT_POD : CLIENT_EXTERNAL;
	if (self->pod6_known && (a[0] & self->pod6_mask[0]) == self->pod6[0] &&
	    (a[1] & self->pod6_mask[1]) == self->pod6[1] && (a[2] & self->pod6_mask[2]) == self->pod6[2] &&
	    (a[3] & self->pod6_mask[3]) == self->pod6[3])
		return CLIENT_POD;
	return CLIENT_EXTERNAL;
}

/* Is the address in one of the service's ranges? Those of service 0, which is none, are the service CIDRs that have no
 * room in map `node`.
 */
INLINE bool in_ranges(__u32 service, const __u32 *address, const bool v6)
{
	if (v6) {
		struct source_range6_key key = {.bits = 160, .service = service};

		copy_address(key.address, address);
		return bpf_map_lookup_elem(&source_ranges6, &key);
	} else {
		struct source_range4_key key = {.bits = 64, .service = service, .address = address[0]};

		return bpf_map_lookup_elem(&source_ranges4, &key);
	}
}

/* Is the address in a range that services get theirs from? */
INLINE bool in_service_cidr(const __u32 *a, const bool v6)
{
	const struct node *self = &own_node;

#pragma unroll
	for (int i = 0; i < SERVICE_CIDRS; i++) {
		if (!v6 && i < self->cidr4_count && (a[0] & self->mask4[i]) == self->cidr4[i])
			return true;
		if (v6 && i < self->cidr6_count && (a[0] & self->mask6[i][0]) == self->cidr6[i][0] &&
		    (a[1] & self->mask6[i][1]) == self->cidr6[i][1] &&
		    (a[2] & self->mask6[i][2]) == self->cidr6[i][2] && (a[3] & self->mask6[i][3]) == self->cidr6[i][3])
			return true;
	}
	return (v6 ? self->cidr6_count : self->cidr4_count) > SERVICE_CIDRS && in_ranges(0, a, v6);
}

#endif
