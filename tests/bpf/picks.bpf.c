/* Picks backends of random services as fast as it can, and looks whether each
 * is the service's own.
 *
 * Service n is 10.200.0.n, port 80; its backends are 10.0.n.x. So a foreign
 * backend is seen whatever the tags say.
 */
#include "config.h"

#ifdef DAWDLE
/* Sometimes wait between reading a word of slots and the slot, long enough for a
 * writer to reuse the slot range. */
static long nothing(__u32 index, void *context) { return 0; }

static __noinline int dawdle(void) {
  if (!(bpf_get_prandom_u32() & 63))
    bpf_loop(DAWDLE, nothing, NULL, 0);
  return 0;
}

#define bpf_map_lookup_elem(MAP, KEY)                                          \
  ({                                                                           \
    if (!__builtin_strcmp(#MAP, "&slots"))                                     \
      dawdle();                                                                \
    bpf_map_lookup_elem(MAP, KEY);                                             \
  })
#endif

#include "pick.h"

#define PICKS 256
#ifndef SERVICES
#define SERVICES 64
#endif

struct tally {
  __u64 picks;
  __u64 foreign; /* a backend of another service */
  __u64 dropped; /* not decided: the slot range changed twice meanwhile */
  __u64 refused;
};

struct {
  __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
  __uint(max_entries, 1);
  __type(key, __u32);
  __type(value, struct tally);
} tally SEC(".maps");

static __noinline int pick_once(struct tally *t) {
  __u32 number = bpf_get_prandom_u32() & (SERVICES - 1);
  struct tuple asked = {.dport = bpf_htons(80), .protocol = IPPROTO_TCP};
  struct choice c = {};

  if (!t)
    return 0;
  asked.daddr[0] = bpf_htonl(10u << 24 | 200u << 16 | number);
  choose_backend(&c, CLIENT_POD, &asked, false, false);
  t->picks++;
  if (c.verdict == VERDICT_DNAT)
    t->foreign += (bpf_ntohl(c.address[0]) >> 8 & 0xffff) != number;
  else if (c.verdict == VERDICT_DROP)
    t->dropped++;
  else
    t->refused++;
  return 0;
}

SEC("tc")
int picks(struct __sk_buff *skb) {
  __u32 key = 0;
  struct tally *t = bpf_map_lookup_elem(&tally, &key);

  if (!t)
    return -1;
  for (int i = 0; i < PICKS; i++)
    pick_once(t);
  return 0;
}

char LICENSE[] SEC("license") = "GPL";
