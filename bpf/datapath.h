/* What a client sends: to a service, to a backend directly, and what a backend sends back. */
#ifndef HYBRID_PROXY_DATAPATH_H
#define HYBRID_PROXY_DATAPATH_H

#include "dsr.h"

/* May packets of the flow be handed to a pod past the stack? Only where the other direction goes past it, too:
 * conntrack that sees one half of a connection calls the rest invalid. So both ends are pods of this node, or the flow
 * is masqueraded.
 */
INLINE bool skips_stack(const struct flow *f, const enum place place)
{
	if (place == AT_NODE || !settings.fast_path || !f->ifindex || !(f->flags & FLOW_ESTABLISHED))
		return false;
	return place == AT_POD || f->flags & FLOW_MASQUERADE;
}

/* Does the packet, or each of those that it stands for, pass through the interface? The handover would not ask. What
 * is too long goes another way, where its sender is told. Small ones always pass. The helper tells the MTU; its own
 * comparison would count BIG TCP's extra header.
 */
INLINE bool fits(struct __sk_buff *skb, const struct packet *p, __u32 ifindex, const bool v6)
{
	__u32 mtu = 0;

	if (skb->len <= L3_OFFSET + SMALLEST_MTU || !settings.can_check_mtu)
		return true;
	return bpf_check_mtu(skb, ifindex, &mtu, 0, 0) < 0 || packet_length(skb, p, v6) <= mtu;
}

/* Is the pod's interface still there? A pod made anew has another one: until the flow has learned which, its packets
 * are the stack's.
 */
INLINE bool has_pod_link(const struct flow *f)
{
	if (has_link(f->ifindex))
		return true;
	count(COUNT_LINK_GONE);
	return false;
}

/* May this packet be handed to the pod of its flow directly? */
INLINE bool can_hand_over(struct __sk_buff *skb, const struct packet *p, const struct flow *f, const enum place place,
			  const bool v6)
{
	return skips_stack(f, place) && has_pod_link(f) && fits(skb, p, f->ifindex, v6);
}

/* Hand the packet of an established flow to a pod of this node directly, or send it on as its flow says. `direct`: it
 * is known to go directly.
 */
INLINE int dispatch(struct __sk_buff *skb, struct scratch *space, const enum place place, bool direct, const bool v6)
{
	const struct packet *p = &space->packet;
	const struct flow *flow = &space->flow;
	const __u32 answer_to_node = FLOW_NODE | FLOW_REPLY;

	direct = direct || can_hand_over(skb, p, flow, place, v6);
	account(skb, flow->backend, flow->flags & FLOW_REPLY, 0);
	TRACE_EVENT(skb, flow->flags & FLOW_REPLY ? COUNT_REPLY : COUNT_DNAT, place);
	if (flow->flags & FLOW_MASQUERADE && !direct && (flow->flags & answer_to_node) != answer_to_node) {
		count(flow->flags & FLOW_REPLY ? COUNT_REPLY : COUNT_DNAT);
		return STEP_FORWARD;
	}
	rewrite(skb, p, &space->result, v6);
	if (flow->flags & FLOW_HAIRPIN) {
		swap_macs(skb);
		return bpf_redirect(skb->ifindex, 0);
	}
	if ((flow->flags & answer_to_node) == answer_to_node) {
		count(COUNT_REPLY);
		if (skb->ifindex == flow->ifindex || !has_pod_link(flow))
			return pass();
		set_macs(skb, flow->mac); /* or the stack takes it for another machine's */
		return bpf_redirect(flow->ifindex, BPF_F_INGRESS);
	}
	if (!direct) {
		count(flow->flags & FLOW_REPLY ? COUNT_REPLY : COUNT_DNAT);
		return pass();
	}
	set_macs(skb, flow->mac);
	count(COUNT_FAST);
	return bpf_redirect_peer(flow->ifindex, 0);
}

/* Does the packet come in where its flow lives, perhaps by now? */
INLINE bool admit(struct __sk_buff *skb, struct scratch *space, const struct found *found, __u32 place, const bool v6)
{
	const struct packet *p = &space->packet;

	if (!comes_from_origin(skb, space, &p->tuple, found->entry, place, v6))
		return false;
	if (found->entry->origin != origin_here(skb, place) && proves_origin(p, found->entry))
		move_origin(skb, p, found, place, v6);
	return true;
}

