/* Events of packets: dropped, rejected, of a backend that failed, traced. */
#ifndef HYBRID_PROXY_PACKET_EVENTS_H
#define HYBRID_PROXY_PACKET_EVENTS_H

#include "events.h"
#include "flow.h"
#include "maps.h"
#include "packet.h"
#include "scratch.h"

/* What `emit_event` is asked for, in one number: a global function takes no more. */
enum event_request {
	EVENT_REASON_MASK = 0xff, /* enum counter */
	EVENT_HOOK_SHIFT = 8,
	EVENT_HOOK_MASK = 0xff,
	EVENT_TRACED = 1 << 16, /* only if the packet is traced */
};

/* A packet of an established flow, which is traced only while there is room. */
INLINE bool is_routine(enum counter reason)
{
	return reason == COUNT_DNAT || reason == COUNT_REPLY || reason == COUNT_FAST;
}

INLINE bool is_traced_packet(const struct scratch *space, enum counter reason)
{
	const struct tuple *t = &space->packet.tuple;
	const __u32 *end = is_routine(reason) ? space->result.daddr : t->daddr;

	return is_traced(space->service, t->saddr, t->daddr) || is_traced(space->service, end, end);
}

/* Writes the event that `request` (enum event_request) names, unless this CPU has written too many. */
INLINE int emit_event(struct __sk_buff *skb, struct scratch *space, __u32 request, const bool v6)
{
	enum counter reason = request & EVENT_REASON_MASK;
	const struct tuple *shown = reason == COUNT_BACKEND_REFUSED ? &space->result : &space->packet.tuple;
	struct event *e;

	if (request & EVENT_TRACED && !is_traced_packet(space, reason))
		return 0;
	if (!(is_routine(reason) ? event_allowed(true) : event_allowed(false)))
		return 0;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e)
		return 0;
	fill_event(e, shown, reason, request >> EVENT_HOOK_SHIFT & EVENT_HOOK_MASK, v6);
	e->service = space->service;
	e->backend = space->backend;
	e->ifindex = skb->ifindex;
	e->tcp_flags = space->packet.tcp_flags;
	e->traced = !!(request & EVENT_TRACED);
	bpf_ringbuf_submit(e, 0);
	return 0;
}

GLOBAL_VERB_WITH(__u32, int, emit_event, 0)

/* Reports what happened to the packet. */
INLINE void report_event(struct __sk_buff *skb, enum counter reason, enum hook hook, const bool v6)
{
	if (settings.event_burst)
		CALL(emit_event, v6, skb, reason | hook << EVENT_HOOK_SHIFT);
}

/* Reports that the backend of the packet's flow failed. */
INLINE void report_failure(struct __sk_buff *skb, struct scratch *space, const struct flow *f, enum counter how,
			   enum hook hook, const bool v6)
{
	space->service = f->service;
	space->backend = f->backend;
	report_event(skb, how, hook, v6);
}

/* Reports that the backend refused the connection, by the packet that its client gets: it has the frontend. */
INLINE void report_refusal(struct __sk_buff *skb, struct scratch *space, const struct flow *reply, enum hook hook,
			   const bool v6)
{
	translated_tuple(&space->result, reply, space->packet.tuple.protocol);
	report_failure(skb, space, reply, COUNT_BACKEND_REFUSED, hook, v6);
}

/* Reports the packet if it is traced. */
INLINE void trace_event(struct __sk_buff *skb, enum counter reason, enum hook hook, const bool v6)
{
	if (settings.event_burst && is_tracing())
		CALL(emit_event, v6, skb, reason | hook << EVENT_HOOK_SHIFT | EVENT_TRACED);
}

#endif
