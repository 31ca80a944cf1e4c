// Attention of one item: rows of queries x tiles of tokens, online softmax in units of log2.
#pragma once

namespace nibblekv {
namespace NKV_ISA {

constexpr float kLog2e = 1.44269504088896341f;
constexpr int64_t kGroups = kTile / 16;

NKV_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
NKV_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

struct States {  // of the rows of an item, over the tokens seen so far
  Partial row[kMaxRows];
  alignas(64) float pages[kMaxRows * kMaxHeadSize];  // rotated domain, in the order of the value kernel, units of 2^m
  alignas(64) float raw[kMaxRows * kMaxHeadSize];  // unquantized values
};

struct Workspace {  // one per thread
  States states, total;
  alignas(64) float query_rotated[kMaxRows * kMaxHeadSize];
  alignas(64) float query_raw[kMaxRows * kMaxHeadSize];
  alignas(64) int32_t operand[kMaxRows * kMaxHeadSize / 2];
  alignas(64) float scores[kMaxRows * kTile];  // then weights
  alignas(64) int32_t quads[4 * kTile];  // of weights, 4 rows; see ValueRow
  alignas(64) float keys[kMaxHeadSize * kTile];  // [dimension][token]
  alignas(64) float values[kTile * kMaxHeadSize];  // [token][dimension]
  alignas(64) uint8_t key_codes[2][kMaxHeadSize * 32 + 16 * 64];  // of two groups, and of the next two
  alignas(64) uint8_t value_codes[kMaxHeadSize * kTile];
  alignas(64) float k_scale[kTile], k_bias[kTile], v_scale[kTile], v_bias[kTile];
  float float8[256];
};

static Workspace& workspace() {
  static thread_local Workspace* mine = nullptr;  // kept as long as its thread: 1.3 MB
  if (!mine) {
    mine = static_cast<Workspace*>(aligned_alloc(64, (sizeof(Workspace) + 63) / 64 * 64));
    memset(static_cast<void*>(mine), 0, sizeof(Workspace));
    for (int i = 0; i < 256; ++i) mine->float8[i] = from_float8(static_cast<uint8_t>(i));
  }
  return *mine;
}

struct Pages {  // the rows of one tile, by groups of 16 tokens
  const uint8_t *k[kGroups], *v[kGroups], *k_words[kGroups], *v_words[kGroups];
};

struct Bits {  // tokens of a tile
  uint64_t word[kTile / 64];
  uint32_t of16(int64_t t) const { return static_cast<uint32_t>(word[t / 64] >> (t % 64)) & 0xFFFFu; }
};

enum class Form { kAny, kPacked, kRaw };  // how a query reads a position before its chunk
enum Seen { kNone, kSome, kAll };  // of the tokens of a tile, and kAll only where they are whole groups of 16

struct Context {  // of one item
  const AttentionArgs& a;
  const Geometry& g;
  const Item& item;
  Workspace& w;
  int64_t group, begin, query_len, seq_len, context_len, paged_len, rows;
  int64_t value_width, page_values;  // of accumulators: unquantized values, and those of pages
  bool causal, special, own, ring, raw, k_int, v_int;  // own: the queries' own rows, ring: raw_key, raw: one of them
  float factor;  // of the operands: softmax_scale, and log2(e) unless options need natural units
  float sum[kMaxRows];  // of the rotated query, times factor
  float operand_scale[kMaxRows];
  int32_t center[kMaxRows];
  int64_t query_of[kMaxRows];
  float decay[kMaxRows];

  Context(const AttentionArgs& args, const Item& it)
      : a(args), g(*args.geometry), item(it), w(workspace()) {
    group = a.num_query_heads / g.num_kv_heads;
    begin = load_index(a.query_start_loc, a.query_start_stride, a.query_start_is_64, item.seq);
    query_len = load_index(a.query_start_loc, a.query_start_stride, a.query_start_is_64, item.seq + 1) - begin;
    seq_len = load_index(a.seq_lens, a.seq_lens_stride, a.seq_lens_are_64, item.seq);
    context_len = seq_len - query_len;
    own = a.key != nullptr && !a.prefix_only;
    paged_len = own || a.prefix_only ? context_len : seq_len;
    ring = a.raw_key != nullptr;
    raw = own || ring;
    rows = item.rows;
    causal = a.causal_flags ? a.causal_flags[item.seq] : a.causal;
    special = a.softcap > 0 || a.alibi_slopes || a.qq_bias;
    factor = static_cast<float>(a.softmax_scale) * (special ? 1.0f : kLog2e);
    k_int = NKV_AVX512 && g.k.code != kFp8;
    v_int = NKV_AVX512 && g.v.code != kFp8;
    value_width = page_values = (g.v.head_size + 15) / 16 * 16;
#if NKV_AVX512
    if (v_int) page_values = value_accumulator_size(g.v.row_bytes, g.v.code == kUint4);
#endif
    for (int64_t r = 0; r < rows; ++r) query_of[r] = (item.row0 + r) / group;
  }
  int64_t query(int64_t r) const { return query_of[r]; }
  int64_t head(int64_t r) const { return item.head * group + (item.row0 + r) % group; }
  int64_t position(int64_t r) const { return context_len + query(r); }

  // Calls f(first, end) for ranges of visible positions whose union is what a query at q sees.
  template <typename F>
  NKV_INLINE_MEMBER void ranges(int64_t q, F f) const {
    const int64_t end = causal ? min64(q + 1, seq_len) : seq_len;
    if (a.chunk_lookback >= 0) {
      f(max64(0, (q / a.chunk_size - a.chunk_lookback) * a.chunk_size), end);
    } else if (a.rswa_prefix_lens) {
      f(int64_t{0}, min64(a.rswa_prefix_lens[item.seq], end));
      f(max64(0, q - a.rswa_window + 1), end);
    } else if (a.sliding_window > 0) {
      f(max64(0, q - a.sliding_window + 1), causal ? end : min64(end, q + a.sliding_window));
    } else {
      f(int64_t{0}, end);
    }
    for (int64_t i = 0; i < a.mm_count; ++i) {
      const int32_t* range = a.mm_ranges + (item.seq * a.mm_count + i) * 2;
      if (range[0] < range[1] && q >= range[0] && q <= range[1])
        f(a.mm_clamp && a.sliding_window > 0 ? max64(range[0], q - a.sliding_window + 1) : int64_t{range[0]},
          min64(int64_t{range[1]} + 1, seq_len));
    }
  }

