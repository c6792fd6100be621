/* Everything that C and Python share: rows of maps, enums and limits.
 *
 * It is written once. The build preprocesses this file with ABI_FOR_PYTHON, Python reads the result through cffi, and a
 * test compares sizes and offsets with BTF. There are enums instead of macros, because cffi keeps enums.
 *
 * Addresses and ports are in network byte order. An IPv4 address is the first of four words, the others are 0. Times
 * are in jiffies, cut to 32 bits, unless the field says otherwise.
 *
 * Names, types and offsets of all rows that outlive a process, and the numbers of their flags, are recorded next to the
 * pins (layouts.py). An agent of another version carries the rows over field by field, by name (convert.py). An
 * anonymous union has the name of its first member there. A field that gets another meaning raises ABI_VERSION.
 */
#ifndef HYBRID_PROXY_ABI_H
#define HYBRID_PROXY_ABI_H

#ifndef ABI_FOR_PYTHON
#include <linux/types.h>
#endif

enum abi_limits {
	ABI_VERSION = 3,	/* raise it when a field gets another meaning, and teach convert.py what to do */
	PREFILTER_BITS = 20,	/* size of each bitmap: 2^20 bits, 128 KiB */
	RANGE_OFFSET_BITS = 28, /* a slot range in one word: offset | count << 28 | epoch << 46 */
	RANGE_COUNT_BITS = 18,
	RANGE_EPOCH_BITS = 18,
	BACKEND_SETS = 2,     /* distinct ones of one service port: the cluster's backends, this node's */
	SERVICE_CIDRS = 4,    /* of each family in `node`; more are ranges of service 0 */
	SOCKET_PEERS = 4,     /* service addresses that one unconnected UDP socket is remembered to talk to */
	TIMEWAIT_BITS = 15,   /* 2^15 buckets of reply tuples that are remembered after their connection ended */
	TIMEWAIT_ENTRIES = 8, /* tuples in a bucket, which is a cache line */
	SWEEP_KEYS = 16,      /* flows that one call of the sweep program checks again */
	TRAFFIC_GROUP = 8,    /* backends whose rows in map `traffic` lie together, for one CPU after the other */
};

/* A frontend's value is one u64 that never changes: service | flags << 32 | tag << 40. The tag is a hash of the key.
 * The kernel may reuse an element for another key while a program reads it; then the tag does not match.
 */
enum frontend_flags {
	FRONTEND_INTERNAL_SET = 1 << 0, /* pods and this node get the service's backend set 1 instead of 0 */
	FRONTEND_EXTERNAL_SET = 1 << 1, /* clients beyond the cluster do */
	FRONTEND_ADDRESS = 1 << 2, /* of port 0, protocol 0: the address is a service's, other ports are rejected */
	FRONTEND_MASQUERADE_POD = 1 << 3, /* these clients' source address is replaced by the node's */
	FRONTEND_MASQUERADE_NODE = 1 << 4,
	FRONTEND_MASQUERADE_EXTERNAL = 1 << 5,
	FRONTEND_SOURCE_RANGES = 1 << 6, /* clients must be in the service's ranges (maps `source_ranges4`, `6`) */
	FRONTEND_NODE_PORTS = 1 << 7,	 /* of an address: node ports are served here, as frontends of address 0;
					  * without FRONTEND_ADDRESS to sockets of the node alone: a loopback address */
};

/* Bits of what may be a service's, by hash; a false hit costs a lookup. */
struct bitmaps {
	__u64 service_addresses[1 << PREFILTER_BITS >> 6]; /* of addresses */
	__u64 backend_sockets[1 << PREFILTER_BITS >> 6];   /* of addresses, ports and protocols */
	__u64 node_ports[3 << 16 >> 6];			   /* not hashed: of TCP, UDP and SCTP, 2^16 for each */
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
	SERVICE_DROP_SET0 = 1 << 0, /* an empty set 0 drops; otherwise it rejects */
	SERVICE_DROP_SET1 = 1 << 1,
	SERVICE_BY_TUPLE = 1 << 4, /* how the slot is chosen; none of these: at random */
	SERVICE_BY_CLIENT = 1 << 5,
	SERVICE_ROUND_ROBIN = 1 << 6,
	SERVICE_FEWEST = 1 << 7, /* the backend with the fewest open flows, among several random slots */
};

