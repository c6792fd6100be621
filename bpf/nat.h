/* Rewrite a packet's tuple, checksums included. Headers were proved to be there by packet.h. */
#ifndef HYBRID_PROXY_NAT_H
#define HYBRID_PROXY_NAT_H

#include "crc.h"
#include "packet.h"

#define SCTP_CHECKSUM 8

INLINE int checksum_offset(__u8 protocol)
{
	if (protocol == IPPROTO_TCP)
		return offsetof(struct tcphdr, check);
	if (protocol == IPPROTO_UDP)
		return offsetof(struct udphdr, check);
	return -1;
}

/* Ones' complement sum of 32 bit words, carries kept. */
INLINE __u64 exchange(__u64 sum, __u32 from, __u32 to)
{
	return sum + (__u32)~from + to;
}

/* Difference that the new addresses make to a ones' complement sum, folded to 32 bits. */
INLINE __s64 address_difference(const struct tuple *from, const struct tuple *to, const bool v6)
{
	__u64 sum = 0;

#pragma unroll
	for (int i = 0; i < (v6 ? 4 : 1); i++) {
		sum = exchange(sum, from->saddr[i], to->saddr[i]);
		sum = exchange(sum, from->daddr[i], to->daddr[i]);
	}
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

/* A header checksum after a difference: RFC 1624, equation 3. */
INLINE __u16 updated_checksum(__u16 check, __s64 difference)
{
	__u64 sum = (__u16)~check + (__u64)difference;

	sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* The sum that bpf_csum_diff() returns, as a checksum. */
INLINE __u16 csum_fold(__s64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32 & 0xffff);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* SCTP's CRC covers ports, but no addresses. 0: still to be filled in. Of a datagram in fragments it is out of reach.
 */
INLINE void update_sctp(struct __sk_buff *skb, const struct packet *p, const struct tuple *to, const bool v6)
{
	const __u32 offset = L3_OFFSET + (v6 ? offsetof(struct ipv6hdr, payload_len) : offsetof(struct iphdr, tot_len));
	__be32 old = bpf_htonl((__u32)bpf_ntohs(p->tuple.sport) << 16 | bpf_ntohs(p->tuple.dport));
	__be32 new = bpf_htonl((__u32)bpf_ntohs(to->sport) << 16 | bpf_ntohs(to->dport));
	__u32 sum = 0;
	__be16 length = 0;

	if (old == new || p->fragment.part || bpf_skb_load_bytes(skb, p->l4 + SCTP_CHECKSUM, &sum, sizeof(sum)) ||
	    !sum || bpf_skb_load_bytes(skb, offset, &length, sizeof(length)))
		return;
	sum ^= __cpu_to_le32(
		crc_difference(old, new, bpf_ntohs(length) + (v6 ? sizeof(struct ipv6hdr) : 0) + L3_OFFSET - p->l4));
	bpf_skb_store_bytes(skb, p->l4 + SCTP_CHECKSUM, &sum, sizeof(sum), 0);
}

/* The transport's checksum. Where it is still to be filled in, the helper knows, and ports do not count. */
INLINE void update_transport(struct __sk_buff *skb, const struct packet *p, const struct tuple *to, __s64 difference,
			     const bool v6)
{
	int check = checksum_offset(p->tuple.protocol);
	__u64 zero_is_none = p->tuple.protocol == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 old = (__u32)p->tuple.sport << 16 | p->tuple.dport, new = (__u32)to->sport << 16 | to->dport;

	if (check < 0) {
		update_sctp(skb, p, to, v6);
		return;
	}
	bpf_l4_csum_replace(skb, p->l4 + check, 0, difference, BPF_F_PSEUDO_HDR | zero_is_none);
	if (old != new)
		bpf_l4_csum_replace(skb, p->l4 + check, old, new, 4 | zero_is_none);
}

INLINE void rewrite_addresses(struct __sk_buff *skb, __u32 offset, const struct tuple *to, __s64 difference,
			      const bool v6)
{
	if (v6) {
		struct {
			__u32 saddr[4], daddr[4];
		} both;

		copy_address(both.saddr, to->saddr);
		copy_address(both.daddr, to->daddr);
		bpf_skb_store_bytes(skb, offset + offsetof(struct ipv6hdr, saddr), &both, sizeof(both), 0);
	} else {
		__u32 both[2] = {to->saddr[0], to->daddr[0]};

		bpf_l3_csum_replace(skb, offset + offsetof(struct iphdr, check), 0, difference, 0);
		bpf_skb_store_bytes(skb, offset + offsetof(struct iphdr, saddr), both, sizeof(both), 0);
	}
}

/* IPv4's hops, protocol, checksum, addresses and, where no options are between them, ports: they lie in one piece. */
INLINE void fill_piece4(__u16 *piece, const struct packet *p, const struct tuple *to, __s64 difference)
{
	piece[0] = bpf_htons(p->ttl << 8 | p->tuple.protocol);
	piece[1] = updated_checksum(p->ip_check, difference);
	piece[2] = to->saddr[0];
	piece[3] = to->saddr[0] >> 16;
	piece[4] = to->daddr[0];
	piece[5] = to->daddr[0] >> 16;
	piece[6] = to->sport;
	piece[7] = to->dport;
}

INLINE void store_tuple4(struct __sk_buff *skb, const struct packet *p, const struct tuple *to, __s64 difference)
{
	const __u32 offset = L3_OFFSET + offsetof(struct iphdr, ttl);
	__u16 piece[8];

	fill_piece4(piece, p, to, difference);
	if (p->l4 == L3_OFFSET + sizeof(struct iphdr)) {
		bpf_skb_store_bytes(skb, offset, piece, 16, 0);
	} else {
		bpf_skb_store_bytes(skb, offset, piece, 12, 0);
		bpf_skb_store_bytes(skb, p->l4, piece + 6, 4, 0);
	}
}

/* IPv6's addresses and, without extension headers, ports. */
INLINE void store_tuple6(struct __sk_buff *skb, const struct packet *p, const struct tuple *to)
{
	struct {
		__u32 saddr[4], daddr[4];
		__be16 ports[2];
	} piece;
	const __u32 offset = L3_OFFSET + offsetof(struct ipv6hdr, saddr);

	copy_address(piece.saddr, to->saddr);
	copy_address(piece.daddr, to->daddr);
	piece.ports[0] = to->sport;
	piece.ports[1] = to->dport;
	if (p->l4 == L3_OFFSET + sizeof(struct ipv6hdr)) {
		bpf_skb_store_bytes(skb, offset, &piece, 36, 0);
	} else {
		bpf_skb_store_bytes(skb, offset, &piece, 32, 0);
		bpf_skb_store_bytes(skb, p->l4, piece.ports, 4, 0);
	}
}

/* Of a later fragment, addresses alone: the first one's checksum covers the whole datagram. Nothing makes up for the
 * change of IPv6's, so that a sum over the packet, which the device may have made, needs to change with them.
 */
INLINE void rewrite_later(struct __sk_buff *skb, const struct tuple *to, __s64 difference, const bool v6)
{
	struct {
		__u32 saddr[4], daddr[4];
	} both;

	if (!v6) {
		rewrite_addresses(skb, L3_OFFSET, to, difference, false);
		return;
	}
	copy_address(both.saddr, to->saddr);
	copy_address(both.daddr, to->daddr);
	bpf_skb_store_bytes(skb, L3_OFFSET + offsetof(struct ipv6hdr, saddr), &both, sizeof(both),
			    BPF_F_RECOMPUTE_CSUM);
}

INLINE void rewrite(struct __sk_buff *skb, const struct packet *p, const struct tuple *to, const bool v6)
{
	__s64 difference = address_difference(&p->tuple, to, v6);

	if (p->fragment.part == LATER_FRAGMENT) {
		rewrite_later(skb, to, difference, v6);
		return;
	}
	update_transport(skb, p, to, difference, v6);
	if (v6)
		store_tuple6(skb, p, to);
	else
		store_tuple4(skb, p, to, difference);
}

/* All that changes of an IPv4 packet without options and its frame, with what lies between: one store. False: this is
 * no such packet.
 */
INLINE bool rewrite_with_macs(struct __sk_buff *skb, const struct packet *p, const struct tuple *to, const __u16 *mac)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__s64 difference = address_difference(&p->tuple, to, false);
	__u16 piece[19], *old = data;

	if (p->l4 != L3_OFFSET + sizeof(struct iphdr) || p->fragment.part || data + sizeof(piece) > end)
		return false;
#pragma unroll
	for (int i = 0; i < 6; i++)
		piece[i] = mac[i];
#pragma unroll
	for (int i = 6; i < 11; i++)
		piece[i] = old[i];
	fill_piece4(piece + 11, p, to, difference);
	update_transport(skb, p, to, difference, false);
	bpf_skb_store_bytes(skb, 0, piece, sizeof(piece), 0);
	return true;
}

/* Destination and source of the frame, as the pod that gets it expects them. */
INLINE void set_macs(struct __sk_buff *skb, const __u8 *mac)
{
	bpf_skb_store_bytes(skb, 0, mac, 12, 0);
}

INLINE void get_macs(struct __sk_buff *skb, __u8 *mac)
{
	bpf_skb_load_bytes(skb, 0, mac, 12);
}

/* Frame addresses for the way back: destination and source change places. */
INLINE void swap_macs(struct __sk_buff *skb)
{
	__u8 mac[12], swapped[12];

	get_macs(skb, mac);
	__builtin_memcpy(swapped, mac + 6, 6);
	__builtin_memcpy(swapped + 6, mac, 6);
	set_macs(skb, swapped);
}

#endif
