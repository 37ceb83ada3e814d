// Memory limits: what cgroups leave of a machine's memory to this process. Nothing is timed here.
//
// A job's limit stands in its own cgroup or any above it, which only /proc/self/cgroup names; a buffer
// sized by MemAvailable alone ends with the OOM killer there.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace homenode {

// Directories below `mounts` (/sys/fs/cgroup) that may hold a limit, the process's own first. `text`
// is /proc/self/cgroup. Of a path that leaves the mount (a container's), the mount alone.
std::vector<std::string> limit_directories(const std::string& text, const std::string& mounts);

// The least that one of these directories leaves: its limit without what is used; file pages that
// the kernel can drop do not count as used. Nothing where none has a limit.
std::optional<std::uint64_t> limit_left(const std::vector<std::string>& directories);

}  // namespace homenode
