/* Fragments: only the first of a datagram has ports, which are remembered for the others.
 *
 * A fragment that comes before the first one is queued. A program cannot keep an skb, so the frame is copied into map
 * `frag_queue`, and the packet is dropped. When the first fragment arrives, the program reuses its skb to reinject each
 * queued fragment: it loads the queued frame into the skb, puts a clone of that back into the interface's queue, and
 * restores the first fragment at the end. Only ingress queues fragments, and only those that may concern a service;
 * behind routing they arrive in the order in which ingress left them.
 */
#ifndef HYBRID_PROXY_FRAGMENT_H
#define HYBRID_PROXY_FRAGMENT_H

#include "count.h"
#include "hash.h"
#include "maps.h"
#include "packet.h"
#include "scratch.h"
#include "service.h"

#define FRAGMENT_SECONDS 30 /* as long as a receiver waits for the rest (RFC 791, ipfrag_time) */

INLINE void write_datagram_key(struct fragment_key *key, const struct packet *p)
{
	copy_address(key->saddr, p->tuple.saddr);
	copy_address(key->daddr, p->tuple.daddr);
	key->id = p->fragment.id;
	key->protocol = p->fragment.protocol;
}

INLINE bool same_datagram(const struct fragment_key *a, const struct fragment_key *b)
{
	return same_address(a->saddr, b->saddr, true) && same_address(a->daddr, b->daddr, true) && a->id == b->id &&
	       a->protocol == b->protocol;
}

INLINE bool is_current(const struct fragments *known)
{
	return now() - known->seen <= FRAGMENT_SECONDS * settings.hz;
}

/* What is known of the datagram; begun where there is nothing, or only something of a former one with its number.
 * NULL: the map has no room. Two CPUs that begin one at once both get the same element.
 */
INLINE struct fragments *begin_datagram(struct scratch *space, const bool first)
{
	struct fragments *known = bpf_map_lookup_elem(&fragments, &space->datagram), *fresh = &space->fragments;

	if (known && is_current(known) && !(first && known->known))
		return known;
	__builtin_memset(fresh, 0, sizeof(*fresh));
	fresh->seen = now();
	if (known) {
		*known = *fresh;
		return known;
	}
	bpf_map_update_elem(&fragments, &space->datagram, fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&fragments, &space->datagram);
}

/* May the datagram be to a service or from a backend? Without its ports, the addresses have to say. */
INLINE bool may_concern_service(const struct tuple *t, const bool v6)
{
	return may_be_service(t->daddr, v6) || find_frontend(t->daddr, 0, 0, v6) || may_be_backend(t->saddr, 0, 0, v6);
}

/* A length that is known to be from 1 to FRAG_BYTES; as bounded(), for verifiers before Linux 6.4. */
INLINE __u32 bounded_length(__u32 length)
{
	asm volatile("" : "+r"(length));
	return ((length - 1) & (FRAG_BYTES - 1)) + 1;
}

/* Copy the frame; its length, or 0 where it is too long. */
INLINE __u32 save_frame(struct __sk_buff *skb, struct queued_fragment *to)
{
	__u32 length = skb->len;

	if (length < L3_OFFSET || length > FRAG_BYTES || bpf_skb_load_bytes(skb, 0, to->frame, bounded_length(length)))
		return 0;
	to->length = length;
	return length;
}

/* Let the packet be the copy. */
INLINE bool load_frame(struct __sk_buff *skb, struct queued_fragment *copy)
{
	__u32 length = copy->length;

	if (length < L3_OFFSET || length > FRAG_BYTES)
		return false;
	return !bpf_skb_change_tail(skb, length, 0) &&
	       !bpf_skb_store_bytes(skb, 0, copy->frame, bounded_length(length), BPF_F_RECOMPUTE_CSUM);
}

/* What was written before this is seen by others before anything behind it is read. An atomic addition does that on
 * x86, here to the number of the next place; on arm64, where it does not, what remains is the time for which a
 * processor keeps back what it has written.
 */
INLINE void order_memory(struct scratch *space)
{
	__sync_fetch_and_add(&space->next_place, 1);
}

/* Queue a copy of the packet; pass the packet where there is no room for one. NICs that spread datagrams by their ports
 * lead the first fragment to another CPU: it may become known while the copy is made. Then this one needs not wait.
 */
