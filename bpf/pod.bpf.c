/* tc at the host side of a pod's interface: translate what the pod sends to a service, undo what it receives.
 *
 * Ingress (from the pod) is where a service address becomes a backend's, egress (to the pod) where a backend's
 * reply becomes the service's again: between the two, routing, rp_filter, conntrack and policies see one plain,
 * symmetric flow from client to backend. Once that flow is established both ends are handed over directly.
 */
#include "reply.h"

#define EEXIST 17

/* The packet's flow says what to do: rewrite, then hand over or pass on. */
INLINE int follow(struct __sk_buff *skb, struct packet *p, struct found *found, const bool v6)
{
	struct flow flow;
	struct tuple to;
	bool finished;

	if (completes_handshake(p, found)) {
		establish(&p->tuple, found->entry, found->table, v6);
		if (found->table == TABLE_OPENING)
			find_flow(found, &p->tuple, v6);
		if (!found->entry)
			return drop(COUNT_SLOT_LOST);
	}
	flow = *found->entry;
	if (flow.tag != flow_tag(&p->tuple, v6))
		return drop(COUNT_SLOT_LOST);
	finished = touch(p, found->entry, found->table, v6);
	rewritten(&to, &flow, p->tuple.protocol);
	rewrite(skb, p, &to, v6);
	if (finished)
		finish(&p->tuple, &flow, found->table, v6);
	if (flow.flags & FLOW_HAIRPIN) {
		swap_frame(skb);
		return bpf_redirect(skb->ifindex, 0);
	}
	if (!settings.fast_path || !flow.ifindex || !(flow.flags & FLOW_ESTABLISHED)) {
		count(flow.flags & FLOW_REPLY ? COUNT_REPLY : COUNT_DNAT);
		return pass();
	}
	rewrite_frame(skb, flow.mac);
	count(COUNT_FAST);
	return bpf_redirect_peer(flow.ifindex, 0);
}

INLINE bool is_opening_segment(const struct packet *p)
{
	return (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN)) == TCP_SYN;
}

/* May a SYN begin anew with this flow's ports? */
INLINE bool has_ended(const struct flow *f)
{
	return f->flags & (FLOW_FIN | FLOW_OTHER_FIN | FLOW_RESET | FLOW_CLASH);
}

/* Forget a flow that is about to begin anew. After a clash the other half stays: it shows that the tuple is taken. */
INLINE void make_way(const struct tuple *key, const struct found *found, const bool v6)
{
	if (found->entry->flags & FLOW_CLASH)
		flow_delete(key, found->table, v6);
	else
		delete_pair(key, found->entry, found->table, v6);
}

/* Does this packet want another backend than its flow has? A new connection from a port that was used before,
 * or a datagram to a backend that is gone. Established TCP stays with its backend.
 */
INLINE bool wants_renewal(const struct packet *p, const struct flow *f)
{
	if (p->tuple.protocol == IPPROTO_TCP) {
		if (!is_opening_segment(p))
			return false;
		if (has_ended(f))
			return true;
	}
	if (is_serving(f->backend, f->service, f->daddr, f->dport))
		return false;
	count(COUNT_STALE_BACKEND);
	return true;
}

/* Store both directions of a new flow in one table: `key` becomes `result`, and back, `reply` being the other
 * direction of `result`. 0 or a negative errno.
 */
INLINE long put_pair(const struct tuple *key, const struct tuple *result, const struct tuple *reply, struct flow *f,
		     const __u8 *mac, __u32 ifindex, const enum flow_table table, const bool v6)
{
	__u32 direction = f->flags;
	struct tuple reply_result;
	long error;

	turn_round(&reply_result, key);
	fill_flow(f, reply, &reply_result, v6);
	f->flags = direction | FLOW_REPLY;
	f->ifindex = ifindex;
	__builtin_memcpy(f->mac, mac + 6, 6);
	__builtin_memcpy(f->mac + 6, mac, 6);
	error = flow_put(reply, f, table, BPF_NOEXIST, v6);
	if (error)
		goto out;
	fill_flow(f, key, result, v6);
	f->flags = direction;
	f->ifindex = 0;
	error = flow_put(key, f, table, BPF_ANY, v6);
	if (error)
		flow_delete(reply, table, v6);
out:
	f->flags = direction;
	return error;
}

