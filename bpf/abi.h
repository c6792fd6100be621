/* Rows, enums and limits that C and Python share.
 *
 * Written once: the build preprocesses this file with ABI_FOR_PYTHON and Python reads the result through
 * cffi, a test compares sizes and offsets with BTF. Enums instead of macros, because cffi keeps enums.
 * Addresses and ports are in network byte order; an IPv4 address is the first of four words, the rest 0.
 */
#ifndef HYBRID_PROXY_ABI_H
#define HYBRID_PROXY_ABI_H

#ifndef ABI_FOR_PYTHON
#include <linux/types.h>
#endif

enum abi_limits {
	ABI_VERSION = 3,	/* to be raised when a field gets another meaning; the pin path has it and the layout */
	PREFILTER_BITS = 20,	/* size of each bitmap: 2^20 bits, 128 KiB */
	RANGE_OFFSET_BITS = 28, /* slice word: offset | count << 28 | epoch << 46 */
	RANGE_COUNT_BITS = 18,
	RANGE_EPOCH_BITS = 18,
	BACKEND_SETS = 2,     /* distinct backend sets of one service port: the cluster's, this node's */
	SERVICE_CIDRS = 4,    /* of each family */
	SOCKET_PEERS = 4,     /* service addresses that one unconnected UDP socket is remembered to talk to */
	TIMEWAIT_BITS = 16,   /* buckets of reply tuples that are remembered after their connection ended */
	TIMEWAIT_ENTRIES = 4, /* tuples in a bucket */
	SWEEP_KEYS = 16,      /* flows that one call of the sweep program re-checks */
	TRAFFIC_GROUP = 8,    /* backends whose rows in map `traffic` lie together, for one CPU after the other */
};

/* A frontend's value is one immutable u64: service | flags << 32 | tag << 40. The tag is a hash of the
 * key: an element that was recycled for another key while a program looked at it does not match.
 */
enum frontend_flags {
	FRONTEND_INTERNAL_SET = 1 << 0,	  /* which route pods and this node take */
	FRONTEND_EXTERNAL_SET = 1 << 1,	  /* which route clients beyond the cluster take */
	FRONTEND_ADDRESS = 1 << 2,	  /* port 0, protocol 0: the address is a service's; other ports are refused */
	FRONTEND_MASQUERADE_POD = 1 << 3, /* these clients' source address is replaced by the node's */
	FRONTEND_MASQUERADE_NODE = 1 << 4,
	FRONTEND_MASQUERADE_EXTERNAL = 1 << 5,
	FRONTEND_SOURCE_RANGES = 1 << 6, /* only sources that map `sources` holds for the service may come */
	FRONTEND_NODE_PORTS = 1 << 7,	 /* of an address: node ports are served here, as frontends of address 0 */
};

struct frontend4_key {
	__u32 address;
	__u16 port;
	__u8 protocol;
	__u8 pad;
};

struct frontend6_key {
	__u32 address[4];
	__u16 port;
	__u8 protocol;
	__u8 pad;
};

/* Clients that may come to the load-balancer IPs of a service, by longest prefix; `bits` counts from `service` on. */
struct source_range4_key {
	__u32 bits;
	__u32 service;
	__u32 address;
};

struct source_range6_key {
	__u32 bits;
	__u32 service;
	__u32 address[4];
};

enum service_flags {
	SERVICE_DROP_SET0 = 1 << 0, /* an empty route 0 drops; otherwise it refuses */
	SERVICE_DROP_SET1 = 1 << 1,
	SERVICE_BY_TUPLE = 1 << 4, /* what chooses a place in a slice; none of these: chance */
	SERVICE_BY_CLIENT = 1 << 5,
	SERVICE_ROUND_ROBIN = 1 << 6,
};

struct service {
	__u64 sets[2]; /* slice words, each replaced by one store */
	__u32 flags;
	__u32 affinity; /* idle time in jiffies after which a client may move, 0: no affinity */
	__u64 turn;	/* counts connections where SERVICE_ROUND_ROBIN */
};

