/* Where the packets of a flow come in. Each direction lives at one place: at a pod's interface, or at the uplinks,
 * which are one place, because routes between them change. What comes in elsewhere is a forgery, and dropped: who got
 * it untranslated would answer with a reset, which the flow's other end believes. Only a sender that has moved is
 * followed: the route to it, which is the way that the stack sends it packets, leads here by now.
 */
#ifndef HYBRID_PROXY_ORIGIN_H
#define HYBRID_PROXY_ORIGIN_H

#include "source.h"
#include "packet_events.h"

INLINE bool has_link(__u32 key)
{
	return bpf_map_lookup_elem(&links, &key);
}

INLINE __u32 origin_here(struct __sk_buff *skb, __u32 place)
{
	if (place == AT_UPLINK)
		return ORIGIN_UPLINKS;
	return place == AT_NODE ? ORIGIN_NODE : skb->ifindex;
}

/* Is the interface gone that packets came in at, or was there none yet? */
INLINE bool origin_is_gone(__u32 origin)
{
	return origin == ORIGIN_UNKNOWN || (origin != ORIGIN_UPLINKS && origin != ORIGIN_NODE && !has_link(origin));
}

/* Where the stack would send `space->reply`. */
INLINE int origin_by_route(struct __sk_buff *skb, struct scratch *space, __u32 unused, const bool v6)
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

GLOBAL_VERB(origin_by_route)

/* Does the sender of the flow's packets, whose key is `key`, live here? Behind an interface without programs, where the
 * route cannot tell its ports apart, it is believed unless it lives at another one. A client that nobody has answered
 * for long lives nowhere yet: who forged the flow's first packet does not shut it out.
 */
INLINE bool comes_from_origin(struct __sk_buff *skb, struct scratch *space, const struct tuple *key,
			      const struct flow *f, __u32 place, const bool v6)
{
	__u32 here = origin_here(skb, place), way;

	if (f->origin == here)
		return true;
	reverse_tuple(&space->reply, key);
	way = CALL(origin_by_route, skb, 0);
	NOTE(NOTE_FOREIGN, f->origin, way);
	if (way == ORIGIN_ELSEWHERE)
		return origin_is_gone(f->origin) || !(f->flags & (FLOW_REPLY | FLOW_ESTABLISHED));
	return way == here;
}

/* Does the packet tell where the flow lives? Of a connection that opens, an answer to its SYN alone. */
INLINE bool proves_origin(const struct packet *p, const struct flow *f)
{
	return p->tuple.protocol != IPPROTO_TCP || (f->flags & (FLOW_REPLY | FLOW_ESTABLISHED)) != FLOW_REPLY ||
	       answers_syn(p, f);
}

/* From now on the flow's packets come in here, and those of the other direction are handed over here: to a pod that is
 * not its own peer.
 */
INLINE void move_origin(struct __sk_buff *skb, const struct packet *p, const struct found *found, __u32 place,
			const bool v6)
{
	struct flow *other = peer_flow(found->entry, p->tuple.protocol, found->table, v6);
	__u32 here = origin_here(skb, place);
	__u8 mac[12];

	if (found->entry->origin != ORIGIN_UNKNOWN)
		count(COUNT_MOVED);
	WRITE_ONCE(found->entry->origin, here);
	if (!other || found->entry->flags & (FLOW_HAIRPIN | FLOW_DIRECT))
		return;
	if (place != AT_POD) {
		WRITE_ONCE(other->ifindex, 0);
		return;
	}
	get_macs(skb, mac);
	__builtin_memcpy(other->mac, mac + 6, 6);
	__builtin_memcpy(other->mac + 6, mac, 6);
	WRITE_ONCE(other->ifindex, here);
}

/* An answer goes to a client through the stack: to where the client's packets come in? If not these are forged, or take
 * another way than they are answered, and the answers stay the stack's: of a connection by what is noted here, of
 * datagrams because the caller does not let the flow establish.
 */
INLINE bool confirm_path(struct __sk_buff *skb, struct flow *reply, __u32 place, __u8 protocol)
{
	if (place != AT_POD || !reply->ifindex || reply->ifindex == skb->ifindex)
		return true;
	if (protocol != IPPROTO_TCP)
		return false;
	WRITE_ONCE(reply->ifindex, 0);
	return true;
}

/* The same where the flow's answers never go through the stack: ask where it would send them. */
INLINE void confirm_route(struct __sk_buff *skb, struct scratch *space, struct flow *reply, __u8 protocol,
			  const bool v6)
{
	if (!reply->ifindex || reply->flags & (FLOW_HAIRPIN | FLOW_NODE))
		return;
	translated_tuple(&space->reply, reply, protocol);
	if ((__u32)CALL(origin_by_route, skb, 0) != reply->ifindex)
		WRITE_ONCE(reply->ifindex, 0);
}

#endif
