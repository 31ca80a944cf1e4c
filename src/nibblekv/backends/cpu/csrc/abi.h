// The records that Python fills (struct.pack, 8 bytes a field; see _library.py) and the kernels read.
#pragma once
#include <cstdint>

namespace nibblekv {

enum DataType : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat8 = 3 };
enum CodeKind : int64_t { kUint4 = 0, kInt8 = 1, kFp8 = 2 };  // kUint4: 4 bits or less
enum WordKind : int64_t { kScaleMin = 0, kScaleZero = 1, kScale = 2 };

// y = gain * (H_p kron B) (signs * x), or I kron H_p where not outer; x = inverse_gain * R^T y.
struct Rotation {
  int64_t p, m, outer, size;
  float gain, inverse_gain;
  const float *base, *base_transposed;  // [m][m]
  const float* signs;  // [size]
};

// Codes and words of keys or of values; offsets and strides in bytes from the cache's first byte.
struct Side {
  int64_t codes_offset, block_stride, slot_stride, head_stride;
  int64_t words_offset, word_block_stride, word_slot_stride, word_head_stride;
  int64_t code, bits, word, head_size, row_bytes, stored_bytes;  // row_bytes: with codes of less than 4 bits widened to 4
  const Rotation* rotation;
};

struct Geometry {
  Side k, v;
  int64_t block_size, num_kv_heads;
};

// The shape of caches that were checked and have this geometry, with any number of blocks. Strides in bytes.
struct CacheShape {
  const Geometry* geometry;
  int64_t dims, shape[4], strides[4];
};

struct WriteArgs {
  const Geometry* geometry;
  uint8_t* kv_cache;
  const uint8_t *key, *value;
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;  // bytes
  int64_t dtype;
  const uint8_t* slot_mapping;
  int64_t slot_stride, slots_are_64;
  int64_t num_tokens, num_threads;
};

struct AttentionArgs {
  const Geometry* geometry;
  const uint8_t* kv_cache;
  const uint8_t* query;
  int64_t query_token_stride, query_head_stride, query_dtype;  // strides in bytes
  uint8_t* out;
  int64_t out_token_stride, out_head_stride, out_dtype;
  float* lse;  // [num_tokens][num_query_heads] or null
  const uint8_t *key, *value;  // the queries' own rows, or null
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride, key_dtype, value_dtype;
  const uint8_t* block_table;
  int64_t block_table_row, block_table_col, block_table_is_64;  // strides in bytes
  const uint8_t* seq_lens;
  int64_t seq_lens_stride, seq_lens_are_64;
  const uint8_t* query_start_loc;
  int64_t query_start_stride, query_start_is_64;
  int64_t num_seqs, num_query_heads, num_blocks;
  int64_t causal;
  const uint8_t* causal_flags;  // [num_seqs] or null
  int64_t sliding_window, chunk_size, chunk_lookback;
  const int64_t* rswa_prefix_lens;  // [num_seqs] or null
  int64_t rswa_window;
  const float* alibi_slopes;  // [num_query_heads] or null
  int64_t alibi_sqrt;
  const float* sinks;  // [num_query_heads] or null
  const float* qq_bias;  // [qq_stride][qq_stride] or null
  int64_t qq_stride;
  const int32_t* mm_ranges;  // [num_seqs][mm_count][2] or null
  int64_t mm_count, mm_clamp;
  const uint8_t *raw_key, *raw_value;  // unquantized rows of the first and newest tokens of each sequence, or null
  int64_t raw_key_seq_stride, raw_key_row_stride, raw_key_head_stride;  // bytes
  int64_t raw_value_seq_stride, raw_value_row_stride, raw_value_head_stride;
  int64_t raw_dtype, raw_ring, raw_sinks, raw_window;
  int64_t batch_invariant, prefix_only, num_threads;
  double softmax_scale, softcap, output_scale;  // output_scale 0: none
};

static_assert(sizeof(Side) == 15 * 8 && sizeof(Geometry) == 32 * 8, "_library.py packs these fields");
static_assert(sizeof(CacheShape) == 10 * 8, "_library.py packs these fields");
static_assert(sizeof(WriteArgs) == 14 * 8 && sizeof(AttentionArgs) == 65 * 8, "__init__.py packs these fields");

inline int64_t load_index(const uint8_t* base, int64_t stride, int64_t is_64, int64_t i) {
  const uint8_t* p = base + i * stride;
  return is_64 ? *reinterpret_cast<const int64_t*>(p) : *reinterpret_cast<const int32_t*>(p);
}

// One unit of work: rows [row0, row0 + rows) of (sequence, KV head), row = query * group + head of the group, over the
// splits [first_split, last_split) of its tokens. partial >= 0: where to leave the states to be merged.
struct Item {
  int64_t seq, head, row0, rows, first_split, last_split, num_splits, partial;
};

struct Partial {  // one row's state: in units of 2^m
  float m;
  int32_t nan;
  double l, shared;
};

struct Plan {
  const AttentionArgs* args;
  int64_t split_size;  // tokens, a multiple of the tile
  Partial* partials;  // [slots]
  float* accumulators;  // [slots][accumulator_size]
  int64_t accumulator_size;
};

struct Kernels {
  const char* name;
  void (*attend)(const Plan&, const Item&);
  void (*merge)(const Plan&, const Item&);
  void (*write)(const WriteArgs&, int64_t begin, int64_t end);
};

constexpr int64_t kMaxRows = 32;
constexpr int64_t kTile = 256;
constexpr int64_t kMaxHeadSize = 512;

extern const Kernels generic_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

}  // namespace nibblekv