/* One place in a slice. Both words carry the service's id, so that a reader whose slice was given to another
 * service meanwhile finds out. An IPv4 endpoint stands here too: one cache miss less; IPv6's is in the row.
 */
struct slot {
	__u64 backend;	/* id | service << 32 */
	__u64 endpoint; /* address | port << 32 | (service & 0xffff) << 48 */
};

enum backend_flags {
	BACKEND_SERVING = 1 << 0, /* established flows may stay */
	BACKEND_SET0 = 1 << 1,	  /* a member of the service's set 0 */
	BACKEND_SET1 = 1 << 2,
	BACKEND_EJECTED = 1 << 3,      /* not in a route it belongs to, because it keeps failing */
	BACKEND_PROBE_FAILED = 1 << 4, /* beside that: it is the agent's probes that failed */
	BACKEND_LOCAL = 1 << 5,	       /* it runs on this node */
};

struct backend {
	__u32 address[4];
	__u16 port;
	__u16 flags;
	__u32 service; /* ids belong to one service, so that a stale id proves itself wrong */
	/* family (4 or 6) | protocol << 8; 0: nobody's row */
	__u32 kind;
	__u32 failures; /* connections one after the other that it did not answer, or refused */
};

/* What a backend's flows came to on one CPU (map `traffic`). Bytes are those of IP packets; of a packet that stands for
 * several segments (GSO) all are counted, their headers once.
 */
struct traffic {
	__u64 flows; /* begun */
	__u64 packets;
	__u64 bytes;
	__u64 reply_packets;
	__u64 reply_bytes;
	__u64 answered;	  /* TCP connections that it accepted */
	__u64 connect_ns; /* from their SYN to its answer, together */
};

struct flow4_key {
	__u32 saddr;
	__u32 daddr;
	__u16 sport;
	__u16 dport;
	__u8 protocol;
	__u8 pad[3];
};

struct flow6_key {
	__u32 saddr[4];
	__u32 daddr[4];
	__u16 sport;
	__u16 dport;
	__u8 protocol;
	__u8 pad[3];
};

enum flow_flags {
	FLOW_REPLY = 1 << 0,	 /* the backend's direction */
	FLOW_HAIRPIN = 1 << 1,	 /* client and backend are one pod: back out of the interface it came from */
	FLOW_DIRECT = 1 << 2,	 /* not to a service: keeps a reply tuple apart from a service flow's */
	FLOW_FIN = 1 << 3,	 /* this direction has ended */
	FLOW_FIN_ACKED = 1 << 4, /* and the other one knows: a pair of which both are so is deleted */
	FLOW_RESET = 1 << 5,
	FLOW_PEER_FIN = 1 << 7,	   /* the other direction has ended: acknowledgements are looked at */
	FLOW_ESTABLISHED = 1 << 9, /* both directions have spoken */
	FLOW_REPLIED = 1 << 8,	   /* the backend accepted: the client's next segment establishes the pair */
	FLOW_COLLISION = 1 << 6,   /* the reply tuple turned out to be a direct connection's: choose another port */
	FLOW_MASQUERADE = 1 << 10, /* the source is the node's: the packet goes on by our own route lookup */
	FLOW_NODE = 1 << 11,	   /* the client is this node */
	FLOW_DSR = 1 << 12,	/* its packets go to the backend's node in another one, and answers do not come here */
	FLOW_DOUBTED = 1 << 14, /* reset with a number ahead of what was acknowledged: over, if nobody goes on */
	FLOW_CHALLENGED =
		1 << 13, /* a SYN asked the backend whether this connection still lives; it has not answered */
};

