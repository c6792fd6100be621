/*
 * The programs of `hybrid-proxy trace`, which bcc compiles. `workshop.tracing.text` puts definitions before this text (the
 * offsets of the running kernel's fields, the view) and the functions of the tracepoints behind it. Kernel memory is read
 * by these offsets alone, so that headers of another kernel do as well. What differs from one measurement to the next is
 * in maps, so that compiled programs can be kept.
 *
 * A packet is recognised by the address of its sk_buff, which stays while its headers are rewritten.
 */

enum { REQUEST, REPLY };
enum { FIN = 1, SYN = 2, RST = 4, ACK = 16 };
enum { TCP = 6, UDP = 17, SCTP = 132 };
enum { ASKED, ANSWERED, REFUSED, REPEATED };

#define STALE_NS 100000000ULL /* an sk_buff that was not seen for so long has become another packet's */

struct ends {
	u8 source[16];
	u8 destination[16];
	u16 source_port;
	u16 destination_port;
	u8 protocol;
	u8 unused[3];
};

struct place {
	u8 address[16];
	u16 port;
	u8 protocol;
	u8 unused;
};

struct known {
	u32 service;
	u32 way;
	struct place backend; /* or what was asked for, where no point has shown a backend */
	struct place client;
};

struct walk {
	u64 left;
	u64 began;
	u32 way;
	u32 service;
	u32 sign;
	u32 acknowledged; /* all resets of SYNs have the sequence number 0 */
	u32 point; /* where it was last */
	struct ends first;
};

struct header {
	struct ends ends;
	u32 sign; /* what no translation changes: the sequence number, or the length of a datagram */
	u32 acknowledged;
	u32 flags;
	u32 length;
};

/* The beginning of TCP's header, RFC 9293; UDP has its length where `sequence` is, SCTP its verification tag. */
struct transport {
	u16 source;
	u16 destination;
	u32 sequence;
	u32 acknowledged;
	u8 offset;
	u8 flags;
	u16 window;
};

struct sum {
	u64 ns;
	u64 max;
};

BPF_TABLE("lru_hash", u64, struct walk, walks, 16384);
BPF_TABLE("lru_hash", struct ends, struct known, flows, 65536);
BPF_TABLE("hash", struct place, u32, wanted, 1); /* as many as are wanted when it is made */
BPF_TABLE("hash", struct place, u32, reached, 1); /* backends */

struct settings {
	u64 client[2]; /* of packets with this source address alone */
	u32 has_client;
	u32 home; /* the network namespace that is measured */
};

BPF_ARRAY(settings, struct settings, 1);

static __always_inline u64 word(u64 at)
{
	u64 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), (void *)at);
	return value;
}

static __always_inline u32 half(u64 at)
{
	u32 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), (void *)at);
	return value;
}

static __always_inline u16 quarter(u64 at)
{
	u16 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), (void *)at);
	return value;
}

static __always_inline u32 netns_of(u64 net)
{
	return net ? half(net + NET_INUM) : 0;
}

static __always_inline int is_home(u32 netns)
{
	int zero = 0;
	struct settings *s = settings.lookup(&zero);

	return s && s->home == netns;
}

static __always_inline u32 netns_of_packet(u64 skb)
{
	u64 dev = word(skb + SKB_DEV), sk;

	if (dev)
		return netns_of(word(dev + DEV_NET));
	sk = word(skb + SKB_SK);
	return sk ? netns_of(word(sk + SOCK_NET)) : 0;
}

static __always_inline void mapped(u8 *to, const u8 *v4)
{
	__builtin_memset(to, 0, 10);
	to[10] = to[11] = 0xff;
	__builtin_memcpy(to + 12, v4, 4);
}