  // Bits of the positions [first, first + n) that row r sees and reads in this form.
  Seen visible(int64_t r, int64_t first, int64_t n, Form form, Bits* bits) const {
    *bits = Bits{};
    Seen seen = kNone;
    const int64_t q = position(r), all = seq_len, window = a.raw_window > 0 ? q - a.raw_window + 1 : all;
    auto add = [&](int64_t low, int64_t high) {
      ranges(q, [&](int64_t from, int64_t to) {
        from = max64(max64(from, low) - first, 0);
        to = min64(min64(to, high) - first, n);
        if (from >= to) return;
        if (seen == kNone) seen = kSome;
        if (from == 0 && to == n && n % 16 == 0) seen = kAll;
        for (int64_t i = from / 64; i <= (to - 1) / 64; ++i) {
          const int64_t begin = max64(from - 64 * i, 0), end = min64(to - 64 * i, 64);
          bits->word[i] |= (~0ULL >> (64 - (end - begin))) << begin;
        }
      });
    };
    if (form == Form::kRaw) {
      add(0, a.raw_sinks);
      add(window, all);
    } else {
      const bool packed = ring && form == Form::kPacked;
      add(packed ? a.raw_sinks : 0, packed ? window : all);
    }
    return seen;
  }
};

// Scale and bias of 16 tokens; the bias takes in the codes' centre. Returns zeros, but NaN where a word is not a number: its
// scale and bias are 0.
NKV_INLINE v16 load_words(const Side& side, const uint8_t* p, float* scale, float* bias) {
  i16 word;
  if (side.word_slot_stride == 4) {
    word = *reinterpret_cast<const i16u*>(p);
  } else {
    int32_t words[16];
    for (int t = 0; t < 16; ++t) memcpy(words + t, p + t * side.word_slot_stride, 4);
    word = *reinterpret_cast<const i16u*>(words);
  }
  v16 s, b = (v16){};
  if (side.word == kScaleMin) {
    s = (v16)(word & -0x10000);
    b = (v16)(word << 16);
  } else if (side.word == kScaleZero) {
    s = (v16)(word & ~15);
    b = -__builtin_convertvector(word & 15, v16) * s;
  } else {
    s = (v16)word;
  }
  if (side.code == kUint4) b = fma16(s, splat(static_cast<float>(1 << (side.bits - 1))), b);
  const v16 zero = fma16(s, (v16){}, b * (v16){});
#if NKV_AVX512
  const __mmask16 good = _mm512_cmp_ps_mask((__m512)zero, (__m512)zero, _CMP_ORD_Q);
  _mm512_store_ps(scale, _mm512_maskz_mov_ps(good, (__m512)s));
  _mm512_store_ps(bias, _mm512_maskz_mov_ps(good, (__m512)b));
#else
  const i16 good = zero == zero;
  store16(scale, (v16)((i16)s & good));
  store16(bias, (v16)((i16)b & good));
#endif
  return zero;
}

#if NKV_AVX512
constexpr float kSmallestOperand = 0x1p-110f;  // kLargestOperand divided by anything above is finite

NKV_INLINE __m512i round_operand(__m512 x, float inverse) {
  return _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse)));
}

NKV_INLINE void split_operand(__m512i q, __m128i* high, __m128i* low) {
  const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
  *high = _mm512_cvtepi32_epi8(h);
  *low = _mm512_cvtepi32_epi8(q);  // minus 256 h
}

// The bytes of one query for the dot products; see KeyRow. Sums wrap, as the dot products do that they are taken from.
static void make_operand(Context& c, int64_t r) {
  const int64_t n = c.g.k.head_size;
  const bool nibbles = c.g.k.code == kUint4;
  const float* x = c.w.query_rotated + r * kMaxHeadSize;
  auto load = [&](int64_t d) { return _mm512_maskz_loadu_ps(n - d >= 16 ? 0xFFFF : n > d ? 0x00FF : 0, x + d); };
  __m512 top = _mm512_setzero_ps();
  for (int64_t d = 0; d < n; d += 16) top = _mm512_max_ps(top, _mm512_abs_ps(load(d)));
  const float largest = _mm512_reduce_max_ps(top), limit = nibbles ? kLargestNibbles : kLargestOperand;
  const float inverse = largest > kSmallestOperand ? limit / largest : 0.0f;
  __m128i* out = reinterpret_cast<__m128i*>(c.w.operand + r * kMaxHeadSize / 2);
  __m512i center = _mm512_setzero_si512();
  if (nibbles) {
    const __m512i even_lanes = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd_lanes = _mm512_add_epi32(even_lanes, _mm512_set1_epi32(1));
    const __m512 scale = _mm512_set1_ps(inverse), sixteenth = _mm512_set1_ps(0.0625f);
    for (int64_t d = 0; d < n; d += 32, out += 4) {
      const __m512 a = load(d), b = load(d + 16);
      const __m512i byte = round_operand(_mm512_permutex2var_ps(a, odd_lanes, b), inverse);
      const __m512 even = _mm512_mul_ps(_mm512_permutex2var_ps(a, even_lanes, b), scale);
      const __m512i rest = _mm512_cvtps_epi32(_mm512_fnmadd_ps(_mm512_cvtepi32_ps(byte), sixteenth, even));
      const __m512i byte_center = _mm512_mullo_epi32(byte, _mm512_set1_epi32(8 * 17));  // 8 for each of its codes
      center = _mm512_add_epi32(center, _mm512_add_epi32(_mm512_slli_epi32(rest, 7), byte_center));
      __m128i even_high, even_low, byte_high, byte_low;
      split_operand(rest, &even_high, &even_low);
      split_operand(byte, &byte_high, &byte_low);
      const __m128i e0 = _mm_unpacklo_epi32(even_high, even_low), e1 = _mm_unpackhi_epi32(even_high, even_low);
      const __m128i b0 = _mm_unpacklo_epi32(byte_high, byte_low), b1 = _mm_unpackhi_epi32(byte_high, byte_low);
      _mm_store_si128(out, _mm_unpacklo_epi64(e0, b0));
      _mm_store_si128(out + 1, _mm_unpackhi_epi64(e0, b0));
      _mm_store_si128(out + 2, _mm_unpacklo_epi64(e1, b1));
      _mm_store_si128(out + 3, _mm_unpackhi_epi64(e1, b1));
    }
  } else {
    for (int64_t d = 0; d < n; d += 16, out += 2) {
      const __m512i q = round_operand(load(d), inverse);
      center = _mm512_add_epi32(center, _mm512_slli_epi32(q, 7));
      __m128i high, low;
      split_operand(q, &high, &low);
      _mm_store_si128(out, _mm_unpacklo_epi32(high, low));
      _mm_store_si128(out + 1, _mm_unpackhi_epi32(high, low));
    }
  }
  c.center[r] = _mm512_reduce_add_epi32(center);
  c.operand_scale[r] = largest / limit * (nibbles ? 0.0625f : 1.0f);
}

