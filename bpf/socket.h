/* The hooks of the node's own sockets: they choose a backend when a socket connects or sends, and show the service
 * where the socket asks for its peer. No packet is translated. The socket's storage keeps what the socket asked for.
 */
#ifndef HYBRID_PROXY_SOCKET_H
#define HYBRID_PROXY_SOCKET_H

#include "count.h"
#include "events.h"
#include "flow.h"
#include "hash.h"
#include "maps.h"
#include "node.h"
#include "packet.h"
#include "pick.h"
#include "service.h"
#include "socket_storage.h"
#include "target.h"
#include "traffic.h"

#define ECONNREFUSED 111
#define REFUSE 0

INLINE void write_target(struct bpf_sock_addr *ctx, const struct target *t, const __u32 *address, __be16 port,
			 const bool v6)
{
	ctx->user_port = port;
	if (!v6) {
		ctx->user_ip4 = address[0];
	} else if (t->mapped) {
		ctx->user_ip6[3] = address[0];
	} else {
		ctx->user_ip6[0] = address[0];
		ctx->user_ip6[1] = address[1];
		ctx->user_ip6[2] = address[2];
		ctx->user_ip6[3] = address[3];
	}
}

/* Returns the socket's storage. The context's fields are read once, at the start: the verifier refuses a context
 * pointer that the compiler moved to a field.
 */
INLINE struct socket_state *state_of(struct bpf_sock *sk, __u64 flags)
{
	return sk ? bpf_sk_storage_get(&sockets, sk, NULL, flags) : NULL;
}

/* Reports what the socket asked for, as an event of the packet that it would have sent. */
INLINE void emit_socket_event(const struct target *t, const struct choice *c, __u8 protocol, enum counter reason,
			      const bool traced)
{
	struct tuple asked = {.dport = t->port, .protocol = protocol};
	struct event *e;

	primary_address(asked.saddr, t->v6);
	copy_address(asked.daddr, t->address);
	if (!event_allowed(false))
		return;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e)
		return;
	fill_event(e, &asked, reason, HOOK_SOCKET, t->v6);
	e->service = c->service;
	e->backend = c->backend;
	e->ifindex = 0;
	e->tcp_flags = 0;
	e->traced = traced;
	bpf_ringbuf_submit(e, 0);
}

/* Emit an event for the socket's choice, where its service or this node's own address is traced. */
INLINE void trace_socket(const struct target *t, const struct choice *c, __u8 protocol)
{
	__u32 client[4] = {};

	if (!settings.event_burst || !READ_ONCE(own_node.trace))
		return;
	primary_address(client, t->v6);
	if (is_traced(c->service, client, client))
		emit_socket_event(t, c, protocol, COUNT_SOCKET_CONNECT, true);
}

/* Refuses the call. Without bpf_set_retval the caller would see EPERM; then the call proceeds, and its packets are
 * rejected at the uplink, like a pod's.
 */
INLINE int refuse_socket(const struct target *t, const struct choice *c, __u8 protocol)
{
	enum counter why = c->service ? COUNT_SOCKET_REFUSED : COUNT_SOCKET_REFUSED_NO_PORT;

	if (!settings.can_set_errno)
		return PROCEED;
	count(why);
	if (settings.event_burst)
		emit_socket_event(t, c, protocol, why, false);
	bpf_set_retval(-ECONNREFUSED);
	return REFUSE;
}

/* Lets the socket proceed to the address that it asked for, and forgets an earlier connection. */
INLINE int proceed_untranslated(struct bpf_sock_addr *ctx, struct bpf_sock *sk)
{
	struct socket_state *state = state_of(sk, 0);

	if (state)
		state->connected = 0;
	return PROCEED;
}

/* Treats the source of a datagram socket as free if the kernel chose it at an earlier connect(). */
INLINE void forget_chosen(struct bpf_sock *sk, __u32 *source)
{
	struct socket_state *state = is_zero_address(source) ? NULL : state_of(sk, 0);

	if (state && state->connected == CONNECTED_FREE)
		source[0] = source[1] = source[2] = source[3] = 0;
}

/* Chooses for a socket with this source address. A socket without one is treated as if it had the node's primary
 * address. Its port is not known yet.
 */
INLINE void choose_for(struct choice *c, const __u32 *source, const struct target *t, __u8 protocol)
{
	struct tuple asked = {.dport = t->port, .protocol = protocol};

	copy_address(asked.saddr, source);
	copy_address(asked.daddr, t->address);
	if (is_zero_address(source))
		primary_address(asked.saddr, t->v6);
	if (t->v6)
		choose_backend(c, CLIENT_NODE, &asked, true, true);
	else
		choose_backend(c, CLIENT_NODE, &asked, false, true);
}

