// How group normalisation is cut into slabs, see norm_slab.cuh.
#include "norm_slab.cuh"

#include <algorithm>

namespace fp4bf16 {

bool norm_slabs(int64_t n, int64_t pixels, int64_t c, int64_t groups, int most_parts, NormSlabs* slabs) {
    const int64_t group = c / groups;
    if (c % kSlab != 0 || c > int64_t{1} << 20 || group < 4 || kSlab % group != 0) return false;
    if (n > int64_t{65535} * 65535) return false;
    // One warp of two chunks a lane, up to eight of four: fewer chunks are slower where there are many
    // images, since each warp has some 500 instructions to do whatever it holds.
    int chunks = 2, parts = 1;
    const auto room = [&] { return int64_t{kSlabRows} * chunks * (chunks == 2 ? 1 : 2 * chunks); };
    if (pixels > room()) chunks = 4;
    while (parts < most_parts && pixels > parts * room()) parts *= 2;
    if (pixels > parts * room()) return false;
    const int64_t part = ceil_div(pixels, parts), warps = ceil_div(part, int64_t{kSlabRows} * chunks);
    slabs->pixels = static_cast<int>(pixels), slabs->slabs = static_cast<int>(c / kSlab);
    slabs->part = static_cast<int>(part), slabs->parts = parts, slabs->parts_shift = 0;
    while (1 << slabs->parts_shift < parts) ++slabs->parts_shift;
    slabs->chunks = chunks, slabs->warps = static_cast<int>(warps);
    // Thread blocks of about four warps at least, so that a multiprocessor's places for them do not run out.
    slabs->teams =
        parts > 1 ? 1 : static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(4 / warps, slabs->slabs)));
    slabs->group_shift = 0;
    while (int64_t{1} << slabs->group_shift < group) ++slabs->group_shift;
    slabs->inverse_count = 1.0f / (static_cast<float>(pixels) * static_cast<float>(group));
    return true;
}

}  // namespace fp4bf16
