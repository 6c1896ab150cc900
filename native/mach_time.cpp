// mlx-rs seeds its random numbers from this clock of macOS, on every platform. Here: nanoseconds of the steady clock.
#include <chrono>
#include <cstdint>

extern "C" uint64_t mach_approximate_time() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}
