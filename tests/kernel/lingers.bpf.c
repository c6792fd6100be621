/* Takes some tenths of a second, and says when it has begun and when it has ended. */
#include "maps.h"

#define TURNS 4000000
#define TIMES 16

ARRAY_MAP(marks, __u64, 2); /* begun, ended */

static long nothing(__u32 index, void *context)
{
	return 0;
}

SEC("tc")
int lingers(struct __sk_buff *skb)
{
	__u32 first = 0, second = 1;
	__u64 *begun = bpf_map_lookup_elem(&marks, &first), *ended = bpf_map_lookup_elem(&marks, &second);

	if (!begun || !ended)
		return -1;
	WRITE_ONCE(*begun, 1);
	for (int i = 0; i < TIMES; i++)
		bpf_loop(TURNS, nothing, NULL, 0);
	WRITE_ONCE(*ended, 1);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
