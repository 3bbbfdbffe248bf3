// Loops that reach what one core can: reading memory, float32 multiply-adds, bfloat16 products.
//
// `bench/harness/ceilings.py` compiles this file for the machine it runs on and calls it from one thread a core. Each function
// returns what it did, in bytes or flops, and keeps its results alive in `sink`, so that nothing is optimised away.

#include <cstdint>
#include <cstring>

#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#include <sys/syscall.h>
#include <unistd.h>

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 64;
#else
constexpr int WIDTH = 32;
#endif
typedef std::uint64_t Words __attribute__((vector_size(WIDTH)));
typedef float Floats __attribute__((vector_size(WIDTH)));

volatile std::uint64_t sink;

}  // namespace

// Adds up `bytes` (a multiple of 8 * WIDTH) from `data`, which is aligned to WIDTH.
extern "C" double tw_read(const void* data, std::int64_t bytes) {
    const Words* words = static_cast<const Words*>(data);
    Words sum[8] = {};
    for (std::int64_t i = 0; i < bytes / WIDTH; i += 8)
        for (int j = 0; j < 8; ++j) sum[j] += words[i + j];
    Words all = sum[0];
    for (int j = 1; j < 8; ++j) all += sum[j];
    sink = all[0] + all[1];
    return static_cast<double>(bytes);
}

// Independent multiply-adds in registers: twelve of them hide the latency of four to five cycles at two a cycle. Each has
// a variable of its own, which an array in a loop would not get.
#define TW_CHAINS(STEP) STEP(a) STEP(b) STEP(c) STEP(d) STEP(e) STEP(f) STEP(g) STEP(h) STEP(i) STEP(j) STEP(k) STEP(l)
#define TW_ALL(x) (x(a) + x(b) + x(c) + x(d) + x(e) + x(f) + x(g) + x(h) + x(i) + x(j) + x(k) + x(l))
#define TW_KEEP(x) __asm__ volatile("" : "+v"(x));

extern "C" double tw_fp32(std::int64_t rounds) {
    const Floats factor = Floats{} + 0.999f, summand = Floats{} + 0.001f;
#define TW_DECLARE(x) Floats x = Floats{} + 0.5f;
    TW_CHAINS(TW_DECLARE)
#undef TW_DECLARE
    for (std::int64_t r = 0; r < rounds; ++r) {
#define TW_STEP(x) x = x * factor + summand; TW_KEEP(x)
        TW_CHAINS(TW_STEP)
#undef TW_STEP
    }
#define TW_FIRST(x) x[0]
    sink = static_cast<std::uint64_t>(TW_ALL(TW_FIRST));
#undef TW_FIRST
    return static_cast<double>(rounds) * 12 * (WIDTH / 4) * 2;
}

// Products of bfloat16 with float32 sums: AMX tiles where there are any, AVX-512 otherwise; 0 where there is neither.
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
extern "C" double tw_bf16(std::int64_t rounds) {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2), XFEATURE_XTILEDATA
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) != 0) return 0;
    alignas(64) std::uint8_t config[64];
    alignas(64) std::uint8_t zeros[1024];
    std::memset(config, 0, sizeof config);
    std::memset(zeros, 0, sizeof zeros);
    config[0] = 1;  // palette
    for (int tile = 0; tile < 8; ++tile) {
        config[16 + 2 * tile] = 64;  // bytes of a row
        config[48 + tile] = 16;      // rows
    }
    // GCC 12 believes that the instruction reads 8 bytes of the configuration and may drop stores to the others.
    __asm__ volatile("" : : "r"(&config[0]) : "memory");
    _tile_loadconfig(config);
    _tile_loadd(6, zeros, 64);
    _tile_loadd(7, zeros, 64);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (std::int64_t r = 0; r < rounds; ++r) {
        _tile_dpbf16ps(0, 6, 7);
        _tile_dpbf16ps(1, 6, 7);
        _tile_dpbf16ps(2, 6, 7);
        _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(0, zeros, 64);
    _tile_release();
    sink = zeros[0];
    return static_cast<double>(rounds) * 4 * 16 * 16 * 32 * 2;
}
#elif defined(__AVX512BF16__)
extern "C" double tw_bf16(std::int64_t rounds) {
    const __m512bh one = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1e-3f), _mm512_set1_ps(1e-3f));
#define TW_DECLARE(x) __m512 x = _mm512_set1_ps(0.5f);
    TW_CHAINS(TW_DECLARE)
#undef TW_DECLARE
    for (std::int64_t r = 0; r < rounds; ++r) {
#define TW_STEP(x) x = _mm512_dpbf16_ps(x, one, one); TW_KEEP(x)
        TW_CHAINS(TW_STEP)
#undef TW_STEP
    }
#define TW_FIRST(x) _mm512_reduce_add_ps(x)
    sink = static_cast<std::uint64_t>(TW_ALL(TW_FIRST));
#undef TW_FIRST
    return static_cast<double>(rounds) * 12 * 32 * 2;
}
#else
extern "C" double tw_bf16(std::int64_t) { return 0; }
#endif
