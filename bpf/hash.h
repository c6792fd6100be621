/* The hashes of prefilters and tags. `dataplane/modes/ebpf/maps/layout.py` computes the same ones. */
#ifndef HYBRID_PROXY_HASH_H
#define HYBRID_PROXY_HASH_H

#include "maps.h"
#include "packet.h"

INLINE __u32 hash_address(const __u32 *a, const bool v6)
{
	__u32 h = a[0];

	if (v6) {
		h = h * 0x85ebca77u + a[1];
		h = h * 0xc2b2ae3du + a[2];
		h = h * 0x27d4eb2fu + a[3];
	}
	return h * 0x9e3779b1u;
}

INLINE __u32 hash_socket(const __u32 *a, __be16 port, __u8 protocol, const bool v6)
{
	return (hash_address(a, v6) ^ ((__u32)port << 8 | protocol)) * 0x165667b1u;
}

/* 24 bits that an element of a frontend's hash carries to prove whose it is. */
INLINE __u32 frontend_tag(const __u32 *a, __be16 port, __u8 protocol, const bool v6)
{
	return ((hash_address(a, v6) + ((__u32)port << 8 | protocol)) * 0xc2b2ae35u) >> 8;
}

INLINE __u32 flow_tag(const struct tuple *t, const bool v6)
{
	__u32 ports = (__u32)t->sport << 16 | t->dport;

	return (hash_address(t->saddr, v6) * 31 + hash_address(t->daddr, v6)) ^ (ports + t->protocol) * 0x27d4eb2fu;
}

INLINE bool bit_set(const __u64 *bitmap, __u32 bit)
{
	return READ_ONCE(bitmap[bit / 64]) >> (bit & 63) & 1;
}

INLINE bool may_be_service(const __u32 *address, const bool v6)
{
	return bit_set(prefilters.service_addresses, hash_address(address, v6) >> (32 - PREFILTER_BITS));
}

/* The bit of a node port; a transport that services do not have shares SCTP's bits. */
INLINE bool may_be_node_port(__be16 port, __u8 protocol)
{
	__u32 kind = protocol == IPPROTO_TCP ? 0 : protocol == IPPROTO_UDP ? 1 : 2, number = bpf_ntohs(port);

	/* The verifier of Linux 5.10 does not know how large a swapped number is, and the compiler removes a mask. */
	asm volatile("" : "+r"(number));
	return bit_set(prefilters.node_ports, kind << 16 | (number & 0xffff));
}

INLINE bool may_be_backend(const __u32 *address, __be16 port, __u8 protocol, const bool v6)
{
	return bit_set(prefilters.backend_sockets, hash_socket(address, port, protocol, v6) >> (32 - PREFILTER_BITS));
}

#endif
