/* cgroup hook at which the kernel reports how connections of the node's own sockets begin. Their backend was chosen at
 * connect(), and no program sees their packets; but the kernel reports that it repeats a SYN, and that a backend has
 * accepted. It does not distinguish a reset connection from a socket that was closed too soon.
 */
#include "config.h"
#include "service.h"
#include "sockets.h"
#include "traffic.h"

#define PROCEED 1
#define SYN_SENT 2 /* TCP_SYN_SENT, net/tcp_states.h */

/* The service that this socket connects to, and its backend; NULL: it is none of ours. */
INLINE struct socket_peer *peer_of(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct socket_state *state = sk ? bpf_sk_storage_get(&sockets, sk, NULL, 0) : NULL;

	return state && state->connected ? &state->peers[0] : NULL;
}

/* Other programs' wishes stay. */
INLINE void set_rto_cb(struct bpf_sock_ops *ctx, const bool wanted)
{
	__u32 flags = ctx->bpf_sock_ops_cb_flags;

	bpf_sock_ops_cb_flags_set(ctx, wanted ? flags | BPF_SOCK_OPS_RTO_CB_FLAG : flags & ~BPF_SOCK_OPS_RTO_CB_FLAG);
}

/* The only round trip so far is that of the SYN; of one that was repeated the kernel measures none. */
INLINE void note_accepted(struct bpf_sock_ops *ctx, const struct socket_peer *peer)
{
	__u32 eighths = ctx->srtt_us;

	note_success(peer->backend_id, peer->service);
	if (eighths)
		account_answer(peer->backend_id, (__u64)eighths * 1000 / 8);
}

/* One failure for each connection, however often its SYN is repeated. */
SEC("sockops")
int sockops_cb(struct bpf_sock_ops *ctx)
{
	__u32 what = ctx->op;
	struct socket_peer *peer;

	if (what != BPF_SOCK_OPS_TCP_CONNECT_CB && what != BPF_SOCK_OPS_RTO_CB &&
	    what != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB)
		return PROCEED;
	peer = peer_of(ctx);
	if (!peer)
		return PROCEED;
	if (what == BPF_SOCK_OPS_TCP_CONNECT_CB) {
		set_rto_cb(ctx, true);
		return PROCEED;
	}
	if (what == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB)
		note_accepted(ctx, peer);
	else if (ctx->state == SYN_SENT)
		note_failure(peer->backend_id, peer->service, COUNT_BACKEND_UNANSWERED);
	set_rto_cb(ctx, false);
	return PROCEED;
}

char LICENSE[] SEC("license") = "GPL";
