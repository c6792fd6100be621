/* The maps that several programs share. Elements of an array never move, so arrays hold what changes; values of a hash
 * table are written once.
 *
 * A map that belongs to one header or program is defined there: scratch.h, route.h, driver.h, socket_storage.h,
 * target.h, explaining.h.
 */
#ifndef HYBRID_PROXY_MAPS_H
#define HYBRID_PROXY_MAPS_H

#include "config.h"

/* Rows of programs alone. */

#define AWAITED_BITS 9
#define FRAG_QUEUE 256	   /* fragments that wait for their first, of all datagrams together */
#define FRAG_QUEUE_EACH 64 /* of one datagram: 64 KiB over an MTU of 1500 are 45 */
#define FRAG_BYTES 2048	   /* of a frame that can wait */

/* A datagram in fragments, on its way: all of them have this key. */
struct fragment_key {
	__u32 saddr[4];
	__u32 daddr[4];
	__u32 id;
	__u32 protocol;
};

/* The ports of its first fragment, or which later ones wait for it (places in map `frag_queue`). */
struct fragments {
	__u32 seen; /* jiffies of the one that came first */
	__u16 sport;
	__u16 dport;
	__u8 known; /* the first fragment was seen */
	__u8 protocol;
	__u16 waiting;
	__u8 places[FRAG_QUEUE_EACH];
};

/* A fragment that came before its datagram's first. */
struct queued_fragment {
	struct fragment_key key;
	__u32 length;
	__u32 pad;
	__u8 frame[FRAG_BYTES];
};

/* Programs reach the only element of these two maps as a variable: its address is a constant, where a lookup would be
 * code at every place that asks. Who loads an object makes the variable's section and the map one.
 */

/* Which packets may be a service's (hash.h). */
ARRAY_MAP(bitmaps, struct bitmaps, 1);
struct bitmaps prefilters SEC(".bss.bitmaps");
/* Addresses of this node; what else may change at run time. */
ARRAY_MAP(node, struct node, 1);
struct node own_node SEC(".data.node");

/* (address, port, protocol) -> service, flags, tag. */
GROWING_MAP(frontends4, struct frontend4_key, __u64, 65536);
GROWING_MAP(frontends6, struct frontend6_key, __u64, 65536);
/* Clients in the source ranges of load-balancer IPs. */
PREFIX_MAP(source_ranges4, struct source_range4_key, 65536);
PREFIX_MAP(source_ranges6, struct source_range6_key, 65536);
/* Interfaces behind which all sources are pods, where pods are recognized by their interface. */
GROWING_MAP(pod_links, __u32, __u32, 4096);
/* This node's addresses, on whatever interface, and its networks' broadcast addresses: no source of a packet from
 * outside.
 */
GROWING_MAP(own_addresses, struct own_address, __u32, 16384);
/* How packets are checked, by the index of the interface that they come in at: enum interface_flags. */
GROWING_MAP(interfaces, __u32, __u32, 8192);
/* The addresses that masqueraded packets get when they leave by an interface, by its index. */
GROWING_MAP(interface_addresses, __u32, struct interface_address, 4096);
/* Routes with several next hops, by number, and these by twos. */
PREFIX_MAP(equal_routes, struct equal_route, 4096);
GROWING_MAP(equal_paths, struct equal_path, __u32, 4096);
/* Interfaces that programs are at (keys: enum link_kind). The kernel removes the entries of one that goes; it keeps no
 * types of such a map's rows.
 */
struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP_HASH);
	__uint(max_entries, 16384);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
} links SEC(".maps");
/* Service id -> the slot ranges of its two backend sets. */
ARRAY_MAP(services, struct service, 32768);
/* All slot ranges, one after the other. */
ARRAY_MAP(slots, struct slot, 262144);
/* Backend id -> address and port. */
ARRAY_MAP(backends, struct backend, 262144);
/* Backend id -> its open flows, where they are counted. */
ARRAY_MAP(loads, struct load, 262144);
/* Backend id -> how connections to it failed; only of backends that did fail. */
GROWING_MAP(failures, __u32, struct failures, 8192);
/* Both directions of flows. Nothing evicts them. */
GROWING_MAP(flows4, struct flow4_key, struct flow, 262144);
GROWING_MAP(flows6, struct flow6_key, struct flow, 262144);
/* Datagrams until they prove to be a conversation, and connections that begin while too many others do. A flood evicts
 * only entries of this table.
 */
LRU_MAP(half_open4, struct flow4_key, struct flow, 65536);
LRU_MAP(half_open6, struct flow6_key, struct flow, 65536);
/* Reply tuples of the last minute: timewait.h. */
ARRAY_MAP(timewait, struct timewait_bucket, 1 << TIMEWAIT_BITS);
/* Client and service -> backend | jiffies of the last connection << 32. */
LRU_MAP(affinity, struct affinity_key, __u64, 65536);
/* Datagrams in fragments: ports for those that have none. */
LRU_MAP(fragments, struct fragment_key, struct fragments, 2048);
/* Fragments that wait for their first; a ring. */
ARRAY_MAP(frag_queue, struct queued_fragment, FRAG_QUEUE);
/* Sums over each backend's flows: rows of TRAFFIC_GROUP backends for one CPU, then for the next, so that no two CPUs
 * write to one cache line and user space reads all of it as one array.
 */
ARRAY_MAP(traffic, struct traffic, 524288);
/* The figures of a service's former backends, by service; user space alone writes them. */
ARRAY_MAP(traffic_gone, struct traffic, 32768);
/* Service id -> how long its clients waited for a backend's first packet. */
ARRAY_MAP(first_packets, struct first_packets, 32768);

/* When a delivery to a backend's socket was last waited for, by the socket's hash (delivery.h); jiffies, 0: never. */
ARRAY_MAP(awaited, __u64, 1 << AWAITED_BITS);

/* The programs that all hooks call, by enum datapath: to replace one is one store. */
MAP(datapaths, BPF_MAP_TYPE_PROG_ARRAY, 0, __u32, __u32, DATAPATHS);

/* Events by reason, per CPU. */
CPU_MAP(counters, __u64, COUNTERS);

/* Events of packets, for user space; counters count more. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} events SEC(".maps");

/* Events left | jiffies of the last refill << 32, per CPU. */
CPU_MAP(event_budget, __u64, 1);

/* Answers to rejected packets left | jiffies of the last refill << 32, per CPU. */
CPU_MAP(reject_budget, __u64, 1);

#endif
