/* Includes, settings set before load, and a few macros of the BPF dialect. */
#ifndef HYBRID_PROXY_CONFIG_H
#define HYBRID_PROXY_CONFIG_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <stdbool.h>
#include <stddef.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

/* The kernel's icmp.h drags in the C library's socket headers; ICMP and ICMPv6 begin alike. */
struct icmp_header {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__be32 rest;
};

enum socket_families { AF_INET = 2, AF_INET6 = 10 };

enum icmp_numbers {
	ICMP_ECHO_REPLY = 0,
	ICMP_DEST_UNREACH = 3,
	ICMP_PORT_UNREACH = 3,
	ICMP_FRAG_NEEDED = 4,
	ICMP_SOURCE_QUENCH = 4,
	ICMP_REDIRECT = 5,
	ICMP_ECHO_REQUEST = 8,
	ICMP_TIME_EXCEEDED = 11,
	ICMP_PARAMETERPROB = 12,
	ICMPV6_DEST_UNREACH = 1,
	ICMPV6_PORT_UNREACH = 4,
	ICMPV6_PKT_TOOBIG = 2,
	ICMPV6_TIME_EXCEEDED = 3,
	ICMPV6_INFORMATIONAL = 128, /* lower types are errors */
	ICMPV6_ECHO_REQUEST = 128,
	ICMPV6_ECHO_REPLY = 129,
};

#define INLINE static __always_inline
#define READ_ONCE(x) (*(const volatile typeof(x) *)&(x))
#define WRITE_ONCE(x, v) (*(volatile typeof(x) *)&(x) = (v))

#define MAP(NAME, KIND, FLAGS, KEY, VALUE, ENTRIES)                                                                    \
	struct {                                                                                                       \
		__uint(type, KIND);                                                                                    \
		__uint(map_flags, FLAGS);                                                                              \
		__uint(max_entries, ENTRIES);                                                                          \
		__type(key, KEY);                                                                                      \
		__type(value, VALUE);                                                                                  \
	} NAME SEC(".maps")

#define ARRAY_MAP(NAME, VALUE, ENTRIES) MAP(NAME, BPF_MAP_TYPE_ARRAY, BPF_F_MMAPABLE, __u32, VALUE, ENTRIES)
#define CPU_MAP(NAME, VALUE, ENTRIES) MAP(NAME, BPF_MAP_TYPE_PERCPU_ARRAY, 0, __u32, VALUE, ENTRIES)
#define HASH_MAP(NAME, KEY, VALUE, ENTRIES) MAP(NAME, BPF_MAP_TYPE_HASH, 0, KEY, VALUE, ENTRIES)
#define LRU_MAP(NAME, KEY, VALUE, ENTRIES) MAP(NAME, BPF_MAP_TYPE_LRU_HASH, 0, KEY, VALUE, ENTRIES)
#define PREFIX_MAP(NAME, KEY, ENTRIES) MAP(NAME, BPF_MAP_TYPE_LPM_TRIE, BPF_F_NO_PREALLOC, KEY, __u32, ENTRIES)
/* Elements take memory when they come, and programs find them faster than in a table that is made whole: the kernel
 * keeps such elements in large pages. The number of entries is a bound.
 */
#define GROWING_MAP(NAME, KEY, VALUE, ENTRIES) MAP(NAME, BPF_MAP_TYPE_HASH, BPF_F_NO_PREALLOC, KEY, VALUE, ENTRIES)

const volatile struct settings settings = {};

INLINE __u32 now(void)
{
	return (__u32)bpf_jiffies64();
}

/* The same, where 0 stands for never. */
INLINE __u32 moment(void)
{
	__u32 time = now();

	return time ? time : 1;
}

#define KTIME_SHIFT 10		   /* ticks of 2^10 ns, which wrap after 73 minutes */
#define LONGEST_CONNECT (1u << 26) /* ticks of ktime(), 67 s: longer than clients try */

/* Finer than `now`, and slower to get: for what happens once in a connection. */
INLINE __u32 ktime(void)
{
	return (__u32)(bpf_ktime_get_ns() >> KTIME_SHIFT);
}

#endif
