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
// the chunk, once for each token of the quad. In a half chunk the upper lanes hold the same bytes of the next quad.
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
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) _mm512_store_si512(base + (i * (kQuads / 2) + group * 2 + q) * 64, u[i]);
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

// Cache lines of the next tile, asked for one by one between dot products, into the second level: asked for in one go they
// fill the core's line buffers and stall it (measured: a third of the time). The list is as long as the stage has places
// that ask.
struct Prefetches {
  const uint8_t** next;
};

NKV_INLINE void prefetch(Prefetches& p) { __builtin_prefetch(*p.next++, 0, 2); }

struct KeyRow {  // a query: bytes for the dot products, and what turns sums into scores
  const int32_t* operand;  // uint4: [dword][even high, even low, odd high, odd low]; int8: [dword][high, low]
  int32_t center;  // the code's centre * sum of the operand
  float scale, sum;  // score = scale * k_scale * dot product + sum * k_bias
};

// Scores of two groups of 16 tokens, [row][kTile]: groups of keys of `dwords` vectors each, k_scale and k_bias [32].
template <int kRows, bool kNibbles>
static void dot_keys(const uint8_t* keys, int64_t dwords, const KeyRow* rows, const float* k_scale, const float* k_bias,
                     float* scores, Prefetches& ahead) {
  constexpr int kChains = kNibbles && kRows <= 2 ? 2 : 1;  // enough independent sums to hide the latency of five cycles
  const __m512i nibble = _mm512_set1_epi8(15);
  const int32_t* operand[kRows];
  for (int r = 0; r < kRows; ++r) operand[r] = rows[r].operand;
  const uint8_t *k0 = keys, *k1 = keys + dwords * 64;
  __m512i high[kRows][2][kChains], low[kRows][2][kChains];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g)
#pragma GCC unroll 2
      for (int i = 0; i < kChains; ++i) high[r][g][i] = low[r][g][i] = _mm512_setzero_si512();
  for (int64_t j = 0; j < dwords; ++j) {
    prefetch(ahead);
    prefetch(ahead);
    const __m512i x0 = _mm512_load_si512(k0 + j * 64), x1 = _mm512_load_si512(k1 + j * 64);
    if (kNibbles) {
      const __m512i e0 = _mm512_and_si512(x0, nibble), e1 = _mm512_and_si512(x1, nibble);
      const __m512i o0 = _mm512_and_si512(_mm512_srli_epi16(x0, 4), nibble);
      const __m512i o1 = _mm512_and_si512(_mm512_srli_epi16(x1, 4), nibble);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const int32_t* q = operand[r] + 4 * j;
        const __m512i eh = _mm512_set1_epi32(q[0]), el = _mm512_set1_epi32(q[1]);
        dot4(high[r][0][0], e0, eh);
        dot4(high[r][1][0], e1, eh);
        dot4(low[r][0][0], e0, el);
        dot4(low[r][1][0], e1, el);
        const __m512i oh = _mm512_set1_epi32(q[2]), ol = _mm512_set1_epi32(q[3]);
        dot4(high[r][0][kChains - 1], o0, oh);
        dot4(high[r][1][kChains - 1], o1, oh);
        dot4(low[r][0][kChains - 1], o0, ol);
        dot4(low[r][1][kChains - 1], o1, ol);
      }
    } else {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const int32_t* q = operand[r] + 2 * j;
        const __m512i h = _mm512_set1_epi32(q[0]), l = _mm512_set1_epi32(q[1]);
        dot4(high[r][0][0], x0, h);
        dot4(high[r][1][0], x1, h);
        dot4(low[r][0][0], x0, l);
        dot4(low[r][1][0], x1, l);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g) {
      __m512i h = high[r][g][0], l = low[r][g][0];
      if (kChains == 2) h = _mm512_add_epi32(h, high[r][g][kChains - 1]), l = _mm512_add_epi32(l, low[r][g][kChains - 1]);
      // Sums beyond 32 bits wrap; what is left without the centre fits: 32639 * 128 * 512 < 2^31.
      l = _mm512_sub_epi32(l, _mm512_set1_epi32(rows[r].center));
      const __m512 x = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(h, 8), l));
      const __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(x, _mm512_load_ps(k_scale + 16 * g)), _mm512_set1_ps(rows[r].scale));
      _mm512_store_ps(scores + r * kTile + 16 * g,
                      _mm512_fmadd_ps(_mm512_load_ps(k_bias + 16 * g), _mm512_set1_ps(rows[r].sum), scaled));
    }
}

