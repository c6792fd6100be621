/* Refuse: answer with ICMP port unreachable, as netfilter's REJECT does, out of the interface it came from. */
#ifndef HYBRID_PROXY_REPLY_H
#define HYBRID_PROXY_REPLY_H

#include "related.h"

#define QUOTED_PAYLOAD 8
#define REFUSAL4 (sizeof(struct iphdr) + ICMP_HEADER)
#define QUOTED4 (sizeof(struct iphdr) + QUOTED_PAYLOAD)
#define REFUSAL6 (sizeof(struct ipv6hdr) + ICMP_HEADER)
#define QUOTED6 (sizeof(struct ipv6hdr) + QUOTED_PAYLOAD)

/* A bucket for each CPU that refills once a second. */
INLINE bool may_refuse(void)
{
	__u32 key = 0, time = now();
	__u64 *budget = bpf_map_lookup_elem(&reject_budget, &key), left;

	if (!budget)
		return false;
	left = (__u32)*budget;
	if (time - (__u32)(*budget >> 32) >= settings.hz)
		left = settings.reject_burst;
	else
		time = *budget >> 32;
	if (!left)
		return false;
	*budget = (__u64)time << 32 | (left - 1);
	return true;
}

INLINE __u16 fold(__s64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32 & 0xffff);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

struct refusal4 {
	struct iphdr ip;
	struct icmp_header icmp;
};

struct refusal6 {
	struct ipv6hdr ip;
	struct icmp_header icmp;
};

INLINE long write_refusal4(struct __sk_buff *skb, const struct tuple *t)
{
	struct refusal4 head = {};
	__u32 quoted[QUOTED4 / 4];
	__s64 sum;

	if (bpf_skb_load_bytes(skb, L3_OFFSET + REFUSAL4, quoted, sizeof(quoted)))
		return -1;
	head.ip.version = 4;
	head.ip.ihl = 5;
	head.ip.ttl = 64;
	head.ip.protocol = IPPROTO_ICMP;
	head.ip.tot_len = bpf_htons(REFUSAL4 + QUOTED4);
	head.ip.saddr = t->daddr[0];
	head.ip.daddr = t->saddr[0];
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&head.ip, sizeof(head.ip), 0);
	head.ip.check = fold(sum);
	head.icmp.type = ICMP_DEST_UNREACH;
	head.icmp.code = ICMP_PORT_UNREACH;
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&head.icmp, sizeof(head.icmp), 0);
	sum = bpf_csum_diff(NULL, 0, quoted, sizeof(quoted), (__u32)sum);
	head.icmp.checksum = fold(sum);
	return bpf_skb_store_bytes(skb, L3_OFFSET, &head, sizeof(head), 0);
}

INLINE long write_refusal6(struct __sk_buff *skb, const struct tuple *t)
{
	struct refusal6 head = {};
	__u32 quoted[QUOTED6 / 4], pseudo[2] = {bpf_htonl(ICMP_HEADER + QUOTED6), bpf_htonl(IPPROTO_ICMPV6)};
	__s64 sum;

	if (bpf_skb_load_bytes(skb, L3_OFFSET + REFUSAL6, quoted, sizeof(quoted)))
		return -1;
	head.ip.version = 6;
	head.ip.hop_limit = 64;
	head.ip.nexthdr = IPPROTO_ICMPV6;
	head.ip.payload_len = bpf_htons(ICMP_HEADER + QUOTED6);
	__builtin_memcpy(&head.ip.saddr, t->daddr, 16);
	__builtin_memcpy(&head.ip.daddr, t->saddr, 16);
	head.icmp.type = ICMPV6_DEST_UNREACH;
	head.icmp.code = ICMPV6_PORT_UNREACH;
	sum = bpf_csum_diff(NULL, 0, (__be32 *)t->saddr, 16, 0);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)t->daddr, 16, (__u32)sum);
	sum = bpf_csum_diff(NULL, 0, pseudo, sizeof(pseudo), (__u32)sum);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&head.icmp, sizeof(head.icmp), (__u32)sum);
	sum = bpf_csum_diff(NULL, 0, quoted, sizeof(quoted), (__u32)sum);
	head.icmp.checksum = fold(sum);
	return bpf_skb_store_bytes(skb, L3_OFFSET, &head, sizeof(head), 0);
}

/* Quote the headers that the sender needs to find its socket, in a new packet to it. */
INLINE int refuse(struct __sk_buff *skb, const struct packet *p, const bool v6)
{
	__u32 quoted = v6 ? QUOTED6 : QUOTED4, head = v6 ? REFUSAL6 : REFUSAL4;

	if (p->l4 != L3_OFFSET + quoted - QUOTED_PAYLOAD || !may_refuse())
		return drop(COUNT_REJECT_LIMITED);
	if (bpf_skb_change_tail(skb, L3_OFFSET + quoted, 0) || bpf_skb_adjust_room(skb, head, BPF_ADJ_ROOM_MAC, 0))
		return drop(COUNT_REJECT_LIMITED);
	if (v6 ? write_refusal6(skb, &p->tuple) : write_refusal4(skb, &p->tuple))
		return drop(COUNT_REJECT_LIMITED);
	swap_frame(skb);
	count(COUNT_REJECT);
	return bpf_redirect(skb->ifindex, 0);
}

#endif
