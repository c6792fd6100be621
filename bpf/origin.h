/* The place at which packets of a flow arrive. Each direction has one place: a pod's interface, or the uplinks, which
 * are one place, because routes between them change. A packet that arrives elsewhere is a forgery and dropped: its
 * receiver would get it untranslated and answer with a reset, which the flow's other end accepts. Only a sender that
 * has moved is followed: then the route by which the stack sends it packets leads here.
 */
#ifndef HYBRID_PROXY_ORIGIN_H
#define HYBRID_PROXY_ORIGIN_H

#include "count.h"
#include "flow.h"
#include "flow_state.h"
#include "nat.h"
#include "packet.h"
#include "route.h"
#include "scratch.h"
#include "source.h"

INLINE bool has_link(__u32 key)
{
	return bpf_map_lookup_elem(&links, &key);
}

INLINE __u32 origin_here(struct __sk_buff *skb, enum hook hook)
{
	if (hook == HOOK_UPLINK_INGRESS)
		return ORIGIN_UPLINKS;
	return hook == HOOK_UPLINK_EGRESS ? ORIGIN_NODE : skb->ifindex;
}

/* Is the interface gone that packets came in at, or was there none yet? */
INLINE bool origin_is_gone(__u32 origin)
{
	return origin == ORIGIN_UNKNOWN || (origin != ORIGIN_UPLINKS && origin != ORIGIN_NODE && !has_link(origin));
}

/* Returns where packets of a sender would arrive, if it is where the stack would send `space->reply`. */
INLINE __u32 origin_by_route(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	struct bpf_fib_lookup *hop = &space->hop;
	long result = fib_lookup_as_host(skb, hop, &space->reply, v6);
	__u32 index = hop->ifindex;

	if (result == BPF_FIB_LKUP_RET_FWD_DISABLED)
		return ORIGIN_ELSEWHERE;
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_NO_NEIGH)
		return ORIGIN_NONE;
	if (has_link(index | 1u << LINK_POD_BIT))
		return index;
	return has_link(index | 1u << LINK_OUTER_BIT) ? ORIGIN_UPLINKS : ORIGIN_ELSEWHERE;
}

GLOBAL_VERB(__u32, origin_by_route, ORIGIN_NONE)

/* Is this the place of the sender of the flow's packets, whose key is `key`? Behind an interface without programs the
 * route does not show which port the sender is at; then it is, unless another origin is known. The origin of a client
 * is not final until the flow is established: otherwise a forged first packet would lock the real client out.
 */
INLINE bool comes_from_origin(struct __sk_buff *skb, struct scratch *space, const struct tuple *key,
			      const struct flow *f, enum hook hook, const bool v6)
{
	__u32 here = origin_here(skb, hook), way;

	if (f->origin == here)
		return true;
	reverse_tuple(&space->reply, key);
	way = CALL(origin_by_route, v6, skb);
	NOTE(NOTE_FOREIGN, f->origin, way);
	if (way == ORIGIN_ELSEWHERE)
		return origin_is_gone(f->origin) || f->origin == ORIGIN_NODE ||
		       !(f->flags & (FLOW_REPLY | FLOW_ESTABLISHED));
	return way == here;
}

/* Does the packet prove where its sender lives? On a half-open connection only an answer to its SYN does. */
INLINE bool proves_origin(const struct packet *p, const struct flow *f)
{
	return p->tuple.protocol != IPPROTO_TCP || (f->flags & (FLOW_REPLY | FLOW_ESTABLISHED)) != FLOW_REPLY ||
	       answers_syn(p, f);
}

/* Moves the flow's origin here. Packets of the other direction are handed over here from now on, if this is a pod's
 * interface and the pod is not its own peer.
 */
INLINE void move_origin(struct __sk_buff *skb, const struct packet *p, const struct found *found, enum hook hook,
			const bool v6)
{
	struct flow *other = peer_flow(found->entry, p->tuple.protocol, found->table, v6);
	__u32 here = origin_here(skb, hook);
	__u8 mac[12];

	if (found->entry->origin != ORIGIN_UNKNOWN)
		count(COUNT_MOVED);
	WRITE_ONCE(found->entry->origin, here);
	if (!other || found->entry->flags & (FLOW_HAIRPIN | FLOW_DIRECT))
		return;
	if (hook != HOOK_POD_INGRESS) {
		WRITE_ONCE(other->ifindex, 0);
		return;
	}
	get_macs(skb, mac);
	__builtin_memcpy(other->mac, mac + 6, 6);
	__builtin_memcpy(other->mac + 6, mac, 6);
	WRITE_ONCE(other->ifindex, here);
}

/* Does the answer leave by the interface at which the client's packets arrive? If not, they are forged, or routed
 * asymmetrically, and the stack must deliver all answers. For a connection that is noted here; for datagrams the caller
 * does not let the flow establish.
 */
INLINE bool confirm_path(struct __sk_buff *skb, struct flow *reply, enum hook hook, __u8 protocol)
{
	if (hook != HOOK_POD_EGRESS || !reply->ifindex || reply->ifindex == skb->ifindex)
		return true;
	if (protocol != IPPROTO_TCP)
		return false;
	WRITE_ONCE(reply->ifindex, 0);
	return true;
}

/* Does the same where the flow's answers bypass the stack: the route decides. */
INLINE void confirm_route(struct __sk_buff *skb, struct scratch *space, struct flow *reply, __u8 protocol,
			  const bool v6)
{
	if (!reply->ifindex || reply->flags & (FLOW_HAIRPIN | FLOW_NODE))
		return;
	translated_tuple(&space->reply, reply, protocol);
	if (CALL(origin_by_route, v6, skb) != reply->ifindex)
		WRITE_ONCE(reply->ifindex, 0);
}

/* Does a packet that arrives elsewhere than those before it, or is the first one, come from the flow's sender? Then the
 * flow's origin moves here, if the packet proves it.
 */
INLINE int admit_elsewhere(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	const struct packet *p = &space->packet;
	struct found found;

	find_flow(&found, &p->tuple, v6);
	if (!found.entry)
		return true; /* it is gone meanwhile: `take_flow` notices */
	if (!comes_from_origin(skb, space, &p->tuple, found.entry, hook, v6))
		return false;
	if (found.entry->origin != origin_here(skb, hook) && found.entry->origin != ORIGIN_NODE &&
	    proves_origin(p, found.entry))
		move_origin(skb, p, &found, hook, v6);
	return true;
}

GLOBAL_VERB_WITH(enum hook, int, admit_elsewhere, false)

/* Does the packet arrive at its flow's origin, or has the sender moved here? */
INLINE bool admit(struct __sk_buff *skb, struct scratch *space, const struct found *found, enum hook hook,
		  const bool v6)
{
	if (found->entry->origin == origin_here(skb, hook))
		return true;
	return CALL(admit_elsewhere, v6, skb, hook);
}

#endif
