// Put in front of every mlx-c source where it is compiled off the Mac. Two gaps are filled:
// the half types, which mlx-c declares on Arm only, and std::format, which gcc has from 13 on.
// setup.sh precompiles this file: parsing MLX's headers is most of the work, and every source needs them.
#ifndef GREENROOM_MLXC_PREFIX_HPP
#define GREENROOM_MLXC_PREFIX_HPP

#include "mlx/types/half_types.h"
#define MLX_HALF_H
#define HAS_FLOAT16
#define HAS_BFLOAT16
using float16_t = mlx::core::float16_t;
using bfloat16_t = mlx::core::bfloat16_t;

#if __has_include(<format>)
#include <format>
#else
#include <sstream>
#include <string>
#include <string_view>

namespace greenroom {

// Writes `pattern` up to its first "{}", then `value`; returns the rest of the pattern.
template <class T>
std::string_view fill_one(std::ostringstream& out, std::string_view pattern, const T& value) {
  const auto hole = pattern.find("{}");
  if (hole == std::string_view::npos) {
    return pattern;
  }
  out << pattern.substr(0, hole) << value;
  return pattern.substr(hole + 2);
}

} // namespace greenroom

namespace std {

// Only plain "{}" holes: mlx-c uses no others (error messages and the names of devices).
template <class... Values>
string format(string_view pattern, const Values&... values) {
  ostringstream out;
  ((pattern = greenroom::fill_one(out, pattern, values)), ...);
  out << pattern;
  return out.str();
}

} // namespace std
#endif

#include "mlx/mlx.h"

#endif
