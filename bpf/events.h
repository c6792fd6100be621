/* Events for user space (ring buffer `events`): dropped, rejected and traced packets, a limited number per second and
 * CPU. Counters count all of them.
 */
#ifndef HYBRID_PROXY_EVENTS_H
#define HYBRID_PROXY_EVENTS_H

#include "maps.h"
#include "node.h"
#include "packet.h"
#include "ratelimit.h"

/* May this CPU emit another event in this second? `spare`: only while more than half of them are left. */
INLINE bool event_allowed(const bool spare)
{
	__u32 key = 0;
	__u64 *budget = bpf_map_lookup_elem(&event_budget, &key);

	return budget && ratelimit_allow(budget, settings.event_burst, spare ? settings.event_burst / 2 : 0);
}

/* Is anything traced? While nothing is, tracing costs no more than this question. */
INLINE bool is_tracing(void)
{
	return READ_ONCE(own_node.trace);
}

/* Does `trace` select this? `client` is one end of the packet, `other` another, or the same. */
INLINE bool is_traced(__u32 service, const __u32 *client, const __u32 *other)
{
	const struct node *self = &own_node;
	const __u32 *wanted = self->trace_services;

	if (wanted[0] && wanted[0] != service && wanted[1] != service && wanted[2] != service && wanted[3] != service)
		return false;
	return same_address(self->trace_client, (const __u32[4]){}, true) ||
	       same_address(self->trace_client, client, true) || same_address(self->trace_client, other, true);
}

INLINE void fill_event(struct event *e, const struct tuple *t, enum counter reason, enum hook hook, const bool v6)
{
	e->time = bpf_ktime_get_ns();
	e->reason = reason;
	e->hook = hook;
	e->family = v6 ? 6 : 4;
	e->sport = t->sport;
	e->dport = t->dport;
	e->protocol = t->protocol;
	e->pad = 0;
	copy_address(e->saddr, t->saddr);
	copy_address(e->daddr, t->daddr);
}

#endif
