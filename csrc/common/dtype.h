// Codes by which Python names an element type; kernels/dtypes.py has the same.
#pragma once

namespace tw {

enum class Dtype : int { f32 = 0, f16 = 1, bf16 = 2, e4m3 = 3, e5m2 = 4, i8 = 5 };

}  // namespace tw