struct service {
	__u64 sets[2]; /* the slot range of each backend set, replaced by one store */
	__u32 flags;
	__u32 affinity; /* idle time in jiffies after which a client may move, 0: no affinity */
	__u64 turn;	/* counts connections where SERVICE_ROUND_ROBIN */
};

/* One slot of a slot range. Both words carry the service's id. If the slot range was given to another service while a
 * program reads it, the program notices. The address of an IPv4 backend is here, which saves a cache miss; that of an
 * IPv6 backend is in its row.
 */
struct slot {
	__u64 backend;	/* id | service << 32 */
	__u64 endpoint; /* address | port << 32 | (service & 0xffff) << 48 */
};

enum backend_flags {
	BACKEND_SERVING = 1 << 0, /* established flows may stay */
	BACKEND_SET0 = 1 << 1,	  /* a member of the service's set 0 */
	BACKEND_SET1 = 1 << 2,
	BACKEND_EJECTED = 1 << 3,      /* removed from its sets, because it keeps failing */
	BACKEND_PROBE_FAILED = 1 << 4, /* in addition to BACKEND_EJECTED: the agent's probes failed */
	BACKEND_LOCAL = 1 << 5,	       /* it runs on this node */
	BACKEND_COUNTED = 1 << 6,      /* its open flows are counted (map `loads`) */
};

struct backend {
	__u32 address[4];
	__u16 port;
	__u16 flags;
	__u32 service; /* ids belong to one service, so that a stale id proves itself wrong */
	/* family (4 or 6) | protocol << 8; 0: nobody's row */
	__u32 kind;
	__u32 failures; /* connections one after the other that it did not answer, or reset */
};

/* The number of a backend's open flows is opened - closed + correction (map `loads`). Programs alone write the first
 * two, user space the others.
 */
struct load {
	__u32 opened;
	__u32 closed;
	__u32 correction; /* may be negative */
	__u32 weight;
};

/* Counts how connections to a backend failed (map `failures`). A count starts again from 0 after ten minutes without
 * such a failure. Times are nanoseconds of CLOCK_MONOTONIC; 0: never.
 */
struct failures {
	__u32 address[4]; /* the backend's address, because ids of backends are reused */
	__u16 port;
	__u16 pad;
	__u32 service;
	__u32 refused;	  /* SYNs that it answered with a reset */
	__u32 unanswered; /* SYNs that it did not answer */
	__u64 refused_at;
	__u64 unanswered_at;
};

/* Sums over a backend's flows on one CPU (map `traffic`). Bytes are those of IP packets. A packet that stands for
 * several segments (GSO) counts all of them, and their headers once.
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

/* How long a service's clients waited for the first packet of a backend (map `first_packets`): a count for each step,
 * which wraps. Step 4n + m begins at (4 + m) << (n - 1) ticks of 1.024 us, and steps 0 to 3 at so many ticks.
 */
struct first_packets {
	__u32 counts[96];
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
	FLOW_REPLY = 1 << 0,	   /* the backend's direction */
	FLOW_HAIRPIN = 1 << 1,	   /* client and backend are one pod: back out of the interface it came from */
	FLOW_DIRECT = 1 << 2,	   /* to a backend directly: keeps a reply tuple apart from that of a service's flow */
	FLOW_FIN = 1 << 3,	   /* this direction has ended, and the other one has sent a packet since then */
	FLOW_FIN_ACKED = 1 << 4,   /* the other end has acknowledged it; a pair of two such halves is deleted */
	FLOW_RESET = 1 << 5,	   /* a reset ended the connection */
	FLOW_COLLISION = 1 << 6,   /* the reply tuple turned out to be a direct connection's: choose another port */
	FLOW_PEER_FIN = 1 << 7,	   /* the other direction has ended: acknowledgements are checked */
	FLOW_REPLIED = 1 << 8,	   /* the backend accepted: the client's next segment establishes the pair */
	FLOW_ESTABLISHED = 1 << 9, /* both directions have spoken */
	FLOW_MASQUERADE = 1 << 10, /* the source is the node's: the packet goes on by our own route lookup */
	FLOW_NODE = 1 << 11,	   /* the client is this node */
	FLOW_DSR = 1 << 12,	   /* its packets are encapsulated for the backend's node; answers do not come here */
	FLOW_CHALLENGED = 1 << 13, /* a SYN asks the backend whether the connection still lives, and has no reply yet */
	FLOW_DOUBTED = 1 << 14, /* reset with a number ahead of what was acknowledged: over unless an end continues */
	FLOW_OTHERS = 1 << 15,	/* another mode or proxy translates it: only the key and `seen` have a meaning */
};