/* The packet's flow says what to do: rewrite, then hand over or pass on. */
INLINE int follow(struct __sk_buff *skb, struct scratch *space, struct found *found, const enum place place,
		  const bool direct, const bool v6)
{
	struct packet *p = &space->packet;

	note_repeated_syn(p, found, v6);
	if (completes_handshake(p, found)) {
		establish(&p->tuple, found->entry, found->table, v6);
		if (found->table == TABLE_HALF_OPEN)
			find_flow(found, &p->tuple, v6);
		if (!found->entry)
			return drop(COUNT_DROP_FLOW_LOST);
	}
	space->flow = *found->entry;
	if (space->flow.tag != flow_tag(&p->tuple, v6))
		return drop(COUNT_DROP_FLOW_LOST);
	space->service = space->flow.service;
	space->backend = space->flow.backend;
	if (space->flow.flags & FLOW_DSR) {
		account(skb, space->flow.backend, false, 0);
		refresh_dsr(p, found->entry, found->table);
		translated_tuple(&space->result, &space->flow, p->tuple.protocol);
		return STEP_ENCAP;
	}
	if (refresh(p, found->entry, found->table, v6))
		close_pair(&p->tuple, &space->flow, found->table, v6);
	translated_tuple(&space->result, &space->flow, p->tuple.protocol);
	return dispatch(skb, space, place, direct, v6);
}

#define SYN_REPEAT_TIME (500000000u >> KTIME_SHIFT) /* half a second */

/* May a SYN begin anew with this flow's ports? After a FIN that is the backend's to say, as with conntrack: the other
 * half may still be open. A pair of which both have ended is gone.
 */
INLINE bool has_ended(const struct flow *f)
{
	return f->flags & (FLOW_RESET | FLOW_COLLISION);
}

/* Forget a flow that is about to begin anew. After a clash the other half stays: it shows that the tuple is taken. */
INLINE void evict(const struct tuple *key, const struct found *found, const bool v6)
{
	if (found->entry->flags & FLOW_COLLISION)
		flow_delete(key, found->table, v6);
	else
		delete_pair(key, found->entry, found->table, v6);
}

/* Has the backend of a flow been silent for so long that its client's SYN comes again? Clients wait a second before
 * they repeat one (RFC 6298); what comes sooner is a copy of the first.
 */
INLINE bool is_unanswered(const struct flow *f)
{
	return !(f->flags & (FLOW_REPLIED | FLOW_ESTABLISHED)) && ktime() - f->started_or_fin >= SYN_REPEAT_TIME;
}

/* A SYN on a connection that lives goes to its backend, which answers it whatever it is about: with a challenge, a
 * reset or an acceptance (RFC 9293, 3.10.7.4). Is there nobody left to do that? Linux leaves one of two SYNs unanswered
 * that come within half a second (tcp_invalid_ratelimit), so three are needed, with that time between.
 */
INLINE bool ignores_syns(const struct packet *p, struct found *found, const bool v6)
{
	struct flow *f = found->entry, *reply;
	__u32 time = now();

	if (f->flags & FLOW_CHALLENGED && time - f->challenged_at < settings.hz * 5 / 8)
		return false;
	f->challenged_at = time;
	f->challenges += 1;
	if (f->challenges == 1) {
		reply = peer_flow(f, p->tuple.protocol, found->table, v6);
		if (reply)
			reply->flags |= FLOW_CHALLENGED;
		f->flags |= FLOW_CHALLENGED;
	}
	return f->challenges > 2;
}

/* Does this packet want another backend than its flow has? A new connection from a port that was used before, a SYN
 * that got no answer, which then names the backend to avoid, or a datagram to a backend that is gone. Established TCP
 * stays with its backend.
 */
INLINE bool needs_new_flow(const struct packet *p, struct found *found, __u32 *avoid, const bool v6)
{
	struct flow *f = found->entry;

	if (p->tuple.protocol == IPPROTO_TCP) {
		if (!is_syn(p))
			return false;
		if (has_ended(f))
			return true;
	}
	if (!is_serving(f->backend, f->service, f->daddr, f->dport)) {
		if (p->tuple.protocol == IPPROTO_TCP && f->flags & FLOW_ESTABLISHED && !ignores_syns(p, found, v6))
			return false;
		count(COUNT_STALE_BACKEND);
		return true;
	}
	if (p->tuple.protocol != IPPROTO_TCP || !is_unanswered(f))
		return false;
	note_failure(f->backend, f->service);
	if (f->flags & FLOW_DSR) { /* answers do not come here: it may be one of them that was lost */
		f->started_or_fin = ktime();
		return false;
	}
	*avoid = f->backend;
	return true;
}

