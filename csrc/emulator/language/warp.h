// Warp-wide operations. The last lane to come computes the result for all of them; the lanes' arguments are read where
// they lie, on the fibers' stacks.
#pragma once

namespace tw::emu {

template <class T>
struct Shuffle {
  T value;
  T result;
  unsigned source;  // lane to read from, after clamping to the segment; 32 and above: its own
};

template <class T>
TW_UNTRACED void run_shuffle(void* const* args, std::uint32_t mask) {
  for (std::uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
    auto* mine = static_cast<Shuffle<T>*>(args[lane]);
    const unsigned source = mine->source;
    if (args[source] == nullptr) {
      fail("inactive_lane",
           "a shuffle reads lane " + std::to_string(source) + " from lane " + std::to_string(lane) +
               ", but lane " + std::to_string(source) + " does not take part",
           resolve_site(here->site));
    }
    mine->result = static_cast<const Shuffle<T>*>(args[source])->value;
  }
}

template <class T>
T shuffle(unsigned mask, T value, unsigned source, const char* what, Site site) {
  static_assert(sizeof(T) <= 8, "shuffles move 2, 4 or 8 bytes");
  Shuffle<T> args{value, value, source};
  warp_sync(mask, run_shuffle<T>, &args, false, what, site);
  return args.result;
}

struct Vote {
  int predicate;
  unsigned result;
};
void run_ballot(void* const* args, std::uint32_t mask);

inline unsigned ballot(unsigned mask, int predicate, const char* what, Site site) {
  Vote vote{predicate, 0};
  warp_sync(mask, run_ballot, &vote, false, what, site);
  return vote.result;
}

template <class T>
struct Match {
  T value;
  unsigned result;
};

template <class T>
TW_UNTRACED void run_match(void* const* args, std::uint32_t mask) {
  for (std::uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    auto* mine = static_cast<Match<T>*>(args[__builtin_ctz(rest)]);
    mine->result = 0;
    for (std::uint32_t others = mask; others != 0; others &= others - 1) {
      const int lane = __builtin_ctz(others);
      // Bits are compared, so that a NaN matches itself and zeros of different sign do not.
      if (std::memcmp(&static_cast<const Match<T>*>(args[lane])->value, &mine->value, sizeof(T)) == 0) mine->result |= 1u << lane;
    }
  }
}

template <class T>
struct Reduce {
  T value;
  T result;
};

template <class T, class Op>
TW_UNTRACED void run_reduce(void* const* args, std::uint32_t mask) {
  T total = static_cast<const Reduce<T>*>(args[__builtin_ctz(mask)])->value;
  for (std::uint32_t rest = mask & (mask - 1); rest != 0; rest &= rest - 1) {
    total = Op::apply(total, static_cast<const Reduce<T>*>(args[__builtin_ctz(rest)])->value);
  }
  for (std::uint32_t rest = mask; rest != 0; rest &= rest - 1) static_cast<Reduce<T>*>(args[__builtin_ctz(rest)])->result = total;
}

template <class T, class Op>
T reduce(unsigned mask, T value, const char* what, Site site) {
  Reduce<T> args{value, value};
  warp_sync(mask, run_reduce<T, Op>, &args, false, what, site);
  return args.result;
}

struct Add { template <class T> static T apply(T a, T b) { return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b)); } };
struct Min { template <class T> static T apply(T a, T b) { return b < a ? b : a; } };
struct Max { template <class T> static T apply(T a, T b) { return a < b ? b : a; } };
struct And { template <class T> static T apply(T a, T b) { return a & b; } };
struct Or { template <class T> static T apply(T a, T b) { return a | b; } };
struct Xor { template <class T> static T apply(T a, T b) { return a ^ b; } };

}  // namespace tw::emu

inline void __syncwarp(unsigned mask = 0xffffffffu, tw::emu::Site site = tw::emu::Site::current()) {
  tw::emu::warp_sync(mask, nullptr, nullptr, true, "__syncwarp()", site);
}

