/* Answers a packet that is not served, out of the interface that it came from: TCP by a reset, all else by an ICMP
 * error.
 *
 * TCP could be rejected by ICMP too. But the error would arrive while connect() still holds the socket, and then the
 * kernel only notes it: the client waits a second for its next SYN. A reset waits in the socket's backlog.
 */
#ifndef HYBRID_PROXY_REJECT_H
#define HYBRID_PROXY_REJECT_H

#include "count.h"
#include "maps.h"
#include "nat.h"
#include "packet.h"
#include "ratelimit.h"
#include "scratch.h"

/* How much of the transport is quoted: what its receiver needs, and never less than up to the checksum. The kernel does
 * not shorten a packet further whose checksum is still to be filled in by the device (CHECKSUM_PARTIAL).
 */
#define QUOTED_TCP 20
#define QUOTED_SCTP 12
#define QUOTED_OTHER 8
#define QUOTED_MOST 128 /* with IP's headers */
#define ERROR4_SIZE (sizeof(struct iphdr) + ICMP_HEADER)
#define ERROR6_SIZE (sizeof(struct ipv6hdr) + ICMP_HEADER)

/* May this CPU send one more answer in this second? */
INLINE bool reject_allowed(void)
{
	__u32 key = 0;
	__u64 *budget = bpf_map_lookup_elem(&reject_budget, &key);

	return budget && ratelimit_allow(budget, settings.reject_burst, 0);
}

struct icmp_error4 {
	struct iphdr ip;
	struct icmp_header icmp;
};

struct icmp_error6 {
	struct ipv6hdr ip;
	struct icmp_header icmp;
};

/* Type and code of an ICMP error, and the word behind its checksum. */
struct icmp_error {
	__u8 type;
	__u8 code;
	__be32 rest;
};

INLINE __u32 quoted_length(__u8 protocol)
{
	if (protocol == IPPROTO_TCP)
		return QUOTED_TCP;
	return protocol == IPPROTO_SCTP ? QUOTED_SCTP : QUOTED_OTHER;
}

/* How many bytes are quoted: IP's header with its options or extension headers, among them that of a fragment, and the
 * beginning of what it carries. A later fragment has no transport header.
 */
INLINE __u32 quoted_size(const struct packet *p)
{
	__u8 protocol = p->fragment.part == LATER_FRAGMENT ? IPPROTO_UDP : p->tuple.protocol;
	__u32 size = p->l4 - L3_OFFSET + quoted_length(protocol);

	return size < QUOTED_MOST ? size & ~3u : QUOTED_MOST;
}

/* Load the bytes that are quoted and add them to the checksum; lengths that the verifier can check. */
INLINE __s64 sum_quoted(struct __sk_buff *skb, struct scratch *space, __u32 offset, __u32 size, __s64 sum)
{
	__be32 *quoted = (void *)space->first.frame; /* no first fragment waits while an error is sent */

	asm volatile("" : "+r"(size));
	if (size < QUOTED_OTHER || size > QUOTED_MOST || bpf_skb_load_bytes(skb, offset, quoted, size))
		return -1;
	return bpf_csum_diff(NULL, 0, quoted, size, (__u32)sum);
}

INLINE long write_error4(struct __sk_buff *skb, struct scratch *space, const struct icmp_error *what, __u32 size)
{
	const struct tuple *t = &space->packet.tuple;
	struct icmp_error4 head = {};
	__s64 sum;

	head.ip.version = 4;
	head.ip.ihl = 5;
	head.ip.ttl = 64;
	head.ip.protocol = IPPROTO_ICMP;
	head.ip.tot_len = bpf_htons(ERROR4_SIZE + size);
	head.ip.saddr = t->daddr[0];
	head.ip.daddr = t->saddr[0];
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&head.ip, sizeof(head.ip), 0);
	head.ip.check = csum_fold(sum);
	head.icmp.type = what->type;
	head.icmp.code = what->code;
	head.icmp.rest = what->rest;
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&head.icmp, sizeof(head.icmp), 0);
	sum = sum_quoted(skb, space, L3_OFFSET + ERROR4_SIZE, size, sum);
	if (sum < 0)
		return -1;
	head.icmp.checksum = csum_fold(sum);
	return bpf_skb_store_bytes(skb, L3_OFFSET, &head, sizeof(head), 0);
}

INLINE long write_error6(struct __sk_buff *skb, struct scratch *space, const struct icmp_error *what, __u32 size)
{
	const struct tuple *t = &space->packet.tuple;
	struct icmp_error6 head = {};
	__u32 length = ICMP_HEADER + size;
	__u32 pseudo[2] = {bpf_htonl(length), bpf_htonl(IPPROTO_ICMPV6)};
	__s64 sum;

	head.ip.version = 6;
	head.ip.hop_limit = 64;
	head.ip.nexthdr = IPPROTO_ICMPV6;
	head.ip.payload_len = bpf_htons(length);
	__builtin_memcpy(&head.ip.saddr, t->daddr, 16);
	__builtin_memcpy(&head.ip.daddr, t->saddr, 16);
	head.icmp.type = what->type;
	head.icmp.code = what->code;
	head.icmp.rest = what->rest;
	sum = bpf_csum_diff(NULL, 0, (__be32 *)t->saddr, 16, 0);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)t->daddr, 16, (__u32)sum);
	sum = bpf_csum_diff(NULL, 0, pseudo, sizeof(pseudo), (__u32)sum);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&head.icmp, sizeof(head.icmp), (__u32)sum);
	sum = sum_quoted(skb, space, L3_OFFSET + ERROR6_SIZE, size, sum);
	if (sum < 0)
		return -1;
	head.icmp.checksum = csum_fold(sum);
	return bpf_skb_store_bytes(skb, L3_OFFSET, &head, sizeof(head), 0);
}

