/* Replaces count.h in programs that explain. Verbs compiled with it decide as usual and record each decision, but
 * change nothing: updates of maps do nothing, flows are read as copies, and counts are recorded as notes.
 */
#ifndef HYBRID_PROXY_EXPLAINING_H
#define HYBRID_PROXY_EXPLAINING_H

#define HYBRID_PROXY_COUNT_H

#include "maps.h"

#define COPIES 8 /* of flows; no program reads more of them for one packet */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct explanation);
} explanation SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, COPIES);
	__type(key, __u32);
	__type(value, struct flow);
} copies SEC(".maps");

INLINE struct explanation *explanation_row(void)
{
	__u32 key = 0;

	return bpf_map_lookup_elem(&explanation, &key);
}

__noinline int note(__u32 what, __u32 a, __u32 b)
{
	struct explanation *e = explanation_row();
	struct note *n;

	if (!e || e->count >= NOTES)
		return 0;
	n = &e->notes[e->count & (NOTES - 1)];
	n->what = what;
	n->a = a;
	n->b = b;
	e->count += 1;
	return 0;
}

INLINE struct flow *copy_of(const struct flow *live)
{
	struct explanation *e = explanation_row();
	struct flow *copy;
	__u32 key;

	if (!live || !e)
		return NULL;
	key = e->copied++ % COPIES;
	copy = bpf_map_lookup_elem(&copies, &key);
	if (copy)
		*copy = *live;
	return copy;
}

#undef WRITE_ONCE
#define WRITE_ONCE(x, v) ((void)(x), (void)(v))
#define bpf_map_update_elem(map, key, value, flags) ((void)(key), (void)(value), 0L)
#define bpf_map_delete_elem(map, key) ((void)(key), 0L)
#define __sync_fetch_and_add(pointer, value) ((void)(value), READ_ONCE(*(pointer)))
#define NOTE(what, a, b) note(what, a, b)
#define SEEN(flow) copy_of(flow)

INLINE void count(enum counter what)
{
	note(NOTE_COUNT, what, 0);
}

INLINE void count_inline(enum counter what)
{
	count(what);
}

#endif
