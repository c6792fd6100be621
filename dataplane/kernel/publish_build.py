"""Builds `dataplane.kernel._publish`: the stores that the datapath watches, with their memory order.

A whole backend set changes by one aligned 64-bit store. Slots written before it must be visible before it,
on arm64 too, where neither Python nor numpy orders anything: so the store is a release in C.
"""

from __future__ import annotations

from cffi import FFI

builder = FFI()
builder.cdef(
    """
    void store_release(uint64_t *array, size_t index, uint64_t value);
    void store_release_many(uint64_t *array, const uint64_t *indexes, const uint64_t *values, size_t count);
    uint64_t load_acquire(const uint64_t *array, size_t index);
    """
)
builder.set_source(
    "hybrid_proxy.dataplane.kernel._publish",
    """
    static void store_release(uint64_t *array, size_t index, uint64_t value)
    {
        __atomic_store_n(array + index, value, __ATOMIC_RELEASE);
    }

    static void store_release_many(uint64_t *array, const uint64_t *indexes, const uint64_t *values, size_t count)
    {
        for (size_t i = 0; i < count; i++)
            __atomic_store_n(array + indexes[i], values[i], __ATOMIC_RELEASE);
    }

    static uint64_t load_acquire(const uint64_t *array, size_t index)
    {
        return __atomic_load_n(array + index, __ATOMIC_ACQUIRE);
    }
    """,
    extra_compile_args=["-O2", "-g0"],
)