/* Where packets of a flow arrive: the index of a pod's interface, or one of these. */
enum origin {
	ORIGIN_UPLINKS = 0,	     /* any uplink: all of them are one origin */
	ORIGIN_NODE = 0x7ffffffd,    /* this node itself */
	ORIGIN_UNKNOWN = 0x7ffffffe, /* nothing came yet */
	/* What a route leads to may also be: */
	ORIGIN_ELSEWHERE = 0x7ffffff0, /* an interface without programs, a bridge say */
	ORIGIN_NONE = 0x7ffffff1,      /* no route */
};

/* Map `links` has the index of each interface with programs, and once more with one of these bits. */
enum link_kind {
	LINK_POD_BIT = 30,
	LINK_OUTER_BIT = 31, /* an uplink without pods of this node behind it; a bridge, for example, has them */
};

/* One direction of a flow: what packets with the key's tuple are translated to, and the direction's state. The key of
 * the other direction is the translated tuple reversed.
 */
struct flow {
	__u32 saddr[4];
	__u32 daddr[4];
	__u16 sport;
	__u16 dport;
	__u16 flags;	 /* enum flow_flags */
	__u8 challenges; /* while FLOW_CHALLENGED: SYNs since the other direction sent its last packet */
	__u8 past_stack; /* 1: the flow began by bypassing the stack, which has not judged it */
	__u32 service;
	__u32 backend;
	__u32 seen;    /* the last packet of either direction, to a second */
	__u32 tag;     /* hash of the key, by which a program recognizes a reused entry: see flow.h */
	__u32 ifindex; /* established packets are handed to this pod's interface; 0: they go through the stack */
	union {
		/* When the flow began: jiffies, of TCP ticks of ktime(). In the backend's direction, when the client's
		 * first SYN came, which may have been to another backend.
		 */
		__u32 started;
		__u32 fin_end; /* of TCP once this direction has sent a FIN: the number that acknowledges it */
	};
	__u8 mac[12]; /* destination and source of frames to that pod */
	__u32 origin; /* enum origin */
	union {
		/* Of TCP: the next sequence number of the other direction, as this one acknowledged it last, 0:
		 * unknown. Before this direction's first segment, what that must acknowledge.
		 */
		__u32 ack;
		__u32 client_seq; /* of FLOW_DSR: the client's last sequence number */
		/* Of datagrams, until the backend's first one: when the client's came, in ktime(), if that is timed. */
		__u32 asked_at;
	};
	union {
		/* Of datagrams until the flow is established: when the stack last delivered one, in jiffies, 0: never
		 * (fast_path.h).
		 */
		__u32 bypassed_at;
		__u32 challenged_at; /* of established TCP: when the last SYN challenged the backend, in jiffies */
	};
};

/* Reverse-path checks for packets received on an interface (map `interfaces`). No entry means no check. */
enum interface_flags {
	INTERFACE_STRICT4 = 1 << 0, /* the route back to the source must lead out of this interface */
	INTERFACE_LOOSE4 = 1 << 1,  /* there must be a route back to the source */
	INTERFACE_STRICT6 = 1 << 2,
	INTERFACE_IN_VRF = 1 << 3, /* its packets are routed by a table of their own */
	INTERFACE_SHARED =
		1 << 4, /* it also receives frames for other hosts: it is a bridge's port, or below a macvlan */
	INTERFACE_BRIDGE_SHIFT = 8, /* from this bit on: index of the bridge that it is a port of, 0: none */
};

/* Destinations of routes that have several next hops, by longest prefix; `bits` counts from `family` on. */
struct equal_route {
	__u32 bits;
	__u32 family; /* 4 or 6 */
	__u32 address[4];
};

/* Two next hops of such a route: a packet that comes in at `ingress` passes a strict check of its source where the
 * answer would take the hop at `ifindex`.
 */
struct equal_path {
	__u32 route; /* number that map `equal_routes` has */
	__u32 ingress;
	__u32 ifindex;
	__u32 gateway[4]; /* zeros: the interface alone */
};

