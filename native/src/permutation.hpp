// A pseudo-random order of n things, computed and not stored. Nothing is timed here.
//
// Shuffling an index array of half a gigabyte's lines costs seconds and its own cache misses. Odd
// multiplications and folded shifts modulo a power of two can each be undone, so together they map
// 0..2^k-1 onto itself; what falls outside of n is mapped again until it falls inside.
#pragma once

#include <bit>
#include <cstdint>

namespace homenode {

class Permutation {
 public:
  Permutation(std::uint64_t count, std::uint64_t seed) : count_(count), seed_(scramble(seed)) {
    const auto bits = static_cast<unsigned>(std::bit_width(count > 1 ? count - 1 : 1));
    mask_ = (std::uint64_t{1} << bits) - 1;
    fold_ = (bits + 1) / 2;
  }

  std::uint64_t count() const { return count_; }

  std::uint64_t operator()(std::uint64_t index) const {
    do {
      index = mixed(index);
    } while (index >= count_);
    return index;
  }

  // splitmix64: spreads a small seed, such as 1 or a group's number, over all bits.
  static std::uint64_t scramble(std::uint64_t value) {
    value += 0x9e3779b97f4a7c15U;
    value = (value ^ (value >> 30U)) * 0xbf58476d1ce4e5b9U;
    value = (value ^ (value >> 27U)) * 0x94d049bb133111ebU;
    return value ^ (value >> 31U);
  }

 private:
  std::uint64_t mixed(std::uint64_t x) const {
    x = (x * (seed_ | 1U) + (seed_ >> 17U)) & mask_;
    x ^= x >> fold_;
    x = (x * 0xd1342543de82ef95U + seed_) & mask_;
    x ^= x >> fold_;
    x = (x * 0xaf251af3b0f025b5U) & mask_;
    return x ^ (x >> fold_);
  }

  std::uint64_t count_;
  std::uint64_t seed_;
  std::uint64_t mask_;
  unsigned fold_;
};

}  // namespace homenode