/* Reads a packet's first two headers; 0: it is no packet that services have. */
static __always_inline int read_header(u64 skb, int at_data, struct header *h)
{
	u64 start = at_data ? word(skb + SKB_DATA) : word(skb + SKB_HEAD) + quarter(skb + SKB_NETWORK);
	u8 ip[40] = {};
	struct transport l4 = {};
	u32 skip = 40;

	__builtin_memset(h, 0, sizeof(*h));
	if (bpf_probe_read_kernel(ip, sizeof(ip), (void *)start))
		return 0;
	if (ip[0] >> 4 == 4) {
		skip = (ip[0] & 15) * 4;
		if ((ip[6] & 0x1f) | ip[7])
			return 0;
		h->ends.protocol = ip[9];
		mapped(h->ends.source, ip + 12);
		mapped(h->ends.destination, ip + 16);
	} else if (ip[0] >> 4 == 6) {
		h->ends.protocol = ip[6];
		__builtin_memcpy(h->ends.source, ip + 8, 16);
		__builtin_memcpy(h->ends.destination, ip + 24, 16);
	} else {
		return 0;
	}
	if (h->ends.protocol != TCP && h->ends.protocol != UDP && h->ends.protocol != SCTP)
		return 0;
	if (bpf_probe_read_kernel(&l4, sizeof(l4), (void *)(start + skip)))
		return 0;
	h->ends.source_port = bpf_ntohs(l4.source);
	h->ends.destination_port = bpf_ntohs(l4.destination);
	h->length = half(skb + SKB_LEN);
	h->sign = bpf_ntohl(l4.sequence);
	h->acknowledged = bpf_ntohl(l4.acknowledged);
	if (h->ends.protocol == TCP)
		h->flags = l4.flags;
	else if (h->ends.protocol == UDP)
		h->sign >>= 16; /* the checksum behind the length changes */
	return 1;
}

static __always_inline void turned(struct ends *to, const struct ends *from)
{
	__builtin_memset(to, 0, sizeof(*to));
	__builtin_memcpy(to->source, from->destination, 16);
	__builtin_memcpy(to->destination, from->source, 16);
	to->source_port = from->destination_port;
	to->destination_port = from->source_port;
	to->protocol = from->protocol;
}

static __always_inline u32 *asked_for(const struct ends *e)
{
	struct place to = {};
	int zero = 0;
	struct settings *s = settings.lookup(&zero);
	u64 source[2];

	__builtin_memcpy(source, e->source, 16);
	if (!s || (s->has_client && (source[0] != s->client[0] || source[1] != s->client[1])))
		return 0;
	__builtin_memcpy(to.address, e->destination, 16);
	to.port = e->destination_port;
	to.protocol = e->protocol;
	return wanted.lookup(&to);
}

/* The ends of any backend's answer to this client. */
static __always_inline void of_any(struct ends *to, const u8 *client, u16 port, u8 protocol)
{
	__builtin_memset(to, 0, sizeof(*to));
	__builtin_memcpy(to->destination, client, 16);
	to->destination_port = port;
	to->protocol = protocol;
}

/* Any backend's answer to this SYN. It has the number that it acknowledges, also where a flow got another source port
 * because a direct connection has its own.
 */
static __always_inline void of_syn(struct ends *to, u32 sequence)
{
	__builtin_memset(to, 0, sizeof(*to));
	__builtin_memcpy(to->source, &sequence, sizeof(sequence));
	to->protocol = TCP;
}

/* Finds the request that a backend's packet answers, where no point has shown the backend. */
static __always_inline struct known *asked_before(const struct header *h)
{
	struct known *asked = 0;
	struct ends e;

	if (h->flags & (SYN | RST)) {
		of_syn(&e, h->acknowledged - 1);
		asked = flows.lookup(&e);
	}
	if (asked || h->flags & SYN)
		return asked;
	of_any(&e, h->ends.destination, h->ends.destination_port, h->ends.protocol);
	return flows.lookup(&e);
}

/* Tells whether the packet is the first answer to a request that bypassed the stack (bpf_redirect_peer): no point has
 * shown its backend. `of_syn` and `of_any` remember what a client asked for, in place of a backend.
 */
static __always_inline int is_answer(const struct header *h, struct known *k)
{
	struct ends e = h->ends;
	struct place from = {};
	struct known *old;

	__builtin_memcpy(from.address, e.source, 16);
	from.port = e.source_port;
	from.protocol = e.protocol;
	if (!reached.lookup(&from))
		return 0;
	old = asked_before(h);
	if (!old)
		return 0;
	__builtin_memcpy(e.source, old->client.address, 16);
	e.source_port = old->client.port;
	__builtin_memcpy(e.destination, old->backend.address, 16);
	e.destination_port = old->backend.port;
	__builtin_memset(k, 0, sizeof(*k));
	k->service = old->service;
	k->backend = from;
	flows.update(&e, k);
	e = h->ends;
	k->way = REPLY;
	flows.update(&e, k);
	return 1;
}

