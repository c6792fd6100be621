/* One cursor over Ethernet, IPv4 or IPv6, and the transport's ports; result: struct packet. */
#ifndef HYBRID_PROXY_PACKET_H
#define HYBRID_PROXY_PACKET_H

#include "config.h"

#define IP_FRAGMENT_MASK bpf_htons(0x3fff)
#define IP_OFFSET_MASK bpf_htons(0x1fff)
#define IPV6_FRAGMENT_MASK bpf_htons(0xfff9)
#define IPV6_OFFSET_MASK bpf_htons(0xfff8)
#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10
#define IPV6_EXTENSIONS 8
#define HEADERS_MASK 0x3ff /* headers behind it are not parsed; the verifier wants a mask */
#define ICMP_HEADER 8
#define L3_OFFSET ETH_HLEN
#define PULL_LENGTH 256 /* all headers lie in so many bytes, those that an ICMP error quotes, too */

struct tuple {
	__u32 saddr[4];
	__u32 daddr[4];
	__be16 sport;
	__be16 dport;
	__u8 protocol;
};

enum packet_kind {
	PACKET_OTHER, /* not IP, too short, or an unknown transport */
	PACKET_TRANSPORT,
	PACKET_FRAGMENT, /* of a transport: what fragment.h makes a PACKET_TRANSPORT, with the ports of its first */
	PACKET_ICMP_ERROR,
	PACKET_ECHO, /* an echo request */
	PACKET_ICMP_OTHER,
	PACKET_MALFORMED, /* not what it says: form.h */
};

enum fragment_part {
	WHOLE,
	FIRST_FRAGMENT,
	LATER_FRAGMENT, /* without a transport header */
};

struct fragment {
	__u32 id;
	__u8 part;     /* of enum fragment_part */
	__u8 protocol; /* the next header, as all fragments of a datagram have it */
};

struct packet {
	struct tuple tuple;
	enum packet_kind kind;
	struct fragment fragment;
	__u32 l4;	/* offset of the transport header */
	__u16 ip_check; /* IPv4: the header's checksum */
	__u8 ttl;
	__u8 header; /* bytes of the transport's header */
	__u8 tcp_flags;
	__u32 fin_end; /* of a FIN: the sequence number that acknowledges it */
	__u32 seq;
	__u32 ack;
};

/* Compares without branches. The verifier would follow each branch, and check everything after it five times. */
INLINE bool same_address(const __u32 *a, const __u32 *b, const bool v6)
{
	if (!v6)
		return a[0] == b[0];
	return !((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]));
}

/* 127.0.0.1 or ::1 */
INLINE bool is_localhost(const __u32 *a, const bool v6)
{
	return v6 ? !(a[0] | a[1] | a[2]) && a[3] == bpf_htonl(1) : a[0] == bpf_htonl(0x7f000001);
}

/* Of 127/8, or ::1: packets with such a source do not leave the node. */
INLINE bool is_loopback(const __u32 *a, const bool v6)
{
	return v6 ? is_localhost(a, true) : bpf_ntohl(a[0]) >> 24 == 127;
}

INLINE bool is_zero_address(const __u32 *a)
{
	return !(a[0] | a[1] | a[2] | a[3]);
}

INLINE void copy_address(__u32 *to, const __u32 *from)
{
	to[0] = from[0];
	to[1] = from[1];
	to[2] = from[2];
	to[3] = from[3];
}

INLINE bool same_tuple(const struct tuple *a, const struct tuple *b, const bool v6)
{
	return same_address(a->daddr, b->daddr, v6) && same_address(a->saddr, b->saddr, v6) && a->sport == b->sport &&
	       a->dport == b->dport;
}

/* The same conversation seen from the other end. */
INLINE void reverse_tuple(struct tuple *to, const struct tuple *from)
{
	copy_address(to->saddr, from->daddr);
	copy_address(to->daddr, from->saddr);
	to->sport = from->dport;
	to->dport = from->sport;
	to->protocol = from->protocol;
}

/* Does the hook see packets before they are routed: from a pod, or from beyond the node? */
INLINE bool is_ingress(const enum hook hook)
{
	return hook == HOOK_POD_INGRESS || hook == HOOK_UPLINK_INGRESS;
}

/* IPv4 header at `offset` into the tuple's addresses and protocol; the transport's offset, 0: not for us. */
INLINE __u32 parse_ipv4(void *data, void *end, __u32 offset, struct tuple *t, struct fragment *f)
{
	struct iphdr *ip = data + offset;

	if ((void *)(ip + 1) > end || ip->version != 4 || ip->ihl < 5)
		return 0;
	if (ip->frag_off & IP_FRAGMENT_MASK) {
		f->part = ip->frag_off & IP_OFFSET_MASK ? LATER_FRAGMENT : FIRST_FRAGMENT;
		f->id = ip->id;
		f->protocol = ip->protocol;
	}
	t->saddr[0] = ip->saddr;
	t->daddr[0] = ip->daddr;
	t->protocol = ip->protocol;
	return offset + ip->ihl * 4;
}

