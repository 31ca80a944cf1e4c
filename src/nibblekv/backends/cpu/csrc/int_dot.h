// Integer dot products over packed 4- and 8-bit codes (AVX-512 VNNI): exact sums of code * (16-bit operand), the operand
// split in two signed bytes. Tokens' rows are read once, rearranged in registers into the thread's cache, and then serve
// all query heads of the group.
#pragma once

namespace nibblekv {
namespace NKV_ISA {

constexpr int64_t kGroup = 16;  // tokens whose rows lie in one page
constexpr int64_t kQuads = kTile / 4;

NKV_INLINE int64_t full_chunks(int64_t row_bytes) { return (row_bytes + 31) / 64; }  // a rest above 32 bytes counts as full
NKV_INLINE bool half_chunk(int64_t row_bytes) { return (row_bytes & 63) != 0 && (row_bytes & 63) <= 32; }
NKV_INLINE __mmask64 chunk_mask(int64_t row_bytes, int64_t chunk) {
  const int64_t left = row_bytes - 64 * chunk;
  return left >= 64 ? ~0ULL : (1ULL << left) - 1;
}

template <bool kSigned, bool kWhole>
NKV_INLINE __m512i load_codes(const uint8_t* p, __mmask64 mask) {
  const __m512i x = kWhole ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(mask, p);
  return kSigned ? _mm512_xor_si512(x, _mm512_set1_epi8(static_cast<char>(0x80))) : x;  // c + 128 is unsigned
}

template <bool kWhole>
NKV_INLINE __m256i load_half(const uint8_t* p, __mmask32 mask) {
  return kWhole ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)) : _mm256_maskz_loadu_epi8(mask, p);
}

template <bool kSigned, bool kWhole>
NKV_INLINE __m512i load_two(const uint8_t* low, const uint8_t* high, __mmask32 mask) {
  const __m512i x =
      _mm512_inserti64x4(_mm512_castsi256_si512(load_half<kWhole>(low, mask)), load_half<kWhole>(high, mask), 1);
  return kSigned ? _mm512_xor_si512(x, _mm512_set1_epi8(static_cast<char>(0x80))) : x;
}

NKV_INLINE void transpose4(const __m512i* r, __m512i* t) {  // 4x4 dwords inside each 128-bit lane
  const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
  t[0] = _mm512_unpacklo_epi64(a, c);
  t[1] = _mm512_unpackhi_epi64(a, c);
  t[2] = _mm512_unpacklo_epi64(b, d);
  t[3] = _mm512_unpackhi_epi64(b, d);
}