/* Tells whether a packet belongs to a wanted flow, whose first packet it may be. */
static __always_inline int belongs(const struct header *h, struct known *k)
{
	struct ends e = h->ends, back;
	struct known *old = flows.lookup(&e);
	u32 *service;

	if (old) {
		__builtin_memcpy(k, old, sizeof(*k));
		return 1;
	}
	service = asked_for(&e);
	if (!service)
		return is_answer(h, k);
	__builtin_memset(k, 0, sizeof(*k));
	k->service = *service;
	flows.update(&e, k);
	turned(&back, &e);
	k->way = REPLY;
	flows.update(&back, k);
	__builtin_memcpy(k->backend.address, e.destination, 16);
	k->backend.port = e.destination_port;
	__builtin_memcpy(k->client.address, e.source, 16);
	k->client.port = e.source_port;
	of_any(&back, e.source, e.source_port, e.protocol);
	flows.update(&back, k);
	if (h->flags & SYN) {
		of_syn(&back, h->sign);
		flows.update(&back, k);
	}
	__builtin_memset(k, 0, sizeof(*k));
	k->service = *service;
	return 1;
}

/* Tells whether a packet belongs to a wanted flow, also one in a pod's namespace, which begins no flow that this node has
 * not seen: another host of the same machine (a lab) may have the same addresses.
 */
static __always_inline int is_wanted(u32 netns, const struct header *h, struct known *k)
{
	struct ends e = h->ends;
	struct known *old;

	if (is_home(netns))
		return belongs(h, k);
	old = flows.lookup(&e);
	if (old)
		__builtin_memcpy(k, old, sizeof(*k));
	return old != 0;
}

/* Remembers the ends with which a request leaves: the replies have them in reverse. */
static __always_inline void learn(const struct walk *w, const struct header *h)
{
	struct known k = {};
	struct ends first = w->first, back;

	if (w->way != REQUEST)
		return;
	k.service = w->service;
	__builtin_memcpy(k.backend.address, h->ends.destination, 16);
	k.backend.port = h->ends.destination_port;
	k.backend.protocol = h->ends.protocol;
	flows.update(&first, &k);
#ifdef DROPS
	first = h->ends; /* as which a pod's own rules see it */
	flows.update(&first, &k);
#endif
	k.way = REPLY;
	turned(&back, &h->ends);
	flows.update(&back, &k);
}

static __always_inline void begin(struct walk *w, const struct header *h, const struct known *k)
{
	__builtin_memset(w, 0, sizeof(*w));
	w->way = k->way;
	w->service = k->service;
	w->sign = h->sign;
	w->acknowledged = h->acknowledged;
	w->first = h->ends;
}

static __always_inline int same_address(const u8 *a, const u8 *b)
{
	u64 one[2], other[2];

	__builtin_memcpy(one, a, 16);
	__builtin_memcpy(other, b, 16);
	return one[0] == other[0] && one[1] == other[1];
}

/* Tells whether the sk_buff of a packet that ended at a socket has another flow's packet of the same length now. A packet
 * keeps its client's port for as long as it keeps the other end.
 */
static __always_inline int is_anothers(const struct walk *w, const struct ends *e)
{
	const struct ends *f = &w->first;

	if (w->way == REQUEST)
		return same_address(e->destination, f->destination) && e->destination_port == f->destination_port &&
		       e->source_port != f->source_port;
	return same_address(e->source, f->source) && e->source_port == f->source_port &&
	       e->destination_port != f->destination_port;
}

/* Tells whether the sk_buff has another packet since it was seen last. */
static __always_inline int is_stale(const struct walk *w, const struct header *h, u64 now)
{
	return w->sign != h->sign || w->acknowledged != h->acknowledged || now - w->left > STALE_NS;
}

/* The histogram's slot: 0 to 3 for 0 to 3 ns, then four for each power of two. */
static __always_inline u32 slot_of(u64 ns)
{
	u32 octave;

	if (ns < 4)
		return ns;
	octave = bpf_log2l(ns) - 1;
	return octave * 4 + ((ns >> (octave - 2)) & 3);
}

/* Counts atomically; bcc's increment() is a load and a store, and two CPUs would lose one. */
static __always_inline void one_more(u64 *count)
{
	if (count)
		lock_xadd(count, 1);
}

#ifdef LATENCY
struct waiting {
	u64 since;
	struct ends first;
	u32 service;
	u32 led; /* a socket whose destination was a backend when it connected */
};

struct answer {
	u32 service;
	u32 what;
	struct place backend;
	u32 slot;
};

BPF_TABLE("lru_hash", struct ends, u64, pending, 65536);
BPF_TABLE("lru_hash", struct ends, struct waiting, waits, 65536);
BPF_HASH(answers, struct answer, u64, 65536);
BPF_HASH(answer_sums, struct answer, struct sum, 16384);

