// One warpgroup, one 64 x 64 tile of C + A B^T by wgmma from shared memory: small enough to see what the
// tensor cores add. Compiled at run time for sm_90a by probe_accumulator.py; no headers.
//
// A (M, K) and B (N, K) are row-major bytes; a step of the tensor cores takes 32 bytes of K, that is 32 FP8
// or 16 BF16 products. Shared memory holds each step as core matrices of 8 rows x 16 bytes without a swizzle:
// (row group, half of K) -> byte 256 * group + 128 * half.

constexpr int kTile = 64, kStepBytes = 32, kGroup = 4;  // steps in flight
constexpr int kStepTile = kTile * kStepBytes;

__device__ __forceinline__ unsigned long long descriptor(const void* p) {
  unsigned address;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(address) : "l"(p));
  constexpr unsigned long long along_k = 128 >> 4, along_rows = 256 >> 4;
  return ((address & 0x3ffffull) >> 4) | along_k << 16 | along_rows << 32;
}

#define ACC                                                                                        \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
  "%26,%27,%28,%29,%30,%31}"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA(kind, flags)                                                                             \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned." kind " " ACC     \
               ", %32, %33, p, " flags "; }"                                                           \
               : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28)                           \
               : "l"(a), "l"(b), "r"(add))

enum Kind { kE4M3, kE5M2, kBF16 };

template <Kind kind>
__device__ __forceinline__ void wgmma(float (&d)[32], unsigned long long a, unsigned long long b, int add) {
  if (kind == kE4M3) WGMMA("m64n64k32.f32.e4m3.e4m3", "1, 1");
  if (kind == kE5M2) WGMMA("m64n64k32.f32.e5m2.e5m2", "1, 1");
  if (kind == kBF16) WGMMA("m64n64k16.f32.bf16.bf16", "1, 1, 0, 0");
}

// A promoted product starts every `promote` steps with a chain of its own (the instruction ignores what the
// registers hold) and adds it to the total in FP32. promote = 0: one chain, which starts from C.
template <Kind kind>
__device__ void probe(const uint4* a, const uint4* b, const float* c, float* y, int n, int steps,
                      int promote) {
  __shared__ alignas(128) unsigned char tile_a[kGroup * kStepTile], tile_b[kGroup * kStepTile];
  const int t = threadIdx.x, row0 = blockIdx.x * kTile, column0 = blockIdx.y * kTile;
  const int row = row0 + t / 32 * 16 + t % 32 / 4, column = column0 + t % 4 * 2;
  auto at = [&](int i) { return (row + i / 2 % 2 * 8) * n + column + i / 4 * 8 + i % 2; };
  float total[32], chain[32];
  for (int i = 0; i < 32; ++i) chain[i] = total[i] = c[at(i)];

#pragma unroll 1
  for (int first = 0; first < steps; first += kGroup) {
    const int here = min(kGroup, steps - first), line = t / 2, half = t % 2;
    const int slot = line / 8 * 256 + half * 128 + line % 8 * 16;
    for (int s = 0; s < here; ++s) {
      const int piece = (first + s) * 2 + half;  // of 16 bytes
      *reinterpret_cast<uint4*>(tile_a + s * kStepTile + slot) = a[(row0 + line) * 2 * steps + piece];
      *reinterpret_cast<uint4*>(tile_b + s * kStepTile + slot) = b[(column0 + line) * 2 * steps + piece];
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
#pragma unroll 1
    for (int s = 0; s < here; ++s) {
      const int step = first + s;
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      wgmma<kind>(chain, descriptor(tile_a + s * kStepTile), descriptor(tile_b + s * kStepTile),
                  promote == 0 || step % promote != 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (promote != 0 && ((step + 1) % promote == 0 || step + 1 == steps))
        for (int i = 0; i < 32; ++i) total[i] = __fadd_rn(total[i], chain[i]);
    }
    __syncthreads();
  }
  for (int i = 0; i < 32; ++i) y[at(i)] = promote == 0 ? chain[i] : total[i];
}

#define PROBE(name, kind)                                                                                 \
  extern "C" __global__ void __launch_bounds__(128)                                                       \
      name(const uint4* a, const uint4* b, const float* c, float* y, int n, int steps, int promote) {     \
    probe<kind>(a, b, c, y, n, steps, promote);                                                           \
  }
PROBE(probe_e4m3, kE4M3)
PROBE(probe_e5m2, kE5M2)
PROBE(probe_bf16, kBF16)