/* Choose for the packet; the verdict. */
INLINE int choose_for_packet(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	const struct tuple *t = &space->packet.tuple;
	enum client from = place == AT_NODE ? CLIENT_NODE : classify_client(t->saddr, skb->ifindex, v6);

	__builtin_memset(&space->choice, 0, sizeof(space->choice));
	space->choice.sport = t->sport;
	space->choice.avoid = space->avoid;
	choose_backend(&space->choice, from, t->saddr, t->daddr, t->dport, t->protocol, v6, true);
	space->service = space->choice.service;
	space->backend = space->choice.backend;
	return space->choice.verdict;
}

GLOBAL_VERB(choose_for_packet)

/* Is the chosen backend this node itself? What is on its way out cannot be brought back to the stack: that takes no
 * packet from an interface with a source of its own.
 */
INLINE bool is_self(const struct choice *c, const bool v6)
{
	__u32 own[4] = {};

	primary_address(own, v6);
	return c->verdict == VERDICT_DNAT && same_address(c->address, own, v6);
}

/* Choose for the packet, as well as can be: another backend than one that did not answer, or that cannot be reached. */
INLINE int choose_reachable(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	int verdict = CALL(choose_for_packet, skb, place);

	if (space->avoid && verdict == VERDICT_DNAT && space->choice.backend != space->avoid)
		count(COUNT_FAILOVER);
	if (place != AT_NODE || !is_self(&space->choice, v6))
		return verdict;
	space->avoid = space->choice.backend;
	return CALL(choose_for_packet, skb, place);
}

/* The destination may be a service's address, or a node port. */
INLINE int serve(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	struct packet *p = &space->packet;
	struct found found;
	int verdict;

	space->avoid = 0;
	find_flow(&found, &p->tuple, v6);
	if (found.entry) {
		NOTE(NOTE_FLOW_OWNER, found.entry->service, found.entry->backend);
		NOTE(NOTE_FLOW, found.entry->flags, now() - found.entry->seen);
		if (!admit(skb, space, &found, place, v6))
			return drop(COUNT_DROP_FOREIGN);
		if (!needs_new_flow(p, &found, &space->avoid, v6))
			return follow(skb, space, &found, place, false, v6);
		NOTE(NOTE_RENEWAL, 0, 0);
		evict(&p->tuple, &found, v6);
	} else if (p->tuple.protocol == IPPROTO_TCP && !is_syn(p)) {
		return STEP_NONE; /* somebody else's connection, netfilter's perhaps */
	}
	verdict = choose_reachable(skb, space, place, v6);
	if (verdict != VERDICT_UNTOUCHED && place != AT_NODE) {
		const __u32 *target = verdict == VERDICT_DNAT ? space->choice.address : p->tuple.daddr;
		int checked = check_source_towards(skb, space, target, v6);

		if (checked != STEP_NONE)
			return checked;
	}
	if (p->fragment.part == LATER_FRAGMENT && verdict != VERDICT_UNTOUCHED)
		return drop(COUNT_DROP_FRAGMENT); /* as its first */
	switch (verdict) {
	case VERDICT_REJECT:
		return STEP_REJECT;
	case VERDICT_DROP:
		return drop(space->choice.why);
	case VERDICT_DNAT:
		return STEP_CREATE_FLOW;
	}
	return in_service_cidr(p->tuple.daddr, v6) ? drop(COUNT_DROP_UNALLOCATED) : STEP_NONE;
}

GLOBAL_VERB(serve)

/* A ping, say, to a service's address: no port answers there. */
INLINE int other_to_service(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	const struct packet *p = &space->packet;
	__u32 flags = find_frontend(p->tuple.daddr, 0, 0, v6) >> 32;

	if (flags & FRONTEND_ADDRESS && !(flags & FRONTEND_NODE_PORTS)) {
		int checked = place == AT_NODE ? STEP_NONE : check_source_towards(skb, space, p->tuple.daddr, v6);

		if (checked != STEP_NONE)
			return checked;
		return settings.answer_ping && p->kind == PACKET_ECHO ? STEP_ECHO : STEP_REJECT;
	}
	return in_service_cidr(p->tuple.daddr, v6) ? drop(COUNT_DROP_UNALLOCATED) : STEP_NONE;
}

/* The destination may be a service's address, or a node port; `otherwise` if it is not. */
INLINE int to_frontend(struct __sk_buff *skb, struct scratch *space, __u32 place, const int otherwise, const bool v6)
{
	int step;

	if (space->packet.kind == PACKET_TRANSPORT)
		return STEP_SERVE;
	step = other_to_service(skb, space, place, v6);
	return step == STEP_NONE ? otherwise : step;
}

