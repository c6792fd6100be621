/* Chooses a backend for a new connection: the one that affinity remembers, else one slot of the service's slot range.
 *
 * Algorithms live in user space. They fill slot ranges, and name the number by which a slot is found (select.h).
 */
#ifndef HYBRID_PROXY_PICK_H
#define HYBRID_PROXY_PICK_H

#include "count.h"
#include "hash.h"
#include "maps.h"
#include "packet.h"
#include "select.h"
#include "service.h"

INLINE bool is_member(__u32 backend, __u32 service, __u32 set)
{
	struct backend *row = find_backend(backend, service);

	return row && READ_ONCE(row->flags) & (set ? BACKEND_SET1 : BACKEND_SET0);
}

/* Returns the backend that this client had before, if affinity has not expired and the backend is still a member;
 * otherwise 0.
 */
INLINE __u32 affinity_lookup(const struct affinity_key *key, __u32 timeout, __u32 set)
{
	__u64 *memory = bpf_map_lookup_elem(&affinity, key), value;

	if (!memory)
		return 0;
	value = READ_ONCE(*memory);
	if (now() - (__u32)(value >> 32) > timeout || !is_member((__u32)value, key->service, set))
		return 0;
	return (__u32)value;
}

INLINE long affinity_store(const struct affinity_key *key, __u32 backend, __u64 flags)
{
	__u64 value = (__u64)now() << 32 | backend;

	return bpf_map_update_elem(&affinity, key, &value, flags);
}

/* Remembers the backend chosen for a new client, and returns the client's backend. Another CPU may choose for the same
 * client at the same time: the first one remembered counts for both.
 */
INLINE __u32 affinity_begin(const struct affinity_key *key, __u32 backend, __u32 timeout, __u32 set)
{
	__u32 first;

	if (!affinity_store(key, backend, BPF_NOEXIST))
		return backend;
	first = affinity_lookup(key, timeout, set);
	if (first)
		return first;
	affinity_store(key, backend, BPF_ANY);
	return backend;
}

/* The backend's address from its row; false: the id is another service's by now. */
INLINE bool read_backend(struct choice *c)
{
	struct backend *row = find_backend(c->backend, c->service);

	if (!row)
		return false;
	copy_address(c->address, row->address);
	c->port = row->port;
	return true;
}

/* Picks a backend for a new connection; false: the set is empty. Slots are read in one place, because the verifier
 * would check a second one just as often.
 */
INLINE bool pick_backend(struct choice *c, struct service *service, const struct tuple *t, const bool v6,
			 const bool remember)
{
	__u32 timeout = service->affinity;
	struct affinity_key key = {.service = c->service};
	bool known = false;

	if (timeout) {
		copy_address(key.client, t->saddr);
		c->backend = affinity_lookup(&key, timeout, c->set);
		NOTE(NOTE_AFFINITY, timeout, c->backend);
		known = c->backend;
		if (c->backend == c->avoid)
			c->backend = 0;
	}
	if (!c->backend && !select_slot(c, service, slot_number(c, service, t, v6, remember)))
		return false;
	if (!timeout)
		return !v6 || read_backend(c);
	if (remember && known)
		affinity_store(&key, c->backend, BPF_ANY);
	else if (remember && !c->crowded) /* forged clients would evict real ones */
		c->backend = affinity_begin(&key, c->backend, timeout, c->set);
	return read_backend(c);
}

/* Decides the verdict when no backend was found. A set that is not empty was changing while this program read it: the
 * packet is dropped, and the client tries again.
 */
INLINE void choose_none(struct choice *c, struct service *service)
{
	__u32 drops = c->set ? SERVICE_DROP_SET1 : SERVICE_DROP_SET0;
	__u64 word = READ_ONCE(service->sets[c->set & 1]);
	bool empty = !range_size(word), rejects = empty && !(service->flags & drops);

	NOTE(NOTE_EMPTY, c->set, !rejects);
	c->why = empty ? COUNT_DROP_EMPTY : COUNT_DROP_CHANGING;
	if (rejects)
		c->why = COUNT_REJECT;
	c->verdict = rejects ? VERDICT_REJECT : VERDICT_DROP;
}

