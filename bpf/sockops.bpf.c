/* cgroup hook at which the kernel reports how connections of the node's own sockets begin. Their backend was chosen at
 * connect(), and no program sees their packets; but the kernel reports that it repeats a SYN, that a backend has
 * accepted, and that a connection ended before that. It calls this nine times for any connection of the cgroup, so it
 * is attached only where sockets connect to services (`note_cgroup`).
 */
#include "config.h"
#include "first_packet.h"
#include "service.h"
#include "socket_storage.h"
#include "traffic.h"

#define PROCEED 1
#define SYN_SENT 2 /* TCP_SYN_SENT, net/tcp_states.h */
#define CLOSE 7

/* Returns the storage of a socket that connects to a service; NULL: it connects to none. */
INLINE struct socket_state *state_of(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct socket_state *state = sk ? bpf_sk_storage_get(&sockets, sk, NULL, 0) : NULL;

	return state && state->connected ? state : NULL;
}

/* Ask for reports of repetitions, and of states. Other programs' wishes stay. */
INLINE void begin(struct bpf_sock_ops *ctx)
{
	bpf_sock_ops_cb_flags_set(ctx,
				  ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG);
}

/* It is known how the connection began. Others may wait for states, too, so those are still reported. */
INLINE void end(struct bpf_sock_ops *ctx)
{
	bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags & ~BPF_SOCK_OPS_RTO_CB_FLAG);
}

/* Is the connection over before it began, by the first segment that came? That is a reset. Of a socket that was closed
 * too soon, or given up, none has come. What failed otherwise was noted already.
 */
INLINE bool is_refused(const struct bpf_sock_ops *ctx)
{
	return ctx->args[0] == SYN_SENT && ctx->args[1] == CLOSE && ctx->segs_in &&
	       ctx->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_RTO_CB_FLAG;
}

/* The only round trip so far is that of the SYN; of one that was repeated the kernel measures none. */
INLINE void note_accepted(struct bpf_sock_ops *ctx, const struct socket_state *state)
{
	const struct socket_peer *peer = &state->peers[0];
	__u32 eighths = ctx->srtt_us, ticks = (__u64)eighths * 125 >> KTIME_SHIFT;

	note_success(peer->backend_id, peer->service);
	account_first_packet(peer->backend_id, eighths ? ticks : LONGEST_CONNECT, peer->service,
			     eighths ? ticks : ktime() - state->asked_at);
}

/* Returns when the first SYN was sent, in ticks of ktime(): the kernel's timer, in jiffies, has just run out. */
INLINE __u32 first_sent(const struct bpf_sock_ops *ctx)
{
	return ktime() - ctx->args[1] * (1000000000 / settings.hz >> KTIME_SHIFT);
}

/* One failure for each connection, however often its SYN is repeated. */
SEC("sockops")
int sockops_cb(struct bpf_sock_ops *ctx)
{
	__u32 what = ctx->op;
	struct socket_state *state;
	struct socket_peer *peer;

	if (what != BPF_SOCK_OPS_TCP_CONNECT_CB && what != BPF_SOCK_OPS_RTO_CB &&
	    what != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB && !(what == BPF_SOCK_OPS_STATE_CB && is_refused(ctx)))
		return PROCEED;
	state = state_of(ctx);
	if (!state)
		return PROCEED;
	peer = &state->peers[0];
	if (what == BPF_SOCK_OPS_TCP_CONNECT_CB) {
		begin(ctx);
		return PROCEED;
	}
	if (what == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB) {
		note_accepted(ctx, state);
	} else if (what == BPF_SOCK_OPS_STATE_CB) {
		note_failure(peer->backend_id, peer->service, COUNT_BACKEND_REFUSED);
	} else if (ctx->state == SYN_SENT) {
		state->asked_at = first_sent(ctx);
		note_failure(peer->backend_id, peer->service, COUNT_BACKEND_UNANSWERED);
	}
	end(ctx);
	return PROCEED;
}

char LICENSE[] SEC("license") = "GPL";
