// Replay: recorded series from a file, for the parts that label and find and measure nothing. No timing.
#pragma once

#include <string>
#include <vector>

namespace homenode {

// Numbers of each line, separated by spaces, tabs or commas; lines that are empty or open with # are
// skipped; "-" is a value that was not measured (NaN). Throws a usage Failure that names the line for
// anything else, for a line with fewer than `least` or more than `most` numbers, and for a file over
// 64 MiB or that cannot be read.
std::vector<std::vector<double>> read_series(const std::string& path, std::size_t least, std::size_t most);

}  // namespace homenode
