/* Flows, packets and bytes of each backend. A service's are its backends' together, which user space adds up. */
#ifndef HYBRID_PROXY_TRAFFIC_H
#define HYBRID_PROXY_TRAFFIC_H

#include "packet.h"

/* The backend's row of this CPU; NULL: traffic is not counted. */
INLINE struct traffic *traffic_of(__u32 backend)
{
	__u32 group = backend / TRAFFIC_GROUP * settings.traffic_cpus + bpf_get_smp_processor_id();
	__u32 index = group * TRAFFIC_GROUP + backend % TRAFFIC_GROUP;

	return settings.traffic_cpus && backend ? bpf_map_lookup_elem(&traffic, &index) : NULL;
}

/* A packet of a flow; `begun`: 1 if it is the flow's first. */
INLINE void account(struct __sk_buff *skb, __u32 backend, bool reply, const __u64 begun)
{
	struct traffic *row = traffic_of(backend);
	__u32 segments;

	if (!row)
		return;
	segments = skb->gso_segs;
	if (!segments)
		segments = 1;
	if (reply) {
		row->reply_packets += segments;
		row->reply_bytes += skb->len - L3_OFFSET;
	} else {
		row->packets += segments;
		row->bytes += skb->len - L3_OFFSET;
		row->flows += begun;
	}
}

/* A flow of which no program sees a packet: a socket's of this node. */
INLINE void account_flow(__u32 backend)
{
	struct traffic *row = traffic_of(backend);

	if (row)
		row->flows += 1;
}

#endif
