// One pool of threads for the whole process.
//
// parallel_for cuts [0, n) into contiguous parts, whose bounds depend on n, grain and the number of threads alone, and
// runs the body once for each: the calling thread takes the first part and workers the others, except that the caller
// takes over what no worker has begun when it has done its own. Kernels compute each
// output element within one part and in an order of its own, so that their results do not depend on the cut.
#pragma once

#include <cstdint>

#include "cpu/runtime/range_body.h"

namespace tw {

// Calls body(begin, end) for parts that cover [0, n), each of `grain` elements or more, and returns when all are done.
// Runs the body at once on the calling thread where there is a single part, inside another parallel_for, and while
// another thread uses the pool. The first part's exception among those thrown is rethrown, after all parts have ended.
void parallel_for(std::int64_t n, std::int64_t grain, RangeBody body);

// Threads that parallel_for uses, the calling one included. At first: TILEWRIGHT_NUM_THREADS, or the cores that this
// process may use (its affinity and its control group's quota). std::invalid_argument for a malformed variable.
int num_threads();

// std::invalid_argument outside 1 .. kMaxThreads; std::logic_error inside a parallel_for.
void set_num_threads(int threads);

constexpr int kMaxThreads = 1024;

}  // namespace tw
