/* Ranges of addresses, in tries: those of the clients that a service admits to its load-balancer IPs. The ranges of
 * service 0, which is none, are service CIDRs that have no room in map `node`.
 */
#ifndef HYBRID_PROXY_RANGES_H
#define HYBRID_PROXY_RANGES_H

#include "maps.h"
#include "packet.h"

/* Is the address in one of the service's ranges? */
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

#endif
