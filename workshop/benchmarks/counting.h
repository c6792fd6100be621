/* Before the verbs: they are compiled as ever, but each helper, function and
 * tail call counts itself first. */
#ifndef HYBRID_PROXY_COUNTING_H
#define HYBRID_PROXY_COUNTING_H

#include "../../bpf/maps.h"

/* What a packet made the programs do; packet_kinds.py has the same order. */
enum tally {
  TALLY_ARRAY,    /* elements of arrays that were looked at: the kernel makes
                     instructions of such a lookup */
  TALLY_LOOKUP,   /* keys that were looked for in hash tables and tries */
  TALLY_WRITE,    /* elements written or deleted */
  TALLY_HELPER,   /* other helpers that were called */
  TALLY_FUNCTION, /* global functions that were called */
  TALLY_TAIL,     /* tail calls */
  TALLIES,
};

struct tallies {
  __u64 of[TALLIES];
};

ARRAY_MAP(tallies, struct tallies, 1);

INLINE void tally(enum tally what) {
  __u32 key = 0;
  struct tallies *all = bpf_map_lookup_elem(&tallies, &key);

  if (all)
    all->of[what] += 1;
}

#define TALLY(what, ...)                                                       \
  ({                                                                           \
    tally(what);                                                               \
    __VA_ARGS__;                                                               \
  })

#define TYPE_OF(map) (sizeof(*(map)->type) / sizeof(int))
#define IS_ARRAY(map)                                                          \
  (TYPE_OF(map) == BPF_MAP_TYPE_ARRAY ||                                       \
   TYPE_OF(map) == BPF_MAP_TYPE_PERCPU_ARRAY)

/* A macro is not expanded again in its own expansion. bpf_jiffies64 is left
 * out: the kernel makes one load of it. */
#define bpf_map_lookup_elem(map, key)                                          \
  TALLY(IS_ARRAY(map) ? TALLY_ARRAY : TALLY_LOOKUP,                            \
        bpf_map_lookup_elem(map, key))
#define bpf_map_update_elem(...)                                               \
  TALLY(TALLY_WRITE, bpf_map_update_elem(__VA_ARGS__))
#define bpf_map_delete_elem(...)                                               \
  TALLY(TALLY_WRITE, bpf_map_delete_elem(__VA_ARGS__))
#define bpf_check_mtu(...) TALLY(TALLY_HELPER, bpf_check_mtu(__VA_ARGS__))
#define bpf_clone_redirect(...)                                                \
  TALLY(TALLY_HELPER, bpf_clone_redirect(__VA_ARGS__))
#define bpf_csum_diff(...) TALLY(TALLY_HELPER, bpf_csum_diff(__VA_ARGS__))
#define bpf_fib_lookup(...) TALLY(TALLY_HELPER, bpf_fib_lookup(__VA_ARGS__))
#define bpf_get_prandom_u32(...)                                               \
  TALLY(TALLY_HELPER, bpf_get_prandom_u32(__VA_ARGS__))
#define bpf_get_smp_processor_id(...)                                          \
  TALLY(TALLY_HELPER, bpf_get_smp_processor_id(__VA_ARGS__))
#define bpf_ktime_get_ns(...) TALLY(TALLY_HELPER, bpf_ktime_get_ns(__VA_ARGS__))
#define bpf_l3_csum_replace(...)                                               \
  TALLY(TALLY_HELPER, bpf_l3_csum_replace(__VA_ARGS__))
#define bpf_l4_csum_replace(...)                                               \
  TALLY(TALLY_HELPER, bpf_l4_csum_replace(__VA_ARGS__))
#define bpf_redirect(...) TALLY(TALLY_HELPER, bpf_redirect(__VA_ARGS__))
#define bpf_redirect_neigh(...)                                                \
  TALLY(TALLY_HELPER, bpf_redirect_neigh(__VA_ARGS__))
#define bpf_redirect_peer(...)                                                 \
  TALLY(TALLY_HELPER, bpf_redirect_peer(__VA_ARGS__))
#define bpf_ringbuf_reserve(...)                                               \
  TALLY(TALLY_HELPER, bpf_ringbuf_reserve(__VA_ARGS__))
#define bpf_ringbuf_submit(...)                                                \
  TALLY(TALLY_HELPER, bpf_ringbuf_submit(__VA_ARGS__))
#define bpf_sk_fullsock(...) TALLY(TALLY_HELPER, bpf_sk_fullsock(__VA_ARGS__))
#define bpf_sk_lookup_udp(...)                                                 \
  TALLY(TALLY_HELPER, bpf_sk_lookup_udp(__VA_ARGS__))
#define bpf_sk_release(...) TALLY(TALLY_HELPER, bpf_sk_release(__VA_ARGS__))
#define bpf_sk_storage_get(...)                                                \
  TALLY(TALLY_HELPER, bpf_sk_storage_get(__VA_ARGS__))
#define bpf_skc_lookup_tcp(...)                                                \
  TALLY(TALLY_HELPER, bpf_skc_lookup_tcp(__VA_ARGS__))
#define bpf_skb_vlan_pop(...) TALLY(TALLY_HELPER, bpf_skb_vlan_pop(__VA_ARGS__))
#define bpf_skb_adjust_room(...)                                               \
  TALLY(TALLY_HELPER, bpf_skb_adjust_room(__VA_ARGS__))
#define bpf_skb_change_head(...)                                               \
  TALLY(TALLY_HELPER, bpf_skb_change_head(__VA_ARGS__))
#define bpf_skb_change_tail(...)                                               \
  TALLY(TALLY_HELPER, bpf_skb_change_tail(__VA_ARGS__))
#define bpf_skb_load_bytes(...)                                                \
  TALLY(TALLY_HELPER, bpf_skb_load_bytes(__VA_ARGS__))
#define bpf_skb_pull_data(...)                                                 \
  TALLY(TALLY_HELPER, bpf_skb_pull_data(__VA_ARGS__))
#define bpf_skb_store_bytes(...)                                               \
  TALLY(TALLY_HELPER, bpf_skb_store_bytes(__VA_ARGS__))

#include "../../bpf/scratch.h"

#undef CALL
#define CALL(NAME, v6, ...)                                                    \
  TALLY(TALLY_FUNCTION, v6 ? NAME##6(__VA_ARGS__) : NAME##4(__VA_ARGS__))

#endif