// Rows of another pitch than their bytes, of 8-bit codes or of less than 4 bits.
__attribute__((noinline)) static void spread_any_keys(const Side& k, const uint8_t* rows, uint8_t* dst) {
  alignas(64) uint8_t wide[kWideBytes];
  int64_t stride = k.slot_stride, bytes = k.row_bytes;
  rows = widen_rows(k, rows, &stride, wide);
  if (k.code != kUint4)
    transpose_keys<true, false>(rows, stride, bytes, dst);
  else if (bytes % 32)
    transpose_keys<false, false>(rows, stride, bytes, dst);
  else
    transpose_keys<false, true>(rows, stride, bytes, dst);
}

__attribute__((noinline)) static void spread_any_values(const Side& v, const uint8_t* rows, int64_t group, uint8_t* dst) {
  alignas(64) uint8_t wide[kWideBytes];
  int64_t stride = v.slot_stride, bytes = v.row_bytes;
  rows = widen_rows(v, rows, &stride, wide);
  if (v.code != kUint4)
    interleave_values<true, false>(rows, stride, bytes, group, dst);
  else if (bytes % 32)
    interleave_values<false, false>(rows, stride, bytes, group, dst);
  else
    interleave_values<false, true>(rows, stride, bytes, group, dst);
}

// Bytes of a row of 4-bit codes that lies close to the next one, so that addresses are constants; else 0.
NKV_INLINE int64_t close_rows(const Side& side) {
  return side.code == kUint4 && side.bits == 4 && side.slot_stride == side.row_bytes ? side.row_bytes : 0;
}

NKV_INLINE void spread_keys(const Side& k, const uint8_t* rows, uint8_t* dst) {
  switch (close_rows(k)) {
    case 32: transpose_keys<false, true>(rows, 32, 32, dst); break;
    case 64: transpose_keys<false, true>(rows, 64, 64, dst); break;
    default: spread_any_keys(k, rows, dst);
  }
}

NKV_INLINE void spread_values(const Side& v, const uint8_t* rows, int64_t group, uint8_t* dst) {
  switch (close_rows(v)) {
    case 32: interleave_values<false, true>(rows, 32, 32, group, dst); break;
    case 64: interleave_values<false, true>(rows, 64, 64, group, dst); break;
    default: spread_any_values(v, rows, group, dst);
  }
}

static void score_pages_int(Context& c, const Pages& pages, int64_t groups, const Pages& next, int64_t next_groups,
                            Prefetches& ahead) {
  const bool nibbles = c.g.k.code == kUint4;
  const int64_t dwords = c.g.k.row_bytes / 4;
  KeyRow rows[kMaxRows];
  for (int64_t r = 0; r < c.rows; ++r)
    rows[r] = {c.w.operand + r * kMaxHeadSize / 2, c.center[r], c.operand_scale[r], c.sum[r]};
  auto spread = [&](int64_t g) {
    uint8_t* keys = c.w.key_codes[g / 2 % 2];
    spread_keys(c.g.k, pages.k[g], keys);
    if (g + 1 < groups) spread_keys(c.g.k, pages.k[g + 1], keys + dwords * 64);
  };
  spread(0);
  for (int64_t g = 0; g < groups; g += 2) {  // beyond an odd count of groups, scores of scratch that nobody reads
    // What the dot products below do not wait for: shuffles keep one of the two ports for vectors busy, and while they wait
    // for memory, neither.
    if (g + 2 < groups) spread(g + 2);
    if (c.v_int)
      for (int64_t i = g; i < min64(g + 2, groups); ++i) spread_values(c.g.v, pages.v[i], i, c.w.value_codes);
    const uint8_t* keys = c.w.key_codes[g / 2 % 2];
    for (int64_t i = g; i < min64(g + 2, next_groups); ++i) {
      __builtin_prefetch(next.k_words[i]);
      __builtin_prefetch(next.v_words[i]);
    }
    const float *scale = c.w.k_scale + 16 * g, *bias = c.w.k_bias + 16 * g;
    const Prefetches begin = ahead;
    for (int64_t r = 0; r < c.rows; r += 4) {
      ahead = begin;
      float* out = c.w.scores + r * kTile + 16 * g;
#define NKV_CASE(N)                                                                    \
  case N:                                                                              \
    nibbles ? dot_nibble_keys<N>(keys, dwords, rows + r, scale, bias, out, ahead)      \
            : dot_byte_keys<N>(keys, dwords, rows + r, scale, bias, out, ahead);       \
    break;
      switch (min64(4, c.rows - r)) { NKV_CASE(1) NKV_CASE(2) NKV_CASE(3) NKV_CASE(4) }
#undef NKV_CASE
    }
  }
}
#endif

static void score_float(Context& c, const float* query, int64_t tokens) {
  for (int64_t r = 0; r < c.rows; r += 4) {
    const float* q = query + r * kMaxHeadSize;
    float* out = c.w.scores + r * kTile;
    const int64_t size = c.g.k.head_size;
    switch (min64(4, c.rows - r)) {
      case 1: dot_keys_float<1>(c.w.keys, size, tokens, q, out); break;
      case 2: dot_keys_float<2>(c.w.keys, size, tokens, q, out); break;
      case 3: dot_keys_float<3>(c.w.keys, size, tokens, q, out); break;
      default: dot_keys_float<4>(c.w.keys, size, tokens, q, out);
    }
  }
}

