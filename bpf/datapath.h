/* The way of a packet through each of the tc hooks: the verbs in order.
 *
 * hooks.bpf.c has left packets that are certainly no service's. All others come here, and every function below names
 * what happens to them, one verb after the other; scratch.h says why a verb returns the next step instead of taking it.
 */
#ifndef HYBRID_PROXY_DATAPATH_H
#define HYBRID_PROXY_DATAPATH_H

#include "classify.h"
#include "direct.h"
#include "dsr.h"
#include "egress.h"
#include "flow_create.h"
#include "follow.h"
#include "forward.h"
#include "icmp_error.h"
#include "packet_events.h"
#include "reject.h"
#include "scratch.h"
#include "serve.h"

/* The tuples of a flow that begins are known, but perhaps for the port that the backend sees; or follow one that there
 * is, or is by then.
 */
INLINE enum step begin_or_follow(struct __sk_buff *skb, enum step step, const enum hook hook, const bool v6)
{
	if (step == STEP_STORE)
		step = CALL(store_flow, v6, skb, hook);
	if (step == STEP_RESERVE)
		step = CALL(reserve_tuple, v6, skb);
	if (step == STEP_CONTINUE)
		step = CALL(store_flow, v6, skb, hook);
	return step == STEP_FOLLOW ? CALL(follow_again, v6, skb, hook) : step;
}

/* To a frontend, perhaps. */
INLINE enum step to_service(struct __sk_buff *skb, const enum hook hook, const bool v6)
{
	enum step step = CALL(serve, v6, skb, hook);

	if (step == STEP_CHOOSE)
		step = CALL(choose, v6, skb, hook);
	if (step == STEP_CREATE)
		step = CALL(prepare_flow, v6, skb, hook);
	if (step == STEP_CREATE_DSR)
		step = CALL(create_dsr_flow, v6, skb);
	return begin_or_follow(skb, step, hook, v6);
}

/* From a backend, or to one directly, or neither. */
INLINE enum step beside_services(struct __sk_buff *skb, const enum hook hook, const bool v6)
{
	enum step step = CALL(from_backend, v6, skb, hook);

	if (step == STEP_CONTINUE)
		step = CALL(to_backend, v6, skb, hook);
	return begin_or_follow(skb, step, hook, v6);
}

/* Encapsulated, from the node that a client sent it to. */
INLINE enum step from_other_node(struct __sk_buff *skb, const enum hook hook, const bool v6)
{
	return begin_or_follow(skb, CALL(decap, v6, skb), hook, v6);
}

/* Send out what does not go through the stack. */
INLINE enum step transmit(struct __sk_buff *skb, const struct scratch *space, enum step step, const enum hook hook,
			  const bool v6)
{
	if (step == STEP_FORWARD)
		return CALL(forward, v6, skb);
	if (step == STEP_ENCAP)
		return CALL(encap, v6, skb);
	if (step == STEP_ECHO)
		return CALL(send_echo_reply, v6, skb);
	if (step == STEP_REJECT) {
		step = CALL(send_reject, v6, skb);
		if (step != STEP_DROP)
			report_event(skb, space->reason, hook, v6);
	}
	return step;
}

/* Ingress of a pod's interface: from the pod. */
INLINE enum step from_pod(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const enum hook hook = HOOK_POD_INGRESS;
	enum step step = classify_ingress(skb, space, hook, v6);

	if (step == STEP_ICMP_ERROR)
		return CALL(translate_error_ingress, v6, skb, hook);
	if (step == STEP_SERVE)
		step = to_service(skb, hook, v6);
	if (step == STEP_NOT_SERVICE)
		step = beside_services(skb, hook, v6);
	return transmit(skb, space, step, hook, v6);
}

/* Egress of a pod's interface: to the pod. */
INLINE enum step to_pod(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const enum hook hook = HOOK_POD_EGRESS;
	enum step step = classify_egress(skb, space, hook, v6);

	if (step == STEP_ICMP_ERROR)
		return CALL(translate_error_egress, v6, skb, hook);
	if (step == STEP_SERVE) /* the node sends it, wherever the route to a backend that is gone leads */
		step = to_service(skb, HOOK_UPLINK_EGRESS, v6);
	if (step == STEP_NOT_SERVICE)
		step = CALL(egress, v6, skb, hook);
	return transmit(skb, space, step, hook, v6);
}

/* Ingress of an uplink: from clients beyond the node, and from other nodes. */
INLINE enum step from_uplink(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const enum hook hook = HOOK_UPLINK_INGRESS;
	enum step step = classify_ingress(skb, space, hook, v6);

	if (step == STEP_ICMP_ERROR)
		return CALL(translate_error_ingress, v6, skb, hook);
	if (step == STEP_DECAP)
		step = from_other_node(skb, hook, v6);
	if (step == STEP_SERVE)
		step = to_service(skb, hook, v6);
	if (step == STEP_NOT_SERVICE)
		step = beside_services(skb, hook, v6);
	return transmit(skb, space, step, hook, v6);
}

/* Egress of an uplink: what backends of this node answer to clients beyond it, and what the node itself sends. */
INLINE enum step to_uplink(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const enum hook hook = HOOK_UPLINK_EGRESS;
	enum step step = classify_egress(skb, space, hook, v6);

	if (step == STEP_ICMP_ERROR)
		return CALL(translate_error_egress, v6, skb, hook);
	if (step == STEP_SERVE)
		step = to_service(skb, hook, v6);
	if (step == STEP_NOT_SERVICE)
		step = CALL(egress, v6, skb, hook);
	return transmit(skb, space, step, hook, v6);
}

/* The tc action of a step. A drop is reported, unless events are switched off. */
INLINE int to_tc_action(struct __sk_buff *skb, const struct scratch *space, enum step step, const enum hook hook,
			const bool v6)
{
	if (step == STEP_DROP)
		report_event(skb, space->reason, hook, v6);
	if (step == STEP_DROP || step == STEP_QUEUED)
		return TC_ACT_SHOT;
	return step == STEP_REDIRECT ? TC_ACT_REDIRECT : TC_ACT_UNSPEC;
}

/* A packet at one of the hooks; its tc action. */
INLINE int datapath(struct __sk_buff *skb, const enum hook hook, const bool v6)
{
	struct scratch *space = scratch_space();
	enum step step = STEP_PASS;

	if (!space)
		return TC_ACT_SHOT;
	if (hook == HOOK_POD_INGRESS)
		step = from_pod(skb, space, v6);
	else if (hook == HOOK_POD_EGRESS)
		step = to_pod(skb, space, v6);
	else if (hook == HOOK_UPLINK_INGRESS)
		step = from_uplink(skb, space, v6);
	else if (hook == HOOK_UPLINK_EGRESS)
		step = to_uplink(skb, space, v6);
	return to_tc_action(skb, space, step, hook, v6);
}

#endif