/* Where the packets of a flow come in: the index of a pod's interface, or one of these. */
enum origin {
	ORIGIN_UPLINKS = 0,	     /* at any uplink: they are one place */
	ORIGIN_NODE = 0x7ffffffd,    /* from this node itself */
	ORIGIN_UNKNOWN = 0x7ffffffe, /* nothing came yet */
	/* Where a route leads to may also be: */
	ORIGIN_ELSEWHERE = 0x7ffffff0, /* to an interface without programs, a bridge say */
	ORIGIN_NONE = 0x7ffffff1,
};

/* Map `links` has the index of each interface that programs are at, and once more with the bit of what it is. */
enum link_kind {
	LINK_POD_BIT = 30,
	LINK_OUTER_BIT = 31, /* an uplink that no pod of this node is behind, as pods may be behind a bridge */
};

/* What to make of a packet with the key's tuple. The pair's key is this tuple turned round. */
struct flow {
	__u32 saddr[4];
	__u32 daddr[4];
	__u16 sport;
	__u16 dport;
	__u16 flags;
	__u16 challenges; /* how many SYNs asked since the other direction spoke, while FLOW_CHALLENGED */
	__u32 service;
	__u32 backend;
	__u32 seen;	      /* jiffies of the last packet of either direction, to a second */
	__u32 tag;	      /* hash of the key, as for frontends */
	__u32 ifindex;	      /* host side of the pod to hand established packets to, 0: the host's stack decides */
	__u32 started_or_fin; /* jiffies of the start; of TCP its `moment`, once FLOW_FIN: the sequence number that
		       acknowledges it */
	__u8 mac[12];	      /* destination and source of frames to that pod */
	__u32 origin;	      /* of enum origin */
	__u32 ack;	      /* of TCP: what this direction acknowledged last; before its first segment, what that must
				 acknowledge. Of FLOW_DSR: the last sequence number. */
	__u32 challenged_at;  /* jiffies of the last SYN that asked */
};

/* What is asked of packets that come in at an interface (map `interfaces`); of one that is not there, nothing. */
enum interface_flags {
	INTERFACE_STRICT4 = 1 << 0, /* the way back to the source is by this interface */
	INTERFACE_LOOSE4 = 1 << 1,  /* there is a way back to the source */
	INTERFACE_STRICT6 = 1 << 2,
	INTERFACE_IN_VRF = 1 << 3, /* its packets have a table of routes of their own */
	INTERFACE_SHARED = 1 << 4, /* frames for others come here, too: it is a bridge's port, or below a macvlan */
};

/* Destinations of routes that have several next hops, by longest prefix; `bits` counts from `family` on. */
struct equal_route {
	__u32 bits;
	__u32 family; /* 4 or 6 */
	__u32 address[4];
};

/* Two next hops of such a route: who comes in at `ingress` may be answered by the hop at `ifindex`, and strictly so. */
struct equal_path {
	__u32 route; /* number that map `equal_routes` has */
	__u32 ingress;
	__u32 ifindex;
	__u32 gateway[4]; /* zeros: the interface alone */
};

/* An address of this node, or one to all hosts of a network of its own. */
struct own_address {
	__u32 address[4];
	__u32 family; /* 4 or 6 */
};

/* Each mark: hash of the tuple << 40 | hash of whom it belonged to << 16 | time in ticks of 256 jiffies. */
struct timewait_bucket {
	__u64 entries[4];
};

struct affinity_key {
	__u32 client[4];
	__u32 service;
};

/* Settings of the node that may change while programs run (map `node`, one element). */
struct node {
	__u32 primary4;
	__u32 primary6[4];
	__u32 cidr4_count;
	__u32 cidr6_count;
	__u32 cidr4[4];
	__u32 mask4[4];
	__u32 cidr6[4][4];
	__u32 mask6[4][4];
	__u32 pods_by_link; /* pods are known by their interface (map `pod_links`), not by these: */
	__u32 pod4_known;
	__u32 pod6_known;
	__u32 pod4;
	__u32 pod4_mask;
	__u32 pod6[4];
	__u32 pod6_mask[4];
	__u32 direct_flows; /* non-zero once a direct flow had to change its port */
	__u32 overflowed;   /* non-zero once a TCP flow had to begin in the table that forgets */
	__u32 trace; /* tell what happens to packets of `trace_services` (zeros: any) from or to `trace_client` (or any)
		      */
	__u32 trace_services[4];
	__u32 trace_client[4];
	__s32 half_open; /* pairs among the flows that are not established; user space counts them again */
};

