// The optimizer's arithmetic on the host, for tests/test_cuda_optimizer.py.
#include "optimizer.cuh"

using namespace fp4bf16;

// x (rows, columns), columns a multiple of 16 -> E4M3 bytes and decode scales.
extern "C" void host_twin(const float* x, int64_t rows, int64_t columns, uint8_t* bytes, float* scale) {
    for (int64_t row = 0; row < rows; ++row) {
        uint32_t most = 0;
        for (int64_t k = 0; k < columns; ++k) {
            const uint32_t bits = float_bits(x[row * columns + k]) & 0x7FFFFFFFu;
            if (bits < kInfinity && bits > most) most = bits;
        }
        const int e = outer_exponent(bits_float(most));
        scale[row] = power_of_two(e);
        for (int64_t k = 0; k < columns; k += 16) {
            float block[16];
            uint32_t out[4];
            memcpy(block, x + row * columns + k, sizeof block);
            twin_block(block, power_of_two(-e), out);
            memcpy(bytes + row * columns + k, out, sizeof out);
        }
    }
}

// scalars as of fp4bf16_adamw.
extern "C" void host_adamw(int64_t count, const float* g, float* p, float* m, float* v, float* average,
                           const float* scalars, double beta1, double beta2, float eps) {
    const StepFactors s{static_cast<float>(beta1),
                        static_cast<float>(1 - beta1),
                        static_cast<float>(beta2),
                        static_cast<float>(1 - beta2),
                        eps,
                        scalars[0],
                        scalars[1],
                        scalars[2],
                        scalars[3],
                        scalars[5]};
    for (int64_t i = 0; i < count; ++i) {
        adamw_element(s, g[i], p[i], m[i], v[i]);
        average[i] = average_element(s, average[i], p[i]);
    }
}
