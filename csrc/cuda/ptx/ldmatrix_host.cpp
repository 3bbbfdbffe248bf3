// Host model of ldmatrix and stmatrix.
#include "cuda/ptx/ldmatrix.cuh"

namespace tw::ptx {

namespace {

struct MatrixCall {
  uint32_t* registers;
  char* row;  // of matrix lane/8, row lane%8
  int matrices;
  bool transposed;
  bool store;
  emu::Site site;
};

// The two 16-bit elements of matrix i that lane `lane` holds, as addresses.
void locate(void* const* args, int i, int lane, bool transposed, char* (&element)[2]) {
  for (int half = 0; half < 2; ++half) {
    const int held_row = lane / 4;
    const int held_column = 2 * (lane % 4) + half;
    const int row = transposed ? held_column : held_row;
    const int column = transposed ? held_row : held_column;
    element[half] = static_cast<const MatrixCall*>(args[8 * i + row])->row + 2 * column;
  }
}

void run_matrix(void* const* args, std::uint32_t) {
  const auto& any = *static_cast<const MatrixCall*>(args[0]);
  const char* what = any.store ? "stmatrix" : "ldmatrix";
  for (int lane = 0; lane < 8 * any.matrices; ++lane) {
    const auto* call = static_cast<const MatrixCall*>(args[lane]);
    emu::Thread* const running = emu::here;
    emu::here = &emu::lane_thread(static_cast<unsigned>(lane));
    emu::require_aligned(call->row, 16, what, call->site);
    emu::require_shared(call->row, 16, what, call->site);
    emu::here = running;
  }
  for (int i = 0; i < any.matrices; ++i) {
    for (int lane = 0; lane < 32; ++lane) {
      char* element[2];
      locate(args, i, lane, any.transposed, element);
      const emu::Thread& thread = emu::lane_thread(static_cast<unsigned>(lane));
      uint32_t& held = static_cast<const MatrixCall*>(args[lane])->registers[i];
      for (int half = 0; half < 2; ++half) {
        if (any.store) {
          const auto value = static_cast<std::uint16_t>(held >> (16 * half));
          emu::note_write(thread, element[half], 2, what, any.site);
          std::memcpy(element[half], &value, 2);
        } else {
          std::uint16_t value;
          emu::note_read(thread, element[half], 2, what, any.site);
          std::memcpy(&value, element[half], 2);
          held = half == 0 ? value : held | static_cast<uint32_t>(value) << 16;
        }
      }
    }
  }
}

}  // namespace

void ldmatrix_model(uint32_t* r, const void* row, int matrices, bool transposed, emu::Site site) {
  MatrixCall call{r, static_cast<char*>(const_cast<void*>(row)), matrices, transposed, false, site};
  emu::warp_sync(~0u, run_matrix, &call, false, "ldmatrix", site);
}

void stmatrix_model(void* row, const uint32_t* r, int matrices, bool transposed, emu::Site site) {
  MatrixCall call{const_cast<uint32_t*>(r), static_cast<char*>(row), matrices, transposed, true, site};
  emu::warp_sync(~0u, run_matrix, &call, false, "stmatrix", site);
}

}  // namespace tw::ptx