// Lanes outside a segment of `width` keep their own value, as the instruction defines.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, tw::emu::Site site = tw::emu::Site::current()) {
  const unsigned lane = tw::emu::here->lane;
  const unsigned segment = lane & ~static_cast<unsigned>(width - 1);
  return tw::emu::shuffle(mask, value, segment | (static_cast<unsigned>(source) & static_cast<unsigned>(width - 1)),
                          "__shfl_sync()", site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, tw::emu::Site site = tw::emu::Site::current()) {
  const unsigned lane = tw::emu::here->lane;
  const unsigned within = lane & static_cast<unsigned>(width - 1);
  return tw::emu::shuffle(mask, value, within >= delta ? lane - delta : lane, "__shfl_up_sync()", site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, tw::emu::Site site = tw::emu::Site::current()) {
  const unsigned lane = tw::emu::here->lane;
  const unsigned within = lane & static_cast<unsigned>(width - 1);
  return tw::emu::shuffle(mask, value, within + delta < static_cast<unsigned>(width) ? lane + delta : lane,
                          "__shfl_down_sync()", site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, tw::emu::Site site = tw::emu::Site::current()) {
  const unsigned lane = tw::emu::here->lane;
  const unsigned source = lane ^ static_cast<unsigned>(lane_mask);
  // A source above the segment's end is out of reach; one below its start is not (as for the instruction).
  const unsigned end = (lane | static_cast<unsigned>(width - 1));
  return tw::emu::shuffle(mask, value, source <= end ? source : lane, "__shfl_xor_sync()", site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, tw::emu::Site site = tw::emu::Site::current()) {
  return tw::emu::ballot(mask, predicate, "__ballot_sync()", site);
}
inline int __any_sync(unsigned mask, int predicate, tw::emu::Site site = tw::emu::Site::current()) {
  return tw::emu::ballot(mask, predicate, "__any_sync()", site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, tw::emu::Site site = tw::emu::Site::current()) {
  return tw::emu::ballot(mask, predicate == 0, "__all_sync()", site) == 0;
}
// Which lanes are converged is the scheduler's choice, on a device too: here a fiber is always alone.
inline unsigned __activemask() { return 1u << tw::emu::here->lane; }

template <class T>
unsigned __match_any_sync(unsigned mask, T value, tw::emu::Site site = tw::emu::Site::current()) {
  tw::emu::Match<T> args{value, 0};
  tw::emu::warp_sync(mask, tw::emu::run_match<T>, &args, false, "__match_any_sync()", site);
  return args.result;
}
template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* predicate, tw::emu::Site site = tw::emu::Site::current()) {
  tw::emu::Match<T> args{value, 0};
  tw::emu::warp_sync(mask, tw::emu::run_match<T>, &args, false, "__match_all_sync()", site);
  *predicate = args.result == mask;
  return *predicate ? mask : 0;
}

#define TW_REDUCE(name, Op, T)                                                                        \
  inline T name(unsigned mask, T value, tw::emu::Site site = tw::emu::Site::current()) {              \
    return tw::emu::reduce<T, tw::emu::Op>(mask, value, #name "()", site);                            \
  }
TW_REDUCE(__reduce_add_sync, Add, unsigned)
TW_REDUCE(__reduce_add_sync, Add, int)
TW_REDUCE(__reduce_min_sync, Min, unsigned)
TW_REDUCE(__reduce_min_sync, Min, int)
TW_REDUCE(__reduce_max_sync, Max, unsigned)
TW_REDUCE(__reduce_max_sync, Max, int)
TW_REDUCE(__reduce_and_sync, And, unsigned)
TW_REDUCE(__reduce_or_sync, Or, unsigned)
TW_REDUCE(__reduce_xor_sync, Xor, unsigned)
#undef TW_REDUCE
