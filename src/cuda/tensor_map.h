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

}  // namespace fp4bf16