/* The reply tuple was claimed. When `flows` has no room, the table that forgets keeps the service going. */
INLINE bool open_pair(struct __sk_buff *skb, const struct tuple *key, const struct tuple *result,
		      const struct tuple *reply, struct flow *f, const bool v6)
{
	__u32 ifindex = skb->ifindex;
	__u8 mac[12];

	read_frame(skb, mac);
	note_recent(reply, key, v6);
	if (first_table(key->protocol) == TABLE_FLOWS) {
		long error = put_pair(key, result, reply, f, mac, ifindex, TABLE_FLOWS, v6);

		if (!error)
			count_opening(1);
		if (!error || error == -EEXIST)
			return !error;
		count(COUNT_FLOW_FULL);
		note_overflow();
	}
	return !put_pair(key, result, reply, f, mac, ifindex, TABLE_OPENING, v6);
}

/* The source that a pod sees when it talks to itself: this node, so that its answer comes back to us. */
INLINE bool hairpin_source(__u32 *address, const bool v6)
{
	address[0] = 0;
	own_address(address, v6);
	return address[0] != 0;
}

/* An ICMP error to this node may be about a pod's conversation with itself. */
INLINE bool is_to_hairpin_source(const struct packet *p, const bool v6)
{
	__u32 address[4];

	return p->kind == PACKET_ICMP_ERROR && hairpin_source(address, v6) && same_address(address, p->tuple.daddr, v6);
}

/* A first packet to a chosen backend: remember the flow, then rewrite. */
INLINE int open_flow(struct __sk_buff *skb, struct packet *p, const struct choice *c, const bool v6)
{
	struct flow flow = {.service = c->service, .backend = c->backend};
	struct tuple result = p->tuple, reply;

	copy_address(result.daddr, c->address);
	result.dport = c->port;
	if (same_address(result.daddr, p->tuple.saddr, v6)) {
		if (!hairpin_source(result.saddr, v6))
			return drop(COUNT_TUPLE_EXHAUSTED);
		flow.flags = FLOW_HAIRPIN;
	}
	turn_round(&reply, &result);
	if (!claim_reply(&reply, &p->tuple, v6))
		return drop(COUNT_TUPLE_EXHAUSTED);
	result.sport = reply.dport;
	if (!open_pair(skb, &p->tuple, &result, &reply, &flow, v6))
		return drop(COUNT_FLOW_FULL);
	count(COUNT_NEW_FLOW);
	rewrite(skb, p, &result, v6);
	if (!(flow.flags & FLOW_HAIRPIN))
		return pass();
	swap_frame(skb);
	return bpf_redirect(skb->ifindex, 0);
}

/* The destination may be a service's address. */
INLINE int to_service(struct __sk_buff *skb, struct packet *p, const bool v6)
{
	struct choice choice = {};
	struct found found;

	find_flow(&found, &p->tuple, v6);
	if (found.entry) {
		if (!wants_renewal(p, found.entry))
			return follow(skb, p, &found, v6);
		make_way(&p->tuple, &found, v6);
	} else if (p->tuple.protocol == IPPROTO_TCP && !is_opening_segment(p)) {
		return pass(); /* somebody else's connection, netfilter's perhaps */
	}
	choose(&choice, p->tuple.saddr, p->tuple.daddr, p->tuple.dport, p->tuple.protocol, v6, true);
	if (choice.verdict == VERDICT_REJECT)
		return refuse(skb, p, v6);
	if (choice.verdict == VERDICT_DROP)
		return drop(COUNT_DROP_EMPTY);
	if (choice.verdict == VERDICT_DNAT)
		return open_flow(skb, p, &choice, v6);
	return is_unallocated(p->tuple.daddr, v6) ? drop(COUNT_DROP_UNALLOCATED) : pass();
}

/* A ping, say, to a service's address: no port answers there. */
INLINE int other_to_service(struct __sk_buff *skb, const struct packet *p, const bool v6)
{
	if (find_frontend(p->tuple.daddr, 0, 0, v6))
		return refuse(skb, p, v6);
	return is_unallocated(p->tuple.daddr, v6) ? drop(COUNT_DROP_UNALLOCATED) : pass();
}

