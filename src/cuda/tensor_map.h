// Host side: descriptors of operands for the copy engine.
#pragma once

#include <cuda.h>

#include "common.h"

namespace fp4bf16 {

// Box of (box_rows, box_columns) elements of a (batch, rows, columns) array, columns contiguous, laid out in
// shared memory in rows of 128 bytes under the 128-byte swizzle; what lies outside the array reads as zero.
struct MapShape {
    int64_t columns, rows, batch;
    int64_t row_stride, batch_stride;  // elements
    int box_columns, box_rows;
};

// `element_bytes`: 1 (E4M3) or 2 (BF16). The pointer and both strides must be multiples of 16 bytes.
fp4bf16_status make_tensor_map(const char* function, const char* name, const void* pointer, int element_bytes,
                               const MapShape& shape, CUtensorMap* map);

// Pictures (n, h, w, channels), strides in elements of image, row, pixel. A box is `box` = (channels, pixels
// of a row, rows, images) as they lie in shared memory, channels innermost, under the 128-byte swizzle (the
// 64-byte one where they are 64 bytes); its pixels and rows are `step` apart in the picture (1 or 2), its
// place is given in the picture's own pixels.
struct PictureShape {
    int64_t channels, w, h, n;
    const int64_t* strides;
    int box[4];
    int step;
};

// For loads and stores. The pointer and every stride must be multiples of 16 bytes.
fp4bf16_status make_picture_map(const char* function, const char* name, const void* pointer,
                                int element_bytes, const PictureShape& shape, CUtensorMap* map);

}  // namespace fp4bf16
