/* What is wrong with a packet itself. The stack drops such packets before it routes them, or conntrack calls them
 * invalid; what a program answers, or sends on by its own lookup, meets neither. The rules are those of ip_rcv_core(),
 * ip_rcv_options(), ip6_rcv_core() and ip6_parse_tlv(), and of conntrack's tcp_error() and udp_error().
 */
#ifndef HYBRID_PROXY_FORM_H
#define HYBRID_PROXY_FORM_H

#include <linux/if_packet.h>

#include "maps.h"
#include "packet.h"

#define SCTP_HEADER 12
#define BEYOND_PADDING 0xfefefefe /* bits that no byte of padding has, which is of zeros and ones */
#define HOP_PAD1 0
#define HOP_PADN 1

/* Is the frame addressed to this node alone? What comes to a port of a bridge, or to an interface below a macvlan, is
 * for these to judge.
 */
INLINE bool is_for_this_node(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex, *flags;

	if (skb->pkt_type == PACKET_HOST)
		return true;
	if (skb->pkt_type != PACKET_OTHERHOST)
		return false;
	flags = bpf_map_lookup_elem(&interfaces, &ifindex);
	return !flags || *flags & INTERFACE_SHARED;
}

/* Is IPv4's header checksum right (RFC 1071)? Options must be padding: whatever else routers do with them (source
 * routes, records) is the stack's to do, and these packets do not meet it.
 */
INLINE bool adds_up(void *data, void *end, const struct packet *p)
{
	__u32 *word = data + L3_OFFSET;
	__u64 sum;

	if ((void *)(word + 5) > end)
		return false;
	sum = (__u64)word[0] + word[1] + word[2] + word[3] + word[4];
	if (p->l4 != L3_OFFSET + sizeof(struct iphdr)) {
		for (int i = 5; i < 15; i++) {
			if (L3_OFFSET + i * 4 >= p->l4)
				break;
			if ((void *)(word + i + 1) > end)
				return false;
			if (word[i] & BEYOND_PADDING)
				return false;
			sum += word[i];
		}
	}
	sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
	return sum == 0xffff || sum == 2 * 0xffff;
}

INLINE bool has_hop_options(void *data, void *end)
{
	struct ipv6hdr *ip = data + L3_OFFSET;

	return (void *)(ip + 1) <= end && ip->nexthdr == IPPROTO_HOPOPTS;
}

/* Hop-by-hop options, which routers read: nothing but padding, in their smallest form. What is longer than IPv6's
 * header can say has its length there.
 */
INLINE bool is_padding(void *data, void *end)
{
	struct ipv6hdr *ip = data + L3_OFFSET;
	__u8 *option = (void *)(ip + 1);

	if ((void *)(option + 8) > end)
		return false;
	if (!ip->payload_len)
		return true;
	if (option[1] || (option[2] == HOP_PADN ? option[3] != 4 : option[2] != HOP_PAD1 || option[3] != HOP_PAD1))
		return false;
	return !(option[4] | option[5] | option[6] | option[7]);
}

/* Do the transport's header, and the length in it, fit into a packet that ends at `finish`? */
INLINE bool transport_fits(void *data, void *end, const struct packet *p, __u32 finish)
{
	struct udphdr *udp = data + (p->l4 & HEADERS_MASK);
	__u32 length;

	if (p->fragment.part || p->kind != PACKET_TRANSPORT)
		return p->l4 <= finish;
	if (p->tuple.protocol == IPPROTO_TCP)
		return p->header >= sizeof(struct tcphdr) && p->l4 + p->header <= finish;
	if (p->tuple.protocol == IPPROTO_SCTP)
		return p->l4 + SCTP_HEADER <= finish;
	if ((void *)(udp + 1) > end)
		return false;
	length = bpf_ntohs(udp->len);
	return length >= sizeof(*udp) && p->l4 + length <= finish;
}

/* Do checksum and lengths agree with each other, and with a frame of `whole` bytes? `finish`: where the packet ends in
 * it, 0: nowhere.
 */
INLINE bool is_sound(void *data, void *end, __u32 whole, __u32 finish, const struct packet *p, const bool v6)
{
	if (v6 ? has_hop_options(data, end) && !is_padding(data, end) : !adds_up(data, end, p))
		return false;
	return finish && finish <= whole && transport_fits(data, end, p, finish);
}

/* Are the headers of a parsed packet sound? One that stands for several may be longer than IP's header can say (BIG
 * TCP), and ends with its frame.
 */
INLINE bool is_well_formed(struct __sk_buff *skb, const struct packet *p, const bool v6)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u32 finish = end_of_packet(data, end, v6);

	if (!finish && skb->gso_size)
		finish = skb->len;
	return is_sound(data, end, skb->len, finish, p, v6);
}

#endif
