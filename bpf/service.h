/* From an address and port to a service, and from a service to a backend. */
#ifndef HYBRID_PROXY_SERVICE_H
#define HYBRID_PROXY_SERVICE_H

#include "count.h"
#include "hash.h"
#include "maps.h"
#include "node.h"
#include "packet.h"

/* A backend, or another verdict, for a new flow or socket. */
struct choice {
	enum verdict verdict;
	__u32 service;
	__u32 backend;
	__u32 avoid;	  /* a backend that was tried in vain, 0: none */
	__u32 set;	  /* of the service's backend sets: 0 or 1 */
	__u32 address[4]; /* the backend's */
	__be16 port;
	bool masquerade;
	bool counted;	  /* the service's open flows are */
	bool forgettable; /* the choice must be repeatable for the same tuple, because the flow may be evicted */
	bool crowded;	  /* a flood is under way: the algorithm is ignored, and the tuple or client is hashed */
	enum counter why; /* of a drop, or of a rejection */
};

INLINE __u64 lookup_frontend(const __u32 *address, __be16 port, __u8 protocol, const bool v6)
{
	__u64 *value;

	if (v6) {
		struct frontend6_key key = {.port = port, .protocol = protocol};

		copy_address(key.address, address);
		value = bpf_map_lookup_elem(&frontends6, &key);
	} else {
		struct frontend4_key key = {.address = address[0], .port = port, .protocol = protocol};

		value = bpf_map_lookup_elem(&frontends4, &key);
	}
	return value ? READ_ONCE(*value) : 0;
}

/* While the mode drains, no flow begins. */
INLINE bool is_draining(void)
{
	return READ_ONCE(own_node.draining);
}

/* The frontend's value, 0 when there is none. An element that was recycled for another key meanwhile is looked up
 * again. */
INLINE __u64 find_frontend(const __u32 *address, __be16 port, __u8 protocol, const bool v6)
{
	__u32 tag = frontend_tag(address, port, protocol, v6);

	if (is_draining())
		return 0;
#pragma unroll
	for (int i = 0; i < 2; i++) {
		__u64 value = lookup_frontend(address, port, protocol, v6);

		if (!value || value >> 40 == tag)
			return value;
	}
	return 0;
}

INLINE struct backend *find_backend(__u32 id, __u32 service)
{
	struct backend *row = bpf_map_lookup_elem(&backends, &id);

	return row && READ_ONCE(row->service) == service ? row : NULL;
}

/* Does the backend that a flow remembers still serve? Its id may have been reused, so the address decides. */
INLINE bool is_serving(__u32 id, __u32 service, const __u32 *address, __be16 port)
{
	struct backend *row = find_backend(id, service);

	return row && READ_ONCE(row->flags) & BACKEND_SERVING && row->port == port &&
	       same_address(row->address, address, true);
}

INLINE __u32 range_size(__u64 word)
{
	return word >> RANGE_OFFSET_BITS & ((1 << RANGE_COUNT_BITS) - 1);
}

/* Reads the slot that `number` leads to in the set's slot range into `c`; false: the range is empty.
 *
 * One load reads offset and count of the range together, so a program sees the old set or the new one. But the slots
 * themselves may be given to another service between that load and the next. Slots carry the id of their service; on a
 * mismatch the read is repeated.
 */
INLINE bool read_slot(struct choice *c, struct service *service, __u32 number)
{
#pragma unroll
	for (int i = 0; i < 2; i++) {
		__u64 word = READ_ONCE(service->sets[c->set & 1]), backend, endpoint;
		__u32 size = range_size(word);
		__u32 index = word & ((1 << RANGE_OFFSET_BITS) - 1);
		struct slot *slot;

		if (!size)
			return false;
		index += (__u64)number * size >> 32;
		slot = bpf_map_lookup_elem(&slots, &index);
		if (!slot)
			return false;
		backend = READ_ONCE(slot->backend);
		endpoint = READ_ONCE(slot->endpoint);
		if (backend >> 32 == c->service && endpoint >> 48 == (__u16)c->service) {
			c->backend = (__u32)backend;
			c->address[0] = (__u32)endpoint;
			c->port = endpoint >> 32;
			NOTE(NOTE_SLOT, index, c->backend);
			return true;
		}
		count(COUNT_SLOT_RETRY);
	}
	count(COUNT_SLOT_LOST);
	return false;
}

#define FAILURE_SERIES 600000000000ull /* a longer time without a failure ends a series */

INLINE bool is_history_of(const struct failures *known, const struct backend *row)
{
	return known->service == row->service && known->port == row->port &&
	       same_address(known->address, row->address, true);
}

/* Returns the backend's failure row, an empty one at first; NULL: there is no room. */
INLINE struct failures *failure_history(__u32 id, const struct backend *row)
{
	struct failures *known = bpf_map_lookup_elem(&failures, &id);
	struct failures first = {.port = row->port, .service = row->service};

	if (known && is_history_of(known, row))
		return known;
	copy_address(first.address, row->address);
	bpf_map_update_elem(&failures, &id, &first, BPF_ANY);
	return bpf_map_lookup_elem(&failures, &id);
}

INLINE void extend_series(__u32 *count, __u64 *last)
{
	__u64 time = bpf_ktime_get_ns();

	if (time - READ_ONCE(*last) > FAILURE_SERIES)
		WRITE_ONCE(*count, 0);
	WRITE_ONCE(*last, time);
	__sync_fetch_and_add(count, 1);
}

/* Remembers when and how a connection to the backend failed, for people. It is a function of its own, because it is
 * rarely called.
 */
__noinline int remember_failure(__u32 id, __u32 how)
{
	struct backend *row = bpf_map_lookup_elem(&backends, &id);
	struct failures *known = row ? failure_history(id, row) : NULL;

	if (!known)
		return 0;
	if (how == COUNT_BACKEND_REFUSED)
		extend_series(&known->refused, &known->refused_at);
	else
		extend_series(&known->unanswered, &known->unanswered_at);
	return 0;
}

/* Notes that a connection to the backend failed: COUNT_BACKEND_REFUSED or COUNT_BACKEND_UNANSWERED. User space ejects
 * backends whose connections keep failing (outliers.py).
 */
INLINE void note_failure(__u32 backend, __u32 service, enum counter how)
{
	struct backend *row = find_backend(backend, service);

	if (!row)
		return;
	__sync_fetch_and_add(&row->failures, 1);
	count(how);
	remember_failure(backend, how);
}

INLINE void note_success(__u32 backend, __u32 service)
{
	struct backend *row = find_backend(backend, service);

	if (row && READ_ONCE(row->failures))
		WRITE_ONCE(row->failures, 0);
}

#endif