static void weigh_float(Context& c, float* accumulator, int64_t tokens) {
  for (int64_t r = 0; r < c.rows; r += 4) {
    const float* w = c.w.scores + r * kTile;
    float* out = accumulator + r * kMaxHeadSize;
    const float* decay = c.decay + r;
    switch (min64(4, c.rows - r)) {
      case 1: dot_values_float<1>(c.w.values, c.value_width, tokens, w, decay, out); break;
      case 2: dot_values_float<2>(c.w.values, c.value_width, tokens, w, decay, out); break;
      case 3: dot_values_float<3>(c.w.values, c.value_width, tokens, w, decay, out); break;
      default: dot_values_float<4>(c.w.values, c.value_width, tokens, w, decay, out);
    }
  }
}

// Softcap, ALiBi and the query-query bias on one row of scores in natural units; leaves units of log2.
static void apply_special(const Context& c, int64_t r, int64_t first, int64_t n, float* s) {
  const int64_t q = c.position(r);
  if (c.a.softcap > 0) {
    const float cap = static_cast<float>(c.a.softcap);
    for (int64_t t = 0; t < n; ++t) s[t] = cap * tanhf(s[t] / cap);
  }
  if (c.a.alibi_slopes) {
    const float slope = c.a.alibi_slopes[c.head(r)];
    for (int64_t t = 0; t < n; ++t) {
      const float distance = static_cast<float>(first + t - q);
      s[t] += slope * (c.a.alibi_sqrt ? (distance < 0 ? -sqrtf(-distance) : 0.0f) : distance);
    }
  }
  if (c.a.qq_bias) {
    const float* bias = c.a.qq_bias + c.query(r) * c.a.qq_stride;
    for (int64_t t = max64(0, c.context_len - first); t < n; ++t) s[t] += bias[first + t - c.context_len];
  }
  for (int64_t t = 0; t < n; ++t) s[t] *= kLog2e;
}

// Scores of pages from dot products with codes.
static void scale_scores(Context& c, int64_t padded) {
  const Workspace& w = c.w;
  for (int64_t r = 0; r < c.rows; ++r) {
    float* s = c.w.scores + r * kTile;
    const v16 sum = splat(c.sum[r]);
    for (int64_t t = 0; t < padded; t += 16) store16(s + t, fma16(load16(s + t), load16(w.k_scale + t), load16(w.k_bias + t) * sum));
  }
}

// One row of a tile: scores -> weights times v_scale, and the row's running maximum and sums.
static void softmax_row(Context& c, int64_t r, int64_t first, int64_t n, const Bits& bits, Seen seen) {
  Workspace& w = c.w;
  float* s = w.scores + r * kTile;
  Partial& state = w.states.row[r];
  const int64_t padded = (n + 15) / 16 * 16;
  c.decay[r] = 1.0f;
  if (seen == kNone) {
    memset(s, 0, padded * sizeof(float));
    return;
  }
  if (c.special) apply_special(c, r, first, n, s);
  v16 top = splat(-INFINITY);
  bool broken = false;
  for (int64_t t = 0; t < padded; t += 16) {
    v16 x = load16(s + t);
    const uint32_t lanes = bits.of16(t);
    if (lanes != 0xFFFFu) {
      for (int i = 0; i < 16; ++i)
        if (!(lanes >> i & 1)) x[i] = -INFINITY;
      store16(s + t, x);
    }
    broken |= any_nan(x);
    top = max16(top, x);
  }
  const float highest = reduce_max16(top);
  broken |= highest == INFINITY;  // of a raw key: inf - inf is not a number, and exp2_16 would not say so
  if (broken || highest == -INFINITY) {
    state.nan |= broken;
    memset(s, 0, padded * sizeof(float));
    return;
  }
  const float m = highest > state.m ? highest : state.m;
  if (m != state.m) c.decay[r] = state.m == -INFINITY ? 0.0f : exp2f(state.m - m);
  v16 total = (v16){}, shared = (v16){};
  for (int64_t t = 0; t < padded; t += 16) {
    const v16 p = exp2_16(load16(s + t) - splat(m));
    total += p;
    shared = fma16(p, load16(w.v_bias + t), shared);
    store16(s + t, p * load16(w.v_scale + t));
  }
  state.m = m;
  state.l = state.l * c.decay[r] + sum16(total);
  state.shared = state.shared * c.decay[r] + sum16(shared);
}

#if NKV_AVX512
// 2^x for -126 < x <= 0, else 0; NaN for NaN. Relative error 2e-6: 2^(j/16) from a table, the rest to the second power.
NKV_INLINE __m512 exp2_table(__m512 x) {
  const __m512 table = _mm512_set_ps(1.91520656f, 1.83400809f, 1.75625216f, 1.68179283f, 1.61049033f, 1.54221083f, 1.47682615f,
                                     1.41421356f, 1.35425555f, 1.29683955f, 1.24185781f, 1.18920712f, 1.13878863f, 1.09050773f,
                                     1.04427378f, 1.0f);
  const __m512 magic = _mm512_set1_ps(786432.0f);  // 1.5 * 2^19: adding it rounds to sixteenths
  const __mmask16 alive = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ);
  const __m512 shifted = _mm512_add_ps(x, magic), rounded = _mm512_sub_ps(shifted, magic);
  const __m512 f = _mm512_sub_ps(x, rounded);
  __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(0.240226507f), _mm512_set1_ps(0.693147181f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(alive, _mm512_mul_ps(p, _mm512_permutexvar_ps(_mm512_castps_si512(shifted), table)), rounded);
}