// 16 rows -> dst[dword j][lane = token]. kWhole: a row is a multiple of 32 bytes and needs no masks. Writes up to 15 vectors beyond the row's dwords.
template <bool kSigned, bool kWhole>
NKV_INLINE void transpose_keys(const uint8_t* rows, int64_t stride, int64_t row_bytes, uint8_t* dst) {
  const int64_t full = full_chunks(row_bytes);
  for (int64_t chunk = 0; chunk < full; ++chunk) {
    const __mmask64 mask = chunk_mask(row_bytes, chunk);
    __m512i t[4][4];
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      __m512i r[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) r[i] = load_codes<kSigned, kWhole>(rows + (4 * q + i) * stride + 64 * chunk, mask);
      transpose4(r, t[q]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const __m512i a = _mm512_shuffle_i32x4(t[0][c], t[1][c], 0x44), b = _mm512_shuffle_i32x4(t[2][c], t[3][c], 0x44);
      const __m512i d = _mm512_shuffle_i32x4(t[0][c], t[1][c], 0xEE), e = _mm512_shuffle_i32x4(t[2][c], t[3][c], 0xEE);
      uint8_t* o = dst + (16 * chunk + c) * 64;
      _mm512_store_si512(o, _mm512_shuffle_i32x4(a, b, 0x88));
      _mm512_store_si512(o + 4 * 64, _mm512_shuffle_i32x4(a, b, 0xDD));
      _mm512_store_si512(o + 8 * 64, _mm512_shuffle_i32x4(d, e, 0x88));
      _mm512_store_si512(o + 12 * 64, _mm512_shuffle_i32x4(d, e, 0xDD));
    }
  }
  if (half_chunk(row_bytes)) {  // two rows to a vector
    const __mmask32 mask = static_cast<__mmask32>(chunk_mask(row_bytes, full));
    __m512i t[2][4];
#pragma GCC unroll 2
    for (int q = 0; q < 2; ++q) {
      __m512i r[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        r[i] = load_two<kSigned, kWhole>(rows + (8 * q + i) * stride + 64 * full, rows + (8 * q + 4 + i) * stride + 64 * full, mask);
      transpose4(r, t[q]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      uint8_t* o = dst + (16 * full + c) * 64;
      _mm512_store_si512(o, _mm512_shuffle_i32x4(t[0][c], t[1][c], 0x88));
      _mm512_store_si512(o + 4 * 64, _mm512_shuffle_i32x4(t[0][c], t[1][c], 0xDD));
    }
  }
}

NKV_INLINE void interleave4(const __m512i* r, __m512i* u) {  // byte k of four rows side by side
  const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
  const __m512i c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
  u[0] = _mm512_unpacklo_epi16(a, c);
  u[1] = _mm512_unpackhi_epi16(a, c);
  u[2] = _mm512_unpacklo_epi16(b, d);
  u[3] = _mm512_unpackhi_epi16(b, d);
}

// 16 rows of the tile's token group -> dst[chunk][u][quad of tokens]: lane 4L + j of vector u holds byte 16L + 4u + j of
// the chunk, once for each token of the quad. A half chunk has two vectors: its 32 bytes fill the lanes of 0 and 1, then of
// 2 and 3.
template <bool kSigned, bool kWhole>
NKV_INLINE void interleave_values(const uint8_t* rows, int64_t stride, int64_t row_bytes, int64_t group, uint8_t* dst) {
  const int64_t full = full_chunks(row_bytes);
  for (int64_t chunk = 0; chunk < full; ++chunk) {
    const __mmask64 mask = chunk_mask(row_bytes, chunk);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      __m512i r[4], u[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) r[i] = load_codes<kSigned, kWhole>(rows + (4 * q + i) * stride + 64 * chunk, mask);
      interleave4(r, u);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) _mm512_store_si512(dst + ((chunk * 4 + i) * kQuads + group * 4 + q) * 64, u[i]);
    }
  }
  if (half_chunk(row_bytes)) {
    const __mmask32 mask = static_cast<__mmask32>(chunk_mask(row_bytes, full));
    uint8_t* base = dst + full * 4 * kQuads * 64;
#pragma GCC unroll 2
    for (int q = 0; q < 2; ++q) {
      __m512i r[4], u[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        r[i] = load_two<kSigned, kWhole>(rows + (8 * q + i) * stride + 64 * full, rows + (8 * q + 4 + i) * stride + 64 * full, mask);
      interleave4(r, u);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        uint8_t* o = base + (i * kQuads + group * 4 + 2 * q) * 64;
        _mm512_store_si512(o, _mm512_shuffle_i32x4(u[2 * i], u[2 * i + 1], 0x44));
        _mm512_store_si512(o + 64, _mm512_shuffle_i32x4(u[2 * i], u[2 * i + 1], 0xEE));
      }
    }
  }
}

// sum[lane] += dot of 4 unsigned and 4 signed bytes. Not the intrinsic: GCC 12 copies and spills its accumulators. The local
// variable keeps arrays of accumulators in registers.
NKV_INLINE void dot4(__m512i& sum, __m512i codes, __m512i operand) {
  __m512i s = sum;
  asm("vpdpbusd %2, %1, %0" : "+v"(s) : "v"(codes), "v"(operand));
  sum = s;
}

