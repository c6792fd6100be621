/* Counts each backend's open flows, for services whose algorithm needs that (SERVICE_FEWEST).
 *
 * A flow counts while the reply half of its pair is in `flows`. That half is stored as a new one, or not at all
 * (BPF_NOEXIST), and the kernel reports to one of several deleters that it was there. So a flow is counted off once,
 * whoever ends it. Flows that begin in `half_open`, mostly datagrams, count when they move to `flows`: the kernel
 * evicts entries there without a report.
 *
 * User space compares the counts with the flows every few seconds and writes the difference into `correction`
 * (open_counts.py). So it never writes to a word that programs add to.
 */
#ifndef HYBRID_PROXY_OPEN_FLOWS_H
#define HYBRID_PROXY_OPEN_FLOWS_H

#include "count.h"
#include "service.h"

/* A function of its own, so that the verifier checks it once, not at every end of a flow. */
__noinline int count_flow(__u32 backend, __u32 service, __u32 closed)
{
	struct backend *row = find_backend(backend, service);
	struct load *load;

	if (!row || !(READ_ONCE(row->flags) & BACKEND_COUNTED))
		return 0;
	load = bpf_map_lookup_elem(&loads, &backend);
	if (load)
		__sync_fetch_and_add(closed ? &load->closed : &load->opened, 1);
	return 0;
}

INLINE __u32 open_flows(const struct load *load)
{
	__s32 open = READ_ONCE(load->opened) - READ_ONCE(load->closed) + READ_ONCE(load->correction);

	return open > 0 ? open : 0; /* between two corrections it may be wrong */
}

#endif