static __always_inline void count_answer(u32 service, u32 what, const struct ends *e, u64 ns)
{
	struct answer key = {.service = service, .what = what};
	struct sum none = {}, *s;
	u64 zero = 0;

	if (e) {
		__builtin_memcpy(key.backend.address, e->source, 16);
		key.backend.port = e->source_port;
		key.backend.protocol = e->protocol;
	}
	if (what == ANSWERED) {
		s = answer_sums.lookup_or_try_init(&key, &none);
		if (s) {
			lock_xadd(&s->ns, ns);
			if (ns > s->max)
				s->max = ns;
		}
		key.slot = slot_of(ns);
	}
	one_more(answers.lookup_or_try_init(&key, &zero));
}

/* Counts a packet that was received: a SYN, whose wait begins, or the answer that ends it. */
static __always_inline void came(struct walk *w, const struct header *h, u64 now)
{
	struct waiting *waits_for, one = {};
	struct ends e = h->ends, any;
	u64 *since;

	if (e.protocol != TCP)
		return;
	if (w->way == REQUEST && (h->flags & (SYN | ACK)) == SYN) {
		since = pending.lookup(&e);
		w->began = since ? *since : now;
		count_answer(w->service, since ? REPEATED : ASKED, 0, 0);
		if (!since)
			pending.update(&e, &now);
		of_syn(&any, h->sign);
		one.since = w->began;
		one.first = e;
		one.service = w->service;
		waits.update(&any, &one);
	} else if (w->way == REPLY && h->flags & (SYN | RST)) {
		of_syn(&any, h->acknowledged - 1);
		waits_for = waits.lookup(&e);
		if (!waits_for)
			waits_for = waits.lookup(&any);
		if (!waits_for)
			return;
		count_answer(waits_for->service, h->flags & RST ? REFUSED : ANSWERED, &e, now - waits_for->since);
		struct ends first = waits_for->first;
		pending.delete(&first);
		waits.delete(&e);
		waits.delete(&any);
	}
}

static __always_inline void went(const struct walk *w, const struct header *h)
{
	struct waiting one = {};
	struct ends back;

	if (w->way != REQUEST || !w->began)
		return;
	one.since = w->began;
	one.first = w->first;
	one.service = w->service;
	turned(&back, &h->ends);
	waits.update(&back, &one);
}

BPF_TABLE("lru_hash", u64, struct waiting, connecting, 16384);
#else
static __always_inline void came(struct walk *w, const struct header *h, u64 now)
{
}

static __always_inline void went(const struct walk *w, const struct header *h)
{
}
#endif

#ifdef FOLLOW
struct event {
	u64 ns;
	u64 skb;
	struct ends ends;
	u32 point;
	u32 netns;
	u32 began; /* with `skb`, names this packet: an sk_buff has one after another */
	u32 way;
	u32 service;
	u32 sequence;
	u32 flags;
	u32 length;
	u64 more;
	char device[16];
};

BPF_RINGBUF_OUTPUT(events, 256);
BPF_PERCPU_ARRAY(latest, u64, 1); /* the packet that this processor received last */

static __always_inline void emit(u64 skb, u32 point, u32 netns, const struct walk *w, const struct header *h, u64 now,
				 u64 more)
{
	struct event *event = events.ringbuf_reserve(sizeof(struct event));
	u64 dev = word(skb + SKB_DEV);

	if (!event)
		return;
	__builtin_memset(event, 0, sizeof(*event));
	event->ns = now;
	event->skb = skb;
	event->point = point;
	event->netns = netns;
	event->began = w->began;
	event->way = w->way;
	event->service = w->service;
	event->more = more;
	if (h) {
		event->ends = h->ends;
		event->sequence = h->sign;
		event->flags = h->flags;
		event->length = h->length;
	}
	if (dev)
		bpf_probe_read_kernel(event->device, sizeof(event->device), (void *)(dev + DEV_NAME));
	events.ringbuf_submit(event, 0);
}

/* Tells whether a socket of this network namespace sends the packet: it did not come in before. */
static __always_inline int is_sent_here(u64 skb, u32 netns)
{
	u64 sk = word(skb + SKB_SK);

	return sk && netns_of(word(sk + SOCK_NET)) == netns;
}

