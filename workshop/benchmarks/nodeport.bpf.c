/* Sends the frames of clients, one after the other, into a node; and ends them behind it. */
#include <linux/bpf.h>
#include <linux/if_ether.h>

#include <bpf/bpf_helpers.h>

#define FRAME 60 /* without the check sequence: the smallest there is */
#define FRAMES 64

struct frame {
	__u8 bytes[FRAME];
	__u32 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, FRAMES);
	__type(key, __u32);
	__type(value, struct frame);
} frames SEC(".maps");

/* What gets the frames: the program at the driver, or none, and then it is the stack. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} next SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} arrived SEC(".maps");

static __u32 turn;

/* Pages are reused with their old contents, so write every frame anew. */
static __always_inline long write_frame(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 key = turn++ % FRAMES;
	struct frame *frame = bpf_map_lookup_elem(&frames, &key);

	if (!frame || data + FRAME > end)
		return -1;
	__builtin_memcpy(data, frame->bytes, FRAME);
	return 0;
}

SEC("xdp")
int send(struct xdp_md *ctx)
{
	if (write_frame(ctx))
		return XDP_ABORTED;
	bpf_tail_call(ctx, &next, 0);
	return XDP_PASS;
}

/* What the sending itself costs. */
SEC("xdp")
int send_nowhere(struct xdp_md *ctx)
{
	return write_frame(ctx) ? XDP_ABORTED : XDP_DROP;
}

SEC("xdp")
int receive(struct xdp_md *ctx)
{
	__u32 key = 0;
	__u64 *count = bpf_map_lookup_elem(&arrived, &key);

	if (count)
		*count += 1;
	return XDP_DROP;
}

char LICENSE[] SEC("license") = "GPL";
