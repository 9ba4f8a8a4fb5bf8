// The quantisers' arithmetic on the host, for tests/test_cuda_arithmetic.py: whole rows by the plain rules,
// single blocks of 16 by the packed FP16 form.
#include "quantize.cuh"
#include "quantize_half.cuh"

using namespace fp4bf16;

template <int kB>
static void rows(const float* x, int64_t count, int64_t k, const Rule& r, uint64_t seed, const float* source,
                 bool given, uint8_t* packed, uint8_t* scale, float* outer, double* sums, int* counts) {
    const int64_t blocks = (k + kB - 1) / kB, kp = r.format == FP4BF16_FP8 ? k : blocks * kB;
    for (int64_t row = 0; row < count; ++row) {
        const Outer o = given ? outer_from_scale(r, source[row]) : outer_from_amax(r, source[row]);
        outer[row] = o.decode;
        for (int64_t b = 0; b < blocks; ++b) {
            const int n = static_cast<int>(k - b * kB < kB ? k - b * kB : kB);
            float v[kB] = {};
            for (int j = 0; j < n; ++j) v[j] = x[row * k + b * kB + j];
            Philox random(seed, 0, 0);
            Codes<kB> c;
            quantize_block(v, kB, n, r, o, &random, row * k + b * kB, 1, true, &c, counts);
            for (int i = 0; i < 3; ++i) sums[3 * row + i] += c.sums[i];
            for (int j = 0; r.format == FP4BF16_FP8 && j < n; ++j) packed[row * kp + b * kB + j] = c.code[j];
            if (r.format == FP4BF16_FP8) continue;
            for (int j = 0; j < kB; j += 2)
                packed[(row * kp + b * kB + j) / 2] = static_cast<uint8_t>(c.code[j] | c.code[j + 1] << 4);
            scale[row * blocks + b] = static_cast<uint8_t>(c.byte);
        }
    }
}

extern "C" void host_rows(const float* x, int64_t count, int64_t k, int format, int rule, int full,
                          int stochastic, uint64_t seed, const float* source, int given, uint8_t* packed,
                          uint8_t* scale, float* outer, double* sums, int* counts) {
    const Rule r{static_cast<fp4bf16_format>(format), static_cast<fp4bf16_scale_rule>(rule), full != 0,
                 stochastic != 0};
    if (format == FP4BF16_MXFP4)
        rows<32>(x, count, k, r, seed, source, false, packed, scale, outer, sums, counts);
    else
        rows<16>(x, count, k, r, seed, source, given != 0, packed, scale, outer, sums, counts);
}

// Blocks of 16 BF16 numbers whose largest is in [2^-90, 6 * 64 * decode].
extern "C" void host_blocks(const uint32_t* words, int64_t count, int full, float decode, uint8_t* packed,
                            uint8_t* scale, uint8_t* expanded) {
    static constexpr PairTable kTable = make_pairs();
    for (int64_t b = 0; b < count; ++b) {
        const uint32_t* w = words + 8 * b;
        uint32_t top = 0, y[8], q[8], p[2], e[4];
        for (int i = 0; i < 8; ++i) top = max2(top, w[i] & kMagnitudes);
        top = top >> 16 > (top & 0xFFFF) ? top >> 16 : top & 0xFFFF;
        const int exponent = static_cast<int>(top >> 7);
        for (int i = 0; i < 8; ++i) y[i] = to_half(w[i] & kMagnitudes, shift_of(17, exponent));
        const float t = bits_float(top << 16) / decode, unit = power_of_two(exponent - 129) / decode;
        const uint32_t byte = full ? search_full_half(y, t, unit, q)
                                   : search_fast_half(y, t, unit, kTable.entry[top & 0x7F], q);
        for (int i = 0; i < 4; ++i) e[i] = expand_codes(q + 2 * i, w + 2 * i, byte * 0x800080u);
        for (int i = 0; i < 8; ++i) q[i] |= w[i] & kSigns;
        for (int i = 0; i < 2; ++i) p[i] = pack_codes(q + 4 * i);
        scale[b] = static_cast<uint8_t>(byte);
        memcpy(packed + 8 * b, p, sizeof p);
        memcpy(expanded + 16 * b, e, sizeof e);
    }
}
