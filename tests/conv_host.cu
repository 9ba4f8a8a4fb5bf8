// What a convolution's launch sets up, and where its tiles lie, on the host, for tests/test_conv_host.py: the
// real choice of boxes, taps, maps and parts of sm90_conv.cu, and plain loops in place of the kernel, which
// read and write through maps that only know shapes.
#include "sm90_conv.cu"

#include <cstring>

namespace fp4bf16 {

// ---- maps that are read by loops
struct Map {
    const char* data;
    int element_bytes, step, box[4];
    int64_t sizes[4], strides[4];  // innermost first; elements

    // Address of an element, NULL outside.
    char* at(int64_t a, int64_t b, int64_t c, int64_t d) const {
        const int64_t place[4] = {a, b, c, d};
        int64_t offset = 0;
        for (int i = 0; i < 4; ++i) {
            if (place[i] < 0 || place[i] >= sizes[i]) return nullptr;
            offset += place[i] * strides[i];
        }
        return const_cast<char*>(data) + offset * element_bytes;
    }
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap), "a map must fit");

const Map& map_of(const CUtensorMap& map) { return *reinterpret_cast<const Map*>(&map); }

fp4bf16_status make_tensor_map(const char*, const char*, const void* pointer, int element_bytes,
                               const MapShape& s, CUtensorMap* map) {
    const Map made{static_cast<const char*>(pointer),
                   element_bytes,
                   1,
                   {s.box_columns, s.box_rows, 1, 1},
                   {s.columns, s.rows, s.batch, 1},
                   {1, s.row_stride, s.batch_stride, 0}};
    memcpy(map, &made, sizeof made);
    return FP4BF16_OK;
}

fp4bf16_status make_picture_map(const char*, const char*, const void* pointer, int element_bytes,
                                const PictureShape& s, CUtensorMap* map) {
    const Map made{static_cast<const char*>(pointer),
                   element_bytes,
                   s.step,
                   {s.box[0], s.box[1], s.box[2], s.box[3]},
                   {s.channels, s.w, s.h, s.n},
                   {1, s.strides[2], s.strides[1], s.strides[0]}};
    memcpy(map, &made, sizeof made);
    return FP4BF16_OK;
}

fp4bf16_status fail(fp4bf16_status status, const char*, ...) { return status; }
fp4bf16_status cuda_result(cudaError_t error, const char*) {
    return error == cudaSuccess ? FP4BF16_OK : FP4BF16_CUDA_ERROR;
}

// ---- numbers
double values_of_e4m3[256];

double bf16_value(uint16_t bits) {
    const uint32_t word = uint32_t{bits} << 16;
    float v;
    memcpy(&v, &word, 4);
    return v;
}
double value_of(const char* at, int element_bytes) {
    if (at == nullptr) return 0.0;
    if (element_bytes == 1) return values_of_e4m3[static_cast<uint8_t>(*at)];
    uint16_t bits;
    memcpy(&bits, at, 2);
    return bf16_value(bits);
}
uint16_t to_bf16(float v) {
    uint32_t word;
    memcpy(&word, &v, 4);
    return static_cast<uint16_t>((word + 0x7FFFu + (word >> 16 & 1)) >> 16);
}

// ---- the kernel's walk
double track_sum(const ConvTrack& t, const ConvParams& p, const CUtensorMap& x_map, const CUtensorMap& w_map,
                 bool n_major, int phase, Pixel q, int channel) {
    if (t.taps == 0) return 0.0;
    const Map &x = map_of(x_map), &w = map_of(w_map);
    double sum = 0.0;
    for (int i = 0; i < t.taps; ++i) {
        const Tap tap = p.tap[t.first_tap + phase * t.taps + i];
        for (int c = 0; c < t.channels; ++c) {
            const char* at = x.at(c, q.x * t.step + tap.dx, q.y * t.step + tap.dy, q.n);
            const char* weight = n_major ? w.at(channel, c, tap.weight, 0)
                                         : w.at(int64_t{tap.weight} * t.channels + c, channel, 0, 0);
            sum += value_of(at, x.element_bytes) * value_of(weight, w.element_bytes);
        }
    }
    return sum;
}

void store(const ConvParams& p, int phase, Pixel q, int channel, double v) {
    if (p.staged) {
        char* to = map_of(p.d[phase]).at(channel, q.x, q.y, q.n);
        const uint16_t bits = to_bf16(static_cast<float>(v));
        if (to != nullptr) memcpy(to, &bits, 2);
        return;
    }
    const int64_t at = (phase >> 1) * p.phase_strides[0] + (phase & 1) * p.phase_strides[1] +
                       q.n * p.d_strides[0] + q.y * p.d_strides[1] + q.x * p.d_strides[2] + channel;
    if (p.epilogue.d_dtype == FP4BF16_FLOAT32)
        static_cast<float*>(p.epilogue.d)[at] = static_cast<float>(v);
    else
        static_cast<uint16_t*>(p.epilogue.d)[at] = to_bf16(static_cast<float>(v));
}

// As store_sums: the place among the parts of row `row` of a tile.
int part_of(const ConvParams& p, Pixel corner, int phase, int row) {
    const int log_image = p.log_w + p.log_h;
    const int box = (corner.y >> p.log_h) * p.tiles_w + (corner.x >> p.log_w);
    return phase * p.phase_parts + (box << (log_image - p.log_part)) +
           ((row & ((1 << log_image) - 1)) >> p.log_part);
}

