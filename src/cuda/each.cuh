// Kernels over independent items: each item is a load, then a store.
#pragma once

#include <cstring>

#include "elementwise.cuh"
#include "launch.cuh"

namespace fp4bf16 {

// Of an operation that has a `run_if`.
template <typename Op>
__device__ inline auto skips(const Op& op, int) -> decltype(skipped(op.run_if)) {
    return skipped(op.run_if);
}
template <typename Op>
__device__ inline bool skips(const Op&, long) {
    return false;
}

// A thread takes Op::kItems items that lie a block apart and loads all of them before it stores the first, so
// that enough loads are under way. Op has a type Loaded, load(item) and store(Loaded).
template <typename Op>
__global__ void __launch_bounds__(kThreads) each_kernel(const Op op, int64_t items) {
    if (skips(op, 0)) return;
    wait_for_previous();
    constexpr int64_t kBlock = int64_t{kThreads} * Op::kItems;
    for (int64_t first = blockIdx.x * kBlock + threadIdx.x; first < items; first += gridDim.x * kBlock) {
        typename Op::Loaded loaded[Op::kItems];
#pragma unroll
        for (int u = 0; u < Op::kItems; ++u)
            if (first + u * kThreads < items) loaded[u] = op.load(first + u * kThreads);
#pragma unroll
        for (int u = 0; u < Op::kItems; ++u)
            if (first + u * kThreads < items) op.store(loaded[u]);
    }
}

template <typename Op>
void launch_each(const Op& op, int64_t items, void* stream) {
    const int64_t blocks = ceil_div(items, int64_t{kThreads} * Op::kItems);
    const unsigned grid = static_cast<unsigned>(blocks < 0x7FFFFFFF ? blocks : 0x7FFFFFFF);
    if (grid > 0)
        launch_kernel(each_kernel<Op>, grid, kThreads, 0, static_cast<cudaStream_t>(stream), op, items);
}

// A vector as the words it is loaded in: to take it apart waits for the load, which is for `store` to do.
template <int kBytes>
struct Words;
template <>
struct Words<16> {
    using Type = uint4;
};
template <>
struct Words<2> {
    using Type = uint16_t;
};
template <>
struct Words<4> {
    using Type = uint32_t;
};
template <typename T, int kCount>
using Raw = typename Words<sizeof(T) * kCount>::Type;

template <int kCount, typename T>
__device__ inline Raw<T, kCount> load_raw(const T* from) {
    return *reinterpret_cast<const Raw<T, kCount>*>(from);
}

template <typename T, int kCount>
__device__ inline Vector<T, kCount> unpack(const Raw<T, kCount>& raw) {
    Vector<T, kCount> v;
    memcpy(&v, &raw, sizeof v);
    return v;
}

template <int kCount, typename T>
__device__ inline void store_vector(T* to, const Vector<T, kCount>& v) {
    *reinterpret_cast<Vector<T, kCount>*>(to) = v;
}

// Division of what is not negative; 64-bit signed division costs more.
__device__ inline int64_t quotient(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) / static_cast<uint64_t>(b));
}

// Whether rows of k elements that start at `pointer` and lie `stride` apart are whole vectors of 16 bytes.
inline bool in_vectors(const void* pointer, int64_t rows, int64_t k, int64_t stride, int64_t element_bytes) {
    return aligned(pointer, 16) && k * element_bytes % 16 == 0 &&
           (rows <= 1 || stride * element_bytes % 16 == 0);
}

}  // namespace fp4bf16