// The same, but the weights become 16-bit integers, for dot_values: `quads` of `row`, which is filled in place
// (a record returned by value is copied in one load, which waits for the narrow stores before it: a tenth of the time).
// largest: of |v_scale| in the tile.
static void softmax_row_int(Context& c, int64_t r, int64_t first, int64_t n, const Bits& bits, Seen seen, float largest,
                            int32_t* quads, ValueRow& row, Prefetches& ahead) {
  Workspace& w = c.w;
  float* s = w.scores + r * kTile;
  Partial& state = w.states.row[r];
  const int64_t padded = (n + 15) / 16 * 16;
  row.quads = quads;
  row.sum = 0;
  row.scale = 0.0f;
  row.decay = 1.0f;
  row.accumulator = w.states.pages + r * kMaxHeadSize;
  c.decay[r] = 1.0f;
  __m512 top = _mm512_set1_ps(-INFINITY);
  if (seen != kNone && c.special) apply_special(c, r, first, n, s);
  if (seen == kAll) {
    __m512 odd = top;  // two chains, neither of which waits for the other
    for (int64_t t = 0; t < padded; t += 32) {
      top = _mm512_max_ps(_mm512_load_ps(s + t), top);  // passes over NaN
      if (t + 16 < padded) odd = _mm512_max_ps(_mm512_load_ps(s + t + 16), odd);
    }
    top = _mm512_max_ps(top, odd);
  } else if (seen == kSome) {  // what the row does not see must not decide how finely its weights are rounded
    __m512 scale = _mm512_setzero_ps();
    for (int64_t t = 0; t < padded; t += 16) {
      const __mmask16 lanes = static_cast<__mmask16>(bits.of16(t));
      const __m512 x = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes, s + t);
      _mm512_store_ps(s + t, x);
      top = _mm512_max_ps(x, top);
      scale = _mm512_max_ps(scale, _mm512_abs_ps(_mm512_maskz_loadu_ps(lanes, w.v_scale + t)));
    }
    largest = _mm512_reduce_max_ps(scale);
  }
  const float highest = _mm512_reduce_max_ps(top);
  if (highest == -INFINITY) {
    if (seen != kNone)
      for (int64_t t = 0; t < padded; t += 16) state.nan |= any_nan(load16(s + t));
    memset(quads, 0, padded * sizeof(int32_t));
    return;
  }
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_set_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 12, 8, 4, 0, 13, 9, 5, 1));
  const __m512i flip = _mm512_broadcast_i32x4(_mm_set_epi32(0, 0, static_cast<int>(0x80808080), 0));
  const __m512i ones = _mm512_set1_epi8(1);
  // Adding 1.5 * 2^23 leaves an integer in the low bits; with 128 more, its second byte is the high byte of the weight and its
  // first the low one with the sign bit flipped.
  const __m512 magic = _mm512_set1_ps(12582912.0f + 128.0f);
  const float inverse = largest > kSmallestOperand ? kLargestOperand / largest : 0.0f;
  const __m512 factor = _mm512_set1_ps(inverse), m_tile = _mm512_set1_ps(highest);
  __m512 total = _mm512_setzero_ps(), shared = total;
  __m512i sums = _mm512_setzero_si512();
  for (int64_t t = 0; t < padded; t += 16) {
    prefetch(ahead);
    const __m512 p = exp2_table(_mm512_sub_ps(_mm512_load_ps(s + t), m_tile));
    total = _mm512_add_ps(total, p);
    shared = _mm512_fmadd_ps(p, _mm512_load_ps(w.v_bias + t), shared);
    const __m512i q = _mm512_castps_si512(_mm512_fmadd_ps(_mm512_mul_ps(p, factor), _mm512_load_ps(w.v_scale + t), magic));
    const __m512i split = _mm512_xor_si512(_mm512_shuffle_epi8(q, bytes), flip);
    dot4(sums, ones, split);
    _mm512_store_si512(quads + t, split);
  }
  const float m = highest > state.m ? highest : state.m;
  const float gain = highest == m ? 1.0f : exp2f(highest - m), sum = _mm512_reduce_add_ps(total);
  if (m != state.m) c.decay[r] = state.m == -INFINITY ? 0.0f : exp2f(state.m - m);
  state.nan |= sum != sum;
  state.m = m;
  state.l = state.l * c.decay[r] + gain * sum;
  state.shared = state.shared * c.decay[r] + gain * _mm512_reduce_add_ps(shared);
  const __m512i parts = _mm512_broadcast_i32x4(_mm_set_epi32(0, 0, 1, 256));
  row.sum = _mm512_reduce_add_epi32(_mm512_mullo_epi32(sums, parts));
  row.scale = gain * (inverse > 0 ? largest / kLargestOperand : 0.0f);
  row.decay = c.decay[r];
}

static void weigh_pages_int(Context& c, const Pages& pages, int64_t first, int64_t n, const Bits* bits, const Seen* seen,
                            Prefetches& ahead) {
  const bool nibbles = c.g.v.code == kUint4;
  const int64_t groups = (n + 15) / 16;
  uint8_t* values = c.w.value_codes;
  __m512 scale = _mm512_setzero_ps();
  for (int64_t i = 0; i < groups; ++i) scale = _mm512_max_ps(scale, _mm512_abs_ps(_mm512_load_ps(c.w.v_scale + 16 * i)));
  const float largest = _mm512_reduce_max_ps(scale);
  if (!c.k_int)
    for (int64_t i = 0; i < groups; ++i) spread_values(c.g.v, pages.v[i], i, values);
  const Prefetches begin = ahead;
  for (int64_t r = 0; r < c.rows; r += 4) {
    ahead = begin;
    ValueRow rows[4];
    const int64_t count = min64(4, c.rows - r), bytes = c.g.v.row_bytes, quads = groups * 4;
    for (int64_t i = 0; i < count; ++i)
      softmax_row_int(c, r + i, first, n, bits[r + i], seen[r + i], largest, c.w.quads + i * kTile, rows[i], ahead);
#define NKV_CASE(N)                                                              \
  case N:                                                                        \
    nibbles ? dot_values<N, true>(values, bytes, quads, rows, ahead)             \
            : dot_values<N, false>(values, bytes, quads, rows, ahead);           \
    break;
    switch (count) { NKV_CASE(1) NKV_CASE(2) NKV_CASE(3) NKV_CASE(4) }
#undef NKV_CASE
  }
}
#endif

static void find_pages(const Context& c, int64_t first, int64_t groups, Pages* p) {
  const AttentionArgs& a = c.a;
  const uint8_t* table = a.block_table + c.item.seq * a.block_table_row;
  const Side &k = c.g.k, &v = c.g.v;
  const int64_t head = c.item.head;
  const uint8_t* k_codes = a.kv_cache + k.codes_offset + head * k.head_stride;
  const uint8_t* v_codes = a.kv_cache + v.codes_offset + head * v.head_stride;
  const uint8_t* k_words = a.kv_cache + k.words_offset + head * k.word_head_stride;
  const uint8_t* v_words = a.kv_cache + v.words_offset + head * v.word_head_stride;
  int64_t page = first / c.g.block_size, slot = first % c.g.block_size;
  for (int64_t i = 0; i < groups; ++i, slot += 16) {
    if (slot == c.g.block_size) slot = 0, ++page;
    const int64_t block = load_index(table, a.block_table_col, a.block_table_is_64, page);
    p->k[i] = k_codes + block * k.block_stride + slot * k.slot_stride;
    p->v[i] = v_codes + block * v.block_stride + slot * v.slot_stride;
    p->k_words[i] = k_words + block * k.word_block_stride + slot * k.word_slot_stride;
    p->v_words[i] = v_words + block * v.word_block_stride + slot * v.word_slot_stride;
  }
}