NKV_INLINE void dot4(__m512i& sum, __m512i codes, const int32_t* operand) {  // the same 4 bytes for each lane
#if defined(__clang__)
  dot4(sum, codes, _mm512_set1_epi32(*operand));
#else
  __m512i s = sum;
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(s) : "v"(codes), "m"(*operand));
  sum = s;
#endif
}

// Cache lines of the next tile, asked for one by one between dot products, into the second level: asked for in one go they
// fill the core's line buffers and stall it (measured: a third of the time). The list is as long as the stage has places
// that ask.
struct Prefetches {
  const uint8_t** next;
};

NKV_INLINE void prefetch(Prefetches& p) { __builtin_prefetch(*p.next++, 0, 2); }

struct KeyRow {  // a query: bytes for the dot products, and what turns sums into scores
  const int32_t* operand;  // uint4: [dword][even high, even low, byte high, byte low]; int8: [dword][high, low]
  int32_t center;  // the dot product with the code's centre
  float scale, sum;  // score = scale * k_scale * (dot product - center) + sum * k_bias
};

NKV_INLINE void store_scores(__m512i dot, const KeyRow& row, const float* k_scale, const float* k_bias, float* scores) {
  const __m512 x = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_load_ps(k_scale)), _mm512_set1_ps(row.scale));
  _mm512_store_ps(scores, _mm512_fmadd_ps(_mm512_load_ps(k_bias), _mm512_set1_ps(row.sum), x));
}

// Scores of kTogether groups of 16 tokens, [row][kTile]: groups of keys of `dwords` vectors each, k_scale and k_bias [32].
// Odd codes o are never unpacked: with bytes b = e + 16 o, q_e e + q_o o = (q_e - q_o / 16) e + q_o / 16 b. In sixteenths of
// a query's step the first factor is the even operand times 16, the second the byte operand: q_e and q_o keep 16 bits.
template <int kRows, int kTogether>
NKV_INLINE void dot_nibbles(const uint8_t* keys, int64_t dwords, const KeyRow* rows, const float* k_scale,
                            const float* k_bias, float* scores, Prefetches& ahead) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const int32_t* operand[kRows];
  for (int r = 0; r < kRows; ++r) operand[r] = rows[r].operand;
  __m512i even_high[kRows][kTogether], even_low[kRows][kTogether], byte_high[kRows][kTogether], byte_low[kRows][kTogether];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int g = 0; g < kTogether; ++g) {
      even_high[r][g] = even_low[r][g] = byte_high[r][g] = _mm512_setzero_si512();
      byte_low[r][g] = _mm512_set1_epi32(-rows[r].center);
    }
  for (int64_t j = 0; j < dwords; ++j) {
    __m512i x[kTogether], e[kTogether];
#pragma GCC unroll 2
    for (int g = 0; g < kTogether; ++g) {
      prefetch(ahead);
      x[g] = _mm512_load_si512(keys + (g * dwords + j) * 64);
      e[g] = _mm512_and_si512(x[g], nibble);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const int32_t* q = operand[r] + 4 * j;
#pragma GCC unroll 2
      for (int g = 0; g < kTogether; ++g) {
        dot4(even_high[r][g], e[g], q);
        dot4(even_low[r][g], e[g], q + 1);
        dot4(byte_high[r][g], x[g], q + 2);
        dot4(byte_low[r][g], x[g], q + 3);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int g = 0; g < kTogether; ++g) {
      // Sums beyond 32 bits wrap; what is left without the centre fits: 16 * 30719 * 8 * 512 < 2^31.
      __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(even_high[r][g], 4), byte_high[r][g]);
      sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 4), even_low[r][g]);
      sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 4), byte_low[r][g]);
      store_scores(sum, rows[r], k_scale + 16 * g, k_bias + 16 * g, scores + r * kTile + 16 * g);
    }
}

