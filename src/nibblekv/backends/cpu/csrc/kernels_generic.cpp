// The path of any machine: plain C++ with compiler vectors.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "abi.h"

#define NKV_ISA generic
#include "kernels.h"