/* Reports points of all network namespaces; `rows.ours` selects those of this node's packets. */
static __always_inline void step(u64 skb, const u32 point, const u32 kind)
{
	u64 now = bpf_ktime_get_ns();
	struct walk fresh = {}, *w = walks.lookup(&skb);
	u32 netns = netns_of_packet(skb);
	struct header h;
	struct known k;
	int zero = 0;

	if (!read_header(skb, kind & POINT_AT_DATA, &h)) {
		walks.delete(&skb);
		return;
	}
	if (w && (is_stale(w, &h, now) || is_anothers(w, &h.ends)))
		w = 0;
	if (w && point == POINT_TRANSMIT && w->point == POINT_RECEIVE && is_sent_here(skb, netns))
		w = 0;
	if (w) {
		learn(w, &h);
		w->left = now;
	} else {
		walks.delete(&skb); /* the memory is another packet's now */
		if (!belongs(&h, &k))
			return;
		begin(&fresh, &h, &k);
		fresh.left = fresh.began = now;
		fresh.point = point;
		walks.update(&skb, &fresh);
		w = &fresh;
	}
	w->point = point;
	emit(skb, point, netns, w, &h, now, 0);
	if (point == POINT_RECEIVE)
		latest.update(&zero, &skb);
	else if (point == POINT_SOCKET)
		walks.delete(&skb);
}

/* A packet ends: dropped, or used by a socket if it was received before (one that was sent has only left). TCP frees a
 * SYN at once, but a datagram has been read by then.
 */

static __always_inline void freed(u64 skb, u64 location, u32 reason)
{
	u64 now = bpf_ktime_get_ns();
	struct walk *w = walks.lookup(&skb);
	struct header h;

	if (!w)
		return;
	if ((location || w->point == POINT_RECEIVE) && read_header(skb, 0, &h) && !is_stale(w, &h, now))
		emit(skb, location ? POINT_DROP : h.ends.protocol == TCP ? POINT_SOCKET : POINT_READ,
		     netns_of_packet(skb), w, &h, now, (u64)reason << 48 | (location & 0xffffffffffffULL));
	walks.delete(&skb);
}
#else
/* Follows packets in this network namespace, and to the sockets that receive them from here. */
static __always_inline void step(u64 skb, const u32 point, const u32 kind)
{
	u64 now = bpf_ktime_get_ns();
	struct walk fresh, *w;
	struct header h;
	struct known k;

	if (!(kind & POINT_ANYWHERE) && !is_home(netns_of_packet(skb)))
		return;
	w = walks.lookup(&skb);
	if (kind & POINT_ENDS) {
		if (read_header(skb, 0, &h)) {
			if (w && !is_stale(w, &h, now)) {
				learn(w, &h);
				went(w, &h);
			} else if (h.flags & RST && belongs(&h, &k)) { /* this node's own: it never came */
				begin(&fresh, &h, &k);
				came(&fresh, &h, now);
			}
		}
		walks.delete(&skb);
		return;
	}
	if (!read_header(skb, kind & POINT_AT_DATA, &h))
		return;
	if (w && !is_stale(w, &h, now) && !is_anothers(w, &h.ends)) {
		w->left = now;
		return;
	}
	walks.delete(&skb);
	if (!belongs(&h, &k))
		return;
	begin(&fresh, &h, &k);
	came(&fresh, &h, now);
	fresh.left = now;
	walks.update(&skb, &fresh);
}
#endif

#if defined(DROPS) || defined(RETRANSMITS)
struct drop {
	u32 service;
	u32 way;
	u32 reason;
	u32 netns; /* `rows.drop_rows` selects this node and its pods */
	u64 location;
	struct place to;
};

BPF_HASH(drops, struct drop, u64, 8192);

/* Counts a packet that is dropped here or in a pod. One that bypassed the stack shows its backend nowhere else. */
static __always_inline void freed(u64 skb, u64 location, u32 reason)
{
	u64 now = bpf_ktime_get_ns(), zero = 0;
	struct walk *w = walks.lookup(&skb);
	struct drop key = {.reason = reason, .location = location, .netns = netns_of_packet(skb)};
	struct header h;
	struct known k;
	u32 *service;

	if (!location)
		return;
	if (!read_header(skb, 0, &h)) {
		walks.delete(&skb);
		return;
	}
	if (w && w->sign == h.sign && (is_home(key.netns) || !(is_stale(w, &h, now) || is_anothers(w, &h.ends)))) {
		learn(w, &h);
		key.service = w->service;
		key.way = w->way;
	} else if (is_wanted(key.netns, &h, &k)) {
		key.service = k.service;
		key.way = k.way;
	} else { /* a client's own rules dropped it before it came here */
		service = asked_for(&h.ends);
		if (!service)
			return;
		key.service = *service;
	}
	__builtin_memcpy(key.to.address, h.ends.destination, 16);
	key.to.port = key.way == REQUEST ? h.ends.destination_port : 0; /* a client's port would be a row for each */
	key.to.protocol = h.ends.protocol;
	one_more(drops.lookup_or_try_init(&key, &zero));
	walks.delete(&skb);
}
#endif

