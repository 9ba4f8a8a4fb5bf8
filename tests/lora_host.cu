// The adapters' kernels on the host, for tests/test_cuda_lora.py: their own code, with loops over thread
// blocks and, between two barriers, over threads.
#include <vector>

#include "lora.cuh"

using namespace fp4bf16;

namespace {
template <typename Threads, typename Function>
void each(Threads& threads, const Function& function) {
    for (auto& thread : threads) function(thread);
}

template <typename Thread>
std::vector<Thread> block(const fp4bf16_lora_args& a, const LoraLayer& t) {
    std::vector<Thread> threads;
    for (int lane = 0; lane < kLoraLanes; ++lane) threads.push_back(Thread{a, t, lane});
    return threads;
}
}  // namespace

extern "C" int64_t host_units(int64_t rows, int64_t columns, int32_t gradient) {
    return gradient != 0 ? up_units(rows) + down_units(columns) : merge_units(rows, columns);
}

extern "C" void host_merge(const fp4bf16_lora_args* a) {
    for (int64_t unit = 0; unit < a->units; ++unit) {
        const LoraLayer t(*a, 0, unit);
        auto threads = block<Merge>(*a, t);
        std::vector<double> up(kMergeRows * kMergeRanks, NAN);
        for (int first = 0; a->adapters != nullptr && first < t.rank; first += kMergeRanks) {
            each(threads, [&](Merge& m) { m.stage(first, up.data()); });
            each(threads, [&](Merge& m) { m.add(first, up.data()); });
        }
        each(threads, [](Merge& m) { m.store(); });
    }
}

extern "C" void host_gradient(const fp4bf16_lora_args* a) {
    for (int64_t unit = 0; unit < a->units; ++unit) {
        const LoraLayer t(*a, 1, unit);
        std::vector<double> sums(kUpSums * kPitch, NAN);
        if (t.unit < up_units(t.rows)) {
            auto threads = block<Up>(*a, t);
            for (int first = 0; first < t.rank; first += kRanks) {
                each(threads, [&](Up& u) { u.add(first, sums.data()); });
                each(threads, [&](Up& u) { u.quarter(sums.data()); });
                each(threads, [&](Up& u) { u.store(first, sums.data()); });
            }
            continue;
        }
        auto threads = block<Down>(*a, t);
        for (int first = 0; first < t.rank; first += kRanks) {
            each(threads, [&](Down& d) { d.add(first, sums.data()); });
            each(threads, [&](Down& d) { d.store(first, sums.data()); });
        }
    }
}
