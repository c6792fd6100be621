/* The programs of the datapath once more, run by BPF_PROG_TEST_RUN on a packet that nobody sent: they note the
 * decisions that the attached ones would make now, and the agent explains these. They are loaded on demand.
 */
#include "explaining.h"

#include "datapath.h"
#include "hash.h"
#include "packet.h"
#include "pick.h"
#include "prefilter.h"
#include "scratch.h"

INLINE int call_datapath(struct __sk_buff *skb, const enum hook hook, const bool v6)
{
	return datapath(skb, hook, v6);
}

INLINE void begin(void)
{
	struct explanation *e = explanation_row();

	if (e)
		e->count = e->copied = 0;
}

SEC("tc")
int explain_pod(struct __sk_buff *skb)
{
	begin();
	return enter_wanted(skb, HOOK_POD_INGRESS, ALL_PACKETS);
}

SEC("tc")
int explain_uplink(struct __sk_buff *skb)
{
	begin();
	return enter_wanted(skb, HOOK_UPLINK_INGRESS, ALL_PACKETS);
}

/* What the node's own sockets get when they connect: see connect.bpf.c. Returns enum verdict. */
INLINE int explain_choice(struct __sk_buff *skb, const bool v6)
{
	struct scratch *space = scratch_space();
	struct packet *p;

	if (!space)
		return VERDICT_UNTOUCHED;
	p = &space->packet;
	__builtin_memset(p, 0, sizeof(*p));
	parse_packet(skb, p, v6);
	if (p->kind != PACKET_TRANSPORT || !may_be_frontend(p, v6))
		return VERDICT_UNTOUCHED;
	note(NOTE_MAY_BE_SERVICE, 0, 0);
	__builtin_memset(&space->choice, 0, sizeof(space->choice));
	p->tuple.sport = 0; /* a socket that connects has no port yet */
	choose_backend(&space->choice, CLIENT_NODE, &p->tuple, v6, false);
	if (space->choice.verdict == VERDICT_DROP || space->choice.verdict == VERDICT_REJECT)
		note(NOTE_COUNT, space->choice.why, 0);
	return space->choice.verdict;
}

SEC("tc")
int explain_socket(struct __sk_buff *skb)
{
	begin();
	return skb->protocol == bpf_htons(ETH_P_IPV6) ? explain_choice(skb, true) : explain_choice(skb, false);
}

char LICENSE[] SEC("license") = "GPL";