INLINE __u64 node_port_at(__be16 port, __u8 protocol, const bool v6)
{
	__u32 any[4] = {};
	__u64 found = find_frontend(any, port, protocol, v6);

	NOTE(NOTE_NODE_PORT, (__u32)found, found >> 32 & 0xff);
	return found;
}

/* Finds the frontend at this address and port. Node ports have address 0, and are served at addresses whose row has
 * FRONTEND_NODE_PORTS. At other addresses of services a port without a frontend is rejected.
 */
INLINE __u64 frontend_at(struct choice *c, const __u32 *address, __be16 port, __u8 protocol, const bool v6)
{
	const __u32 any[4] = {};
	__u64 found;

	if (same_address(address, any, v6))
		return 0; /* nothing is sent there, but node ports would be found */
	found = find_frontend(address, port, protocol, v6);
	if (found) {
		NOTE(NOTE_FRONTEND, (__u32)found, found >> 32 & 0xff);
		return found;
	}
	found = find_frontend(address, 0, 0, v6);
	if (!(found >> 32 & FRONTEND_ADDRESS))
		return 0;
	if (found >> 32 & FRONTEND_NODE_PORTS)
		return node_port_at(port, protocol, v6);
	NOTE(NOTE_CLOSED, 0, 0);
	c->why = COUNT_REJECT_NO_PORT;
	c->verdict = VERDICT_REJECT;
	return 0;
}

INLINE bool is_masqueraded(__u32 flags, enum client from)
{
	if (from == CLIENT_POD)
		return flags & FRONTEND_MASQUERADE_POD;
	return flags & (from == CLIENT_NODE ? FRONTEND_MASQUERADE_NODE : FRONTEND_MASQUERADE_EXTERNAL);
}

/* Clients that are not in the service's source ranges are dropped (KEP-3866: before every other rule). */
INLINE bool is_excluded(struct choice *c, __u32 flags, const __u32 *client, const bool v6)
{
	bool allowed;

	if (!(flags & FRONTEND_SOURCE_RANGES))
		return false;
	allowed = in_ranges(c->service, client, v6);
	NOTE(NOTE_SOURCES, allowed, 0);
	if (allowed)
		return false;
	c->why = COUNT_DROP_SOURCE_RANGES;
	c->verdict = VERDICT_DROP;
	return true;
}

/* Chooses among the backends of a frontend. */
INLINE void choose_at(struct choice *c, __u64 frontend, const enum client from, const struct tuple *t, const bool v6,
		      const bool remember)
{
	struct service *service;
	__u32 flags = frontend >> 32;

	c->service = (__u32)frontend;
	c->set = flags & (from == CLIENT_EXTERNAL ? FRONTEND_EXTERNAL_SET : FRONTEND_INTERNAL_SET) ? 1 : 0;
	c->masquerade = is_masqueraded(flags, from);
	NOTE(NOTE_CLIENT, from, 0);
	if (is_excluded(c, flags, t->saddr, v6))
		return;
	NOTE(NOTE_ROUTE, c->set, c->masquerade);
	service = bpf_map_lookup_elem(&services, &c->service);
	if (!service)
		return;
	c->counted = service->flags & SERVICE_FEWEST;
	if (pick_backend(c, service, t, v6, remember))
		c->verdict = VERDICT_DNAT;
	else
		choose_none(c, service);
}

/* Chooses for the tuple of a client's packet, or of a socket that has no port yet. Only a socket of this node finds
 * node ports at a loopback address; a packet to such an address, which may be a neighbour's, is not served. `remember`
 * false: without side effects.
 */
INLINE void choose_backend(struct choice *c, const enum client from, const struct tuple *t, const bool v6,
			   const bool remember)
{
	__u64 frontend = 0;

	c->verdict = VERDICT_UNTOUCHED;
	if (from != CLIENT_NODE || !is_localhost(t->daddr, v6))
		frontend = frontend_at(c, t->daddr, t->dport, t->protocol, v6);
	else if (find_frontend(t->daddr, 0, 0, v6) >> 32 & FRONTEND_NODE_PORTS)
		frontend = node_port_at(t->dport, t->protocol, v6);
	if (frontend)
		choose_at(c, frontend, from, t, v6, remember);
}

#endif
