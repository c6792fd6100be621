/* The hooks and the datapath as in bpf/, in one program for each hook, which
 * counts what a packet makes it do. */
#include "counting.h"

#include "../../bpf/datapath.h"
#include "../../bpf/prefilter.h"

enum { CALLED = 100 }; /* more than any verdict; the next one: of IPv6 */

/* Here a tail call is a return, after which the program itself calls the
 * datapath: so the prefilter's frame is gone, as behind a tail call. */
INLINE int call_datapath(struct __sk_buff *skb, const enum hook hook,
                         const bool v6) {
  tally(TALLY_TAIL);
  return CALLED + v6;
}

#define COUNTED(NAME, HOOK)                                                    \
  static __attribute__((noinline)) int NAME##_prefilter(                       \
      struct __sk_buff *skb) {                                                 \
    return prefilter(skb, HOOK);                                               \
  }                                                                            \
                                                                               \
  SEC("tc")                                                                    \
  int NAME(struct __sk_buff *skb) {                                            \
    int verdict = NAME##_prefilter(skb);                                       \
                                                                               \
    if (verdict < CALLED)                                                      \
      return verdict;                                                          \
    return verdict == CALLED ? datapath(skb, HOOK, false)                      \
                             : datapath(skb, HOOK, true);                      \
  }

COUNTED(pod_ingress, HOOK_POD_INGRESS)
COUNTED(pod_egress, HOOK_POD_EGRESS)
COUNTED(uplink_ingress, HOOK_UPLINK_INGRESS)

char LICENSE[] SEC("license") = "GPL";
