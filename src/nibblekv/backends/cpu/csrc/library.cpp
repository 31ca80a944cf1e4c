// The C entry points: choosing kernels for the machine, cutting a call into items, running them on threads.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "abi.h"

namespace nibblekv {
namespace {

const Kernels* detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    return &avx512_kernels;
  if (avx2) return &avx2_kernels;
#endif
  return &generic_kernels;
}

const Kernels* kernels = detect();

// GOMP_parallel of the OpenMP runtime that torch has loaded. A second pool of threads would fight with torch's, whose
// workers spin for milliseconds after every operation: on two cores our worker then waits for a core.
using ParallelFunction = void (*)(void (*)(void*), void*, unsigned, unsigned);
ParallelFunction team = nullptr;

template <typename F>
void parallel_for(int64_t count, int64_t num_threads, const F& f) {
  if (num_threads > count) num_threads = count;
  if (num_threads <= 1) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t count;
    const F* f;
  } shared;
  shared.count = count;
  shared.f = &f;
  auto worker = [](void* p) {
    Shared& s = *static_cast<Shared*>(p);
    for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) (*s.f)(i);
  };
  if (team) {
    team(worker, &shared, static_cast<unsigned>(num_threads), 0);
    return;
  }
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < num_threads; ++i) threads.emplace_back(worker, &shared);
  worker(&shared);
  for (auto& t : threads) t.join();
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kInvariantSplit = 1024;  // tokens of a split where nothing but the sequence may decide
constexpr int64_t kSmallestSplit = 512;  // below, loading the queries again costs more than a tenth
constexpr int64_t kItemsPerThread = 6;  // items to balance by
constexpr int64_t kWriteGrain = 64;  // rows: about 20 us

// Whether every page of every sequence is one of the cache's.
bool pages_exist(const AttentionArgs& a) {
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    const uint8_t* table = a.block_table + seq * a.block_table_row;
    const int64_t tokens = load_index(a.seq_lens, a.seq_lens_stride, a.seq_lens_are_64, seq);
    const int64_t pages = ceil_div(tokens, a.geometry->block_size);
    bool good = true;
    if (!a.block_table_is_64 && a.block_table_col == 4) {  // a loop that compilers vectorize
      const int32_t* page = reinterpret_cast<const int32_t*>(table);
      const uint32_t count = static_cast<uint32_t>(a.num_blocks < INT32_MAX ? a.num_blocks : INT32_MAX);
      uint32_t largest = 0;
      for (int64_t i = 0; i < pages; ++i) {
        const uint32_t number = static_cast<uint32_t>(page[i]);
        largest = number > largest ? number : largest;
      }
      good = pages == 0 || largest < count;
    } else {
      for (int64_t i = 0; i < pages; ++i)
        good &= static_cast<uint64_t>(load_index(table, a.block_table_col, a.block_table_is_64, i)) <
                static_cast<uint64_t>(a.num_blocks);
    }
    if (!good) return false;
  }
  return true;
}

struct Block {  // of rows of one (sequence, KV head)
  int64_t seq, head, row0, rows, tokens;
};