/* Are node ports served at this address? Then it is this node's own, and packets to it meet no uplink. */
INLINE bool serves_node_ports(const struct target *t)
{
	__u64 found = t->v6 ? find_frontend(t->address, 0, 0, true) : find_frontend(t->address, 0, 0, false);

	return found >> 32 & FRONTEND_NODE_PORTS;
}

/* Does the packet need another source than the socket is bound to? A hook cannot change the source of a socket, but the
 * program at the uplink can. Answers of a backend on this node find any address of the node.
 */
INLINE bool needs_other_source(const struct choice *c, const __u32 *source, const struct target *t)
{
	struct backend *row;
	__u32 own[4] = {};

	if (!c->masquerade || is_zero_address(source))
		return false;
	if (is_loopback(source, t->v6)) {
		count(COUNT_SOCKET_LOCALHOST_BOUND);
		return true;
	}
	primary_address(own, t->v6);
	if (same_address(own, source, true))
		return false;
	row = find_backend(c->backend, c->service);
	return row && !(READ_ONCE(row->flags) & BACKEND_LOCAL) && !serves_node_ports(t);
}

INLINE bool may_be_target(const struct target *t, __u8 protocol)
{
	if (may_be_node_port(t->port, protocol))
		return true;
	return t->v6 ? may_be_service(t->address, true) : may_be_service(t->address, false);
}

INLINE void remember_peer(struct socket_peer *peer, const struct target *t, const struct choice *c)
{
	copy_address(peer->frontend, t->address);
	copy_address(peer->backend, c->address);
	peer->frontend_port = t->port;
	peer->backend_port = c->port;
	peer->service = c->service;
	peer->backend_id = c->backend;
}

/* Cgroups whose sockets connect to services. The agent attaches sockops.bpf.c to these alone, so that other connections
 * of the node do not pay for it. Two with one place overwrite each other until each was seen.
 */
ARRAY_MAP(client_cgroups, __u64, 64);

INLINE void note_cgroup(void)
{
	__u64 number = bpf_get_current_cgroup_id();
	__u32 place = number % 64;
	__u64 *noted = bpf_map_lookup_elem(&client_cgroups, &place);

	if (noted && READ_ONCE(*noted) != number)
		WRITE_ONCE(*noted, number);
}

/* Remembers what a socket connects to: for getpeername, and for its datagrams when the backend goes (`lost_peer`). */
INLINE void remember_connected(struct bpf_sock *sk, const struct target *t, const struct choice *c, enum connected how)
{
	struct socket_state *state = state_of(sk, BPF_SK_STORAGE_GET_F_CREATE);

	if (!state)
		return;
	remember_peer(&state->peers[0], t, c);
	state->connected = how;
}

INLINE void count_localhost(const struct target *t)
{
	if (is_to_localhost(t))
		count(COUNT_SOCKET_LOCALHOST);
}

INLINE int connect_socket(struct bpf_sock_addr *ctx, const bool v6)
{
	__u32 protocol = READ_ONCE(ctx->protocol);
	struct bpf_sock *sk = READ_ONCE(ctx->sk);
	struct choice choice = {};
	__u32 source[4] = {};
	struct target target;

	if (!is_host_netns(ctx))
		return PROCEED;
	read_target(ctx, &target, v6);
	if (!may_be_target(&target, protocol))
		return proceed_untranslated(ctx, sk);
	read_bound(sk, source, &target, v6);
	forget_chosen(sk, source);
	choose_for(&choice, source, &target, protocol);
	if (choice.verdict == VERDICT_REJECT)
		return refuse_socket(&target, &choice, protocol);
	if (choice.verdict != VERDICT_DNAT || needs_other_source(&choice, source, &target))
		return proceed_untranslated(ctx, sk); /* the uplink decides, also when its SYN comes again */
	remember_connected(sk, &target, &choice, is_zero_address(source) ? CONNECTED_FREE : CONNECTED_BOUND);
	write_target(ctx, &target, choice.address, choice.port, v6);
	if (protocol == IPPROTO_TCP)
		note_cgroup();
	count_inline(COUNT_SOCKET_CONNECT);
	count_localhost(&target);
	account_flow(choice.backend);
	trace_socket(&target, &choice, protocol);
	return PROCEED;
}

/* Returns the backend of this socket's earlier datagrams to the service, as long as it serves. */
INLINE struct socket_peer *known_peer(struct socket_state *state, const struct target *t)
{
	for (int i = 0; i < SOCKET_PEERS; i++) {
		struct socket_peer *peer = &state->peers[i];

		if (peer->frontend_port == t->port && same_address(peer->frontend, t->address, true))
			return is_serving(peer->backend_id, peer->service, peer->backend, peer->backend_port) ? peer
													      : NULL;
	}
	return NULL;
}

