// Bandwidth kernels in SSE2, the least that x86-64 has. Inside the timed region: the loops of kernel_body.hpp; see there why.
//
// Each function names its target itself, so that the file needs no flags of its own and nothing else
// in it can be compiled for instructions that the processor at hand does not have.
#include "kernel.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

namespace homenode {
namespace {

#define KERNEL [[gnu::no_sanitize("address", "undefined")]]
#define INLINE [[gnu::no_sanitize("address", "undefined")]] inline

using Vector = __m128d;

INLINE Vector load(const double* at) { return _mm_load_pd(at); }
INLINE void store(double* at, Vector value) { _mm_store_pd(at, value); }
INLINE void stream(double* at, Vector value) { _mm_stream_pd(at, value); }
INLINE Vector broadcast(double value) { return _mm_set1_pd(value); }
INLINE Vector zero() { return _mm_setzero_pd(); }
INLINE Vector plus(Vector x, Vector y) { return _mm_add_pd(x, y); }
INLINE Vector times(Vector x, Vector y) { return _mm_mul_pd(x, y); }
INLINE Vector times_plus(Vector x, Vector y, Vector z) { return _mm_add_pd(_mm_mul_pd(x, y), z); }
INLINE void fence() { _mm_sfence(); }

INLINE double sum_of(Vector value) {
  alignas(64) double parts[sizeof(Vector) / sizeof(double)];
  _mm_store_pd(parts, value);
  double sum = 0.0;
  for (const double part : parts) sum += part;
  return sum;
}

#include "kernel_body.hpp"

}  // namespace

const KernelSet sse2_kernels = HOMENODE_KERNEL_SET("sse2");

}  // namespace homenode

#endif