INLINE enum step queue_fragment(struct __sk_buff *skb, struct scratch *space, struct fragments *datagram)
{
	__u32 number = datagram->waiting, place = (skb->ifindex * 37 + space->next_place) & (FRAG_QUEUE - 1);
	struct queued_fragment *copy = bpf_map_lookup_elem(&frag_queue, &place);

	if (number >= FRAG_QUEUE_EACH || !copy || !save_frame(skb, copy)) {
		count(COUNT_FRAGMENT_LOST);
		return STEP_PASS;
	}
	copy->key = space->datagram;
	datagram->places[bounded(number) & (FRAG_QUEUE_EACH - 1)] = place;
	WRITE_ONCE(datagram->waiting, number + 1);
	order_memory(space);
	if (READ_ONCE(datagram->known)) {
		copy->length = 0;
		return STEP_CONTINUE;
	}
	count(COUNT_FRAGMENT_QUEUED);
	return STEP_QUEUED;
}

/* Reinject one of the fragments that waited for this first one. */
INLINE int reinject_fragment(struct __sk_buff *skb, struct scratch *space, __u32 place, const bool v6)
{
	struct queued_fragment *copy = bpf_map_lookup_elem(&frag_queue, &place);

	if (!copy || !same_datagram(&copy->key, &space->datagram) || !load_frame(skb, copy))
		return 0; /* others needed the place */
	bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS);
	copy->length = 0;
	count(COUNT_FRAGMENT_REINJECTED);
	return 1;
}

GLOBAL_VERB_WITH(__u32, int, reinject_fragment, 0)

/* Reinject the fragments that waited for this first one. False: the packet could not be restored. */
INLINE bool reinject_fragments(struct __sk_buff *skb, struct scratch *space, struct fragments *datagram, const bool v6)
{
	__u32 waiting = datagram->waiting;

	if (!save_frame(skb, &space->first)) {
		count(COUNT_FRAGMENT_LOST);
		return true;
	}
#pragma clang loop unroll(disable)
	for (int i = 0; i < FRAG_QUEUE_EACH && i < waiting; i++)
		CALL(reinject_fragment, v6, skb, datagram->places[i]);
	return load_frame(skb, &space->first);
}

/* Remember the datagram's ports. */
INLINE enum step track_first(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	struct packet *p = &space->packet;
	struct fragments *datagram = begin_datagram(space, true);

	p->kind = PACKET_TRANSPORT;
	if (!datagram)
		return STEP_CONTINUE;
	datagram->sport = p->tuple.sport;
	datagram->dport = p->tuple.dport;
	datagram->protocol = p->tuple.protocol;
	WRITE_ONCE(datagram->known, 1);
	order_memory(space);
	if (READ_ONCE(datagram->waiting) && !reinject_fragments(skb, space, datagram, v6))
		return drop(space, COUNT_DROP_FRAGMENT);
	return STEP_CONTINUE;
}

/* Uses the remembered ports, or waits for them. */
INLINE enum step track_later(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	struct packet *p = &space->packet;
	struct fragments *datagram = bpf_map_lookup_elem(&fragments, &space->datagram);
	enum step step;

	if (!datagram || !READ_ONCE(datagram->known) || !is_current(datagram)) {
		if (!is_ingress(hook) || !may_concern_service(&p->tuple, v6))
			return STEP_PASS;
		datagram = begin_datagram(space, false);
		if (!datagram)
			return STEP_PASS;
		step = queue_fragment(skb, space, datagram);
		if (step != STEP_CONTINUE)
			return step;
	}
	p->tuple.sport = datagram->sport;
	p->tuple.dport = datagram->dport;
	p->tuple.protocol = datagram->protocol;
	p->kind = PACKET_TRANSPORT;
	return STEP_CONTINUE;
}

/* Make the fragment a PACKET_TRANSPORT, with the ports of its datagram. */
INLINE enum step track_fragment(struct __sk_buff *skb, struct scratch *space, enum hook hook, const bool v6)
{
	write_datagram_key(&space->datagram, &space->packet);
	if (space->packet.fragment.part == FIRST_FRAGMENT)
		return track_first(skb, space, v6);
	return track_later(skb, space, hook, v6);
}

GLOBAL_VERB_WITH(enum hook, enum step, track_fragment, STEP_DROP)

#endif