#if NKV_AVX512
constexpr int64_t kMostLines = kGroups * (16 * (kMaxHeadSize / 64 + 1) + 4) + 16;  // of the keys or values of a tile

// Appends the cache lines of 16 rows to a list; writes up to 8 entries beyond its end.
NKV_INLINE const uint8_t** list_lines(const uint8_t* rows, int64_t stride, int64_t bytes, const uint8_t** list) {
  if (stride == bytes) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(rows) & ~uintptr_t{63};
    const int64_t lines = static_cast<int64_t>((reinterpret_cast<uintptr_t>(rows) + 16 * bytes - 1 - begin) / 64 + 1);
    const __m512i steps = _mm512_set_epi64(448, 384, 320, 256, 192, 128, 64, 0);
    for (int64_t i = 0; i < lines; i += 8)
      _mm512_storeu_si512(list + i, _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(begin + 64 * i)), steps));
    return list + lines;
  }
  uintptr_t seen = 0;
  for (int64_t t = 0; t < 16; ++t) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(rows + t * stride) / 64;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(rows + t * stride) + bytes - 1) / 64;
    for (uintptr_t line = begin > seen ? begin : seen + 1; line <= end; ++line)
      *list++ = reinterpret_cast<const uint8_t*>(line * 64);
    seen = end;
  }
  return list;
}

// Repeats the last of a list's lines (or the entry at its begin) until `stop`.
NKV_INLINE void fill_lines(const uint8_t** end, const uint8_t** stop) {
  const __m512i last = _mm512_set1_epi64(static_cast<int64_t>(reinterpret_cast<uintptr_t>(end[-1])));
  for (; end < stop; end += 8) _mm512_storeu_si512(end, last);
}
#endif

// Tokens [first, first + n) of the pages; `next` are the pages of the tile after it, for prefetching.
static void attend_pages(Context& c, int64_t first, int64_t n, const Pages& pages, const Pages& next, int64_t next_groups,
                         const Bits* bits, const Seen* seen) {
  Workspace& w = c.w;
  const Side &k = c.g.k, &v = c.g.v;
  const int64_t groups = (n + 15) / 16;
  for (int64_t i = 0; i < groups; ++i) {
    v16 mark = load_words(k, pages.k_words[i], w.k_scale + 16 * i, w.k_bias + 16 * i);
    mark += load_words(v, pages.v_words[i], w.v_scale + 16 * i, w.v_bias + 16 * i);
    if (!c.k_int) decode_keys(k, pages.k[i], k.slot_stride, w.float8, w.keys + 16 * i);
    if (!c.v_int)
      for (int t = 0; t < 16; ++t)
        if (!decode_value(v, pages.v[i] + t * v.slot_stride, w.float8, w.values + (16 * i + t) * c.value_width)) mark[t] = NAN;
    store16(w.k_bias + 16 * i, load16(w.k_bias + 16 * i) + mark);
  }
  if (!c.k_int) {
    score_float(c, w.query_rotated, groups * 16);
    scale_scores(c, groups * 16);
  }
#if NKV_AVX512
  const uint8_t* lines[kMostLines];
  if (c.k_int) {  // while keys are read, ask for the next keys
    const uint8_t** end = lines;
    *end++ = pages.k[0];
    for (int64_t i = 0; i < next_groups; ++i) end = list_lines(next.k[i], k.slot_stride, k.stored_bytes, end);
    fill_lines(end, lines + (groups + 1) / 2 * 2 * (k.row_bytes / 4));
    Prefetches ahead{lines};
    score_pages_int(c, pages, groups, next, next_groups, ahead);
  }
  if (c.v_int) {  // and while weights are made and values are read, for the next values
    const uint8_t** end = lines;
    *end++ = pages.v[0];
    for (int64_t i = 0; i < next_groups; ++i) end = list_lines(next.v[i], v.slot_stride, v.stored_bytes, end);
    // Four rows ask once for each group, then their sums.
    fill_lines(end, lines + groups * (4 + 16 * full_chunks(v.row_bytes) + 8 * half_chunk(v.row_bytes)));
    Prefetches ahead{lines};
    weigh_pages_int(c, pages, first, n, bits, seen, ahead);
    return;
  }
#endif
  for (int64_t r = 0; r < c.rows; ++r) softmax_row(c, r, first, n, bits[r], seen[r]);
  weigh_float(c, w.states.pages, groups * 16);
}

