// Small vectors, conversions between number formats, and the row rotation. Included once per instruction set.
#pragma once

namespace nibblekv {
namespace NKV_ISA {

#define NKV_INLINE static inline __attribute__((always_inline))

typedef float v16 __attribute__((vector_size(64)));
typedef float v16u __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef int32_t i16u __attribute__((vector_size(64), aligned(4), may_alias));
typedef float v8 __attribute__((vector_size(32)));
typedef float v8u __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8x __attribute__((vector_size(32)));
typedef uint8_t b16 __attribute__((vector_size(16)));
typedef uint8_t b16u __attribute__((vector_size(16), aligned(1), may_alias));

#if defined(__clang__)
#define NKV_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define NKV_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (decltype((a) == (b))){__VA_ARGS__})
#endif

NKV_INLINE v16 load16(const float* p) { return *reinterpret_cast<const v16u*>(p); }
NKV_INLINE void store16(float* p, v16 x) { *reinterpret_cast<v16u*>(p) = x; }
NKV_INLINE v8 load8(const float* p) { return *reinterpret_cast<const v8u*>(p); }
NKV_INLINE void store8(float* p, v8 x) { *reinterpret_cast<v8u*>(p) = x; }
NKV_INLINE v16 splat(float x) { return x - (v16){}; }
NKV_INLINE v16 select(i16 mask, v16 a, v16 b) { return (v16)((mask & (i16)a) | (~mask & (i16)b)); }

NKV_INLINE v16 fma16(v16 a, v16 b, v16 c) {
#if NKV_AVX512
  return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

NKV_INLINE v16 max16(v16 a, v16 b) {
#if NKV_AVX512
  return (v16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

NKV_INLINE float sum16(v16 x) {
  float s = 0;
#if NKV_AVX512
  s = _mm512_reduce_add_ps((__m512)x);
#else
  for (int i = 0; i < 16; ++i) s += x[i];
#endif
  return s;
}

NKV_INLINE float sum8(v8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

NKV_INLINE float reduce_max16(v16 x) {
#if NKV_AVX512
  return _mm512_reduce_max_ps((__m512)x);
#else
  float s = x[0];
  for (int i = 1; i < 16; ++i) s = x[i] > s ? x[i] : s;
  return s;
#endif
}

NKV_INLINE bool any_nan(v16 x) {
#if NKV_AVX512
  return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q) != 0;
#else
  i16 bad = x != x;
  int32_t any = 0;
  for (int i = 0; i < 16; ++i) any |= bad[i];
  return any != 0;
#endif
}

// 2^x for x <= 0, 0 below 2^-126; relative error 2e-7 (Taylor to the 6th power on [-1/2, 1/2]).
NKV_INLINE v16 exp2_16(v16 x) {
  const i16 alive = x > splat(-126.0f);
  x = select(alive, x, splat(-126.0f));
  const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const v16 shifted = x + magic;
  const v16 f = x - (shifted - magic);
  v16 p = splat(1.5403530e-4f);
  p = fma16(p, f, splat(1.3333558e-3f));
  p = fma16(p, f, splat(9.6181291e-3f));
  p = fma16(p, f, splat(5.5504109e-2f));
  p = fma16(p, f, splat(2.4022651e-1f));
  p = fma16(p, f, splat(6.9314718e-1f));
  p = fma16(p, f, splat(1.0f));
  const i16 exponent = ((i16)shifted - (i16)magic) << 23;
  return (v16)((i16)(v16)((i16)p + exponent) & alive);
}

NKV_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

NKV_INLINE float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// [n] values of a dtype, n a multiple of 8, to float.
NKV_INLINE void load_row(int64_t dtype, const uint8_t* src, int64_t n, float* dst) {
  if (dtype == kFloat32) {
    memcpy(dst, src, n * 4);
  } else if (dtype == kBFloat16) {
    const uint16_t* s = reinterpret_cast<const uint16_t*>(src);
    for (int64_t i = 0; i < n; ++i) dst[i] = float_of(static_cast<uint32_t>(s[i]) << 16);
  } else {
    const uint16_t* s = reinterpret_cast<const uint16_t*>(src);
#if NKV_AVX2
    for (int64_t i = 0; i < n; i += 8)
      _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s + i))));
#else
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t h = s[i], sign = (h & 0x8000u) << 16;
      float x = float_of((h & 0x7FFFu) << 13) * 0x1p112f;  // exact, subnormals included
      if ((h & 0x7C00u) == 0x7C00u) x = float_of(0x7F800000u | ((h & 0x3FFu) << 13));
      dst[i] = float_of(bits_of(x) | sign);
    }
#endif
  }
}

