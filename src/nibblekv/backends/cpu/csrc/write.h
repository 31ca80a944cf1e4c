// Quantizing rows into their slots: the formulas of nibblekv/formats.py in the same order of float32 operations.
#pragma once

namespace nibblekv {
namespace NKV_ISA {

constexpr float kScaleFloor = 0x1p-100f;
constexpr float kEdge[] = {0, 0, 8.0f, 16.0f, 62.0f};  // by bits
constexpr float kRefitCovariance = 0.5f, kRefitShift = 0.125f;

NKV_INLINE float round_bfloat16(float x, bool up) {
  const uint32_t u = bits_of(x);
  uint32_t t = u & 0xFFFF0000u;
  if ((u & 0xFFFFu) && (up ? x > 0 : x < 0)) t += 0x10000u;
  return float_of(t);
}

NKV_INLINE bool finite(float x) { return (bits_of(x) & 0x7F800000u) != 0x7F800000u; }

NKV_INLINE void clamp_codes(int32_t* c, int64_t n, int32_t most) {
  for (int64_t i = 0; i < n; ++i) c[i] = c[i] < 0 ? 0 : c[i] > most ? most : c[i];
}

NKV_INLINE float nearest_bfloat16(float x) {
  const uint32_t u = bits_of(x);
  return float_of((u + 0x7FFFu + ((u >> 16) & 1u)) & 0xFFFF0000u);
}

// The scale and bias with which the codes c of a key are unbiased along the key itself: `_refit` of nibblekv/formats.py.
NKV_INLINE void refit(const float* y, const int32_t* c, int64_t n, float most, float inverse, float& scale, float& bias) {
  v8 steps = {}, codes = {};
  for (int64_t i = 0; i < n; i += 8) {
    steps += (load8(y + i) - bias) * inverse;
    codes += __builtin_convertvector(*reinterpret_cast<const i8x*>(c + i), v8);
  }
  const float steps_mean = sum8(steps) / n, codes_mean = sum8(codes) / n;
  v8 variance = {}, covariance = {};
  for (int64_t i = 0; i < n; i += 8) {
    const v8 centred = (load8(y + i) - bias) * inverse - steps_mean;
    variance += centred * centred;
    covariance += centred * (__builtin_convertvector(*reinterpret_cast<const i8x*>(c + i), v8) - codes_mean);
  }
  const float related = sum8(covariance);
  const float new_scale = nearest_bfloat16(scale * (sum8(variance) / related));
  const float exact_bias = bias + scale * steps_mean - new_scale * codes_mean;
  const float new_bias = nearest_bfloat16(exact_bias);
  if (related >= kRefitCovariance && __builtin_fabsf(new_scale - scale) * most <= scale &&
      __builtin_fabsf(new_bias - exact_bias) <= scale * kRefitShift) {  // all false with NaN
    scale = new_scale;
    bias = new_bias;
  }
}

static void encode_row(const Side& side, bool is_key, const float* y, uint8_t* codes, uint32_t* word) {
  const int64_t n = side.head_size;
  v8 low = load8(y), high = low, check = low * 0.0f;
  for (int64_t i = 8; i < n; i += 8) {
    const v8 x = load8(y + i);
    const i8x less = x < low, more = x > high;
    low = (v8)((less & (i8x)x) | (~less & (i8x)low));
    high = (v8)((more & (i8x)x) | (~more & (i8x)high));
    check += x * 0.0f;  // NaN where x is NaN or Inf
  }
  float lo = low[0], hi = high[0], zeros = check[0];
  for (int i = 1; i < 8; ++i) {
    lo = low[i] < lo ? low[i] : lo;
    hi = high[i] > hi ? high[i] : hi;
    zeros += check[i];
  }
  alignas(64) int32_t c[kMaxHeadSize];
  const int32_t most = (1 << side.bits) - 1;  // of unsigned codes
  float scale;
  uint32_t bits, nan_word = 0x7FC00000u;
  if (side.word == kScaleMin) {
    nan_word = 0x7FC07FC0u;
    const float margin = (hi - lo) / kEdge[side.bits];
    float bias = round_bfloat16(lo + margin, false);
    scale = round_bfloat16((hi - margin - bias) / static_cast<float>(most), true);
    if (scale < kScaleFloor) scale = 0;
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    for (int64_t i = 0; i < n; i += 8) {
      const v8 x = (load8(y + i) - bias) * inverse + 0.5f;
      *reinterpret_cast<i8x*>(c + i) = __builtin_convertvector(x, i8x);
    }
    clamp_codes(c, n, most);
    if (is_key) refit(y, c, n, static_cast<float>(most), inverse, scale, bias);
    bits = bits_of(scale) | (bits_of(bias) >> 16);
  } else if (side.word == kScaleZero) {
    lo = lo < 0 ? lo : 0;
    hi = hi > 0 ? hi : 0;
    scale = (hi - lo) / 15.0f;
    if (scale < kScaleFloor) scale = kScaleFloor;
    const int32_t rounded = finite(scale) ? static_cast<int32_t>(-lo / scale + 0.5f) : 0;
    const int32_t zero = rounded > 15 ? 15 : rounded;
    const float inverse = 1.0f / scale;
    for (int64_t i = 0; i < n; i += 8) {
      const v8 x = load8(y + i) * inverse + static_cast<float>(zero) + 0.5f;
      *reinterpret_cast<i8x*>(c + i) = __builtin_convertvector(x, i8x);
    }
    clamp_codes(c, n, most);
    bits = (bits_of(scale) & ~15u) | static_cast<uint32_t>(zero);
  } else {
    scale = (hi > -lo ? hi : -lo) / (side.code == kInt8 ? 127.0f : 448.0f);
    if (scale < kScaleFloor) scale = kScaleFloor;
    bits = bits_of(scale);
  }
  if (zeros != 0 || zeros != zeros || !finite(scale) || !finite(hi - lo)) {
    memset(codes, 0, side.stored_bytes);
    *word = nan_word;
    return;
  }
  *word = bits;
  if (side.code == kUint4) {
    if (side.bits == 4) {
      for (int64_t j = 0; j < n / 2; ++j) codes[j] = static_cast<uint8_t>(c[2 * j] | (c[2 * j + 1] << 4));
      return;
    }
    for (int64_t j = 0; j < n / 4; ++j) {
      uint32_t byte = 0;
      for (int k = 0; k < 4; ++k) byte |= (c[4 * j + k] & 3u) << (2 * k);
      codes[j] = static_cast<uint8_t>(byte);
    }
    if (side.bits == 3)
      for (int64_t j = 0; j < n / 8; ++j) {
        uint32_t byte = 0;
        for (int k = 0; k < 8; ++k) byte |= (static_cast<uint32_t>(c[8 * j + k]) >> 2) << k;
        codes[n / 4 + j] = static_cast<uint8_t>(byte);
      }
    return;
  }
  const float inverse = 1.0f / scale;
  if (side.code == kInt8) {
    for (int64_t i = 0; i < n; ++i) {
      const float x = y[i] * inverse;
      const int32_t q = static_cast<int32_t>(x + float_of(0x3F000000u | (bits_of(x) & 0x80000000u)));
      codes[i] = static_cast<uint8_t>(static_cast<int8_t>(q < -128 ? -128 : q > 127 ? 127 : q));
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const float x = y[i] * inverse;
      codes[i] = to_float8(x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x);
    }
  }
}

NKV_INLINE void write_side(const WriteArgs& a, const Side& side, bool is_key, const uint8_t* row, int64_t block, int64_t slot,
                           int64_t head) {
  alignas(64) float y[kMaxHeadSize];
  load_row(a.dtype, row, side.head_size, y);
  rotate_row(*side.rotation, y);
  uint8_t* codes = a.kv_cache + side.codes_offset + block * side.block_stride + slot * side.slot_stride + head * side.head_stride;
  uint8_t* word = a.kv_cache + side.words_offset + block * side.word_block_stride + slot * side.word_slot_stride +
                  head * side.word_head_stride;
  encode_row(side, is_key, y, codes, reinterpret_cast<uint32_t*>(word));
}

// Rows [begin, end) of tokens x heads.
static void write_rows(const WriteArgs& a, int64_t begin, int64_t end) {
  const Geometry& g = *a.geometry;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t token = i / g.num_kv_heads, head = i % g.num_kv_heads;
    const int64_t slot = load_index(a.slot_mapping, a.slot_stride, a.slots_are_64, token);
    if (slot < 0) continue;
    const int64_t block = slot / g.block_size, row = slot % g.block_size;
    write_side(a, g.k, true, a.key + token * a.key_token_stride + head * a.key_head_stride, block, row, head);
    write_side(a, g.v, false, a.value + token * a.value_token_stride + head * a.value_head_stride, block, row, head);
  }
}

}  // namespace NKV_ISA
}  // namespace nibblekv
