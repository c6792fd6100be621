/* The least that a proxy at pods' interfaces can do: what its figures are to be held against. Nothing is checked. */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define HASH(name, key_type, value_type, size) \
	struct { \
		__uint(type, BPF_MAP_TYPE_HASH); \
		__uint(map_flags, BPF_F_NO_PREALLOC); \
		__uint(max_entries, size); \
		__type(key, key_type); \
		__type(value, value_type); \
	} name SEC(".maps")

#define L4 (ETH_HLEN + sizeof(struct iphdr))
enum flags { FIN = 1, SYN = 2 };

struct tuple {
	__u32 addresses[2]; /* from, to */
	__u32 ports;
	__u32 protocol;
};

struct pod {
	__u32 ifindex;
	__u8 macs[12]; /* its own, its interface's */
};

struct flow {
	__u32 addresses[2]; /* after translation */
	__u32 client;
	struct pod pod;
};

HASH(flows, struct tuple, struct flow, 1 << 19);
HASH(pods, __u32, struct pod, 16);
HASH(services, __u32, __u32, 16); /* ClusterIP -> backend */

static __always_inline int hand_over(struct __sk_buff *skb, const struct pod *pod)
{
	bpf_skb_store_bytes(skb, 0, pod->macs, sizeof(pod->macs), 0);
	return bpf_redirect_peer(pod->ifindex, 0);
}

static __always_inline struct flow *open_flow(const struct tuple *t)
{
	__u32 client = t->addresses[0], *backend = bpf_map_lookup_elem(&services, &t->addresses[1]);
	struct pod *from = bpf_map_lookup_elem(&pods, &client), *to;
	struct tuple reply = {.ports = t->ports << 16 | t->ports >> 16, .protocol = t->protocol};
	struct flow flow = {.client = client};

	if (!from || !backend || !(to = bpf_map_lookup_elem(&pods, backend)))
		return 0;
	reply.addresses[0] = *backend;
	reply.addresses[1] = flow.addresses[1] = client;
	flow.addresses[0] = t->addresses[1];
	flow.pod = *from;
	bpf_map_update_elem(&flows, &reply, &flow, BPF_ANY);
	flow.addresses[0] = client;
	flow.addresses[1] = *backend;
	flow.pod = *to;
	bpf_map_update_elem(&flows, t, &flow, BPF_ANY);
	return bpf_map_lookup_elem(&flows, t);
}

static __always_inline void translate(struct __sk_buff *skb, struct tuple *t, struct flow *flow)
{
	__s64 diff = bpf_csum_diff(t->addresses, 8, flow->addresses, 8, 0);
	int place = L4 + (t->protocol == IPPROTO_TCP ? 16 : 6);
	int how = BPF_F_PSEUDO_HDR | (t->protocol == IPPROTO_TCP ? 0 : BPF_F_MARK_MANGLED_0);

	bpf_l4_csum_replace(skb, place, 0, diff, how);
	bpf_l3_csum_replace(skb, ETH_HLEN + __builtin_offsetof(struct iphdr, check), 0, diff, 0);
	bpf_skb_store_bytes(skb, ETH_HLEN + __builtin_offsetof(struct iphdr, saddr), flow->addresses, 8, 0);
}

/* `shown`: the stack sees what opens a flow, SYN and SYN/ACK; the latter is translated where it leaves the stack. */
static __always_inline int serve(struct __sk_buff *skb, const int shown, const int leaves)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct iphdr *ip = data + ETH_HLEN;
	struct tcphdr *tcp = (void *)(ip + 1);
	struct flow *flow;
	struct pod *pod;
	__u8 flags = 0;
	int opens = 0;

	if (skb->protocol != bpf_htons(ETH_P_IP) || data + L4 + 8 > end)
		return TC_ACT_UNSPEC;
	struct tuple t = {{ip->saddr, ip->daddr}, *(__u32 *)tcp, ip->protocol};

	if (t.protocol == IPPROTO_TCP && (void *)(tcp + 1) <= end)
		flags = ((__u8 *)tcp)[13];
	flow = bpf_map_lookup_elem(&flows, &t);
	if (!flow && !leaves && (flow = open_flow(&t)))
		opens = 1;
	if (!flow) {
		pod = shown ? 0 : bpf_map_lookup_elem(&pods, &t.addresses[1]);
		return pod ? hand_over(skb, pod) : TC_ACT_UNSPEC;
	}
	if (shown && !leaves && flags & SYN && !opens && flow->client != t.addresses[0])
		return TC_ACT_UNSPEC;
	translate(skb, &t, flow);
	if (leaves || (shown && (opens || flags & SYN)))
		return TC_ACT_UNSPEC;
	pod = &flow->pod;
	return hand_over(skb, pod);
}

SEC("tc") int established(struct __sk_buff *skb)
{
	return serve(skb, 1, 0);
}

SEC("tc") int established_leaves(struct __sk_buff *skb)
{
	return serve(skb, 1, 1);
}

SEC("tc") int always(struct __sk_buff *skb)
{
	return serve(skb, 0, 0);
}

char LICENSE[] SEC("license") = "GPL";
