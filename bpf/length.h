/* How long a packet is, and whether an interface's MTU has room for it. */
#ifndef HYBRID_PROXY_LENGTH_H
#define HYBRID_PROXY_LENGTH_H

#include "packet.h"

#define SMALLEST_MTU 1280
#define GSO_BY_FRAGS 0xffff /* linux/skbuff.h: SCTP packets in one, each as long as its sender made it */
#define JUMBO_HEADER 8	    /* hop-by-hop options with the length (RFC 2675), IPV6_TLV_JUMBO alone */

/* Is it longer than the length in IPv6's header can be? */
INLINE bool is_jumbo(struct __sk_buff *skb, const bool v6)
{
	return v6 && skb->len > L3_OFFSET + sizeof(struct ipv6hdr) + 0xffff;
}

/* Bytes of the IP packet; of a packet that stands for several (GSO), those of the largest of them. Linux before 7.0
 * writes the length of BIG TCP into an extra header, which it takes away when it segments the packet.
 */
INLINE __u32 length_at(struct __sk_buff *skb, __u32 l4, __u32 header, const bool v6)
{
	__u32 segment = skb->gso_size, length = l4 - L3_OFFSET;

	if (!segment)
		return skb->len - L3_OFFSET;
	if (segment == GSO_BY_FRAGS)
		return SMALLEST_MTU;
	if (is_jumbo(skb, v6) && length > sizeof(struct ipv6hdr))
		length -= JUMBO_HEADER;
	return length + header + segment;
}

INLINE __u32 packet_length(struct __sk_buff *skb, const struct packet *p, const bool v6)
{
	return length_at(skb, p->l4, p->tuple.protocol == IPPROTO_TCP ? p->header : sizeof(struct udphdr), v6);
}

/* Packets of the smallest MTU fit every interface, and those of Linux before 5.12 cannot be checked. */
INLINE bool always_fits(struct __sk_buff *skb)
{
	return skb->len <= L3_OFFSET + SMALLEST_MTU || !settings.can_check_mtu;
}

/* Does the packet, or each segment that it stands for, fit the interface's MTU? bpf_redirect_peer() does not check
 * that. Longer packets go through the stack, which sends the ICMP error. bpf_check_mtu() reports the MTU; its own
 * comparison would count the extra header of BIG TCP.
 */
INLINE bool length_fits(struct __sk_buff *skb, __u32 ifindex, __u32 length)
{
	__u32 mtu = 0;

	return bpf_check_mtu(skb, ifindex, &mtu, 0, 0) < 0 || length <= mtu;
}

#endif