/* The destination may be a backend, addressed directly. Datagrams leave a claim, because nothing in them
 * tells a reply to this from a reply to a service flow; TCP is looked at when it opens.
 */
INLINE int to_backend(struct __sk_buff *skb, struct scratch *space, const enum place place, const bool v6)
{
	struct packet *p = &space->packet;
	struct found found;
	struct node *self = this_node();
	bool opens = is_syn(p), tcp = p->tuple.protocol == IPPROTO_TCP;

	if (tcp && !opens && !(self && READ_ONCE(self->direct_flows)))
		return pass();
	find_flow(&found, &p->tuple, v6);
	if (found.entry && !(found.entry->flags & FLOW_DIRECT))
		return pass();
	if (found.entry && !admit(skb, space, &found, place, v6))
		return drop(COUNT_DROP_FOREIGN);
	if (found.entry && !(opens && has_ended(found.entry))) {
		if (found.entry->sport != p->tuple.sport)
			return follow(skb, space, &found, place, false, v6);
		refresh(p, found.entry, found.table, v6);
		return pass();
	}
	if (found.entry)
		evict(&p->tuple, &found, v6);
	if ((tcp && !opens) || p->fragment.part == LATER_FRAGMENT)
		return pass();
	copy_address(space->result.daddr, p->tuple.daddr);
	return CALL(may_create_direct, skb, 0) ? STEP_CREATE_DIRECT : pass();
}

/* The source may be a backend that answers. Where the client's address is the node's by now, it is put back here,
 * before the answer is routed. Else the first answer goes through the stack, so that firewalls see the flow open; it is
 * translated at the client's interface.
 */
INLINE int from_backend(struct __sk_buff *skb, struct scratch *space, const enum place place, const bool v6)
{
	struct packet *p = &space->packet;
	const __u32 ours = FLOW_HAIRPIN | FLOW_MASQUERADE;
	struct found found;
	bool direct = false;

	find_flow(&found, &p->tuple, v6);
	if (!found.entry || !(found.entry->flags & FLOW_REPLY) || found.entry->flags & FLOW_COLLISION)
		return pass();
	if (!admit(skb, space, &found, place, v6))
		return drop(COUNT_DROP_FOREIGN);
	if (found.entry->flags & FLOW_DIRECT)
		return pass();
	if (!(found.entry->flags & FLOW_ESTABLISHED)) {
		if (!(found.entry->flags & ours))
			return pass();
		confirm_route(skb, space, found.entry, p->tuple.protocol, v6);
		note_reply(p, &found, v6);
		find_flow(&found, &p->tuple, v6);
		if (!found.entry)
			return pass();
	} else if (!(found.entry->flags & ours)) {
		direct = can_hand_over(skb, p, found.entry, place, v6);
		if (!direct)
			return pass();
	}
	return follow(skb, space, &found, place, direct, v6);
}

INLINE bool may_be_frontend(const struct packet *p, const bool v6)
{
	return may_be_service(p->tuple.daddr, v6) ||
	       (p->kind == PACKET_TRANSPORT && may_be_node_port(p->tuple.dport, p->tuple.protocol));
}

/* An address of the services' ranges at which there is none. */
INLINE bool is_unallocated(const __u32 *address, const bool v6)
{
	return in_service_cidr(address, v6) && !may_be_service(address, v6);
}

/* An answer that opens no connection, on a flow that is opening: the tuple is a direct connection's, which was
 * there first. Leave the packet alone; the service flow takes another port when its SYN is repeated.
 */
INLINE bool is_collision(const struct packet *p, const struct flow *f)
{
	if (f->flags & FLOW_COLLISION)
		return true;
	return p->tuple.protocol == IPPROTO_TCP && !(f->flags & FLOW_REPLIED) && !(p->tcp_flags & TCP_RST) &&
	       (p->tcp_flags & (TCP_SYN | TCP_ACK)) != (TCP_SYN | TCP_ACK);
}

INLINE void mark_collision(const struct packet *p, const struct found *reply, const bool v6)
{
	struct flow *forward = peer_flow(reply->entry, p->tuple.protocol, reply->table, v6);

	if (forward)
		forward->flags |= FLOW_COLLISION;
	reply->entry->flags |= FLOW_COLLISION;
	count(COUNT_TUPLE_COLLISION);
}