template <int kTileM_, int kTileN_, int kClusterM_, int kClusterN_, bool kBN>
struct Shape {
    static constexpr int kTileM = kTileM_, kTileN = kTileN_, kClusterM = kClusterM_, kClusterN = kClusterN_;
    static constexpr int kCluster = kClusterM * kClusterN;

    static fp4bf16_status launch(const ConvParams& p, cudaStream_t) {
        for (int tile = 0; tile < p.schedule.total(); ++tile)
            for (int rank = 0; rank < kCluster; ++rank) {
                const ConvCorner<Shape> corner(p, tile, rank);
                const int phase = corner.phase();
                if (phase >= p.phases || corner.channel() % kTileN != 0) return FP4BF16_CUDA_ERROR;
                for (int row = 0; row < kTileM; ++row) {
                    const Pixel q = pixel_of(p, corner.at, row);
                    if (q.x >= p.w || q.y >= p.h || q.n >= p.n) continue;
                    for (int i = 0; i < kTileN && corner.channel() + i < p.epilogue.n; ++i)
                        element(p, corner.at, phase, row, q, corner.channel() + i);
                }
            }
        return FP4BF16_OK;
    }

    static void element(const ConvParams& p, Pixel corner, int phase, int row, Pixel q, int channel) {
        double v = track_sum(p.fp4, p, p.x8, p.w8, false, phase, q, channel);
        const double v16 = track_sum(p.bf16, p, p.x16, p.w16, kBN, phase, q, channel);
        if (p.fp4.taps == 0) v = v16;
        if (p.epilogue.col_scale != nullptr)
            v *= p.epilogue.col_scale[(channel * p.phases + phase) * p.epilogue.col_step];
        if (p.image_scale != nullptr) v *= p.image_scale[q.n * p.image_scale_step];
        if (p.fp4.taps > 0) v += v16;
        if (p.bias != nullptr) v += static_cast<const float*>(p.bias)[channel];
        if (p.residual != nullptr)
            v += bf16_value(static_cast<const uint16_t*>(
                p.residual)[q.n * p.residual_strides[0] + q.y * p.residual_strides[1] +
                            q.x * p.residual_strides[2] + channel]);
        store(p, phase, q, channel, v);
        if (p.sums == nullptr) return;
        const double stored = bf16_value(to_bf16(static_cast<float>(v)));
        const int part = part_of(p, corner, phase, row);
        float* sums = p.sums + 2 * ((int64_t{q.n} * p.sum_parts + part) * p.epilogue.n + channel);
        sums[0] += static_cast<float>(stored), sums[1] += static_cast<float>(stored * stored);
    }
};

template <int kM, int kN, int kClusterM, int kClusterN, bool kPromote, bool kBN = false, bool kTurns = false>
constexpr ConvConfig config(const char* name) {
    return {name,      kM,        kN,
            kClusterM, kClusterN, kPromote,
            kBN,       kTurns,    Shape<kM, kN, kClusterM, kClusterN, kBN>::launch};
}

extern const ConvConfig kConvPromoted256x128N = config<256, 128, 1, 2, true>("");
extern const ConvConfig kConvPromoted256x128M = config<256, 128, 2, 1, true>("");
extern const ConvConfig kConvPromoted128x128 = config<128, 128, 1, 1, true>("");
extern const ConvConfig kConvPromoted128x160 = config<128, 160, 2, 1, true>("");
extern const ConvConfig kConvFast128x256 = config<128, 256, 2, 1, false>("");
extern const ConvConfig kConvFast256x128 = config<256, 128, 2, 1, false>("");
extern const ConvConfig kConvFast128x128 = config<128, 128, 1, 1, false>("");
extern const ConvConfig kConvFast128x64 = config<128, 64, 1, 1, false>("");
extern const ConvConfig kConvTurns128x128 = config<128, 128, 2, 1, false, false, true>("");
extern const ConvConfig kConvTurns128x160 = config<128, 160, 2, 1, false, false, true>("");
extern const ConvConfig kConvGradient128x256 = config<128, 256, 2, 1, false, true>("");
extern const ConvConfig kConvGradient256x128 = config<256, 128, 2, 1, false, true>("");
extern const ConvConfig kConvGradient128x128 = config<128, 128, 1, 1, false, true>("");

}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" int host_config_count() { return kCount; }
extern "C" void host_set_values(const double* values) {
    memcpy(values_of_e4m3, values, sizeof values_of_e4m3);
}

// -1: the configuration is not for these operands.
extern "C" int host_conv2d(const fp4bf16_conv2d_args* a, int i) {
    Problem p = forward_problem(*a);
    return fits(*kConfigs[i], p) ? launch(*kConfigs[i], p, nullptr) : -1;
}

extern "C" int64_t host_sum_parts(const fp4bf16_conv2d_args* a, int i) {
    Problem p = forward_problem(*a);
    return fits(*kConfigs[i], p) ? sum_parts(*kConfigs[i], p).count * p.phases : 0;
}

extern "C" int host_dgrad(const fp4bf16_conv2d_dgrad_args* a, int i) {
    if (a->phases != 0) {
        Problem p = phase_gradient_problem(*a);
        return fits(*kConfigs[i], p) ? launch(*kConfigs[i], p, nullptr) : -1;
    }
    for (int64_t y = 0; y < a->stride; ++y)
        for (int64_t x = 0; x < a->stride; ++x) {
            Problem p = gradient_problem(*a, y, x);
            if (!fits(*kConfigs[i], p)) return -1;
            if (const int status = launch(*kConfigs[i], p, nullptr)) return status;
        }
    return 0;
}
