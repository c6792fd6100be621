/* The time to first packet, as SIG Scalability defines that indicator: from a client's SYN, or the first datagram of a
 * conversation, to the first packet of the service's backend. Each service has a histogram (map `first_packets`).
 */
#ifndef HYBRID_PROXY_FIRST_PACKET_H
#define HYBRID_PROXY_FIRST_PACKET_H

#include "hash.h"
#include "traffic.h"

#define FIRST_PACKET_STEPS (sizeof(struct first_packets) / sizeof(__u32))
/* One in so many conversations of datagrams is timed, and counts for all: clocks are slow. */
#define DATAGRAM_SAMPLE 4

/* Returns when the client asked, in ticks of ktime(), for the backend's half of a flow of datagrams; 0: the answer is
 * not timed.
 */
INLINE __u32 asked_now(const struct tuple *key, const bool v6)
{
	return flow_tag(key, v6) < 0xffffffff / DATAGRAM_SAMPLE ? ktime() : 0;
}

/* The number's highest bit. Without branches, of which the verifier would follow each combination. */
INLINE __u32 log2_of(__u64 number)
{
	__u32 bit = 0;

#pragma unroll
	for (__u32 half = 16; half; half /= 2) {
		__u32 shift = (((1ull << half) - 1 - number) >> 63) * half;

		number >>= shift;
		bit += shift;
	}
	return bit;
}

/* The step of a histogram that has this time: four for each octave, by the two bits behind the highest one. */
INLINE __u32 first_packet_step(__u32 ticks)
{
	__u32 bit = log2_of(ticks);

	return ticks < 4 ? ticks : 4 * (bit - 1) + (ticks >> (bit - 2) & 3);
}

/* Accounts a backend's first packet, which came so many ticks of ktime() after the client's first one to it, and so
 * many after that to any; of datagrams without the backend. Ignores impossibly long times: the flow was created by an
 * older program with another clock. All CPUs add to one row, as a row for each of them would take 384 bytes for each
 * CPU and service.
 */
__noinline int account_first_packet(__u32 backend, __u32 took, __u32 service, __u32 waited)
{
	struct first_packets *row;
	__u32 step;

	if (took < LONGEST_CONNECT)
		account_answer(backend, (__u64)took << KTIME_SHIFT);
	if (!settings.traffic_cpus || !service || waited >= LONGEST_CONNECT)
		return 0;
	row = bpf_map_lookup_elem(&first_packets, &service);
	step = first_packet_step(waited);
	if (step >= FIRST_PACKET_STEPS)
		step = FIRST_PACKET_STEPS - 1;
	if (row)
		__sync_fetch_and_add(&row->counts[step], backend ? 1 : DATAGRAM_SAMPLE);
	return 0;
}

#endif