template <int kRows>
static void dot_nibble_keys(const uint8_t* keys, int64_t dwords, const KeyRow* rows, const float* k_scale,
                            const float* k_bias, float* scores, Prefetches& ahead) {
  if constexpr (kRows < 4) {
    dot_nibbles<kRows, 2>(keys, dwords, rows, k_scale, k_bias, scores, ahead);
  } else {  // sums of two groups would fill all 32 registers
    dot_nibbles<kRows, 1>(keys, dwords, rows, k_scale, k_bias, scores, ahead);
    dot_nibbles<kRows, 1>(keys + dwords * 64, dwords, rows, k_scale + 16, k_bias + 16, scores + 16, ahead);
  }
}

// The same of 8-bit codes, always two groups.
template <int kRows>
static void dot_byte_keys(const uint8_t* keys, int64_t dwords, const KeyRow* rows, const float* k_scale, const float* k_bias,
                          float* scores, Prefetches& ahead) {
  __m512i high[kRows][2], low[kRows][2];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g) {
      high[r][g] = _mm512_setzero_si512();
      low[r][g] = _mm512_set1_epi32(-rows[r].center);
    }
  for (int64_t j = 0; j < dwords; ++j) {
    __m512i x[2];
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g) {
      prefetch(ahead);
      x[g] = _mm512_load_si512(keys + (g * dwords + j) * 64);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const int32_t* q = rows[r].operand + 2 * j;
#pragma GCC unroll 2
      for (int g = 0; g < 2; ++g) {
        dot4(high[r][g], x[g], q);
        dot4(low[r][g], x[g], q + 1);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g)  // sums wrap, and without the centre fit: 32639 * 128 * 512 < 2^31
      store_scores(_mm512_add_epi32(_mm512_slli_epi32(high[r][g], 8), low[r][g]), rows[r], k_scale + 16 * g, k_bias + 16 * g,
                   scores + r * kTile + 16 * g);
}

struct ValueRow {  // a row of weights as 16-bit integers: bytes for the dot products, and where their sums go
  const int32_t* quads;  // [quad of tokens][4]: high bytes of the weights, low bytes, 0, 0
  int32_t sum;  // of the weights
  float scale, decay;  // accumulator = accumulator * decay + scale * sum
  float* accumulator;  // [chunk][u][even, odd][16 lanes], or without [even, odd] for 8-bit codes
};

// accumulator_r[channel] = accumulator_r[channel] * decay + sum over tokens of weight * (code - centre), for the 64 bytes of
// 4 vectors, or the 32 of 2; kVectors of them at once. Odd codes o are never unpacked: with bytes b = e + 16 o, the sum over
// w o is (sum over w b - sum over w e) / 16, exactly.
template <int kRows, int kVectors, bool kNibbles>
static void dot_values_chunk(const uint8_t* values, int64_t vectors, int64_t quads, const ValueRow* rows, int64_t offset,
                             Prefetches& ahead) {
  constexpr int kParts = kNibbles ? 2 : 1;  // bytes, and their even codes
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int64_t u = 0; u < vectors; u += kVectors) {
    __m512i high[kRows][kVectors][kParts], low[kRows][kVectors][kParts];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 2
        for (int p = 0; p < kParts; ++p) high[r][v][p] = low[r][v][p] = _mm512_setzero_si512();
    for (int64_t s = 0; s < quads; ++s) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) prefetch(ahead);
      __m512i x[kVectors][kParts];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        x[v][0] = _mm512_load_si512(values + ((u + v) * kQuads + s) * 64);
        if (kNibbles) x[v][kParts - 1] = _mm512_and_si512(x[v][0], nibble);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m512i h = _mm512_set1_epi32(rows[r].quads[4 * s]), l = _mm512_set1_epi32(rows[r].quads[4 * s + 1]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 2
          for (int p = 0; p < kParts; ++p) {
            dot4(high[r][v][p], x[v][p], h);
            dot4(low[r][v][p], x[v][p], l);
          }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512 scale = _mm512_set1_ps(rows[r].scale), decay = _mm512_set1_ps(rows[r].decay);
      const __m512i byte_center = _mm512_set1_epi32(rows[r].sum * (kNibbles ? 8 * 17 : 128));
      const __m512i even_center = _mm512_set1_epi32(rows[r].sum * 8);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        __m512i sum[kParts];
#pragma GCC unroll 2
        for (int p = 0; p < kParts; ++p)
          sum[p] = _mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32(high[r][v][p], 8), low[r][v][p]),
                                    p == 0 ? byte_center : even_center);
        float* a = rows[r].accumulator + offset + (u + v) * kParts * 16;
        const __m512 even = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[kParts - 1]), scale);
        _mm512_store_ps(a, _mm512_fmadd_ps(_mm512_load_ps(a), decay, even));
        if (kNibbles) {
          const __m512 odd = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[0], sum[kParts - 1]));
          _mm512_store_ps(a + 16, _mm512_fmadd_ps(_mm512_load_ps(a + 16), decay,
                                                  _mm512_mul_ps(odd, _mm512_mul_ps(scale, _mm512_set1_ps(0.0625f)))));
        }
      }
    }
  }
}

