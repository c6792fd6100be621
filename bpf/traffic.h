/* Flows, packets and bytes of each backend. A service's are its backends' together, which user space adds up. */
#ifndef HYBRID_PROXY_TRAFFIC_H
#define HYBRID_PROXY_TRAFFIC_H

#include "maps.h"
#include "packet.h"

/* The backend's row of this CPU; NULL: traffic is not counted. */
INLINE struct traffic *traffic_of(__u32 backend)
{
	__u32 group = backend / TRAFFIC_GROUP * settings.traffic_cpus + bpf_get_smp_processor_id();
	__u32 index = group * TRAFFIC_GROUP + backend % TRAFFIC_GROUP;

	return settings.traffic_cpus && backend ? bpf_map_lookup_elem(&traffic, &index) : NULL;
}

/* Accounts packets of a flow and the bytes of their IP packets; `begun`: 1 if the flow begins with them. */
INLINE void account_bytes(__u32 backend, bool reply, __u32 packets, __u32 bytes, const __u64 begun)
{
	struct traffic *row = traffic_of(backend);

	if (!row)
		return;
	if (reply) {
		row->reply_packets += packets;
		row->reply_bytes += bytes;
	} else {
		row->packets += packets;
		row->bytes += bytes;
		row->flows += begun;
	}
}

/* A packet of a flow, or what stands for several. */
INLINE void account(struct __sk_buff *skb, __u32 backend, bool reply, const __u64 begun)
{
	__u32 segments = skb->gso_segs;

	account_bytes(backend, reply, segments ? segments : 1, skb->len - L3_OFFSET, begun);
}

/* A flow of which no program sees a packet: a socket's of this node. */
INLINE void account_flow(__u32 backend)
{
	struct traffic *row = traffic_of(backend);

	if (row)
		row->flows += 1;
}

/* The backend accepted a connection, so long after its SYN. */
INLINE void account_answer(__u32 backend, __u64 nanoseconds)
{
	struct traffic *row = traffic_of(backend);

	if (!row)
		return;
	row->answered += 1;
	row->connect_ns += nanoseconds;
}

#endif