/* Set before load (`const volatile`, one struct: the order of scalars in .rodata is not the source's). */
struct settings {
	__u64 host_netns;   /* cookie of the namespace whose sockets are the node's, 0: any, all bits: see `home` */
	__u32 hz;	    /* jiffies per second */
	__u32 reject_burst; /* refusals per CPU and second */
	__u32 fast_path;
	__u32 can_set_errno;	  /* bpf_set_retval exists */
	__s32 max_half_open;	  /* pairs that may begin among the flows; more begin in the table that forgets */
	__u32 udp_timeout;	  /* jiffies after which another flow may claim the reply tuple of datagrams, */
	__u32 udp_timeout_stream; /* and of those that both sides have sent for a while */
	__u32 port_first;	  /* source ports that we give: those of masqueraded clients and of flows that clash */
	__u32 port_count;
	__u32 answer_ping;   /* echo requests to ClusterIPs are answered, not refused */
	__u32 can_check_mtu; /* bpf_check_mtu exists */
	__u32 dsr;	     /* clients outside are answered by the backend's node */
	__u32 traffic_cpus;  /* CPUs that map `traffic` has rows for, 0: traffic is not counted */
	__u32 event_burst;   /* events per CPU and second that are told to user space, 0: none */
};

/* How a connected socket came to its source address. */
enum connected {
	CONNECTED_BOUND = 1,
	CONNECTED_FREE, /* the kernel chose one on the way to the backend */
};

/* A socket's memory of the service addresses it talks to. */
struct socket_peer {
	__u32 frontend[4];
	__u32 backend[4];
	__u16 frontend_port;
	__u16 backend_port;
	__u32 service;
	__u32 backend_id;
	__u32 sent; /* number of the last datagram to it */
};

struct socket_state {
	struct socket_peer peers[4];
	__u32 sent;	 /* datagrams to services */
	__u32 connected; /* peers[0] is the peer of a connected socket: enum connected */
};

enum verdict {
	VERDICT_UNTOUCHED = 0,
	VERDICT_DNAT = 1,
	VERDICT_REJECT = 2,
	VERDICT_DROP = 3,
};

/* What the verbs tell when they explain themselves: each of these with two numbers. */
enum note_kind {
	NOTE_NONE,
	NOTE_COUNT,	     /* an event that is counted: enum counter */
	NOTE_MAY_BE_SERVICE, /* the prefilters have a bit for the destination */
	NOTE_FLOW,	     /* a flow is known: its flags, jiffies since its last packet */
	NOTE_FLOW_OWNER,     /* its service, its backend */
	NOTE_RENEWAL,	     /* the known flow is not followed: a new one takes its place */
	NOTE_FRONTEND,	     /* service, flags of the frontend at the address and port */
	NOTE_NODE_PORT,	     /* the same, of a node port at an address that serves these */
	NOTE_CLOSED,	     /* the address is a service's, the port is not */
	NOTE_CLIENT,	     /* enum client */
	NOTE_SOURCES,	     /* 1: the client is in the service's source ranges */
	NOTE_ROUTE,	     /* the route's number, 1: masquerade */
	NOTE_AFFINITY,	     /* the idle time in jiffies, the backend that is remembered, 0: none */
	NOTE_SLOT,	     /* index of the slot, its backend */
	NOTE_EMPTY,	     /* the route's number, 1: it drops */
	NOTE_PATH_BACK,	     /* index of the interface that leads back to the source, 0: none; 1: it must be this one */
	NOTE_HOP,	     /* index of the interface that leads to the backend, BPF_FIB_LKUP_RET_* */
	NOTE_FOREIGN,	     /* where packets of the flow come in (enum origin), where the route to the sender leads */
	NOTES = 32
};

