// Who takes which pixel in norm_apply.cu, on the host, for tests/test_norm_host.py: the kernel's own plan and
// places, and loops for its thread blocks and threads.
#include "norm_apply.cuh"

#include <vector>

using namespace fp4bf16;

namespace {

ApplyPlan plan_of(int64_t n, int64_t pixels, int64_t vectors, int64_t slots) {
    ApplyPlan plan = passes_of(pixels, vectors);
    share_out(n, slots, &plan);
    return plan;
}

}  // namespace

extern "C" {

// passes, blocks, threads, rows.
void host_plan(int64_t n, int64_t pixels, int64_t vectors, int64_t slots, int64_t* out) {
    const ApplyPlan p = plan_of(n, pixels, vectors, slots);
    out[0] = p.passes, out[1] = p.blocks, out[2] = p.threads, out[3] = p.rows;
}

// Where each thread block's passes begin, and where the last one's end: (blocks + 1,).
void host_starts(int64_t n, int64_t pixels, int64_t vectors, int64_t slots, int64_t* out) {
    const ApplyPlan p = plan_of(n, pixels, vectors, slots);
    for (unsigned b = 0; b <= p.blocks; ++b) out[b] = first_pass(p, b);
}

// Segments (image, pass, count) of a thread block, `most` at most: their number.
int64_t host_segments(int64_t n, int64_t pixels, int64_t vectors, int64_t slots, unsigned block, int64_t most,
                      int64_t* out) {
    const ApplyPlan p = plan_of(n, pixels, vectors, slots);
    int64_t found = 0;
    const unsigned end = first_pass(p, block + 1);
    for (unsigned pass = first_pass(p, block); pass < end && found < most; ++found) {
        const Segment g = segment_at(p, pass, end);
        out[3 * found] = g.image, out[3 * found + 1] = g.pass, out[3 * found + 2] = g.count;
        pass += g.count;
    }
    return found;
}

// Adds one to taken (n, pixels, vectors) where a thread takes that, and to written (n,) where a thread block
// writes an image's statistics. Returns how often pixels were taken without their image's statistics.
int64_t host_take(int64_t n, int64_t pixels, int64_t vectors, int64_t slots, int32_t* taken,
                  int32_t* written) {
    const ApplyPlan p = plan_of(n, pixels, vectors, slots);
    int64_t without = 0;
    for (unsigned block = 0; block < p.blocks; ++block) {
        const unsigned first = first_pass(p, block), end = first_pass(p, block + 1);
        int64_t image = -1;
        for (unsigned pass = first; pass < end;) {
            const Segment g = segment_at(p, pass, end);
            if (g.pass == 0 || pass == first) image = g.image, written[image] += g.pass == 0;
            without += image != g.image;
            for (unsigned thread = 0; thread < static_cast<unsigned>(p.threads); ++thread) {
                const ApplyPlace t(p, pixels, g, thread);
                for (int k = 0; k < t.count; ++k)
                    ++taken[(t.image * pixels + t.pixel + int64_t{k} * p.rows) * vectors + t.vector];
            }
            pass += g.count;
        }
    }
    return without;
}

}  // extern "C"