/* A pod talks to a backend directly and a service flow already owns the reply tuple: change the source port. */
INLINE int open_direct(struct __sk_buff *skb, struct packet *p, struct tuple *reply, const bool v6)
{
	struct flow flow = {.flags = FLOW_DIRECT};
	struct tuple result = p->tuple;
	struct node *self;

	if (!claim_reply(reply, &p->tuple, v6))
		return drop(COUNT_TUPLE_EXHAUSTED);
	result.sport = reply->dport;
	if (result.sport == p->tuple.sport && p->tuple.protocol == IPPROTO_TCP) {
		note_recent(reply, &p->tuple, v6);
		return pass();
	}
	if (!open_pair(skb, &p->tuple, &result, reply, &flow, v6))
		return drop(COUNT_FLOW_FULL);
	if (result.sport == p->tuple.sport)
		return pass();
	self = this_node();
	if (self)
		WRITE_ONCE(self->direct_flows, 1);
	rewrite(skb, p, &result, v6);
	return pass();
}

/* The destination may be a backend, addressed directly. Datagrams leave a claim, because nothing in them
 * tells a reply to this from a reply to a service flow; TCP is looked at when it opens.
 */
INLINE int to_backend(struct __sk_buff *skb, struct packet *p, const bool v6)
{
	struct tuple reply;
	struct found found;
	struct node *self = this_node();
	bool opens = is_opening_segment(p), tcp = p->tuple.protocol == IPPROTO_TCP;

	if (tcp && !opens && !(self && READ_ONCE(self->direct_flows)))
		return pass();
	find_flow(&found, &p->tuple, v6);
	if (found.entry && !(found.entry->flags & FLOW_DIRECT))
		return pass();
	if (found.entry && !(opens && has_ended(found.entry))) {
		if (found.entry->sport != p->tuple.sport)
			return follow(skb, p, &found, v6);
		touch(p, found.entry, found.table, v6);
		return pass();
	}
	if (found.entry)
		make_way(&p->tuple, &found, v6);
	if (tcp && !opens)
		return pass();
	turn_round(&reply, &p->tuple);
	return open_direct(skb, p, &reply, v6);
}

/* Remember where the backend of an opening flow is, for the time after it is established. */
INLINE void learn_backend(struct __sk_buff *skb, const struct packet *p, const struct found *reply, const bool v6)
{
	__u32 ifindex = skb->ifindex;
	struct flow *forward;
	__u8 mac[12];

	if (p->tuple.protocol == IPPROTO_TCP && (p->tcp_flags & (TCP_SYN | TCP_ACK)) != (TCP_SYN | TCP_ACK))
		return;
	forward = other_half(reply->entry, p->tuple.protocol, reply->table, v6);
	if (!forward)
		return;
	read_frame(skb, mac);
	__builtin_memcpy(forward->mac, mac + 6, 6);
	__builtin_memcpy(forward->mac + 6, mac, 6);
	forward->ifindex = ifindex;
}

/* The source may be a backend that answers. The first answer goes through the stack, so that firewalls see the
 * flow open; it is translated at the client's interface.
 */
INLINE int from_backend(struct __sk_buff *skb, struct packet *p, const bool v6)
{
	struct found found;

	find_flow(&found, &p->tuple, v6);
	if (!found.entry || !(found.entry->flags & FLOW_REPLY) || found.entry->flags & (FLOW_CLASH | FLOW_DIRECT))
		return pass();
	if (!(found.entry->flags & FLOW_ESTABLISHED)) {
		if (!(found.entry->flags & FLOW_HAIRPIN)) {
			learn_backend(skb, p, &found, v6);
			return pass();
		}
		note_answer(p, &found, v6);
		find_flow(&found, &p->tuple, v6);
		if (!found.entry)
			return pass();
	} else if (!(found.entry->flags & FLOW_HAIRPIN) && (!settings.fast_path || !found.entry->ifindex)) {
		return pass();
	}
	return follow(skb, p, &found, v6);
}

