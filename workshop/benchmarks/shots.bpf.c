/* One frame again and again through the production programs, whatever became of
 * it the time before: this writes it into the buffer, perhaps as another
 * client's, and goes on to a program of `targets` by a tail call.
 * BPF_PROG_TEST_RUN repeats that, and the same with a target that does nothing
 * is what the repetition itself costs.
 */
#include "../../bpf/config.h"
#include "../../bpf/maps.h"

#define FRAME_BYTES 128
#define SHORTEST 54 /* Ethernet, IPv4 and TCP */
#define TARGETS 4

/* What to shoot (map `shots`, one element). */
struct shot {
  __u32 length;
  __u32 target;
  __u32 changing; /* where in the frame the last four bytes of an address are
                     that differ each time; 0: nowhere */
  __u32 first;    /* the first of these addresses, host byte order */
  __u32 count;    /* of those used */
  __u32 sum; /* of IPv4's header but for that address and the checksum, as it
                lies in memory; 0: not IPv4 */
  __u8 frame[FRAME_BYTES];
};

ARRAY_MAP(shots, struct shot, 1);
MAP(targets, BPF_MAP_TYPE_PROG_ARRAY, 0, __u32, __u32, TARGETS);

/* IPv4's checksum (RFC 1071). */
INLINE __u16 header_sum(__u32 rest, __be32 address) {
  __u64 sum = (__u64)rest + address;

  sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
  sum = (sum & 0xffff) + (sum >> 16);
  return ~((sum & 0xffff) + (sum >> 16));
}

INLINE void change(struct shot *s) {
  __be32 address = bpf_htonl(s->first + s->count++);

  if (s->changing > FRAME_BYTES - sizeof(address))
    return;
  __builtin_memcpy(s->frame + s->changing, &address, sizeof(address));
  if (s->sum)
    *(__u16 *)(s->frame + ETH_HLEN + offsetof(struct iphdr, check)) =
        header_sum(s->sum, address);
}

SEC("tc")
int shoot(struct __sk_buff *skb) {
  __u32 key = 0, length;
  struct shot *s = bpf_map_lookup_elem(&shots, &key);

  if (!s)
    return TC_ACT_SHOT;
  length = s->length;
  if (length < SHORTEST || length > FRAME_BYTES)
    return TC_ACT_SHOT;
  if (skb->len != length && bpf_skb_change_tail(skb, length, 0))
    return TC_ACT_SHOT;
  if (s->changing)
    change(s);
  if (bpf_skb_store_bytes(skb, 0, s->frame, length, BPF_F_INVALIDATE_HASH))
    return TC_ACT_SHOT;
  bpf_tail_call(skb, &targets, s->target);
  return TC_ACT_SHOT;
}

SEC("tc")
int nothing(struct __sk_buff *skb) { return TC_ACT_UNSPEC; }

char LICENSE[] SEC("license") = "GPL";
