/* Events of packets: dropped, rejected, of a backend that failed, traced. */
#ifndef HYBRID_PROXY_PACKET_EVENTS_H
#define HYBRID_PROXY_PACKET_EVENTS_H

#include "events.h"
#include "maps.h"
#include "packet.h"
#include "scratch.h"

#define EVENT_HOOK_SHIFT 8 /* bits before it: the reason */
#define EVENT_TRACED (1 << 16)

/* A packet of an established flow, which is traced only while there is room. */
INLINE bool is_routine(__u32 reason)
{
	return reason == COUNT_DNAT || reason == COUNT_REPLY || reason == COUNT_FAST;
}

/* `detail` is reason | hook << EVENT_HOOK_SHIFT | EVENT_TRACED. */
INLINE int emit_event(struct __sk_buff *skb, struct scratch *space, __u32 detail, const bool v6)
{
	const struct tuple *t = &space->packet.tuple;
	__u32 reason = detail & ((1 << EVENT_HOOK_SHIFT) - 1), hook = detail >> EVENT_HOOK_SHIFT & 0xff;
	struct event *e;

	if (detail & EVENT_TRACED) {
		const __u32 *end = is_routine(reason) ? space->result.daddr : t->daddr;

		if (!is_traced(space->service, t->saddr, t->daddr) && !is_traced(space->service, end, end))
			return 0;
	}
	if (!(is_routine(reason) ? event_allowed(true) : event_allowed(false)))
		return 0;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e)
		return 0;
	fill_event(e, t, reason, hook, v6);
	e->service = space->service;
	e->backend = space->backend;
	e->ifindex = skb->ifindex;
	e->tcp_flags = space->packet.tcp_flags;
	e->traced = !!(detail & EVENT_TRACED);
	bpf_ringbuf_submit(e, 0);
	return 0;
}

GLOBAL_VERB(int, emit_event, 0)

#define EMIT_EVENT(skb, reason, hook)                                                                                  \
	do {                                                                                                           \
		if (settings.event_burst)                                                                              \
			CALL(emit_event, skb, (reason) | (hook) << EVENT_HOOK_SHIFT);                                  \
	} while (0)

/* The packet shows that the flow's backend failed. */
INLINE void report_failure(struct __sk_buff *skb, struct scratch *space, const struct flow *f, enum counter how,
			   const enum hook hook, const bool v6)
{
	space->service = f->service;
	space->backend = f->backend;
	EMIT_EVENT(skb, how, hook);
}

#define TRACE_EVENT(skb, reason, hook)                                                                                 \
	do {                                                                                                           \
		if (settings.event_burst && is_tracing())                                                              \
			CALL(emit_event, skb, (reason) | (hook) << EVENT_HOOK_SHIFT | EVENT_TRACED);                   \
	} while (0)

#endif
