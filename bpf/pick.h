/* Affinity first, then one index into the slice. Algorithms live in user space: they fill slices. */
#ifndef HYBRID_PROXY_PICK_H
#define HYBRID_PROXY_PICK_H

#include "service.h"

INLINE bool is_member(__u32 backend, __u32 service, __u32 route)
{
	struct backend *row = find_backend(backend, service);

	return row && READ_ONCE(row->flags) & (route ? BACKEND_ROUTE1 : BACKEND_ROUTE0);
}

/* The backend that this client had before, if it is not too long ago and still a member; otherwise 0. */
INLINE __u32 recall(const struct affinity_key *key, __u32 timeout, __u32 route)
{
	__u64 *memory = bpf_map_lookup_elem(&affinity, key), value;

	if (!memory)
		return 0;
	value = READ_ONCE(*memory);
	if (now() - (__u32)(value >> 32) > timeout || !is_member((__u32)value, key->service, route))
		return 0;
	return (__u32)value;
}

INLINE void memorise(const struct affinity_key *key, __u32 backend)
{
	__u64 value = (__u64)now() << 32 | backend;

	bpf_map_update_elem(&affinity, key, &value, BPF_ANY);
}

/* A backend id for a new connection of `client`, 0: the route is empty. */
INLINE __u32 pick(__u32 id, struct service *service, __u32 route, const __u32 *client, const bool remember)
{
	__u32 timeout = service->affinity, backend = 0;
	struct affinity_key key = {.service = id};

	if (timeout) {
		copy_address(key.client, client);
		backend = recall(&key, timeout, route);
	}
	if (!backend)
		backend = index_slice(id, service, route, bpf_get_prandom_u32());
	if (timeout && backend && remember)
		memorise(&key, backend);
	return backend;
}

/* No backend. A slice that has some after all was changing under our eyes: drop, and the client tries again. */
INLINE void choose_empty(struct choice *c, struct service *service)
{
	__u32 drops = c->route ? SERVICE_DROP_ROUTE1 : SERVICE_DROP_ROUTE0;
	__u64 word = READ_ONCE(service->routes[c->route & 1]);
	bool empty = !(word >> SLICE_OFFSET_BITS & ((1 << SLICE_COUNT_BITS) - 1));

	c->verdict = !empty || service->flags & drops ? VERDICT_DROP : VERDICT_REJECT;
}

/* Decide for a client inside the cluster (a pod or this node). `remember` false: without side effects. */
INLINE void choose(struct choice *c, const __u32 *client, const __u32 *address, __be16 port, __u8 protocol,
		   const bool v6, const bool remember)
{
	__u64 frontend = find_frontend(address, port, protocol, v6);
	struct service *service;
	struct backend *row;

	c->verdict = VERDICT_UNTOUCHED;
	if (!frontend) {
		if (find_frontend(address, 0, 0, v6))
			c->verdict = VERDICT_REJECT;
		return;
	}
	c->service = (__u32)frontend;
	c->route = frontend >> 32 & FRONTEND_INSIDE_ROUTE ? 1 : 0;
	service = bpf_map_lookup_elem(&services, &c->service);
	if (!service)
		return;
	c->backend = pick(c->service, service, c->route, client, remember);
	row = c->backend ? find_backend(c->backend, c->service) : NULL;
	if (!row) {
		choose_empty(c, service);
		return;
	}
	copy_address(c->address, row->address);
	c->port = row->port;
	c->verdict = VERDICT_DNAT;
}

#endif
