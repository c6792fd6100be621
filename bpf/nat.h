/* Rewrite a packet's tuple, checksums included. Headers were proved to be there by packet.h. */
#ifndef HYBRID_PROXY_NAT_H
#define HYBRID_PROXY_NAT_H

#include "flow.h"

INLINE int checksum_offset(__u8 protocol)
{
	if (protocol == IPPROTO_TCP)
		return offsetof(struct tcphdr, check);
	if (protocol == IPPROTO_UDP)
		return offsetof(struct udphdr, check);
	return -1; /* SCTP's CRC does not cover addresses */
}

/* Difference that the new addresses make to a ones' complement sum. */
INLINE __s64 address_difference(const struct tuple *from, const struct tuple *to, const bool v6)
{
	__s64 sum;

	if (!v6) {
		__u32 old[2] = {from->saddr[0], from->daddr[0]}, new[2] = {to->saddr[0], to->daddr[0]};

		return bpf_csum_diff(old, sizeof(old), new, sizeof(new), 0);
	}
	sum = bpf_csum_diff((__be32 *)from->saddr, 16, (__be32 *)to->saddr, 16, 0);
	return bpf_csum_diff((__be32 *)from->daddr, 16, (__be32 *)to->daddr, 16, (__u32)sum);
}

INLINE void rewrite_transport(struct __sk_buff *skb, const struct packet *p, const struct tuple *to, __s64 difference)
{
	int check = checksum_offset(p->tuple.protocol);
	__u64 zero_is_none = p->tuple.protocol == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 old = (__u32)p->tuple.sport << 16 | p->tuple.dport, new = (__u32)to->sport << 16 | to->dport;
	__be16 ports[2] = {to->sport, to->dport};

	if (check >= 0) {
		bpf_l4_csum_replace(skb, p->l4 + check, 0, difference, BPF_F_PSEUDO_HDR | zero_is_none);
		if (old != new)
			bpf_l4_csum_replace(skb, p->l4 + check, old, new, 4 | zero_is_none);
	}
	if (old != new)
		bpf_skb_store_bytes(skb, p->l4, ports, sizeof(ports), 0);
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

INLINE void rewrite(struct __sk_buff *skb, const struct packet *p, const struct tuple *to, const bool v6)
{
	__s64 difference = address_difference(&p->tuple, to, v6);

	rewrite_transport(skb, p, to, difference);
	rewrite_addresses(skb, L3_OFFSET, to, difference, v6);
}

/* Destination and source of the frame, as the pod that gets it expects them. */
INLINE void rewrite_frame(struct __sk_buff *skb, const __u8 *mac)
{
	bpf_skb_store_bytes(skb, 0, mac, 12, 0);
}

INLINE void read_frame(struct __sk_buff *skb, __u8 *mac)
{
	bpf_skb_load_bytes(skb, 0, mac, 12);
}

/* Frame addresses for the way back: destination and source change places. */
INLINE void swap_frame(struct __sk_buff *skb)
{
	__u8 mac[12], swapped[12];

	read_frame(skb, mac);
	__builtin_memcpy(swapped, mac + 6, 6);
	__builtin_memcpy(swapped + 6, mac, 6);
	rewrite_frame(skb, swapped);
}

#endif