/* The source may be a backend whose answer the client expects from the service's address. */
INLINE int translate_reply(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	struct packet *p = &space->packet;
	struct found found;
	struct tuple to;

	find_flow(&found, &p->tuple, v6);
	if (!found.entry || !(found.entry->flags & FLOW_REPLY) || found.entry->flags & (FLOW_HAIRPIN | FLOW_MASQUERADE))
		return pass();
	translated_tuple(&to, found.entry, p->tuple.protocol);
	if (same_tuple(&to, &p->tuple, v6))
		return pass();
	space->service = found.entry->service;
	space->backend = found.entry->backend;
	if (!(found.entry->flags & FLOW_ESTABLISHED)) {
		if (is_collision(p, found.entry)) {
			if (!(found.entry->flags & FLOW_COLLISION))
				mark_collision(p, &found, v6);
			return pass();
		}
		if (confirm_path(skb, found.entry, place, p->tuple.protocol))
			note_reply(p, &found, v6);
		else
			refresh(p, found.entry, found.table, v6);
	} else if (refresh(p, found.entry, found.table, v6)) {
		close_pair(&p->tuple, found.entry, found.table, v6);
	}
	count(COUNT_REPLY);
	account(skb, space->backend, true, 0);
	TRACE_EVENT(skb, COUNT_REPLY, place == AT_NODE ? HOOK_UPLINK_EGRESS : HOOK_POD_EGRESS);
	rewrite(skb, p, &to, v6);
	return pass();
}

/* What packet it is; of a fragment, of which datagram. Something else than STEP_NONE when it has to wait. */
INLINE int classify_packet(struct __sk_buff *skb, struct scratch *space, const enum queueing queueing, const bool v6)
{
	struct packet *p = &space->packet;

	__builtin_memset(p, 0, sizeof(*p));
	space->service = space->backend = 0;
	parse_packet(skb, p, v6);
	if (queueing == MAY_QUEUE && p->l4 && !is_well_formed(skb, p, v6))
		p->kind = PACKET_MALFORMED;
	return p->kind == PACKET_FRAGMENT ? CALL(track_fragment, skb, queueing) : STEP_NONE;
}

/* A packet that is not what it says: that of a service goes nowhere, any other is the stack's to judge. */
INLINE int drop_malformed(const struct packet *p, const bool v6)
{
	if (may_be_service(p->tuple.daddr, v6) || may_be_backend(p->tuple.saddr, p->tuple.sport, p->tuple.protocol, v6))
		return drop(COUNT_DROP_MALFORMED);
	return pass();
}

/* A packet from a pod or from beyond the node, before it is routed. */
INLINE int ingress(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	struct packet *p = &space->packet;
	int step;

	if (!is_for_this_node(skb)) {
		count(COUNT_FOREIGN_FRAME);
		return pass();
	}
	step = classify_packet(skb, space, MAY_QUEUE, v6);
	if (step != STEP_NONE)
		return step;
	if (p->kind == PACKET_MALFORMED)
		return drop_malformed(p, v6);
	if (p->kind == PACKET_OTHER)
		return settings.dsr && place == AT_UPLINK && p->tuple.protocol == (v6 ? IPPROTO_IPV6 : IPPROTO_IPIP)
			       ? STEP_DECAP
			       : pass();
	if (p->kind == PACKET_ICMP_ERROR)
		return STEP_ERROR_INGRESS;
	if (!may_be_frontend(p, v6))
		return STEP_NOT_SERVICE;
	NOTE(NOTE_MAY_BE_SERVICE, 0, 0);
	return to_frontend(skb, space, place, STEP_NOT_SERVICE, v6);
}

GLOBAL_VERB(ingress)

/* It is to no service: from a backend, to one, or neither. */
INLINE int not_service(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	const struct packet *p = &space->packet;

	if (p->kind == PACKET_TRANSPORT && may_be_backend(p->tuple.saddr, p->tuple.sport, p->tuple.protocol, v6)) {
		int verdict = from_backend(skb, space, place, v6);

		if (verdict != TC_ACT_UNSPEC)
			return verdict;
	}
	if (is_unallocated(p->tuple.daddr, v6))
		return drop(COUNT_DROP_UNALLOCATED);
	if (p->kind == PACKET_TRANSPORT && may_be_backend(p->tuple.daddr, p->tuple.dport, p->tuple.protocol, v6))
		return to_backend(skb, space, place, v6);
	return pass();
}

GLOBAL_VERB(not_service)