#ifndef DROPS
static __always_inline void ends_of_socket(u64 sk, struct ends *e)
{
	u8 v4[4];

	__builtin_memset(e, 0, sizeof(*e));
	e->protocol = TCP;
	e->source_port = quarter(sk + SOCK_NUM);
	e->destination_port = bpf_ntohs(quarter(sk + SOCK_DPORT));
	if (quarter(sk + SOCK_FAMILY) == 2) {
		bpf_probe_read_kernel(v4, 4, (void *)(sk + SOCK_DADDR));
		mapped(e->destination, v4);
		bpf_probe_read_kernel(v4, 4, (void *)(sk + SOCK_SADDR));
		mapped(e->source, v4);
	} else {
		bpf_probe_read_kernel(e->destination, 16, (void *)(sk + SOCK_DADDR6));
		bpf_probe_read_kernel(e->source, 16, (void *)(sk + SOCK_SADDR6));
	}
}
#endif

#ifdef RETRANSMITS
struct again {
	u32 service;
	u32 way;
	struct place backend;
};

BPF_HASH(repeats, struct again, u64, 16384);

static __always_inline void repeated(u64 sk)
{
	struct header h = {};
	struct known k = {};
	struct again key = {};
	u64 zero = 0;

	ends_of_socket(sk, &h.ends);
	if (!is_wanted(netns_of(word(sk + SOCK_NET)), &h, &k))
		return;
	key.service = k.service;
	key.way = k.way;
	key.backend = k.backend;
	one_more(repeats.lookup_or_try_init(&key, &zero));
}
#endif

enum { ESTABLISHED = 1, SYN_SENT = 2, SYN_RECV = 3, OF_SOCKET = 255 };

#ifdef FOLLOW
/* The packet that this processor has received last ended a handshake: nothing else shows where it went. */
static __always_inline void changed(u64 sk, u32 before, u32 after)
{
	int zero = 0;
	u64 *skb = latest.lookup(&zero), at, now = bpf_ktime_get_ns();
	struct walk *w;
	struct header h;
	struct ends e, came;

	if ((before != SYN_SENT && before != SYN_RECV) || !skb)
		return;
	at = *skb;
	w = walks.lookup(&at);
	if (!w || !read_header(at, 0, &h) || is_stale(w, &h, now))
		return;
	ends_of_socket(sk, &e);
	turned(&came, &e);
	if (e.source_port && h.ends.destination_port != e.source_port) /* a reset has taken the port away */
		return;
	if (h.ends.source_port != came.source_port || !same_address(h.ends.source, came.source) ||
	    !same_address(h.ends.destination, came.destination))
		return;
	emit(at, POINT_SOCKET, netns_of(word(sk + SOCK_NET)), w, &h, now, 0);
	walks.delete(&at);
}
#endif

#ifdef LATENCY

/* A socket of the node itself: its connect() shows which service it asked for; no packet does. */
static __always_inline void changed(u64 sk, u32 before, u32 after)
{
	u64 now = bpf_ktime_get_ns();
	struct waiting one = {}, *w;
	struct ends end = {};
	struct place to = {};
	u32 *service;

	if (after == SYN_SENT && is_home(netns_of(word(sk + SOCK_NET)))) {
		ends_of_socket(sk, &one.first);
		service = asked_for(&one.first);
		if (!service) {
			__builtin_memcpy(to.address, one.first.destination, 16);
			to.port = one.first.destination_port;
			to.protocol = TCP;
			service = reached.lookup(&to);
			if (!service)
				return;
			one.led = 1;
		}
		one.since = now;
		one.service = *service;
		connecting.update(&sk, &one);
		count_answer(one.service, ASKED, 0, 0);
	} else if (before == SYN_SENT) {
		w = connecting.lookup(&sk);
		if (!w)
			return;
		if (w->led) {
			__builtin_memcpy(end.source, w->first.destination, 16);
			end.source_port = w->first.destination_port;
		}
		end.protocol = OF_SOCKET;
		count_answer(w->service, after == ESTABLISHED ? ANSWERED : REFUSED, &end, now - w->since);
		connecting.delete(&sk);
	}
}
#endif