/* No datapath of the packet's family is loaded: the packet goes on, and its scratch field is the next program's. The
 * barrier keeps the compiler from an address of its own for the field, which the verifier refuses.
 */
INLINE int pass_without_datapath(struct __sk_buff *skb)
{
	asm volatile("" : "+r"(skb));
	skb->cb[0] = 0;
	return TC_ACT_UNSPEC;
}

/* An offset into a packet. The verifiers of Linux before 6.4 lose its bound over several headers, and then refuse
 * every access behind it. IPV6_EXTENSIONS headers of 2 KiB stay below the mask; the barrier keeps the compiler from
 * knowing.
 */
INLINE __u32 bounded(__u32 offset)
{
	asm volatile("" : "+r"(offset));
	return offset & 0x3fff;
}

struct ipv6_fragment {
	__u8 nexthdr;
	__u8 reserved;
	__be16 offset;
	__be32 id;
};

/* What the fragment header at `option` says; a datagram in one piece may have it, too (RFC 6946). */
INLINE bool parse_fragment_header(const struct ipv6_fragment *option, void *end, struct fragment *f)
{
	if ((void *)(option + 1) > end)
		return false;
	if (option->offset & IPV6_FRAGMENT_MASK)
		f->part = option->offset & IPV6_OFFSET_MASK ? LATER_FRAGMENT : FIRST_FRAGMENT;
	f->id = option->id;
	f->protocol = option->nexthdr;
	return true;
}

/* IPv6 header at `offset`, extension headers skipped; the transport's offset, 0: not for us. */
INLINE __u32 parse_ipv6(void *data, void *end, __u32 offset, struct tuple *t, struct fragment *f)
{
	struct ipv6hdr *ip = data + offset;
	__u8 next;

	if ((void *)(ip + 1) > end || ip->version != 6)
		return 0;
	__builtin_memcpy(t->saddr, &ip->saddr, 16);
	__builtin_memcpy(t->daddr, &ip->daddr, 16);
	next = ip->nexthdr;
	offset += sizeof(*ip);
#pragma clang loop unroll(disable)
	for (int i = 0; i < IPV6_EXTENSIONS && offset <= HEADERS_MASK; i++) {
		struct ipv6_opt_hdr *option = data + (offset & HEADERS_MASK);
		__u32 length;

		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS &&
		    next != IPPROTO_FRAGMENT)
			break;
		if ((void *)(option + 1) > end)
			return 0;
		length = (option->hdrlen + 1) * 8;
		if (next == IPPROTO_FRAGMENT) {
			if (!parse_fragment_header((void *)option, end, f))
				return 0;
			length = sizeof(struct ipv6_fragment);
		}
		next = option->nexthdr;
		offset = bounded(offset + length);
		if (f->part == LATER_FRAGMENT)
			break;
	}
	t->protocol = next;
	return offset;
}

INLINE __u32 parse_ip(void *data, void *end, __u32 offset, struct tuple *t, struct fragment *f, const bool v6)
{
	return v6 ? parse_ipv6(data, end, offset, t, f) : parse_ipv4(data, end, offset, t, f);
}

/* The first four bytes of TCP, UDP and SCTP are the ports; an ICMP error may quote no more than eight. */
INLINE bool parse_ports(void *data, void *end, __u32 offset, struct tuple *t)
{
	__be16 *ports = data + (offset & HEADERS_MASK);

	if (offset > HEADERS_MASK)
		return false;
	if (t->protocol != IPPROTO_TCP && t->protocol != IPPROTO_UDP && t->protocol != IPPROTO_SCTP)
		return false;
	if ((void *)(ports + 2) > end)
		return false;
	t->sport = ports[0];
	t->dport = ports[1];
	return true;
}

INLINE bool is_icmp_error(__u8 type, const bool v6)
{
	if (v6)
		return type < ICMPV6_INFORMATIONAL;
	return type == ICMP_DEST_UNREACH || type == ICMP_SOURCE_QUENCH || type == ICMP_REDIRECT ||
	       type == ICMP_TIME_EXCEEDED || type == ICMP_PARAMETERPROB;
}

INLINE void parse_icmp(void *data, void *end, struct packet *p, const bool v6)
{
	__u8 *type = data + (p->l4 & HEADERS_MASK);

	if (p->l4 > HEADERS_MASK || (void *)(type + 8) > end)
		return;
	if (*type == (v6 ? ICMPV6_ECHO_REQUEST : ICMP_ECHO_REQUEST))
		p->kind = PACKET_ECHO;
	else
		p->kind = is_icmp_error(*type, v6) ? PACKET_ICMP_ERROR : PACKET_ICMP_OTHER;
}

