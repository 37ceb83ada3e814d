// Pinning: a thread on exactly one CPU, proved by asking where it runs. Nothing is timed here.
#pragma once

#include "host.hpp"
#include "pu_set.hpp"

namespace homenode {

// Puts the calling thread on one CPU. Throws Failure if the kernel refuses or runs it elsewhere.
void pin_to(int pu);

// Throws Failure naming the CPUs that are offline or not allowed, before anything is measured.
void require_pus(const Host& host, const PuSet& pus);

}  // namespace homenode