// Tokens [first, first + n) of the queries' own keys and values, or of those kept unquantized: then with the first `lead` of
// the sequence in front of them, if no option asks for a token's position.
static void attend_raw(Context& c, int64_t first, int64_t n, bool own, const Bits* bits, const Seen* seen, int64_t lead = 0) {
  const AttentionArgs& a = c.a;
  const int64_t key_stride = own ? a.key_token_stride : a.raw_key_row_stride;
  const int64_t value_stride = own ? a.value_token_stride : a.raw_value_row_stride;
  const int64_t key_dtype = own ? a.key_dtype : a.raw_dtype, value_dtype = own ? a.value_dtype : a.raw_dtype;
  const uint8_t* keys = own ? a.key + c.item.head * a.key_head_stride
                            : a.raw_key + c.item.seq * a.raw_key_seq_stride + c.item.head * a.raw_key_head_stride;
  const uint8_t* values = own ? a.value + c.item.head * a.value_head_stride
                              : a.raw_value + c.item.seq * a.raw_value_seq_stride + c.item.head * a.raw_value_head_stride;
  Workspace& w = c.w;
  float sums[kMaxRows];
  auto place = [&](int64_t t) {
    const int64_t at = t < lead ? t : first + t - lead;
    if (own) return at + c.begin - c.context_len;
    return at < a.raw_sinks ? at : a.raw_sinks + (at - a.raw_sinks) % a.raw_ring;
  };
  n += lead;
  const int64_t padded = (n + 15) / 16 * 16, size = c.g.k.head_size, size_v = c.g.v.head_size;
  // Rows of one head lie too far apart for the machine's own prefetching.
  const int64_t key_bytes = size * (key_dtype == kFloat32 ? 4 : 2), value_bytes = size_v * (value_dtype == kFloat32 ? 4 : 2);
  for (int64_t t = 0; t < n; ++t) {
    const int64_t at = place(t);
    for (int64_t i = 0; i < key_bytes; i += 64) __builtin_prefetch(keys + at * key_stride + i);
    for (int64_t i = 0; i < value_bytes; i += 64) __builtin_prefetch(values + at * value_stride + i);
  }
  for (int64_t group = 0; group < padded; group += 16) {
    alignas(64) float rows[16][kMaxHeadSize];
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t t = group + i;
      float* value = w.values + t * c.value_width;
      w.k_scale[t] = w.v_scale[t] = 1.0f;
      w.k_bias[t] = w.v_bias[t] = 0.0f;
      if (t >= n) {
        memset(rows[i], 0, size * sizeof(float));
        memset(value, 0, c.value_width * sizeof(float));
        continue;
      }
      const int64_t at = place(t);
      load_row(key_dtype, keys + at * key_stride, size, rows[i]);
      load_row(value_dtype, values + at * value_stride, size_v, value);
      for (int64_t d = size_v; d < c.value_width; ++d) value[d] = 0.0f;
      v16 check = (v16){};
      for (int64_t d = 0; d < c.value_width; d += 16) check += load16(value + d) * splat(0.0f);
      if (any_nan(check)) {
        w.k_bias[t] = NAN;
        memset(value, 0, size_v * sizeof(float));
      }
    }
    // Whole lines of `keys`: they lie 512 bytes apart, in so few sets of the cache that single stores evict one another.
    for (int64_t d = 0; d < size; d += 16) {
      v16 x[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) x[i] = load16(rows[i] + d);
      transpose16(x);
      for (int64_t k = 0; k < min64(16, size - d); ++k) store16(w.keys + (d + k) * kTile + group, x[k]);
    }
  }
  memcpy(sums, c.sum, sizeof sums);
  for (int64_t r = 0; r < c.rows; ++r) c.sum[r] *= 0;  // raw keys have no bias; NaN still acts
  score_float(c, w.query_raw, padded);
  scale_scores(c, padded);
  for (int64_t r = 0; r < c.rows; ++r) softmax_row(c, r, first, n, bits[r], seen[r]);
  memcpy(c.sum, sums, sizeof sums);
  weigh_float(c, w.states.raw, padded);
  for (int64_t r = 0; r < c.rows; ++r)  // the other accumulator has the same unit
    if (c.decay[r] != 1.0f)
      for (int64_t d = 0; d < c.page_values; ++d) w.states.pages[r * kMaxHeadSize + d] *= c.decay[r];
}

static void load_queries(Context& c) {
  for (int64_t r = 0; r < c.rows; ++r) {
    float* raw = c.w.query_raw + r * kMaxHeadSize;
    float* rotated = c.w.query_rotated + r * kMaxHeadSize;
    const int64_t n = c.g.k.head_size;
    load_row(c.a.query_dtype,
             c.a.query + (c.begin + c.query(r)) * c.a.query_token_stride + c.head(r) * c.a.query_head_stride, n, raw);
    v8 check = (v8){}, sum = check;
    for (int64_t d = 0; d < n; d += 8) check += load8(raw + d) * 0.0f;
    const float zero = sum8(check);
    const bool broken = zero != zero;
    for (int64_t d = 0; d < n; ++d) raw[d] = broken ? 0.0f : raw[d] * c.factor;
    memcpy(rotated, raw, n * sizeof(float));
    rotate_row(*c.g.k.rotation, rotated);
    const float gain = c.g.k.rotation->inverse_gain;  // q . x = inverse_gain * (R q) . (R x)
    for (int64_t d = 0; d < n; d += 8) {
      const v8 x = load8(rotated + d) * gain;
      store8(rotated + d, x);
      sum += x;
    }
    // A query that is not a number makes every score one that is not.
    c.sum[r] = broken ? NAN : sum8(sum);
#if NKV_AVX512
    if (c.k_int) make_operand(c, r);
#endif
  }
}

static void reset(Context& c, States& s) {
  for (int64_t r = 0; r < c.rows; ++r) s.row[r] = {-INFINITY, 0, 0.0, 0.0};
  for (int64_t r = 0; r < c.rows; ++r) memset(s.pages + r * kMaxHeadSize, 0, c.page_values * sizeof(float));
  if (c.raw)
    for (int64_t r = 0; r < c.rows; ++r) memset(s.raw + r * kMaxHeadSize, 0, c.value_width * sizeof(float));
}

// into = into + from, one row; n floats of each accumulator.
static void fold(Partial* into, const Partial& from, int64_t n, float* a, const float* b) {
  into->nan |= from.nan;
  if (from.m == -INFINITY) return;
  const float m = from.m > into->m ? from.m : into->m;
  const float x = into->m == -INFINITY ? 0.0f : exp2f(into->m - m), y = exp2f(from.m - m);
  for (int64_t i = 0; i < n; ++i) a[i] = a[i] * x + b[i] * y;
  into->l = into->l * x + from.l * y;
  into->shared = into->shared * x + from.shared * y;
  into->m = m;
}

static void write_row_out(Context& c, int64_t r, const Partial& state, const float* pages, const float* raw) {
  const AttentionArgs& a = c.a;
  const int64_t n = c.g.v.head_size, token = c.begin + c.query(r), head = c.head(r);
  alignas(64) float x[kMaxHeadSize];
  float m = state.m;
  double l = state.l;
  float keep = 1.0f;
  if (a.sinks) {
    const float sink = a.sinks[head] * kLog2e;
    const float top = sink > m ? sink : m;
    keep = m == -INFINITY ? 0.0f : exp2f(m - top);
    l = l * keep + (sink == -INFINITY ? 0.0 : static_cast<double>(exp2f(sink - top)));
    m = top;
  }
  for (int64_t d = 0; d < n; ++d) x[d] = static_cast<float>(state.shared);
#if NKV_AVX512
  if (c.v_int) gather_accumulator(pages, c.g.v.row_bytes, c.g.v.code == kUint4, x);
#endif
  if (!c.v_int)
    for (int64_t d = 0; d < n; ++d) x[d] += pages[d];
  unrotate_row(*c.g.v.rotation, x);
  if (raw)
    for (int64_t d = 0; d < n; ++d) x[d] += raw[d];
  const float inverse = l > 0 ? keep / static_cast<float>(l) : 0.0f;
  for (int64_t d = 0; d < n; ++d) x[d] = state.nan ? NAN : x[d] * inverse;
  store_row(a.out_dtype, x, n, a.out + token * a.out_token_stride + head * a.out_head_stride, static_cast<float>(a.output_scale));
  if (a.lse)
    a.lse[token * a.num_query_heads + head] =
        state.nan ? NAN : l > 0 ? static_cast<float>((m + log2(l)) * 0.693147180559945309) : -INFINITY;
}