/* Where the IP packet ends in the frame, which may be padded; 0 for a length that the header has no room for. */
INLINE __u32 end_of_packet(void *data, void *end, const bool v6)
{
	struct ipv6hdr *ip6 = data + L3_OFFSET;
	struct iphdr *ip4 = data + L3_OFFSET;

	if (v6)
		return (void *)(ip6 + 1) <= end && ip6->payload_len
			       ? L3_OFFSET + sizeof(*ip6) + bpf_ntohs(ip6->payload_len)
			       : 0;
	return (void *)(ip4 + 1) <= end && ip4->tot_len ? L3_OFFSET + bpf_ntohs(ip4->tot_len) : 0;
}

/* A header of so many bytes was not found: the frame of `whole` bytes ends before it, or it lies beyond what is
 * parsed.
 */
INLINE enum packet_kind missing_header(const struct packet *p, __u32 size, __u32 whole)
{
	return p->l4 + size > whole ? PACKET_MALFORMED : PACKET_OTHER;
}

INLINE void parse_tcp(void *data, void *end, __u32 whole, struct packet *p, const bool v6)
{
	struct tcphdr *tcp = data + (p->l4 & HEADERS_MASK);
	__u32 length;

	if ((void *)(tcp + 1) > end) {
		p->kind = missing_header(p, sizeof(*tcp), whole);
		return;
	}
	p->tcp_flags = ((__u8 *)tcp)[13];
	p->header = tcp->doff * 4;
	p->seq = bpf_ntohl(tcp->seq);
	p->ack = bpf_ntohl(tcp->ack_seq);
	if (!(p->tcp_flags & TCP_FIN))
		return;
	length = end_of_packet(data, end, v6);
	if (!length)
		length = whole;
	p->fin_end = p->seq + length - p->l4 - tcp->doff * 4 + 1;
}

/* Does the packet have all of the header: 8 bytes of UDP's, 12 of SCTP's? */
INLINE bool has_header(void *data, void *end, const struct packet *p)
{
	__u8 *header = data + (p->l4 & HEADERS_MASK);

	return p->tuple.protocol == IPPROTO_UDP ? (void *)(header + 8) <= end : (void *)(header + 12) <= end;
}

/* Fill `p` from the bytes between `data` and `end`, of a frame that has `whole` bytes. */
INLINE void parse_bytes(void *data, void *end, __u32 whole, struct packet *p, const bool v6)
{
	p->l4 = parse_ip(data, end, L3_OFFSET, &p->tuple, &p->fragment, v6);
	if (!p->l4)
		return;
	if (data + L3_OFFSET + sizeof(struct iphdr) <= end) {
		struct iphdr *ip = data + L3_OFFSET;

		p->ip_check = ip->check;
		p->ttl = v6 ? ((struct ipv6hdr *)ip)->hop_limit : ip->ttl;
	}
	if (p->fragment.part == LATER_FRAGMENT) {
		p->kind = PACKET_FRAGMENT;
	} else if (parse_ports(data, end, p->l4, &p->tuple)) {
		p->kind = p->fragment.part ? PACKET_FRAGMENT : PACKET_TRANSPORT;
		if (p->tuple.protocol == IPPROTO_TCP)
			parse_tcp(data, end, whole, p, v6);
		else if (!has_header(data, end, p))
			p->kind = missing_header(p, p->tuple.protocol == IPPROTO_UDP ? 8 : 12, whole);
	} else if (!p->fragment.part && p->tuple.protocol == (v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP)) {
		parse_icmp(data, end, p, v6);
	} else if (p->tuple.protocol == IPPROTO_TCP || p->tuple.protocol == IPPROTO_UDP) {
		p->kind = missing_header(p, 4, whole);
	}
}

/* Returns how many bytes could be read (64 bits: with 32, the compiler truncates the pointers that it subtracts). */
INLINE __u64 parse_linear(struct __sk_buff *skb, struct packet *p, const bool v6)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	parse_bytes(data, end, skb->len, p, v6);
	return end - data;
}

/* Fill `p` (zeroed by the caller) from the packet. Headers that do not lie in the buffer's linear part are pulled
 * into it, but only when one was missed: of TCP's packets the payload lies elsewhere, and to pull that copies it.
 */
INLINE void parse_packet(struct __sk_buff *skb, struct packet *p, const bool v6)
{
	for (int i = 0; i < 2; i++) {
		__u64 linear = parse_linear(skb, p, v6);

		if ((p->kind != PACKET_OTHER && p->kind != PACKET_MALFORMED && p->kind != PACKET_ICMP_ERROR) ||
		    linear >= skb->len || linear >= PULL_LENGTH)
			return;
		bpf_skb_pull_data(skb, skb->len < PULL_LENGTH ? skb->len : PULL_LENGTH);
	}
}

#endif