/* Out of the interface that the packet came in at; what is on its way out comes back to the stack. */
INLINE enum step send_back(struct __sk_buff *skb)
{
	swap_macs(skb);
	bpf_redirect(skb->ifindex, skb->ingress_ifindex == skb->ifindex ? 0 : BPF_F_INGRESS);
	return STEP_REDIRECT;
}

/* Turn the echo request into its reply. */
INLINE enum step send_echo_reply(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const struct packet *p = &space->packet;
	__u8 type = v6 ? ICMPV6_ECHO_REPLY : ICMP_ECHO_REPLY, asked = v6 ? ICMPV6_ECHO_REQUEST : ICMP_ECHO_REQUEST;
	struct tuple back;

	reverse_tuple(&back, &p->tuple);
	bpf_l4_csum_replace(skb, p->l4 + offsetof(struct icmp_header, checksum), bpf_htons(asked << 8),
			    bpf_htons(type << 8), 2);
	bpf_skb_store_bytes(skb, p->l4, &type, sizeof(type), 0);
	rewrite_addresses(skb, L3_OFFSET, &back, 0, v6);
	count(COUNT_ECHO);
	return send_back(skb);
}

GLOBAL_VERB(enum step, send_echo_reply, STEP_DROP)

/* Turn the SYN into the reset that answers it. Options stay, so that lengths do not change; the receiver of a reset
 * ignores them.
 */
INLINE enum step send_reset(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const struct packet *p = &space->packet;
	__be32 old[4], new[4];
	struct tuple back;

	if (bpf_skb_load_bytes(skb, p->l4, old, sizeof(old)))
		return drop(space, COUNT_DROP_REJECT_FAILED);
	reverse_tuple(&back, &p->tuple);
	new[0] = (__u32)back.dport << 16 | back.sport;
	new[1] = 0;
	new[2] = bpf_htonl(bpf_ntohl(old[1]) + 1);
	new[3] = (old[3] & bpf_htonl(0xf0000000)) | bpf_htonl((TCP_RST | TCP_ACK) << 16);
	bpf_l4_csum_replace(skb, p->l4 + offsetof(struct tcphdr, check), 0,
			    bpf_csum_diff(old, sizeof(old), new, sizeof(new), 0), 0);
	bpf_skb_store_bytes(skb, p->l4, new, sizeof(new), 0);
	rewrite_addresses(skb, L3_OFFSET, &back, 0, v6);
	count(space->reason);
	return send_back(skb);
}

enum icmp_error_kind {
	PORT_UNREACHABLE,
	TTL_EXPIRED,
	PACKET_TOO_BIG, /* any larger number is the size that fits */
};

INLINE void fill_icmp_error(struct icmp_error *c, const struct scratch *space, __u32 what, const bool v6)
{
	__builtin_memset(c, 0, sizeof(*c));
	if (what == PORT_UNREACHABLE) {
		c->type = v6 ? ICMPV6_DEST_UNREACH : ICMP_DEST_UNREACH;
		c->code = v6 ? ICMPV6_PORT_UNREACH : ICMP_PORT_UNREACH;
		count(space->reason);
	} else if (what == TTL_EXPIRED) {
		c->type = v6 ? ICMPV6_TIME_EXCEEDED : ICMP_TIME_EXCEEDED;
		count(COUNT_TTL_EXPIRED);
	} else { /* RFC 1191, RFC 8201 */
		c->type = v6 ? ICMPV6_PKT_TOOBIG : ICMP_DEST_UNREACH;
		c->code = v6 ? 0 : ICMP_FRAG_NEEDED;
		c->rest = bpf_htonl(what);
		count(COUNT_TOO_BIG);
	}
}

/* Turn the packet into an ICMP error to its sender, from the address that it asked for. It quotes the headers by which
 * the sender finds its socket. `what` is one of enum icmp_error_kind, or the size that would fit.
 */
INLINE enum step send_icmp_error(struct __sk_buff *skb, struct scratch *space, __u32 what, const bool v6)
{
	const __u32 head = v6 ? ERROR6_SIZE : ERROR4_SIZE;
	const struct packet *p = &space->packet;
	__u32 size = quoted_size(p);
	struct icmp_error error;

	if (!v6 && p->fragment.part == LATER_FRAGMENT) /* of IPv4, only the first one is answered (RFC 1122, 3.2.2) */
		return drop(space, COUNT_DROP_REJECT_FAILED);
	if (!reject_allowed())
		return drop(space, COUNT_DROP_REJECT_LIMITED);
	fill_icmp_error(&error, space, what, v6);
	if (bpf_skb_change_tail(skb, L3_OFFSET + size, 0) || bpf_skb_adjust_room(skb, head, BPF_ADJ_ROOM_MAC, 0))
		return drop(space, COUNT_DROP_REJECT_FAILED);
	if (v6 ? write_error6(skb, space, &error, size) : write_error4(skb, space, &error, size))
		return drop(space, COUNT_DROP_REJECT_FAILED);
	return send_back(skb);
}

GLOBAL_VERB_WITH(__u32, enum step, send_icmp_error, STEP_DROP)

/* Nobody is there: a connection gets a reset, all else an ICMP error. */
INLINE enum step send_reject(struct __sk_buff *skb, struct scratch *space, const bool v6)
{
	const struct packet *p = &space->packet;

	if (p->kind != PACKET_TRANSPORT || p->tuple.protocol != IPPROTO_TCP)
		return CALL(send_icmp_error, v6, skb, PORT_UNREACHABLE);
	return reject_allowed() ? send_reset(skb, space, v6) : drop(space, COUNT_DROP_REJECT_LIMITED);
}

GLOBAL_VERB(enum step, send_reject, STEP_DROP)

#endif