/* A packet to a client, behind routing: an answer becomes the service's again. At an uplink it may also be one for a
 * service that nobody has translated, because this node itself sends it past its sockets' hooks.
 */
INLINE int classify_egress(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	struct packet *p = &space->packet;
	int step;

	step = classify_packet(skb, space, MUST_PASS, v6);
	if (step != STEP_NONE)
		return step;
	if (p->kind == PACKET_OTHER || p->kind == PACKET_MALFORMED)
		return STEP_EGRESS;
	if (p->kind == PACKET_ICMP_ERROR)
		return STEP_ERROR_EGRESS;
	if (place != AT_NODE || skb->ingress_ifindex || !may_be_frontend(p, v6))
		return STEP_EGRESS;
	return to_frontend(skb, space, place, STEP_EGRESS, v6);
}

GLOBAL_VERB(classify_egress)

/* It is an answer, perhaps. Whatever is still for a range of services was translated by nobody, and does not leave. */
INLINE int egress(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	const struct packet *p = &space->packet;

	if (place == AT_NODE && in_service_cidr(p->tuple.daddr, v6))
		return drop(COUNT_DROP_UNALLOCATED);
	if (p->kind != PACKET_TRANSPORT || !may_be_backend(p->tuple.saddr, p->tuple.sport, p->tuple.protocol, v6))
		return pass();
	return translate_reply(skb, space, place, v6);
}

GLOBAL_VERB(egress)

/* What was unwrapped is of a flow that is known. */
INLINE int follow_decapped(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	struct found found;

	find_flow(&found, &space->packet.tuple, v6);
	return found.entry ? follow(skb, space, &found, place, false, v6) : drop(COUNT_DROP_FLOW_LOST);
}

GLOBAL_VERB(follow_decapped)

/* The verdict, and why, where somebody listens. */
INLINE int to_tc_action(struct __sk_buff *skb, int step, const enum place place, const bool v6)
{
	if (step >= DROPPED) {
		EMIT_EVENT(skb, step & ~DROPPED, place);
		return TC_ACT_SHOT;
	}
	return step == STEP_NONE ? pass() : step;
}

/* Do what is left to do, until there is a verdict. */
INLINE int finish_steps(struct __sk_buff *skb, int step, const enum place place, const bool v6)
{
	if (step == STEP_SERVE) {
		step = CALL(serve, skb, place);
		if (step == STEP_NONE)
			step = place == AT_NODE ? STEP_EGRESS : STEP_NOT_SERVICE;
	}
	if (step == STEP_NOT_SERVICE)
		step = CALL(not_service, skb, place);
	else if (step == STEP_EGRESS)
		step = CALL(egress, skb, place);
	else if (step == STEP_ERROR_INGRESS)
		step = CALL(translate_error_ingress, skb, place);
	else if (step == STEP_ERROR_EGRESS)
		step = CALL(translate_error_egress, skb, 0);
	else if (step == STEP_DECAP)
		step = CALL(decap, skb, 0);
	if (step == STEP_CREATE_FLOW)
		step = CALL(prepare_flow, skb, place);
	else if (step == STEP_CREATE_DIRECT)
		step = CALL(prepare_direct, skb, 0);
	else if (step == STEP_FOLLOW)
		step = CALL(follow_decapped, skb, place);
	if (step == STEP_CREATE_DSR)
		step = CALL(create_dsr_flow, skb, 0);
	if (step == STEP_RESERVE)
		step = CALL(reserve_tuple, skb, 0);
	if (step == STEP_STORE)
		step = CALL(store_flow, skb, place);
	if (step == STEP_FORWARD) {
		step = CALL(forward, skb, 0);
	} else if (step == STEP_ENCAP) {
		step = CALL(encap, skb, 0);
	} else if (step == STEP_ECHO) {
		step = CALL(send_echo_reply, skb, 0);
	} else if (step == STEP_REJECT) {
		step = CALL(send_reject, skb, 0);
		if (step < DROPPED)
			EMIT_EVENT(skb, COUNT_REJECT, place);
	}
	return to_tc_action(skb, step, place, v6);
}

/* All that is left to do with a packet that one of the hooks handed over. */
INLINE int datapath(struct __sk_buff *skb, const enum hook hook, const bool v6)
{
	enum place place = hook == HOOK_POD_EGRESS ? AT_POD : (enum place)hook;
	int step = is_ingress(hook) ? CALL(ingress, skb, place) : CALL(classify_egress, skb, place);

	return finish_steps(skb, step, place, v6);
}

#endif