struct note {
	__u32 what;
	__u32 a;
	__u32 b;
};

/* What was told about one packet (map `explanation` of the explaining programs, one element). */
struct explanation {
	__u32 count;
	__u32 copied;
	struct note notes[32];
};

/* Where a program runs; the first three are `enum place` of flow_create.h. */
enum hook {
	HOOK_POD_INGRESS,
	HOOK_UPLINK_INGRESS,
	HOOK_UPLINK_EGRESS,
	HOOK_POD_EGRESS,
	HOOK_SOCKET,
	HOOK_XDP,
};

/* What happened to a packet (ring buffer `events`): dropped, refused, or part of what is traced. */
struct event {
	__u64 time; /* nanoseconds, CLOCK_MONOTONIC */
	__u32 service;
	__u32 backend;
	__u32 ifindex;
	__u8 reason; /* enum counter */
	__u8 hook;
	__u8 family;	/* 4 or 6 */
	__u8 traced;	/* told because of `trace` in map `node` */
	__u32 saddr[4]; /* of the packet as it came */
	__u32 daddr[4];
	__u16 sport;
	__u16 dport;
	__u8 protocol;
	__u8 tcp_flags;
	__u16 pad;
};

/* A sweep request: the packet of the sweep program, after its Ethernet header. */
struct sweep {
	__u32 count;
	__u32 family;
	__u32 idle[16]; /* delete when not seen for this many jiffies */
	struct flow6_key keys[16];
};

enum counter {
	COUNT_NEW_FLOW = 0,
	COUNT_DNAT,
	COUNT_REPLY,
	COUNT_FAST,
	COUNT_REJECT,
	COUNT_DROP_REJECT_LIMITED,
	COUNT_DROP_EMPTY,
	COUNT_DROP_UNALLOCATED,
	COUNT_SLOT_RETRY,
	COUNT_SLOT_LOST,
	COUNT_FLOW_FULL,
	COUNT_TUPLE_COLLISION,
	COUNT_DROP_NO_PORT,
	COUNT_STALE_BACKEND,
	COUNT_ICMP_RELATED,
	COUNT_MASQUERADE,
	COUNT_DROP_SOURCE_RANGES,
	COUNT_DROP_NO_ROUTE,
	COUNT_TOO_BIG,
	COUNT_TTL_EXPIRED,
	COUNT_ENCAP,
	COUNT_DECAP,
	COUNT_SOCKET_CONNECT,
	COUNT_SOCKET_REFUSED,
	COUNT_FAILOVER,
	COUNT_ECHO,
	COUNT_FRAGMENT_QUEUED,
	COUNT_FRAGMENT_REINJECTED,
	COUNT_FRAGMENT_LOST,
	COUNT_DROP_CHANGING,
	COUNT_DROP_FLOW_LOST,
	COUNT_DROP_NO_ADDRESS,
	COUNT_DROP_FLOW_FULL,
	COUNT_DROP_REJECT_FAILED,
	COUNT_DROP_ENCAP,
	COUNT_XDP_DNAT,
	COUNT_XDP_REPLY,
	COUNT_XDP_PASS,
	COUNT_DROP_FRAGMENT,
	COUNT_DROP_MARTIAN,
	COUNT_DROP_REVERSE_PATH,
	COUNT_DROP_FOREIGN,
	COUNT_MOVED,
	COUNT_LINK_GONE,
	COUNT_OUT_OF_WINDOW,
	COUNT_DROP_MALFORMED,
	COUNT_FOREIGN_FRAME,
	COUNTERS
};

#endif
