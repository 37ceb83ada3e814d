// The probe as a guest's first process: a kernel, this program, and nothing else. Nothing is timed here.
#pragma once

namespace homenode {

bool is_init();
// Mounts /proc and /sys, where the probe reads what the machine is.
void prepare_guest();
// Flushes the console and switches the machine off. Does not return.
[[noreturn]] void power_off();

}  // namespace homenode
