// Everything that is compiled once per instruction set. The including file sets NKV_ISA, and has set the compiler's target
// after the standard headers: an inline function of theirs compiled here for AVX-512 could replace everybody's.
#pragma once

#ifndef NKV_AVX2
#define NKV_AVX2 0
#endif
#ifndef NKV_AVX512
#define NKV_AVX512 0
#endif
#define NKV_INLINE_MEMBER __attribute__((always_inline))

#include "vectors.h"
#include "write.h"
#include "float_dot.h"
#if NKV_AVX512
#include "int_dot.h"
#endif
#include "attention.h"

#define NKV_STRING_OF(x) #x
#define NKV_STRING(x) NKV_STRING_OF(x)
#define NKV_TABLE_OF(isa) isa##_kernels
#define NKV_TABLE(isa) NKV_TABLE_OF(isa)

namespace nibblekv {
const Kernels NKV_TABLE(NKV_ISA) = {NKV_STRING(NKV_ISA), NKV_ISA::attend, NKV_ISA::merge, NKV_ISA::write_rows};
}
