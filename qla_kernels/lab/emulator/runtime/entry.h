// Turns a translated kernel into an entry of the table that host.cpp launches from.
#pragma once

#include <utility>

#include "launch.h"

namespace emu {

template <class T>
T argument(const TVMFFIAny& any) {
  if constexpr (std::is_pointer_v<T>) return static_cast<T>(any.v_ptr);
  else if constexpr (std::is_integral_v<T>) return T(any.v_int64);
  else if constexpr (std::is_floating_point_v<T>) return T(any.v_float64);
  else return *static_cast<const T*>(any.v_ptr);  // CUtensorMap, passed by value
}

template <auto kernel, class... Parameters>
Kernel entry(void (*)(Parameters...), const char* name,
             std::vector<std::string> launch_parameters) {
  auto call = [](const TVMFFIAny* arguments) {
    [&]<size_t... i>(std::index_sequence<i...>) {
      kernel(argument<std::remove_const_t<Parameters>>(arguments[i])...);
    }(std::index_sequence_for<Parameters...>{});
  };
  return {name, int(sizeof...(Parameters)), call, std::move(launch_parameters)};
}

template <auto kernel>
Kernel entry(const char* name, std::vector<std::string> launch_parameters) {
  return entry<kernel>(kernel, name, std::move(launch_parameters));
}

}  // namespace emu
