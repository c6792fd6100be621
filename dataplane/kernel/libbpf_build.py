"""Builds `dataplane.kernel._libbpf`: what we call of libbpf, for cffi's ABI mode.

The declarations are parsed when the package is built, and by `make bpf` when they have changed since. A process that
parses them itself needs pycparser for that: 1 MB and 50 ms of imports, with those of `bpf/abi.h`.
"""

from __future__ import annotations

import sys

from cffi import FFI

builder = FFI()
builder.cdef(
    """
    struct bpf_object; struct bpf_map; struct bpf_program; struct ring_buffer;
    typedef int (*ring_buffer_sample_fn)(void *ctx, void *data, size_t size);
    struct bpf_map_batch_opts { size_t sz; uint64_t elem_flags; uint64_t flags; };
    struct bpf_test_run_opts {
        size_t sz; const void *data_in; void *data_out; uint32_t data_size_in; uint32_t data_size_out;
        const void *ctx_in; void *ctx_out; uint32_t ctx_size_in; uint32_t ctx_size_out; uint32_t retval;
        int repeat; uint32_t duration; uint32_t flags; uint32_t cpu; uint32_t batch_size;
    };
    struct bpf_map_info {
        uint32_t type; uint32_t id; uint32_t key_size; uint32_t value_size; uint32_t max_entries;
        uint32_t map_flags; char name[16]; uint32_t ifindex; uint32_t btf_vmlinux_value_type_id; uint64_t netns_dev;
        uint64_t netns_ino; uint32_t btf_id; uint32_t btf_key_type_id; uint32_t btf_value_type_id;
    };
    struct bpf_prog_info {
        uint32_t type; uint32_t id; uint8_t tag[8]; uint32_t jited_prog_len; uint32_t xlated_prog_len;
        uint64_t jited_prog_insns; uint64_t xlated_prog_insns; uint64_t load_time; uint32_t created_by_uid;
        uint32_t nr_map_ids; uint64_t map_ids; char name[16];
    };
    struct bpf_link_info { uint32_t type; uint32_t id; uint32_t prog_id; uint32_t pad; uint32_t target[16]; };
    void *libbpf_set_print(void *fn);
    struct bpf_object *bpf_object__open_file(const char *path, const void *opts);
    int bpf_object__load(struct bpf_object *);
    void bpf_object__close(struct bpf_object *);
    struct bpf_program *bpf_object__next_program(const struct bpf_object *, struct bpf_program *);
    struct bpf_map *bpf_object__next_map(const struct bpf_object *, const struct bpf_map *);
    const char *bpf_map__name(const struct bpf_map *);
    const char *bpf_program__name(const struct bpf_program *);
    int bpf_map__fd(const struct bpf_map *);
    int bpf_map__type(const struct bpf_map *);
    uint32_t bpf_map__key_size(const struct bpf_map *);
    uint32_t bpf_map__value_size(const struct bpf_map *);
    uint32_t bpf_map__map_flags(const struct bpf_map *);
    uint32_t bpf_map__btf_key_type_id(const struct bpf_map *);
    uint32_t bpf_map__btf_value_type_id(const struct bpf_map *);
    int bpf_program__fd(const struct bpf_program *);
    int bpf_map__set_max_entries(struct bpf_map *, uint32_t);
    int bpf_map__reuse_fd(struct bpf_map *, int fd);
    void *bpf_map__initial_value(struct bpf_map *, size_t *);
    int bpf_program__set_autoload(struct bpf_program *, bool);
    int bpf_program__set_log_buf(struct bpf_program *, char *, size_t);
    int bpf_program__set_log_level(struct bpf_program *, unsigned int);
    struct bpf_map_create_opts {
        size_t sz; uint32_t btf_fd; uint32_t btf_key_type_id; uint32_t btf_value_type_id;
        uint32_t btf_vmlinux_value_type_id; uint32_t inner_map_fd; uint32_t map_flags;
    };
    int bpf_map_create(int type, const char *name, uint32_t key, uint32_t value, uint32_t entries, const void *opts);
    int bpf_map_update_elem(int fd, const void *k, const void *v, uint64_t flags);
    int bpf_map_lookup_elem(int fd, const void *k, void *v);
    int bpf_map_delete_elem(int fd, const void *k);
    int bpf_map_get_next_key(int fd, const void *k, void *next);
    int bpf_map_update_batch(int fd, const void *keys, const void *values, uint32_t *count, const void *opts);
    int bpf_map_lookup_batch(int fd, void *in, void *out, void *keys, void *values, uint32_t *count, const void *opts);
    int bpf_map_delete_batch(int fd, const void *keys, uint32_t *count, const void *opts);
    struct bpf_link_create_opts { size_t sz; uint32_t flags; const void *iter_info; uint32_t iter_info_len; };
    int bpf_link_create(int prog_fd, int target_fd, int attach_type, const void *opts);
    int bpf_link_update(int link_fd, int new_prog_fd, const void *opts);
    int bpf_link_detach(int link_fd);
    struct bpf_prog_query_opts {
        size_t sz; uint32_t query_flags; uint32_t attach_flags; uint32_t *prog_ids; uint32_t prog_cnt;
    };
    int bpf_prog_query_opts(int target, int type, struct bpf_prog_query_opts *opts);
    struct bpf_prog_load_opts {
        size_t sz; int attempts; uint32_t expected_attach_type; uint32_t prog_btf_fd; uint32_t prog_flags;
        uint32_t prog_ifindex; uint32_t kern_version; uint32_t attach_btf_id; uint32_t attach_prog_fd;
        uint32_t attach_btf_obj_fd; const int *fd_array; const void *func_info; uint32_t func_info_cnt;
        uint32_t func_info_rec_size; const void *line_info; uint32_t line_info_cnt; uint32_t line_info_rec_size;
        uint32_t log_level; uint32_t log_size; char *log_buf;
    };
    int bpf_prog_load(int type, const char *name, const char *license, const void *insns, size_t count, void *opts);
    int bpf_raw_tracepoint_open(const char *name, int prog_fd);
    int bpf_prog_get_fd_by_id(uint32_t id);
    int bpf_prog_attach(int prog_fd, int target_fd, int type, unsigned int flags);
    int bpf_prog_detach2(int prog_fd, int target_fd, int type);
    int bpf_obj_pin(int fd, const char *path);
    int bpf_obj_get(const char *path);
    struct ring_buffer *ring_buffer__new(int map_fd, ring_buffer_sample_fn take, void *ctx, const void *opts);
    int ring_buffer__poll(struct ring_buffer *, int timeout_ms);
    void ring_buffer__free(struct ring_buffer *);
    int bpf_prog_test_run_opts(int prog_fd, struct bpf_test_run_opts *opts);
    int bpf_obj_get_info_by_fd(int fd, void *info, uint32_t *len);
    int libbpf_probe_bpf_helper(int prog_type, int helper, const void *opts);
    """
)
builder.cdef(  # of types, bpf/btf.h and linux/btf.h
    """
    struct btf;
    struct btf_type { uint32_t name_off; uint32_t info; uint32_t size_or_type; };
    struct btf_member { uint32_t name_off; uint32_t type; uint32_t offset; };
    struct btf_enum { uint32_t name_off; int32_t val; };
    struct btf_array { uint32_t type; uint32_t index_type; uint32_t nelems; };
    struct btf *btf__parse(const char *path, void *ext);
    struct btf *bpf_object__btf(const struct bpf_object *);
    struct btf *btf__load_from_kernel_by_id(uint32_t id);
    void btf__free(struct btf *);
    int32_t btf__find_by_name_kind(const struct btf *, const char *name, uint32_t kind);
    const struct btf_type *btf__type_by_id(const struct btf *, uint32_t id);
    const char *btf__name_by_offset(const struct btf *, uint32_t offset);
    """
)
builder.set_source("hybrid_proxy.dataplane.kernel._libbpf", None)

if __name__ == "__main__":
    builder.emit_python_code(sys.argv[1])