/* Returns the row for a peer: its own, or the least recently used one. */
INLINE struct socket_peer *new_peer(struct socket_state *state, const struct target *t)
{
	__u32 chosen = 0, age = 0;

	for (int i = 0; i < SOCKET_PEERS; i++) {
		struct socket_peer *peer = &state->peers[i];

		if (peer->frontend_port == t->port && same_address(peer->frontend, t->address, true))
			return peer;
		if (state->sent + 1 - peer->sent > age) {
			age = state->sent + 1 - peer->sent;
			chosen = i;
		}
	}
	return &state->peers[chosen & (SOCKET_PEERS - 1)];
}

/* Remembers where this datagram goes, for the next one and for the answer. */
INLINE void remember_sent(struct bpf_sock *sk, const struct target *t, const struct choice *c)
{
	struct socket_state *state = state_of(sk, BPF_SK_STORAGE_GET_F_CREATE);
	struct socket_peer *peer;

	if (!state)
		return;
	peer = new_peer(state, t);
	remember_peer(peer, t, c);
	peer->sent = ++state->sent;
}

/* Does another mode translate this socket's datagrams to the service? Such a flow stays with it (FLOW_OTHERS). */
INLINE bool is_others(struct bpf_sock *sk, const __u32 *source, const struct target *t)
{
	struct tuple key = {.sport = bpf_htons(sk->src_port), .dport = t->port, .protocol = IPPROTO_UDP};
	struct found found;

	copy_address(key.saddr, source);
	copy_address(key.daddr, t->address);
	if (t->v6)
		find_flow(&found, &key, true);
	else
		find_flow(&found, &key, false);
	return found.entry && found.entry->flags & FLOW_OTHERS;
}

INLINE int send_datagram(struct bpf_sock_addr *ctx, const bool v6)
{
	struct bpf_sock *sk = READ_ONCE(ctx->sk);
	__u32 source[4] = {}, bound[4] = {};
	struct choice choice = {};
	struct socket_state *state;
	struct socket_peer *peer;
	struct target target;

	if (!is_host_netns(ctx))
		return PROCEED;
	read_target(ctx, &target, v6);
	if (!may_be_target(&target, IPPROTO_UDP))
		return PROCEED;
	read_source(ctx, source, v6);
	read_bound(sk, bound, &target, v6);
	state = state_of(sk, 0);
	peer = state && same_address(source, bound, true) ? known_peer(state, &target) : NULL;
	if (peer) {
		peer->sent = ++state->sent;
		write_target(ctx, &target, peer->backend, peer->backend_port, v6);
		return PROCEED;
	}
	if (is_others(sk, source, &target))
		return PROCEED;
	choose_for(&choice, source, &target, IPPROTO_UDP);
	if (choice.verdict == VERDICT_REJECT)
		return refuse_socket(&target, &choice, IPPROTO_UDP);
	if (choice.verdict != VERDICT_DNAT || needs_other_source(&choice, source, &target))
		return PROCEED;
	remember_sent(sk, &target, &choice);
	count_localhost(&target);
	account_flow(choice.backend);
	trace_socket(&target, &choice, IPPROTO_UDP);
	write_target(ctx, &target, choice.address, choice.port, v6);
	return PROCEED;
}

/* Shows the service that the socket sent to when a datagram comes from a backend. */
INLINE int receive_datagram(struct bpf_sock_addr *ctx, const bool v6)
{
	struct bpf_sock *sk = READ_ONCE(ctx->sk);
	struct socket_state *state = state_of(sk, 0);
	struct socket_peer *asked;
	struct target source;

	if (!state)
		return PROCEED;
	read_target(ctx, &source, v6);
	asked = answering_peer(state, source.address, source.port);
	if (asked)
		write_target(ctx, &source, asked->frontend, asked->frontend_port, v6);
	return PROCEED;
}

INLINE int show_peer(struct bpf_sock_addr *ctx, const bool v6)
{
	struct bpf_sock *sk = READ_ONCE(ctx->sk);
	struct socket_state *state = state_of(sk, 0);
	struct socket_peer *peer;
	struct target actual;

	if (!state || !state->connected)
		return PROCEED;
	read_target(ctx, &actual, v6);
	peer = &state->peers[0];
	if (peer->backend_port == actual.port && same_address(peer->backend, actual.address, true))
		write_target(ctx, &actual, peer->frontend, peer->frontend_port, v6);
	return PROCEED;
}

#endif