/* An address of this node, or the broadcast address of one of its networks. */
struct own_address {
	__u32 address[4];
	__u32 family; /* 4 or 6 */
};

/* Each entry is hash of the tuple << 40 | hash of its owner << 16 | time in ticks of 256 jiffies. */
struct timewait_bucket {
	__u64 entries[8];
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
	__u32 pods_by_link; /* pods are recognized by their interface (map `pod_links`), not by these addresses: */
	__u32 pod4_known;
	__u32 pod6_known;
	__u32 pod4;
	__u32 pod4_mask;
	__u32 pod6[4];
	__u32 pod6_mask[4];
	__u32 direct_flows;	 /* non-zero once a direct flow had to change its port */
	__u32 overflowed;	 /* non-zero once a TCP flow had to begin in `half_open` */
	__u32 trace;		 /* emit an event for each packet of these services from or to this client: */
	__u32 trace_services[4]; /* zeros: any */
	__u32 trace_client[4];	 /* zeros: any */
	__s32 half_open;	 /* pairs in `flows` that are not established; user space corrects the count */
	__u32 draining;		 /* non-zero while no new flow may begin (there are no frontends then) */
	__u32 fast_path;	 /* enum fast_path */
};

/* An interface's own addresses, zeros where it has none. Masqueraded packets that leave by it get them as their source.
 */
struct interface_address {
	__u32 address4;
	__u32 address6[4];
};

/* Which packets between pods of this node bypass the stack. */
enum fast_path {
	FAST_PATH_OFF,
	FAST_PATH_ESTABLISHED, /* those of flows that the stack has let open, and datagrams that it has let pass */
	FAST_PATH_ALWAYS,      /* all that can be delivered, the first of a flow included */
	FAST_PATH_DIRECT,      /* those of no flow, too: the stack has nothing that would not see them */
};

/* Settings that are constants of the loaded programs (.rodata). One struct, because the compiler does not keep the
 * order of single variables there.
 */
struct settings {
	__u32 hz;		  /* jiffies per second */
	__u32 reject_burst;	  /* rejected packets that are answered, per CPU and second */
	__u32 can_set_errno;	  /* bpf_set_retval exists */
	__s32 max_half_open;	  /* pairs that may be half-open in `flows`; more begin in `half_open` */
	__u32 udp_timeout;	  /* jiffies after which another flow may take the reply tuple of datagrams, */
	__u32 udp_timeout_stream; /* and of those that both sides have sent for a while */
	__u32 port_first; /* source ports that programs give, to masqueraded clients and to flows that collide */
	__u32 port_count;
	__u32 answer_ping;   /* echo requests to ClusterIPs are answered, not rejected */
	__u32 can_check_mtu; /* bpf_check_mtu exists */
	__u32 dsr;	     /* direct server return: external clients are answered by the backend's node */
	__u32 traffic_cpus;  /* CPUs that map `traffic` has rows for, 0: traffic is not counted */
	__u32 event_burst;   /* events per CPU and second, 0: none */
};

/* The programs that all tc hooks call (map `datapaths`): one for each family. */
enum datapath {
	DATAPATH4,
	DATAPATH6,
	DATAPATHS,
};

/* Which datapath serves while flows are carried over from maps of another layout (carry.bpf.c). */
enum carry_state {
	CARRY_ALL_FORMER,     /* the former datapath serves all */
	CARRY_NEW_FLOWS_OURS, /* the former one serves the flows that it knows, and ours the rest */
	CARRY_ALL_OURS,	      /* ours serves all */
};

/* Offsets, in bytes, of the fields in keys of the former flow tables. */
struct flow_key_places {
	__u32 saddr;
	__u32 daddr;
	__u32 sport;
	__u32 dport;
	__u32 protocol;
};

struct carrying {
	__u32 state;
	struct flow_key_places places4;
	struct flow_key_places places6;
	__u32 pad;
};

/* Before Linux 5.14 user space cannot read its namespace's cookie (map `host_netns`, one element). When the socket with
 * cookie `teaching_socket` connects, a program writes down its namespace.
 */
struct host_netns {
	__u64 teaching_socket;
	__u64 netns;
};

/* How a connected socket came to its source address. */
enum connected {
	CONNECTED_BOUND = 1,
	CONNECTED_FREE, /* the kernel chose one on the way to the backend */
};

