// The path of x86 machines with AVX-512 and its integer dot product (VNNI).
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "abi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define NKV_ISA avx512
#define NKV_AVX2 1
#define NKV_AVX512 1
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
