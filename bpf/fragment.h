/* Fragments: only the first of a datagram has ports, which are remembered for the others.
 *
 * A fragment that comes before the first waits: a program cannot keep a packet, so it is copied and dropped. When the
 * first comes, it takes the shape of each that waited, for as long as a clone of it is put back into the interface's
 * queue, and then its own again. Only ingress lets fragments wait, and only those that may be of a service; behind
 * routing they come in the order that ingress left them in.
 */
#ifndef HYBRID_PROXY_FRAGMENT_H
#define HYBRID_PROXY_FRAGMENT_H

#include "flow_create.h"

#define FRAGMENT_SECONDS 30 /* as long as a receiver waits for the rest (RFC 791, ipfrag_time) */

enum queueing { MUST_PASS, MAY_QUEUE };

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

/* What is known of the datagram; begun when there is nothing, or only something of a former one with its number.
 * NULL: the map has no room. When two begin at once, both get the same element.
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

/* May the datagram be to a service or from a backend? Without its ports addresses have to tell. */
INLINE bool may_concern_service(const struct tuple *t, const bool v6)
{
	return may_be_service(t->daddr, v6) || find_frontend(t->daddr, 0, 0, v6) || may_be_backend(t->saddr, 0, 0, v6);
}

/* A length that is known to be from 1 to FRAG_BYTES, for verifiers before 6.4, as `bounded()` is. */
INLINE __u32 bounded_length(__u32 length)
{
	asm volatile("" : "+r"(length));
	return ((length - 1) & (FRAG_BYTES - 1)) + 1;
}

/* Copy the frame; its length, 0: it is too long. */
INLINE __u32 save_frame(struct __sk_buff *skb, struct queued_fragment *to)
{
	__u32 length = skb->len;

	if (length < L3_OFFSET || length > FRAG_BYTES || bpf_skb_load_bytes(skb, 0, to->frame, bounded_length(length)))
		return 0;
	to->length = length;
	return length;
}

/* Let the packet be what was copied. */
INLINE bool load_frame(struct __sk_buff *skb, struct queued_fragment *copy)
{
	__u32 length = copy->length;

	if (length < L3_OFFSET || length > FRAG_BYTES)
		return false;
	return !bpf_skb_change_tail(skb, length, 0) &&
	       !bpf_skb_store_bytes(skb, 0, copy->frame, bounded_length(length), BPF_F_RECOMPUTE_CSUM);
}

/* Keep a copy and drop the packet; or pass it, when it cannot wait. */
INLINE int queue_fragment(struct __sk_buff *skb, struct scratch *space, struct fragments *datagram)
{
	__u32 number = datagram->waiting, place = (skb->ifindex * 37 + space->next_place++) & (FRAG_QUEUE - 1);
	struct queued_fragment *copy = bpf_map_lookup_elem(&frag_queue, &place);

	if (number >= FRAG_QUEUE_EACH || !copy || !save_frame(skb, copy)) {
		count(COUNT_FRAGMENT_LOST);
		return pass();
	}
	copy->key = space->datagram;
	datagram->places[bounded(number) & (FRAG_QUEUE_EACH - 1)] = place;
	WRITE_ONCE(datagram->waiting, number + 1);
	count(COUNT_FRAGMENT_QUEUED);
	return TC_ACT_SHOT;
}

/* Put back into the queue what waited for this first fragment. False: the packet is not itself any more. */
INLINE bool reinject_fragments(struct __sk_buff *skb, struct scratch *space, struct fragments *datagram)
{
	__u32 waiting = datagram->waiting;

	if (!save_frame(skb, &space->first)) {
		count(COUNT_FRAGMENT_LOST);
		return true;
	}
#pragma clang loop unroll(disable)
	for (int i = 0; i < FRAG_QUEUE_EACH; i++) {
		__u32 place = datagram->places[i];
		struct queued_fragment *copy;

		if (i >= waiting)
			break;
		copy = bpf_map_lookup_elem(&frag_queue, &place);
		if (!copy || !same_datagram(&copy->key, &space->datagram) || !load_frame(skb, copy))
			continue; /* others needed the place */
		bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS);
		copy->length = 0;
		count(COUNT_FRAGMENT_REINJECTED);
	}
	return load_frame(skb, &space->first);
}

INLINE int track_first(struct __sk_buff *skb, struct scratch *space)
{
	struct packet *p = &space->packet;
	struct fragments *datagram = begin_datagram(space, true);

	p->kind = PACKET_TRANSPORT;
	if (!datagram)
		return STEP_NONE;
	datagram->sport = p->tuple.sport;
	datagram->dport = p->tuple.dport;
	datagram->protocol = p->tuple.protocol;
	WRITE_ONCE(datagram->known, 1);
	if (datagram->waiting && !reinject_fragments(skb, space, datagram))
		return drop(COUNT_DROP_FRAGMENT);
	return STEP_NONE;
}

INLINE int track_later(struct __sk_buff *skb, struct scratch *space, const bool may_hold, const bool v6)
{
	struct packet *p = &space->packet;
	struct fragments *datagram = bpf_map_lookup_elem(&fragments, &space->datagram);

	if (!datagram || !READ_ONCE(datagram->known) || !is_current(datagram)) {
		if (!may_hold || !may_concern_service(&p->tuple, v6))
			return pass();
		datagram = begin_datagram(space, false);
		return datagram ? queue_fragment(skb, space, datagram) : pass();
	}
	p->tuple.sport = datagram->sport;
	p->tuple.dport = datagram->dport;
	p->tuple.protocol = datagram->protocol;
	p->kind = PACKET_TRANSPORT;
	return STEP_NONE;
}

/* Make a fragment a packet with ports. */
INLINE int track_fragment(struct __sk_buff *skb, struct scratch *space, __u32 queueing, const bool v6)
{
	write_datagram_key(&space->datagram, &space->packet);
	if (space->packet.fragment.part == FIRST_FRAGMENT)
		return track_first(skb, space);
	return track_later(skb, space, queueing == MAY_QUEUE, v6);
}

GLOBAL_VERB(track_fragment)

#endif