INLINE int from_pod(struct __sk_buff *skb, const bool v6)
{
	struct packet p = {};

	parse_packet(skb, &p, v6);
	if (p.kind == PACKET_OTHER)
		return pass();
	if (may_be_service(p.tuple.daddr, v6)) {
		if (p.kind == PACKET_TRANSPORT)
			return to_service(skb, &p, v6);
		if (p.kind == PACKET_ICMP_ERROR)
			return translate_related(skb, &p, v6);
		return other_to_service(skb, &p, v6);
	}
	if (p.kind == PACKET_TRANSPORT && may_be_backend(p.tuple.saddr, p.tuple.sport, p.tuple.protocol, v6)) {
		int verdict = from_backend(skb, &p, v6);

		if (verdict != TC_ACT_UNSPEC)
			return verdict;
	}
	if (is_unallocated(p.tuple.daddr, v6))
		return drop(COUNT_DROP_UNALLOCATED);
	if (is_to_hairpin_source(&p, v6))
		return translate_related(skb, &p, v6);
	if (p.kind != PACKET_TRANSPORT)
		return pass();
	if (may_be_backend(p.tuple.daddr, p.tuple.dport, p.tuple.protocol, v6))
		return to_backend(skb, &p, v6);
	return pass();
}

/* An answer that opens no connection, on a flow that is opening: the tuple is a direct connection's, which was
 * there first. Leave the packet alone; the service flow takes another port when its SYN is repeated.
 */
INLINE bool is_clash(const struct packet *p, const struct flow *f)
{
	if (f->flags & FLOW_CLASH)
		return true;
	return p->tuple.protocol == IPPROTO_TCP && !(f->flags & FLOW_ANSWERED) && !(p->tcp_flags & TCP_RST) &&
	       (p->tcp_flags & (TCP_SYN | TCP_ACK)) != (TCP_SYN | TCP_ACK);
}

INLINE void mark_clash(const struct packet *p, const struct found *reply, const bool v6)
{
	struct flow *forward = other_half(reply->entry, p->tuple.protocol, reply->table, v6);

	if (forward)
		forward->flags |= FLOW_CLASH;
	reply->entry->flags |= FLOW_CLASH;
	count(COUNT_TUPLE_CLASH);
}

/* The source may be a backend whose answer the pod expects from the service's address. */
INLINE int reply_to_pod(struct __sk_buff *skb, struct packet *p, const bool v6)
{
	struct found found;
	struct tuple to;

	find_flow(&found, &p->tuple, v6);
	if (!found.entry || !(found.entry->flags & FLOW_REPLY) || found.entry->flags & FLOW_HAIRPIN)
		return pass();
	rewritten(&to, found.entry, p->tuple.protocol);
	if (same_tuple(&to, &p->tuple, v6))
		return pass();
	if (!(found.entry->flags & FLOW_ESTABLISHED)) {
		if (is_clash(p, found.entry)) {
			if (!(found.entry->flags & FLOW_CLASH))
				mark_clash(p, &found, v6);
			return pass();
		}
		note_answer(p, &found, v6);
	} else if (touch(p, found.entry, found.table, v6)) {
		finish(&p->tuple, found.entry, found.table, v6);
	}
	count(COUNT_REPLY);
	rewrite(skb, p, &to, v6);
	return pass();
}

INLINE int to_pod(struct __sk_buff *skb, const bool v6)
{
	struct packet p = {};

	parse_packet(skb, &p, v6);
	if (p.kind == PACKET_ICMP_ERROR)
		return translate_related(skb, &p, v6);
	if (p.kind != PACKET_TRANSPORT || !may_be_backend(p.tuple.saddr, p.tuple.sport, p.tuple.protocol, v6))
		return pass();
	return reply_to_pod(skb, &p, v6);
}

/* One function for each family: a stack frame of its own, and v6 known to the compiler. No frame is larger than
 * 480 bytes: verifiers before 6.4 count at least 32 for the caller, and 512 is the limit.
 */
static __noinline int from_pod4(struct __sk_buff *skb)
{
	return from_pod(skb, false);
}

static __noinline int from_pod6(struct __sk_buff *skb)
{
	return from_pod(skb, true);
}

static __noinline int to_pod4(struct __sk_buff *skb)
{
	return to_pod(skb, false);
}

static __noinline int to_pod6(struct __sk_buff *skb)
{
	return to_pod(skb, true);
}

SEC("tc")
int pod_ingress(struct __sk_buff *skb)
{
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return from_pod4(skb);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return from_pod6(skb);
	return pass();
}

SEC("tc")
int pod_egress(struct __sk_buff *skb)
{
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return to_pod4(skb);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return to_pod6(skb);
	return pass();
}

char LICENSE[] SEC("license") = "GPL";
