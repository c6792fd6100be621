/* The storage of the node's sockets: the service addresses that each of them talks to. */
#ifndef HYBRID_PROXY_SOCKET_STORAGE_H
#define HYBRID_PROXY_SOCKET_STORAGE_H

#include "packet.h"
#include "service.h"

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct socket_state);
} sockets SEC(".maps");

/* Returns what the socket asked, if a datagram from here answers it; of several services of this backend, the last one.
 */
INLINE struct socket_peer *answering_peer(struct socket_state *state, const __u32 *address, __be16 port)
{
	struct socket_peer *found = NULL;

	for (int i = 0; i < SOCKET_PEERS; i++) {
		struct socket_peer *peer = &state->peers[i];

		if (peer->service && peer->backend_port == port && same_address(peer->backend, address, true) &&
		    (!found || (__s32)(peer->sent - found->sent) > 0))
			found = peer;
	}
	return found;
}

/* Returns the service that a connected UDP socket of the node asked for, if this packet is its datagram and its backend
 * serves no longer; NULL for any other packet. The kernel calls no program when a connected socket sends (udp_sendmsg),
 * and a socket whose connection is taken away can never send again without an address. So it keeps sending to its old
 * backend, and its datagrams get another one where they leave.
 */
INLINE struct socket_peer *lost_peer(struct __sk_buff *skb, const struct tuple *t, const bool v6)
{
	struct bpf_sock *sk = t->protocol == IPPROTO_UDP ? skb->sk : NULL;
	struct socket_state *state;
	struct socket_peer *peer;

	if (!sk)
		return NULL;
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->state != BPF_TCP_ESTABLISHED)
		return NULL;
	state = bpf_sk_storage_get(&sockets, sk, NULL, 0);
	if (!state || !state->connected)
		return NULL;
	peer = &state->peers[0];
	if (peer->backend_port != t->dport || !same_address(peer->backend, t->daddr, v6) ||
	    is_serving(peer->backend_id, peer->service, peer->backend, peer->backend_port))
		return NULL;
	return peer;
}

#endif
