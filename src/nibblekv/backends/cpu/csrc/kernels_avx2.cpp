// The path of x86 machines with AVX2, FMA and F16C.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "abi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define NKV_ISA avx2
#define NKV_AVX2 1
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
