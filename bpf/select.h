/* The number by which a new connection finds its slot. An algorithm is the way in which a slot range is filled, plus
 * one of these numbers.
 */
#ifndef HYBRID_PROXY_SELECT_H
#define HYBRID_PROXY_SELECT_H

#include "config.h"
#include "open_flows.h"
#include "packet.h"
#include "service.h"

/* Multiplies and folds. There is no seed, so every node computes the same number. */
INLINE __u32 mix(__u32 h, __u32 word)
{
	h = (h ^ word) * 0x85ebca6bu;
	return h ^ h >> 15;
}

INLINE __u32 mix_address(__u32 h, const __u32 *a, const bool v6)
{
	h = mix(h, a[0]);
	if (v6) {
		h = mix(h, a[1]);
		h = mix(h, a[2]);
		h = mix(h, a[3]);
	}
	return h;
}

/* The words that were mixed in last must reach the high bits, because these choose the slot. */
INLINE __u32 finalize(__u32 h)
{
	return mix(mix(h, 0x9e3779b1u), 0xc2b2ae35u);
}

INLINE __u32 hash_client(const __u32 *client, const bool v6)
{
	return finalize(mix_address(0, client, v6));
}

/* Hashes a tuple. A socket that connects has no port yet (0); a random number replaces it. */
INLINE __u32 hash_tuple(const struct tuple *t, const bool v6)
{
	__u32 h = mix_address(mix_address(t->protocol, t->saddr, v6), t->daddr, v6);

	return finalize(mix(h, (__u32)t->dport << 16 | (t->sport ? t->sport : bpf_get_prandom_u32() & 0xffff)));
}

/* Selects one slot after the other. Two connections at the same moment on two CPUs may get the same one, and the next
 * is skipped: an exact count would make the CPUs wait for each other.
 */
INLINE __u32 round_robin(struct service *service, __u32 set, const bool remember)
{
	__u64 turn = READ_ONCE(service->turn);
	__u32 size = range_size(READ_ONCE(service->sets[set & 1]));

	if (remember)
		__sync_fetch_and_add(&service->turn, 1);
	return size ? ((turn % size << 32) + size - 1) / size : 0; /* read_slot() makes the index of it again */
}

/* Returns the backend whose slot a number leads to; 0: the range is empty. It is a function of its own, like its
 * callers, so that the verifier checks it once.
 */
__noinline __u32 backend_at(__u32 id, __u32 set, __u32 number)
{
	struct service *service = bpf_map_lookup_elem(&services, &id);
	struct choice c = {.service = id, .set = set};

	return service && read_slot(&c, service, number) ? c.backend : 0;
}

#define AVOID_TRIES 16
#define AVOID_STEP 0x9e3779b9u /* steps of the golden ratio: they come to every part of the range soon */

/* Returns a number that leads to another backend than `avoid`: `number`, or one of the next. After AVOID_TRIES it may
 * lead there after all.
 */
__noinline __u32 number_beside(__u32 id, __u32 set, __u32 avoid, __u32 number)
{
#pragma clang loop unroll(disable)
	for (int i = 0; i < AVOID_TRIES && backend_at(id, set, number) == avoid; i++)
		number += AVOID_STEP;
	return number;
}

#define SAMPLES 4

/* Returns the number that leads to the backend with the fewest open flows for its weight, among four random slots. It
 * is not the minimum of all backends, which every processor would find at the same moment. The slots are steps of the
 * golden ratio apart, so both of two backends are among them, and nearly always all of three. If the counts are equal,
 * the first slot wins, so that weights count.
 */
__noinline __u32 number_of_fewest(__u32 id, __u32 set, __u32 avoid)
{
	__u32 number = bpf_get_prandom_u32(), best = number;
	__u64 open = 0, weight = 0; /* of the best; weight 0: there is none yet */

#pragma clang loop unroll(disable)
	for (int i = 0; i < SAMPLES; i++, number += AVOID_STEP) {
		__u32 backend = backend_at(id, set, number);
		struct load *load = bpf_map_lookup_elem(&loads, &backend);

		if (!backend)
			break;
		if (!load || backend == avoid)
			continue;
		NOTE(NOTE_LOAD, backend, open_flows(load));
		if (!weight || open_flows(load) * weight < open * load->weight) {
			open = open_flows(load);
			weight = load->weight ? load->weight : 1;
			best = number;
		}
	}
	return best;
}

/* The number for a connection with this tuple. */
INLINE __u32 slot_number(const struct choice *c, struct service *service, const struct tuple *t, const bool v6,
			 const bool remember)
{
	__u32 flags = c->crowded ? service->flags & SERVICE_BY_CLIENT : service->flags;

	if (flags & SERVICE_BY_CLIENT || (c->forgettable && service->affinity))
		return hash_client(t->saddr, v6);
	if (flags & SERVICE_BY_TUPLE || c->crowded)
		return hash_tuple(t, v6);
	if (flags & SERVICE_ROUND_ROBIN)
		return round_robin(service, c->set, remember);
	if (flags & SERVICE_FEWEST)
		return number_of_fewest(c->service, c->set, c->avoid);
	return c->forgettable ? hash_tuple(t, v6) : bpf_get_prandom_u32();
}

/* One slot of the range, chosen by `number`, into `c`; false: the range is empty. A backend to avoid is taken only when
 * no other is met.
 */
INLINE bool select_slot(struct choice *c, struct service *service, __u32 number)
{
	if (c->avoid)
		number = number_beside(c->service, c->set, c->avoid, number);
	return read_slot(c, service, number);
}

#endif