/* The service addresses that a socket talks to. */
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
	union {
		__u32 sent;	/* datagrams to services */
		__u32 asked_at; /* of TCP whose SYN was repeated: when the first was sent, in ktime() */
	};
	__u32 connected; /* peers[0] is the peer of a connected socket: enum connected */
};

/* The kind of client: it decides the backend set, and whether the address is replaced. */
enum client {
	CLIENT_POD,
	CLIENT_NODE,
	CLIENT_EXTERNAL,
};

enum verdict {
	VERDICT_UNTOUCHED = 0,
	VERDICT_DNAT = 1,
	VERDICT_REJECT = 2,
	VERDICT_DROP = 3,
};

/* The decisions that the explaining programs record (explaining.h), each with two numbers. */
enum note_kind {
	NOTE_NONE,
	NOTE_COUNT,	     /* an event that is counted: enum counter */
	NOTE_MAY_BE_SERVICE, /* the prefilters do not rule the destination out */
	NOTE_FLOW,	     /* a flow is known: its flags, jiffies since its last packet */
	NOTE_FLOW_OWNER,     /* its service, its backend */
	NOTE_RENEWAL,	     /* the known flow is not followed: a new one takes its place */
	NOTE_FRONTEND,	     /* service, flags of the frontend at the address and port */
	NOTE_NODE_PORT,	     /* the same, of a node port at an address that serves these */
	NOTE_CLOSED,	     /* the address is a service's, the port is not */
	NOTE_CLIENT,	     /* enum client */
	NOTE_SOURCES,	     /* 1: the client is in the service's source ranges */
	NOTE_ROUTE,	     /* the backend set's number, 1: masquerade */
	NOTE_AFFINITY,	     /* the idle time in jiffies, the backend that is remembered, 0: none */
	NOTE_SLOT,	     /* index of the slot, its backend */
	NOTE_EMPTY,	     /* the backend set's number, 1: it drops */
	NOTE_PATH_BACK,	     /* index of the interface that leads back to the source, 0: none; 1: it must be this one */
	NOTE_HOP,	     /* index of the interface that leads to the backend, BPF_FIB_LKUP_RET_* */
	NOTE_LOAD,	     /* a backend that was compared, its open flows */
	NOTE_FOREIGN,	     /* where packets of the flow come in (enum origin), where the route to the sender leads */
	NOTES = 32
};

struct note {
	__u32 what;
	__u32 a;
	__u32 b;
};

/* The decisions about one packet (map `explanation` of the explaining programs, one element). */
struct explanation {
	__u32 count;
	__u32 copied;
	struct note notes[32];
};

/* Where a program runs. */
enum hook {
	HOOK_POD_INGRESS,
	HOOK_UPLINK_INGRESS,
	HOOK_UPLINK_EGRESS,
	HOOK_POD_EGRESS,
	HOOK_SOCKET,
	HOOK_XDP,
};

/* An event of a packet (ring buffer `events`): it was dropped or rejected, a backend failed, or it is traced. */
struct event {
	__u64 time; /* nanoseconds, CLOCK_MONOTONIC */
	__u32 service;
	__u32 backend;
	__u32 ifindex;
	__u8 reason; /* enum counter */
	__u8 hook;
	__u8 family;	/* 4 or 6 */
	__u8 traced;	/* emitted because of `trace` in map `node` */
	__u32 saddr[4]; /* of the packet as it came; of COUNT_BACKEND_REFUSED, as it goes on */
	__u32 daddr[4];
	__u16 sport;
	__u16 dport;
	__u8 protocol;
	__u8 tcp_flags;
	__u16 pad;
};

/* Flows that user space names: the payload of the packet that it runs `sweep` and `leave` with. */
struct sweep {
	__u32 count;
	__u32 family;
	__u32 idle[16]; /* of `sweep`: delete when not seen for this many jiffies */
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
	COUNT_REJECT_NO_PORT,
	COUNT_SOCKET_REFUSED_NO_PORT,
	COUNT_BACKEND_REFUSED,
	COUNT_BACKEND_UNANSWERED,
	COUNT_SOCKET_LOCALHOST,
	COUNT_SOCKET_LOCALHOST_BOUND,
	COUNT_DROP_EXPIRED,
	COUNTERS
};

#endif
