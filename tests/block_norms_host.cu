// What group normalisation's quantiser does to a block of 16, and the norms that it adds, on the host, for
// tests/test_block_norms.py.
#include "norm_quantize.cuh"

using namespace fp4bf16;

// words (count, 8): blocks of 16 BF16 numbers; decode: the outer scale. Results lie block by block: norms
// (count, 2) in units of the scale's square; way (count,): 1 where the fast quantiser took the block.
template <bool kExpanded>
static void blocks(const uint32_t* words, int64_t count, float decode, const FourBit& to, float* norms,
                   uint8_t* way) {
    const Outer o = {1.0f / decode, decode, 0.0f};
    const Window window(o);
    for (int64_t b = 0; b < count; ++b) {
        uint32_t w[8];
        memcpy(w, words + 8 * b, sizeof w);
        BlockNorms own;
        way[b] = quantize_block16<kExpanded, true>(w, o, window, to, static_cast<uint32_t>(b), &own);
        if (way[b] == 0) {
            float x[16];
            for (int j = 0; j < 16; ++j)
                x[j] = bits_float(j % 2 == 0 ? w[j / 2] << 16 : w[j / 2] & 0xFFFF0000u);
            own.add(any_block16<true>(x, o, to, b));
        }
        norms[2 * b] = own.error, norms[2 * b + 1] = own.used;
    }
}

extern "C" void host_norm_blocks(const uint32_t* words, int64_t count, float decode, int expanded_alone,
                                 uint8_t* packed, uint8_t* scale, uint8_t* expanded, float* norms,
                                 uint8_t* way) {
    fp4bf16_group_norm_args a{};
    a.expanded = expanded;
    if (expanded_alone == 0) a.packed = packed, a.block_scale = scale;
    const FourBit to(a, 0);
    if (expanded_alone != 0)
        blocks<true>(words, count, decode, to, norms, way);
    else
        blocks<false>(words, count, decode, to, norms, way);
}
