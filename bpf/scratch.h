/* Memory that verbs share, and the steps between them.
 *
 * The large verbs are global functions. The verifier checks a global function once, for any arguments, and not again
 * on every path that leads to it. Inlined, all of them together are more than the million instructions that it checks.
 * In return a global function has only a context and numbers as arguments (Linux 5.10 accepts no pointers to other
 * memory there). So what a verb needs in addition to the packet is here: memory of this CPU that no other program uses
 * at the same time, because tc programs run with bottom halves off, one at a time.
 *
 * A verb does not call the next verb. It returns an `enum step`, and the program (datapath.h) calls the next one. The
 * frames of a function and of all its callers share 512 bytes of stack; those of verbs that are called one after the
 * other do not add up.
 *
 * Which verb reads (r) and writes (w) which fields. `owner` stands for `service` and `backend`:
 *
 *                          packet owner choice avoid flow result reply inner hop reason
 *   load_packet              w     w
 *   classify_*               r                                                    w
 *   decap                    rw         w            w    w      w           w    w
 *   serve                    r     w          w      w    w      w           w    w
 *   follow_again             r     w                 w    w      w           w    w
 *   admit_elsewhere          r                                   w           w
 *   establish                r                                   w
 *   note_refusal             r
 *   close_flow               r                       r           w
 *   choose                   r     w    w     rw          w                  w    w
 *   from_, to_backend        r     w                 w    w      w           w    w
 *   egress                   r     w                 w    w      w                w
 *   prepare_flow             r          r            w    w      w           w    w
 *   create_dsr_flow          r                       rw   r                       w
 *   reserve_tuple            r                       r    rw     rw               w
 *   store_flow               r                       rw   r      r                w
 *   forward                  rw                           r                  w    w
 *   encap                    r                            r      w           w    w
 *   send_*                   r                                                    rw
 *   translate_error_*        r                            w      w     w     w    w
 *   emit_event               r     r                      r
 *
 * `load_packet` and `serve` write `tried_since`, and `store_flow` reads it.
 * fragment.h alone uses `datagram`, `fragments`, `first` and `next_place`. `prepare_flow` and `reserve_tuple` write
 * `port_reserved`, and `store_flow` reads it.
 */
#ifndef HYBRID_PROXY_SCRATCH_H
#define HYBRID_PROXY_SCRATCH_H

#include "count.h"
#include "maps.h"
#include "packet.h"
#include "service.h"

/* What remains to be done with a packet after a verb. This is no tc action: to_tc_action() returns that. */
enum step {
	/* Nothing: the packet's way is decided. */
	STEP_PASS,     /* to whatever comes next: other programs, netfilter, the stack */
	STEP_DROP,     /* nowhere, for `reason`; see drop() */
	STEP_REDIRECT, /* where a redirect helper has been asked to send it */
	STEP_QUEUED,   /* nowhere, because a copy waits in `frag_queue` */
	/* Something. */
	STEP_CONTINUE,	  /* what the caller of the verb has in mind: this check found nothing */
	STEP_ICMP_ERROR,  /* translate what it quotes */
	STEP_DECAP,	  /* it may be another node's (dsr.h) */
	STEP_SERVE,	  /* its destination may be a frontend */
	STEP_CHOOSE,	  /* choose a backend: no flow is known */
	STEP_CREATE,	  /* begin a flow to the backend that was chosen */
	STEP_CREATE_DSR,  /* begin one whose packets are encapsulated */
	STEP_RESERVE,	  /* reserve the reply tuple, store the flow */
	STEP_STORE,	  /* store the flow with its client's own port, which most likely is free */
	STEP_FOLLOW,	  /* follow its flow: it is at the end of a connection, or rare otherwise */
	STEP_NOT_SERVICE, /* its destination is no frontend */
	STEP_FORWARD,	  /* rewrite it to `result` and send it on by our own route lookup */
	STEP_ENCAP,	  /* send it to the backend's node in another packet */
	STEP_ECHO,	  /* answer the ping */
	STEP_REJECT,	  /* send a reset or an ICMP error, for `reason`: there is no backend, or no such port */
};

