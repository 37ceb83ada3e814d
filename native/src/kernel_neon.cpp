// Bandwidth kernels in NEON. Inside the timed region: the loops of kernel_body.hpp; see there why.
//
// aarch64 has no streaming store of one register, only of a pair (stnp), a hint that lines need not be
// kept. So a Vector here is a pair of registers, 32 bytes.
#include "kernel.hpp"

#if defined(__aarch64__)

#include <arm_neon.h>

namespace homenode {
namespace {

#define KERNEL [[gnu::no_sanitize("address", "undefined")]]
#define INLINE KERNEL inline

struct Vector {
  float64x2_t low;
  float64x2_t high;
};

INLINE Vector load(const double* at) { return {vld1q_f64(at), vld1q_f64(at + 2)}; }
INLINE void store(double* at, Vector value) {
  vst1q_f64(at, value.low);
  vst1q_f64(at + 2, value.high);
}
INLINE void stream(double* at, Vector value) {
  asm volatile("stnp %q1, %q2, [%0]" : : "r"(at), "w"(value.low), "w"(value.high) : "memory");
}
INLINE Vector broadcast(double value) { return {vdupq_n_f64(value), vdupq_n_f64(value)}; }
INLINE Vector zero() { return broadcast(0.0); }
INLINE Vector plus(Vector x, Vector y) { return {vaddq_f64(x.low, y.low), vaddq_f64(x.high, y.high)}; }
INLINE Vector times(Vector x, Vector y) { return {vmulq_f64(x.low, y.low), vmulq_f64(x.high, y.high)}; }
INLINE Vector times_plus(Vector x, Vector y, Vector z) {
  return {vfmaq_f64(z.low, x.low, y.low), vfmaq_f64(z.high, x.high, y.high)};
}
INLINE void fence() { asm volatile("dmb ishst" : : : "memory"); }
INLINE double sum_of(Vector value) { return vaddvq_f64(vaddq_f64(value.low, value.high)); }

#include "kernel_body.hpp"

}  // namespace

const KernelSet neon_kernels = HOMENODE_KERNEL_SET("neon");

}  // namespace homenode

#endif
