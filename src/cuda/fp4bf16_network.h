/* fp4bf16_network.h: the part of the C ABI that a network needs beside products of matrices: convolution,
 * normalisation, attention, what surrounds them, diffusion and the optimizer. fp4bf16.h includes it, and says
 * what holds for every function.
 */
#ifndef FP4BF16_NETWORK_H
#define FP4BF16_NETWORK_H

#include "fp4bf16.h"

#ifdef __cplusplus
extern "C" {
#endif

/* cffi: begin */

/* ---- pictures: (n, h, w, c), element (i, y, x, c) at i * strides[0] + y * strides[1] + x * strides[2] + c.
 * FP4 operands are E4M3 bytes of code * block scale; BF16 operands are named *16. */

/* D = activation(alpha * (S * (X8 conv W8) + X16 conv W16) + bias + bias2 + image_bias) + residual,
 * S = image_scale x col_scale, X conv W at (i, y, x, o) = the sum over (r, s, c) of
 * X[i, y * stride + r - top, x * stride + s - left, c] * W[o, r, s, c], X being zero outside.
 * With c8 = 0 the scales apply to the BF16 product instead. x16_on_output = 1: X16 is (n, oh, ow, c16) and
 * W16 (o, c16): a 1x1 convolution on the result's own grid (the branch of a dual weight, a shortcut).
 * On sm_90 data must be 16-byte aligned, strides in bytes multiples of 16. Zero-initialise, then fill in. */
typedef struct fp4bf16_conv2d_args {
    int64_t n, h, w, oh, ow, o, kh, kw, stride, top, left;
    int64_t c8, c16; /* channels of either track; either may be 0 */
    const uint8_t* x8;
    const uint8_t* w8; /* (o, kh * kw * c8), rows w8_stride apart */
    const void* x16;
    const void* w16; /* (o, kh * kw * c16), rows w16_stride apart */
    int64_t x8_strides[3], x16_strides[3], w8_stride, w16_stride;
    int32_t x16_on_output;
    fp4bf16_accumulate accumulate;
    const float* image_scale;                 /* element i * image_scale_step; NULL: one */
    const float* col_scale;                   /* element o * col_scale_step */
    int64_t image_scale_step, col_scale_step; /* 0 or 1 */
    float alpha;
    fp4bf16_activation activation;
    const void* bias; /* (o,), NULL: none */
    const void* bias2;
    const void* image_bias; /* (n, o), rows image_bias_stride apart */
    const void* residual;
    void* d;
    fp4bf16_dtype bias_dtype, image_bias_dtype, residual_dtype, d_dtype; /* bias2 has bias_dtype */
    int64_t image_bias_stride, residual_strides[3], d_strides[3];
    int32_t config; /* 0: chosen by shape; else the number of a configuration, from 1 */
    /* NULL: not wanted. (n, fp4bf16_conv2d_sum_parts(), o, 2): of each part of an image's pixels, the sums
     * over them of the result as it is stored, and of its squares, by channel: what group normalisation
     * needs. */
    float* sums;
    /* NULL: not wanted. (n, oh, ow, o), o a multiple of 16: the stored result (BF16) as nvfp4_exact, fast
     * search, in E4M3, under the outer scale 2^expanded_exponent, -119 to 120; what is larger than its window
     * saturates. */
    uint8_t* expanded;
    int32_t expanded_exponent;
    /* 1: each pixel of X counts as 2 x 2 (nearest upsampling), as one convolution of X itself for each of the
     * four phases of a result with even sides: X conv W at (i, 2 y + a, 2 x + b, o) = the sum over (r, s, c)
     * of X[i, y + r - top + a, x + s - left + b, c] * W[o, a, b, r, s, c], W being (o, 4 * kh * kw * c), and
     * col_scale's element that of channel 4 o + 2 a + b. stride 1, no residual, x16_on_output 0, kernels of
     * at most 8 taps. 3x3 with padding 1 on the large pictures is 2x2 with top = left = 1 on the small ones,
     * W from fp4bf16_phase_weights. */
    int32_t phases;
    const int32_t* run_if; /* NULL: always; see fp4bf16.h */
} fp4bf16_conv2d_args;
/* Host. Parts of `sums`, for BF16 results; 0: none for these operands, and group_norm makes its own. The
 * alignment of d and its strides count, as does the configuration: ask with the arguments of the launch. */
FP4BF16_API int64_t fp4bf16_conv2d_sum_parts(const fp4bf16_conv2d_args* args);
FP4BF16_API fp4bf16_status fp4bf16_conv2d(const fp4bf16_conv2d_args* args, void* stream);
FP4BF16_API fp4bf16_status fp4bf16_conv2d_simple(const fp4bf16_conv2d_args* args, void* stream);
FP4BF16_API const char* fp4bf16_conv2d_config(const fp4bf16_conv2d_args* args, int32_t config); /* host */

/* Gradient in the pictures: DX[i, y, x, c] = the sum of G[i, p, q, o] * W16[o, r, s, c] over all (p, q, r, s,
 * o) with y = p * stride + r - top, x = q * stride + s - left; + residual. */
typedef struct fp4bf16_conv2d_dgrad_args {
    int64_t n, h, w, c, oh, ow, o, kh, kw, stride, top, left;
    const void* g;   /* (n, oh, ow, o) BF16 */
    const void* w16; /* (o, kh * kw * c) BF16, rows w16_stride apart */
    const void* residual;
    void* dx;
    int64_t g_strides[3], w16_stride, residual_strides[3], dx_strides[3];
    fp4bf16_dtype residual_dtype, dx_dtype;
    int32_t config;
    int32_t phases; /* 1: the gradient of a convolution with phases = 1; W16 (o, 4 * kh * kw * c) */
} fp4bf16_conv2d_dgrad_args;
FP4BF16_API fp4bf16_status fp4bf16_conv2d_dgrad(const fp4bf16_conv2d_dgrad_args* args, void* stream);
FP4BF16_API fp4bf16_status fp4bf16_conv2d_dgrad_simple(const fp4bf16_conv2d_dgrad_args* args, void* stream);

/* The weight of a convolution by phases, out (o, 2, 2, 2, 2, c) FP32: out[o, a, b, r, s] = the sum of
 * weight[o, i, j] over i in I(a, r), then j in I(b, s), ascending, rounded after each addition; weight (o, 3,
 * 3, c) FP32, contiguous; I(0, 0) = {0}, I(0, 1) = {1, 2}, I(1, 0) = {0, 1}, I(1, 1) = {2}. */
FP4BF16_API fp4bf16_status fp4bf16_phase_weights(const float* weight, int64_t o, int64_t c, float* out,
                                                 void* stream);

/* Gradient in the weights: DW[o, r, s, c] = the sum of G[i, p, q, o] * X[i, p * stride + r - top, q * stride
 * + s - left, c] over the pixels (i, p, q), split in a way that depends on the shapes alone and summed in
 * order. accumulate = 1 adds to what dw (and db) hold. db[o] = the sum of G over the pixels. */
typedef struct fp4bf16_conv2d_wgrad_args {
    int64_t n, h, w, c, oh, ow, o, kh, kw, stride, top, left;
    const void* g; /* (n, oh, ow, o) BF16 */
    const void* x; /* (n, h, w, c) BF16 */
    float* dw;     /* (o, kh * kw * c), rows dw_stride apart */
    float* db;     /* (o,), NULL: not wanted */
    int64_t g_strides[3], x_strides[3], dw_stride;
    int32_t accumulate;
    void* workspace; /* fp4bf16_conv2d_wgrad_workspace_size() bytes, 16-byte aligned */
} fp4bf16_conv2d_wgrad_args;
FP4BF16_API int64_t fp4bf16_conv2d_wgrad_workspace_size(const fp4bf16_conv2d_wgrad_args* args); /* host; -1 */
FP4BF16_API fp4bf16_status fp4bf16_conv2d_wgrad(const fp4bf16_conv2d_wgrad_args* args, void* stream);
FP4BF16_API fp4bf16_status fp4bf16_conv2d_wgrad_simple(const fp4bf16_conv2d_wgrad_args* args, void* stream);

/* Group normalisation of x (n, pixels, c) BF16 over the pixels and the channels of a group:
 * y = activation((x - mean) * rstd * gamma + beta), activation NONE or SILU, rounded to BF16. The FP4 results
 * are y, so rounded, in nvfp4_exact with fast search and one outer scale for all, the least power of two that
 * no y can exceed 288 times of: |y| <= max|gamma| sqrt(pixels * c / groups - 1) + max|beta|. */
typedef struct fp4bf16_group_norm_args {
    int64_t n, pixels, c, groups;
    const void* x;      /* image i, pixel p at i * x_image + p * x_pixel */
    const float* gamma; /* (c,) */
    const float* beta;  /* (c,) */
    float eps;
    fp4bf16_activation activation;
    int64_t x_image, x_pixel;
    float* mean; /* (n, groups), NULL: not wanted */
    float* rstd;
    void* y; /* BF16, NULL: not wanted */
    int64_t y_image, y_pixel;
    uint8_t* expanded; /* (n, pixels, c), c a multiple of 16; NULL: not wanted */
    uint8_t* packed;   /* (n, pixels, c / 2), NULL: not wanted; then with block_scale (n, pixels, c / 16) */
    uint8_t* block_scale;
    float* outer_scale; /* (1,) decode scale; with expanded or packed */
    void* workspace;    /* fp4bf16_group_norm_workspace_size() bytes; NULL where that is 0 */
    /* fp4bf16_conv2d's sums of x: of its first sum_channels[0] channels, and of the others' (NULL: there are
     * none), (n, sum_parts[i], sum_channels[i], 2). sums[0] NULL: the statistics are computed here. */
    const float* sums[2];
    int64_t sum_parts[2], sum_channels[2];
    /* NULL: not wanted; with expanded or packed. (fp4bf16_group_norm_norm_parts(), 2): over the elements
     * of each part the sums of (y - Y)^2 and of Y^2, y being the BF16 results and Y what their codes decode
     * to, the outer scale included; |y|_F is at most the sum of both roots. Both are upper bounds that hold
     * FP32's rounding: the second is otherwise the sum, the first up to 9/8 of it and 9/64 of each block's
     * squared scale more, about 1.32 times the sum on Gaussian data. Infinite where a block is not finite. */
    float* norms;
    const int32_t* run_if; /* NULL: always; see fp4bf16.h */
} fp4bf16_group_norm_args;
/* Host. Parts of `norms`, each element in one; -1: bad arguments. The device counts, as do addresses, strides
 * and which results are wanted: ask with the arguments of the launch, norms itself being NULL or not. */
FP4BF16_API int64_t fp4bf16_group_norm_norm_parts(const fp4bf16_group_norm_args* args);
FP4BF16_API int64_t fp4bf16_group_norm_workspace_size(const fp4bf16_group_norm_args* args); /* host; -1 */
FP4BF16_API fp4bf16_status fp4bf16_group_norm(const fp4bf16_group_norm_args* args, void* stream);

/* dx = the gradient in x + add; dgamma and dbeta are added to; dshift[i, c] = the sum over image i's pixels
 * of the gradient in x (without add): that of a vector (n, c) which was added to x before. */
typedef struct fp4bf16_group_norm_backward_args {
    int64_t n, pixels, c, groups;
    const void* x; /* BF16 */
    const void* g; /* BF16 */
    const float* gamma;
    const float* beta;
    const float* mean; /* (n, groups) */
    const float* rstd;
    const void* add; /* BF16, NULL: none */
    void* dx;        /* BF16 */
    float* dgamma;   /* (c,), NULL: not wanted */
    float* dbeta;
    float* dshift; /* (n, c), NULL: not wanted */
    int64_t x_image, x_pixel, g_image, g_pixel, add_image, add_pixel, dx_image, dx_pixel;
    fp4bf16_activation activation;
    void* workspace; /* fp4bf16_group_norm_backward_workspace_size() bytes, 16-byte aligned */
} fp4bf16_group_norm_backward_args;
FP4BF16_API int64_t fp4bf16_group_norm_backward_workspace_size(const fp4bf16_group_norm_backward_args* args);
FP4BF16_API fp4bf16_status fp4bf16_group_norm_backward(const fp4bf16_group_norm_backward_args* args,
                                                       void* stream);

/* The certificate of one FP4 product from norms: the bound and the accumulation of fp4bf16.certify, for the
 * linear part before bias and residual, in double, rounded up. What is not finite or cannot be proven is
 * infinite. X: the activations, BF16; X^, W^: what is multiplied. */
typedef struct fp4bf16_certificate_args {
    const float* norms; /* (norm_parts, 2) of fp4bf16_group_norm; or NULL and */
    int64_t norm_parts;
    const double* sums; /* (sum_rows, 3) of fp4bf16_quantize */
    int64_t sum_rows;
    /* (8,) upper bounds: |W|_F, |W^|_F, the largest singular values of W, W^ and W - W^, the largest outer
     * scale of W^; 0, 0. Infinite where nothing is proven. */
    const float* weight;
    const float* outer_scale;     /* (1,) of X^; NULL: what subnormal E4M3 bytes of X^ can add is in `gain` */
    int64_t k, columns, elements; /* length of the sums; columns and elements of the result */
    float factor;                 /* on norms of X: fp4bf16.certify.conv_factor, 1 for a product */
    float gain;                   /* accumulation adds gain |X^|_F |W^|_F to FP32's: the FP8 tensor cores' */
    fp4bf16_dtype output;         /* of the result, which is rounded to it */
    float slope;                  /* largest of the activation that follows */
    /* Floats, square_stride apart, whose sum is |result|_F^2: of fp4bf16_conv2d's sums every second from the
     * second on. NULL: the ratio is infinite and |result| 0. */
    const float* squares;
    int64_t square_count, square_stride;
    float threshold; /* under 0: none */
    float* out;      /* (4,): bound, accumulation, (bound + accumulation) / |result|_F, |result|_F */
    int32_t* flag;   /* (1,) 1 where the ratio is over threshold (NaN is), else 0; NULL: not wanted */
    int32_t* counts; /* (2,) calls and flags, added to; NULL: not wanted */
} fp4bf16_certificate_args;
FP4BF16_API fp4bf16_status fp4bf16_certificate(const fp4bf16_certificate_args* args, void* stream);

/* out (count, m, m) = x x^T of each of x (count, m, n), doubles, C order: symmetric to the bit, sums in a fixed
 * order. out must not be x. */
FP4BF16_API fp4bf16_status fp4bf16_gram(const double* x, int64_t count, int64_t m, int64_t n, double* out,
                                        void* stream);

/* out = softmax(scale q k^T) v for every image and head, BF16, sums in FP32, probabilities rounded to BF16.
 * Token t, head h of image i lies at i * strides[0] + t * strides[1] + h * strides[2]. causal: key j is seen
 * by query i where j <= i. lse (n, heads, q_tokens): the natural logarithm of the softmax's sum. */
typedef struct fp4bf16_attention_args {
    int64_t n, heads, q_tokens, k_tokens, dim;
    const void* q;
    const void* k;
    const void* v;
    void* out;
    float* lse; /* NULL: not wanted */
    int64_t q_strides[3], k_strides[3], v_strides[3], out_strides[3];
    float scale;
    int32_t causal;
    /* backward alone */
    const void* g; /* gradient in out */
    void* dq;
    void* dk;
    void* dv;
    int64_t g_strides[3], dq_strides[3], dk_strides[3], dv_strides[3];
    void* workspace; /* fp4bf16_attention_backward_workspace_size() bytes, 16-byte aligned */
} fp4bf16_attention_args;
FP4BF16_API fp4bf16_status fp4bf16_attention(const fp4bf16_attention_args* args, void* stream);
FP4BF16_API int64_t fp4bf16_attention_backward_workspace_size(const fp4bf16_attention_args* args); /* host */
/* Reads out and lse as the forward wrote them. */
FP4BF16_API fp4bf16_status fp4bf16_attention_backward(const fp4bf16_attention_args* args, void* stream);

/* Each pixel of x (n, h, w, c) as a 2 x 2 patch of y (n, 2h, 2w, c); elements of 1 or 2 bytes, copied. */
FP4BF16_API fp4bf16_status fp4bf16_upsample(const void* x, int32_t element_bytes, int64_t n, int64_t h,
                                            int64_t w, int64_t c, const int64_t x_strides[3], void* y,
                                            const int64_t y_strides[3], const int32_t* run_if, void* stream);
/* Its adjoint: the sum of each 2 x 2 patch of g (n, 2h, 2w, c) BF16, + add (NULL: none), rounded once. */
FP4BF16_API fp4bf16_status fp4bf16_upsample_backward(const void* g, int64_t n, int64_t h, int64_t w,
                                                     int64_t c, const int64_t g_strides[3], const void* add,
                                                     const int64_t add_strides[3], void* dx,
                                                     const int64_t dx_strides[3], void* stream);
/* A convolution of few channels as one of 1x1. patches: out (n, oh, ow, width) BF16 = the values that each
 * output pixel of a convolution meets in x (n, h, w, c) FP32 or BF16, in the order (kh, kw, c) of its weight,
 * zero outside the pictures and from kh * kw * c to width, a multiple of 8. out is contiguous. */
FP4BF16_API fp4bf16_status fp4bf16_patches(const void* x, fp4bf16_dtype dtype, int64_t n, int64_t h,
                                           int64_t w, int64_t c, const int64_t x_strides[3], int64_t oh,
                                           int64_t ow, int64_t kh, int64_t kw, int64_t stride, int64_t top,
                                           int64_t left, void* out, int64_t width, const int32_t* run_if,
                                           void* stream);
/* A convolution of stride 1 to few outputs: out (n, oh, ow, o) FP32 = the sum over c, then over r, s in that
 * order, of x[p - top + r, q - left + s, c] * weight[o, r, s, c], + bias (o,), NULL: none. x (n, h, w, c)
 * BF16 in rows of 16 bytes, c a multiple of 8 up to 1024; weight BF16, contiguous, o * kh * kw at most 64. */
FP4BF16_API fp4bf16_status fp4bf16_conv2d_few(const void* x, int64_t n, int64_t h, int64_t w, int64_t c,
                                              const int64_t x_strides[3], const void* weight, int64_t oh,
                                              int64_t ow, int64_t o, int64_t kh, int64_t kw, int64_t top,
                                              int64_t left, const float* bias, float* out,
                                              const int64_t out_strides[3], const int32_t* run_if,
                                              void* stream);
/* For its gradients: y (n, h, w, width) BF16 = g[p + top - r, q + left - s][o] of g (n, oh, ow, o) FP32 or
 * BF16, in the order (o, kh, kw); zeros and width as of patches. */
FP4BF16_API fp4bf16_status fp4bf16_spread_taps(const void* g, fp4bf16_dtype dtype, int64_t n, int64_t oh,
                                               int64_t ow, int64_t o, const int64_t g_strides[3], int64_t h,
                                               int64_t w, int64_t kh, int64_t kw, int64_t top, int64_t left,
                                               void* y, int64_t width, void* stream);
/* out = a + b (rows, c), BF16, rows *_stride apart. */
FP4BF16_API fp4bf16_status fp4bf16_add(const void* a, int64_t a_stride, const void* b, int64_t b_stride,
                                       int64_t rows, int64_t c, void* out, int64_t out_stride, void* stream);
/* y = silu(x), and dx = g * silu'(x); count elements of one dtype each (FP32 or BF16); in place, too. */
FP4BF16_API fp4bf16_status fp4bf16_silu(const void* x, int64_t count, fp4bf16_dtype dtype, void* y,
                                        void* stream);
FP4BF16_API fp4bf16_status fp4bf16_silu_backward(const void* g, const void* x, int64_t count,
                                                 fp4bf16_dtype dtype, void* dx, void* stream);
/* out (rows, dim) BF16: sines then cosines (flip = 1: the other way round) of t[row] * max_period^(-i /
 * (dim / 2 - freq_shift)), in FP32; an odd dim ends on a zero. t (rows,) int64; t_step 0: one for all. */
FP4BF16_API fp4bf16_status fp4bf16_timestep_embedding(const int64_t* t, int64_t t_step, int64_t rows,
                                                      int64_t dim, int32_t flip, float freq_shift,
                                                      float max_period, void* out, int64_t out_stride,
                                                      void* stream);
/* out[row] (dim,) = BF16 of weight[index[row]] FP32, and its adjoint: dweight[index[row]] += g[row], summed
 * in the order of the rows. index (rows,) int64 in [0, count): others read as zeros and add nothing. */
FP4BF16_API fp4bf16_status fp4bf16_take_rows(const float* weight, int64_t count, int64_t dim,
                                             const int64_t* index, int64_t rows, void* out,
                                             int64_t out_stride, void* stream);
FP4BF16_API fp4bf16_status fp4bf16_take_rows_backward(const void* g, int64_t g_stride, const int64_t* index,
                                                      int64_t rows, int64_t dim, float* dweight,
                                                      int64_t count, void* stream);
/* sums (c,) += the sums of the columns of x (rows, c) BF16; workspace: 4 * c * min(256, rows) bytes. */
FP4BF16_API fp4bf16_status fp4bf16_column_sums(const void* x, int64_t rows, int64_t c, int64_t x_stride,
                                               float* sums, void* workspace, void* stream);

/* out (n, count) FP32: standard normals of row i from Philox with key seeds[i], counter words (element / 4,
 * 0, stream_word, *step): the bits of fp4bf16.diffusion.noise.normal. step: device, for captured graphs. */
FP4BF16_API fp4bf16_status fp4bf16_normal(const uint64_t* seeds, int64_t n, int64_t count,
                                          uint32_t stream_word, const uint32_t* step, float* out,
                                          void* stream);

/* What a network is trained to predict, and what one step of a sampler computes from it. */
typedef enum fp4bf16_prediction { FP4BF16_EPS = 0, FP4BF16_V = 1, FP4BF16_X0 = 2 } fp4bf16_prediction;

/* x_t = sqrt(alpha_bar[t]) x0 + sqrt(1 - alpha_bar[t]) eps, FP32 (n, count), x0 being row index[i] of
 * pictures (picture_count, count), NULL index: row i; target: eps, v = sqrt(alpha_bar) eps - sqrt(1 -
 * alpha_bar) x0, or x0. index, t (n,) int64; alpha_bar (steps,) float64. Either result may be NULL. A t or an
 * index that is out of range makes its row NaN. The bits are those of fp4bf16.diffusion.schedules. */
FP4BF16_API fp4bf16_status fp4bf16_add_noise(const float* pictures, int64_t picture_count,
                                             const int64_t* index, const float* eps, const int64_t* t,
                                             const double* alpha_bar, int64_t steps, int64_t n, int64_t count,
                                             fp4bf16_prediction prediction, float* x_t, float* target,
                                             void* stream);
/* errors[i] (float64) = the mean over count of (output - target)^2, FP32 inputs (n, count). */
FP4BF16_API fp4bf16_status fp4bf16_squared_error(const float* output, const float* target, int64_t n,
                                                 int64_t count, double* errors, void* stream);
/* gradient[i] = ((output - target) * FP32(2 / count)) * FP32(weight[i]), weight float64 (n,); NULL weight:
 * (output - target) * FP32(2 / (n * count)). */
FP4BF16_API fp4bf16_status fp4bf16_squared_error_backward(const float* output, const float* target,
                                                          const double* weight, int64_t n, int64_t count,
                                                          float* gradient, void* stream);
/* Diffusion-DPO of errors (2 * pairs,), chosen then rejected, float64: weight (2 * pairs,), the gradient of
 * the loss in each error; stats (9,): loss, rewards of chosen and rejected, margin, accuracy, the means of
 * errors chosen and rejected, of reference chosen and rejected, as in fp4bf16.align.dpo; no pairs: NaN. */
FP4BF16_API fp4bf16_status fp4bf16_dpo(const double* errors, const double* reference, int64_t pairs,
                                       double beta, double* weight, double* stats, void* stream);
/* One step of DDIM or of ancestral sampling: x0 and eps from output by `prediction` at *alpha_bar, x0 clipped
 * to +-clip (0: not), eps again from it; x = a x0 + b eps + c x + d noise, terms whose factor is 0 left out
 * (b's stays where c is 0, too). coefficients: device, FP32 (8,): sqrt(alpha_bar), sqrt(1 - alpha_bar), a, b,
 * c, d, clip, unused. noise may be NULL where d = 0. The bits are those of fp4bf16.diffusion.samplers. */
FP4BF16_API fp4bf16_status fp4bf16_sampler_step(const float* output, const float* noise,
                                                const float* coefficients, fp4bf16_prediction prediction,
                                                int64_t count, float* x, void* stream);

/* *squares (float64) = the sum of squares of x (count,) FP32; workspace: 8192 bytes. */
FP4BF16_API fp4bf16_status fp4bf16_sum_of_squares(const float* x, int64_t count, double* squares,
                                                  void* workspace, void* stream);

/* AdamW (decoupled decay), the moving average of the weights, their BF16 copy and FP4 twins, in one pass: the
 * bits of fp4bf16.nn.AdamW, fp4bf16.diffusion.EMA and fp4bf16.quantize. `tensors` (device, int64
 * (tensor_count, 8)), in ascending order of: first unit over all tensors, each taking
 * fp4bf16_adamw_units(rows, columns, twin offset >= 0) of them; then offset in the flat arrays, a multiple of
 * 4; rows; columns (rows * columns elements from offset on); offset in twin, a multiple of 16, and then
 * columns is one too, -1: no twin; offset in twin_scale; 0; 0. Between tensors nothing is read or written. A
 * twin's row is nvfp4_exact, full search, one outer scale a row (twin_scale), E4M3. scalars (device, FP32
 * (8,)): lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), 1 - lr * weight_decay, factor on the gradient, 1 to step
 * and 0 to leave all but the copies as it is, 1 - decay of the average, 0, 0. gradient NULL: only the copies
 * are made anew, and scalars are not read. All arrays 16-byte aligned. */
typedef struct fp4bf16_adamw_args {
    int64_t tensor_count, units; /* units of all tensors together */
    const int64_t* tensors;
    float* parameters;
    const float* gradient;
    float* first;
    float* second;
    float* average;    /* NULL: none */
    void* bf16;        /* NULL: none */
    uint8_t* twin;     /* NULL: none */
    float* twin_scale; /* decode scales; with twin */
    const float* scalars;
    double beta1, beta2; /* 1 - beta is rounded to FP32, not beta alone */
    float eps;
} fp4bf16_adamw_args;
FP4BF16_API int64_t fp4bf16_adamw_units(int64_t rows, int64_t columns, int32_t twin); /* host; -1: bad */
FP4BF16_API fp4bf16_status fp4bf16_adamw(const fp4bf16_adamw_args* args, void* stream);
/* scalars[3] = limit / norm where that is less than 1, else 1, norm = sqrt(*squares) (limit 0: 1); scalars[4]
 * = 1 where norm and *loss (NULL: not looked at) are finite, else 0; *norm_out (NULL: not wanted) = norm. */
FP4BF16_API fp4bf16_status fp4bf16_clip_scalars(const double* squares, const double* loss, double limit,
                                                float* scalars, double* norm_out, void* stream);

/* Low-rank adapters of `layer_count` weights, each a matrix (rows, columns), by adapters up (rows, rank) and
 * down (rank, columns); FP32, products and sums in FP64 in a fixed order, the result rounded once.
 * lora_merge: weights = base + scale up down (adapters NULL: weights = base); weights may be base.
 * lora_gradient, G being the gradient in the weights: adapters_gradient = scale G down^T for up, and scale
 * up^T G for down. `layers` (device, int64 (layer_count, 8)), in ascending order of: first unit of lora_merge
 * and of lora_gradient over all layers, each taking fp4bf16_lora_units(rows, columns, gradient) of them;
 * rows; columns; offset of the weight in base, weights and gradient; offsets of down and of up in adapters
 * and adapters_gradient; 1 where these are stored transposed, down (columns, rank) and up (rank, rows), else
 * 0. Nothing else is read or written. */
typedef struct fp4bf16_lora_args {
    int64_t layer_count, units; /* units of all layers together, of the function that is called */
    int64_t rank;
    const int64_t* layers;
    const float* base;
    const float* adapters;
    float* weights;
    const float* gradient;
    float* adapters_gradient;
    double scale; /* alpha / rank */
} fp4bf16_lora_args;
FP4BF16_API int64_t fp4bf16_lora_units(int64_t rows, int64_t columns, int32_t gradient); /* host; -1: bad */
FP4BF16_API fp4bf16_status fp4bf16_lora_merge(const fp4bf16_lora_args* args, void* stream);
FP4BF16_API fp4bf16_status fp4bf16_lora_gradient(const fp4bf16_lora_args* args, void* stream);

/* cffi: end */

#ifdef __cplusplus
}
#endif
#endif /* FP4BF16_NETWORK_H */