/* The packet that an ICMP error quotes, if it belongs to a known flow. */
struct inner_packet {
	struct tuple tuple;  /* as the error has it: sent by the receiver of the error */
	struct tuple before; /* as it was before translation */
	__u32 offset;	     /* of its IP header in the frame */
	__u32 l4;
	__u32 flags; /* of the flow of the opposite direction, where the tuples are from */
};

struct scratch {
	struct packet packet;
	struct choice choice;
	__u32 service; /* of which the packet is, and its backend, as far as known; 0: unknown */
	__u32 backend;
	__u32 avoid;	     /* a backend that was tried in vain, for the choice of another; 0: none */
	__u32 tried_since;   /* when the client's first SYN came, if this is another one, in ticks of ktime(); 0: now */
	enum counter reason; /* of a drop, or of a rejection */
	struct flow flow;
	struct tuple result; /* what the packet becomes */
	struct tuple reply;  /* the key of its answers */
	bool port_reserved;  /* `reserve_tuple` has chosen the ports of `result` and `reply` */
	struct inner_packet inner;
	struct bpf_fib_lookup hop;
	struct fragment_key datagram;
	struct fragments fragments;
	struct queued_fragment first; /* a first fragment, while those that waited for it take its place */
	__u32 next_place;
};

CPU_MAP(scratch, struct scratch, 1);

INLINE struct scratch *scratch_space(void)
{
	__u32 key = 0;

	return bpf_map_lookup_elem(&scratch, &key);
}

/* Drop the packet: counted here, reported by to_tc_action(). */
INLINE enum step drop(struct scratch *space, enum counter why)
{
	count(why);
	space->reason = why;
	return STEP_DROP;
}

/* Reject the packet: counted when it is answered (reject.h), reported by transmit(). */
INLINE enum step reject(struct scratch *space, enum counter why)
{
	space->reason = why;
	return STEP_REJECT;
}

/* GLOBAL_VERB defines global functions NAME4 and NAME6 of an inlined NAME, which also takes scratch space and `v6`.
 * GLOBAL_VERB_WITH does it for a verb with an argument of type ARGUMENT. CALL calls the one for the packet's family.
 * Both return OTHERWISE without scratch space: that never happens, but the verifier does not know that.
 *
 * The barrier uses the arguments. The compiler does not set an argument in the callers if the function does not use it,
 * and the verifier refuses to read a register that nobody has set.
 */
#define GLOBAL_VERB(TYPE, NAME, OTHERWISE)                                                                             \
	DEFINE_VERB(TYPE, NAME, 4, false, OTHERWISE)                                                                   \
	DEFINE_VERB(TYPE, NAME, 6, true, OTHERWISE)

#define GLOBAL_VERB_WITH(ARGUMENT, TYPE, NAME, OTHERWISE)                                                              \
	DEFINE_VERB_WITH(ARGUMENT, TYPE, NAME, 4, false, OTHERWISE)                                                    \
	DEFINE_VERB_WITH(ARGUMENT, TYPE, NAME, 6, true, OTHERWISE)

#define CALL(NAME, v6, ...) ((v6) ? NAME##6(__VA_ARGS__) : NAME##4(__VA_ARGS__))

#define DEFINE_VERB(TYPE, NAME, FAMILY, v6, OTHERWISE)                                                                 \
	__noinline TYPE NAME##FAMILY(struct __sk_buff *skb)                                                            \
	{                                                                                                              \
		struct scratch *space = scratch_space();                                                               \
                                                                                                                       \
		asm volatile("" ::"r"(skb));                                                                           \
		return space ? NAME(skb, space, v6) : OTHERWISE;                                                       \
	}

#define DEFINE_VERB_WITH(ARGUMENT, TYPE, NAME, FAMILY, v6, OTHERWISE)                                                  \
	__noinline TYPE NAME##FAMILY(struct __sk_buff *skb, ARGUMENT argument)                                         \
	{                                                                                                              \
		struct scratch *space = scratch_space();                                                               \
                                                                                                                       \
		asm volatile("" : "+r"(argument) : "r"(skb));                                                          \
		return space ? NAME(skb, space, argument, v6) : OTHERWISE;                                             \
	}

#endif
