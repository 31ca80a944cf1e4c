// Dot products in float32 over decoded tiles: float8 rows everywhere, raw rows, and every format without VNNI.
#pragma once

namespace nibblekv {
namespace NKV_ISA {

constexpr float kCenter = 8.0f;  // of 4-bit codes: an integer, so that integer sums without it are exact
constexpr int kFloatVectors = NKV_AVX512 ? 4 : 1;  // vectors of 16 beside 4 rows that fit the register file

// 16 rows of 16 bytes or floats -> 16 columns.
template <typename V>
NKV_INLINE void transpose16(V* x) {
#pragma GCC unroll 4
  for (int stage = 0; stage < 4; ++stage) {
    V y[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      y[2 * i] = NKV_SHUFFLE(x[i], x[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      y[2 * i + 1] = NKV_SHUFFLE(x[i], x[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) x[i] = y[i];
  }
}

// Eight 2-bit fields, or 1-bit ones, of each entry to eight nibbles.
template <typename U>
NKV_INLINE U spread_pairs(U x) {
  x = (x | x << 8) & 0x00FF00FFu;
  x = (x | x << 4) & 0x0F0F0F0Fu;
  return (x | x << 2) & 0x33333333u;
}

template <typename U>
NKV_INLINE U spread_bits(U x) {
  x = (x | x << 12) & 0x000F000Fu;
  x = (x | x << 6) & 0x03030303u;
  return (x | x << 3) & 0x11111111u;
}

// Codes of 2 or 3 bits -> 4-bit codes with the same centre, of one row.
static void widen_row(const Side& side, const uint8_t* row, uint8_t* wide) {
  typedef uint32_t u8x __attribute__((vector_size(32)));
  typedef uint32_t u8u __attribute__((vector_size(32), aligned(1), may_alias));
  typedef uint16_t h8u __attribute__((vector_size(16), aligned(1), may_alias));
  typedef uint8_t b8u __attribute__((vector_size(8), aligned(1), may_alias));
  const bool three = side.bits == 3;
  const int64_t n = side.head_size / 8;
  const uint8_t* high = row + 2 * n;
  const uint32_t offset = three ? 0x44444444u : 0x66666666u;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    u8x x = spread_pairs(__builtin_convertvector(*reinterpret_cast<const h8u*>(row + 2 * i), u8x));
    if (three) x |= spread_bits(__builtin_convertvector(*reinterpret_cast<const b8u*>(high + i), u8x)) << 2;
    *reinterpret_cast<u8u*>(wide + 4 * i) = x + offset;
  }
  for (; i < n; ++i) {
    uint32_t x = spread_pairs<uint32_t>(row[2 * i] | row[2 * i + 1] << 8);
    if (three) x |= spread_bits<uint32_t>(high[i]) << 2;
    x += offset;
    memcpy(wide + 4 * i, &x, 4);
  }
}

constexpr int64_t kWideBytes = 16 * kMaxHeadSize / 2;

// 16 rows of codes, as they lie or, of less than 4 bits, widened into `wide`; changes the stride.
NKV_INLINE const uint8_t* widen_rows(const Side& side, const uint8_t* rows, int64_t* stride, uint8_t* wide) {
  if (side.bits >= 4) return rows;
  for (int64_t i = 0; i < 16; ++i) widen_row(side, rows + i * *stride, wide + i * side.row_bytes);
  *stride = side.row_bytes;
  return wide;
}

// 16 rows of codes -> keys[dimension][token], less the code's centre.
static void decode_keys(const Side& side, const uint8_t* rows, int64_t stride, const float* table, float* keys) {
  alignas(64) uint8_t wide[kWideBytes];
  rows = widen_rows(side, rows, &stride, wide);
  for (int64_t j = 0; j < side.row_bytes; j += 16) {
    const int64_t n = side.row_bytes - j < 16 ? side.row_bytes - j : 16;
    b16 x[16];
    for (int i = 0; i < 16; ++i) {
      if (n == 16) {
        x[i] = *reinterpret_cast<const b16u*>(rows + i * stride + j);
      } else {
        x[i] = (b16){};
        memcpy(&x[i], rows + i * stride + j, n);
      }
    }
    transpose16(x);
    for (int64_t k = 0; k < n; ++k) {
      uint8_t b[16];
      memcpy(b, &x[k], 16);
      if (side.code == kUint4) {
        float* even = keys + 2 * (j + k) * kTile;
        for (int t = 0; t < 16; ++t) even[t] = static_cast<float>(b[t] & 15) - kCenter;
        for (int t = 0; t < 16; ++t) even[kTile + t] = static_cast<float>(b[t] >> 4) - kCenter;
      } else if (side.code == kInt8) {
        float* key = keys + (j + k) * kTile;
        for (int t = 0; t < 16; ++t) key[t] = static_cast<float>(static_cast<int8_t>(b[t]));
      } else {
        float* key = keys + (j + k) * kTile;
        for (int t = 0; t < 16; ++t) key[t] = table[b[t]];
      }
    }
  }
}

// One row of codes -> value[dimension], less the code's centre; returns whether every code is a number.
static bool decode_value(const Side& side, const uint8_t* row, const float* table, float* value) {
  bool numbers = true;
  if (side.code == kUint4) {
    alignas(64) uint8_t wide[kMaxHeadSize / 2];
    if (side.bits < 4) {
      widen_row(side, row, wide);
      row = wide;
    }
    for (int64_t j = 0; j < side.row_bytes; ++j) {
      value[2 * j] = static_cast<float>(row[j] & 15) - kCenter;
      value[2 * j + 1] = static_cast<float>(row[j] >> 4) - kCenter;
    }
  } else if (side.code == kInt8) {
    for (int64_t j = 0; j < side.row_bytes; ++j) value[j] = static_cast<float>(static_cast<int8_t>(row[j]));
  } else {
    for (int64_t j = 0; j < side.row_bytes; ++j) {
      const bool number = (row[j] & 0x7F) != 0x7F;
      value[j] = number ? table[row[j]] : 0.0f;
      numbers &= number;
    }
  }
  return numbers;
}

// scores[r][token] = sum over d of query[r][d] * keys[d][token].
template <int kRows>
static void dot_keys_float(const float* keys, int64_t head_size, int64_t tokens, const float* query, float* scores) {
  for (int64_t t = 0; t < tokens; t += 16 * kFloatVectors) {
    v16 sum[kRows][kFloatVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kFloatVectors; ++v) sum[r][v] = (v16){};
    for (int64_t d = 0; d < head_size; ++d) {
      v16 k[kFloatVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kFloatVectors; ++v) k[v] = load16(keys + d * kTile + t + 16 * v);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const v16 q = splat(query[r * kMaxHeadSize + d]);
#pragma GCC unroll 4
        for (int v = 0; v < kFloatVectors; ++v) sum[r][v] = fma16(q, k[v], sum[r][v]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kFloatVectors; ++v) store16(scores + r * kTile + t + 16 * v, sum[r][v]);
  }
}

// accumulator[r][d] = accumulator[r][d] * decay[r] + sum over tokens of weight[r][token] * values[token][d].
template <int kRows, int kVectors>
NKV_INLINE void dot_values_strip(const float* values, int64_t width, int64_t tokens, const float* weights, const float* decay,
                                 float* accumulator) {
  v16 sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = (v16){};
  for (int64_t t = 0; t < tokens; ++t) {
    v16 x[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) x[v] = load16(values + t * width + 16 * v);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const v16 w = splat(weights[r * kTile + t]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma16(w, x[v], sum[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* a = accumulator + r * kMaxHeadSize + 16 * v;
      store16(a, fma16(load16(a), splat(decay[r]), sum[r][v]));
    }
}

template <int kRows>
static void dot_values_float(const float* values, int64_t width, int64_t tokens, const float* weights, const float* decay,
                             float* accumulator) {
  int64_t d = 0;
  for (; d + 16 * kFloatVectors <= width; d += 16 * kFloatVectors)
    dot_values_strip<kRows, kFloatVectors>(values + d, width, tokens, weights, decay, accumulator + d);
  for (; d < width; d += 16) dot_values_strip<kRows, 1>(values + d, width, tokens, weights, decay, accumulator + d);
}

}  // namespace NKV_ISA
}  // namespace nibblekv
