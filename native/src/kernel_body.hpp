// The loops of all bandwidth kernels, included once per instruction set. Each function is a timed
// region; for non-temporal stores one fence at the end is part of it, because until then the last lines
// are not on their way to memory.
//
// Why a simpler loop would lie: gcc -O2 and -O3 -march=native differ by 28 % on STREAM's triad; a
// compiler may turn copy into memcpy, whose store type is the C library's choice; a read whose sum
// is unused vanishes (945 GB/s were seen); and without non-temporal forms the write-allocate traffic
// hides a third of a copy. Here each load and store is spelled out, and the caller checks results.
//
// The shapes are the best of those tried on Zen 4, one thread, in turns with each other: two reading
// streams (5 % over one); regular stores line by line (8 % over two lines); non-temporal stores two
// lines at a time with loads prefetched 2 KiB ahead (5 to 10 % over none). Steps of eight lines with
// 64-byte registers, which look best on paper, lose 10 to 20 % to that; kernel.cpp chooses the width.
//
// The includer defines, in an anonymous namespace: KERNEL (function attributes: the target), Vector
// (a register of doubles), load, store, stream, broadcast, plus, times_plus (x * y + z), times, zero,
// sum_of, and fence.
// No #pragma once: included on purpose by several files.

constexpr std::size_t lanes = sizeof(Vector) / sizeof(double);
constexpr std::size_t line_lanes = 8;                           // doubles of a 64-byte line
constexpr std::size_t regular_vectors = line_lanes / lanes;        // per step: one line
constexpr std::size_t streaming_vectors = 2 * line_lanes / lanes;  // two lines
constexpr std::size_t reading_vectors = 4;                         // of each of the two streams
constexpr std::size_t prefetch_lanes = 256;

// Passes follow one another in here: over arrays of a few KiB a call and its sums take as long as the loads.
KERNEL double read_regular(double*, const double* a, const double*, std::size_t count, std::size_t passes) {
  Vector sum[2 * reading_vectors];
  for (auto& part : sum) part = zero();
  const std::size_t half = count / 2;
  for (std::size_t pass = 0; pass < passes; ++pass) {
#pragma GCC unroll 2
    for (std::size_t i = 0; i < half; i += reading_vectors * lanes) {
#pragma GCC unroll 4
      for (std::size_t k = 0; k < reading_vectors; ++k) sum[k] = plus(sum[k], load(a + i + k * lanes));
#pragma GCC unroll 4
      for (std::size_t k = 0; k < reading_vectors; ++k) {
        sum[reading_vectors + k] = plus(sum[reading_vectors + k], load(a + half + i + k * lanes));
      }
    }
    asm volatile("" : : : "memory");  // each pass loads again
  }
  double total = 0.0;
  for (const auto& part : sum) total += sum_of(part);
  return total;
}

// Loads of a whole step come before its stores, and the stores stay in the order of their addresses: a
// compiler that moves one away leaves a line of non-temporal stores half written. `fetch` is run for
// each line of a step, `value` for each register.
#define HOMENODE_STORING_KERNEL(name, vectors, put, finish, fetch, value)                  \
  KERNEL double name([[maybe_unused]] double* c, [[maybe_unused]] const double* a,         \
                     [[maybe_unused]] const double* b, std::size_t count, std::size_t passes) { \
    [[maybe_unused]] const Vector scalar = broadcast(kernel_scalar);                       \
    for (std::size_t pass = 0; pass < passes; ++pass) {                                    \
      for (std::size_t i = 0; i < count; i += vectors * lanes) {                           \
        Vector out[vectors];                                                               \
        _Pragma("GCC unroll 8") for (std::size_t k = 0; k < vectors; ++k) {                \
          [[maybe_unused]] const std::size_t at = i + k * lanes;                           \
          if (k * lanes % line_lanes == 0) fetch;                                          \
          out[k] = value;                                                                  \
        }                                                                                  \
        _Pragma("GCC unroll 8") for (std::size_t k = 0; k < vectors; ++k) {                \
          put(c + i + k * lanes, out[k]);                                                  \
          asm volatile("" : : : "memory");                                                 \
        }                                                                                  \
      }                                                                                    \
    }                                                                                      \
    finish;                                                                                \
    return 0.0;                                                                            \
  }
#define HOMENODE_REGULAR(name, value) \
  HOMENODE_STORING_KERNEL(name, regular_vectors, store, (void)0, (void)0, value)
#define HOMENODE_STREAMING(name, fetch, value) \
  HOMENODE_STORING_KERNEL(name, streaming_vectors, stream, fence(), fetch, value)
// Past the end of an array a prefetch is ignored.
#define HOMENODE_AHEAD(array) __builtin_prefetch(array + at + prefetch_lanes)

HOMENODE_REGULAR(write_regular, scalar)
HOMENODE_REGULAR(copy_regular, load(a + at))
HOMENODE_REGULAR(scale_regular, times(scalar, load(a + at)))
HOMENODE_REGULAR(add_regular, plus(load(a + at), load(b + at)))
HOMENODE_REGULAR(triad_regular, times_plus(scalar, load(b + at), load(a + at)))

HOMENODE_STREAMING(write_streaming, (void)0, scalar)
HOMENODE_STREAMING(copy_streaming, HOMENODE_AHEAD(a), load(a + at))
HOMENODE_STREAMING(scale_streaming, HOMENODE_AHEAD(a), times(scalar, load(a + at)))
HOMENODE_STREAMING(add_streaming, (HOMENODE_AHEAD(a), HOMENODE_AHEAD(b)), plus(load(a + at), load(b + at)))
HOMENODE_STREAMING(triad_streaming, (HOMENODE_AHEAD(a), HOMENODE_AHEAD(b)),
                   times_plus(scalar, load(b + at), load(a + at)))

#undef HOMENODE_AHEAD
#undef HOMENODE_STREAMING
#undef HOMENODE_REGULAR
#undef HOMENODE_STORING_KERNEL

#define HOMENODE_KERNEL_SET(name)                                                             \
  {                                                                                           \
    name, sizeof(Vector),                                                                     \
    {read_regular, write_regular, copy_regular, scale_regular, add_regular, triad_regular}, { \
      nullptr, write_streaming, copy_streaming, scale_streaming, add_streaming,               \
          triad_streaming                                                                     \
    }                                                                                         \
  }
