// The instruction that tells a CPU it is spinning: frees the sibling, saves power. Nothing is timed here.
#pragma once

namespace homenode {

inline void spin_wait() {
#if defined(__x86_64__)
  asm volatile("pause");
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` is a no-op on most cores; isb really waits some cycles
#endif
}

}  // namespace homenode