// float8 e4m3fn, round to nearest even, |x| <= 448 or NaN.
NKV_INLINE uint8_t to_float8(float x) {
  const uint32_t u = bits_of(x), sign = (u >> 24) & 0x80u;
  uint32_t a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return static_cast<uint8_t>(sign | 0x7F);
  if (a < 0x3C800000u)  // below 2^-6: subnormal, in steps of 2^-9
    return static_cast<uint8_t>(sign | (bits_of(float_of(a) + 16384.0f) - bits_of(16384.0f)));
  a += 0x7FFFFu + ((a >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((a >> 20) - (120u << 3)));
}

NKV_INLINE float from_float8(uint8_t b) {
  const uint32_t e = (b >> 3) & 15u, f = b & 7u, sign = static_cast<uint32_t>(b & 0x80u) << 24;
  if ((b & 0x7Fu) == 0x7Fu) return float_of(0x7FC00000u);
  const float x = e ? float_of(((e + 120u) << 23) | (f << 20)) : static_cast<float>(f) * 0x1p-9f;
  return float_of(bits_of(x) | sign);
}

// [n] floats, n a multiple of 8, to a dtype; for float8 they are divided by `scale` and saturated.
NKV_INLINE void store_row(int64_t dtype, const float* src, int64_t n, uint8_t* dst, float scale) {
  if (dtype == kFloat32) {
    memcpy(dst, src, n * 4);
  } else if (dtype == kBFloat16) {
    uint16_t* d = reinterpret_cast<uint16_t*>(dst);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t u = bits_of(src[i]);
      d[i] = static_cast<uint16_t>(src[i] != src[i] ? 0x7FC0u : (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
    }
  } else if (dtype == kFloat16) {
    uint16_t* d = reinterpret_cast<uint16_t*>(dst);
#if NKV_AVX2
    for (int64_t i = 0; i < n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(d + i), _mm256_cvtps_ph(_mm256_loadu_ps(src + i), 0));
#else
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t u = bits_of(src[i]), sign = (u >> 16) & 0x8000u;
      uint32_t a = u & 0x7FFFFFFFu;
      if (a > 0x7F800000u)
        a = 0x7E00u;
      else if (a < 0x38800000u)  // below 2^-14: subnormal, in steps of 2^-24
        a = bits_of(float_of(a) + 0.5f) - bits_of(0.5f);
      else
        a = (a + 0xFFFu + ((a >> 13) & 1u) - (112u << 23)) >> 13, a = a > 0x7C00u ? 0x7C00u : a;
      d[i] = static_cast<uint16_t>(sign | a);
    }
#endif
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const float x = src[i] / scale;
      dst[i] = to_float8(x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x);
    }
  }
}

// In place: x = H_p x on p blocks of `width` contiguous values.
NKV_INLINE void walsh_hadamard(float* x, int64_t p, int64_t width) {
  int64_t h = 1;
  if (width == 1 && p >= 16) {  // the first four stages stay inside a vector
    for (int64_t i = 0; i < p; i += 16) {
      v16 a = load16(x + i);
      a = NKV_SHUFFLE(a, a, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14) +
          a * (v16){1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1};
      a = NKV_SHUFFLE(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13) +
          a * (v16){1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1};
      a = NKV_SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11) +
          a * (v16){1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1};
      a = NKV_SHUFFLE(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7) +
          a * (v16){1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1};
      store16(x + i, a);
    }
    h = 16;
  }
  for (; h < p; h *= 2)
    for (int64_t i = 0; i < p; i += 2 * h) {
      float* a = x + i * width;
      float* b = a + h * width;
      const int64_t n = h * width;
      int64_t k = 0;
      for (; k + 16 <= n; k += 16) {
        const v16 u = load16(a + k), w = load16(b + k);
        store16(a + k, u + w);
        store16(b + k, u - w);
      }
      for (; k < n; ++k) {
        const float u = a[k], w = b[k];
        a[k] = u + w;
        b[k] = u - w;
      }
    }
}

// In place: every run of m values v becomes M^T v, M given by rows.
NKV_INLINE void mix_base(float* x, int64_t size, int64_t m, const float* rows) {
  float mixed[kMaxHeadSize];
  for (int64_t i = 0; i < size; i += m) {
    for (int64_t j = 0; j < m; ++j) mixed[j] = 0;
    for (int64_t k = 0; k < m; ++k)
      for (int64_t j = 0; j < m; ++j) mixed[j] += x[i + k] * rows[k * m + j];
    memcpy(x + i, mixed, m * sizeof(float));
  }
}

NKV_INLINE void mix_sylvester(const Rotation& r, float* x) {
  if (r.outer)
    walsh_hadamard(x, r.p, r.m);
  else
    for (int64_t i = 0; i < r.size; i += r.p) walsh_hadamard(x + i, r.p, 1);
}

static void rotate_row(const Rotation& r, float* x) {
  if (r.p * r.m == 1) return;
  for (int64_t i = 0; i < r.size; ++i) x[i] *= r.signs[i];
  if (r.m > 1) mix_base(x, r.size, r.m, r.base_transposed);
  mix_sylvester(r, x);
  for (int64_t i = 0; i < r.size; ++i) x[i] *= r.gain;
}

static void unrotate_row(const Rotation& r, float* x) {
  if (r.p * r.m == 1) return;
  mix_sylvester(r, x);
  if (r.m > 1) mix_base(x, r.size, r.m, r.base);
  const float gain = r.gain * r.inverse_gain;
  for (int64_t i = 0; i < r.size; ++i) x[i] *= r.signs[i] * gain;
}

}  // namespace NKV_ISA
}  // namespace nibblekv