void attention(const AttentionArgs& a) {
  const Geometry& g = *a.geometry;
  const int64_t group = a.num_query_heads / g.num_kv_heads;
  std::vector<Block> blocks;
  int64_t work = 0, most = 0;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    const int64_t begin = load_index(a.query_start_loc, a.query_start_stride, a.query_start_is_64, seq);
    const int64_t queries = load_index(a.query_start_loc, a.query_start_stride, a.query_start_is_64, seq + 1) - begin;
    const int64_t seq_len = load_index(a.seq_lens, a.seq_lens_stride, a.seq_lens_are_64, seq);
    const int64_t tokens = a.key || a.prefix_only ? seq_len - queries : seq_len;
    const int64_t rows = queries * group;
    // The last blocks of a causal sequence are the longest: start with them.
    for (int64_t block = ceil_div(rows, kMaxRows) - 1; block >= 0; --block)
      for (int64_t head = 0; head < g.num_kv_heads; ++head) {
        const int64_t row0 = block * kMaxRows;
        blocks.push_back({seq, head, row0, rows - row0 < kMaxRows ? rows - row0 : kMaxRows, tokens});
        work += tokens;
        if (tokens > most) most = tokens;
      }
  }
  if (blocks.empty()) return;
  int64_t split_size = ceil_div(most > 0 ? most : 1, kTile) * kTile;
  if (a.batch_invariant) {
    split_size = kInvariantSplit;
  } else if (a.num_threads > 1 && most > 0 && static_cast<int64_t>(blocks.size()) < kItemsPerThread * a.num_threads) {
    const int64_t wanted = ceil_div(work, kItemsPerThread * a.num_threads);
    const int64_t splits = ceil_div(most, wanted < kSmallestSplit ? kSmallestSplit : wanted);
    split_size = ceil_div(ceil_div(most, splits), kTile) * kTile;  // of one size: a rest would leave a thread idle
  }
  const bool spread = a.num_threads > 1 && static_cast<int64_t>(blocks.size()) < kItemsPerThread * a.num_threads;
  std::vector<Item> items, merges;
  std::vector<int64_t> merge_of;  // by item; -1: the item is a whole block
  int64_t slots = 0;
  for (const Block& b : blocks) {
    const int64_t splits = b.tokens > 0 ? ceil_div(b.tokens, split_size) : 1;
    if (spread && splits > 1) {
      for (int64_t s = 0; s < splits; ++s) {
        items.push_back({b.seq, b.head, b.row0, b.rows, s, s + 1, splits, slots + s * b.rows});
        merge_of.push_back(static_cast<int64_t>(merges.size()));
      }
      merges.push_back({b.seq, b.head, b.row0, b.rows, 0, splits, splits, slots});
      slots += splits * b.rows;
    } else {
      items.push_back({b.seq, b.head, b.row0, b.rows, 0, splits, splits, -1});
      merge_of.push_back(-1);
    }
  }
  const int64_t width = kMaxHeadSize * ((a.key && !a.prefix_only) || a.raw_key ? 2 : 1);
  std::unique_ptr<Partial[]> partials(slots ? new Partial[slots] : nullptr);
  std::unique_ptr<float[]> accumulators(slots ? new float[slots * width] : nullptr);
  std::unique_ptr<std::atomic<int64_t>[]> left(merges.empty() ? nullptr : new std::atomic<int64_t>[merges.size()]);
  for (size_t i = 0; i < merges.size(); ++i) left[i] = merges[i].num_splits;
  const Plan plan{&a, split_size, partials.get(), accumulators.get(), width};
  parallel_for(items.size(), a.num_threads, [&](int64_t i) {
    kernels->attend(plan, items[i]);
    // Whoever finishes a block's last split merges it: no second round of threads. The order of the sums is fixed.
    if (merge_of[i] >= 0 && left[merge_of[i]].fetch_sub(1) == 1) kernels->merge(plan, merges[merge_of[i]]);
  });
}

}  // namespace
}  // namespace nibblekv

using namespace nibblekv;

extern "C" {

// Bytes of the records that callers hand over; a library of other sources would read them wrongly.
__attribute__((visibility("default"))) int64_t nibblekv_attention_bytes() { return sizeof(AttentionArgs); }
__attribute__((visibility("default"))) int64_t nibblekv_write_bytes() { return sizeof(WriteArgs); }

// Returns 0; 1 if memory ran out; 2, with nothing written, if the block table names a page that the cache lacks.
__attribute__((visibility("default"))) int nibblekv_attention(const void* args) {
  if (!pages_exist(*static_cast<const AttentionArgs*>(args))) return 2;
  try {
    attention(*static_cast<const AttentionArgs*>(args));
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

__attribute__((visibility("default"))) void nibblekv_write(const void* args) {
  const WriteArgs& a = *static_cast<const WriteArgs*>(args);
  const int64_t rows = a.num_tokens * a.geometry->num_kv_heads;
  parallel_for(ceil_div(rows, kWriteGrain), a.num_threads, [&](int64_t i) {
    kernels->write(a, i * kWriteGrain, (i + 1) * kWriteGrain < rows ? (i + 1) * kWriteGrain : rows);
  });
}

__attribute__((visibility("default"))) void nibblekv_set_team(void* function) {
  team = reinterpret_cast<ParallelFunction>(function);
}

__attribute__((visibility("default"))) const char* nibblekv_instruction_set() { return kernels->name; }

// Uses the kernels of that name from now on; returns whether this machine can run them. "" means the best.
__attribute__((visibility("default"))) int nibblekv_use_instruction_set(const char* name) {
  const Kernels* best = detect();
  if (!*name) {
    kernels = best;
    return 1;
  }
  for (const Kernels* k : {
#if defined(__x86_64__)
           &avx512_kernels, &avx2_kernels,
#endif
           &generic_kernels}) {
    if (k == best) best = nullptr;  // this one and those after it run here
    if (!best && !strcmp(k->name, name)) {
      kernels = k;
      return 1;
    }
  }
  return 0;
}
}