static void attend_split(Context& c, int64_t from, int64_t to, bool last) {
  Bits bits[kMaxRows];
  Seen seen[kMaxRows];
  Pages pages, next;
  auto see = [&](int64_t first, int64_t n, Form form) {
    bool any = false;
    for (int64_t r = 0; r < c.rows; ++r) {
      if (r > 0 && c.query(r) == c.query(r - 1))
        seen[r] = seen[r - 1], bits[r] = bits[r - 1];
      else
        any |= (seen[r] = c.visible(r, first, n, form, &bits[r])) != kNone;
    }
    return any;
  };
  auto raw_tiles = [&](int64_t first, int64_t end, bool own) {
    for (; first < end; first += kTile) {
      const int64_t n = min64(kTile, end - first);
      if (see(first, n, own ? Form::kAny : Form::kRaw)) attend_raw(c, first, n, own, bits, seen);
    }
  };
  int64_t found = -1;
  for (int64_t first = from; first < min64(to, c.paged_len); first += kTile) {
    const int64_t n = min64(kTile, c.paged_len - first);
    if (!see(first, n, Form::kPacked)) continue;
    if (found != first) find_pages(c, first, (n + 15) / 16, &pages);
    const int64_t after = first + kTile, left = min64(kTile, min64(to, c.paged_len) - after);
    const int64_t groups = left > 0 ? (left + 15) / 16 : 0;
    find_pages(c, after, groups, &next);
    attend_pages(c, first, n, pages, next, groups, bits, seen);
    pages = next;
    found = after;
  }
  if (!last) return;
  if (c.ring) {
    const int64_t sinks = min64(c.a.raw_sinks, c.paged_len);
    // Nothing but a multimodal prefix lets a causal query see a later token.
    const int64_t end = c.causal && !c.a.mm_count ? min64(c.paged_len, c.position(c.rows - 1) + 1) : c.paged_len;
    const int64_t start = c.a.raw_window > 0 ? max64(sinks, c.position(0) - c.a.raw_window + 1) : end;
    if (sinks > 0 && start < end && sinks + end - start <= 64 && !c.special) {
      // One tile costs half as much as two. Its rows may see nothing of one part, or of both.
      Bits leading[kMaxRows];
      const bool sees_first = see(0, sinks, Form::kRaw);
      for (int64_t r = 0; r < c.rows; ++r) leading[r] = bits[r];
      if (see(start, end - start, Form::kRaw) || sees_first) {
        for (int64_t r = 0; r < c.rows; ++r) {
          bits[r].word[0] = bits[r].word[0] << sinks | leading[r].word[0];
          seen[r] = bits[r].word[0] ? kSome : kNone;
        }
        attend_raw(c, start, end - start, false, bits, seen, sinks);
      }
    } else {
      raw_tiles(0, sinks, false);
      raw_tiles(start, end, false);
    }
  }
  if (c.own) raw_tiles(c.context_len, c.seq_len, true);
}

// Attends an item's splits one after another, each from a fresh state, folded in their order: the same sums, bit for bit,
// as when other threads attend them and `merge` folds them.
static void attend(const Plan& plan, const Item& item) {
  Context c(*plan.args, item);
  Workspace& w = c.w;
  load_queries(c);
  const bool fold_here = item.partial < 0 && item.last_split - item.first_split > 1;
  if (fold_here) reset(c, w.total);
  for (int64_t split = item.first_split; split < item.last_split; ++split) {
    reset(c, w.states);
    attend_split(c, split * plan.split_size, (split + 1) * plan.split_size, split + 1 == item.num_splits);
    for (int64_t r = 0; r < c.rows; ++r) {
      const float* pages = w.states.pages + r * kMaxHeadSize;
      const float* raw = w.states.raw + r * kMaxHeadSize;
      if (item.partial >= 0) {
        const int64_t slot = item.partial + (split - item.first_split) * c.rows + r;
        plan.partials[slot] = w.states.row[r];
        float* to = plan.accumulators + slot * plan.accumulator_size;
        memcpy(to, pages, c.page_values * sizeof(float));
        if (c.raw) memcpy(to + kMaxHeadSize, raw, c.value_width * sizeof(float));
      } else if (fold_here) {
        Partial copy = w.total.row[r];
        fold(&copy, w.states.row[r], c.page_values, w.total.pages + r * kMaxHeadSize, pages);
        if (c.raw) fold(&w.total.row[r], w.states.row[r], c.value_width, w.total.raw + r * kMaxHeadSize, raw);
        w.total.row[r] = copy;
      }
    }
  }
  if (item.partial >= 0) return;
  const States& s = fold_here ? w.total : w.states;
  for (int64_t r = 0; r < c.rows; ++r)
    write_row_out(c, r, s.row[r], s.pages + r * kMaxHeadSize, c.raw ? s.raw + r * kMaxHeadSize : nullptr);
}

// Folds the partial states that the items of one block of rows left behind, and writes the rows. Item: all splits.
static void merge(const Plan& plan, const Item& item) {
  Context c(*plan.args, item);
  Workspace& w = c.w;
  reset(c, w.total);
  for (int64_t r = 0; r < c.rows; ++r) {
    float* pages = w.total.pages + r * kMaxHeadSize;
    float* raw = w.total.raw + r * kMaxHeadSize;
    for (int64_t split = 0; split < item.num_splits; ++split) {
      const int64_t slot = item.partial + split * c.rows + r;
      const float* from = plan.accumulators + slot * plan.accumulator_size;
      Partial copy = w.total.row[r];
      fold(&copy, plan.partials[slot], c.page_values, pages, from);
      if (c.raw) fold(&w.total.row[r], plan.partials[slot], c.value_width, raw, from + kMaxHeadSize);
      w.total.row[r] = copy;
    }
    write_row_out(c, r, w.total.row[r], pages, c.raw ? raw : nullptr);
  }
}

}  // namespace NKV_ISA
}  // namespace nibblekv