template <int kRows, bool kNibbles>
static void dot_values(const uint8_t* values, int64_t row_bytes, int64_t quads, const ValueRow* rows, Prefetches& ahead) {
  constexpr int kMany = kRows == 1 ? 4 : kRows < 4 ? 2 : 1, kFew = kMany < 2 ? kMany : 2;  // of 16 sums, or 24
  const int64_t full = full_chunks(row_bytes), width = kNibbles ? 128 : 64;
  for (int64_t chunk = 0; chunk < full; ++chunk)
    dot_values_chunk<kRows, kMany, kNibbles>(values + chunk * 4 * kQuads * 64, 4, quads, rows, chunk * width, ahead);
  if (half_chunk(row_bytes))
    dot_values_chunk<kRows, kFew, kNibbles>(values + full * 4 * kQuads * 64, 2, quads, rows, full * width, ahead);
}

NKV_INLINE int64_t value_accumulator_size(int64_t row_bytes, bool nibbles) {
  return (full_chunks(row_bytes) * 2 + half_chunk(row_bytes)) * (nibbles ? 64 : 32);
}

// values[d] += accumulator, in the order of the head's dimensions.
static void gather_accumulator(const float* accumulator, int64_t row_bytes, bool nibbles, float* values) {
  const int64_t full = full_chunks(row_bytes);
  for (int64_t chunk = 0; chunk < full + half_chunk(row_bytes); ++chunk)
    for (int64_t u = 0; u < (chunk == full ? 2 : 4); ++u)
      for (int64_t quarter = 0; quarter < 4; ++quarter) {  // of a vector: 4 bytes of a row
        const int64_t in_chunk = chunk == full ? 16 * (quarter & 1) + 8 * u + 4 * (quarter / 2) : 16 * quarter + 4 * u;
        const int64_t byte = 64 * chunk + in_chunk;
        if (byte >= row_bytes) continue;
        if (nibbles) {
          const float* a = accumulator + (chunk * 4 + u) * 32 + 4 * quarter;
          const __m128 even = _mm_load_ps(a), odd = _mm_load_ps(a + 16);
          float* to = values + 2 * byte;
          _mm_store_ps(to, _mm_add_ps(_mm_load_ps(to), _mm_unpacklo_ps(even, odd)));
          _mm_store_ps(to + 4, _mm_add_ps(_mm_load_ps(to + 4), _mm_unpackhi_ps(even, odd)));
        } else {
          float* to = values + byte;
          _mm_store_ps(to, _mm_add_ps(_mm_load_ps(to), _mm_load_ps(accumulator + (chunk * 4 + u) * 16 + 4 * quarter)));
        }
      }
}

// Largest integer whose high and low byte, the low one signed, both fit.
constexpr float kLargestOperand = 32639.0f;
// The same of what becomes an even operand, q_e - q_o / 16.
constexpr float kLargestNibbles = 30719.0f;

}  // namespace NKV_ISA
}  // namespace nibblekv