struct ValueRow {  // a row of weights as 16-bit integers: bytes for the dot products, and where their sums go
  const int32_t* quads;  // [quad of tokens][4]: high bytes of the weights, low bytes, 0, 0
  const int32_t* pairs;  // [pair of quads][2][16]: high bytes, low bytes; the second quad's in the upper 8 lanes
  int32_t sum;  // of the weights
  float scale, decay;  // accumulator = accumulator * decay + scale * sum
  float* accumulator;  // [chunk][u][even, odd][16 lanes], or without [even, odd] for 8-bit codes
};

// accumulator_r[channel] = accumulator_r[channel] * decay + sum over tokens of weight * (code - centre). kVectors vectors of
// 64 bytes at once; kHalf: the upper lanes take the weights of the next quad. Odd codes o are never unpacked: with bytes
// b = e + 16 o, the sum over w o is (sum over w b - sum over w e) / 16, exactly.
template <int kRows, int kVectors, bool kNibbles, bool kHalf>
static void dot_values_chunk(const uint8_t* values, int64_t quads, const ValueRow* rows, int64_t offset, Prefetches& ahead) {
  constexpr int kParts = kNibbles ? 2 : 1;  // bytes, and their even codes
  constexpr int64_t kSteps = kHalf ? kQuads / 2 : kQuads;
  const int64_t steps = kHalf ? quads / 2 : quads;
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int64_t u = 0; u < 4; u += kVectors) {
    __m512i high[kRows][kVectors][kParts], low[kRows][kVectors][kParts];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 2
        for (int p = 0; p < kParts; ++p) high[r][v][p] = low[r][v][p] = _mm512_setzero_si512();
    for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) prefetch(ahead);
      __m512i x[kVectors][kParts];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        x[v][0] = _mm512_load_si512(values + ((u + v) * kSteps + s) * 64);
        if (kNibbles) x[v][kParts - 1] = _mm512_and_si512(x[v][0], nibble);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        __m512i h, l;
        if (kHalf) {
          h = _mm512_load_si512(rows[r].pairs + 32 * s);
          l = _mm512_load_si512(rows[r].pairs + 32 * s + 16);
        } else {
          h = _mm512_set1_epi32(rows[r].quads[4 * s]);
          l = _mm512_set1_epi32(rows[r].quads[4 * s + 1]);
        }
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 2
          for (int p = 0; p < kParts; ++p) {
            dot4(high[r][v][p], x[v][p], h);
            dot4(low[r][v][p], x[v][p], l);
          }
      }
    }
    const __mmask16 lanes = kHalf ? 0x00FF : 0xFFFF;  // a half chunk adds its upper lanes to the lower: centre once
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512 scale = _mm512_set1_ps(rows[r].scale), decay = _mm512_set1_ps(rows[r].decay);
      const __m512i byte_center = _mm512_maskz_set1_epi32(lanes, rows[r].sum * (kNibbles ? 8 * 17 : 128));
      const __m512i even_center = _mm512_maskz_set1_epi32(lanes, rows[r].sum * 8);
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
  constexpr int kVectors = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;  // of 16 sums, or 12
  const int64_t full = full_chunks(row_bytes), width = kNibbles ? 128 : 64;
  for (int64_t chunk = 0; chunk < full; ++chunk)
    dot_values_chunk<kRows, kVectors, kNibbles, false>(values + chunk * 4 * kQuads * 64, quads, rows, chunk * width, ahead);
  if (half_chunk(row_bytes))
    dot_values_chunk<kRows, kVectors, kNibbles, true>(values + full * 4 * kQuads * 64, quads, rows, full * width, ahead);
}

NKV_INLINE int64_t value_accumulator_size(int64_t row_bytes, bool nibbles) {
  return (full_chunks(row_bytes) + half_chunk(row_bytes)) * (nibbles ? 128 : 64);
}

// values[d] += accumulator, in the order of the head's dimensions.
static void gather_accumulator(const float* accumulator, int64_t row_bytes, bool nibbles, float* values) {
  const int64_t full = full_chunks(row_bytes), parts = nibbles ? 2 : 1;
  for (int64_t chunk = 0; chunk < full + half_chunk(row_bytes); ++chunk)
    for (int64_t u = 0; u < 4; ++u)
      for (int64_t p = 0; p < parts; ++p)
        for (int64_t lane = 0; lane < 16; ++lane) {
          const int64_t quarter = chunk == full ? (lane / 4) & 1 : lane / 4;
          const int64_t byte = 64 * chunk + 16 * quarter + 4 * u + lane % 4;
          if (byte < row_bytes) values[byte * parts + p] += accumulator[((chunk * 4 + u) * parts + p) * 16 + lane];
        }
}

// Largest integer whose high and low byte, the low one signed, both fit.
constexpr float kLargestOperand = 32639.0f;

}  // namespace NKV_ISA
}  // namespace nibblekv
