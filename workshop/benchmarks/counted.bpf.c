/* The hooks and the datapath as in bpf/, in one program for each hook, which
 * counts what a packet makes it do. */
#include "counting.h"

#include "../../bpf/datapath.h"
#include "../../bpf/prefilter.h"

/* Here a tail call is a call. */
INLINE int call_datapath(struct __sk_buff *skb, const enum hook hook,
                         const bool v6) {
  tally(TALLY_TAIL);
  return datapath(skb, hook, v6);
}

#define COUNTED(NAME, HOOK)                                                    \
  SEC("tc")                                                                    \
  int NAME(struct __sk_buff *skb) { return prefilter(skb, HOOK); }

COUNTED(pod_ingress, HOOK_POD_INGRESS)
COUNTED(pod_egress, HOOK_POD_EGRESS)
COUNTED(uplink_ingress, HOOK_UPLINK_INGRESS)

char LICENSE[] SEC("license") = "GPL";
