// A callable passed by reference: two words, no allocation. It must outlive the call that it is passed to.
#pragma once

#include <cstdint>
#include <type_traits>

namespace tw {

// Of a body that works on the range [begin, end).
class RangeBody {
 public:
  template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, RangeBody>>>
  [[gnu::always_inline]] RangeBody(F&& body)  // NOLINT: converts on purpose
      : object_(const_cast<void*>(static_cast<const void*>(&body))),
        call_([](void* object, std::int64_t begin, std::int64_t end) {
          (*static_cast<std::remove_reference_t<F>*>(object))(begin, end);
        }) {}

  void operator()(std::int64_t begin, std::int64_t end) const;

 private:
  void* object_;
  void (*call_)(void*, std::int64_t, std::int64_t);
};

}  // namespace tw
