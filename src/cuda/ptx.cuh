// One-instruction wrappers of Hopper's PTX: barriers, bulk tensor copies, clusters, register reallocation.
// wgmma.cuh holds the matrix instructions. Names follow the PTX ISA (version 8.0 and later).
#pragma once

#include <cstdint>
#include <cuda.h>

namespace fp4bf16::ptx {

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier: a phase ends when all arrivals and all announced bytes are in
__device__ inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// Makes initialised barriers visible to the other CTAs of the cluster and to the copy engine.
__device__ inline void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive_expect_bytes(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive(uint64_t* barrier) { barrier_arrive(shared_address(barrier)); }

// Arrives at the same barrier of CTA `rank` of this cluster. What it orders are reads by the tensor cores
// that have finished, so the default scope does; `.release.cluster` would drain every store of the thread
// first.
__device__ inline void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Waits until the phase of this parity has ended. (`.acquire.cluster` would empty the L1 cache every time.)
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni finished;\n"
        "bra.uni again;\n"
        "finished:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
    barrier_wait(shared_address(barrier), parity);
}

// Whether it has ended already.
__device__ inline bool barrier_test(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// ---- bulk tensor copies (TMA)
__device__ inline void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box at (x, y, z), x innermost -> shared memory; its bytes are counted by `barrier`.
__device__ inline void copy_box(void* target, const CUtensorMap* map, uint64_t* barrier, int32_t x, int32_t y,
                                int32_t z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(target)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The same into every CTA whose bit is set in `mask`, at the same offsets of their shared memory and
// barriers.
__device__ inline void copy_box_multicast(void* target, const CUtensorMap* map, uint64_t* barrier, int32_t x,
                                          int32_t y, int32_t z, uint16_t mask) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(target)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(mask)
        : "memory");
}

// Likewise of pictures: channels from c, pixel (x, y) of image n.
__device__ inline void copy_picture_box(void* target, const CUtensorMap* map, uint64_t* barrier, int32_t c,
                                        int32_t x, int32_t y, int32_t n) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(target)),
        "l"(map), "r"(shared_address(barrier)), "r"(c), "r"(x), "r"(y), "r"(n)
        : "memory");
}
__device__ inline void copy_picture_box_multicast(void* target, const CUtensorMap* map, uint64_t* barrier,
                                                  int32_t c, int32_t x, int32_t y, int32_t n, uint16_t mask) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(target)),
        "l"(map), "r"(shared_address(barrier)), "r"(c), "r"(x), "r"(y), "r"(n), "h"(mask)
        : "memory");
}

// The box comes into the L2 cache alone.
__device__ inline void prefetch_picture_box(const CUtensorMap* map, int32_t c, int32_t x, int32_t y,
                                            int32_t n) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c),
                 "r"(x), "r"(y), "r"(n)
                 : "memory");
}

// Box of shared memory -> global memory at (x, y, z); what lies outside the array is not written.
__device__ inline void store_box(const CUtensorMap* map, uint32_t source, int32_t x, int32_t y, int32_t z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(source), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
__device__ inline void store_picture_box(const CUtensorMap* map, uint32_t source, int32_t c, int32_t x,
                                         int32_t y, int32_t n) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(source), "r"(c), "r"(x), "r"(y), "r"(n)
        : "memory");
}
__device__ inline void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// This thread's committed stores have read their shared memory.
__device__ inline void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void store_matrices(uint32_t address, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w0),
                 "r"(w1), "r"(w2), "r"(w3)
                 : "memory");
}

// Their counterpart: the same lanes give the same addresses and get the same words.
__device__ inline void load_matrices(uint32_t address, uint32_t (&word)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(address)
                 : "memory");
}

// Ordinary writes to shared memory before this are seen by the copy engine and the tensor cores after it.
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters
__device__ inline uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ inline void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// ---- registers of a warpgroup
template <int kCount>
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Whether this is the one lane that the warp elects; every lane must call it.
__device__ inline bool elect() {
    uint32_t chosen;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xFFFFFFFF;\n"
        "selp.b32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(chosen));
    return chosen != 0;
}

}  // namespace fp4bf16::ptx
